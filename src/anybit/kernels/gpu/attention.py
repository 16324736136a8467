"""Paged attention of one query token per sequence over a KV-cache of 4, 8 or 16 bits (Atom, arXiv:2310.19102, 4.4).

A program takes one head of the keys and values, the query heads that share it, and a part of the sequence's tokens
(flash-decoding); a second kernel merges the parts in a fixed order. Keys and values are never dequantized: with codes
c, scale s and minimum m of a token,

    q . (m + s c) = m sum(q) + s (q . c)          sum_n p_n (m_n + s_n c_n) = sum_n p_n m_n + sum_n (p_n s_n) c_n

so the matrix units multiply codes, which are exact in float16. Tokens are the rows of a product and query heads its
columns, of which there are at least 8: fewer are padded.

A row of codes is read as 16-bit words, `PER = 16 / bits` codes each, for which transposed loads exist. Code k of word j
is dimension `PER j + k`: a product for each k, with its own part of the query or the result, undoes the packing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from anybit.errors import InputError
from anybit.formats.bits import FP16_MAX
from anybit.formats.states import QuantizedStates

BITS = (4, 8, 16)
MAX_D = 256
MAX_SPLITS = 128
FLOATS = (torch.float16, torch.bfloat16)
LOG2_E = 1.4426950408889634
LEAST_COLUMNS = 8  # of a product of the matrix units
LEAST_DEPTH = 16
SUMS_PER_WARP = 1024
PROGRAMS = 4  # per multiprocessor, that a sequence is split for
NO_WINDOW = 1 << 30
FP16_LIMIT = tl.constexpr(FP16_MAX)


@dataclass(frozen=True)
class PagedCache:
    """Keys and values of one layer, in pages of `page_size` tokens that sequences own in any order.

    A head's tokens of a page lie side by side, so that a program reads runs of `page_size` rows. Rows hold the bytes of
    `QuantizedStates`, padded to 16-bit words; at 16 bits the states themselves.
    """

    bits: int  # 4, 8 or 16
    d: int  # dimension of a head
    keys: Tensor  # int16 [pages, kv_heads, page_size, words]; at 16 bits float16 or bfloat16 [..., d]
    values: Tensor  # like keys
    key_grid: Tensor | None  # float16 [pages, kv_heads, page_size, 2], scale and minimum; None at 16 bits
    value_grid: Tensor | None

    @staticmethod
    def empty(
        pages: int,
        kv_heads: int,
        d: int,
        bits: int,
        page_size: int = 16,
        dtype: torch.dtype = torch.float16,  # of the states at 16 bits
        device: torch.device | str = "cuda",
    ) -> PagedCache:
        """A cache of pages with arbitrary contents.

        Raises:
            InputError: a width, dimension, page size or dtype that there is not.
        """
        if bits not in BITS:
            raise InputError(f"a paged cache of {bits} bits: expected one of {', '.join(map(str, BITS))}")
        if not 1 <= d <= MAX_D:
            raise InputError(f"heads of {d} dimensions: expected 1 to {MAX_D}")
        if page_size < 1 or page_size & (page_size - 1):
            raise InputError(f"pages of {page_size} tokens: expected a power of two")
        if bits == 16 and dtype not in FLOATS:
            raise InputError(f"a cache of {dtype}: expected float16 or bfloat16")
        rows = (pages, kv_heads, page_size)
        if bits == 16:
            keys, values = (torch.empty(*rows, d, dtype=dtype, device=device) for _ in range(2))
            return PagedCache(bits, d, keys, values, None, None)
        words = -(-d * bits // 16)
        keys, values = (torch.empty(*rows, words, dtype=torch.int16, device=device) for _ in range(2))
        grids = (torch.empty(*rows, 2, dtype=torch.float16, device=device) for _ in range(2))
        return PagedCache(bits, d, keys, values, *grids)

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def page_size(self) -> int:
        return self.keys.shape[2]

    def read(self, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `length` tokens in `pages` [n], float32 [kv_heads, length, d]."""
        keys = self._read(self.keys, self.key_grid, pages, length)
        return keys, self._read(self.values, self.value_grid, pages, length)

    def _read(self, rows: Tensor, grid: Tensor | None, pages: Tensor, length: int) -> Tensor:
        def tokens(part: Tensor) -> Tensor:
            return part[pages.long()].transpose(0, 1).flatten(1, 2)[:, :length]

        if grid is None:
            return tokens(rows).float()
        packed = tokens(rows).contiguous().view(torch.uint8)[..., : -(-self.d * self.bits // 8)]
        scale, minimum = tokens(grid).unbind(-1)
        states = QuantizedStates(self.bits, self.d, torch.float32, packed[None], scale[None], minimum[None])
        return states.dequantize()[0]


@dataclass(frozen=True)
class Tile:
    """What a program works with at a time."""

    tokens: int  # a power of two, 16 or more
    warps: int
    stages: int = 5  # of which two load page numbers ahead of the pages

    @staticmethod
    def fitting(d: int, columns: int) -> Tile:
        """One warp, which need not exchange what it reduces, while its sums [d, columns] fit into its registers."""
        warps = min(8, max(1, triton.next_power_of_2(d) * columns // SUMS_PER_WARP))
        tokens = max(32, min(64, 16 * warps))
        return Tile(tokens, warps, 5 if tokens * d <= 8192 else 4)  # of shared memory too


@triton.jit
def _round(x):
    """Nearest whole number, half to even, of float32 below 2**22 in magnitude."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _states(states_ptr, head, word, k: tl.constexpr, PER: tl.constexpr, D: tl.constexpr):
    """Dimension `PER word + k` of every head, float32 [heads, words]; the last one again beyond."""
    d = tl.minimum(word * PER + k, D - 1)
    x = tl.load(states_ptr + head[:, None] * D + d[None, :]).to(tl.float32)
    return tl.where(x == x, tl.clamp(x, -FP16_LIMIT, FP16_LIMIT), x)


@triton.jit
def _put(
    states_ptr, rows_ptr, grid_ptr, row, head, kept, D: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr
):
    """Quantize the heads of one token as `QuantizedStates.of` does, into one row each."""
    PER: tl.constexpr = 16 // BITS
    WORDS: tl.constexpr = (D + PER - 1) // PER
    top: tl.constexpr = 2**BITS - 1
    word = tl.arange(0, WIDTH)
    to = rows_ptr + row[:, None] * WORDS + word[None, :]
    to_mask = kept[:, None] & (word < WORDS)[None, :]
    if BITS == 16:
        d = tl.minimum(word, D - 1)
        tl.store(to, tl.load(states_ptr + head[:, None] * D + d[None, :]), mask=to_mask)
    else:
        x = _states(states_ptr, head, word, 0, PER, D)
        low, high, wrong = tl.min(x, 1), tl.max(x, 1), tl.max((x != x).to(tl.int32), 1)
        for k in tl.static_range(1, PER):
            x = _states(states_ptr, head, word, k, PER, D)
            low, high = tl.minimum(low, tl.min(x, 1)), tl.maximum(high, tl.max(x, 1))
            wrong = tl.maximum(wrong, tl.max((x != x).to(tl.int32), 1))
        low = tl.where(wrong > 0, float("nan"), low)
        minimum = low.to(tl.float16)
        spread = tl.maximum(high - minimum.to(tl.float32), 0.0)
        scale = tl.div_rn(spread, top * 1.0).to(tl.float16)
        short = scale.to(tl.float32) * top < spread
        above = (scale.to(tl.int16, bitcast=True) + 1).to(tl.float16, bitcast=True)  # the next float16
        scale = tl.where(short, above, scale)
        step = tl.where(scale == 0, 1.0, scale.to(tl.float32))
        words = tl.zeros([head.shape[0], WIDTH], tl.int32)
        for k in tl.static_range(PER):
            x = _states(states_ptr, head, word, k, PER, D)
            x = tl.div_rn(x - minimum.to(tl.float32)[:, None], tl.broadcast_to(step[:, None], x.shape))
            x = tl.where(x == x, tl.clamp(x, 0.0, top * 1.0), 0.0)
            code = tl.where((word * PER + k < D)[None, :], _round(x).to(tl.int32), 0)
            words |= code << (k * BITS)
        tl.store(to, words.to(tl.int16), mask=to_mask)
        tl.store(grid_ptr + 2 * row, scale, mask=kept)
        tl.store(grid_ptr + 2 * row + 1, minimum, mask=kept)


@triton.jit
def _write(
    keys_in, values_in, slots, keys, values, key_grid, value_grid,
    HEADS: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One token's keys (second grid axis 0) or values (1)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    heads = tl.arange(0, ROWS)
    kept = heads < tl.where(slot >= 0, HEADS, 0)
    slot = tl.maximum(slot, 0)
    row = (slot // PAGE * HEADS + heads) * PAGE + slot % PAGE
    head = token * HEADS + tl.minimum(heads, HEADS - 1)
    if tl.program_id(1) == 0:
        _put(keys_in, keys, key_grid, row, head, kept, D, BITS, WIDTH)
    else:
        _put(values_in, values, value_grid, row, head, kept, D, BITS, WIDTH)


@triton.jit
def _codes(words, k: tl.constexpr, BITS: tl.constexpr, PTX: tl.constexpr):
    """Codes k of 16-bit words as float16. `0x6400 | code` is 1024 + code; PTX does two words at a time."""
    shifted: tl.constexpr = "shr.b32 t, $1, 8;" if k * BITS >= 8 else "mov.b32 t, $1;"
    mask: tl.constexpr = "0x000F000F" if BITS == 4 else "0x00FF00FF"
    if BITS == 16:
        return words if PTX else words.to(tl.float32)  # the interpreter cannot multiply bfloat16
    elif not PTX:
        return (((words >> (k * BITS)) & (2**BITS - 1)) | 0x6400).to(tl.float16, bitcast=True) - 1024.0
    elif BITS == 4 and k % 2 == 1:  # in place, as 1024 + 16 code, over 16: one shift for four codes
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, m, n; mov.b32 m, 0x64006400;"
            + shifted
            + "lop3.b32 t, t, 0x00F000F0, m, 0xEA; mov.b32 m, 0x2C002C00; mov.b32 n, 0xD400D400;"
            "fma.rn.f16x2 $0, t, m, n; }",
            "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, m; mov.b32 m, 0x64006400;"
            + shifted
            + "lop3.b32 t, t, "
            + mask
            + ", m, 0xEA; sub.rn.f16x2 $0, t, m; }",
            "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _grid(pair):
    """Scale and minimum, float32, of 32 bits that hold both."""
    scale = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    minimum = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return scale.to(tl.float32), minimum.to(tl.float32)


@triton.jit
def _query(at, k: tl.constexpr, mask, word, PER: tl.constexpr, D: tl.constexpr):
    """Dimensions `PER word + k` of the query heads, [words, heads]; 0 beyond."""
    return tl.load(at + k, mask=mask & (word * PER + k < D)[:, None], other=0)


@triton.jit
def _split_query(at, mask, word, PER: tl.constexpr, D: tl.constexpr):
    """Parts 0 to 3 of the query heads as float16, the sum of each head, and the power of two that all are multiples of.

    Divided by it they are at most 2, where float16 holds what matters of a bfloat16.
    """
    q0 = _query(at, 0, mask, word, PER, D).to(tl.float32)
    q1 = _query(at, 1, mask, word, PER, D).to(tl.float32)
    q2, q3 = q0, q1
    total = tl.sum(q0, 0) + tl.sum(q1, 0)
    if PER > 2:
        q2 = _query(at, 2, mask, word, PER, D).to(tl.float32)
        q3 = _query(at, 3, mask, word, PER, D).to(tl.float32)
        total += tl.sum(q2, 0) + tl.sum(q3, 0)
    largest = tl.maximum(tl.maximum(tl.abs(q0), tl.abs(q1)), tl.maximum(tl.abs(q2), tl.abs(q3)))
    exponent = tl.max(tl.max(largest, 0), 0).to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.maximum(exponent, 0x00800000)
    down = (0x7F000000 - exponent).to(tl.float32, bitcast=True)  # one over the power
    q0, q1 = (q0 * down).to(tl.float16), (q1 * down).to(tl.float16)
    q2, q3 = (q2 * down).to(tl.float16), (q3 * down).to(tl.float16)
    return q0, q1, q2, q3, total * down, exponent.to(tl.float32, bitcast=True)


@triton.jit
def _attend(
    query, keys, values, key_grid, value_grid, tables, lengths, out, stats, max_pages, splits, scale, window,
    KV_HEADS: tl.constexpr, RATIO: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, PAGE: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Attention of one KV head's query heads to one part of a sequence's tokens.

    With PARTS, `out` float32 [batch, heads, splits, D] is not yet divided by the sum of weights, and `stats`
    [batch, heads, splits, 2] holds the largest score, in powers of two, and that sum. `scale` includes log2(e).
    """
    PER: tl.constexpr = 16 // BITS
    WORDS: tl.constexpr = (D + PER - 1) // PER
    split, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.minimum(tl.load(lengths + sequence), max_pages * PAGE)
    first = tl.maximum(length - window, 0)
    share = tl.cdiv(tl.cdiv(length - first, BLOCK), splits) * BLOCK
    begin = first + split * share
    end = tl.minimum(begin + share, length)

    column = tl.arange(0, GROUP)
    word = tl.arange(0, WIDTH)
    token_in_block = tl.arange(0, BLOCK)
    head = (sequence * KV_HEADS + kv_head) * RATIO + column
    real = (column < RATIO)[None, :]
    q_at = query + head[None, :] * D + word[:, None] * PER
    if BITS == 16:
        q0 = _codes(_query(q_at, 0, real, word, PER, D), 0, BITS, PTX)
        q1, q2, q3 = q0, q0, q0
    else:
        q0, q1, q2, q3, q_sum, power = _split_query(q_at, real, word, PER, D)
        scale *= power

    most = tl.full([GROUP], -float("inf"), tl.float32)  # score so far
    total = tl.zeros([GROUP], tl.float32)  # of weights
    base = tl.zeros([GROUP], tl.float32)  # weights times minima
    unit = 2.0**-24  # largest scale of values so far: weights times scales are in its multiples, as float16
    sum0 = tl.zeros([WIDTH, GROUP], tl.float32)
    sum1, sum2, sum3 = sum0, sum0, sum0
    for start in range(begin, end, BLOCK):
        token = start + token_in_block
        kept = token < end
        page = tl.load(tables + sequence * max_pages + token // PAGE, mask=kept, other=0)
        row = (page.to(tl.int64) * KV_HEADS + kv_head) * PAGE + token % PAGE
        key_mask, value_mask = kept[:, None], kept[None, :]
        if WORDS != WIDTH:
            key_mask = key_mask & (word < WORDS)[None, :]
            value_mask = value_mask & (word < WORDS)[:, None]
        key = tl.load(keys + row[:, None] * WORDS + word[None, :], mask=key_mask, other=0)
        value = tl.load(values + row[None, :] * WORDS + word[:, None], mask=value_mask, other=0)

        score = tl.dot(_codes(key, 0, BITS, PTX), q0)
        if PER > 1:
            score = tl.dot(_codes(key, 1, BITS, PTX), q1, score)
        if PER > 2:
            score = tl.dot(_codes(key, 2, BITS, PTX), q2, score)
            score = tl.dot(_codes(key, 3, BITS, PTX), q3, score)
        if BITS < 16:
            key_scale, key_minimum = _grid(tl.load(key_grid + row, mask=kept, other=0))
            score = score * (key_scale * scale)[:, None] + (key_minimum * scale)[:, None] * q_sum[None, :]
        else:
            score *= scale
        score = tl.where(kept[:, None], score, -float("inf"))

        new_most = tl.maximum(most, tl.max(score, 0))
        weight = tl.exp2(score - new_most[None, :])
        shrink = tl.exp2(most - new_most)
        most = new_most
        total = total * shrink + tl.sum(weight, 0)
        if BITS < 16:
            value_scale, value_minimum = _grid(tl.load(value_grid + row, mask=kept, other=0))
            base = base * shrink + tl.sum(weight * value_minimum[:, None], 0)
            new_unit = tl.maximum(unit, tl.max(value_scale, 0))
            shrink *= unit / new_unit
            unit = new_unit
            weight = (weight * (value_scale / unit)[:, None]).to(tl.float16)
        else:
            weight = weight.to(q0.dtype)
        sum0 = tl.dot(_codes(value, 0, BITS, PTX), weight, sum0 * shrink[None, :])
        if PER > 1:
            sum1 = tl.dot(_codes(value, 1, BITS, PTX), weight, sum1 * shrink[None, :])
        if PER > 2:
            sum2 = tl.dot(_codes(value, 2, BITS, PTX), weight, sum2 * shrink[None, :])
            sum3 = tl.dot(_codes(value, 3, BITS, PTX), weight, sum3 * shrink[None, :])

    if BITS == 16:
        unit = 1.0
    if PARTS:
        part = head * splits + split
        tl.store(stats + 2 * part, most, mask=column < RATIO)
        tl.store(stats + 2 * part + 1, total, mask=column < RATIO)
        share_of = tl.full([GROUP], 1.0, tl.float32)
    else:
        part = head
        share_of = 1.0 / tl.where(total == 0, 1.0, total)
    out_at = out + part[None, :] * D + word[:, None] * PER
    _store(out_at, 0, (sum0 * unit + base[None, :]) * share_of[None, :], real, word, PER, D)
    if PER > 1:
        _store(out_at, 1, (sum1 * unit + base[None, :]) * share_of[None, :], real, word, PER, D)
    if PER > 2:
        _store(out_at, 2, (sum2 * unit + base[None, :]) * share_of[None, :], real, word, PER, D)
        _store(out_at, 3, (sum3 * unit + base[None, :]) * share_of[None, :], real, word, PER, D)


@triton.jit
def _store(at, k: tl.constexpr, x, mask, word, PER: tl.constexpr, D: tl.constexpr):
    """Inverse of `_query`."""
    tl.store(at + k, x.to(at.dtype.element_ty), mask=mask & (word * PER + k < D)[:, None])


@triton.jit
def _merge(parts, stats, out, splits, D: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr):
    """One head's result from those of its parts, of which those without tokens weigh nothing."""
    head = tl.program_id(0).to(tl.int64)
    split, d = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    at = head * splits + split
    most = tl.load(stats + 2 * at, mask=split < splits, other=-float("inf"))
    total = tl.load(stats + 2 * at + 1, mask=split < splits, other=0.0)
    filled = most != -float("inf")
    weight = tl.exp2(most - tl.maximum(tl.max(most, 0), -3e38))
    mask = (filled & (split < splits))[:, None] & (d < D)[None, :]
    x = tl.load(parts + at[:, None] * D + d[None, :], mask=mask, other=0.0)
    total = tl.sum(total * weight, 0)
    x = tl.sum(x * weight[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + head * D + d, x.to(out.dtype.element_ty), mask=d < D)


def write(cache: PagedCache, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Put new tokens into a cache, quantized as `QuantizedStates.of` does on a CPU.

    Args:
        keys: float16, bfloat16 or float32 [tokens, kv_heads, d], after their rotary embedding; at 16 bits in the
            cache's dtype.
        values: like keys.
        slots: int32 or int64 [tokens], `page * page_size + place in the page`, all different; below 0: not stored.
            That they are within the cache is not checked.

    Raises:
        InputError: other shapes, dtypes or devices.
    """
    _check_device("keys", keys)
    shape = (len(slots), cache.kv_heads, cache.d)
    allowed = (cache.keys.dtype,) if cache.bits == 16 else (*FLOATS, torch.float32)
    for name, states in (("keys", keys), ("values", values)):
        _check(name, states, shape, allowed, cache.keys.device)
    _check("slots", slots, (shape[0],), (torch.int32, torch.int64), cache.keys.device)
    if keys.dtype != values.dtype:
        raise InputError(f"keys are {keys.dtype} and values {values.dtype}: expected the same")
    if len(slots) == 0:
        return
    per = 16 // cache.bits
    _write[len(slots), 2](
        keys.contiguous(), values.contiguous(), slots.contiguous(),
        cache.keys, cache.values, cache.key_grid, cache.value_grid,
        HEADS=cache.kv_heads, D=cache.d, BITS=cache.bits, PAGE=cache.page_size,
        ROWS=triton.next_power_of_2(cache.kv_heads), WIDTH=triton.next_power_of_2(-(-cache.d // per)),
        num_warps=4,
    )  # fmt: skip


def paged_attention(
    query: Tensor,
    cache: PagedCache,
    block_tables: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    splits: int | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Attention of one query token per sequence to all its tokens, itself included, in the cache.

    Scores, softmax and sums are float32; weights are rounded to float16 (to the cache's dtype at 16 bits). The number
    of parts that a sequence is read in depends on the batch, so sums may differ in their last bits between batches;
    the same call gives the same bits.

    Args:
        query: float16 or bfloat16 [batch, heads, d], heads a multiple of the cache's; at 16 bits in its dtype.
        block_tables: int32 [batch, max_pages], the pages of each sequence in order; those beyond its length are not
            read. That pages are within the cache is not checked.
        lengths: int32 [batch], tokens of each sequence, at most `max_pages * page_size`; 0 gives zeros.
        scale: that scores are multiplied by, above 0, usually `d ** -0.5`.
        window: attend to the last so many tokens only.
        splits: parts that a sequence is read in. Default: what fills the GPU.
        tile: what a program works with. Default: what fits.

    Returns:
        [batch, heads, d] in the dtype of the query.

    Raises:
        InputError: other shapes, dtypes, devices or options.
    """
    _check_device("query", query)
    device = query.device
    allowed = (cache.keys.dtype,) if cache.bits == 16 else FLOATS
    if query.dim() != 3 or query.shape[1] % cache.kv_heads or not query.shape[1]:
        raise InputError(
            f"query {list(query.shape)}: expected [batch, heads, {cache.d}], heads a multiple of {cache.kv_heads}"
        )
    batch, heads = query.shape[:2]
    _check("query", query, (batch, heads, cache.d), allowed, cache.keys.device)
    if block_tables.dim() != 2:
        raise InputError(f"block_tables {list(block_tables.shape)}: expected [batch, max_pages]")
    _check("block_tables", block_tables, (batch, block_tables.shape[1]), (torch.int32,), device)
    _check("lengths", lengths, (batch,), (torch.int32,), device)
    if not scale > 0:
        raise InputError(f"scale {scale}: expected a number above 0")
    if window is not None and window < 1:
        raise InputError(f"window {window}: expected at least 1")
    if splits is not None and not 1 <= splits <= MAX_SPLITS:
        raise InputError(f"splits {splits}: expected 1 to {MAX_SPLITS}")
    out = torch.empty(batch, heads, cache.d, dtype=query.dtype, device=device)
    if batch == 0:
        return out
    ratio, per, max_pages = heads // cache.kv_heads, 16 // cache.bits, block_tables.shape[1]
    columns = max(LEAST_COLUMNS, triton.next_power_of_2(ratio))
    tile = tile or Tile.fitting(cache.d, columns)
    longest = min(max_pages * cache.page_size, window or NO_WINDOW)
    if splits is None:
        splits = _splits(batch * cache.kv_heads, -(-longest // tile.tokens), device)
    made, stats = out, out
    if splits > 1:
        made = torch.empty(batch, heads, splits, cache.d, dtype=torch.float32, device=device)
        stats = torch.empty(batch, heads, splits, 2, dtype=torch.float32, device=device)
    grids = [grid if grid is None else grid.view(torch.int32) for grid in (cache.key_grid, cache.value_grid)]
    _attend[splits, cache.kv_heads, batch](
        query.contiguous(), cache.keys, cache.values, *grids, block_tables.contiguous(), lengths, made, stats,
        max_pages, splits, scale * LOG2_E, window or NO_WINDOW,
        KV_HEADS=cache.kv_heads, RATIO=ratio, D=cache.d, BITS=cache.bits, PAGE=cache.page_size,
        GROUP=columns, BLOCK=tile.tokens,
        WIDTH=max(LEAST_DEPTH, triton.next_power_of_2(-(-cache.d // per))), PARTS=splits > 1, PTX=_ptx(),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        _merge[(batch * heads,)](
            made, stats, out, splits,
            D=cache.d, SPLITS=triton.next_power_of_2(splits), WIDTH=triton.next_power_of_2(cache.d), num_warps=4,
        )  # fmt: skip
    return out


def reference(
    query: Tensor,
    cache: PagedCache,
    block_tables: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """`paged_attention` in plain PyTorch, sequence by sequence, in float32."""
    out = torch.zeros_like(query)
    for i, length in enumerate(lengths.tolist()):
        keys, values = cache.read(block_tables[i, : -(-length // cache.page_size)], length)
        keys, values = (x[:, max(0, length - (window or length)) :] for x in (keys, values))
        grouped = query[i].float().view(cache.kv_heads, -1, cache.d)
        weights = (grouped @ keys.transpose(1, 2) * scale).softmax(-1)
        out[i] = (weights @ values).flatten(0, 1).to(query.dtype)
    return out


def _splits(programs: int, blocks: int, device: torch.device) -> int:
    """A power of two, so that few kernels are compiled: parts of at most `blocks` blocks that fill the device."""
    units = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    wanted = min(PROGRAMS * units // programs, blocks, MAX_SPLITS)
    return 1 << max(0, wanted.bit_length() - 1)


def _ptx() -> bool:
    """Whether kernels are compiled for an NVIDIA GPU; the interpreter has no assembler."""
    return isinstance(_attend, triton.JITFunction) and torch.version.cuda is not None


def _check_device(name: str, tensor: Tensor) -> None:
    if tensor.device.type != "cuda" and isinstance(_attend, triton.JITFunction):
        raise InputError(
            f"{name} on {tensor.device}: expected a CUDA device (or TRITON_INTERPRET=1 before Triton is imported)"
        )


def _check(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    if tuple(tensor.shape) != shape:
        raise InputError(f"{name} {list(tensor.shape)}: expected {list(shape)}")
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InputError(f"{name} of {str(tensor.dtype).removeprefix('torch.')}: expected {names}")
    if tensor.device != device:
        raise InputError(f"{name} on {tensor.device}: expected {device}, where the rest is")
