"""Models inside Transformers, served one text at a time."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anybit
from anybit.engine.engine import Batch, Engine
from anybit.errors import InputError
from anybit.in_transformers import InTransformers
from anybit.kernels import cpu
from anybit.kv_cache import CACHE, QuantizedCache
from anybit.serve.api import openai
from anybit.serve.run.one_text import OneText
from anybit.serve.served import Served
from anybit.serve.server import limits
from anybit.serve.settings import Settings
from tests.serve.conftest import refusal, serving

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the native extension is not built")
ASKED = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
PROMPT = [5, 80, 33, 120, 77] * 3


def expected(model: Any, prompt: list[int], kv_bits: int) -> list[int]:
    cache = {} if kv_bits == 16 else {CACHE: QuantizedCache(model.config, kv_bits)}
    ids = torch.tensor([prompt])
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        min_new_tokens=12,
        do_sample=False,
        **cache,
    )
    return list(made[0, len(prompt) :].tolist())


@pytest.mark.parametrize("family", ["gpt2", "opt"])
@pytest.mark.parametrize("kv_bits", [16, 8])
def test_its_text_is_that_of_generate(family: str, kv_bits: int, model_dir: Callable[[str], Path]) -> None:
    inside = InTransformers(str(model_dir(family)), kv_bits=kv_bits)
    engine = OneText(inside, "tiny")
    wanted = [expected(inside.model, prompt, kv_bits) for prompt in (PROMPT, PROMPT[1:])]
    text = [inside.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in wanted]
    with serving(engine, pages=1, running=1) as (client, state):
        made: dict[int, str] = {}

        def ask(i: int) -> None:
            reply = client.ok("/v1/completions", {**ASKED, "prompt": (PROMPT, PROMPT[1:])[i % 2]})
            made[i] = reply["choices"][0]["text"]
            assert reply["timings"]["draft_tokens"] == 0

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]  # they wait for each other
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert made == {i: text[i % 2] for i in range(4)}
        streamed = client.events("/v1/completions", {**ASKED, "prompt": PROMPT})
        assert "".join(e["choices"][0]["text"] for e in streamed if e["choices"]) == text[0]
        scored = client.ok(
            "/v1/completions",
            {"prompt": PROMPT, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0},
        )
        assert len(scored["choices"][0]["logprobs"]["token_logprobs"]) == len(PROMPT) + 1
        assert state.served is not None and state.served.runner.counters.draft_tokens == 0


@pytest.mark.parametrize("native", [True, False])
def test_what_makers_want_and_the_server_lacks_is_named(
    native: bool, anybit_artifact: Path, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """And it serves all the same."""
    folder = shutil.copytree(anybit_artifact if native else model_dir("gpt2"), tmp_path / "model")
    theirs = {"no_repeat_ngram_size": 3, "suppress_tokens": [4], "typical_p": 0.9}
    asked = theirs | {"do_sample": True, "top_k": 7}
    (folder / "generation_config.json").write_text(json.dumps(asked))
    engine = Engine(folder) if native else OneText(InTransformers(str(folder)), "tiny")
    with serving(engine, pages=1, running=1) as (client, state):
        assert client.ok("/v1/completions", {**ASKED, "prompt": PROMPT})["usage"]["completion_tokens"] == 12
        assert isinstance(state.served, Served) and state.served.sampling.top_k == 7
        said = f"without what generation_config.json asks for by {', '.join(theirs)}"
        assert state.served.greeting().endswith(said)


def test_widths_and_batches_are_refused(model_dir: Callable[[str], Path]) -> None:
    engine = OneText(InTransformers(str(model_dir("gpt2"))), "tiny")
    with serving(engine, pages=1, running=1) as (client, _):
        for more, param in (
            ({"bits": 4}, "bits"),
            ({"bits": "auto"}, "bits"),
            ({"model": "tiny@4"}, "bits"),
            ({"latency_target_ms": 20}, "bits"),
            ({"n": 2}, "n"),
            ({"prompt": [PROMPT, PROMPT]}, "prompt"),
        ):
            status, said, name = refusal(client.ask("/v1/completions", {**ASKED, "prompt": PROMPT, **more}))
            assert (status, name) == (400, param) and "inside Transformers" in said
        too_long = client.ask("/v1/completions", {"prompt": [5] * engine.context, "max_tokens": 1})
        assert refusal(too_long)[0] == 400
        assert client.ok("/v1/completions", {**ASKED, "prompt": PROMPT})["usage"]["completion_tokens"] == 12


def test_logits_of_a_prompt_are_bounded(
    model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = OneText(InTransformers(str(model_dir("gpt2"))), "tiny")
    monkeypatch.setattr(openai, "MOST_LOGITS", 10 * engine.vocabulary)
    asked = {"prompt": PROMPT[:10], "max_tokens": 1, "echo": True, "logprobs": 1}
    with serving(engine, pages=1, running=1) as (client, _):
        client.ok("/v1/completions", asked)
        status, said, param = refusal(client.ask("/v1/completions", {**asked, "prompt": PROMPT[:11]}))
        assert (status, param) == (400, "echo") and "11 tokens" in said and "up to 10, all at once" in said
        client.ok("/v1/completions", {**asked, "prompt": PROMPT, "echo": False})


def test_logits_of_a_prompt_are_there_once(model_dir: Callable[[str], Path]) -> None:
    """They may be a gigabyte: what a step gives out are the model's own, not a copy."""
    engine = OneText(InTransformers(str(model_dir("gpt2"))), "tiny")
    whole = engine._inside.model.forward
    made: list[Any] = []

    def forward(*given: Any, **how: Any) -> Any:
        made.append(whole(*given, **how))
        return made[-1]

    engine._inside.model.forward = forward
    try:
        rows = np.arange(9, dtype=np.int32)
        for wanted in (rows, rows[4:], rows[8:], rows[9:]):
            zeros = np.zeros(9, np.int32)
            found = engine.step(Batch(rows + 20, rows, zeros, zeros[:1, None], wanted), 0)
            logits = made[-1].logits[0].numpy()
            assert np.array_equal(found, logits[len(logits) - len(wanted) :])
            assert len(wanted) == 0 or np.shares_memory(found, logits)
    finally:
        engine._inside.model.forward = whole


def test_an_artifact_has_the_width_that_was_loaded(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    anybit.quantize(model_dir("opt"), tmp_path / "out", anybit.RTN(bits=4, group_size=16))
    engine = OneText(InTransformers(str(tmp_path / "out")), "tiny")
    assert len(engine.widths) == 1
    with serving(engine, pages=1, running=1) as (client, _):
        assert client.ok("/v1/completions", {**ASKED, "prompt": PROMPT})["usage"]["completion_tokens"] == 12


def test_memory_and_context(model_dir: Callable[[str], Path]) -> None:
    inside = InTransformers(str(model_dir("gpt2")))
    engine = OneText(inside, "tiny", 40)
    assert engine.context == 40
    found = limits(engine, Settings("tiny", kv_bytes=engine.page_bytes))
    assert (found.pages, found.running) == (1, 1)
    with pytest.raises(InputError, match=r"--kv-memory\), or texts fewer tokens \(--context\)"):
        limits(engine, Settings("tiny", kv_bytes=engine.page_bytes - 1))
    with pytest.raises(InputError, match="reaches"):
        OneText(inside, "tiny", 10**6)


def test_a_model_that_keeps_nothing_of_a_text_is_refused(model_dir: Callable[[str], Path]) -> None:
    inside = InTransformers(str(model_dir("gpt2")))
    whole, forgets = inside.model.forward, inside.model
    assert OneText(inside, "tiny").page_bytes > 0

    def forward(ids: Any, **given: Any) -> Any:
        return whole(ids, **{name: value for name, value in given.items() if name != CACHE})

    forgets.forward = forward
    with pytest.raises(InputError, match="token by token its logits are"):
        OneText(inside, "tiny")
    forgets.forward = whole
    inside.model.config.num_attention_heads, kept = None, inside.model.config.num_attention_heads
    with pytest.raises(InputError, match="does not say how large keys and values are"):
        OneText(inside, "tiny")
    inside.model.config.num_attention_heads = kept


def test_nan_is_an_error_and_the_next_text_is_served(
    model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = InTransformers(str(model_dir("gpt2")))
    with serving(OneText(inside, "tiny"), pages=1, running=1) as (client, _):
        weight = inside.model.get_input_embeddings().weight
        kept = weight[33].clone()
        with torch.no_grad():
            weight[33] = torch.nan
            status, said, _ = refusal(client.ask("/v1/completions", {**ASKED, "prompt": PROMPT}))
            weight[33] = kept
        assert status == 500 and "NaN or Inf" in said
        assert client.ok("/v1/completions", {**ASKED, "prompt": PROMPT})["usage"]["completion_tokens"] == 12
