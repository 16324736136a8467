"""RTN against a slow and obvious oracle in numpy float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from anybit.config import TileSpec
from anybit.errors import InputError
from anybit.formats.validate import validate
from anybit.formats.weight import QuantizedWeight, pack
from anybit.methods import gptq, grid, rtn
from tests import builders
from tests.builders import correlated_inputs, random, second_moments
from tests.oracles import rtn_oracle


def check_rtn(weight: Tensor, bits: int, group_size: int, symmetric: bool) -> QuantizedWeight:
    made = rtn.quantize(weight, None, builders.layer_spec(bits, group_size, symmetric=symmetric))
    validate("layer", pack(made))
    codes, scales, zeros = rtn_oracle(weight, bits, group_size, symmetric)
    (tile,) = made.tiles
    assert np.array_equal(tile.codes.numpy(), codes)
    assert np.array_equal(tile.scales.numpy(), scales)
    assert tile.zeros is None if symmetric else np.array_equal(tile.zeros.numpy(), zeros)  # type: ignore[union-attr]
    assert tile.group_size == (weight.shape[1] if group_size == -1 else group_size)
    assert tile.rows is None and tile.cols is None
    return made


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", range(2, 9))
def test_rtn_is_the_oracle(bits: int, symmetric: bool) -> None:
    for rows, columns, group_size in [
        (3, 40, 16),
        (1, 1, 128),
        (5, 7, -1),
        (2, 33, 32),
        (4, 9, 1),
        (1, 130, 128),
    ]:
        weight = random(rows, columns, seed=bits)
        check_rtn(weight, bits, group_size, symmetric)
        check_rtn(weight.abs(), bits, group_size, symmetric)  # the range includes 0 all the same
        check_rtn(-weight.abs(), bits, group_size, symmetric)


def test_halves_go_to_the_even_code() -> None:
    weight = torch.tensor([[-8.0, 7.0, 0.5, 1.5, 2.5, -0.5, -1.5]])  # asymmetric 4 bits: scale 1, zero 8
    assert check_rtn(weight, 4, -1, False).tiles[0].codes.tolist() == [[0, 15, 8, 10, 10, 8, 6]]
    weight = torch.tensor([[7.0, 0.5, 1.5, -2.5, -3.5]])  # symmetric: scale 1, offset 8
    assert check_rtn(weight, 4, -1, True).tiles[0].codes.tolist() == [[15, 8, 10, 6, 4]]


def test_the_symmetric_grid_has_one_more_code_below_zero() -> None:
    weight = torch.tensor([[4.0, -7.0]])
    tile = check_rtn(weight, 3, -1, True).tiles[0]
    assert tile.scales.tolist() == [[pytest.approx(7 / 3, rel=1e-3)]] and tile.codes.tolist() == [[6, 1]]
    fine = grid.encode(torch.tensor([-4.0, 4.0]), torch.tensor(1.0), torch.tensor(4.0), torch.tensor(7.0))
    assert fine.tolist() == [0, 7]  # -4 is on the grid, 4 is clamped to 3


def test_the_scale_is_rounded_before_the_codes() -> None:
    weight = torch.tensor([[0.0, 2049.0 * 0.5 * 15, 15363.7]])
    scale = float(np.float16(np.float32(2049.0 * 0.5)))
    assert scale == 1024.0  # 1024.5 is between two half-precision numbers
    made = check_rtn(weight, 4, -1, False)
    assert made.tiles[0].scales.item() == scale
    assert made.tiles[0].codes.tolist() == [[0, 15, 15]]


@pytest.mark.parametrize("symmetric", [False, True])
def test_rows_and_groups_of_zeros_stay_zero(symmetric: bool) -> None:
    weight = random(4, 40)
    weight[1] = 0
    weight[2, 16:32] = 0
    dense = check_rtn(weight, 3, 16, symmetric).dequantize()
    assert torch.equal(dense[1], torch.zeros(40)) and torch.equal(dense[2, 16:32], torch.zeros(16))
    assert dense[2, :16].abs().max() > 0


@pytest.mark.parametrize("symmetric", [False, True])
def test_weights_too_small_for_a_half_precision_scale_become_zero(symmetric: bool) -> None:
    weight = random(3, 8)
    weight[1] *= 1e-9
    made = check_rtn(weight, 4, -1, symmetric)
    assert made.tiles[0].scales[1].item() == 0 and not made.dequantize()[1].any()
    weight[1] *= 1e3  # subnormal scales: coarse, but within one step
    scale = check_rtn(weight, 4, -1, symmetric).tiles[0].scales[1].item()
    assert 0 < scale < 6.1e-5


@pytest.mark.parametrize("value", [1e9, -1e9, float("inf"), float("nan")])
def test_weights_too_large_for_a_half_precision_scale_are_refused(value: float) -> None:
    weight = random(3, 8)
    weight[2, 5] = value
    for symmetric in (False, True):
        spec = builders.layer_spec(8, 4, symmetric=symmetric)
        with pytest.raises(InputError, match="float16"):
            rtn.quantize(weight, None, spec)
        with pytest.raises(InputError, match="float16"):
            gptq.quantize(weight, second_moments(correlated_inputs(30, 8)), spec)


def test_padding_a_ragged_group_changes_nothing() -> None:
    weight = random(3, 37).abs() + 1
    ragged = rtn.quantize(weight, None, builders.layer_spec(4, 16)).dequantize()
    alone = rtn.quantize(weight[:, 32:], None, builders.layer_spec(4, 5)).dequantize()
    assert torch.equal(ragged[:, 32:], alone)


def test_tiles_by_rows_and_columns_are_quantized_each_on_its_own() -> None:
    weight = random(5, 24)
    by_rows = builders.layer_spec(
        tiles=(TileSpec(8, 16, True, rows=(1, 4)), TileSpec(4, 16, False, rows=(0, 2, 3)))
    )
    dense = rtn.quantize(weight, None, by_rows).dequantize()
    wide = rtn.quantize(weight[[1, 4]], None, builders.layer_spec(8, 16, symmetric=True)).dequantize()
    narrow = rtn.quantize(weight[[0, 2, 3]], None, builders.layer_spec(4, 16)).dequantize()
    assert torch.equal(dense[[1, 4]], wide) and torch.equal(dense[[0, 2, 3]], narrow)
    last, first = tuple(range(23, 7, -1)), tuple(range(8))
    by_cols = builders.layer_spec(tiles=(TileSpec(4, 8, True, cols=last), TileSpec(2, 16, cols=first)))
    made = rtn.quantize(weight, None, by_cols)
    assert [t.cols.tolist() for t in made.tiles] == [list(last), list(first)]  # type: ignore[union-attr]
    four = rtn.quantize(weight[:, list(last)], None, builders.layer_spec(4, 8, symmetric=True)).dequantize()
    two = rtn.quantize(weight[:, :8], None, builders.layer_spec(2, 16)).dequantize()
    assert torch.equal(made.dequantize()[:, list(last)], four) and torch.equal(made.dequantize()[:, :8], two)
    validate("layer", pack(made))
