"""Every method by name: what it stores, what it needs to know, and its function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anybit.methods import cmpq, gptq, rtn, squeezellm, tiling
from anybit.spec import LayerSpec
from anybit.tensors import QuantizedWeight


@dataclass(frozen=True)
class Method:
    """`quantize(weight, stats, spec)` is pure; `layout(spec, shape)` is what it will store, known before any work."""

    quantize: Callable[..., QuantizedWeight]
    layout: Callable[[LayerSpec, tuple[int, int]], dict[str, Any]]


METHODS = {
    "rtn": Method(rtn.quantize, tiling.layout),
    "gptq": Method(gptq.quantize, tiling.layout),
    "squeezellm": Method(squeezellm.quantize, squeezellm.layout),
    "any-precision": Method(squeezellm.quantize, squeezellm.layout),
    "cmpq": Method(cmpq.quantize, cmpq.layout),
}
