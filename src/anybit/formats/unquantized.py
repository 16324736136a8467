"""A linear layer that is stored as it was, among those that are quantized: what sizes and widths need of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from anybit.config import Json
from anybit.formats.base import Fields, TileLayout
from anybit.formats.dtypes import Dtype


@dataclass(frozen=True, kw_only=True)
class UnquantizedLayout(TileLayout):
    """How it is stored: in floats, under the name `weight`."""

    NAME: ClassVar = "dense"

    dtype: Dtype

    @staticmethod
    def of(dtype: Dtype) -> UnquantizedLayout:
        return UnquantizedLayout(bits=8 * dtype.itemsize, dtype=dtype)

    def to_json(self) -> Json:
        return super().to_json() | {"dtype": str(self.dtype)}

    def fields(self, r: int, c: int) -> Fields:
        return {"weight": (self.dtype, (r, c))}
