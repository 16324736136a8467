"""Statistics of gradients against autograd's full gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CohereConfig, GraniteConfig, LlamaConfig, PhiConfig, PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from anybit.calibration import gradients
from anybit.calibration.gradients import gradient_statistics, spilled_statistics
from anybit.calibration.streaming import linear_shape
from anybit.errors import InputError
from anybit.methods import METHODS
from anybit.methods.method import Search
from anybit.methods.sensitivity import output_moments
from tests.builders import FAMILIES, MakeModel, opened, random, save_random, token_rows
from tests.calibration.models import COMMON, gemma2, whole_model


def test_spilled_gradients_are_the_same(model_dir: MakeModel, tmp_path: Path) -> None:
    from tests.builders import opened, token_rows

    streamed, tokens = opened(model_dir("llama")), token_rows(3, 12)
    shapes = streamed.all_linears()
    in_memory = gradient_statistics(streamed, tokens, shapes, fisher=True)
    ticks: list[int] = []
    gradient_statistics(opened(model_dir("llama")), tokens, shapes, fisher=tmp_path, advance=ticks.append)
    again = spilled_statistics(shapes, tmp_path)
    assert ticks == [1, 1, 1]
    for name in shapes:
        assert torch.equal(in_memory[name].fisher, again[name].fisher)  # type: ignore[arg-type]


def test_damaged_statistics_are_not_used(tmp_path: Path) -> None:
    shapes = {"a": (4, 8), "b": (2, 3)}
    for i, size in enumerate((4 * 32, 4 * 6)):
        (tmp_path / f"fisher-{i}.bin").write_bytes(bytes(size))
    assert spilled_statistics(shapes, tmp_path) is not None
    (tmp_path / "fisher-1.bin").write_bytes(bytes(23))
    assert spilled_statistics(shapes, tmp_path) is None
    assert spilled_statistics({**shapes, "c": (1, 1)}, tmp_path) is None


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
    monkeypatch.setattr(gradients, "LOGIT_CHUNK", 5)
    monkeypatch.setattr(gradients, "GRADIENT_CHUNK", 700)
    check_gradients(model_dir(family), token_rows(3, 13))


@pytest.mark.parametrize("length", [2, 6, 7])
def test_gradients_with_one_chunk_of_logits(
    model_dir: MakeModel, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "LOGIT_CHUNK", 6)
    check_gradients(model_dir("llama"), token_rows(2, length))


@pytest.mark.parametrize(
    "config", [gemma2(), biased_llama(), PhiConfig(**COMMON)], ids=["gemma2", "biases", "phi"]
)
def test_gradients_of_capped_logits_and_of_biased_layers(
    config: PreTrainedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "LOGIT_CHUNK", 5)
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


@pytest.mark.parametrize("own_texts", [0.0, 0.5])
def test_so_it_is_where_the_model_writes_texts_first(tmp_path: Path, own_texts: float) -> None:
    config = CohereConfig(**COMMON, num_key_value_heads=2, logit_scale=0.3)
    options = METHODS["anybit"].options(own_texts=own_texts, samples=2, seq_len=16).resolve()
    search = Search(opened(save_random(config, tmp_path)), token_rows(2, 16), {}, options)
    with pytest.raises(InputError, match=r"cohere.*logits"):
        output_moments(search)


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
