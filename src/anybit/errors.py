"""The one exception for what a caller got wrong, and what is said where an optional package is missing."""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

LONGEST = 2000  # characters of a message
EXTRAS = {  # what pyproject.toml's extras bring
    "search": ("scipy",),
    "plots": ("matplotlib",),
    "serve": ("starlette", "uvicorn", "uvloop", "llguidance"),
}


class InputError(ValueError):
    """Bad input: a file, an option, a model or a shape that cannot be used.

    The message says what came, what was expected and what to do. The command line prints it as one
    line without a traceback; every other exception is a defect and keeps its traceback. What is quoted of a file may be
    of any length and hold anything: the message is cut, and what would steer a terminal is written out.
    """

    def __str__(self) -> str:  # no `__init__`: torch.compile and torch.export trace where one is raised
        message, half = super().__str__(), LONGEST // 2
        ends = message if len(message) <= LONGEST else f"{message[:half]} ... {message[-half:]}"
        return printable(ends)


def printable(text: str) -> str:
    """A text of which nothing steers a terminal: line ends, escapes and the like are written out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def raised_by_a_model(error: BaseException) -> bool:
    """Whether an exception comes from the code of a model of Transformers, or from what that calls, not of ours."""
    places = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    models = [i for i, place in enumerate(places) if "transformers/models/" in place.as_posix()]
    own = [i for i, place in enumerate(places) if place.is_relative_to(Path(__file__).parent)]
    return bool(models) and models[-1] > max(own, default=-1)


def refuse_unknown(given: Mapping[str, object], known: type) -> None:
    """Refuse keyword arguments that a `TypedDict` does not have, as Python refuses them of a plain signature.

    Raises:
        TypeError: with the first of them, and what there is.
    """
    names = known.__annotations__  # those of its bases too
    for name in given.keys() - names.keys():
        raise TypeError(f"unexpected keyword argument {name!r}: expected some of {', '.join(names)}")


@contextmanager
def about_layer(name: str) -> Iterator[None]:
    """Say of which layer an error speaks."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{name}: {error}") from error


@contextmanager
def enough_memory(remedy: str) -> Iterator[None]:
    """Say that memory was full, of the machine or of its GPU, and what to do.

    Raises:
        InputError: instead of what Python, torch and the kernels raise.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        of_gpu = type(error).__name__ == "OutOfMemoryError"  # torch's, which is not imported here
        words = str(error)
        if not (of_gpu or isinstance(error, MemoryError) or "allocate memory" in words):
            raise
        place, said = "the GPU's memory" if of_gpu else "the memory", words.strip().partition("\n")[0]
        raise InputError(f"{place} is full ({said or type(error).__name__}): {remedy}") from error


def require_extra(extra: str, purpose: str) -> None:
    """Refuse what needs one of `EXTRAS` that is not installed; called before any work. Imports nothing.

    Raises:
        InputError: what `purpose` needs, and the command that installs it.
    """
    for package in EXTRAS[extra]:
        if importlib.util.find_spec(package) is None:
            raise InputError(
                f"{purpose} needs {package}, which is not installed: pip install 'anybit[{extra}]'"
            )
