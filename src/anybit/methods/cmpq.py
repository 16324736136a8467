"""CMPQ: Adapting to Any Bit-Width, Channel-Wise Mixed-Precision Quantization for LLMs (arXiv:2410.13056).

Input channels get widths by their activation norm, each a codebook of its own, at any average width;
`channel_codebooks` makes them, and says what is beyond the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from anybit.config import LayerSpec, Widths, option
from anybit.methods.method import (
    SHARE,
    Attentive,
    Codebooks,
    Damped,
    Method,
    Statistics,
    Work,
    clustering_seconds,
)

if TYPE_CHECKING:
    from torch import Tensor

    from anybit.calibration.stats import LinearStats
    from anybit.formats.layout import LayerLayout
    from anybit.formats.weight import QuantizedWeight


@dataclass(frozen=True, kw_only=True)
class CMPQ(Codebooks, Attentive, Damped):
    name: ClassVar = "cmpq"
    widths_of: ClassVar = Widths(2, 8, fractional=True)

    channel_outliers: float = option(0.0045, "Share of input channels kept in 16 bits.", layer=True, **SHARE)
    error_outliers: float = option(
        0.0005, "Share of weights kept in 16 bits, those clustering misses most.", layer=True, **SHARE
    )
    compensate: bool = option(True, "Make up for a channel's error in later ones.", layer=True)

    @property
    def unquantized(self) -> bool:
        return self.one_shot or not self.compensate


def layout(spec: LayerSpec[CMPQ], shape: tuple[int, int]) -> LayerLayout:
    from anybit.methods import channel_codebooks

    return channel_codebooks.layout(spec, shape)


def quantize(weight: Tensor, stats: LinearStats | None, spec: LayerSpec[CMPQ]) -> QuantizedWeight:
    from anybit.methods import channel_codebooks

    return channel_codebooks.quantize(weight, stats, spec)


def work(options: CMPQ) -> Work:
    """Channel after channel is clustered on one thread, and all at once before that."""
    seconds = clustering_seconds(options.bits)
    return Work(options.compensate, seconds, serial=seconds if options.compensate else 0)


METHOD = Method(
    CMPQ,
    title="Adapting to Any Bit-Width: Channel-Wise Mixed-Precision Quantization for LLMs",
    paper="arXiv:2410.13056",
    summary="codebooks by channel, any average width",
    native=True,
    compared="cmpq",
    quantize=quantize,
    layout=layout,
    statistics=lambda options: Statistics(
        norms=True, hessian=options.compensate, attention=options.attention_weights
    ),
    work=work,
)
