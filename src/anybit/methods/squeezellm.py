"""SqueezeLLM: Dense-and-Sparse Quantization (arXiv:2306.07629): a codebook per output row; `row_codebooks` makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from anybit.config import LayerSpec, Widths, option
from anybit.methods.method import SHARE, Codebooks, Method, Statistics, Work, clustering_seconds

if TYPE_CHECKING:
    from torch import Tensor

    from anybit.calibration.stats import GradientStats
    from anybit.formats.layout import LayerLayout
    from anybit.formats.weight import QuantizedWeight


@dataclass(frozen=True, kw_only=True)
class SqueezeLLM(Codebooks):
    name: ClassVar = "squeezellm"
    widths_of: ClassVar = Widths(2, 8)
    for_encoders: ClassVar = False

    sensitive_outliers: float = option(
        0.0, "Share of weights kept in 16 bits for their sensitivity.", layer=True, **SHARE
    )
    magnitude_outliers: float = option(
        0.0, "Share of weights kept in 16 bits for their size.", layer=True, **SHARE
    )


def outliers(options: SqueezeLLM, weights: int) -> tuple[int, int]:
    """How many weights stay float16: the most sensitive, and the largest of the others (section 4.2)."""
    return round(options.sensitive_outliers * weights), round(options.magnitude_outliers * weights)


def layout(spec: LayerSpec[SqueezeLLM], shape: tuple[int, int]) -> LayerLayout:
    from anybit.methods import row_codebooks

    widths = (int(row_codebooks.whole_rows(spec).bits),)
    return row_codebooks.layout(spec, shape, widths, outliers(spec.options, shape[0] * shape[1]))


def quantize(weight: Tensor, stats: GradientStats | None, spec: LayerSpec[SqueezeLLM]) -> QuantizedWeight:
    from anybit.methods import row_codebooks

    widths = (int(row_codebooks.whole_rows(spec).bits),)
    return row_codebooks.quantize(weight, stats, spec, widths, outliers(spec.options, weight.numel()))


METHOD = Method(
    SqueezeLLM,
    title="SqueezeLLM: Dense-and-Sparse Quantization",
    paper="arXiv:2306.07629",
    summary="codebooks by row, of weights clustered by sensitivity",
    native=True,
    quantize=quantize,
    layout=layout,
    statistics=lambda options: Statistics(fisher=True),
    work=lambda options: Work(clustering=clustering_seconds(options.bits), passes=1),
)
