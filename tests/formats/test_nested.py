"""Nested tiles of the method anybit: tables, the stored format and its kernels."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anybit.errors import InputError
from anybit.formats import Nested, NestedLayout
from anybit.formats import tables as shapes
from anybit.formats.layout import LayerLayout
from anybit.formats.nested import codes_of_kept, weights_of_kept
from anybit.formats.validate import validate
from anybit.formats.weight import PackedWeight, QuantizedWeight, pack, unpack
from anybit.kernels import cpu, cpu_layer
from anybit.kernels.dispatch import BoundWeight

pytestmark = pytest.mark.native

needs_native = pytest.mark.skipif(not cpu.available(), reason=f"no native extension: {cpu.why_not()}")
BITS = range(1, 9)


def random_tile(r: int, c: int, k: int, counts: tuple[int, ...], seed: int = 0, kept_bits: int = 8) -> Nested:
    """With gains, but for a matrix of one row."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.zeros(r, c - k, dtype=torch.uint8)
    for bits, first, last in Nested.spans(counts):
        size = (last - first, c - k)
        codes[first:last] = torch.randint(0, 2**bits, size, generator=generator, dtype=torch.uint8)
    made = Nested(
        counts,
        torch.randperm(r, generator=generator),
        torch.rand(r, generator=generator).half(),
        torch.randint(0, 16, (r,), generator=generator, dtype=torch.uint8),
        codes,
        torch.randperm(c, generator=generator)[:k].sort().values,
        torch.randn(r, k, generator=generator).half(),
        torch.randint(0, 256, (r,), generator=generator, dtype=torch.uint8) if r > 1 else None,
    )
    if k == 0 or kept_bits == 16:
        return made
    drawn = torch.randint(-128, 128, (r, k), generator=generator, dtype=torch.int8)
    return replace(made, kept_values=drawn, kept_scales=8 * torch.rand(k, generator=generator).half())


# ---- shapes -------------------------------------------------------------------------------------------------------


def test_the_shapes_are_those_of_the_format() -> None:
    """They belong to the stored format: another table would make other models of the artifacts that there are."""
    digest = hashlib.sha256(shapes.tables().half().numpy().tobytes()).hexdigest()
    assert digest == "2b91d9ae9a932675479f179b74fa51d186e8708436caec3f16e70927d6361a3c"


def test_tables_are_as_they_are_defined() -> None:
    """Up to the last bit, which this machine's exponentials decide."""
    kept, derived = shapes.entries(), shapes.derived()
    assert (np.abs(kept - derived) <= np.spacing(np.abs(kept).astype(np.float16))).all()
    assert (kept == derived).mean() > 0.99


@pytest.mark.parametrize("bits", BITS)
def test_tables_ascend_and_are_nested(bits: int) -> None:
    table = shapes.table(bits)
    assert table.shape == (len(shapes.EXPONENTS), 2**bits)
    assert (table.diff(dim=1) > 0).all() and torch.equal(table, -table.flip(1))
    if bits > 1:  # an entry is the mean of its cell, between those of its halves
        parents, low, high = shapes.table(bits - 1), table[:, 0::2], table[:, 1::2]
        assert ((low <= parents) & (parents <= high)).all()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_gaussian_shape_is_close_to_the_best_quantizer(bits: int) -> None:
    """Max (1960) has the least squared errors of a Gaussian: 0.1175, 0.03454 and 0.009497 at 2, 3 and 4 bits."""
    x = torch.distributions.Normal(0, 1).icdf((torch.arange(200_000) + 0.5) / 200_000)
    table = shapes.table(bits)[shapes.EXPONENTS.index(2.0)]
    nearest = (x[:, None] - table).square().amin(1).mean()
    assert float(nearest) < {2: 0.1175, 3: 0.03454, 4: 0.009497}[bits] * 1.06


# ---- the stored format --------------------------------------------------------------------------------------------


def test_golden_bytes() -> None:
    """The worked example of docs/formats.md."""
    tile = Nested(
        counts=(2, 2, 1),
        order=torch.tensor([1, 0]),
        scales=torch.tensor([2.0, 1.0]).half(),
        shapes=torch.tensor([11, 5], dtype=torch.uint8),
        codes=torch.tensor([[0, 7, 4], [3, 0, 1]], dtype=torch.uint8),
        kept=torch.tensor([1]),
        kept_values=torch.tensor([[0.5], [-1.0]]).half(),
    )
    packed = pack(QuantizedWeight((2, 4), (tile,)))
    assert packed.layout.to_json() == {
        "shape": [2, 4],
        "tiles": [{"format": "nested", "bits": 2.5, "counts": [2, 2, 1], "kept": 1}],
    }
    found = {field: tensor.view(torch.uint8).flatten().tolist() for field, tensor in packed.tensors.items()}
    assert found == {
        "order": [1, 0, 0, 0],
        "scales": [0x00, 0x40, 0x00, 0x3C],
        "shapes": [0x5B],
        "kept": [1, 0],
        "kept_values": [0x00, 0x38, 0x00, 0xBC],
        "plane_1": [0b110, 0, 0, 0, 0b001, 0, 0, 0],
        "plane_2": [0b010, 0, 0, 0, 0b101, 0, 0, 0],
        "plane_3": [0b010, 0, 0, 0],
    }
    wide, narrow = shapes.table(3)[11], shapes.table(2)[5]
    expected = torch.tensor(
        [[narrow[3], -1.0, narrow[0], narrow[1]], [2 * wide[0], 0.5, 2 * wide[7], 2 * wide[4]]]
    )
    assert torch.equal(tile.dequantize(), expected)
    eight = replace(
        tile,
        kept_values=torch.tensor([[2], [-127]], dtype=torch.int8),
        kept_scales=torch.tensor([16.0]).half(),
    )
    packed = pack(QuantizedWeight((2, 4), (eight,)))
    assert packed.layout.to_json()["tiles"][0]["kept_bits"] == 8
    assert packed.tensors["kept_values"].view(torch.uint8).flatten().tolist() == [0x02, 0x81]
    assert packed.tensors["kept_scales"].view(torch.uint8).tolist() == [0x00, 0x4C]
    assert eight.dequantize()[:, 1].tolist() == [-127 * 127 / 1024, 2 * 4 / 1024]
    gained = replace(tile, gains=torch.tensor([0x35, 0x24], dtype=torch.uint8))
    packed = pack(QuantizedWeight((2, 4), (gained,)))
    assert packed.layout.to_json()["tiles"][0]["gains"] is True
    assert packed.tensors["gains"].tolist() == [0x35, 0x24]
    gain = torch.tensor([[1 + 4 / 64], [1 + 3 / 64]])  # of the first output row at 2 bits, of the second at 3
    expected[:, [0, 2, 3]] *= gain
    assert torch.equal(gained.dequantize(), expected)


SHAPES: list[tuple[int, int, int, tuple[int, ...]]] = [
    (33, 100, 3, (33, 33, 20, 9)),
    (64, 576, 4, (64, 64, 64, 40, 16, 8, 8, 1)),
    (5, 40, 0, (5, 5)),
    (130, 333, 2, (130,)),
    (1, 1, 0, (1, 1, 1, 1, 1, 1, 1, 1)),
    (40, 257, 1, (40, 40, 40, 40, 40, 40, 40, 40)),
    (37, 400, 35, (37, 30, 20, 10, 5)),
]


@pytest.mark.parametrize("kept_bits", [8, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_pack_and_unpack_are_inverse(shape: tuple[int, int, int, tuple[int, ...]], kept_bits: int) -> None:
    tile = random_tile(*shape, kept_bits=kept_bits)
    packed = pack(QuantizedWeight(shape[:2], (tile,)))
    validate("layer", packed)
    again = unpack(packed)
    assert torch.equal(again.dequantize(), tile.dequantize())
    assert all(torch.equal(t, packed.tensors[f]) for f, t in pack(again).tensors.items())


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_fewer_planes_are_the_beginning_of_more(shape: tuple[int, int, int, tuple[int, ...]]) -> None:
    """Codes of fewer bits are the leading bits, and the stored tensors those of more, cut short."""
    tile = random_tile(*shape)
    packed = pack(QuantizedWeight(shape[:2], (tile,)))
    fewer = tuple(m for p, n in enumerate(shape[3]) if (m := n // 2 if p > 1 else n))
    layout = replace(packed.layout, tiles=(NestedLayout.of(fewer, shape[2], gains=True, kept_bits=8),))
    narrow = packed.prefix(layout)
    validate("layer", narrow)
    widths = torch.zeros(shape[0], dtype=torch.uint8)
    for bits, first, last in Nested.spans(shape[3]):
        widths[first:last] = bits
    left = torch.zeros(shape[0], dtype=torch.uint8)
    for bits, first, last in Nested.spans(fewer):
        left[first:last] = bits
    cut = replace(tile, counts=fewer, codes=tile.codes >> (widths - left)[:, None])
    assert torch.equal(unpack(narrow).dequantize(), cut.dequantize())


def change(packed: PackedWeight, tile: dict[str, Any] | None = None, **tensors: Tensor) -> PackedWeight:
    described = packed.layout.to_json()
    layout = {**described, "tiles": [{**described["tiles"][0], **(tile or {})}]}
    return PackedWeight(LayerLayout.from_json("layer", layout), {**packed.tensors, **tensors})


@pytest.mark.parametrize(
    ("tile", "tensors", "word"),
    [
        ({"counts": [33, 20, 33, 9], "bits": 95 / 33}, {}, "not ascend"),
        ({"counts": []}, {}, "1 to 8 planes"),
        ({"counts": [33] * 9, "bits": 9}, {}, "1 to 8 planes"),
        ({"counts": [33, 33, 20, 9.0]}, {}, "not ascend"),
        ({"bits": 3}, {}, "average width"),
        ({"kept": -1}, {}, "not a number"),
        ({"kept_bits": 4}, {}, "kept_bits 4 is neither 8 nor 16"),
        ({"kept_bits": True}, {}, "kept_bits True is neither"),
        ({"kept_bits": 16}, {}, "kept_scales is no tensor of this layer"),
        ({"kept": 0}, {}, "keeps no channels"),
        ({}, {"kept_scales": torch.full((3,), torch.inf).half()}, "kept_scales"),
        ({}, {"kept_scales": torch.full((3,), -0.5).half()}, "kept_scales are negative"),
        ({}, {"kept_values": torch.zeros(33, 3).half()}, "expected"),
        ({"gains": 1}, {}, "neither true nor false"),
        ({"gains": False}, {}, "gains is no tensor of this layer"),
        ({}, {"gains": torch.zeros(32, dtype=torch.uint8)}, "expected"),
        ({"rows": 33}, {}, "whole matrix"),
        ({"counts": [30, 30], "bits": 2}, {}, "do not fit the matrix"),
        ({}, {"order": torch.zeros(33, dtype=torch.int16).view(torch.uint16)}, "each of 33 output rows once"),
        ({}, {"kept": torch.tensor([5, 5, 6], dtype=torch.int16).view(torch.uint16)}, "do not ascend"),
        ({}, {"kept": torch.tensor([5, 6, 100], dtype=torch.int16).view(torch.uint16)}, "within 0..99"),
        ({}, {"scales": torch.full((33,), -1.0).half()}, "negative"),
        ({}, {"scales": torch.full((33,), torch.nan).half()}, "NaN"),
        ({}, {"plane_1": torch.zeros(33, 3, dtype=torch.int32).view(torch.uint32)}, "expected"),
    ],
)
def test_damaged_tiles_are_refused(tile: dict[str, Any], tensors: dict[str, Tensor], word: str) -> None:
    packed = pack(QuantizedWeight((33, 100), (random_tile(*SHAPES[0]),)))
    with pytest.raises(InputError, match=word):
        validate("layer", change(packed, tile, **tensors))


def test_codes_of_kept_channels_are_the_nearest() -> None:
    generator = torch.Generator().manual_seed(0)
    scales = torch.rand(50, generator=generator).half()
    weights, kept_scales = torch.randn(50, 3, generator=generator), torch.tensor([4.0, 60.0, 1.0]).half()
    weights[7], scales[9] = 0, 0
    made = codes_of_kept(weights, scales, kept_scales)
    every = torch.arange(-127, 128, dtype=torch.int8)[:, None, None]
    errors = torch.stack([weights_of_kept(c.expand(50, 3), scales, kept_scales) for c in every]) - weights
    found = (weights_of_kept(made, scales, kept_scales) - weights).abs()
    assert (found <= errors.abs().amin(0) * (1 + 1e-5) + 1e-9).all()
    assert not made[7].any() and not made[9].any() and int(made.abs().max()) == 127
    minus = weights_of_kept(torch.full((1, 1), -128, dtype=torch.int8), torch.ones(1), torch.ones(1))
    assert minus.item() == -1


# ---- kernels ------------------------------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("isa", cpu.matmul_isas() if cpu.available() else ())
@pytest.mark.parametrize("kept_bits", [8, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_the_dense_matrix(
    shape: tuple[int, int, int, tuple[int, ...]], kept_bits: int, isa: str
) -> None:
    packed = pack(QuantizedWeight(shape[:2], (random_tile(*shape, kept_bits=kept_bits),)))
    bound, dense = BoundWeight(packed, isa=isa), unpack(packed).dequantize()
    assert torch.equal(bound.dequantize(), dense)
    generator = torch.Generator().manual_seed(2)
    for tokens in (1, 2, 7, 16, 17, 40):
        for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            x = torch.randn(tokens, shape[1], generator=generator).to(dtype)
            expected = x.double() @ dense.double().T
            error = (bound.matmul(x) - expected).abs().amax() / expected.abs().amax()
            assert float(error) < most, (tokens, dtype)


@needs_native
@pytest.mark.parametrize("isa", cpu.matmul_isas() if cpu.available() else ())
@pytest.mark.parametrize("change", ["nothing", "an entry that is no float16 number", "an entry of one half"])
def test_products_with_other_tables(change: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels may use what the format's tables are, but must not take it for granted."""
    tables = shapes.tables().clone()
    for bits in BITS if change != "nothing" else ():
        tables[:, 2**bits - 2] *= 1.5 if change == "an entry of one half" else 1.0001
        if change == "an entry that is no float16 number":
            tables[:, 2 ** (bits + 1) - 3] *= 1.0001  # opposite it
    monkeypatch.setattr(shapes, "tables", lambda: tables)
    monkeypatch.setattr(shapes, "entries", tables.numpy)
    monkeypatch.setattr(cpu_layer, "_tables", cpu_layer._tables.__wrapped__)
    packed = pack(QuantizedWeight((64, 555), (random_tile(64, 555, 0, (64, 60, 56, 50, 40, 30, 20, 10)),)))
    bound, dense = BoundWeight(packed, isa=isa), unpack(packed).dequantize()
    assert bound.layer is not None
    x = torch.randn(20, 555, generator=torch.Generator().manual_seed(3))
    expected, size = x.double() @ dense.double().T, x.double().abs() @ dense.double().abs().T
    for tokens in (1, 7, 20):
        y = bound.layer.matmul(x[:tokens])
        assert bool(((y - expected[:tokens]).abs() <= 1e-6 * size[:tokens]).all()), tokens
        if tokens == 7:
            rows = torch.cat([bound.layer.matmul(x[k : k + 1], threads=1) for k in range(tokens)])
            assert torch.equal(rows, y)


@needs_native
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 300),
    fractions=st.lists(st.floats(0, 1), min_size=0, max_size=7),
    tokens=st.integers(1, 20),
    threads=st.integers(1, 3),
    kept_bits=st.sampled_from([8, 16]),
)
def test_any_shape_and_any_widths(
    rows: int, columns: int, fractions: list[float], tokens: int, threads: int, kept_bits: int
) -> None:
    counts = (rows, *sorted((n for f in fractions if (n := int(f * rows))), reverse=True))
    kept = min(columns - 1, columns // 50)
    packed = pack(QuantizedWeight((rows, columns), (random_tile(rows, columns, kept, counts, 0, kept_bits),)))
    bound = BoundWeight(packed)
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(rows))
    assert bound.layer is not None
    y = bound.layer.matmul(x, threads)
    expected = x.double() @ unpack(packed).dequantize().double().T
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(y, bound.layer.matmul(x, 1))
