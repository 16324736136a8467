"""What commands share: options, groups of them, and what is checked before any work."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from anybit.config import MAX_SEED, Json, parse_bytes
from anybit.engine.threads import check_threads
from anybit.errors import InputError


def check_seed(seed: int | None) -> int | None:
    """A callback, as help would print a range's 19 digits."""
    if seed is not None and not 0 <= seed <= MAX_SEED:
        raise typer.BadParameter(f"{seed} is not in the range 0 to {MAX_SEED}")
    return seed


Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="HF directory, hub id, .gguf file or anybit artifact.")
]
Source = Annotated[str, typer.Argument(metavar="MODEL", help="HF directory, hub id or .gguf file.")]
Artifact = Annotated[Path, typer.Argument(metavar="OUT", help="A directory that `anybit quantize` made.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads. Default: PyTorch's.", min=1)]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
EvalTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        help="Most tokens of the text.",
        min=1,
        rich_help_panel="Evaluation",
    ),
]
STDOUT = Path("-")
JSON_HELP = "Figures as JSON; - is standard output."
JsonFile = Annotated[Path | None, typer.Option("--json", help=JSON_HELP)]


@dataclass(frozen=True)
class Level:
    """At which of its widths an artifact is read."""

    bits: Annotated[
        float | None,
        typer.Option("--bits", help="The level to read: its largest average width.", rich_help_panel="Width"),
    ] = None
    bpw: Annotated[
        float | None,
        typer.Option("--bpw", help="The same by most bits per weight, in memory.", rich_help_panel="Width"),
    ] = None
    size: Annotated[
        str | None,
        typer.Option("--size", help="The same by most bytes, e.g. 120MB.", rich_help_panel="Width"),
    ] = None

    def asked(self) -> Json:
        """As `anybit.load` takes it."""
        return {
            "bits": self.bits,
            "bpw": self.bpw,
            "size": None if self.size is None else parse_bytes(self.size),
        }


@dataclass(frozen=True)
class Running:
    """How a loaded model computes."""

    codebook_precision: Annotated[
        str | None,
        typer.Option(
            help="fp16, or int8: rounded, faster. [default: fp16; to generate natively: int8]",
            rich_help_panel="Computing",
        ),
    ] = None
    kv_bits: Annotated[
        int | None,
        typer.Option(
            help="KV-cache: 16, 8, 4, 3 or 2 bits. [default: what the artifact asks for, else 16]",
            rich_help_panel="Computing",
        ),
    ] = None
    engine: Annotated[
        str | None,
        typer.Option(
            help="native or transformers. [default: native where it runs the model]",
            rich_help_panel="Computing",
        ),
    ] = None
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.", rich_help_panel="Computing")] = (
        "float32"
    )
    device: Annotated[str, typer.Option(help="cpu or cuda.", rich_help_panel="Computing")] = "cpu"
    threads: Annotated[
        int | None,
        typer.Option(
            help="CPU threads. [default: physical cores]",
            min=1,
            rich_help_panel="Computing",
        ),
    ] = None

    def asked(self) -> Json:
        """As `anybit.evaluate` and `anybit.generate.Generator` take it."""
        check_threads(self.threads)
        names = ("codebook_precision", "kv_bits", "engine", "threads", "dtype", "device")
        asked = {name: getattr(self, name) for name in names}
        return {name: value for name, value in asked.items() if value is not None}


@dataclass(frozen=True)
class ZeroShot:
    """Tasks to measure on."""

    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks",
            help="Zero-shot tasks, e.g. piqa,arc_easy (needs anybit[eval]).",
            rich_help_panel="Evaluation",
        ),
    ] = None
    tasks_dir: Annotated[
        Path | None,
        typer.Option(
            "--tasks-dir",
            help="Folder of the tasks' JSON files: no network needed.",
            rich_help_panel="Evaluation",
        ),
    ] = None
    limit: Annotated[
        int | None,
        typer.Option("--limit", help="Questions per task.", min=1, rich_help_panel="Evaluation"),
    ] = None

    def asked(self) -> Json:
        """As `anybit.evaluate` takes it."""
        return {"tasks": names_in(self.tasks), "tasks_dir": self.tasks_dir, "limit": self.limit}


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of each parameter that is a dataclass in that parameter's place."""
    signature = inspect.signature(command, eval_str=True)
    groups = {name: p.annotation for name, p in signature.parameters.items() if is_dataclass(p.annotation)}
    parameters: dict[str, inspect.Parameter] = {}
    for name, parameter in signature.parameters.items():
        own = _parameters(groups[name]) if name in groups else [parameter]
        parameters |= {p.name: p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own}

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {
            name: group(**{item.name: given.pop(item.name) for item in fields(group)})  # type: ignore[operator]
            for name, group in groups.items()
        }
        command(**given, **made)

    run.__signature__ = signature.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]
    return run


def _parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    defaults = {
        item.name: inspect.Parameter.empty if item.default is MISSING else item.default
        for item in fields(group)
    }
    return [
        inspect.Parameter(name, kind, default=default, annotation=hints[name])
        for name, default in defaults.items()
    ]


@contextmanager
def reporting() -> Iterator[Any]:
    """Progress bars for the length of a `with`."""
    from anybit.progress import Terminal

    report = Terminal()
    try:
        yield report
    finally:
        report.close()


def emit(figures: Json, file: Path | None, show: Callable[[Json], None]) -> None:
    """Print figures, and write them where asked; to standard output in place of what is shown."""
    text = "" if file is None else json.dumps(figures, indent=2, default=str)
    if file == STDOUT:
        typer.echo(text)
        return
    show(figures)
    if file is not None:
        file.write_text(text + "\n", encoding="utf-8")


def check_json(file: Path | None) -> None:
    """`check_writable` of what `emit` takes."""
    if file != STDOUT:
        check_writable(file)


def check_writable(file: Path | None) -> None:
    """Refuse a file that could not be written when the work is done."""
    if file is not None and (file.is_dir() or not os.access(file.absolute().parent, os.W_OK)):
        raise InputError(
            f"{file} cannot be written: name a file in an existing directory that you may write to"
        )


def set_threads(threads: int | None) -> None:
    """Let PyTorch have so many threads."""
    check_threads(threads)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def given(**options: Any) -> Json:
    """The options that were given; the others keep the API's defaults."""
    return {name: value for name, value in options.items() if value is not None}


def refuse_ignored(ignored: Json, reason: str) -> None:
    """Refuse options that would have no effect."""
    for name in ignored:
        raise InputError(f"--{name.replace('_', '-')} would be ignored: {reason}; leave it out")


def names_in(text: str | None) -> tuple[str, ...]:
    """ "piqa,arc_easy" -> ("piqa", "arc_easy")."""
    return tuple(name.strip() for name in text.split(",")) if text else ()


def named(option: str, text: str | None) -> tuple[str, ...]:
    """`names_in` of an option that, where it is given, names something."""
    names = names_in(text)
    if text is not None and not all(names or [""]):
        raise InputError(f"--{option} {text!r}: expected names, separated by commas")
    return names


def numbers(option: str, text: str) -> tuple[float, ...]:
    """ "2,2.5" -> (2.0, 2.5)."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(f"--{option} {text!r}: expected numbers, such as 2,2.5,3") from error


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """ "3,4,6" -> (3, 4, 6)."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise InputError(f"--{option} {text!r}: expected whole numbers from 1 up, such as 3,4,6")
    return tuple(map(int, parts))
