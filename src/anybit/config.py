"""What to make: options of a run and specs of its layers, as plain, frozen, validated data.

`Options` is what all methods have in common; each method's file has a class of its own that adds to it. An option is
declared once, as a field with type, default, range and help: the command line, `compare`, the model card and the checks
follow from it. Imports nothing heavy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from math import ceil, floor
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from anybit.errors import InputError

Json = dict[str, Any]  # an object as JSON has it: what files hold and commands print
KV_BITS = (2, 3, 4, 8, 16)
SAMPLES = 128  # windows that a method is calibrated on, where neither it nor the user says another number
SEQ_LEN = 2048  # tokens of a window, where the user says nothing and the model reaches as far
EMBED_BITS = (4, 8, 16)
GROUP_SIZE = 128  # input channels that share a scale, where nothing else is said
ACT_BITS = (2, 3, 4, 5, 6, 7, 8, 16)
CODEBOOK_BITS = (16, 8, 4)
MAX_GROUP = 2**20  # input channels that share a scale: far more than any model's rows have
SPEC_BYTES = 100_000_000  # of a map of layers: lists of channels are long
MAX_SEED = 2**63 - 1
# Types that a field of these annotations takes; `type(value) in`, as True is an int to isinstance.
_ACCEPTED: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (int, float),
    "None": (type(None),),
    "tuple[int, ...]": (tuple,),
    "tuple[str, ...]": (tuple,),
}


@dataclass(frozen=True)
class Widths:
    """What `bits` may be: whole widths from `low` to `high`, or any average between them."""

    low: float
    high: float
    fractional: bool = False
    compact: tuple[float, ...] = ()  # averages that take fewer bytes than some below them

    def __contains__(self, bits: float) -> bool:
        return self.low <= bits <= self.high and (self.fractional or float(bits).is_integer())

    @property
    def least(self) -> float:
        """`low` to two places, rounded up: what is named can be had."""
        return ceil(self.low * 100) / 100

    def __str__(self) -> str:
        return f"{'any average from' if self.fractional else 'whole widths'} {self.least:g} to {self.high:g}"

    def whole(self) -> range:
        return range(ceil(self.low), floor(self.high) + 1)


@dataclass(frozen=True)
class About:
    """What there is to say of an option besides its type and default."""

    help: str
    expected: str = ""  # the values that it takes, in words
    valid: Callable[[Any], bool] | None = None
    unset: str = ""  # what None stands for, in words
    layer: bool = False  # whether a layer's spec may set it
    flag: str = ""  # on the command line, where it is not the name with dashes
    stored: bool = True  # whether an artifact names it among its options
    panel: str = ""  # of the command's help; the methods' own by default


def option(default: Any, help_: str, **about: Any) -> Any:
    """A field of an `Options` class: its default, what it does, and `About` its values."""
    return field(default=default, metadata={"about": About(help_, **about)})


def one_of(choices: tuple[Any, ...]) -> dict[str, Any]:
    """`option` of a few values."""
    return {"expected": f"one of {', '.join(map(str, choices))}", "valid": lambda value: value in choices}


def within(low: float, high: float, what: str = "a number") -> dict[str, Any]:
    """`option` of numbers in a range, ends included."""
    expected = f"{what} from {low:g} to {high:g}" if high < 1e5 else f"{what} from {low} to {high}"
    return {"expected": expected, "valid": lambda value: low <= value <= high}


def at_least(low: int) -> dict[str, Any]:
    """`option` of whole numbers from `low` up."""
    return {"expected": f"a whole number from {low} up", "valid": lambda value: value >= low}


def flag_of(name: str) -> str:
    """`group_size` -> `--group-size`."""
    return "--" + name.replace("_", "-")


def flags_of(item: Field[Any]) -> tuple[str, str]:
    """How the command line says yes and no to a field: `--clip`, `--no-clip`; "" where there is no way to say no."""
    yes, _, no = (about(item).flag or f"{flag_of(item.name)}/--no-{flag_of(item.name)[2:]}").partition("/")
    return yes, no


def about(item: Field[Any]) -> About:
    """What there is to say of a field of an `Options` class."""
    found: About = item.metadata["about"]
    return found


@dataclass(frozen=True, kw_only=True)
class Options:
    """Everything that decides the bytes of an artifact, besides the model and the calibration text.

    None is an open option: the method decides (`resolve`). At most one of `bits`, `bpw` and `size` is given.

    Raises:
        InputError: on construction, with the option, what came and what is expected.
    """

    name: ClassVar[str] = ""
    widths_of: ClassVar[Widths]
    default_bits: ClassVar[float] = 4
    sized_by: ClassVar[tuple[str, ...]] = ()  # options that say how large an artifact is, but for the width
    several: ClassVar[bool] = False  # whether one artifact runs at several widths
    for_encoders: ClassVar[bool] = True  # False: calibrated on the loss of a language model

    bits: float | None = option(None, "Average code width.", panel="Size")
    bpw: float | None = option(
        None, "Most bits per weight of linear layers, in memory.", panel="Size", stored=False,
        expected="bits per weight, such as 4.5", valid=lambda value: 0 < value < 100,
    )  # fmt: skip
    size: int | str | None = option(
        None, "Most bytes, tokenizer apart, e.g. 120MB.", panel="Size", stored=False
    )
    embed_bits: int | None = option(16, "Embedding and head.", panel="Size", **one_of(EMBED_BITS))
    kv_bits: int = option(16, "KV-cache when the artifact runs.", panel="Size", **one_of(KV_BITS))
    include: tuple[str, ...] = option((), "Only layers of this pattern, e.g. `'*.mlp.*'`.", panel="Layers")
    exclude: tuple[str, ...] = option((), "No layers of this pattern. Both: repeatable.", panel="Layers")
    samples: int | None = option(
        None, "Calibration windows.", panel="Calibration", unset=str(SAMPLES), **at_least(1)
    )
    seq_len: int | None = option(
        None, f"Tokens per calibration window; by default {SEQ_LEN}, or the model's positions if fewer.",
        panel="Calibration", unset=str(SEQ_LEN), **at_least(1),
    )  # fmt: skip
    seed: int = option(
        0, "Picks the calibration windows.", panel="Calibration", **within(0, MAX_SEED, "a whole number")
    )

    def __post_init__(self) -> None:
        check_fields(self)
        given = [name for name in ("bits", "bpw", "size") if getattr(self, name) is not None]
        if len(given) > 1:
            raise InputError(
                f"{' and '.join(given)} set the same thing (--bits, --bpw, --size): give exactly one of them"
            )
        if self.bits is not None and self.bits not in self.widths_of:  # nor is NaN
            raise InputError(f"{self.name} has no {self.bits:g}-bit width: choose {self.widths_of} bits")
        for name in self.sized_by if self.budget is not None else ():
            if getattr(self, name) is not None:
                raise InputError(
                    f"{self.name}'s size follows from {name} ({flag_of(name)}): give that, or bpw or size (--bpw, "
                    "--size), not both; --dry-run tells the size"
                )
        if isinstance(self.size, str):
            parse_bytes(self.size)
        open_ = self._open()
        if open_:
            replace(self, **open_)  # refuses what the completed options would be refused for
        else:
            self.check()

    def defaults(self) -> dict[str, Any]:
        """What the method decides where it is left open; values may depend on the options that are given."""
        return {"bits": self.default_bits, "samples": SAMPLES, "seq_len": SEQ_LEN, "embed_bits": 16}

    def check(self) -> None:
        """Refuse options, none of which is open, that do not go together.

        Raises:
            InputError: with the options and what is expected.
        """
        if not self.for_encoders and self.window < 2:
            raise InputError(
                f"{self.name} needs gradients, and windows of 1 token have none: raise seq_len (--seq-len)"
            )

    def resolve(self) -> Self:
        """The same options with none left open, at the method's default width where a budget is to decide it."""
        return replace(self, **self._open())

    def _open(self) -> dict[str, Any]:
        closed = self if self.budget is None else replace(self, bpw=None, size=None)
        found = {k: v for k, v in closed.defaults().items() if getattr(self, k) is None}
        if self.budget is not None:
            found |= {"bpw": None, "size": None}
        bits = found.get("bits", self.bits)
        if bits is not None and type(bits) is not int and float(bits).is_integer():
            found["bits"] = int(bits)  # 4.0 is stored as 4
        return found

    @property
    def budget(self) -> float | int | str | None:
        """`bpw` or `size`, whichever is given: the width follows from it."""
        return self.size if self.bpw is None else self.bpw

    @property
    def windows(self) -> int:
        """Calibration windows, of options none of which is open."""
        return self.samples or SAMPLES

    @property
    def window(self) -> int:
        """Tokens of one, of a model that reaches as far."""
        return self.seq_len or SEQ_LEN

    def with_bits(self, bits: float) -> Self:
        """The same options at another average width; what is open is decided by that width."""
        return replace(self, bits=bits, bpw=None, size=None)

    @property
    def runs_at(self) -> Widths | tuple[float, ...]:
        """The widths that one artifact runs at, made with these options, none of which is open."""
        return (self.bits or self.default_bits,)

    @property
    def calibrated(self) -> bool:
        """Whether the method looks at a text at all, these options as they are."""
        return True

    @property
    def unquantized(self) -> bool:
        """Whether blocks are calibrated on what the unquantized model hands them."""
        return False

    @property
    def epochs(self) -> int:
        """Of finetuning; 0 for none."""
        return 0

    @property
    def exact_size(self) -> bool:
        """Whether the size of the artifact is known before any data is seen."""
        return True

    def tile(self) -> TileSpec:
        """A whole matrix at these options, none of which is open."""
        grid = {n: getattr(self, n) for n in ("group_size", "symmetric") if hasattr(self, n)}
        return TileSpec(bits=self.bits or self.default_bits, **grid)

    def layer_spec(self) -> LayerSpec[Self]:
        """How a layer is quantized that no spec names; none of the options is open."""
        return LayerSpec(self, (self.tile(),))

    def stored(self) -> dict[str, Any]:
        """What an artifact says of the options, none of which is open."""
        named = [item.name for item in fields(self) if about(item).stored]
        return {"method": self.name, **{name: getattr(self, name) for name in named}}


O = TypeVar("O", bound=Options)  # noqa: E741
O_co = TypeVar("O_co", bound=Options, covariant=True)


@dataclass(frozen=True)
class TileSpec:
    """One tile of a matrix: which rows and columns, on which grid."""

    bits: float = 4  # 1..8; a fraction is an average, where the method mixes widths itself
    group_size: int = GROUP_SIZE  # input channels per scale; -1: the whole row
    symmetric: bool = False
    rows: tuple[int, ...] | None = None  # ascending output rows; None: all
    cols: tuple[int, ...] | None = None  # original input channels in stored order; None: all, natural order
    act_bits: int | None = None  # width of the inputs; None: the layer's
    # Channels that a method found to be outliers, whose inputs are not clipped; in no map.
    outliers: bool = False


@dataclass(frozen=True)
class LayerSpec(Generic[O_co]):
    """How one linear layer is quantized: the value of the `{layer name: spec}` map."""

    options: O_co  # of the method, none left open
    tiles: tuple[TileSpec, ...]

    def but(self, **changed: Any) -> Self:
        """The same tiles with other options."""
        return replace(self, options=replace(self.options, **changed))


SpecMap = dict[str, LayerSpec[Any]]


def check_fields(options: Options) -> None:
    """Refuse a value of another type than its field's ("4", 4.0 and True are no widths), or outside its range.

    Raises:
        InputError: with the option, what came and what is expected.
    """
    for item in fields(options):
        check_value(item, getattr(options, item.name))


def check_value(item: Field[Any], value: Any) -> None:
    """`check_fields` of one field."""
    kinds, said = _types(str(item.type)), about(item)
    words = "a tuple of glob patterns" if "str, ..." in str(item.type) else str(item.type)
    inner = {"tuple[int, ...]": int, "tuple[str, ...]": str}.get(str(item.type), object)
    if type(value) not in kinds or (inner is not object and not all(type(part) is inner for part in value)):
        raise InputError(f"{item.name} ({flag_of(item.name)}) must be of type {words}, got {value!r}")
    if said.valid is not None and value is not None and not said.valid(value):
        raise InputError(f"{item.name} ({flag_of(item.name)}) {value}: expected {said.expected}")


def _types(annotation: str) -> tuple[type, ...]:
    return tuple(kind for part in annotation.split(" | ") for kind in _ACCEPTED[part])


def parse_bytes(text: str) -> int:
    """ "120MB" or "120M" -> 120000000: decimal units, as file sizes are sold.

    Raises:
        InputError: no number, or no such unit.
    """
    powers = {letter: power for power, letter in enumerate("KMGT", 1)}
    units = {"B": 1} | {f"{letter}IB": 2 ** (10 * power) for letter, power in powers.items()}
    for letter, power in powers.items():
        units |= {letter: 1000**power, f"{letter}B": 1000**power}
    number, unit = re.fullmatch(r"(?s)\s*(.*?)\s*([a-zA-Z]*)\s*", text).groups()  # type: ignore[union-attr]
    try:
        return int(float(number) * units[unit.upper() or "B"])
    except (ValueError, KeyError, OverflowError) as error:
        raise InputError(f"size {text!r}: expected a number and a unit, such as 120MB or 1.5GiB") from error


def wants_text(options: Options, spec_map: Mapping[str, LayerSpec[Any]] | None) -> bool:
    """Whether the method looks at a text for any layer, by the options or by a map."""
    return options.calibrated or any(spec.options.calibrated for spec in (spec_map or {}).values())


def read_spec_map(path: Path, default: LayerSpec[O]) -> dict[str, LayerSpec[O]]:
    """Read a `{layer name: spec}` JSON map, the one that `anybit plan -o` writes.

    A value is an object with any of `bits`, `group_size`, `symmetric` (one tile) or `tiles` (a list of such
    objects with `rows` or `cols`), and any of the method's options that concern a layer; what is absent comes from
    `default`.

    Raises:
        InputError: where the file is not such a map, with the layer and the field.
    """
    try:
        if not path.is_file():  # of a pipe there may be no end
            raise InputError(f"--spec {path}: no such file; check the path")
        if path.stat().st_size > SPEC_BYTES:
            raise InputError(f"--spec {path}: more than {SPEC_BYTES} bytes, which is no map of layers")
        data = json.loads(path.read_text(encoding="utf-8"))
    except InputError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"--spec {path}: not a readable JSON file ({error})") from error
    layers = data.get("layers", data) if isinstance(data, dict) else None
    if not isinstance(layers, dict):
        raise InputError(f"--spec {path}: expected an object of layer names to specs")
    return {name: parse_layer_spec(name, value, default) for name, value in layers.items()}


def parse_layer_spec(name: str, value: Any, default: LayerSpec[O]) -> LayerSpec[O]:
    """One entry of the map; see `read_spec_map`."""
    own = {item.name: item for item in fields(default.options) if about(item).layer}
    if not isinstance(value, Mapping):
        raise InputError(f"spec of {name}: expected an object, got {value!r}")
    unknown = value.keys() - _tile_types().keys() - own.keys() - {"tiles"}
    if unknown:
        expected = ", ".join(sorted({*_tile_types(), *own, "tiles"}))
        raise InputError(
            f"spec of {name}: unknown field {min(unknown)!r} of {default.options.name}; expected {expected}"
        )
    beside = sorted(_tile_types().keys() & value.keys())
    if "tiles" in value and beside:
        raise InputError(
            f"spec of {name}: {beside[0]!r} beside tiles would be ignored: put it into each tile"
        )
    tiles = value.get("tiles", [{key: value[key] for key in beside}])
    if not isinstance(tiles, list) or not tiles:
        raise InputError(f"spec of {name}: tiles must be a list with at least one tile")
    given = {key: tuple(v) if isinstance(v, list) else v for key, v in value.items() if key in own}
    try:
        parsed = tuple(_parse_tile(tile, default.tiles[0]) for tile in tiles)
        return LayerSpec(replace(default.options, **given), parsed)  # type: ignore[arg-type]
    except InputError as error:
        raise InputError(f"spec of {name}: {error}") from error


def _tile_types() -> dict[str, str]:
    """The fields of a tile that a map may set, and their types."""
    return {item.name: str(item.type) for item in fields(TileSpec) if item.name != "outliers"}


def _parse_tile(value: Any, default: TileSpec) -> TileSpec:
    known = _tile_types()
    if not isinstance(value, Mapping) or value.keys() - known.keys():
        raise InputError(f"a tile has {', '.join(known)}; got {value!r}")
    tile = replace(default, **dict(_tile_fields(value, known)))
    if tile.act_bits is not None and tile.act_bits not in ACT_BITS:
        raise InputError(f"act_bits {tile.act_bits} is not one of {', '.join(map(str, ACT_BITS))}")
    if not 1 <= tile.bits <= 8:
        raise InputError(f"{tile.bits} bits is outside 1..8")
    if not 1 <= tile.group_size <= MAX_GROUP and tile.group_size != -1:
        raise InputError(f"group_size {tile.group_size} is neither from 1 to {MAX_GROUP} nor -1")
    return replace(tile, bits=int(tile.bits)) if float(tile.bits).is_integer() else tile


def _tile_fields(value: Mapping[str, Any], known: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """The fields of a tile as `TileSpec` takes them, each refused where its JSON type is not the field's."""
    for key, item in value.items():
        if key in ("rows", "cols"):
            channels = isinstance(item, list) and item and all(type(i) is int and i >= 0 for i in item)
            if item is not None and not channels:
                raise InputError(f"{key} must be a list of channel numbers, got {item!r}")
            yield key, None if item is None else tuple(item)
        elif type(item) not in _types(known[key]):
            raise InputError(f"{key} must be of type {known[key]}, got {item!r}")
        else:
            yield key, item


def check_kv_bits(bits: int | None) -> None:
    """Refuse a width that a KV-cache does not come in; None stands for a default.

    Raises:
        InputError: with the widths there are.
    """
    if bits is not None and (type(bits) is not int or bits not in KV_BITS):
        raise InputError(f"--kv-bits {bits!r} is not one of {', '.join(map(str, KV_BITS))}")
