"""The stored formats: what one tile of a quantized matrix, or its sparse part, can look like (docs/formats.md).

A format is a file with two classes: the tile in readable form, and its layout, which knows the description in
config.json, the canonical tensors, and what a reader must check. Adding a format is adding a file here and its layout
to `FORMATS`; methods, files, sizes and `inspect` follow.
"""

from __future__ import annotations

from anybit.formats.base import Tile, TileLayout
from anybit.formats.codebook import Codebook, CodebookLayout
from anybit.formats.float16 import Float16, Float16Layout
from anybit.formats.group_int import GroupInt, GroupIntLayout
from anybit.formats.nested import Nested, NestedLayout
from anybit.formats.sparse import Sparse
from anybit.formats.two_four import TwoFour, TwoFourLayout

FORMATS: dict[str, type[TileLayout]] = {
    layout.NAME: layout
    for layout in (GroupIntLayout, CodebookLayout, Float16Layout, TwoFourLayout, NestedLayout)
}

__all__ = [
    "FORMATS",
    "Codebook",
    "CodebookLayout",
    "Float16",
    "Float16Layout",
    "GroupInt",
    "GroupIntLayout",
    "Nested",
    "NestedLayout",
    "Sparse",
    "Tile",
    "TileLayout",
    "TwoFour",
    "TwoFourLayout",
]
