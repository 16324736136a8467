"""Perplexity and divergence against brute force on tiny models."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

from anybit.errors import InputError
from anybit.evaluation import perplexity as evaluation
from anybit.evaluation.perplexity import paired_bootstrap, perplexity
from anybit.kernels.attention import QuickAttention
from tests.evaluation.models import POSITIONS, VOCABULARY, seeded, tiny_llama


@torch.no_grad()
def noisy(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A model of the same vocabulary that agrees with it now and then, as a quantized one does."""
    generator = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.add_(0.2 * weight.std() * torch.randn(weight.shape, generator=generator))
    return model


def tiny_gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=POSITIONS)
    return seeded(GPT2LMHeadModel, config)


def tiny_gemma2() -> Gemma2ForCausalLM:
    """Its logits are capped after the head."""
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=POSITIONS,
        final_logit_softcapping=0.5,
    )
    return seeded(Gemma2ForCausalLM, config)


def tiny_opt() -> OPTForCausalLM:
    """Its head calls the decoder without its base model."""
    config = OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        ffn_dim=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=POSITIONS,
        word_embed_proj_dim=16,
    )
    return seeded(OPTForCausalLM, config)


def random_tokens(count: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def probabilities(model, window: list[int]) -> np.ndarray:
    """p(next token | prefix) for every prefix of the window, each in a run of its own: float64 [L, V]."""
    rows = [model(input_ids=torch.tensor([window[: n + 1]])).logits[0, -1] for n in range(len(window))]
    logits = torch.stack(rows).double().numpy()
    exps = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exps / exps.sum(axis=1, keepdims=True)


def oracle(model, base, tokens: list[int], seq_len: int, bos: int | None) -> dict:
    nll, base_nll, kld, same = [], [], [], []
    for at in range(0, len(tokens) - seq_len + 1, seq_len):
        window = ([] if bos is None else [bos]) + tokens[at : at + seq_len]
        p, q = probabilities(base, window), probabilities(model, window)
        scored = range(len(window) - 1)
        nll.append(-sum(math.log(q[i, window[i + 1]]) for i in scored))
        base_nll.append(-sum(math.log(p[i, window[i + 1]]) for i in scored))
        kld += [float((p[i] * np.log(p[i] / q[i])).sum()) for i in scored]
        same += [p[i].argmax() == q[i].argmax() for i in scored]
    return {
        "perplexity": math.exp(sum(nll) / len(kld)),
        "base_perplexity": math.exp(sum(base_nll) / len(kld)),
        "window_nll": nll,
        "base_window_nll": base_nll,
        "tokens": len(kld),
        "kld_mean": sum(kld) / len(kld),
        "kld_median": float(np.median(kld)),
        "kld_p99": float(np.percentile(kld, 99)),
        "kld_max": max(kld),
        "top1_agreement": sum(same) / len(same),
    }


@pytest.mark.parametrize("bos", [None, 5])
@pytest.mark.parametrize("chunk", [1 << 24, 4 * VOCABULARY])
def test_figures_equal_brute_force(monkeypatch, bos, chunk):
    monkeypatch.setattr(evaluation, "CHUNK_ELEMENTS", chunk)
    base, model, tokens = tiny_llama(1), noisy(tiny_llama(1)), random_tokens(47)
    result = perplexity(model, tokens, seq_len=9, bos=bos, base=base).as_dict()
    for key, value in oracle(model, base, tokens.tolist(), 9, bos).items():
        assert result[key] == pytest.approx(value, rel=1e-4), key
    assert (result["windows"], result["tail_tokens"], result["seq_len"], result["bos"]) == (5, 2, 9, bos)
    assert result["tokens"] == 5 * (8 if bos is None else 9)
    assert result["base_dtype"] == "float32"
    assert 0 < result["top1_agreement"] < 1, "the models are too alike or too different for this test"
    json.dumps(result, allow_nan=False)


def test_model_against_itself_has_no_divergence():
    model = tiny_llama(1)
    result = perplexity(model, random_tokens(40), seq_len=10, base=model)
    assert (result.kld_max, result.top1_agreement) == (0.0, 1.0)
    assert result.perplexity == result.base_perplexity
    assert result.window_nll == result.base_window_nll


def test_without_base_its_keys_are_absent():
    record = perplexity(tiny_llama(1), random_tokens(40), seq_len=10).as_dict()
    assert {"perplexity", "tokens", "seq_len", "windows", "tail_tokens"} <= record.keys()
    assert not [key for key in record if key.startswith(("kld", "base", "top1"))]


def test_max_tokens_limits_the_text():
    model, tokens = tiny_llama(1), random_tokens(50)
    limited = perplexity(model, tokens, seq_len=10, max_tokens=27)
    assert limited == perplexity(model, tokens[:27], seq_len=10)
    assert (limited.windows, limited.tail_tokens) == (2, 7)
    assert perplexity(model, tokens, seq_len=10, max_tokens=999) == perplexity(model, tokens, seq_len=10)


def test_one_token_windows():
    model, tokens = tiny_llama(1), random_tokens(4)
    nothing = perplexity(model, tokens, seq_len=1, base=tiny_llama(2)).as_dict()
    assert (nothing["perplexity"], nothing["tokens"], nothing["windows"]) == (None, 0, 4)
    assert nothing["kld_mean"] is None and nothing["base_perplexity"] is None
    assert "nothing to score" in nothing["notes"][0]
    scored = perplexity(model, tokens, seq_len=1, bos=5)
    first = probabilities(model, [5])[0]
    assert scored.tokens == 4
    assert scored.perplexity == pytest.approx(np.exp(-np.log(first[tokens]).mean()), rel=1e-5)


@pytest.mark.parametrize("make", [lambda: tiny_llama(1), tiny_gpt2])
def test_bos_takes_a_position_of_a_full_window(make):
    model, tokens = make(), random_tokens(70)
    full = perplexity(model, tokens, seq_len=POSITIONS)
    assert (full.seq_len, full.tokens, full.notes) == (32, 62, ())
    shorter = perplexity(model, tokens, seq_len=POSITIONS, bos=5)
    assert (shorter.seq_len, shorter.tokens, shorter.tail_tokens) == (31, 62, 8)
    assert "BOS takes one of the 32 positions" in shorter.notes[0]
    assert shorter.window_nll == perplexity(model, tokens, seq_len=31, bos=5).window_nll
    with pytest.raises(InputError, match="longer than the 32 positions"):
        perplexity(model, tokens, seq_len=33)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": random_tokens(9)}, "the text has 9 tokens, fewer than one window of 10"),
        ({"max_tokens": 3}, "--max-tokens leaves 3 tokens, fewer than one window of 10"),
        ({"tokens": random_tokens(40).int()}, r"torch.int32 \[40\]; expected int64"),
        ({"tokens": random_tokens(40)[None]}, r"\[1, 40\]; expected int64 of one"),
        ({"tokens": random_tokens(40) + 40}, "vocabulary has 61"),
        ({"bos": 61}, "vocabulary has 61"),
        ({"seq_len": 0}, "seq_len is 0"),
        ({"base": tiny_llama(1, vocabulary=70)}, "61 logits and the base 70"),
    ],
)
def test_requests_that_cannot_be_met(change, message):
    request = {"tokens": random_tokens(40), "seq_len": 10} | change
    with pytest.raises(InputError, match=message):
        perplexity(tiny_llama(1), request.pop("tokens"), **request)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_numbers_name_the_window(bad):
    broken, tokens = tiny_llama(1), torch.arange(40)
    with torch.no_grad():
        broken.get_input_embeddings().weight[25] = bad  # token 25 is in the third window
    with pytest.raises(InputError, match="of the model are NaN or infinite in window 2 "):
        perplexity(broken, tokens, seq_len=10)
    with pytest.raises(InputError, match="of the base model are NaN or infinite in window 2 "):
        perplexity(tiny_llama(1), tokens, seq_len=10, base=broken)


def test_tokens_ruled_out_by_minus_infinity():
    """A model may mask tokens: their probability is 0, which is no fault and no divergence."""

    class Masked(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.config, self.device, self.dtype = inner, inner.config, inner.device, inner.dtype

        def forward(self, **inputs):
            output = self.inner(**inputs)
            output.logits[..., 60] = -math.inf
            return output

    tokens = random_tokens(40).clamp_max(59)
    masked = Masked(tiny_llama(1))
    same = perplexity(masked, tokens, seq_len=10, base=masked)
    assert same.kld_max == 0.0 and math.isfinite(same.perplexity)
    worse = perplexity(masked, tokens.new_full((10,), 60), seq_len=10, base=tiny_llama(1))
    assert worse.perplexity == math.inf and worse.as_dict()["perplexity"] is None
    json.dumps(worse.as_dict(), allow_nan=False)


def test_models_keep_their_mode_and_generators_their_state():
    model, base = tiny_gpt2(), tiny_gpt2()
    quiet = perplexity(model, random_tokens(40), seq_len=10, base=base)
    model.train()
    state = torch.get_rng_state()
    assert perplexity(model, random_tokens(40), seq_len=10, base=base) == quiet, "dropout was active"
    assert model.training and not base.training
    assert torch.equal(state, torch.get_rng_state())


def test_progress_counts_windows():
    seen: list[tuple[int, int]] = []
    perplexity(tiny_llama(1), random_tokens(37), seq_len=10, progress=lambda *args: seen.append(args))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_half_precision_logits_are_scored_in_fp32():
    model, tokens = tiny_llama(1).bfloat16(), random_tokens(20)
    got = perplexity(model, tokens, seq_len=20)
    with torch.no_grad(), QuickAttention():  # whose bfloat16 is rounded elsewhere
        logits = model(input_ids=tokens[None]).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits.double(), tokens[1:], reduction="sum")
    assert got.window_nll[0] == pytest.approx(float(expected), rel=1e-6)


def test_bootstrap_of_equal_and_shifted_models():
    nll = np.random.default_rng(1).gamma(9.0, 10.0, size=50)
    assert paired_bootstrap(nll, nll, 31) == (0.0, 0.0)
    low, high = paired_bootstrap(nll + 31 * 0.25, nll, 31)
    assert (low, high) == (pytest.approx(0.25), pytest.approx(0.25)), "the pairing was lost"


def test_bootstrap_interval_agrees_with_the_normal_one():
    rng = np.random.default_rng(2)
    a, noise = rng.gamma(9.0, 10.0, size=400), rng.normal(1.0, 5.0, size=400)
    low, high = paired_bootstrap(a + noise, a, [10] * 400, resamples=4000)
    half = 1.96 * noise.std() / math.sqrt(400) / 10
    assert low == pytest.approx(noise.mean() / 10 - half, abs=half / 8)
    assert high == pytest.approx(noise.mean() / 10 + half, abs=half / 8)
    assert (low, high) == paired_bootstrap(a + noise, a, 10, resamples=4000), "not reproducible"
    assert (low, high) != paired_bootstrap(a + noise, a, 10, resamples=4000, seed=1)


def test_bootstrap_weights_windows_by_their_tokens():
    """A draw of a long and a short window gives the ratio of the sums: 11/11, not the mean of 0.1 and 10."""
    low, high = paired_bootstrap([1.0, 10.0], [0.0, 0.0], [10, 1])
    assert (low, high) == (0.1, 10.0)
    nll, tokens = [1.0, 10.0] * 500, [10, 1] * 500
    low, high = paired_bootstrap(nll, [0.0] * 1000, tokens)
    assert 0.7 < low < 1.0 < high < 1.3


def test_bootstrap_refuses_windows_that_do_not_pair():
    for a, b, tokens in (([1.0], [1.0, 2.0], 3), ([], [], 3), ([1.0], [1.0], [1, 2])):
        with pytest.raises(InputError, match="same windows"):
            paired_bootstrap(a, b, tokens)
    with pytest.raises(InputError, match="scored tokens"):
        paired_bootstrap([1.0], [1.0], 0)


@pytest.mark.parametrize(
    ("make", "recalls"),
    [(lambda: tiny_llama(0), True), (tiny_gpt2, True), (tiny_gemma2, True), (tiny_opt, False)],
    ids=["llama", "gpt2", "gemma2", "opt"],
)
def test_a_recalled_base_gives_the_same_figures(
    make: Callable[[], PreTrainedModel], recalls: bool, tmp_path: Path
) -> None:
    base, model, tokens = make(), noisy(make()), random_tokens(100)
    expected = perplexity(model, tokens, seq_len=16, base=base)
    for _ in range(2):
        with evaluation.recalled(base, tmp_path):
            assert perplexity(model, tokens, seq_len=16, base=base) == expected
    assert len(list(tmp_path.iterdir())) == (expected.windows if recalls else 0)
    with evaluation.recalled(base, tmp_path):
        other = perplexity(model, tokens + 1 - 2 * (tokens == VOCABULARY - 1), seq_len=16, base=base)
    assert other.kld_mean != expected.kld_mean  # other tokens are not taken for the same
    for parameter in base.model.layers.parameters() if recalls and hasattr(base, "model") else []:
        parameter.data.fill_(math.nan)
        with evaluation.recalled(base, tmp_path):  # not one of its layers runs again
            assert perplexity(model, tokens, seq_len=16, base=base) == expected
    if recalls and hasattr(base, "model"):
        with pytest.raises(InputError, match="NaN"):  # and it is itself again
            perplexity(model, tokens, seq_len=16, base=base)
