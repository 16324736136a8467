"""A checkpoint that is not quantized, read as what an engine is made of."""

from __future__ import annotations

from pathlib import Path

from anybit.checkpoint.counts import check_counts
from anybit.checkpoint.detours import refuse_detours
from anybit.checkpoint.files import check_files, read_json
from anybit.checkpoint.weight_files import read_headers
from anybit.config import Json
from anybit.engine.defaults import with_defaults
from anybit.engine.description import Unsupported, refuse_unknown_fields
from anybit.engine.file_source import FileSource, check_dtype
from anybit.engine.source import EMBEDDING


class PlainModel(FileSource):
    """An HF directory with weights of 16 bits; a matrix is read when the engine asks for it, one at a time."""

    def __init__(self, path: Path) -> None:
        """Read what is small, and hold every header against config.json.

        Args:
            path: its folder.

        Raises:
            InputError: files that are missing or damaged, or ask for others.
            Unsupported: a model that the engine does not run, or not without Transformers.
        """
        check_files(path)
        raw = read_json(path / "config.json")
        refuse_detours(path, raw)
        refuse_unknown_fields(raw.get("model_type"), raw)
        if raw.get("quantization_config") is not None:
            raise Unsupported("it is quantized by another tool")
        _, tensors = read_headers(path)
        check_counts(f"{path}/config.json", raw, tensors.values())
        super().__init__(path, with_defaults(raw), tensors)
        self.kv_bits, self.levels = 16, [(16.0, {})]
        self._check_shapes(self.description)
        self._refuse_unused({f"{name}.weight" for name in self._matrices()})

    def _check_shapes(self, description: Json) -> None:
        size, hidden, inner = (description[key] for key in ("head_size", "hidden", "intermediate"))
        queries, keys = size * description["heads"], size * description["kv_heads"]
        rows = (queries, keys, keys, hidden, inner, inner, hidden)
        columns = (hidden, hidden, hidden, queries, hidden, hidden, inner)
        wanted = {name: (description["vocabulary"], hidden) for name in (EMBEDDING, self.head)}
        for names in self.names():
            wanted |= dict(zip(names, zip(rows, columns, strict=True), strict=True))
        for name, shape in wanted.items():
            found = self._tensors.get(f"{name}.weight")
            if found is None or found.shape != shape:
                held = "no such tensor" if found is None else f"one of {list(found.shape)}"
                raise Unsupported(f"{name}.weight should be of {list(shape)}, and it has {held}")
            check_dtype(f"{name}.weight", found)
