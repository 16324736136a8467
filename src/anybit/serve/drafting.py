"""Which texts have drafts, and those that are drawn at a narrower width."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from anybit.engine.drafts import HOPE, narrow_level, recent
from anybit.errors import InputError
from anybit.serve.job import Job
from anybit.serve.model import Model
from anybit.serve.pace import Pace
from anybit.serve.rows import batch_of
from anybit.serve.scheduler import Rows, Step, Text

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
        self._acceptance = HOPE  # at that level, of texts that have ended

    def begin(self, job: Job) -> None:
        """Let a job know what to expect."""
        job.narrow.acceptance = self._acceptance

    def end(self, job: Job) -> None:
        """Learn from a job."""
        if job.narrow.drafted:
            self._acceptance = recent(self._acceptance, job.narrow.acceptance)

    def choose(self, texts: Sequence[Text], jobs: Mapping[Text, Job], rounds: int) -> None:
        """Let texts have drafts where they pay, by measured times, the first ones first.

        Args:
            texts: that run.
            jobs: of all of them.
            rounds: so far.
        """
        rows, narrow = decoding(texts), Counter[int]()
        for text in texts:
            job, level = jobs[text], text.level
            text.draft = []
            if job.drafts is None or text.missing != 1:
                continue
            seconds = partial(self._pace.step, level)
            found = job.drafts.worth(rows[level], seconds, rounds)
            guessed = job.narrow.worth(rows[level], seconds, self._seconds(level, narrow[level]))
            if guessed > found:
                text.draft = [UNKNOWN] * guessed.length
                narrow[level] += 1
            else:
                text.draft = job.drafts.draft(found.length)
            rows[level] += len(text.draft)

    def _seconds(self, level: int, others: int) -> float | None:
        """What a token of a draft takes beside those of other texts; None: the text's own level is no wider."""
        alone, together = self._pace.step(self._level, others), self._pace.step(self._level, others + 1)
        if level <= self._level or together is None:
            return None
        return max(0.0, together - (alone or 0.0)) if others else together

    def filled(self, step: Step, jobs: Mapping[Text, Job]) -> Step:
        """A step whose drafts are known. The cache has keys and values of the narrow level then, until the step."""
        wanted = {rows.text: len(rows.draft) for rows in step.rows if UNKNOWN in rows.draft}
        if not wanted:
            return step
        known = {text: len(text.tokens) for text in wanted}
        try:
            self._draw(wanted, jobs)
        except InputError:  # NaN of this width: the text's own decides
            pass
        finally:
            for text, count in known.items():
                jobs[text].narrow.draft = text.tokens[count:]
                del text.tokens[count:]
        rows = [replace(r, draft=jobs[r.text].narrow.draft) if r.text in wanted else r for r in step.rows]
        return replace(step, rows=rows)

    def _draw(self, wanted: Mapping[Text, int], jobs: Mapping[Text, Job]) -> None:
        """Put so many tokens behind each text; fewer where it would end."""
        draws = {text: jobs[text].ahead() for text in wanted}
        for drawn in range(max(wanted.values())):
            begun = time.perf_counter()
            texts = [text for text in draws if wanted[text] > drawn]
            if not texts:
                return
            batch, _ = batch_of([Rows(text, len(text.tokens) - 1, 1) for text in texts], self._windowed)
            for text, logits in zip(texts, self._engine.step(batch, self._level)):
                text.tokens.append(draws[text](logits))
                if text.tokens[-1] in jobs[text].ends:
                    del draws[text]
            self._pace.measure(self._level, len(texts), 0, time.perf_counter() - begun)


def decoding(texts: Sequence[Text]) -> Counter[int]:
    """How many texts decode at each level."""
    return Counter(text.level for text in texts if text.missing == 1)
