"""What `anybit compare` is asked for: methods with their options, widths, and what all cells have in common."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from anybit import methods
from anybit.calibration.streaming import StreamedModel
from anybit.checkpoint.architectures import usual_window
from anybit.checkpoint.directory import Checkpoint
from anybit.config import SAMPLES, Json, Options, Widths, flag_of
from anybit.errors import InputError
from anybit.kernels.dispatch import compute_dtype
from anybit.plan import make_plan

BASE = "unquantized"
USUAL = [method.compared for method in methods.METHODS.values() if method.compared]
SHARED = ("samples", "seq_len", "seed")  # options that all cells have in common
SIZES = ("bpw", "size")  # that cells are not asked for by
OF_ALL = {name: f"give it for all of them ({flag_of(name)})" for name in SHARED} | {
    name: "ask for widths (--bits)" for name in SIZES
}


class NoSuchWidth(InputError):
    """A width that a method does not have."""


@dataclass(frozen=True)
class Entry:
    """A method with its options: a line of the table."""

    name: str
    method: str
    options: Json  # of the method
    bits: tuple[float, ...] = ()  # widths of its own

    @property
    def identity(self) -> tuple[str, str]:
        """What makes it, whatever its name."""
        return self.method, json.dumps(self.options, sort_keys=True)


@dataclass(frozen=True)
class Settings:
    """What all cells have in common: how they are calibrated and what they are measured on."""

    calibration: str = "builtin"
    samples: int = SAMPLES
    # Of calibration and of evaluation; None: 2048, or the model's positions if fewer.
    seq_len: int | None = None
    seed: int = Options.seed
    text: str = "builtin-eval"
    max_tokens: int | None = None
    tasks: tuple[str, ...] = ()
    tasks_dir: Path | None = None
    limit: int | None = None


@dataclass(frozen=True)
class Cell:
    """One entry at one width."""

    entry: Entry
    bits: float
    options: Options  # none open
    arguments: Json  # that they were made of


def parse_entry(text: str) -> Entry:
    """ "gptq", or "gptq: clip=false, group_size=64, name='GPTQ, plain'": a method and its options.

    The options are TOML, as in an inline table. `name` is what the report calls the entry, `bits` (a number or a list)
    are its own widths.

    Raises:
        InputError: no such method or option, or what TOML cannot read.
    """
    method, _, given = (part.strip() for part in text.partition(":"))
    try:
        options = tomllib.loads(f"options = {{{given}}}")["options"]
    except tomllib.TOMLDecodeError as error:
        raise InputError(
            f"method {text!r}: expected METHOD or METHOD: OPTION=VALUE, ..., such as "
            f"gptq: clip=false, group_size=64, scaling='awq' ({error})"
        ) from error
    name = options.pop("name", None)
    if name == BASE:
        raise InputError(f"method {text!r}: {BASE!r} is the name of the model itself; choose another")
    for of_all in sorted(options.keys() & {*SHARED, *SIZES}):
        raise InputError(f"method {text!r}: {of_all} is no option of one row: {OF_ALL[of_all]}")
    methods.check_names(method, options)
    bits = options.pop("bits", [])
    bits = bits if isinstance(bits, list) else [bits]
    if not all(type(b) in (int, float) for b in bits):
        raise InputError(f"method {text!r}: bits must be a number or a list of numbers, got {bits}")
    name = str(name or default_name(method, options))
    return Entry(name, method, as_options(options), tuple(float(b) for b in bits))


def as_options(given: Json) -> Json:
    """Options of TOML or JSON as methods take them: their lists are tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}


def default_name(method: str, options: Json) -> str:
    return f"{method} ({toml(options)})" if options else method


def toml(options: Json) -> str:
    """Options as `parse_entry` reads them."""
    return ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in options.items())


def entry_of(row: Json) -> Entry:
    """The entry that a finished cell is of, at that cell's width."""
    return Entry(row["name"], row["method"], as_options(row["options"]), (row["bits"],))


def cell_of(row: Json, settings: Settings) -> Cell:
    """A finished cell as it would be asked for now.

    Raises:
        InputError, TypeError: options that there are no longer.
    """
    return _cell(entry_of(row), row["bits"], settings)


def with_window(checkpoint: Checkpoint, settings: Settings) -> Settings:
    """The settings with the length of windows that the model reaches, where none is given."""
    if settings.seq_len is not None:
        return settings
    return replace(settings, seq_len=usual_window(StreamedModel(checkpoint, compute_dtype()).model))


def plan_cells(
    checkpoint: Checkpoint, entries: Sequence[Entry], bits: Sequence[float], settings: Settings
) -> tuple[list[Cell], list[Json]]:
    """The cells there will be, each checked against the model, and those that a method does not have.

    Raises:
        InputError: an encoder; options that do not exist or that this model cannot take; entries of the same name; no
            method that has any of the widths.
    """
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        raise InputError(f"methods {names}: two have the same name; give one another with name='...'")
    if not entries or not (bits or all(entry.bits for entry in entries)):
        raise InputError("nothing to compare: name methods (-m) and widths (--bits)")
    streamed = StreamedModel(checkpoint, compute_dtype())
    if streamed.encoder:
        raise InputError(
            f"{checkpoint.source} is an encoder, and compare measures language models: use `anybit quantize` and "
            "`anybit eval --base --pairs` for each width"
        )
    cells: list[Cell] = []
    left_out: list[Json] = []
    for entry in entries:
        made, errors = [], []
        for width in dict.fromkeys(entry.bits or bits):
            try:
                made.append(_cell(entry, float(width), settings))
                make_plan(streamed, made[-1].options)
            except InputError as error:
                errors.append(error)
                left_out.append(left_out_row(entry, float(width), str(error), failed=False))
                made = [cell for cell in made if cell.bits != width]
        wrong = next((error for error in errors if not isinstance(error, NoSuchWidth)), None)
        if not made and wrong is not None:
            raise InputError(f"{entry.name}: {wrong}") from wrong
        cells += made
    if not cells:
        reasons = "; ".join(dict.fromkeys(f"{row['name']}: {row['reason']}" for row in left_out))
        raise InputError(f"no method has any of the widths asked for (--bits): {reasons}")
    return cells, left_out


def left_out_row(entry: Entry, bits: float, reason: str, failed: bool) -> Json:
    return {"name": entry.name, "bits": bits, "reason": reason, "failed": failed}


def _cell(entry: Entry, bits: float, settings: Settings) -> Cell:
    """An entry at a width, calibrated as the settings say.

    Raises:
        InputError: options that do not exist, or a width that the method does not have.
    """
    shared = {name: getattr(settings, name) for name in SHARED}
    arguments = {**entry.options, **shared}
    made = methods.options(entry.method, **arguments).resolve()
    if made.several:
        if bits not in made.runs_at:
            widths = made.runs_at if isinstance(made.runs_at, Widths) else ", ".join(map(str, made.runs_at))
            raise NoSuchWidth(f"its artifact runs at {widths} bits")
        return Cell(entry, bits, made, arguments)
    if bits not in made.widths_of:
        raise NoSuchWidth(f"it has {made.widths_of} bits")
    arguments["bits"] = bits
    return Cell(entry, bits, methods.options(entry.method, **arguments).resolve(), arguments)
