"""Format "two_four": 2-bit groups whose scales are themselves rounded, and 4-bit channels in the same launch.

A word has the codes of one block of 16 channels of a row, so a lane finds one scale, or two, for all of a word: it is
made of the group's byte (zero point and scale code) and the grid of 16 rows while the words are on their way. The 4-bit
channels follow, eight to a word; a row has one scale and zero point for all of them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from anybit import formats
from anybit.formats.two_four import BLOCK
from anybit.kernels.gpu import split
from anybit.kernels.gpu.arithmetic import dot, rounded
from anybit.kernels.gpu.group_int import one_plus, place_product, store, store_tile
from anybit.kernels.gpu.split import Tiling, share
from anybit.kernels.gpu.words import as_int32

WORDS = 32  # that a step takes


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


@triton.jit
def _word(codes, n, w, r, words):
    """Words w of rows n, uint32 [BLOCK, WORDS]."""
    there = (n < r)[:, None] & (w < words)[None, :]
    at = codes + (n * words)[:, None] + w[None, :]
    return tl.load(at, mask=there, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _sums(
    total, word, scale, offset, x, m, tokens, c, first, w, words, FROM: tl.constexpr, TO: tl.constexpr,
    BITS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """`total` and what fields FROM to TO of words w add; field i of all words meets inputs from first + i * words."""
    part, met = tl.zeros(word.shape, tl.float32), tl.zeros(w.shape, tl.float32)
    for k in tl.static_range(TO - FROM):
        at = first + (FROM + k) * words + w
        weight = one_plus(word, BITS * (FROM + k), BITS)
        if TOKENS == 1:
            one = tl.load(x + at, mask=w < words, other=0.0).to(tl.float32)
            part += weight * one[None, :]
            met += one
        else:
            inputs = x + (m.to(tl.int64) * c)[:, None] + at[None, :]
            some = tl.load(inputs, mask=(m < tokens)[:, None] & (w < words)[None, :], other=0.0)
            total = dot(rounded((weight + offset) * scale, some.dtype), tl.trans(some), total)
    if TOKENS == 1:
        total += scale * (part + offset * met[None, :])
    return total


@triton.jit(do_not_specialize=["tokens", "groups"])
def _product(
    x,  # [tokens, 16 * words + 8 * wide_words]: the ith channel of all words, then the next; the same of wide words
    codes,  # int32 [r, words]
    grids,  # uint8 [r, groups]: zero | scale code << 2
    scale_scales,  # float16 [ceil(r / 16), groups]
    scale_zeros,  # uint8 [ceil(r / 16), groups]
    wide_codes,  # int32 [r, wide_words]
    wide_scales,  # float16 [r]
    wide_zeros,  # uint8 [r]
    y,  # [parts, tokens, out]
    tokens,
    r,
    words,
    wide_words,
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
    c, mask = 16 * words + 8 * wide_words, n < r
    total = tl.zeros((BLOCK, WORDS) if TOKENS == 1 else (BLOCK, TOKENS), tl.float32)
    narrow = tl.cdiv(words, WORDS)
    start, stop = share(narrow + tl.cdiv(wide_words, WORDS))
    for s in range(start, tl.minimum(stop, narrow)):
        w = s * WORDS + tl.arange(0, WORDS)
        there, word = mask[:, None] & (w < words)[None, :], _word(codes, n, w, r, words)
        for half in tl.static_range(HALVES):
            scale, offset = _second_order(grids, scale_scales, scale_zeros, n, w, there, groups, half, HALVES)
            total = _sums(
                total, word, scale, offset, x, m, tokens, c, 0, w, words, half * (16 // HALVES),
                (half + 1) * (16 // HALVES), 2, TOKENS,
            )  # fmt: skip
    scale = tl.load(wide_scales + n, mask=mask, other=0.0).to(tl.float32)[:, None] * 16.0
    offset = -1.0 - tl.load(wide_zeros + n, mask=mask, other=0).to(tl.float32)[:, None] * 0.0625
    for s in range(tl.maximum(start, narrow), stop):
        w = (s - narrow) * WORDS + tl.arange(0, WORDS)
        word = _word(wide_codes, n, w, r, wide_words)
        total = _sums(
            total, word, scale, offset, x, m, tokens, c, 16 * words, w, wide_words, 0, 8, 4, TOKENS
        )  # fmt: skip
    if TOKENS == 1:
        store(tl.sum(total, 1), y, codes, n, mask, out, False, ADD)
    else:
        store_tile(tl.trans(total), y, codes, m, n, tokens, r, out, False, ADD)


def _dense(x: Tensor) -> bool:
    """Whether inputs meet the dense matrix: several of a type that tensor cores do not take.

    All others meet weights as they are decoded. The dense matrix is made by plain PyTorch, which takes longer.
    """
    return len(x) > 1 and x.dtype == torch.float32


def _tiling(m: int) -> Tiling:
    return Tiling(1, 32, 2) if m == 1 else Tiling(16 if m <= 16 else 64, 64, 4)


class TwoFourKernel:
    """A tile of 2- and 4-bit blocks in the kernels' order."""

    rows = None

    def __init__(self, tile: formats.TwoFour) -> None:
        self.r, self.c = tile.codes.shape
        self._halves = BLOCK // tile.group_size
        self._low, self._high = formats.TwoFour.channels(tile.wide, self.c)
        self._codes, order = _in_words(tile.codes, self._low, 2)
        self._wide_codes, wide_order = _in_words(tile.codes, self._high, 4)
        self._order = torch.cat([order, wide_order])
        self._grids = (tile.zeros | tile.scale_codes << 2).contiguous()
        self._group = formats.TwoFour.group_of(len(self._low), tile.group_size).to(tile.codes.device)
        nothing = tile.codes.new_empty(self.r, 0)
        self._given = replace(tile, codes=nothing, zeros=nothing, scale_codes=nothing)  # what is small

    def splits(self, x: Tensor) -> int:
        """See `group_int.GroupIntKernel.splits`."""
        if _dense(x):
            return 1
        tiling = _tiling(len(x))
        steps = sum(-(-codes.shape[1] // WORDS) for codes in (self._codes, self._wide_codes))
        return split.splits(tiling.warps_of(self.r, len(x)), tiling.each, steps, x.device)

    def matmul(self, x: Tensor, y: Tensor, add: bool = False) -> None:
        """`y = x @ W.T`, or `+=`; see `group_int.GroupIntKernel.matmul`."""
        if _dense(x):
            return place_product(x @ self.dequantize(x.dtype).T, y, None, add)
        given, tiling = self._given, _tiling(len(x))
        ordered = torch.nn.functional.pad(x, (0, 1)) if len(self._order) > self.c else x
        _product[tiling.grid(self.r, len(x), y)](
            ordered.index_select(1, self._order), self._codes, self._grids, given.scale_scales, given.scale_zeros,
            self._wide_codes, given.wide_scales, given.wide_zeros, y, len(x), self.r, self._codes.shape[1],
            self._wide_codes.shape[1], self._grids.shape[1], y.shape[-1], HALVES=self._halves, ADD=add,
            TOKENS=tiling.tokens, WORDS=WORDS, BLOCK=tiling.block, num_warps=tiling.warps, num_stages=1,
        )  # fmt: skip

    def restore(self) -> formats.TwoFour:
        """The tile that this was made of."""
        codes = torch.zeros(self.r, self.c, dtype=torch.uint8, device=self._codes.device)
        codes[:, self._low] = self._low_codes().to(torch.uint8)
        codes[:, self._high] = self._high_codes().to(torch.uint8)
        return replace(self._given, codes=codes, zeros=self._grids & 3, scale_codes=self._grids >> 2)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The tile's weights [r, c]: exact in float32, rounded to nearest even in any other dtype."""
        dense = torch.empty(self.r, self.c, device=self._codes.device)
        scales = replace(self._given, scale_codes=self._grids >> 2, codes=self._grids).scales()
        zeros = (self._grids & 3).index_select(1, self._group)
        weights = (self._low_codes() - zeros.int()) * scales.index_select(1, self._group)
        dense.index_copy_(1, self._low, weights)
        wide = self._high_codes() - self._given.wide_zeros.int()[:, None]
        dense.index_copy_(1, self._high, wide * self._given.wide_scales.float()[:, None])
        return dense.to(dtype)

    def _low_codes(self) -> Tensor:
        """Codes of the 2-bit channels, int32 [r, narrow]."""
        return _of_words(self._codes, len(self._low), 2)

    def _high_codes(self) -> Tensor:
        """Codes of the 4-bit channels, int32 [r, wide]."""
        return _of_words(self._wide_codes, len(self._high), 4)


def _in_words(codes: Tensor, channels: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 [r, c] of some channels [n] as words int32 [r, ceil(n / fields)], and whose inputs their fields meet.

    The inputs: int64 [fields * words], field 0 of all words first; those of padding are c, a column of zeros.
    """
    r, c = codes.shape
    fields = 32 // bits
    words = -(-len(channels) // fields)
    padded = codes.new_zeros(r, words * fields)
    padded[:, : len(channels)] = codes[:, channels]
    shifts = bits * torch.arange(fields, device=codes.device)
    order = torch.full((words * fields,), c, device=codes.device)
    order[: len(channels)] = channels
    packed = (padded.view(r, words, fields).long() << shifts).sum(-1)
    return as_int32(packed), order.view(words, fields).T.flatten()


def _of_words(words: Tensor, n: int, bits: int) -> Tensor:
    """The first n codes of every row, int32 [r, n]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & 2**bits - 1).flatten(1)[:, :n]
