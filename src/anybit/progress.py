"""How long work tells what it is doing: silently by default, with bars and an ETA at a terminal."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from anybit.errors import printable

Advance = Callable[[int], None]
SHORT = 2.0  # seconds of work of which lines say nothing


def ignore(steps: int) -> None:
    """An `Advance` that tells nobody."""


class Silent:
    """Says nothing; what library calls use unless told otherwise."""

    def say(self, text: str) -> None:
        """A sentence the user should see once."""

    def task(self, description: str, total: int) -> Advance:
        """Begin a bar of `total` steps; the returned function advances it."""
        return ignore

    def close(self) -> None:
        """End all bars."""


class Terminal(Silent):
    """Bars with an ETA on standard error; where that is no terminal, a line at every tenth, unless it is short work."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as Remaining

        self.console = Console(stderr=True, highlight=False)
        text = TextColumn("{task.description}", markup=False)
        bar: Any = Progress(
            text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("ETA"), Remaining(),
            console=self.console,
        )  # fmt: skip
        self.bars: Any = bar if sys.stderr.isatty() else None
        self._started = False

    def say(self, text: str) -> None:
        self.console.print(printable(text), markup=False, soft_wrap=True)

    def task(self, description: str, total: int) -> Advance:
        if self.bars is None:
            return self._lines(description, total)
        if not self._started:
            self.bars.start()
            self._started = True
        task = self.bars.add_task(printable(description), total=total)
        bars = self.bars
        return lambda steps: bars.advance(task, steps)

    def _lines(self, description: str, total: int) -> Advance:
        import time

        start, done, told = time.monotonic(), 0, 0

        def advance(steps: int) -> None:
            nonlocal done, told
            done += steps
            tenth = 10 * done // max(total, 1)
            elapsed = time.monotonic() - start
            if tenth > told and elapsed > SHORT:
                told = tenth
                left = elapsed * (total - done) / done
                self.say(f"{description}: {10 * tenth} %, {elapsed:.0f} s, ETA {left:.0f} s")

        return advance

    def close(self) -> None:
        if self._started:
            self.bars.stop()
            for (
                task
            ) in self.bars.task_ids:  # they stay on the screen, and must not come again with later ones
                self.bars.remove_task(task)
            self._started = False


SILENT = Silent()


@contextmanager
def no_other_bars() -> Iterator[None]:
    """Silence the bars of Transformers, lm-eval and other libraries, all tqdm's: they would run into ours."""
    tqdm: Any = importlib.import_module("tqdm.std").tqdm
    drawn = tqdm.__init__

    def silent(self: Any, *args: Any, **options: Any) -> None:
        drawn(self, *args, **{**options, "disable": True})

    tqdm.__init__ = silent
    try:
        yield
    finally:
        tqdm.__init__ = drawn
