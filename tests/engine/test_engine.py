"""`anybit.Engine`: text out of a model, at its levels, beside Transformers' `generate`."""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anybit
from anybit import Engine, Sampling
from anybit.engine import cgroups, threads
from anybit.engine import pages as cache
from anybit.engine.description import Unsupported, reach
from anybit.engine.drafts import Drafts, NarrowDrafts, Worth, narrow_level
from anybit.engine.engine import Batch
from anybit.engine.pages import Pages, _left, free_memory
from anybit.engine.threads import _quota, default_threads
from anybit.errors import InputError
from anybit.generate import Generator
from anybit.kernels import cpu
from tests.builders import Said
from tests.engine.models import VOCABULARY, random_model, saved_model
from tests.engine.test_decoder import error, keys_and_values_in_float16, reference
from tests.engine.test_drafts import drafting_narrowly

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu.available(), reason="the native extension is not built"),
]
PROMPT = [5, 80, 33, 120, 77]
WINDOWS = {"qwen2-windows": 50, "mistral": 70}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """An HF directory of 16-bit weights whose end of text is no likely token; never change it."""
    made = tmp_path_factory.mktemp("engine") / "model"
    saved_model(made, tokenizer, "llama", 200)
    return made


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(folder, codebook_precision="fp16", threads=2)


def greedy(folder: Path, n: int) -> list[int]:
    model = anybit.load(folder)
    ids = torch.tensor([PROMPT])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False)
    return made[0, len(PROMPT) :].tolist()


# ---- text


def test_greedy_tokens_are_those_of_transformers(folder: Path, engine: Engine) -> None:
    made = engine.generate(PROMPT, 64)
    assert made.tokens == greedy(folder, 64)
    assert (made.finish, made.prompt_tokens) == ("length", 5)
    assert made.text == engine.tokenizer.decode(made.tokens, skip_special_tokens=True)


def test_a_text_ends_at_each_of_its_ends(engine: Engine) -> None:
    tokens = engine.generate(PROMPT, 20).tokens
    first = next(i for i in range(3, 20) if tokens[i] not in tokens[:i])
    for ends in (tokens[first], [VOCABULARY - 1, tokens[first]]):
        engine.generation["eos_token_id"] = ends
        try:
            made = engine.generate(PROMPT, 20)
        finally:
            engine.generation["eos_token_id"] = 0
        assert (made.tokens, made.finish) == (tokens[: first + 1], "stop")


def test_stop_strings_are_cut_off(engine: Engine) -> None:
    whole = engine.generate(PROMPT, 40).text
    stop = whole[10:13]
    made = engine.generate(PROMPT, 40, stop=[stop])
    assert made.finish == "stop" and made.text == whole[: whole.index(stop)]
    assert "".join(piece.text for piece in engine.stream(PROMPT, 40, stop=[stop])) == made.text


def test_the_same_seed_draws_the_same_text(engine: Engine) -> None:
    sampling = Sampling(temperature=1.0, top_k=20, seed=3)
    made = engine.generate(PROMPT, 30, sampling)
    assert made.tokens == engine.generate(PROMPT, 30, sampling).tokens
    assert made.tokens != engine.generate(PROMPT, 30, Sampling(temperature=1.0, top_k=20, seed=4)).tokens


@pytest.mark.parametrize("kv_bits", [16, 4])
def test_drafts_change_no_text_and_save_steps(
    folder: Path, kv_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, chance = Engine(folder, kv_bits=kv_bits), random.Random(1)
    samplings = Sampling(), Sampling(temperature=1.0, seed=3), Sampling(repetition_penalty=1.3, logprobs=2)
    plain = [engine.generate(PROMPT, 70, sampling, speculate=False) for sampling in samplings]

    def draft(self: Drafts, length: int) -> list[int]:
        """Of what will be drawn some, then something else: fits no more than is asked for."""
        text = next(
            t for made in plain if (t := [*PROMPT, *made.tokens])[: len(self._tokens)] == self._tokens
        )
        return [*text[len(self._tokens) :][: chance.randrange(6)], 9][:length]

    monkeypatch.setattr(Drafts, "draft", draft)
    monkeypatch.setattr(Drafts, "worth", lambda self, *_: Worth(math.inf, 7))
    for sampling, made in zip(samplings, plain):
        steps = engine._times[0].steps
        drafted = engine.generate(PROMPT, 70, sampling)
        assert drafted.drawn == made.drawn and drafted.text == made.text and drafted.finish == made.finish
        assert engine._times[0].steps - steps < 45
        assert engine.generate(PROMPT, 3, sampling).tokens == made.tokens[:3]


def test_a_draft_that_cannot_be_computed_ends_no_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, step, failed = Engine(folder), Engine._step, []
    plain = engine.generate(PROMPT, 30, speculate=False)

    def fails(self: Engine, rows: Batch, *how: Any) -> None:
        if len(rows.tokens) == 3:
            failed.append(rows)
            raise InputError("NaN")
        step(self, rows, *how)

    monkeypatch.setattr(Engine, "_step", fails)
    monkeypatch.setattr(Drafts, "draft", lambda self, length: [9, 9][:length])
    monkeypatch.setattr(Drafts, "worth", lambda self, *_: Worth(math.inf, 2))
    assert engine.generate(PROMPT, 30).tokens == plain.tokens and len(failed) > 20


@pytest.mark.parametrize("kv_bits", [16, 4])
def test_drafts_at_a_narrower_width_change_no_text(
    anybit_artifact: Path, kv_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Across pages and the first page's end, greedy, penalized and at random; a turn goes on from what they left."""
    engine = Engine(anybit_artifact, kv_bits=kv_bits)
    low, ids = narrow_level(engine.widths), [5, 9, 70, 33]
    samplings = Sampling(repetition_penalty=1.2), Sampling(temperature=1.0, seed=3), Sampling(logprobs=2)
    plain = [engine.generate(ids, 90, sampling, speculate=False) for sampling in samplings]
    more = engine.generate([*ids, *plain[-1].tokens, 8, 9], 9, speculate=False)
    drafting_narrowly(monkeypatch)
    drafted: list[tuple[list[int], list[int]]] = []
    compare = NarrowDrafts.compare

    def compared(self: NarrowDrafts, drawn: list[int]) -> None:
        drafted.append((self.draft, list(drawn)))
        compare(self, drawn)

    monkeypatch.setattr(NarrowDrafts, "compare", compared)
    for sampling, made in zip(samplings, plain):
        found = engine.generate(ids, 90, sampling)
        assert found.drawn == made.drawn and found.text == made.text and found.finish == made.finish
    turn = engine.generate([*ids, *plain[-1].tokens, 8, 9], 9)
    assert turn.tokens == more.tokens and turn.cached_tokens >= len(ids) + len(plain[-1].tokens) - 1
    right = sum(len(drawn) - 1 for draft, drawn in drafted)
    assert 0 < right < sum(len(draft) for draft, _ in drafted)
    assert all(draft[: len(drawn) - 1] == drawn[:-1] for draft, drawn in drafted)
    drafted.clear()
    engine.generate(ids, 20, bits=engine.widths[low])
    assert len(drafted) > 10 and not any(draft for draft, _ in drafted)


def test_narrow_drafts_that_fail_or_are_interrupted_leave_the_text_as_it_is(
    anybit_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, step = Engine(anybit_artifact), Engine._step
    low, ids, sampling = narrow_level(engine.widths), list(range(5, 45)), Sampling(temperature=1.0, seed=1)
    plain = engine.generate(ids, 30, sampling, speculate=False)
    drafting_narrowly(monkeypatch)
    errors: list[type[BaseException]] = [InputError] * 5
    began: list[int] = []  # positions of the draft under way

    def fails(self: Engine, batch: Batch, logits: Any, level: int, *how: Any) -> None:
        if level == low:
            began.append(int(batch.positions[0]))
        else:
            began.clear()
        if len(began) > 2 and errors:
            raise errors.pop()
        step(self, batch, logits, level, *how)

    monkeypatch.setattr(Engine, "_step", fails)
    assert engine.generate(ids, 30, sampling).tokens == plain.tokens and not errors
    errors.append(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(ids, 30, sampling)
    assert len(began) > 2 and began[0] >= len(ids)
    known, longer = began[0], [*ids, *plain.tokens]
    again = engine.generate(longer, 3, speculate=False)
    assert again.cached_tokens == known  # and not the two behind them, which the draft has computed
    assert again.tokens == Engine(anybit_artifact).generate(longer, 3).tokens


def test_generation_config_is_the_default(folder: Path, engine: Engine) -> None:
    assert engine.default_sampling() == Sampling()
    engine.generation.update(top_k=7)
    try:
        assert engine.default_sampling(do_sample=True, temperature=0.5) == Sampling(temperature=0.5, top_k=7)
    finally:
        del engine.generation["top_k"]


def test_a_model_whose_makers_want_tokens_drawn(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    asked = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "eos_token_id": 0}
    (tmp_path / "model/generation_config.json").write_text(json.dumps(asked))
    assert Engine(tmp_path / "model").default_sampling() == Sampling(temperature=0.7, top_p=0.9, top_k=50)


def test_makers_that_want_what_the_engine_lacks_have_it_inside_transformers(
    folder: Path, engine: Engine, tmp_path: Path
) -> None:
    """There it counts: of what is left of the vocabulary no token comes."""
    shutil.copytree(folder, tmp_path / "model")
    plain = engine.generate(PROMPT, 12).tokens
    asked = {"eos_token_id": 0, "suppress_tokens": plain, "no_repeat_ngram_size": 1}
    (tmp_path / "model/generation_config.json").write_text(json.dumps(asked))
    report = Said()
    inside = Generator(str(tmp_path / "model"), report=report)
    assert not inside.native and "asks for no_repeat_ngram_size 1" in report.lines[-1]
    made = inside.generate(PROMPT, 12)
    assert len({*PROMPT, *made}) == len(PROMPT) + 12 and not {*made} & {*plain}
    with pytest.raises(InputError, match="which the native engine lacks"):
        Engine(tmp_path / "model").generate(PROMPT, 12)


@pytest.mark.parametrize("kv_bits", [16, 8])
def test_transformers_takes_all_that_is_kept_for_it(folder: Path, tmp_path: Path, kv_bits: int) -> None:
    shutil.copytree(folder, tmp_path / "model")
    asked = {
        "typical_p": 0.9, "top_h": 0.9, "epsilon_cutoff": 1e-4, "eta_cutoff": 1e-4, "no_repeat_ngram_size": 3,
        "min_length": 7, "min_new_tokens": 2, "guidance_scale": 1.5, "bad_words_ids": [[3], [4, 5]],
        "suppress_tokens": [6], "begin_suppress_tokens": [7], "forced_bos_token_id": 8, "forced_eos_token_id": 9,
    }  # fmt: skip
    (tmp_path / "model/generation_config.json").write_text(json.dumps(asked))
    inside = Generator(str(tmp_path / "model"), engine="transformers", kv_bits=kv_bits)
    for temperature in (0.0, 0.7):
        made = inside.generate(PROMPT, 12, temperature=temperature)
        assert len(made) == 12 and made[-1] == 9 and not {3, 6} & {*made}


def test_logprobs_are_those_of_the_logits(engine: Engine) -> None:
    made = engine.generate(PROMPT, 8, Sampling(logprobs=3))
    rows = torch.tensor(engine.logits(PROMPT + made.tokens)[len(PROMPT) - 1 : -1]).log_softmax(-1)
    for drawn, row in zip(made.drawn, rows):
        top = row.topk(3)
        assert [token for token, _ in drawn.top] == top.indices.tolist()
        assert drawn.logprob == pytest.approx(row[drawn.token].item(), abs=1e-5)


# ---- how it computes


def test_it_says_what_becomes_of_inputs(
    folder: Path, anybit_artifact: Path, artifact_of: Callable[..., Path]
) -> None:
    def inputs(model: Path, precision: str = "int8") -> str:
        return Engine(model, codebook_precision=precision).how().split(", ")[1]

    assert inputs(folder) == "exact inputs"  # nothing is quantized
    quantized = artifact_of("llama", group_size=32)
    assert (inputs(quantized), inputs(quantized, "fp16")) == ("inputs rounded to 8 bits", "exact inputs")
    nested = anybit_artifact  # with kept channels
    assert (inputs(nested), inputs(nested, "fp16")) == ("inputs rounded to 8 bits", "exact inputs")
    rounding = artifact_of("llama", group_size=32, act_bits=8)
    assert inputs(rounding) == inputs(rounding, "fp16") == "inputs rounded as the artifact asks"


# ---- levels


def test_every_width_of_a_file(anybit_artifact: Path) -> None:
    """Each level has the logits that Transformers has there, up to what keys and values lose in float16, and a text
    changes nothing of another level's."""
    model = anybit.load(anybit_artifact)
    engine = Engine(anybit_artifact, codebook_precision="fp16")
    ids = np.random.default_rng(0).integers(3, engine.vocabulary, 40).tolist()
    assert engine.widths == [level.bits for level in model.levels]
    first = engine.logits(ids, bits=engine.widths[0])
    for bits in (engine.widths[0], engine.widths[len(engine.widths) // 2], engine.widths[-1]):
        model.set_bits(bits)
        wanted = reference(model, ids)
        with keys_and_values_in_float16(model):
            lost = np.linalg.norm(reference(model, ids) - wanted)
        found = engine.logits(ids, bits=bits)
        assert np.linalg.norm(found - wanted) < 2 * lost < 3e-3 * np.linalg.norm(wanted)
    assert np.array_equal(engine.logits(ids, bits=engine.widths[0]), first)
    with pytest.raises(InputError, match="average widths from"):
        engine.generate(ids, 2, bits=12)


def test_a_model_that_is_loaded_already(folder: Path, engine: Engine) -> None:
    loaded = anybit.load(folder)
    made = Engine(loaded, tokenizer=engine.tokenizer, codebook_precision="fp16")
    assert made.generate(PROMPT, 10).tokens == engine.generate(PROMPT, 10).tokens
    assert sum(parameter.numel() for parameter in loaded.parameters()) < 3000  # norms alone


# ---- room


def test_prompts_that_do_not_fit_name_both_numbers(engine: Engine) -> None:
    with pytest.raises(InputError, match="the prompt has 200 tokens, the context holds 200"):
        engine.generate([5] * 200, 1)
    assert len(engine.generate([5] * 199, 50).tokens) == 1
    with pytest.raises(InputError, match="the prompt is empty"):
        engine.generate([], 1)
    with pytest.raises(InputError, match="vocabulary has"):
        engine.generate([10_000], 1)
    with pytest.raises(InputError, match="max_new_tokens is 0"):
        engine.generate(PROMPT, 0)


def test_pages_come_back_however_a_text_ends(engine: Engine) -> None:
    """But those of the text that ended last, until another begins."""
    engine._cache._let_go()
    free = engine._cache._pages.free
    engine.generate(PROMPT, 40)
    pieces = engine.stream(PROMPT, 100)
    next(pieces)
    assert engine._cache._pages.free == free - 4
    pieces.close()
    assert engine._cache._pages.free == free - 4
    engine.logits(PROMPT)  # of another text, which leaves it alone
    assert engine._cache._pages.free == free - 4
    engine.logits([5] * 190)  # unless it needs the room
    assert engine._cache._pages.free == free
    with pytest.raises(InputError, match="the text has 1000 tokens"):
        engine.logits([0] * 1000)
    assert engine._cache._pages.free == free


@pytest.mark.parametrize("kv_bits", [16, 8, 4])
@pytest.mark.parametrize("family", ["llama", *WINDOWS])
def test_a_conversation_goes_on_where_it_was(
    family: str, kv_bits: int, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns have the tokens that they have when all is computed anew, far beyond windows, whatever drafts left."""
    saved_model(tmp_path, tokenizer, family, 4096)
    engine, fresh = Engine(tmp_path, kv_bits=kv_bits), Engine(tmp_path, kv_bits=kv_bits)
    engine.generation["eos_token_id"] = fresh.generation["eos_token_id"] = []
    monkeypatch.setattr(Drafts, "draft", lambda self, length: [9, 8, 7][:length])
    monkeypatch.setattr(Drafts, "worth", lambda self, *_: Worth(math.inf, 3))
    chance, text, cached = np.random.default_rng(0), [], []
    for turn in (500, 1, 33, 700, 20):
        text += chance.integers(1, len(tokenizer), turn).tolist()
        made = engine.generate(text, 40)
        fresh._cache._let_go()  # nothing is left of the turn before
        assert made.tokens == fresh.generate(text, 40).tokens
        cached.append(made.cached_tokens)
        text += made.tokens
    assert cached == [0, *np.cumsum([539, 41, 73, 740])]  # the last token of an answer is never computed
    fresh._cache._let_go()
    there = engine.generate(text[:1000], 2)  # back into the past, behind which windows are written over
    assert there.cached_tokens == (999 if family == "llama" else 0)
    assert there.tokens == fresh.generate(text[:1000], 2).tokens
    one, other = engine.stream(text[:1001], 20), engine.stream(text[:1001], 20)  # only one can have the pages
    found = [[piece.drawn.token for piece in pair if piece.drawn] for pair in zip(*zip(one, other))]
    assert found == [fresh.generate(text[:1001], 20).tokens] * 2
    one.close()
    other.close()
    engine._cache._let_go()
    for pages in (engine._cache._pages, engine._cache._window_pages):
        assert pages.free == pages.count


@pytest.mark.parametrize("family", WINDOWS)
def test_windows_are_there_as_far_back_as_it_is_said(
    family: str, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, also where a step wrote pages and failed."""
    saved_model(tmp_path, tokenizer, family, 4096)
    engine, ids = Engine(tmp_path), np.random.default_rng(0).integers(1, len(tokenizer), 1500).tolist()
    level = engine._level_of(None)

    def behind(prompt: list[int]) -> tuple[int, Any]:
        with engine._cache.going_on(prompt, 1, level) as text:
            done = text.done
            return done, engine._run(text, prompt[done:], level)

    step, back = engine._step, cache.CHUNK - 32
    for whole in (100, 1500):  # before any page is written twice, and long after
        for further in (back, back + 1) if whole == 1500 else (60,):
            behind(ids[:whole])
            prompt = [*ids[: whole - further], 7]
            done, found = behind(prompt)
            assert done == (0 if further > back else whole - further)
            assert np.array_equal(found[0], engine.logits(prompt)[-1])
    engine._cache._let_go()

    def interrupted(rows: Any, *rest: Any) -> None:
        step(rows, *rest)
        if rows.positions[0] == 512:
            raise KeyboardInterrupt

    monkeypatch.setattr(engine, "_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        behind(ids)
    monkeypatch.setattr(engine, "_step", step)
    done, found = behind([*ids[:300], 7])
    assert done == 0 and np.array_equal(found[0], engine.logits([*ids[:300], 7])[-1])


def test_what_has_no_use_is_computed_anew(engine: Engine, anybit_artifact: Path) -> None:
    """Less than a page, another level, other tokens."""
    text = list(range(5, 45))
    for ids, most, cached in (
        (text, 5, 0),
        (text, 5, 39),
        (text[:35], 5, 34),
        (text[:31], 5, 0),
        (text, 1, 0),
    ):
        assert engine.generate(ids, most).cached_tokens == cached
    assert engine.generate([*text[:33], 5, 6], 1).cached_tokens == 33
    assert engine.generate([7, *text], 1).cached_tokens == 0
    several = Engine(anybit_artifact)
    low, high = several.widths[0], several.widths[-1]
    ids = [5 + i % 40 for i in range(50)]
    found = [several.generate(ids, 4, bits=bits) for bits in (low, high, high, low)]
    assert [made.cached_tokens for made in found] == [0, 0, 49, 0]
    assert found[0].tokens == found[3].tokens and found[1].tokens == found[2].tokens


def test_a_shorter_context(folder: Path) -> None:
    engine = Engine(folder, context=50)
    assert engine.context == 50 and len(engine.generate(PROMPT, 100).tokens) == 45
    with pytest.raises(InputError, match="a context of 201 tokens: expected 1 to 200; the model reaches 200"):
        Engine(folder, context=201)


def test_yarn_lengthens_the_context(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    """As files of the hub ask for it: the positions that are stated stay those of the training."""
    shutil.copytree(folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 200}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    engine = Engine(tmp_path / "model", codebook_precision="fp16", threads=2)
    assert engine.context == 800 and Engine(tmp_path / "model", context=500).context == 500
    model, ids = anybit.load(tmp_path / "model"), np.random.default_rng(0).integers(0, VOCABULARY, 420)
    ids %= len(tokenizer)
    assert error(engine.logits(ids.tolist()), reference(model, ids)).max() < 1e-3
    assert Generator(str(tmp_path / "model"), engine="transformers").runner.context == 800
    assert Engine(model, tokenizer=tokenizer).context == 800


@pytest.mark.parametrize(
    ("rope", "positions", "expected"),
    [
        ({"rope_type": "default"}, 100, 100),
        ({"rope_type": "linear", "factor": 4.0}, 100, 100),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, 100, 400),
        ({"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 33}, 100, 100),
        ({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 100}, 400, 400),
        ({"rope_type": "yarn", "factor": math.inf, "original_max_position_embeddings": 100}, 400, 400),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, None, 400),
        ({"full_attention": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 100}}, 100, 200),
        ({}, None, None),
    ],
)  # fmt: skip
def test_what_a_model_reaches(rope: Any, positions: int | None, expected: int | None) -> None:
    assert reach({"rope_parameters": rope, "max_position_embeddings": positions}) == expected


def test_memory_bounds_the_context(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (
        4 * 2 * 16 * 2 * 2 * 32
    )  # blocks, KV heads, head size (keys are not padded), K and V, bytes, tokens
    monkeypatch.setattr(cache, "free_memory", lambda: 2 * 3 * 2 * page)
    assert Engine(folder).context in (96, 128)
    monkeypatch.setattr(cache, "free_memory", lambda: 100)
    with pytest.raises(InputError, match="no memory for a KV-cache"):
        Engine(folder)


@pytest.mark.parametrize("kv_bits", [16, 8, 4])
@pytest.mark.parametrize("family", WINDOWS)
def test_pages_that_a_window_has_passed_are_used_again(
    family: str, kv_bits: int, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In some blocks, or in all of them: texts far beyond the window have the bits that they have with all pages."""
    saved_model(tmp_path, tokenizer, family, 4096)
    ids = np.random.default_rng(0).integers(1, len(tokenizer), 900).tolist()
    few = Engine(tmp_path, kv_bits=kv_bits)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "WINDOWED_TEXTS", 1000)  # so many cost more than all pages
        every = Engine(tmp_path, kv_bits=kv_bits)
    few.generation["eos_token_id"] = every.generation["eos_token_id"] = []
    plain = few.generate(ids[:600], 40, speculate=False).tokens
    assert every.generate(ids[:600], 40).tokens == few.generate(ids[:600], 40).tokens == plain
    assert np.array_equal(few.logits(ids), every.logits(ids))
    native = few._cache.native
    kept = native.pages * native.page_bytes + native.window_pages * native.window_page_bytes
    assert every._cache.native.window_pages == 0 < native.window_pages
    assert kept < 0.8 * every._cache.native.pages * every.page_bytes
    one, other = few.stream(ids[:500], 20), few.stream(ids[100:600], 20)
    found = [[piece.drawn.token for piece in pair if piece.drawn] for pair in zip(*zip(one, other))]
    assert found == [few.generate(ids[:500], 20).tokens, few.generate(ids[100:600], 20).tokens]
    one.close()
    other.close()
    monkeypatch.setattr(Drafts, "draft", lambda self, length: [9, 8, 7][:length])
    monkeypatch.setattr(Drafts, "worth", lambda self, *_: Worth(math.inf, 3))
    assert few.generate(ids[:600], 40).tokens == plain  # what wrong drafts wrote is written over
    streams = [few.stream(ids[:500], 20) for _ in range(5)]
    with pytest.raises(
        InputError, match="too many texts are open: the engine holds 4 beyond the model's window"
    ):
        list(map(next, streams))
    for stream in streams:
        stream.close()
    few._cache._let_go()
    assert few._cache._window_pages.free == native.window_pages
    few.give_pages(8)  # to whoever runs several texts: of all blocks
    assert (few._cache.native.pages, few._cache.native.page_bytes) == (8, few.page_bytes)


def test_pages_of_their_own_shorten_no_text() -> None:
    """Shapes of Mistral 7B and Gemma 3 1B in 16 bits, with memory for all, for some, and for hardly any."""
    mistral, gemma = [4096] * 32, ([512] * 5 + [0]) * 4 + [512] * 2
    for windows, block_bytes in ((mistral, 131072), (gemma, 32768)):
        longest = 0
        for memory in (10**6, 10**8, 10**9, 2 * 10**9, 4 * 10**9, 10**10):
            found = cache.room(windows, block_bytes, 32768, memory)
            own = sum(w > 0 for w in windows) if found.window_pages else 0
            used = (len(windows) - own) * found.pages + own * found.window_pages
            assert used * block_bytes <= memory
            assert found.fits >= min(32768, memory // (len(windows) * block_bytes) * 32)
            longest = max(longest, found.fits)
        assert longest == 32768 and found.window_pages
    assert not cache.room([0, 0], 1000, 512, 10**9).window_pages


def test_pages_are_given_out_once() -> None:
    pages = Pages(5, 32)
    first: list[int] = []
    second: list[int] = []
    pages.extend(first, 33)
    pages.extend(second, 64)
    assert sorted(first + second) == [0, 1, 2, 3] and pages.free == 1
    with pytest.raises(InputError, match="97 tokens need 2 more pages of 32 in the KV-cache, 1 are free"):
        pages.extend(first, 97)
    assert len(first) == 2
    pages.release(second)
    assert second == [] and pages.free == 3


# ---- what runs elsewhere


def test_what_the_engine_does_not_run(folder: Path) -> None:
    with pytest.raises(Unsupported, match="a KV-cache of 2 bits"):
        Engine(folder, kv_bits=2)
    with pytest.raises(InputError, match="expected fp16 or int8"):
        Engine(folder, codebook_precision="int4")


def test_whoever_is_refused_keeps_the_model(anybit_artifact: Path, folder: Path, engine: Engine) -> None:
    packed = anybit.load(anybit_artifact)
    with pytest.raises(InputError, match="a context of 1000000000 tokens"):
        Engine(packed, tokenizer=engine.tokenizer, context=10**9)
    assert packed.model.layers[0].mlp.up_proj.codebook_precision == "fp16"
    loaded = anybit.load(folder)
    with pytest.raises(InputError, match="a context of"):
        Engine(loaded, tokenizer=engine.tokenizer, context=10**9)
    assert loaded.lm_head.weight.numel() > 0


def test_a_loaded_model_has_its_budget_and_its_type(anybit_artifact: Path, folder: Path) -> None:
    with pytest.raises(InputError, match=r"bits: the model is loaded already; give this to anybit\.load"):
        Engine(anybit.load(anybit_artifact), bits=3)
    with pytest.raises(Unsupported, match="dtype bfloat16 on cpu"):
        Engine(anybit.load(folder, dtype="bfloat16"))


def test_a_tied_head_leaves_no_copy(engine: Engine) -> None:
    model = random_model("smollm2")
    made = Engine(model, tokenizer=engine.tokenizer)
    assert model.lm_head.weight.numel() == model.model.embed_tokens.weight.numel() == 0
    assert made.logits(PROMPT).shape == (5, VOCABULARY)


def test_damaged_weights_are_named() -> None:
    model = random_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN"):
        Engine(model)


def test_two_texts_at_once_take_turns_or_are_refused_at_the_start(folder: Path) -> None:
    engine = Engine(folder, context=64, codebook_precision="fp16")
    wanted = [engine.generate(PROMPT[:n], 20).tokens for n in (3, 4)]
    first, second = engine.stream(PROMPT[:3], 20), engine.stream(PROMPT[:4], 20)
    found = [[piece.drawn.token for piece in pair if piece.drawn] for pair in zip(*zip(first, second))]
    assert found == wanted
    first.close()
    second.close()
    running = engine.stream(PROMPT, 50)
    next(running)
    with pytest.raises(InputError, match="0 are free"):
        next(engine.stream(PROMPT, 50))
    assert len(list(running)) == 50


def test_pytorch_has_its_threads_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the last engine is gone; those of other tests do not count."""
    monkeypatch.setattr(threads._Resting, "engines", 0)
    torch.set_num_threads(2)
    try:
        engine = Engine(folder)
        later = Engine(folder)
        assert torch.get_num_threads() == 1
        del engine
        gc.collect()
        assert torch.get_num_threads() == 1
        del later
        gc.collect()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def _generate(engine: Engine) -> None:
    engine.generate(PROMPT, 2)


def _step(engine: Engine) -> None:
    none = np.zeros(0, np.int32)
    engine.step(Batch(none, none, none, np.zeros((0, 1), np.int32), none), 0)


def _in_a_child(engine: Engine, work: Any, said: Any) -> None:
    try:
        work(engine)
    except InputError as error:
        said.put(str(error))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("work", [_generate, _step])
def test_a_forked_process_is_refused(engine: Engine, work: Any) -> None:
    context = multiprocessing.get_context("fork")
    said = context.Queue()
    child = context.Process(target=_in_a_child, args=(engine, work, said))
    child.start()
    assert "does not work in a forked process" in said.get(timeout=60)
    child.join()


# ---- threads


@pytest.mark.parametrize("threads", [0, -1, 10_000])
def test_threads_that_cannot_be(folder: Path, threads: int) -> None:
    with pytest.raises(InputError, match=f"threads .--threads. {threads}: .* give 1 to"):
        Engine(folder, threads=threads)


def test_threads_are_bounded_by_affinity() -> None:
    assert 1 <= default_threads() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.cfs_quota_us": "50000\n", "cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
        ({"cpu.max": "nonsense\n"}, None),
    ],
)
def test_what_a_cgroup_grants(tmp_path: Path, files: dict[str, str], quota: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert _quota(tmp_path) == quota


@pytest.mark.parametrize(
    ("files", "left"),
    [
        (
            {"memory.max": "1000\n", "memory.current": "700\n", "memory.stat": "anon 5\ninactive_file 40\n"},
            340,
        ),
        ({"memory.max": "max\n", "memory.current": "700\n", "memory.stat": ""}, None),
        (
            {
                "memory.limit_in_bytes": "1000\n",
                "memory.usage_in_bytes": "900\n",
                "memory.stat": "inactive_file 1\ntotal_inactive_file 30\n",
            },
            130,
        ),
        ({}, None),
    ],
)
def test_memory_that_a_cgroup_leaves(tmp_path: Path, files: dict[str, str], left: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert _left(tmp_path) == left


def test_the_least_of_machine_and_cgroups_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is in a group without a limit, in one that has one."""
    machine = free_memory()
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    for name, text in (("memory.max", "5000"), ("memory.current", "1000"), ("memory.stat", "")):
        (inner.parent / name).write_text(text)
    (tmp_path / "memberships").write_text("3:cpu:/elsewhere\n0::/outer/inner\n")
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    monkeypatch.setattr(cgroups, "MEMBERSHIPS", tmp_path / "memberships")
    assert free_memory() == 4000 < machine


@pytest.mark.parametrize(("head_size", "more"), [(64, 3.5), (128, 3.75)])
def test_a_cache_of_4_bits_holds_that_many_times_the_tokens_of_16(head_size: int, more: float) -> None:
    """Keys and values, and a scale and a minimum in float16 for each head and token."""
    wide, narrow = (cpu._native.KvCache(2, 3, head_size, bits, 1).page_bytes for bits in (16, 4))
    assert wide / narrow >= more
