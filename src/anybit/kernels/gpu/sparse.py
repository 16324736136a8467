"""Sparse weights: a row's values meet the inputs of their columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anybit import formats
from anybit.kernels.gpu.arithmetic import rounded


@triton.jit
def _sparse(
    x,  # [tokens, c]
    values,  # [n]
    columns,  # int32 [n]
    row_ptr,  # int32 [out + 1]
    y,  # [tokens, out]
    tokens,
    c,
    out,
    ADD: tl.constexpr,
    TOKENS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    row = tl.program_id(0)
    m = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    first, last = tl.load(row_ptr + row), tl.load(row_ptr + row + 1)
    total = tl.zeros((TOKENS, AT_ONCE), tl.float32)
    for at in range(first, last, AT_ONCE):
        i = at + tl.arange(0, AT_ONCE)
        value = tl.load(values + i, mask=i < last, other=0.0).to(tl.float32)
        column = tl.load(columns + i, mask=i < last, other=0)
        given = x + (m.to(tl.int64) * c)[:, None] + column[None, :]
        some = tl.load(given, mask=(m < tokens)[:, None] & (i < last)[None, :], other=0.0)
        total += value[None, :] * some.to(tl.float32)
    sums, to = tl.sum(total, 1), y + m.to(tl.int64) * out + row
    if ADD:
        sums += tl.load(to, mask=m < tokens, other=0.0).to(tl.float32)
    tl.store(to, rounded(sums, y.dtype.element_ty), mask=m < tokens)


class SparseKernel:
    """Weights that are added to the tiles', compressed by rows."""

    def __init__(self, sparse: formats.Sparse) -> None:
        self._values, self._row_ptr = sparse.values, sparse.row_ptr
        self._columns = sparse.columns.to(torch.int32)

    def splits(self, x: Tensor) -> int:
        return 1

    def matmul(self, x: Tensor, y: Tensor, add: bool = False) -> None:
        """`y [m, out] = x [m, in] @ W.T`, or `+=`, one program for a row and up to 16 tokens."""
        tokens = min(16, triton.next_power_of_2(len(x)))
        _sparse[(len(self._row_ptr) - 1, triton.cdiv(len(x), tokens))](
            x, self._values, self._columns, self._row_ptr, y, len(x), x.shape[1], y.shape[1], ADD=add, TOKENS=tokens,
            AT_ONCE=64, num_warps=1,
        )  # fmt: skip
