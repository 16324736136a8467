"""What a method says of itself, and the options that several methods share. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from anybit.config import (
    ACT_BITS,
    CODEBOOK_BITS,
    GROUP_SIZE,
    MAX_GROUP,
    LayerSpec,
    Options,
    one_of,
    option,
    within,
)
from anybit.errors import InputError
from anybit.progress import SILENT, Silent

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from anybit.calibration.own_texts import MixedWindows
    from anybit.calibration.stats import VocabularyCost, VocabularyStats
    from anybit.calibration.streaming import StreamedModel
    from anybit.formats.layout import LayerLayout
    from anybit.formats.weight import QuantizedWeight
    from anybit.methods.end_to_end import Training
    from anybit.methods.finetune import Task
    from anybit.progress import Advance

SCALINGS = ("none", "awq", "smoothquant")
Shape = tuple[int, int]  # (out, in)
UNCLIPPED_BITS = 8  # of weights whose grid reaches all of them, where no clipping ratio is searched


@dataclass(frozen=True)
class Statistics:
    """What a method is to be told of a layer; `|` joins what several layers want."""

    norms: bool = False  # squared norms of input channels
    hessian: bool = False  # second moments of the inputs, whole
    inputs: bool = False  # ranges of the inputs, and a sample of them
    fisher: bool = False  # diagonal Fisher information of the weights, of the whole model before any block
    attention: bool = (
        False  # value tokens count by the attention they receive, where second moments are wanted
    )

    def __or__(self, other: Statistics) -> Statistics:
        return Statistics(
            self.norms or other.norms,
            self.hessian or other.hessian,
            self.inputs or other.inputs,
            self.fisher or other.fisher,
            self.attention or other.attention,
        )

    def __bool__(self) -> bool:
        return self.norms or self.hessian or self.inputs or self.fisher


@dataclass(frozen=True)
class Work:
    """What a method costs besides the blocks' forward passes, for predictions of time and memory."""

    sweeps: float = 0  # over the columns of every matrix, errors compensated in the rest of it
    clustering: float = 0  # seconds per weight and thread,
    serial: float = 0  # and on one thread alone
    passes: float = 0  # of all samples through the whole model, forward and backward; of some, their share
    written: int = 0  # tokens of texts that the model writes by itself
    epochs: int = 0  # of finetuning
    rounded_sweeps: bool = False  # whether they multiply errors in the numbers that calibration computes in
    scaled: bool = False  # whether factors of input channels are searched first


@dataclass(frozen=True)
class Search:
    """What a method may look at before any block is quantized."""

    streamed: StreamedModel
    tokens: Tensor  # int64 [samples, seq_len]
    shapes: Mapping[str, Shape]  # of the layers that it may decide on
    options: Any  # the method's
    specs: Mapping[str, LayerSpec[Any]] = field(default_factory=dict)  # of those layers, as they are planned
    layouts: Mapping[str, LayerLayout] = field(default_factory=dict)
    folder: Path | None = (
        None  # where finished parts are kept: a search that was interrupted goes on from there
    )
    vocabulary: bool = False  # whether it is to say what embedding and head do
    report: Silent = SILENT


@dataclass(frozen=True)
class Ordered:
    """How bitplanes are put in one order over the model."""

    bits: float  # up to which average width
    whole: bool  # whether layers step as a whole
    coded: bool  # whether files hold planes entropy-coded


@dataclass(frozen=True)
class Allocation:
    """What was found there."""

    specs: Mapping[str, LayerSpec[Any]] = field(default_factory=dict)  # layer -> how it is quantized
    outputs: Mapping[str, Tensor] = field(default_factory=dict)  # layer -> what its rows' errors are worth
    tokens: Mapping[str, Mapping[int, Tensor]] = field(
        default_factory=dict
    )  # layer -> sample -> weight of each token, [seq_len]
    plain_share: float = 0.5  # of second moments, of tokens alike; those of `tokens` are the rest
    vocabulary: VocabularyStats | None = None  # what embedding and head do, where the method asks
    mixed: MixedWindows | None = None  # what to calibrate on, if not on windows of the text alone


@dataclass(frozen=True)
class Start:
    """What there is to quantize a layer from."""

    name: str
    weight: Callable[[], Tensor]  # float32 [out, in]
    stats: Any  # `LinearStats` or `GradientStats`; None where none are wanted
    spec: LayerSpec[Any]


def check_ratio(name: str, spec: LayerSpec[Any], usual: LayerSpec[Any]) -> None:
    """Refuse a clipping ratio that a map sets for a layer of which nothing is clipped."""
    given, ratio = getattr(spec.options, "clip_ratio", None), getattr(usual.options, "clip_ratio", None)
    if given != ratio and all(tile.bits == UNCLIPPED_BITS for tile in spec.tiles):
        raise InputError(
            f"spec of {name}: clip_ratio {given:g} would be ignored: {UNCLIPPED_BITS} bits are not clipped; leave it "
            "out, or give fewer bits"
        )


@dataclass(frozen=True)
class Method:
    """A way to quantize. `quantize` and `layout` are pure: no model, no files, no device but their tensors'."""

    options: type[Options]
    title: str  # of the paper
    paper: str  # where it is
    summary: str  # in a few words, for help and reports
    # Of a weight float32 [out, in], its statistics, its spec.
    quantize: Callable[[Tensor, Any, Any], QuantizedWeight]
    layout: Callable[[Any, Shape], LayerLayout]  # what `quantize` will store of a spec and a shape
    statistics: Callable[[Any], Statistics]  # what it wants, of a layer's options
    work: Callable[[Any], Work] = lambda options: Work()
    extra: str = ""  # of pyproject.toml, that it needs
    native: bool = False  # whether it needs the native extension, where it runs on the CPU
    compared: str = ""  # how `anybit compare` lists it where it is asked for no methods; "": not at all
    # Decides on layers over the whole model. What is kept of it depends on `searched`, and not on the width.
    allocate: Callable[[Search], Allocation] | None = None
    searched: Callable[[Any], list[Any]] = lambda options: []
    # Trains what `quantize` gave, a block's layers together: the weights, and the error before and after each epoch.
    tune: (
        Callable[[Task, Mapping[str, Start], Any, Advance], tuple[dict[str, QuantizedWeight], list[float]]]
        | None
    ) = None
    # Its bitplanes are put in one order over the model.
    ordered: Callable[[Any], Ordered] | None = None
    # How embedding and head are stored where `embed_bits` is left open, and what they become, of a weight and of what
    # its errors cost; None: the method rounds them.
    embedding_layout: Callable[[Any, Shape], LayerLayout] | None = None
    embed: Callable[[Tensor, VocabularyCost, Any], QuantizedWeight] | None = None
    # Of weights that carry losses: as what they run for the sake of the blocks after them.
    running: (
        Callable[[Any, Mapping[str, LayerLayout], Mapping[str, Tensor]], Mapping[str, LayerLayout]] | None
    ) = None
    # Steps of training once all layers are there; and what trains: tensors by name that take the place of theirs.
    tuning: Callable[[Any], int] = lambda options: 0
    end_to_end: Callable[[Training], dict[str, Tensor]] | None = None
    # Refuses what a map of specs says of a layer: name, its spec, that of a layer it does not name.
    check_given: Callable[[str, Any, Any], None] = check_ratio

    @property
    def name(self) -> str:
        return self.options.name


@dataclass(frozen=True, kw_only=True)
class Sequential(Options):
    """Methods that are calibrated block by block."""

    one_shot: bool = option(
        False, "Statistics of the unquantized model, not of what the quantized blocks before hand over.",
        panel="Calibration", flag="--one-shot",
    )  # fmt: skip

    @property
    def unquantized(self) -> bool:
        return self.one_shot


@dataclass(frozen=True, kw_only=True)
class Attentive(Sequential):
    """Methods whose statistics of value projections weight tokens by the attention they receive."""

    attention_weights: bool = option(
        True, "Value tokens count by the attention they receive.", panel="Calibration"
    )


@dataclass(frozen=True, kw_only=True)
class Damped(Options):
    """Methods that compensate errors by the inverse of a Hessian."""

    damp: float = option(
        0.01, "Share of the mean Hessian diagonal added to it.", layer=True,
        expected="a share between 0 and 1 (0.01 is usual)", valid=lambda value: 0 < value < 1,
    )  # fmt: skip


def group_size_of(default: int) -> Any:
    """The option of all uniform grids."""
    return option(
        default, "Input channels that share a scale; -1: the whole row.",
        expected=f"a whole number from 1 to {MAX_GROUP}, or -1 for the whole row",
        valid=lambda value: value == -1 or 1 <= value <= MAX_GROUP,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Uniform(Attentive):
    """Methods that round weights, and perhaps inputs, to uniform grids."""

    group_size: int = group_size_of(GROUP_SIZE)
    clip: bool = option(False, "Search clipping ratios per group.", layer=True)
    clip_ratio: float | None = option(
        None, "Clipping ratio below 8 bits, where none is searched.", unset="1", layer=True,
        **within(0.1, 1, "a ratio"),
    )  # fmt: skip
    act_bits: int | None = option(
        None, "Round a layer's inputs to so many bits, token by token; 16: not at all.", unset="16", layer=True,
        **one_of(ACT_BITS),
    )  # fmt: skip
    act_clip: float | None = option(
        None,
        "Share of the largest input that the grid reaches.",
        unset="1",
        layer=True,
        **within(0.1, 1, "a ratio"),
    )
    act_search: bool = option(False, "Search that share per group.", layer=True)
    act_static: bool = option(
        False, "Scales of inputs from calibration instead of each token.", layer=True, flag="--act-static"
    )
    scaling: str = option("none", "Scale input channels first.", layer=True, **one_of(SCALINGS))

    def defaults(self) -> dict[str, Any]:
        return super().defaults() | {"clip_ratio": 1.0, "act_bits": 16, "act_clip": 1.0}

    def check(self) -> None:
        super().check()
        grids = {"act_static": self.act_static, "act_search": self.act_search, "act_clip": self.act_clip != 1}
        for name, wanted in grids.items():
            if wanted and self.act_bits == 16:
                raise InputError(
                    f"{name} is about rounded inputs, which stay at 16 bits: give act_bits (--act-bits 8)"
                )
        if self.act_search and (self.act_static or self.act_clip != 1):
            raise InputError(
                "act_search finds how far the grid of inputs reaches: leave act_static and act_clip out"
            )
        if self.clip and self.clip_ratio != 1:
            raise InputError("clip searches the clipping ratios: leave clip_ratio out, or give --no-clip")

    def with_bits(self, bits: float) -> Self:
        ratio = None if bits == UNCLIPPED_BITS else self.clip_ratio
        return super(Uniform, replace(self, clip_ratio=ratio)).with_bits(bits)

    def layer_spec(self) -> LayerSpec[Self]:
        if self.bits == UNCLIPPED_BITS and self.clip_ratio != 1:
            raise InputError(
                f"clip_ratio {self.clip_ratio:g} would be ignored: {UNCLIPPED_BITS} bits are not clipped; leave it out "
                "(--clip-ratio), or give fewer bits"
            )
        return super().layer_spec()

    @property
    def calibrated(self) -> bool:
        return bool(rounding_statistics(self))


def rounding_statistics(options: Uniform) -> Statistics:
    """What plain rounding wants to know: nothing, but for the searches around it."""
    inputs = options.scaling != "none" or options.act_search or options.act_static
    hessian = options.clip or (options.scaling != "none" and options.act_bits == 16)
    return Statistics(
        norms=inputs or hessian, hessian=hessian, inputs=inputs, attention=options.attention_weights
    )


def rounding_work(options: Uniform) -> Work:
    """What plain rounding costs: nothing, but for a search around it."""
    return Work(scaled=options.scaling != "none")


@dataclass(frozen=True, kw_only=True)
class Compensated(Uniform, Damped):
    """Uniform grids whose errors are compensated in later columns, as GPTQ does."""

    clip: bool = option(True, "Search clipping ratios per group.", layer=True)
    group_reorder: bool = option(
        True, "Groups of the largest inputs first; storage stays natural.", layer=True
    )

    @property
    def calibrated(self) -> bool:
        return True


def compensation_statistics(options: Compensated) -> Statistics:
    """What error compensation wants to know."""
    return replace(rounding_statistics(options), norms=True, hessian=True)


def compensation_work(options: Compensated) -> Work:
    """What error compensation costs."""
    return replace(rounding_work(options), sweeps=1)


@dataclass(frozen=True, kw_only=True)
class Codebooks(Options):
    """Methods whose codes are numbers of entries in tables."""

    codebook_bits: int = option(16, "Bits of a codebook's entry.", layer=True, **one_of(CODEBOOK_BITS))


def clustering_seconds(bits: float | None) -> float:
    """Of a weight on a thread: with the number of clusters that the seed has."""
    return 6e-8 * 2 ** max(0.0, (bits or 4) - 3)


SHARE = within(0, 0.1, "a share") | {"expected": "a share from 0 to 0.1 (0.005 is 0.5 %)"}
