"""Reference implementations, slow and obvious: what the library makes is held against them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anybit.calibration.stats import LinearStats
from anybit.formats.weight import QuantizedWeight
from anybit.kernels import reference
from anybit.methods import clip
from tests import builders


def output_error(weight: Tensor, made: QuantizedWeight, x: Tensor) -> float:
    return float((reference.int_matmul(x, made) - x @ weight.T).square().sum())


def output_loss(weight: Tensor, made: QuantizedWeight | np.ndarray, hessian: Tensor) -> float:
    """tr(D H D^T): the squared error of the layer's outputs over the calibration tokens."""
    dense = made.dequantize().numpy() if isinstance(made, QuantizedWeight) else made
    delta = dense.astype(np.float64) - weight.numpy().astype(np.float64)
    return float(((delta @ hessian.numpy().astype(np.float64)) * delta).sum())


def scalar_grid(values: np.ndarray, bits: int, symmetric: bool, ratio: float = 1.0) -> tuple[np.float32, int]:
    """Scale and zero point of one group of one row, as docs/formats.md and the paper have them."""
    top, half = 2**bits - 1, 2 ** (bits - 1)
    low, high = min(values.min(), 0), max(values.max(), 0)
    scale = max(-low, high) / (half - 1) if symmetric else (high - low) / top
    scale = np.float32(np.float16(np.float32(scale * ratio)))
    if symmetric:
        return scale, half
    return scale, 0 if scale == 0 else int(min(max(np.rint(-low * ratio / scale), 0), top))


def scalar_code(value: float, scale: float, zero: int, bits: int) -> int:
    return zero if scale == 0 else int(min(max(np.rint(value / scale) + zero, 0), 2**bits - 1))


def rtn_oracle(weight: Tensor, bits: int, group_size: int, symmetric: bool) -> tuple[np.ndarray, ...]:
    """codes [out, in], scales and zeros [out, groups], one weight at a time in float32."""
    w = weight.numpy()
    size = w.shape[1] if group_size == -1 else group_size
    groups = -(-w.shape[1] // size)
    codes = np.zeros(w.shape, np.uint8)
    scales, zeros = np.zeros((len(w), groups), np.float16), np.zeros((len(w), groups), np.uint8)
    for i, row in enumerate(w):
        for g in range(groups):
            scale, zero = scalar_grid(row[g * size : (g + 1) * size], bits, symmetric)
            scales[i, g], zeros[i, g] = scale, zero
            for j in range(g * size, min((g + 1) * size, len(row))):
                codes[i, j] = scalar_code(row[j], scale, zero, bits)
    return codes, scales, zeros


def clip_oracle(
    weight: Tensor, hessian: np.ndarray, bits: int, group_size: int, symmetric: bool
) -> np.ndarray:
    """Error of every ratio, [ratios, out, groups], one group of one row at a time."""
    w = weight.numpy().astype(np.float64)
    groups = -(-w.shape[1] // group_size)
    errors = np.zeros((len(clip.RATIOS), len(w), groups))
    for k, ratio in enumerate(clip.RATIOS):
        for i in range(len(w)):
            for g in range(groups):
                span = slice(g * group_size, min((g + 1) * group_size, w.shape[1]))
                scale, zero = scalar_grid(w[i, span], bits, symmetric, ratio)
                codes = np.array([scalar_code(v, scale, zero, bits) for v in w[i, span]])
                delta = float(scale) * (codes - zero) - w[i, span]
                errors[k, i, g] = delta @ hessian[span, span] @ delta
    return errors


@dataclass
class Group:
    """A group of input channels in processing order, and the grid of each row in it."""

    channels: list[int]
    bits: list[int]
    symmetric: list[bool]


def groups_in_order(energy: np.ndarray, rows: int, spec: builders.LayerSpec) -> list[Group]:
    """What GPTQ walks through, from the options' definitions; energy [in] is the Hessian's diagonal."""
    groups: list[Group] = []
    for cols in dict.fromkeys(t.cols for t in spec.tiles):
        tiles = [t for t in spec.tiles if t.cols == cols]
        channels = list(range(len(energy)) if cols is None else cols)
        if getattr(spec.options, "desc_act", False):
            channels.sort(key=lambda j: -energy[j])
        size = len(channels) if tiles[0].group_size == -1 else tiles[0].group_size
        of_row = {i: t for t in tiles for i in (range(rows) if t.rows is None else t.rows)}
        bits, symmetric = [of_row[i].bits for i in range(rows)], [of_row[i].symmetric for i in range(rows)]
        for start in range(0, len(channels), size):
            groups.append(Group(channels[start : start + size], bits, symmetric))
    if spec.options.group_reorder and not getattr(spec.options, "desc_act", False):
        groups.sort(key=lambda g: -float(np.mean(energy[g.channels])))
    return groups


def eliminate(inverse: np.ndarray, j: int) -> np.ndarray:
    """The inverse Hessian without channel j."""
    return inverse - np.outer(inverse[:, j], inverse[j]) / inverse[j, j]


def ratios_of(weight: Tensor, group: Group, cost: np.ndarray, clipped: bool) -> np.ndarray:
    """Clipping ratio of each row: least final cost of the original weights' errors."""
    ratio = np.ones(len(weight))
    for i in range(len(weight) if clipped else 0):
        one, h = weight[i : i + 1, group.channels], np.diag(cost[group.channels])
        errors = clip_oracle(one, h, group.bits[i], len(group.channels), group.symmetric[i])
        ratio[i] = clip.RATIOS[int(errors[:, 0, 0].argmin())]
    return ratio


def gptq_oracle(weight: Tensor, stats: LinearStats, spec: builders.LayerSpec) -> np.ndarray:
    """Optimal brain quantization, column by column, with the explicit inverse Hessian; dense [out, in]."""
    assert stats.hessian is not None
    w, h = weight.numpy().astype(np.float64), stats.hessian.numpy().astype(np.float64)
    diagonal = h.diagonal().copy()
    dead = diagonal == 0
    mean = diagonal.mean() if diagonal.any() else 1.0
    h[np.diag_indices(len(h))] += np.where(dead, mean, spec.options.damp * mean)
    w[:, dead] = 0
    groups = groups_in_order(diagonal, len(w), spec)
    inverse, cost = np.linalg.inv(h), np.zeros(len(h))
    for j in [j for group in groups for j in group.channels]:
        cost[j], inverse = 1 / inverse[j, j], eliminate(inverse, j)
    inverse, dense, left = np.linalg.inv(h), np.zeros_like(w), np.ones(len(h), bool)
    for group in groups:
        ratio = ratios_of(torch.tensor(np.where(dead, 0, weight)), group, cost, spec.options.clip)
        fitted = [
            scalar_grid(w[i, group.channels], group.bits[i], group.symmetric[i], ratio[i])
            for i in range(len(w))
        ]
        for j in group.channels:
            left[j] = False
            for i, (scale, zero) in enumerate(fitted):
                dense[i, j] = float(scale) * (scalar_code(w[i, j], float(scale), zero, group.bits[i]) - zero)
                error = (w[i, j] - dense[i, j]) / inverse[j, j]
                w[i, left] -= error * inverse[j, left]
            inverse = eliminate(inverse, j)
    return dense
