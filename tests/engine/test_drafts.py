"""Drafts of what follows in a text, and when they are worth their step."""

from __future__ import annotations

import pytest

from anybit.engine.drafts import AGAIN, DOUBT, INDEXED, LENGTHS, MATCH, Drafts, StepTimes, paying


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

    assert paying(0.9, 1, lambda rows: None) == 0
    assert paying(0.95, 1, steps(10, 0)) == LENGTHS[-1]  # all of a step is reading weights
    assert paying(0.5, 1, steps(10, 10)) == 0  # all of it is computing
    assert paying(0.95, 1, steps(10, 10)) == 0
    assert paying(0.0, 1, steps(10, 0)) == 0
    assert 0 < paying(0.7, 1, steps(10, 3)) < LENGTHS[-1]
    assert paying(0.8, 1, steps(10, 4)) > 0 == paying(0.8, 32, steps(10, 9.9))


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
def test_a_draft_that_is_chosen_is_better_than_none(acceptance: float) -> None:
    for each in range(11):
        seconds = {rows: 10 + each * (rows - 1) for rows in range(1, 40)}
        length = paying(acceptance, 1, seconds.get)
        drawn = sum(acceptance**i for i in range(length + 1))
        assert length == 0 or drawn / seconds[1 + length] > 1 / seconds[1]


def test_times_that_pay_no_more_are_doubted_now_and_then() -> None:
    def slow(rows: int) -> float:
        return 10.0 * rows

    drafts = Drafts([*range(40), *range(20)])
    assert drafts.length(1, slow, AGAIN) == 0
    for token in range(20, 40):
        drafts.push(token)
    assert drafts.length(1, slow, AGAIN) == LENGTHS[-1]
    assert drafts.length(1, slow, AGAIN + 1) == drafts.length(2, slow, AGAIN) == 0


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
