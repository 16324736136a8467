"""How a layer is stored: its tiles and what lies beside them, their tensors and bytes, the widths it can be read at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from anybit.config import Json
from anybit.errors import InputError
from anybit.formats import FORMATS, Sparse, TileLayout
from anybit.formats.base import Fields, Refuse, is_int
from anybit.formats.dtypes import Dtype

QUANT_METHOD = "anybit"  # what config.json calls us
FORMAT_VERSION = 2  # of the stored bytes and their description
MAX_TILES = 256  # of one layer, far beyond what any method makes: a reader compares them pair by pair


@dataclass(frozen=True)
class PlacedTile:
    """A tile of a layer: its layout, its size, and what its fields begin with."""

    layout: TileLayout
    rows: int  # r
    columns: int  # c
    prefix: str  # "" where the layer has one tile


@dataclass(frozen=True)
class LayerLayout:
    """How a matrix [out, in] is stored: what config.json says of the layer."""

    shape: tuple[int, int]  # (out, in)
    tiles: tuple[TileLayout, ...]  # disjoint, covering
    sparse: int | None = None  # how many weights are added to the tiles'
    input_scale: bool = False  # whether inputs are scaled before all else
    tied: bool = False  # of an embedding: whether it is the head too

    def placed(self) -> Iterator[PlacedTile]:
        several = len(self.tiles) > 1
        for i, tile in enumerate(self.tiles):
            rows = self.shape[0] if tile.rows is None else tile.rows
            columns = self.shape[1] if tile.cols is None else tile.cols
            yield PlacedTile(tile, rows, columns, f"{i}." if several else "")

    def stored_tensors(self) -> Fields:
        """Field -> (dtype, shape) of every stored tensor.

        The one place that knows the shapes: it sizes buffers at load, predicts bytes before any work and checks
        what a file holds.
        """
        stored: Fields = {}
        for tile in self.placed():
            fields = tile.layout.fields(tile.rows, tile.columns)
            fields |= {} if tile.layout.rows is None else {"rows": (Dtype.I32, (tile.rows,))}
            fields |= {} if tile.layout.cols is None else {"cols": (Dtype.I32, (tile.columns,))}
            stored |= {tile.prefix + field: entry for field, entry in fields.items()}
        if self.sparse is not None:
            fields = Sparse.fields(self.sparse, self.shape)
            stored |= {f"sparse.{field}": entry for field, entry in fields.items()}
        if self.input_scale:
            stored["input_scale"] = (Dtype.F16, (self.shape[1],))
        return stored

    @property
    def weights(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(dtype.itemsize * prod(shape) for dtype, shape in self.stored_tensors().values())

    @property
    def rounds_inputs(self) -> bool:
        """Whether the layer computes with anything else than the inputs it gets."""
        return any(tile.rounds_inputs for tile in self.tiles)

    @property
    def widths(self) -> tuple[int, ...]:
        """The whole widths that the layer can be read at, ascending, where there is more than one."""
        return self.tiles[0].readable_at if len(self.tiles) == 1 else ()

    def at_width(self, bits: float) -> LayerLayout:
        """The layout read at one of its widths; a layer of one width stays as it is.

        Raises:
            InputError: a width that it does not have.
        """
        if not self.widths:
            return self
        if bits not in self.widths:
            raise InputError(f"the artifact has the widths {', '.join(map(str, self.widths))}, not {bits:g}")
        return replace(self, tiles=(self.tiles[0].at(int(bits)),))

    def upto(self, bits: float) -> LayerLayout:
        """The layout with its widths up to `bits`; a layer of one width stays as it is."""
        return replace(self, tiles=(self.tiles[0].upto(int(bits)),)) if self.widths else self

    def expanded(self) -> LayerLayout:
        """The layout in memory: nothing coded."""
        return replace(self, tiles=tuple(tile.expanded() for tile in self.tiles))

    def widest(self) -> LayerLayout:
        """The layout read at its widest."""
        return self.at_width(max(self.widths, default=0))

    def to_json(self) -> Json:
        made: Json = {"shape": list(self.shape), "tiles": [tile.to_json() for tile in self.tiles]}
        made |= {} if self.sparse is None else {"sparse": self.sparse}
        made |= {"input_scale": True} if self.input_scale else {}
        return made | ({"tied": True} if self.tied else {})

    @staticmethod
    def from_json(name: str, layout: Any) -> LayerLayout:
        """The layout of a layer `name`, from its description in config.json.

        Raises:
            InputError: with the layer, what came and what is expected: no writer of this version makes it.
        """

        def refuse(what: str) -> None:
            raise InputError(f"{name}: {what}; the artifact's config.json is damaged or from another version")

        if not isinstance(layout, dict) or not isinstance(layout.get("shape"), list | tuple):
            refuse("the layer description has no shape")
        for key in sorted(layout.keys() - {"shape", "tiles", "sparse", "input_scale", "tied"}):
            refuse(f"the layer description has the unknown key {key!r}")
        shape, tiles = layout["shape"], layout.get("tiles")
        if len(shape) != 2 or not all(is_int(n, 1, 2**31 - 1) for n in shape):
            refuse(f"shape {shape} is not [out, in] with positive sizes")
        if not isinstance(tiles, list | tuple) or not 1 <= len(tiles) <= MAX_TILES:
            refuse(f"the layer has no list of 1 to {MAX_TILES} tiles")
        for flag in ("input_scale", "tied"):
            if layout.get(flag, True) is not True:
                refuse(f"{flag} {layout[flag]!r} is not true; leave it out where there is none")
        if "sparse" in layout and not is_int(layout["sparse"], 0, prod(shape)):
            refuse(f"{layout['sparse']!r} sparse weights are not a number up to {prod(shape)}")
        made = LayerLayout(
            (shape[0], shape[1]),
            tuple(_tile(tile, (shape[0], shape[1]), refuse) for tile in tiles),
            layout.get("sparse"),
            "input_scale" in layout,
            "tied" in layout,
        )
        made.check(refuse)
        return made

    def check(self, refuse: Refuse) -> None:
        """Refuse tiles that do not fit together."""
        area = sum(tile.rows * tile.columns for tile in self.placed())
        if area != self.weights:
            refuse(f"tiles cover {area} of {self.weights} weights")
        if self.sparse is not None and self.rounds_inputs:
            refuse("sparse weights beside tiles whose inputs are rounded: what they multiply is not defined")
        self._check_inputs(refuse)

    def _check_inputs(self, refuse: Refuse) -> None:
        """Inputs are rounded by channel: tiles by rows share how, tiles by columns need not."""
        if not self.rounds_inputs or all(tile.rows is None for tile in self.tiles):
            return
        if len({tile.input_grid for tile in self.tiles}) > 1 or self.tiles[0].cols is not None:
            refuse("tiles by rows must round all input channels alike, in natural order")


def _tile(tile: Any, shape: tuple[int, int], refuse: Refuse) -> TileLayout:
    if not isinstance(tile, dict) or tile.get("format") not in list(FORMATS):
        refuse(f"tile {tile!r} is in none of the formats {', '.join(FORMATS)}")
    return FORMATS[tile["format"]].from_json(tile, shape, refuse)


def bits_per_weight(layouts: Iterable[LayerLayout]) -> float:
    """Stored bits per weight over layers: 8 x bytes of codes, scales, zeros, indices and padding / weights."""
    layouts = list(layouts)
    weights = sum(layout.weights for layout in layouts)
    return 8 * sum(layout.nbytes for layout in layouts) / weights if weights else 0.0


def code_bits(layouts: Iterable[LayerLayout]) -> float:
    """Average width of the codes alone, weighted by the number of weights that have codes.

    Columns of a quantized matrix that are kept at more bits are outliers, not codes. 16 where nothing has codes.
    """
    weights, bits, layers = 0, 0.0, 0
    for layout in layouts:
        layers += 1
        for tile in layout.placed():
            area = tile.rows * tile.layout.coded(tile.columns)
            weights, bits = weights + area, bits + area * tile.layout.bits
    return bits / weights if weights else 16.0 * bool(layers)
