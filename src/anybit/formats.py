"""The stored formats: what one tile of a quantized matrix, or its sparse part, can look like (docs/formats.md).

Each format is one class: the readable form, its canonical tensors, and what a reader must check. Adding a format is
adding a class here and to `FORMATS`; methods, files, sizes and `inspect` follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from anybit.codes import (
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
from anybit.errors import InputError
from anybit.spec import CODEBOOK_BITS

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


Tile = GroupInt | Codebook | Float16
FORMATS: dict[str, type[GroupInt] | type[Codebook] | type[Float16]] = {
    format_.NAME: format_ for format_ in (GroupInt, Codebook, Float16)
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
