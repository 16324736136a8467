"""The inner loop of GPTQ (arXiv:2210.17323, algorithm 1) on a GPU: one launch for a block of columns.

Rows are independent, so a program holds a few of them with all columns of the block in registers and goes through the
columns left to right. Operations and their order are those of `reference.gptq_block`, divisions are exact and nothing
is fused (`enable_fp_fusion=False`), so codes and errors are the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anybit.errors import InputError

COLUMNS = 128  # of a block, at most
ROWS = 2  # of a program, which is one warp: sums over columns then need no barrier
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds |x| < 2^22 half to even


@triton.jit
def _gptq_block(
    weight,  # float32 [rows, n]; compensated in place
    inverse,  # float32 [n, n]
    scales,  # float32 [rows]
    zeros,  # float32 [rows]
    tops,  # float32 [rows]
    codes,  # uint8 [rows, n]
    errors,  # float32 [rows, n]
    rows,
    n,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # n or more
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    there = row < rows
    at = row.to(tl.int64)[:, None] * n + column[None, :]
    inside = there[:, None] & (column < n)[None, :]
    w = tl.load(weight + at, inside, 0.0)
    scale = tl.load(scales + row, there, 0.0)
    zero = tl.load(zeros + row, there, 0.0)
    top = tl.load(tops + row, there, 0.0)
    divisor = tl.where(scale == 0.0, 1.0, scale)
    q = tl.zeros((ROWS, COLUMNS), tl.float32)
    error = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range(n):
        here = column == i
        factor = tl.load(inverse + i * n + column, (column >= i) & (column < n), 0.0)
        pivot = tl.load(inverse + i * n + i)
        x = tl.sum(tl.where(here[None, :], w, 0.0), 1)
        ratio = tl.where(scale == 0.0, 0.0, tl.div_rn(x, divisor))
        code = (ratio + ROUND) - ROUND + zero
        code = tl.where(code > 0.0, code, 0.0)  # NaN too
        code = tl.where(code < top, code, top)
        wrong = tl.div_rn(x - scale * (code - zero), pivot + tl.zeros((ROWS,), tl.float32))
        q = tl.where(here[None, :], code[:, None], q)
        error = tl.where(here[None, :], wrong[:, None], error)
        later = (column > i)[None, :]
        w = tl.where(later, w - wrong[:, None] * factor[None, :], w)
    tl.store(weight + at, w, inside)
    tl.store(codes + at, q.to(tl.uint8), inside)
    tl.store(errors + at, error, inside)


def gptq_block(
    weight: Tensor,  # float32 [rows, n], contiguous, n up to 128; compensated in place
    inverse: Tensor,  # float32 [n, n], contiguous: this block of the upper Cholesky factor of the inverse Hessian
    scale: Tensor,  # float32 [rows]
    zero: Tensor,  # float32 [rows]
    top: Tensor,  # float32 [rows], largest code
) -> tuple[Tensor, Tensor]:
    """Quantize the columns of one block left to right: see `reference.gptq_block`; a weight of NaN gets the code 0.

    Returns:
        codes uint8 [rows, n], errors float32 [rows, n].

    Raises:
        InputError: a block that is too wide or not contiguous.
    """
    rows, n = weight.shape
    if n > COLUMNS or not (weight.is_contiguous() and inverse.is_contiguous()):
        raise InputError(f"a block of {list(weight.shape)}: expected up to {COLUMNS} contiguous columns")
    codes, errors = torch.empty_like(weight, dtype=torch.uint8), torch.empty_like(weight)
    grid = (triton.cdiv(rows, ROWS),)
    scale, zero, top = (t.contiguous() for t in (scale, zero, top))
    _gptq_block[grid](
        weight, inverse, scale, zero, top, codes, errors, rows, n,
        ROWS=ROWS, COLUMNS=max(16, triton.next_power_of_2(n)), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return codes, errors
