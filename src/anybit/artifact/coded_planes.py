"""Bitplanes as files hold them: entropy-coded given the planes above, the others as in memory.

A base layer has a stream for each of its matrices, an enhancement layer one for all of its planes. What is in a stream:
docs/formats.md, "Coded planes"; how it is coded: csrc/coding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from anybit.errors import InputError
from anybit.formats import NestedLayout, TileLayout
from anybit.formats.layout import LayerLayout
from anybit.formats.nested import CODED_PLANES
from anybit.formats.weight import PackedWeight
from anybit.kernels import cpu
from anybit.lazy import Tensor, torch


@dataclass(frozen=True)
class PlaneRows:
    """Some rows of a plane, and what says how its bits are coded."""

    plane: int
    above: Sequence[np.ndarray]  # uint32 [rows, words] of the planes before it
    shapes: np.ndarray  # uint8 [rows]
    columns: int  # that have codes


class PlaneWriter:
    """A stream of planes in the order in which they are written."""

    def __init__(self) -> None:
        _refuse_without_coder()
        self._writer = cpu.plane_writer()

    def write(self, rows: PlaneRows, words: np.ndarray) -> None:
        """Rows of a plane, uint32 [rows, words]."""
        self._writer.write(rows.plane, [*map(_dense, rows.above)], rows.shapes, rows.columns, _dense(words))

    def finish(self) -> np.ndarray:
        """The stream, uint8 [n]."""
        return np.frombuffer(bytearray(self._writer.finish()), np.uint8)


class PlaneReader:
    """The planes of a stream uint8 [n], in the order in which they were written; `whose` it is, errors say."""

    def __init__(self, coded: np.ndarray, whose: str) -> None:
        _refuse_without_coder()
        self._reader, self._whose = cpu.plane_reader(_dense(coded)), whose

    def read(self, rows: PlaneRows, words: np.ndarray) -> None:
        """Fill rows of a plane, uint32 [rows, words] without gaps.

        Raises:
            InputError: the stream is damaged.
        """
        try:
            self._reader.read(rows.plane, [*map(_dense, rows.above)], rows.shapes, rows.columns, words)
        except ValueError as error:
            raise self._damaged(error) from error

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
    shapes: dict[str, np.ndarray] = {}
    plain_bytes = 0  # of what is coded
    for name, plane, first, last in added:
        words = planes.rows(name, plane, first, last)
        if writer is None or plane not in CODED_PLANES:
            plain.append(words.view(torch.int32).flatten())
            continue
        if name not in shapes:
            shapes[name] = unpack_shapes(planes.shapes(name).numpy())
        above = [planes.rows(name, p, first, last).numpy() for p in range(1, plane)]
        writer.write(PlaneRows(plane, above, shapes[name][first:last], planes.columns[name]), words.numpy())
        plain_bytes += words.nbytes
    stream = None if writer is None else writer.finish()
    if stream is not None and len(stream) >= plain_bytes:
        return enhancement(planes, added, coded=False)
    steps = [(numbers[name], plane, last - first) for name, plane, first, last in added]
    made = {
        "steps": torch.tensor(steps, dtype=torch.int32).view(-1, 3),
        "words": torch.cat(plain).view(torch.uint32),
    }
    return made if stream is None else made | {"coded": torch.from_numpy(stream)}


def unpack_shapes(stored: np.ndarray) -> np.ndarray:
    """The shape of every stored row of a nested matrix, uint8 [out], and one more where that is odd."""
    return np.stack([stored & 15, stored >> 4], axis=1).reshape(-1)


def code(packed: PackedWeight) -> PackedWeight:
    """A nested matrix with its planes coded, unless that makes it no smaller."""
    (tile,) = packed.layout.tiles
    assert isinstance(tile, NestedLayout)
    planes = {f"plane_{p}": p for p in CODED_PLANES if p <= len(tile.counts)}
    tensors, columns = packed.tensors, tile.coded(packed.layout.shape[1])
    writer, arrays = PlaneWriter(), {field: tensor.numpy() for field, tensor in tensors.items()}
    shapes = unpack_shapes(arrays["shapes"])
    for field, p in planes.items():
        writer.write(_rows(p, arrays, shapes, columns, tile.counts[p - 1]), arrays[field])
    coded = writer.finish()
    if len(coded) >= sum(tensors[field].nbytes for field in planes):
        return packed
    made = {field: tensor for field, tensor in tensors.items() if field not in planes}
    tiles = (replace(tile, coded_bytes=len(coded)),)
    return PackedWeight(replace(packed.layout, tiles=tiles), made | {"coded": torch.from_numpy(coded)})


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
        InputError: see `expanded`.
    """
    layout = packed.layout.expanded()
    if layout == packed.layout:
        return packed
    device = packed.tensors["coded"].device
    arrays = expanded(name, packed.layout, {f: tensor.cpu().numpy() for f, tensor in packed.tensors.items()})
    return PackedWeight(layout, {f: torch.from_numpy(array).to(device) for f, array in arrays.items()})


def expanded(name: str, layout: LayerLayout, stored: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of a layer as its layout has them in memory, from those that are stored.

    Raises:
        InputError: a stream that is damaged; no native extension.
    """
    if "coded" not in stored:
        return dict(stored)
    made = {field: array for field, array in stored.items() if field != "coded"}
    in_memory = layout.expanded()
    (tile,) = in_memory.tiles
    assert isinstance(tile, NestedLayout)
    reader, shapes = PlaneReader(stored["coded"], f"{name}.coded"), unpack_shapes(made["shapes"])
    fields = in_memory.stored_tensors()
    for p in CODED_PLANES:
        if p <= len(tile.counts):
            words = np.empty(fields[f"plane_{p}"][1], np.uint32)
            reader.read(_rows(p, made, shapes, tile.coded(layout.shape[1]), len(words)), words)
            made[f"plane_{p}"] = words
    reader.finish()
    return made


def _rows(
    plane: int, arrays: Mapping[str, np.ndarray], shapes: np.ndarray, columns: int, rows: int
) -> PlaneRows:
    """The first rows of a plane."""
    above = [arrays[f"plane_{p}"][:rows] for p in range(1, plane)]
    return PlaneRows(plane, above, shapes[:rows], columns)


def _dense(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array)


def _refuse_without_coder() -> None:
    if not cpu.available():
        raise InputError(
            f"coded planes need the native extension, which is not there: {cpu.why_not()}; on a machine that has it, "
            "`anybit convert --expand` makes files without coded planes"
        )
