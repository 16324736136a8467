"""Format "codebook": bitplanes of codes, and a table of values per row or per input channel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from anybit.config import CODEBOOK_BITS
from anybit.formats.base import Fields, Refuse, TileLayout, check_finite, count, is_int
from anybit.formats.bits import pack_bits, pack_planes, row_bytes, unpack_bits, unpack_planes
from anybit.formats.dtypes import Dtype
from anybit.lazy import Tensor, torch


def decode_table(table: Tensor, scale: Tensor | None, minimum: Tensor | None) -> Tensor:
    """Entries [n, entries] of a codebook's table: as they are without a scale [n], else `minimum + scale * code`."""
    if scale is None or minimum is None:
        return table
    return minimum.float()[:, None] + scale.float()[:, None] * table.float()


@dataclass(frozen=True, kw_only=True)
class CodebookLayout(TileLayout):
    """How a tile in format "codebook" is stored: n tables, each for m weights."""

    NAME: ClassVar = "codebook"

    widths: tuple[int, ...]  # ascending; each has a table, the last is `bits`
    by_channel: bool  # n input channels of m = r weights, instead of n = r rows
    table_bits: int  # 16, 8 or 4: of a table's entry

    @staticmethod
    def of(
        widths: Sequence[int], by_channel: bool, table_bits: int, cols: int | None = None
    ) -> CodebookLayout:
        return CodebookLayout(
            bits=widths[-1], widths=tuple(widths), by_channel=by_channel, table_bits=table_bits, cols=cols
        )

    @property
    def readable_at(self) -> tuple[int, ...]:
        return self.widths if len(self.widths) > 1 and not self.by_channel else ()

    def at(self, width: int) -> CodebookLayout:
        return replace(self, bits=width, widths=(width,))

    def upto(self, width: int) -> CodebookLayout:
        return replace(self, bits=width, widths=tuple(b for b in self.widths if b <= width))

    def tables(self, r: int, c: int) -> tuple[int, int]:
        """How many tables there are, and how many weights each is for: n, m."""
        return (c, r) if self.by_channel else (r, c)

    def entries(self, width: int, m: int) -> int:
        """Entries of a table: 2**width, but no more than a channel has weights."""
        return min(2**width, m) if self.by_channel else 2**width

    def fields(self, r: int, c: int) -> Fields:
        n, m = self.tables(r, c)
        fields: Fields = {"planes": (Dtype.U32, (int(self.bits), n, -(-m // 32)))}
        for width in self.widths:
            entries = self.entries(width, m)
            if self.table_bits == 16:
                fields[f"codebook_{width}"] = (Dtype.F16, (n, entries))
            else:
                fields[f"codebook_{width}"] = (Dtype.U8, (n, row_bytes(entries, self.table_bits, 1)))
        if self.table_bits != 16:
            fields |= {"codebook_scale": (Dtype.F16, (n,)), "codebook_min": (Dtype.F16, (n,))}
        return fields

    def read_table(self, tensors: Mapping[str, Tensor], width: int, m: int) -> Tensor:
        """The table of a width from stored tensors [n, entries]: float16, or codes of `table_bits` bits."""
        table = tensors[f"codebook_{width}"]
        return table if self.table_bits == 16 else unpack_bits(table, self.table_bits, self.entries(width, m))

    def read(self, tensors: Mapping[str, Tensor], r: int, c: int) -> Codebook:
        _, m = self.tables(r, c)
        return Codebook(
            widths=self.widths,
            codes=unpack_planes(tensors["planes"].view(torch.uint8), m),
            tables=tuple(self.read_table(tensors, width, m) for width in self.widths),
            by_channel=self.by_channel,
            table_bits=self.table_bits,
            table_scale=tensors.get("codebook_scale"),
            table_min=tensors.get("codebook_min"),
            rows=tensors.get("rows"),
            cols=tensors.get("cols"),
        )

    def check(self, r: int, c: int, refuse: Refuse) -> None:
        widths: Any = self.widths
        if not isinstance(widths, tuple) or not widths or not all(is_int(b, 1, 8) for b in widths):
            refuse(f"widths {widths!r} are not a list of widths from 1 to 8")
        if list(widths) != sorted(set(widths)) or self.bits != widths[-1]:
            refuse(f"widths {list(widths)!r} must ascend to the tile's width, {self.bits!r}")
        if self.table_bits not in CODEBOOK_BITS or not isinstance(self.by_channel, bool):
            refuse(f"{self} needs table_bits of {CODEBOOK_BITS} and by_channel true or false")
        if self.by_channel and self.rows is not None:
            refuse("a codebook by channel holds all output rows, not some")

    def check_tensors(self, tensors: Mapping[str, Tensor], r: int, c: int, refuse: Refuse) -> None:
        for name in tensors:
            if name.startswith("codebook"):
                check_finite(name, tensors, refuse)
        scale = tensors.get("codebook_scale")
        if scale is not None and (scale < 0).any():
            refuse("codebook_scale is negative")
        _, m = self.tables(r, c)
        for width in self.widths:
            table = self.read_table(tensors, width, m)
            if not (table[:, 1:] >= table[:, :-1]).all():
                refuse(f"codebook_{width} does not ascend")
        entries = self.entries(self.widths[-1], m)
        if entries < 2 ** self.widths[-1]:  # by channel, a table may have fewer entries than codes could name
            codes = unpack_planes(tensors["planes"].view(torch.uint8), 32 * tensors["planes"].shape[2])
            if int(codes.max()) >= entries:
                refuse(f"planes hold the code {int(codes.max())} of a table with {entries} entries")


@dataclass(frozen=True)
class Codebook:
    """One tile in format "codebook": `w[i, j] = table[i, code[i, j]]`, a table per row and stored width.

    Nested: the code at a width is the leading bits of the widest one, so entries 2q and 2q + 1 of a table are the
    children of entry q of the table one bit narrower. With `by_channel` the tile is held transposed, a table per
    input channel.
    """

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

    def dequantize(self, width: int | None = None) -> Tensor:
        """The tile's weights at a stored width (default: the widest), float32 [r, c]."""
        width = width or self.bits
        dense = self.values(width).gather(1, (self.codes >> (self.bits - width)).long())
        return dense.T if self.by_channel else dense

    def layout(self) -> CodebookLayout:
        return CodebookLayout(
            bits=self.bits,
            widths=self.widths,
            by_channel=self.by_channel,
            table_bits=self.table_bits,
            rows=count(self.rows),
            cols=count(self.cols),
        )

    def tensors(self) -> dict[str, Tensor]:
        fields = {"planes": pack_planes(self.codes, self.bits).view(torch.uint32)}
        for width, table in zip(self.widths, self.tables):
            fields[f"codebook_{width}"] = (
                table if self.table_bits == 16 else pack_bits(table, self.table_bits, 1)
            )
        if self.table_scale is not None and self.table_min is not None:
            fields |= {"codebook_scale": self.table_scale, "codebook_min": self.table_min}
        return fields
