"""The runner on a tiny model: a text is the same alone and in any company."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anybit import Engine, Sampling
from anybit.engine.drafts import Drafts, NarrowDrafts, Worth, narrow_level
from anybit.engine.engine import Batch
from anybit.engine.text import check_tokenizer
from anybit.errors import InputError
from anybit.kernels import cpu
from anybit.serve import server
from anybit.serve.chat.constraint import Constraints
from anybit.serve.errors import Busy, Closing
from anybit.serve.run.job import Job, Progress, jobs_of
from anybit.serve.run.request import Request
from anybit.serve.run.runner import Limits, Runner
from anybit.serve.schedule.windows import WindowPages
from anybit.serve.settings import Settings
from tests.engine.models import saved_model
from tests.engine.test_drafts import drafting_narrowly

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu.available(), reason="the native extension is not built"),
]
PATIENCE = 60
PROMPT = [5, 9, 70, 33]


@pytest.fixture
def start(engine: Engine) -> Iterator[Callable[..., Runner]]:
    """Makes runners, which end with the test."""
    made = []

    def make(begin: bool = True, **limits: Any) -> Runner:
        runner = Runner(engine, Limits(**{"pages": 64, **limits}))
        if begin:
            runner.start()
        made.append(runner)
        return runner

    yield make
    for runner in made:
        runner.close(0)
        assert runner.scheduler.blocks.available == runner.scheduler.blocks.pages
        assert not runner._jobs and not runner.scheduler.running and not runner.scheduler.waiting_count


class Heard:
    """What a request's texts have said so far."""

    def __init__(self, runner: Runner, request: Request) -> None:
        self._said: queue.SimpleQueue[tuple[int, Progress]] = queue.SimpleQueue()
        self.texts = [""] * request.n
        self.tokens: list[list[int]] = [[] for _ in range(request.n)]
        self.prompt: list[Any] = []
        self.finish: list[str | None] = [None] * request.n
        self.errors: list[Exception | None] = [None] * request.n
        self.jobs = jobs_of(
            runner.engine, runner.engine.context, request, lambda i, p: self._said.put((i, p))
        )
        runner.submit(self.jobs)

    def next(self) -> Progress:
        at, progress = self._said.get(timeout=PATIENCE)
        assert self.finish[at] is None
        self.texts[at] += progress.text
        self.prompt += progress.prompt
        if progress.drawn is not None:
            self.tokens[at].append(progress.drawn.token)
        self.finish[at], self.errors[at] = progress.finish, progress.error
        return progress

    def all(self) -> Heard:
        while None in self.finish:
            self.next()
        return self


def requests(engine: Engine) -> list[Request]:
    """Of all kinds: greedy and drawn, long and short prompts, several widths, a common beginning."""
    random = np.random.default_rng(0)
    common = random.integers(3, 250, 64).tolist()
    made = [Request([7, 8 + i], 80, ignores_ends=True) for i in range(3)]  # grow until pages run out
    for i in range(10):
        own = random.integers(3, 250, int(random.integers(1, 20))).tolist()
        sampling = Sampling() if i % 2 else Sampling(temperature=1.0, top_p=0.9, seed=i, presence_penalty=0.5)
        tokens = (common if i % 3 else []) + own
        bits = engine.widths[(0, len(engine.widths) // 2, -1)[i % 3]]
        made.append(
            Request(tokens, 5 + 3 * i, sampling=sampling, bits=bits, ignores_ends=True, key=f"{i % 2}")
        )
    return made


def drafting(monkeypatch: pytest.MonkeyPatch, draft: Callable[[Drafts, int], list[int]]) -> None:
    """Let every text have these drafts, and no others."""
    monkeypatch.setattr(Drafts, "draft", draft)
    monkeypatch.setattr(NarrowDrafts, "worth", lambda self, *_: Worth(0, 0))


# ---- the same text


def test_a_text_alone_is_the_engines(engine: Engine, start: Callable[..., Runner]) -> None:
    runner = start()
    for request in requests(engine)[:5]:
        assert not isinstance(request.bits, str)
        heard = Heard(runner, request).all()
        ends, Engine.ends = Engine.ends, property(lambda self: set())  # type: ignore[assignment]
        try:
            alone = engine.generate(request.tokens, request.most or 0, request.sampling, bits=request.bits)
        finally:
            Engine.ends = ends  # type: ignore[method-assign]
        assert heard.tokens == [alone.tokens] and heard.texts == [alone.text]


@pytest.mark.parametrize("limits", [{}, {"running": 2}, {"pages": 6}, {"pages": 5, "running": 8}], ids=str)
def test_a_text_is_the_same_in_any_company(
    engine: Engine, start: Callable[..., Runner], limits: dict[str, int]
) -> None:
    asked = [replace(request, speculates=False) for request in requests(engine)]  # drafts hang on the clock
    calm = start(running=1)
    alone = [Heard(calm, request).all() for request in asked]
    calm.close(0)
    crowded = start(begin=False, **limits)
    together = [Heard(crowded, request) for request in asked]
    crowded.start()
    for one, other in zip(alone, together):
        assert other.all().tokens == one.tokens and other.texts == one.texts
        assert other.finish == ["length"]
    if limits.get("pages") == 5:
        assert crowded.scheduler.preemptions > 0
    if not limits:
        assert crowded.counters.cached_tokens > 0
    speculating = start(begin=False, **limits)
    together = [Heard(speculating, request) for request in requests(engine)]
    speculating.start()
    assert [heard.all().tokens for heard in together] == [one.tokens for one in alone]


@pytest.mark.parametrize("kv_bits", [8, 4])
def test_so_it_is_where_keys_hang_on_a_texts_first_page(anybit_artifact: Path, kv_bits: int) -> None:
    """Caches of codes: what keys are less is kept with the first page, which texts share and give up."""
    engine = Engine(anybit_artifact, threads=1, kv_bits=kv_bits)
    asked, found = [replace(request, speculates=False) for request in requests(engine)], []
    for limits in (Limits(64, running=1), Limits(64), Limits(5, running=8)):
        runner = Runner(engine, limits)
        together = [Heard(runner, request) for request in asked]
        runner.start()
        found.append([heard.all().tokens for heard in together])
        runner.close(0)
    assert found[0] == found[1] == found[2]
    assert runner.scheduler.preemptions > 0


@pytest.mark.parametrize("kv_bits", [16, 8, 4])
@pytest.mark.parametrize("family", ["qwen2-windows", "mistral"])
def test_so_it_is_where_windows_have_pages_of_their_own(
    family: str, kv_bits: int, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In some blocks or in all of them; prompts begin alike, go far beyond the window, and are asked for again."""
    saved_model(tmp_path, tokenizer, family, 1024)
    engine, chance = Engine(tmp_path, threads=1, kv_bits=kv_bits), np.random.default_rng(0)
    common = chance.integers(3, len(tokenizer), 400).tolist()
    prompts = [
        common[:length] + chance.integers(3, len(tokenizer), 5).tolist() for length in (30, 90, 200, 400)
    ]
    asked = [Request([7, 8 + i], 200, ignores_ends=True) for i in range(4)]  # grow until pages run out
    asked += [Request(prompt, 50, ignores_ends=True) for prompt in [*prompts, *prompts[::-1]]]
    found, cached = [], []
    for pages, running, own in ((120, 1, 0), (120, 1, 13), (120, 4, 70), (18, 4, 104)):
        runner = Runner(engine, Limits(pages, running, window_pages=own))
        together = [Heard(runner, request) for request in asked]
        runner.start()
        found.append([heard.all().tokens for heard in together])
        runner.close(0)
        cached.append(runner.counters.cached_tokens)
        assert runner.scheduler.blocks.available == pages
        if isinstance(runner.scheduler.windows, WindowPages):
            assert runner.scheduler.windows.blocks.available == own
    assert runner.scheduler.preemptions > 0
    assert found[0] == found[1] == found[2] == found[3]
    assert cached[0] > cached[1] > 0 < cached[2]
    drafting(monkeypatch, lambda self, length: [9, 8, 7])  # wrong ones
    runner = Runner(engine, Limits(120, 4, window_pages=70))
    together = [Heard(runner, request) for request in asked]
    gone = Heard(runner, replace(asked[7], most=400))
    runner.start()
    for _ in range(5):
        gone.next()
    runner.cancel(gone.jobs[0])
    assert [heard.all().tokens for heard in together] == found[0]
    runner.close(0)
    assert runner.counters.draft_tokens > 0
    assert (
        isinstance(runner.scheduler.windows, WindowPages) and runner.scheduler.windows.blocks.available == 70
    )
    drafting_narrowly(monkeypatch)
    # The same width, drawn beforehand.
    monkeypatch.setattr("anybit.serve.run.drafting.narrow_level", lambda widths: -1)
    runner = Runner(engine, Limits(120, 4, window_pages=70))
    together = [Heard(runner, request) for request in asked]
    runner.start()
    assert [heard.all().tokens for heard in together] == found[0]
    runner.close(0)
    assert runner.counters.accepted_tokens == runner.counters.draft_tokens > 100


def test_memory_goes_to_windows_where_more_fits() -> None:
    """Gemma 3 1B's shape: 22 of 26 blocks look back 512 tokens; Mistral's 32 all look back 4096."""

    def pages(window: int, share: float, memory: float, context: int) -> tuple[int, int]:
        bytes_ = {"page_tokens": 32, "page_bytes": 2**20, "window_page_bytes": int(share * 2**20)}
        model = SimpleNamespace(context=context, together=True, window=window, **bytes_)
        found = server.limits(model, Settings("model", kv_bytes=int(memory * 2**20), running=16))  # type: ignore[arg-type]
        own = bytes_["window_page_bytes"] if found.window_pages else 0
        assert found.pages * (2**20 - own) + found.window_pages * own <= memory * 2**20
        return found.pages, found.window_pages

    own = 2 * 16 * (1 + (512 + 256 + 31) // 32 + 1)
    every, more = pages(512, 22 / 26, 4000, 32768)
    assert every == 16 * 1024 and more > 2 * own  # all that 16 texts can have, 4000 without; and what is left
    assert pages(512, 22 / 26, 1500, 32768)[1] == own
    assert pages(512, 22 / 26, 500, 32768) == (500, 0)  # too little for 16 windows
    assert pages(512, 22 / 26, 4000, 600) == (16 * 19, 0)  # there is memory for all
    assert pages(512, 1 / 26, 9000, 32768) == (9000, 0)  # one block of 26 gains hardly anything
    assert pages(4096, 1.0, 5000, 32768) == (16 * 1024, 5000)
    assert pages(0, 0.0, 4000, 32768) == (4000, 0)


@pytest.mark.parametrize("kv_bits", [16, 4])
def test_a_text_is_the_same_with_drafts(
    anybit_artifact: Path, kv_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is drafted: right tokens, wrong ones, across pages and the first page's end, greedy and at random."""
    engine = Engine(anybit_artifact, threads=1, kv_bits=kv_bits)
    asked = requests(engine)
    plain = Runner(engine, Limits(64, running=1))
    plain.start()
    alone = [Heard(plain, replace(request, speculates=False)).all() for request in asked]
    plain.close(0)
    assert plain.counters.draft_tokens == 0
    known = [[*r.tokens, *heard.tokens[0]] for r, heard in zip(asked, alone)]
    chance = random.Random(2)

    def draft(self: Drafts, length: int) -> list[int]:
        """Of what will be drawn some, then something else."""
        text = next(own for own in known if own[: len(self._tokens)] == self._tokens)
        return [*text[len(self._tokens) :][: chance.randrange(6)], 17]

    drafting(monkeypatch, draft)
    for limits in (Limits(64, running=1), Limits(64), Limits(6, running=8)):
        runner = Runner(engine, limits)
        together = [Heard(runner, request) for request in asked]
        runner.start()
        for one, other in zip(alone, together):
            assert other.all().tokens == one.tokens and other.texts == one.texts
        runner.close(0)
        assert 20 < runner.counters.accepted_tokens < runner.counters.draft_tokens
        assert runner.counters.accepted_tokens == sum(job.accepted for o in together for job in o.jobs)


@pytest.mark.parametrize("kv_bits", [16, 8, 4])
def test_a_text_is_the_same_with_drafts_at_a_narrower_width(
    anybit_artifact: Path, kv_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and beside others at several widths, where pages run out, too, and with a form."""
    engine = Engine(anybit_artifact, threads=1, kv_bits=kv_bits)
    forms = Constraints(check_tokenizer(engine.tokenizer), engine.vocabulary, engine.ends)
    form = forms.compile("regex", "(ab|ba){3,20}")
    asked = [
        *requests(engine),
        Request([5], 30, constraint=form),
        Request([6], 30, sampling=Sampling(logprobs=2)),
    ]
    plain = Runner(engine, Limits(64, running=1))
    plain.start()
    alone = [Heard(plain, replace(request, speculates=False)).all() for request in asked]
    plain.close(0)
    drafting_narrowly(monkeypatch)
    for limits in (Limits(64, running=1), Limits(64), Limits(6, running=8)):
        runner = Runner(engine, limits)
        together = [Heard(runner, request) for request in asked]
        runner.start()
        for one, other in zip(alone, together):
            assert (
                other.all().tokens == one.tokens and other.texts == one.texts and other.finish == one.finish
            )
        runner.close(0)
        assert 20 < runner.counters.accepted_tokens < runner.counters.draft_tokens
        assert runner.scheduler.blocks.available == limits.pages
        for other in together:
            (job,) = other.jobs
            assert job.text.tokens == [*job.request.tokens, *other.tokens[0]]
            assert job.drafted == 0 or job.text.level > narrow_level(engine.widths)


def test_narrow_drafts_that_fail_end_no_text(
    engine: Engine, start: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, step, request = start(), Engine.step, Request(PROMPT, 20, ignores_ends=True)
    alone = Heard(runner, replace(request, speculates=False)).all()
    failed = []

    def fails(self: Engine, batch: Batch, level: int) -> Any:
        if level == narrow_level(engine.widths) and batch.positions[0] % 2:
            failed.append(batch)
            raise InputError("NaN")
        return step(self, batch, level)

    monkeypatch.setattr(Engine, "step", fails)
    drafting_narrowly(monkeypatch)
    together = [Heard(runner, request) for _ in range(3)]
    assert all(heard.all().tokens == alone.tokens for heard in together) and failed


def test_a_draft_that_fails_ends_no_text(
    engine: Engine, start: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, step, request = start(), Engine.step, Request(PROMPT, 20, ignores_ends=True)
    alone = Heard(runner, replace(request, speculates=False)).all()

    def fails(self: Engine, batch: Batch, level: int) -> Any:
        if 17 in batch.tokens:
            raise InputError("NaN")
        return step(self, batch, level)

    monkeypatch.setattr(Engine, "step", fails)
    drafting(monkeypatch, lambda self, length: [17])
    together = [Heard(runner, request) for _ in range(3)]
    assert all(heard.all().tokens == alone.tokens for heard in together)


def test_what_was_drawn_before_an_error_is_told(
    engine: Engine, start: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, request = start(), Request(PROMPT, 20, ignores_ends=True)
    alone = Heard(runner, replace(request, speculates=False)).all().tokens[0]
    draw = Job.draw

    def fails(self: Job, logits: Any, level: int, before: int = 0) -> Any:
        if before == 2:
            raise InputError("no token can be drawn")
        return draw(self, logits, level, before)

    monkeypatch.setattr(Job, "draw", fails)
    drafting(monkeypatch, lambda self, length: alone[len(self._tokens) - len(PROMPT) :][:4])
    heard = Heard(runner, request).all()
    assert heard.tokens[0] == alone[:3] and heard.finish == ["error"]


def test_a_width_is_looked_at_again_however_many_tokens_a_round_draws(engine: Engine) -> None:
    (job,) = jobs_of(engine, engine.context, Request(PROMPT, 40), lambda _, __: None)
    due = []
    for drawn in (1, 9, 17, 20, 25):
        job.levels[0] = drawn
        due.append(job.is_due())
    assert due == [True, True, True, False, True]
    job.end_round(7, [9] * 8)
    time.sleep(0.02)
    job.end_round(7, [9] * 8)
    assert job.gap is not None and 0.002 < job.gap < 0.02 and (job.drafted, job.accepted) == (14, 14)


def test_drafts_end_where_the_text_does(engine: Engine, start: Callable[..., Runner]) -> None:
    runner = start()
    whole = Heard(runner, Request([5, 9, 70], 40, ignores_ends=True)).all()
    for most in (1, 2, 7):
        cut = Heard(runner, Request([5, 9, 70, *whole.tokens[0], 5, 9, 70], most, ignores_ends=True)).all()
        assert len(cut.tokens[0]) == most and cut.finish == ["length"]
    forms = Constraints(check_tokenizer(engine.tokenizer), engine.vocabulary, engine.ends)
    form = forms.compile("regex", "(ab){3,20}")
    kept = Heard(runner, Request([5], 30, constraint=form)).all()
    plain = Heard(runner, Request([5], 30, constraint=form, speculates=False)).all()
    assert kept.tokens == plain.tokens and kept.jobs[0].drafts is not None


def test_several_texts_of_one_prompt(engine: Engine, start: Callable[..., Runner]) -> None:
    runner = start()
    sampling = Sampling(temperature=1.0, seed=7)
    heard = Heard(runner, Request([5] * 40, 12, n=3, sampling=sampling, ignores_ends=True)).all()
    assert len({*map(tuple, heard.tokens)}) == 3
    assert [job.text.cached for job in heard.jobs] == [0, 32, 32]
    for i in range(3):
        own = Sampling(temperature=1.0, seed=7 + i)
        alone = Heard(runner, Request([5] * 40, 12, sampling=own, ignores_ends=True)).all()
        assert alone.tokens[0] == heard.tokens[i]


def test_stop_strings_ends_and_lengths(engine: Engine, start: Callable[..., Runner]) -> None:
    runner = start()
    whole = Heard(runner, Request([5, 9, 70], 30, ignores_ends=True)).all()
    stop = whole.texts[0][4:6]
    cut = Heard(runner, Request([5, 9, 70], 30, stop=(stop,), ignores_ends=True)).all()
    assert cut.texts[0] == whole.texts[0][: whole.texts[0].index(stop)] and cut.finish == ["stop"]
    banned = {token: -np.inf for token in range(engine.vocabulary) if token not in engine.ends}
    ended = Heard(runner, Request([5, 9], 30, sampling=Sampling(logit_bias=banned))).all()
    assert ended.tokens == [[*engine.ends]] and ended.finish == ["stop"] and ended.texts == [""]


def test_log_probabilities_of_the_prompt(engine: Engine, start: Callable[..., Runner]) -> None:
    runner = start(pages=8)
    tokens = np.random.default_rng(1).integers(3, 250, 90).tolist()
    request = Request(tokens, 1, sampling=Sampling(logprobs=2), every=True)
    for _ in range(2):  # the second time pages are there, and none is used
        heard = Heard(runner, request).all()
        rows = engine_logits(engine, tokens)
        assert [drawn.token for drawn in heard.prompt] == tokens[1:]
        found = [drawn.logprob for drawn in heard.prompt]
        assert np.allclose(found, [rows[i, tokens[i + 1]] for i in range(89)], atol=1e-5)
        assert [t for t, _ in heard.prompt[3].top] == np.argsort(-rows[3])[:2].tolist()
    none = Heard(runner, Request(tokens, 0, sampling=Sampling(logprobs=2), every=True)).all()
    assert none.tokens == [[]] and none.finish == ["length"] and len(none.prompt) == 89


def engine_logits(engine: Engine, tokens: list[int]) -> Any:
    rows, one_text = np.arange(len(tokens), dtype=np.int32), np.zeros(len(tokens), np.int32)
    batch = Batch(np.array(tokens, np.int32), rows, one_text, np.arange(4, 8, dtype=np.int32)[None], rows)
    logits = engine.step(batch, len(engine.widths) - 1).astype(np.float64)
    return (
        logits
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        - logits.max(1, keepdims=True)
    )


def test_a_form_is_kept_whatever_is_drawn(engine: Engine, start: Callable[..., Runner]) -> None:
    runner = start()
    forms = Constraints(check_tokenizer(engine.tokenizer), engine.vocabulary, engine.ends)
    form = forms.compile("regex", "(ab|cd){3}[0-9]")
    asked = Request([5], 30, n=4, sampling=Sampling(temperature=2.0, seed=1, logprobs=1), constraint=form)
    heard = Heard(runner, asked).all()
    for text, tokens, finish in zip(heard.texts, heard.tokens, heard.finish):
        assert len(text) == 7 and text[6].isdigit() and set(text[:6]) <= set("abcd")
        assert finish == "stop" and 7 <= len(tokens) <= 8
    assert len({*heard.texts}) > 1


# ---- widths


def test_a_width_is_served_as_asked(engine: Engine, start: Callable[..., Runner]) -> None:
    runner = start()
    for level in (0, len(engine.widths) - 1):
        heard = Heard(runner, Request([5] * 9, 6, bits=engine.widths[level], ignores_ends=True)).all()
        assert heard.jobs[0].levels == {level: 6} and runner.served[level] == 6


def test_load_lowers_auto_and_raises_it_again(engine: Engine, start: Callable[..., Runner]) -> None:
    runner = start(begin=False, running=4, auto_bits=2.0)
    widest = len(engine.widths) - 1
    fixed = engine.widths[widest]
    auto = Heard(
        runner, Request([5] * 9, 40, bits="auto", ignores_ends=True)
    )  # the first: others run beside it
    crowd = [Heard(runner, Request([6] * 9, 40, bits=fixed, ignores_ends=True)) for _ in range(8)]
    runner.start()
    auto.all()
    assert min(auto.jobs[0].levels) < widest
    for heard in crowd:
        heard.all()
        assert heard.jobs[0].levels == {widest: 40}
    calm = Heard(runner, Request([5] * 9, 100, bits="auto", ignores_ends=True)).all()
    assert max(calm.jobs[0].levels) > min(auto.jobs[0].levels)


@pytest.mark.parametrize("limits", [{"running": 1}, {"running": 2}, {"pages": 4}], ids=str)
def test_auto_alone_is_the_widest(
    engine: Engine, start: Callable[..., Runner], limits: dict[str, int]
) -> None:
    """However few texts may run, and however much of the cache it takes."""
    runner = start(auto_bits=2.0, **limits)
    for _ in range(2):
        heard = Heard(runner, Request([5] * 70, 50, bits="auto", ignores_ends=True)).all()
        assert heard.jobs[0].levels == {len(engine.widths) - 1: 50}


def test_the_load_is_what_others_add(engine: Engine, start: Callable[..., Runner]) -> None:
    runner, loads = start(begin=False, running=4), []
    for _ in range(6):
        Heard(runner, Request([5] * 9, 2))
        loads.append(runner.load())
    assert loads == pytest.approx([0, 1 / 3, 2 / 3, 1, 1, 1])
    runner.start()


def test_a_latency_counts_the_text_that_asks_for_it(engine: Engine, start: Callable[..., Runner]) -> None:
    """With others at its level it is one more, also before it runs."""
    runner, seen = start(begin=False), []
    for texts, seconds in ((1, 0.001), (2, 0.003), (4, 0.02)):
        for level in range(len(engine.widths)):
            runner.pace.measure(level, texts, 0, seconds * (1 + level))
    within = runner.pace.within

    def watched(target: float, now: tuple[int, int], *how: Any) -> int:
        seen.append(now[1])
        return within(target, now, *how)

    runner.pace.within = watched  # type: ignore[method-assign]
    heard = [Heard(runner, Request([5] * 9, 3, target=0.0015, ignores_ends=True))]
    runner._choose_levels()
    assert seen == [1] and heard[0].jobs[0].text.level == runner._targets[0]
    heard += [Heard(runner, Request([6 + i] * 9, 3, ignores_ends=True)) for i in range(3)]
    runner.scheduler.schedule(256)
    assert runner.running == 4
    heard.append(Heard(runner, Request([5] * 9, 3, target=10.0, ignores_ends=True)))
    runner._choose_levels()
    assert seen == [1, 4]
    runner.start()
    for one in heard:
        one.all()


def test_a_latency_that_is_asked_for_chooses_the_width(engine: Engine, start: Callable[..., Runner]) -> None:
    runner = start()
    for level in range(len(engine.widths)):
        for _ in range(50):
            runner.pace.measure(level, 1, 0, 0.001 * (1 + level))
    never = Heard(runner, Request([5] * 9, 6, target=1e-6, ignores_ends=True)).all()
    assert set(never.jobs[0].levels) == {runner._targets[0]}
    always = Heard(runner, Request([5] * 9, 6, target=10.0, ignores_ends=True)).all()
    assert set(always.jobs[0].levels) == {len(engine.widths) - 1}


# ---- faults


def test_a_request_that_fails_harms_no_other(
    engine: Engine, start: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, step = start(), Engine.step

    def faulty(self: Engine, batch: Batch, level: int) -> Any:
        if 99 in batch.tokens:
            raise InputError("the head gives NaN or Inf")
        return step(self, batch, level)

    wanted = Heard(runner, Request([5] * 40, 20, ignores_ends=True)).all()
    monkeypatch.setattr(Engine, "step", faulty)
    good = Heard(runner, Request([5] * 40, 20, ignores_ends=True))
    bad = Heard(runner, Request([7] * 40 + [99], 20)).all()
    banned = {token: -np.inf for token in range(engine.vocabulary)}
    unreachable = Heard(runner, Request([5] * 3, 20, sampling=Sampling(logit_bias=banned))).all()
    assert good.all().tokens == wanted.tokens
    assert bad.finish == ["error"] and "NaN" in str(bad.errors[0])
    assert unreachable.finish == ["error"] and "no token is within reach" in str(unreachable.errors[0])
    monkeypatch.undo()
    again = Heard(runner, Request([7] * 40 + [99], 3, ignores_ends=True)).all()
    assert again.finish == ["length"] and again.jobs[0].text.cached == 0  # what failed was never computed


def test_a_cancelled_request_ends_within_a_step(engine: Engine, start: Callable[..., Runner]) -> None:
    runner = start(running=1)
    long = Heard(runner, Request([5] * 9, 100, ignores_ends=True))
    waiting = Heard(runner, Request([5] * 9, 100, ignores_ends=True))
    long.next()
    for heard in (waiting, long):
        runner.cancel(heard.jobs[0])
    assert long.all().finish == waiting.all().finish == ["cancelled"]
    assert len(long.tokens[0]) < 100 and waiting.tokens == [[]]
    runner.cancel(long.jobs[0])  # again: nothing happens


def test_what_cannot_be_served_is_refused_at_once(engine: Engine, start: Callable[..., Runner]) -> None:
    runner = start(pages=2, waiting=3, running=1)
    for request, words in (
        (Request([]), "the prompt is empty"),
        (Request([5] * 128), "the prompt has 128 tokens; the context holds 128"),
        (Request([5] * 100, 29), "the prompt has 100 tokens and 29 more are 129; the context holds 128"),
        (Request([5000]), "vocabulary has"),
        (Request([5], bits=12), "average widths from"),
        (Request([5], bits="much"), 'expected a number or "auto"'),
        (Request([5] * 60, 20), "a prompt of 60 tokens and 20 more are 80, and the KV-cache holds 64"),
    ):
        with pytest.raises(InputError, match=words):
            Heard(runner, request)
    first = Heard(runner, Request([5], 40, ignores_ends=True))
    first.next()
    second = Heard(runner, Request([5], 40, ignores_ends=True))
    with pytest.raises(Busy):
        Heard(runner, Request([5], 40, n=3))
    first.all()
    second.all()


def test_closing_finishes_what_is_there(engine: Engine, start: Callable[..., Runner]) -> None:
    runner = start()
    heard = Heard(runner, Request([5] * 9, 60, ignores_ends=True))
    heard.next()
    runner.close(PATIENCE)
    assert heard.all().finish == ["length"] and len(heard.tokens[0]) == 60
    with pytest.raises(Closing, match="stopping"):
        Heard(runner, Request([5], 1))


def held_steps(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let every step wait for this event."""
    step, go_on = Engine.step, threading.Event()

    def held(self: Engine, *rows: Any) -> Any:
        go_on.wait(PATIENCE)
        return step(self, *rows)

    monkeypatch.setattr(Engine, "step", held)
    return go_on


def test_a_step_that_takes_too_long_is_seen(
    engine: Engine, start: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, go_on = start(), held_steps(monkeypatch)
    monkeypatch.setattr("anybit.serve.run.worker.STUCK", 0.02)
    heard = Heard(runner, Request([5], 1))
    deadline = time.monotonic() + PATIENCE
    while not runner.stuck:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    go_on.set()
    heard.all()
    while runner.stuck or runner.step_seconds:  # the text is told before the step has ended
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_step_that_hangs_does_not_hold_up_the_end(
    engine: Engine, start: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, go_on = start(), held_steps(monkeypatch)
    monkeypatch.setattr("anybit.serve.run.worker.LATE", 0.05)
    heard = Heard(runner, Request([5], 1))
    begun = time.monotonic()
    runner.close(0.1)
    assert time.monotonic() - begun < PATIENCE / 2
    go_on.set()
    heard.all()


def test_a_defect_of_the_thread_is_told_to_all(
    engine: Engine, start: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(engine, Limits(pages=8))
    monkeypatch.setattr(Runner, "_choose_levels", lambda self: 1 / 0)
    runner.start()
    heard = Heard(runner, Request([5], 3)).all()
    assert heard.finish == ["error"] and "ZeroDivisionError" in (runner.broken or "")
    with pytest.raises(Closing, match="ZeroDivisionError"):
        Heard(runner, Request([5], 3))


def test_jobs_say_what_they_waited_for(engine: Engine, start: Callable[..., Runner]) -> None:
    job: Job = Heard(start(), Request([5] * 9, 6, ignores_ends=True)).all().jobs[0]
    times = job.times
    assert times.asked <= times.started <= times.first <= times.last
    assert job.drawn == 6 and job.finished == "length"
