"""What to make of a layer and of a run: plain, frozen, validated data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import ceil
from pathlib import Path
from typing import Any

from anybit.errors import InputError


@dataclass(frozen=True)
class Widths:
    """What `bits` may be: whole widths from `low` to `high`, or any average between them."""

    low: float
    high: int
    fractional: bool = False

    def __contains__(self, bits: float) -> bool:
        return self.low <= bits <= self.high and (self.fractional or float(bits).is_integer())

    def __str__(self) -> str:
        return f"{'any average from' if self.fractional else 'whole widths'} {self.low} to {self.high}"

    def whole(self) -> range:
        return range(ceil(self.low), self.high + 1)


def bits_eq10(wide: float, group_size: int) -> float:
    """The average width of 2/4/16 by its eq. 10: scales and zero points of 2-bit groups count, `wide` of all at 4 bits.

    2-bit groups have a 2-bit zero point and a 4-bit scale, over 16 rows a 4-bit zero point and a float16 scale.
    """
    return (1 - wide) * (2 + (2 + 4) / group_size + (4 + 16) / (16 * group_size)) + 4 * wide


METHOD_WIDTHS = {
    "anybit": Widths(2, 8, fractional=True),
    "rtn": Widths(2, 8),
    "gptq": Widths(2, 8),
    "awq": Widths(2, 8),
    "smoothquant": Widths(2, 8),
    "mixllm": Widths(4, 8, fractional=True),
    "atom": Widths(2, 8),
    "llm-mq": Widths(2, 4, fractional=True),
    "two-four-sixteen": Widths(bits_eq10(0, 16), 4, fractional=True),
    "squeezellm": Widths(2, 8),
    "any-precision": Widths(2, 8),
    "cmpq": Widths(2, 8, fractional=True),
}
METHODS = tuple(METHOD_WIDTHS)
DESCRIPTIONS = {  # for help and reports
    "anybit": "any average width at load and at run time, from one artifact",
    "rtn": "round to nearest, no calibration",
    "gptq": "each column's error is compensated in later ones, by second moments of the inputs",
    "awq": "input channels scaled by their activations before rounding",
    "smoothquant": "int8 activations, made easier by scaling input channels",
    "mixllm": "8-bit rows where they count, int8 activations",
    "atom": "4-bit weights and activations, outlier channels at 8; its paper adds a 4-bit KV-cache, --kv-bits 4",
    "llm-mq": "a width per layer, by an integer program",
    "two-four-sixteen": "2/4/16: 2- and 4-bit groups and sparse outliers at 16",
    "squeezellm": "codebooks by row, of weights clustered by sensitivity",
    "any-precision": "SqueezeLLM's codebooks nested, every width in one artifact",
    "cmpq": "codebooks by channel, any average width",
}
CODEBOOK_METHODS = ("squeezellm", "any-precision", "cmpq")
FISHER_METHODS = ("squeezellm", "any-precision")  # calibrated on gradients
SEARCH_METHODS = ("mixllm", "llm-mq")  # widths chosen by gradients
ENCODER_METHODS = tuple(m for m in METHODS if m not in ("anybit", *FISHER_METHODS, *SEARCH_METHODS))
CODEBOOK_BITS = (16, 8, 4)
UNIFORM_METHODS = ("rtn", "gptq", "awq", "smoothquant", "mixllm", "atom", "llm-mq")
COMPENSATED = ("gptq", "mixllm", "atom", "llm-mq")  # uniform grids with GPTQ's error compensation
SALIENCES = {
    "mixllm": ("full", "diagonal", "second-order"),
    "anybit": ("output", "full", "diagonal"),
}  # default first
# Methods that look at an option; the options that are not here concern all of them.
USED_BY = {
    **dict.fromkeys(("group_size", "clip"), (*UNIFORM_METHODS, "two-four-sixteen")),
    "clip_ratio": UNIFORM_METHODS,
    **dict.fromkeys(("act_bits", "act_clip", "act_search", "act_static"), UNIFORM_METHODS),
    "attention_weights": (*UNIFORM_METHODS, "two-four-sixteen", "cmpq"),
    "one_shot": ("anybit", *UNIFORM_METHODS, "two-four-sixteen", "cmpq"),
    "symmetric": ("rtn", "gptq", "awq", "smoothquant", "atom", "llm-mq"),
    "scaling": UNIFORM_METHODS,
    "group_reorder": COMPENSATED,
    "desc_act": ("gptq",),
    "damp": ("anybit", *COMPENSATED, "two-four-sixteen", "cmpq"),
    **dict.fromkeys(("kept_channels", "tune_for", "whole_layers"), ("anybit",)),
    **dict.fromkeys(
        ("wide_groups", "exclusive_outliers", "finetune", "finetune_epochs"), ("two-four-sixteen",)
    ),
    **dict.fromkeys(("wide_rows", "search"), ("mixllm",)),
    "salience": tuple(SALIENCES),
    "outlier_channels": ("atom",),
    "widths": ("any-precision",),
    "codebook_bits": CODEBOOK_METHODS,
    **dict.fromkeys(("sensitive_outliers", "magnitude_outliers"), ("squeezellm",)),
    **dict.fromkeys(("channel_outliers", "error_outliers", "compensate"), ("cmpq",)),
}
SCALINGS = ("none", "awq", "smoothquant")
SEARCHES = ("one-pass", "progressive")
ACT_BITS = (2, 3, 4, 5, 6, 7, 8, 16)
KV_BITS = (2, 3, 4, 8, 16)
NESTED_WIDTHS = (3, 4, 5, 6, 7, 8)
EMBED_BITS = (4, 8, 16)
EMBED_GROUP_SIZE = 128
MAX_SEED = 2**63 - 1
# Types that a field of these annotations takes; `type(value) in`, as True is an int to isinstance.
_ACCEPTED: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "bool | None": (bool, type(None)),
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "int | None": (int, type(None)),
    "str | None": (str, type(None)),
}


@dataclass(frozen=True)
class TileSpec:
    """One tile of a matrix: which rows and columns, on which grid."""

    bits: float = 4  # 1..8; a fraction is an average, where the method mixes widths itself
    group_size: int = 128  # input channels per scale; -1: the whole row
    symmetric: bool = False
    rows: tuple[int, ...] | None = None  # ascending output rows; None: all
    cols: tuple[int, ...] | None = None  # original input channels in stored order; None: all, natural order
    act_bits: int | None = None  # width of the inputs; None: the layer's

    def __post_init__(self) -> None:
        if float(self.bits).is_integer():
            object.__setattr__(self, "bits", int(self.bits))


@dataclass(frozen=True)
class LayerSpec:
    """How one linear layer is quantized: the value of the `{layer name: spec}` map."""

    tiles: tuple[TileSpec, ...] = (TileSpec(),)
    clip: bool = False  # search a clipping ratio per row and group
    clip_ratio: float = 1.0  # of all groups below 8 bits, where none is searched
    act_bits: int = 16  # width that inputs are rounded to, in the groups of the weights; 16: not at all
    act_clip: float = 1.0  # share of a group's largest input that the grid of act_bits reaches
    act_search: bool = False  # search that share group by group instead
    act_static: bool = False  # scales of inputs from calibration instead of each token
    scaling: str = "none"  # divide input channels by a factor searched before: "awq" or "smoothquant"
    outlier_channels: int | None = None  # atom: input channels at 8 bits; None: by the layer's width
    exclusive_outliers: float = (
        0.002  # two-four-sixteen: share of weights kept sparsely, the largest at 2 bits
    )
    desc_act: bool = False  # store columns in order of falling activation energy (costs a permutation)
    group_reorder: bool = True  # process whole groups in order of importance (storage stays natural)
    damp: float = 0.01  # share of the mean Hessian diagonal added to it
    widths: tuple[int, ...] = ()  # any-precision: the widths of nested codes; empty: the tile's
    codebook_bits: int = 16  # of a codebook's entries: 16, 8 or 4
    sensitive_outliers: float = 0.0  # squeezellm: share of weights kept sparsely for their Fisher information
    magnitude_outliers: float = 0.0  # squeezellm: and for their size
    channel_outliers: float = 0.0045  # cmpq: share of input channels that stay float16
    error_outliers: float = (
        0.0005  # cmpq: share of weights kept sparsely, those a first clustering misses most
    )
    compensate: bool = True  # cmpq: what a channel loses is compensated in those clustered later
    kept_channels: float = 1 / 128  # anybit: share of input channels that stay float16
    tune_for: float = 3.0  # anybit: average width at which errors count most
    extremes: bool = True  # cmpq, at 3 bits: the top 1 % of channels get 4 bits, the bottom 1 % get 2

    @staticmethod
    def uniform(bits: int, group_size: int = 128, symmetric: bool = False, **options: Any) -> LayerSpec:
        return LayerSpec(tiles=(TileSpec(bits, group_size, symmetric),), **options)


@dataclass(frozen=True)
class QuantizeConfig:
    """Everything that decides the bytes of an artifact, besides the model and the calibration text."""

    method: str = "anybit"
    bits: float | None = (
        None  # average width, for anybit the largest; None: 8 for it and smoothquant, any-precision's
    )
    # widest, else 4
    group_size: int | None = None  # -1: one group per row; None: 128, for smoothquant -1
    symmetric: bool | None = None  # None: for atom and smoothquant
    embed_bits: int | None = None  # None: 8 for anybit, else 16
    clip: bool | None = None  # None: for awq and whatever compensates errors
    clip_ratio: float | None = None  # None: 0.85 for atom, else 1
    act_bits: int | None = None  # None: 8 for mixllm and smoothquant, the weights' for atom, else 16
    act_clip: float | None = None  # None: 0.9 for atom below 8 bits, else 1
    act_search: bool = False
    act_static: bool = False
    kv_bits: int = 16  # width of the KV-cache that the artifact asks for
    scaling: str | None = None  # None: the method's
    kept_channels: float = 1 / 128  # anybit: see LayerSpec
    tune_for: float = 3.0
    whole_layers: bool = (
        False  # anybit: one width for all rows of q, k and v, of gate and up, of every other layer
    )
    outlier_channels: int | None = None  # atom: see LayerSpec
    wide_groups: float | None = (
        None  # two-four-sixteen: share of groups at 4 bits; None: 0.25, or what `bits` says
    )
    exclusive_outliers: float = 0.002  # two-four-sixteen: see LayerSpec
    finetune: bool = False  # two-four-sixteen: train each block's weights after quantizing them
    finetune_epochs: int = 6  # at most so many passes over the calibration windows
    wide_rows: float | None = None  # mixllm: share of output rows at 8 bits; None: 0.1, or what `bits` says
    salience: str | None = (
        None  # what ranks rows; None: the first of the method's SALIENCES, see `anybit.methods.sensitivity`
    )
    search: str = "one-pass"  # mixllm: or "progressive", 2 % of the rows at a time
    desc_act: bool = False
    group_reorder: bool = True
    damp: float = 0.01
    attention_weights: bool = True  # value projections: tokens count by the attention they receive
    one_shot: bool = False  # statistics from the unquantized model instead of the quantized blocks before
    samples: int = 128
    seq_len: int = 2048
    seed: int = 0
    include: tuple[str, ...] = ()  # glob patterns of layer names to quantize; empty: all
    exclude: tuple[str, ...] = ()  # glob patterns of layer names to keep
    widths: tuple[int, ...] = NESTED_WIDTHS  # any-precision: the widths that the artifact can run at
    codebook_bits: int = 16  # codebook methods: bits of a table's entry
    sensitive_outliers: float = 0.0  # squeezellm, any-precision: see LayerSpec
    magnitude_outliers: float = 0.0
    channel_outliers: float = 0.0045  # cmpq: see LayerSpec
    error_outliers: float = 0.0005
    compensate: bool = True

    def __post_init__(self) -> None:  # noqa: PLR0912 - a check each
        check_method(self.method)
        _check_types(self)
        check_codebooks(self)
        object.__setattr__(self, "_given", {field.name: getattr(self, field.name) for field in fields(self)})
        if not self.widths:
            raise InputError("widths is empty: name at least one")
        for name, method, default in (
            ("wide_rows", "mixllm", 0.1),
            ("wide_groups", "two-four-sixteen", 0.25),
        ):
            share = getattr(self, name)
            if share is not None and not 0 <= share <= 1:
                raise InputError(f"{name} {share}: expected a share from 0 to 1 (0.1 is 10 %)")
            if self.method == method and share is None and self.bits is None:
                object.__setattr__(self, name, default)
        bits = self._default_bits() if self.bits is None else self.bits
        widest = max(self.widths) if self.nested else 4
        if bits not in METHOD_WIDTHS[self.method]:
            raise InputError(
                f"{self.method} has no {bits:g}-bit width: choose {METHOD_WIDTHS[self.method]} bits"
            )
        if self.nested and bits != widest:
            raise InputError(
                f"any-precision stores all of its widths, here {self.widths}: choose them with widths "
                f"(--widths), not bits ({bits:g})"
            )
        object.__setattr__(self, "bits", int(bits) if float(bits).is_integer() else bits)
        self._resolve()
        check_activations(self)
        if self.embed_bits not in EMBED_BITS:
            raise InputError(
                f"--embed-bits {self.embed_bits} is not one of {', '.join(map(str, EMBED_BITS))}"
            )
        assert self.group_size is not None
        if self.group_size < 1 and self.group_size != -1:
            raise InputError(
                f"group size {self.group_size}: expected a positive number, or -1 for whole rows"
            )
        if not 0 < self.damp < 1:
            raise InputError(f"damp {self.damp} must lie between 0 and 1 (0.01 is usual)")
        if self.samples < 1 or self.seq_len < 1:
            raise InputError(f"samples ({self.samples}) and seq_len ({self.seq_len}) must be at least 1")
        if not 2 <= self.tune_for <= 8:
            raise InputError(f"tune_for {self.tune_for:g}: expected an average width from 2 to 8")
        if (self.gradients or self.searches or self.progressive) and self.seq_len < 2:
            raise InputError(
                f"{self.method} needs gradients, and windows of 1 token have none: raise seq_len (--seq-len)"
            )
        self._check_finetuning()
        if not 0 <= self.seed <= MAX_SEED:
            raise InputError(f"seed {self.seed}: expected a number from 0 to 2**63 - 1")

    def _check_finetuning(self) -> None:
        default = QuantizeConfig.finetune_epochs
        if not self.finetune and self.finetune_epochs != default:
            raise InputError(
                "finetune_epochs (--finetune-epochs) says how long to finetune: add finetune (--finetune)"
            )
        if not 1 <= self.finetune_epochs <= 1000:
            raise InputError(
                f"finetune_epochs {self.finetune_epochs}: expected 1 to 1000 ({default} is usual)"
            )
        if self.finetune and self.one_shot:
            raise InputError(
                "finetuning makes each block undo what the blocks before it lost, which one_shot (--one-shot) hides "
                "from it: give one of them"
            )
        if self.finetune and self.samples < 2:
            raise InputError(
                "finetuning trains on some windows and stops by others: raise samples (--samples) to 2 or more"
            )

    def _default_bits(self) -> float:
        if self.nested:
            return max(self.widths)
        if self.method == "mixllm" and self.wide_rows is not None:
            return 4 + 4 * self.wide_rows
        if self.method == "two-four-sixteen" and self.wide_groups is not None:
            return bits_eq10(self.wide_groups, self.group_size or 16)
        return 8 if self.method in ("anybit", "smoothquant") else 4

    def _resolve(self) -> None:
        """Fill in what the method decides."""
        atom, smooth = self.method == "atom", self.method == "smoothquant"
        for name in ("wide_rows", "wide_groups"):
            if getattr(self, name) is not None and abs(self._default_bits() - (self.bits or 0)) > 1e-9:
                flag = "--" + name.replace("_", "-")
                raise InputError(f"{name} ({flag}) and bits (--bits) set the same thing: give one of them")
        own = self.method if self.method in SCALINGS else "none"
        if self.scaling not in (None, own) and own != "none":
            raise InputError(f"{self.method} is itself a scaling: leave scaling (--scaling) out")
        act_bits = {"mixllm": 8, "smoothquant": 8, "atom": int(self.bits or 4)}.get(self.method, 16)
        act_bits = act_bits if self.act_bits is None else self.act_bits
        clipped = atom and act_bits < 8 and not self.act_search
        defaults = {
            "act_clip": 0.9 if clipped else 1.0,
            "group_size": {"smoothquant": -1, "two-four-sixteen": 16}.get(self.method, 128),
            "symmetric": atom or smooth,
            "clip_ratio": 0.85 if atom and not self.clips else 1.0,
            "act_bits": act_bits,
            "scaling": own,
            "embed_bits": 8 if self.progressive else 16,
            "salience": SALIENCES.get(self.method, (None,))[0],
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for field in fields(self):
            value, methods = getattr(self, field.name), USED_BY.get(field.name)
            unused = methods is not None and self.method not in methods
            if unused and value not in (field.default, defaults.get(field.name, field.default)):
                flag = "--" + field.name.replace("_", "-")
                raise InputError(
                    f"{field.name} ({flag}) is for {', '.join(methods or ())}; {self.method} has no use for it"
                )

    def with_bits(self, bits: float) -> QuantizeConfig:
        """The same options at another average width; what the width decides is decided anew."""
        given: dict[str, Any] = self.__dict__["_given"]
        return QuantizeConfig(**{**given, "bits": bits, "wide_rows": None, "wide_groups": None})

    @property
    def nested(self) -> bool:
        """Whether one artifact holds several widths."""
        return self.method == "any-precision"

    @property
    def progressive(self) -> bool:
        """Whether the artifact is a core and refinements, in one order over the whole model."""
        return self.method == "anybit"

    @property
    def searches(self) -> bool:
        """Whether widths are chosen over the whole model, from gradients, before any block is quantized."""
        return self.method in SEARCH_METHODS

    @property
    def clips(self) -> bool:
        """Whether clipping ratios are searched."""
        return self.method in (*COMPENSATED, "two-four-sixteen", "awq") if self.clip is None else self.clip

    @property
    def calibrated(self) -> bool:
        """Whether the method looks at activations at all."""
        return self.method != "rtn" or self.clips or self.input_stats

    @property
    def input_stats(self) -> bool:
        """Whether a layer's inputs themselves are looked at, not only their second moments."""
        return self.scaling != "none" or self.act_search or self.act_static or self.method == "atom"

    @property
    def gradients(self) -> bool:
        """Whether calibration is global, on gradients, instead of block by block."""
        return self.method in FISHER_METHODS

    @property
    def unquantized_inputs(self) -> bool:
        """Whether blocks are calibrated on what the unquantized model hands them."""
        return self.one_shot or (self.method == "cmpq" and not self.compensate)

    @property
    def hessians(self) -> bool:
        """Whether calibration collects whole second moments, not only the channels' norms."""
        if self.method == "cmpq":
            return self.compensate
        second_order = ("anybit", *COMPENSATED, "two-four-sixteen")
        return self.method in second_order or self.clips or (self.scaling != "none" and self.act_bits == 16)

    def layer_spec(self) -> LayerSpec:
        return LayerSpec(
            kept_channels=self.kept_channels,
            tune_for=self.tune_for,
            tiles=(TileSpec(self.bits or 4, self.group_size or 128, bool(self.symmetric)),),
            clip=self.clips,
            clip_ratio=self.clip_ratio or 1.0,
            act_bits=self.act_bits or 16,
            act_clip=self.act_clip or 1.0,
            act_search=self.act_search,
            act_static=self.act_static,
            scaling=self.scaling or "none",
            outlier_channels=self.outlier_channels,
            exclusive_outliers=self.exclusive_outliers,
            desc_act=self.desc_act,
            group_reorder=self.group_reorder,
            damp=self.damp,
            widths=self.widths if self.nested else (),
            codebook_bits=self.codebook_bits,
            sensitive_outliers=self.sensitive_outliers,
            magnitude_outliers=self.magnitude_outliers,
            channel_outliers=self.channel_outliers,
            error_outliers=self.error_outliers,
            compensate=self.compensate,
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_codebooks(options: QuantizeConfig | LayerSpec) -> None:
    """Refuse widths, table sizes and outlier shares that no codebook has.

    Raises:
        InputError: with the option and what is expected.
    """
    widths = METHOD_WIDTHS["any-precision"]
    if list(options.widths) != sorted(set(options.widths)):
        raise InputError(
            f"widths {options.widths}: expected different ones in ascending order, such as 3,4,6,8"
        )
    if not all(b in widths for b in options.widths):
        raise InputError(f"widths {options.widths}: any-precision has {widths} bits")
    if options.codebook_bits not in CODEBOOK_BITS:
        raise InputError(
            f"--codebook-bits {options.codebook_bits} is not one of {', '.join(map(str, CODEBOOK_BITS))}"
        )
    for name in (
        "sensitive_outliers",
        "magnitude_outliers",
        "channel_outliers",
        "error_outliers",
        "exclusive_outliers",
        "kept_channels",
    ):
        if not 0 <= getattr(options, name) <= 0.1:
            raise InputError(
                f"{name} {getattr(options, name)}: expected a share from 0 to 0.1 (0.005 is 0.5 %)"
            )


def check_activations(options: QuantizeConfig | LayerSpec) -> None:
    """Refuse activation widths, clipping ratios and scalings that do not exist.

    Raises:
        InputError: with the option and what is expected.
    """
    choices: dict[str, tuple[Any, ...]] = {"act_bits": ACT_BITS, "scaling": SCALINGS}
    if isinstance(options, QuantizeConfig):
        choices |= {"kv_bits": KV_BITS, "search": SEARCHES}
        if options.method in SALIENCES:
            choices["salience"] = SALIENCES[options.method]
    for name, accepted in choices.items():
        if getattr(options, name) not in accepted:
            flag = "--" + name.replace("_", "-")
            raise InputError(f"{flag} {getattr(options, name)} is not one of {', '.join(map(str, accepted))}")
    for name in ("clip_ratio", "act_clip"):
        if not 0.1 <= getattr(options, name) <= 1:
            raise InputError(f"{name} {getattr(options, name)}: expected a ratio from 0.1 to 1")
    if options.outlier_channels is not None and options.outlier_channels < 1:
        raise InputError(f"outlier_channels {options.outlier_channels}: expected at least 1")
    grids = {
        "act_static": options.act_static,
        "act_search": options.act_search,
        "act_clip": options.act_clip != 1,
    }
    for name, wanted in grids.items():
        if wanted and options.act_bits == 16:
            raise InputError(
                f"{name} is about rounded inputs, which stay at 16 bits: give act_bits (--act-bits 8)"
            )
    if options.act_search and (options.act_static or options.act_clip != 1):
        raise InputError(
            "act_search finds how far the grid of inputs reaches: leave act_static and act_clip out"
        )
    clips = options.clips if isinstance(options, QuantizeConfig) else options.clip
    if clips and options.clip_ratio != 1:
        raise InputError("clip searches the clipping ratios: leave clip_ratio out, or give --no-clip")


def parse_bytes(text: str) -> int:
    """ "120MB" or "120M" -> 120000000: decimal units, as file sizes are sold.

    Raises:
        InputError: no number, or no such unit.
    """
    powers = {letter: power for power, letter in enumerate("KMGT", 1)}
    units = {"B": 1} | {f"{letter}IB": 2 ** (10 * power) for letter, power in powers.items()}
    for letter, power in powers.items():
        units |= {letter: 1000**power, f"{letter}B": 1000**power}
    number = text.strip().rstrip("KMGTIBkmgtib ")
    unit = text.strip()[len(number) :].strip().upper() or "B"
    try:
        return int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError) as error:
        raise InputError(f"size {text!r}: expected a number and a unit, such as 120MB or 1.5GiB") from error


def check_method(method: str) -> None:
    """Refuse what is no method's name.

    Raises:
        InputError: with the names there are.
    """
    if method not in METHODS:
        raise InputError(f"unknown method {method!r}: expected one of {', '.join(METHODS)}")


def _check_types(config: QuantizeConfig) -> None:
    """Refuse an option of another type than its field's: "4", 4.0 and True are no widths."""
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name == "widths":
            if not isinstance(value, tuple) or not all(type(bits) is int for bits in value):
                raise InputError(f"widths must be a tuple of whole numbers such as (3, 4, 8), got {value!r}")
            continue
        if field.name in ("include", "exclude"):
            if not isinstance(value, tuple) or not all(isinstance(pattern, str) for pattern in value):
                raise InputError(
                    f"{field.name} must be a tuple of glob patterns, got {value!r}: "
                    f"pass a tuple such as {field.name}=('*.mlp.*',)"
                )
            continue
        if type(value) not in _ACCEPTED[str(field.type)]:
            raise InputError(f"{field.name} must be of type {field.type}, got {value!r}")


SpecMap = dict[str, LayerSpec]


def read_spec_map(path: Path, default: LayerSpec) -> SpecMap:
    """Read a `{layer name: spec}` JSON map, the one that `anybit plan -o` writes.

    A value is an object with any of `bits`, `group_size`, `symmetric` (one tile) or `tiles` (a list of such
    objects with `rows` or `cols`), and any option of `LayerSpec`; what is absent comes from `default`.

    Raises:
        InputError: where the file is not such a map, with the layer and the field.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"--spec {path}: not a readable JSON file ({error})") from error
    layers = data.get("layers", data) if isinstance(data, dict) else None
    if not isinstance(layers, dict):
        raise InputError(f"--spec {path}: expected an object of layer names to specs")
    return {name: parse_layer_spec(name, value, default) for name, value in layers.items()}


def parse_layer_spec(name: str, value: Any, default: LayerSpec) -> LayerSpec:
    """One entry of the map; see `read_spec_map`."""
    tile_fields = {f.name for f in fields(TileSpec)}
    option_fields = {f.name for f in fields(LayerSpec)} - {"tiles"}
    if not isinstance(value, Mapping):
        raise InputError(f"spec of {name}: expected an object, got {value!r}")
    unknown = value.keys() - tile_fields - option_fields - {"tiles"}
    if unknown:
        expected = ", ".join(sorted(tile_fields | option_fields | {"tiles"}))
        raise InputError(f"spec of {name}: unknown field {sorted(unknown)[0]!r}; expected {expected}")
    beside = sorted(tile_fields & value.keys())
    if "tiles" in value and beside:
        raise InputError(
            f"spec of {name}: {beside[0]!r} beside tiles would be ignored: put it into each tile"
        )
    options = {key: _typed(name, LayerSpec, key, value[key]) for key in option_fields & value.keys()}
    if not 2 <= options.get("tune_for", default.tune_for) <= 8:
        raise InputError(f"spec of {name}: tune_for {options['tune_for']:g}: expected 2 to 8")
    if not 0 < options.get("damp", default.damp) < 1:
        raise InputError(f"spec of {name}: damp {options['damp']} must lie between 0 and 1 (0.01 is usual)")
    tiles = value.get("tiles", [{key: value[key] for key in tile_fields & value.keys()}])
    if not isinstance(tiles, list) or not tiles:
        raise InputError(f"spec of {name}: tiles must be a list with at least one tile")
    parsed = tuple(_parse_tile(name, tile, default.tiles[0]) for tile in tiles)
    made = replace(default, tiles=parsed, **options)
    try:
        check_codebooks(made)
        check_activations(made)
    except InputError as error:
        raise InputError(f"spec of {name}: {error}") from error
    return made


def _parse_tile(name: str, value: Any, default: TileSpec) -> TileSpec:
    if not isinstance(value, Mapping) or value.keys() - {f.name for f in fields(TileSpec)}:
        raise InputError(
            f"spec of {name}: a tile has bits, group_size, symmetric, rows and cols; got {value!r}"
        )
    tile = replace(default, **{key: _typed(name, TileSpec, key, item) for key, item in value.items()})
    if tile.act_bits is not None and tile.act_bits not in ACT_BITS:
        raise InputError(
            f"spec of {name}: act_bits {tile.act_bits} is not one of {', '.join(map(str, ACT_BITS))}"
        )
    if not 1 <= tile.bits <= 8:
        raise InputError(f"spec of {name}: {tile.bits} bits is outside 1..8")
    if tile.group_size < 1 and tile.group_size != -1:
        raise InputError(f"spec of {name}: group_size {tile.group_size} is neither positive nor -1")
    return tile


def _typed(name: str, owner: type, key: str, value: Any) -> Any:
    """The value of one field, refused where its JSON type is not the field's."""
    kind = next(f.type for f in fields(owner) if f.name == key)
    if key in ("rows", "cols", "widths"):
        if value is None and key != "widths":
            return None
        if isinstance(value, list) and value and all(type(i) is int and i >= 0 for i in value):
            return tuple(value)
        what = "widths" if key == "widths" else "channel numbers"
        raise InputError(f"spec of {name}: {key} must be a list of {what}, got {value!r}")
    if type(value) not in _ACCEPTED[str(kind)]:
        raise InputError(f"spec of {name}: {key} must be of type {kind}, got {value!r}")
    return value
