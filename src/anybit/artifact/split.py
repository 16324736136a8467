"""What a run has written, all planes of all rows, split into a base layer and enhancement layers.

The base layer is an ordinary HF directory. Enhancement layers of `STEP` bits each are files beside it; the base layer
and any first ones of them are a valid model. Which planes go where: `methods.ordering`; who reads them: `enhancements`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anybit.artifact.files import EMBEDDING, SECTION, enhancement_file, link, list_hash
from anybit.artifact.levels import Size
from anybit.artifact.writer import ArtifactWriter
from anybit.config import Json
from anybit.formats.layout import LayerLayout
from anybit.methods.ordering import (
    BITS,
    Steps,
    coded_columns,
    level_widths,
    nested_layers,
    order,
    plane_rows,
    plane_words,
    with_counts,
)

LOSSES = "losses"  # field beside a layer's tensors while the order is not known yet


@dataclass(frozen=True)
class Split:
    """An artifact that was split into base layer and enhancement layers."""

    layouts: dict[str, LayerLayout]  # of all layers, and of embeddings, as the base layer has them
    files: dict[str, Json]  # `bytes` and `sha256` of every enhancement layer's file
    section: Json  # of anybit.index.json
    stated: Json  # what config.json says of it
    bits: float  # average width with all of them

    def sizes(self, base: Size) -> tuple[Size, ...]:
        """The levels, of which the first is `base`."""
        taken = [0, *itertools.accumulate(entry["bytes"] for entry in self.files.values())]
        levels = self.section[SECTION]
        beside = itertools.accumulate(level.get(EMBEDDING, 0) for level in levels)
        return tuple(
            Size(level["bits"], base.layer_bytes + more - other, base.size_bytes + more, level["loss"], True)
            for level, more, other in zip(levels, taken, beside)
        )


@dataclass(frozen=True)
class Cut:
    """How far the order of planes goes: up to an average width of the layers, and up to so many bytes of planes."""

    bits: float  # at least `BASE_BITS`
    whole: bool  # see `order`
    beside: Collection[str] = ()  # matrices that do not count for the average: embedding and head
    plane_bytes: int | None = None  # of all planes; None: any

    def last(self, steps: Steps) -> int:
        """How many of the steps are taken."""
        end = steps.upto(self.bits)
        if self.plane_bytes is None:
            return end
        return min(end, steps.upto_bytes(self.plane_bytes - steps.first_bytes()))

    def ends(self, steps: Steps) -> list[int]:
        """How many steps there are up to each level."""
        last = self.last(steps)
        widths = level_widths(steps.all_bits(last))
        return list(dict.fromkeys([*map(steps.upto_all, widths[:-1]), last]))  # whole layers may skip some


def split(writer: ArtifactWriter, layouts: Mapping[str, LayerLayout], cut: Cut) -> Split:
    """Write what a run has made, all planes of all rows, again as base layer and enhancement layers.

    Args:
        writer: all of whose shards are finished, with the losses of every nested layer.
        layouts: of all layers, and of embeddings; of nested ones only the kept channels matter.
        cut: how far.
    """
    names = list(nested_layers(layouts))
    shard_of, losses = {}, {}
    for shard in range(writer.shards):
        for name, tensor in writer.read_field(shard, LOSSES).items():
            shard_of[name], losses[name] = shard, tensor
    columns = coded_columns(layouts)
    steps = order({name: losses[name] for name in names}, columns, cut.whole, cut.beside)
    ends = cut.ends(steps)
    counts = [steps.counts(end) for end in ends]
    base = {n: with_counts(x, counts[0][n]) if n in counts[0] else x for n, x in layouts.items()}
    writer.begin_split()
    chain = ""
    for shard in range(writer.shards):
        tensors = writer.read_whole(shard)
        for name in (name for name in names if shard_of[name] == shard):
            tensors = _base_tensors(name, base[name], tensors)
        chain = link(chain, writer.write_split(writer.file(shard), tensors)["sha256"])
    section = [{"file": "", "bits": steps.bits(ends[0]), "loss": steps.loss_after(ends[0]), "chain": chain}]
    files: dict[str, Json] = {}
    for i in range(1, len(ends)):
        file = enhancement_file(i, len(ends) - 1)
        added = list(plane_rows(counts[i], counts[i - 1]))
        tensors = _enhancement(writer, names, shard_of, added)
        files[file] = writer.write_split(file, tensors, {"after": chain})
        chain = link(chain, files[file]["sha256"])
        level = {"bits": steps.bits(ends[i]), "loss": steps.loss_after(ends[i])}
        if cut.beside:
            rows = [(name, last - first) for name, _, first, last in added if name in cut.beside]
            level[EMBEDDING] = sum(4 * n * plane_words(columns[name]) for name, n in rows)
        section.append({"file": file, **level, "chain": chain})
    stated = {SECTION: {"refinements": len(files), "list": list_hash(section)}}
    return Split(base, files, {SECTION: section}, stated, steps.bits(ends[-1]))


def _base_tensors(name: str, layout: LayerLayout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a shard with those of a layer as the base layer has it."""
    own = {f"{name}.{LOSSES}", *(f"{name}.plane_{p}" for p in range(1, BITS + 1))}
    made = {field: tensor for field, tensor in tensors.items() if field not in own}
    for field, (_, shape) in layout.stored_tensors().items():
        made[f"{name}.{field}"] = tensors[f"{name}.{field}"][: shape[0]]
    return made


def _enhancement(
    writer: ArtifactWriter,
    names: Sequence[str],
    shard_of: Mapping[str, int],
    added: Sequence[tuple[str, int, int, int]],  # layer, plane, first and last row
) -> dict[str, Tensor]:
    """The tensors of an enhancement layer: `steps` int32 [n, 3] (number of the layer, plane, rows), `words` uint32."""
    words: dict[tuple[str, int], Tensor] = {}
    for shard in sorted({shard_of[name] for name, *_ in added}):
        here = {(n, p): (first, last) for n, p, first, last in added if shard_of[n] == shard}
        found = writer.read_rows(shard, {f"{n}.plane_{p}": rows for (n, p), rows in here.items()})
        words |= {(n, p): found[f"{n}.plane_{p}"].view(torch.int32).flatten() for n, p in here}
    numbers = {name: i for i, name in enumerate(names)}
    steps = [(numbers[name], plane, last - first) for name, plane, first, last in added]
    joined = torch.cat([words[n, p] for n, p, *_ in added]) if added else torch.zeros(0, dtype=torch.int32)
    return {"steps": torch.tensor(steps, dtype=torch.int32).view(-1, 3), "words": joined.view(torch.uint32)}
