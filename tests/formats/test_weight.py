"""Packing and unpacking of whole matrices against their definition, over random tilings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anybit.formats import GroupInt, GroupIntLayout
from anybit.formats.dtypes import Dtype
from anybit.formats.layout import bits_per_weight, code_bits
from anybit.formats.validate import validate
from anybit.formats.weight import PackedWeight, QuantizedWeight, layout_of, pack, unpack
from tests.formats.by_hand import packed, split, tile


def random_tile(
    rng: np.random.Generator, bits: int, rows: Any, cols: Any, shape: tuple[int, int]
) -> GroupInt:
    """Random codes of any width; group size, symmetry and scales drawn too."""
    r, c = shape[0] if rows is None else len(rows), shape[1] if cols is None else len(cols)
    group_size = int(rng.choice([1, 3, 16, 128, c]))
    groups = -(-c // group_size)

    def draw(*size: int) -> Tensor:
        return torch.from_numpy(rng.integers(0, 2**bits, size, dtype=np.uint8))

    def index(values: Any) -> Tensor | None:
        return None if values is None else torch.tensor(np.asarray(values), dtype=torch.int32)

    scales = torch.from_numpy(rng.standard_normal((r, groups)).astype(np.float16))
    zeros = None if rng.integers(2) else draw(r, groups)
    return GroupInt(bits, group_size, draw(r, c), scales, zeros, index(rows), index(cols))


def random_weight(
    seed: int, shape: tuple[int, int], widths: list[int], by_rows: bool, permuted: bool
) -> QuantizedWeight:
    """Row tiles or column tiles of the given widths; columns in any order."""
    rng = np.random.default_rng(seed)
    size = shape[0] if by_rows else shape[1]
    widths = widths[:size]
    cuts = np.sort(rng.choice(np.arange(1, size), len(widths) - 1, replace=False)) if size > 1 else []
    tiles = []
    for bits, part in zip(widths, np.split(rng.permutation(size), cuts)):
        rows = np.sort(part) if by_rows and len(widths) > 1 else None
        cols = part if not by_rows else rng.permutation(shape[1]) if permuted else None
        tiles.append(random_tile(rng, bits, rows, cols, shape))
    return QuantizedWeight(shape, tuple(tiles))


def oracle(weight: QuantizedWeight) -> np.ndarray:
    """The dense matrix, one weight at a time; NaN where no tile is."""
    dense = np.full(weight.shape, np.nan, np.float32)
    for t in weight.tiles:
        rows = range(weight.shape[0]) if t.rows is None else t.rows.tolist()
        cols = range(weight.shape[1]) if t.cols is None else t.cols.tolist()
        codes, scales = t.codes.tolist(), t.scales.float().tolist()
        for i, row in enumerate(rows):
            for j, col in enumerate(cols):
                g = j // t.group_size
                zero = 2 ** (t.bits - 1) if t.zeros is None else int(t.zeros[i, g])
                dense[row, col] = np.float32(codes[i][j] - zero) * np.float32(scales[i][g])
    return dense


weights = st.builds(
    random_weight,
    seed=st.integers(0, 2**31),
    shape=st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 47, 65, 130])),
    widths=st.lists(st.integers(1, 8), min_size=1, max_size=3),
    by_rows=st.booleans(),
    permuted=st.booleans(),
)


@settings(max_examples=80, deadline=None)
@given(weights)
def test_pack_and_unpack_are_inverse_to_the_bit(weight: QuantizedWeight) -> None:
    stored = pack(weight)
    validate("layer", stored)
    again = unpack(stored)
    assert again.shape == weight.shape
    for before, after in zip(weight.tiles, again.tiles, strict=True):
        assert (before.bits, before.group_size) == (after.bits, after.group_size)
        for name in ("codes", "scales", "zeros", "rows", "cols"):
            a, b = getattr(before, name), getattr(after, name)
            assert (a is None) == (b is None), name
            assert a is None or (a.dtype == b.dtype and torch.equal(a, b)), name
    twice = pack(again)
    assert twice.layout == stored.layout
    assert all(torch.equal(twice.tensors[f], stored.tensors[f]) for f in stored.tensors)


@settings(max_examples=80, deadline=None)
@given(weights)
def test_what_is_predicted_is_what_pack_makes(weight: QuantizedWeight) -> None:
    stored = pack(weight)
    predicted = layout_of(weight).stored_tensors()
    assert {f: (Dtype.of(t.dtype), tuple(t.shape)) for f, t in stored.tensors.items()} == predicted
    assert all(t.is_contiguous() for t in stored.tensors.values())
    size = sum(len(t.numpy().tobytes()) for t in stored.tensors.values())
    assert size == stored.layout.nbytes == stored.nbytes
    assert bits_per_weight([stored.layout]) == 8 * size / (weight.shape[0] * weight.shape[1])


@settings(max_examples=40, deadline=None)
@given(weights)
def test_dequantize_is_the_definition(weight: QuantizedWeight) -> None:
    assert np.array_equal(weight.dequantize().numpy(), oracle(weight))


@settings(max_examples=40, deadline=None)
@given(weights, st.integers(0, 255))
def test_padding_is_zero_and_never_read(weight: QuantizedWeight, junk: int) -> None:
    stored = pack(weight)
    assert all(torch.equal(t, padded_with(stored, f, 0)) for f, t in stored.tensors.items())
    dirty = PackedWeight(stored.layout, {f: padded_with(stored, f, junk) for f in stored.tensors})
    assert torch.equal(unpack(dirty).dequantize(), weight.dequantize())


def padded_with(stored: PackedWeight, field: str, junk: int) -> Tensor:
    """The tensor with every bit that pads a row of codes or zeros taken from `junk`."""
    tensor = stored.tensors[field]
    prefix, _, name = field.rpartition(".")
    if name not in ("codes", "zeros"):
        return tensor
    placed = list(stored.layout.placed())[int(prefix or 0)]
    tile, c = placed.layout, placed.columns
    assert isinstance(tile, GroupIntLayout)
    used = c if name == "codes" else -(-c // tile.group_size)
    used *= int(tile.bits) if tile.bits in (2, 4, 8) else 1
    bits = np.unpackbits(tensor.numpy(), axis=-1, bitorder="little")
    noise = np.unpackbits(np.full_like(tensor.numpy(), junk), axis=-1, bitorder="little")
    bits[..., used:] = noise[..., used:]
    return torch.from_numpy(np.packbits(bits, axis=-1, bitorder="little"))


def test_average_widths_weigh_layers_by_their_weights() -> None:
    mixed = layout_of(unpack(PackedWeight(*split([0, 2], [1]))))
    plain = layout_of(unpack(packed(tile(2, [[1] * 9], 9))))
    assert code_bits([mixed]) == pytest.approx((2 * 8 + 4) / 3)
    assert code_bits([mixed, plain]) == pytest.approx((6 * 8 + 3 * 4 + 9 * 2) / 18)
    assert bits_per_weight([]) == code_bits([]) == 0.0
