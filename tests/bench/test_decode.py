"""`anybit bench decode`: what it times, what it keeps, and what it compares."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import anybit
from anybit import Engine
from anybit.bench import decode, decode_targets, mistralrs_rate, quality, random_model, sources
from anybit.bench.agreement import agreement, agrees, prompt_of
from anybit.bench.contenders import InTransformers, LlamaBench, MistralRs, Native, kv_bytes, touched
from anybit.bench.decode import Plan
from anybit.bench.others import Used, others, used
from anybit.bench.picture import plot_decode
from anybit.calibration.texts import read_text
from anybit.engine.filler import fill
from anybit.engine.pages import Held
from anybit.engine.timing import far_apart, prompt_seconds, step_seconds
from anybit.errors import InputError
from anybit.formats.layout import code_bits
from anybit.kernels import cpu
from tests.bench.decoding import Json, gguf, little, mistralrs, stand_in
from tests.checkpoint.models import write_gguf
from tests.engine.models import FAMILIES
from tests.engine.models import random_model as family

pytestmark = pytest.mark.native


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    little(monkeypatch)


@pytest.fixture
def llama(tmp_path: Path) -> Json:
    return stand_in(tmp_path)


def tiny(**changes: Any) -> Plan:
    given: Json = {
        "models": ["random:tiny"],
        "bits": (2.5, 4),
        "depths": (40,),
        "prompts": (20,),
        "rounds": 2,
    }
    return Plan(**given | {"threads": 1} | changes)


def test_everybody_takes_turns_and_is_compared_with_reading(llama: Json, tmp_path: Path) -> None:
    out = tmp_path / "decode.json"
    figures = decode.decode(tiny(**llama, kv_bits=(16, 8)), out)
    assert json.loads(out.read_text()) == figures
    tests = [(c["test"], c["tokens"]) for c in figures["cells"]]
    assert tests == [("decode", 40), ("prefill", 20)]
    cell = figures["cells"][0]
    assert list(cell["contenders"]) == [
        "anybit 2.50 fp16", "anybit 4.00 fp16", "anybit 2.50 int8", "anybit 4.00 int8",
        "anybit 2.50 fp16 kv8", "anybit 4.00 fp16 kv8", "anybit 2.50 int8 kv8", "anybit 4.00 int8 kv8",
        "Transformers 2.50 bfloat16", "Transformers 4.00 bfloat16",
        "Transformers 2.50 float32", "Transformers 4.00 float32",
        "llama.cpp tiny-Q4_0.gguf", "llama.cpp tiny-Q4_0.gguf flash", "llama.cpp tiny-Q4_0.gguf flash kv8",
    ]  # fmt: skip
    for name, c in cell["contenders"].items():
        assert len(c["rounds"]) == 2 and c["range"] == [min(c["rounds"]), max(c["rounds"])], name
        assert c["tokens_per_second"] > 0 and c["of_limit"] > 0 and c["bytes_per_token"] > 0
    narrow, wide = (cell["contenders"][f"anybit {bits} int8"] for bits in ("2.50", "4.00"))
    assert narrow["bytes_per_token"] < wide["bytes_per_token"]
    assert "of_limit" not in figures["cells"][1]["contenders"]["anybit 4.00 int8"]
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert len(calls) == 3 * 2 * 2 and calls[:3] == calls[3:6]  # rounds, one after another
    given = [dict(zip(call[::2], call[1::2])) for call in calls]
    assert {(g["-p"], g["-n"], g["-d"], g["-t"], g["-r"]) for g in given} == {
        ("0", "32", "40", "1", "1"),
        ("20", "0", "0", "1", "1"),
    }
    assert [(g["-fa"], g["-ctk"], g["-ctv"]) for g in given[:3]] == [
        ("0", "f16", "f16"),
        ("1", "f16", "f16"),
        ("1", "q8_0", "q8_0"),
    ]
    plot_decode(figures, tmp_path / "decode.png")
    assert (tmp_path / "decode.png").stat().st_size > 10_000


def test_what_a_file_has_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, plan = tmp_path / "decode.json", tiny(only=("anybit 4.00 int8",))
    first = decode.decode(plan, out)
    measured: list[tuple[str, int]] = []
    measure = decode._measure

    def noted(*given: Any) -> Json:
        measured.append(given[4])
        return measure(*given)

    monkeypatch.setattr(decode, "_measure", noted)
    assert decode.decode(plan, out) == first and not measured
    more = decode.decode(replace(plan, depths=(40, 8)), out)
    assert measured == [("decode", 8)] and [c["tokens"] for c in more["cells"]] == [40, 20, 8]
    measured.clear()
    decode.decode(replace(plan, rounds=1), out)  # in the place of the old ones
    assert measured == [("decode", 40), ("prefill", 20)]
    assert [c["tokens"] for c in json.loads(out.read_text())["cells"]] == [8, 40, 20]
    measured.clear()
    monkeypatch.setattr(decode, "source", lambda: "other code")
    decode.decode(plan, out)
    assert len(measured) == 2
    measured.clear()
    figures = json.loads(out.read_text())
    for cell in figures["cells"]:
        if cell["test"] == "prefill":  # somebody else ran
            cell["contenders"]["anybit 4.00 int8"]["others"] = 0.7
    out.write_text(json.dumps(figures))
    decode.decode(plan, out)
    assert measured == [("prefill", 20)]


def test_a_run_that_stops_keeps_the_cells_that_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> float:
        raise KeyboardInterrupt

    out = tmp_path / "decode.json"
    monkeypatch.setattr(Native, "prefill", stop)
    with pytest.raises(KeyboardInterrupt):
        decode.decode(tiny(only=("anybit 4.00 int8",)), out)
    assert [c["test"] for c in json.loads(out.read_text())["cells"]] == ["decode"]


def test_random_models_have_the_widths_and_memory_of_their_own() -> None:
    model = random_model.random_model(random_model.random_config("tiny"), (2.5, 4))
    for level, bits in zip(model.levels, (2.5, 4)):
        assert level.bits == bits and code_bits(level.layouts.values()) == pytest.approx(bits, abs=0.1)
    blocks = [block.mlp.up_proj.packed.tensors for block in model.model.layers]
    planes = [{t.data_ptr() for name, t in block.items() if name.startswith("plane")} for block in blocks]
    assert planes[0] and not planes[0] & planes[1]
    matrices = [n for n in model.levels[0].layouts if n != "model.embed_tokens"]
    assert len(matrices) == 2 * 7
    for level in model.levels:  # the head is the embedding
        assert touched(model, level.bits, 2) == sum(layout.nbytes for layout in level.layouts.values())
    assert np.isfinite(Engine(model, threads=1).logits([1, 2, 3], 2.5)).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_bytes_and_weights_are_counted_as_they_are(name: str) -> None:
    model = family(name)
    config, embedding = model.config, model.get_input_embeddings().weight
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2]  # tied ones once
    assert decode.parameters(config) == sum(p.numel() for p in matrices)
    read = sum(p.numel() for p in matrices) - (0 if config.tie_word_embeddings else embedding.numel())
    assert touched(model, 16.0, 2) == 2 * read
    if getattr(config, "sliding_window", None):
        assert kv_bytes(config, 800, 16) < 800 * kv_bytes(config, 1, 16)


@pytest.mark.parametrize("size", [64, 80, 128])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_keys_and_values_are_counted_as_the_cache_has_them(size: int, bits: int) -> None:
    config = family("llama", head_dim=size).config
    cache = cpu._native.KvCache(config.num_hidden_layers, config.num_key_value_heads, size, bits, 1)
    counted = kv_bytes(config, cpu._native.PAGE_TOKENS, bits if bits == 16 else bits + 32 / size)
    assert counted < cache.page_bytes if size == 80 else counted == cache.page_bytes  # padding is no need


def test_transformers_decodes_behind_a_filled_cache() -> None:
    runner = InTransformers(sources.open_source("random:tiny", (3,)), "float32", 1)
    cache = runner._filled(37)
    assert cache.get_seq_length() == 37
    with torch.inference_mode():
        assert runner._run(1, cache).logits.shape == (1, 1, 320)
    assert cache.get_seq_length() == 38


def test_steps_are_timed_behind_keys_and_values_that_are_there() -> None:
    engine = Engine(family("llama"), threads=1, context=100)
    free = engine._cache._pages.free
    assert len(step_seconds(engine, 60, 5)) == 5 and prompt_seconds(engine, 100) > 0
    assert engine._cache._pages.free == free
    for depth, steps in ((99, 2), (-1, 2), (5, 0)):
        with pytest.raises(InputError, match="the context holds 100"):
            step_seconds(engine, depth, steps)
    with pytest.raises(InputError, match="a prompt of 101"):
        prompt_seconds(engine, 101)


@pytest.mark.parametrize("kv_bits", [16, 4])
def test_steps_behind_pages_that_take_turns(kv_bits: int) -> None:
    model = family("qwen2-windows", max_position_embeddings=4096)
    engine = Engine(model, threads=2, kv_bits=kv_bits)
    assert engine._cache.native.window_pages
    assert len(step_seconds(engine, 3000, 4)) == 4


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_every_page_that_is_filled_is_written(bits: int) -> None:
    engine = Engine(family("llama"), threads=1, kv_bits=bits, context=1024)
    every = list(range(32))
    table = np.array(every, np.int32)
    fill(engine._cache.native, engine._cache.sizes[:3], (table, table), 1)
    whole = _logits_behind(engine, every)
    assert np.array_equal(_logits_behind(engine, every), whole)
    for at in (0, 17, 30):  # each has numbers of its own
        twice = every.copy()
        twice[at] = every[at + 1]
        assert not np.array_equal(_logits_behind(engine, twice), whole)


def _logits_behind(engine: Engine, pages: list[int]) -> Any:
    """Logits of one token behind all tokens of some pages but the last."""
    text = Held(list(pages), tokens=[0] * (len(pages) * cpu._native.PAGE_TOKENS - 1))
    return engine._run(text, [5], engine._level_of(None))


def test_a_peer_that_fails_is_quoted(llama: Json, tmp_path: Path) -> None:
    program, file = llama["llama_bench"], sources.open_gguf(llama["ggufs"][0])
    program.write_text("#!/bin/sh\necho 'error: out of memory' >&2\nexit 3\n")
    runner = LlamaBench(program, file, False, 16, 1)
    with pytest.raises(InputError, match=r"exit code 3\): error: out of memory"):
        runner.decode(0, 8, 32)
    with pytest.raises(InputError, match="does not start"):
        LlamaBench(tmp_path / "none", file, False, 16, 1).prefill(0, 8)


def test_mistral_rs_runs_the_same_files(llama: Json, tmp_path: Path) -> None:
    python = mistralrs(tmp_path)
    plan = tiny(**llama | {"llama_bench": None}, mistralrs=python, only=("mistral.rs",), kv_bits=(16, 8))
    figures = decode.decode(plan)
    (behind,), (prompt,) = (list(cell["contenders"].items()) for cell in figures["cells"])
    assert behind[0] == prompt[0] == "mistral.rs tiny-Q4_0.gguf"
    assert behind[1]["tokens_per_second"] == 32 / 0.25 and behind[1]["kv_bits"] == 16
    assert prompt[1]["tokens_per_second"] == 20 / 0.5
    asked = [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]
    warm_up = [4, 4, True, "1"]
    assert asked == 2 * [warm_up, [40, 33, True, "1"]] + 2 * [warm_up, [20, 1, True, "1"]]
    plot_decode(figures, tmp_path / "decode.png")
    everyone = tiny(**llama, mistralrs=python).contenders(plan.sources[0])
    assert [c.name for c in everyone if "gguf" in c.name] == [
        "llama.cpp tiny-Q4_0.gguf", "llama.cpp tiny-Q4_0.gguf flash", "mistral.rs tiny-Q4_0.gguf",
    ]  # fmt: skip
    rounded = tiny(**llama, mistralrs=python, kv_bits=(8,)).contenders(plan.sources[0])
    assert not any(c.name.startswith("mistral.rs") for c in rounded)


def test_a_mistral_rs_that_fails_is_quoted(tmp_path: Path) -> None:
    few, file = mistralrs(tmp_path, most=20), sources.open_gguf(gguf(tmp_path / "tiny.gguf"))
    with pytest.raises(InputError, match=r"exit code 1\): 20 tokens came behind 8; 33 behind 8 were asked"):
        MistralRs(few, file, 1).decode(0, 8, 32)
    broken = sources.open_gguf(gguf(tmp_path / "broken.gguf"))
    with pytest.raises(InputError, match=r"broken.gguf .*ValueError: Tokenizer is missing required props"):
        MistralRs(few, broken, 1).prefill(0, 8)
    with pytest.raises(InputError, match="gave no rate"):
        MistralRs(Path("/bin/true"), file, 1).prefill(0, 8)
    with pytest.raises(InputError, match="does not start"):
        MistralRs(tmp_path / "none", file, 1).prefill(0, 8)


class Words:
    """Stands for mistral.rs with a vocabulary in which a text has one of these numbers of tokens."""

    def __init__(self, first: int, **pieces: int) -> None:
        self.first, self.pieces = first, pieces

    def tokenize_text(self, made: str, *_: Any) -> list[int]:
        each = self.pieces["word"] if made.startswith(" a") else self.pieces["letter"]
        return [0] * (self.first + each * (len(made) // (2 if made.startswith(" a") else 1)))


def test_a_text_has_as_many_tokens_as_asked() -> None:
    assert mistralrs_rate.text(Words(0, word=1, letter=9), 5) == " a" * 5
    assert mistralrs_rate.text(Words(1, word=1, letter=9), 5) == " a" * 4  # one begins every text
    assert mistralrs_rate.text(Words(1, word=2, letter=1), 6) == "b" * 5
    with pytest.raises(SystemExit, match="no text of 6 tokens"):
        mistralrs_rate.text(Words(0, word=2, letter=2), 6)


def test_a_gguf_file_counts_what_a_token_reads(tmp_path: Path) -> None:
    matrix = 320 * 64 * 2
    assert sources.open_gguf(gguf(tmp_path / "tied.gguf")).nbytes == 2 * matrix
    assert sources.open_gguf(gguf(tmp_path / "untied.gguf", untied=True)).nbytes == 2 * matrix


def test_others_are_what_neither_this_process_nor_its_children_took() -> None:
    one = Used(10, 3, 100), Used(12, 4, 104)
    assert others([one]) == 1.5
    assert others([one, (Used(0, 0, 0), Used(1, 3, 0))]) == 0  # clocks tick a hundred times a second
    assert others([(Used(10, 3, None), Used(12, 5, 101))]) is None and others([]) is None
    before = used()
    sum(range(5_000_000))
    after = used()
    assert after.wall > before.wall and after.own > before.own


# ---- targets


def cell(
    test: str,
    shape: str,
    tokens: int,
    *found: Json,
    others: float = 0.0,
    random: bool = False,
    model: str = "",
) -> Json:
    named = {f"{i}": {"others": others, "kv_bits": 16, **c} for i, c in enumerate(found)}
    size = 1e8 if shape == decode_targets.SMALL else 6e8
    return {
        "test": test,
        "model": model or shape,
        "shape": shape,
        "tokens": tokens,
        "random": random,
        "parameters": size,
        "contenders": named,
    }


def ours(rate: float, bits: float = 4.0, **more: Any) -> Json:
    read = {"bytes_per_token": int(bits * 10), "of_limit": 0.8}
    return {"engine": "anybit", "bits": bits, "precision": "int8", "tokens_per_second": rate, **read, **more}


def theirs(rate: float, file: str = "x-Q4_0.gguf", **more: Any) -> Json:
    read = {"tokens_per_second": rate, "bytes_per_token": 45}
    return {"engine": "llama.cpp", "file": file, **read, **more}


def rows(number: int, *cells: Json) -> list[Json]:
    return [t for t in decode_targets.targets(cells) if t["row"] == number and t["measured"] is not None]


def test_shares_of_the_memorys_rate_are_judged_by_width() -> None:
    found = [ours(1, bits=b, of_limit=s) for b, s in ((2.43, 0.1), (2.5, 0.66), (2.99, 0.76), (8.0, 0.9))]
    exact = ours(1, precision="fp16", of_limit=0.2)
    made = rows(
        1,
        cell("decode", "Qwen3-0.6B", 128, *found, exact),
        cell("decode", decode_targets.SMALL, 128, ours(1)),
    )
    assert [(t["measured"], t["met"]) for t in made] == [(0.76, True), (0.66, True)]
    assert not rows(1, cell("decode", decode_targets.SMALL, 128, ours(1)))
    (missed,) = rows(1, cell("decode", "Qwen3-0.6B", 128, ours(1, of_limit=0.74)))
    assert missed["met"] is False and missed["bound"] == 1


def test_the_widest_level_of_no_more_bytes_meets_the_fastest_file() -> None:
    peers = [theirs(10), theirs(12, "x-Q2_K.gguf"), theirs(99, "x-Q8_0.gguf")]
    levels = [ours(30, bits=2.5), ours(18, bits=4.4), ours(99, bits=4.6)]
    (found,) = rows(2, cell("decode", decode_targets.SMALL, 128, *levels, *peers))
    assert found["measured"] == 1.5 and found["met"] is None and found["bound"] == pytest.approx(1.5 / 0.8)
    for share, met in ((0.86, None), (0.84, False)):  # or near the bound
        (found,) = rows(2, cell("decode", decode_targets.SMALL, 128, ours(12, of_limit=share), *peers))
        assert found["measured"] == 1 and found["met"] is met
    (found,) = rows(3, cell("decode", decode_targets.CODER, 128, ours(12), theirs(10, "q-Q4_K_M.gguf")))
    assert found["measured"] == 1.2 and found["met"] is False
    assert not rows(3, cell("decode", decode_targets.CODER, 128, ours(12), theirs(10)))
    assert not rows(
        2, cell("decode", decode_targets.SMALL, 128, ours(9, bits=4.6), *peers)
    )  # nothing is as small


def test_a_file_is_beaten_only_by_what_is_as_good() -> None:
    """By perplexity of SmolLM2 and by divergence of Qwen, where they were measured."""
    for row, shape, figure in ((2, decode_targets.SMALL, "perplexity"), (3, decode_targets.CODER, "kld")):
        peer, level = theirs(10, "x-Q2_K-Q4_K_M.gguf"), ours(15, bits=4.4)
        timed = cell("decode", shape, 128, ours(30, bits=2.5), level, peer)
        (found,) = rows(row, timed)
        assert found["met"] is None and found["target"].endswith(f"{figure} not measured")
        (found,) = rows(row, cell("decode", shape, 128, ours(5, bits=4.4), peer))
        assert found["met"] is False  # slower
        for value, met in ((9.0, True), (9.2, False)):
            read = cell("quality", shape, 8192, {**ours(1, bits=2.5), figure: 30}, {**level, figure: value})
            read["contenders"]["x"] = {"engine": "file", "file": peer["file"], figure: 9.1, "others": None}
            (found,) = rows(row, timed, read)
            assert found["met"] is met and found["target"].endswith(f"{figure} {value:.4g} against 9.1")
            (found,) = rows(row, timed | {"model": "another"}, read)  # of the same sizes
            assert found["met"] is None


def test_what_rounded_keys_and_values_cost_is_judged_at_the_worst_width() -> None:
    def read(bits: float, kv_bits: int, value: float) -> Json:
        return {**ours(1, bits=bits, precision="fp16", kv_bits=kv_bits), "perplexity": value}

    figures = {16: (10.0, 20.0), 8: (10.01, 20.08), 4: (10.1, 20.4)}
    found = [read(bits, kv, value) for kv, both in figures.items() for bits, value in zip((3, 4), both)]
    found.append(read(9, 8, 99.0))  # at a width that has no cache of 16 bits
    eight, four = rows(7, cell("quality", decode_targets.SMALL, 8192, *found))
    assert eight["measured"] == pytest.approx(0.004) and eight["met"] is False
    assert four["measured"] == pytest.approx(0.02) and four["met"] is True


def test_deep_and_prompt_targets_are_over_whatever_is_fastest() -> None:
    deep = cell(
        "decode", "Qwen3-1.7B", 8192, ours(10.5), ours(20, kv_bits=8), theirs(9), theirs(10, kv_bits=8)
    )
    assert [(t["measured"], t["met"]) for t in rows(4, deep)] == [(1.05, False), (2.0, True)]
    faster = theirs(20, engine="mistral.rs")
    (found,) = rows(4, cell("decode", "Qwen3-0.6B", 2048, ours(10), theirs(9), faster))
    assert found["measured"] == 0.5 and found["target"].endswith("over mistral.rs")
    prompt = ours(10)
    del prompt["of_limit"]
    others = theirs(99, "x-q8_0.gguf"), theirs(9, "x-q4_k_m.gguf")
    (found,) = rows(5, cell("prefill", "Qwen3-0.6B", 512, prompt, theirs(10), faster, *others))
    assert found["measured"] == 1 and found["met"] and found["bound"] is None


def test_what_others_disturbed_does_not_count() -> None:
    disturbed = cell("decode", "Qwen3-1.7B", 8192, ours(10), theirs(1), others=0.5)
    assert not rows(4, disturbed)
    real = cell("decode", decode_targets.SMALL, 128, ours(10), theirs(10))
    made = cell("decode", decode_targets.SMALL, 128, ours(99), theirs(10), random=True)
    assert [t["measured"] for t in rows(2, made, real)] == [1.0]
    assert all(t["met"] is None for t in decode_targets.targets([]))
    assert {t["row"] for t in decode_targets.targets([])} == {1, 2, 3, 4, 5, 7, 10}


# ---- logits beside Transformers'


def test_the_engine_is_compared_with_transformers(tmp_path: Path) -> None:
    family("llama").save_pretrained(tmp_path / "model")
    plan = tiny(models=[str(tmp_path / "model")], only=("anybit", "Transformers 16.00 float32"), prompts=())
    figures = decode.decode(plan)
    cells = {c["test"]: c["contenders"] for c in figures["cells"]}
    assert list(cells) == ["decode", "agreement"]
    assert list(cells["decode"]) == ["anybit 16.00 fp16", "Transformers 16.00 float32"]
    (found,) = cells["agreement"].values()
    assert 0 < found["difference"] < 1e-3 and found["equal"] > 8
    (target,) = [t for t in figures["targets"] if t["row"] == 10]
    assert target["measured"] == found["difference"] and target["met"] is True
    random = decode.decode(tiny(only=("anybit 4.00 fp16", "Transformers 4.00 float32"), prompts=()))
    assert [c["test"] for c in random["cells"]] == ["decode"]


def test_perplexities_of_widths_caches_and_files(
    anybit_artifact: Path,
    model_dir: Any,
    text_file: Path,
    llama: Json,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quality, "WINDOW", 32)
    monkeypatch.setattr(decode, "WINDOW", 32)
    monkeypatch.setattr(decode, "TOKENS", 32)
    base = str(model_dir("llama"))
    model = AutoModelForCausalLM.from_pretrained(base)
    file = write_gguf(tmp_path / "exact.gguf", model, "llama")
    plan = tiny(
        models=[str(anybit_artifact)], **llama | {"ggufs": (file,)}, text=text_file, base=base,
        only=("anybit 2.", "anybit 3.", "llama.cpp"), kv_bits=(16, 4), depths=(8,), prompts=(), tokens=32,
    )  # fmt: skip
    out = tmp_path / "decode.json"
    figures = decode.decode(plan, out)
    (found,) = [c["contenders"] for c in figures["cells"] if c["test"] == "quality"]
    exact = found["exact.gguf"]["perplexity"]
    assert found["exact.gguf"]["kld"] < 1e-6
    assert len(found) == 9
    for name, c in list(found.items())[:-1]:
        alone = anybit.evaluate(
            anybit_artifact, engine="native", text=str(text_file), seq_len=32, max_tokens=256, bits=c["bits"],
            kv_bits=c["kv_bits"], codebook_precision=c["precision"], base=base,
        )  # fmt: skip
        assert (c["perplexity"], c["kld"]) == pytest.approx(
            (alone["perplexity"], alone["kld_mean"]), rel=1e-6
        ), name
        assert c["kld"] > 1e-4 and c["perplexity"] != exact
    again = decode.decode(plan, out)
    assert again["cells"] == figures["cells"]
    other = tmp_path / "other.txt"
    other.write_text(text_file.read_text()[::-1])
    cells = decode.decode(replace(plan, text=other), out)["cells"]
    assert [c["test"] for c in cells if c not in figures["cells"]] == ["quality"]
    with pytest.raises(InputError, match="--base is for divergences on a text"):
        replace(plan, text=None).check()
    with pytest.raises(InputError, match="none"):
        replace(plan, text=tmp_path / "none.txt").check()
    with pytest.raises(InputError, match="was made of: it has other sizes"):
        family("llama").save_pretrained(tmp_path / "wider")
        replace(plan, base=str(tmp_path / "wider")).check()
    other.write_text("abc")
    with pytest.raises(InputError, match=r"has \d tokens, expected 256: give a longer one"):
        replace(plan, text=other).check()
    assert "quality" in [c["test"] for c in decode.decode(replace(plan, only=("llama.cpp",)))["cells"]]


def test_texts_may_part_where_two_tokens_are_equal() -> None:
    near = {"difference": 1e-4, "equal": 9}
    assert agrees({**near, "gap": None}, 1e-3) and agrees({**near, "gap": 2e-4}, 1e-3)
    assert not agrees({**near, "gap": 3e-4}, 1e-3) and not agrees({**near, "gap": None}, 1e-5)


class Fixed:
    """Stands for the engine: logits of one best token each."""

    vocabulary = 8

    def __init__(self, best: list[int]) -> None:
        self.best = best

    def logits(self, tokens: list[int], bits: float) -> Any:
        return np.eye(8, dtype=np.float32)[self.best[1 : len(tokens) + 1]]


def test_the_first_token_that_differs_is_found() -> None:
    text = [i * 3 % 8 for i in range(257)]
    beside: Any = type("", (), {"greedy": lambda *_: (text[:256], np.eye(8, dtype=np.float32)[text[1:]])})()

    def compare(best: list[int]) -> Json:
        engine: Any = type("", (), {"engine": Fixed(best)})()
        return agreement(engine, beside, 4.0, text[:192])

    assert compare(text) == {"difference": 0.0, "equal": 64, "gap": None}
    other = text.copy()
    other[192 + 5] ^= 1
    assert compare(other) == {"difference": 1.0, "equal": 5, "gap": 1.0}


def test_a_text_is_compared_where_a_tokenizer_reads_it(
    model_dir: Any, tokenizer: Any, tmp_path: Path
) -> None:
    found = prompt_of(str(model_dir("llama")), 8)
    assert found == tokenizer(read_text("builtin-eval"), add_special_tokens=False)["input_ids"][:192]
    family("llama").save_pretrained(tmp_path / "none")
    assert prompt_of(str(tmp_path / "none"), 8) == far_apart(192, 8)
