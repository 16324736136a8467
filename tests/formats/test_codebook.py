"""The stored bytes of codebooks and sparse weights: golden bytes by hand, and hostile tensors refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from anybit.errors import InputError
from anybit.formats import Codebook, Float16, Sparse
from anybit.formats.layout import LayerLayout
from anybit.formats.validate import validate
from anybit.formats.weight import PackedWeight, QuantizedWeight, pack, unpack
from tests.formats.by_hand import hexes


def codebook_example() -> QuantizedWeight:
    """The codebook of docs/formats.md."""
    tile = Codebook(
        widths=(1, 2),
        codes=torch.tensor([[0, 1, 3, 2, 3]], dtype=torch.uint8),
        tables=(torch.tensor([[-1.0, 2.0]]).half(), torch.tensor([[-2.0, 0.0, 1.0, 4.0]]).half()),
    )
    mask = torch.tensor([[False, False, False, True, False]])
    return QuantizedWeight((1, 5), (tile,), Sparse.of(torch.full((1, 5), 0.5), mask))


def test_the_codebook_of_the_documentation() -> None:
    weight = pack(codebook_example())
    assert weight.layout.to_json() == {
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
    layout = pack(codebook_example()).layout.to_json()
    with pytest.raises(InputError, match="layer: "):
        LayerLayout.from_json("layer", {**layout, "tiles": [{**layout["tiles"][0], **change}]})
    for count in (-1, 6, True, 1.0, None):
        with pytest.raises(InputError, match="layer: "):
            LayerLayout.from_json("layer", {**layout, "sparse": count})


def test_sparse_weights_beside_rounded_inputs_are_refused() -> None:
    tile = {"format": "group_int", "bits": 4, "group_size": 8, "symmetric": True}
    layout = {"shape": [2, 8], "tiles": [tile], "sparse": 1}
    LayerLayout.from_json("layer", layout)
    with pytest.raises(InputError, match="inputs are rounded"):
        LayerLayout.from_json("layer", {**layout, "tiles": [{**tile, "act_bits": 8}]})


def test_a_width_that_is_not_stored() -> None:
    layout = pack(codebook_example()).layout
    with pytest.raises(InputError, match="1, 2, not 3"):
        layout.at_width(3)


def test_sparse_columns_must_ascend_within_rows() -> None:
    mask = torch.tensor([[True, True], [False, True]])
    columns = Float16(torch.zeros(2, 2).half())
    weight = pack(QuantizedWeight((2, 2), (columns,), Sparse.of(torch.ones(2, 2), mask)))
    validate("layer", weight)
    swapped = torch.tensor([1, 0, 1], dtype=torch.int16).view(torch.uint16)
    with pytest.raises(InputError, match="ascend within each row"):
        validate("layer", PackedWeight(weight.layout, {**weight.tensors, "sparse.columns": swapped}))
    assert unpack(weight).dequantize().tolist() == [[1, 1], [0, 1]]
