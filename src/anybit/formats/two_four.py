"""Format "two_four": blocks of input channels at 2 and 4 bits with second-order scales (2/4/16)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from anybit.formats.base import Fields, Refuse, TileLayout, check_finite, is_int
from anybit.formats.bits import groups_of, pack_bits, row_bytes, unpack_bits
from anybit.formats.dtypes import Dtype
from anybit.lazy import Tensor, torch

BLOCK = 16  # input channels that have one width in a "two_four" tile
SECOND_GROUP = 16  # output rows whose scales share a second-order grid


@dataclass(frozen=True, kw_only=True)
class TwoFourLayout(TileLayout):
    """How a tile in format "two_four" is stored."""

    NAME: ClassVar = "two_four"

    narrow: int  # input channels at 2 bits
    group_size: int  # channels of a 2-bit group: 16 or 8

    @staticmethod
    def of(narrow: int, c: int, group_size: int) -> TwoFourLayout:
        """Of a tile with `narrow` of its `c` channels at 2 bits."""
        return TwoFourLayout(bits=_average_width(narrow, c), narrow=narrow, group_size=group_size)

    def fields(self, r: int, c: int) -> Fields:
        narrow, size = self.narrow, self.group_size
        wide, groups, parts = c - narrow, TwoFour.groups(narrow, size), groups_of(r, SECOND_GROUP)
        fields: Fields = {"blocks": (Dtype.U8, (row_bytes(groups_of(c, BLOCK), 1, 1),))}
        if narrow:
            fields["scale_scales"] = (Dtype.F16, (parts, groups))
            fields["scale_zeros"] = (Dtype.U8, (parts, row_bytes(groups, 4, 1)))
        if wide:
            fields["wide_scales"] = (Dtype.F16, (r,))
            fields["wide_zeros"] = (Dtype.U8, (row_bytes(r, 4, 1),))
        if TwoFour.is_aligned(narrow, c, size):
            units = wide // BLOCK
            return fields | {
                "codes": (Dtype.U8, (r, units, 16)),
                "rest": (Dtype.U8, (r, units, 4)),
                "grids": (Dtype.U16, (r, units)),
            }
        if narrow:
            fields["narrow_codes"] = (Dtype.U8, (r, row_bytes(narrow, 2, 4)))
            fields["zeros"] = (Dtype.U8, (r, row_bytes(groups, 2, 1)))
            fields["scale_codes"] = (Dtype.U8, (r, row_bytes(groups, 4, 1)))
        if wide:
            fields["wide_codes"] = (Dtype.U8, (r, row_bytes(wide, 4, 4)))
        return fields

    def read(self, tensors: Mapping[str, Tensor], r: int, c: int) -> TwoFour:
        narrow, size = self.narrow, self.group_size
        groups, parts = TwoFour.groups(narrow, size), groups_of(r, SECOND_GROUP)
        mask = unpack_bits(tensors["blocks"][None], 1, groups_of(c, BLOCK))[0].bool()
        at_2, at_4 = TwoFour.channels(mask, c)
        device = mask.device
        nothing = torch.zeros(r, 0, dtype=torch.uint8, device=device)
        low = high = zeros = scale_codes = nothing
        if TwoFour.is_aligned(narrow, c, size):
            first, rest = tensors["codes"], tensors["rest"]
            low = unpack_bits(first[..., :12].reshape(r, -1), 2, narrow)
            high = unpack_bits(torch.cat([first[..., 12:], rest], dim=-1).reshape(r, -1), 4, c - narrow)
            grids = tensors["grids"].view(torch.int16).int() & 0xFFFF
            zeros = torch.stack([grids & 3, grids >> 2 & 3, grids >> 4 & 3], -1).flatten(1).to(torch.uint8)
            scales = torch.stack([grids >> 6 & 15, grids >> 10 & 7, grids >> 13], -1)
            scale_codes = scales.flatten(1).to(torch.uint8)
        else:
            if narrow:
                low = unpack_bits(tensors["narrow_codes"], 2, narrow)
                zeros = unpack_bits(tensors["zeros"], 2, groups)
                scale_codes = unpack_bits(tensors["scale_codes"], 4, groups)
            if narrow < c:
                high = unpack_bits(tensors["wide_codes"], 4, c - narrow)
        codes = torch.empty(r, c, dtype=torch.uint8, device=device)
        codes[:, at_2], codes[:, at_4] = low, high
        none = torch.zeros(parts, 0, dtype=torch.uint8, device=device)
        return TwoFour(
            mask,
            size,
            codes,
            zeros,
            scale_codes,
            tensors["scale_scales"] if narrow else none.half(),
            unpack_bits(tensors["scale_zeros"], 4, groups) if narrow else none,
            tensors["wide_scales"] if narrow < c else torch.zeros(r, device=device).half(),
            unpack_bits(tensors["wide_zeros"][None], 4, r)[0]
            if narrow < c
            else torch.zeros(r, dtype=torch.uint8, device=device),
        )

    def check(self, r: int, c: int, refuse: Refuse) -> None:
        if self.group_size not in (8, BLOCK):
            refuse(f"group_size {self.group_size!r} of 2-bit groups is not 8 or {BLOCK}")
        if not is_int(self.narrow, 0, c):
            refuse(f"{self.narrow!r} channels at 2 bits are not a number of them up to {c}")
        if self.rows is not None or self.cols is not None:
            refuse("a tile of 2 and 4 bits holds the whole matrix")
        if not isinstance(self.bits, int | float) or not 2 <= self.bits <= 4:
            refuse(f"average width {self.bits!r} is not between 2 and 4")
        if abs(self.bits - _average_width(self.narrow, c)) > 1e-9:
            average = _average_width(self.narrow, c)
            refuse(f"{self.narrow} of {c} channels at 2 bits are {average} bits, not {self.bits}")

    def check_tensors(self, tensors: Mapping[str, Tensor], r: int, c: int, refuse: Refuse) -> None:
        for field in ("scale_scales", "wide_scales"):
            if field in tensors:
                check_finite(field, tensors, refuse)
        mask = unpack_bits(tensors["blocks"][None], 1, groups_of(c, BLOCK))[0].bool()
        narrow = len(TwoFour.channels(mask, c)[0])
        if narrow != self.narrow:
            refuse(f"blocks give {narrow} channels 2 bits, the description {self.narrow}")
        if c % BLOCK and bool(mask[-1]):
            refuse(f"the last block has {c % BLOCK} of {BLOCK} channels, and 4 bits: it must have 2")


@dataclass(frozen=True)
class TwoFour:
    """One tile in format "two_four": blocks of 16 input channels at 2 bits, others at 4 (2/4/16, ICCAD 2024).

    2-bit groups have a 2-bit zero point and a scale that is itself rounded, over 16 output rows at a time:
    `scale = scale_scales * (scale_code + scale_zero)`. All 4-bit channels of a row share one scale and zero point.
    Where there are three 2-bit blocks to each 4-bit block, codes are stored in units of 128 bits and grids of 16.
    """

    wide: Tensor  # bool [blocks]: those at 4 bits; the last block may have fewer channels
    group_size: int  # channels of a 2-bit group: 16 or 8
    codes: Tensor  # uint8 [r, c], natural order
    zeros: Tensor  # uint8 [r, g] below 4, of the 2-bit groups in order
    scale_codes: Tensor  # uint8 [r, g] below 16; aligned: of every three, the second and third below 8
    scale_scales: Tensor  # float16 [ceil(r / 16), g]
    scale_zeros: Tensor  # uint8 [ceil(r / 16), g] below 16
    wide_scales: Tensor  # float16 [r]
    wide_zeros: Tensor  # uint8 [r] below 16

    rows: ClassVar = None
    cols: ClassVar = None

    @staticmethod
    def channels(wide: Tensor, c: int) -> tuple[Tensor, Tensor]:
        """The input channels at 2 bits and those at 4."""
        of_channel = wide.repeat_interleave(BLOCK)[:c]
        return (~of_channel).nonzero()[:, 0], of_channel.nonzero()[:, 0]

    @staticmethod
    def groups(narrow: int, group_size: int) -> int:
        """2-bit groups of so many 2-bit channels: a block that is cut short begins its own."""
        return narrow // BLOCK * (BLOCK // group_size) + groups_of(narrow % BLOCK, group_size)

    @staticmethod
    def is_aligned(narrow: int, c: int, group_size: int) -> bool:
        """Whether three 2-bit blocks go with each 4-bit block, all of them whole."""
        return group_size == BLOCK and c % BLOCK == 0 and narrow == 3 * (c - narrow)

    @staticmethod
    def group_of(narrow: int, group_size: int, device: torch.device | str = "cpu") -> Tensor:
        """The group of every 2-bit channel, int64 [narrow]."""
        at = torch.arange(narrow, device=device)
        return at // BLOCK * (BLOCK // group_size) + at % BLOCK // group_size

    @staticmethod
    def scale_tops(narrow: int, c: int, group_size: int) -> Tensor:
        """The largest code that each group's scale may have, int64 [g]: two of three have a bit less if aligned."""
        tops = torch.full((TwoFour.groups(narrow, group_size),), 15)
        if TwoFour.is_aligned(narrow, c, group_size):
            tops.view(-1, 3)[:, 1:] = 7
        return tops

    def scales(self) -> Tensor:
        """Scales of the 2-bit groups, float32 [r, g]."""
        zeros = _by_part(self.scale_zeros.float(), len(self.codes))
        return _by_part(self.scale_scales.float(), len(self.codes)) * (self.scale_codes.float() + zeros)

    def dequantize(self) -> Tensor:
        """The tile's weights, float32 [r, c]. Differentiable where the fields are float tensors (`finetune`)."""
        narrow, _ = self.channels(self.wide, self.codes.shape[1])
        scales = torch.cat([self.scales(), self.wide_scales.float()[:, None]], 1)
        zeros = torch.cat([self.zeros.float(), self.wide_zeros.float()[:, None]], 1)
        of_channel = torch.full((self.codes.shape[1],), scales.shape[1] - 1, device=scales.device)
        of_channel[narrow] = self.group_of(len(narrow), self.group_size, scales.device)
        return (self.codes.float() - zeros.index_select(1, of_channel)) * scales.index_select(1, of_channel)

    def layout(self) -> TwoFourLayout:
        c = self.codes.shape[1]
        return TwoFourLayout.of(len(self.channels(self.wide, c)[0]), c, self.group_size)

    def tensors(self) -> dict[str, Tensor]:
        r, c = self.codes.shape
        narrow, wide = self.channels(self.wide, c)
        fields = {"blocks": pack_bits(self.wide[None].to(torch.uint8), 1, 1)[0]}
        if len(narrow):
            fields |= {"scale_scales": self.scale_scales, "scale_zeros": pack_bits(self.scale_zeros, 4, 1)}
        if len(wide):
            fields |= {
                "wide_scales": self.wide_scales,
                "wide_zeros": pack_bits(self.wide_zeros[None], 4, 1)[0],
            }
        low, high = self.codes[:, narrow], self.codes[:, wide]
        if self.is_aligned(len(narrow), c, self.group_size):
            units = len(wide) // BLOCK
            first = pack_bits(low, 2, 1).view(r, units, 12)
            second = pack_bits(high, 4, 1).view(r, units, 8)
            zeros, scales = (t.view(r, units, 3).int() for t in (self.zeros, self.scale_codes))
            grid = zeros[..., 0] | zeros[..., 1] << 2 | zeros[..., 2] << 4
            grid |= scales[..., 0] << 6 | scales[..., 1] << 10 | scales[..., 2] << 13
            return fields | {
                "codes": torch.cat([first, second[..., :4]], dim=-1),
                "rest": second[..., 4:],
                "grids": grid.to(torch.int16).view(torch.uint16),
            }
        if len(narrow):
            fields |= {
                "narrow_codes": pack_bits(low, 2, 4),
                "zeros": pack_bits(self.zeros, 2, 1),
                "scale_codes": pack_bits(self.scale_codes, 4, 1),
            }
        return fields | {"wide_codes": pack_bits(high, 4, 4)} if len(wide) else fields


def _by_part(of_parts: Tensor, rows: int) -> Tensor:
    """What is stored once for 16 rows, for each of them: [ceil(rows / 16), g] -> [rows, g]."""
    return of_parts.repeat_interleave(SECOND_GROUP, 0)[:rows]


def _average_width(narrow: int, c: int) -> float:
    return 2 + 2 * (c - narrow) / c
