"""MixLLM: the most salient output rows of the whole model at 8 bits, the others at 4 (arXiv:2412.14590).

Which rows those are is found globally (`sensitivity.search`); here a layer's rows become tiles. 8-bit rows are
symmetric, 4-bit rows asymmetric, inputs 8-bit symmetric per token and group (section 3.1.2); rounding is GPTQ's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar

from anybit.config import LayerSpec, TileSpec, Widths, one_of, option, within
from anybit.errors import InputError
from anybit.methods import gptq
from anybit.methods.method import (
    Allocation,
    Compensated,
    Method,
    Search,
    check_ratio,
    compensation_statistics,
    compensation_work,
)

if TYPE_CHECKING:
    from anybit.formats.layout import LayerLayout

NARROW, WIDE = 4, 8
SALIENCES = ("full", "diagonal", "second-order")
SEARCHES = ("one-pass", "progressive")
STEP = 0.02  # share of the rows that a progressive search widens at a time


@dataclass(frozen=True, kw_only=True)
class MixLLM(Compensated):
    name: ClassVar = "mixllm"
    widths_of: ClassVar = Widths(NARROW, WIDE, fractional=True)
    for_encoders: ClassVar = False
    sized_by: ClassVar = ("wide_rows",)

    wide_rows: float | None = option(
        None, "Share of output rows at 8 bits, instead of bits.", unset="0.1",
        **within(0, 1, "a share") | {"expected": "a share from 0 to 1 (0.1 is 10 %)"},
    )  # fmt: skip
    salience: str = option("full", "What ranks rows: full is eq. 4.", **one_of(SALIENCES))
    search: str = option("one-pass", "Ranks rows once, or anew after each 2 %.", **one_of(SEARCHES))

    def defaults(self) -> dict[str, Any]:
        share = self.wide_rows
        if share is None and self.bits is None and self.budget is None:
            share = 0.1
        bits = {} if share is None else {"bits": NARROW + (WIDE - NARROW) * share, "wide_rows": share}
        return super().defaults() | {"act_bits": 8} | bits

    def check(self) -> None:
        super().check()
        implied = self.bits if self.wide_rows is None else NARROW + (WIDE - NARROW) * self.wide_rows
        if abs((implied or 0) - (self.bits or 0)) > 1e-9:
            raise InputError("wide_rows (--wide-rows) and bits (--bits) set the same thing: give one of them")

    def tile(self) -> TileSpec:
        return replace(super().tile(), symmetric=self.bits == WIDE)

    @property
    def exact_size(self) -> bool:
        return self.wide_rows is None or self.wide_rows in (0, 1)

    @property
    def wide_share(self) -> float:
        """The share of rows, or where `bits` sets it of weights, that get 8 bits."""
        if self.wide_rows is not None:
            return self.wide_rows
        return ((self.bits or NARROW) - NARROW) / (WIDE - NARROW)

    @property
    def passes(self) -> int:
        """How often the search goes through the calibration tokens."""
        if self.wide_share in (0, 1):
            return 0
        return ceil(self.wide_share / STEP - 1e-9) if self.search == "progressive" else 1


def layout(spec: LayerSpec[Any], shape: tuple[int, int]) -> LayerLayout:
    """What will be stored of a matrix of this shape; before the search, as if layers got equal shares of wide rows.

    With `bits` the search spends what this takes, and never a row more; with `wide_rows` it may end some percent above,
    where long rows are the salient ones.
    """
    from anybit.methods import tiling

    tile = spec.tiles[0]
    if len(spec.tiles) == 1 and tile.rows is None and tile.bits not in (NARROW, WIDE):
        wide = ceil((tile.bits - NARROW) / (WIDE - NARROW) * shape[0] - 1e-9)
        spec = with_rows(spec, range(wide), shape[0])
    return tiling.layout(spec, shape)


def with_rows(spec: LayerSpec[Any], wide: Iterable[int], out_features: int) -> LayerSpec[Any]:
    """The spec of a layer whose `wide` rows have 8 bits."""
    size, chosen = spec.tiles[0].group_size, set(wide)
    narrow = TileSpec(NARROW, size, symmetric=False)
    if not chosen:
        return replace(spec, tiles=(narrow,))
    if len(chosen) == out_features:
        return replace(spec, tiles=(TileSpec(WIDE, size, symmetric=True),))
    rows = {kind: tuple(r for r in range(out_features) if (r in chosen) == kind) for kind in (True, False)}
    return replace(spec, tiles=(TileSpec(WIDE, size, True, rows[True]), replace(narrow, rows=rows[False])))


def allocate(search: Search) -> Allocation:
    """Rows of all layers in one list, by the loss that rounding them to 4 bits is estimated to cost (section 3.2)."""
    from anybit.methods import sensitivity

    rows = sensitivity.salient_rows(search)
    return Allocation({n: with_rows(search.specs[n], rows[n], search.shapes[n][0]) for n in rows})


def check_given(name: str, spec: LayerSpec[Any], usual: LayerSpec[Any]) -> None:
    check_ratio(name, spec, usual)
    if any(tile.bits not in (NARROW, WIDE) for tile in spec.tiles):
        raise InputError(
            f"spec of {name}: mixllm's search leaves out the layers that the spec names: give them bits 4 or 8, or "
            "tiles"
        )


METHOD = Method(
    MixLLM,
    title="MixLLM: LLM Quantization with Global Mixed-precision between Output-features and Highly-efficient System "
    "Design",
    paper="arXiv:2412.14590",
    summary="8-bit rows where they count, int8 activations",
    compared="mixllm: bits=[4.4, 5]",
    quantize=gptq.compensated,
    layout=layout,
    statistics=compensation_statistics,
    work=lambda options: replace(compensation_work(options), passes=options.passes),
    allocate=allocate,
    searched=lambda o: [o.wide_rows is not None, o.salience, o.search, o.group_size],
    check_given=check_given,
)
