"""The stored bytes of "group int": golden bytes written by hand."""

from __future__ import annotations

import pytest
import torch

from anybit.formats.weight import PackedWeight, unpack
from tests.formats.by_hand import hexes, packed, split, tile


def test_the_worked_example_of_the_documentation() -> None:
    weight = packed(tile(4, [[1, 2, 3, 4, 5], [15, 0, 8, 7, 9]], 4, [[8, 3], [0, 15]]))
    assert hexes(weight.tensors["codes"]) == ["214305" + "00" * 13, "0f7809" + "00" * 13]
    assert hexes(weight.tensors["scales"].view(torch.uint8)) == ["003c0040", "00420044"]
    assert hexes(weight.tensors["zeros"]) == ["38", "f0"]
    assert weight.layout.to_json() == {
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


def test_tiles_carry_their_rows_as_int32() -> None:
    weight = PackedWeight(*split([0, 2], [1]))
    first, second = ["0.codes", "0.scales", "0.rows"], ["1.codes", "1.scales", "1.zeros", "1.rows"]
    assert list(weight.tensors) == first + second
    assert hexes(weight.tensors["0.rows"].view(torch.uint8)[None]) == ["0000000002000000"]
    described = {"format": "group_int", "bits": 8, "group_size": 4, "symmetric": True, "rows": 2}
    assert weight.layout.tiles[0].to_json() == described
    assert unpack(weight).dequantize().tolist() == [[-128, -127, -126], [-1, -1, -1], [-250, -248, -246]]
