"""Formats "codebook" and "nested": centroids looked up by codes, the tables in the first cache.

By rows, codes lie as bitplanes, so a width is made of its first planes. A chunk of 512 columns is LANES words of each
plane: lane l has the columns l, LANES + l, ... at bits 0, 1, ... Shifting and merging turns the planes of 32 codes into
words of eight 4-bit fields, of the low four planes and of the others; what a field of all lanes meets is 16 inputs side
by side.

By input channels, codes lie as with format "group int", one lane to a row, and the lanes of a warp are output rows:
they look up one channel's table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from anybit.kernels.gpu import split
from anybit.kernels.gpu.arithmetic import INTERPRETED, dot, rounded, side_by_side
from anybit.kernels.gpu.group_int import field, fused, load_words, place_product, store, store_tile
from anybit.kernels.gpu.split import Tiling, share
from anybit.kernels.gpu.words import LANES, as_int32, chunks_of, pack_words, unpack_words

FIELDS = 32  # codes of a lane


@triton.jit
def _plane(planes, starts, line, mask, P: tl.constexpr, BITS: tl.constexpr):
    """Words of the plane of bit P, 0 the least significant; 0 where the width has no such bit."""
    if P >= BITS:
        return tl.zeros(line.shape, tl.uint32)
    start = tl.load(starts + BITS - 1 - P)
    return tl.load(planes + start + line, mask=mask, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _nibbles(planes, starts, line, mask, FIRST: tl.constexpr, BITS: tl.constexpr):
    """Words r of 0 to 3 whose 4-bit field k has the bits FIRST to FIRST + 3 of the codes 4 k + r."""
    a = _plane(planes, starts, line, mask, FIRST, BITS)
    b = _plane(planes, starts, line, mask, FIRST + 1, BITS)
    c = _plane(planes, starts, line, mask, FIRST + 2, BITS)
    d = _plane(planes, starts, line, mask, FIRST + 3, BITS)
    even_low, odd_low = (a & 0x55555555) | ((b & 0x55555555) << 1), ((a >> 1) & 0x55555555) | (b & 0xAAAAAAAA)
    even_high, odd_high = (
        (c & 0x55555555) | ((d & 0x55555555) << 1),
        ((c >> 1) & 0x55555555) | (d & 0xAAAAAAAA),
    )
    return (
        (even_low & 0x33333333) | ((even_high & 0x33333333) << 2),
        (odd_low & 0x33333333) | ((odd_high & 0x33333333) << 2),
        ((even_low >> 2) & 0x33333333) | (even_high & 0xCCCCCCCC),
        ((odd_low >> 2) & 0x33333333) | (odd_high & 0xCCCCCCCC),
    )


def _look_up_ptx(parts: int, wide: bool) -> str:
    """PTX: the eight 4-bit codes of $8 to $0 to $7, float16 or as float32; tables of 8 float16 entries for each part.

    One instruction picks four bytes of eight by four codes, so low and high bytes of the entries are looked up apart
    and put together. Of two parts the codes' highest bits, as bytes of ones, choose.
    """
    low, high = ([f"${9 + 2 * parts * byte + i}" for i in range(2 * parts)] for byte in range(2))
    lines = [".reg .b32 w, s, m, p, q, l, h", ".reg .b16 x, y"]
    for first in (0, 4):
        lines += [f"shr.u32 w, $8, {4 * first}", "and.b32 s, w, 0x7777"]
        if parts == 2:
            lines += ["shr.u32 m, w, 3", "and.b32 m, m, 0x1111", "prmt.b32 m, 0xff00, 0, m"]
        for to, table in (("l", low), ("h", high)):
            if parts == 1:
                lines += [f"prmt.b32 {to}, {table[0]}, {table[1]}, s"]
            else:
                lines += [f"prmt.b32 p, {table[0]}, {table[1]}, s", f"prmt.b32 q, {table[2]}, {table[3]}, s"]
                lines += [f"lop3.b32 {to}, p, q, m, 0xd8"]
        for at, order in ((first, "0x5140"), (first + 2, "0x7362")):
            lines += [f"prmt.b32 p, l, h, {order}"]
            if wide:
                lines += ["mov.b32 {x, y}, p", f"cvt.f32.f16 ${at}, x", f"cvt.f32.f16 ${at + 1}, y"]
            else:
                lines += [f"mov.b32 {{${at}, ${at + 1}}}, p"]
    return "{ " + "; ".join(lines) + "; }"


LOOK_UP_8, LOOK_UP_16 = (tl.constexpr(_look_up_ptx(parts, True)) for parts in (1, 2))
LOOK_UP_8_HALF, LOOK_UP_16_HALF = (tl.constexpr(_look_up_ptx(parts, False)) for parts in (1, 2))
CHANNEL_CHUNKS = 16  # chunks of 32 channels that a step takes
MOST_PERMUTED = 4  # bits: of more, entries are loaded one by one
FUSED_LOADS = 16  # tokens that such entries are loaded anew for; more are multiplied with the dense matrix


def pack_entries(tables: Tensor) -> Tensor:
    """Tables float16 [n, entries], at most 16, as they are permuted: int32 [n, 8], or 4 where 8 entries are enough.

    The low bytes of all entries, four to a word, and then the high ones.
    """
    entries = 8 if tables.shape[1] <= 8 else 16
    padded = tables.new_zeros(len(tables), entries)
    padded[:, : tables.shape[1]] = tables
    return (
        padded.view(torch.uint8)
        .view(-1, entries, 2)
        .transpose(1, 2)
        .contiguous()
        .view(torch.int32)
        .flatten(1)
    )


@triton.jit
def _permuted(word, packed, n, r, kinds, BITS: tl.constexpr, SHARED: tl.constexpr, TYPE: tl.constexpr):
    """The entries of the eight 4-bit codes of each word, a tuple; float16 if TYPE is, else float32."""
    n = tl.minimum(n, r - 1)
    kind = tl.load(kinds + n).to(tl.int64) if SHARED else n
    a = packed + (kind * (4 if BITS <= 3 else 8))[:, None]
    given = (word, tl.load(a), tl.load(a + 1), tl.load(a + 2), tl.load(a + 3))
    if BITS > 3:
        given += (tl.load(a + 4), tl.load(a + 5), tl.load(a + 6), tl.load(a + 7))  # type: ignore[assignment]
    REST: tl.constexpr = ",r,r,r,r,r" if BITS <= 3 else ",r,r,r,r,r,r,r,r,r"
    if tl.float16 == TYPE:
        return tl.inline_asm_elementwise(
            LOOK_UP_8_HALF if BITS <= 3 else LOOK_UP_16_HALF, "=h,=h,=h,=h,=h,=h,=h,=h" + REST, given,
            dtype=(tl.float16,) * 8, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            LOOK_UP_8 if BITS <= 3 else LOOK_UP_16, "=f,=f,=f,=f,=f,=f,=f,=f" + REST, given,
            dtype=(tl.float32,) * 8, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _entry(table, low, high, k: tl.constexpr, BITS: tl.constexpr):
    """The entries float32 of the codes of field k, loaded from where each row's table begins."""
    code = (low >> 4 * k) & 15
    if BITS > 4:
        code |= ((high >> 4 * k) & 15) << 4
    return tl.load(table + code.to(tl.int32, bitcast=True)).to(tl.float32)


@triton.jit
def _eight(
    low, high, tables, packed, kinds, n, r, BITS: tl.constexpr, SHARED: tl.constexpr, PERMUTED: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """The entries of the codes of fields 0 to 7, a tuple: float32, or exactly in TYPE.

    Rows behind the last read its table.
    """
    if PERMUTED and not INTERPRETED:
        return _permuted(low, packed, n, r, kinds, BITS, SHARED, TYPE)
    else:
        n = tl.minimum(n, r - 1)
        kind = tl.load(kinds + n).to(tl.int64) if SHARED else n
        table = (tables + (kind << BITS))[:, None]
        return (
            _entry(table, low, high, 0, BITS), _entry(table, low, high, 1, BITS),
            _entry(table, low, high, 2, BITS), _entry(table, low, high, 3, BITS),
            _entry(table, low, high, 4, BITS), _entry(table, low, high, 5, BITS),
            _entry(table, low, high, 6, BITS), _entry(table, low, high, 7, BITS),
        )  # fmt: skip


@triton.jit(do_not_specialize=["chunks"])
def _row_gemv(
    x,  # [c]
    planes,  # int32, rows of [chunks, LANES] words
    starts,  # int64 [BITS]: where each plane begins, the most significant first
    tables,  # [kinds, 2**BITS]
    packed,  # int32 [kinds, words]: see `pack_entries`; used where PERMUTED
    kinds,  # uint8 [r]; used where SHARED
    scales,  # float32 [r]; used where SHARED
    rows,
    y,  # [parts, out]
    r,
    c,
    out,
    chunks,
    BITS: tl.constexpr,
    LANES: tl.constexpr,
    SHARED: tl.constexpr,  # tables are those of kinds of rows, times a scale; else each row has its own
    PERMUTED: tl.constexpr,  # entries are float16, few enough to be permuted
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    mask, lane = n < r, tl.arange(0, LANES)
    line = (n * (chunks * LANES))[:, None] + lane[None, :]
    total = tl.zeros((BLOCK, LANES), tl.float32)
    start, stop = share(chunks)
    for s in range(start, stop):
        low = _nibbles(planes, starts, line + s * LANES, mask[:, None], 0, BITS)
        high = low if BITS <= 4 else _nibbles(planes, starts, line + s * LANES, mask[:, None], 4, BITS)
        for q in tl.static_range(4):
            weight = _eight(low[q], high[q], tables, packed, kinds, n, r, BITS, SHARED, PERMUTED, tl.float32)
            for k in tl.static_range(8):
                column = (s * 32 + 4 * k + q) * LANES + lane
                one = tl.load(x + column, mask=column < c, other=0.0).to(tl.float32)
                total += weight[k] * one[None, :]
    values = tl.sum(total, 1)
    if SHARED:
        values *= tl.load(scales + n, mask=mask, other=0.0)
    store(values, y, rows, n, mask, out, ROWS, ADD)


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _row_gemm(
    x,  # [tokens, c]
    planes,
    starts,
    tables,
    packed,
    kinds,
    scales,
    rows,
    y,  # [parts, tokens, out]
    tokens,
    r,
    c,
    out,
    chunks,
    BITS: tl.constexpr,
    LANES: tl.constexpr,
    SHARED: tl.constexpr,
    PERMUTED: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    m = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    mask, lane = n < r, tl.arange(0, LANES)
    line = (n * (chunks * LANES))[:, None] + lane[None, :]
    inputs, k = x + (m.to(tl.int64) * c)[:, None], tl.arange(0, 8 * LANES)
    total = tl.zeros((BLOCK, TOKENS), tl.float32)
    start, stop = share(chunks)
    for s in range(start, stop):
        low = _nibbles(planes, starts, line + s * LANES, mask[:, None], 0, BITS)
        high = low if BITS <= 4 else _nibbles(planes, starts, line + s * LANES, mask[:, None], 4, BITS)
        for q in tl.static_range(4):
            weight = _eight(
                low[q], high[q], tables, packed, kinds, n, r, BITS, SHARED, PERMUTED, x.dtype.element_ty
            )
            column = (s * 32 + 4 * (k // LANES) + q) * LANES + k % LANES
            there = (m < tokens)[:, None] & (column < c)[None, :]
            some = tl.load(inputs + column[None, :], mask=there, other=0.0)
            total = dot(rounded(side_by_side(weight), some.dtype), tl.trans(some), total)
    if SHARED:
        total *= tl.load(scales + n, mask=mask, other=0.0)[:, None]
    store_tile(tl.trans(total), y, rows, m, n, tokens, r, out, ROWS, ADD)


@triton.jit(do_not_specialize=["chunks"])
def _row_dequantize(
    planes,
    starts,
    tables,
    packed,
    kinds,
    scales,
    dense,  # [r, c]
    r,
    c,
    chunks,
    BITS: tl.constexpr,
    LANES: tl.constexpr,
    SHARED: tl.constexpr,
    PERMUTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    s, mask, lane = tl.program_id(1), n < r, tl.arange(0, LANES)
    line = (n * (chunks * LANES))[:, None] + (s * LANES + lane)[None, :]
    low = _nibbles(planes, starts, line, mask[:, None], 0, BITS)
    high = low if BITS <= 4 else _nibbles(planes, starts, line, mask[:, None], 4, BITS)
    for q in tl.static_range(4):
        weight = _eight(low[q], high[q], tables, packed, kinds, n, r, BITS, SHARED, PERMUTED, tl.float32)
        for k in tl.static_range(8):
            column = (s * 32 + 4 * k + q) * LANES + lane
            value = weight[k]
            if SHARED:
                value *= tl.load(scales + n, mask=mask, other=0.0)[:, None]
            at = dense + (n * c)[:, None] + column[None, :]
            tl.store(at, rounded(value, dense.dtype.element_ty), mask=mask[:, None] & (column < c)[None, :])


class RowCodebook:
    """A tile of codebooks by row, or the rows of one width of a nested tile.

    Args:
        planes: int32, any number of planes of [rows, chunks, LANES] words one behind the other.
        starts: int64 [bits], the word at which each plane's first row of this tile lies, most significant first.
        tables: [r, 2**bits], or with `kinds` [kinds, 2**bits].
        columns: c.
        rows: int32 [r] output rows; None: all.
        kinds: uint8 [r], which table a row has.
        scales: float32 [r], what a row's table is multiplied by; with `kinds` only.
    """

    def __init__(
        self,
        planes: Tensor,
        starts: Sequence[int],
        tables: Tensor,
        columns: int,
        rows: Tensor | None = None,
        kinds: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> None:
        self.planes, self.tables, self.c, self.rows = planes, tables.contiguous(), columns, rows
        self.kinds, self.scales, self.bits = kinds, scales, len(starts)
        self.r, self.chunks = len(tables) if kinds is None else len(kinds), chunks_of(columns, LANES)
        half = tables.half()
        self._permuted = self.bits <= MOST_PERMUTED and bool((half == tables).all())
        self._packed = pack_entries(half) if self._permuted else planes
        self._starts = torch.tensor(starts, dtype=torch.int64, device=planes.device)

    @staticmethod
    def tiling(m: int) -> Tiling:
        return Tiling(1, 32, 2) if m == 1 else Tiling(16 if m <= 16 else 64, 64, 4)

    def fuses(self, x: Tensor) -> bool:
        """Whether several tokens meet weights as they are decoded; see `group_int.fused`."""
        return fused(x) if self._permuted else fused(x, FUSED_LOADS)

    def splits(self, x: Tensor) -> int:
        """See `group_int.GroupIntKernel.splits`."""
        return splits_of([self], x)

    def matmul(self, x: Tensor, y: Tensor, add: bool = False) -> None:
        """`y[:, rows] = x @ W.T`, or `+=`; see `group_int.GroupIntKernel.matmul`.

        One token is multiplied in float32, several in the type of x.
        """
        rows, flags = (
            self.planes if self.rows is None else self.rows,
            {"ROWS": self.rows is not None, "ADD": add},
        )
        tiling, out = self.tiling(len(x)), y.shape[-1]
        if len(x) == 1:
            _row_gemv[tiling.grid(self.r, 1, y)](
                x, *self._stored(), rows, y, self.r, self.c, out, self.chunks, **self._grid(), **flags,
                BLOCK=tiling.block, num_warps=tiling.warps,
            )  # fmt: skip
        elif self.fuses(x):
            _row_gemm[tiling.grid(self.r, len(x), y)](
                x, *self._stored(), rows, y, len(x), self.r, self.c, out, self.chunks, **self._grid(), **flags,
                TOKENS=tiling.tokens, BLOCK=tiling.block, num_warps=tiling.warps, num_stages=1,
            )  # fmt: skip
        else:
            place_product(x @ self.dequantize(x.dtype).T, y, self.rows, add)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The tile's weights [r, c]: exact in float32, rounded to nearest even in any other dtype."""
        dense = torch.empty(self.r, self.c, dtype=dtype, device=self.planes.device)
        _row_dequantize[(triton.cdiv(self.r, 16), self.chunks)](
            *self._stored(), dense, self.r, self.c, self.chunks, **self._grid(), BLOCK=16, num_warps=4
        )
        return dense

    def _stored(self) -> tuple[Tensor, ...]:
        kinds = self.planes if self.kinds is None else self.kinds
        scales = self.tables if self.scales is None else self.scales
        return self.planes, self._starts, self.tables, self._packed, kinds, scales

    def _grid(self) -> dict[str, int]:
        shared = self.kinds is not None
        return {"BITS": self.bits, "LANES": LANES, "SHARED": shared, "PERMUTED": self._permuted}


def splits_of(tiles: Sequence[RowCodebook], x: Tensor) -> int:
    """Parts that the products with x of tiles of the same columns, at the same time, are best summed in."""
    if len(x) > 1 and not all(tile.fuses(x) for tile in tiles):
        return 1
    tiling = RowCodebook.tiling(len(x))
    warps = sum(tiling.warps_of(tile.r, len(x)) for tile in tiles)
    return split.splits(warps, tiling.each, tiles[0].chunks, x.device)


def pack_planes(planes: Tensor, columns: int) -> Tensor:
    """Stored planes uint32 [bits, r, ceil(c / 32)] in the order of the kernels: int32 [bits, r, chunks, LANES]."""
    return torch.stack([pack_plane(_bits(plane, columns), LANES) for plane in planes])


def unpack_planes(packed: Tensor, columns: int) -> Tensor:
    """Inverse of `pack_planes`."""
    words = torch.stack([_words(unpack_plane(plane, columns)) for plane in packed])
    return words.view(torch.uint32)


def pack_plane(bit: Tensor, lanes: int) -> Tensor:
    """One bit of each code, uint8 [r, c] -> int32 [r, chunks, lanes]: field j at bit j."""
    r, c = bit.shape
    padded = bit.new_zeros(r, chunks_of(c, lanes) * FIELDS * lanes)
    padded[:, :c] = bit
    fields = padded.view(r, -1, FIELDS, lanes).long()
    words = torch.zeros_like(fields[:, :, 0])
    for j in range(FIELDS):
        words |= fields[:, :, j] << j
    return as_int32(words)


def unpack_plane(words: Tensor, columns: int) -> Tensor:
    """Inverse of `pack_plane`."""
    fields = torch.stack([words >> j & 1 for j in range(FIELDS)], 2)
    return fields.flatten(1)[:, :columns].to(torch.uint8)


def _bits(plane: Tensor, columns: int) -> Tensor:
    """Words [r, w] of 32 bits -> uint8 [r, columns]."""
    shifts = torch.arange(FIELDS, dtype=torch.int32, device=plane.device)
    return (plane.view(torch.int32)[..., None] >> shifts & 1).flatten(1)[:, :columns].to(torch.uint8)


def _words(bits: Tensor) -> Tensor:
    """Inverse of `_bits`."""
    return pack_plane(bits, 1)[:, :, 0].contiguous()


@triton.jit(do_not_specialize=["chunks"])
def _channel_gemv(
    x,  # [c]
    words,  # int32 [chunks of 32 channels, BITS, r]
    tables,  # [c, ENTRIES]
    y,  # [parts, 1, out]
    r,
    c,
    out,
    chunks,
    BITS: tl.constexpr,
    ENTRIES: tl.constexpr,
    CHUNKS: tl.constexpr,  # at a time
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    mask = n < r
    total = tl.zeros((CHUNKS, BLOCK), tl.float32)
    start, stop = share(tl.cdiv(chunks, CHUNKS))
    for s in range(start, stop):
        chunk = s * CHUNKS + tl.arange(0, CHUNKS)
        line = words + (chunk.to(tl.int64) * (BITS * r))[:, None] + n[None, :]
        held = load_words(line, r, (chunk < chunks)[:, None] & mask[None, :], BITS)
        for q in tl.static_range(16):
            pair = field(held, q, BITS)
            for half in tl.static_range(2):
                channel = chunk * 32 + 2 * q + half
                code = ((pair >> 16 * half) & ((1 << BITS) - 1)).to(tl.int32, bitcast=True)
                at = tables + (channel * ENTRIES)[:, None] + code
                weight = tl.load(at, mask=(channel < c)[:, None], other=0.0)
                one = tl.load(x + channel, mask=channel < c, other=0.0).to(tl.float32)
                total += weight.to(tl.float32) * one[:, None]
    store(tl.sum(total, 0), y, words, n, mask, out, False, ADD)


@triton.jit
def _channel_dequantize(
    words,
    tables,
    dense,  # [r, c]
    r,
    c,
    BITS: tl.constexpr,
    ENTRIES: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    WHOLE: tl.constexpr = 16 // BITS
    LEFT: tl.constexpr = 16 % BITS
    there, q, half = (n < r)[:, None] & (channel < c)[None, :], channel % 32 // 2, channel % 2 * 16
    whole = (q < WHOLE * BITS)[None, :]
    line = words + n[:, None] + (channel // 32).to(tl.int64)[None, :] * (BITS * r)
    word = tl.load(line + (q // WHOLE)[None, :] * r, mask=there & whole, other=0)
    code = (word >> (q % WHOLE * BITS + half)[None, :]) & ((1 << BITS) - 1)
    if LEFT > 0:
        for k in tl.static_range(BITS):
            at = tl.maximum((q - WHOLE * BITS) * BITS + k, 0)
            word = tl.load(line + (at // LEFT)[None, :] * r, mask=there & ~whole, other=0)
            code |= ((word >> (WHOLE * BITS + at % LEFT + half)[None, :]) & 1) << k
    value = tl.load(tables + (channel * ENTRIES)[None, :] + code, mask=there, other=0.0).to(tl.float32)
    at = dense + (n * c)[:, None] + channel[None, :]
    tl.store(at, rounded(value, dense.dtype.element_ty), mask=there)


class ChannelCodebook:
    """A tile of codebooks by input channel.

    Args:
        codes: uint8 [r, c].
        tables: [c, entries], at most 2**bits of them.
        bits: width, 1 to 8.
    """

    rows = None

    def __init__(self, codes: Tensor, tables: Tensor, bits: int) -> None:
        (self.r, self.c), self.bits, self.tables = codes.shape, bits, tables.contiguous()
        self._words = pack_words(codes, bits, 1)[..., 0].permute(1, 2, 0).contiguous()

    _tiling = Tiling(1, 64, 4)

    def splits(self, x: Tensor) -> int:
        """See `group_int.GroupIntKernel.splits`."""
        if len(x) > 1:
            return 1
        warps, steps = self._tiling.warps_of(self.r, 1), -(-len(self._words) // CHANNEL_CHUNKS)
        return split.splits(warps, self._tiling.each, steps, x.device)

    def matmul(self, x: Tensor, y: Tensor, add: bool = False) -> None:
        """`y = x @ W.T`, or `+=`; see `RowCodebook.matmul`. Several tokens meet the dense matrix, which is faster."""
        if len(x) > 1:
            return place_product(x @ self.dequantize(x.dtype).T, y, None, add)
        _channel_gemv[self._tiling.grid(self.r, 1, y)](
            x, self._words, self.tables, y, self.r, self.c, y.shape[-1], len(self._words), BITS=self.bits,
            ENTRIES=self.tables.shape[1], CHUNKS=CHANNEL_CHUNKS, ADD=add, BLOCK=self._tiling.block,
            num_warps=self._tiling.warps, num_stages=1,
        )  # fmt: skip

    def codes(self) -> Tensor:
        """Codes uint8 [r, c]."""
        return unpack_words(self._words.permute(2, 0, 1)[..., None], self.c)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The tile's weights [r, c]: exact in float32, rounded to nearest even in any other dtype."""
        dense, channels, block = torch.empty(self.r, self.c, dtype=dtype, device=self.tables.device), 64, 32
        _channel_dequantize[(triton.cdiv(self.r, block), triton.cdiv(self.c, channels))](
            self._words, self.tables, dense, self.r, self.c, BITS=self.bits, ENTRIES=self.tables.shape[1],
            CHANNELS=channels, BLOCK=block, num_warps=4,
        )  # fmt: skip
        return dense
