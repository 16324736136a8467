"""Plain PyTorch versions of every kernel: what runs where no fast one exists, and the oracle in tests."""

from __future__ import annotations

import torch
from torch import Tensor

from anybit.methods.grid import safe
from anybit.tensors import PackedWeight, unpack


def matmul(x: Tensor, weight: PackedWeight) -> Tensor:
    """`x [..., in] @ W^T -> [..., out]` in the dtype of x, the weight dequantized in float32."""
    return torch.nn.functional.linear(x, dequantize(weight).to(device=x.device, dtype=x.dtype))


def dequantize(weight: PackedWeight) -> Tensor:
    """The dense matrix, float32 [out, in]."""
    return unpack(weight).dequantize()


def gptq_block(
    weight: Tensor,  # float32 [rows, n], compensated in place
    inverse: Tensor,  # float32 [n, n], this block of the upper Cholesky factor of the inverse Hessian
    scale: Tensor,  # float32 [rows]
    zero: Tensor,  # float32 [rows]
    top: Tensor,  # float32 [rows], largest code
) -> tuple[Tensor, Tensor]:
    """Quantize the columns of one block left to right, spreading each column's error to those after it.

    Returns:
        codes uint8 [rows, n] and errors float32 [rows, n], the latter divided by the factor's diagonal
        (GPTQ, algorithm 1: what the columns after the block are compensated with).
    """
    codes, errors = torch.empty_like(weight), torch.empty_like(weight)
    divisor, empty = safe(scale), scale == 0
    for i in range(weight.shape[1]):
        w = weight[:, i]
        ratio = torch.where(empty, 0.0, w / divisor)  # without a grid, whatever compensation added is lost
        q = (torch.round(ratio) + zero).clamp(min=0).minimum(top)
        error = (w - scale * (q - zero)) / inverse[i, i]
        weight[:, i + 1 :] -= (
            error[:, None] * inverse[i, i + 1 :]
        )  # not addr_, which fuses: other bits than csrc
        codes[:, i], errors[:, i] = q, error
    return codes.to(torch.uint8), errors
