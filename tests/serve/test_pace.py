"""Widths for a latency and for a load, from times that are given."""

from __future__ import annotations

import pytest

from anybit.serve.run.pace import CALM, Auto, Pace, stops

WIDTHS = [2.0, 3.0, 4.0, 6.0, 8.0]


def test_times_between_levels_lie_on_a_line() -> None:
    pace = Pace(WIDTHS)
    assert pace.step(0, 1) is None and pace.budget(1.0, 16, 256) == 256
    pace.measure(4, 1, 0, 0.016)
    assert pace.step(0, 1) == pytest.approx(0.004)  # one alone: by bits
    pace.measure(0, 1, 0, 0.006)
    assert pace.step(2, 1) == pytest.approx(0.006 + 0.010 / 3)
    pace.measure(2, 1, 0, 0.007)
    assert pace.step(1, 1) == pytest.approx(0.0065)


def test_steps_of_many_texts_say_nothing_of_one() -> None:
    pace = Pace(WIDTHS)
    for texts, seconds in ((1, 0.01), (24, 0.2)):
        pace.measure(4, texts, 0, seconds)
    assert pace.step(4, 1) == 0.01 and pace.step(4, 32) == 0.2
    assert pace.step(4, 4) == 0.01  # the nearest


def test_a_prompt_is_what_a_step_takes_longer() -> None:
    pace = Pace(WIDTHS)
    pace.measure(4, 2, 0, 0.01)
    pace.measure(4, 2, 50, 0.11)
    assert pace.budget(0.1, 16, 256) == 50
    assert pace.budget(0.001, 16, 256) == 16 and pace.budget(9.0, 16, 256) == 256
    pace.measure(4, 2, 50, 0.005)  # faster than without: chance
    assert pace.budget(0.1, 16, 256) == 50


def test_a_latency_takes_the_widest_level_that_keeps_it() -> None:
    pace = Pace(WIDTHS)
    assert pace.within(0.01, (4, 1), None, [1, 2, 3, 4]) == 4  # nothing was measured: as it is
    for level in range(5):
        pace.measure(level, 1, 0, 0.002 * (level + 1))
    assert pace.within(0.0081, (4, 1), None, [1, 2, 3, 4]) == 3
    assert pace.within(0.0001, (4, 1), None, [1, 2, 3, 4]) == 1
    # What other texts cost in the same rounds leaves less for this one.
    assert pace.within(0.0121, (4, 1), 0.016, [1, 2, 3, 4]) == 2


def test_auto_goes_down_at_once_and_up_slowly() -> None:
    auto = Auto([1, 2, 3, 4])
    assert auto.update(0.0) == auto.update(0.24) == 4
    assert auto.update(0.5) == 2 and auto.update(1.0) == auto.update(1.5) == 1
    levels = [auto.update(0.1) for _ in range(3 * CALM)]
    assert levels == [1] * (CALM - 1) + [2] * CALM + [3] * CALM + [4]
    assert auto.update(0.9) == 1
    for _ in range(CALM - 1):
        auto.update(0.1)
    assert auto.update(0.8) == 1 and auto.update(0.1) == 1  # calm is counted anew
    assert Auto([7]).update(0.9) == 7


def test_auto_is_the_highest_at_once_where_a_text_is_alone() -> None:
    auto = Auto([1, 2, 3, 4])
    assert [auto.update(load) for load in (0.9, 0.1, 0.0, 0.1)] == [1, 1, 4, 4]


def test_a_step_without_texts_has_no_time() -> None:
    pace = Pace(WIDTHS)
    pace.measure(4, 1, 0, 0.016)
    with pytest.raises(ValueError, match="a step of 0 tokens has no size"):
        pace.step(4, 0)


def test_stops_are_levels_evenly_apart() -> None:
    assert stops(WIDTHS, 3.0, 3) == [1, 3, 4] or stops(WIDTHS, 3.0, 3) == [1, 2, 4]
    assert stops(WIDTHS, 0, 100) == [0, 1, 2, 3, 4]
    assert stops(WIDTHS, 9, 4) == [4] and stops([16.0], 3.0) == [0]
