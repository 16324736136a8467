"""Drafts of what follows in a text, and whether they are worth their step.

Either they are what followed in the text before (prompt lookup decoding, Saxena, 2023), or the model itself draws them
at a narrower width, which reads fewer planes of the same weights (self-speculative decoding, arXiv:2309.08168).

A step computes a draft together with the token before it. The draft counts as far as it is what is drawn, and each
token is drawn from its own logits with its own random numbers. So a text is the same with drafts and without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

MATCH = 3  # tokens that must have stood together before
INDEXED = 4096  # tokens of a prompt, its last ones, that are looked through
LENGTHS = (1, 3, 7)  # of drafts
GAIN = 1.05  # in tokens per second, from which a draft is worth its step
DOUBT = 0.4  # acceptance before any draft was compared
HOPE = 0.9  # acceptance of drafts at a narrower width before any was compared
NARROW = 3.0  # average bits of that width, at most; where a model has only wider ones, its narrowest is taken
RECENT = 0.1  # weight of the newest comparison
SURE = 0.7  # acceptance from which step times are measured again
AGAIN = 64  # steps from one such measurement to the next, and from a draft at a narrower width that is not worth it

Seconds = Callable[[int], float | None]


class Worth(NamedTuple):
    """The tokens per second that a step with a draft promises, and the draft's length; (0, 0): none is worth it."""

    rate: float
    length: int


class Drafts:
    """A text's tokens, and what followed where its last ones stood before.

    Args:
        tokens: of the prompt; they are looked through when the first token is drawn.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.acceptance = DOUBT  # share of draft tokens that were drawn, computed or not
        self._prompt = tokens[-INDEXED:]
        self._tokens: list[int] = []
        # Of tokens that stood together: where the next one stands.
        self._behind: dict[tuple[int, ...], int] = {}
        self._next: int | None = None  # where the token stands that is expected next

    def push(self, token: int) -> None:
        """A token that was drawn."""
        if not self._tokens:
            for known in self._prompt:
                self._append(known)
        if self._next is not None:
            self.acceptance = recent(self.acceptance, self._tokens[self._next] == token)
        self._append(token)

    def worth(self, rows: int, seconds: Seconds, steps: int) -> Worth:
        """What the next step's draft is worth; see `paying`. Now and then times that hardly change are doubted.

        Args:
            rows: tokens that the step computes without it, the text's own among them.
            seconds: of a step with so many rows, as measured; None: not known.
            steps: that were computed so far.
        """
        if self._next is None:  # there is nothing to draft
            return Worth(0, 0)
        if self.acceptance >= SURE and rows == 1 and steps % AGAIN == 0:
            return Worth(math.inf, LENGTHS[-1])
        return paying(self.acceptance, rows, seconds)

    @property
    def last(self) -> int:
        """The token that was drawn last."""
        return self._tokens[-1]

    def draft(self, length: int) -> list[int]:
        """Up to so many tokens that may follow."""
        return [] if self._next is None else self._tokens[self._next : self._next + length]

    def _append(self, token: int) -> None:
        self._tokens.append(token)
        last = tuple(self._tokens[-MATCH:])
        self._next = self._behind.get(last)
        if len(last) == MATCH:
            self._behind[last] = len(self._tokens)


class NarrowDrafts:
    """How far texts are what the model draws at a narrower width.

    Args:
        acceptance: share of draft tokens that were drawn in texts before.
    """

    def __init__(self, acceptance: float = HOPE) -> None:
        self.acceptance = acceptance
        self.draft: list[int] = []  # the last one, until it is compared
        self.drafted = 0  # tokens
        self._without = 0  # steps since one was worth it

    def worth(self, rows: int, seconds: Seconds, each: float | None) -> Worth:
        """What the next step's draft is worth; see `paying`. Now and then a text alone is asked again.

        Args:
            rows: tokens that the step computes without it, the text's own among them.
            seconds: of a step with so many rows, as measured; None: not known.
            each: seconds that one token of the draft takes; None: not known.
        """
        if each is None:
            return Worth(0, 0)
        found = paying(self.acceptance, rows, seconds, each)
        self._without = 0 if found.length else self._without + 1
        if rows == 1 and self._without >= AGAIN:
            self._without = 0
            return Worth(math.inf, LENGTHS[0])
        return found

    def fail(self) -> None:
        """Count a draft that could not be drawn as a wrong one, so that it is not tried at every step."""
        self.acceptance = recent(self.acceptance, False)

    def taught(self, before: float) -> float:
        """The acceptance to begin the next text with; where this one had no drafts, they may be tried again.

        Args:
            before: what this one began with, or a mean of texts before.
        """
        return recent(before, self.acceptance if self.drafted else HOPE)

    def compare(self, drawn: Sequence[int]) -> None:
        """Count what was right of the last draft: the tokens that were drawn are the draft so far, and one more."""
        for expected, token in zip(self.draft, drawn):
            self.acceptance = recent(self.acceptance, expected == token)
        self.drafted += len(self.draft)
        self.draft = []


class StepTimes:
    """Seconds of steps by the tokens that they compute: means of what was measured up to each power of 2."""

    def __init__(self) -> None:
        self.steps = 0
        self._means: dict[int, float] = {}

    def measure(self, rows: int, seconds: float) -> None:
        size = size_of(rows)
        self._means[size] = recent(self._means.get(size), seconds)
        self.steps += 1

    def seconds(self, rows: int) -> float | None:
        """Of a step with so many tokens, or with the nearest number that was measured; None: nothing was."""
        size = size_of(rows)
        return min(((abs(other - size), mean) for other, mean in self._means.items()), default=(0, None))[1]


def size_of(rows: int) -> int:
    """Which power of 2 holds so many tokens of a step: steps of one size take about as long.

    Raises:
        ValueError: a step without tokens, which has no size.
    """
    if rows < 1:
        raise ValueError(f"a step of {rows} tokens has no size: expected 1 or more")
    return (rows - 1).bit_length()


def recent(before: float | None, new: float) -> float:
    """A mean in which the newest counts `RECENT`; None: it is the first."""
    return new if before is None else before + RECENT * (new - before)


def paying(acceptance: float, rows: int, seconds: Seconds, each: float = 0.0) -> Worth:
    """How long a text's draft should be in a step.

    Args:
        acceptance: share of draft tokens that are drawn, each if those before it were.
        rows: tokens that the step computes without it, the text's own among them.
        seconds: of a step with so many rows, as measured; None: not known.
        each: seconds that one token of the draft takes before the step.
    """
    best, alone = Worth(0, 0), seconds(rows)
    if alone is None:
        return best
    for length in LENGTHS:
        drawn = rows + sum(acceptance**i for i in range(1, length + 1))
        taken = seconds(rows + length)
        if taken is not None and (rate := drawn / (taken + length * each)) > max(
            best.rate, GAIN * rows / alone
        ):
            best = Worth(rate, length)
    return best


def narrow_level(widths: Sequence[float]) -> int:
    """Which of ascending average widths draws drafts for wider ones: the last of up to `NARROW` bits, or the first."""
    return max((i for i, width in enumerate(widths) if width <= NARROW), default=0)
