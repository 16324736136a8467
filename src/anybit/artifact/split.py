"""What a run has written, all planes of all rows, split into a base layer and enhancement layers.

The base layer is an ordinary HF directory. Enhancement layers of `STEP` bits each are files beside it; the base layer
and any first ones of them are a valid model. Which planes go where: `methods.ordering`; how files hold them:
`coded_planes`; who reads them: `enhancements`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from anybit.artifact.coded_planes import Planes, code, enhancement
from anybit.artifact.files import EMBEDDING, PLANES, SECTION, enhancement_file, link, list_hash
from anybit.artifact.levels import Size
from anybit.artifact.writer import ArtifactWriter
from anybit.config import Json
from anybit.formats.layout import LayerLayout
from anybit.formats.weight import PackedWeight
from anybit.methods.ordering import (
    BITS,
    Counts,
    Steps,
    coded_columns,
    level_widths,
    order,
    plane_bytes,
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
        files = [0, *itertools.accumulate(entry["bytes"] for entry in self.files.values())]
        levels = self.section[SECTION]
        planes = itertools.accumulate(level.get(PLANES, 0) - level.get(EMBEDDING, 0) for level in levels)
        return tuple(
            Size(level["bits"], base.layer_bytes + more, base.size_bytes + taken, level["loss"], True)
            for level, taken, more in zip(levels, files, planes)
        )


@dataclass(frozen=True)
class Cut:
    """How far the order of planes goes: up to an average width of the layers, and up to so many bytes of planes."""

    bits: float  # at least `BASE_BITS`
    whole: bool  # see `order`
    coded: bool  # whether files hold planes coded
    beside: Collection[str] = ()  # matrices that do not count for the average: embedding and head
    file_bytes: int | None = None  # of all planes in the files; None: any

    def order(self, planes: WrittenPlanes) -> Steps:
        """All planes in their order."""
        return order(planes.losses(), planes.columns, self.whole, self.beside)

    def ends(self, steps: Steps, planes: WrittenPlanes) -> list[int]:
        """How many steps there are up to each level."""
        last = steps.upto(self.bits)
        widths = level_widths(steps.all_bits(last))
        ends = list(dict.fromkeys([*map(steps.upto_all, widths[:-1]), last]))  # whole layers may skip some
        return ends if self.file_bytes is None else self._within(self.file_bytes, ends, steps, planes)

    def _within(self, room: int, ends: Sequence[int], steps: Steps, planes: WrittenPlanes) -> list[int]:
        """The first levels that there is room for, and as much as there is room for of the next one."""
        made: list[int] = []
        for end in ends:
            before = steps.counts(made[-1]) if made else None
            taken = planes.file_bytes(steps.counts(end), before, self.coded)
            if taken <= room:
                made.append(end)
                room -= taken
                continue
            low, high = made[-1] if made else 0, end
            while high - low > 1:
                middle = (low + high) // 2
                fits = planes.file_bytes(steps.counts(middle), before, self.coded) <= room
                low, high = (middle, high) if fits else (low, middle)
            return list(dict.fromkeys([*made, steps.ending(low)]))
        return made


class WrittenPlanes(Planes):
    """All planes of all rows of nested matrices, in the shards that a run has written."""

    def __init__(
        self, layouts: Mapping[str, LayerLayout], files: Sequence[Any], tuned: Mapping[str, Tensor]
    ) -> None:
        self.layouts, self.tuned = layouts, tuned
        self.columns = coded_columns(layouts)
        self._file_of = {
            name.removesuffix(f".{LOSSES}"): file
            for file in files
            for name in file.keys()  # noqa: SIM118
            if name.endswith(f".{LOSSES}")
        }

    def losses(self) -> dict[str, Tensor]:
        """What every stored row costs at each width, float32 [out, 8]."""
        return {name: self._file_of[name].get_tensor(f"{name}.{LOSSES}") for name in self.columns}

    def rows(self, name: str, plane: int, first: int, last: int) -> Tensor:
        return self._file_of[name].get_slice(f"{name}.plane_{plane}")[first:last]

    def shapes(self, name: str) -> Tensor:
        return self._file_of[name].get_tensor(f"{name}.shapes")

    def whole(self, name: str) -> PackedWeight:
        """A matrix with all planes of all rows."""
        return self.base(name, [self.layouts[name].shape[0]] * BITS, coded=False)

    def base(self, name: str, counts: Sequence[int], coded: bool) -> PackedWeight:
        """A matrix as a base layer with so many rows of its planes has it in its file."""
        layout, file = with_counts(self.layouts[name], counts), self._file_of[name]
        tensors = {
            field: file.get_slice(f"{name}.{field}")[: shape[0]]
            for field, (_, shape) in layout.stored_tensors().items()
        }
        tensors |= {
            field: self.tuned[f"{name}.{field}"] for field in tensors if f"{name}.{field}" in self.tuned
        }
        packed = PackedWeight(layout, tensors)
        return code(packed) if coded else packed

    def file_bytes(self, counts: Counts, before: Counts | None, coded: bool) -> int:
        """What the planes of a base layer (`before` is None), or those that an enhancement layer adds, take."""
        if before is not None:
            tensors = enhancement(self, list(plane_rows(counts, before)), coded)
            return sum(tensor.nbytes for field, tensor in tensors.items() if field != "steps")
        layouts = (self.base(name, of, coded).layout for name, of in counts.items())
        return sum(layout.nbytes - layout.expanded().nbytes for layout in layouts) + plane_bytes(
            {name: with_counts(self.layouts[name], of) for name, of in counts.items()}
        )


@contextmanager
def written_planes(
    writer: ArtifactWriter, layouts: Mapping[str, LayerLayout], tuned: Mapping[str, Tensor] | None = None
) -> Iterator[WrittenPlanes]:
    """The planes of a run all of whose shards are finished, its files open.

    Args:
        writer: of the run.
        layouts: of all layers, and of embeddings; of nested ones only kept channels and gains matter.
        tuned: tensors that are to stand in the place of those in the files, by name.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(writer.open_whole(shard)) for shard in range(writer.shards)]
        yield WrittenPlanes(layouts, files, tuned or {})


def split(
    writer: ArtifactWriter,
    layouts: Mapping[str, LayerLayout],
    cut: Cut,
    tuned: Mapping[str, Tensor] | None = None,
) -> Split:
    """Write what a run has made, all planes of all rows, again as base layer and enhancement layers.

    Args:
        writer: all of whose shards are finished, with the losses of every nested layer.
        layouts: of all layers, and of embeddings; of nested ones only kept channels and gains matter.
        cut: how far.
        tuned: tensors that stand in the place of those that the run has written, by name.
    """
    with written_planes(writer, layouts, tuned) as planes:
        steps = cut.order(planes)
        ends = cut.ends(steps, planes)
        counts = [steps.counts(end) for end in ends]
        base, chain = dict(layouts), ""
        writer.begin_split()
        for shard in range(writer.shards):
            tensors = writer.read_whole(shard)
            tensors |= {name: tensor for name, tensor in planes.tuned.items() if name in tensors}
            for name in (name for name in counts[0] if f"{name}.{LOSSES}" in tensors):
                packed = planes.base(name, counts[0][name], cut.coded)
                tensors, base[name] = _with_base(name, packed, tensors), packed.layout
            chain = link(chain, writer.write_split(writer.file(shard), tensors)["sha256"])
        section = [{"file": "", **_stated(steps, ends[0]), "chain": chain}]
        files: dict[str, Json] = {}
        for i in range(1, len(ends)):
            file = enhancement_file(i, len(ends) - 1)
            added = list(plane_rows(counts[i], counts[i - 1]))
            files[file] = writer.write_split(file, enhancement(planes, added, cut.coded), {"after": chain})
            chain = link(chain, files[file]["sha256"])
            sizes = {PLANES: memory_bytes(added, planes.columns)}
            if cut.beside:
                beside = [rows for rows in added if rows[0] in cut.beside]
                sizes[EMBEDDING] = memory_bytes(beside, planes.columns)
            section.append({"file": file, **_stated(steps, ends[i]), **sizes, "chain": chain})
    stated = {SECTION: {"refinements": len(files), "list": list_hash(section)}}
    return Split(base, files, {SECTION: section}, stated, steps.bits(ends[-1]))


def _stated(steps: Steps, end: int) -> Json:
    """What the list says of a level."""
    return {"bits": steps.bits(end), "loss": steps.loss_after(end)}


def memory_bytes(added: Sequence[tuple[str, int, int, int]], columns: Mapping[str, int]) -> int:
    """Of rows that planes gain."""
    return sum(4 * (last - first) * plane_words(columns[name]) for name, _, first, last in added)


def _with_base(name: str, packed: PackedWeight, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a shard with those of a matrix as the base layer has it."""
    own = {f"{name}.{LOSSES}", *(f"{name}.plane_{p}" for p in range(1, BITS + 1))}
    made = {field: tensor for field, tensor in tensors.items() if field not in own}
    return made | {f"{name}.{field}": tensor for field, tensor in packed.tensors.items()}
