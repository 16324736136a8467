"""How long steps take, as measured, and what follows from it: a width for a latency, a load for a width."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from anybit.engine.drafts import recent, size_of

STOPS = 4  # widths among which "auto" moves: pages are shared at one width only, so few are better
CALM = 32  # rounds of less load before "auto" goes up by one stop


class Pace:
    """Seconds of decoding steps by level and number of texts, and of a token of a prompt: means of what was measured.

    Args:
        widths: average bits of each level, ascending.
    """

    def __init__(self, widths: Sequence[float]) -> None:
        self._widths = list(widths)
        self._steps: dict[int, dict[int, float]] = {}  # by power of 2 that holds the texts, then by level
        self._prompt: float | None = None

    def measure(self, level: int, texts: int, prompt: int, seconds: float) -> None:
        """A step at a level with so many texts that decode and so many tokens of prompts."""
        if not prompt:
            known = self._steps.setdefault(size_of(texts), {})
            known[level] = recent(known.get(level), seconds)
        elif seconds > (decoding := (self.step(level, texts) or 0.0) if texts else 0.0):
            self._prompt = recent(self._prompt, (seconds - decoding) / prompt)

    def step(self, level: int, texts: int) -> float | None:
        """Seconds of a step that decodes so many texts; None: nothing was measured.

        What was not measured with about so many texts is taken from the nearest number that was, and of levels between
        two that were, from the line between them.
        """
        if not self._steps:
            return None
        size = size_of(texts)
        known = self._steps[min(self._steps, key=lambda other: abs(other - size))]
        if level in known:
            return known[level]
        levels = sorted(known)
        at, seconds = [self._widths[i] for i in levels], [known[i] for i in levels]
        if len(levels) == 1:  # all of a step is reading weights, then
            return seconds[0] * self._widths[level] / at[0]
        return float(np.interp(self._widths[level], at, seconds))

    def budget(self, seconds: float, least: int, most: int) -> int:
        """Tokens of prompts that take so long; the most before anything was measured."""
        return most if self._prompt is None else int(min(most, max(least, seconds // self._prompt)))

    def within(self, target: float, now: tuple[int, int], gap: float | None, choices: Sequence[int]) -> int:
        """The widest of some levels whose tokens come at least as fast as wanted, else the narrowest.

        Args:
            target: seconds from token to token.
            now: the text's level, and how many texts decode at it.
            gap: median seconds from token to token of the text; None: it is new. What the same rounds compute besides
                is in it.
            choices: levels, ascending.
        """
        level, texts = now
        step = self.step(level, texts)
        if step is None:
            return level
        others = 0.0 if gap is None else max(0.0, gap - step)
        fits = [choice for choice in choices if (self.step(choice, texts) or 0.0) + others <= target]
        return max(fits, default=choices[0])


class Auto:
    """The level of all requests with bits "auto": at once lower when load rises, later and step by step higher again.

    A text alone has the highest at once.

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
            load: from 0, no more than one text is served, to 1, nothing more can be.
        """
        last = len(self._levels) - 1
        wanted = min(last, int(max(load, 0) * (last + 1)))
        self._calm = self._calm + 1 if wanted < self._down else 0
        if wanted > self._down or load <= 0:  # a text alone waits for nobody
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
