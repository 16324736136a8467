"""The stored bytes of "group int": golden bytes written by hand, round trips, and hostile tensors refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anybit.errors import InputError
from anybit.formats import Codebook, Float16, GroupInt, Sparse
from anybit.formats.weight import (
    FORMAT_VERSION,
    MAX_TILES,
    PackedWeight,
    QuantizedWeight,
    at_width,
    bits_per_weight,
    check_version,
    code_bits,
    layout_of,
    pack,
    stored_bytes,
    stored_tensors,
    unpack,
    validate,
    validate_layout,
)


def tile(
    bits: int, codes: list[list[int]], group_size: int, zeros: list[list[int]] | None = None
) -> GroupInt:
    """A tile with the scales 1, 2, 3, ... row by row."""
    q = torch.tensor(codes, dtype=torch.uint8)
    groups = -(-q.shape[1] // group_size)
    scales = torch.arange(1, q.shape[0] * groups + 1).view(q.shape[0], groups).half()
    z = None if zeros is None else torch.tensor(zeros, dtype=torch.uint8)
    return GroupInt(bits, group_size, q, scales, z)


def packed(*tiles: GroupInt, shape: tuple[int, int] | None = None) -> PackedWeight:
    return pack(QuantizedWeight(shape or tuple(tiles[0].codes.shape), tiles))  # type: ignore[arg-type]


def hexes(tensor: Tensor) -> list[str]:
    """The rows of a uint8 tensor in hex, plane after plane."""
    return [bytes(row.tolist()).hex() for row in tensor.reshape(-1, tensor.shape[-1])]


def codebook_example() -> QuantizedWeight:
    """The codebook of docs/formats.md."""
    tile = Codebook(
        widths=(1, 2),
        codes=torch.tensor([[0, 1, 3, 2, 3]], dtype=torch.uint8),
        tables=(torch.tensor([[-1.0, 2.0]]).half(), torch.tensor([[-2.0, 0.0, 1.0, 4.0]]).half()),
    )
    mask = torch.tensor([[False, False, False, True, False]])
    return QuantizedWeight((1, 5), (tile,), Sparse.of(torch.full((1, 5), 0.5), mask))


# ---- golden bytes, by hand


def test_the_codebook_of_the_documentation() -> None:
    weight = pack(codebook_example())
    assert weight.layout == {
        "shape": [1, 5],
        "tiles": [
            {"format": "codebook", "bits": 2, "widths": [1, 2], "by_channel": False, "table_bits": 16},
        ],
        "sparse": 1,
    }
    got = {
        field: bytes(t.contiguous().view(torch.uint8).flatten().tolist()).hex()
        for field, t in weight.tensors.items()
    }
    assert got == {
        "planes": "1c00000016000000",
        "codebook_1": "00bc0040",
        "codebook_2": "00c00000003c0044",
        "sparse.values": "0038",
        "sparse.columns": "0300",
        "sparse.row_ptr": "0000000001000000",
    }
    assert weight.tensors["planes"].dtype == torch.uint32
    assert weight.tensors["sparse.columns"].dtype == torch.uint16
    validate("layer", weight)
    assert unpack(weight).dequantize().tolist() == [[-2, 0, 4, 1.5, 4]]
    narrow = weight.at_width(1)
    assert set(narrow.tensors) == {
        "planes",
        "codebook_1",
        "sparse.values",
        "sparse.columns",
        "sparse.row_ptr",
    }
    assert unpack(narrow).dequantize().tolist() == [[-1, -1, 2, 2.5, 2]]
    assert narrow.tensors["planes"].data_ptr() == weight.tensors["planes"].data_ptr()


def test_tables_of_8_and_4_bits() -> None:
    tile = Codebook(
        widths=(2,),
        codes=torch.tensor([[0, 3, 1], [2, 2, 0]], dtype=torch.uint8),
        tables=(torch.tensor([[0, 5, 10, 15], [1, 2, 3, 4]], dtype=torch.uint8),),
        by_channel=True,
        table_bits=4,
        table_scale=torch.tensor([0.5, 2.0]).half(),
        table_min=torch.tensor([-1.0, 0.0]).half(),
    )
    # a channel has three weights, so the fourth entry of each table is not stored
    tile = Codebook(**{**tile.__dict__, "codes": torch.tensor([[0, 2, 1], [2, 2, 0]], dtype=torch.uint8)})
    fewer = Codebook(**{**tile.__dict__, "tables": (tile.tables[0][:, :3].contiguous(),)})
    weight = pack(QuantizedWeight((3, 2), (fewer,)))
    assert hexes(weight.tensors["codebook_2"]) == ["500a", "2103"]
    validate("layer", weight)
    assert unpack(weight).dequantize().tolist() == [[-1.0, 6.0], [4.0, 6.0], [1.5, 2.0]]


def test_codes_beyond_a_short_table_are_refused() -> None:
    tile = Codebook(
        (2,), torch.tensor([[0, 3, 1]], dtype=torch.uint8), (torch.tensor([[0.0, 1.0, 2.0]]).half(),), True
    )
    with pytest.raises(InputError, match="planes hold the code 3 of a table with 3 entries"):
        validate("layer", pack(QuantizedWeight((3, 1), (tile,))))


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("sparse.row_ptr", torch.tensor([0, 2], dtype=torch.int32), "row_ptr"),
        ("sparse.row_ptr", torch.tensor([1, 1], dtype=torch.int32), "row_ptr"),
        ("sparse.row_ptr", torch.tensor([0, -1], dtype=torch.int32), "row_ptr"),
        ("sparse.columns", torch.tensor([5], dtype=torch.int16).view(torch.uint16), "columns point outside"),
        ("sparse.columns", torch.tensor([3], dtype=torch.int32), "sparse.columns"),
        ("sparse.values", torch.tensor([torch.inf]).half(), "values holds NaN or Inf"),
        ("codebook_2", torch.tensor([[0.0, -1.0, 2.0, 3.0]]).half(), "codebook_2 does not ascend"),
        ("codebook_1", torch.tensor([[0.0, torch.nan]]).half(), "codebook_1 holds NaN"),
        ("planes", torch.zeros(1, 1, 1, dtype=torch.int32).view(torch.uint32), "planes"),
    ],
)
def test_hostile_codebooks_are_refused(field: str, value: Tensor, word: str) -> None:
    weight = pack(codebook_example())
    with pytest.raises(InputError, match=word):
        validate("layer", PackedWeight(weight.layout, {**weight.tensors, field: value}))


@pytest.mark.parametrize(
    "change",
    [
        {"widths": []},
        {"widths": [2, 1]},
        {"widths": [1, 3]},
        {"widths": [0, 2]},
        {"widths": "12"},
        {"widths": None},
        {"bits": 3},
        {"table_bits": 7},
        {"by_channel": 1},
    ],
)
def test_absurd_codebooks_are_refused(change: dict[str, Any]) -> None:
    layout = pack(codebook_example()).layout
    with pytest.raises(InputError, match="layer: "):
        validate_layout("layer", {**layout, "tiles": [{**layout["tiles"][0], **change}]})
    for count in (-1, 6, True, 1.0, None):
        with pytest.raises(InputError, match="layer: "):
            validate_layout("layer", {**layout, "sparse": count})


def test_sparse_weights_beside_rounded_inputs_are_refused() -> None:
    tile = {"format": "group_int", "bits": 4, "group_size": 8, "symmetric": True}
    layout = {"shape": [2, 8], "tiles": [tile], "sparse": 1}
    validate_layout("layer", layout)
    with pytest.raises(InputError, match="inputs are rounded"):
        validate_layout("layer", {**layout, "tiles": [{**tile, "act_bits": 8}]})


def test_a_width_that_is_not_stored() -> None:
    layout = pack(codebook_example()).layout
    with pytest.raises(InputError, match="1, 2, not 3"):
        at_width(layout, 3)


def test_sparse_columns_must_ascend_within_rows() -> None:
    mask = torch.tensor([[True, True], [False, True]])
    columns = Float16(torch.zeros(2, 2).half())
    weight = pack(QuantizedWeight((2, 2), (columns,), Sparse.of(torch.ones(2, 2), mask)))
    validate("layer", weight)
    swapped = torch.tensor([1, 0, 1], dtype=torch.int16).view(torch.uint16)
    with pytest.raises(InputError, match="ascend within each row"):
        validate("layer", PackedWeight(weight.layout, {**weight.tensors, "sparse.columns": swapped}))
    assert unpack(weight).dequantize().tolist() == [[1, 1], [0, 1]]


def test_the_worked_example_of_the_documentation() -> None:
    weight = packed(tile(4, [[1, 2, 3, 4, 5], [15, 0, 8, 7, 9]], 4, [[8, 3], [0, 15]]))
    assert hexes(weight.tensors["codes"]) == ["214305" + "00" * 13, "0f7809" + "00" * 13]
    assert hexes(weight.tensors["scales"].view(torch.uint8)) == ["003c0040", "00420044"]
    assert hexes(weight.tensors["zeros"]) == ["38", "f0"]
    assert weight.layout == {
        "shape": [2, 5],
        "tiles": [{"format": "group_int", "bits": 4, "group_size": 4, "symmetric": False}],
    }
    expected = [[-7, -6, -5, -4, 4], [45, 0, 24, 21, -24]]
    assert unpack(weight).dequantize().tolist() == expected


def test_two_bits_four_to_a_byte() -> None:
    weight = packed(tile(2, [[3, 2, 1, 0, 1]], 5, [[2]]))
    assert hexes(weight.tensors["codes"]) == ["1b01" + "00" * 14]
    assert hexes(weight.tensors["zeros"]) == ["02"]


def test_eight_bits_a_byte_each_and_rows_of_sixteen() -> None:
    codes = [list(range(17)), list(range(255, 238, -1))]
    weight = packed(tile(8, codes, 17))
    assert hexes(weight.tensors["codes"]) == [
        "000102030405060708090a0b0c0d0e0f" + "10" + "00" * 15,
        "fffefdfcfbfaf9f8f7f6f5f4f3f2f1f0" + "ef" + "00" * 15,
    ]
    assert "zeros" not in weight.tensors
    exact = packed(tile(8, [list(range(16))], 16))
    assert tuple(exact.tensors["codes"].shape) == (1, 16)


def test_three_bits_are_planes_most_significant_first_and_rows_of_four_bytes() -> None:
    #        codes  0 1 2 3 4 5 6 7 6   low bits first: weight j at bit j
    # plane 2 (4s)  0 0 0 0 1 1 1 1 1   f0 01
    # plane 1 (2s)  0 0 1 1 0 0 1 1 1   cc 01
    # plane 0 (1s)  0 1 0 1 0 1 0 1 0   aa 00
    row = [0, 1, 2, 3, 4, 5, 6, 7, 6]
    weight = packed(tile(3, [row, row[::-1]], 4, [[5, 2, 7], [0, 1, 4]]))
    assert tuple(weight.tensors["codes"].shape) == (3, 2, 4)
    two, one, zero = ["f0010000", "1f000000"], ["cc010000", "67000000"], ["aa000000", "aa000000"]
    assert hexes(weight.tensors["codes"]) == two + one + zero
    # zeros [5 2 7], [0 1 4]: planes of one byte a row, no further padding
    assert tuple(weight.tensors["zeros"].shape) == (3, 2, 1)
    assert hexes(weight.tensors["zeros"]) == ["05", "04", "06", "00", "05", "02"]


@pytest.mark.parametrize(
    ("bits", "planes"),
    [
        (1, ["01000000"]),
        (5, ["01000000", "00000000", "01000000", "00000000", "03000000"]),
        (6, ["01000000", "00000000", "00000000", "01000000", "00000000", "03000000"]),
        (7, ["01000000", "00000000", "00000000", "00000000", "01000000", "00000000", "03000000"]),
    ],
)
def test_the_other_planes(bits: int, planes: list[str]) -> None:
    first = 1 if bits == 1 else 2 ** (bits - 1) + 0b101
    second = 0 if bits == 1 else 1
    assert hexes(packed(tile(bits, [[first, second]], 2)).tensors["codes"]) == planes


def test_a_plane_row_grows_at_the_thirty_third_weight() -> None:
    for columns, width in ((32, 4), (33, 8), (64, 8), (65, 12)):
        last = [[0] * (columns - 1) + [1]]
        codes = packed(tile(1, last, columns)).tensors["codes"]
        assert tuple(codes.shape) == (1, 1, width)
        assert hexes(codes) == [(1 << (columns - 1)).to_bytes(width, "little").hex()]


def test_symmetric_codes_are_offset_by_half_the_range() -> None:
    for bits in range(1, 9):
        half = 2 ** (bits - 1)
        weight = unpack(packed(tile(bits, [[0, half, 2**bits - 1]], 3))).dequantize()
        assert weight.tolist() == [[-half, 0, half - 1]]


def split(first: list[int], second: list[int]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Layout and tensors of a [3, 3] matrix in two row tiles."""
    a = tile(8, [[0, 1, 2], [3, 4, 5]], 4)
    b = tile(4, [[1, 1, 1]], 4, [[2]])
    rows = [torch.tensor(first, dtype=torch.int32), torch.tensor(second, dtype=torch.int32)]
    tiles = tuple(GroupInt(t.bits, 4, t.codes, t.scales, t.zeros, r) for t, r in zip((a, b), rows))
    weight = packed(*tiles, shape=(3, 3))
    return dict(weight.layout), dict(weight.tensors)


def test_tiles_carry_their_rows_as_int32() -> None:
    weight = PackedWeight(*split([0, 2], [1]))
    first, second = ["0.codes", "0.scales", "0.rows"], ["1.codes", "1.scales", "1.zeros", "1.rows"]
    assert list(weight.tensors) == first + second
    assert hexes(weight.tensors["0.rows"].view(torch.uint8)[None]) == ["0000000002000000"]
    described = {"format": "group_int", "bits": 8, "group_size": 4, "symmetric": True, "rows": 2}
    assert weight.layout["tiles"][0] == described
    assert unpack(weight).dequantize().tolist() == [[-128, -127, -126], [-1, -1, -1], [-250, -248, -246]]


# ---- round trips


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
    predicted = stored_tensors(layout_of(weight))
    assert {f: (t.dtype, tuple(t.shape)) for f, t in stored.tensors.items()} == predicted
    assert all(t.is_contiguous() for t in stored.tensors.values())
    size = sum(len(t.numpy().tobytes()) for t in stored.tensors.values())
    assert size == stored_bytes(stored.layout) == stored.nbytes
    assert bits_per_weight({"a": stored.layout}) == 8 * size / (weight.shape[0] * weight.shape[1])


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
    t = stored.layout["tiles"][int(prefix or 0)]
    c = t.get("cols", stored.layout["shape"][1])
    used = (c if name == "codes" else -(-c // t["group_size"])) * (t["bits"] if t["bits"] in (2, 4, 8) else 1)
    bits = np.unpackbits(tensor.numpy(), axis=-1, bitorder="little")
    noise = np.unpackbits(np.full_like(tensor.numpy(), junk), axis=-1, bitorder="little")
    bits[..., used:] = noise[..., used:]
    return torch.from_numpy(np.packbits(bits, axis=-1, bitorder="little"))


def test_average_widths_weigh_layers_by_their_weights() -> None:
    mixed = layout_of(unpack(PackedWeight(*split([0, 2], [1]))))
    plain = layout_of(unpack(packed(tile(2, [[1] * 9], 9))))
    assert code_bits({"a": mixed}) == pytest.approx((2 * 8 + 4) / 3)
    assert code_bits({"a": mixed, "b": plain}) == pytest.approx((6 * 8 + 3 * 4 + 9 * 2) / 18)
    assert bits_per_weight({}) == code_bits({}) == 0.0


# ---- hostile tensors


def refused(layout: Any, tensors: dict[str, Any], *words: str) -> None:
    with pytest.raises(InputError) as error:
        validate("model.q_proj", PackedWeight(layout, tensors))
    message = str(error.value)
    assert "\n" not in message and all(w in message for w in ("model.q_proj", *words)), message


def test_validate_accepts_what_pack_makes() -> None:
    validate("model.q_proj", PackedWeight(*split([0, 2], [1])))


@pytest.mark.parametrize("field", ["0.codes", "0.scales", "0.rows", "1.zeros"])
def test_a_missing_tensor_is_named(field: str) -> None:
    layout, tensors = split([0, 2], [1])
    del tensors[field]
    refused(layout, tensors, field, "missing")


def test_a_tensor_that_the_layout_does_not_have_is_refused() -> None:
    """An undeclared `rows` or `cols` would be used without any check of its shape."""
    weight = packed(tile(4, [[1, 2, 3]], 4))
    for field in ("rows", "cols", "zeros", "other"):
        hostile = torch.full((7,), 2**40)
        refused(weight.layout, {**weight.tensors, field: hostile}, field)


@pytest.mark.parametrize("field", ["0.codes", "0.scales", "0.rows", "1.zeros"])
def test_wrong_dtypes_and_shapes_are_refused(field: str) -> None:
    layout, tensors = split([0, 2], [1])
    good = tensors[field]
    for bad in (good.long(), good.float(), good[:0], good[None], good.flatten()[0], torch.cat([good, good])):
        refused(layout, {**tensors, field: bad}, field, "expected")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_scales_that_are_no_numbers_are_refused(value: float) -> None:
    layout, tensors = split([0, 2], [1])
    tensors["0.scales"][1, 0] = value
    refused(layout, tensors, "0.scales", "NaN")


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ([0, 3], "outside"),
        ([-1, 2], "outside"),
        ([0, 2**31 - 1], "outside"),
        ([-(2**31), 0], "outside"),
        ([2, 0], "ascending"),
        ([0, 0], "ascending"),
        ([0, 1], "overlaps"),
        ([1, 2], "overlaps"),
    ],
)
def test_bad_rows_are_refused(rows: list[int], word: str) -> None:
    layout, tensors = split([0, 2], [1])
    tensors["0.rows"] = torch.tensor(rows, dtype=torch.int32)
    refused(layout, tensors, word)


@pytest.mark.parametrize(
    ("cols", "word"),
    [
        ([[0, 3], [2]], "outside"),
        ([[0, -1], [2]], "outside"),
        ([[0, 0], [1]], "twice"),
        ([[1, 0], [1]], "overlaps"),
    ],
)
def test_bad_columns_are_refused(cols: list[list[int]], word: str) -> None:
    tiles = []
    for index in cols:
        t = tile(4, [[1] * len(index)], 4)
        tiles.append(GroupInt(4, 4, t.codes, t.scales, None, None, torch.tensor(index, dtype=torch.int32)))
    weight = packed(*tiles, shape=(1, 3))
    refused(weight.layout, dict(weight.tensors), word)


def test_tiles_that_leave_weights_out_are_refused_before_any_tensor_is_looked_at() -> None:
    layout, _ = split([0, 2], [1])
    refused({"shape": layout["shape"], "tiles": layout["tiles"][:1]}, {}, "cover 6 of 9")
    refused({"shape": [2**31 - 1, 2**31 - 1], "tiles": layout["tiles"]}, {}, "cover")


TILE = {"format": "group_int", "bits": 4, "group_size": 128, "symmetric": False}


@pytest.mark.parametrize(
    "layout",
    [None, [], "layout", 3, {}, {"shape": [4, 4]}, {"tiles": [TILE]}, {"shape": [4, 4], "tiles": []}]
    + [{"shape": [4, 4], "tiles": tiles} for tiles in (TILE, "tiles", [None], ["tile"], [[]], [TILE, 4])]
    + [{"shape": [999, 1], "tiles": [{**TILE, "rows": 1}] * 999}],
)
def test_absurd_layouts_are_refused(layout: Any) -> None:
    with pytest.raises(InputError, match="layer"):
        validate_layout("layer", layout)


def test_as_many_tiles_as_allowed() -> None:
    validate_layout("layer", {"shape": [MAX_TILES, 1], "tiles": [{**TILE, "rows": 1}] * MAX_TILES})


@pytest.mark.parametrize(
    "shape",
    [
        [4],
        [4, 4, 4],
        [0, 4],
        [4, -4],
        [True, 4],
        ["4", "4"],
        [4.0, 4],
        [None, 4],
        [2**31, 4],
        [2**70, 2**70],
        "44",
        {},
        16,
    ],
)
def test_absurd_shapes_are_refused(shape: Any) -> None:
    with pytest.raises(InputError, match="shape"):
        validate_layout("layer", {"shape": shape, "tiles": [TILE]})


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("format", [None, "", "GROUP_INT", "codebook", ["group_int"], 3]),
        ("bits", [None, 0, -4, 9, 16, 2**40, True, 4.0, "4", [4]]),
        ("group_size", [None, 0, -1, True, 1.5, "128", 2**31, [128]]),
        ("symmetric", [None, 0, 1, "false", []]),
        ("rows", [None, 0, -1, 5, True, 2.0, "4", 2**40, [0, 1]]),
        ("cols", [None, 0, -1, 5, True, 2.0, "4", 2**40, [0, 1]]),
    ],
)
def test_absurd_tiles_are_refused(key: str, values: list[Any]) -> None:
    validate_layout("layer", {"shape": [4, 4], "tiles": [TILE]})
    for value in values:
        with pytest.raises(InputError, match="layer: "):
            validate_layout("layer", {"shape": [4, 4], "tiles": [{**TILE, key: value}]})
    if key in TILE:
        without = {k: v for k, v in TILE.items() if k != key}
        with pytest.raises(InputError, match="layer: "):
            validate_layout("layer", {"shape": [4, 4], "tiles": [without]})


def test_versions() -> None:
    check_version(FORMAT_VERSION)
    with pytest.raises(InputError, match="upgrade"):
        check_version(FORMAT_VERSION + 1)
    for damaged in (None, 0, -1, "1", 1.0, True, [1]):
        with pytest.raises(InputError, match="format_version"):
            check_version(damaged)
