"""Format "group int" with inputs in float16, bfloat16 or float32.

Tensor cores multiply inputs of 16 bits, one token's too: codes less zero points are exact in both types, and scales
multiply what a group sums up to. The two codes of the halves of a word are decoded at a time: put at the end of a
mantissa they read as a base, 1024 or 128, plus the code, and one multiply-add takes base and zero point off again. Both
are neighbours in a register of the left operand. Of up to 16 tokens, columns are multiplied in the order in which
threads hold what they load, 16 bytes of a row of words and of inputs, so nothing but scales and zero points passes from
thread to thread, where groups are whole multiples of 32 columns, rows of 16, and codes fit the type of the inputs.

One token in float32 has multiply-adds: shifted to the top of a mantissa below the exponent of 1, a code reads as
`1 + code / 2**bits`. A group's weights are `scale * 2**bits` times that less `1 + zero / 2**bits`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from anybit.kernels.gpu import split
from anybit.kernels.gpu.arithmetic import INTERPRETED, dot, rounded, side_by_side
from anybit.kernels.gpu.split import Tiling, share
from anybit.kernels.gpu.words import FEW_LANES, HALF, LANES, pack_words, unpack_words

FUSED_TOKENS = 64  # more are multiplied with the dense matrix
DEPTH = tl.constexpr(
    32
)  # of a product: of four threads, each with what Triton loads at a time, up to 8 inputs


@triton.jit
def one_plus(words, FROM: tl.constexpr, BITS: tl.constexpr):
    """`1 + code / 2**BITS`, float32, of the codes at bit FROM of uint32 words."""
    UP: tl.constexpr = 23 - BITS - FROM
    TOP: tl.constexpr = ((1 << BITS) - 1) << (23 - BITS)
    moved = words << UP if UP >= 0 else words >> -UP
    return ((moved & TOP) | 0x3F800000).to(tl.float32, bitcast=True)


# PTX: the halves of `$2 & $3 | $4`, read as floats, times those of $5 plus those of $6, to 16-bit floats $0 and $1.
READ_HALF, READ_BFLOAT16 = (
    tl.constexpr(
        f"{{ .reg .b32 t; lop3.b32 t, $2, $3, $4, 0xea; fma.rn.{kind} t, t, $5, $6; mov.b32 {{$0, $1}}, t; }}"
    )
    for kind in ("f16x2", "bf16x2")
)


@triton.jit
def _low(words, TYPE: tl.constexpr):
    """The low halves of words as floats of 16 bits, in float32."""
    if tl.bfloat16 == TYPE:
        return (words << 16).to(tl.float32, bitcast=True)
    else:
        return (words & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _read(word, mask, base, step, offset, TYPE: tl.constexpr):
    """`(word & mask | base) * step + offset` of the halves of words: two tiles of TYPE, the low halves first."""
    if INTERPRETED:
        read = (word & mask) | base
        low = _low(read, TYPE) * _low(step, TYPE) + _low(offset, TYPE)
        high = _low(read >> 16, TYPE) * _low(step >> 16, TYPE) + _low(offset >> 16, TYPE)
        return rounded(low, TYPE), rounded(high, TYPE)
    elif tl.bfloat16 == TYPE:
        return tl.inline_asm_elementwise(
            READ_BFLOAT16, "=h,=h,r,r,r,r,r", [word, mask, base, step, offset],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            READ_HALF, "=h,=h,r,r,r,r,r", [word, mask, base, step, offset],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _offset(zero, BITS: tl.constexpr, TYPE: tl.constexpr):
    """What takes the base and `zero` from what `_two` reads, in both halves of words."""
    BASE: tl.constexpr = 128.0 if tl.bfloat16 == TYPE else 1024.0
    half = ((zero.to(tl.float32) + BASE) * (-1.0 / (1 << BITS))).to(TYPE).to(tl.uint16, bitcast=True)
    return half.to(tl.uint32) * 0x10001


@triton.jit
def _two(word, offset, BITS: tl.constexpr, TYPE: tl.constexpr):
    """`(code - zero) / 2**BITS` of the codes at the ends of both halves of words, exact in TYPE: two tiles."""
    MASK: tl.constexpr = ((1 << BITS) - 1) * 0x10001
    BASE: tl.constexpr = 0x43004300 if tl.bfloat16 == TYPE else 0x64006400
    STEP: tl.constexpr = ((127 - BITS << 7) if tl.bfloat16 == TYPE else (15 - BITS << 10)) * 0x10001
    mask, base = tl.full(word.shape, MASK, tl.uint32), tl.full(word.shape, BASE, tl.uint32)
    return _read(word, mask, base, tl.full(word.shape, STEP, tl.uint32), offset, TYPE)


@triton.jit
def load_words(at, stride, mask, BITS: tl.constexpr):
    """The words of every lane, `stride` apart: a tuple of uint32 tiles."""
    words = ()
    for p in tl.static_range(BITS):
        word = tl.load(at + p * stride) if mask is None else tl.load(at + p * stride, mask=mask, other=0)
        words += (word.to(tl.uint32, bitcast=True),)  # type: ignore[assignment]  # grows as the loop is unrolled
    return words


@triton.jit
def field(words, q: tl.constexpr, BITS: tl.constexpr):
    """Field q of both halves of each lane's words, at the ends of a word's halves; the bits before it mean nothing."""
    WHOLE: tl.constexpr = 16 // BITS * BITS
    if q < WHOLE:
        return words[q // (16 // BITS)] >> q % (16 // BITS) * BITS
    else:
        code = tl.zeros_like(words[0])
        for p in tl.static_range(BITS):
            code |= _piece(words[p], (q - WHOLE) * BITS - p * (16 % BITS), BITS)
        return code


@triton.jit
def _piece(word, FIRST: tl.constexpr, BITS: tl.constexpr):
    """What the bits left of a word's halves hold of the code that begins FIRST bits behind the first of these bits."""
    LEFT: tl.constexpr = 16 % BITS
    FROM: tl.constexpr = 0 if FIRST >= 0 else -FIRST
    TO: tl.constexpr = LEFT - FIRST if LEFT - FIRST < BITS else BITS
    if FROM < TO:
        return (word >> (16 - LEFT + FIRST)) & (((1 << TO) - (1 << FROM)) * 0x10001)
    else:
        return tl.zeros_like(word)


@triton.jit
def _grids(
    scales, zeros, n, groups, first, FIELDS: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
    COLUMNS: tl.constexpr, SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """Scales and zero points [BLOCK] of the runs of FIELDS fields, of COLUMNS columns, from column `first`: two tuples.

    A zero point that all groups share is loaded, too: by the bytes that a product's left operand comes from, Triton
    chooses the order of its columns.
    """
    of_scales, of_zeros = (), ()
    for q in tl.static_range(0, FIELDS, RUN):
        at = n * groups + tl.minimum((first + q * COLUMNS) // GROUP, groups - 1)  # padding meets inputs of 0
        of_scales += (tl.load(scales + at),)  # type: ignore[assignment]  # tuples that grow as loops are unrolled
        of_zeros += (tl.load(zeros + (n * 0 if SYMMETRIC else at)),)  # type: ignore[assignment]
    return of_scales, of_zeros


@triton.jit(do_not_specialize=["chunks", "groups"])
def _gemv(
    x,  # float32 [c]
    words,  # int32 [r, chunks, BITS, LANES]
    scales,  # float16 [r, groups]
    zeros,  # uint8 [r, groups]; [1], of all groups, where SYMMETRIC
    rows,  # int32 [r]
    y,  # [parts, out]
    r,
    c,
    out,
    chunks,
    groups,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,  # fields that surely lie in one group
    BITS: tl.constexpr,
    LANES: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    there, lane = tl.minimum(n, r - 1), tl.arange(0, LANES)
    line = words + (there * (chunks * BITS * LANES))[:, None] + lane[None, :]
    total = tl.zeros((BLOCK, LANES), tl.float32)
    start, stop = share(chunks)
    for s in range(start, stop):
        held, column = load_words(line + s * BITS * LANES, LANES, None, BITS), s * 32 * LANES
        of_scales, of_zeros = _grids(
            scales, zeros, there, groups, column, 16, GROUP, RUN, 2 * LANES, SYMMETRIC
        )
        for first in tl.static_range(0, 16, RUN):
            part, met = tl.zeros((BLOCK, LANES), tl.float32), tl.zeros((LANES,), tl.float32)
            for i in tl.static_range(RUN):
                pair = field(held, first + i, BITS)
                for half in tl.static_range(2):
                    at = column + (first + i) * 2 * LANES + lane * 2 + half
                    one = tl.load(x + at, mask=at < c, other=0.0)
                    part += one_plus(pair, 16 * half, BITS) * one[None, :]
                    met += one
            offset = -1.0 - of_zeros[first // RUN].to(tl.float32) * (1.0 / (1 << BITS))
            part += offset[:, None] * met[None, :]
            total += part * (of_scales[first // RUN].to(tl.float32) * (1 << BITS))[:, None]
    store(tl.sum(total, 1), y, rows, n, n < r, out, ROWS, ADD)


@triton.jit
def store(values, y, rows, n, mask, out, ROWS: tl.constexpr, ADD: tl.constexpr):
    """`y[part, rows[n]] = values`, or `+=`; y [parts, out]."""
    at = y + tl.program_id(2) * out + (tl.load(rows + n, mask=mask, other=0) if ROWS else n)
    if ADD:
        values += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, rounded(values, y.dtype.element_ty), mask=mask)


@triton.jit
def store_tile(values, y, rows, m, n, tokens, r, out, ROWS: tl.constexpr, ADD: tl.constexpr):
    """`y[part, m, rows[n]] = values [m, n]`, or `+=`; y [parts, tokens, out]."""
    column = tl.load(rows + n, mask=n < r, other=0) if ROWS else n
    line = (tl.program_id(2) * tokens + m).to(tl.int64) * out
    at, mask = y + line[:, None] + column[None, :], (m < tokens)[:, None] & (n < r)[None, :]
    if ADD:
        values += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, rounded(values, y.dtype.element_ty), mask=mask)


@triton.jit
def _inputs(x, m, c, first, COUNT: tl.constexpr, DEPTH: tl.constexpr):
    """COUNT inputs from column `first` on, [COUNT, tokens]: what weights are multiplied with. At least DEPTH: of 0."""
    i = tl.arange(0, COUNT if COUNT > DEPTH else DEPTH)
    column = first + i
    at, there = x + m[:, None].to(tl.int64) * c + column[None, :], column < c
    if COUNT < DEPTH:
        there = there & (i < COUNT)
    return tl.trans(tl.load(at, mask=there[None, :], other=0.0))


@triton.jit(do_not_specialize=["tokens", "chunks", "groups"])
def _gemm(
    x,  # [tokens, c]
    words,
    scales,
    zeros,
    rows,
    y,  # [parts, tokens, out]
    tokens,
    r,
    c,
    out,
    chunks,
    groups,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    BITS: tl.constexpr,
    LANES: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,  # fields to a product; it divides RUN
    BLOCK: tl.constexpr,
):
    n = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    m = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    there, of, lane = tl.minimum(n, r - 1), tl.minimum(m, tokens - 1), tl.arange(0, LANES)
    TYPE: tl.constexpr = x.dtype.element_ty
    EXACT: tl.constexpr = tl.float16 if BITS == 8 else TYPE  # bfloat16 has no room for base and code
    line = words + (there * (chunks * BITS * LANES))[:, None] + lane[None, :]
    total = tl.zeros((BLOCK, TOKENS), tl.float32)
    start, stop = share(chunks)
    for s in range(start, stop):
        held, column = load_words(line + s * BITS * LANES, LANES, None, BITS), s * 32 * LANES
        of_scales, of_zeros = _grids(
            scales, zeros, there, groups, column, 16, GROUP, RUN, 2 * LANES, SYMMETRIC
        )
        for first in tl.static_range(0, 16, RUN):
            offset = tl.broadcast_to(_offset(of_zeros[first // RUN], BITS, EXACT)[:, None], (BLOCK, LANES))
            part = tl.zeros((BLOCK, TOKENS), tl.float32)
            for i in tl.static_range(0, RUN, STEP):
                weights = ()
                for k in tl.static_range(STEP):
                    low, high = _two(field(held, first + i + k, BITS), offset, BITS, EXACT)
                    weights += (tl.reshape(tl.join(low, high), (BLOCK, 2 * LANES)),)  # type: ignore[assignment]
                if STEP * 2 * LANES < DEPTH:
                    weights += (tl.zeros((BLOCK, 2 * LANES), EXACT),)  # type: ignore[assignment]
                some = _inputs(x, of, c, column + (first + i) * 2 * LANES, STEP * 2 * LANES, DEPTH)
                weight = side_by_side(weights)
                if EXACT != TYPE:
                    weight = rounded(weight.to(tl.float32), TYPE)
                part = dot(weight, some, part)
            total += part * (of_scales[first // RUN].to(tl.float32) * (1 << BITS))[:, None]
    store_tile(tl.trans(total), y, rows, m, n, tokens, r, out, ROWS, ADD)


@triton.jit(do_not_specialize=["chunks", "groups"])
def _dequantize(
    words,
    scales,
    zeros,
    ids,  # int64 [r]: the rows wanted; used where PICKED
    dense,  # [r, c]
    r,
    c,
    chunks,
    groups,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    BITS: tl.constexpr,
    LANES: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    PICKED: tl.constexpr,  # else all rows
    BLOCK: tl.constexpr,
):
    to = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    s, there, lane = tl.program_id(1), tl.minimum(to, r - 1), tl.arange(0, LANES)
    n = tl.load(ids + there) if PICKED else there
    line = words + (n * (chunks * BITS * LANES))[:, None] + lane[None, :]
    held = load_words(line + s * BITS * LANES, LANES, None, BITS)
    for q in tl.static_range(16):
        first = (s * 16 + q) * 2 * LANES
        of_scales, of_zeros = _grids(scales, zeros, n, groups, first, 1, GROUP, RUN, 2 * LANES, SYMMETRIC)
        offset = (-1.0 - of_zeros[0].to(tl.float32) * (1.0 / (1 << BITS)))[:, None]
        pair = field(held, q, BITS)
        both = tl.join(one_plus(pair, 0, BITS) + offset, one_plus(pair, 16, BITS) + offset)
        value = tl.reshape(both, (BLOCK, 2 * LANES)) * (of_scales[0].to(tl.float32) * (1 << BITS))[:, None]
        column = first + tl.arange(0, 2 * LANES)
        at = dense + (to * c)[:, None] + column[None, :]
        tl.store(at, rounded(value, dense.dtype.element_ty), mask=(to < r)[:, None] & (column < c)[None, :])


def _tiling(x: Tensor) -> Tiling:
    m = len(x)
    if m == 1 and x.dtype == torch.float32:
        return Tiling(1, 32, 1)
    if m <= 16:
        return Tiling(8 if m <= 8 else 16, 16, 1)
    return Tiling(64, 128, 8) if m > 32 else Tiling(32, 64, 4)


class GroupIntKernel:
    """A tile in the kernels' order.

    Args:
        codes: uint8 [r, c].
        scales: float16 [r, groups].
        zeros: uint8 [r, groups]; None: symmetric.
        rows: int32 [r] output rows; None: all.
        bits: width, 1 to 8.
        group_size: a multiple of 16, or no less than c.
    """

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        rows: Tensor | None,
        bits: int,
        group_size: int,
    ) -> None:
        self.rows, (self.r, self.c), self.bits, self.group_size = rows, codes.shape, bits, group_size
        one_group = group_size >= self.c
        lanes = LANES if one_group or group_size % (2 * LANES) == 0 else FEW_LANES
        self.words = pack_words(codes, bits, lanes)
        self.scales, symmetric = scales.contiguous(), zeros is None
        self.zeros = (
            scales.new_tensor([1 << bits - 1], dtype=torch.uint8) if zeros is None else zeros.contiguous()
        )
        self._grid: dict[str, Any] = {
            "GROUP": 1 << 30 if one_group else group_size,
            "RUN": HALF if one_group else math.gcd(group_size // (2 * lanes), HALF),
            "BITS": bits,
            "LANES": lanes,
            "SYMMETRIC": symmetric,
        }

    @staticmethod
    def takes(columns: int, group_size: int) -> bool:
        """Whether there is a kernel for groups of this size."""
        return group_size >= columns or group_size % (2 * FEW_LANES) == 0

    def splits(self, x: Tensor) -> int:
        """Parts that the product with x is best summed in."""
        if len(x) > 1 and not fused(x):
            return 1
        tiling = _tiling(x)
        return split.splits(tiling.warps_of(self.r, len(x)), tiling.each, self.words.shape[1], x.device)

    def matmul(self, x: Tensor, y: Tensor, add: bool = False) -> None:
        """`y[:, rows] = x @ W.T`, or `+=`, summed in float32.

        Args:
            x: [m, c], contiguous, float16, bfloat16 or float32.
            y: [m, out], contiguous, any type of floats. Or [parts, m, out]: the product is the sum of the parts; any
                number where `splits` says more than one.
            add: add to y.
        """
        stored = self.words, self.scales, self.zeros
        rows = self.words if self.rows is None else self.rows
        sizes, flags = (
            (self.words.shape[1], self.scales.shape[1]),
            {"ROWS": self.rows is not None, "ADD": add},
        )
        tiling, out = _tiling(x), y.shape[-1]
        if fused(x):
            step = 1 if tiling.warps == 1 else min(4, self._grid["RUN"])
            _gemm[tiling.grid(self.r, len(x), y)](
                x, *stored, rows, y, len(x), self.r, self.c, out, *sizes, **self._grid, **flags,
                TOKENS=tiling.tokens, STEP=step, BLOCK=tiling.block, num_warps=tiling.warps, num_stages=1,
            )  # fmt: skip
        elif len(x) == 1:
            _gemv[tiling.grid(self.r, 1, y)](
                x, *stored, rows, y, self.r, self.c, out, *sizes, **self._grid, **flags, BLOCK=tiling.block,
                num_warps=tiling.warps,
            )  # fmt: skip
        else:
            product = x @ self.dequantize(x.dtype).T
            place_product(product, y, self.rows, add)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The tile's weights [r, c]: exact in float32, rounded to nearest even in any other dtype."""
        return self._dense(self.r, None, dtype)

    def dequantize_rows(self, ids: Tensor) -> Tensor:
        """Weights float32 [n, c] of the rows `ids` int64 [n], which are not checked."""
        return self._dense(len(ids), ids.long().contiguous(), torch.float32)

    def _dense(self, rows: int, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        dense = torch.empty(rows, self.c, dtype=dtype, device=self.words.device)
        chunks = self.words.shape[1]
        if rows:
            _dequantize[(triton.cdiv(rows, 16), chunks)](
                self.words, self.scales, self.zeros, self.words if ids is None else ids, dense, rows, self.c, chunks,
                self.scales.shape[1], **self._grid, PICKED=ids is not None, BLOCK=16, num_warps=4,
            )  # fmt: skip
        return dense

    def codes(self) -> Tensor:
        """Codes uint8 [r, c]."""
        return unpack_words(self.words, self.c)


def fused(x: Tensor, most: int = FUSED_TOKENS) -> bool:
    """Whether several tokens meet weights as they are decoded: at most so many, of a type that tensor cores take.

    A dense matrix costs as much for any number of tokens; decoding once more for each 64 tokens soon costs more.
    """
    return len(x) <= most and x.dtype != torch.float32


def place_product(product: Tensor, y: Tensor, rows: Tensor | None, add: bool) -> None:
    """`y[:, rows] = product`, or `+=`."""
    if rows is None:
        y.add_(product) if add else y.copy_(product)
    elif add:
        y.index_add_(1, rows.long(), product.to(y.dtype))
    else:
        y[:, rows.long()] = product.to(y.dtype)
