"""Descriptions and bytes that come from outside are checked here before anything else looks at them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from anybit.errors import InputError
from anybit.formats import FORMATS, GroupInt, Nested, Sparse
from anybit.formats.base import Refuse, is_int
from anybit.formats.layout import FORMAT_VERSION, stored_tensors, tile_prefix
from anybit.formats.weight import PackedWeight, sparse_tensors, tile_tensors

MAX_TILES = 256  # of one layer, far beyond what any method makes: a reader compares them pair by pair


def check_version(version: Any) -> None:
    """Refuse an artifact that a newer anybit wrote.

    Raises:
        InputError: no version, or a newer one than this reader's.
    """
    if type(version) is not int or version < 1:
        raise InputError(
            f"the artifact's format_version is {version!r}, expected a number: its config.json is damaged"
        )
    if version > FORMAT_VERSION:
        raise InputError(
            f"the artifact has format_version {version}, this anybit reads up to {FORMAT_VERSION}: upgrade anybit "
            "(pip install -U anybit)"
        )


def validate_layout(name: str, layout: Any) -> None:
    """Refuse a layer description that no writer of this version makes, before anything is sized from it.

    Raises:
        InputError: with the layer, what came and what is expected.
    """

    def refuse(what: str) -> None:
        raise InputError(f"{name}: {what}; the artifact's config.json is damaged or from another version")

    if not isinstance(layout, Mapping) or not isinstance(layout.get("shape"), list | tuple):
        refuse("the layer description has no shape")
    shape, tiles = layout["shape"], layout.get("tiles")
    if len(shape) != 2 or not all(is_int(n, 1, 2**31 - 1) for n in shape):
        refuse(f"shape {shape} is not [out, in] with positive sizes")
    if not isinstance(tiles, list | tuple) or not 1 <= len(tiles) <= MAX_TILES:
        refuse(f"the layer has no list of 1 to {MAX_TILES} tiles")
    for tile in tiles:
        if not isinstance(tile, Mapping) or tile.get("format") not in list(FORMATS):
            refuse(f"tile {tile!r} is in none of the formats {', '.join(FORMATS)}")
        FORMATS[tile["format"]].check_description(tile, refuse)
        if not is_int(tile.get("rows", 1), 1, shape[0]) or not is_int(tile.get("cols", 1), 1, shape[1]):
            refuse(f"tile {dict(tile)!r} has more rows or columns than the matrix {shape}")
        if tile["format"] == Nested.NAME and (tile["counts"][0] != shape[0] or tile["kept"] >= shape[1]):
            refuse(f"counts and kept channels of {dict(tile)!r} do not fit the matrix {shape}")
    area = sum(tile.get("rows", shape[0]) * tile.get("cols", shape[1]) for tile in tiles)
    if area != shape[0] * shape[1]:
        refuse(f"tiles cover {area} of {shape[0] * shape[1]} weights")
    if layout.get("input_scale", True) is not True:
        refuse(f"input_scale {layout['input_scale']!r} is not true; leave it out where there is none")
    check_activations(tiles, refuse)
    if "sparse" in layout and any("act_bits" in tile for tile in tiles):
        refuse("sparse weights beside tiles whose inputs are rounded: what they multiply is not defined")
    if not is_int(layout.get("sparse", 0), 0, prod(shape)):
        refuse(f"{layout['sparse']!r} sparse weights are not a number up to {prod(shape)}")


def check_activations(tiles: Sequence[Mapping[str, Any]], refuse: Refuse) -> None:
    """What inputs are rounded to is a matter of their channel: tiles by rows share it, tiles by columns need not."""
    rounding = [tile for tile in tiles if {"act_bits", "act_static"} & tile.keys()]
    if any(tile["format"] != GroupInt.NAME or "act_bits" not in tile for tile in rounding):
        refuse("act_bits, and act_static beside it, belong to group_int tiles only")
    if not rounding:
        return
    if any("rows" in tile for tile in tiles):
        kinds = {(t.get("act_bits"), t.get("act_static"), t.get("group_size"), "cols" in t) for t in tiles}
        if len(kinds) > 1 or "cols" in tiles[0]:
            refuse("tiles by rows must round all input channels alike, in natural order")


def validate(name: str, packed: PackedWeight) -> None:
    """Check every dtype, shape, bound and index of bytes that come from outside.

    Raises:
        InputError: with the layer, the field, what came and what is expected.
    """
    validate_layout(name, packed.layout)
    expected = stored_tensors(packed.layout)
    for field in sorted(expected.keys() - packed.tensors.keys()):
        raise InputError(f"{name}.{field} is missing: the artifact is incomplete; run `anybit verify` on it")
    for field in sorted(packed.tensors.keys() - expected.keys()):
        raise InputError(f"{name}.{field} is no tensor of this layer's layout: the artifact is damaged")
    for field, (dtype, shape) in expected.items():
        tensor = packed.tensors[field]
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise InputError(
                f"{name}.{field} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)}: "
                "the artifact is damaged"
            )
    _validate_tiling(name, packed)
    layout = packed.layout
    for i, tile in enumerate(layout["tiles"]):
        refuse = _refusal(f"{name}.{tile_prefix(i, len(layout['tiles']))}")
        r, c = tile.get("rows", layout["shape"][0]), tile.get("cols", layout["shape"][1])
        FORMATS[tile["format"]].check_tensors(tile, tile_tensors(packed, i), r, c, refuse)
    refuse = _refusal(f"{name}.")
    scale = packed.tensors.get("input_scale")
    if scale is not None and not ((scale > 0) & scale.isfinite()).all():
        refuse("input_scale is not above 0 and finite")
    for field in ("act_clip", "act_scales"):  # tiles by rows read the same inputs
        held = [t for f, t in packed.tensors.items() if f.endswith(field)]
        if "rows" in layout["tiles"][0] and any(not torch.equal(t, held[0]) for t in held):
            refuse(f"{field} differs between tiles of the same inputs")
    if "sparse" in layout:
        refuse = _refusal(f"{name}.sparse.")
        Sparse.check_tensors(sparse_tensors(packed), tuple(layout["shape"]), refuse)


def _refusal(place: str) -> Any:
    def refuse(what: str) -> None:
        raise InputError(f"{place}{what}: the artifact is damaged")

    return refuse


def _validate_tiling(name: str, packed: PackedWeight) -> None:
    """Index tensors are in range and the tiles are disjoint; as their areas add up, they cover the matrix."""
    out_features, in_features = packed.layout["shape"]
    tiles = len(packed.layout["tiles"])
    sets: list[tuple[Tensor, Tensor]] = []
    for i in range(tiles):
        prefix = tile_prefix(i, tiles)
        rows = _index_set(f"{name}.{prefix}rows", packed.tensors.get(prefix + "rows"), out_features, True)
        cols = _index_set(f"{name}.{prefix}cols", packed.tensors.get(prefix + "cols"), in_features, False)
        if any((rows & r).any() and (cols & c).any() for r, c in sets):
            raise InputError(f"{name}: tile {i} overlaps another tile: the artifact is damaged")
        sets.append((rows, cols))


def _index_set(name: str, index: Tensor | None, size: int, ascending: bool) -> Tensor:
    """The set of an index tensor as a mask, bool [size]."""
    if index is None:
        return torch.ones(size, dtype=torch.bool)
    if index.min() < 0 or index.max() >= size:
        raise InputError(f"{name} points outside 0..{size - 1}: the artifact is damaged")
    if ascending and not (index[1:] > index[:-1]).all():
        raise InputError(f"{name} must be strictly ascending: the artifact is damaged")
    mask = torch.zeros(size, dtype=torch.bool)
    mask[index.long()] = True
    if int(mask.sum()) != index.numel():
        raise InputError(f"{name} names a channel twice: the artifact is damaged")
    return mask
