"""Scaling of input channels before quantization: AWQ (arXiv:2306.00978) and SmoothQuant (arXiv:2211.10438).

`y = (x / s) (W s)^T` for any s > 0. AWQ protects channels of large activations from the rounding of weights,
`s = E|x|^alpha` (section 3.2, eq. 4 and 5); SmoothQuant moves the range of activations into the weights,
`s = max|x|^alpha / max|W|^(1 - alpha)` (section 4, eq. 4). Both choose alpha on a grid for the least error of the
layer's output. The factor 1 / s stays with the layer as its `input_scale`, whatever precedes it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from anybit.calibration.stats import InputStats, LinearStats
from anybit.config import LayerSpec
from anybit.errors import InputError
from anybit.formats.weight import pack
from anybit.kernels import reference
from anybit.methods import grid, rounding
from anybit.methods.method import Uniform

ALPHAS = tuple(k / 20 for k in range(21))
SMALLEST, LARGEST = 2.0**-14, 2.0**15  # of an input scale: normal float16 numbers


def search(weight: Tensor, stats: LinearStats, spec: LayerSpec[Uniform]) -> Tensor:
    """The factor that inputs are multiplied by, float16 [in].

    Candidates are judged with plain rounding. Where activations are quantized too, by the error on a sample of inputs;
    else by the exact mean over the calibration tokens, `D H D^T`.

    Args:
        weight: float32 [out, in].
        stats: Hessian and `InputStats` of the layer's inputs.
        spec: `scaling`, and everything about the grids.

    Raises:
        InputError: no statistics of the inputs.
    """
    if stats.inputs is None:
        raise InputError(f"{spec.options.scaling} needs the layer's inputs: calibrate first")
    plain = _plain(spec)
    factors = [_factor(weight, stats.inputs, stats.tokens, spec.options.scaling, alpha) for alpha in ALPHAS]
    weight = grid.without_dead(weight, stats.squares)  # as they are rounded in the end
    sample = stats.inputs.sample if (spec.options.act_bits or 16) < 16 or stats.hessian is None else None
    target = weight.new_empty(0) if sample is None else sample @ weight.T
    errors = []
    for factor in factors:
        try:
            made = replace(rounding.quantize(weight / factor.float(), None, plain), input_scale=factor)
        except InputError:  # scaled beyond float16
            errors.append(torch.inf)
            continue
        dense = made.dequantize()
        if sample is not None:
            error = reference.round_inputs(sample, pack(made)) @ dense.T - target
            errors.append(float(error.square().sum()))
        else:
            assert stats.hessian is not None
            delta = dense - weight
            errors.append(float(((delta @ stats.hessian) * delta).sum()))
    best = min(
        range(len(factors)), key=lambda i: errors[i] if errors[i] == errors[i] else torch.inf
    )  # NaN: never
    return factors[best]


def _plain(spec: LayerSpec[Uniform]) -> LayerSpec[Uniform]:
    """The grids of a layer for plain rounding, without what is searched later."""
    return spec.but(clip=False, act_search=False, act_static=False)


def _factor(weight: Tensor, inputs: InputStats, tokens: int, scaling: str, alpha: float) -> Tensor:
    if scaling == "awq":
        s = (inputs.magnitudes / max(tokens, 1)).clamp(min=1e-6) ** alpha
    else:
        s = inputs.peaks.clamp(min=1e-6) ** alpha / weight.abs().amax(0).clamp(min=1e-6) ** (1 - alpha)
    s = s / (s.max() * s.min()).sqrt()  # around 1: any common factor is as good
    return s.reciprocal().clamp(SMALLEST, LARGEST).half()
