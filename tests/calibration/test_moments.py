"""Statistics of a model's layers against X^T X by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from anybit.calibration import moments as calibrate
from anybit.calibration.moments import Activations, Collected, Collector, attention_received
from anybit.calibration.stats import LinearStats
from anybit.calibration.streaming import run_block
from anybit.errors import InputError
from tests.builders import FAMILIES, MakeModel, opened, random, save_random, token_rows
from tests.calibration.models import gemma2, whole_model

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


def test_a_forward_pass_ends_with_the_last_layer_that_is_called() -> None:
    class Sometimes(Pair):
        """Calls one layer twice, and another one for long inputs alone, like experts."""

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(self.a(x) + self.a(2 * x))
            return self.b(x) if len(x) > 4 else y

    xs = [random(4 + i, 6, seed=i) for i in range(4)]
    for kind, names, ends in (
        (Pair, {"a", "b", "copy", "conv"}, [False, True, True, True]),
        (Pair, {"b", "copy"}, [False, True, True, True]),
        (Sometimes, {"conv"}, [False, True, True, True]),
        (Sometimes, {"a", "conv"}, [False] * 4),
        (Sometimes, {"b", "conv"}, [False] * 4),
    ):
        torch.manual_seed(0)
        block, found = kind(), []
        linears = {name: layer for name, layer in block.named_children() if name in names}
        with Collector(linears, True) as wanted, torch.no_grad():
            for x in xs:
                block(x)
                wanted.finish_forward()
        with Collector(linears, True, whole=False) as collector, torch.no_grad():
            for x in xs:
                try:
                    block(x)
                    found.append(False)
                except Collected:
                    found.append(True)
                collector.finish_forward()
        assert found == ends
        for name in names:
            assert torch.equal(collector.stats[name].hessian, wanted.stats[name].hessian)  # type: ignore[arg-type]
            assert collector.stats[name].tokens == wanted.stats[name].tokens


def test_only_the_layers_asked_for_are_collected() -> None:
    block = Pair()
    with Collector({"b": block.b}, hessian=True) as collector, torch.no_grad():
        block(random(2, 6))
        collector.finish_forward()
    assert collector.stats.keys() == {"b"}


def test_the_hooks_are_gone_after_an_error() -> None:
    block = Pair()
    with (
        pytest.raises(RuntimeError, match="shapes cannot be multiplied"),
        Collector({"a": block.a}, hessian=True) as collector,
    ):
        block(random(2, 7))
    block(random(2, 6))
    assert not block.a._forward_pre_hooks and not collector.stats  # the second call was not seen


@pytest.mark.parametrize("share", [0, 0.5, 0.7, 1])
@pytest.mark.parametrize("hessian", [True, False])
def test_a_share_of_the_moments_is_of_all_tokens_alike(hessian: bool, share: float) -> None:
    """The rest is the mean over the tokens of some samples, by weights of each layer's own."""
    block, xs = Pair(), [random(1, 5, 6, seed=seed) for seed in (1, 2, 3)]
    weights = {name: {1: random(5, seed=seed).square()} for name, seed in (("a", 4), ("b", 5))}
    collector = Collector(dict(block.named_children()), hessian, importance=weights, plain_share=share)
    with collector, torch.no_grad():
        for x in xs:
            block(x)
            collector.finish_forward()
    stats = collector.collected()
    plain = sum(moment(x) for x in xs)
    assert isinstance(plain, Tensor)
    check_moment(stats["copy"], plain, 15)
    for name, of in weights.items():
        check_moment(stats[name], plain * share + moment(xs[1], of[1]) * (15 / 5) * (1 - share), 15)


def test_weighted_inputs_in_bfloat16_are_rounded_once_more() -> None:
    block, x = nn.Linear(6, 4).bfloat16(), random(1, 50, 6).bfloat16()
    weights = {"": {0: random(50, seed=1).square()}}
    with Collector({"": block}, True, importance=weights) as collector, torch.no_grad():
        block(x)
        collector.finish_forward()
    found = collector.collected()[""].hessian
    expected = (moment(x) + moment(x, weights[""][0])) / 2
    assert found is not None
    torch.testing.assert_close(found.double(), expected, rtol=0.01, atol=0.01 * float(expected.max()))


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


def collected(
    folder: Path, tokens: Tensor, attention: bool, importance: dict[int, Tensor] | None = None
) -> dict[str, LinearStats]:
    """`importance` is that of all layers."""
    streamed = opened(folder)
    states: dict[int, Tensor] = {}
    calls = streamed.first_inputs(tokens, states.__setitem__)
    linears = streamed.linears(0)
    weights = None if importance is None else dict.fromkeys(linears, importance)
    collector = Collector(linears, hessian=True, attention=attention, importance=weights)
    with streamed.block(0) as block, torch.no_grad(), collector:
        for state in states.values():
            run_block(block, state, calls[0])
            collector.finish_forward()
    return collector.collected()


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


def test_importance_takes_the_place_of_attention(model_dir: MakeModel) -> None:
    tokens, weights = token_rows(2, 24), random(24, seed=7).square()
    inputs, _ = block_inputs(model_dir("llama"), tokens)
    stats = collected(model_dir("llama"), tokens, attention=True, importance={1: weights})
    for name, x in inputs.items():
        check_moment(stats[name], moment(x) / 2 + moment(x[24:], weights) * (48 / 24 / 2), 48)


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
