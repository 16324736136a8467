"""Clip search against brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from anybit.methods import clip, gptq, rtn
from anybit.methods.tiling import column_sets
from tests import builders
from tests.builders import correlated_inputs, random, second_moments
from tests.oracles import clip_oracle, output_loss


@pytest.mark.parametrize(("bits", "symmetric"), [(2, False), (3, True), (4, False)])
def test_clip_search_is_brute_force(bits: int, symmetric: bool) -> None:
    weight, x = random(4, 21) ** 3, correlated_inputs(50, 21)
    columns = column_sets(builders.layer_spec(bits, 8, symmetric=symmetric), (4, 21))[0]
    for stats, h in [(second_moments(x), (x.T @ x).numpy().astype(np.float64)), (None, np.eye(21))]:
        ratios = clip.search(weight, columns, stats)
        errors = clip_oracle(weight, h, bits, 8, symmetric)
        chosen = np.abs(np.array(clip.RATIOS)[:, None, None] - ratios.numpy()).argmin(0)
        best = np.take_along_axis(errors, chosen[None], 0)[0]
        assert np.allclose(best, errors.min(0), rtol=1e-4)  # the same ratio, or one as good
        assert (chosen != 0).any()


def test_compensated_clip_search_is_brute_force() -> None:
    weight, cost = random(4, 21) ** 3, torch.rand(21) + 0.1
    columns = column_sets(builders.layer_spec(3, 8), (4, 21))[0]
    ratios = clip.search_compensated(weight, columns, cost)
    errors = clip_oracle(weight, np.diag(cost.numpy().astype(np.float64)), 3, 8, False)
    chosen = np.abs(np.array(clip.RATIOS)[:, None, None] - ratios.numpy()).argmin(0)
    best = np.take_along_axis(errors, chosen[None], 0)[0]
    assert np.allclose(best, errors.min(0), rtol=1e-4)
    assert (chosen != 0).any()


def test_clip_search_of_exact_weights_clips_nothing() -> None:
    weight = torch.tensor([[0.0, 1, 2, 3], [0, 0, 0, 0]])
    columns = column_sets(builders.layer_spec(2, 4), (2, 4))[0]
    assert clip.search(weight, columns, None).tolist() == [[1], [1]]


def test_clipping_lowers_the_loss() -> None:
    weight, x = random(96, 64), correlated_inputs(400, 64)
    stats = second_moments(x)
    assert stats.hessian is not None
    for method in (rtn.quantize, gptq.quantize):
        plain = method(weight, stats, builders.layer_spec(3, 32))
        clipped = method(weight, stats, builders.layer_spec(3, 32, clip=True))
        assert output_loss(weight, clipped, stats.hessian) < output_loss(weight, plain, stats.hessian)
