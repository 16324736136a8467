"""The scheduler beside a cache that remembers what was written, and a model whose next token depends on all before."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anybit.engine.pages import pages_of_window
from anybit.errors import InputError
from anybit.serve.errors import Busy
from anybit.serve.schedule.blocks import Blocks, chain
from anybit.serve.schedule.scheduler import Rows, Scheduler, Text
from anybit.serve.schedule.windows import GONE, WindowPages

PAGE = 4
LEVELS = 3


def scheduler(pages: int, window: int = 0, spare: int = 0, **limits: int) -> Scheduler:
    """With pages for windows, if there are some, just enough for rounds of 8 tokens and some more."""
    limits = {"most_running": 32, "most_waiting": 256, **limits}
    running, windows = limits["most_running"], None
    if window:
        windows = WindowPages(window, running * pages_of_window(window, 8, PAGE) + spare, PAGE, running)
    return Scheduler(pages, PAGE, **limits, windows=windows)


def waiting(scheduler: Scheduler) -> list[Text]:
    return [text for queue in scheduler._queues.values() for text in queue]


def next_token(tokens: list[int], level: int) -> int:
    return hash((tuple(tokens), level)) % 50


class Machine:
    """Runs a scheduler's rounds, and checks everything that a cache of pages asks for.

    Args:
        seed: of drafts, right ones and wrong ones; None: texts have none.
    """

    def __init__(self, pages: int, seed: int | None = None, **limits: int) -> None:
        self.scheduler = scheduler(pages, **limits)
        self.chance = None if seed is None else random.Random(seed)
        self.drafted = self.accepted = 0
        self.cache: dict[tuple[int, int], tuple[int, int]] = {}  # (page, place): token and position
        self.window_cache: dict[tuple[int, int], tuple[int, int]] = {}  # the same of blocks with windows
        self.log: list[Any] = []

    def round(self, budget: int = 8) -> bool:
        """One round; whether there was anything to do."""
        for text in self.scheduler.running:
            text.draft = [] if self.chance is None else draft_of(text, self.chance)
        steps = self.scheduler.schedule(budget)
        self.check_pages()
        assert len({step.level for step in steps}) == len(steps)
        texts = [rows.text for step in steps for rows in step.rows]
        assert len(set(texts)) == len(texts)
        assert len(texts) <= self.scheduler.most_running
        for step in steps:
            drawn = {}
            for rows in step.rows:
                text = rows.text
                assert (rows.first, text.level) == (text.done, step.level) and rows.count > 0
                for at, token in enumerate(rows.tokens, rows.first):
                    page = text.pages[at // PAGE]
                    assert self.scheduler.blocks._users[page] == 1
                    assert page not in self.scheduler.blocks._hash_of
                    self.cache[page, at % PAGE] = token, at
                read = [
                    self.cache[text.pages[at // PAGE], at % PAGE] for at in range(rows.first + rows.count)
                ]
                assert read == [(text.tokens[at], at) for at in range(rows.first + rows.count)]
                if isinstance(self.scheduler.windows, WindowPages):
                    self.check_window(rows, self.scheduler.windows)
                if rows.last and text.left:
                    assert len(rows.draft) < text.left
                    drawn[text] = draw(text.tokens, rows.draft, step.level)
                    self.drafted += len(rows.draft)
                    self.accepted += len(drawn[text]) - 1
            self.log.append(
                [(rows.text.arrival, rows.first, rows.count, *rows.text.pages) for rows in step.rows]
            )
            self.scheduler.done(step, drawn)
        self.check_pages()
        return bool(steps)

    def check_window(self, rows: Rows, windows: WindowPages) -> None:
        """Write a text's rows into pages that are its own, and read what their windows reach and the first page."""
        pages, known = rows.text.window_pages, [*rows.text.tokens[: rows.first], *rows.tokens]
        for at, token in enumerate(rows.tokens, rows.first):
            page = pages[at // PAGE]
            assert windows.blocks._users[page] == 1 and page not in windows.blocks._hash_of
            self.window_cache[page, at % PAGE] = token, at
        for at in range(rows.first, len(known)):
            for other in {*range(min(PAGE, at)), *range(max(0, at + 1 - windows.window), at + 1)}:
                assert self.window_cache[pages[other // PAGE], other % PAGE] == (known[other], other)

    def check_windows(self, windows: WindowPages) -> None:
        held, running = [0] * windows.blocks.pages, self.scheduler.running
        for text in running:
            own = [page for page in text.window_pages if page != GONE]
            assert len(own) <= windows.blocks.pages // self.scheduler.most_running
            for page in own:
                held[page] += 1
        assert held == [windows.blocks._users[page] for page in range(len(held))]
        assert windows.blocks.available == held.count(0)

    def check_pages(self) -> None:
        """Every page is free, idle, or in as many hands as it says."""
        if isinstance(self.scheduler.windows, WindowPages):
            self.check_windows(self.scheduler.windows)
        scheduler, held = self.scheduler, [0] * self.scheduler.blocks.pages
        for text in scheduler.running:
            assert len(set(text.pages)) == len(text.pages)
            for page in text.pages:
                held[page] += 1
        assert held == [scheduler.blocks._users[page] for page in range(len(held))]
        assert scheduler.blocks.available == held.count(0)
        for text in waiting(scheduler):
            assert not text.pages and not text.done

    def drain(self, most: int = 5000) -> None:
        for _ in range(most):
            if not self.round():
                break
        assert not self.scheduler.running and not waiting(self.scheduler)
        assert self.scheduler.blocks.available == self.scheduler.blocks.pages
        assert not self.scheduler._coming and not self.scheduler._queues


def draw(tokens: list[int], draft: Sequence[int], level: int) -> list[int]:
    """What is drawn behind some tokens, as far as a draft has computed it."""
    drawn: list[int] = []
    for expected in (*draft, None):
        drawn.append(next_token([*tokens, *drawn], level))
        if drawn[-1] != expected:
            break
    return drawn


def draft_of(text: Text, chance: random.Random) -> list[int]:
    """Tokens that may follow: right ones, and behind them wrong ones."""
    draft: list[int] = []
    for _ in range(chance.randrange(6)):
        draft.append(next_token([*text.tokens, *draft], text.level))
    return [*draft, *[99] * chance.randrange(4)]


def alone(prompt: list[int], most: int, level: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(most):
        tokens.append(next_token(tokens, level))
    return tokens


PROMPTS = st.tuples(st.integers(0, 2), st.integers(1, 30)).map(lambda p: ([p[0]] * 9 + [*range(30)])[: p[1]])
REQUESTS = st.tuples(
    PROMPTS, st.integers(0, 20), st.integers(0, LEVELS - 1), st.sampled_from("abc"), st.booleans()
)
EVENTS = st.lists(
    st.one_of(
        REQUESTS.map(lambda r: ("add", r)),
        st.integers(1, 40).map(lambda budget: ("round", budget)),
        st.integers(0, 20).map(lambda i: ("end", i)),
    ),
    max_size=60,
)


def play(
    events: list[Any], pages: int, running: int, seed: int | None = None, **windows: int
) -> tuple[Machine, list[Text]]:
    """A machine after some events, and the texts that nobody ended."""
    machine, texts = Machine(pages, seed, most_running=running, most_waiting=10, **windows), []
    for kind, what in events:
        if kind == "add":
            text = Text(list(what[0]), *what[1:])
            try:
                machine.scheduler.add([text])
            except (Busy, InputError):
                continue
            texts.append(text)
        elif kind == "end" and what < len(texts):
            machine.scheduler.end(texts.pop(what))
        elif kind == "round":
            machine.round(what)
    machine.drain()
    return machine, texts


@settings(deadline=None, max_examples=150)
@given(
    EVENTS,
    st.integers(3, 20),
    st.integers(1, 5),
    st.none() | st.integers(0, 2**32),
    st.integers(0, 15),
    st.integers(0, 20),
)
def test_every_text_is_what_it_is_alone_and_every_page_comes_back(
    events: list[Any], pages: int, running: int, seed: int | None, window: int, spare: int
) -> None:
    _, texts = play(events, pages, running, seed, window=window, spare=spare)
    for text in texts:
        assert text.tokens == alone(text.tokens[: text.prompt], text.most, text.level)


@settings(deadline=None, max_examples=30)
@given(EVENTS, st.integers(3, 20), st.integers(1, 5))
def test_the_same_events_give_the_same_rounds(events: list[Any], pages: int, running: int) -> None:
    assert play(events, pages, running)[0].log == play(events, pages, running)[0].log


@settings(deadline=None, max_examples=50)
@given(st.lists(REQUESTS, min_size=1, max_size=8), st.integers(0, 2**32), st.integers(13, 20))
def test_levels_that_change_share_no_page_that_is_not_theirs(
    requests: list[Any], seed: int, pages: int
) -> None:
    """The cache's content is checked by token and position; here also by the level that wrote it."""
    machine, chance = Machine(pages, most_running=4), random.Random(seed)
    written: dict[int, set[int]] = {}
    texts = [Text(list(r[0]), *r[1:]) for r in requests]
    machine.scheduler.add(texts)
    for _ in range(3000):
        for text in texts:
            if chance.random() < 0.1:
                machine.scheduler.set_level(text, chance.randrange(LEVELS))
        steps = machine.scheduler.schedule(8)
        if not steps:
            break
        for step in steps:
            drawn = {}
            for rows in step.rows:
                first = rows.first // PAGE
                for at in range(rows.first, rows.first + rows.count):
                    page = rows.text.pages[at // PAGE]
                    written[page] = written.get(page, set()) if at % PAGE else set()
                    written[page].add(step.level)
                if not rows.text.mixed:
                    assert all(written[page] == {step.level} for page in rows.text.pages[:first])
                if rows.last and rows.text.left:
                    drawn[rows.text] = [next_token(rows.text.tokens, 0)]
            machine.scheduler.done(step, drawn)
            machine.check_pages()
    machine.drain()


def test_decoding_goes_first_and_prompts_have_a_budget() -> None:
    machine = Machine(100, most_running=8)
    first = Text([1] * 3, 50, 0)
    machine.scheduler.add([first])
    machine.round(8)
    machine.scheduler.add([Text([2] * 100, 5, 0)])
    for _ in range(5):
        (step,) = machine.scheduler.schedule(8)
        assert [rows.count for rows in step.rows] == [1, 8] and step.rows[0].text is first
        machine.scheduler.done(step, {first: [1]})


def test_drafts_save_rounds_and_never_push_a_text_out() -> None:
    rounds = {}
    for seed in (None, 1):
        machine = Machine(12, seed, most_running=4)
        machine.scheduler.add([Text([i], 10, 0) for i in range(4)])
        rounds[seed] = next(i for i in range(100) if not machine.round())
        assert machine.scheduler.preemptions == 0
    assert machine.accepted > 10 and machine.drafted > machine.accepted
    assert rounds[1] < rounds[None]


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    machine = Machine(100, most_running=8)
    long, short = Text([1] * 200, 1, 0), Text([2] * 8, 1, 0)
    machine.scheduler.add([long, short])
    machine.round(16)
    assert (long.done, short.done) == (8, 0) and len(short.tokens) == 9  # it has ended


def test_a_prompt_that_another_computes_is_waited_for_and_shared() -> None:
    machine = Machine(100, most_running=8)
    texts = [Text([1] * 41, 3, 0) for _ in range(4)]
    other = Text([1] * 41, 3, 1)
    machine.scheduler.add([*texts, other])
    machine.drain()
    assert [text.cached for text in texts] == [0, 40, 40, 40]
    assert other.cached == 0  # another level


def test_a_prompt_goes_on_where_the_window_of_another_is_still_there() -> None:
    """Its end, and any place before it whose window is known; the rest has been written over."""
    for spare, cached in ((50, [0, 40, 20, 40]), (0, [0, 40, 4, 20])):
        machine, made = Machine(100, most_running=1, window=6, spare=spare), []
        for prompt in ([1] * 41, [1] * 41, [1] * 21, [1] * 45):
            text = Text(list(prompt), 0, 0)
            machine.scheduler.add([text])
            machine.drain()
            made.append(text.cached)
        assert made == cached


def test_a_prompt_that_has_just_ended_is_there_as_a_whole() -> None:
    """Though pages with the same content lay idle, of a window that was there no more."""
    for spare in range(8):
        machine = Machine(100, most_running=1, window=13, spare=spare)
        for length in (45, 17, 17, 30, 45, 9, 30):
            for again in (False, True):
                text = Text([1] * length, 0, 0)
                machine.scheduler.add([text])
                machine.drain()
                assert not again or text.cached == (length - 1) // PAGE * PAGE


def test_windows_need_pages_for_all_texts() -> None:
    with pytest.raises(ValueError, match="8 pages for 2 texts with a window of 8 tokens"):
        WindowPages(8, 8, PAGE, 2)
    assert WindowPages(8, 10, PAGE, 2).most == 4


def test_pages_of_a_text_whose_level_changed_are_its_own() -> None:
    def cached(machine: Machine, level: int) -> int | None:
        text = Text([1] * 41, 0, level)
        machine.scheduler.add([text])
        machine.drain()
        return text.cached

    for preempted in (False, True):
        machine = Machine(100)
        text = Text([1] * 41, 3, 0)
        machine.scheduler.add([text])
        machine.round(8)
        machine.scheduler.set_level(text, 1)
        machine.round(8)
        if preempted:  # then all of it is computed at its new level
            machine.scheduler._preempt(text)
        machine.drain()
        assert cached(machine, 1) == (40 if preempted else 0)
        assert cached(machine, 0) == 8


def test_a_text_is_not_let_in_to_be_put_out_at_once() -> None:
    machine = Machine(4)
    machine.scheduler.add([Text([1] * 11, 5, 0), Text([2] * 3, 10, 0)])
    machine.drain()
    assert machine.scheduler.preemptions == 0


def test_prompts_whose_logits_are_wanted_come_from_no_cache() -> None:
    machine = Machine(100)
    machine.scheduler.add([Text([1] * 41, 0, 0)])
    machine.drain()
    text = Text([1] * 41, 0, 0, every=True)
    machine.scheduler.add([text])
    machine.drain()
    assert text.cached == 0


def test_keys_take_turns() -> None:
    machine = Machine(100, most_running=2)
    greedy = [Text([i] * 5, 3, 0, "greedy") for i in range(20)]
    modest = [Text([30 + i] * 5, 3, 0, "modest") for i in range(2)]
    machine.scheduler.add(greedy)
    machine.scheduler.add(modest)
    while any(text.left for text in modest):
        machine.round()
    assert sum(not text.left for text in greedy) <= 3
    machine.drain()


def test_the_latest_text_gives_up_its_pages_and_is_computed_again() -> None:
    machine = Machine(8, most_running=4)
    texts = [Text([i] * 7, 20, 0) for i in range(3)]
    machine.scheduler.add(texts)
    machine.drain()
    assert machine.scheduler.preemptions > 0
    assert [text.tokens for text in texts] == [alone([i] * 7, 20, 0) for i in range(3)]


def test_a_large_text_is_not_passed_forever() -> None:
    machine, serial = Machine(20, most_running=8), 0
    large = Text([1] * 60, 10, 0, "large")
    for round_ in range(400):
        while machine.scheduler.waiting_count < 4:
            machine.scheduler.add([Text([2, serial % 40], 30, 0, "small")])
            serial += 1
        if round_ == 5:
            machine.scheduler.add([large])
        machine.round()
    assert large.left == 0


def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    scheduler = Machine(4).scheduler
    with pytest.raises(
        InputError, match="a prompt of 10 tokens and 7 more are 17, and the KV-cache holds 16"
    ):
        scheduler.add([Text([1], 1, 0), Text([1] * 10, 7, 0)])
    assert not scheduler.waiting_count
    scheduler.add([Text([1] * 10, 6, 0), Text([1] * 16, 0, 0)])
    with pytest.raises(InputError, match="no tokens"):
        scheduler.add([Text([], 1, 0)])


def test_a_full_queue_takes_all_of_a_request_or_nothing() -> None:
    scheduler = Machine(4, most_waiting=3).scheduler
    scheduler.add([Text([1], 1, 0), Text([1], 1, 0)])
    with pytest.raises(Busy, match="2 texts wait already, and 3 may"):
        scheduler.add([Text([1], 1, 0), Text([1], 1, 0)])
    assert scheduler.waiting_count == 2
    with pytest.raises(InputError, match="4 texts at once: at most 3 may wait"):
        scheduler.add([Text([1], 1, 0) for _ in range(4)])


def test_texts_that_wait_for_one_anothers_pages_hold_up_nobody() -> None:
    """All texts of a key are looked at, however many of them wait for the pages that the first one computes."""
    machine = Machine(200, most_running=32)
    alike = [Text([1] * 160, 1, 0) for _ in range(12)]
    machine.scheduler.add(alike)
    other = Text([2] * 9, 1, 0)
    machine.scheduler.add([other])
    machine.round()
    assert machine.scheduler.running == [alike[0], other]
    machine.drain()
    assert [text.cached for text in alike] == [0] + [156] * 11


def test_a_key_leaves_places_for_others() -> None:
    scheduler = Machine(64, most_waiting=8, shared=True).scheduler
    scheduler.add([Text([1], 1, 0, "a") for _ in range(4)])
    with pytest.raises(Busy, match="4 texts of this key wait already, and 4 places are free"):
        scheduler.add([Text([1], 1, 0, "a")])
    scheduler.add([Text([1], 1, 0, "b"), Text([1], 1, 0, "b")])
    with pytest.raises(Busy, match="2 texts of this key wait already, and 2 places are free"):
        scheduler.add([Text([1], 1, 0, "b")])
    scheduler.add([Text([1], 1, 0, "c")])
    alone = Machine(64, most_waiting=8).scheduler
    alone.add([Text([1], 1, 0, "a") for _ in range(8)])


def test_pages_that_were_not_used_for_long_go_first_and_ends_before_beginnings() -> None:
    blocks, keys = Blocks(4), chain(b"", [*range(16)], PAGE)
    pages = blocks.take(4)
    for page, key in zip(pages, keys):
        blocks.publish(page, key)
    blocks.release(pages[:])
    again = blocks.share(keys[:1])
    blocks.release(again)
    taken = blocks.take(2)
    assert blocks.matching(keys) == 2 and taken == [3, 2]
    assert chain(b"", [*range(16)], PAGE, keys[:2]) == keys
    assert chain(b"x", [*range(16)], PAGE)[0] != keys[0]
