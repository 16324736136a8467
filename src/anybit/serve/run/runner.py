"""The thread that has the engine: it runs the scheduler's steps and tells each text how it goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from anybit.engine.distribution import Floats
from anybit.errors import InputError
from anybit.serve.errors import Closing, EngineFault
from anybit.serve.run.drafting import Drafting, decoding
from anybit.serve.run.job import Job, Progress
from anybit.serve.run.model import Model
from anybit.serve.run.pace import Auto, Pace, stops
from anybit.serve.run.request import AUTO
from anybit.serve.run.rows import batch_of
from anybit.serve.run.worker import Worker
from anybit.serve.schedule.scheduler import Rows, Scheduler, Step, Text
from anybit.serve.schedule.windows import WindowPages
from anybit.serve.settings import Settings

LOG = logging.getLogger(__name__)  # unlike printing, it survives a full disk
ROUND_SECONDS = 0.1  # of a round with prompts beside texts that decode; prompts alone: four times that
LEAST_PROMPT, MOST_PROMPT = 16, 256  # tokens of prompts in a round
TARGET_STOPS = 8  # widths among which a latency chooses

Heard = Sequence[tuple[Job, Progress]]


@dataclass(frozen=True)
class Limits:
    """What the engine is shared by."""

    pages: int  # of the KV-cache
    running: int = Settings.running  # texts that run together
    waiting: int = Settings.waiting  # texts that wait
    auto_bits: float = Settings.auto_bits  # the least that load and latencies choose
    window_pages: int = 0  # of blocks with a sliding window, where these have their own
    shared: bool = False  # whether several keys share the places of those that wait


@dataclass
class Counters:
    """What was done since the start."""

    prompt_tokens: int = 0  # computed or found
    cached_tokens: int = 0
    draft_tokens: int = 0  # computed, drawn or not
    accepted_tokens: int = 0
    rounds: int = 0
    busy_seconds: float = 0.0


class Runner(Worker):
    """Runs jobs on an engine, which nobody else may use meanwhile.

    Args:
        engine: its KV-cache becomes the runner's.
        limits: what texts share.
        deliver: takes what a round has made, in the engine's thread; default: each job hears it there.
    """

    def __init__(self, engine: Model, limits: Limits, deliver: Callable[[Heard], None] | None = None) -> None:
        super().__init__()
        engine.give_pages(limits.pages, limits.window_pages)
        self.engine, self.limits, self._deliver = engine, limits, deliver or tell
        seed = repr((engine.name, engine.kv_bits, engine.codebook_precision)).encode()
        most = {"most_running": limits.running, "most_waiting": limits.waiting}
        windows = None
        if limits.window_pages:
            windows = WindowPages(engine.window, limits.window_pages, engine.page_tokens, limits.running)
        self.scheduler = Scheduler(
            limits.pages, engine.page_tokens, **most, shared=limits.shared, seed=seed, windows=windows
        )
        self.pace, self.auto = Pace(engine.widths), Auto(stops(engine.widths, limits.auto_bits))
        self.counters, self.served = Counters(), dict.fromkeys(range(len(engine.widths)), 0)
        self._targets = stops(engine.widths, limits.auto_bits, TARGET_STOPS)
        self._windowed = windows is not None
        self.drafting = Drafting(engine, self.pace, self._windowed)
        self._jobs: dict[Text, Job] = {}
        self._cancelled: set[Job] = set()

    # ---- from any thread

    def submit(self, jobs: Sequence[Job]) -> None:
        """Take jobs, all of them or none.

        Raises:
            InputError: one that could never be served.
            Busy: too many wait.
            Closing: the server has no time left.
        """
        with self._changed:
            self._refuse_late()
            self.scheduler.add([job.text for job in jobs])
            for job in jobs:
                self._jobs[job.text] = job
                self.drafting.begin(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """End a job after the step that runs now, if it has not ended."""
        with self._changed:
            self._cancelled.add(job)
            self._changed.notify()

    @property
    def running(self) -> int:
        return len(self.scheduler.running)

    @property
    def waiting(self) -> int:
        return self.scheduler.waiting_count

    def load(self) -> float:
        """From 0, no more than one text is served, to 1, all that may run do, or the cache is full."""
        scheduler, others = self.scheduler, len(self._jobs) - 1
        if others < 1:
            return 0.0
        texts = others / max(1, scheduler.most_running - 1)
        pages = scheduler.blocks.used / scheduler.blocks.pages
        return min(1.0, max(texts, pages))

    # ---- in the engine's thread

    def _round(self) -> bool:
        steps = self._next()
        for step in steps or ():
            self._deliver(self._step(step))
        return steps is not None

    def _abandon(self, error: Exception) -> None:
        with self._changed:
            left, self._jobs = list(self._jobs.values()), {}
        failed = Progress(finish="error", error=error)
        self._deliver([(job, failed) for job in left])

    def _next(self) -> list[Step] | None:
        """The steps of the next round, waited for; None: there will be none."""
        with self._changed:
            while not self._jobs and not self._closed:
                self._changed.wait()
            heard = self._ended_early()
            if not self._jobs and self._closed:
                steps = None
            else:
                self._choose_levels()
                self.drafting.choose(self.scheduler.running, self._jobs, self.counters.rounds)
                steps = self.scheduler.schedule(self._budget())
                self.counters.rounds += 1
        self._deliver(heard)
        return steps

    def _ended_early(self) -> Heard:
        """End what was cancelled, and when the server stops what it has no more time for."""
        if time.perf_counter() >= self._deadline:
            jobs = list(self._jobs.values())
            progress = Progress(finish="error", error=Closing("the server has stopped"))
        elif self._cancelled:
            jobs = [job for job in self._cancelled if job.text in self._jobs]
            progress = Progress(finish="cancelled")
        else:
            return []
        self._cancelled.clear()
        return [(job, self._end(job, progress)) for job in jobs]

    def _choose_levels(self) -> None:
        """Let load and measured times move those texts that want it."""
        level = self.auto.update(self.load())
        for text, job in self._jobs.items():
            target = job.request.target
            if job.request.bits == AUTO:
                self.scheduler.set_level(text, level)
            elif target is not None and job.is_due():
                beside = sum(
                    other.level == text.level for other in self.scheduler.running if other is not text
                )
                now = text.level, 1 + beside  # also where the text does not run yet
                self.scheduler.set_level(text, self.pace.within(target, now, job.gap, self._targets))

    def _budget(self) -> int:
        """Tokens of prompts for the next round: what is left of its time beside the texts that decode."""
        if not self.engine.together:  # some models compute a prompt in parts otherwise
            return self.engine.context
        counts = decoding(self.scheduler.running)
        taken = sum(self.pace.step(level, texts) or 0.0 for level, texts in counts.items())
        seconds = ROUND_SECONDS - taken if counts else 4 * ROUND_SECONDS
        return self.pace.budget(seconds, LEAST_PROMPT, MOST_PROMPT)

    def _step(self, step: Step) -> Heard:
        """Run a step and draw behind it; what fails ends its own text alone."""
        self.step_size = max(1.0, sum(rows.count for rows in step.rows) / MOST_PROMPT)
        self.step_begun = begun = time.perf_counter()
        for rows in step.rows:
            times = self._jobs[rows.text].times
            times.started = times.started or begun
        step = self.drafting.filled(step, self._jobs)
        filled = time.perf_counter()
        self.counters.busy_seconds += filled - begun
        computed = self._computed(step)
        heard: list[tuple[Job, Progress]] = []
        drawn: dict[Text, list[int]] = {}
        for rows, logits in computed:
            job = self._jobs[rows.text]
            try:
                drawn[rows.text], made = self._drawn(job, rows, logits)
            except Exception as error:
                made = [_failed(error)]
            heard += [(job, progress) for progress in made]
        # Log-probabilities of a prompt take their time, too.
        self._measure(step, time.perf_counter() - filled)
        self.served[step.level] += sum(map(len, drawn.values()))
        self._finish(step, drawn, [(job, progress) for job, progress in heard if progress.finish is not None])
        self.step_ended, self.step_begun = time.perf_counter(), None
        return heard

    def _finish(self, step: Step, drawn: dict[Text, list[int]], ended: Heard) -> None:
        """Let the scheduler know what a step has computed, and forget the jobs that it ended."""
        with self._changed:
            for job, progress in ended:
                if progress.error is not None:  # its pages are nobody else's
                    self._end(job, progress)
            self.scheduler.done(step, drawn)
            for job, progress in ended:
                self._end(job, progress)

    def _measure(self, step: Step, seconds: float) -> None:
        prompt = sum(rows.count for rows in step.rows if rows.count > 1)
        decoded = sum(1 + len(rows.draft) for rows in step.rows if rows.count == 1)
        self.pace.measure(step.level, decoded, prompt, seconds)
        self.counters.busy_seconds += seconds

    def _computed(self, step: Step) -> list[tuple[Rows, Floats | Exception]]:
        """The logits of each text of a step; where it fails, of each alone, so that the one to blame is found."""
        try:
            return self._logits(step)
        except Exception as error:
            if any(rows.draft for rows in step.rows):  # a text is not to blame for what it has not drawn
                return self._computed(Step(step.level, [replace(rows, draft=()) for rows in step.rows]))
            if len(step.rows) == 1:
                return [(step.rows[0], error)]
        return [alone for rows in step.rows for alone in self._computed(Step(step.level, [rows]))]

    def _logits(self, step: Step) -> list[tuple[Rows, Floats | Exception]]:
        batch, counts = batch_of(step.rows, self._windowed)
        logits = self.engine.step(batch, step.level)
        made: list[tuple[Rows, Floats | Exception]] = []
        end = 0
        for rows, count in zip(step.rows, counts):
            begin, end = end, end + count
            made.append((rows, logits[begin:end]))
        return made

    def _drawn(self, job: Job, rows: Rows, logits: Floats | Exception) -> tuple[list[int], list[Progress]]:
        """The tokens behind a text's rows, if they are its last, and what to tell of them.

        Behind a draft token that was drawn there is one more, from the logits that were computed with it.
        """
        if isinstance(logits, InputError):
            raise EngineFault(str(logits)) from logits
        if isinstance(logits, Exception):
            raise logits
        prompt = job.score(rows.first, logits) if job.text.every else []
        if not rows.last or job.text.left <= 0:
            finish = "length" if rows.last else None
            return [], [Progress(finish=finish, prompt=prompt)] if prompt or finish else []
        tokens: list[int] = []
        made: list[Progress] = []
        for behind, expected in zip(logits[-1 - len(rows.draft) :], [*rows.draft, None]):
            try:
                token, progress = job.draw(behind, rows.text.level, len(tokens))
            except Exception as error:
                if not tokens:
                    raise
                made.append(_failed(error))
                break
            tokens.append(token)
            made.append(progress)
            if progress.finish is not None or token != expected:
                break
        job.end_round(len(rows.draft), tokens)
        if prompt:
            made[0] = replace(made[0], prompt=prompt)
        return tokens, made

    def _end(self, job: Job, progress: Progress) -> Progress:
        """Forget a job; with the lock held."""
        if self._jobs.pop(job.text, None) is not None:
            job.finished = progress.finish
            self.drafting.end(job)
            self.counters.prompt_tokens += job.text.prompt
            self.counters.cached_tokens += job.text.cached or 0
            self.counters.draft_tokens += job.drafted
            self.counters.accepted_tokens += job.accepted
            self.scheduler.end(job.text)
        return progress


def _failed(error: Exception) -> Progress:
    if not isinstance(error, InputError):
        LOG.error("a text has failed", exc_info=error)
    return Progress(finish="error", error=error)


def tell(heard: Heard) -> None:
    """Let each job hear of its progress."""
    for job, progress in heard:
        job.hear(progress)
