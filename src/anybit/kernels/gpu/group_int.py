"""Format "group int" with inputs in float16, bfloat16 or float32: one token, and several.

A code becomes a float without a conversion: shifted to the top of a mantissa below the exponent of 1, it reads as
`1 + code / 2**bits`. A group's weights are `scale * 2**bits` times that less `1 + zero / 2**bits`, so one token costs a
shift, a mask and a multiply-add per weight, and two multiply-adds per group and lane. With several tokens the
difference, which is exact in every type, goes to the tensor cores, and scales multiply what a group sums up to.
Weights are the left operand there: then words, not weights, pass from the order of loads to that of products. Up to
eight fields are one product, and codes of 2, 4 and 8 bits, two of which lie 16 bits apart, become 16-bit floats in
pairs.
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
from anybit.kernels.gpu.words import FIELDS, LANES, pack_words, unpack_words

FUSED_TOKENS = 256  # more are multiplied with the dense matrix


@triton.jit
def one_plus(words, FROM: tl.constexpr, BITS: tl.constexpr):
    """`1 + code / 2**BITS`, float32, of the codes at bit FROM of uint32 words."""
    UP: tl.constexpr = 23 - BITS - FROM
    TOP: tl.constexpr = ((1 << BITS) - 1) << (23 - BITS)
    moved = words << UP if UP >= 0 else words >> -UP
    return ((moved & TOP) | 0x3F800000).to(tl.float32, bitcast=True)


def _two_ptx(bits: int, bfloat16: bool) -> str:
    """PTX: the codes at the ends of both halves of a word $2 over 2**bits plus what $3 has, to 16-bit floats $0 and $1.

    A code at the end of a mantissa reads as a base, 128 or 1024, plus the code, so the base is to be taken from $3.
    """
    kind, base = ("bf16x2", 0x43004300) if bfloat16 else ("f16x2", 0x64006400)
    step = (127 - bits << 7 if bfloat16 else 15 - bits << 10) * 0x10001  # 2**-bits, twice
    return (
        f"{{ .reg .b32 t, s; mov.b32 s, {step:#x}; lop3.b32 t, $2, {(2**bits - 1) * 0x10001:#x}, {base:#x}, 0xea; "
        f"fma.rn.{kind} t, t, s, $3; mov.b32 {{$0, $1}}, t; }}"
    )


TWO_2, TWO_4, TWO_8 = (tl.constexpr(_two_ptx(bits, False)) for bits in (2, 4, 8))
TWO_2_BF16, TWO_4_BF16 = (tl.constexpr(_two_ptx(bits, True)) for bits in (2, 4))


@triton.jit
def _two(word, offset, BITS: tl.constexpr, TYPE: tl.constexpr):
    """See `_two_ptx`."""
    if tl.bfloat16 == TYPE:
        return tl.inline_asm_elementwise(
            TWO_2_BF16 if BITS == 2 else TWO_4_BF16, "=h,=h,r,r", [word, offset],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            TWO_2 if BITS == 2 else TWO_4 if BITS == 4 else TWO_8, "=h,=h,r,r", [word, offset],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _halves(word, low, high, BITS: tl.constexpr, TYPE: tl.constexpr):
    """`1 + code / 2**BITS` plus an offset of its half, exact in TYPE, of each field of words: two tuples, by halves."""
    BASE: tl.constexpr = (128.0 if tl.bfloat16 == TYPE else 1024.0) / (1 << BITS)
    first = (low + (1.0 - BASE)).to(TYPE).to(tl.uint16, bitcast=True).to(tl.uint32)
    second = (high + (1.0 - BASE)).to(TYPE).to(tl.uint16, bitcast=True).to(tl.uint32)
    offset = tl.broadcast_to((first | (second << 16))[:, None], word.shape)
    lows, highs = (), ()
    for i in tl.static_range(16 // BITS):
        if INTERPRETED:
            a = rounded(one_plus(word, i * BITS, BITS) + low[:, None], TYPE)
            b = rounded(one_plus(word, 16 + i * BITS, BITS) + high[:, None], TYPE)
        else:
            a, b = _two(word >> i * BITS, offset, BITS, TYPE)
        lows += (a,)  # type: ignore[assignment]  # tuples that grow as loops are unrolled
        highs += (b,)  # type: ignore[assignment]
    return lows, highs


@triton.jit
def _rest(words, p: tl.constexpr, BITS: tl.constexpr):
    """What word p of a lane holds of the codes that lie across words, each at the place it has in a word of its own."""
    WHOLE: tl.constexpr = 32 // BITS * BITS
    bits = tl.zeros_like(words)
    for e in tl.static_range(32 - WHOLE):
        bits |= ((words >> (WHOLE + e)) & 1) << (BITS * e + p)
    return bits


@triton.jit
def next_word(at, mask, rest, p: tl.constexpr, BITS: tl.constexpr):
    """Word p of every lane, uint32, and what is met so far of the codes across words, the word after the last."""
    if p == BITS:
        return rest, rest
    word = tl.load(at, mask=mask, other=0).to(tl.uint32, bitcast=True)
    return word, rest | _rest(word, p, BITS)


@triton.jit
def _grid(scales, zeros, n, mask, groups, g, BITS: tl.constexpr, SYMMETRIC: tl.constexpr):
    """A group's scales times 2**BITS and `-1 - zero / 2**BITS`, float32 [BLOCK] each."""
    g = tl.minimum(g, groups - 1)  # padding columns meet inputs of 0
    scale = tl.load(scales + n * groups + g, mask=mask, other=0.0).to(tl.float32) * (1 << BITS)
    if SYMMETRIC:
        return scale, tl.full(scale.shape, -1.5, tl.float32)
    zero = tl.load(zeros + n * groups + g, mask=mask, other=0).to(tl.float32)
    return scale, -1.0 - zero * (1.0 / (1 << BITS))


@triton.jit(do_not_specialize=["chunks", "groups"])
def _gemv(
    x,  # [c]
    words,  # int32 [r, chunks, BITS, LANES]
    scales,  # float16 [r, groups]
    zeros,  # uint8 [r, groups]
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
    mask, lane = n < r, tl.arange(0, LANES)
    WHOLE: tl.constexpr = 32 // BITS
    line = words + (n * (chunks * BITS * LANES))[:, None] + lane[None, :]
    total = tl.zeros((BLOCK, LANES), tl.float32)
    start, stop = share(chunks)
    for s in range(start, stop):
        part, met = tl.zeros((BLOCK, LANES), tl.float32), tl.zeros((LANES,), tl.float32)
        scale, offset = _grid(scales, zeros, n, mask, groups, s * 32 * LANES // GROUP, BITS, SYMMETRIC)
        rest = tl.zeros((BLOCK, LANES), tl.uint32)
        for p in tl.static_range(BITS + (1 if 32 % BITS else 0)):
            word, rest = next_word(line + (s * BITS + p) * LANES, mask[:, None], rest, p, BITS)
            for i in tl.static_range(WHOLE if p < BITS else 32 - WHOLE * BITS):
                j = p * WHOLE + i
                column = (s * 32 + j) * LANES + lane
                one = tl.load(x + column, mask=column < c, other=0.0).to(tl.float32)
                part += one_plus(word, i * BITS, BITS) * one[None, :]
                met += one
                if (j + 1) % RUN == 0:
                    total += scale[:, None] * (part + offset[:, None] * met[None, :])
                    if j + 1 < 32:
                        part, met = tl.zeros_like(part), tl.zeros_like(met)
                        g = (s * 32 + j + 1) * LANES // GROUP
                        scale, offset = _grid(scales, zeros, n, mask, groups, g, BITS, SYMMETRIC)
    store(tl.sum(total, 1), y, rows, n, mask, out, ROWS, ADD)


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
def columns_of(x, m, tokens, c, first, COUNT: tl.constexpr):
    """COUNT inputs from column `first` on, [COUNT, tokens]: what weights are multiplied with."""
    column = first + tl.arange(0, COUNT)
    at = x + m[:, None].to(tl.int64) * c + column[None, :]
    return tl.trans(tl.load(at, mask=(m < tokens)[:, None] & (column < c)[None, :], other=0.0))


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
    TWO: tl.constexpr,  # codes are decoded two at a time; halves of words lie in one group
    BLOCK: tl.constexpr,
):
    n = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    m = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    mask, lane = n < r, tl.arange(0, LANES)
    WHOLE: tl.constexpr = 32 // BITS
    HALF: tl.constexpr = WHOLE // 2
    STEP: tl.constexpr = RUN if RUN < 8 else 8  # fields to a product
    line = words + (n * (chunks * BITS * LANES))[:, None] + lane[None, :]
    total = tl.zeros((BLOCK, TOKENS), tl.float32)
    start, stop = share(chunks)
    for s in range(start, stop):
        part = tl.zeros((BLOCK, TOKENS), tl.float32)
        scale, offset = _grid(scales, zeros, n, mask, groups, s * 32 * LANES // GROUP, BITS, SYMMETRIC)
        rest, held = tl.zeros((BLOCK, LANES), tl.uint32), ()
        for p in tl.static_range(BITS + (1 if 32 % BITS else 0)):
            word, rest = next_word(line + (s * BITS + p) * LANES, mask[:, None], rest, p, BITS)
            if TWO:
                first, after, behind = (s * 32 + p * WHOLE) * LANES, scale, offset
                if RUN == HALF:
                    g = (first + HALF * LANES) // GROUP
                    after, behind = _grid(scales, zeros, n, mask, groups, g, BITS, SYMMETRIC)
                low, high = _halves(word, offset, behind, BITS, x.dtype.element_ty)
                if RUN > HALF and WHOLE <= 8:
                    some = columns_of(x, m, tokens, c, first, WHOLE * LANES)
                    part = dot(side_by_side(low + high), some, part)
                else:
                    part = dot(side_by_side(low), columns_of(x, m, tokens, c, first, HALF * LANES), part)
                    if RUN == HALF:
                        total += part * scale[:, None]
                        part, scale = tl.zeros_like(part), after
                    some = columns_of(x, m, tokens, c, first + HALF * LANES, HALF * LANES)
                    part = dot(side_by_side(high), some, part)
            for i in tl.static_range(WHOLE if p < BITS else 32 - WHOLE * BITS):
                if not TWO:
                    weight = rounded(one_plus(word, i * BITS, BITS) + offset[:, None], x.dtype.element_ty)
                    held += (weight,)  # type: ignore[assignment]
                    if (p * WHOLE + i + 1) % STEP == 0:
                        first = (s * 32 + p * WHOLE + i + 1 - STEP) * LANES
                        some = columns_of(x, m, tokens, c, first, STEP * LANES)
                        part, held = dot(side_by_side(held), some, part), ()
                if (not TWO or i + 1 == WHOLE) and (p * WHOLE + i + 1) % RUN == 0:
                    total += part * scale[:, None]
                    if p * WHOLE + i + 1 < 32:
                        part = tl.zeros_like(part)
                        g = (s * 32 + p * WHOLE + i + 1) * LANES // GROUP
                        scale, offset = _grid(scales, zeros, n, mask, groups, g, BITS, SYMMETRIC)
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
    s, mask, lane = tl.program_id(1), to < r, tl.arange(0, LANES)
    n = tl.load(ids + to, mask=mask, other=0) if PICKED else to
    WHOLE: tl.constexpr = 32 // BITS
    line = words + (n * (chunks * BITS * LANES))[:, None] + lane[None, :]
    rest = tl.zeros((BLOCK, LANES), tl.uint32)
    for p in tl.static_range(BITS + (1 if 32 % BITS else 0)):
        word, rest = next_word(line + (s * BITS + p) * LANES, mask[:, None], rest, p, BITS)
        for i in tl.static_range(WHOLE if p < BITS else 32 - WHOLE * BITS):
            first = (s * 32 + p * WHOLE + i) * LANES
            g = first // GROUP
            scale, offset = _grid(scales, zeros, n, mask, groups, g, BITS, SYMMETRIC)
            value = scale[:, None] * (one_plus(word, i * BITS, BITS) + offset[:, None])
            column = first + lane
            at = dense + (to * c)[:, None] + column[None, :]
            tl.store(at, rounded(value, dense.dtype.element_ty), mask=mask[:, None] & (column < c)[None, :])


def _tiling(m: int) -> Tiling:
    if m == 1:
        return Tiling(1, 32, 1)
    return Tiling(64, 128, 8) if m > 32 else Tiling(16 if m <= 16 else 32, 64, 4)


class GroupInt:
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
        self.words = pack_words(codes, bits, LANES)
        self.scales, self.zeros = scales.contiguous(), None if zeros is None else zeros.contiguous()
        one_group = group_size >= self.c
        self._grid: dict[str, Any] = {
            "GROUP": 1 << 30 if one_group else group_size,
            "RUN": FIELDS if one_group else math.gcd(group_size // LANES, FIELDS),
            "BITS": bits,
            "LANES": LANES,
            "SYMMETRIC": zeros is None,
        }

    @staticmethod
    def takes(columns: int, group_size: int) -> bool:
        """Whether there is a kernel for groups of this size."""
        return group_size >= columns or group_size % LANES == 0

    def splits(self, x: Tensor) -> int:
        """Parts that the product with x is best summed in."""
        if len(x) > 1 and not fused(x):
            return 1
        tiling = _tiling(len(x))
        return split.splits(tiling.warps_of(self.r, len(x)), tiling.each, self.words.shape[1], x.device)

    def matmul(self, x: Tensor, y: Tensor, add: bool = False) -> None:
        """`y[:, rows] = x @ W.T`, or `+=`, summed in float32.

        Args:
            x: [m, c], contiguous, float16, bfloat16 or float32.
            y: [m, out], contiguous, any type of floats. Or [parts, m, out]: the product is the sum of the parts; any
                number where `splits` says more than one.
            add: add to y.
        """
        stored = self.words, self.scales, self.scales if self.zeros is None else self.zeros
        rows = self.words if self.rows is None else self.rows
        sizes, flags = (
            (self.words.shape[1], self.scales.shape[1]),
            {"ROWS": self.rows is not None, "ADD": add},
        )
        tiling, out = _tiling(len(x)), y.shape[-1]
        if len(x) == 1:
            _gemv[tiling.grid(self.r, 1, y)](
                x, *stored, rows, y, self.r, self.c, out, *sizes, **self._grid, **flags, BLOCK=tiling.block,
                num_warps=tiling.warps,
            )  # fmt: skip
        elif fused(x):
            _gemm[tiling.grid(self.r, len(x), y)](
                x, *stored, rows, y, len(x), self.r, self.c, out, *sizes, **self._grid, **flags,
                TOKENS=tiling.tokens, TWO=self._two(x.dtype), BLOCK=tiling.block, num_warps=tiling.warps,
                num_stages=1,
            )  # fmt: skip
        else:
            product = x @ self.dequantize(x.dtype).T
            place_product(product, y, self.rows, add)

    def _two(self, dtype: torch.dtype) -> bool:
        """Whether halves of words hold whole codes of one group, which the type's mantissa has room for."""
        room = 7 if dtype == torch.bfloat16 else 8
        return self.bits in (2, 4, 8) and self.bits <= room and self._grid["RUN"] >= 16 // self.bits

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The tile's weights [r, c]: exact in float32, rounded to nearest even in any other dtype."""
        return self._dense(self.r, None, dtype)

    def dequantize_rows(self, ids: Tensor) -> Tensor:
        """Weights float32 [n, c] of the rows `ids` int64 [n], which are not checked."""
        return self._dense(len(ids), ids.long().contiguous(), torch.float32)

    def _dense(self, rows: int, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        dense = torch.empty(rows, self.c, dtype=dtype, device=self.words.device)
        chunks, zeros = self.words.shape[1], self.scales if self.zeros is None else self.zeros
        if rows:
            _dequantize[(triton.cdiv(rows, 16), chunks)](
                self.words, self.scales, zeros, self.words if ids is None else ids, dense, rows, self.c, chunks,
                self.scales.shape[1], **self._grid, PICKED=ids is not None, BLOCK=16, num_warps=4,
            )  # fmt: skip
        return dense

    def codes(self) -> Tensor:
        """Codes uint8 [r, c]."""
        return unpack_words(self.words, self.c)


def fused(x: Tensor) -> bool:
    """Whether weights are decoded as several tokens meet them: few enough, and of a type that tensor cores take."""
    return len(x) <= FUSED_TOKENS and x.dtype != torch.float32


def place_product(product: Tensor, y: Tensor, rows: Tensor | None, add: bool) -> None:
    """`y[:, rows] = product`, or `+=`."""
    if rows is None:
        y.add_(product) if add else y.copy_(product)
    elif add:
        y.index_add_(1, rows.long(), product.to(y.dtype))
    else:
        y[:, rows.long()] = product.to(y.dtype)
