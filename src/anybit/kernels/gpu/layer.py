"""A stored weight bound to its GPU kernels: what `kernels.dispatch.BoundWeight` holds for tensors on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from anybit import formats
from anybit.formats import tables as shapes
from anybit.formats.codebook import decode_table
from anybit.formats.layout import LayerLayout, PlacedTile
from anybit.formats.nested import weights_of_kept
from anybit.formats.weight import PackedWeight, place
from anybit.kernels.gpu import activations, codebook, integer
from anybit.kernels.gpu.group_int import GroupIntKernel, place_product
from anybit.kernels.gpu.sparse import SparseKernel
from anybit.kernels.gpu.split import sum_parts
from anybit.kernels.gpu.streams import concurrently
from anybit.kernels.gpu.two_four import TwoFourKernel
from anybit.kernels.gpu.words import LANES

MOST_PARTS = 256  # tokens whose products are cut into parts
TWO_FOUR_CODES = {"codes", "rest", "grids", "narrow_codes", "zeros", "scale_codes", "wide_codes"}


class Multiplies(Protocol):
    def splits(self, x: Tensor) -> int: ...

    def matmul(self, x: Tensor, y: Tensor, add: bool = False) -> None: ...


class Tile(Multiplies, Protocol):
    """A tile's weights in the order of its kernel."""

    @property
    def rows(self) -> Tensor | None: ...

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor: ...


@dataclass(frozen=True)
class Bound:
    """A stored tile and what multiplies with it."""

    tile: Tile
    cols: Tensor | None  # int64 [c] input channels; None: all
    repacked: Collection[str]  # stored fields that the kernels hold in another order
    unpack: Callable[[], dict[str, Tensor]]  # all stored fields of the tile
    at: Callable[[formats.TileLayout], Tile] | None = None  # the same weights at fewer bits; None: one width


class Dense:
    """A tile without a kernel of its own, multiplied as a dense matrix: exactly, at the speed of its floats."""

    def __init__(self, tile: formats.Tile) -> None:
        self.rows, self._tile = tile.rows, tile

    def splits(self, x: Tensor) -> int:
        return 1

    def matmul(self, x: Tensor, y: Tensor, add: bool = False) -> None:
        place_product(x @ self.dequantize(x.dtype).T, y, self.rows, add)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._tile.dequantize().to(dtype)


class Rounded:
    """A tile whose inputs are rounded, on the integer kernels or, where they do not take it, as a dense matrix.

    It gets the layer's inputs as they come: reading the tile's channels, scaling and rounding them is one kernel.
    """

    def __init__(self, tile: formats.GroupInt, input_scale: Tensor | None) -> None:
        self.rows, self.c = tile.rows, tile.codes.shape[1]
        self.grid = activations.Grid(tile.act_bits, tile.group_size, tile.act_clip, tile.act_scales)
        self._input_scale = input_scale
        stored = tile.codes, tile.scales, tile.zeros, tile.rows, tile.bits, tile.group_size
        takes = integer.IntegerTile.takes(self.c, tile.group_size)
        self.integer = integer.IntegerTile(*stored) if takes else None
        self._rest = tile if self.integer is None else replace(tile, codes=_nothing(tile))

    def inputs(self, x: Tensor, sums: bool) -> integer.Inputs:
        """The layer's inputs x [m, in] as integer tiles of these channels take them, with their sums or without."""
        assert self.integer is not None
        span = self.integer.span if sums else None
        cols, scale = self._rest.cols, self._input_scale
        made = activations.quantize_and_sum(
            x, self.grid, span, cols=cols, input_scale=scale, multiple=self.integer.stride
        )
        return integer.Inputs(*made)

    def splits(self, x: Tensor) -> int:
        return 1 if self.integer is None else integer.splits([self.integer], len(x), x.device)

    def matmul(self, x: Tensor, y: Tensor, add: bool = False) -> None:
        if self.integer is not None:
            return integer.matmul([(self.integer, self.inputs(x, self.integer.needs_sums))], y, add)
        codes, scales = activations.quantize(
            x, self.grid, cols=self._rest.cols, input_scale=self._input_scale
        )
        group = torch.arange(self.c, device=x.device) // self.grid.group_size
        place_product(codes.float() * scales[:, group] @ self.dequantize().T, y, self.rows, add)

    def tile(self) -> formats.GroupInt:
        """The tile that this was made of."""
        return self._rest if self.integer is None else replace(self._rest, codes=self.integer.codes())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.tile().dequantize().to(dtype)


class KeptChannels:
    """The kept channels of a nested tile, rows as they are put out.

    Args:
        channels: int64 [k].
        values: float16 or int8 [r, k], rows as they are stored.
        kept_scales: float16 [k], of int8.
        scales: float16 [r], of rows as they are stored.
        order: int64 [r]: the output row of each stored row.
    """

    def __init__(
        self, channels: Tensor, values: Tensor, kept_scales: Tensor | None, scales: Tensor, order: Tensor
    ) -> None:
        self.channels, self._kept_scales = channels, kept_scales
        self._values, self._scales = torch.empty_like(values), torch.empty_like(scales)
        self._values[order], self._scales[order] = values, scales
        self._made: dict[torch.dtype, Tensor] = {}

    def __len__(self) -> int:
        return len(self.channels)

    @property
    def bits(self) -> int:
        return 16 if self._kept_scales is None else 8

    def weights(self) -> Tensor:
        """Float32 [r, k]."""
        return weights_of_kept(self._values, self._scales, self._kept_scales)

    def weights_in(self, dtype: torch.dtype) -> Tensor:
        """The same in the dtype of inputs. They are made once for each: by the caller's stream, not in a capture."""
        if dtype not in self._made:
            exact = self._values.dtype == dtype  # of 16 bits, and float16
            self._made[dtype] = self._values if exact else self.weights().to(dtype)
        return self._made[dtype]


class NestedKernel:
    """A nested tile: a codebook of shared tables for the rows of every width, and the channels that are kept."""

    rows = None

    def __init__(
        self, counts: tuple[int, ...], fields: Mapping[str, Tensor], small: tuple[Tensor, ...], c: int
    ) -> None:
        self._order, self._kinds, self._scales, kept = small
        self._gains = fields.get("gains")
        self.c, self._stored = c, counts
        self._kept: KeptChannels | None = None
        self._coded: Tensor | None = None
        if len(kept):
            values, kept_scales = fields["kept_values"], fields.get("kept_scales")
            self._kept = KeptChannels(kept, values, kept_scales, self._scales, self._order)
            self._coded = formats.Nested.coded(c, kept)
        self._columns = c - len(kept)
        packed = [
            codebook.pack_planes(fields[f"plane_{p}"][None], self._columns)[0]
            for p in range(1, len(counts) + 1)
        ]
        self._planes = torch.cat([plane.flatten() for plane in packed])
        per_row = packed[0][0].numel()
        starts = [0]
        for n in counts:
            starts.append(starts[-1] + n * per_row)
        self._starts, self._per_row = starts, per_row
        self._cut(counts)

    def _cut(self, counts: tuple[int, ...]) -> None:
        """Multiply with so many rows of every plane."""
        self._parts = [
            codebook.RowCodebook(
                self._planes,
                [start + first * self._per_row for start in self._starts[:bits]],
                shapes.table(bits).to(self._scales.device),
                self._columns,
                self._order[first:last].int(),
                self._kinds[first:last],
                formats.Nested.scales_at(self._scales, self._gains, bits)[first:last],
            )
            for bits, first, last in formats.Nested.spans(counts)
        ]

    def at(self, layout: formats.TileLayout) -> NestedKernel:
        """The same planes, of which fewer rows are multiplied with."""
        if not isinstance(layout, formats.NestedLayout):
            raise ValueError(f"a level of a nested tile is nested, this one is {layout.NAME!r}")
        counts, stored = list(layout.counts), self._stored
        own = (*((len(self._kept), self._kept.bits) if self._kept else (0, 16)), self._gains is not None)
        if (given := (layout.kept, layout.kept_bits, layout.gains)) != own:
            raise ValueError(f"kept channels, their bits and gains of a level are {given}, expected {own}")
        fits = 0 < len(counts) <= len(stored) and counts[0] == stored[0] and counts[-1] > 0
        fits = fits and counts == sorted(counts, reverse=True)
        if not fits or any(n > own for n, own in zip(counts, stored)):
            raise ValueError("counts of planes are not some of this tile's, falling from all of its rows")
        made = copy.copy(self)
        made._cut(tuple(counts))
        return made

    def splits(self, x: Tensor) -> int:
        return codebook.splits_of(self._parts, x)

    def matmul(self, x: Tensor, y: Tensor, add: bool = False) -> None:
        given = x if self._coded is None else x.index_select(1, self._coded)
        runs = [partial(part.matmul, given, y, add) for part in self._parts]  # each has rows of its own
        if self._kept is None:
            return concurrently(x.device, *runs)
        weights, products = self._kept.weights_in(x.dtype), x.new_empty(len(x), self._stored[0])
        concurrently(x.device, *runs, partial(self._multiply_kept, x, weights, products))
        (y[0] if y.dim() == 3 else y).add_(products)

    def _multiply_kept(self, x: Tensor, weights: Tensor, products: Tensor) -> None:
        assert self._kept is not None
        torch.mm(x.index_select(1, self._kept.channels), weights.T, out=products)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        dense = torch.empty(self._stored[0], self.c, dtype=dtype, device=self._planes.device)
        for part in self._parts:
            place(dense, part.dequantize(dtype), part.rows, self._coded)
        if self._kept is not None:
            dense[:, self._kept.channels] = self._kept.weights().to(dtype)
        return dense

    def planes(self) -> dict[str, Tensor]:
        """The stored planes."""
        made = {}
        for p, n in enumerate(self._stored, 1):
            packed = self._planes[self._starts[p - 1] : self._starts[p]].view(1, n, -1, LANES)
            made[f"plane_{p}"] = codebook.unpack_planes(packed, self._columns)[0]
        return made


class Pair:
    """Two tiles with rounded inputs, both of rows or both of columns of their own, in one launch."""

    def __init__(self, a: Rounded, b: Rounded, by_columns: bool) -> None:
        assert a.integer is not None and b.integer is not None
        self._a, self._b, self._tiles, self._by_columns = a, b, (a.integer, b.integer), by_columns
        self._sums = [tile.needs_sums for tile in self._tiles]

    def splits(self, x: Tensor) -> int:
        return integer.splits(list(self._tiles), len(x), x.device)

    def matmul(self, x: Tensor, y: Tensor, add: bool = False) -> None:
        if self._by_columns:
            inputs = [tile.inputs(x, sums) for tile, sums in zip((self._a, self._b), self._sums)]
        else:
            inputs = [self._a.inputs(x, any(self._sums))] * 2
        integer.matmul(list(zip(self._tiles, inputs)), y, add)


@dataclass(frozen=True)
class Product:
    """One of a layer's products: a tile's, those of two in one launch, or the sparse part's."""

    what: Multiplies
    cols: Tensor | None  # int64 [c] input channels; None: all
    raw: bool  # it scales inputs itself
    addend: int  # products of one addend write rows of their own; parts of all addends are summed


class Layer:
    """A stored weight in the hands of the GPU's kernels, whole: tiles, the sparse part, the input scale.

    It has what `cpu_layer.Layer` has: stored fields that it holds in another order (`repacked`) may go, `unpack` makes
    them again; all others stay referenced.
    """

    def __init__(self, layout: LayerLayout, fields: Mapping[str, Tensor]) -> None:
        self.device = next(iter(fields.values())).device
        self.out_features, self.in_features = layout.shape
        weight = PackedWeight(layout, fields)
        scale, placed = fields.get("input_scale"), list(layout.placed())
        self._tiles = [_bind(tile, weight.of_tile(tile), scale) for tile in placed]
        self._prefixes = [tile.prefix for tile in placed]
        self._input_scale = None if scale is None else scale.float()
        self._sparse = None if layout.sparse is None else formats.Sparse.read(weight.of_sparse)
        self._settle()

    def _settle(self) -> None:
        """What follows from the tiles."""
        by_rows = any(bound.tile.rows is not None for bound in self._tiles)
        by_columns = any(bound.cols is not None for bound in self._tiles)
        self._mixed = by_rows and by_columns  # no addend writes all outputs
        self._products = self._multiplied(by_columns)
        if self._sparse is not None:
            sparse = Product(SparseKernel(self._sparse), None, False, self._products[-1].addend + 1)
            self._products.append(sparse)
        self._addends = self._products[-1].addend + 1
        summed = self._addends > 1 or any(isinstance(bound.tile, NestedKernel) for bound in self._tiles)
        self._direct = not summed  # each output is written once

    def _multiplied(self, by_columns: bool) -> list[Product]:
        """The tiles' products."""
        tiles = [bound.tile for bound in self._tiles]
        rounded = [tile for tile in tiles if isinstance(tile, Rounded) and tile.integer is not None]
        if len(tiles) == len(rounded) == 2 and not self._mixed:
            return [Product(Pair(rounded[0], rounded[1], by_columns), None, True, 0)]
        return [
            Product(bound.tile, bound.cols, isinstance(bound.tile, Rounded), i if by_columns else 0)
            for i, bound in enumerate(self._tiles)
        ]

    def at(self, layout: LayerLayout) -> Layer:
        """The same weight at one of its levels; copies no codes.

        Raises:
            ValueError: a layout that is none of them.
        """
        if len(self._tiles) != 1 or len(layout.tiles) != 1:
            raise ValueError("a layer of several tiles has one width")
        made = copy.copy(self)
        (bound,), (tile,) = self._tiles, layout.tiles
        if layout.shape != (self.out_features, self.in_features):
            raise ValueError(f"a level of {layout.shape}, expected {(self.out_features, self.in_features)}")
        if bound.at is None:
            raise ValueError(f"a tile in the format {tile.NAME} has one width")
        made._tiles = [replace(bound, tile=bound.at(tile))]
        made._settle()
        return made

    @property
    def repacked(self) -> tuple[str, ...]:
        """Stored fields that the kernels hold in another order."""
        return tuple(
            prefix + field for prefix, bound in zip(self._prefixes, self._tiles) for field in bound.repacked
        )

    def unpack(self) -> dict[str, Tensor]:
        """The stored tensors of the fields `repacked`, of all levels."""
        made: dict[str, Tensor] = {}
        for prefix, bound in zip(self._prefixes, self._tiles):
            stored = bound.unpack() if bound.repacked else {}
            made |= {prefix + field: stored[field] for field in bound.repacked}
        return made

    def matmul(self, x: Tensor) -> Tensor:
        """`x [m, in] @ W^T -> [m, out]` in the dtype of x, summed in float32."""
        if len(x) == 0:
            return x.new_empty(0, self.out_features)
        given = x if self._input_scale is None else (x.float() * self._input_scale).to(x.dtype)
        dtype, shape = x.dtype if self._direct else torch.float32, (len(x), self.out_features)
        if self._mixed or len(x) > MOST_PARTS:  # so many keep the GPU busy, and parts would take room
            y = (torch.zeros if self._mixed else torch.empty)(shape, dtype=dtype, device=x.device)
            for product in self._products:
                _multiply(product, x, given, y, self._mixed or product.addend > 0)
            return y.to(x.dtype)
        counts = self._counts(x)
        dtype = dtype if sum(counts) == 1 else torch.float32
        parts = torch.empty(sum(counts), *shape, dtype=dtype, device=x.device)
        of = [some if len(some) > 1 else some[0] for some in parts.split(counts)]
        runs = [partial(_multiply, one, x, given, of[one.addend], False) for one in self._products]
        concurrently(x.device, *runs)
        return parts[0].to(x.dtype) if len(parts) == 1 else sum_parts(parts, x.dtype)

    def _counts(self, x: Tensor) -> list[int]:
        """Parts of each addend: as many as all of its products can write."""
        counts: dict[int, int] = {}
        for one in self._products:
            count = one.what.splits(x)
            counts[one.addend] = min(count, counts.get(one.addend, count))
        return [counts[addend] for addend in range(self._addends)]

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` [n], float32 [n, in], where one tile holds it.

        Raises:
            ValueError: a layer of several tiles, sparse weights or scaled inputs.
        """
        (bound, *others), plain = self._tiles, self._sparse is None and self._input_scale is None
        if others or not plain or bound.cols is not None or bound.tile.rows is not None:
            raise ValueError(
                "single rows are those of a layer of one tile over all of it: dequantize this one"
            )
        if isinstance(bound.tile, GroupIntKernel):
            return bound.tile.dequantize_rows(ids)
        return bound.tile.dequantize()[ids]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dense matrix [out, in]."""
        plain = self._sparse is None and self._input_scale is None
        exact = dtype if plain else torch.float32
        dense = torch.empty(self.out_features, self.in_features, dtype=exact, device=self.device)
        for bound in self._tiles:
            place(dense, bound.tile.dequantize(exact), bound.tile.rows, bound.cols)
        if self._sparse is not None:
            self._sparse.add_to(dense)
        return (dense if self._input_scale is None else dense * self._input_scale).to(dtype)


def _multiply(product: Product, x: Tensor, given: Tensor, y: Tensor, add: bool) -> None:
    """`y [m, out] = x @ W.T`, or `+=`, or its parts, of inputs x as they come and as `given`: scaled."""
    some = given if product.cols is None else given.index_select(1, product.cols)
    product.what.matmul(x if product.raw else some, y, add)


def _nothing(tile: formats.GroupInt) -> Tensor:
    """Codes of no columns, which are no view: that would keep all of them."""
    return tile.codes.new_empty(len(tile.codes), 0)


def _bind(placed: PlacedTile, fields: Mapping[str, Tensor], scale: Tensor | None) -> Bound:
    layout, r, c = placed.layout, placed.rows, placed.columns
    cols = fields["cols"].long() if "cols" in fields else None
    if isinstance(layout, formats.NestedLayout):
        nested = NestedKernel(layout.counts, fields, layout.read_grid(fields, r), c)
        planes = tuple(field for field in fields if field.startswith("plane_"))
        return Bound(nested, cols, planes, nested.planes, nested.at)
    if isinstance(layout, formats.CodebookLayout):
        return (_by_channel if layout.by_channel else _by_row)(layout, fields, r, c, cols)
    tile = layout.read(fields, r, c)
    if isinstance(tile, formats.TwoFour):
        two_four = TwoFourKernel(tile)
        return Bound(two_four, cols, TWO_FOUR_CODES & fields.keys(), lambda: two_four.restore().tensors())
    if isinstance(tile, formats.GroupInt) and tile.act_bits < 16:
        rounded = Rounded(tile, scale)
        return Bound(rounded, cols, ("codes",), lambda: rounded.tile().tensors())
    if isinstance(tile, formats.GroupInt) and GroupIntKernel.takes(c, tile.group_size):
        group_int = GroupIntKernel(tile.codes, tile.scales, tile.zeros, tile.rows, tile.bits, tile.group_size)
        small = replace(tile, codes=_nothing(tile))
        return Bound(group_int, cols, ("codes",), lambda: replace(small, codes=group_int.codes()).tensors())
    return Bound(Dense(tile), cols, (), dict)


def _by_row(
    layout: formats.CodebookLayout, fields: Mapping[str, Tensor], r: int, c: int, cols: Tensor | None
) -> Bound:
    planes = codebook.pack_planes(fields["planes"], c)
    small = {field: tensor for field, tensor in fields.items() if field != "planes"}

    def at(level: formats.TileLayout) -> codebook.RowCodebook:
        width = int(level.bits)
        if not isinstance(level, formats.CodebookLayout) or not set(level.widths) <= set(layout.widths):
            raise ValueError("a codebook has no such width")
        table = layout.read_table(small, width, c)
        table = decode_table(table, small.get("codebook_scale"), small.get("codebook_min"))
        starts = [p * planes[0].numel() for p in range(width)]
        return codebook.RowCodebook(planes, starts, table, c, small.get("rows"))

    return Bound(at(layout), cols, ("planes",), lambda: {"planes": codebook.unpack_planes(planes, c)}, at)


def _by_channel(
    layout: formats.CodebookLayout, fields: Mapping[str, Tensor], r: int, c: int, cols: Tensor | None
) -> Bound:
    stored = layout.read(fields, r, c)
    tile = codebook.ChannelCodebook(stored.codes.T.contiguous(), stored.values(stored.bits), stored.bits)
    small = replace(stored, codes=stored.codes.new_empty(0, stored.codes.shape[1]))
    return Bound(tile, cols, ("planes",), lambda: replace(small, codes=tile.codes().T.contiguous()).tensors())
