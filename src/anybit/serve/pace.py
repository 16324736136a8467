"""How long steps take, as measured, and what follows from it: a width for a latency, a load for a width."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RECENT = 0.1  # weight of the newest measurement in a mean
STOPS = 4  # widths among which "auto" moves: pages are shared at one width only, so few are better
CALM = 32  # rounds of less load before "auto" goes up by one stop


class Pace:
    """Seconds of decoding steps at each level, and of a token of a prompt: running means of what was measured.

    Args:
        widths: average bits of each level, ascending.
    """

    def __init__(self, widths: Sequence[float]) -> None:
        self._widths = list(widths)
        self._steps: dict[int, float] = {}
        self._prompt: float | None = None

    def measure(self, level: int, decoded: int, prompt: int, seconds: float) -> None:
        """A step at a level with so many texts that decode and so many tokens of prompts."""
        if not prompt:
            self._steps[level] = _mean(self._steps.get(level), seconds)
        elif seconds > (decoding := (self.step(level) or 0.0) if decoded else 0.0):
            self._prompt = _mean(self._prompt, (seconds - decoding) / prompt)

    def step(self, level: int) -> float | None:
        """Seconds of a decoding step at a level; between levels that were measured, on the line; None: none was."""
        if level in self._steps or not self._steps:
            return self._steps.get(level)
        known = sorted(self._steps)
        at, seconds = [self._widths[i] for i in known], [self._steps[i] for i in known]
        if len(known) == 1:  # all of a step is reading weights, then
            return seconds[0] * self._widths[level] / at[0]
        return float(np.interp(self._widths[level], at, seconds))

    def budget(self, seconds: float, least: int, most: int) -> int:
        """Tokens of prompts that take so long; the most before anything was measured."""
        return most if self._prompt is None else int(min(most, max(least, seconds // self._prompt)))

    def within(self, target: float, level: int, measured: float | None, choices: Sequence[int]) -> int:
        """The widest of some levels whose tokens come at least as fast as wanted, else the narrowest.

        Args:
            target: seconds from token to token.
            level: at which the text runs now.
            measured: median seconds from token to token of the text; None: it is new. What other texts in the same
                rounds cost is in it.
            choices: levels, ascending.
        """
        now = self.step(level)
        others = 0.0 if measured is None or now is None else max(0.0, measured - now)
        fits = [
            choice
            for choice in choices
            if (step := self.step(choice)) is not None and step + others <= target
        ]
        return max(fits, default=choices[0] if self._steps else level)


class Auto:
    """The level of all requests with bits "auto": at once lower when load rises, later and step by step higher again.

    Args:
        levels: that it may choose, ascending.
    """

    def __init__(self, levels: Sequence[int]) -> None:
        self._levels, self._down, self._calm = list(levels), 0, 0

    @property
    def level(self) -> int:
        return self._levels[-1 - self._down]

    def update(self, load: float) -> int:
        """The level of the next round.

        Args:
            load: from 0, nobody is served, to 1, nothing more can be.
        """
        last = len(self._levels) - 1
        wanted = min(last, int(max(load, 0) * (last + 1)))
        self._calm = self._calm + 1 if wanted < self._down else 0
        if wanted > self._down:
            self._down = wanted
        elif self._calm >= CALM:
            self._down, self._calm = self._down - 1, 0
        return self.level


def stops(widths: Sequence[float], least: float, count: int = STOPS) -> list[int]:
    """Some levels from the first of at least so many bits to the last, evenly apart.

    Args:
        widths: average bits of each level, ascending.
        least: bits.
        count: levels at most.
    """
    first = next((i for i, width in enumerate(widths) if width >= least - 0.05), len(widths) - 1)
    wanted = np.linspace(widths[first], widths[-1], count)
    return sorted({int(np.abs(np.asarray(widths) - bits).argmin()) for bits in wanted})


def _mean(before: float | None, new: float) -> float:
    return new if before is None else before + RECENT * (new - before)
