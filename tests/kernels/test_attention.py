"""Attention of many tokens in bfloat16 in C++, and which calls of PyTorch's take it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from anybit import driver
from anybit.calibration.gradients import gradient_statistics
from anybit.calibration.streaming import StreamedModel
from anybit.checkpoint.directory import open_checkpoint
from anybit.evaluation.perplexity import perplexity
from anybit.kernels import attention, cpu
from anybit.kernels.attention import QuickAttention
from tests import builders

native = pytest.mark.native
needs_dot = pytest.mark.skipif(not cpu.has_bfloat16_dot(), reason="no AVX512-BF16 on this machine")

SHAPES = [  # n, heads, key heads, tokens, size
    (1, 1, 1, 1, 2),
    (2, 3, 1, 5, 16),
    (1, 2, 2, 47, 80),
    (1, 4, 2, 48, 64),
    (1, 2, 1, 49, 96),
    (3, 2, 1, 64, 30),
    (1, 2, 2, 65, 256),
    (1, 6, 3, 127, 64),
    (1, 2, 1, 130, 250),
    (1, 9, 3, 300, 64),
]


def heads_of(n: int, heads: int, shared: int, tokens: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values; values lie as a projection leaves them, token by token."""
    generator = torch.Generator().manual_seed(tokens * size + heads)
    query, key = (torch.randn(n, h, tokens, size, generator=generator) for h in (heads, shared))
    value = torch.randn(n, tokens, shared, size, generator=generator).transpose(1, 2)
    return 2 * query.bfloat16(), key.bfloat16(), value.bfloat16()


def exact(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The same in float64: outputs, and the logarithms of the sums of exponentials."""
    shared = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(shared, 1) for x in (key, value))
    scores = query.double() @ key.transpose(-1, -2) * scale
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(later, -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


@native
@needs_dot
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_attention(shape: tuple[int, int, int, int, int]) -> None:
    query, key, value = heads_of(*shape)
    found = [cpu.causal_attention(query, key, value, 0.3, threads) for threads in (1, 2, 3)]
    out, sums = exact(query, key, value, 0.3)
    torch.testing.assert_close(found[0][0].double(), out, rtol=2**-8, atol=0.01)
    assert float((found[0][0].double() - out).norm() / out.norm()) < 0.003
    torch.testing.assert_close(found[0][1].double(), sums, rtol=1e-5, atol=1e-5)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


@native
@needs_dot
def test_rows_begin_anywhere() -> None:
    """Not only at whole pairs of numbers."""
    wide = torch.randn(3, 1, 2, 70, 33, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = cpu.causal_attention(*wide[..., 1:], 0.3)
    wanted = cpu.causal_attention(*wide[..., 1:].contiguous(), 0.3)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@native
@needs_dot
def test_defaults_of_the_process_do_not_matter() -> None:
    heads = heads_of(1, 2, 1, 20, 16)
    wanted = cpu.causal_attention(*heads, 0.3)
    torch.set_default_dtype(torch.float64)
    try:
        found = cpu.causal_attention(*heads, 0.3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@native
@needs_dot
def test_no_query_sees_a_later_token() -> None:
    """Not by a bit."""
    query, key, value = heads_of(1, 2, 1, 200, 64)
    before, sums = cpu.causal_attention(query, key, value, 0.1)
    for place in (199, 128, 100, 64, 1):
        for spoiled, by in ((key, float("nan")), (value, 1e30)):
            kept = spoiled[:, :, place].clone()
            spoiled[:, :, place] = by
            after, sums_after = cpu.causal_attention(query, key, value, 0.1)
            spoiled[:, :, place] = kept
            assert torch.equal(before[:, :, :place], after[:, :, :place])
            assert torch.equal(sums[:, :, :place], sums_after[:, :, :place])
            assert not (after[:, :, place:].abs() < 1e20).any()


@native
@needs_dot
@pytest.mark.parametrize("size", [1e-30, 1.0, 3e4])
def test_scores_of_any_size(size: float) -> None:
    query, key, value = heads_of(1, 2, 1, 150, 32)
    out, sums = cpu.causal_attention(query * size, key, value, 1.0)
    wanted, wanted_sums = exact(query * size, key, value, 1.0)
    assert float((out.double() - wanted).norm() / wanted.norm()) < 0.003
    torch.testing.assert_close(sums.double(), wanted_sums, rtol=1e-5, atol=1e-5)


@native
@needs_dot
def test_what_does_not_fit_is_refused() -> None:
    x = torch.ones(1, 2, 6, 8).bfloat16()
    odd = torch.ones(1, 2, 6, 9).bfloat16()
    for bad, words in (
        ((x.float(), x, x), "q: expected|expected"),
        ((x, x[:, :, :5], x), "expected"),
        ((x, x, x[:, :1]), "expected"),
        ((x, torch.ones(1, 3, 6, 8).bfloat16(), torch.ones(1, 3, 6, 8).bfloat16()), "multiple of the heads"),
        ((odd, odd, odd), "even count"),
        ((torch.ones(1, 1, 2, 258).bfloat16(),) * 3, "2 to 256"),
    ):
        with pytest.raises(ValueError, match=words):
            cpu.causal_attention(*bad, 1.0)


class Calls(TorchFunctionMode):
    """Notes the shapes with which PyTorch's own attention is called."""

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[tuple[int, ...]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            self.queries.append(tuple(args[0].shape[1:3]))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("heads", "positions", "change", "packed"),
    [
        (6, 1, {}, True),
        (6, 1, {"attn_mask": torch.arange(7)[None] % 2 == 0}, False),
        (6, 1, {"is_causal": True}, False),
        (6, 5, {}, False),
        (2, 1, {}, False),
    ],
)
def test_heads_that_share_keys_are_packed(
    heads: int, positions: int, change: dict[str, Any], packed: bool
) -> None:
    query, key, value = torch.randn(3, heads, positions, 8), torch.randn(3, 2, 7, 8), torch.randn(3, 2, 7, 4)
    how = {"enable_gqa": True, "scale": 0.2, **change}
    wanted = scaled_dot_product_attention(query, key, value, **how)
    with Calls() as calls, QuickAttention():
        found = scaled_dot_product_attention(query, key, value, **how)
    torch.testing.assert_close(found, wanted)
    assert calls.queries == [(2, heads // 2) if packed else (heads, positions)]


@pytest.fixture
def multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor on which this way is taken, whatever runs the test; AMX has PyTorch's own."""
    if not cpu.has_bfloat16_dot():
        pytest.skip("no AVX512-BF16 on this machine")
    monkeypatch.setattr(attention, "multiplies_bfloat16", lambda: True)


@native
@pytest.mark.usefixtures("multiplies")
@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"scale": 0.7}, True),
        ({"is_causal": False}, False),
        ({"is_causal": False, "attn_mask": torch.ones(40, 40).tril() > 0}, False),
        ({"dtype": torch.float32}, False),
        ({"dtype": torch.float16}, False),
        ({"size": 31}, False),
        ({"size": 260}, False),
        ({"queries": 39}, False),
    ],
)
def test_which_calls_take_it(change: dict[str, Any], taken: bool) -> None:
    change = {"is_causal": True, **change}
    dtype, size, queries = (
        change.pop("dtype", torch.bfloat16),
        change.pop("size", 32),
        change.pop("queries", 40),
    )
    query, key, value = (x.to(dtype) for x in heads_of(2, 4, 2, 40, size))
    query = query[:, :, :queries]
    wanted = scaled_dot_product_attention(query, key, value, enable_gqa=True, **change)
    with Calls() as calls, QuickAttention():
        found = scaled_dot_product_attention(query, key, value, enable_gqa=True, **change)
    assert calls.queries == ([] if taken else [(4, queries)])
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)


@native
@pytest.mark.usefixtures("multiplies")
def test_what_pytorch_refuses_is_refused() -> None:
    """Heads that share keys without a word; and dropout is PyTorch's."""
    query, key, value = heads_of(1, 4, 2, 40, 32)
    with Calls() as calls, QuickAttention():
        with pytest.raises(RuntimeError):
            scaled_dot_product_attention(query, key, value, is_causal=True)
        scaled_dot_product_attention(query, query, query, dropout_p=0.5, is_causal=True)
    assert calls.queries == [(4, 40), (4, 40)]


@native
@pytest.mark.usefixtures("multiplies")
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    ("shape", "scale"), [((2, 6, 2, 70, 64), None), ((1, 2, 2, 33, 30), 0.4), ((1, 3, 1, 130, 80), None)]
)
def test_gradients(again: bool, shape: tuple[int, int, int, int, int], scale: float | None) -> None:
    """Against float32, and with a forward pass that is made again in the backward one; numbers of a head that do not
    lie side by side are PyTorch's trap."""
    query, key, value = heads_of(*shape)
    query = query.transpose(-1, -2).contiguous().transpose(-1, -2)
    given, how = [x.requires_grad_() for x in (query, key, value)], {"scale": scale, "enable_gqa": True}
    aim = torch.randn(query.shape)

    def quick(*heads: Tensor) -> Tensor:
        with QuickAttention():
            return scaled_dot_product_attention(*heads, is_causal=True, **how)

    out = checkpoint(quick, *given, use_reentrant=False) if again else quick(*given)
    found = torch.autograd.grad(out, given, aim.bfloat16())
    plain = [x.detach().float().requires_grad_() for x in given]
    wanted = torch.autograd.grad(scaled_dot_product_attention(*plain, is_causal=True, **how), plain, aim)
    for a, b in zip(found, wanted, strict=True):
        assert float((a.float() - b).norm() / b.norm()) < 0.01


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the tokens of every attention within `QuickAttention`, whatever computes it."""
    seen: list[int] = []
    computes = attention.attention

    def count(query: Tensor, *rest: Any, **how: Any) -> Tensor:
        seen.append(query.shape[2])
        return computes(query, *rest, **how)

    monkeypatch.setattr(attention, "attention", count)
    return seen


def test_calibration_and_evaluation_take_it(
    model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path, counted: list[int]
) -> None:
    """Both forward passes of every block but the last, whose second nobody needs; and all windows of a text."""
    model = AutoModelForCausalLM.from_pretrained(model_dir("llama"))
    blocks = model.config.num_hidden_layers
    options = builders.options("gptq", bits=4, group_size=16, samples=3, seq_len=24)
    driver.quantize(model_dir("llama"), tmp_path / "out", options, calibration=str(text_file))
    assert counted == [24] * 3 * (2 * blocks - 1)
    counted.clear()
    perplexity(model, torch.arange(100) % 50, seq_len=20)
    assert counted == [20] * 5 * blocks


def test_gradients_take_it_forward_and_again(model_dir: Callable[[str], Path], counted: list[int]) -> None:
    streamed = StreamedModel(open_checkpoint(model_dir("llama")), torch.float32)
    blocks = len(streamed.blocks)
    gradient_statistics(streamed, torch.arange(60).view(2, 30), [f"{streamed.block_name(0)}.mlp.up_proj"])
    assert counted == [30] * 2 * 2 * blocks
