"""Atom: outlier channels at 8 bits, the others at the width of the weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import anybit
from anybit.config import TileSpec, parse_layer_spec
from anybit.errors import InputError
from anybit.formats import GroupInt
from anybit.loader import load
from anybit.methods import METHODS, atom
from tests import builders
from tests.builders import MakeModel, outlier_inputs, rounded_layer
from tests.oracles import output_error

pytestmark = pytest.mark.native

SMALL: dict[str, Any] = {"samples": 3, "seq_len": 24}


def test_atom_keeps_outliers() -> None:
    weight, stats, made, spec = rounded_layer("atom")
    assert stats.inputs is not None
    body, outliers = made.tiles
    assert isinstance(body, GroupInt) and isinstance(outliers, GroupInt)
    assert (body.bits, body.act_bits, outliers.bits, outliers.act_bits) == (4, 4, 8, 8)
    energy = stats.inputs.energy
    assert body.cols is not None and outliers.cols is not None
    stored = torch.cat([body.cols, outliers.cols]).long()
    assert (energy[stored].diff() >= 0).all() and len(outliers.cols) == 8
    assert body.act_clip is not None and (body.act_clip == torch.tensor(0.9).half()).all()
    assert outliers.act_clip is not None and (outliers.act_clip == 1).all()
    x = outlier_inputs(128, weight.shape[1], seed=8)
    plain = replace(spec, tiles=(TileSpec(4, 32, True),))
    without = METHODS["rtn"].quantize(weight, stats, plain)
    assert output_error(weight, made, x) < 0.2 * output_error(weight, without, x)


def test_atom_default_outliers() -> None:
    assert [atom.outlier_channels(n) for n in (32, 576, 1536, 4096, 11008)] == [16, 16, 48, 128, 128]
    with pytest.raises(InputError, match="leave none"):
        atom.split(builders.layer_spec(outlier_channels=None), range(16))


def test_outlier_channels_are_never_clipped() -> None:
    weight, stats, _, spec = rounded_layer("atom")
    for bits in (4, 8):
        for static in (False, True):
            made = METHODS["atom"].quantize(weight, stats, spec.but(act_bits=bits, act_static=static))
            body, outliers = made.tiles
            assert isinstance(body, GroupInt) and isinstance(outliers, GroupInt) and stats.inputs is not None
            if static:
                assert outliers.cols is not None and outliers.act_scales is not None
                reached = outliers.act_scales.float() * 127
                peaks = stats.inputs.peaks[outliers.cols.long()].amax()
                torch.testing.assert_close(reached, peaks[None], rtol=1e-3, atol=0)
            else:
                assert outliers.act_clip is not None and (outliers.act_clip == 1).all()
                assert body.act_clip is not None and (body.act_clip < 1).all()


@pytest.mark.parametrize("method", ["rtn", "atom"])
def test_a_map_clips_the_inputs_that_it_rounds(method: str) -> None:
    """The width of a layer's inputs in a map does not make outliers of them."""
    weight, stats, _, _ = rounded_layer("atom")
    of_method = {} if method == "rtn" else {"outlier_channels": 8}
    default = builders.options(method, clip=False, **of_method).layer_spec()
    given = parse_layer_spec("layer", {"act_bits": 4, "act_clip": 0.7}, default)
    body = METHODS[method].quantize(weight, stats, given).tiles[0]
    assert isinstance(body, GroupInt) and body.act_bits == 4 and body.act_clip is not None
    assert (body.act_clip == torch.tensor(0.7).half()).all()
    with pytest.raises(InputError, match="unknown field 'outliers'"):
        parse_layer_spec("layer", {"outliers": True}, default)


@pytest.mark.slow
def test_atom_follows_its_activations(model_dir: MakeModel, tmp_path: Path) -> None:
    """Later blocks are calibrated on what quantized activations and weights of earlier ones hand them."""
    made = {}
    for act_bits in (16, 2):
        config = builders.options(
            "atom", outlier_channels=8, act_bits=act_bits, act_search=False, group_size=16, **SMALL
        )
        anybit.quantize(model_dir("llama"), tmp_path / str(act_bits), config)
        made[act_bits] = load(tmp_path / str(act_bits)).state_dict()
    first, second = (f"model.layers.{i}.self_attn.q_proj.0.codes" for i in (0, 1))
    assert torch.equal(made[16][first], made[2][first])
    assert not torch.equal(made[16][second], made[2][second])
