"""What composes with every rounding to uniform grids: a scaling of the inputs before, clipping ratios of them after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from anybit.calibration.stats import LinearStats
from anybit.config import LayerSpec
from anybit.errors import InputError
from anybit.formats.weight import QuantizedWeight
from anybit.methods import activations, scaling
from anybit.methods.method import Uniform

Rounding = Callable[[Tensor, LinearStats | None, LayerSpec[Uniform]], QuantizedWeight]


def quantize(
    rounding: Rounding, weight: Tensor, stats: LinearStats | None, spec: LayerSpec[Uniform]
) -> QuantizedWeight:
    """Round `weight` float32 [out, in] by a method, with the searches around it that the spec asks for.

    Raises:
        InputError: missing statistics, or weights and options that the method cannot take.
    """
    options = spec.options
    if options.scaling == "none" and not options.act_search:
        return rounding(weight, stats, spec)
    if stats is None or stats.inputs is None:
        raise InputError("scaling and clipping searches need the layer's inputs: calibrate first")
    factor = None
    if options.scaling != "none":
        factor = scaling.search(weight, stats, spec)
        weight, stats = weight / factor.float(), stats.scaled(factor.float())
    made = rounding(weight, stats, spec)
    if options.act_search and stats.inputs is not None:
        made = activations.search_clip(made, stats.inputs.sample)
    return replace(made, input_scale=factor)
