"""Drafts of what follows in a text, from what stood in it before: prompt lookup decoding (Saxena, 2023).

A step computes a draft together with the token before it. The draft counts as far as it is what is drawn, and each
token is drawn from its own logits with its own random numbers. So a text is the same with drafts and without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

MATCH = 3  # tokens that must have stood together before
INDEXED = 4096  # tokens of a prompt, its last ones, that are looked through
LENGTHS = (1, 3, 7)  # of drafts
GAIN = 1.05  # in tokens per second, from which a draft is worth its step
DOUBT = 0.4  # acceptance before any draft was compared
RECENT = 0.1  # weight of the newest comparison
SURE = 0.7  # acceptance from which step times are measured again
AGAIN = 64  # steps from one such measurement to the next

Seconds = Callable[[int], float | None]


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

    def length(self, rows: int, seconds: Seconds, steps: int) -> int:
        """How long the next step's draft should be; see `paying`. Now and then times that hardly change are doubted.

        Args:
            rows: tokens that the step computes without it, the text's own among them.
            seconds: of a step with so many rows, as measured; None: not known.
            steps: that were computed so far.
        """
        if self._next is None:  # there is nothing to draft
            return 0
        if self.acceptance >= SURE and rows == 1 and steps % AGAIN == 0:
            return LENGTHS[-1]
        return paying(self.acceptance, rows, seconds)

    def draft(self, length: int) -> list[int]:
        """Up to so many tokens that may follow."""
        return [] if self._next is None else self._tokens[self._next : self._next + length]

    def _append(self, token: int) -> None:
        self._tokens.append(token)
        last = tuple(self._tokens[-MATCH:])
        self._next = self._behind.get(last)
        if len(last) == MATCH:
            self._behind[last] = len(self._tokens)


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
    """Which power of 2 holds so many tokens of a step: steps of one size take about as long."""
    return (rows - 1).bit_length()


def recent(before: float | None, new: float) -> float:
    """A mean in which the newest counts `RECENT`; None: it is the first."""
    return new if before is None else before + RECENT * (new - before)


def paying(acceptance: float, rows: int, seconds: Seconds) -> int:
    """How long a text's draft should be in a step; 0: none is worth it.

    Args:
        acceptance: share of draft tokens that are drawn, each if those before it were.
        rows: tokens that the step computes without it, the text's own among them.
        seconds: of a step with so many rows, as measured; None: not known.
    """
    alone = seconds(rows)
    if alone is None:
        return 0
    best, most = 0, GAIN * rows / alone
    for length in LENGTHS:
        drawn = rows + sum(acceptance**i for i in range(1, length + 1))
        taken = seconds(rows + length)
        if taken is not None and drawn / taken > most:
            best, most = length, drawn / taken
    return best
