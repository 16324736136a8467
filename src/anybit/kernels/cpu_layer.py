"""A stored weight bound to the native CPU kernels. What they compute: kernels/reference.py; how: csrc/layer/layer.h."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from anybit import formats
from anybit.errors import InputError
from anybit.formats import tables as shapes
from anybit.formats.layout import LayerLayout
from anybit.kernels import cpu
from anybit.lazy import Tensor, torch

if TYPE_CHECKING:
    from anybit import _native


CODEBOOK_PRECISIONS = ("fp16", "int8")  # what codebooks by row, and what they meet, are rounded to


class Layer:
    """A stored weight in the hands of the native kernels, whole: tiles, what each reads of the inputs, a sparse part.

    Some formats are put into an order of the kernels', which then hold the bytes: whoever holds the tensors of the
    fields `repacked` may drop them, and `unpack` makes them again. All others stay referenced.

    Args:
        layout: how the weight is stored.
        fields: the stored tensors by field; arrays of NumPy do, too, and hold bfloat16 as uint16.
        codebook_precision: "int8" has codebooks by row and nested tiles multiply inputs of 8 bits (a scale per token
            and 32 of them) with centroids of 8 bits (127 steps to the largest of a row), nested rows of 7 and 8 bits
            with centroids of 16. Kept channels meet inputs as they are. That is faster; other tiles are not touched.
        isa: one of `cpu.matmul_isas()` instead of the best, for tests.

    Raises:
        ValueError: a tensor that is missing, of a wrong dtype, shape, layout or device; an index out of range.
    """

    __slots__ = ("_layout", "native")

    native: _native.Layer

    def __init__(
        self,
        layout: LayerLayout,
        fields: Mapping[str, Tensor] | Mapping[str, np.ndarray],
        codebook_precision: str = "fp16",
        threads: int | None = None,
        isa: str | None = None,
    ) -> None:
        nested = any(isinstance(tile, formats.NestedLayout) for tile in layout.tiles)
        int8 = codebook_precision == "int8"
        tables = _tables(isa, int8) if nested else None
        self.native = cpu._native.Layer(
            layout.to_json(), cast(Any, dict(fields)), int8, tables, cpu.used_threads(threads), isa
        )
        self._layout = layout

    def at(self, layout: LayerLayout) -> Layer:
        """The same weight at one of its levels; copies nothing.

        Raises:
            ValueError: a layout that is none of them.
        """
        made = object.__new__(Layer)
        made.native, made._layout = self.native.at(layout.to_json()), self._layout
        return made

    @property
    def repacked(self) -> tuple[str, ...]:
        """Stored fields that the kernels hold in another order."""
        return tuple(self.native.repacked)

    def unpack(self, threads: int | None = None) -> dict[str, Tensor]:
        """The stored tensors of the fields `repacked`, of all levels."""
        stored = self._layout.stored_tensors()
        made = {field: torch.empty(stored[field][1], dtype=stored[field][0].torch) for field in self.repacked}
        self.native.unpack(made, cpu.used_threads(threads))
        return made

    def matmul(self, x: Tensor, threads: int | None = None) -> Tensor:
        """`x [..., in] @ W.T -> [..., out]` of float32 or bfloat16, in its dtype, summed in float32.

        Tiles that take bfloat16 multiply it as it is: products are exact, but codebooks' centroids are rounded to it,
        and so are all weights that many tokens share. The same bits for every number of threads. One token and its row
        in a batch of up to `cpu.few_tokens` give the same bits; of more, weights are decoded once for all. Inputs
        rounded to 8 bits have the same bits in any number.

        Raises:
            ValueError: wrong dtype, shape or device; a tensor without memory, or with a tangent of forward-mode
                differentiation.
        """
        plain = x if type(x) is torch.Tensor else x.as_subclass(torch.Tensor)
        y = self.native.matmul(plain.resolve_neg().contiguous(), cpu.used_threads(threads))
        if y is None:
            raise ValueError(
                f"x is {x.dtype} {list(x.shape)} on {x.device}: expected float32 or bfloat16 "
                f"[..., {self._layout.shape[1]}] on the CPU, with its numbers in memory and no tangent of forward-mode "
                "differentiation"
            )
        return y

    def product(
        self,
        x: Tensor,  # [m, in], contiguous rows: float32, bfloat16, or int8 with scales
        y: Tensor,  # [m, out], contiguous rows: float32, or bfloat16 unless `add`
        scales: Tensor | None = None,  # float32 [m, groups] of `native.int8_group_size` inputs
        add: bool = False,
        threads: int | None = None,
    ) -> None:
        """`y = x @ W.T`, or `y +=`, as an engine asks for it; `matmul` says what the bits are.

        Inputs that the caller has rounded meet group int in integers, exactly, with scales after, and codebooks of
        centroids rounded to bytes. For codebooks the scales of a token are whole multiples, up to 255, of a power of
        two: then sums over all groups are exact.

        Raises:
            ValueError: wrong dtype, shape, layout or device; rounded inputs of a layer that rounds its own; scales that
                are no such multiples.
        """
        self.native.product(x, scales, y, add, cpu.used_threads(threads))

    def dequantize(self, dtype: torch.dtype | None = None, threads: int | None = None) -> Tensor:
        """The matrix that is multiplied with, [out, in]: exact in float32, rounded to nearest even in others."""
        dtype = torch.float32 if dtype is None else dtype
        direct = dtype if dtype in (torch.float32, torch.bfloat16) else torch.float32
        out = torch.empty(self._layout.shape, dtype=direct)
        self.native.dequantize(out, cpu.used_threads(threads))
        return out.to(dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` [n] of the matrix, float32 [n, in], where one tile holds it.

        Raises:
            ValueError: an id that is no row; a layer of several tiles.
        """
        out = torch.empty(len(ids), self._layout.shape[1])
        self.native.rows(ids.long().contiguous(), out)
        return out


@cache
def _tables(isa: str | None, int8: bool) -> _native.Tables:
    """The tables of nested tiles for the kernels of an instruction set, exact or for inputs of 8 bits."""
    return cpu._native.Tables(shapes.entries(), isa, int8)


def check_precision(codebook_precision: str) -> str:
    """The precision as given, where it is one of codebooks.

    Raises:
        InputError: neither fp16 nor int8.
    """
    if codebook_precision not in CODEBOOK_PRECISIONS:
        raise InputError(f"codebook precision {codebook_precision!r}: expected fp16 or int8")
    return codebook_precision
