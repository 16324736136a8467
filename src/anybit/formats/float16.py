"""Format "float16": columns that are stored as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from anybit.formats.base import Fields, Refuse, check_finite


@dataclass(frozen=True)
class Float16:
    """One tile that is not quantized: columns whose inputs are too large to round their weights."""

    NAME: ClassVar = "float16"

    values: Tensor  # float16 [r, c]
    rows: Tensor | None = None
    cols: Tensor | None = None

    bits: ClassVar = 16

    def dequantize(self) -> Tensor:
        return self.values.float()

    def describe(self) -> dict[str, Any]:
        return {"format": self.NAME, "bits": 16}

    def tensors(self) -> dict[str, Tensor]:
        return {"values": self.values}

    @staticmethod
    def fields(tile: Mapping[str, Any], r: int, c: int) -> Fields:
        return {"values": (torch.float16, (r, c))}

    @staticmethod
    def read(tile: Mapping[str, Any], tensors: Mapping[str, Tensor], r: int, c: int) -> Float16:
        return Float16(tensors["values"], tensors.get("rows"), tensors.get("cols"))

    @staticmethod
    def check_description(tile: Mapping[str, Any], refuse: Refuse) -> None:
        if tile.get("bits") != 16:
            refuse(f"width {tile.get('bits')!r} of a float16 tile is not 16")

    @staticmethod
    def check_tensors(
        tile: Mapping[str, Any], tensors: Mapping[str, Tensor], r: int, c: int, refuse: Refuse
    ) -> None:
        check_finite("values", tensors, refuse)
