"""Which texts are embedded together: fairness, bounds, and nobody forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybit.serve.errors import Busy
from anybit.serve.schedule.batches import SHORTEST, Asked, Batches

DIMENSIONS = 6
MUCH = 1 << 30  # bytes


def asked(*lengths: int, key: str = "") -> Asked:
    return Asked([np.zeros(length, np.int32) for length in lengths], DIMENSIONS, key)


def taken(batches: Batches) -> list[tuple[Asked, int]]:
    return [(row.asked, row.at) for row in batches.next()]


def test_texts_of_all_requests_fill_a_batch_and_short_ones_wait_for_their_like() -> None:
    batches, first, second = Batches(100, 8, 9, MUCH), asked(4, 20, 12), asked(18, 3, 21, 5)
    batches.add(first)
    batches.add(second)
    assert batches.waiting == 7
    assert taken(batches) == [(first, 1), (second, 0), (first, 2)]  # none is longer than the first's longest
    assert taken(batches) == [(second, 2)]
    assert taken(batches) == [(first, 0), (second, 1)]
    assert taken(batches) == [(second, 3)]
    assert batches.next() == [] and batches.waiting == 0 and not list(batches)


def test_a_batch_is_bounded_by_tokens_and_by_texts_and_one_long_text_is_one() -> None:
    batches = Batches(40, 3, 9, MUCH)
    batches.add(asked(10, 10, 10, 9, 20, 20, 20, 50))
    assert [[len(row.tokens) for row in batches.next()] for _ in range(4)] == [
        [50],
        [20, 20],
        [20, 10],
        [10, 10, 9],
    ]


def test_requests_take_turns_and_keys_before_them() -> None:
    batches, many, late, other = (
        Batches(10, 1, 9, MUCH),
        asked(10, 10, 10),
        asked(10, 10),
        asked(10, key="other"),
    )
    for one in (many, late, other):
        batches.add(one)
    turns = [taken(batches)[0][0] for _ in range(6)]
    assert turns == [many, other, late, many, late, many]


def test_who_has_left_or_failed_is_forgotten() -> None:
    batches, gone, failed, stays = Batches(10, 1, 3, MUCH), asked(10), asked(10, 10), asked(10)
    for one in (gone, failed, stays):
        batches.add(one)
    with pytest.raises(Busy, match="3 requests wait already, and 3 may"):
        batches.add(asked(1))
    gone.done.cancel()
    failed.fail(ValueError("no"))
    batches.forget_ended()
    assert list(batches) == [stays]
    gone.put(0, np.zeros(2, np.float32))  # a row that was on its way: nobody listens
    gone.fail(ValueError("late"))
    assert gone.done.cancelled()


def test_what_waits_is_bounded_by_its_tokens_and_embeddings() -> None:
    small, large = asked(4), asked(30, 30)
    assert (small.bytes, large.bytes) == (4 * (4 + 6), 4 * (60 + 12))
    batches = Batches(30, 1, 9, small.bytes + large.bytes)
    batches.add(large)
    batches.add(small)
    with pytest.raises(Busy, match="that wait take 328 bytes and this one 40, more than the 328 that may be"):
        batches.add(small)
    assert taken(batches) == [(large, 1)] and taken(batches) == [(small, 0)]
    batches.add(asked(4))  # there is room again
    narrow = Batches(30, 1, 9, 1)
    narrow.add(large)  # alone: there is no better time for it
    with pytest.raises(Busy):
        narrow.add(asked(1))


def test_a_key_leaves_places_for_others() -> None:
    batches = Batches(30, 1, 4, MUCH, shared=True)
    for _ in range(2):
        batches.add(asked(4, key="a"))
    with pytest.raises(Busy, match="2 requests of this key wait already, and 2 places are free"):
        batches.add(asked(4, key="a"))
    batches.add(asked(4, key="b"))


def test_rows_come_in_the_order_of_the_request() -> None:
    one = asked(3, 5)
    for at in (1, 0):
        one.put(at, np.full(2, at, np.float32))
    assert [row[0] for row in one.done.result(0)] == [0, 1]


class Counting(Sequence[int]):
    """A text that counts how often one of its like is looked at."""

    looked = 0

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        Counting.looked += 1
        return self.length

    def __getitem__(self, at: Any) -> Any:
        raise NotImplementedError


def test_a_batch_looks_at_few_of_the_texts_that_wait() -> None:
    batches = Batches(2048, 32, 9, MUCH)
    for _ in range(8):
        batches.add(Asked([Counting(1 + i % 60) for i in range(2000)], DIMENSIONS))  # type: ignore[misc]
    Counting.looked = 0
    assert len(batches.next()) == 32 and batches.waiting == 8 * 2000 - 32
    assert Counting.looked < 600  # a few for each text of the batch, and a search for each request


def plainly(batches: Batches) -> list[tuple[Asked, int]]:
    """The next batch, by a look at all texts that wait."""
    first, *others = batches
    others.sort(key=lambda one: one.key == first.key)  # the key whose turn it was is the last
    longest = max(len(first.texts[at]) for at in first.left)
    fits = [
        (one, at)
        for one in (first, *others)
        for at in reversed(one.left)
        if SHORTEST * longest <= len(one.texts[at]) <= longest
    ]
    fits.sort(key=lambda row: -len(row[0].texts[row[1]]))
    return fits[: min(batches.most_texts, max(1, batches.most_tokens // longest))]


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.sampled_from("ab")), max_size=9
    ),
    st.integers(1, 100),
    st.integers(1, 5),
)
def test_every_text_is_taken_once_within_the_bounds(
    requests: list[tuple[list[int], str]], tokens: int, texts: int
) -> None:
    batches = Batches(tokens, texts, 9, MUCH)
    made = [asked(*lengths, key=key) for lengths, key in requests]
    for one in made:
        batches.add(one)
    found = []
    while batches.waiting:
        expected, rows = plainly(batches), batches.next()
        longest = len(rows[0].tokens)
        assert len(rows) == 1 or longest * len(rows) <= tokens
        assert len(rows) <= texts and all(longest / 2 <= len(row.tokens) <= longest for row in rows)
        assert [(row.asked, row.at) for row in rows] == expected
        found += expected
    assert batches.next() == []
    assert len(found) == len({*found}) == sum(len(one.texts) for one in made)
