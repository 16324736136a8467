"""GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers (arXiv:2210.17323).

Algorithm 1, which `compensation` does, on any tiling of widths; its head lists the deviations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from anybit.config import LayerSpec, Widths, option
from anybit.methods.method import Compensated, Method, compensation_statistics, compensation_work

if TYPE_CHECKING:
    from torch import Tensor

    from anybit.calibration.stats import LinearStats
    from anybit.formats.layout import LayerLayout
    from anybit.formats.weight import QuantizedWeight


@dataclass(frozen=True, kw_only=True)
class GPTQ(Compensated):
    name: ClassVar = "gptq"
    widths_of: ClassVar = Widths(2, 8)

    symmetric: bool = option(False, "Without zero points.", flag="--symmetric/--asymmetric")
    desc_act: bool = option(
        False, "Store columns in order of falling activation energy, which costs a permutation.", layer=True
    )


def layout(spec: LayerSpec[GPTQ], shape: tuple[int, int]) -> LayerLayout:
    from anybit.methods import tiling

    return tiling.layout(spec, shape, ordered=spec.options.desc_act)


def quantize(weight: Tensor, stats: LinearStats | None, spec: LayerSpec[GPTQ]) -> QuantizedWeight:
    return compensated(weight, stats, spec, by_energy=spec.options.desc_act)


def compensated(
    weight: Tensor, stats: LinearStats | None, spec: LayerSpec[Any], by_energy: bool = False
) -> QuantizedWeight:
    """GPTQ's rounding, for every method that rounds so."""
    from functools import partial

    from anybit.methods import compensation, uniform

    return uniform.quantize(partial(compensation.quantize, by_energy=by_energy), weight, stats, spec)


METHOD = Method(
    GPTQ,
    title="GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
    paper="arXiv:2210.17323",
    summary="each column's error is compensated in later ones, by second moments of the inputs",
    compared="gptq",
    quantize=quantize,
    layout=layout,
    statistics=compensation_statistics,
    work=compensation_work,
)
