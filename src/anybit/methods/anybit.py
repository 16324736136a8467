"""The method anybit: nested codes of every output row, one order over the whole model, one artifact of any size.

`nested_codes` compensates the errors of all widths at once; `ordering` ranks the bitplanes of all rows of all layers by
the loss that a byte of them saves; the artifact is split along that order into a base layer and enhancement layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from anybit.config import LayerSpec, Widths, one_of, option, within
from anybit.errors import InputError
from anybit.methods.method import (
    SHARE,
    Allocation,
    Damped,
    Effort,
    Method,
    Search,
    Sequential,
    Statistics,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from anybit.calibration.stats import LinearStats
    from anybit.formats.layout import LayerLayout
    from anybit.formats.weight import QuantizedWeight

BITS = 8  # planes of a row, at most
BASE_BITS = 2.0  # average width of the base layer
SALIENCES = ("output", "full", "diagonal")
CODING = 5e-7  # seconds per weight and thread


@dataclass(frozen=True, kw_only=True)
class AnyBit(Sequential, Damped):
    name: ClassVar = "anybit"
    widths_of: ClassVar = Widths(BASE_BITS, BITS, fractional=True)
    default_bits: ClassVar = BITS
    several: ClassVar = True
    for_encoders: ClassVar = False

    embed_bits: int = option(8, "Embedding and head.", panel="Size", **one_of((4, 8, 16)))
    tune_for: float = option(
        3.0,
        "Average width at which errors are compensated best.",
        layer=True,
        **within(BASE_BITS, BITS, "an average width"),
    )
    descent: int = option(
        2,
        "Passes over the codes after the first, each code chosen anew.",
        layer=True,
        expected="a whole number from 0 to 100",
        valid=lambda value: 0 <= value <= 100,
    )
    kept_channels: float = option(1 / 128, "Share of input channels kept in 16 bits.", layer=True, **SHARE)
    whole_layers: bool = option(
        False, "One width for a whole layer, the same for q, k and v and for gate and up, instead of one per row.",
        flag="--whole-layers/--rows",
    )  # fmt: skip
    salience: str = option(
        "output", "What ranks rows: what errors at outputs cost, or MixLLM's scores.", **one_of(SALIENCES)
    )

    @property
    def runs_at(self) -> Widths:
        return replace(self.widths_of, high=self.bits or BITS)

    @property
    def exact_size(self) -> bool:
        return False


def layout(spec: LayerSpec[AnyBit], shape: tuple[int, int]) -> LayerLayout:
    from anybit.methods import nested_codes

    return nested_codes.layout(spec, shape)


def quantize(weight: Tensor, stats: LinearStats | None, spec: LayerSpec[AnyBit]) -> QuantizedWeight:
    """All planes of all rows, and what every row costs at each width."""
    from anybit.methods import nested_codes

    return nested_codes.quantize(weight, stats, spec)


def allocate(search: Search) -> Allocation:
    """What errors at the outputs of every layer cost, and how much each token counts: from one backward pass."""
    from anybit.methods import sensitivity

    if search.options.salience == "output":
        return sensitivity.output_moments(search)
    return sensitivity.width_scores(search)


def running(
    options: AnyBit, layouts: Mapping[str, LayerLayout], losses: Mapping[str, Tensor]
) -> dict[str, LayerLayout]:
    """Layouts at the width that the blocks after these layers are calibrated for."""
    from anybit.methods import ordering

    bits = min(options.tune_for, options.bits or BITS)
    return ordering.at_average(layouts, losses, bits, options.whole_layers)


def check_given(name: str, spec: LayerSpec[AnyBit], usual: LayerSpec[AnyBit]) -> None:
    if spec.tiles != usual.tiles:
        raise InputError(
            f"spec of {name}: anybit chooses the widths of all rows together, in one order over the whole model: "
            "leave bits and tiles out (--bits is the largest average, --exclude leaves a layer alone)"
        )


METHOD = Method(
    AnyBit,
    title="",
    paper="",
    summary="any average width at load and at run time, from one artifact",
    compared="anybit",
    quantize=quantize,
    layout=layout,
    statistics=lambda options: Statistics(norms=True, hessian=True, attention=True),
    effort=lambda options: Effort(sweeps=BITS, clustering=CODING, passes=1),
    allocate=allocate,
    searched=lambda options: [options.salience],
    ordered=lambda options: (float(options.bits), options.whole_layers),
    running=running,
    check_given=check_given,
)
