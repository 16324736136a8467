"""What rounding embedding and head costs: statistics against autograd, costs against the losses of rounded models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from anybit.calibration.gradients import gradient_statistics, load_whole
from anybit.calibration.stats import ExpectedTokens, VocabularyCost, VocabularyStats
from anybit.calibration.streaming import StreamedModel
from anybit.checkpoint.directory import open_checkpoint
from tests.builders import VOCABULARY

LENGTH, HIDDEN = 24, 48


def tokens(samples: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 40, (samples, LENGTH), generator=generator)


def gathered(streamed: StreamedModel, ids: Tensor) -> VocabularyStats:
    stats = VocabularyStats.empty(VOCABULARY, HIDDEN, ids.shape[1])
    gradient_statistics(streamed, ids, [], vocabulary=stats)
    return stats


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gemma3"])
def test_statistics_are_those_of_autograd(model_dir: Callable[[str], Path], family: str) -> None:
    streamed, ids = StreamedModel(open_checkpoint(model_dir(family)), torch.float32), tokens()
    found = gathered(streamed, ids)
    model = load_whole(streamed)
    rows = model.get_input_embeddings().weight
    squared, read = torch.zeros(HIDDEN), torch.zeros(VOCABULARY)
    hidden, probability = torch.zeros(HIDDEN, HIDDEN), torch.zeros(VOCABULARY)
    scale = float(getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0))
    for row in ids:
        places = rows.detach()[row].clone().requires_grad_()
        out = model(inputs_embeds=(places * scale)[None], labels=row[None], output_hidden_states=True)
        (gradient,) = torch.autograd.grad(out.loss, places)
        of_rows = torch.zeros(VOCABULARY, HIDDEN).index_add_(0, row, gradient)
        squared, read = squared + gradient.square().sum(0), read + of_rows.square().sum(1)
        h, p = out.hidden_states[-1][0, :-1].detach(), out.logits[0, :-1].detach().softmax(-1)
        hidden, probability = hidden + h.T @ h, probability + p.sum(0)
    assert float(found.samples) == len(ids)
    torch.testing.assert_close(found.gradient, squared, rtol=1e-3, atol=1e-9)
    torch.testing.assert_close(found.read, read, rtol=1e-3, atol=1e-9)
    torch.testing.assert_close(found.hidden, hidden, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.probability, probability, rtol=1e-3, atol=1e-5)


def test_costs_add_up_over_what_a_matrix_does(model_dir: Callable[[str], Path]) -> None:
    found = gathered(StreamedModel(open_checkpoint(model_dir("llama-tied")), torch.float32), tokens())
    both, head, table = (found.cost(*what) for what in ((True, True), (False, True), (True, False)))
    errors, rows = torch.randn(10, HIDDEN) / 100, slice(20, 30)
    torch.testing.assert_close(both.of(errors, rows), head.of(errors, rows) + table.of(errors, rows))
    torch.testing.assert_close(both.hessian(), head.hessian() + table.hessian())
    assert torch.equal(table.hessian(), torch.diag(table.hessian().diagonal()))


def test_what_small_errors_of_the_head_cost_is_the_divergence_that_they_make() -> None:
    """Hidden states and errors of Gaussians: KL(p || p') of the softmax, averaged over errors."""
    generator = torch.Generator().manual_seed(0)
    head, h = (torch.randn(n, 16, generator=generator) for n in (60, 4000))
    found = VocabularyStats.empty(60, 16, len(h) + 1)
    found.samples += 1
    p = (h @ head.T).softmax(-1)
    found.add_head(h, p)
    cost, measured, expected = found.cost(read=False, multiplied=True), 0.0, 0.0
    for _ in range(20):
        errors = torch.randn(60, 16, generator=generator) / 80
        q = (h @ (head + errors).T).log_softmax(-1)
        measured += float((p * (p.log() - q)).sum(1).mean())
        expected += float(cost.of(errors, slice(0, 60)).sum())
    assert expected == pytest.approx(measured, rel=0.1)


def test_rows_of_little_probability_cost_more_than_to_second_order_if_their_errors_are_large() -> None:
    cost = VocabularyCost(torch.eye(4), torch.tensor([1e-4, 1e-4]), torch.zeros(4), torch.zeros(2))
    small, large = (float(cost.of(torch.full((1, 4), e), slice(1, 2))) for e in (0.01, 2.0))
    assert small == pytest.approx(1e-4 * 4 * 0.01**2 / 2, rel=1e-3)
    assert large > 10 * 1e-4 * 4 * 2.0**2 / 2
    assert torch.isfinite(cost.of(torch.full((1, 4), 1e6), slice(0, 1)))


def test_statistics_are_kept_and_found_again(model_dir: Callable[[str], Path]) -> None:
    found = gathered(StreamedModel(open_checkpoint(model_dir("llama")), torch.float32), tokens())
    again = VocabularyStats.of(copy.deepcopy(found.tensors()), found.length)
    assert all(torch.equal(a, b) for a, b in zip(found.tensors().values(), again.tensors().values()))


def test_half_of_a_cost_is_what_the_model_expects_in_texts_of_its_own(
    model_dir: Callable[[str], Path],
) -> None:
    found = gathered(StreamedModel(open_checkpoint(model_dir("llama-tied")), torch.float32), tokens())
    own = ExpectedTokens(torch.rand(VOCABULARY), torch.rand(VOCABULARY))
    without, cost = found.cost(True, True), found.cost(True, True, own)
    torch.testing.assert_close(cost.multiplied, (without.multiplied + own.variance) / 2)
    shares = found.read.sum() / found.gradient.sum()
    torch.testing.assert_close(cost.read, (without.read + own.probability * shares) / 2)
    assert torch.equal(cost.moment, without.moment)
    assert torch.equal(cost.gradient, without.gradient)
    assert not found.cost(False, True, own).read.any()
    assert not found.cost(True, False, own).multiplied.any()
