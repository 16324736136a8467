"""One text that is asked for: what is wanted of it, and how it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

from anybit.checkpoint.tokenizer import check_ids
from anybit.config import MAX_SEED
from anybit.engine.distribution import Floats
from anybit.engine.drafts import Drafts, NarrowDrafts
from anybit.engine.sampling import Drawn, Sampler
from anybit.engine.text import TextStream, check_tokenizer
from anybit.errors import InputError
from anybit.formats.levels import largest
from anybit.serve.errors import TooLong
from anybit.serve.run.model import Model
from anybit.serve.run.request import AUTO, Request
from anybit.serve.schedule.scheduler import Text

# The next token from logits [vocabulary], and whether a text ends behind it; InputError where none can be drawn.
Draw = Callable[[Floats], tuple[int, bool]]

RECENT = 8  # gaps between tokens, of which the median counts for a latency that is asked for


@dataclass(frozen=True)
class Progress:
    """What one round adds to a text."""

    text: str = ""
    drawn: Drawn | None = None
    finish: str | None = None  # of the last: "stop", "length", "cancelled", or "error"
    error: Exception | None = None
    prompt: Sequence[Drawn] = ()  # tokens of the prompt from the second on, with their log-probabilities


@dataclass
class Times:
    """When things happened, in seconds of `time.perf_counter`; 0: not yet."""

    asked: float = field(default_factory=time.perf_counter)
    started: float = 0.0  # the first step begins
    first: float = 0.0  # the first token is there
    last: float = 0.0


class Job:
    """A text on its way.

    Args:
        engine: that will run it.
        request: what is wanted of it.
        number: which of the request's texts.
        level: that it begins at.
        hear: is told of its progress.
    """

    def __init__(
        self, engine: Model, request: Request, number: int, level: int, hear: Callable[[Progress], None]
    ) -> None:
        sampling, tokens = request.sampling, request.tokens
        if sampling.seed is not None and number:
            sampling = replace(sampling, seed=(sampling.seed + number) % (MAX_SEED + 1))
        self.request, self.hear = request, hear
        self.text = Text(list(tokens), request.most or 0, level, request.key, request.every)
        self.sampler = Sampler(sampling, engine.vocabulary, tokens)
        self.stream = TextStream(check_tokenizer(engine.tokenizer), request.stop, tokens, request.shown)
        self.ends: set[int] = set() if request.ignores_ends else engine.ends
        self.constraint = request.constraint.copy() if request.constraint is not None else None
        self.drafts = Drafts(tokens) if request.speculates and engine.together else None
        self.narrow = NarrowDrafts()
        self.drafted = self.accepted = 0  # tokens of drafts that were computed, and drawn
        self.times = Times()
        self.levels: dict[int, int] = {}  # tokens drawn at each level
        self.finished: str | None = None
        self._scored = 1  # tokens of the prompt whose log-probabilities were given out, or that have none
        self._gaps: list[float] = []
        self._rounds_end = 0.0  # when the last round that drew a token ended
        self._due = 0  # tokens that are to be drawn before the width is chosen again

    @property
    def drawn(self) -> int:
        """Tokens drawn, one that ended the text among them."""
        return sum(self.levels.values())

    @property
    def gap(self) -> float | None:
        """Median seconds between its last tokens; None: too few came yet."""
        return median(self._gaps) if len(self._gaps) == RECENT else None

    def is_due(self) -> bool:
        """Whether `RECENT` tokens came since it was last said so."""
        if self.drawn < self._due:
            return False
        self._due = self.drawn + RECENT
        return True

    def end_round(self, drafted: int, tokens: Sequence[int]) -> None:
        """A round computed so many tokens of a draft, and drew these tokens."""
        drawn = len(tokens)
        self.drafted += drafted
        self.accepted += drawn - 1
        self.narrow.compare(tokens)
        now = time.perf_counter()
        if self._rounds_end:
            self._gaps = [*self._gaps, *[(now - self._rounds_end) / drawn] * drawn][-RECENT:]
        self._rounds_end = now

    def draw(self, logits: Floats, level: int, before: int = 0) -> tuple[int, Progress]:
        """The next token, and what it adds; `finish` says whether it is the last.

        Args:
            logits: float32 [vocabulary], behind all tokens so far.
            level: that computed them.
            before: tokens drawn already that the text does not have yet.

        Raises:
            InputError: no token can be drawn.
        """
        allowed = None if self.constraint is None else self.constraint.allowed()
        drawn = self.sampler.draw(logits, allowed)
        self._count(level)
        if self.drafts is not None:
            self.drafts.push(drawn.token)
        if drawn.token in self.ends:
            return drawn.token, Progress(self.stream.finish(), drawn, "stop")
        if self.constraint is not None:
            self.constraint.accept(drawn.token)
        piece = self.stream.push(drawn.token)
        if self.stream.stopped is not None:
            return drawn.token, Progress(piece, drawn, "stop")
        if self.constraint is not None and self.constraint.finished:
            return drawn.token, Progress(piece + self.stream.finish(), drawn, "stop")
        if self.text.left - before <= 1:
            return drawn.token, Progress(piece + self.stream.finish(), drawn, "length")
        return drawn.token, Progress(piece, drawn)

    def ahead(self) -> Draw:
        """What draws the text's next tokens as the text will, which itself stays as it is."""
        sampler, form = self.sampler.ahead(), None if self.constraint is None else self.constraint.copy()

        def draw(logits: Floats) -> tuple[int, bool]:
            token = sampler.token(logits, None if form is None else form.allowed())
            if form is None or token in self.ends:
                return token, token in self.ends
            form.accept(token)
            return token, form.finished

        return draw

    def score(self, first: int, logits: Floats) -> list[Drawn]:
        """The prompt's own tokens behind some of its rows, those that were given out before left out.

        Args:
            first: position of the first row.
            logits: float32 [rows, vocabulary].
        """
        last = min(first + len(logits), self.text.prompt - 1)
        scored = [
            self.sampler.report(self.text.tokens[at + 1], logits[at - first])
            for at in range(max(first, self._scored - 1), last)
        ]
        self._scored += len(scored)
        return scored

    def _count(self, level: int) -> None:
        now = time.perf_counter()
        self.levels[level] = self.levels.get(level, 0) + 1
        self.times.first, self.times.last = self.times.first or now, now


def jobs_of(
    engine: Model, context: int, request: Request, hear: Callable[[int, Progress], None]
) -> list[Job]:
    """The jobs of a request, one for each of its texts.

    Args:
        engine: that will run them.
        context: tokens that a text may have.
        request: what is wanted.
        hear: is told which text makes which progress.

    Raises:
        InputError: what of this cannot be.
    """
    if not request.tokens:
        raise InputError("the prompt is empty: give some text to continue")
    check_ids(request.tokens, engine.vocabulary)
    length, room = len(request.tokens), context - len(request.tokens)
    most = room if request.most is None else request.most
    if room < 1 or most > room:
        more = f" and {most} more are {length + most}" if request.most else ""
        raise TooLong(
            f"the prompt has {length} tokens{more}; the context holds {context}, one to draw among them: shorten it"
        )
    request, level = replace(request, most=most), level_of(engine, request.bits)
    return [Job(engine, request, i, level, partial(hear, i)) for i in range(request.n)]


def level_of(engine: Model, bits: float | str | None) -> int:
    """Which of an engine's levels serves a width.

    Raises:
        InputError: one that it does not have.
    """
    if bits is None or bits == AUTO:
        return len(engine.widths) - 1
    if isinstance(bits, str):
        raise InputError(f'bits is {bits!r:.50}, expected a number or "auto"')
    return largest(engine.widths, bits, "the model has")
