"""Round to nearest: each weight to the closest point of its group's grid (`grid`)."""

from __future__ import annotations

import torch
from torch import Tensor

from anybit.calibration.stats import LinearStats
from anybit.config import LayerSpec, TileSpec
from anybit.formats import GroupInt
from anybit.formats.bits import split_groups
from anybit.formats.weight import QuantizedWeight
from anybit.methods import clip, grid
from anybit.methods.method import Uniform
from anybit.methods.rtn import RTN
from anybit.methods.tiling import assemble, column_sets

EMBED_ROWS = 4096  # rows of an embedding that are quantized at a time


def quantize(weight: Tensor, stats: LinearStats | None, spec: LayerSpec[Uniform]) -> QuantizedWeight:
    """Quantize `weight` [out, in] to the nearest codes.

    Args:
        weight: float32 [out, in].
        stats: of the layer's inputs, for the clip search and to leave dead channels out; None: all inputs alike.
        spec: tiling and options.
    """
    if stats is not None:
        weight = grid.without_dead(weight, stats.squares)
    sets = column_sets(spec, (weight.shape[0], weight.shape[1]), weight.device)
    codes, scales, zeros = [], [], []
    for s in sets:
        matrix = weight[:, s.cols]
        ratio = clip.search(matrix, s, stats) if spec.options.clip else s.fixed_ratio(spec)[:, None]
        bits, symmetric = s.bits[:, None], s.symmetric[:, None]
        groups = split_groups(matrix, s.group_size)
        scale, zero = grid.fit(groups, bits, symmetric, ratio)
        q = grid.encode(groups, scale[..., None], zero[..., None], (2.0**bits - 1)[..., None])
        codes.append(q.flatten(1)[:, : len(s.cols)])
        scales.append(scale)
        zeros.append(zero)
    return assemble((weight.shape[0], weight.shape[1]), spec, stats, sets, codes, scales, zeros)


def quantize_rows(weight: Tensor, bits: int) -> QuantizedWeight:
    """Round an embedding [vocabulary, hidden] to nearest, some rows at a time so that memory stays bounded."""
    spec = LayerSpec(RTN().resolve(), (TileSpec(bits),))
    parts = [quantize(rows.float(), None, spec).tiles[0] for rows in weight.split(EMBED_ROWS)]
    tiles = [part for part in parts if isinstance(part, GroupInt)]
    tile = GroupInt(
        bits=bits,
        group_size=tiles[0].group_size,
        codes=torch.cat([t.codes for t in tiles]),
        scales=torch.cat([t.scales for t in tiles]),
        zeros=torch.cat([t.zeros for t in tiles if t.zeros is not None]),
    )
    return QuantizedWeight((weight.shape[0], weight.shape[1]), (tile,))
