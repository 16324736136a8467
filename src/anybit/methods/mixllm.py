"""MixLLM: the most salient output rows of the whole model at 8 bits, the others at 4 (arXiv:2412.14590).

Which rows those are is found globally (`anybit.methods.sensitivity`); here a layer's rows become tiles. 8-bit rows are
symmetric, 4-bit rows asymmetric, inputs 8-bit symmetric per token and group (section 3.1.2); rounding is GPTQ's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import ceil
from typing import Any

from anybit.config import LayerSpec, TileSpec
from anybit.methods import tiling

NARROW, WIDE = 4, 8


def layout(spec: LayerSpec, shape: tuple[int, int]) -> dict[str, Any]:
    """What will be stored of a matrix of this shape; before the search, as if layers got equal shares of wide rows.

    With `bits` the search spends what this takes, and never a row more; with `wide_rows` it may end some percent above,
    where long rows are the salient ones.
    """
    tile = spec.tiles[0]
    if len(spec.tiles) == 1 and tile.rows is None and tile.bits not in (NARROW, WIDE):
        wide = ceil((tile.bits - NARROW) / (WIDE - NARROW) * shape[0] - 1e-9)
        spec = with_rows(spec, range(wide), shape[0])
    return tiling.layout(spec, shape)


def with_rows(spec: LayerSpec, wide: Iterable[int], out_features: int) -> LayerSpec:
    """The spec of a layer whose `wide` rows have 8 bits."""
    size, chosen = spec.tiles[0].group_size, set(wide)
    narrow = TileSpec(NARROW, size, symmetric=False)
    if not chosen:
        return replace(spec, tiles=(narrow,))
    if len(chosen) == out_features:
        return replace(spec, tiles=(TileSpec(WIDE, size, symmetric=True),))
    rows = {kind: tuple(r for r in range(out_features) if (r in chosen) == kind) for kind in (True, False)}
    return replace(spec, tiles=(TileSpec(WIDE, size, True, rows[True]), replace(narrow, rows=rows[False])))
