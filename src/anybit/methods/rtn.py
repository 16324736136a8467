"""RTN: round to nearest, each weight to the closest point of its group's grid. The baseline; `rounding` does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from anybit.config import LayerSpec, Widths, option
from anybit.methods.method import Method, Uniform, rounding_statistics, rounding_work

if TYPE_CHECKING:
    from torch import Tensor

    from anybit.calibration.stats import LinearStats
    from anybit.formats.layout import LayerLayout
    from anybit.formats.weight import QuantizedWeight


@dataclass(frozen=True, kw_only=True)
class RTN(Uniform):
    name: ClassVar = "rtn"
    widths_of: ClassVar = Widths(2, 8)

    symmetric: bool = option(False, "Without zero points.", flag="--symmetric/--asymmetric")


def layout(spec: LayerSpec[RTN], shape: tuple[int, int]) -> LayerLayout:
    from anybit.methods import tiling

    return tiling.layout(spec, shape)


def quantize(weight: Tensor, stats: LinearStats | None, spec: LayerSpec[RTN]) -> QuantizedWeight:
    from anybit.methods import rounding, uniform

    return uniform.quantize(rounding.quantize, weight, stats, spec)


METHOD = Method(
    RTN,
    title="Round to nearest",
    paper="",
    summary="round to nearest, no calibration",
    compared="rtn",
    quantize=quantize,
    layout=layout,
    statistics=rounding_statistics,
    work=rounding_work,
)
