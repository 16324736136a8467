"""LLM-MQ: a width per layer by an integer program."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import anybit
from anybit import methods
from anybit.artifact.sizes import inspect
from anybit.errors import InputError
from anybit.loader import load
from anybit.methods import sensitivity
from anybit.methods.method import Search
from anybit.plan import fit_budget
from tests import builders
from tests.builders import MakeModel, opened, token_rows
from tests.probes import logits

SMALL: dict[str, Any] = {"samples": 3, "seq_len": 24}


def test_widths_by_layer_are_optimal() -> None:
    generator = torch.Generator().manual_seed(0)
    for seed in range(5):
        names = [f"l{i}" for i in range(5)]
        scores = {n: torch.rand(3, generator=generator).sort(descending=True).values for n in names}
        weights = {n: int(torch.randint(1, 9, (1,), generator=generator)) for n in names}
        average = 2.3 + 0.3 * seed
        found = sensitivity.assign(scores, weights, (2, 3, 4), average)
        total = sum(weights.values())

        def cost(widths: tuple[int, ...], scores: dict[str, Tensor] = scores) -> float:
            return sum(float(s[b - 2]) for s, b in zip(scores.values(), widths))

        allowed = [
            widths
            for widths in product((2, 3, 4), repeat=5)
            if sum(b * w for b, w in zip(widths, weights.values())) <= average * total + 1e-9
        ]
        assert tuple(found.values()) in allowed
        assert cost(tuple(found.values())) == pytest.approx(min(map(cost, allowed)))
    with pytest.raises(InputError, match="no average of 1"):
        sensitivity.assign(scores, weights, (2, 3, 4), 1.9)


def test_widths_that_cost_nothing_are_taken() -> None:
    scores = {
        "a": torch.tensor([3, 1, 1.2]),
        "b": torch.tensor([3.0, 2, 1]),
    }  # noise: no width is worse for real
    assert sensitivity.assign(scores, {"a": 10, "b": 10}, (2, 3, 4), 4) == {"a": 4, "b": 4}
    assert sensitivity.assign(scores, {"a": 10, "b": 10}, (2, 3, 4), 3.5) == {"a": 3, "b": 4}


def test_widths_fit_a_number_of_bytes() -> None:
    scores = {"a": torch.tensor([3, 2, 0.5]), "b": torch.tensor([3.0, 2, 1])}
    stored = {"a": [20, 30, 40], "b": [21, 39, 41]}
    found = sensitivity.assign(scores, {"a": 10, "b": 10}, (2, 3, 4), 4, stored, 62)
    assert found == {"a": 4, "b": 2}
    with pytest.raises(InputError, match="in 40 bytes"):
        sensitivity.assign(scores, {"a": 10, "b": 10}, (2, 3, 4), 4, stored, 40)


@pytest.mark.slow
@pytest.mark.parametrize("bpw", [4.6, 5.0, 5.5])
def test_llm_mq_keeps_to_a_budget(model_dir: MakeModel, tmp_path: Path, bpw: float) -> None:
    config = methods.options("llm-mq", bpw=bpw, group_size=16, **SMALL)
    fitted = fit_budget(opened(model_dir("llama")), config)
    made = anybit.quantize(model_dir("llama"), tmp_path / "out", fitted)
    assert 0.8 * bpw < made.bits_per_weight <= bpw


def test_scores_of_widths_are_first_order_changes(model_dir: MakeModel) -> None:
    folder, tokens = model_dir("llama"), token_rows(3, 16)
    streamed = opened(folder)
    shapes = streamed.all_linears()
    room = {n: [1, 1, 1] for n in shapes}
    search = Search(streamed, tokens, shapes, builders.options("llm-mq", bits=2.7))
    chosen = sensitivity.layer_widths(search, room, len(room))
    weights = {n: out * in_ for n, (out, in_) in shapes.items()}
    average = sum(weights[n] * b for n, b in chosen.items()) / sum(weights.values())
    assert 2.5 < average <= 2.7 and set(chosen.values()) <= {2, 3, 4}


@pytest.mark.slow
def test_llm_mq_artifacts(model_dir: MakeModel, tmp_path: Path) -> None:
    config = builders.options("llm-mq", bits=2.7, group_size=16, **SMALL)
    anybit.quantize(model_dir("llama"), tmp_path / "out", config)
    figures = inspect(tmp_path / "out")
    assert 2.4 < figures["bits"] <= 2.7
    assert {tile["bits"] for line in figures["layers"] for tile in line["tiles"]} <= {2, 3, 4}
    assert all(len(line["tiles"]) == 1 for line in figures["layers"])
    assert torch.isfinite(logits(load(tmp_path / "out"), token_rows(1, 9))).all()
