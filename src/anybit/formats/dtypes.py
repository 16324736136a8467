"""The types of numbers that files hold."""

from __future__ import annotations

import re
from enum import StrEnum
from functools import cached_property

import numpy as np

from anybit.lazy import torch


class Dtype(StrEnum):
    """A type of stored numbers. A member is called as in safetensors files, and its value is PyTorch's name."""

    F64 = "float64"
    F32 = "float32"
    F16 = "float16"
    BF16 = "bfloat16"
    I64 = "int64"
    I32 = "int32"
    I16 = "int16"
    I8 = "int8"
    BOOL = "bool"
    U64 = "uint64"
    U32 = "uint32"
    U16 = "uint16"
    U8 = "uint8"
    F8_E4M3 = "float8_e4m3fn"
    F8_E5M2 = "float8_e5m2"

    @staticmethod
    def of(dtype: torch.dtype) -> Dtype:
        """That of a tensor."""
        return Dtype(str(dtype).removeprefix("torch."))

    @cached_property
    def itemsize(self) -> int:
        """Bytes of a number."""
        bits = re.match(r"[A-Z]+(\d+)", self.name)
        return int(bits[1]) // 8 if bits else 1

    @property
    def is_floating_point(self) -> bool:
        return "F" in self.name

    @property
    def torch(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.value)
        return found

    @cached_property
    def numpy(self) -> np.dtype:
        """That of the array that holds its bytes: NumPy has no bfloat16, and no floats of 8 bits."""
        narrow = {1: "uint8", 2: "uint16"}
        return np.dtype(narrow[self.itemsize] if self.name.startswith(("BF", "F8")) else self.value)
