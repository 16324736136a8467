"""The native CPU kernels on torch tensors. What they compute: kernels/reference.py; how: csrc/."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from anybit import formats
from anybit.formats import tables as shapes
from anybit.formats.bits import pack_bits, unpack_bits

try:
    from anybit import _native as _extension
except ImportError as error:  # a bare source tree: the reference runs instead
    _native: Any = None
    _REASON: str | None = f"the native extension is not built ({error}): `pip install .` builds it"
else:
    _native = _extension
    _REASON = None


MOST_THREADS = 1024
LOOKUP_GROUP = 32  # inputs that share a scale where codebooks meet inputs of 8 bits


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


class _Tile:
    """A tile bound to its kernels."""

    __slots__ = ("_native", "columns", "rows", "takes_bf16", "takes_ints")

    def __init__(self, native: Any, rows: int, columns: int) -> None:
        self._native = native
        self.rows, self.columns = rows, columns  # r, c
        self.takes_bf16: bool = native.takes_bf16(1)  # whether `matmul` takes bfloat16 of few tokens
        self.takes_ints: bool = native.takes_ints()  # whether there is `int_matmul`

    def matmul(self, x: Tensor, y: Tensor, threads: int | None = None) -> None:
        """`y[:, rows] += x @ W.T`, accumulated in float32, the same bits for every number of threads.

        Args:
            x: float32 [m, c], contiguous rows; bfloat16 where `takes_bf16`, with AVX512-BF16 any number of tokens, else
                up to 16. That runs faster: products are exact, but codebooks' centroids are rounded to bfloat16, and
                so are all weights that many tokens share (see `few_tokens`).
            y: float32 [m, out], contiguous; out = r where the tile has no `rows`.
            threads: default `torch.get_num_threads()`.

        Raises:
            ValueError: wrong dtype, shape, layout or device; rows beyond `out`.
        """
        self._native.matmul(_array(x), y.numpy(), _threads(threads))

    def int_matmul(self, x: Tensor, scales: Tensor, y: Tensor, threads: int | None = None) -> None:
        """`y[:, rows] += x @ W.T` of quantized activations: exact integer sums per group, scales after.

        Codebooks have groups of `LOOKUP_GROUP` inputs, and their centroids are rounded to bytes, 127 steps to each
        row's largest.

        Args:
            x: int8 [m, c], contiguous.
            scales: float32 [m, groups], contiguous.
            y: float32 [m, out], contiguous.
            threads: default `torch.get_num_threads()`; the result is the same for every number.

        Raises:
            ValueError: wrong dtype, shape, layout or device; groups of more than 65536 columns.
        """
        self._native.int_matmul(x.numpy(), scales.numpy(), y.numpy(), _threads(threads))


class GroupInt(_Tile):
    """One tile in format "group int" in the order in which the kernels read it; `group_int` makes it."""

    __slots__ = ("_stored",)

    def __init__(self, native: Any, stored: tuple[torch.Size, torch.Size, bool], columns: int) -> None:
        super().__init__(native, stored[1][0], columns)
        self._stored = stored

    def dequantize(self, dtype: torch.dtype = torch.float32, threads: int | None = None) -> Tensor:
        """The tile's weights [r, c]: exact in float32, rounded to nearest even in any other dtype."""
        direct = dtype if dtype in (torch.float32, torch.bfloat16) else torch.float32
        out = torch.empty(self.rows, self.columns, dtype=direct)
        self._native.dequantize(out, _threads(threads))
        return out.to(dtype)

    def dequantize_rows(self, ids: Tensor) -> Tensor:
        """Weights float32 [n, c] of the rows `ids` [n].

        Raises:
            ValueError: an id that is no row.
        """
        out = torch.empty(len(ids), self.columns)
        self._native.dequantize_rows(ids.long().contiguous(), out)
        return out

    def restore(self, threads: int | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The codes, scales and zeros that `group_int` was given."""
        shape, grid, symmetric = self._stored
        codes, scales = torch.empty(shape, dtype=torch.uint8), torch.empty(grid, dtype=torch.float16)
        zeros = None if symmetric else torch.empty(grid, dtype=torch.uint8)
        self._native.restore(codes, scales, zeros, _threads(threads))
        return codes, scales, zeros


class Codebook(_Tile):
    """One tile in format "codebook", bound once to the tensors that hold it (`codebook` makes it)."""

    __slots__ = ("by_channel",)

    def __init__(self, native: Any, n: int, m: int, by_channel: bool) -> None:
        super().__init__(native, *((m, n) if by_channel else (n, m)))  # W is the transposed table by channel
        self.by_channel = by_channel

    def dequantize(self, dtype: torch.dtype = torch.float32, threads: int | None = None) -> Tensor:
        """The tile's weights [r, c]: exact in float32, rounded to nearest even in any other dtype."""
        shape = (self.columns, self.rows) if self.by_channel else (self.rows, self.columns)
        out = torch.empty(shape)
        self._native.dequantize(out, _threads(threads))
        return (out.T if self.by_channel else out).to(dtype)


class Channels(_Tile):
    """One tile in format "codebook" by input channel, in the kernels' order; it holds its bytes."""

    __slots__ = ("_planes",)

    FLOAT_BITS = (
        6  # tables of more entries fit no registers: they are float16, others bound as stored (`codebook`)
    )

    def __init__(
        self,
        planes: Tensor,  # uint32 [bits, c, words]
        table: Tensor,  # float16 or, up to `FLOAT_BITS`, float32 [c, entries]; every code is below `entries`
        rows: int,  # r
        threads: int | None = None,
        isa: str | None = None,
    ) -> None:
        threads = _threads(threads)
        table = table if len(planes) > self.FLOAT_BITS else table.float()
        native = _native.Channels(planes, table.contiguous(), rows, threads, isa)
        super().__init__(native, rows, planes.shape[1])
        self._planes = planes.shape

    def dequantize(self, dtype: torch.dtype = torch.float32, threads: int | None = None) -> Tensor:
        """The tile's weights [r, c]: exact in float32, rounded to nearest even in any other dtype."""
        out = torch.empty(self.rows, self.columns)
        self._native.dequantize(out, _threads(threads))
        return out.to(dtype)

    def restore(self, threads: int | None = None) -> Tensor:
        """The planes that this was made of."""
        planes = torch.empty(self._planes, dtype=torch.int32)
        self._native.restore(planes, _threads(threads))
        return planes.view(torch.uint32)


def _array(x: Tensor) -> Any:
    """Activations as the native kernels take them: numpy views cost a third of what DLPack does at each call."""
    x = x.detach()
    return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()


def codebook(
    planes: Tensor,  # uint32 [bits, n, words]
    table: Tensor,  # float16 or float32 [n, entries]
    rows: Tensor | None,  # int32 [n] ascending output rows; None: all
    *,
    columns: int,  # m
    by_channel: bool,
    isa: str | None = None,
) -> Codebook:
    """Bind a tile to its kernels; codes beyond `entries`, which `tensors.validate` refuses, stand for 0.

    Args:
        isa: one of `matmul_isas()` instead of the best, for tests.

    Raises:
        ValueError: wrong dtype, shape, layout or device, output rows below 0 or twice.
    """
    native = _native.Codebook(planes, table, rows, columns, by_channel, isa)
    return Codebook(native, planes.shape[1], columns, by_channel)


class TwoFour:
    """One tile in format "two_four": its 2-bit channels and its 4-bit ones, each in the order of their kernels."""

    __slots__ = ("_given", "_narrow", "_wide", "channels", "columns", "rows", "takes_bf16")

    def __init__(self, tile: formats.TwoFour, threads: int | None = None, isa: str | None = None) -> None:
        self.rows, self.columns = tile.codes.shape
        self.channels = formats.TwoFour.channels(tile.wide, self.columns)
        threads = _threads(threads)
        low, high = (tile.codes[:, part].contiguous() for part in self.channels)
        self._narrow: _Tile | None = None
        self._wide: GroupInt | None = None
        if low.shape[1]:
            grid = (tile.zeros, tile.scale_codes, tile.scale_scales.float(), tile.scale_zeros)
            native = _native.SecondOrder(low, *grid, tile.group_size, threads, isa)
            self._narrow = _Tile(native, *low.shape)
        if high.shape[1]:
            self._wide = group_int(
                pack_bits(high, 4, 1),
                tile.wide_scales[:, None].contiguous(),
                tile.wide_zeros[:, None].contiguous(),
                None,
                bits=4,
                group_size=high.shape[1],
                columns=high.shape[1],
                threads=threads,
                isa=isa,
            )
        self.takes_bf16 = all(part.takes_bf16 for part, _ in self.parts())
        nothing = torch.zeros(self.rows, 0, dtype=torch.uint8)
        self._given = replace(tile, codes=nothing, zeros=nothing, scale_codes=nothing)  # what is small

    def matmul(self, x: Tensor, y: Tensor, threads: int | None = None) -> None:
        """`y += x @ W.T` of x [m, c] and contiguous y [m, r]; see `GroupInt.matmul`."""
        for part, columns in self.parts():
            part.matmul(x.index_select(1, columns), y, threads)

    def parts(self) -> list[tuple[_Tile, Tensor]]:
        """The tiles that it consists of, and the input channels int32 of each."""
        pairs = zip((self._narrow, self._wide), self.channels)
        return [(part, columns.int()) for part, columns in pairs if part is not None]

    def dequantize(self, dtype: torch.dtype = torch.float32, threads: int | None = None) -> Tensor:
        """The tile's weights [r, c]: exact in float32, rounded to nearest even in any other dtype."""
        out, (narrow, wide) = torch.empty(self.rows, self.columns), self.channels
        if self._narrow is not None:
            part = torch.empty(self.rows, len(narrow))
            self._narrow._native.dequantize(part, _threads(threads))
            out[:, narrow] = part
        if self._wide is not None:
            out[:, wide] = self._wide.dequantize(threads=threads)
        return out.to(dtype)

    def restore(self) -> formats.TwoFour:
        """The tile that this was made of."""
        codes, (narrow, wide) = torch.empty(self.rows, self.columns, dtype=torch.uint8), self.channels
        groups = self._given.scale_scales.shape[1]
        zeros, scale_codes = (torch.empty(self.rows, groups, dtype=torch.uint8) for _ in range(2))
        if self._narrow is not None:
            part = torch.empty(self.rows, len(narrow), dtype=torch.uint8)
            self._narrow._native.restore(part, zeros, scale_codes, torch.get_num_threads())
            codes[:, narrow] = part
        if self._wide is not None:
            codes[:, wide] = unpack_bits(self._wide.restore()[0], 4, len(wide))
        return replace(self._given, codes=codes, zeros=zeros, scale_codes=scale_codes)


class Float16(_Tile):
    """One tile in format "float16", bound to the tensor that holds it."""

    __slots__ = ("_values",)

    def __init__(
        self,
        values: Tensor,  # float16 [r, c]; bfloat16, which no artifact has, to compare with
        rows: Tensor | None,  # int32 [r] ascending output rows; None: all
        isa: str | None = None,
    ) -> None:
        super().__init__(_native.Halves(values, rows, isa), *values.shape)
        self._values = values

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._values.to(dtype)


class Nested(_Tile):
    """One tile in format "nested": its rows of all widths, and the input channels that are kept.

    Its inputs are those of the coded channels, then those of the kept ones: `channels`.
    """

    __slots__ = ("_coded", "_kept", "_kept_values", "_order", "channels")

    def __init__(  # noqa: PLR0913 - what the format has
        self,
        planes: Sequence[Tensor],  # uint32 [rows that have the bit, words], the most significant first
        order: Tensor,  # int64 [r]
        kinds: Tensor,  # uint8 [r]
        scales: Tensor,  # float16 [r]
        kept: Tensor,  # int64 [k]
        kept_values: Tensor | None,  # float16 [r, k]; None where k = 0
        columns: int,  # c
        isa: str | None = None,
    ) -> None:
        self._coded, self._kept, self._kept_values = formats.Nested.coded(columns, kept), kept, kept_values
        self._order = order
        native = _native.Nested(
            list(planes), order.int(), kinds, scales.float(), kept_values, len(self._coded), _shapes(isa), isa
        )
        super().__init__(native, len(order), columns)
        # int32 [c]; None: all, in order
        self.channels = torch.cat([self._coded, kept]).int() if len(kept) else None

    def matmul(self, x: Tensor, y: Tensor, threads: int | None = None) -> None:
        """`y += x @ W.T` of x [m, c] and contiguous y [m, r]; see `GroupInt.matmul`."""
        super().matmul(x if self.channels is None else x.index_select(1, self.channels), y, threads)

    def dequantize(self, dtype: torch.dtype = torch.float32, threads: int | None = None) -> Tensor:
        """The tile's weights [r, c]: exact in float32, rounded to nearest even in any other dtype."""
        stored = torch.empty(self.rows, len(self._coded))
        self._native.dequantize(stored, _threads(threads))
        out = torch.empty(self.rows, self.columns)
        out[self._order[:, None], self._coded] = stored
        if self._kept_values is not None:
            out[self._order[:, None], self._kept] = self._kept_values.float()
        return out.to(dtype)


@cache
def _shapes(isa: str | None) -> Any:
    """The tables of `shapes` for the kernels of an instruction set."""
    return _native.Shapes(shapes.tables(), isa)


Tile = GroupInt | Codebook | Channels | TwoFour | Nested | Float16


class Layer:
    """A whole linear layer, multiplied in one call: tiles, what each reads of the inputs, and a sparse part."""

    __slots__ = ("_native", "out_features")

    def __init__(self, out_features: int, in_features: int, isa: str | None = None) -> None:
        self._native = _native.Layer(out_features, in_features, isa)
        self.out_features = out_features

    def add(
        self,
        tile: _Tile | TwoFour,
        cols: Tensor | None = None,  # int32 [c] inputs that the tile reads; None: all
        act_bits: int = 0,  # its inputs are rounded to; 0: they are not
        group_size: int = 1,  # inputs that share a scale
        clip: Tensor | None = None,  # float16 [groups]: share of the largest that the scale reaches; or
        fixed: Tensor | None = None,  # float16 [groups]: scales known beforehand
    ) -> None:
        """Add a tile's product to the layer's.

        Raises:
            ValueError: an index out of range, a tile that does not fit the layer.
        """
        if isinstance(tile, TwoFour):
            for part, own in tile.parts():
                self.add(part, own if cols is None else cols[own.long()])
            return
        if isinstance(tile, Nested) and tile.channels is not None:
            cols = tile.channels if cols is None else cols[tile.channels.long()]
        self._native.add_tile(tile._native, cols, act_bits, group_size, clip, fixed)

    def add_sparse(self, values: Tensor, columns: Tensor, row_ptr: Tensor) -> None:
        """Weights beside the tiles (CSR): float16 [n], uint16 or uint32 [n], int32 [out + 1]."""
        self._native.set_sparse(values, columns, row_ptr)

    def scale_inputs(self, scale: Tensor) -> None:
        """Multiply the inputs with float32 [in] first."""
        self._native.set_input_scale(scale)

    def matmul(self, x: Tensor, threads: int | None = None) -> Tensor:
        """`x [m, in] @ W.T -> [m, out]` of contiguous float32 or bfloat16, in its dtype, summed in float32.

        Tiles that take bfloat16 multiply it as it is. One token (m = 1) and its row in a batch of up to `few_tokens`
        give the same bits; of more, weights are decoded once for all.
        """
        y = torch.empty(x.shape[0], self.out_features, dtype=x.dtype)
        self._native.matmul(_array(x), _array(y), _threads(threads))
        return y


def group_int(  # noqa: PLR0913 - what the format has
    codes: Tensor,  # uint8 [r, bytes] at 2, 4 and 8 bits, else planes [bits, r, bytes]; any padding of a row
    scales: Tensor,  # float16 [r, groups]
    zeros: Tensor | None,  # uint8 [r, groups], a byte each; None: 2^(bits-1)
    rows: Tensor | None,  # int32 [r] ascending output rows; None: all
    *,
    bits: int,  # 1..8
    group_size: int,  # columns per group; the last group may be shorter
    columns: int,  # c
    threads: int | None = None,
    isa: str | None = None,
) -> GroupInt:
    """Put a tile into the kernels' order. Nothing is referenced: the tensors may go, and `restore` gives them back.

    Args:
        isa: one of `matmul_isas()` instead of the best, for tests.

    Raises:
        ValueError: wrong dtype, shape, layout or device, output rows below 0 or twice.
    """
    threads = _threads(threads)
    native = _native.GroupInt(codes, scales, zeros, rows, bits, group_size, columns, threads, isa)
    return GroupInt(native, (codes.shape, scales.shape, zeros is None), columns)


def nested_codes(  # noqa: PLR0913 - what the algorithm reads
    targets: Tensor,  # float32 [widths, rows, n], n up to 128; of 1 bit, 2 bits, ...
    inverse: Tensor,  # float32 [n, n], upper triangular: the Cholesky factor of the inverse Hessian
    tables: Tensor,  # float32 [shapes, 2 + 4 + ... + 2**widths], ascending at every width
    kinds: Tensor,  # uint8 [rows]: shapes
    scales: Tensor,  # float32 [rows]
    weights: Tensor,  # float32 [rows, widths], not below 0, of the squared error at every width
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


def nested_descent(  # noqa: PLR0913 - what the algorithm reads and changes
    slopes: Tensor,  # float32 [widths, rows, n], n up to 128: `errors @ hessian` over all columns of the matrix
    hessian: Tensor,  # float32 [n, n]: of these columns
    weight: Tensor,  # float32 [rows, n]
    tables: Tensor,  # float32 [shapes, 2 + 4 + ... + 2**widths], ascending at every width
    kinds: Tensor,  # uint8 [rows]: shapes
    scales: Tensor,  # float32 [rows]
    weights: Tensor,  # float32 [rows, widths], not below 0
    codes: Tensor,  # uint8 [rows, n], changed
    errors: Tensor,  # float32 [widths, rows, n]: dequantized codes less `weight`, changed
    losses: Tensor,  # float32 [rows, widths]: `errors @ hessian @ errors^T` of every row, changed
    threads: int | None = None,
    isa: str | None = None,
) -> None:
    """Choose nested codes anew, one column after the other, each the best while all others stay.

    A row's sum of `losses` by `weights` does not rise. The same bits for every instruction set and number of threads.

    Raises:
        ValueError: wrong dtype, shape, layout or device; a diagonal of `hessian` that is not positive.
    """
    _native.nested_descent(
        slopes, hessian, weight, tables, kinds, scales, weights, codes, errors, losses, _threads(threads), isa
    )


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
