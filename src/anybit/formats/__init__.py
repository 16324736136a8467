"""The stored formats: what one tile of a quantized matrix, or its sparse part, can look like (docs/formats.md).

Each format is one class: the readable form, its canonical tensors, and what a reader must check. Adding a format is
adding a class here and to `FORMATS`; methods, files, sizes and `inspect` follow.
"""

from __future__ import annotations

from anybit.formats.codebook import Codebook
from anybit.formats.float16 import Float16
from anybit.formats.group_int import GroupInt
from anybit.formats.nested import Nested
from anybit.formats.sparse import Sparse
from anybit.formats.two_four import TwoFour

Tile = GroupInt | Codebook | Float16 | TwoFour | Nested
FORMATS: dict[str, type[GroupInt] | type[Codebook] | type[Float16] | type[TwoFour] | type[Nested]] = {
    format_.NAME: format_ for format_ in (GroupInt, Codebook, Float16, TwoFour, Nested)
}

__all__ = ["FORMATS", "Codebook", "Float16", "GroupInt", "Nested", "Sparse", "Tile", "TwoFour"]
