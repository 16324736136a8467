"""Columns of a product shared out among programs, so that every scheduler of a GPU has warps that wait for memory.

A product of few tokens has too few rows for that. Its loop over columns is cut into parts of whole steps, one for each
program of the grid's last axis; every part writes float32 sums of its own, which are added in a fixed order. How many
parts there are depends on shapes and the device only, so results are the same on every call.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from anybit.kernels.gpu.arithmetic import rounded

SCHEDULERS = 4  # of a multiprocessor
ASSUMED = 132  # multiprocessors, where there is no GPU


class Tiling(NamedTuple):
    """How a product is cut into programs."""

    tokens: int  # of a program
    block: int  # rows of a program
    warps: int  # of a program

    @property
    def each(self) -> int:
        """Warps that a scheduler is to have.

        Of many tokens as many as there are registers for; of up to 8 about twice as many, so that all schedulers end at
        about the same time.
        """
        return 8 if self.tokens <= 8 else 3 if self.tokens <= 16 else 2

    def warps_of(self, rows: int, m: int) -> int:
        """Warps of the programs that multiply so many rows with m tokens, each with all columns."""
        return self.warps * -(-rows // self.block) * -(-m // self.tokens)

    def grid(self, rows: int, m: int, y: Tensor) -> tuple[int, int, int]:
        """Programs that write to y [m, out], or to the parts of y [parts, m, out]."""
        return -(-rows // self.block), -(-m // self.tokens), len(y) if y.dim() == 3 else 1


def splits(warps: int, each: int, steps: int, device: torch.device) -> int:
    """Parts of whole steps that give each scheduler so many warps at most.

    Args:
        warps: of all programs, if each had all columns.
        each: warps that a scheduler is to have.
        steps: of the loop over columns.
        device: where the product runs.
    """
    most = each * SCHEDULERS * _multiprocessors(device) // max(1, warps)
    most, steps = max(1, min(most, steps)), max(1, steps)
    return -(-steps // -(-steps // most))


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return ASSUMED
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def share(steps):
    """The first of this program's steps over columns, and the one behind its last."""
    each = tl.cdiv(steps, tl.num_programs(2))
    first = tl.program_id(2) * each
    return first, tl.minimum(first + each, steps)


@triton.jit(do_not_specialize=["parts"])
def _sum(
    sums,  # float32 [parts, size]
    y,  # [size]
    parts,
    size,
    PARTS: tl.constexpr,  # at least `parts`
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for p in tl.static_range(PARTS):
        part = at + p * size
        total += tl.load(sums + part, mask=(at < size) & (part < parts * size), other=0.0)
    tl.store(y + at, rounded(total, y.dtype.element_ty), mask=at < size)


def sum_parts(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums float32 [parts, m, out], contiguous, added up one part after the other: [m, out]."""
    y = torch.empty(sums.shape[1:], dtype=dtype, device=sums.device)
    _sum[(triton.cdiv(y.numel(), 128),)](
        sums, y, len(sums), y.numel(), PARTS=triton.next_power_of_2(len(sums)), BLOCK=128, num_warps=1
    )
    return y
