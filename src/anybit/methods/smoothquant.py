"""SmoothQuant (arXiv:2211.10438): int8 weights and activations, made easier by scaled channels; see `scaling`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from anybit.config import Widths, option
from anybit.methods import rtn
from anybit.methods.method import Method, Uniform, group_size_of, rounding_statistics, rounding_work


@dataclass(frozen=True, kw_only=True)
class SmoothQuant(Uniform):
    name: ClassVar = "smoothquant"
    widths_of: ClassVar = Widths(2, 8)
    default_bits: ClassVar = 8

    group_size: int = group_size_of(-1)
    symmetric: bool = option(True, "Without zero points.", flag="--symmetric/--asymmetric")
    scaling: str = option(
        "smoothquant", "The method is a scaling.", layer=True,
        expected="smoothquant: the method is itself a scaling; leave it out",
        valid=lambda value: value == "smoothquant",
    )  # fmt: skip

    def defaults(self) -> dict[str, Any]:
        return super().defaults() | {"act_bits": 8}


METHOD = Method(
    SmoothQuant,
    title="SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models",
    paper="arXiv:2211.10438",
    summary="int8 activations, made easier by scaling input channels",
    quantize=rtn.quantize,
    layout=rtn.layout,
    statistics=rounding_statistics,
    work=rounding_work,
)
