"""Format "float16": columns that are stored as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from anybit.formats.base import Fields, Refuse, TileLayout, check_finite, count
from anybit.formats.dtypes import Dtype
from anybit.lazy import Tensor


@dataclass(frozen=True, kw_only=True)
class Float16Layout(TileLayout):
    """How a tile that is not quantized is stored."""

    NAME: ClassVar = "float16"

    bits: float = 16

    def coded(self, c: int) -> int:
        return 0

    def fields(self, r: int, c: int) -> Fields:
        return {"values": (Dtype.F16, (r, c))}

    def read(self, tensors: Mapping[str, Tensor], r: int, c: int) -> Float16:
        return Float16(tensors["values"], tensors.get("rows"), tensors.get("cols"))

    def check(self, r: int, c: int, refuse: Refuse) -> None:
        if self.bits != 16:
            refuse(f"width {self.bits!r} of a float16 tile is not 16")

    def check_tensors(self, tensors: Mapping[str, Tensor], r: int, c: int, refuse: Refuse) -> None:
        check_finite("values", tensors, refuse)


@dataclass(frozen=True)
class Float16:
    """One tile that is not quantized: columns whose inputs are too large to round their weights."""

    values: Tensor  # float16 [r, c]
    rows: Tensor | None = None
    cols: Tensor | None = None

    def dequantize(self) -> Tensor:
        return self.values.float()

    def layout(self) -> Float16Layout:
        return Float16Layout(rows=count(self.rows), cols=count(self.cols))

    def tensors(self) -> dict[str, Tensor]:
        return {"values": self.values}
