"""GPTQ against a slow and obvious oracle in numpy float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from anybit.calibration.stats import LinearStats
from anybit.config import TileSpec
from anybit.errors import InputError
from anybit.formats.validate import validate
from anybit.formats.weight import QuantizedWeight, pack
from anybit.kernels import cpu, reference
from anybit.methods import compensation, gptq, grid, rtn
from tests import builders
from tests.builders import correlated_inputs, random, second_moments
from tests.oracles import gptq_oracle, output_loss

MIXED_ROWS = (TileSpec(8, 16, True, rows=(0, 3, 4)), TileSpec(4, 16, False, rows=(1, 2, 5, 6, 7)))
FIRST, REST = tuple(range(2, 50, 3)), tuple(j for j in range(50) if j not in range(2, 50, 3))
MIXED_COLUMNS = (TileSpec(2, 16, False, cols=REST), TileSpec(4, -1, True, cols=FIRST))
SPECS = {
    "asymmetric": builders.layer_spec(4, 16, group_reorder=False),
    "symmetric": builders.layer_spec(4, 16, symmetric=True, group_reorder=False),
    "two bits, whole rows": builders.layer_spec(2, -1),
    "three bits, ragged": builders.layer_spec(3, 12, symmetric=True),
    "group reorder": builders.layer_spec(3, 8),
    "group reorder, symmetric": builders.layer_spec(3, 8, symmetric=True),
    "group of one": builders.layer_spec(4, 1),
    "eight bits": builders.layer_spec(8, 16),
    "strong damping": builders.layer_spec(4, 16, damp=0.5),
    "desc_act": builders.layer_spec(4, 16, desc_act=True),
    "desc_act, whole rows": builders.layer_spec(3, -1, symmetric=True, desc_act=True),
    "clip": builders.layer_spec(3, 16, clip=True),
    "clip, desc_act": builders.layer_spec(3, 16, symmetric=True, clip=True, desc_act=True),
    "8 and 4 bits by rows": builders.layer_spec(tiles=MIXED_ROWS),
    "8 and 4 bits by rows, desc_act": builders.layer_spec(tiles=MIXED_ROWS, desc_act=True),
    "2 and 4 bits by columns": builders.layer_spec(tiles=MIXED_COLUMNS),
    "2 and 4 bits by columns, natural": builders.layer_spec(
        tiles=MIXED_COLUMNS, group_reorder=False, clip=True
    ),
    "2 and 4 bits by columns, desc_act": builders.layer_spec(tiles=MIXED_COLUMNS, desc_act=True),
}


def check_gptq(weight: Tensor, stats: LinearStats, spec: builders.LayerSpec) -> QuantizedWeight:
    """GPTQ makes the oracle's matrix but for rare ties, with a loss that is as low."""
    assert stats.hessian is not None
    made = gptq.quantize(weight, stats, spec)
    validate("layer", pack(made))
    dense, expected = made.dequantize().numpy(), gptq_oracle(weight, stats, spec)
    assert np.isfinite(dense).all()
    equal = np.isclose(
        dense, expected, rtol=2e-3, atol=1e-6
    )  # one unit of a half-precision scale apart at most
    assert equal.mean() >= 0.995, f"{(~equal).sum()} of {equal.size} weights differ"
    ours, theirs = output_loss(weight, made, stats.hessian), output_loss(weight, expected, stats.hessian)
    assert ours == pytest.approx(theirs, rel=0.01, abs=1e-3)
    return made


@pytest.mark.parametrize("name", SPECS)
def test_gptq_is_the_oracle(name: str) -> None:
    check_gptq(random(8, 50), second_moments(correlated_inputs(200, 50)), SPECS[name])


@pytest.mark.parametrize(
    "name", ["asymmetric", "desc_act", "clip", "8 and 4 bits by rows", "2 and 4 bits by columns"]
)
def test_gptq_with_dead_channels_and_fewer_tokens_than_channels(name: str) -> None:
    x = correlated_inputs(20, 50)
    x[:, [0, 5, 17, 48]] = 0
    made = check_gptq(random(8, 50), second_moments(x), SPECS[name])
    assert not made.dequantize()[:, [0, 5, 17, 48]].any()


def test_weights_of_dead_channels_change_nothing() -> None:
    x, weight = correlated_inputs(200, 50), random(8, 50)
    x[:, [0, 17]] = 0
    other = weight.clone()
    other[:, [0, 17]] = 40.0
    for name, method in (
        ("asymmetric", gptq),
        ("clip", gptq),
        ("clip, desc_act", gptq),
        ("asymmetric", rtn),
        ("clip", rtn),
    ):
        first, second = (
            method.quantize(w, second_moments(x), SPECS[name]).dequantize() for w in (weight, other)
        )
        assert torch.equal(first, second)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_gptq_with_a_rank_deficient_hessian(rank: int) -> None:
    x = correlated_inputs(rank, 50) if rank else torch.zeros(4, 50)
    check_gptq(random(8, 50), second_moments(x), builders.layer_spec(4, 16, damp=0.01))


def test_gptq_over_more_columns_than_a_block() -> None:
    assert compensation.BLOCK < 300
    weight, stats = random(3, 300), second_moments(correlated_inputs(600, 300))
    for spec in (
        builders.layer_spec(4, -1),
        builders.layer_spec(3, 200, symmetric=True),
        builders.layer_spec(4, 128, desc_act=True),
    ):
        check_gptq(weight, stats, spec)


def test_gptq_of_one_column() -> None:
    made = check_gptq(random(4, 1), second_moments(correlated_inputs(9, 1)), builders.layer_spec(4, 128))
    assert torch.equal(
        made.dequantize(), rtn.quantize(random(4, 1), None, builders.layer_spec(4)).dequantize()
    )


def test_gptq_on_independent_channels_is_rtn() -> None:
    weight, stats = random(6, 40), second_moments(torch.eye(40) * 3)
    for spec in (builders.layer_spec(4, 16), builders.layer_spec(3, 16, symmetric=True)):
        assert torch.equal(
            gptq.quantize(weight, stats, spec).dequantize(), rtn.quantize(weight, None, spec).dequantize()
        )


def test_desc_act_stores_its_permutation_and_group_reorder_none() -> None:
    weight, stats = random(8, 50), second_moments(correlated_inputs(200, 50))
    energy = stats.squares
    (tile,) = gptq.quantize(weight, stats, SPECS["desc_act"]).tiles
    assert tile.cols is not None and tile.cols.dtype == torch.int32
    assert torch.equal(tile.cols.long(), torch.argsort(energy, descending=True, stable=True))
    assert gptq.quantize(weight, stats, SPECS["group reorder"]).tiles[0].cols is None
    tiles = gptq.quantize(weight, stats, SPECS["2 and 4 bits by columns, desc_act"]).tiles
    for made, channels in zip(tiles, (REST, FIRST)):
        assert made.cols is not None and sorted(made.cols.tolist()) == list(channels)
        assert (energy[made.cols.long()].diff() <= 0).all()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_gptq_beats_rtn_on_correlated_inputs(bits: int) -> None:
    for seed in range(3):
        weight, stats = random(16, 96, seed=seed), second_moments(correlated_inputs(400, 96, seed + 10))
        assert stats.hessian is not None
        spec = builders.layer_spec(bits, 32)
        rounded = output_loss(weight, rtn.quantize(weight, None, spec), stats.hessian)
        for options in ({}, {"desc_act": True}, {"group_reorder": False}):
            made = gptq.quantize(weight, stats, builders.layer_spec(bits, 32, **options))
            assert output_loss(weight, made, stats.hessian) < 0.95 * rounded


@pytest.mark.parametrize(
    "name", ["clip", "clip, desc_act", "8 and 4 bits by rows", "2 and 4 bits by columns"]
)
def test_methods_are_pure_and_deterministic(name: str) -> None:
    weight, stats = random(8, 50), second_moments(correlated_inputs(200, 50))
    assert stats.hessian is not None
    before, hessian, state = weight.clone(), stats.hessian.clone(), torch.get_rng_state()
    for method in (rtn.quantize, gptq.quantize):
        spec = SPECS[name]
        first, again = pack(method(weight, stats, spec)), pack(method(weight, stats, spec))
        assert first.layout == again.layout
        assert all(torch.equal(first.tensors[f], again.tensors[f]) for f in first.tensors)
    assert torch.equal(weight, before) and torch.equal(stats.hessian, hessian) and stats.tokens == 200
    assert torch.equal(torch.get_rng_state(), state)


def test_gptq_refuses_what_it_cannot_use() -> None:
    weight = random(2, 2)
    with pytest.raises(InputError, match="Hessian"):
        gptq.quantize(weight, None, builders.layer_spec())
    with pytest.raises(InputError, match="Hessian"):
        gptq.quantize(weight, LinearStats.empty(2, hessian=False), builders.layer_spec())
    indefinite = torch.tensor([[1.0, 100.0], [100.0, 1.0]])
    with pytest.raises(InputError, match="positive definite"):
        gptq.quantize(weight, LinearStats(1, indefinite.diagonal(), indefinite), builders.layer_spec())


def test_damping_is_raised_until_the_factorisation_works() -> None:
    slightly_indefinite = torch.tensor([[1.0, 1.05], [1.05, 1.0]])  # 1 % is too little, 10 % is enough
    factor = compensation.inverse_factor(slightly_indefinite, torch.arange(len(slightly_indefinite)), 0.01)
    damped = slightly_indefinite + 0.1 * torch.eye(2)
    assert torch.allclose(factor.T @ factor, torch.linalg.inv(damped), rtol=1e-4)
    assert torch.equal(factor, factor.triu())


def test_the_factor_is_that_of_the_inverse() -> None:
    h = second_moments(correlated_inputs(300, 40)).hessian
    assert h is not None
    factor = compensation.inverse_factor(h, torch.arange(len(h)), 0.01).double()
    damped = h.double() + 0.01 * h.diagonal().mean() * torch.eye(40)
    assert torch.allclose(factor.T @ factor @ damped, torch.eye(40, dtype=torch.float64), atol=1e-3)


@pytest.mark.skipif(not cpu.available(), reason=f"no native extension: {cpu.why_not()}")
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 16), (16, 33), (37, 128)])
def test_the_native_block_is_the_reference_to_the_bit(rows: int, columns: int) -> None:
    weight = random(rows, columns)
    h = second_moments(correlated_inputs(2 * columns, columns)).hessian
    assert h is not None
    factor = compensation.inverse_factor(h, torch.arange(len(h)), 0.01).contiguous()
    bits = torch.arange(rows) % 7 + 2
    scale, zero = grid.fit(weight, bits, bits % 3 == 0)
    scale[::4] = 0  # a group of zeros that compensation has filled since: no grid, so the zero point
    slow, fast = weight.clone(), weight.clone()
    expected = reference.gptq_block(slow, factor, scale, zero, 2.0**bits - 1)
    made = cpu.gptq_block(fast, factor, scale, zero, 2.0**bits - 1)
    assert torch.equal(made[0], expected[0])
    assert torch.equal(made[1].view(torch.int32), expected[1].view(torch.int32))
    assert torch.equal(fast.view(torch.int32), slow.view(torch.int32))
    assert (expected[0][::4] == zero[::4, None]).all()


@pytest.mark.skipif(not cpu.available(), reason=f"no native extension: {cpu.why_not()}")
def test_gptq_makes_the_same_bytes_without_the_native_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, stats = random(9, 150), second_moments(correlated_inputs(200, 150))
    specs = [builders.layer_spec(4, 64), builders.layer_spec(3, -1, symmetric=True, desc_act=True, clip=True)]
    fast = [pack(gptq.quantize(weight, stats, spec)) for spec in specs]
    monkeypatch.setattr(cpu, "_native", None)
    for spec, expected in zip(specs, fast):
        made = pack(gptq.quantize(weight, stats, spec))
        assert all(torch.equal(made.tensors[f], expected.tensors[f]) for f in expected.tensors)
