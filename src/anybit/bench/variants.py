"""Shapes and variants of `anybit bench kernels`, as its options name them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from anybit.bench import ggml
from anybit.errors import InputError

MOST_WEIGHTS = 1 << 30
ROWS = 64  # of the least part of a matrix
ISA = " @"  # between a variant and its instruction set
OWN = "own bfloat16"  # a product that does nothing but read 16 bits a weight


def parse_shape(text: str, least: int = 1) -> tuple[int, int]:
    """ "4096x11008" -> (4096, 11008), rows and columns.

    Raises:
        InputError: no such thing; more weights than there is room for; fewer rows.
    """
    sizes = text.split("x")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise InputError(f"shape {text!r}: expected OUTxIN, such as 4096x11008")
    if int(sizes[0]) * int(sizes[1]) > MOST_WEIGHTS:
        raise InputError(
            f"shape {text!r}: more than {MOST_WEIGHTS:.1e} weights, which a benchmark has no room for"
        )
    if int(sizes[0]) < least:
        raise InputError(
            f"shape {text!r}: with --cached, rows beyond the first {ROWS} count; give {least} or more"
        )
    return int(sizes[0]), int(sizes[1])


def chosen(only: Iterable[str], there: Collection[str]) -> list[str]:
    """The variants that have these names, with any instruction set; of a name that none has, those that begin so.

    Raises:
        InputError: there is none.
    """
    found: set[str] = set()
    for given in only:
        named = {name for name in there if given in (name, name.partition(ISA)[0])}
        named = named or {name for name in there if given and name.startswith(given)}
        if not named:
            why = f" ({ggml.why_not()})" if given.startswith("ggml") and ggml.why_not() else ""
            raise InputError(f"no variant begins with {given!r}{why}: there are {', '.join(there)}")
        found |= named
    return [name for name in there if name in found]
