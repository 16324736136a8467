"""The native decoder against Transformers: families, formats, the KV-cache, and the rule that bits do not depend on
what else is computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anybit
from anybit.engine.description import Unsupported, describe, refuse_unknown_fields
from anybit.engine.loaded import LoadedModel
from anybit.kernels import cpu
from anybit.kv_cache import quantized_attention
from anybit.methods import METHODS
from tests import builders
from tests.engine.models import FAMILIES, VOCABULARY, random_model

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu.available(), reason="the native extension is not built"),
]
PAGE = 32
HUGE = 2.0**127  # sums of products with it overflow
Row = tuple[int, int, int]  # token, position, sequence


def description_of(model: Any) -> dict[str, Any]:
    source = LoadedModel(model, None, "fp16")
    return describe(source.config, source.tensor)


class Decoded:
    """A model's decoder at its widest level, and a cache whose pages sequences have in turns."""

    def __init__(
        self,
        model: Any,
        kv_bits: int = 16,
        int8_inputs: bool = False,
        sequences: int = 3,
        isa: str | None = None,
        batch_invariant: bool = True,
        positions: int = 1024,
    ) -> None:
        source = LoadedModel(model, None, "fp16")
        description = describe(source.config, source.tensor)
        self.native, self.threads = cpu._native.Decoder(description, int8_inputs, isa), 2
        self.vocabulary, self.batch_invariant = description["vocabulary"], batch_invariant
        self.level = self.native.add_level(*source.matrices(source.levels[-1][1]))
        pages = positions // PAGE
        sizes = len(description["blocks"]), description["kv_heads"], description["head_size"], kv_bits
        self.cache = cpu._native.KvCache(*sizes, sequences * pages)
        self.pages = np.arange(sequences * pages, dtype=np.int32).reshape(pages, sequences).T.copy()

    def step(self, rows: Sequence[Row]) -> np.ndarray:
        """Logits of all rows."""
        tokens, positions, sequences = (np.array(each, np.int32) for each in zip(*rows))
        logits = np.full((len(rows), self.vocabulary), np.nan, np.float32)
        wanted = np.arange(len(rows), dtype=np.int32)
        self.native.step(
            tokens, positions, sequences, self.pages, wanted, logits, self.level, self.cache, self.threads,
            batch_invariant=self.batch_invariant,
        )  # fmt: skip
        return logits

    def run(self, ids: Sequence[int], chunk: int = 64, sequence: int = 0) -> np.ndarray:
        rows = [(int(token), i, sequence) for i, token in enumerate(ids)]
        return np.concatenate([self.step(rows[i : i + chunk]) for i in range(0, len(rows), chunk)])


def text(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, n)


def reference(model: Any, ids: np.ndarray, kv_bits: int = 16) -> np.ndarray:
    with torch.no_grad(), quantized_attention(model, kv_bits):
        return model(torch.tensor(ids)[None]).logits[0].numpy()


def error(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The largest difference of every token, in the spread of the logits."""
    return np.abs(found - wanted).max(1) / (wanted.max() - wanted.min())


@contextmanager
def keys_and_values_in_float16(model: Any) -> Iterator[None]:
    """Let the model lose what the engine's cache of 16 bits loses."""
    modules = [module for name, module in model.named_modules() if name.endswith(("k_proj", "v_proj"))]
    handles = [module.register_forward_hook(lambda _, __, y: y.half().float()) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ---- what is computed


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str) -> None:
    """Up to what keys and values lose in float16; 300 tokens reach beyond a split and the windows."""
    model, ids = random_model(family), text(300)
    assert error(Decoded(model).run(ids), reference(model, ids)).max() < 1e-3


@pytest.mark.parametrize("kv_bits", [8, 4])
@pytest.mark.parametrize("family", ["llama", "llama3", "mistral", "gemma3", "smollm3", "qwen2-windows"])
def test_a_cache_of_few_bits_rounds_as_quantized_cache_does(family: str, kv_bits: int) -> None:
    """But for numbers between two codes, where the last digits decide: all blocks after the first one see that. What
    one block computes, and so integer attention, is tested more sharply below."""
    model, ids = random_model(family), text(300)
    found = error(Decoded(model, kv_bits).run(ids), reference(model, ids, kv_bits))
    lost = error(reference(model, ids, kv_bits), reference(model, ids))
    assert np.median(found) < 0.4 * np.median(lost)


@pytest.mark.parametrize("isa", cpu._native.engine_isas() if cpu.available() else [])
@pytest.mark.parametrize("kv_bits", [16, 8, 4])
@pytest.mark.parametrize(
    "shape", [(4, 2, 32), (5, 1, 72), (3, 3, 34), (2, 1, 80), (4, 1, 96), (8, 8, 128), (2, 1, 256)]
)
def test_attention_of_every_instruction_set(shape: tuple[int, int, int], kv_bits: int, isa: str) -> None:
    """One block, behind which nothing is rounded again: what queries and weights lose is little beside their codes."""
    heads, kv_heads, head_size = shape
    model = random_model(
        "qwen2",
        num_hidden_layers=1,
        hidden_size=heads * head_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )
    ids = text(300)
    wanted = reference(model, ids, kv_bits)
    found = Decoded(model, kv_bits, isa=isa).run(ids, chunk=300)
    lost = np.median(error(wanted, reference(model, ids)))
    if kv_bits == 16:
        assert error(found, wanted).max() < 1e-3
    else:
        assert np.median(error(found, wanted)) < {8: 0.1, 4: 0.01}[kv_bits] * lost
    for chunk in (1, 37):
        assert np.array_equal(Decoded(model, kv_bits, isa=isa).run(ids, chunk), found)


@pytest.mark.parametrize("kv_bits", [16, 8, 4])
def test_large_biases_of_keys_cost_nothing(kv_bits: int) -> None:
    """They are taken from keys before these are rounded, in the first page and behind it."""
    ids, errors = text(100), []
    for times in (1, 300):
        model = random_model("qwen2")
        with torch.no_grad():
            for block in model.model.layers:
                block.self_attn.k_proj.bias.mul_(times)
        found = Decoded(model, kv_bits).run(ids)
        assert np.median(error(found, reference(model, ids, kv_bits))) < 2e-3
        errors.append(error(found, reference(model, ids)).mean())
    assert errors[1] < 2 * errors[0]


@pytest.mark.parametrize("method", METHODS)
def test_formats_of_all_methods(method: str, tmp_path: Path, tokenizer: Any, text_file: Path) -> None:
    model = random_model("llama", hidden_size=128, intermediate_size=256)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    settings = {} if method == "rtn" else {"samples": 4, "seq_len": 32}
    anybit.quantize(
        tmp_path / "model", tmp_path / "out", builders.options(method, **settings), calibration=str(text_file)
    )
    made, ids = anybit.load(tmp_path / "out"), text(80)
    wanted = reference(made, ids, made.kv_bits)
    for batch_invariant in (True, False):
        found = error(Decoded(made, made.kv_bits, batch_invariant=batch_invariant).run(ids), wanted)
        if method in ("atom", "mixllm", "smoothquant"):  # which round inputs: the least change decides codes
            with keys_and_values_in_float16(made):
                assert found.mean() < 2 * error(reference(made, ids, made.kv_bits), wanted).mean()
        else:
            assert found.max() < 1e-3


def test_rounded_inputs_cost_little(tmp_path: Path, tokenizer: Any) -> None:
    model = random_model("llama", hidden_size=128, intermediate_size=256)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    anybit.quantize(tmp_path / "model", tmp_path / "out", builders.options("rtn", bits=8, group_size=32))
    made, ids = anybit.load(tmp_path / "out"), text(80)
    wanted = reference(made, ids)
    rounded, exact = (
        error(Decoded(made, int8_inputs=True).run(ids), wanted),
        error(Decoded(made).run(ids), wanted),
    )
    assert exact.max() < 1e-3 < rounded.max() < 0.1


@pytest.mark.parametrize(
    "settings",
    [
        {"act_bits": 4, "act_clip": 0.5, "group_size": 32},
        {"act_bits": 8, "act_clip": 0.5, "group_size": 32},
        {"group_size": -1},  # the largest of so many inputs would drown the others
    ],
    ids=str,
)
def test_inputs_are_rounded_as_layers_ask(settings: Any, tmp_path: Path, tokenizer: Any) -> None:
    model = random_model("llama", hidden_size=512, intermediate_size=512)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    anybit.quantize(tmp_path / "model", tmp_path / "out", builders.options("rtn", bits=8, **settings))
    made, ids = anybit.load(tmp_path / "out"), text(40)
    assert np.array_equal(Decoded(made, int8_inputs=True).run(ids), Decoded(made).run(ids))


# ---- bits do not depend on what else is computed


@pytest.mark.parametrize("kv_bits", [16, 8, 4])
@pytest.mark.parametrize("family", ["smollm2", "gemma3"])
def test_chunks_of_a_prompt_change_no_bit(family: str, kv_bits: int) -> None:
    decoded, ids = Decoded(random_model(family), kv_bits), text(300)
    wanted = decoded.run(ids, chunk=300)
    for chunk in (1, 17, 64):
        assert np.array_equal(decoded.run(ids, chunk), wanted)


def test_many_tokens_may_share_what_decoding_a_weight_costs(anybit_artifact: Path) -> None:
    """More tokens than a product takes at once: other bits where that is allowed, the same logits."""
    made, ids = anybit.load(anybit_artifact), text(600) % 256
    invariant, shared = (Decoded(made, batch_invariant=each).run(ids, chunk=600) for each in (True, False))
    assert not np.array_equal(shared, invariant)
    assert error(shared, invariant).max() < 1e-3


@pytest.mark.parametrize("int8_inputs", [False, True])
def test_neighbours_in_a_batch_change_no_bit(int8_inputs: bool) -> None:
    """Sequences at different positions, whose pages lie between one another's."""
    decoded = Decoded(random_model("llama"), int8_inputs=int8_inputs)
    texts = [text(n, seed=n) for n in (90, 61, 33)]
    alone = [decoded.run(ids, sequence=s)[30:] for s, ids in enumerate(texts)]
    for s, ids in enumerate(texts):
        decoded.run(ids[:30], sequence=s)
    for i in range(60):
        rows = [(int(ids[30 + i]), 30 + i, s) for s, ids in enumerate(texts) if 30 + i < len(ids)]
        found = decoded.step(rows)
        for row, (_, _, s) in zip(found, rows):
            assert np.array_equal(row, alone[s][i])


def test_the_number_of_threads_changes_no_bit() -> None:
    decoded, ids = Decoded(random_model("qwen3")), text(300)
    wanted = decoded.run(ids)
    decoded.threads = 1
    assert np.array_equal(decoded.run(ids), wanted)


def test_what_all_windows_have_passed_is_left_out() -> None:
    """Rows far behind the first split, whose windows begin in different ones."""
    model, ids = random_model("mistral"), text(900)
    decoded = Decoded(model)
    wanted = decoded.run(ids, chunk=900)
    assert error(wanted, reference(model, ids)).max() < 1e-3
    assert np.array_equal(decoded.run(ids, chunk=33), wanted)


@pytest.mark.parametrize("kv_bits", [16, 4])
def test_rows_whose_attention_memory_would_not_hold_together(kv_bits: int) -> None:
    """256 rows of 16 heads behind 24 thousand tokens: more parts than are in memory at a time."""
    first = 96 * 256
    model = random_model(
        "llama",
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=first + 256,
    )
    decoded = Decoded(model, kv_bits, sequences=1, positions=first + 256)
    rows = [(int(token), first + i, 0) for i, token in enumerate(text(256))]
    decoded.run(text(PAGE))
    decoded.pages[0, : first // PAGE] = decoded.pages[0, 0]  # what no row has written may be anything
    together = decoded.step(rows)
    alone = np.concatenate([decoded.step(rows[i : i + 50]) for i in range(0, 256, 50)])
    assert np.array_equal(together, alone)


def test_what_a_page_held_before_does_not_matter() -> None:
    """Pages of an earlier text, and of one whose values were not finite."""
    for kv_bits in (16, 8, 4):
        decoded, ids = Decoded(random_model("llama"), kv_bits), text(40)
        wanted = decoded.run(ids)
        decoded.run(text(200, seed=5))
        assert np.array_equal(decoded.run(ids), wanted)
        model = random_model("llama")
        with torch.no_grad():
            model.model.layers[0].self_attn.v_proj.weight[:] = HUGE
        broken = Decoded(model, kv_bits)
        broken.cache = decoded.cache
        with pytest.raises(cpu._native.NotFiniteError, match="the attention of block 0"):
            broken.run(text(64), chunk=64)
        assert np.array_equal(decoded.run(ids), wanted)


# ---- what is refused


def test_families_and_fields_that_are_not_known() -> None:
    model = random_model("llama")
    source = LoadedModel(model, None, "fp16")
    with pytest.raises(Unsupported, match="'llamoid'"):
        describe(source.config | {"model_type": "llamoid"}, source.tensor)
    for field in ("rope_parameters", "hidden_act", "rms_norm_eps", "max_position_embeddings"):
        without = {key: value for key, value in source.config.items() if key != field}
        with pytest.raises(Unsupported, match=f"config.json has no {field}"):
            describe(without, source.tensor)
    for field, number in (
        ("hidden_size", 0),
        ("num_hidden_layers", "text"),
        ("max_position_embeddings", -1),
        ("rms_norm_eps", -1e-5),
    ):
        with pytest.raises(Unsupported, match=f"{field} = {number!r}, expected"):
            describe(source.config | {field: number}, source.tensor)
    still = source.config["rope_parameters"] | {"rope_theta": 0}
    with pytest.raises(Unsupported, match="rope_theta is 0, expected 1 or more"):
        describe(source.config | {"rope_parameters": still}, source.tensor)
    for field in ("rope_parameters", "rms_norm_eps"):
        with pytest.raises(Unsupported, match=r"config\.json is not what the engine reads"):
            describe(source.config | {field: "text"}, source.tensor)
    for family, lost in (("qwen2", "k_proj.bias"), ("qwen3", "q_norm.weight"), ("llama3", "up_proj.bias")):
        whole = LoadedModel(random_model(family), None, "fp16")
        with pytest.raises(Unsupported, match="it has no model"):
            describe(whole.config, lambda name: None if name.endswith(lost) else whole.tensor(name))  # noqa: B023
    windows = {"layer_types": ["sliding_attention"] * 4, "sliding_window": 9}
    foreign = windows | {"hidden_activation": "relu", "final_logit_softcapping": 5.0}
    assert str(describe(source.config | foreign, source.tensor)) == str(description_of(model))
    for field, value in foreign.items():
        changed = random_model("llama", **{field: value})
        with pytest.raises(Unsupported, match=f"says {field} = "):
            description_of(changed)
    inert = {"transformers.js_config": {"dtype": "q4"}, "unsloth_fixed": True, "unsloth_version": "2025.1"}
    refuse_unknown_fields("llama", source.config | inert)
    refuse_unknown_fields("gemma2", {"sliding_window_size": 4096})
    with pytest.raises(Unsupported, match="sliding_window_size = 4096"):
        refuse_unknown_fields("llama", {"sliding_window_size": 4096})
    model.config.attention_sinks = 4
    with pytest.raises(Unsupported, match="attention_sinks = 4"):
        description_of(model)
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(Unsupported, match="'dynamic'"):
        description_of(random_model("llama", rope_parameters=dynamic))


def test_weights_of_more_than_16_bits() -> None:
    model = random_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = 1 / 3
    with pytest.raises(
        Unsupported, match=r"layers\.1\.mlp\.up_proj\.weight holds numbers of more than 16 bits"
    ):
        Decoded(model)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([(VOCABULARY, 0, 0)], r"tokens\[0\] is 300, expected 0 to 299"),
        ([(-1, 0, 0)], r"tokens\[0\] is -1"),
        ([(1, 1024, 0)], r"positions\[0\] is 1024, expected 0 to 1023"),
        ([(1, 0, 3)], r"sequences\[0\] is 3, expected 0 to 2"),
        ([(1, 4, 0), (1, 4, 0)], "positions of sequence 0 do not follow one another"),
        ([(1, 4, 0), (1, 4, 1), (1, 5, 0)], "rows of sequence 0 do not stand together"),
    ],
)
def test_steps_out_of_range(rows: list[Row], words: str) -> None:
    decoded = Decoded(random_model("llama"))
    with pytest.raises(ValueError, match=words):
        decoded.step(rows)


def test_pages_out_of_range() -> None:
    decoded = Decoded(random_model("llama"))
    decoded.pages[0, 1] = 96
    decoded.run(text(32))  # the second page is not reached
    with pytest.raises(ValueError, match=r"pages\[1\] is 96, expected 0 to 95"):
        decoded.run(text(33))


def test_the_layer_that_gives_nan_is_named() -> None:
    for name, words in (
        ("self_attn.o_proj", "the attention of block 2"),
        ("mlp.down_proj", "the MLP of block 2"),
    ):
        model = random_model("llama")
        with torch.no_grad():
            model.model.layers[2].get_submodule(name).weight[0] = HUGE
        with pytest.raises(cpu._native.NotFiniteError, match=words):
            Decoded(model).run(text(5))
    model = random_model("llama")
    with torch.no_grad():
        model.lm_head.weight[7] = HUGE
    with pytest.raises(cpu._native.NotFiniteError, match="the head gives NaN or Inf"):
        Decoded(model).run(text(5))


def test_descriptions_whose_sizes_do_not_belong_together() -> None:
    model = random_model("llama")
    for key, value, words in (
        ("kv_heads", 3, "4 heads are no multiple of 3 kv_heads"),
        ("head_size", 0, "head_size is 0"),
        ("hidden", 65, "final_norm has 64 numbers, expected 65"),
        ("activation", "swish2", "activation 'swish2' is unknown"),
        ("blocks", [], "has no blocks"),
    ):
        with pytest.raises(ValueError, match=words):
            cpu._native.Decoder(description_of(model) | {key: value}, False)
    with pytest.raises(ValueError, match="entries that nobody knows"):
        cpu._native.Decoder(description_of(model) | {"speed": 1}, False)
    wider = cpu._native.Decoder(description_of(random_model("llama", intermediate_size=192)), False)
    with pytest.raises(ValueError, match="block 0: gate is 160 x 64, expected 192 x 64"):
        wider.add_level(*LoadedModel(model, None, "fp16").matrices({}))
