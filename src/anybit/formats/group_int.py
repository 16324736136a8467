"""Format "group_int": integers with a scale, and perhaps a zero point, per row and group of input channels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from anybit.config import MAX_GROUP
from anybit.formats.base import Fields, Refuse, TileLayout, check_finite, count, is_int
from anybit.formats.bits import code_align, groups_of, pack_codes, packed_shape, unpack_codes
from anybit.formats.dtypes import Dtype
from anybit.lazy import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class GroupIntLayout(TileLayout):
    """How a tile in format "group int" is stored."""

    NAME: ClassVar = "group_int"

    group_size: int  # input channels per group
    symmetric: bool  # without zero points
    act_bits: int = 16  # 2..8; 16: inputs as they come
    act_static: bool = False  # their scales are stored, instead of found for each token

    @property
    def rounds_inputs(self) -> bool:
        return self.act_bits < 16

    @property
    def input_grid(self) -> tuple[Any, ...]:
        return self.act_bits, self.act_static, self.group_size, self.cols is not None

    def fields(self, r: int, c: int) -> Fields:
        bits, groups = int(self.bits), groups_of(c, self.group_size)
        fields: Fields = {
            "codes": (Dtype.U8, packed_shape(r, c, bits, code_align(bits))),
            "scales": (Dtype.F16, (r, groups)),
        }
        if not self.symmetric:
            fields["zeros"] = (Dtype.U8, packed_shape(r, groups, bits, 1))
        if self.rounds_inputs:
            fields["act_scales" if self.act_static else "act_clip"] = (Dtype.F16, (groups,))
        return fields

    def read(self, tensors: Mapping[str, Tensor], r: int, c: int) -> GroupInt:
        bits, zeros = int(self.bits), tensors.get("zeros")
        return GroupInt(
            bits,
            self.group_size,
            codes=unpack_codes(tensors["codes"], bits, c),
            scales=tensors["scales"],
            zeros=None if zeros is None else unpack_codes(zeros, bits, groups_of(c, self.group_size)),
            rows=tensors.get("rows"),
            cols=tensors.get("cols"),
            act_bits=self.act_bits,
            act_clip=tensors.get("act_clip"),
            act_scales=tensors.get("act_scales"),
        )

    def check(self, r: int, c: int, refuse: Refuse) -> None:
        if not is_int(self.bits, 1, 8):
            refuse(f"width {self.bits!r} is not one of 1..8 bits")
        if self.act_bits != 16 and not is_int(self.act_bits, 2, 8):
            refuse(f"activations of {self.act_bits!r} bits are not of 2..8")
        if not isinstance(self.act_static, bool):
            refuse(f"act_static {self.act_static!r} is not true or false")
        if self.act_static and not self.rounds_inputs:
            refuse("act_static is about rounded inputs, and act_bits is not below 16")
        if not is_int(self.group_size, 1, MAX_GROUP) or not isinstance(self.symmetric, bool):
            refuse(f"{self} needs a group_size of 1 to {MAX_GROUP} and symmetric true or false")

    def check_tensors(self, tensors: Mapping[str, Tensor], r: int, c: int, refuse: Refuse) -> None:
        check_finite("scales", tensors, refuse)
        for field, most in (("act_clip", 1.0), ("act_scales", torch.inf)):
            if field in tensors:
                check_finite(field, tensors, refuse)
                if not ((tensors[field] > 0) & (tensors[field] <= most)).all():
                    refuse(f"{field} is not above 0" + (" and up to 1" if most == 1 else ""))


@dataclass(frozen=True)
class GroupInt:
    """One tile in format "group int": `w[i, j] = scales[i, g] * (codes[i, j] - zero[i, g])`, g = j // group_size.

    `zero` is `zeros` where present (asymmetric) and `2**(bits - 1)` otherwise (symmetric).
    The last group is shorter where `c` is not a multiple of `group_size`.

    With `act_bits` below 16 the tile multiplies integers: its inputs are rounded, per token, to a symmetric grid of
    that width in the same groups as the weights. The grid reaches `act_clip` times a group's largest magnitude
    (dynamic), or has the scale `act_scales` (static).
    """

    bits: int  # 1..8
    group_size: int  # input channels per group, in stored order
    codes: Tensor  # uint8 [r, c], values below 2**bits
    scales: Tensor  # float16 [r, groups]
    zeros: Tensor | None = None  # uint8 [r, groups]; None: symmetric
    rows: Tensor | None = None  # int32 [r], ascending output rows; None: all
    cols: Tensor | None = None  # int32 [c], original input channels in stored order; None: all, natural order
    act_bits: int = 16  # 2..8; 16: inputs as they come
    act_clip: Tensor | None = None  # float16 [groups], in (0, 1]; where act_bits < 16, this or
    act_scales: Tensor | None = None  # float16 [groups]

    def dequantize(self) -> Tensor:
        """The tile's weights, float32 [r, c], columns in stored order."""
        c = self.codes.shape[1]
        group = torch.arange(c, device=self.codes.device) // self.group_size
        zero = 2 ** (self.bits - 1) if self.zeros is None else self.zeros.float()[:, group]
        return (self.codes.float() - zero) * self.scales.float()[:, group]

    def layout(self) -> GroupIntLayout:
        return GroupIntLayout(
            bits=self.bits,
            group_size=self.group_size,
            symmetric=self.zeros is None,
            act_bits=self.act_bits,
            act_static=self.act_scales is not None,
            rows=count(self.rows),
            cols=count(self.cols),
        )

    def tensors(self) -> dict[str, Tensor]:
        fields = {"codes": pack_codes(self.codes, self.bits, code_align(self.bits)), "scales": self.scales}
        fields |= {} if self.zeros is None else {"zeros": pack_codes(self.zeros, self.bits, 1)}
        fields |= {} if self.act_clip is None else {"act_clip": self.act_clip}
        return fields if self.act_scales is None else fields | {"act_scales": self.act_scales}
