"""Which of some widths serves one that is asked for."""

from __future__ import annotations

import pytest

from anybit.errors import InputError
from anybit.formats.levels import largest

WIDTHS = [2.0098, 3.0149, 3.9101848, 3.9151, 8.0]


@pytest.mark.parametrize("at", range(len(WIDTHS)))
def test_a_width_is_itself_exactly_and_as_it_is_printed(at: int) -> None:
    assert largest(WIDTHS, WIDTHS[at], "it has") == at
    assert largest(WIDTHS, float(f"{WIDTHS[at]:.2f}"), "it has") == at


@pytest.mark.parametrize(
    ("bits", "at"), [(3.0, 0), (3.5, 1), (3.9, 1), (3.914, 2), (4, 3), (7.99, 3), (8.05, 4)]
)
def test_a_width_between_two_is_the_lower(bits: float, at: int) -> None:
    assert largest(WIDTHS, bits, "it has") == at


@pytest.mark.parametrize("bits", [0, 2.0, 2.009, 8.06, float("nan"), float("inf")])
def test_a_width_that_is_not_there_is_refused(bits: float) -> None:
    with pytest.raises(InputError, match=r"it has average widths from 2\.01 to 8\.00 bits, not"):
        largest(WIDTHS, bits, "it has")
