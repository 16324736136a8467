"""The method anybit: nested codes of every output row, one order over the whole model, one artifact of any size.

`nested_codes` compensates the errors of all widths at once; `ordering` ranks the bitplanes of all rows of all layers by
the loss that a byte of them saves; the artifact is split along that order into a base layer and enhancement layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from anybit.config import EMBED_BITS, LayerSpec, Widths, at_least, one_of, option, within
from anybit.errors import InputError
from anybit.methods.method import (
    SHARE,
    Allocation,
    Damped,
    Method,
    Ordered,
    Search,
    Sequential,
    Statistics,
    Work,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from anybit.calibration.stats import LinearStats, VocabularyCost
    from anybit.formats.layout import LayerLayout
    from anybit.formats.weight import QuantizedWeight
    from anybit.methods.end_to_end import Training

BITS = 8  # planes of a row, at most
BASE_BITS = 2.0  # average width of the base layer
SALIENCES = ("output", "full", "diagonal")
CODING = 1.7e-7  # seconds per weight, thread and pass,
FITTING = 6e-8  # and of its scale
OWN_TEXT_TOKENS = 256  # of a text that the model writes by itself
WRITTEN_PER_TAKEN = 1.5  # texts written for each that is taken: the most varied are
DRAWN = 1 / 2  # time of a token that is drawn, beside that of one with its gradient


@dataclass(frozen=True)
class Effort:
    """What is taken for a level of `--effort`."""

    tokens: int  # that second moments are gathered from
    gradient_tokens: int  # of those, that are weighted by gradients
    descent: int  # passes over the codes after the first
    steps: int  # of `--tune`


EFFORTS = {
    "quick": Effort(16_384, 8_192, 1, 50),
    "normal": Effort(65_536, 16_384, 2, 150),
    "best": Effort(131_072, 32_768, 4, 400),
}


@dataclass(frozen=True, kw_only=True)
class AnyBit(Sequential, Damped):
    name: ClassVar = "anybit"
    widths_of: ClassVar = Widths(BASE_BITS, BITS, fractional=True)
    default_bits: ClassVar = BITS
    several: ClassVar = True
    for_encoders: ClassVar = False

    embed_bits: int | None = option(
        None,
        "Embedding and head.",
        panel="Size",
        unset="in the order of the layers' planes",
        **one_of(EMBED_BITS),
    )
    tune_for: float = option(
        3.0,
        "Average width at which errors are compensated best.",
        layer=True,
        **within(BASE_BITS, BITS, "an average width"),
    )
    effort: str = option(
        "normal",
        "How many tokens are read and how often codes are revisited, where options do not say.",
        **one_of(tuple(EFFORTS)),
    )
    samples: int | None = option(
        None, "Calibration windows.", panel="Calibration", unset="by effort", **at_least(1)
    )
    gradient_samples: int | None = option(
        None, "Of those, windows whose tokens count by their gradients.", panel="Calibration",
        unset="by effort", **at_least(1),
    )  # fmt: skip
    own_texts: float = option(
        0.25,
        "Share of the calibration windows that the model writes by itself, so that other kinds of text count too.",
        panel="Calibration",
        **within(0, 0.9, "a share"),
    )
    plain_share: float = option(
        0.5,
        "Share of the second moments in which all tokens count alike; in the rest they count by their gradients.",
        panel="Calibration",
        **within(0, 1, "a share"),
    )
    descent: int | None = option(
        None,
        "Passes over the codes after the first, each code chosen anew.",
        layer=True,
        unset="by effort",
        expected="a whole number from 0 to 100",
        valid=lambda value: 0 <= value <= 100,
    )
    tune: bool = option(
        False, "Train scales end to end after all else, for all widths at once.",
        flag="--tune",
    )  # fmt: skip
    kept_channels: float = option(
        1 / 128,
        "Share of input channels kept at more bits: those of the largest inputs.",
        layer=True,
        **SHARE,
    )
    kept_bits: int = option(8, "Bits of their weights.", layer=True, **one_of((8, 16)))
    gains: bool = option(
        True, "A byte for every row of the layers, by which its outputs are larger at 2 and at 3 bits.",
        layer=True, flag="--gains/--no-gains",
    )  # fmt: skip
    whole_layers: bool = option(
        False, "One width for a whole layer, the same for q, k and v and for gate and up, instead of one per row.",
        flag="--whole-layers/--rows",
    )  # fmt: skip
    coded: bool = option(
        True, "Planes entropy-coded in the files: smaller, and expanded as they are loaded.",
        panel="Size", flag="--coded/--expand",
    )  # fmt: skip
    salience: str = option(
        "output", "What ranks rows: what errors at outputs cost, or MixLLM's scores.", **one_of(SALIENCES)
    )

    def defaults(self) -> dict[str, Any]:
        effort = EFFORTS[self.effort]
        samples = self.samples or max(1, effort.tokens // self.window)
        usual = {name: value for name, value in super().defaults().items() if name != "embed_bits"}
        return usual | {
            "samples": samples,
            "gradient_samples": min(samples, max(1, effort.gradient_tokens // self.window)),
            "descent": effort.descent,
        }

    def check(self) -> None:
        super().check()
        if (self.gradient_samples or 0) > self.windows:
            raise InputError(
                f"gradient_samples ({self.gradient_samples}) are some of the {self.windows} samples: give no more "
                "(--gradient-samples), or raise --samples"
            )
        if self.salience != "output" and self.plain_share != type(self).plain_share:
            raise InputError(
                f"plain_share ({self.plain_share}) has no effect with salience {self.salience!r}: leave it "
                '(--plain-share) out, or use salience "output"'
            )

    @property
    def runs_at(self) -> Widths:
        return replace(self.widths_of, high=self.bits or BITS)

    @property
    def exact_size(self) -> bool:
        return False


def layout(spec: LayerSpec[AnyBit], shape: tuple[int, int]) -> LayerLayout:
    from anybit.methods import nested_codes

    return nested_codes.layout(spec, shape)


def quantize(weight: Tensor, stats: LinearStats | None, spec: LayerSpec[AnyBit]) -> QuantizedWeight:
    """All planes of all rows, and what every row costs at each width."""
    from anybit.methods import nested_codes

    return nested_codes.quantize(weight, stats, spec)


def vocabulary_spec(options: AnyBit) -> LayerSpec[AnyBit]:
    """What embedding and head are quantized by: as layers are, without gains."""
    return options.layer_spec().but(gains=False)


def embedding_layout(options: AnyBit, shape: tuple[int, int]) -> LayerLayout:
    """All planes of all rows; which are read at which size, the order of all planes says."""
    from anybit.methods import nested_codes

    spec = vocabulary_spec(options)
    return nested_codes.layout(replace(spec, tiles=(replace(spec.tiles[0], bits=BITS),)), shape)


def embed(weight: Tensor, cost: VocabularyCost, options: AnyBit) -> QuantizedWeight:
    """An embedding or a head, like a layer."""
    from anybit.methods import nested_codes

    return nested_codes.quantize_vocabulary(weight, cost, options)


def allocate(search: Search) -> Allocation:
    """What errors at the outputs of every layer cost, and how much each token counts: from one backward pass."""
    from anybit.methods import sensitivity

    if search.options.salience == "output":
        return sensitivity.output_moments(search)
    return sensitivity.width_scores(search)


def running(
    options: AnyBit, layouts: Mapping[str, LayerLayout], losses: Mapping[str, Tensor]
) -> dict[str, LayerLayout]:
    """Layouts at the width that the blocks after these layers are calibrated for."""
    from anybit.methods import ordering

    bits = min(options.tune_for, options.bits or BITS)
    return ordering.at_average(layouts, losses, bits, options.whole_layers)


def check_given(name: str, spec: LayerSpec[AnyBit], usual: LayerSpec[AnyBit]) -> None:
    if spec.tiles != usual.tiles:
        raise InputError(
            f"spec of {name}: anybit chooses the widths of all rows together, in one order over the whole model: "
            "leave bits and tiles out (--bits is the largest average, --exclude leaves a layer alone)"
        )


def kinds_of_windows(samples: int, share: float, given: int) -> tuple[int, int]:
    """How many calibration windows are of the text, one at least, and how many the model writes by itself.

    Args:
        samples: windows that are asked for.
        share: of these, by the model.
        given: windows that the text has. Where they are too few all of them are taken, and a share beside them.
    """
    own = min(samples - 1, int(share * samples + 0.5))
    if given >= samples - own:
        return samples - own, own
    return given, min(own, int(share / (1 - share) * given + 0.5))


def _work(options: AnyBit) -> Work:
    """A first pass compensates what follows, the next ones look at all columns."""
    descent = options.descent or 0
    own = WRITTEN_PER_TAKEN * kinds_of_windows(options.windows, options.own_texts, options.windows)[1]
    return Work(
        sweeps=BITS * (0.5 + descent),
        rounded_sweeps=True,
        clustering=CODING * (1 + descent) + FITTING,
        passes=((options.gradient_samples or 0) + DRAWN * own) / options.windows,
        written=int(own * options.window),
    )


def _searched(options: AnyBit) -> list[Any]:
    return [options.salience, options.gradient_samples, options.own_texts, options.embed_bits is None]


def tune(training: Training) -> dict[str, Tensor]:
    """Scales that bring the model of every width nearer to the unquantized one."""
    from anybit.methods import end_to_end

    return end_to_end.end_to_end(training)


METHOD = Method(
    AnyBit,
    title="",
    paper="",
    summary="any average width at load and at run time, from one artifact",
    compared="anybit",
    native=True,
    quantize=quantize,
    layout=layout,
    statistics=lambda options: Statistics(norms=True, hessian=True, attention=True),
    work=_work,
    allocate=allocate,
    embedding_layout=embedding_layout,
    embed=embed,
    searched=_searched,
    ordered=lambda options: Ordered(float(options.bits), options.whole_layers, options.coded),
    running=running,
    tuning=lambda options: EFFORTS[options.effort].steps if options.tune else 0,
    end_to_end=tune,
    check_given=check_given,
)
