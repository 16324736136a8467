"""An artifact, read as what an engine is made of: neither PyTorch nor Transformers is imported."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from anybit.artifact.coded_planes import expanded
from anybit.artifact.enhancements import levels_upto
from anybit.artifact.levels import Budget, Levels
from anybit.artifact.reader import open_stored
from anybit.checkpoint.counts import check_counts
from anybit.engine.description import refuse_unknown_fields
from anybit.engine.file_source import FileSource
from anybit.engine.source import EMBEDDING, HEAD, Layouts
from anybit.errors import InputError
from anybit.formats.layout import LayerLayout
from anybit.formats.levels import levels_of
from anybit.kernels.cpu_layer import Layer
from anybit.progress import SILENT, Silent

if TYPE_CHECKING:
    from anybit import _native

Arrays = dict[str, np.ndarray]


class StoredModel(FileSource):
    """An artifact up to one of its levels; of what is beyond that nothing is read."""

    def __init__(self, path: Path, at: Budget, how: tuple[str, int], report: Silent = SILENT) -> None:
        """Read an artifact.

        Args:
            path: its folder.
            at: the budget of the widest level.
            how: precision of codebooks, "fp16" or "int8", and threads that put weights into the kernels' order.
            report: where notes go.

        Raises:
            InputError: see `open_stored` and `Levels.choose`.
            Unsupported: a model that the engine does not run.
        """
        artifact = open_stored(path)
        check_counts(f"{path}/config.json", artifact.config, artifact.tensors.values())
        self._artifact, self._how = artifact, how
        super().__init__(path, artifact.config, artifact.tensors)
        self.kv_bits = artifact.quantization.get("kv_bits", 16)
        refuse_unknown_fields(self.config.get("model_type"), self.config)
        assert self.description  # or a refusal, before hundreds of megabytes are read
        packed = artifact.stored.packed
        used = {f"{name}.{field}" for name, layout in packed.items() for field in layout.stored_tensors()}
        self._refuse_unused(used | {f"{name}.weight" for name in self._matrices() - packed.keys()})
        levels = Levels(artifact)
        chosen = levels.choose(**at)
        for note in levels.notes(at.get("bits"), chosen):
            report.say(note)
        self._layers: dict[str, tuple[LayerLayout, Layer]] = {}
        self._read(levels, levels.last if chosen is None else chosen, report)

    def _find_head(self) -> str:
        embedding = self._artifact.stored.embeddings.get(EMBEDDING)
        if embedding is not None and embedding.tied:
            return EMBEDDING
        return HEAD if HEAD in self._artifact.stored.embeddings else super()._find_head()

    def _read(self, levels: Levels, level: int, report: Silent) -> None:
        """Bind all matrices up to a level; the arrays of one are let go before the next."""
        found, stored = self._artifact.enhancements, self._artifact.stored
        if found is None:
            bits = levels.sizes[level].bits
            layouts = {n: layout.upto(bits).expanded() for n, layout in stored.layers.items()}
            made = levels_of(layouts)
            for name, layout in stored.packed.items():
                within = layout.upto(bits) if name in stored.layers else layout
                self._bind(name, within.expanded(), self._expanded(name, within))
        else:
            found.check_base()
            with ThreadPoolExecutor(self._how[1]) as pool:
                base = pool.map(self._expanded, stored.packed, stored.packed.values())
                counts = found.counts(level, threads=self._how[1])  # meanwhile
                made, wide = levels_upto(found, counts), found.layouts_at(counts[level])
                arrays = {name: grown(held, wide[name]) for name, held in zip(stored.packed, base)}
            found.read_all(counts, arrays, self._how[1], report.task("loading", level))
            for name, layout in wide.items():
                self._bind(name, layout, arrays.pop(name))
        self.levels = [(one.bits, one.layouts) for one in made]

    def _expanded(self, name: str, layout: LayerLayout) -> Arrays:
        """The arrays of a matrix as a layout has them in memory, from its file."""
        tensors = self._artifact.tensors
        fields = layout.stored_tensors().items()
        stored = {field: tensors[f"{name}.{field}"].array(shape=shape) for field, (_, shape) in fields}
        return expanded(name, layout, stored)

    def _bind(self, name: str, layout: LayerLayout, arrays: Arrays) -> None:
        try:
            layer = Layer(layout, arrays, *self._how)
        except ValueError as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"{self.name}: {name}: {error}: the artifact is damaged; copy it again"
            ) from error
        self._layers[name] = layout, layer

    def layer(self, name: str, layouts: Layouts) -> _native.Layer:
        if name in self._layers:
            layout, layer = self._layers[name]
            wanted = layouts.get(name, layout.widest())
            return (layer if wanted == layout else layer.at(wanted)).native
        return super().layer(name, layouts)


def grown(held: Arrays, layout: LayerLayout) -> Arrays:
    """The arrays of a layout that begin with these; what is new of them is zeros."""
    made: Arrays = {}
    for field, (dtype, shape) in layout.stored_tensors().items():
        old = held.get(field)
        if old is not None and old.shape == shape:
            made[field] = old
            continue
        made[field] = np.zeros(shape, dtype.numpy)
        if old is not None:
            made[field][: len(old)] = old
    return made
