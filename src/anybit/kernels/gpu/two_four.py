"""Format "two_four": 2-bit groups whose scales are themselves rounded, 4-bit channels beside them; and sparse weights.

A word has the codes of one block of 16 channels of a row, so a lane finds one scale, or two, for all of a word: it is
made of the group's byte (zero point and scale code) and the grid of 16 rows while the words are on their way.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from anybit import formats
from anybit.kernels.gpu.arithmetic import dot, rounded
from anybit.kernels.gpu.group_int import GroupInt, fused, one_plus, place_product, store, store_tile
from anybit.kernels.gpu.words import as_int32


@triton.jit
def _second_order(
    grids, scale_scales, scale_zeros, n, w, there, groups, HALF: tl.constexpr, HALVES: tl.constexpr
):
    """Scales times 4 and `-1 - zero / 4` of the groups HALF of words w of rows n, float32 [BLOCK, WORDS]."""
    g = w * HALVES + HALF
    there &= (g < groups)[None, :]
    grid = tl.load(grids + (n * groups)[:, None] + g[None, :], mask=there, other=0).to(tl.int32)
    part = (n // 16 * groups)[:, None] + g[None, :]
    step = tl.load(scale_scales + part, mask=there, other=0.0).to(tl.float32)
    zero = tl.load(scale_zeros + part, mask=there, other=0).to(tl.int32)
    return step * ((grid >> 2) + zero).to(tl.float32) * 4.0, -1.0 - (grid & 3).to(tl.float32) * 0.25


@triton.jit(do_not_specialize=["tokens", "groups"])
def _narrow(
    x,  # [tokens, 16 * words]: the ith channel of all words, then the next
    codes,  # int32 [r, words]
    grids,  # uint8 [r, groups]: zero | scale code << 2
    scale_scales,  # float16 [ceil(r / 16), groups]
    scale_zeros,  # uint8 [ceil(r / 16), groups]
    y,  # [tokens, out]
    tokens,
    r,
    words,
    groups,
    out,
    HALVES: tl.constexpr,  # groups of a word
    ADD: tl.constexpr,
    TOKENS: tl.constexpr,  # 1: multiply-adds; else tensor cores
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    m = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    total = tl.zeros((BLOCK, WORDS) if TOKENS == 1 else (TOKENS, BLOCK), tl.float32)
    for first in range(0, words, WORDS):
        w = first + tl.arange(0, WORDS)
        there = (n < r)[:, None] & (w < words)[None, :]
        word = tl.load(codes + (n * words)[:, None] + w[None, :], mask=there, other=0).to(
            tl.uint32, bitcast=True
        )
        for half in tl.static_range(HALVES):
            scale, offset = _second_order(grids, scale_scales, scale_zeros, n, w, there, groups, half, HALVES)
            part, met = tl.zeros((BLOCK, WORDS), tl.float32), tl.zeros((WORDS,), tl.float32)
            for k in tl.static_range(16 // HALVES):
                i = half * (16 // HALVES) + k
                if TOKENS == 1:
                    one = tl.load(x + i * words + w, mask=w < words, other=0.0).to(tl.float32)
                    part += one_plus(word, 2 * (half * (16 // HALVES) + k), 2) * one[None, :]
                    met += one
                else:
                    at = x + (m.to(tl.int64) * 16 * words)[:, None] + (i * words + w)[None, :]
                    some = tl.load(at, mask=(m < tokens)[:, None] & (w < words)[None, :], other=0.0)
                    weight = rounded(
                        (one_plus(word, 2 * (half * (16 // HALVES) + k), 2) + offset) * scale, some.dtype
                    )
                    total = dot(some, tl.trans(weight), total)
            if TOKENS == 1:
                total += scale * (part + offset * met[None, :])
    if TOKENS == 1:
        store(tl.sum(total, 1), y, codes, n, n < r, False, ADD)
    else:
        store_tile(total, y, codes, m, n, tokens, r, out, False, ADD)


class TwoFour:
    """A tile of 2- and 4-bit blocks in the kernels' order."""

    rows = None

    def __init__(self, tile: formats.TwoFour) -> None:
        self.r, self.c = tile.codes.shape
        device = tile.codes.device
        low, high = formats.TwoFour.channels(tile.wide, self.c)
        self._narrow, self._halves, self._low = len(low), formats.BLOCK // tile.group_size, low
        words = -(-len(low) // formats.BLOCK)
        padded = tile.codes.new_zeros(self.r, words * formats.BLOCK)
        padded[:, : len(low)] = tile.codes[:, low]
        shifts = 2 * torch.arange(formats.BLOCK, device=device)
        wide_words = (padded.view(self.r, words, formats.BLOCK).long() << shifts).sum(-1)
        self._codes = as_int32(wide_words)
        self._grids = (tile.zeros | tile.scale_codes << 2).contiguous()
        order = torch.full(
            (words * formats.BLOCK,), self.c, device=device
        )  # a column of zeros behind the inputs
        order[: len(low)] = low
        self._order = order.view(words, formats.BLOCK).T.flatten()
        self._high = high
        self._wide: GroupInt | None = None
        if len(high):
            scales, zeros = tile.wide_scales[:, None], tile.wide_zeros[:, None]
            self._wide = GroupInt(tile.codes[:, high].contiguous(), scales, zeros, None, 4, len(high))
        self._group = formats.TwoFour.group_of(len(low), tile.group_size).to(device)
        nothing = tile.codes.new_empty(self.r, 0)
        self._given = replace(tile, codes=nothing, zeros=nothing, scale_codes=nothing)  # what is small

    def matmul(self, x: Tensor, y: Tensor, add: bool = False) -> None:
        """`y = x @ W.T`, or `+=`; see `group_int.GroupInt.matmul`."""
        if len(x) > 1 and not fused(x):
            return place_product(x @ self.dequantize(x.dtype).T, y, None, add)
        if self._narrow:
            tokens, words = 1 if len(x) == 1 else 16 if len(x) <= 16 else 64, self._codes.shape[1]
            given = (torch.nn.functional.pad(x, (0, 1)) if self._narrow % formats.BLOCK else x).index_select(
                1, self._order
            )
            _narrow[(triton.cdiv(self.r, 32), triton.cdiv(len(x), tokens))](
                given, self._codes, self._grids, self._given.scale_scales, self._given.scale_zeros, y, len(x), self.r,
                words, self._grids.shape[1], y.shape[1], HALVES=self._halves, ADD=add, TOKENS=tokens, WORDS=32,
                BLOCK=32, num_warps=2, num_stages=1,
            )  # fmt: skip
        if self._wide is not None:
            self._wide.matmul(x.index_select(1, self._high), y, add or self._narrow > 0)

    def restore(self) -> formats.TwoFour:
        """The tile that this was made of."""
        codes = torch.zeros(self.r, self.c, dtype=torch.uint8, device=self._codes.device)
        codes[:, self._low] = self._low_codes().to(torch.uint8)
        if self._wide is not None:
            codes[:, self._high] = self._wide.codes()
        return replace(self._given, codes=codes, zeros=self._grids & 3, scale_codes=self._grids >> 2)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The tile's weights [r, c]: exact in float32, rounded to nearest even in any other dtype."""
        dense = torch.empty(self.r, self.c, device=self._codes.device)
        if self._narrow:
            scales = replace(self._given, scale_codes=self._grids >> 2, codes=self._grids).scales()
            zeros = (self._grids & 3).index_select(1, self._group)
            weights = (self._low_codes() - zeros.int()) * scales.index_select(1, self._group)
            dense.index_copy_(1, self._low, weights)
        if self._wide is not None:
            dense.index_copy_(1, self._high, self._wide.dequantize())
        return dense.to(dtype)

    def _low_codes(self) -> Tensor:
        """Codes of the 2-bit channels, int32 [r, narrow]."""
        shifts = 2 * torch.arange(formats.BLOCK, dtype=torch.int32, device=self._codes.device)
        return (self._codes[..., None] >> shifts & 3).flatten(1)[:, : self._narrow]


@triton.jit
def _sparse(x, values, columns, row_ptr, y, tokens, c, out, TOKENS: tl.constexpr, AT_ONCE: tl.constexpr):
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
    to = y + m.to(tl.int64) * out + row
    before = tl.load(to, mask=m < tokens, other=0.0).to(tl.float32)
    tl.store(to, rounded(before + tl.sum(total, 1), y.dtype.element_ty), mask=m < tokens)


class Sparse:
    """Weights that are added to the tiles', compressed by rows."""

    def __init__(self, sparse: formats.Sparse) -> None:
        self._values, self._row_ptr = sparse.values, sparse.row_ptr
        self._columns = sparse.columns.to(torch.int32)

    def add(self, x: Tensor, y: Tensor) -> None:
        """`y [m, out] += x [m, in] @ W.T`, one program for a row and up to 16 tokens."""
        tokens = min(16, triton.next_power_of_2(len(x)))
        _sparse[(len(self._row_ptr) - 1, triton.cdiv(len(x), tokens))](
            x, self._values, self._columns, self._row_ptr, y, len(x), x.shape[1], y.shape[1], TOKENS=tokens,
            AT_ONCE=64, num_warps=1,
        )  # fmt: skip
