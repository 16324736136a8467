"""Quantized matrices: readable tiles, their canonical bytes, and the exact way between the two.

A quantized weight [out, in] is a tiling: disjoint (rows x columns) tiles that cover the matrix, each in one
stored format (`formats`), and perhaps a sparse part that is added. `QuantizedWeight` is what methods produce and
tests read; `PackedWeight` is what files hold (docs/formats.md); `pack` and `unpack` are inverse to the bit. Bytes
read from a file go through `validate` before anything else looks at them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from anybit.errors import InputError
from anybit.formats import FORMATS, Codebook, Fields, Float16, GroupInt, Nested, Refuse, Sparse, Tile, is_int

MAX_TILES = 256  # of one layer, far beyond what any method makes: a reader compares them pair by pair
QUANT_METHOD = "anybit"  # what config.json calls us
FORMAT_VERSION = 1  # of the stored bytes and their description


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantized weight matrix in readable form."""

    shape: tuple[int, int]  # (out, in)
    tiles: tuple[Tile, ...]  # disjoint, covering
    sparse: Sparse | None = None  # added to what the tiles hold
    input_scale: Tensor | None = None  # float16 [in], above 0: what inputs are multiplied by, before all else

    def dequantize(self) -> Tensor:
        """The matrix that the codes stand for, float32 [out, in]; of a nested one, at its widest."""
        dense = torch.zeros(self.shape, device=_device(self.tiles[0]))
        for tile in self.tiles:
            place(dense, tile.dequantize(), tile.rows, tile.cols)
        if self.sparse is not None:
            self.sparse.add_to(dense)
        return dense if self.input_scale is None else dense * self.input_scale.float()


@dataclass(frozen=True)
class PackedWeight:
    """A quantized weight matrix as stored bytes."""

    layout: Mapping[str, Any]  # {"shape": [out, in], "tiles": [{...}]}: what config.json says of the layer
    tensors: Mapping[str, Tensor]  # canonical tensors by field: "codes", or "0.codes" where tiles are several

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def at_width(self, bits: int) -> PackedWeight:
        """The same weight at one of its widths: views of the planes and the table that it needs, nothing copied."""
        return self.beginning(at_width(self.layout, bits))

    def beginning(self, layout: Mapping[str, Any]) -> PackedWeight:
        """The same weight as a layout whose tensors are beginnings of these: views, nothing copied."""
        wanted = stored_tensors(layout)
        return PackedWeight(layout, {field: self.tensors[field][: wanted[field][1][0]] for field in wanted})


def place(dense: Tensor, tile: Tensor, rows: Tensor | None, cols: Tensor | None) -> None:
    """Write a tile [r, c] to its rows and columns of `dense` [out, in]."""
    if rows is None and cols is None:
        dense.copy_(tile)
    elif cols is None:
        dense[rows.long()] = tile  # type: ignore[union-attr]
    elif rows is None:
        dense[:, cols.long()] = tile
    else:
        dense[rows.long()[:, None], cols.long()] = tile


def _device(tile: Tile) -> torch.device:
    return (tile.values if isinstance(tile, Float16) else tile.codes).device


def pack(weight: QuantizedWeight) -> PackedWeight:
    """Canonical bytes of a quantized weight."""
    tensors: dict[str, Tensor] = {}
    for i, tile in enumerate(weight.tiles):
        fields = tile.tensors()
        fields |= {} if tile.rows is None else {"rows": tile.rows}
        fields |= {} if tile.cols is None else {"cols": tile.cols}
        prefix = tile_prefix(i, len(weight.tiles))
        tensors |= {prefix + field: tensor.contiguous() for field, tensor in fields.items()}
    if weight.sparse is not None:
        fields = weight.sparse.tensors(weight.shape[1])
        tensors |= {f"sparse.{field}": tensor.contiguous() for field, tensor in fields.items()}
    tensors |= {} if weight.input_scale is None else {"input_scale": weight.input_scale}
    return PackedWeight(layout_of(weight), tensors)


def layout_of(weight: QuantizedWeight) -> dict[str, Any]:
    """The JSON description that, with the tensors, makes a packed weight readable."""
    tiles = []
    for t in weight.tiles:
        tile = t.describe()
        tile |= {"rows": t.rows.numel()} if t.rows is not None else {}
        tile |= {"cols": t.cols.numel()} if t.cols is not None else {}
        tiles.append(tile)
    layout: dict[str, Any] = {"shape": list(weight.shape), "tiles": tiles}
    layout |= {} if weight.sparse is None else {"sparse": len(weight.sparse.values)}
    return layout if weight.input_scale is None else layout | {"input_scale": True}


def unpack(packed: PackedWeight) -> QuantizedWeight:
    """Inverse of `pack`. The bytes must have gone through `validate` if they come from a file."""
    layout = packed.layout
    out_features, in_features = layout["shape"]
    tiles = []
    for i, tile in enumerate(layout["tiles"]):
        r, c = tile.get("rows", out_features), tile.get("cols", in_features)
        tiles.append(FORMATS[tile["format"]].read(tile, tile_tensors(packed, i), r, c))
    sparse = Sparse.read(sparse_tensors(packed)) if "sparse" in layout else None
    return QuantizedWeight(
        (out_features, in_features), tuple(tiles), sparse, packed.tensors.get("input_scale")
    )


def tile_prefix(i: int, tiles: int) -> str:
    """What the fields of tile i of so many begin with."""
    return f"{i}." if tiles > 1 else ""


def tile_tensors(packed: PackedWeight, i: int) -> dict[str, Tensor]:
    """The tensors of one tile by field."""
    return _with_prefix(packed, tile_prefix(i, len(packed.layout["tiles"])))


def sparse_tensors(packed: PackedWeight) -> dict[str, Tensor]:
    """The tensors of the sparse part by field; empty where there is none."""
    return _with_prefix(packed, "sparse.")


def _with_prefix(packed: PackedWeight, prefix: str) -> dict[str, Tensor]:
    return {f.removeprefix(prefix): t for f, t in packed.tensors.items() if f.startswith(prefix)}


def stored_tensors(layout: Mapping[str, Any]) -> Fields:
    """Field -> (dtype, shape) of every tensor that a layer of this layout stores.

    The one place that knows the shapes: it sizes buffers at load, predicts bytes before any work and checks
    what a file holds.
    """
    out_features, in_features = layout["shape"]
    stored: Fields = {}
    for i, tile in enumerate(layout["tiles"]):
        r, c = tile.get("rows", out_features), tile.get("cols", in_features)
        fields = FORMATS[tile["format"]].fields(tile, r, c)
        fields |= {"rows": (torch.int32, (r,))} if "rows" in tile else {}
        fields |= {"cols": (torch.int32, (c,))} if "cols" in tile else {}
        prefix = tile_prefix(i, len(layout["tiles"]))
        stored |= {prefix + field: entry for field, entry in fields.items()}
    if "sparse" in layout:
        fields = Sparse.fields(layout["sparse"], (out_features, in_features))
        stored |= {f"sparse.{field}": entry for field, entry in fields.items()}
    if "input_scale" in layout:
        stored["input_scale"] = (torch.float16, (in_features,))
    return stored


def stored_bytes(layout: Mapping[str, Any]) -> int:
    """Bytes of all tensors of a layer of this layout."""
    return sum(dtype.itemsize * prod(shape) for dtype, shape in stored_tensors(layout).values())


def bits_per_weight(layouts: Mapping[str, Mapping[str, Any]]) -> float:
    """Stored bits per weight over layers: 8 x bytes of codes, scales, zeros, indices and padding / weights."""
    weights = sum(prod(layout["shape"]) for layout in layouts.values())
    return 8 * sum(stored_bytes(layout) for layout in layouts.values()) / weights if weights else 0.0


def code_bits(layouts: Mapping[str, Mapping[str, Any]]) -> float:
    """Average width of the codes alone, weighted by the number of weights that have codes.

    Columns of a quantized matrix that stay float16 are outliers, not codes.
    """
    weights, bits = 0, 0
    for layout in layouts.values():
        out_features, in_features = layout["shape"]
        for tile in layout["tiles"]:
            if tile["format"] != Float16.NAME:
                area = tile.get("rows", out_features) * (tile.get("cols", in_features) - tile.get("kept", 0))
                weights, bits = weights + area, bits + area * tile["bits"]
    return bits / weights if weights else 16.0 * bool(layouts)


def stored_widths(layout: Mapping[str, Any]) -> tuple[int, ...]:
    """The widths that a layer can run at: several for a nested one, else its own."""
    nested = [
        tuple(t["widths"]) for t in layout["tiles"] if t["format"] == Codebook.NAME and not t["by_channel"]
    ]
    return nested[0] if len(nested) == 1 == len(layout["tiles"]) else ()


def at_width(layout: Mapping[str, Any], bits: float) -> dict[str, Any]:
    """The layout of a nested layer read at one of its widths; a layer that is not nested stays as it is.

    Raises:
        InputError: a width that it does not have.
    """
    widths = stored_widths(layout)
    if len(widths) < 2:
        return dict(layout)
    if bits not in widths:
        raise InputError(f"the artifact has the widths {', '.join(map(str, widths))}, not {bits:g}")
    bits = int(bits)
    return {**layout, "tiles": [{**layout["tiles"][0], "bits": bits, "widths": [bits]}]}


def widest(layout: Mapping[str, Any]) -> dict[str, Any]:
    """The layout of a layer read at its widest."""
    return at_width(layout, max(stored_widths(layout), default=0))


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
