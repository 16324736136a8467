"""Inputs rounded to 8 bits or fewer: the reference, and the native products of integers against it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from anybit.formats import GroupInt
from anybit.formats.weight import QuantizedWeight, pack
from anybit.kernels import cpu, reference
from anybit.kernels.cpu_layer import Layer
from tests.builders import random
from tests.kernels.cases import layer_of
from tests.probes import isas

pytestmark = pytest.mark.native

# ---- rounding of activations


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("m", "columns", "group"), [(1, 1, 1), (3, 100, 32), (2, 48, 48), (5, 37, 7), (4, 130, 128)]
)
def test_activation_codes_follow_the_grid(bits: int, m: int, columns: int, group: int) -> None:
    x = random(m, columns, seed=bits) * torch.logspace(-4, 4, m)[:, None]
    x[0] = 0
    groups = -(-columns // group)
    clip = torch.linspace(0.5, 1, groups).half()
    codes, scales = reference.quantize_activations(x, bits, group, clip, None)
    top = 2 ** (bits - 1) - 1
    for k in range(m):
        for g in range(groups):
            part = x[k, g * group : (g + 1) * group]
            expected = part.abs().max() * clip[g].float() / top
            torch.testing.assert_close(scales[k, g], expected, rtol=1e-6, atol=0)
            for j, value in enumerate(part.tolist()):
                q = round(value / float(scales[k, g])) if scales[k, g] else 0
                assert abs(int(codes[k, g * group + j]) - max(-top - 1, min(top, q))) <= (
                    abs(value / float(scales[k, g] or 1)) % 1 > 0.499
                )
    for isa in isas():
        again = cpu.quantize_activations(x, bits, group, clip, None, isa)
        assert torch.equal(again[0], codes) and torch.equal(again[1], scales), isa
    fixed = torch.rand(groups, generator=torch.Generator().manual_seed(1)).half() + 0.01
    expected_codes, _ = reference.quantize_activations(x, bits, group, None, fixed)
    for isa in isas():
        assert torch.equal(cpu.quantize_activations(x, bits, group, None, fixed, isa)[0], expected_codes), isa


def native_layer(tile: GroupInt, isa: str) -> Layer:
    rows, columns = tile.codes.shape
    return layer_of(tile, (rows, columns), isa=isa)


def test_damaged_inputs_stay_damaged() -> None:
    for value in (torch.nan, torch.inf):
        x = random(1, 64)
        x[0, 5] = value
        one = torch.ones(1).half()
        for clip, fixed in ((one, None), (None, one)):
            for scale in (
                reference.quantize_activations(x, 8, 64, clip, fixed)[1],
                *(cpu.quantize_activations(x, 8, 64, clip, fixed, isa)[1] for isa in isas()),
            ):
                assert torch.isnan(scale).all()


# ---- integer products

SHAPES = [
    (5, 576, 128),
    (41, 200, 32),
    (301, 1539, 128),
    (7, 576, 64),
    (3, 100, 32),
    (9, 1000, 1000),
    (4, 37, 2),
    (1, 1, 4),
    (16, 130, 16),
    (3, 40, 96),
]


def group_tile(rows: int, columns: int, group: int, bits: int, symmetric: bool, seed: int) -> GroupInt:
    generator = torch.Generator().manual_seed(seed)
    groups = -(-columns // group)
    codes = torch.randint(0, 2**bits, (rows, columns), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 2**bits, (rows, groups), generator=generator, dtype=torch.uint8)
    scales = torch.rand(rows, groups, generator=generator).half() + 0.1
    clip = torch.ones(groups).half()
    return GroupInt(bits, group, codes, scales, None if symmetric else zeros, act_bits=8, act_clip=clip)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_group_sums_are_exact(shape: tuple[int, int, int], bits: int) -> None:
    rows, columns, group = shape
    tile = group_tile(rows, columns, group, bits, symmetric=False, seed=bits)
    x = torch.randint(-128, 128, (3, columns), generator=torch.Generator().manual_seed(9)).to(torch.int8)
    assert tile.zeros is not None
    of_column = torch.arange(columns) // group
    products = x.long()[:, None] * (tile.codes.long() - tile.zeros.long()[:, of_column])
    oracle = torch.zeros(3, rows, tile.scales.shape[1], dtype=torch.int64).index_add_(2, of_column, products)
    assert torch.equal(reference.group_sums(x, tile).long(), oracle)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("shape", SHAPES)
def test_native_products_match_the_reference(shape: tuple[int, int, int], bits: int) -> None:
    rows, columns, group = shape
    tile = group_tile(rows, columns, group, bits, symmetric=bits % 3 == 0, seed=7)
    made = QuantizedWeight((rows, columns), (tile,))
    for isa in isas():
        layer = native_layer(tile, isa)
        assert layer.native.int8_group_size == min(group, columns)
        for m in (1, 3, 15):
            x = random(m, columns, seed=m)
            expected = reference.int_matmul(x, made)
            codes, scales = reference.quantize_activations(x, 8, group, tile.act_clip, None)
            y, threaded = torch.zeros(m, rows), torch.zeros(m, rows)
            layer.product(codes, y, scales)
            torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
            layer.product(codes, threaded, scales, threads=3)
            assert torch.equal(y, threaded)
            assert torch.equal(layer.matmul(x), y)  # the layer rounds its inputs alike


def test_extreme_codes_do_not_overflow() -> None:
    """All products at their largest: pairs of 7 and 8 bits come near or beyond 16, a long group beyond 24."""
    columns = 65536
    x = torch.full((9, columns), -128, dtype=torch.int8)
    for bits in (4, 7, 8):
        codes = torch.full((2, columns), 2**bits - 1, dtype=torch.uint8)
        zeros = torch.zeros(2, 1, dtype=torch.uint8)
        tile = GroupInt(bits, columns, codes, torch.ones(2, 1).half(), zeros)
        for isa in isas():
            for m in (1, 9):
                y = torch.zeros(m, 2)
                native_layer(tile, isa).product(x[:m], y, torch.ones(m, 1))
                assert y.tolist() == [[-128.0 * (2**bits - 1) * columns] * 2] * m, (bits, isa, m)


@pytest.mark.parametrize("bits", range(1, 9))
def test_many_tokens_have_the_bits_of_one_by_one(bits: int) -> None:
    """Sums of many tokens come from other instructions, in other panels: groups of every fit, ends of every kind."""
    shapes = [(37, 416, 32), (140, 320, 64), (16, 609, 96), (64, 300, 128), (21, 350, 350), (7, 1000, 300)]
    for i, (rows, columns, group) in enumerate(shapes):
        generator = torch.Generator().manual_seed(bits)
        tile = group_tile(rows, columns, group, bits, symmetric=(i + bits) % 3 == 0, seed=i)
        tile.codes[:: 1 + bits % 2, columns // 2 :] = 2**bits - 1
        if tile.zeros is not None and bits % 2 == 0:  # at the ends; of 8 bits beyond signed bytes
            half = 2 ** (bits - 1)
            ends = torch.tensor([0, half - 1, half, 2 * half - 1], dtype=torch.uint8)
            tile.zeros[:] = ends[torch.arange(rows) % 4, None]
        tokens = (9, 17, 31, 33, 47, 64, 65)[(i + bits) % 7]
        x = torch.randint(-128, 128, (tokens, columns), generator=generator).to(torch.int8)
        x[0], x[-1] = -128, 127
        scales = torch.rand(tokens, tile.scales.shape[1], generator=generator)
        for isa in isas():
            layer = native_layer(tile, isa)
            many, single = torch.ones(tokens, rows), torch.ones(tokens, rows)
            layer.product(x, many, scales, add=True, threads=1 + i % 3)
            for k in range(tokens):
                layer.product(x[k : k + 1], single[k : k + 1], scales[k : k + 1], add=True, threads=1)
            assert torch.equal(many, single), (isa, rows, columns, group)


def test_more_tokens_than_one_batch_have_the_bits_of_fewer() -> None:
    for group in (32, 700):
        tile = group_tile(40, 700, group, 4, symmetric=False, seed=group)
        x = torch.randint(-128, 128, (513, 700), generator=torch.Generator().manual_seed(1)).to(torch.int8)
        scales = random(513, tile.scales.shape[1])
        for isa in isas():
            layer = native_layer(tile, isa)
            all_at_once, parts = torch.zeros(513, 40), torch.zeros(513, 40)
            layer.product(x, all_at_once, scales)
            for k in range(0, 513, 8):
                layer.product(x[k : k + 8], parts[k : k + 8], scales[k : k + 8])
            assert torch.equal(all_at_once, parts), (isa, group)


@pytest.mark.parametrize("columns", [500, 4096, 20000])
def test_sums_of_one_sign_are_exact(columns: int) -> None:
    """The zero point cancels most of such a sum: nothing may be rounded before it does."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(100, 156, (6, columns), generator=generator, dtype=torch.uint8)
    x = torch.randint(60, 128, (3, columns), generator=generator).to(torch.int8)
    tile = GroupInt(8, columns, codes, torch.ones(6, 1).half())
    oracle = (x.long() @ (codes.long() - 128).T).float()
    for isa in isas():
        y = torch.zeros(3, 6)
        native_layer(tile, isa).product(x, y, torch.ones(3, 1))
        assert torch.equal(y, oracle), isa


def test_native_products_refuse_what_they_cannot_take() -> None:
    isas()
    long = 65537
    wrong = GroupInt(8, long, torch.zeros(2, long, dtype=torch.uint8), torch.ones(2, 1).half())
    layer = native_layer(wrong, "portable")
    assert layer.native.int8_group_size == 0  # its sums could leave 32 bits
    with pytest.raises(ValueError, match="no kernel for rounded ones"):
        layer.product(torch.zeros(1, long, dtype=torch.int8), torch.zeros(1, 2), torch.zeros(1, 1))
    good = native_layer(group_tile(2, 8, 4, 4, True, 0), "portable")
    for x, scales, y in (
        (torch.zeros(1, 8, dtype=torch.uint8), torch.zeros(1, 2), torch.zeros(1, 2)),
        (torch.zeros(1, 7, dtype=torch.int8), torch.zeros(1, 2), torch.zeros(1, 2)),
        (torch.zeros(1, 8, dtype=torch.int8), torch.zeros(1, 3), torch.zeros(1, 2)),
        (torch.zeros(1, 8, dtype=torch.int8), torch.zeros(1, 2), torch.zeros(1, 3)),
    ):
        with pytest.raises(ValueError, match="expected"):
            good.product(x, y, scales)


def test_layers_that_pick_or_scale_inputs_round_them_themselves() -> None:
    tile = replace(group_tile(4, 8, 4, 4, True, 0), cols=torch.arange(8).flip(0).int())
    packed = pack(QuantizedWeight((4, 8), (tile,)))
    scaled = pack(QuantizedWeight((4, 8), (replace(tile, cols=None),), input_scale=torch.ones(8).half()))
    for weight in (packed, scaled):
        layer = Layer(weight.layout, weight.tensors)
        assert layer.native.int8_group_size == 0
        with pytest.raises(ValueError, match="scales, picks or rounds"):
            layer.product(torch.zeros(1, 8, dtype=torch.int8), torch.zeros(1, 4), torch.zeros(1, 2))
