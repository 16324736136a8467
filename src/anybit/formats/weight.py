"""Quantized matrices: readable tiles, their canonical bytes, and the exact way between the two.

A quantized weight [out, in] is a tiling: disjoint (rows x columns) tiles that cover the matrix, each in one
stored format (`formats`), and perhaps a sparse part that is added. `QuantizedWeight` is what methods produce and
tests read; `PackedWeight` is what files hold (docs/formats.md); `pack` and `unpack` are inverse to the bit. Bytes
read from a file go through `validate` before anything else looks at them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from anybit.formats import Sparse, Tile
from anybit.formats.layout import LayerLayout, PlacedTile
from anybit.lazy import Tensor, torch


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
        dense: Tensor | None = None
        for tile in self.tiles:
            part = tile.dequantize()
            dense = torch.zeros(self.shape, device=part.device) if dense is None else dense
            place(dense, part, tile.rows, tile.cols)
        assert dense is not None, "a matrix has at least one tile"
        if self.sparse is not None:
            self.sparse.add_to(dense)
        return dense if self.input_scale is None else dense * self.input_scale.float()


@dataclass(frozen=True)
class PackedWeight:
    """A quantized weight matrix as stored bytes."""

    layout: LayerLayout
    tensors: Mapping[str, Tensor]  # canonical tensors by field: "codes", or "0.codes" where tiles are several

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def at_width(self, bits: int) -> PackedWeight:
        """The same weight at one of its widths: views of the planes and the table that it needs, nothing copied."""
        return self.prefix(self.layout.at_width(bits))

    def prefix(self, layout: LayerLayout) -> PackedWeight:
        """The same weight as a layout whose tensors are the first rows of these: views, nothing copied."""
        wanted = layout.stored_tensors()
        return PackedWeight(layout, {field: self.tensors[field][: wanted[field][1][0]] for field in wanted})

    def grown(self, layout: LayerLayout) -> PackedWeight:
        """A layout whose tensors begin with these, where they are; what is new of them is zeros."""
        held, grown = self.tensors, {}
        device = next(iter(held.values())).device
        for field, (dtype, shape) in layout.stored_tensors().items():
            old = held.get(field)
            if old is not None and tuple(old.shape) == shape:
                grown[field] = old
                continue
            grown[field] = torch.zeros(shape, dtype=dtype.torch, device=device)
            if old is not None:
                grown[field][: len(old)] = old
        return PackedWeight(layout, grown)

    def of_tile(self, tile: PlacedTile) -> dict[str, Tensor]:
        """The tensors of one tile by field."""
        return self._with_prefix(tile.prefix)

    @property
    def of_sparse(self) -> dict[str, Tensor]:
        """The tensors of the sparse part by field; empty where there is none."""
        return self._with_prefix("sparse.")

    def _with_prefix(self, prefix: str) -> dict[str, Tensor]:
        return {f.removeprefix(prefix): t for f, t in self.tensors.items() if f.startswith(prefix)}


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


def pack(weight: QuantizedWeight) -> PackedWeight:
    """Canonical bytes of a quantized weight."""
    layout = layout_of(weight)
    tensors: dict[str, Tensor] = {}
    for tile, placed in zip(weight.tiles, layout.placed()):
        fields = tile.tensors()
        fields |= {} if tile.rows is None else {"rows": tile.rows}
        fields |= {} if tile.cols is None else {"cols": tile.cols}
        tensors |= {placed.prefix + field: tensor.contiguous() for field, tensor in fields.items()}
    if weight.sparse is not None:
        fields = weight.sparse.tensors(weight.shape[1])
        tensors |= {f"sparse.{field}": tensor.contiguous() for field, tensor in fields.items()}
    tensors |= {} if weight.input_scale is None else {"input_scale": weight.input_scale}
    return PackedWeight(layout, tensors)


def layout_of(weight: QuantizedWeight) -> LayerLayout:
    """How a quantized weight is stored."""
    return LayerLayout(
        weight.shape,
        tuple(tile.layout() for tile in weight.tiles),
        None if weight.sparse is None else len(weight.sparse.values),
        weight.input_scale is not None,
    )


def unpack(packed: PackedWeight) -> QuantizedWeight:
    """Inverse of `pack`. The bytes must have gone through `validate` if they come from a file."""
    layout = packed.layout
    tiles = (tile.layout.read(packed.of_tile(tile), tile.rows, tile.columns) for tile in layout.placed())
    sparse = None if layout.sparse is None else Sparse.read(packed.of_sparse)
    return QuantizedWeight(layout.shape, tuple(tiles), sparse, packed.tensors.get("input_scale"))
