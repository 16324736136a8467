"""Drafts of what follows in a text, and when they are worth their step."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from anybit.engine.drafts import (
    AGAIN,
    DOUBT,
    HOPE,
    INDEXED,
    LENGTHS,
    MATCH,
    Drafts,
    NarrowDrafts,
    Seconds,
    StepTimes,
    Worth,
    narrow_level,
    paying,
)


def drafting_narrowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all texts that are wider than the narrow level have drafts of it alone, of 0 to 7 tokens by chance."""
    chance = random.Random(4)

    def worth(self: NarrowDrafts, rows: int, seconds: Any, each: float | None) -> Worth:
        return Worth(0, 0) if each is None else Worth(math.inf, chance.randrange(8))

    monkeypatch.setattr(NarrowDrafts, "worth", worth)
    monkeypatch.setattr(Drafts, "draft", lambda self, length: [])


def test_what_followed_the_last_time_is_drafted() -> None:
    drafts = Drafts([1, 2, 3, 4, 5, 6, 7, 9, 1])
    drafts.push(2)
    assert drafts.draft(4) == []
    drafts.push(3)
    assert drafts.draft(4) == [4, 5, 6, 7] and drafts.draft(2) == [4, 5] and drafts.draft(0) == []
    drafts.push(8)
    assert drafts.draft(4) == []
    for token in (1, 2, 3):
        drafts.push(token)
    assert drafts.draft(3) == [8, 1, 2]  # of several times the last


def test_tokens_that_come_again_and_again() -> None:
    drafts = Drafts([5] * MATCH)
    assert drafts.draft(3) == Drafts([]).draft(3) == []
    drafts.push(5)
    assert drafts.draft(3) == [5]


def test_of_a_long_prompt_the_end_is_looked_through() -> None:
    drafts = Drafts([*range(2 * INDEXED)])
    for token in range(3):
        drafts.push(token)
    assert drafts.draft(3) == []
    for token in range(INDEXED, INDEXED + 3):
        drafts.push(token)
    assert drafts.draft(2) == [INDEXED + 3, INDEXED + 4]


def test_acceptance_follows_what_is_drawn_though_nothing_is_computed() -> None:
    copied, other = Drafts([*range(40)]), Drafts([*range(40)])
    for token in (0, 1, 2):
        copied.push(token)
        other.push(token)
    assert copied.acceptance == other.acceptance == DOUBT
    for token in range(3, 30):
        copied.push(token)
    assert copied.acceptance > 0.95
    other.push(77)
    assert other.acceptance < DOUBT


def test_drafts_are_as_long_as_their_steps_pay() -> None:
    def steps(one: float, each: float):
        return lambda rows: one + each * (rows - 1)

    def length(acceptance: float, rows: int, seconds: Seconds, each: float = 0.0) -> int:
        return paying(acceptance, rows, seconds, each).length

    assert length(0.9, 1, lambda rows: None) == 0
    assert length(0.95, 1, steps(10, 0)) == LENGTHS[-1]  # all of a step is reading weights
    assert length(0.5, 1, steps(10, 10)) == 0  # all of it is computing
    assert length(0.95, 1, steps(10, 10)) == 0
    assert length(0.0, 1, steps(10, 0)) == 0
    assert 0 < length(0.7, 1, steps(10, 3)) < LENGTHS[-1]
    assert length(0.8, 1, steps(10, 4)) > 0 == length(0.8, 32, steps(10, 9.9))
    assert length(0.8, 1, steps(10, 2), each=4) == 1 < length(0.8, 1, steps(10, 2))
    assert length(0.9, 1, steps(10, 2), each=8) == 0


@pytest.mark.parametrize("narrow", [0.0, 2.0, 5.0])
@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
def test_a_draft_that_is_chosen_is_better_than_none(acceptance: float, narrow: float) -> None:
    for each in range(11):
        seconds = {rows: 10 + each * (rows - 1) for rows in range(1, 40)}
        rate, length = paying(acceptance, 1, seconds.get, narrow)
        drawn = sum(acceptance**i for i in range(length + 1))
        if length:
            assert (
                rate == pytest.approx(drawn / (seconds[1 + length] + length * narrow))
                and rate > 1 / seconds[1]
            )


def test_times_that_pay_no_more_are_doubted_now_and_then() -> None:
    def slow(rows: int) -> float:
        return 10.0 * rows

    drafts = Drafts([*range(40), *range(20)])
    assert drafts.worth(1, slow, AGAIN) == (0, 0)
    for token in range(20, 40):
        drafts.push(token)
    assert drafts.worth(1, slow, AGAIN) == (math.inf, LENGTHS[-1])
    assert drafts.worth(1, slow, AGAIN + 1) == drafts.worth(2, slow, AGAIN) == (0, 0)


def test_narrow_drafts_stop_where_they_are_wrong_and_are_asked_again_now_and_then() -> None:
    """One text of which the narrow width foretells nothing: it has a few drafts at first, then one in `AGAIN`."""
    narrow, drafted = NarrowDrafts(), []
    assert narrow.acceptance == HOPE and narrow.worth(1, {1: 10.0, 2: 11.0}.get, None) == (0, 0)
    for step in range(10 * AGAIN):
        found = narrow.worth(1, lambda rows: 10.0 + rows, 3.0)
        if found.length:
            drafted.append(step)
            narrow.draft = [7] * found.length
        narrow.compare([5])
        assert narrow.draft == []
    assert drafted[0] == 0 and 10 <= len(drafted) < 25 and set(np.diff(drafted[-5:])) == {AGAIN}
    assert narrow.drafted >= len(drafted)
    assert all(narrow.worth(2, lambda rows: 10.0 + rows, 3.0) == (0, 0) for _ in range(2 * AGAIN))
    assert narrow.worth(1, lambda rows: 10.0 + rows, 3.0) == (math.inf, LENGTHS[0])  # alone again
    known = narrow.acceptance
    narrow.fail()
    assert narrow.acceptance < known
    before = narrow.drafted
    narrow.draft = [1, 2, 3]
    narrow.compare([1, 2, 3, 4])
    narrow.draft = [1, 2, 3]
    narrow.compare([1, 9])
    assert narrow.drafted == before + 6


def test_drafts_are_drawn_at_about_three_bits() -> None:
    assert narrow_level([2.0, 2.5, 3.0, 3.1, 8.0]) == 2 and narrow_level([2.04, 2.96, 4.0]) == 1
    assert narrow_level([4.0, 8.0]) == narrow_level([16.0]) == narrow_level([3.0]) == 0


def test_times_are_means_of_steps_of_about_one_size() -> None:
    times = StepTimes()
    assert times.seconds(1) is None
    times.measure(1, 1.0)
    assert times.seconds(8) == 1.0
    times.measure(8, 3.0)
    for _ in range(100):
        times.measure(7, 2.0)
    assert times.seconds(1) == 1.0 and times.steps == 102
    assert times.seconds(5) == times.seconds(30) == pytest.approx(2.0, rel=1e-3)
