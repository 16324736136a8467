"""Figures for Prometheus, in its text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from anybit.serve.run.job import Job
from anybit.serve.schedule.windows import WindowPages
from anybit.serve.served import Served, ServedEncoder

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
GAPS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1)  # seconds from token to token


class Histogram:
    """Counts of values up to each of some bounds.

    Args:
        bounds: ascending.
    """

    def __init__(self, bounds: Iterable[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum:.6f}"
        yield f"{name}_count {total}"


class Page:
    """Figures as they are written."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def family(self, name: str, kind: str, help_: str, values: Iterable[tuple[str, float]]) -> None:
        """A figure by labels."""
        self._lines.extend((f"# HELP anybit_{name} {help_}", f"# TYPE anybit_{name} {kind}"))
        self._lines.extend(f"anybit_{name}{labels} {value:.10g}" for labels, value in values)

    def one(self, name: str, kind: str, help_: str, value: float) -> None:
        self.family(name, kind, help_, [("", value)])

    def histogram(self, name: str, help_: str, histogram: Histogram) -> None:
        self.family(name, "histogram", help_, [])
        self._lines.extend(histogram.lines(f"anybit_{name}"))

    @property
    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


@dataclass
class Metrics:
    """What requests were like since the start."""

    answers: Counter[tuple[str, int]] = field(default_factory=Counter)  # by path and status
    first: Histogram = field(default_factory=lambda: Histogram(SECONDS))  # seconds to the first token
    gap: Histogram = field(
        default_factory=lambda: Histogram(GAPS)
    )  # mean seconds from token to token of a text
    whole: Histogram = field(default_factory=lambda: Histogram(SECONDS))  # seconds of a text
    embedding: Histogram = field(default_factory=lambda: Histogram(SECONDS))  # seconds of a request for some

    def ended(self, job: Job) -> None:
        """Count a text, if a token of it came."""
        times = job.times
        if not times.first:
            return
        self.first.add(times.first - times.asked)
        self.whole.add(times.last - times.asked)
        if job.drawn > 1:
            self.gap.add((times.last - times.first) / (job.drawn - 1))

    def page(self, served: Served | ServedEncoder) -> str:
        """All figures."""
        page = Page()
        page.family(
            "requests_total", "counter", "Answers by path and status.",
            [(f'{{path="{path}",status="{status}"}}', n) for (path, status), n in sorted(self.answers.items())],
        )  # fmt: skip
        if isinstance(served, ServedEncoder):
            self._embeddings(page, served)
        else:
            self._texts(page, served)
        runner = served.runner
        page.one("running_texts", "gauge", "Texts that run.", runner.running)
        page.one("waiting_texts", "gauge", "Texts that wait.", runner.waiting)
        page.one("step_seconds", "gauge", "How long the step has run that runs now.", runner.step_seconds)
        return page.text

    def _texts(self, page: Page, served: Served) -> None:
        runner, scheduler = served.runner, served.runner.scheduler
        counters, blocks = runner.counters, scheduler.blocks
        page.family(
            "generated_tokens_total", "counter", "Tokens drawn, by the average width that computed them.",
            [(f'{{bits="{bits:.2f}"}}', runner.served[i]) for i, bits in enumerate(served.engine.widths)],
        )  # fmt: skip
        for name, help_, count in (
            ("prompt_tokens", "Tokens of prompts of ended texts.", counters.prompt_tokens),
            ("cached_tokens", "Those of them found in the cache.", counters.cached_tokens),
            ("draft_tokens", "Tokens of drafts of ended texts.", counters.draft_tokens),
            ("accepted_tokens", "Those of them that were drawn.", counters.accepted_tokens),
            ("rounds", "Rounds of the scheduler.", counters.rounds),
            ("busy_seconds", "Seconds in steps of the engine.", counters.busy_seconds),
            ("preemptions", "Texts that gave up their pages.", scheduler.preemptions),
        ):
            page.one(f"{name}_total", "counter", help_, count)
        page.one("cache_pages", "gauge", "Pages of the KV-cache.", blocks.pages)
        page.one("cache_pages_used", "gauge", "Those of them that texts hold.", blocks.used)
        if isinstance(windows := scheduler.windows, WindowPages):
            page.one(
                "cache_window_pages", "gauge", "Pages of blocks with a sliding window.", windows.blocks.pages
            )
            page.one(
                "cache_window_pages_used", "gauge", "Those of them that texts hold.", windows.blocks.used
            )
        auto = served.engine.widths[runner.auto.level]
        page.one("auto_bits", "gauge", 'Average width of bits "auto" now.', auto)
        page.histogram("time_to_first_token_seconds", "From a request to its first token.", self.first)
        page.histogram("inter_token_seconds", "Mean time from token to token of a text.", self.gap)
        page.histogram("text_seconds", "From a request to a text's last token.", self.whole)

    def _embeddings(self, page: Page, served: ServedEncoder) -> None:
        counters = served.runner.counters
        for name, help_, count in (
            ("embedded_texts", "Texts that were embedded.", counters.texts),
            ("embedded_tokens", "Their tokens.", counters.tokens),
            ("padding_tokens", "Tokens that were computed beside them.", counters.padding),
            ("batches", "Batches of texts.", counters.batches),
            ("busy_seconds", "Seconds in batches.", counters.busy_seconds),
        ):
            page.one(f"{name}_total", "counter", help_, count)
        page.histogram("embedding_seconds", "From a request to its embeddings.", self.embedding)
