"""Bitplanes as files hold them: entropy-coded given the planes above, the others as in memory.

A base layer has a stream for each of its matrices, an enhancement layer one for all of its planes. What is in a stream:
docs/formats.md, "Coded planes"; how it is coded: csrc/coding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from anybit.errors import InputError
from anybit.formats import NestedLayout, TileLayout
from anybit.formats.bits import unpack_bits
from anybit.formats.layout import LayerLayout
from anybit.formats.nested import CODED_PLANES
from anybit.formats.weight import PackedWeight
from anybit.kernels import cpu


@dataclass(frozen=True)
class PlaneRows:
    """Some rows of a plane, and what says how its bits are coded."""

    plane: int
    above: Sequence[Tensor]  # uint32 [rows, words] of the planes before it
    shapes: Tensor  # uint8 [rows]
    columns: int  # that have codes


class PlaneWriter:
    """A stream of planes in the order in which they are written."""

    def __init__(self) -> None:
        _refuse_without_coder()
        self._writer = cpu.plane_writer()

    def write(self, rows: PlaneRows, words: Tensor) -> None:
        """Rows of a plane, uint32 [rows, words]."""
        above = [plane.contiguous() for plane in rows.above]
        self._writer.write(rows.plane, above, rows.shapes, rows.columns, words.contiguous())

    def finish(self) -> Tensor:
        """The stream, uint8 [n]."""
        return torch.frombuffer(bytearray(self._writer.finish()), dtype=torch.uint8)


class PlaneReader:
    """The planes of a stream uint8 [n], in the order in which they were written; `whose` it is, errors say."""

    def __init__(self, coded: Tensor, whose: str) -> None:
        _refuse_without_coder()
        self._reader, self._whose = cpu.plane_reader(coded.cpu().contiguous()), whose

    def read(self, rows: PlaneRows, words: Tensor) -> None:
        """Fill rows of a plane, uint32 [rows, words].

        Raises:
            InputError: the stream is damaged.
        """
        made = torch.empty(words.shape, dtype=torch.uint32)
        above = [plane.cpu().contiguous() for plane in rows.above]
        try:
            self._reader.read(rows.plane, above, rows.shapes.cpu(), rows.columns, made)
        except ValueError as error:
            raise self._damaged(error) from error
        words.copy_(made)

    def finish(self) -> None:
        """Refuse a stream that holds more, or that led to something else than was written.

        Raises:
            InputError: it does.
        """
        try:
            self._reader.finish()
        except ValueError as error:
            raise self._damaged(error) from error

    def _damaged(self, error: ValueError) -> InputError:
        return InputError(f"{self._whose}: {error}; copy the artifact again")


class Planes(Protocol):
    """Where the planes of nested matrices come from."""

    columns: Mapping[
        str, int
    ]  # that have codes, of every nested matrix; in the order in which files number them

    def rows(self, name: str, plane: int, first: int, last: int) -> Tensor:
        """Rows of a plane, uint32 [last - first, words]."""

    def shapes(self, name: str) -> Tensor:
        """The shapes of all rows as they are stored."""


def enhancement(planes: Planes, added: Sequence[tuple[str, int, int, int]], coded: bool) -> dict[str, Tensor]:
    """The tensors of an enhancement layer: `steps`, `words` and, where planes are coded, `coded` (docs/formats.md).

    Args:
        planes: of all matrices.
        added: (matrix, plane, first row, last) in order.
        coded: whether planes are coded where that makes them smaller.
    """
    numbers = {name: i for i, name in enumerate(planes.columns)}
    writer, plain = PlaneWriter() if coded else None, [torch.zeros(0, dtype=torch.int32)]
    shapes: dict[str, Tensor] = {}
    plain_bytes = 0  # of what is coded
    for name, plane, first, last in added:
        words = planes.rows(name, plane, first, last)
        if writer is None or plane not in CODED_PLANES:
            plain.append(words.view(torch.int32).flatten())
            continue
        if name not in shapes:
            shapes[name] = unpack_shapes(planes.shapes(name))
        above = [planes.rows(name, p, first, last) for p in range(1, plane)]
        writer.write(PlaneRows(plane, above, shapes[name][first:last], planes.columns[name]), words)
        plain_bytes += words.nbytes
    stream = None if writer is None else writer.finish()
    if stream is not None and len(stream) >= plain_bytes:
        return enhancement(planes, added, coded=False)
    steps = [(numbers[name], plane, last - first) for name, plane, first, last in added]
    made = {
        "steps": torch.tensor(steps, dtype=torch.int32).view(-1, 3),
        "words": torch.cat(plain).view(torch.uint32),
    }
    return made if stream is None else made | {"coded": stream}


def unpack_shapes(stored: Tensor) -> Tensor:
    """The shape of every stored row of a nested matrix, uint8 [out], and one more where that is odd."""
    return unpack_bits(stored[None].cpu(), 4, 2 * len(stored))[0]


def code(packed: PackedWeight) -> PackedWeight:
    """A nested matrix with its planes coded, unless that makes it no smaller."""
    (tile,) = packed.layout.tiles
    assert isinstance(tile, NestedLayout)
    planes = {f"plane_{p}": p for p in CODED_PLANES if p <= len(tile.counts)}
    tensors, columns = packed.tensors, tile.coded(packed.layout.shape[1])
    writer, shapes = PlaneWriter(), unpack_shapes(tensors["shapes"])
    for field, p in planes.items():
        writer.write(_rows(p, tensors, shapes, columns, tile.counts[p - 1]), tensors[field])
    coded = writer.finish()
    if len(coded) >= sum(tensors[field].nbytes for field in planes):
        return packed
    made = {field: tensor for field, tensor in tensors.items() if field not in planes}
    tiles = (replace(tile, coded_bytes=len(coded)),)
    return PackedWeight(replace(packed.layout, tiles=tiles), made | {"coded": coded})


def as_long_as_any(layouts: Mapping[str, LayerLayout]) -> dict[str, LayerLayout]:
    """Nested layouts as if coded, described by as many bytes as any stream could need."""
    return {
        name: replace(layout, tiles=tuple(_coded_in(layout.nbytes, tile) for tile in layout.tiles))
        for name, layout in layouts.items()
    }


def _coded_in(most: int, tile: TileLayout) -> TileLayout:
    return replace(tile, coded_bytes=most) if isinstance(tile, NestedLayout) else tile


def expand(name: str, packed: PackedWeight) -> PackedWeight:
    """A layer with its coded planes as they are in memory; any other one stays as it is.

    Raises:
        InputError: a stream that is damaged; no native extension.
    """
    layout = packed.layout.expanded()
    if layout == packed.layout:
        return packed
    (tile,) = layout.tiles
    assert isinstance(tile, NestedLayout)
    made = {field: tensor for field, tensor in packed.tensors.items() if field != "coded"}
    coded, stored = packed.tensors["coded"], layout.stored_tensors()
    reader, shapes = PlaneReader(coded, f"{name}.coded"), unpack_shapes(made["shapes"])
    for p in CODED_PLANES:
        if p <= len(tile.counts):
            words = torch.empty(stored[f"plane_{p}"][1], dtype=torch.uint32, device=coded.device)
            reader.read(_rows(p, made, shapes, tile.coded(layout.shape[1]), len(words)), words)
            made[f"plane_{p}"] = words
    reader.finish()
    return PackedWeight(layout, made)


def _rows(plane: int, tensors: Mapping[str, Tensor], shapes: Tensor, columns: int, rows: int) -> PlaneRows:
    """The first rows of a plane."""
    above = [tensors[f"plane_{p}"][:rows] for p in range(1, plane)]
    return PlaneRows(plane, above, shapes[:rows], columns)


def _refuse_without_coder() -> None:
    if not cpu.available():
        raise InputError(
            f"coded planes need the native extension, which is not there: {cpu.why_not()}; on a machine that has it, "
            "`anybit convert --expand` makes files without coded planes"
        )
