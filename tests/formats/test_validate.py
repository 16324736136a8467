"""Hostile layouts and tensors are refused with what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anybit.errors import InputError
from anybit.formats import GroupInt
from anybit.formats.layout import FORMAT_VERSION, MAX_TILES, LayerLayout
from anybit.formats.validate import check_version, validate
from anybit.formats.weight import PackedWeight
from tests.formats.by_hand import packed, split, tile


def refused(layout: LayerLayout, tensors: dict[str, Any], *words: str) -> None:
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
    layout = split([0, 2], [1])[0].to_json()
    for change, word in (
        ({"tiles": layout["tiles"][:1]}, "cover 6 of 9"),
        ({"shape": [2**31 - 1] * 2}, "cover"),
    ):
        with pytest.raises(InputError, match=rf"layer: .*{word}"):
            LayerLayout.from_json("layer", {**layout, **change})


TILE = {"format": "group_int", "bits": 4, "group_size": 128, "symmetric": False}


@pytest.mark.parametrize(
    "layout",
    [None, [], "layout", 3, {}, {"shape": [4, 4]}, {"tiles": [TILE]}, {"shape": [4, 4], "tiles": []}]
    + [{"shape": [4, 4], "tiles": tiles} for tiles in (TILE, "tiles", [None], ["tile"], [[]], [TILE, 4])]
    + [{"shape": [999, 1], "tiles": [{**TILE, "rows": 1}] * 999}],
)
def test_absurd_layouts_are_refused(layout: Any) -> None:
    with pytest.raises(InputError, match="layer"):
        LayerLayout.from_json("layer", layout)


def test_as_many_tiles_as_allowed_and_no_more() -> None:
    def layout(count: int) -> dict[str, Any]:
        return {"shape": [count, 1], "tiles": [{**TILE, "rows": 1}] * count}

    LayerLayout.from_json("layer", layout(MAX_TILES))
    with pytest.raises(InputError, match="tiles"):
        LayerLayout.from_json("layer", layout(MAX_TILES + 1))


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
        LayerLayout.from_json("layer", {"shape": shape, "tiles": [TILE]})


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("format", [None, "", "GROUP_INT", "codebook", ["group_int"], 3]),
        ("bits", [None, 0, -4, 9, 16, 2**40, True, 4.0, "4", [4]]),
        ("group_size", [None, 0, -1, True, 1.5, "128", 2**20 + 1, 2**31, 10**20, [128]]),
        ("symmetric", [None, 0, 1, "false", []]),
        ("rows", [None, 0, -1, 5, True, 2.0, "4", 2**40, [0, 1]]),
        ("cols", [None, 0, -1, 5, True, 2.0, "4", 2**40, [0, 1]]),
    ],
)
def test_absurd_tiles_are_refused(key: str, values: list[Any]) -> None:
    LayerLayout.from_json("layer", {"shape": [4, 4], "tiles": [TILE]})
    for value in values:
        with pytest.raises(InputError, match="layer: "):
            LayerLayout.from_json("layer", {"shape": [4, 4], "tiles": [{**TILE, key: value}]})
    if key in TILE:
        without = {k: v for k, v in TILE.items() if k != key}
        with pytest.raises(InputError, match="layer: "):
            LayerLayout.from_json("layer", {"shape": [4, 4], "tiles": [without]})


def test_versions() -> None:
    check_version(FORMAT_VERSION)
    with pytest.raises(InputError, match="upgrade"):
        check_version(FORMAT_VERSION + 1)
    for damaged in (None, 0, -1, "1", 1.0, True, [1]):
        with pytest.raises(InputError, match="format_version"):
            check_version(damaged)
