"""AWQ: Activation-aware Weight Quantization (arXiv:2306.00978): plain rounding of scaled channels; see `scaling`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from anybit.config import Widths, option
from anybit.methods import rtn
from anybit.methods.method import Method, Uniform, rounding_statistics, rounding_work


@dataclass(frozen=True, kw_only=True)
class AWQ(Uniform):
    name: ClassVar = "awq"
    widths_of: ClassVar = Widths(2, 8)

    symmetric: bool = option(False, "Without zero points.", flag="--symmetric/--asymmetric")
    clip: bool = option(True, "Search clipping ratios per group.", layer=True)
    scaling: str = option(
        "awq", "The method is a scaling.", layer=True, expected="awq: the method is itself a scaling; leave it out",
        valid=lambda value: value == "awq",
    )  # fmt: skip


METHOD = Method(
    AWQ,
    title="AWQ: Activation-aware Weight Quantization for On-Device LLM Compression and Acceleration",
    paper="arXiv:2306.00978",
    summary="input channels scaled by their activations before rounding",
    quantize=rtn.quantize,
    layout=rtn.layout,
    statistics=rounding_statistics,
    work=rounding_work,
)
