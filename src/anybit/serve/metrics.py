"""Figures for Prometheus, in its text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from anybit.serve.job import Job
from anybit.serve.served import Served

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


@dataclass
class Metrics:
    """What requests were like since the start."""

    answers: Counter[tuple[str, int]] = field(default_factory=Counter)  # by path and status
    first: Histogram = field(default_factory=lambda: Histogram(SECONDS))  # seconds to the first token
    gap: Histogram = field(
        default_factory=lambda: Histogram(GAPS)
    )  # mean seconds from token to token of a text
    whole: Histogram = field(default_factory=lambda: Histogram(SECONDS))  # seconds of a text

    def ended(self, job: Job) -> None:
        """Count a text, if a token of it came."""
        times = job.times
        if not times.first:
            return
        self.first.add(times.first - times.asked)
        self.whole.add(times.last - times.asked)
        if job.drawn > 1:
            self.gap.add((times.last - times.first) / (job.drawn - 1))

    def page(self, served: Served) -> str:
        """All figures."""
        runner, scheduler = served.runner, served.runner.scheduler
        counters, blocks = runner.counters, scheduler.blocks
        lines: list[str] = []

        def family(name: str, kind: str, help_: str, values: Iterable[tuple[str, float]]) -> None:
            lines.extend((f"# HELP anybit_{name} {help_}", f"# TYPE anybit_{name} {kind}"))
            lines.extend(f"anybit_{name}{labels} {value:.10g}" for labels, value in values)

        def one(name: str, kind: str, help_: str, value: float) -> None:
            family(name, kind, help_, [("", value)])

        family(
            "requests_total", "counter", "Answers by path and status.",
            [(f'{{path="{path}",status="{status}"}}', n) for (path, status), n in sorted(self.answers.items())],
        )  # fmt: skip
        family(
            "generated_tokens_total", "counter", "Tokens drawn, by the average width that computed them.",
            [(f'{{bits="{bits:.2f}"}}', runner.served[i]) for i, bits in enumerate(served.engine.widths)],
        )  # fmt: skip
        one("prompt_tokens_total", "counter", "Tokens of prompts of ended texts.", counters.prompt_tokens)
        one("cached_tokens_total", "counter", "Those of them found in the cache.", counters.cached_tokens)
        one("draft_tokens_total", "counter", "Tokens of drafts of ended texts.", counters.draft_tokens)
        one("accepted_tokens_total", "counter", "Those of them that were drawn.", counters.accepted_tokens)
        one("rounds_total", "counter", "Rounds of the scheduler.", counters.rounds)
        one("busy_seconds_total", "counter", "Seconds in steps of the engine.", counters.busy_seconds)
        one("preemptions_total", "counter", "Texts that gave up their pages.", scheduler.preemptions)
        one("running_texts", "gauge", "Texts that run.", len(scheduler.running))
        one("waiting_texts", "gauge", "Texts that wait.", scheduler.waiting_count)
        one("cache_pages", "gauge", "Pages of the KV-cache.", blocks.pages)
        one("cache_pages_used", "gauge", "Those of them that texts hold.", blocks.used)
        one("step_seconds", "gauge", "How long the step has run that runs now.", runner.step_seconds)
        one(
            "auto_bits", "gauge", 'Average width of bits "auto" now.', served.engine.widths[runner.auto.level]
        )
        for name, help_, histogram in (
            ("time_to_first_token_seconds", "From a request to its first token.", self.first),
            ("inter_token_seconds", "Mean time from token to token of a text.", self.gap),
            ("text_seconds", "From a request to a text's last token.", self.whole),
        ):
            family(name, "histogram", help_, [])
            lines.extend(histogram.lines(f"anybit_{name}"))
        return "\n".join(lines) + "\n"
