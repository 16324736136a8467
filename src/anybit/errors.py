"""The one exception for what a caller got wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """Bad input: a file, an option, a model or a shape that cannot be used.

    The message says what came, what was expected and what to do. The command line prints it as one
    line without a traceback; every other exception is a defect and keeps its traceback.
    """


@contextmanager
def about_layer(name: str) -> Iterator[None]:
    """Say of which layer an error speaks."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
