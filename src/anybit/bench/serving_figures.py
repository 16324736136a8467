"""Figures of a load: rates, latencies, goodput."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from anybit.bench.load import Answer
from anybit.config import Json

RAMP = 1 / 3  # of a saturated run: before it the texts that run together began together


@dataclass(frozen=True)
class Bounds:
    """What a request must keep to be good."""

    first: float = 2.0  # seconds to the first token,
    per_prompt_token: float = 0.002  # and this much longer for each token of the prompt
    gap: float = 0.1  # mean seconds from token to token

    def keeps(self, answer: Answer) -> bool:
        if answer.status != "ok":
            return False
        late = answer.times[0] - answer.asked > self.first + self.per_prompt_token * answer.prompt
        return not late and answer.times[-1] - answer.times[0] <= self.gap * sum(answer.counts[1:])


def gaps_of(answer: Answer) -> list[float]:
    """Seconds from one event with tokens to the next."""
    return [after - before for before, after in zip(answer.times, answer.times[1:])]


def percentile(values: Sequence[float], share: float) -> float | None:
    """The least value that at least such a share of all is no larger than (nearest rank); None: there are none."""
    return sorted(values)[max(1, math.ceil(share * len(values))) - 1] if values else None


def most_at_once(answers: Sequence[Answer]) -> int:
    """Texts between their first and their last token at the same time, at most."""
    changes = [(a.times[0], 1) for a in answers if a.times] + [(a.times[-1], -1) for a in answers if a.times]
    now = most = 0
    for _, change in sorted(changes, key=lambda c: (c[0], -c[1])):
        now += change
        most = max(most, now)
    return most


def steady_rate(answers: Sequence[Answer], seconds: float, ran_out: bool) -> float:
    """Tokens per second of a saturated run: prompts count when their first token comes, tokens as they come.

    What came in the first third is left out. Where requests ran out, so is what came after the last one was begun. How
    many tokens come with an event: see `Answer.counts`.
    """
    end = min(seconds, max((answer.asked for answer in answers), default=0.0)) if ran_out else seconds
    begin = RAMP * end
    if end <= begin:  # so few that all began at once
        begin, end = 0.0, max((a.times[-1] for a in answers if a.times), default=0.0)
    done = sum(
        answer.prompt * (begin < answer.times[0] <= end)
        + sum(count for at, count in zip(answer.times, answer.counts) if begin < at <= end)
        for answer in answers
        if answer.times
    )
    return done / (end - begin) if end > begin else 0.0


def figures(answers: Sequence[Answer], bounds: Bounds) -> Json:
    """Of requests that came at set times. Rates are over the time from the first request to the last token."""
    count = Counter(answer.status for answer in answers)
    ok = [answer for answer in answers if answer.status == "ok"]
    seconds = max((a.times[-1] for a in answers if a.times), default=0.0) - min(
        (a.asked for a in answers), default=0.0
    )
    rate = 1 / seconds if seconds > 0 else 0.0
    drawn = sum(answer.drawn for answer in answers)
    read = sum(answer.prompt for answer in answers if answer.times)
    first = [answer.times[0] - answer.asked for answer in answers if answer.times]
    gaps = [gap for answer in answers for gap in gaps_of(answer)]
    return {
        "offered": len(answers), "completed": len(ok), "refused": count["refused"], "failed": count["failed"],
        "unfinished": count["unfinished"], "seconds": seconds, "requests_per_second": len(ok) * rate,
        "output_tokens_per_second": drawn * rate, "tokens_per_second": (drawn + read) * rate,
        "first_token_p50": percentile(first, 0.5), "first_token_p99": percentile(first, 0.99),
        "gap_p50": percentile(gaps, 0.5), "gap_p99": percentile(gaps, 0.99),
        "good": sum(map(bounds.keeps, answers)), "goodput": sum(map(bounds.keeps, answers)) * rate,
        "most_at_once": most_at_once(answers), "bits": served_bits(answers),
        "tokens_counted": {
            "by_server": sum(a.drawn for a in answers if a.tokens is not None),
            "by_events": sum(a.drawn for a in answers if a.tokens is None),
        },
        "errors": sorted({answer.error for answer in answers if answer.error})[:3],
    }  # fmt: skip


def offered(answers: Sequence[Answer]) -> Json:
    """The load as it was sent: tokens of prompts and of the answers asked for, until the last request was sent."""
    tokens = sum(answer.prompt + answer.answer for answer in answers)
    last = max(answer.asked for answer in answers)
    return {"offered_tokens": tokens, "tokens_per_second_offered": tokens / last if last else None}


def served_bits(answers: Sequence[Answer]) -> Json | None:
    """Least, mean and most width of the tokens drawn; None: nobody said."""
    said = [(a.bits, a.drawn) for a in answers if a.bits and a.bits.get("mean") is not None and a.drawn]
    if not said:
        return None
    mean = sum(bits["mean"] * drawn for bits, drawn in said) / sum(drawn for _, drawn in said)
    return {
        "min": min(bits["min"] for bits, _ in said),
        "mean": mean,
        "max": max(bits["max"] for bits, _ in said),
    }
