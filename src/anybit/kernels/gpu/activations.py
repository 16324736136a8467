"""Inputs of a layer to int8 codes in one kernel: RMSNorm, reordering and rounding fused (Atom, arXiv:2310.19102, 4.3).

Codes and scales are those of `kernels.reference.quantize_activations`, to the bit where that runs on a CPU. With a norm
they are so up to the order in which its squares are added.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from anybit.errors import InputError
from anybit.formats.bits import groups_of
from anybit.kernels import reference as plain

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
BLOCK = 2048  # values that a program works with at a time
WIDEST = 8192  # the same, where a group is wider
PROGRAMS = 2  # per multiprocessor, that rows are split for
VALUES_PER_WARP = 512


@dataclass(frozen=True)
class Grid:
    """A symmetric grid for each group of inputs: fields of a `GroupInt` tile."""

    bits: int  # 2..8
    group_size: int
    clip: Tensor | None = None  # float16 [groups]; this (dynamic) or
    scales: Tensor | None = None  # float16 [groups] (static)


@dataclass(frozen=True)
class Norm:
    """RMSNorm as Llama has it: in float32, then rounded to the dtype of the inputs, then times `weight`."""

    weight: Tensor  # [in], in the dtype of the inputs
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


@triton.jit
def _inputs(x_row, weight, cols, input_scale, root, j, mask):
    """Inputs j of a tile as it sees them, float32; 0 where masked."""
    at = j
    if cols is not None:
        at = tl.load(cols + j, mask=mask, other=0)
    x = tl.load(x_row + at, mask=mask, other=0).to(tl.float32)
    if weight is not None:
        dtype = x_row.dtype.element_ty
        w = tl.load(weight + at, mask=mask, other=0).to(tl.float32)
        x = (
            ((x * root).to(dtype).to(tl.float32) * w).to(dtype).to(tl.float32)
        )  # the product is exact in float32
    if input_scale is not None:
        x *= tl.load(input_scale + at, mask=mask, other=0).to(tl.float32)
    return x


@triton.jit
def _quantize(
    x, weight, cols, input_scale, clip, fixed, codes, scales, sums, columns, c, width, groups, blocks, eps,
    SIZE: tl.constexpr, SPAN: tl.constexpr, TOP: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """One part of a row: `blocks` blocks of ROWS groups, CHUNK of a group's values at a time."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x_row, codes_row, scales_row = x + row * columns, codes + row * width, scales + row * groups
    root = 0.0
    if weight is not None:
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, columns, BLOCK):
            j = start + tl.arange(0, BLOCK)
            value = tl.load(x_row + j, mask=j < columns, other=0).to(tl.float32)
            squares += value * value
        mean = tl.div_rn(tl.sum(squares, 0), columns + tl.zeros([], tl.float32))  # may be a constant
        root = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))

    inner = tl.arange(0, CHUNK)
    WIDE: tl.constexpr = SPAN if SPAN < CHUNK else CHUNK
    for block in range(part * blocks, (part + 1) * blocks):
        group = block * ROWS + tl.arange(0, ROWS)
        largest = tl.zeros([ROWS], tl.float32)
        wrong = tl.zeros([ROWS], tl.int32)
        for k in tl.static_range(CHUNKS):
            i = k * CHUNK + inner
            j = group[:, None] * SIZE + i[None, :]
            mask = j < c
            if SIZE != CHUNK * CHUNKS:
                mask = mask & (i < SIZE)[None, :]
            value = _inputs(x_row, weight, cols, input_scale, root, j, mask)
            finite = tl.abs(value) < float("inf")
            largest = tl.maximum(largest, tl.max(tl.where(finite, tl.abs(value), 0.0), 1))
            wrong = tl.maximum(wrong, tl.max(tl.where(finite, 0, 1), 1))
        if fixed is not None:
            scale = tl.load(fixed + group, mask=group < groups, other=0).to(tl.float32)
        else:
            ratio = tl.load(clip + group, mask=group < groups, other=0).to(tl.float32)
            scale = tl.div_rn(largest * ratio, tl.full([ROWS], TOP, tl.float32))
        scale = tl.where(wrong > 0, float("nan"), scale)
        tl.store(scales_row + group, scale, mask=group < groups)
        step = tl.where(scale == 0, 1.0, scale)
        for k in tl.static_range(CHUNKS):
            i = k * CHUNK + inner
            j = group[:, None] * SIZE + i[None, :]
            mask = j < c
            if SIZE != CHUNK * CHUNKS:
                mask = mask & (i < SIZE)[None, :]
            if CHUNKS > 1:  # else they are at hand
                value = _inputs(x_row, weight, cols, input_scale, root, j, mask)
            code = tl.div_rn(value, tl.broadcast_to(step[:, None], value.shape))
            code = tl.where(code == code, tl.clamp(code, -TOP - 1.0, TOP * 1.0), -TOP - 1.0)
            code = (code + 12582912.0) - 12582912.0  # to the nearest whole number, half to even
            tl.store(codes_row + j, code.to(tl.int8), mask=mask)
            if sums is not None:  # SPAN columns lie in one group
                spans = tl.reshape(tl.where(mask, code.to(tl.int32), 0), [ROWS, CHUNK // WIDE, WIDE])
                i = k * CHUNK + WIDE * tl.arange(0, CHUNK // WIDE)
                j = group[:, None] * SIZE + i[None, :]
                at = sums + row * (width // SPAN) + j // SPAN
                tl.store(at, tl.sum(spans, 2), mask=(j < c) & (i < SIZE)[None, :])
    if PAD > 0:
        if part == 0:
            if sums is not None:
                for at in range(tl.cdiv(c, SPAN), width // SPAN):
                    tl.store(sums + row * (width // SPAN) + at, 0)
            j = c + tl.arange(0, PAD)
            tl.store(codes_row + j, tl.zeros([PAD], tl.int8), mask=j < width)


def quantize(
    x: Tensor,
    grid: Grid,
    *,
    cols: Tensor | None = None,
    input_scale: Tensor | None = None,
    norm: Norm | None = None,
    multiple: int = 1,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of a tile's inputs: `norm`, then times `input_scale`, then channels `cols`, then rounded.

    Args:
        x: float16, bfloat16 or float32 [m, in].
        cols: int32 [c], the tile's input channels in stored order; that they are below `in` is not checked. Default:
            all, c = in.
        input_scale: float16 [in].
        multiple: codes are padded with zeros to rows of a multiple of so many.

    Returns:
        codes int8 [m, c padded] and scales float32 [m, groups]; the scale of a group with NaN or Inf is NaN.

    Raises:
        InputError: other shapes, dtypes, devices or options.
    """
    codes, scales, _ = quantize_and_sum(
        x, grid, None, cols=cols, input_scale=input_scale, norm=norm, multiple=multiple
    )
    return codes, scales


def quantize_and_sum(
    x: Tensor,
    grid: Grid,
    span: int | None,
    *,
    cols: Tensor | None = None,
    input_scale: Tensor | None = None,
    norm: Norm | None = None,
    multiple: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `quantize`, and the sums of codes over `span` columns of a group, int32 [m, c padded / span].

    Args:
        span: a power of two that divides the group size, or any where there is one group only, and `multiple`; None: no
            sums.
    """
    _check(x, grid, cols, input_scale, norm)
    if multiple < 1:
        raise InputError(f"codes padded to a multiple of {multiple}: expected at least 1")
    m, columns = x.shape
    c, size = columns if cols is None else len(cols), grid.group_size
    groups, width = groups_of(c, size), groups_of(c, multiple) * multiple
    codes = torch.empty(m, width, dtype=torch.int8, device=x.device)
    scales = torch.empty(m, groups, dtype=torch.float32, device=x.device)
    sums = None if span is None else torch.empty(m, width // span, dtype=torch.int32, device=x.device)
    if not m or not c:
        return codes.zero_(), scales, sums
    chunk = min(triton.next_power_of_2(min(size, c)), WIDEST)
    size = min(size, c)  # no less one group
    rows = max(1, BLOCK // chunk)
    blocks = -(-groups // rows)
    parts = min(blocks, -(-_programs(x.device) // m))
    _quantize[m, parts](
        x.contiguous(), None if norm is None else norm.weight, cols, input_scale, grid.clip, grid.scales,
        codes, scales, sums, columns, c, width, groups, -(-blocks // parts),
        0.0 if norm is None else float(norm.eps), SIZE=size, SPAN=span or 1, TOP=2 ** (grid.bits - 1) - 1,
        ROWS=rows, CHUNK=chunk, CHUNKS=-(-size // chunk),
        BLOCK=BLOCK, PAD=triton.next_power_of_2(width - c) if width > c else 0,
        num_warps=max(1, min(16, rows * chunk // VALUES_PER_WARP)),
    )  # fmt: skip
    return codes, scales, sums


def reference(
    x: Tensor,
    grid: Grid,
    *,
    cols: Tensor | None = None,
    input_scale: Tensor | None = None,
    norm: Norm | None = None,
    multiple: int = 1,
) -> tuple[Tensor, Tensor]:
    """`quantize` in plain PyTorch."""
    wide = (x if norm is None else norm(x)).float()
    wide = wide if input_scale is None else wide * input_scale.float()
    wide = wide if cols is None else wide[:, cols.long()]
    codes, scales = plain.quantize_activations(wide, grid.bits, grid.group_size, grid.clip, grid.scales)
    return torch.nn.functional.pad(codes, (0, -codes.shape[1] % multiple)), scales


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count


def _check(x: Tensor, grid: Grid, cols: Tensor | None, input_scale: Tensor | None, norm: Norm | None) -> None:
    if x.device.type != "cuda" and isinstance(_quantize, triton.JITFunction):
        raise InputError(
            f"inputs on {x.device}: expected a CUDA device (or TRITON_INTERPRET=1 before Triton is imported)"
        )
    if x.dim() != 2 or x.dtype not in FLOATS:
        raise InputError(f"inputs {x.dtype} {list(x.shape)}: expected [m, in] of 16- or 32-bit floats")
    if not 2 <= grid.bits <= 8:
        raise InputError(f"inputs of {grid.bits} bits: expected 2 to 8")
    if grid.group_size < 1:
        raise InputError(f"groups of {grid.group_size} inputs: expected at least 1")
    if (grid.clip is None) == (grid.scales is None):
        raise InputError("a grid has either clip (dynamic) or scales (static)")
    c = x.shape[1] if cols is None else len(cols)
    groups = (groups_of(c, grid.group_size),)
    wanted = {
        "clip": (grid.clip, groups, torch.float16),
        "scales": (grid.scales, groups, torch.float16),
        "cols": (cols, (c,), torch.int32),
        "input_scale": (input_scale, x.shape[1:], torch.float16),
        "the norm's weight": (None if norm is None else norm.weight, x.shape[1:], x.dtype),
    }
    for name, (tensor, shape, dtype) in wanted.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype or tensor.device != x.device:
            raise InputError(
                f"{name} {tensor.dtype} {list(tensor.shape)} on {tensor.device}: "
                f"expected {dtype} {list(shape)} on {x.device}"
            )
        if not tensor.is_contiguous():
            raise InputError(f"{name} is a view with gaps: expected a contiguous tensor")
