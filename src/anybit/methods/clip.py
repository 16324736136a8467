"""Clip search: a ratio c <= 1 per (row, group) that shrinks the grid's range where that lowers the output error.

The error is the layer's, not the weights': `D H D^T` with D the group's rounding error and H the group's block of
the Hessian `X^T X`. Where a method compensates errors in later columns (GPTQ), what a column's error costs in the end
is `d_j^2 / R_jj^2`, R the Cholesky factor of the inverse Hessian (GPTQ's loss, Optimal Brain Quantization eq. 5);
then that is what is minimised.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from anybit.calibration.stats import LinearStats
from anybit.formats.bits import split_groups
from anybit.methods import grid
from anybit.methods.tiling import ColumnSet

RATIOS = tuple(1 - 0.04 * k for k in range(14))  # 1.00 down to 0.48
CHUNK = 2**18  # weights searched at a time: rows are independent, and these stay in cache
DEVICE_CHUNK = 2**24  # the same elsewhere: a GPU needs work for all of it, and each launch costs microseconds


def search(weight: Tensor, columns: ColumnSet, stats: LinearStats | None) -> Tensor:
    """Best clipping ratio of every row and group for plain rounding.

    Args:
        weight: float32 [out, c], the column set's channels in stored order.
        columns: the column set.
        stats: Hessian of the layer's inputs; None weighs all errors alike.

    Returns:
        float32 [out, groups], values in (0, 1].
    """
    blocks = _hessian_blocks(columns, stats, weight)

    def cost(delta: Tensor) -> Tensor:
        # [groups, out, n] @ [groups, n, n], then the row-wise inner product with delta
        across = delta.transpose(0, 1)
        return (torch.bmm(across, blocks) * across).sum(-1).T

    return _least(weight, columns, cost)


def search_compensated(weight: Tensor, columns: ColumnSet, column_cost: Tensor) -> Tensor:
    """Best clipping ratio of every row and group where errors are compensated in later columns.

    Args:
        weight: float32 [out, c], the column set's channels in stored order.
        columns: the column set.
        column_cost: float32 [c], what a squared error in each channel costs in the end.

    Returns:
        float32 [out, groups], values in (0, 1].
    """
    costs = split_groups(column_cost[None], columns.group_size)  # [1, groups, n], zeros beyond the last
    return _least(weight, columns, lambda delta: (delta.square() * costs).sum(-1))


def _least(weight: Tensor, columns: ColumnSet, cost: Callable[[Tensor], Tensor]) -> Tensor:
    """The ratio of least `cost(rounding errors [rows, groups, n]) -> [rows, groups]`, some rows at a time."""
    bits, symmetric = columns.bits[:, None], columns.symmetric[:, None]
    chunk = CHUNK if weight.device.type == "cpu" else DEVICE_CHUNK
    rows = max(1, chunk // weight.shape[1])
    parts = zip(weight.split(rows), bits.split(rows), symmetric.split(rows), strict=True)
    size = columns.group_size
    return torch.cat([least_of_rows(split_groups(w, size), b, s, cost) for w, b, s in parts])


def least_of_rows(
    groups: Tensor, bits: Tensor, symmetric: Tensor, cost: Callable[[Tensor], Tensor]
) -> Tensor:
    """The ratio of least cost for every row and group.

    Args:
        groups: float32 [rows, groups, n], weights.
        bits: width, broadcastable to [rows, groups].
        symmetric: bool, broadcastable to [rows, groups].
        cost: of rounding errors [rows, groups, n], float32 [rows, groups].

    Returns:
        float32 [rows, groups], values in (0, 1].
    """
    top = (2.0**bits - 1)[..., None]
    best = torch.full(groups.shape[:2], torch.inf, device=groups.device)
    ratios = torch.ones_like(best)
    for ratio in RATIOS:
        scale, zero = grid.fit(groups, bits, symmetric, ratio)
        scale, zero = scale[..., None], zero[..., None]
        error = cost(grid.decode(grid.encode(groups, scale, zero, top), scale, zero) - groups)
        ratios = torch.where(error < best, ratio, ratios)
        best = torch.minimum(error, best)
    return ratios


def _hessian_blocks(columns: ColumnSet, stats: LinearStats | None, weight: Tensor) -> Tensor:
    """Diagonal blocks of the Hessian by group, float32 [groups, n, n]; a ragged group is padded with zeros."""
    n, groups = min(columns.group_size, len(columns.cols)), columns.groups
    blocks = torch.zeros(groups, n, n, device=weight.device)
    for g in range(groups):
        channels = columns.group(g)
        k = len(channels)
        if stats is None or stats.hessian is None:
            blocks[g, :k, :k] = torch.eye(k, device=weight.device)
        else:
            blocks[g, :k, :k] = stats.hessian[channels[:, None], channels].to(weight.device)
    return blocks
