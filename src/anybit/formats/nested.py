"""Format "nested": bitplanes of which any beginnings are a matrix of fewer bits (the method anybit)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from anybit.formats import tables as shapes
from anybit.formats.base import (
    Fields,
    Refuse,
    TileLayout,
    check_finite,
    index,
    index_type,
    is_int,
    wide_index,
)
from anybit.formats.bits import PLANE_ALIGN, groups_of, pack_bits, row_bytes, unpack_bits
from anybit.formats.dtypes import Dtype
from anybit.lazy import Tensor, torch

CODED_PLANES = range(2, 5)  # that files may hold entropy-coded: the first is a sign, those below are noise
MAX_CODED = 1 << 40  # bytes of a stream
MOST_KEPT = 127  # the largest code of a kept channel, of either sign
KEPT_UNIT = 2.0**-14  # of a code times its size
GAIN_BITS = 3  # widths up to this have gains; 1 and 2 bits share one
GAIN_STEP = 1 / 64  # of a gain, which is 1 and up to 15 steps


@dataclass(frozen=True, kw_only=True)
class NestedLayout(TileLayout):
    """How a tile in format "nested" is stored."""

    NAME: ClassVar = "nested"

    counts: tuple[int, ...]  # rows of every plane, above 0 and not ascending
    kept: int  # input channels that have no codes in planes
    gains: bool = False  # whether rows of few bits are multiplied by a gain
    kept_bits: int = 16  # of a weight of the kept channels
    coded_bytes: int | None = None  # of the stream in place of `CODED_PLANES`; None: they are as in memory

    @staticmethod
    def of(counts: Sequence[int], kept: int, *, gains: bool = False, kept_bits: int = 16) -> NestedLayout:
        bits = sum(counts) / counts[0]
        exact = int(bits) if bits.is_integer() else bits
        kept_bits = kept_bits if kept else 16  # of nothing: as by default, so that it is not described
        return NestedLayout(bits=exact, counts=tuple(counts), kept=kept, gains=gains, kept_bits=kept_bits)

    def with_counts(self, counts: Sequence[int]) -> NestedLayout:
        """So many rows of every plane of the same matrix, in memory."""
        return self.of(counts, self.kept, gains=self.gains, kept_bits=self.kept_bits)

    def coded(self, c: int) -> int:
        return c - self.kept

    def fields(self, r: int, c: int) -> Fields:
        fields: Fields = {
            "order": (index_type(r), (r,)),
            "scales": (Dtype.F16, (r,)),
            "shapes": (Dtype.U8, (row_bytes(r, 4, 1),)),
        }
        if self.gains:
            fields["gains"] = (Dtype.U8, (r,))
        if self.kept:
            fields["kept"] = (index_type(c), (self.kept,))
            fields["kept_values"] = (Dtype.I8 if self.kept_bits == 8 else Dtype.F16, (r, self.kept))
            if self.kept_bits == 8:
                fields["kept_scales"] = (Dtype.F16, (self.kept,))
        words = groups_of(self.coded(c), 32)
        planes: Fields = {f"plane_{p}": (Dtype.U32, (n, words)) for p, n in enumerate(self.counts, 1)}
        if self.coded_bytes is not None:
            coded = {f"plane_{p}" for p in CODED_PLANES}
            planes = {field: entry for field, entry in planes.items() if field not in coded}
            planes["coded"] = (Dtype.U8, (self.coded_bytes,))
        return fields | planes

    def expanded(self) -> NestedLayout:
        return replace(self, coded_bytes=None)

    def read(self, tensors: Mapping[str, Tensor], r: int, c: int) -> Nested:
        device = tensors["scales"].device
        codes = torch.zeros(r, self.coded(c), dtype=torch.uint8, device=device)
        for p, n in enumerate(self.counts, 1):
            codes[:n] = codes[:n] << 1 | unpack_bits(
                tensors[f"plane_{p}"].view(torch.uint8), 1, self.coded(c)
            )
        order, kinds, scales, kept = self.read_grid(tensors, r)
        none = torch.zeros(r, 0, dtype=torch.float16, device=device)
        return Nested(
            self.counts, order, scales, kinds, codes, kept, tensors["kept_values"] if self.kept else none,
            tensors.get("gains"), tensors.get("kept_scales"),
        )  # fmt: skip

    def read_grid(self, tensors: Mapping[str, Tensor], r: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What there is beside codes and values: order int64, shapes uint8, scales float16 [r], kept int64 [k]."""
        nothing = torch.zeros(0, dtype=torch.int64, device=tensors["order"].device)
        kept = wide_index(tensors["kept"]) if self.kept else nothing
        kinds = unpack_bits(tensors["shapes"][None], 4, r)[0]
        return wide_index(tensors["order"]), kinds, tensors["scales"], kept

    def check(self, r: int, c: int, refuse: Refuse) -> None:
        counts: Any = self.counts
        if not isinstance(counts, tuple) or not 1 <= len(counts) <= 8:
            refuse(f"counts {counts!r} are not the rows of 1 to 8 planes")
        if not all(is_int(n, 1, 2**31 - 1) for n in counts) or list(counts) != sorted(counts, reverse=True):
            refuse(f"counts {list(counts)!r} of planes must be above 0 and not ascend")
        if self.rows is not None or self.cols is not None:
            refuse("a nested tile holds the whole matrix")
        if self.bits != sum(counts) / counts[0]:
            refuse(f"average width {self.bits!r} is not that of the counts {list(counts)!r}")
        if not is_int(self.kept, 0, 2**31 - 1):
            refuse(f"{self.kept!r} kept channels are not a number of them")
        if not is_int(self.kept_bits, 8, 16) or self.kept_bits not in (8, 16):
            refuse(f"kept_bits {self.kept_bits!r} is neither 8 nor 16")
        if self.kept == 0 and self.kept_bits != 16:
            refuse("kept_bits of a tile that keeps no channels")
        if not isinstance(self.gains, bool):
            refuse(f"gains {self.gains!r} is neither true nor false")
        if self.coded_bytes is not None and not is_int(self.coded_bytes, 1, MAX_CODED):
            refuse(f"{self.coded_bytes!r} bytes of coded planes are not a number of them")
        if counts[0] != r or self.kept >= c:
            refuse(f"counts and kept channels of {self} do not fit the matrix [{r}, {c}]")

    def check_tensors(self, tensors: Mapping[str, Tensor], r: int, c: int, refuse: Refuse) -> None:
        check_finite("scales", tensors, refuse)
        if (tensors["scales"] < 0).any():
            refuse("scales are negative")
        if not torch.equal(wide_index(tensors["order"]).sort().values.cpu(), torch.arange(r)):
            refuse(f"order does not name each of {r} output rows once")
        if self.kept:
            if self.kept_bits == 8:
                check_finite("kept_scales", tensors, refuse)
                if (tensors["kept_scales"] < 0).any():
                    refuse("kept_scales are negative")
            check_finite("kept_values", tensors, refuse)
            kept = wide_index(tensors["kept"])
            if int(kept.min()) < 0 or int(kept.max()) >= c or (kept.diff() <= 0).any():
                refuse(f"kept channels do not ascend within 0..{c - 1}")


def weights_of_kept(values: Tensor, scales: Tensor, kept_scales: Tensor | None) -> Tensor:
    """What values [r, k] of kept channels stand for, float32: themselves; or with scales [r] and [k] what codes do.

    A code `c` stands for `c |c|` times a unit: rows' weights over their scales differ much, and small ones need smaller
    steps than large ones.
    """
    values = values.float()
    if kept_scales is None:
        return values
    return values * values.abs() * (scales.float()[:, None] * (kept_scales.float() * KEPT_UNIT))


def codes_of_kept(weights: Tensor, scales: Tensor, kept_scales: Tensor) -> Tensor:
    """The codes int8 [r, k] of the nearest weights; 0 where a scale is."""
    units = scales.float()[:, None] * (kept_scales.float() * KEPT_UNIT)
    squares = torch.where(units > 0, weights.abs() / units, 0.0)
    sizes = (squares - 0.25).clamp(min=0).sqrt().round().clamp(max=MOST_KEPT)  # c^2 + c + 1/2 is halfway
    return (sizes * weights.sign()).to(torch.int8)


@dataclass(frozen=True)
class Nested:
    """One tile in format "nested": the whole matrix, every output row at a width of its own (the method `anybit`).

    Rows are stored in order of falling sensitivity, so that no row is wider than the one before: the plane of bit p
    (the most significant is 1) holds the first `counts[p - 1]` rows, and a matrix of fewer bits is made of the
    beginnings of the same planes. A weight is its row's scale times an entry of the row's shape (`shapes`), and at 1 to
    3 bits times the row's gain, but for some input channels, which are kept at more bits: as float16, or as
    int8 with a scale of the channel beside the row's (`weights_of_kept`).
    """

    counts: tuple[int, ...]  # rows of every plane, above 0 and not ascending; the first is r
    order: Tensor  # int64 [r]: the output row of each stored row
    scales: Tensor  # float16 [r]
    shapes: Tensor  # uint8 [r] below 16
    codes: Tensor  # uint8 [r, c - k], natural order without the kept channels; a row's code at its own width
    kept: Tensor  # int64 [k], ascending input channels
    kept_values: Tensor  # float16 [r, k]; or int8, with kept scales
    gains: Tensor | None = None  # uint8 [r]: steps of the gain at 3 bits times 16, and of that at 1 and 2
    kept_scales: Tensor | None = None  # float16 [k]

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

    @staticmethod
    def scales_at(scales: Tensor, gains: Tensor | None, bits: int) -> Tensor:
        """What tables of a width are multiplied by, float32 [r]: the scales, times the gains where there are any."""
        if gains is None or bits > GAIN_BITS:
            return scales.float()
        return scales.float() * (1 + GAIN_STEP * (gains >> 4 if bits == GAIN_BITS else gains & 15))

    @property
    def kept_weights(self) -> Tensor:
        """The weights of the kept channels, float32 [r, k]."""
        return weights_of_kept(self.kept_values, self.scales, self.kept_scales)

    def dequantize(self) -> Tensor:
        """The matrix [r, c], float32."""
        k, device = len(self.kept), self.codes.device
        stored = torch.empty(self.codes.shape, device=device)
        for bits, first, last in self.spans(self.counts):
            of_rows = shapes.table(bits).to(device)[self.shapes[first:last].long()]
            entries = of_rows * self.scales_at(self.scales, self.gains, bits)[first:last, None]
            stored[first:last] = entries.gather(1, self.codes[first:last].long())
        dense = torch.empty(len(self.order), self.codes.shape[1] + k, device=device)
        dense[self.order[:, None], self.coded(k + self.codes.shape[1], self.kept)] = stored
        dense[self.order[:, None], self.kept] = self.kept_weights
        return dense

    @staticmethod
    def coded(c: int, kept: Tensor) -> Tensor:
        """The input channels that have codes, int64 [c - k]."""
        mask = torch.ones(c, dtype=torch.bool, device=kept.device)
        mask[kept] = False
        return mask.nonzero()[:, 0]

    def layout(self) -> NestedLayout:
        kept_bits = 16 if self.kept_scales is None else 8
        return NestedLayout.of(self.counts, len(self.kept), gains=self.gains is not None, kept_bits=kept_bits)

    def tensors(self) -> dict[str, Tensor]:
        r = len(self.order)
        fields = {
            "order": index(self.order, r),
            "scales": self.scales,
            "shapes": pack_bits(self.shapes[None], 4, 1)[0],
        }
        if self.gains is not None:
            fields["gains"] = self.gains
        if len(self.kept):
            fields["kept"] = index(self.kept, self.codes.shape[1] + len(self.kept))
            fields["kept_values"] = self.kept_values
            if self.kept_scales is not None:
                fields["kept_scales"] = self.kept_scales
        widths = torch.zeros(r, dtype=torch.uint8, device=self.codes.device)
        for bits, first, last in self.spans(self.counts):
            widths[first:last] = bits
        for p, n in enumerate(self.counts, 1):
            bit = self.codes[:n] >> (widths[:n, None] - p) & 1
            fields[f"plane_{p}"] = pack_bits(bit, 1, PLANE_ALIGN).view(torch.uint32)
        return fields
