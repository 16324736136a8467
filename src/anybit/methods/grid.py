"""The uniform grid that RTN, GPTQ and every integer method share (GPTQ, arXiv:2210.17323, section 2).

Codes are unsigned: `w ~ scale * (code - zero)`, code in 0..2**bits - 1; a symmetric grid has the fixed zero
2**(bits - 1). Ranges always include 0, so padding a ragged group with zeros changes nothing. Scales are
rounded to float16 before any code is computed: what is evaluated is what is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anybit.errors import InputError
from anybit.formats.bits import FP16_MAX, safe


def without_dead(weight: Tensor, squares: Tensor) -> Tensor:
    """`weight` [out, in] with 0 for dead input channels, those of `squares` [in] 0: any weight is as good there, and 0
    costs no range and is no outlier.
    """
    return torch.where(squares.to(weight.device) == 0, 0.0, weight)


def fit(
    weight: Tensor, bits: Tensor, symmetric: Tensor, ratio: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each group of weights.

    Args:
        weight: float32 [..., n], one group along the last dimension.
        bits: width per group, broadcastable to [...].
        symmetric: bool per group, broadcastable to [...].
        ratio: clipping ratio c in (0, 1], broadcastable to [...].

    Returns:
        scale and zero, float32 [...]; scale holds float16 values, zero whole numbers in 0..2**bits - 1.

    Raises:
        InputError: weights too large for a float16 scale.
    """
    top = 2.0**bits - 1
    low, high = weight.amin(-1).clamp(max=0), weight.amax(-1).clamp(min=0)
    half = 2.0 ** (bits - 1)
    scale = torch.where(symmetric, torch.maximum(-low, high) / (half - 1), (high - low) / top) * ratio
    if scale.numel() and not scale.max() <= FP16_MAX:
        raise InputError(
            f"weights up to {float(weight.abs().max()):.3g} need a scale above float16's {FP16_MAX:g}"
        )
    scale = scale.half().float()
    zero = torch.round(-low * ratio / safe(scale)).clamp(min=0).minimum(top.expand_as(scale))
    return scale, torch.where(symmetric, half, zero)


def encode(weight: Tensor, scale: Tensor, zero: Tensor, top: Tensor) -> Tensor:
    """Nearest codes (half to even), float32 like `weight`; the other arguments broadcast to it."""
    return (torch.round(weight / safe(scale)) + zero).clamp(min=0).minimum(top)


def decode(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return (codes - zero) * scale
