"""Bytes that come from outside are checked here before anything else looks at them; descriptions, in `layout`."""

from __future__ import annotations

from typing import Any

from anybit.errors import InputError
from anybit.formats import Sparse
from anybit.formats.base import Refuse
from anybit.formats.layout import FORMAT_VERSION
from anybit.formats.weight import PackedWeight
from anybit.lazy import Tensor, torch


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


def validate(name: str, packed: PackedWeight) -> None:
    """Check every dtype, shape, bound and index of bytes that come from outside.

    Raises:
        InputError: with the layer, the field, what came and what is expected.
    """
    layout = packed.layout
    expected = layout.stored_tensors()
    for field in sorted(expected.keys() - packed.tensors.keys()):
        raise InputError(f"{name}.{field} is missing: the artifact is incomplete; run `anybit verify` on it")
    for field in sorted(packed.tensors.keys() - expected.keys()):
        raise InputError(f"{name}.{field} is no tensor of this layer's layout: the artifact is damaged")
    for field, (dtype, shape) in expected.items():
        tensor = packed.tensors[field]
        if tensor.dtype != dtype.torch or tuple(tensor.shape) != shape:
            raise InputError(
                f"{name}.{field} is {tensor.dtype} {list(tensor.shape)}, expected {dtype.torch} {list(shape)}: "
                "the artifact is damaged"
            )
    _validate_tiling(name, packed)
    for tile in layout.placed():
        refuse = _refusal(f"{name}.{tile.prefix}")
        tile.layout.check_tensors(packed.of_tile(tile), tile.rows, tile.columns, refuse)
    refuse = _refusal(f"{name}.")
    scale = packed.tensors.get("input_scale")
    if scale is not None and not ((scale > 0) & scale.isfinite()).all():
        refuse("input_scale is not above 0 and finite")
    for field in ("act_clip", "act_scales"):  # tiles by rows read the same inputs
        held = [t for f, t in packed.tensors.items() if f.endswith(field)]
        if layout.tiles[0].rows is not None and any(not torch.equal(t, held[0]) for t in held):
            refuse(f"{field} differs between tiles of the same inputs")
    if layout.sparse is not None:
        Sparse.check_tensors(packed.of_sparse, layout.shape, _refusal(f"{name}.sparse."))


def _refusal(place: str) -> Refuse:
    def refuse(what: str) -> None:
        raise InputError(f"{place}{what}: the artifact is damaged")

    return refuse


def _validate_tiling(name: str, packed: PackedWeight) -> None:
    """Index tensors are in range and the tiles are disjoint; as their areas add up, they cover the matrix."""
    out_features, in_features = packed.layout.shape
    sets: list[tuple[Tensor, Tensor]] = []
    for i, tile in enumerate(packed.layout.placed()):
        fields, place = packed.of_tile(tile), f"{name}.{tile.prefix}"
        rows = _index_set(f"{place}rows", fields.get("rows"), out_features, True)
        cols = _index_set(f"{place}cols", fields.get("cols"), in_features, False)
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
