"""Format "codebook": bitplanes of codes, and a table of values per row or per input channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from anybit.config import CODEBOOK_BITS
from anybit.formats.base import Fields, Refuse, check_finite, is_int
from anybit.formats.bits import pack_bits, pack_planes, row_bytes, unpack_bits, unpack_planes


def decode_table(table: Tensor, scale: Tensor | None, minimum: Tensor | None) -> Tensor:
    """Entries [n, entries] of a codebook's table: as they are without a scale [n], else `minimum + scale * code`."""
    if scale is None or minimum is None:
        return table
    return minimum.float()[:, None] + scale.float()[:, None] * table.float()


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
                check_finite(field, tensors, refuse)
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
