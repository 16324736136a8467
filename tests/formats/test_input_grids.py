"""What a layer stores for its rounded inputs: golden bytes, and damage refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from anybit.errors import InputError
from anybit.formats import Float16, GroupInt
from anybit.formats.layout import LayerLayout
from anybit.formats.validate import validate
from anybit.formats.weight import PackedWeight, QuantizedWeight, pack
from anybit.kernels.dispatch import BoundWeight
from anybit.methods import squeezellm
from tests import builders
from tests.builders import random, rounded_layer

pytestmark = pytest.mark.native


def test_the_stored_bytes_of_the_documentation() -> None:
    tile = GroupInt(
        bits=4,
        group_size=4,
        codes=torch.tensor([[1, 2, 3, 4, 5], [15, 0, 8, 7, 9]], dtype=torch.uint8),
        scales=torch.tensor([[1.0, 2.0], [3.0, 4.0]]).half(),
        zeros=torch.tensor([[8, 3], [0, 15]], dtype=torch.uint8),
        act_bits=8,
        act_clip=torch.tensor([0.75, 1.0]).half(),
    )
    scale = torch.tensor([1.0, 0.5, 2.0, 1.0, 4.0]).half()
    packed = pack(QuantizedWeight((2, 5), (tile,), input_scale=scale))
    assert packed.layout.to_json() == {
        "shape": [2, 5],
        "tiles": [{"format": "group_int", "bits": 4, "group_size": 4, "symmetric": False, "act_bits": 8}],
        "input_scale": True,
    }
    stored = {
        field: bytes(t.view(torch.uint8).flatten().tolist()).hex() for field, t in packed.tensors.items()
    }
    assert stored["act_clip"] == "003a003c"
    assert stored["input_scale"] == "003c00380040003c0044"
    validate("layer", packed)
    # x times the input scale: 2 -1 0 1 | 0.5; the first group's grid reaches 1.5, so 2 is cut off
    x = torch.tensor([[2.0, -2.0, 0.0, 1.0, 0.125]])
    step, last = 1.5 / 127, 0.5 / 127
    codes = [127, round(-1 / step), 0, round(1 / step)]
    first = step * sum(q * (c - 8) for q, c in zip(codes, (1, 2, 3, 4)))
    expected = first * 1 + 127 * last * 2 * (5 - 3)
    torch.testing.assert_close(BoundWeight(packed).matmul(x)[0, 0], torch.tensor(expected), rtol=1e-5, atol=0)


def damage(packed: PackedWeight, field: str, value: Any) -> PackedWeight:
    return PackedWeight(packed.layout, {**packed.tensors, field: value(packed.tensors[field].clone())})


@pytest.mark.parametrize(
    ("kind", "field", "value", "word"),
    [
        ("atom", "0.act_clip", lambda t: t.fill_(1.5), "act_clip"),
        ("atom", "1.act_clip", lambda t: t.fill_(torch.nan), "act_clip"),
        ("mixllm", "0.act_clip", lambda t: t.fill_(0.5), "act_clip differs"),
        ("static", "act_scales", lambda t: t.fill_(0), "act_scales"),
        ("awq", "input_scale", lambda t: t.fill_(0), "input_scale"),
        ("awq", "input_scale", lambda t: t[:-1], "input_scale"),
        ("awq", "input_scale", lambda t: t.fill_(torch.inf), "input_scale"),
    ],
)
def test_damaged_grids_are_refused(kind: str, field: str, value: Any, word: str) -> None:
    packed = pack(rounded_layer(kind)[2])
    validate("layer", packed)
    with pytest.raises(InputError, match=f"layer.*{word}"):
        validate("layer", damage(packed, field, value))


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("mixllm", lambda layout: layout["tiles"][0].update(act_bits=4)),
        ("mixllm", lambda layout: layout["tiles"][0].pop("act_bits")),
        ("atom", lambda layout: layout["tiles"][0].update(act_bits=9)),
        ("atom", lambda layout: layout["tiles"][0].update(act_static=1)),
        ("awq", lambda layout: layout.update(input_scale=1)),
        ("awq", lambda layout: layout["tiles"][0].update(act_static=True)),
        ("float16", lambda layout: layout["tiles"][0].update(act_bits=8)),
        ("codebook", lambda layout: layout["tiles"][0].update(act_bits=8)),
    ],
)
def test_damaged_descriptions_are_refused(kind: str, change: Any) -> None:
    if kind == "float16":
        packed = pack(QuantizedWeight((2, 3), (Float16(torch.ones(2, 3).half()),)))
    elif kind == "codebook":
        packed = pack(
            squeezellm.quantize(random(4, 40), None, builders.spec_of(builders.options("squeezellm", 3)))
        )
    else:
        packed = pack(rounded_layer(kind)[2])
    layout = json.loads(json.dumps(packed.layout.to_json()))
    change(layout)
    with pytest.raises(InputError, match="layer"):
        validate("layer", PackedWeight(LayerLayout.from_json("layer", layout), packed.tensors))
