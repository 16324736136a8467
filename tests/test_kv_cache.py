"""The quantized KV-cache: its arithmetic, its place in Transformers, and what eval and generate make of it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

import anybit
from anybit.artifact.sizes import inspect
from anybit.errors import InputError
from anybit.formats.states import QuantizedStates, rotated
from anybit.generate import Generator
from anybit.kv_cache import CACHE, QuantizedCache, QuantizedLayer, quantized_attention
from anybit.loader import load
from tests import builders
from tests.builders import MakeModel, random

TOKENS = torch.arange(3, 43).view(2, 20)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("d", [1, 7, 12, 64])
def test_states_are_rounded_to_nearest(bits: int, d: int) -> None:
    x = random(2, 3, 5, d) * torch.logspace(-2, 3, 5)[:, None] + 4
    x[0, 0, 0] = 1.5
    states = QuantizedStates.of(x, bits)
    codes = -(-d * bits // 8) if bits != 3 else 3 * -(-d // 8)
    assert states.nbytes == 2 * 3 * 5 * (codes + 4)
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    error = (states.dequantize() - x).abs()
    assert (error <= 0.51 * step + 2e-3 * x.abs().amax(-1, keepdim=True)).all()
    again = QuantizedStates.of(states.dequantize(), bits).dequantize()
    torch.testing.assert_close(again, states.dequantize(), rtol=2e-3, atol=1e-3)
    assert states.dequantize().dtype == x.dtype
    assert QuantizedStates.of(x.bfloat16(), bits).dequantize().dtype == torch.bfloat16


@pytest.mark.parametrize(("d", "rows"), [(64, 64), (80, 80), (96, 96), (40, 40), (12, 12), (72, 8), (10, 2)])
def test_an_outlier_is_spread_over_a_head_and_comes_back(d: int, rows: int) -> None:
    turned = rotated(torch.eye(d))
    assert torch.equal(turned != 0, torch.block_diag(*[torch.ones(rows, rows)] * (d // rows)) != 0)
    torch.testing.assert_close(turned.abs().amax(-1), torch.full((d,), rows**-0.5))
    torch.testing.assert_close(rotated(turned), torch.eye(d))


def test_more_bits_are_nearer() -> None:
    x = random(1, 2, 30, 64)
    errors = [float((QuantizedStates.of(x, b).dequantize() - x).square().mean()) for b in (2, 3, 4, 8)]
    assert all(a > 3 * b for a, b in itertools.pairwise(errors))


@torch.no_grad()
def run(model: Any, tokens: Tensor, cache: Any = None, **options: Any) -> Tensor:
    return model(input_ids=tokens, use_cache=cache is not None, **{CACHE: cache}, **options).logits


FAMILIES = ["llama", "qwen3", "gemma3", "gpt2", "opt"]


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, model_dir: MakeModel) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir(request.param), dtype=torch.float32).eval()


def test_eight_bits_change_little_and_fewer_more(model: Any) -> None:
    base = run(model, TOKENS)
    changes = [
        float((run(model, TOKENS, QuantizedCache(model.config, bits)) - base).abs().mean())
        for bits in (8, 4, 2)
    ]
    assert 0 < changes[0] < changes[1] < changes[2]
    assert changes[0] < 0.05 * float(base.abs().mean())


@pytest.mark.parametrize("bits", [8, 3])
def test_prefill_equals_token_by_token(model: Any, bits: int) -> None:
    """Past the window of gemma3 too, where the cache forgets."""
    whole = run(model, TOKENS, QuantizedCache(model.config, bits))
    cache = QuantizedCache(model.config, bits)
    parts = [run(model, part, cache) for part in TOKENS.split([5, 1, 11, 1, 1, 1], dim=1)]
    assert cache.get_seq_length() == 20
    joined = torch.cat(parts, dim=1)
    # A key that falls between two codes may go either way after a sum in another order.
    assert float((joined - whole).abs().mean()) < 0.02 * float(whole.abs().mean())


def test_cache_takes_less_memory(model: Any) -> None:
    plain, quantized = DynamicCache(config=model.config), QuantizedCache(model.config, 4)
    for cache in (plain, quantized):
        run(model, TOKENS, cache)
    full = sum(t.numel() * t.element_size() for layer in plain.layers for t in (layer.keys, layer.values))
    d = plain.layers[0].keys.shape[-1]
    assert quantized.nbytes == full * (d / 2 + 4) / (4 * d)


def test_beams_and_batches_move_together(model: Any) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False, "pad_token_id": 1}
    made = model.generate(TOKENS, **{CACHE: QuantizedCache(model.config, 8)}, **options)
    assert made.shape[0] == 2 and made.shape[1] > 20
    cache = QuantizedCache(model.config, 8)
    run(model, TOKENS, cache)
    alone = QuantizedCache(model.config, 8)
    run(model, TOKENS[1:], alone)
    cache.batch_select_indices(torch.tensor([1]))
    more = torch.tensor([[7, 9]])
    torch.testing.assert_close(run(model, more, cache), run(model, more, alone), rtol=1e-3, atol=1e-3)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0


def test_crop_forgets_the_last_tokens(model_dir: MakeModel) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir("llama"), dtype=torch.float32).eval()
    cache, fresh = QuantizedCache(model.config, 4), QuantizedCache(model.config, 4)
    run(model, TOKENS, cache)
    cache.crop(-6)
    run(model, TOKENS[:, :14], fresh)
    assert cache.get_seq_length() == 14 and cache.nbytes == fresh.nbytes
    torch.testing.assert_close(run(model, TOKENS[:, :2], cache), run(model, TOKENS[:, :2], fresh))
    with pytest.raises(ValueError, match="negative"):
        cache.crop(3)


def test_unknown_widths_are_refused(model_dir: MakeModel, text_file: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir("llama"), dtype=torch.float32)
    for bits in (5, 16, 1):
        with pytest.raises(InputError, match="expected one of 2, 3, 4, 8"):
            QuantizedCache(model.config, bits)
    with pytest.raises(InputError, match="--kv-bits 6"):
        anybit.evaluate(model_dir("llama"), text=str(text_file), kv_bits=6)


def test_the_artifact_says_its_width(model_dir: MakeModel, tmp_path: Path, text_file: Path) -> None:
    """Eval and generate follow it, and an option overrides it."""
    made = {}
    for kv_bits in (16, 2):
        out = tmp_path / str(kv_bits)
        anybit.quantize(model_dir("llama"), out, builders.options("rtn", kv_bits=kv_bits))
        assert inspect(out)["kv_bits"] == kv_bits
        made[kv_bits] = anybit.evaluate(out, text=str(text_file), seq_len=32, max_tokens=96)
        assert made[kv_bits]["kv_bits"] == kv_bits
    assert made[2]["perplexity"] != made[16]["perplexity"]
    again = anybit.evaluate(tmp_path / "2", text=str(text_file), seq_len=32, max_tokens=96, kv_bits=16)
    assert again["perplexity"] == made[16]["perplexity"]
    by_option = anybit.evaluate(tmp_path / "16", text=str(text_file), seq_len=32, max_tokens=96, kv_bits=2)
    assert by_option["perplexity"] == made[2]["perplexity"]
    generator = Generator(str(tmp_path / "2"), engine="transformers")
    assert generator.kv_bits == 2
    ids = generator.encode("ab")
    seen: list[Any] = []
    handle = generator.runner.model.register_forward_pre_hook(
        lambda m, a, k: seen.append(k[CACHE]), with_kwargs=True
    )
    generator.generate(ids, 4)
    handle.remove()
    assert seen and all(isinstance(cache, QuantizedCache) and cache.bits == 2 for cache in seen)


def test_evaluation_leaves_the_model_as_it_was(model_dir: MakeModel) -> None:
    model = load(model_dir("llama"))
    base = run(model, TOKENS)
    with quantized_attention(model, 2):
        changed = model(input_ids=TOKENS, use_cache=False).logits
    assert not torch.equal(changed, base)
    assert torch.equal(run(model, TOKENS), base)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_states_beyond_float16_are_cut_off_there(bits: int) -> None:
    x = random(1, 2, 3, 16)
    x[0, 0, 0, :2] = torch.tensor([-1e5, 3e5])
    found = QuantizedStates.of(x, bits).dequantize()
    assert found.isfinite().all()
    assert found[0, 0, 0, 0] == -65504 and found[0, 0, 0, 1] == pytest.approx(65504, rel=2e-3)
    assert torch.equal(found[0, 1], QuantizedStates.of(x[:, 1:], bits).dequantize()[0, 0])


def test_a_window_of_one_keeps_nothing() -> None:
    layer = QuantizedLayer(8, window=1)
    for _ in range(3):
        keys, _values = layer.update(random(1, 2, 1, 8), random(1, 2, 1, 8))
        assert keys.shape[2] == 1  # the newest token alone
    assert layer._keys is not None and layer._keys.tokens == 0
