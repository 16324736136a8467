"""What a run has written, all planes of all rows, split into a base layer and enhancement layers.

The base layer is an ordinary HF directory. Enhancement layers of `STEP` bits each are files beside it; the base layer
and any first ones of them are a valid model. Which planes go where: `methods.ordering`; who reads them: `enhancements`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anybit.artifact.files import SECTION, enhancement_file, link, list_hash
from anybit.artifact.levels import Size
from anybit.artifact.writer import ArtifactWriter
from anybit.config import Json
from anybit.formats.layout import LayerLayout
from anybit.methods.ordering import (
    BITS,
    coded_columns,
    level_widths,
    nested_layers,
    order,
    plane_rows,
    with_counts,
)

LOSSES = "losses"  # field beside a layer's tensors while the order is not known yet


@dataclass(frozen=True)
class Split:
    """An artifact that was split into base layer and enhancement layers."""

    layouts: dict[str, LayerLayout]  # of all layers as the base layer has them
    files: dict[str, Json]  # `bytes` and `sha256` of every enhancement layer's file
    section: Json  # of anybit.index.json
    stated: Json  # what config.json says of it
    bits: float  # average width with all of them

    def sizes(self, base: Size) -> tuple[Size, ...]:
        """The levels, of which the first is `base`."""
        taken = itertools.accumulate((entry["bytes"] for entry in self.files.values()), initial=0)
        return tuple(
            Size(level["bits"], base.layer_bytes + more, base.size_bytes + more, level["loss"], True)
            for level, more in zip(self.section[SECTION], taken)
        )


def split(writer: ArtifactWriter, layouts: Mapping[str, LayerLayout], bits: float, whole: bool) -> Split:
    """Write what a run has made, all planes of all rows, again as base layer and enhancement layers up to `bits`.

    Args:
        writer: all of whose shards are finished, with the losses of every nested layer.
        layouts: of all layers; of nested ones only the kept channels matter.
        bits: average width, at least `BASE_BITS`.
        whole: see `order`.
    """
    names = list(nested_layers(layouts))
    shard_of, losses = {}, {}
    for shard in range(writer.shards):
        for name, tensor in writer.read_field(shard, LOSSES).items():
            shard_of[name], losses[name] = shard, tensor
    steps = order(
        {name: losses[name] for name in names}, coded_columns({n: layouts[n] for n in names}), whole
    )
    ends = list(
        dict.fromkeys(steps.upto(width) for width in level_widths(bits))
    )  # whole layers may skip some
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
        tensors = _enhancement(writer, names, shard_of, list(plane_rows(counts[i], counts[i - 1])))
        files[file] = writer.write_split(file, tensors, {"after": chain})
        chain = link(chain, files[file]["sha256"])
        level = {"bits": steps.bits(ends[i]), "loss": steps.loss_after(ends[i])}
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
