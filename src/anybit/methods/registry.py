"""Every method by name: what it stores, what it needs to know, and its function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from anybit.calibration.stats import GradientStats, LinearStats
from anybit.config import LayerSpec
from anybit.errors import InputError
from anybit.formats.weight import QuantizedWeight
from anybit.methods import (
    activations,
    atom,
    cmpq,
    gptq,
    llm_mq,
    mixllm,
    rtn,
    scaling,
    squeezellm,
    tiling,
    two_four_sixteen,
)
from anybit.methods import anybit as nested


@dataclass(frozen=True)
class Method:
    """`quantize(weight, stats, spec)` is pure; `layout(spec, shape)` is what it will store, known before any work."""

    quantize: Callable[..., QuantizedWeight]
    layout: Callable[[LayerSpec, tuple[int, int]], dict[str, Any]]


METHODS = {
    "anybit": Method(nested.quantize, nested.layout),
    "rtn": Method(rtn.quantize, tiling.layout),
    "gptq": Method(gptq.quantize, tiling.layout),
    "awq": Method(rtn.quantize, tiling.layout),  # what they are is in their spec's `scaling`
    "smoothquant": Method(rtn.quantize, tiling.layout),
    "mixllm": Method(gptq.quantize, mixllm.layout),
    "llm-mq": Method(gptq.quantize, llm_mq.layout),
    "atom": Method(atom.quantize, atom.layout),
    "two-four-sixteen": Method(two_four_sixteen.quantize, two_four_sixteen.layout),
    "squeezellm": Method(squeezellm.quantize, squeezellm.layout),
    "any-precision": Method(squeezellm.quantize, squeezellm.layout),
    "cmpq": Method(cmpq.quantize, cmpq.layout),
}


def quantize(
    method: str, weight: Tensor, stats: LinearStats | GradientStats | None, spec: LayerSpec
) -> QuantizedWeight:
    """Quantize `weight` float32 [out, in] by a method, with what composes with every one: scaling before, and the
    search of activation clipping after.

    Raises:
        InputError: missing statistics, or weights and options that the method cannot take.
    """
    if spec.scaling == "none" and not spec.act_search:
        return METHODS[method].quantize(weight, stats, spec)
    if not isinstance(stats, LinearStats) or stats.inputs is None:
        raise InputError("scaling and clipping searches need the layer's inputs: calibrate first")
    factor = None
    if spec.scaling != "none":
        factor = scaling.search(weight, stats, spec)
        weight, stats = weight / factor.float(), stats.scaled(factor.float())
    made = METHODS[method].quantize(weight, stats, spec)
    if spec.act_search and stats.inputs is not None:
        made = activations.search_clip(made, stats.inputs.sample)
    return replace(made, input_scale=factor)
