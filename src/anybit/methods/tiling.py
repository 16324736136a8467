"""Tilings as methods see them: column sets, and a width per row in each.

Uniform methods walk input channels in groups while all output rows move together, so a layer's tiles are
regrouped: tiles with the same columns form one `ColumnSet` whose rows may differ in width. Tiles by rows
(MixLLM) are one column set; tiles by columns (Atom, 2/4/16) are several.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from anybit.calibration.stats import LinearStats
from anybit.config import LayerSpec, TileSpec
from anybit.errors import InputError
from anybit.formats import GroupInt, GroupIntLayout
from anybit.formats.base import to_half
from anybit.formats.bits import groups_of, split_groups
from anybit.formats.layout import MAX_TILES, LayerLayout
from anybit.formats.weight import QuantizedWeight
from anybit.methods.method import Uniform


@dataclass(frozen=True)
class ColumnSet:
    """Input channels that are quantized in the same groups."""

    cols: Tensor  # int64 [c], original input channels in stored order
    stored: bool  # whether the order is written to the artifact
    group_size: int
    bits: Tensor  # int64 [out], width per row
    symmetric: Tensor  # bool [out]
    tiles: tuple[TileSpec, ...]  # row tiles, in the spec's order

    @property
    def groups(self) -> int:
        return groups_of(len(self.cols), self.group_size)

    def to(self, device: torch.device | str) -> ColumnSet:
        cols, bits, symmetric = (t.to(device) for t in (self.cols, self.bits, self.symmetric))
        return replace(self, cols=cols, bits=bits, symmetric=symmetric)

    def fixed_ratio(self, spec: LayerSpec[Any]) -> Tensor:
        """The clipping ratio of each row where none is searched, float32 [out]: 8 bits need none."""
        return torch.where(self.bits < 8, spec.options.clip_ratio, 1.0)

    def group(self, g: int) -> Tensor:
        """Original input channels of group g."""
        return self.cols[g * self.group_size : (g + 1) * self.group_size]


def column_sets(
    spec: LayerSpec[Any], shape: tuple[int, int], device: torch.device | str = "cpu"
) -> list[ColumnSet]:
    """Regroup a layer's tiles by their columns; index tensors are made on `device`.

    Raises:
        InputError: tiles that overlap, leave weights out, point outside the matrix, or that mix group sizes
            within the same columns.
    """
    in_features = shape[1]
    if len(spec.tiles) > MAX_TILES:
        raise InputError(f"the spec has {len(spec.tiles)} tiles: a layer has at most {MAX_TILES}")
    by_cols: dict[tuple[int, ...] | None, list[TileSpec]] = {}
    for tile in spec.tiles:
        by_cols.setdefault(tile.cols, []).append(tile)
    sets = [_column_set(cols, tiles, shape) for cols, tiles in by_cols.items()]
    _check_covered(torch.cat([s.cols for s in sets]), in_features)
    return [s.to(device) for s in sets]


def layout(spec: LayerSpec[Uniform], shape: tuple[int, int], ordered: bool = False) -> LayerLayout:
    """What uniform methods store of a matrix of this shape; `ordered`: columns in an order that is stored too."""
    tiles = []
    for s in column_sets(spec, shape):
        for tile in s.tiles:
            act_bits = tile.act_bits or spec.options.act_bits or 16
            tiles.append(
                GroupIntLayout(
                    bits=tile.bits,
                    group_size=s.group_size,
                    symmetric=tile.symmetric,
                    act_bits=act_bits,
                    act_static=spec.options.act_static and act_bits < 16,
                    rows=None if tile.rows is None else len(tile.rows),
                    cols=len(s.cols) if s.stored or ordered else None,
                )
            )
    made = LayerLayout(shape, tuple(tiles), input_scale=spec.options.scaling != "none")
    made.check(_refuse)
    return made


def _refuse(what: str) -> None:
    raise InputError(f"the spec is wrong: {what}")


def _check_covered(cols: Tensor, in_features: int) -> None:
    """Refuse column sets `cols` that do not hold each input channel exactly once."""
    times = torch.bincount(cols, minlength=in_features)
    if (times > 1).any():
        raise InputError(
            f"the spec is wrong: input channel {int((times > 1).nonzero()[0])} is in two tiles, or twice in one"
        )
    if (times == 0).any():
        raise InputError(f"the spec is wrong: {int((times == 0).sum())} input channels are in no tile")


def _column_set(cols: tuple[int, ...] | None, tiles: list[TileSpec], shape: tuple[int, int]) -> ColumnSet:
    out_features, in_features = shape
    index = torch.arange(in_features) if cols is None else _columns(cols, in_features)
    sizes = {len(index) if t.group_size == -1 else t.group_size for t in tiles}
    if len(sizes) != 1:
        raise InputError(f"row tiles of the same columns must share one group_size, got {sorted(sizes)}")
    bits, symmetric = (
        torch.zeros(out_features, dtype=torch.int64),
        torch.zeros(out_features, dtype=torch.bool),
    )
    for tile in tiles:
        if not float(tile.bits).is_integer():
            raise InputError(f"a tile of {tile.bits:g} bits: expected a whole width")
        rows = slice(None) if tile.rows is None else _rows(tile.rows, out_features)
        if (bits[rows] != 0).any():
            raise InputError("two tiles of the spec hold the same weights")
        bits[rows], symmetric[rows] = int(tile.bits), tile.symmetric
    if (bits == 0).any():
        raise InputError(f"the spec's tiles leave out {int((bits == 0).sum())} output rows")
    return ColumnSet(index, cols is not None, sizes.pop(), bits, symmetric, tuple(tiles))


def _columns(cols: tuple[int, ...], in_features: int) -> Tensor:
    """A tile's columns as an index, checked."""
    if not cols:
        raise InputError("a tile of the spec has no columns: leave `cols` out to mean all")
    for channel in (min(cols), max(cols)):
        if not 0 <= channel < in_features:
            raise InputError(f"the spec names input channel {channel}, the matrix has {in_features}")
    return torch.tensor(cols)


def _rows(rows: tuple[int, ...], out_features: int) -> Tensor:
    """A tile's rows as an index, checked."""
    if not rows:
        raise InputError("a tile of the spec has no rows: leave `rows` out to mean all")
    if rows[0] < 0 or rows[-1] >= out_features or list(rows) != sorted(set(rows)):
        raise InputError(f"a tile's rows must be ascending, from 0 and below {out_features}")
    return torch.tensor(rows)


def assemble(
    shape: tuple[int, int],
    spec: LayerSpec[Any],
    stats: LinearStats | None,  # with inputs, for static activations
    sets: list[ColumnSet],
    codes: list[Tensor],  # per column set: [out, c], in stored order
    scales: list[Tensor],  # per column set: [out, groups]
    zeros: list[Tensor],  # per column set: [out, groups]
) -> QuantizedWeight:
    """Cut whole-row results into the spec's tiles, on the device that the results are on.

    Raises:
        InputError: static activations without statistics of the inputs.
    """
    tiles = []
    for s, q, scale, zero in zip(sets, codes, scales, zeros):
        for tile in s.tiles:
            rows = None if tile.rows is None else torch.tensor(tile.rows, device=q.device)
            pick = slice(None) if rows is None else rows
            tiles.append(
                GroupInt(
                    bits=int(tile.bits),
                    group_size=s.group_size,
                    codes=q[pick].to(torch.uint8),
                    scales=scale[pick].half(),
                    zeros=None if tile.symmetric else zero[pick].to(torch.uint8),
                    rows=None if rows is None else rows.to(torch.int32),
                    cols=s.cols.to(torch.int32) if s.stored else None,
                    **_activation_grid(s, tile, spec, stats),
                )
            )
    return QuantizedWeight(shape, tuple(tiles))


def _activation_grid(
    columns: ColumnSet, tile: TileSpec, spec: LayerSpec[Any], stats: LinearStats | None
) -> dict[str, Any]:
    """How a tile rounds its inputs: a fixed clipping ratio, or scales from calibration."""
    bits = tile.act_bits or spec.options.act_bits or 16
    if bits == 16:
        return {}
    ratio = 1.0 if tile.outliers else spec.options.act_clip
    if not spec.options.act_static:
        clip = torch.full((columns.groups,), ratio, device=columns.cols.device).half()
        return {"act_bits": bits, "act_clip": clip}
    if stats is None or stats.inputs is None:
        raise InputError("static activations need the range of the layer's inputs: calibrate first")
    peaks = split_groups(stats.inputs.peaks[None, columns.cols], columns.group_size)[0].amax(-1)
    scales = to_half(peaks * ratio / (2 ** (bits - 1) - 1))
    return {"act_bits": bits, "act_scales": scales.clamp(min=2.0**-24)}  # float16's smallest number
