"""Grids of rounded inputs: searched clips and scales from calibration."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from anybit.config import TileSpec
from anybit.errors import InputError
from anybit.formats import GroupInt
from anybit.kernels import reference
from anybit.methods import activations, rtn
from tests import builders
from tests.builders import rounded_layer


def test_searched_clips_are_the_best_of_the_grid() -> None:
    _weight, stats, made, _ = rounded_layer("atom searched")
    assert stats.inputs is not None
    x = stats.inputs.sample
    (tile, _), dense = made.tiles, made.dequantize()
    assert isinstance(tile, GroupInt) and tile.cols is not None and tile.act_clip is not None
    cols = tile.cols.long()
    for g in range(len(tile.act_clip)):
        at = slice(g * tile.group_size, (g + 1) * tile.group_size)
        part, columns = x[:, cols][:, at], dense[:, cols][:, at]

        def cost(ratio: float, part: Tensor = part, columns: Tensor = columns) -> float:
            clip = torch.tensor([ratio]).half()
            codes, scale = reference.quantize_activations(part, tile.act_bits, part.shape[1], clip, None)
            return float(((codes * scale - part) @ columns.T).square().sum())

        costs = [cost(ratio) for ratio in activations.RATIOS]
        assert cost(float(tile.act_clip[g])) <= 1.001 * min(costs)
    assert (tile.act_clip < 1).any()


def test_static_scales_come_from_the_calibration() -> None:
    weight, stats, made, _ = rounded_layer("static")
    (tile,) = made.tiles
    assert isinstance(tile, GroupInt) and tile.act_scales is not None and stats.inputs is not None
    torch.testing.assert_close(
        tile.act_scales.float(), stats.inputs.peaks.max()[None] / 127, rtol=1e-3, atol=0
    )
    with pytest.raises(InputError, match="calibrate"):
        rtn.quantize(weight, None, builders.layer_spec(tiles=(TileSpec(8, -1),), act_bits=8, act_static=True))
