"""What all stored formats share: a tile's layout, types of fields, checks, indices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Protocol, Self

from anybit.config import Json
from anybit.errors import InputError
from anybit.formats.dtypes import Dtype
from anybit.lazy import Tensor, torch

Fields = dict[str, tuple[Dtype, tuple[int, ...]]]  # field -> dtype and shape
Refuse = Callable[[str], None]  # raises InputError with a reason
MAX_UINT16 = 65536  # input channels that 16-bit column indices reach
PLACE = ("rows", "cols")  # fields of a layout that say where a tile lies


class Tile(Protocol):
    """A tile in readable form: codes, grids and tables as tensors."""

    @property
    def rows(self) -> Tensor | None:
        """int32 [r], ascending output rows; None: all."""

    @property
    def cols(self) -> Tensor | None:
        """int32 [c], original input channels in stored order; None: all, natural order."""

    def layout(self) -> TileLayout: ...

    def tensors(self) -> dict[str, Tensor]:
        """What is stored, by field, as the layout's `fields` says."""

    def dequantize(self) -> Tensor:
        """The tile's weights, float32 [r, c], columns in stored order."""


@dataclass(frozen=True, kw_only=True)
class TileLayout:
    """What is known of a tile without its tensors: how it is stored, and which part of the matrix it holds.

    A format is a subclass: its fields are the keys of its JSON description, those with defaults may be absent. In all
    methods the tile is `r` output rows by `c` input channels.
    """

    NAME: ClassVar[str]

    bits: float  # average width of its codes
    rows: int | None = None  # how many output rows it holds, which a tensor `rows` names; None: all
    cols: int | None = None  # how many input channels, which a tensor `cols` names in stored order; None: all

    @property
    def readable_at(self) -> tuple[int, ...]:
        """The whole widths that all of it can be read at, where there is more than one."""
        return ()

    def at(self, width: int) -> Self:
        """Its layout read at one of these widths."""
        raise NotImplementedError(f"{self.NAME} has one width")

    def upto(self, width: int) -> Self:
        """Its layout with those of them up to `width`."""
        raise NotImplementedError(f"{self.NAME} has one width")

    def expanded(self) -> Self:
        """Its layout in memory, where files hold it coded."""
        return self

    @property
    def rounds_inputs(self) -> bool:
        """Whether it multiplies something else than the inputs it gets."""
        return False

    @property
    def input_grid(self) -> tuple[Any, ...]:
        """What rounds its inputs: equal for tiles that see the same rounded inputs."""
        return ()

    def coded(self, c: int) -> int:
        """How many of its input channels have codes; the others are outliers, kept at more bits."""
        return c

    def fields(self, r: int, c: int) -> Fields:
        """Dtype and shape of its tensors, but for `rows` and `cols`."""
        raise NotImplementedError

    def read(self, tensors: Mapping[str, Tensor], r: int, c: int) -> Tile:
        """The tile in readable form, from tensors that are as `fields` says."""
        raise NotImplementedError

    def check(self, r: int, c: int, refuse: Refuse) -> None:
        """Refuse values that no writer makes. Those of a JSON file may be of any type."""
        raise NotImplementedError

    def check_tensors(self, tensors: Mapping[str, Tensor], r: int, c: int, refuse: Refuse) -> None:
        """Refuse bytes that no writer makes, of tensors that are as `fields` says."""
        raise NotImplementedError

    def to_json(self) -> Json:
        """Its description in config.json: `format` and `bits` first, the place last, nothing that is as by default."""
        items = {item.name: item for item in fields(self)}
        own = [name for name in items if name not in ("bits", *PLACE)]
        stored = {name: getattr(self, name) for name in (*own, *PLACE)}
        entries = {name: value for name, value in stored.items() if value != items[name].default}
        made = {"format": self.NAME, "bits": self.bits, **entries}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in made.items()}

    @classmethod
    def from_json(cls, tile: Json, shape: tuple[int, int], refuse: Refuse) -> Self:
        """Inverse of `to_json` for a tile of a matrix [out, in]."""
        items = {item.name: item for item in fields(cls)}
        for name in sorted(tile.keys() - items.keys() - {"format"}):
            refuse(f"tile {dict(tile)!r} has the unknown key {name!r}")
        for name in [n for n, item in items.items() if item.default is MISSING and n not in tile]:
            refuse(f"tile {dict(tile)!r} has no {name}")
        if not is_int(tile.get("rows", 1), 1, shape[0]) or not is_int(tile.get("cols", 1), 1, shape[1]):
            refuse(f"tile {dict(tile)!r} has more rows or columns than the matrix {list(shape)}")
        values: Any = {name: _frozen(tile[name]) for name in items if name in tile}
        made = cls(**values)
        made.check(tile.get("rows", shape[0]), tile.get("cols", shape[1]), refuse)
        return made


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def is_int(value: Any, low: int, high: int) -> bool:
    """Whether a JSON value is a whole number in a range; True is none."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def count(index: Tensor | None) -> int | None:
    """How many rows or columns a tile names; None: it holds all."""
    return None if index is None else len(index)


def to_half(values: Tensor) -> Tensor:
    """Rounded to float16.

    Raises:
        InputError: values that float16 does not reach.
    """
    half = values.half()
    if not torch.isfinite(half).all():
        raise InputError(f"values up to {float(values.abs().max()):.3g} are beyond float16's 65504")
    return half


def check_finite(field: str, tensors: Mapping[str, Tensor], refuse: Refuse) -> None:
    tensor = tensors[field]
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        refuse(f"{field} holds NaN or Inf")


def index_type(size: int) -> Dtype:
    """What numbers below `size` are stored as."""
    return Dtype.U16 if size <= MAX_UINT16 else Dtype.I32


def index(values: Tensor, size: int) -> Tensor:
    """Numbers int64 below `size` as they are stored; PyTorch casts to int16 by dropping the high bits."""
    narrow = values.to(torch.int32)
    return narrow.to(torch.int16).view(torch.uint16) if size <= MAX_UINT16 else narrow


def wide_index(stored: Tensor) -> Tensor:
    """Inverse of `index`."""
    return stored.view(torch.int16).long() & 0xFFFF if stored.dtype == torch.uint16 else stored.long()
