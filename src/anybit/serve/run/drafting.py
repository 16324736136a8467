"""Which texts have drafts, and those that are drawn at a narrower width."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from anybit.engine.distribution import Floats
from anybit.engine.drafts import HOPE, narrow_level
from anybit.errors import InputError
from anybit.serve.run.job import Draw, Job
from anybit.serve.run.model import Model
from anybit.serve.run.pace import Pace
from anybit.serve.run.rows import batch_of
from anybit.serve.schedule.scheduler import Rows, Step, Text

LOG = logging.getLogger(__name__)
UNKNOWN = -1  # a token of a draft that is drawn just before its step


class Drafting:
    """Drafts of the texts of one engine.

    Args:
        engine: that computes them.
        pace: measured times of its steps.
        windowed: whether blocks with a sliding window have pages of their own.
    """

    def __init__(self, engine: Model, pace: Pace, windowed: bool) -> None:
        self._engine, self._pace, self._windowed = engine, pace, windowed
        self._level = narrow_level(engine.widths)
        self._cold = True  # no step at that level was computed for a draft
        self._acceptance = HOPE  # of drafts at that level, by texts that have ended

    def begin(self, job: Job) -> None:
        """Let a job know what to expect."""
        job.narrow.acceptance = self._acceptance

    def end(self, job: Job) -> None:
        """Learn from a job."""
        self._acceptance = job.narrow.taught(self._acceptance)

    def choose(self, texts: Sequence[Text], jobs: Mapping[Text, Job], rounds: int) -> None:
        """Let texts have drafts where they pay, by measured times, the first ones first.

        Drafts at the narrow level take steps of their own. So they are for rounds of one level and without prompts:
        nobody else waits for them.

        Args:
            texts: that run.
            jobs: of all of them.
            rounds: so far.
        """
        rows, lengths = decoding(texts), list[int]()
        alike = len(rows) == 1 and sum(rows.values()) == len(texts)
        for text in texts:
            job, level = jobs[text], text.level
            text.draft = []
            if job.drafts is None or text.missing != 1:
                continue
            seconds = partial(self._pace.step, level)
            found = job.drafts.worth(rows[level], seconds, rounds)
            each = self._seconds(len(lengths)) if alike and level > self._level else None
            guessed = job.narrow.worth(rows[level], seconds, each)
            if guessed > found:
                lengths.append(
                    min([guessed.length, *lengths[:1]])
                )  # in steps that the first one takes anyway
                text.draft = [UNKNOWN] * lengths[-1]
            else:
                text.draft = job.drafts.draft(found.length)
            rows[level] += len(text.draft)

    def _seconds(self, others: int) -> float | None:
        """A text's share of a step that draws a token of its draft and of others'; None: no time is known."""
        step = self._pace.step(self._level, others + 1)
        return None if step is None else step / (others + 1)

    def filled(self, step: Step, jobs: Mapping[Text, Job]) -> Step:
        """A step whose drafts are known. The cache has keys and values of the narrow level then, until the step.

        Whatever fails here ends a draft and no text.
        """
        wanted = {rows.text: len(rows.draft) for rows in step.rows if UNKNOWN in rows.draft}
        if not wanted:
            return step
        known = {text: len(text.tokens) for text in wanted}
        try:
            self._draw(wanted, jobs)
        except Exception as error:
            _log(error)
        finally:
            for text, count in known.items():
                narrow = jobs[text].narrow
                narrow.draft = text.tokens[count:]
                del text.tokens[count:]
                if not narrow.draft:
                    narrow.fail()
        rows = [replace(r, draft=jobs[r.text].narrow.draft) if r.text in wanted else r for r in step.rows]
        return replace(step, rows=rows)

    def _draw(self, wanted: Mapping[Text, int], jobs: Mapping[Text, Job]) -> None:
        """Put so many tokens behind each text; fewer where it would end."""
        begun = time.perf_counter()
        draws = {text: jobs[text].ahead() for text in wanted}
        for drawn in range(max(wanted.values())):
            texts = [text for text in draws if wanted[text] > drawn]
            if not texts:
                return
            batch, _ = batch_of([Rows(text, len(text.tokens) - 1, 1) for text in texts], self._windowed)
            for text, logits in zip(texts, self._engine.step(batch, self._level)):
                if self._draw_one(text, draws[text], logits):
                    del draws[text]
            now = time.perf_counter()
            if not self._cold:  # the first step reads what no step has read
                self._pace.measure(self._level, len(texts), 0, now - begun)
            begun, self._cold = now, False

    def _draw_one(self, text: Text, draw: Draw, logits: Floats) -> bool:
        """Put a token behind a text; whether its draft ends there."""
        try:
            token, ends = draw(logits)
        except Exception as error:
            _log(error)
            return True
        text.tokens.append(token)
        return ends


def _log(error: Exception) -> None:
    """Say what is no NaN of this width and no want of tokens within reach, which the text's own step decides."""
    if not isinstance(error, InputError):
        LOG.error("a draft has failed", exc_info=error)


def decoding(texts: Sequence[Text]) -> dict[int, int]:
    """How many texts decode at each level."""
    counts: dict[int, int] = {}
    for text in texts:
        if text.missing == 1:
            counts[text.level] = counts.get(text.level, 0) + 1
    return counts
