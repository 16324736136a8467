"""Statistics of a model's layers against X^T X by hand and against autograd's full gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    PhiConfig,
    PreTrainedConfig,
)
from transformers.pytorch_utils import Conv1D

from anybit.calibration import moments as calibrate
from anybit.calibration.moments import Activations, Collector, attention_received, gradient_statistics
from anybit.calibration.stats import LinearStats
from anybit.calibration.streaming import linear_shape, run_block
from anybit.errors import InputError
from tests.builders import MakeModel, opened, random, save_random, token_rows

FAMILIES = ("llama", "llama-tied", "qwen3", "gemma3", "gpt2", "opt")
SIZES = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4}
COMMON = {"vocab_size": 97, "initializer_range": 0.2, "max_position_embeddings": 64, **SIZES}


def whole_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


# ---- hidden states between blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_on_disk_are_those_in_memory(tmp_path: Path, dtype: torch.dtype) -> None:
    states = [random(1, 5, 8, seed=i).to(dtype) for i in range(4)]
    size = 4 * states[0].numel() * states[0].element_size()
    memory, disk = Activations(4, tmp_path, budget=size), Activations(4, tmp_path, budget=size - 1)
    for activations in (memory, disk):
        assert len(activations) == 4
        for i in (2, 0, 3, 1):
            activations.put(i, states[i])
    for again in range(2):
        for i in (1, 3, 0, 2):
            assert torch.equal(memory.get(i), states[i]) and torch.equal(disk.get(i), states[i])
            assert disk.get(i).dtype == dtype and disk.get(i).shape == (1, 5, 8)
            states[i] = states[i] * 2 + again
            for activations in (memory, disk):  # the next block's inputs take the place of this one's
                activations.put(i, states[i])
    assert list(tmp_path.iterdir()) == []  # nothing that a killed process could leave behind


def test_activations_take_slices_and_hand_out_tensors_of_their_own(tmp_path: Path) -> None:
    disk = Activations(2, tmp_path, budget=0)
    transposed = random(1, 8, 5).transpose(1, 2)
    disk.put(0, transposed)
    disk.get(0).zero_()
    assert torch.equal(disk.get(0), transposed)


def test_a_sample_that_was_never_put_is_a_defect(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="sample 1"):
        Activations(2, tmp_path).get(1)


# ---- input moments


def moment(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """X^T diag(w) X one token at a time, float64."""
    x = x.reshape(-1, x.shape[-1]).double()
    total = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64)
    for t, token in enumerate(x):
        total += torch.outer(token, token) * (1 if weights is None else float(weights[t]))
    return total


def check_moment(stats: LinearStats, expected: Tensor, tokens: int) -> None:
    assert stats.tokens == tokens
    torch.testing.assert_close(stats.squares.double(), expected.diagonal(), rtol=1e-4, atol=1e-4)
    if stats.hessian is not None:
        torch.testing.assert_close(stats.hessian.double(), expected, rtol=1e-4, atol=1e-4)


class Pair(nn.Module):
    """Two layers on the same input, one on a copy of it, and one on something else."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.copy = nn.Linear(6, 4), nn.Linear(6, 5), nn.Linear(6, 2)
        self.conv = Conv1D(3, 4)
        for parameter in self.parameters():
            parameter.data = random(*parameter.shape)

    def forward(self, x: Tensor) -> Tensor:
        self.b(x), self.copy(x.clone())
        return self.conv(self.a(x))


@pytest.mark.parametrize("hessian", [True, False])
def test_collected_moments_are_those_of_the_inputs(hessian: bool) -> None:
    block, xs = Pair(), [random(2, 3, 6, seed=1), random(1, 7, 6, seed=2), random(4, 6, seed=3)]
    with Collector(dict(block.named_children()), hessian) as collector, torch.no_grad():
        for x in xs:
            block(x)
            collector.finish_forward()
    block(xs[0])  # outside: no longer collected
    stats = collector.stats
    expected = sum(moment(x) for x in xs)
    assert stats.keys() == {"a", "b", "copy", "conv"}
    assert stats["a"] is stats["b"] and stats["copy"] is not stats["a"]
    assert isinstance(expected, Tensor)
    for name in ("a", "copy"):
        check_moment(stats[name], expected, 6 + 7 + 4)
    inner = sum(moment(block.a(x).detach()) for x in xs)
    assert isinstance(inner, Tensor)
    check_moment(stats["conv"], inner, 17)
    assert (stats["a"].hessian is not None) == hessian


def test_only_the_layers_asked_for_are_collected() -> None:
    block = Pair()
    with Collector({"b": block.b}, hessian=True) as collector, torch.no_grad():
        block(random(2, 6))
        collector.finish_forward()
    assert collector.stats.keys() == {"b"}


def test_the_hooks_are_gone_after_an_error() -> None:
    block = Pair()
    with pytest.raises(RuntimeError), Collector({"a": block.a}, hessian=True) as collector:
        block(random(2, 7))
    block(random(2, 6))
    assert not block.a._forward_pre_hooks and not collector.stats  # the second call was not seen


def test_norms_alone_and_half_precision_inputs() -> None:
    x = random(9, 6).bfloat16()
    stats = LinearStats.empty(6, hessian=False)
    stats.add(x[:4])
    stats.add(x[4:])
    check_moment(stats, moment(x.float()), 9)
    assert stats.hessian is None and stats.squares.dtype == torch.float32


def test_statistics_with_nan_are_refused() -> None:
    stats = LinearStats.empty(2, hessian=True)
    stats.add(torch.tensor([[1.0, torch.inf]]))
    with pytest.raises(InputError, match=r"layer\.name.*NaN"):
        stats.check("layer.name")
    LinearStats.empty(2, hessian=True).check("layer.name")


def block_inputs(folder: Path, tokens: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What the first block's linears read in the whole model, and its attention [samples, heads, T, T]."""
    whole = whole_model(folder)
    seen: dict[str, list[Tensor]] = {}
    streamed = opened(folder)
    for name in streamed.linears(0):
        whole.get_submodule(name).register_forward_pre_hook(
            lambda m, args, name=name: seen.setdefault(name, []).append(args[0])
        )
    with torch.no_grad():
        attention = [whole(input_ids=row[None], output_attentions=True).attentions[0] for row in tokens]
    rows = {
        name: torch.cat([x.flatten(0, -2) for x in xs]) for name, xs in seen.items()
    }  # OPT's fc1 reads [T, in]
    return rows, torch.cat(attention)


def collected(folder: Path, tokens: Tensor, attention: bool) -> dict[str, LinearStats]:
    streamed = opened(folder)
    states: dict[int, Tensor] = {}
    calls = streamed.first_inputs(tokens, states.__setitem__)
    collector = Collector(streamed.linears(0), hessian=True, attention=attention)
    with streamed.block(0) as block, torch.no_grad(), collector:
        for state in states.values():
            run_block(block, state, calls[0])
            collector.finish_forward()
    return collector.stats


@pytest.mark.parametrize("family", FAMILIES)
def test_moments_of_a_models_first_block(model_dir: MakeModel, family: str) -> None:
    tokens = token_rows(3, 9)
    inputs, _ = block_inputs(model_dir(family), tokens)
    stats = collected(model_dir(family), tokens, attention=False)
    assert stats.keys() == inputs.keys()
    for name, x in inputs.items():
        check_moment(stats[name], moment(x), 27)
    if family == "llama":
        own = {id(s) for s in stats.values()}
        assert len(own) == 4  # q/k/v, o, gate/up, down


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "opt"])
def test_value_projections_weigh_tokens_by_the_attention_they_receive(
    model_dir: MakeModel, family: str
) -> None:
    tokens = token_rows(2, 24)  # gemma3's window is 16
    inputs, attention = block_inputs(model_dir(family), tokens)
    stats = collected(model_dir(family), tokens, attention=True)
    received = attention.double().square().sum((1, 2)).flatten()  # over heads and queries
    for name, x in inputs.items():
        weights = received if name.endswith("v_proj") else None
        check_moment(stats[name], moment(x, weights), 48)


def test_attention_that_is_not_pytorchs_counts_all_tokens_alike(tmp_path: Path) -> None:
    folder = save_random(gemma2(), tmp_path)  # caps its attention scores, which PyTorch's kernel cannot
    tokens = token_rows(2, 9)
    inputs, _ = block_inputs(folder, tokens)
    stats = collected(folder, tokens, attention=True)
    assert stats.keys() == inputs.keys()
    for name, x in inputs.items():
        check_moment(stats[name], moment(x), 18)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "length"), [(4, 2, 7), (3, 3, 1), (2, 1, 20)])
def test_attention_received_is_the_softmax(causal: bool, heads: int, kv_heads: int, length: int) -> None:
    query, key = random(1, heads, length, 8), random(1, kv_heads, length, 8, seed=1)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    expected = torch.zeros(length)
    for h in range(heads):
        for i in range(length):
            scores = query[0, h, i] @ key[0, h * kv_heads // heads].T * 0.3
            expected += (
                scores.masked_fill(~mask[i] if causal else mask[i] & False, -torch.inf).softmax(0) ** 2
            )
    for options in ({"is_causal": causal}, {"attn_mask": mask if causal else None}):
        torch.testing.assert_close(attention_received(query, key, key, scale=0.3, **options), expected)  # type: ignore[arg-type]
    if causal:
        added = torch.zeros(1, 1, length, length).masked_fill(~mask, -torch.inf)
        torch.testing.assert_close(attention_received(query, key, key, added, scale=0.3), expected)


def test_attention_of_long_samples_is_taken_from_evenly_spaced_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query, key = random(1, 2, 40, 8) * 0.1, random(1, 2, 40, 8, seed=1) * 0.1
    all_queries = attention_received(query, key, key)
    monkeypatch.setattr(calibrate, "ATTENTION_QUERIES", 10)
    torch.testing.assert_close(attention_received(query, key, key), all_queries, rtol=0.2, atol=0)


# ---- gradients


def gemma2() -> Gemma2Config:
    return Gemma2Config(
        **COMMON,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=8,
        query_pre_attn_scalar=8,
        final_logit_softcapping=2.0,
        attn_logit_softcapping=3.0,
    )


def biased_llama() -> LlamaConfig:
    return LlamaConfig(**COMMON, num_key_value_heads=2, attention_bias=True, mlp_bias=True)


def oracle(folder: Path, tokens: Tensor, deltas: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Fisher, products and output moment of every layer from autograd's full gradients of its loss."""
    whole = whole_model(folder)
    found: dict[str, dict[str, Tensor]] = {}
    for name, delta in deltas.items():
        module, d = whole.get_submodule(name), delta.shape
        found[name] = {
            "fisher": torch.zeros(d),
            "products": torch.zeros(len(tokens), d[0]),
            "diagonal": torch.zeros(d[0]),
            "moment": torch.zeros(d[0]),
        }

        def add(m: nn.Module, of_input: Any, of_output: Any, name: str = name) -> None:
            found[name]["moment"] += of_output[0].flatten(0, -2).square().sum(0)

        module.register_full_backward_hook(add)
    for sample, row in enumerate(tokens):
        whole.zero_grad()
        whole(input_ids=row[None], labels=row[None]).loss.backward()
        for name, delta in deltas.items():
            module = whole.get_submodule(name)
            gradient = module.weight.grad.T if isinstance(module, Conv1D) else module.weight.grad
            found[name]["fisher"] += gradient.square()
            found[name]["products"][sample] = (gradient * delta).sum(1)
            found[name]["diagonal"] += (gradient * delta).square().sum(1)
    return found


def check_gradients(folder: Path, tokens: Tensor) -> None:
    streamed = opened(folder)
    deltas = {name: random(*shape, seed=7) for name, shape in streamed.all_linears().items()}
    expected = oracle(folder, tokens, deltas)
    stats = gradient_statistics(
        streamed, tokens, deltas, fisher=True, deltas=[lambda name, a, b: deltas[name][a:b].clone()]
    )
    assert list(stats) == list(deltas)
    largest = max(
        float(found["products"].abs().max()) for found in expected.values()
    )  # what rounding is small beside
    for name, s in stats.items():
        assert (s.samples, s.tokens) == (len(tokens), tokens.numel())
        assert s.fisher is not None
        size = expected[name]["fisher"].max()
        assert size > 0 or tokens.shape[1] == 2  # a first token attends to nothing but itself
        torch.testing.assert_close(
            s.fisher, expected[name]["fisher"], rtol=1e-3, atol=float(size) * 1e-5 + 1e-9
        )
        size = expected[name]["products"].abs().max()
        torch.testing.assert_close(
            s.products[0], expected[name]["products"], rtol=1e-3, atol=float(size) * 1e-4 + 1e-6 * largest
        )
        size = expected[name]["diagonal"].max()
        torch.testing.assert_close(
            s.diagonal[0], expected[name]["diagonal"], rtol=1e-3, atol=float(size) * 1e-4 + 1e-9
        )
        size = expected[name]["moment"].max()
        torch.testing.assert_close(
            s.output_moment, expected[name]["moment"], rtol=1e-3, atol=float(size) * 1e-5 + 1e-9
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_autograds(model_dir: MakeModel, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "LOGIT_CHUNK", 5)
    monkeypatch.setattr(calibrate, "GRADIENT_CHUNK", 700)
    check_gradients(model_dir(family), token_rows(3, 13))


@pytest.mark.parametrize("length", [2, 6, 7])
def test_gradients_with_one_chunk_of_logits(
    model_dir: MakeModel, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "LOGIT_CHUNK", 6)
    check_gradients(model_dir("llama"), token_rows(2, length))


@pytest.mark.parametrize(
    "config", [gemma2(), biased_llama(), PhiConfig(**COMMON)], ids=["gemma2", "biases", "phi"]
)
def test_gradients_of_capped_logits_and_of_biased_layers(
    config: PreTrainedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "LOGIT_CHUNK", 5)
    check_gradients(save_random(config, tmp_path), token_rows(2, 12))


@pytest.mark.parametrize(
    "config",
    [
        CohereConfig(**COMMON, num_key_value_heads=2, logit_scale=0.3),
        GraniteConfig(**COMMON, num_key_value_heads=2, logits_scaling=3.0),
    ],
    ids=["cohere", "granite"],
)
def test_a_head_that_scales_its_logits_is_right_or_refused(config: PreTrainedConfig, tmp_path: Path) -> None:
    folder = save_random(config, tmp_path)
    with pytest.raises(InputError, match=f"{config.model_type}.*logits"):
        check_gradients(folder, token_rows(2, 6))


def test_only_what_is_asked_for(model_dir: MakeModel) -> None:
    streamed = opened(model_dir("llama"))
    name = "model.layers.1.self_attn.q_proj"
    stats = gradient_statistics(streamed, token_rows(2, 6), [name])
    assert list(stats) == [name]
    assert stats[name].fisher is None and not len(stats[name].products)
    assert stats[name].output_moment.shape == (48,) and (stats[name].output_moment > 0).all()


def test_the_model_is_as_before_afterwards(model_dir: MakeModel) -> None:
    streamed, tokens = opened(model_dir("llama")), token_rows(1, 8)
    gradient_statistics(streamed, tokens, streamed.all_linears(), fisher=True)
    with torch.no_grad():
        expected = whole_model(model_dir("llama"))(input_ids=tokens).logits
        torch.testing.assert_close(streamed.model(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-5)
    assert not any(p.requires_grad or p.grad is not None for p in streamed.model.parameters())
    assert all("forward" not in vars(m) for m in streamed.model.modules())
    shapes = {n: linear_shape(streamed.model.get_submodule(n)) for n in streamed.all_linears()}
    assert shapes == streamed.all_linears()


def test_windows_of_one_token_have_nothing_to_predict(model_dir: MakeModel) -> None:
    with pytest.raises(InputError, match="at least 2 tokens"):
        gradient_statistics(opened(model_dir("llama")), token_rows(2, 1), [])


def test_gradients_that_overflow_are_refused_with_the_layers_name(model_copy: MakeModel) -> None:
    folder = model_copy("llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] *= 1e30
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    streamed = opened(folder)
    with pytest.raises(InputError, match=r"model\.layers\.\d.*gradients hold NaN or Inf"):
        gradient_statistics(streamed, token_rows(1, 6), streamed.all_linears())
