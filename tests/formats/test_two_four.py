"""The stored format of 2/4/16: golden bytes, round trips, products, and damage refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from anybit.errors import InputError
from anybit.formats import TwoFour
from anybit.formats.layout import LayerLayout
from anybit.formats.validate import validate
from anybit.formats.weight import PackedWeight, QuantizedWeight, pack, unpack
from anybit.kernels import cpu
from anybit.kernels.cpu_layer import Layer
from anybit.kernels.dispatch import BoundWeight
from anybit.methods import two_four_sixteen
from tests.builders import random, two_four_spec, weight_and_stats
from tests.kernels.cases import layer_of

pytestmark = pytest.mark.native


@pytest.mark.parametrize("shape", [(20, 64), (33, 192), (16, 16), (1, 40), (5, 7), (40, 100), (3, 1)])
@pytest.mark.parametrize("wide", [0.0, 0.1, 0.25, 0.6, 1.0])
@pytest.mark.parametrize("group_size", [16, 8])
def test_any_shape_round_trips(shape: tuple[int, int], wide: float, group_size: int) -> None:
    weight, stats = weight_and_stats(*shape)
    made_spec = two_four_spec(wide, group_size, 0.01, clip=wide == 0.6)
    made = two_four_sixteen.quantize(weight, stats, made_spec)
    packed = pack(made)
    assert packed.layout == two_four_sixteen.layout(made_spec, shape)
    validate("layer", packed)
    again = pack(unpack(packed))
    assert again.layout == packed.layout
    for field, tensor in packed.tensors.items():
        assert torch.equal(again.tensors[field].view(torch.uint8), tensor.view(torch.uint8)), field
    dense = made.dequantize()
    assert torch.equal(unpack(packed).dequantize(), dense)
    x = random(3, shape[1], seed=9)
    bound = BoundWeight(packed)
    torch.testing.assert_close(bound.matmul(x), x @ dense.T, rtol=1e-4, atol=1e-4)
    assert torch.equal(bound.dequantize(), dense)
    restored = bound.unpack()
    assert restored.keys() == set(bound.repacked) and (bound.repacked or not cpu.available())
    for field, tensor in restored.items():
        assert torch.equal(tensor.view(torch.uint8), packed.tensors[field].view(torch.uint8)), field


@pytest.mark.skipif(not cpu.available(), reason="the native extension is not built")
@pytest.mark.parametrize("shape", [(33, 192), (1, 40), (5, 7), (40, 100), (300, 1000)])
@pytest.mark.parametrize("wide", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("group_size", [16, 8])
def test_native_products(shape: tuple[int, int], wide: float, group_size: int) -> None:
    weight, stats = weight_and_stats(*shape)
    (tile,) = two_four_sixteen.quantize(weight, stats, two_four_spec(wide, group_size, clip=False)).tiles
    assert isinstance(tile, TwoFour)
    given, dense = random(17, shape[1], seed=9), tile.dequantize()
    for isa in cpu.matmul_isas():
        layer = layer_of(tile, shape, isa=isa)
        assert torch.equal(layer.dequantize(), dense)
        for dtype in (torch.float32, torch.bfloat16)[: 1 + isa.endswith("_bf16")]:
            x, bound = given.to(dtype), 1e-6 if dtype == torch.float32 else 1e-5
            for m in (1, 2, 17):
                met = (
                    dense.to(dtype) if m > 16 else dense
                ).double()  # many tokens meet weights in their own dtype
                expected, size = x[:m].double() @ met.T, x[:m].double().abs() @ met.abs().T
                y, threaded = torch.zeros(m, shape[0]), torch.zeros(m, shape[0])
                layer.product(x[:m], y, threads=1)
                assert bool(((y - expected).abs() <= bound * size.amax() + 1e-30).all()), (isa, m)
                layer.product(x[:m], threaded, threads=3)
                assert torch.equal(y, threaded)


@pytest.mark.skipif(not cpu.available(), reason="the native extension is not built")
def test_kernels_refuse_blocks_that_are_not_those_of_the_description() -> None:
    weight, stats = weight_and_stats(33, 64)
    packed = pack(two_four_sixteen.quantize(weight, stats, two_four_spec(0.25, 16, clip=False)))
    tensors = dict(packed.tensors) | {"blocks": packed.tensors["blocks"] ^ 3}
    with pytest.raises(ValueError, match="blocks give"):
        Layer(packed.layout, tensors)


def aligned_example() -> TwoFour:
    """Two rows, one unit: blocks 0, 1 and 3 at 2 bits, block 2 at 4."""
    codes = torch.zeros(2, 64, dtype=torch.uint8)
    codes[0, :16] = torch.tensor([0, 1, 2, 3] * 4)
    codes[0, 16:32], codes[0, 48:] = 3, 1
    codes[0, 32:48] = torch.arange(16)
    codes[1, 63] = 2
    return TwoFour(
        wide=torch.tensor([False, False, True, False]),
        group_size=16,
        codes=codes,
        zeros=torch.tensor([[1, 2, 3], [0, 0, 0]], dtype=torch.uint8),
        scale_codes=torch.tensor([[15, 7, 1], [0, 0, 4]], dtype=torch.uint8),
        scale_scales=torch.tensor([[0.5, 1.0, 2.0]]).half(),
        scale_zeros=torch.tensor([[1, 0, 3]], dtype=torch.uint8),
        wide_scales=torch.tensor([0.25, 1.0]).half(),
        wide_zeros=torch.tensor([8, 0], dtype=torch.uint8),
    )


def test_the_stored_bytes_of_the_documentation() -> None:
    packed = pack(QuantizedWeight((2, 64), (aligned_example(),)))
    assert packed.layout.to_json()["tiles"] == [
        {"format": "two_four", "bits": 2.5, "narrow": 48, "group_size": 16}
    ]
    stored = {
        field: bytes(t.contiguous().view(torch.uint8).flatten().tolist()).hex()
        for field, t in packed.tensors.items()
    }
    assert stored == {
        "blocks": "04",
        "codes": "e4e4e4e4" + "ffffffff" + "55555555" + "10325476" + "00" * 11 + "80" + "00" * 4,
        "rest": "98badcfe" + "00" * 4,
        "grids": "f93f" + "0080",
        "scale_scales": "0038003c0040",
        "scale_zeros": "0103",
        "wide_scales": "0034003c",
        "wide_zeros": "08",
    }
    validate("layer", packed)
    dense = unpack(packed).dequantize()
    assert dense[0, :4].tolist() == [-8.0, 0.0, 8.0, 16.0]  # scale 0.5 * (15 + 1), zero point 1
    assert (
        dense[0, 16].item() == 7.0 and dense[0, 48].item() == -16.0
    )  # 1 * 7 * (3 - 2), 2 * (1 + 3) * (1 - 3)
    assert dense[0, 32:36].tolist() == [-2.0, -1.75, -1.5, -1.25]
    assert dense[1, 63].item() == 28.0 and dense[1].count_nonzero() == 1


def test_the_stored_bytes_without_units() -> None:
    """Two rows, a block at 4 bits and one that is cut short at 2: codes of each width lie by themselves."""
    codes = torch.zeros(2, 24, dtype=torch.uint8)
    codes[0, :16], codes[0, 16:] = torch.arange(16), torch.tensor([0, 1, 2, 3] * 2)
    codes[1, 0], codes[1, 23] = 15, 2
    tile = TwoFour(
        wide=torch.tensor([True, False]),
        group_size=8,
        codes=codes,
        zeros=torch.tensor([[3], [1]], dtype=torch.uint8),
        scale_codes=torch.tensor([[15], [4]], dtype=torch.uint8),
        scale_scales=torch.tensor([[1.5]]).half(),
        scale_zeros=torch.tensor([[2]], dtype=torch.uint8),
        wide_scales=torch.tensor([0.25, 1.0]).half(),
        wide_zeros=torch.tensor([8, 0], dtype=torch.uint8),
    )
    packed = pack(QuantizedWeight((2, 24), (tile,)))
    stored = {
        f: bytes(t.contiguous().view(torch.uint8).flatten().tolist()).hex() for f, t in packed.tensors.items()
    }
    assert stored == {
        "blocks": "01",
        "scale_scales": "003e",
        "scale_zeros": "02",
        "wide_scales": "0034003c",
        "wide_zeros": "08",
        "narrow_codes": "e4e40000" + "00800000",
        "zeros": "03" + "01",
        "scale_codes": "0f" + "04",
        "wide_codes": "1032547698badcfe" + "0f" + "00" * 7,
    }
    validate("layer", packed)
    dense = unpack(packed).dequantize()
    assert (
        dense[0, 16].item() == -76.5 and dense[0, 0].item() == -2.0
    )  # 1.5 * (15 + 2) * (0 - 3), 0.25 * (0 - 8)
    assert dense[1, 0].item() == 15.0 and dense[1, 22:].tolist() == [-9.0, 9.0]


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("blocks", lambda t: t.fill_(255), "blocks give"),
        ("scale_scales", lambda t: t.fill_(torch.nan), "scale_scales"),
        ("wide_scales", lambda t: t.fill_(torch.inf), "wide_scales"),
        ("grids", lambda t: t[:, :0], "grids"),
    ],
)
def test_damaged_tiles_are_refused(field: str, value: Any, word: str) -> None:
    packed = pack(QuantizedWeight((2, 64), (aligned_example(),)))
    damaged = PackedWeight(packed.layout, {**packed.tensors, field: value(packed.tensors[field].clone())})
    with pytest.raises(InputError, match=f"layer.*{word}"):
        validate("layer", damaged)


@pytest.mark.parametrize(
    "change",
    [
        {"narrow": -1},
        {"narrow": True},
        {"group_size": 12},
        {"bits": 5},
        {"bits": 2.6},
        {"bits": None},
        {"rows": 2},
        {"narrow": 65},
    ],
)
def test_damaged_descriptions_are_refused(change: dict[str, Any]) -> None:
    packed = pack(QuantizedWeight((2, 64), (aligned_example(),)))
    layout = json.loads(json.dumps(packed.layout.to_json()))
    layout["tiles"][0] |= change
    with pytest.raises(InputError, match="layer"):
        validate("layer", PackedWeight(LayerLayout.from_json("layer", layout), packed.tensors))
