"""Tilings of a layer: those that fit have a known layout, the others are refused."""

from __future__ import annotations

import pytest
import torch

from anybit.calibration.stats import LinearStats
from anybit.config import TileSpec
from anybit.errors import InputError
from anybit.formats.layout import LayerLayout
from anybit.formats.weight import pack
from anybit.methods import METHODS, gptq, rtn
from anybit.methods.tiling import column_sets
from anybit.plan import spec_layout
from tests import builders


@pytest.mark.parametrize(
    ("tiles", "word"),
    [
        ((TileSpec(rows=(0, 1)),), "leave out 2"),
        ((TileSpec(rows=(0, 1)), TileSpec(rows=(1, 2, 3))), "same weights"),
        ((TileSpec(), TileSpec()), "same weights"),
        ((TileSpec(rows=(0, 4)), TileSpec(rows=(1, 2, 3))), "below 4"),
        ((TileSpec(rows=(-1, 0)), TileSpec(rows=(1, 2))), "below 4"),
        ((TileSpec(rows=(1, 0)), TileSpec(rows=(2, 3))), "ascending"),
        ((TileSpec(rows=()), TileSpec()), "no rows"),
        ((TileSpec(rows=(0, 1), group_size=16), TileSpec(rows=(2, 3), group_size=8)), "group_size"),
        ((TileSpec(cols=(0, 1, 2)), TileSpec(cols=(3, 4))), "1 input channels are in no tile"),
        ((TileSpec(cols=(0, 1, 2)), TileSpec(cols=(3, 4, 5, 6))), "channel 6"),
        ((TileSpec(cols=(0, 1, 2)), TileSpec(cols=(2, 3, 4, 5))), "channel 2 is in two tiles"),
        ((TileSpec(cols=(-1, 0, 1, 2, 3, 4)),), "channel -1"),
        ((TileSpec(cols=(0, 0, 1, 2, 3, 4)),), "channel 0 is in two tiles"),
        ((TileSpec(cols=()), TileSpec()), "no columns"),
        ((TileSpec(cols=(0, 1, 2, 3, 4, 2**64)),), f"channel {2**64}, the matrix has 6"),
        ((TileSpec(), TileSpec(cols=(0, 1, 2, 3, 4, 5))), "channel 0 is in two tiles"),
        (tuple(TileSpec(rows=(0,)) for _ in range(300)), "300 tiles"),
    ],
)
def test_tilings_that_do_not_fit_are_refused(tiles: tuple[TileSpec, ...], word: str) -> None:
    with pytest.raises(InputError, match=word):
        column_sets(builders.layer_spec(tiles=tiles), (4, 6))


TILINGS = {
    "plain": builders.layer_spec(4, 16),
    "planes": builders.layer_spec(3, 128, symmetric=True),
    "whole rows": builders.layer_spec(5, -1),
    "desc_act": builders.layer_spec(4, 16, desc_act=True),
    "rows": builders.layer_spec(tiles=(TileSpec(8, 16, True, rows=(1, 4)), TileSpec(4, 16, rows=(0, 2, 3)))),
    "rows, desc_act": builders.layer_spec(
        tiles=(TileSpec(8, 16, rows=(1, 4)), TileSpec(4, 16, rows=(0, 2, 3))), desc_act=True
    ),
    "columns": builders.layer_spec(
        tiles=(TileSpec(2, 8, cols=tuple(range(5, 41))), TileSpec(4, -1, True, cols=tuple(range(5))))
    ),
}


@pytest.mark.parametrize("name", TILINGS)
def test_the_layout_is_known_before_the_bytes(name: str) -> None:
    spec, weight = TILINGS[name], torch.randn(5, 41, generator=torch.Generator().manual_seed(0))
    stats = LinearStats.empty(41, hessian=True)
    stats.add(torch.randn(99, 41, generator=torch.Generator().manual_seed(1)))
    planned = spec_layout("layer", spec, (5, 41), METHODS["gptq"])
    assert LayerLayout.from_json("layer", planned.to_json()) == planned
    packed = pack(gptq.quantize(weight, stats, spec))
    assert packed.layout == planned
    assert packed.nbytes == planned.nbytes
    if not spec.options.desc_act:
        assert (
            spec_layout("layer", spec, (5, 41), METHODS["rtn"])
            == pack(rtn.quantize(weight, None, spec)).layout
        )


@pytest.mark.parametrize(
    ("spec", "method", "word"),
    [
        (builders.layer_spec(1), "gptq", "1-bit"),
        (builders.layer_spec(tiles=(TileSpec(4, rows=(0,)), TileSpec(9, rows=(1, 2, 3, 4)))), "rtn", "9-bit"),
        (builders.layer_spec(tiles=(TileSpec(rows=(0, 1)),)), "gptq", "leave out 3"),
    ],
)
def test_specs_that_do_not_fit_are_refused_with_the_layers_name(
    spec: builders.LayerSpec, method: str, word: str
) -> None:
    with pytest.raises(InputError, match=rf"model\.q_proj.*{word}"):
        spec_layout("model.q_proj", spec, (5, 41), METHODS[method])
