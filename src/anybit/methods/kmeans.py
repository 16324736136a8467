"""Weighted k-means in one dimension, row by row: codebooks of one width, or nested over several.

The work is native (csrc/quantize/kmeans.cpp) or a GPU's (kernels/gpu/kmeans.py); here is its contract, and how
codebooks are stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anybit.errors import InputError
from anybit.formats import Codebook
from anybit.formats.base import to_half
from anybit.kernels import cpu, dispatch


def cluster(
    weight: Tensor, importance: Tensor | None, seed_bits: int, bits: int
) -> tuple[Tensor, dict[int, Tensor]]:
    """Nested codes and centroids of every row.

    A row is clustered into `2**seed_bits` intervals of its sorted values so that the importance-weighted squared
    error is (nearly) least; then every cluster is cut in two at its best place, width after width (SqueezeLLM,
    arXiv:2306.07629, eq. 7; Any-Precision, arXiv:2402.10517, section 4.2). Deterministic: no random start.

    Args:
        weight: float32 [n, m].
        importance: float32 [n, m] or [m], not below 0; None: all alike. A weight of importance 0 does not
            count, but gets a code too.
        seed_bits: width that is clustered from scratch.
        bits: widest width, 1..8.

    Returns:
        codes uint8 [n, m] at `bits`, those of a narrower width being their leading bits, and
        `{width: centroids}`, float32 [n, 2**width], ascending. Where a row has fewer distinct values than
        centroids, the last value is repeated and has no codes.

    Raises:
        InputError: NaN or Inf, a negative importance, or no native extension (on the CPU).
    """
    if weight.device.type == "cpu" and not cpu.available():
        raise InputError(f"clustering needs the native extension, which is not there: {cpu.why_not()}")
    try:
        codes, centroids = dispatch.kmeans(weight.float().contiguous(), importance, seed_bits, bits)
    except ValueError as error:
        raise InputError(f"these weights cannot be clustered: {error}") from error
    sizes = [2**b for b in range(seed_bits, bits + 1)]
    return codes, dict(zip(range(seed_bits, bits + 1), centroids.split(sizes, dim=1)))


def codebook(
    codes: Tensor,
    centroids: dict[int, Tensor],
    widths: Sequence[int],
    *,
    table_bits: int = 16,
    by_channel: bool = False,
    cols: Tensor | None = None,
) -> Codebook:
    """A tile of codes [n, m] and the tables of `widths`, stored in `table_bits` bits an entry.

    Tables of 8 and 4 bits share a float16 scale and minimum per row, over all widths (CMPQ, table 7).

    Raises:
        InputError: centroids too large for float16.
    """
    m = codes.shape[1]
    widest = centroids[max(widths)]
    entries = {b: min(2**b, m) if by_channel else 2**b for b in widths}
    scale = minimum = None
    if table_bits == 16:
        tables = tuple(to_half(centroids[b][:, : entries[b]]) for b in widths)
    else:
        top = 2**table_bits - 1
        minimum = to_half(widest.amin(1))
        spread = (widest.amax(1) - minimum.float()).clamp(min=0)
        scale = to_half(spread / top)
        short = scale.float() * top < spread  # rounded down: the last entry would not reach the last centroid
        scale = torch.where(short, torch.nextafter(scale, torch.full_like(scale, torch.inf)), scale)
        safe = torch.where(scale == 0, 1.0, scale.float())[:, None]
        tables = tuple(
            ((centroids[b][:, : entries[b]] - minimum.float()[:, None]) / safe)
            .round()
            .clamp(0, top)
            .to(torch.uint8)
            for b in widths
        )
    return Codebook(tuple(widths), codes, tables, by_channel, table_bits, scale, minimum, cols=cols)
