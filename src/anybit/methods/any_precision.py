"""Any-Precision LLM: Low-Cost Deployment of Multiple, Different-Sized LLMs (arXiv:2402.10517).

SqueezeLLM's codebooks, whose clusters are cut in two, width after width (section 4.2): one matrix of nested codes holds
every width from the seed's up. `row_codebooks` makes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from anybit.config import LayerSpec, Widths, option
from anybit.errors import InputError
from anybit.methods.method import Codebooks, Method, Statistics, Work, clustering_seconds

if TYPE_CHECKING:
    from torch import Tensor

    from anybit.calibration.stats import GradientStats
    from anybit.formats.layout import LayerLayout
    from anybit.formats.weight import QuantizedWeight


@dataclass(frozen=True, kw_only=True)
class AnyPrecision(Codebooks):
    name: ClassVar = "any-precision"
    widths_of: ClassVar = Widths(2, 8)
    sized_by: ClassVar = ("widths",)
    several: ClassVar = True
    for_encoders: ClassVar = False

    widths: tuple[int, ...] = option(
        (3, 4, 5, 6, 7, 8), "The widths that the artifact can run at.", layer=True,
        expected="different widths from 2 to 8 in ascending order, such as 3,4,6,8",
        valid=lambda value: bool(value) and list(value) == sorted({b for b in value if 2 <= b <= 8}),
    )  # fmt: skip

    def defaults(self) -> dict[str, Any]:
        return super().defaults() | {"bits": max(self.widths)}

    def check(self) -> None:
        super().check()
        if self.bits != max(self.widths):
            raise InputError(
                f"any-precision stores all of its widths, here {self.widths}: choose them with widths (--widths), not "
                f"bits ({self.bits:g})"
            )

    @property
    def runs_at(self) -> tuple[int, ...]:
        return self.widths


def layout(spec: LayerSpec[AnyPrecision], shape: tuple[int, int]) -> LayerLayout:
    from anybit.methods import row_codebooks

    row_codebooks.whole_rows(spec)
    return row_codebooks.layout(spec, shape, spec.options.widths)


def quantize(weight: Tensor, stats: GradientStats | None, spec: LayerSpec[AnyPrecision]) -> QuantizedWeight:
    from anybit.methods import row_codebooks

    row_codebooks.whole_rows(spec)
    return row_codebooks.quantize(weight, stats, spec, spec.options.widths)


def check_given(name: str, spec: LayerSpec[AnyPrecision], usual: LayerSpec[AnyPrecision]) -> None:
    if spec.options.widths != usual.options.widths:
        raise InputError(
            f"spec of {name}: widths {list(spec.options.widths)} beside {list(usual.options.widths)}: an any-precision "
            "model runs all of its layers at one width"
        )
    if spec.tiles[0].bits != usual.tiles[0].bits:
        raise InputError(
            f"spec of {name}: bits would be ignored, widths {list(spec.options.widths)} say what is stored"
        )


METHOD = Method(
    AnyPrecision,
    title="Any-Precision LLM: Low-Cost Deployment of Multiple, Different-Sized LLMs",
    paper="arXiv:2402.10517",
    summary="SqueezeLLM's codebooks nested, every width in one artifact",
    compared="any-precision",
    native=True,
    quantize=quantize,
    layout=layout,
    statistics=lambda options: Statistics(fisher=True),
    work=lambda options: Work(clustering=clustering_seconds(min(options.widths)), passes=1),
    check_given=check_given,
)
