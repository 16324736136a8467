"""How long a comparison still takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import ceil
from statistics import mean

from anybit.compare.cells import Cell

Kind = tuple[str, bool, bool]  # method, whether calibrated, whether the cell before left its artifact


class Eta:
    """Counts the cells that are made, and foresees the rest from those like them."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.kinds = [_kind(before, cell) for before, cell in zip([None, *cells], cells)]
        self.begun = 0
        self.started = 0.0
        self.took: list[tuple[Kind, float]] = []  # seconds

    def begin(self) -> str:
        """ "cell 3 of 18, ETA 42 min"; no ETA while a cell is left that is unlike all that were made."""
        left = self._left()
        self.begun, self.started = self.begun + 1, time.monotonic()
        eta = "" if left is None else f", ETA {ceil(left / 60)} min"
        return f"cell {self.begun} of {len(self.kinds)}{eta}"

    def end(self) -> None:
        """The cell that was begun last is made."""
        self.took.append((self.kinds[self.begun - 1], time.monotonic() - self.started))

    def _left(self) -> float | None:
        """Seconds: of each cell what its method took, or else what calibrated (or plain) methods did."""
        left = 0.0
        for kind in self.kinds[self.begun :]:
            alike = [seconds for made, seconds in self.took if made == kind]
            alike = alike or [seconds for made, seconds in self.took if made[1:] == kind[1:]]
            if not alike:
                return None
            left += mean(alike)
        return left


def _kind(before: Cell | None, cell: Cell) -> Kind:
    again = cell.options.several and before is not None and before.entry == cell.entry
    return cell.entry.method, cell.options.calibrated, again
