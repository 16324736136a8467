"""Command lines by chance, of every command and its options: what cannot be meant is a sentence before any work."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import typer

from anybit.cli.main import app
from anybit.methods import METHODS
from tests.fuzz.bases import Bases
from tests.fuzz.doors import command
from tests.fuzz.limits import Finding
from tests.fuzz.mutate import SECRET

WEIGHTS = {  # how often; what works for minutes by design gets a line that it must refuse
    **{
        "quantize": 12,
        "eval": 4,
        "generate": 4,
        "chat": 2,
        "inspect": 2,
        "verify": 2,
        "convert": 2,
        "plan": 3,
        "methods": 1,
    },
    **{"compare": 1, "demo": 1, "bench": 1},
}
LONG = ("compare", "demo", "bench")
EFFORT = (
    "--epochs",
    "--samples",
    "--seq-len",
    "--max-tokens",
    "--max-new-tokens",
    "--limit",
    "--rounds",
    "--threads",
)
NUMBERS = (
    "0",
    "1",
    "2",
    "3",
    "4",
    "8",
    "16",
    "32",
    "-1",
    "2.5",
    "3.3",
    "1e400",
    "nan",
    "inf",
    "1_0",
    "٣",
    "0x10",
)
HUGE = ("2147483647", "2147483648", "99999999999999999999", "-99999999999999999999", "1e308")
TEXTS = (
    "",
    "x",
    "gptq",
    "anybit",
    "90MB",
    "0MB",
    "1e9GB",
    "-5MB",
    "3,5",
    "3,,5",
    "cuda",
    "float16",
    "attn",
    "*",
    "(",
    "é",
)
FEW = ("1", "2", "3", "16", "24", "0", "-1", "x", "")


@cache
def options() -> dict[str, list[Any]]:
    """Every command and its parameters, as the command line knows them."""
    group: Any = typer.main.get_command(app)
    return {name: list(made.params) for name, made in group.commands.items()}


def case(rng: Random, bases: Bases, folder: Path) -> str:
    given = folder / "given"
    given.mkdir()
    name = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    arguments = line(rng, bases, folder, name)
    if name in LONG:
        arguments[1:1] = [
            rng.choice(("--no-such-option", "--help", "-x"))
        ]  # first: nothing can take it for its own
    before = (given / "file").read_text() if (given / "file").exists() else None
    if name in LONG and arguments[0] != name:
        arguments = [name, "-x"]
    outcome = command(*arguments, stdin=rng.choice(("", "hello\n", "/new\n\n", "\ud800\n")), usage=True)
    if before is not None and (given / "file").read_text() != before:
        raise Finding("a file that was there was overwritten")
    return outcome


def line(rng: Random, bases: Bases, folder: Path, name: str) -> list[str]:
    made = [name]
    if name == "quantize" and rng.random() < 0.7:
        made += ["--method", rng.choice(list(METHODS))]
    parameters = [p for p in options().get(name, []) if p.name != "help"]
    for parameter in parameters:
        if parameter.param_type_name == "argument" and rng.random() < 0.95:
            made.append(model(rng, bases, folder))
    made += frugal(name, bases)
    chosen = [p for p in parameters if p.param_type_name == "option"]
    for parameter in rng.sample(chosen, min(len(chosen), rng.choice((0, 1, 1, 2, 3, 5)))):
        flag = rng.choice([*parameter.opts, *parameter.secondary_opts])
        made.append(flag)
        if not parameter.is_flag and rng.random() < 0.97:
            made.append(argument(rng, flag, parameter, bases, folder))
    if rng.random() < 0.05 and name not in LONG:
        rng.shuffle(made)
    if rng.random() < 0.05:
        made.insert(
            rng.randrange(len(made) + 1), rng.choice(("--bits", "--no-such-option", "", "-", "--", "\ud800"))
        )
    return made


def frugal(name: str, bases: Bases) -> list[str]:
    """What keeps a line that works short; an option that comes later counts."""
    if name in ("quantize", "convert"):
        return ["-o", "out"]
    if name == "eval":
        return ["--text", str(bases.text), "--seq-len", "32", "--max-tokens", "64"]
    if name in ("generate", "chat"):
        return ["--max-new-tokens", "2", *(["-p", "the fox"] if name == "generate" else [])]
    return []


def model(rng: Random, bases: Bases, folder: Path) -> str:
    """What may stand for MODEL or OUT."""
    choices: list[Callable[[], object]] = [
        lambda: rng.choice(list(bases.models.values())),
        lambda: rng.choice(list(bases.models.values())),
        lambda: rng.choice(list(bases.artifacts.values())),
        lambda: rng.choice(list(bases.artifacts.values())),
        lambda: rng.choice(list(bases.ggufs.values())),
        lambda: rng.choice(
            ("nowhere", "", "/", "/dev/null", "/dev/zero", "a/b", "../..", "\0", "x" * 1000, "~", ".")
        ),
        lambda: file(folder),
    ]
    return str(rng.choice(choices)())


def file(folder: Path) -> Path:
    path = folder / "given" / "file"
    path.write_text(SECRET)
    return path


def argument(rng: Random, flag: str, parameter: Any, bases: Bases, folder: Path) -> str:
    if flag in EFFORT:
        return rng.choice(FEW)
    if flag in ("-o", "--out"):
        taken = folder / "given" / "taken"
        if not taken.exists():
            shutil.copytree(bases.artifacts["rtn"], taken)
        return str(
            rng.choice(
                (
                    "out",
                    "out",
                    "a/../b",
                    "",
                    "/dev/null",
                    "/proc/self/x",
                    taken,
                    file(folder),
                    "\0",
                    "x" * 300,
                )
            )
        )
    kind = parameter.type_descriptor.annotation
    if kind in (int, float):
        return rng.choice(rng.choice((NUMBERS, NUMBERS, HUGE, TEXTS)))
    if kind is Path or flag in ("--text", "--calibration", "--base", "--pairs", "--spec"):
        places = ["nowhere", "", "/dev/null", "/", "given"]
        if flag != "--json":  # which writes what it names, as it is asked to
            places += [bases.text, bases.pairs, file(folder), bases.models["llama"] / "config.json"]
        return str(rng.choice(places))
    return rng.choice(rng.choice((TEXTS, NUMBERS, list(METHODS))))
