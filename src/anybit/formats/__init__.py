"""The stored formats: what one tile of a quantized matrix, or its sparse part, can look like (docs/formats.md).

Each format is one class: the readable form, its canonical tensors, and what a reader must check. Adding a format is
adding a class here and to `FORMATS`; methods, files, sizes and `inspect` follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from anybit.config import CODEBOOK_BITS
from anybit.errors import InputError
from anybit.formats import tables as shapes
from anybit.formats.bits import (
    PLANE_ALIGN,
    code_align,
    groups_of,
    pack_bits,
    pack_codes,
    pack_planes,
    packed_shape,
    row_bytes,
    unpack_bits,
    unpack_codes,
    unpack_planes,
)

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


def activations_of(bits: int, static: bool) -> dict[str, Any]:
    """What a tile's description says of its activations; nothing where they stay as they come."""
    if bits == 16:
        return {}
    return {"act_bits": bits, "act_static": True} if static else {"act_bits": bits}


def decode_table(table: Tensor, scale: Tensor | None, minimum: Tensor | None) -> Tensor:
    """Entries [n, entries] of a codebook's table: as they are without a scale [n], else `minimum + scale * code`."""
    if scale is None or minimum is None:
        return table
    return minimum.float()[:, None] + scale.float()[:, None] * table.float()


@dataclass(frozen=True)
class GroupInt:
    """One tile in format "group int": `w[i, j] = scales[i, g] * (codes[i, j] - zero[i, g])`, g = j // group_size.

    `zero` is `zeros` where present (asymmetric) and `2**(bits - 1)` otherwise (symmetric).
    The last group is shorter where `c` is not a multiple of `group_size`.

    With `act_bits` below 16 the tile multiplies integers: its inputs are rounded, per token, to a symmetric grid of
    that width in the same groups as the weights. The grid reaches `act_clip` times a group's largest magnitude
    (dynamic), or has the scale `act_scales` (static).
    """

    NAME: ClassVar = "group_int"

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

    def describe(self) -> dict[str, Any]:
        tile: dict[str, Any] = {
            "format": self.NAME,
            "bits": self.bits,
            "group_size": self.group_size,
            "symmetric": self.zeros is None,
        }
        return tile | activations_of(self.act_bits, self.act_scales is not None)

    def tensors(self) -> dict[str, Tensor]:
        fields = {"codes": pack_codes(self.codes, self.bits, code_align(self.bits)), "scales": self.scales}
        fields |= {} if self.zeros is None else {"zeros": pack_codes(self.zeros, self.bits, 1)}
        fields |= {} if self.act_clip is None else {"act_clip": self.act_clip}
        return fields if self.act_scales is None else fields | {"act_scales": self.act_scales}

    @staticmethod
    def fields(tile: Mapping[str, Any], r: int, c: int) -> Fields:
        bits, groups = tile["bits"], groups_of(c, tile["group_size"])
        fields: Fields = {
            "codes": (torch.uint8, packed_shape(r, c, bits, code_align(bits))),
            "scales": (torch.float16, (r, groups)),
        }
        if not tile["symmetric"]:
            fields["zeros"] = (torch.uint8, packed_shape(r, groups, bits, 1))
        if "act_bits" in tile:
            fields["act_scales" if tile.get("act_static") else "act_clip"] = (torch.float16, (groups,))
        return fields

    @staticmethod
    def read(tile: Mapping[str, Any], tensors: Mapping[str, Tensor], r: int, c: int) -> GroupInt:
        bits, group_size, zeros = tile["bits"], tile["group_size"], tensors.get("zeros")
        return GroupInt(
            bits,
            group_size,
            codes=unpack_codes(tensors["codes"], bits, c),
            scales=tensors["scales"],
            zeros=None if zeros is None else unpack_codes(zeros, bits, groups_of(c, group_size)),
            rows=tensors.get("rows"),
            cols=tensors.get("cols"),
            act_bits=tile.get("act_bits", 16),
            act_clip=tensors.get("act_clip"),
            act_scales=tensors.get("act_scales"),
        )

    @staticmethod
    def check_description(tile: Mapping[str, Any], refuse: Refuse) -> None:
        if not is_int(tile.get("bits"), 1, 8):
            refuse(f"width {tile.get('bits')!r} is not one of 1..8 bits")
        if "act_bits" in tile and not is_int(tile["act_bits"], 2, 8):
            refuse(f"activations of {tile['act_bits']!r} bits are not of 2..8")
        if not isinstance(tile.get("act_static", False), bool):
            refuse(f"act_static {tile['act_static']!r} is not true or false")
        if not is_int(tile.get("group_size"), 1, 2**31 - 1) or not isinstance(tile.get("symmetric"), bool):
            refuse(f"tile {dict(tile)!r} needs a positive group_size and symmetric true or false")

    @staticmethod
    def check_tensors(
        tile: Mapping[str, Any], tensors: Mapping[str, Tensor], r: int, c: int, refuse: Refuse
    ) -> None:
        _check_finite("scales", tensors, refuse)
        for field, most in (("act_clip", 1.0), ("act_scales", torch.inf)):
            if field in tensors:
                _check_finite(field, tensors, refuse)
                if not ((tensors[field] > 0) & (tensors[field] <= most)).all():
                    refuse(f"{field} is not above 0" + (" and up to 1" if most == 1 else ""))


@dataclass(frozen=True)
class Codebook:
    """One tile in format "codebook": `w[i, j] = table[i, code[i, j]]`, a table per row and stored width.

    Nested: the code at a width is the leading bits of the widest one, so entries 2q and 2q + 1 of a table are the
    children of entry q of the table one bit narrower. With `by_channel` the tile is held transposed, a table per
    input channel.
    """

    NAME: ClassVar = "codebook"

    widths: tuple[int, ...]  # ascending, 1..8: the widths that can be run
    codes: Tensor  # uint8 [n, m] at the widest; n = r and m = c, by channel n = c and m = r
    tables: tuple[Tensor, ...]  # per width [n, entries], ascending: float16, or uint8 below 2**table_bits
    by_channel: bool = False
    table_bits: int = 16  # 8 or 4: an entry is table_min + table_scale * code
    table_scale: Tensor | None = None  # float16 [n], shared by all widths
    table_min: Tensor | None = None  # float16 [n]
    rows: Tensor | None = None  # as in GroupInt
    cols: Tensor | None = None

    @property
    def bits(self) -> int:
        return self.widths[-1]

    def values(self, width: int) -> Tensor:
        """The table of a width, float32 [n, entries]."""
        table = self.tables[self.widths.index(width)]
        return decode_table(table, self.table_scale, self.table_min).float()

    @staticmethod
    def read_table(tile: Mapping[str, Any], tensors: Mapping[str, Tensor], width: int, m: int) -> Tensor:
        """The table of a width from stored tensors [n, entries]: float16, or codes of `table_bits` bits."""
        table = tensors[f"codebook_{width}"]
        if tile["table_bits"] == 16:
            return table
        return unpack_bits(table, tile["table_bits"], Codebook.entries(tile, width, m))

    def dequantize(self, width: int | None = None) -> Tensor:
        """The tile's weights at a stored width (default: the widest), float32 [r, c]."""
        width = width or self.bits
        dense = self.values(width).gather(1, (self.codes >> (self.bits - width)).long())
        return dense.T if self.by_channel else dense

    def describe(self) -> dict[str, Any]:
        return {
            "format": self.NAME,
            "bits": self.bits,
            "widths": list(self.widths),
            "by_channel": self.by_channel,
            "table_bits": self.table_bits,
        }

    def tensors(self) -> dict[str, Tensor]:
        fields = {"planes": pack_planes(self.codes, self.bits).view(torch.uint32)}
        for width, table in zip(self.widths, self.tables):
            fields[f"codebook_{width}"] = (
                table if self.table_bits == 16 else pack_bits(table, self.table_bits, 1)
            )
        if self.table_scale is not None and self.table_min is not None:
            fields |= {"codebook_scale": self.table_scale, "codebook_min": self.table_min}
        return fields

    @staticmethod
    def entries(tile: Mapping[str, Any], width: int, m: int) -> int:
        """Entries of a table: 2**width, but no more than a channel has weights."""
        return min(2**width, m) if tile["by_channel"] else 2**width

    @staticmethod
    def fields(tile: Mapping[str, Any], r: int, c: int) -> Fields:
        n, m = (c, r) if tile["by_channel"] else (r, c)
        table_bits = tile["table_bits"]
        fields: Fields = {"planes": (torch.uint32, (tile["bits"], n, -(-m // 32)))}
        for width in tile["widths"]:
            entries = Codebook.entries(tile, width, m)
            if table_bits == 16:
                fields[f"codebook_{width}"] = (torch.float16, (n, entries))
            else:
                fields[f"codebook_{width}"] = (torch.uint8, (n, row_bytes(entries, table_bits, 1)))
        if table_bits != 16:
            fields |= {"codebook_scale": (torch.float16, (n,)), "codebook_min": (torch.float16, (n,))}
        return fields

    @staticmethod
    def read(tile: Mapping[str, Any], tensors: Mapping[str, Tensor], r: int, c: int) -> Codebook:
        m = r if tile["by_channel"] else c
        return Codebook(
            widths=tuple(tile["widths"]),
            codes=unpack_planes(tensors["planes"].view(torch.uint8), m),
            tables=tuple(Codebook.read_table(tile, tensors, width, m) for width in tile["widths"]),
            by_channel=tile["by_channel"],
            table_bits=tile["table_bits"],
            table_scale=tensors.get("codebook_scale"),
            table_min=tensors.get("codebook_min"),
            rows=tensors.get("rows"),
            cols=tensors.get("cols"),
        )

    @staticmethod
    def check_description(tile: Mapping[str, Any], refuse: Refuse) -> None:
        widths: Any = tile.get("widths")
        if not isinstance(widths, list | tuple) or not widths or not all(is_int(b, 1, 8) for b in widths):
            refuse(f"widths {widths!r} are not a list of widths from 1 to 8")
        if list(widths) != sorted(set(widths)) or tile.get("bits") != widths[-1]:
            refuse(f"widths {widths!r} must ascend to the tile's width, {tile.get('bits')!r}")
        if tile.get("table_bits") not in CODEBOOK_BITS or not isinstance(tile.get("by_channel"), bool):
            refuse(f"tile {dict(tile)!r} needs table_bits of {CODEBOOK_BITS} and by_channel true or false")
        if tile["by_channel"] and "rows" in tile:
            refuse("a codebook by channel holds all output rows, not some")

    @staticmethod
    def check_tensors(
        tile: Mapping[str, Any], tensors: Mapping[str, Tensor], r: int, c: int, refuse: Refuse
    ) -> None:
        for field in tensors:
            if field.startswith("codebook"):
                _check_finite(field, tensors, refuse)
        scale = tensors.get("codebook_scale")
        if scale is not None and (scale < 0).any():
            refuse("codebook_scale is negative")
        m = r if tile["by_channel"] else c
        for width in tile["widths"]:
            table = Codebook.read_table(tile, tensors, width, m)
            if not (table[:, 1:] >= table[:, :-1]).all():
                refuse(f"codebook_{width} does not ascend")
        entries = Codebook.entries(tile, tile["bits"], m)
        if entries < 2 ** tile["bits"]:  # by channel, a table may have fewer entries than codes could name
            codes = unpack_planes(tensors["planes"].view(torch.uint8), 32 * tensors["planes"].shape[2])
            if int(codes.max()) >= entries:
                refuse(f"planes hold the code {int(codes.max())} of a table with {entries} entries")


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
        _check_finite("values", tensors, refuse)


BLOCK = 16  # input channels that have one width in a "two_four" tile
SECOND_GROUP = 16  # output rows whose scales share a second-order grid


@dataclass(frozen=True)
class TwoFour:
    """One tile in format "two_four": blocks of 16 input channels at 2 bits, others at 4 (2/4/16, ICCAD 2024).

    2-bit groups have a 2-bit zero point and a scale that is itself rounded, over 16 output rows at a time:
    `scale = scale_scales * (scale_code + scale_zero)`. All 4-bit channels of a row share one scale and zero point.
    Where there are three 2-bit blocks to each 4-bit block, codes are stored in units of 128 bits and grids of 16.
    """

    NAME: ClassVar = "two_four"

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

    @property
    def bits(self) -> float:
        return _average_width(
            int(self.channels(self.wide, self.codes.shape[1])[0].numel()), self.codes.shape[1]
        )

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

    def describe(self) -> dict[str, Any]:
        c = self.codes.shape[1]
        return self.description(len(self.channels(self.wide, c)[0]), c, self.group_size)

    @staticmethod
    def description(narrow: int, c: int, group_size: int) -> dict[str, Any]:
        """The description of a tile with `narrow` of its `c` channels at 2 bits."""
        return {
            "format": TwoFour.NAME,
            "bits": _average_width(narrow, c),
            "narrow": narrow,
            "group_size": group_size,
        }

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

    @staticmethod
    def fields(tile: Mapping[str, Any], r: int, c: int) -> Fields:
        narrow, size = tile["narrow"], tile["group_size"]
        wide, groups, parts = c - narrow, TwoFour.groups(narrow, size), groups_of(r, SECOND_GROUP)
        fields: Fields = {"blocks": (torch.uint8, (row_bytes(groups_of(c, BLOCK), 1, 1),))}
        if narrow:
            fields["scale_scales"] = (torch.float16, (parts, groups))
            fields["scale_zeros"] = (torch.uint8, (parts, row_bytes(groups, 4, 1)))
        if wide:
            fields["wide_scales"] = (torch.float16, (r,))
            fields["wide_zeros"] = (torch.uint8, (row_bytes(r, 4, 1),))
        if TwoFour.is_aligned(narrow, c, size):
            units = wide // BLOCK
            return fields | {
                "codes": (torch.uint8, (r, units, 16)),
                "rest": (torch.uint8, (r, units, 4)),
                "grids": (torch.uint16, (r, units)),
            }
        if narrow:
            fields["narrow_codes"] = (torch.uint8, (r, row_bytes(narrow, 2, 4)))
            fields["zeros"] = (torch.uint8, (r, row_bytes(groups, 2, 1)))
            fields["scale_codes"] = (torch.uint8, (r, row_bytes(groups, 4, 1)))
        if wide:
            fields["wide_codes"] = (torch.uint8, (r, row_bytes(wide, 4, 4)))
        return fields

    @staticmethod
    def read(tile: Mapping[str, Any], tensors: Mapping[str, Tensor], r: int, c: int) -> TwoFour:
        narrow, size = tile["narrow"], tile["group_size"]
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

    @staticmethod
    def check_description(tile: Mapping[str, Any], refuse: Refuse) -> None:
        if tile.get("group_size") not in (8, BLOCK):
            refuse(f"group_size {tile.get('group_size')!r} of 2-bit groups is not 8 or {BLOCK}")
        if not is_int(tile.get("narrow"), 0, 2**31 - 1):
            refuse(f"{tile.get('narrow')!r} channels at 2 bits are not a number of them")
        if "rows" in tile or "cols" in tile:
            refuse("a tile of 2 and 4 bits holds the whole matrix")
        if not isinstance(tile.get("bits"), int | float) or not 2 <= tile["bits"] <= 4:
            refuse(f"average width {tile.get('bits')!r} is not between 2 and 4")

    @staticmethod
    def check_tensors(
        tile: Mapping[str, Any], tensors: Mapping[str, Tensor], r: int, c: int, refuse: Refuse
    ) -> None:
        for field in ("scale_scales", "wide_scales"):
            if field in tensors:
                _check_finite(field, tensors, refuse)
        mask = unpack_bits(tensors["blocks"][None], 1, groups_of(c, BLOCK))[0].bool()
        narrow = len(TwoFour.channels(mask, c)[0])
        if narrow != tile["narrow"]:
            refuse(f"blocks give {narrow} channels 2 bits, the description {tile['narrow']}")
        if c % BLOCK and bool(mask[-1]):
            refuse(f"the last block has {c % BLOCK} of {BLOCK} channels, and 4 bits: it must have 2")
        if abs(tile["bits"] - _average_width(narrow, c)) > 1e-9:
            refuse(
                f"{narrow} of {c} channels at 2 bits are {_average_width(narrow, c)} bits, not {tile['bits']}"
            )


def _by_part(of_parts: Tensor, rows: int) -> Tensor:
    """What is stored once for 16 rows, for each of them: [ceil(rows / 16), g] -> [rows, g]."""
    return of_parts.repeat_interleave(SECOND_GROUP, 0)[:rows]


def _average_width(narrow: int, c: int) -> float:
    return 2 + 2 * (c - narrow) / c


@dataclass(frozen=True)
class Nested:
    """One tile in format "nested": the whole matrix, every output row at a width of its own (the method `anybit`).

    Rows are stored in order of falling sensitivity, so that no row is wider than the one before: the plane of bit p
    (the most significant is 1) holds the first `counts[p - 1]` rows, and a matrix of fewer bits is made of the
    beginnings of the same planes. A weight is its row's scale times an entry of the row's shape (`shapes`), but for
    some input channels, which are kept as they are.
    """

    NAME: ClassVar = "nested"

    counts: tuple[int, ...]  # rows of every plane, above 0 and not ascending; the first is r
    order: Tensor  # int64 [r]: the output row of each stored row
    scales: Tensor  # float16 [r]
    shapes: Tensor  # uint8 [r] below 16
    codes: Tensor  # uint8 [r, c - k], natural order without the kept channels; a row's code at its own width
    kept: Tensor  # int64 [k], ascending input channels
    kept_values: Tensor  # float16 [r, k]

    rows: ClassVar = None
    cols: ClassVar = None

    @property
    def bits(self) -> float:
        return sum(self.counts) / len(self.order)

    @staticmethod
    def spans(counts: Sequence[int]) -> list[tuple[int, int, int]]:
        """(width, first, last) of the stored rows of every width, the widest first."""
        ends = [*counts, 0]
        return [(b, ends[b], ends[b - 1]) for b in range(len(counts), 0, -1) if ends[b] < ends[b - 1]]

    def dequantize(self) -> Tensor:
        """The matrix [r, c], float32."""
        k, device = len(self.kept), self.codes.device
        stored = torch.empty(self.codes.shape, device=device)
        for bits, first, last in self.spans(self.counts):
            of_rows = shapes.table(bits).to(device)[self.shapes[first:last].long()]
            entries = of_rows * self.scales[first:last, None].float()
            stored[first:last] = entries.gather(1, self.codes[first:last].long())
        dense = torch.empty(len(self.order), self.codes.shape[1] + k, device=device)
        dense[self.order[:, None], self.coded(k + self.codes.shape[1], self.kept)] = stored
        dense[self.order[:, None], self.kept] = self.kept_values.float()
        return dense

    @staticmethod
    def coded(c: int, kept: Tensor) -> Tensor:
        """The input channels that have codes, int64 [c - k]."""
        mask = torch.ones(c, dtype=torch.bool, device=kept.device)
        mask[kept] = False
        return mask.nonzero()[:, 0]

    @staticmethod
    def description(counts: Sequence[int], kept: int) -> dict[str, Any]:
        bits = sum(counts) / counts[0]
        return {
            "format": Nested.NAME,
            "bits": int(bits) if bits.is_integer() else bits,
            "counts": list(counts),
            "kept": kept,
        }

    def describe(self) -> dict[str, Any]:
        return self.description(self.counts, len(self.kept))

    def tensors(self) -> dict[str, Tensor]:
        r = len(self.order)
        fields = {
            "order": _index(self.order, r),
            "scales": self.scales,
            "shapes": pack_bits(self.shapes[None], 4, 1)[0],
        }
        if len(self.kept):
            fields["kept"] = _index(self.kept, self.codes.shape[1] + len(self.kept))
            fields["kept_values"] = self.kept_values
        widths = torch.zeros(r, dtype=torch.uint8, device=self.codes.device)
        for bits, first, last in self.spans(self.counts):
            widths[first:last] = bits
        for p, n in enumerate(self.counts, 1):
            bit = self.codes[:n] >> (widths[:n, None] - p) & 1
            fields[f"plane_{p}"] = pack_bits(bit, 1, PLANE_ALIGN).view(torch.uint32)
        return fields

    @staticmethod
    def fields(tile: Mapping[str, Any], r: int, c: int) -> Fields:
        fields: Fields = {
            "order": (_index_type(r), (r,)),
            "scales": (torch.float16, (r,)),
            "shapes": (torch.uint8, (row_bytes(r, 4, 1),)),
        }
        if tile["kept"]:
            fields["kept"] = (_index_type(c), (tile["kept"],))
            fields["kept_values"] = (torch.float16, (r, tile["kept"]))
        words = groups_of(c - tile["kept"], 32)
        return fields | {f"plane_{p}": (torch.uint32, (n, words)) for p, n in enumerate(tile["counts"], 1)}

    @staticmethod
    def read(tile: Mapping[str, Any], tensors: Mapping[str, Tensor], r: int, c: int) -> Nested:
        counts, k = tuple(tile["counts"]), tile["kept"]
        device = tensors["scales"].device
        codes = torch.zeros(r, c - k, dtype=torch.uint8, device=device)
        for p, n in enumerate(counts, 1):
            codes[:n] = codes[:n] << 1 | unpack_bits(tensors[f"plane_{p}"].view(torch.uint8), 1, c - k)
        order, kinds, scales, kept = Nested.read_grid(tile, tensors, r)
        values = tensors["kept_values"] if k else torch.zeros(r, 0, dtype=torch.float16, device=device)
        return Nested(counts, order, scales, kinds, codes, kept, values)

    @staticmethod
    def read_grid(
        tile: Mapping[str, Any], tensors: Mapping[str, Tensor], r: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What there is beside codes and values: order int64, shapes uint8, scales float16 [r], kept int64 [k]."""
        nothing = torch.zeros(0, dtype=torch.int64, device=tensors["order"].device)
        kept = _wide_index(tensors["kept"]) if tile["kept"] else nothing
        kinds = unpack_bits(tensors["shapes"][None], 4, r)[0]
        return _wide_index(tensors["order"]), kinds, tensors["scales"], kept

    @staticmethod
    def check_description(tile: Mapping[str, Any], refuse: Refuse) -> None:
        counts: Any = tile.get("counts")
        if not isinstance(counts, list | tuple) or not 1 <= len(counts) <= 8:
            refuse(f"counts {counts!r} are not the rows of 1 to 8 planes")
        if not all(is_int(n, 1, 2**31 - 1) for n in counts) or list(counts) != sorted(counts, reverse=True):
            refuse(f"counts {counts!r} of planes must be above 0 and not ascend")
        if "rows" in tile or "cols" in tile:
            refuse("a nested tile holds the whole matrix")
        if tile.get("bits") != sum(counts) / counts[0]:
            refuse(f"average width {tile.get('bits')!r} is not that of the counts {counts!r}")
        if not is_int(tile.get("kept"), 0, 2**31 - 1):
            refuse(f"{tile.get('kept')!r} kept channels are not a number of them")

    @staticmethod
    def check_tensors(
        tile: Mapping[str, Any], tensors: Mapping[str, Tensor], r: int, c: int, refuse: Refuse
    ) -> None:
        _check_finite("scales", tensors, refuse)
        if (tensors["scales"] < 0).any():
            refuse("scales are negative")
        if not torch.equal(_wide_index(tensors["order"]).sort().values.cpu(), torch.arange(r)):
            refuse(f"order does not name each of {r} output rows once")
        if tile["kept"]:
            _check_finite("kept_values", tensors, refuse)
            kept = _wide_index(tensors["kept"])
            if int(kept.min()) < 0 or int(kept.max()) >= c or (kept.diff() <= 0).any():
                refuse(f"kept channels do not ascend within 0..{c - 1}")


def _index_type(size: int) -> torch.dtype:
    """What numbers below `size` are stored as."""
    return torch.uint16 if size <= MAX_UINT16 else torch.int32


def _index(values: Tensor, size: int) -> Tensor:
    """Numbers int64 below `size` as they are stored; PyTorch casts to int16 by dropping the high bits."""
    narrow = values.to(torch.int32)
    return narrow.to(torch.int16).view(torch.uint16) if size <= MAX_UINT16 else narrow


def _wide_index(stored: Tensor) -> Tensor:
    """Inverse of `_index`."""
    return stored.view(torch.int16).long() & 0xFFFF if stored.dtype == torch.uint16 else stored.long()


Tile = GroupInt | Codebook | Float16 | TwoFour | Nested
FORMATS: dict[str, type[GroupInt] | type[Codebook] | type[Float16] | type[TwoFour] | type[Nested]] = {
    format_.NAME: format_ for format_ in (GroupInt, Codebook, Float16, TwoFour, Nested)
}


@dataclass(frozen=True)
class Sparse:
    """Weights that are added to the tiles', compressed by rows (CSR)."""

    values: Tensor  # float16 [n]
    columns: Tensor  # int64 [n], ascending within a row
    row_ptr: Tensor  # int32 [out + 1]

    @staticmethod
    def of(dense: Tensor, mask: Tensor) -> Sparse:
        """The entries of dense [out, in] that a mask picks."""
        counts = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask.sum(1).cumsum(0)])
        return Sparse(to_half(dense[mask]), mask.nonzero()[:, 1], counts.to(torch.int32))

    @cached_property
    def rows(self) -> Tensor:
        """Output row of each value, int64 [n]."""
        counts = self.row_ptr.diff().long()
        return torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)

    def add_to(self, dense: Tensor) -> None:
        """`dense [out, in] += self`."""
        dense[self.rows, self.columns] += self.values.to(dense.dtype)

    def add_product(self, x: Tensor, y: Tensor) -> None:
        """`y [tokens, out] += x [tokens, in] @ self^T`."""
        y.index_add_(1, self.rows, x[:, self.columns] * self.values.float())

    def tensors(self, in_features: int) -> dict[str, Tensor]:
        index = self.columns.to(torch.int32)
        narrow = in_features <= MAX_UINT16  # PyTorch casts to int16 by dropping the high bits
        columns = index.to(torch.int16).view(torch.uint16) if narrow else index.view(torch.uint32)
        return {"values": self.values, "columns": columns, "row_ptr": self.row_ptr}

    @staticmethod
    def fields(n: int, shape: tuple[int, int]) -> Fields:
        index = torch.uint16 if shape[1] <= MAX_UINT16 else torch.uint32
        return {
            "values": (torch.float16, (n,)),
            "columns": (index, (n,)),
            "row_ptr": (torch.int32, (shape[0] + 1,)),
        }

    @staticmethod
    def read(tensors: Mapping[str, Tensor]) -> Sparse:
        columns = tensors["columns"]
        if columns.dtype == torch.uint16:
            columns = columns.view(torch.int16).long() & 0xFFFF
        else:
            columns = columns.view(torch.int32).long()
        return Sparse(tensors["values"], columns, tensors["row_ptr"])

    @staticmethod
    def check_tensors(tensors: Mapping[str, Tensor], shape: tuple[int, int], refuse: Refuse) -> None:
        _check_finite("values", tensors, refuse)
        pointers = tensors["row_ptr"].long()
        if pointers[0] != 0 or pointers[-1] != len(tensors["values"]) or (pointers.diff() < 0).any():
            refuse("row_ptr does not ascend from 0 to the number of values")
        columns = Sparse.read(tensors).columns
        if len(columns) and not (int(columns.min()) >= 0 and int(columns.max()) < shape[1]):
            refuse(f"columns point outside 0..{shape[1] - 1}")
        first = torch.zeros(len(columns) + 1, dtype=torch.bool)
        first[pointers] = True
        if not ((columns.diff() > 0) | first[1:-1]).all():
            refuse("columns must ascend within each row")


def _check_finite(field: str, tensors: Mapping[str, Tensor], refuse: Refuse) -> None:
    tensor = tensors[field]
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        refuse(f"{field} holds NaN or Inf")
