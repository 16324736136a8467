"""Quantized matrices: readable tiles, their canonical bytes, and the exact way between the two.

A quantized weight [out, in] is a tiling: disjoint (rows x columns) tiles that cover the matrix, each in one
stored format (`formats`), and perhaps a sparse part that is added. `QuantizedWeight` is what methods produce and
tests read; `PackedWeight` is what files hold (docs/formats.md); `pack` and `unpack` are inverse to the bit. Bytes
read from a file go through `validate` before anything else looks at them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anybit.formats import FORMATS, Float16, Sparse, Tile
from anybit.formats.layout import at_width, stored_tensors, tile_prefix


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantized weight matrix in readable form."""

    shape: tuple[int, int]  # (out, in)
    tiles: tuple[Tile, ...]  # disjoint, covering
    sparse: Sparse | None = None  # added to what the tiles hold
    input_scale: Tensor | None = None  # float16 [in], above 0: what inputs are multiplied by, before all else
    losses: Tensor | None = (
        None  # float32 [out, 8]: what a nested weight's stored rows cost at widths 1 to 8; not packed
    )

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


def tile_tensors(packed: PackedWeight, i: int) -> dict[str, Tensor]:
    """The tensors of one tile by field."""
    return _with_prefix(packed, tile_prefix(i, len(packed.layout["tiles"])))


def sparse_tensors(packed: PackedWeight) -> dict[str, Tensor]:
    """The tensors of the sparse part by field; empty where there is none."""
    return _with_prefix(packed, "sparse.")


def _with_prefix(packed: PackedWeight, prefix: str) -> dict[str, Tensor]:
    return {f.removeprefix(prefix): t for f, t in packed.tensors.items() if f.startswith(prefix)}
