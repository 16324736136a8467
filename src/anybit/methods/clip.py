"""Clip search: a ratio c <= 1 per (row, group) that shrinks the grid's range where that lowers the output error.

The error is the layer's, not the weights': `D H D^T` with D the group's rounding error and H the group's
block of the Hessian `X^T X` (the second-order weighting of OmniQuant's and AWQ's clip, without gradients).
"""

from __future__ import annotations

import torch
from torch import Tensor

from anybit.methods import grid
from anybit.methods.tiling import ColumnSet
from anybit.stats import LinearStats

RATIOS = tuple(1 - 0.04 * k for k in range(14))  # 1.00 down to 0.48


def search(weight: Tensor, columns: ColumnSet, stats: LinearStats | None) -> Tensor:
    """Best clipping ratio of every row and group.

    Args:
        weight: float32 [out, c], the column set's channels in stored order.
        columns: the column set.
        stats: Hessian of the layer's inputs; None weighs all errors alike.

    Returns:
        float32 [out, groups], values in (0, 1].
    """
    bits, symmetric = columns.bits.to(weight.device)[:, None], columns.symmetric.to(weight.device)[:, None]
    groups = grid.split_groups(weight, columns.group_size)
    blocks = _hessian_blocks(columns, stats, weight)
    top = (2.0**bits - 1)[..., None]
    best = torch.full(groups.shape[:2], torch.inf, device=weight.device)
    ratios = torch.ones_like(best)
    for ratio in RATIOS:
        scale, zero = grid.fit(groups, bits, symmetric, ratio)
        scale, zero = scale[..., None], zero[..., None]
        delta = grid.decode(grid.encode(groups, scale, zero, top), scale, zero) - groups
        # [groups, out, n] @ [groups, n, n], then the row-wise inner product with delta
        error = (torch.bmm(delta.transpose(0, 1), blocks) * delta.transpose(0, 1)).sum(-1).T
        ratios = torch.where(error < best, ratio, ratios)
        best = torch.minimum(error, best)
    return ratios


def _hessian_blocks(columns: ColumnSet, stats: LinearStats | None, weight: Tensor) -> Tensor:
    """Diagonal blocks of the Hessian by group, float32 [groups, n, n]; a ragged group is padded with zeros."""
    n, groups = columns.group_size, columns.groups
    blocks = torch.zeros(groups, n, n, device=weight.device)
    for g in range(groups):
        channels = columns.group(g)
        k = len(channels)
        if stats is None or stats.hessian is None:
            blocks[g, :k, :k] = torch.eye(k, device=weight.device)
        else:
            blocks[g, :k, :k] = stats.hessian[channels[:, None], channels].to(weight.device)
    return blocks
