"""The native CPU kernels on torch tensors. What they compute: kernels/reference.py; how: csrc/."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anybit import formats
from anybit.formats import tables as shapes
from anybit.formats.layout import LayerLayout

if TYPE_CHECKING:
    from anybit import _native

    _REASON: str | None = None
else:
    try:
        from anybit import _native

        _REASON = None
    except ImportError as error:  # a bare source tree: the reference runs instead
        _native = None
        _REASON = f"the native extension is not built ({error}): `pip install .` builds it"


MOST_THREADS = 1024


def available() -> bool:
    """Whether the native extension is built and loads."""
    return _native is not None


def why_not() -> str | None:
    """Why the native extension cannot be used; None where it can."""
    return _REASON


def isa() -> str:
    """The instruction set of kernels other than products: "portable", "avx2" or "avx512"."""
    return _native.isa()


def matmul_isa() -> str:
    """How products with stored tiles run: the best of `matmul_isas()`."""
    return _native.matmul_isa()


def matmul_isas() -> tuple[str, ...]:
    """Ways to multiply that this machine has, the best last: "portable", "avx2", "avx_vnni", "avx512", ..."""
    return tuple(_native.matmul_isas())


def few_tokens(dtype: torch.dtype, isa: str | None = None) -> int:
    """How many tokens at most have, each, the bits that they have alone. More share weights that are decoded once and,
    where inputs are bfloat16 and the processor multiplies it, rounded to it."""
    return _native.few_tokens(dtype == torch.bfloat16, isa)


def cpu_features() -> dict[str, bool]:
    """What the processor has of what kernels could use."""
    return _native.cpu_features()


def _threads(threads: int | None) -> int:
    """What the kernels get: as many threads as were asked for, or PyTorch's number within what they take."""
    return min(torch.get_num_threads(), MOST_THREADS) if threads is None else threads


class Layer:
    """A stored weight in the hands of the native kernels, whole: tiles, what each reads of the inputs, a sparse part.

    Some formats are put into an order of the kernels', which then hold the bytes: whoever holds the tensors of the
    fields `repacked` may drop them, and `unpack` makes them again. All others stay referenced.

    Args:
        layout: how the weight is stored.
        fields: the stored tensors by field.
        codebook_precision: "int8" has codebooks by row multiply inputs of 8 bits (a scale per token and 32 of them)
            with centroids of 8 bits (127 steps to the largest of a row). That is faster; other tiles are not touched.
        isa: one of `matmul_isas()` instead of the best, for tests.

    Raises:
        ValueError: a tensor that is missing, of a wrong dtype, shape, layout or device; an index out of range.
    """

    __slots__ = ("_layout", "native")

    def __init__(
        self,
        layout: LayerLayout,
        fields: Mapping[str, Tensor],
        codebook_precision: str = "fp16",
        threads: int | None = None,
        isa: str | None = None,
    ) -> None:
        nested = any(isinstance(tile, formats.NestedLayout) for tile in layout.tiles)
        int8, tables = codebook_precision == "int8", _tables(isa) if nested else None
        self.native = _native.Layer(layout.to_json(), dict(fields), int8, tables, _threads(threads), isa)
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
        made = {field: torch.empty(stored[field][1], dtype=stored[field][0]) for field in self.repacked}
        self.native.unpack(made, _threads(threads))
        return made

    def matmul(self, x: Tensor, threads: int | None = None) -> Tensor:
        """`x [..., in] @ W.T -> [..., out]` of float32 or bfloat16, in its dtype, summed in float32.

        Tiles that take bfloat16 multiply it as it is: products are exact, but codebooks' centroids are rounded to it,
        and so are all weights that many tokens share. The same bits for every number of threads. One token and its row
        in a batch of up to `few_tokens` give the same bits; of more, weights are decoded once for all.

        Raises:
            ValueError: wrong dtype, shape or device.
        """
        y = self.native.matmul(x.contiguous(), _threads(threads))
        if y is None:
            raise ValueError(
                f"x is {x.dtype} {list(x.shape)} on {x.device}: expected float32 or bfloat16 "
                f"[..., {self._layout.shape[1]}] on the CPU"
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
        centroids rounded to bytes.

        Raises:
            ValueError: wrong dtype, shape, layout or device; rounded inputs of a layer that rounds its own.
        """
        self.native.product(x, scales, y, add, _threads(threads))

    def dequantize(self, dtype: torch.dtype = torch.float32, threads: int | None = None) -> Tensor:
        """The matrix that is multiplied with, [out, in]: exact in float32, rounded to nearest even in others."""
        direct = dtype if dtype in (torch.float32, torch.bfloat16) else torch.float32
        out = torch.empty(self._layout.shape, dtype=direct)
        self.native.dequantize(out, _threads(threads))
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
def _tables(isa: str | None) -> _native.Tables:
    """The tables of nested tiles for the kernels of an instruction set."""
    return _native.Tables(shapes.tables(), isa)


def nested_codes(  # noqa: PLR0913 - what the algorithm reads
    targets: Tensor,  # float32 [widths, rows, n], n up to 128; of 1 bit, 2 bits, ...
    inverse: Tensor,  # float32 [n, n], upper triangular: the Cholesky factor of the inverse Hessian
    tables: Tensor,  # float32 [shapes, 2 + 4 + ... + 2**widths], ascending at every width
    kinds: Tensor,  # uint8 [rows]: shapes
    scales: Tensor,  # float32 [rows]
    weights: Tensor,  # float32 [widths], not below 0, of the squared error at every width
    threads: int | None = None,
    isa: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One code per weight for all widths from 1 bit up: see `methods.nested`.

    The same bits for every instruction set and number of threads.

    Returns:
        codes uint8 [rows, n] at the widest, errors float32 [widths, rows, n] divided by the diagonal of `inverse`.

    Raises:
        ValueError: wrong dtype, shape, layout or device; a diagonal of `inverse` that is not positive.
    """
    codes, errors = torch.empty(targets.shape[1:], dtype=torch.uint8), torch.empty(targets.shape)
    threads = _threads(threads)
    _native.nested_codes(targets, inverse, tables, kinds, scales, weights, 1, codes, errors, threads, isa)
    return codes, errors


def nested_fit(
    weight: Tensor,  # float32 [rows, n], contiguous rows
    importance: Tensor,  # float32 [n], not below 0
    tables: Tensor,  # float32 [shapes, entries]
    threads: int | None = None,
    isa: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The shape uint8 and the scale float32 [rows] of each row, by the weighted squared error of rounding it.

    Searched coarsely over all shapes and finely around the best; the same bits for every instruction set.

    Raises:
        ValueError: wrong dtype, shape, layout or device; NaN or Inf.
    """
    kinds, scales = torch.empty(len(weight), dtype=torch.uint8), torch.empty(len(weight))
    _native.nested_fit(weight, importance, tables, kinds, scales, _threads(threads), isa)
    return kinds, scales


def quantize_activations(
    x: Tensor,  # float32 [m, c], contiguous rows
    bits: int,
    group_size: int,
    clip: Tensor | None,  # float16 [groups]
    fixed: Tensor | None,  # float16 [groups]
    isa: str | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.quantize_activations`: the same bits, in every instruction set.

    Raises:
        ValueError: wrong dtype, shape, layout or device.
    """
    m, columns = x.shape
    codes = torch.empty(m, columns, dtype=torch.int8)
    scales = torch.empty(m, -(-columns // group_size))
    _native.quantize_activations(x, clip, fixed, bits, group_size, codes, scales, isa)
    return codes, scales


def gptq_block(
    weight: Tensor,  # float32 [rows, n], contiguous rows; compensated in place
    inverse: Tensor,  # float32 [n, n], upper triangular: the Cholesky factor of the inverse Hessian
    scale: Tensor,  # float32 [rows] or [rows, n]
    zero: Tensor,  # float32 [rows] or [rows, n]
    top: Tensor,  # float32 [rows], largest code
    threads: int | None = None,
    isa: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize the columns of one block left to right: see `reference.gptq_block`.

    The same bits for every instruction set and number of threads; where the scale is 0, the code is the zero.

    Returns:
        codes uint8 [rows, n], errors float32 [rows, n].

    Raises:
        ValueError: wrong dtype, shape, layout or device; a diagonal of `inverse` that is not positive.
    """
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    errors = torch.empty(weight.shape)
    threads = _threads(threads)
    _native.gptq_block(weight, inverse, scale, zero, top, codes, errors, threads, isa)
    return codes, errors


def has_moments() -> bool:
    """Whether `moments` can run here: the native extension, and a processor with AVX512-BF16."""
    return available() and _native.has_moments()


def moments(x: Tensor, hessian: Tensor, threads: int | None = None) -> None:
    """`hessian += x.T @ x`, summed in float32, the same bits for every number of threads.

    Args:
        x: bfloat16 [tokens, n], contiguous rows.
        hessian: float32 [n, n], contiguous; symmetric before and after.

    Raises:
        ValueError: wrong dtype, shape, layout or device; a machine without AVX512-BF16.
    """
    _native.moments(x, hessian, _threads(threads))


def kmeans(
    weight: Tensor,  # float32 [rows, n], contiguous rows
    importance: Tensor | None,  # float32 [rows, n] or [n], not below 0; None: all alike
    seed_bits: int,
    bits: int,
    threads: int | None = None,
    isa: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Nested weighted k-means of every row: see `methods.kmeans.cluster`.

    The same bits for every instruction set and number of threads.

    Raises:
        ValueError: wrong dtype, shape, layout or device; NaN or Inf; a negative importance.
    """
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    centroids = torch.empty(weight.shape[0], 2 ** (bits + 1) - 2**seed_bits)
    threads = _threads(threads)
    _native.kmeans(weight, importance, seed_bits, bits, codes, centroids, threads, isa)
    return codes, centroids
