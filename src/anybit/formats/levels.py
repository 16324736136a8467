"""The sizes that one model can run at: levels, the smallest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anybit.errors import InputError
from anybit.formats.layout import LayerLayout, code_bits

CLOSE_BITS = 0.02  # average widths that are called the same


@dataclass(frozen=True)
class Level:
    """What a model is at one of its sizes."""

    bits: float  # average code width
    bytes: int  # that its quantized layers take
    loss: float | None  # expected increase of the loss in nats per token; None: not known
    layouts: Mapping[str, LayerLayout]  # of the quantized linear layers, as they run


def levels_of(layouts: Mapping[str, LayerLayout]) -> tuple[Level, ...]:
    """The levels of layers whose bytes are all there: each of their widths, or the one that they have."""
    widths = sorted({width for layout in layouts.values() for width in layout.widths})
    levels = {float(b): {name: layout.at_width(b) for name, layout in layouts.items()} for b in widths}
    levels = levels or {code_bits(layouts.values()): dict(layouts)}
    return tuple(
        Level(bits, sum(layout.nbytes for layout in read.values()), None, read)
        for bits, read in levels.items()
    )


def largest(widths: Sequence[float], bits: float, whose: str) -> int:
    """The last of ascending average widths that is at most `bits`, exactly or as it is printed, with two decimals.

    Args:
        widths: at least one.
        bits: what is asked for.
        whose: how an error begins, such as "out has".

    Raises:
        InputError: fewer bits than the first has, or more than the last.
    """
    fits = [i for i, width in enumerate(widths) if min(width, round(width, 2)) <= bits + 1e-6]
    if not fits or bits > widths[-1] + 0.05:
        there = f"average widths from {widths[0]:.2f} to {widths[-1]:.2f} bits"
        if len(widths) == 1:
            there = f"one width, {widths[0]:.2f} bits"
        elif all(width.is_integer() for width in widths):
            there = f"the widths {', '.join(f'{width:.0f}' for width in widths)}"
        raise InputError(f"{whose} {there}, not {bits:g}")
    return fits[-1]
