"""Format "group int" with inputs of 8 bits or fewer: integer products on the tensor cores.

The two-step dequantization of MixLLM (arXiv:2412.14590, section 3.3): within a group, `sum_j (code - zero) x_j` in
integers; then the group's scales of weights and inputs. The integer becomes a float without a conversion: sums of up to
128 products stay below 2**22, and begin at the integer whose bits are those of the float `3 * 2**22`, whose last place
is 1.

Two tiles run as one launch: by rows (MixLLM's 4 and 8 bits, each program has one of them) or by columns (Atom's, each
program sums both).

Codes of up to 4 bits lie two to a byte: byte y of a unit of 2 SPAN columns has column y in its low half and SPAN + y in
its high one, so inputs are read as they lie. Wider ones have a byte each, symmetric ones less their zero point. Of 8
bits, codes less any zero point are no bytes: there the byte is `code - 128`, and sums begin at
`(128 - zero) * sum_j x_j` more; the sums of inputs come from the kernel that rounds them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from anybit.kernels.gpu import split
from anybit.kernels.gpu.arithmetic import INTERPRETED, dot
from anybit.kernels.gpu.group_int import store_tile
from anybit.kernels.gpu.split import Tiling, share

SPAN = 128  # columns of a product, at most: of one group
LEAST = 32  # columns that an integer product takes at once
assert SPAN * 128 * 255 < 2**22


# Four bytes at a time: codes less zero points, both below 128. Bit 7 keeps a byte from borrowing from the next one.
LOW, HIGH, WHOLE = (
    tl.constexpr(f"{{ .reg .b32 t; {pick} sub.u32 t, t, $2; xor.b32 $0, t, 0x80808080; }}")
    for pick in (
        "lop3.b32 t, $1, 0x0f0f0f0f, 0x80808080, 0xea;",
        "shr.u32 t, $1, 4; lop3.b32 t, t, 0x0f0f0f0f, 0x80808080, 0xea;",
        "or.b32 t, $1, 0x80808080;",
    )
)


@triton.jit
def _less_zero(codes, zero, HALVES: tl.constexpr, HALF: tl.constexpr):
    """The codes in bytes, or in one of two halves of them, less zero points: int8."""
    if INTERPRETED:
        codes = codes if HALVES == 1 else codes >> 4 if HALF else codes & 15
        return codes.to(tl.int8) - zero.to(tl.int8)
    zero = tl.broadcast_to(zero, codes.shape)
    ptx: tl.constexpr = WHOLE if HALVES == 1 else HIGH if HALF else LOW
    return tl.inline_asm_elementwise(ptx, "=r,r,r", [codes, zero], tl.int8, is_pure=True, pack=4)


@triton.jit
def _product(
    total,  # float32 [TOKENS, BLOCK]
    codes,
    weight_scales,
    zeros,
    x,  # int8 [tokens, stride]
    scales,  # float32 [tokens, groups]
    x_sums,  # int32 [tokens, stride // SPAN]: sums of x; used where OUTSIDE
    m,
    n,
    tokens,
    r,
    stride,  # columns of x, of which those behind the tile's are 0
    groups,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    HALVES: tl.constexpr,  # columns to a byte
    ZERO: tl.constexpr,  # of all codes; -1: `zeros` has them
    OUTSIDE: tl.constexpr,  # bytes are codes less 128, and what zero points differ from that meets the sums of x
):
    """`total += x @ W.T` of one tile."""
    byte, some, mine = tl.arange(0, SPAN), n < r, m < tokens
    line = codes + (n * (stride // HALVES))[:, None] + byte[None, :]
    inputs = x + (m.to(tl.int64) * stride)[:, None] + byte[None, :]
    start, stop = share(stride // (HALVES * SPAN))
    for unit in range(start, stop):
        both = tl.load(line + unit * SPAN, mask=some[:, None], other=0)
        for half in tl.static_range(HALVES):
            column = (unit * HALVES + half) * SPAN
            g = tl.minimum(column // GROUP, groups - 1)
            if ZERO < 0:
                zero = tl.load(zeros + n * groups + g, mask=some, other=0)
            weight, begin = both, tl.full(total.shape, 0x4B400000, tl.int32)
            if OUTSIDE:
                met = tl.load(x_sums + m * (stride // SPAN) + column // SPAN, mask=mine, other=0)
                begin += met[:, None] * (128 - zero.to(tl.int32))[None, :]
            elif ZERO < 0:
                weight = _less_zero(both, zero[:, None], HALVES, half)
            elif HALVES == 2:
                weight = _less_zero(both, tl.full((1, 1), ZERO, tl.uint8), HALVES, half)
            values = tl.load(inputs + column, mask=mine[:, None], other=0)
            sums = dot(values, tl.trans(weight), begin).to(tl.float32, bitcast=True) - 12582912.0
            weight_scale = tl.load(weight_scales + n * groups + g, mask=some, other=0.0).to(tl.float32)
            scale = tl.load(scales + m * groups + g, mask=mine, other=0.0)
            total += sums * (scale[:, None] * weight_scale[None, :])
    return total


@triton.jit(do_not_specialize=["tokens", "groups_a", "groups_b"])
def _matmul(
    codes_a,
    weight_scales_a,
    zeros_a,
    rows_a,
    x_a,
    scales_a,
    x_sums_a,
    r_a,
    stride_a,
    groups_a,
    codes_b,
    weight_scales_b,
    zeros_b,
    rows_b,
    x_b,
    scales_b,
    x_sums_b,
    r_b,
    stride_b,
    groups_b,
    y,  # [parts, tokens, out]
    tokens,
    out,
    GROUP_A: tl.constexpr,
    SPAN_A: tl.constexpr,
    HALVES_A: tl.constexpr,
    ZERO_A: tl.constexpr,
    OUTSIDE_A: tl.constexpr,
    GROUP_B: tl.constexpr,
    SPAN_B: tl.constexpr,
    HALVES_B: tl.constexpr,
    ZERO_B: tl.constexpr,
    OUTSIDE_B: tl.constexpr,
    TILES: tl.constexpr,  # 1; 2: both by rows; 3: both by columns
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    m = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    block, blocks_a = tl.program_id(0), tl.cdiv(r_a, BLOCK)
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    if block < blocks_a:
        n = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        total = _product(
            total, codes_a, weight_scales_a, zeros_a, x_a, scales_a, x_sums_a, m, n, tokens, r_a, stride_a,
            groups_a, GROUP_A, SPAN_A, HALVES_A, ZERO_A, OUTSIDE_A,
        )  # fmt: skip
        if TILES == 3:
            total = _product(
                total, codes_b, weight_scales_b, zeros_b, x_b, scales_b, x_sums_b, m, n, tokens, r_b, stride_b,
                groups_b, GROUP_B, SPAN_B, HALVES_B, ZERO_B, OUTSIDE_B,
            )  # fmt: skip
        store_tile(total, y, rows_a, m, n, tokens, r_a, out, ROWS, ADD)
    elif TILES == 2:
        n = ((block - blocks_a) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        total = _product(
            total, codes_b, weight_scales_b, zeros_b, x_b, scales_b, x_sums_b, m, n, tokens, r_b, stride_b,
            groups_b, GROUP_B, SPAN_B, HALVES_B, ZERO_B, OUTSIDE_B,
        )  # fmt: skip
        store_tile(total, y, rows_b, m, n, tokens, r_b, out, ROWS, ADD)


@dataclass(frozen=True)
class Inputs:
    """Activations of a tile: `x ~ scale * code`."""

    codes: Tensor  # int8 [m, stride], 0 behind the tile's columns
    scales: Tensor  # float32 [m, groups]
    sums: Tensor | None = None  # int32 [m, stride / span]: of codes, where a tile needs them


class IntegerTile:
    """A tile of symmetric or asymmetric codes that multiplies rounded inputs.

    Args:
        codes: uint8 [r, c].
        scales: float16 [r, groups].
        zeros: uint8 [r, groups]; None: symmetric.
        rows: int32 [r] output rows; None: all.
        bits: width, 1 to 8.
        group_size: a multiple of 32, or no less than c.
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
        self.span = span = SPAN if one_group else math.gcd(group_size, SPAN)
        self.needs_sums = bits == 8 and zeros is not None
        halves = 2 if bits <= 4 else 1
        # The same for every width: tiles by rows share inputs.
        self.stride = -(-self.c // (2 * span)) * 2 * span
        self.steps = self.stride // (halves * span)
        padded = torch.nn.functional.pad(codes, (0, self.stride - self.c))  # what meets inputs of 0
        if halves == 2:
            low, high = padded.view(self.r, self.stride // (2 * span), 2, span).unbind(2)
            self._codes = (low | high << 4).flatten(1).contiguous()
        elif zeros is None or self.needs_sums:
            self._codes = (padded - 2 ** (bits - 1)).view(torch.int8)  # modulo 256
        else:
            self._codes = padded.contiguous()
        self.scales, self.zeros = scales.contiguous(), None if zeros is None else zeros.contiguous()
        self._grid: dict[str, Any] = {
            "GROUP": 1 << 30 if one_group else group_size,
            "SPAN": span,
            "HALVES": halves,
            "ZERO": -1 if zeros is not None else 2 ** (bits - 1),
            "OUTSIDE": self.needs_sums,
        }

    @staticmethod
    def takes(columns: int, group_size: int) -> bool:
        """Whether there is a kernel for groups of this size."""
        return group_size >= columns or group_size % LEAST == 0

    def codes(self) -> Tensor:
        """Codes uint8 [r, c]."""
        if self._grid["HALVES"] == 2:
            halves = torch.stack([self._codes & 15, self._codes >> 4], 1)
            halves = halves.view(self.r, 2, self.steps, self._grid["SPAN"])
            return halves.transpose(1, 2).flatten(1)[:, : self.c].contiguous()
        stored = self._codes[:, : self.c].contiguous()
        return stored if stored.dtype == torch.uint8 else stored.view(torch.uint8) + 2 ** (self.bits - 1)

    def operands(self, inputs: Inputs) -> tuple[Any, ...]:
        nothing = self.scales
        zeros, rows = (
            nothing if self.zeros is None else self.zeros,
            nothing if self.rows is None else self.rows,
        )
        sums = nothing if inputs.sums is None else inputs.sums
        sizes = self.r, self.stride, self.scales.shape[1]
        return self._codes, self.scales, zeros, rows, inputs.codes, inputs.scales, sums, *sizes

    def flags(self, mark: str) -> dict[str, Any]:
        return {f"{name}_{mark}": value for name, value in self._grid.items()}


def matmul(tiles: list[tuple[IntegerTile, Inputs]], y: Tensor, add: bool = False) -> None:
    """`y[:, rows] = x @ W.T`, or `+=`: exact integer sums per group, scales after.

    Args:
        tiles: one; or two, both of some rows of their own or both of all rows and some columns.
        y: [m, out], contiguous, any type of floats; or [parts, m, out], of any number: the product is their sum.
        add: add to y.
    """
    (a, x_a), (b, x_b) = tiles[0], tiles[-1]
    kind = _kind([tile for tile, _ in tiles])
    m, out = y.shape[-2:]
    tiling = _tiling(m)
    blocks, of_tokens, parts = tiling.grid(a.r, m, y)
    if kind == 2:
        blocks += triton.cdiv(b.r, tiling.block)
    _matmul[(blocks, of_tokens, parts)](
        *a.operands(x_a), *b.operands(x_b), y, m, out, **a.flags("A"), **b.flags("B"), TILES=kind,
        ROWS=a.rows is not None, ADD=add, TOKENS=tiling.tokens, BLOCK=tiling.block, num_warps=tiling.warps,
    )  # fmt: skip


def splits(tiles: Sequence[IntegerTile], m: int, device: torch.device) -> int:
    """Parts that a product of m tokens is best summed in."""
    tiling, several = _tiling(m), tiles if _kind(tiles) == 2 else tiles[:1]
    warps = sum(tiling.warps_of(tile.r, m) for tile in several)
    return split.splits(warps, tiling.each, max(tile.steps for tile in tiles), device)


def _tiling(m: int) -> Tiling:
    return Tiling(128, 64, 8) if m > 64 else Tiling(16 if m <= 16 else 64, 64, 4)


def _kind(tiles: Sequence[IntegerTile]) -> int:
    """1: one tile, 2: two by rows, 3: two by columns."""
    return 1 if len(tiles) == 1 else 2 if tiles[0].rows is not None else 3
