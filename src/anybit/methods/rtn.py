"""Round to nearest: each weight to the closest point of its group's grid (methods.grid). The baseline."""

from __future__ import annotations

from torch import Tensor

from anybit.calibration.stats import LinearStats
from anybit.config import LayerSpec
from anybit.formats.bits import split_groups
from anybit.formats.weight import QuantizedWeight
from anybit.methods import clip, grid
from anybit.methods.tiling import assemble, column_sets


def quantize(weight: Tensor, stats: LinearStats | None, spec: LayerSpec) -> QuantizedWeight:
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
        ratio = clip.search(matrix, s, stats) if spec.clip else s.fixed_ratio(spec)[:, None]
        bits, symmetric = s.bits[:, None], s.symmetric[:, None]
        groups = split_groups(matrix, s.group_size)
        scale, zero = grid.fit(groups, bits, symmetric, ratio)
        q = grid.encode(groups, scale[..., None], zero[..., None], (2.0**bits - 1)[..., None])
        codes.append(q.flatten(1)[:, : len(s.cols)])
        scales.append(scale)
        zeros.append(zero)
    return assemble((weight.shape[0], weight.shape[1]), spec, stats, sets, codes, scales, zeros)
