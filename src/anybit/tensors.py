"""Quantized matrices: readable tiles, their canonical bytes, and the exact way between the two.

A quantized weight [out, in] is a tiling: disjoint (rows x columns) tiles that cover the matrix, each in one
stored format. `QuantizedWeight` is what methods produce and tests read; `PackedWeight` is what files hold
(docs/formats.md); `pack` and `unpack` are inverse to the bit. Bytes read from a file go through `validate`
before anything else looks at them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from anybit.errors import InputError

PACKED_WIDTHS = (2, 4, 8)  # packed along `in`; every other width is stored as bitplanes
ROW_ALIGN = 16  # bytes: rows of packed codes start where a vector load likes them
PLANE_ALIGN = 4  # bytes: a bitplane row is a whole number of 32-bit words
FORMATS = ("group_int",)
MAX_TILES = 256  # of one layer, far beyond what any method makes: a reader compares them pair by pair
QUANT_METHOD = "anybit"  # what config.json calls us
FORMAT_VERSION = 1  # of the stored bytes and their description


@dataclass(frozen=True)
class GroupInt:
    """One tile in format "group int": `w[i, j] = scales[i, g] * (codes[i, j] - zero[i, g])`, g = j // group_size.

    `zero` is `zeros` where present (asymmetric) and `2**(bits - 1)` otherwise (symmetric).
    The last group is shorter where `c` is not a multiple of `group_size`.
    """

    bits: int  # 1..8
    group_size: int  # input channels per group, in stored order
    codes: Tensor  # uint8 [r, c], values below 2**bits
    scales: Tensor  # float16 [r, groups]
    zeros: Tensor | None = None  # uint8 [r, groups]; None: symmetric
    rows: Tensor | None = None  # int32 [r], ascending output rows; None: all
    cols: Tensor | None = None  # int32 [c], original input channels in stored order; None: all, natural order

    def dequantize(self) -> Tensor:
        """The tile's weights, float32 [r, c], columns in stored order."""
        c = self.codes.shape[1]
        group = torch.arange(c, device=self.codes.device) // self.group_size
        zero = 2 ** (self.bits - 1) if self.zeros is None else self.zeros.float()[:, group]
        return (self.codes.float() - zero) * self.scales.float()[:, group]


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantized weight matrix in readable form."""

    shape: tuple[int, int]  # (out, in)
    tiles: tuple[GroupInt, ...]  # disjoint, covering

    def dequantize(self) -> Tensor:
        """The matrix that the codes stand for, float32 [out, in]."""
        dense = torch.zeros(self.shape, device=self.tiles[0].codes.device)
        for tile in self.tiles:
            place(dense, tile.dequantize(), tile.rows, tile.cols)
        return dense


@dataclass(frozen=True)
class PackedWeight:
    """A quantized weight matrix as stored bytes."""

    layout: Mapping[str, Any]  # {"shape": [out, in], "tiles": [{...}]}: what config.json says of the layer
    tensors: Mapping[str, Tensor]  # canonical tensors by field: "codes", or "0.codes" where tiles are several

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


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


def groups_of(columns: int, group_size: int) -> int:
    """Number of groups along `columns` input channels; a ragged last group is a group."""
    return -(-columns // group_size)


def row_bytes(columns: int, bits: int, align: int) -> int:
    """Bytes of one row of codes (one plane's, for a width stored as planes), padded to `align` bytes."""
    stored = bits if bits in PACKED_WIDTHS else 1
    return -(-columns * stored // (8 * align)) * align


def code_align(bits: int) -> int:
    return ROW_ALIGN if bits in PACKED_WIDTHS else PLANE_ALIGN


def pack_codes(codes: Tensor, bits: int, align: int) -> Tensor:
    """Pack codes [r, c] below 2**bits: uint8 [r, bytes] at 2, 4 and 8 bits, else planes uint8 [bits, r, bytes].

    Low bits come first: weight j of a packed row is at bit `j * bits`, of a plane row at bit j. Planes are
    stored most significant first.
    """
    if bits not in PACKED_WIDTHS:
        planes = [pack_bits(codes >> p & 1, 1, align) for p in range(bits - 1, -1, -1)]
        return torch.stack(planes)
    return pack_bits(codes, bits, align)


def pack_bits(codes: Tensor, width: int, align: int) -> Tensor:
    """Pack codes [r, c] of a width that divides 8 into uint8 [r, bytes]."""
    per_byte = 8 // width
    r, c = codes.shape
    padded = torch.zeros(r, row_bytes(c, width, align) * per_byte, dtype=torch.uint8, device=codes.device)
    padded[:, :c] = codes
    fields = padded.view(r, -1, per_byte)
    packed = fields[..., 0].clone()
    for k in range(1, per_byte):
        packed |= fields[..., k] << (k * width)
    return packed


def unpack_codes(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Inverse of `pack_codes`: uint8 [r, columns]."""
    if bits in PACKED_WIDTHS:
        return unpack_bits(packed, bits, columns)
    codes = torch.zeros(packed.shape[1], columns, dtype=torch.uint8, device=packed.device)
    for plane in packed:
        codes = codes << 1 | unpack_bits(plane, 1, columns)
    return codes


def unpack_bits(packed: Tensor, width: int, columns: int) -> Tensor:
    """Inverse of `pack_bits`: uint8 [r, columns]."""
    per_byte = 8 // width
    fields = torch.stack([packed >> (k * width) & (2**width - 1) for k in range(per_byte)], dim=-1)
    return fields.flatten(1)[:, :columns].contiguous()


def pack(weight: QuantizedWeight) -> PackedWeight:
    """Canonical bytes of a quantized weight."""
    tensors: dict[str, Tensor] = {}
    for i, tile in enumerate(weight.tiles):
        prefix = f"{i}." if len(weight.tiles) > 1 else ""
        align = code_align(tile.bits)
        tensors[prefix + "codes"] = pack_codes(tile.codes, tile.bits, align)
        tensors[prefix + "scales"] = tile.scales.contiguous()
        if tile.zeros is not None:
            tensors[prefix + "zeros"] = pack_codes(tile.zeros, tile.bits, 1)
        if tile.rows is not None:
            tensors[prefix + "rows"] = tile.rows.contiguous()
        if tile.cols is not None:
            tensors[prefix + "cols"] = tile.cols.contiguous()
    return PackedWeight(layout_of(weight), tensors)


def layout_of(weight: QuantizedWeight) -> dict[str, Any]:
    """The JSON description that, with the tensors, makes a packed weight readable."""
    tiles = []
    for t in weight.tiles:
        tile: dict[str, Any] = {
            "format": "group_int",
            "bits": t.bits,
            "group_size": t.group_size,
            "symmetric": t.zeros is None,
        }
        tile |= {"rows": t.rows.numel()} if t.rows is not None else {}
        tile |= {"cols": t.cols.numel()} if t.cols is not None else {}
        tiles.append(tile)
    return {"shape": list(weight.shape), "tiles": tiles}


def unpack(packed: PackedWeight) -> QuantizedWeight:
    """Inverse of `pack`. The bytes must have gone through `validate` if they come from a file."""
    layout = packed.layout
    out_features, in_features = layout["shape"]
    tiles = []
    for i, tile in enumerate(layout["tiles"]):
        prefix = f"{i}." if len(layout["tiles"]) > 1 else ""
        bits, group_size = tile["bits"], tile["group_size"]
        c = tile.get("cols", in_features)
        zeros = packed.tensors.get(prefix + "zeros")
        if zeros is not None:
            zeros = unpack_codes(zeros, bits, groups_of(c, group_size))
        tiles.append(
            GroupInt(
                bits=bits,
                group_size=group_size,
                codes=unpack_codes(packed.tensors[prefix + "codes"], bits, c),
                scales=packed.tensors[prefix + "scales"],
                zeros=zeros,
                rows=packed.tensors.get(prefix + "rows"),
                cols=packed.tensors.get(prefix + "cols"),
            )
        )
    return QuantizedWeight((out_features, in_features), tuple(tiles))


def stored_tensors(layout: Mapping[str, Any]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Field -> (dtype, shape) of every tensor that a layer of this layout stores.

    The one place that knows the shapes: it sizes buffers at load, predicts bytes before any work and checks
    what a file holds.
    """
    out_features, in_features = layout["shape"]
    fields: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for i, tile in enumerate(layout["tiles"]):
        prefix = f"{i}." if len(layout["tiles"]) > 1 else ""
        bits = tile["bits"]
        r, c = tile.get("rows", out_features), tile.get("cols", in_features)
        groups = groups_of(c, tile["group_size"])
        fields[prefix + "codes"] = (torch.uint8, packed_shape(r, c, bits, code_align(bits)))
        fields[prefix + "scales"] = (torch.float16, (r, groups))
        if not tile["symmetric"]:
            fields[prefix + "zeros"] = (torch.uint8, packed_shape(r, groups, bits, 1))
        if "rows" in tile:
            fields[prefix + "rows"] = (torch.int32, (r,))
        if "cols" in tile:
            fields[prefix + "cols"] = (torch.int32, (c,))
    return fields


def packed_shape(r: int, c: int, bits: int, align: int) -> tuple[int, ...]:
    width = row_bytes(c, bits, align)
    return (r, width) if bits in PACKED_WIDTHS else (bits, r, width)


def stored_bytes(layout: Mapping[str, Any]) -> int:
    """Bytes of all tensors of a layer of this layout."""
    return sum(dtype.itemsize * prod(shape) for dtype, shape in stored_tensors(layout).values())


def bits_per_weight(layouts: Mapping[str, Mapping[str, Any]]) -> float:
    """Stored bits per weight over layers: 8 x bytes of codes, scales, zeros, indices and padding / weights."""
    weights = sum(prod(layout["shape"]) for layout in layouts.values())
    return 8 * sum(stored_bytes(layout) for layout in layouts.values()) / weights if weights else 0.0


def code_bits(layouts: Mapping[str, Mapping[str, Any]]) -> float:
    """Average width of the codes alone, weighted by the number of weights."""
    weights, bits = 0, 0
    for layout in layouts.values():
        out_features, in_features = layout["shape"]
        for tile in layout["tiles"]:
            area = tile.get("rows", out_features) * tile.get("cols", in_features)
            weights, bits = weights + area, bits + area * tile["bits"]
    return bits / weights if weights else 0.0


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

    def integer(value: Any, low: int, high: int) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high

    def refuse(what: str) -> None:
        raise InputError(f"{name}: {what}; the artifact's config.json is damaged or from another version")

    if not isinstance(layout, Mapping) or not isinstance(layout.get("shape"), list | tuple):
        refuse("the layer description has no shape")
    shape, tiles = layout["shape"], layout.get("tiles")
    if len(shape) != 2 or not all(integer(n, 1, 2**31 - 1) for n in shape):
        refuse(f"shape {shape} is not [out, in] with positive sizes")
    if not isinstance(tiles, list | tuple) or not 1 <= len(tiles) <= MAX_TILES:
        refuse(f"the layer has no list of 1 to {MAX_TILES} tiles")
    for tile in tiles:
        if not isinstance(tile, Mapping) or tile.get("format") not in FORMATS:
            refuse(f"tile {tile!r} is in none of the formats {', '.join(FORMATS)}")
        if not integer(tile.get("bits"), 1, 8):
            refuse(f"width {tile.get('bits')!r} is not one of 1..8 bits")
        if not integer(tile.get("group_size"), 1, 2**31 - 1) or not isinstance(tile.get("symmetric"), bool):
            refuse(f"tile {dict(tile)!r} needs a positive group_size and symmetric true or false")
        if not integer(tile.get("rows", 1), 1, shape[0]) or not integer(tile.get("cols", 1), 1, shape[1]):
            refuse(f"tile {dict(tile)!r} has more rows or columns than the matrix {shape}")
    area = sum(tile.get("rows", shape[0]) * tile.get("cols", shape[1]) for tile in tiles)
    if area != shape[0] * shape[1]:
        refuse(f"tiles cover {area} of {shape[0] * shape[1]} weights")


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
        if field.endswith("scales") and not torch.isfinite(tensor).all():
            raise InputError(f"{name}.{field} holds NaN or Inf: the artifact is damaged")
    _validate_tiling(name, packed)


def _validate_tiling(name: str, packed: PackedWeight) -> None:
    """Index tensors are in range and the tiles are disjoint; as their areas add up, they cover the matrix."""
    out_features, in_features = packed.layout["shape"]
    several = len(packed.layout["tiles"]) > 1
    sets: list[tuple[Tensor, Tensor]] = []
    for i in range(len(packed.layout["tiles"])):
        prefix = f"{i}." if several else ""
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
