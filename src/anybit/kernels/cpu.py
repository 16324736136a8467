"""The native CPU kernels: what there is, and those that quantize. Layers are in cpu_layer.py.

What they compute: kernels/reference.py; how: csrc/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anybit.lazy import Tensor, torch

if TYPE_CHECKING:
    import numpy as np

    from anybit import _native

    _REASON: str | None = None
else:
    try:
        from anybit import _native

        _REASON = None
    except ImportError as error:  # a bare source tree: the reference runs instead
        _native = None
        _REASON = f"the native extension is not built ({error}): `pip install .` builds it"


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


def matmul_needs() -> dict[str, list[str]]:
    """Every way to multiply that was compiled, the best last, and which of `cpu_features` it needs."""
    return _native.matmul_needs()


def cpu_features() -> dict[str, bool]:
    """What the processor has of what kernels could use."""
    return _native.cpu_features()


def used_threads(threads: int | None) -> int:
    """What the kernels get: as many threads as were asked for, or PyTorch's number within what they take."""
    return min(torch.get_num_threads(), _native.MAX_THREADS) if threads is None else threads


def plane_writer() -> _native.PlaneWriter:
    """What codes bitplanes for files."""
    return _native.PlaneWriter()


def plane_reader(coded: np.ndarray) -> _native.PlaneReader:
    """What such a stream, uint8 [n], holds."""
    return _native.PlaneReader(coded)


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
    """One code per weight for all widths from 1 bit up: see `methods.nested_codes`.

    The same bits for every instruction set and number of threads.

    Returns:
        codes uint8 [rows, n] at the widest, errors float32 [widths, rows, n] divided by the diagonal of `inverse`.

    Raises:
        ValueError: wrong dtype, shape, layout or device; a diagonal of `inverse` that is not positive.
    """
    codes, errors = torch.empty(targets.shape[1:], dtype=torch.uint8), torch.empty(targets.shape)
    threads = used_threads(threads)
    _native.nested_codes(targets, inverse, tables, kinds, scales, weights, codes, errors, threads, isa)
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
    threads = used_threads(threads)
    _native.nested_descent(
        slopes, hessian, weight, tables, kinds, scales, weights, codes, errors, losses, threads, isa
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
    _native.nested_fit(weight, importance, tables, kinds, scales, used_threads(threads), isa)
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
    threads = used_threads(threads)
    _native.gptq_block(weight, inverse, scale, zero, top, codes, errors, threads, isa)
    return codes, errors


def has_bfloat16_dot() -> bool:
    """Whether `moments` and `causal_attention` can run here: the native extension, and a processor with AVX512-BF16."""
    return available() and _native.has_bfloat16_dot()


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, threads: int | None = None
) -> tuple[Tensor, Tensor]:
    """`softmax(q k^T scale) v`, each query with the keys up to its own place: scores and sums are float32.

    Args:
        query: bfloat16 [n, heads, tokens, size], its numbers side by side; `size` is even and at most
            `_native.MOST_HEAD_SIZE`.
        key: bfloat16 [n, key heads, tokens, size]; as many query heads share each.
        value: the same.
        scale: of the scores.
        threads: None: PyTorch's.

    Returns:
        bfloat16 [n, heads, tokens, size], a view of [n, tokens, heads, size]; and of every query the logarithm of the
        sum of its scores' exponentials, float32 [n, heads, tokens]. The same bits for every number of threads.

    Raises:
        ValueError: wrong dtype, shape, layout or device; a machine without AVX512-BF16.
    """
    n, heads, tokens, size = query.shape
    out = query.new_empty(n, tokens, heads, size)
    sums = query.new_empty(n, heads, tokens, dtype=torch.float32)
    threads = used_threads(threads)
    for q, k, v, to, of in zip(query, key, value, out, sums, strict=True):
        _native.causal_attention(q, k, v, scale, to, of, threads)
    return out.transpose(1, 2), sums


def moments(x: Tensor, hessian: Tensor, threads: int | None = None) -> None:
    """`hessian += x.T @ x`, summed in float32, the same bits for every number of threads.

    Args:
        x: bfloat16 [tokens, n], contiguous rows.
        hessian: float32 [n, n], contiguous; symmetric before and after.

    Raises:
        ValueError: wrong dtype, shape, layout or device; a machine without AVX512-BF16.
    """
    _native.moments(x, hessian, used_threads(threads))


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
    threads = used_threads(threads)
    _native.kmeans(weight, importance, seed_bits, bits, codes, centroids, threads, isa)
    return codes, centroids
