"""What all stored formats share: types of descriptions and fields, checks, indices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from anybit.errors import InputError

Fields = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # field -> dtype and shape
Refuse = Callable[[str], None]  # raises InputError with a reason
MAX_UINT16 = 65536  # input channels that 16-bit column indices reach


def is_int(value: Any, low: int, high: int) -> bool:
    """Whether a JSON value is a whole number in a range; True is none."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def to_half(values: Tensor) -> Tensor:
    """Rounded to float16.

    Raises:
        InputError: values that float16 does not reach.
    """
    half = values.half()
    if not torch.isfinite(half).all():
        raise InputError(f"values up to {float(values.abs().max()):.3g} are beyond float16's 65504")
    return half


def check_finite(field: str, tensors: Mapping[str, Tensor], refuse: Refuse) -> None:
    tensor = tensors[field]
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        refuse(f"{field} holds NaN or Inf")


def index_type(size: int) -> torch.dtype:
    """What numbers below `size` are stored as."""
    return torch.uint16 if size <= MAX_UINT16 else torch.int32


def index(values: Tensor, size: int) -> Tensor:
    """Numbers int64 below `size` as they are stored; PyTorch casts to int16 by dropping the high bits."""
    narrow = values.to(torch.int32)
    return narrow.to(torch.int16).view(torch.uint16) if size <= MAX_UINT16 else narrow


def wide_index(stored: Tensor) -> Tensor:
    """Inverse of `_index`."""
    return stored.view(torch.int16).long() & 0xFFFF if stored.dtype == torch.uint16 else stored.long()
