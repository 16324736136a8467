"""Statistics of inputs."""

from __future__ import annotations

import torch

from anybit.calibration.stats import InputStats
from anybit.formats.bits import split_groups
from tests.builders import outlier_inputs


def test_input_statistics_are_sums_and_a_sample() -> None:
    x = outlier_inputs(100, 12)
    stats = InputStats.empty(12)
    stats.add(x)
    torch.testing.assert_close(stats.magnitudes, x.abs().sum(0))
    torch.testing.assert_close(stats.peaks, x.abs().amax(0))
    torch.testing.assert_close(stats.energy, x.square().sum(0))
    assert all(any(torch.equal(row, other) for other in x) for row in stats.sample)
    half = stats.scaled(torch.full((12,), 0.5))
    torch.testing.assert_close(half.energy, x.square().sum(0) / 4)
    assert split_groups(half.sample, 4).shape == (16, 3, 4)
