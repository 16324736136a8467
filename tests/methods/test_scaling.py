"""AWQ and SmoothQuant: input channels scaled before rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from anybit.calibration.stats import InputStats, LinearStats
from anybit.config import TileSpec
from anybit.methods import METHODS, gptq, scaling
from tests import builders
from tests.builders import outlier_inputs, rounded_layer, stats_of
from tests.oracles import output_error

pytestmark = pytest.mark.native


@pytest.mark.parametrize("kind", ["awq", "smoothquant"])
def test_scaling_is_worth_it(kind: str) -> None:
    """Scaled, the output error falls; and what is stored is the factor times the scaled matrix."""
    weight, stats, made, spec = rounded_layer(kind)
    plain = METHODS["rtn"].quantize(weight, stats, spec.but(scaling="none"))
    x = outlier_inputs(128, weight.shape[1], seed=8)
    assert made.input_scale is not None and made.input_scale.float().std() > 0
    assert output_error(weight, made, x) < 0.9 * output_error(weight, plain, x)


def test_scaling_is_judged_on_the_rows_widths() -> None:
    """Rows of 4 bits decide alpha, though the first tile is one of 8."""
    weight, stats, _, spec = rounded_layer("mixllm")
    assert stats.hessian is not None
    mixed = scaling.search(weight, stats, spec.but(scaling="awq", act_bits=16))
    narrow = replace(spec.but(scaling="awq", act_bits=16), tiles=(TileSpec(4, 32),))
    wide = replace(spec.but(scaling="awq", act_bits=16), tiles=(TileSpec(8, 32, True),))
    assert torch.equal(mixed, scaling.search(weight, stats, narrow))
    assert not torch.equal(mixed, scaling.search(weight, stats, wide))


def test_scaling_looks_at_live_channels_only() -> None:
    weight, _, _, spec = rounded_layer("awq")
    x, loud, dead = outlier_inputs(300, weight.shape[1]), weight.clone(), [1, 17]
    x[:, dead], loud[:, dead] = 0, 100.0
    first, second = (METHODS["awq"].quantize(w, stats_of(x), spec) for w in (weight, loud))
    assert first.input_scale is not None and second.input_scale is not None
    assert torch.equal(first.input_scale, second.input_scale)
    assert torch.equal(first.dequantize(), second.dequantize())


def test_awq_scale_is_a_power_of_the_magnitudes() -> None:
    weight, stats, made, _ = rounded_layer("awq")
    assert made.input_scale is not None and stats.inputs is not None
    slope = torch.linalg.lstsq(
        torch.stack([stats.inputs.magnitudes.log(), torch.ones(weight.shape[1])], 1),
        made.input_scale.float().log()[:, None],
    )
    alpha = -float(slope.solution[0])
    assert 0 < alpha <= 1 and alpha * 20 == pytest.approx(round(alpha * 20), abs=0.02)
    assert float(slope.residuals.sum()) < 1e-3


@pytest.mark.parametrize("kind", ["awq", "smoothquant"])
def test_scaling_composes_with_gptq(kind: str) -> None:
    """The factor, then GPTQ of the scaled matrix on the scaled inputs: nothing else."""
    weight, stats, _, _ = rounded_layer("awq")
    spec = builders.layer_spec(tiles=(TileSpec(3, 32),), clip=True, scaling=kind)
    made = METHODS["gptq"].quantize(weight, stats, spec)
    assert made.input_scale is not None
    factor = made.input_scale.float()
    inputs = InputStats.empty(72)
    by_hand = LinearStats.empty(72, hessian=True)
    by_hand.hessian = stats.hessian * factor * factor[:, None]  # type: ignore[operator]
    by_hand.inputs = inputs
    expected = gptq.quantize(weight / factor, by_hand, spec.but(scaling="none"))
    assert torch.equal(replace(made, input_scale=None).dequantize(), expected.dequantize())
