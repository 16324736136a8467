"""A codebook per output row: the algorithm of SqueezeLLM (arXiv:2306.07629) and Any-Precision LLM (arXiv:2402.10517).

A row's weights are clustered with the diagonal Fisher information as importance. SqueezeLLM stores one width;
Any-Precision cuts clusters in two, width after width, so that one matrix of nested codes holds every width from the
seed's up. Outliers (SqueezeLLM, section 4.2) leave before the clustering and are stored sparsely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anybit.calibration.stats import GradientStats
from anybit.config import LayerSpec, TileSpec
from anybit.errors import InputError
from anybit.formats import CodebookLayout, Sparse
from anybit.formats.layout import LayerLayout
from anybit.formats.weight import QuantizedWeight
from anybit.methods import kmeans
from anybit.methods.method import Codebooks


def whole_rows(spec: LayerSpec[Any]) -> TileSpec:
    """The one tile of a layer that is quantized row by row.

    Raises:
        InputError: several tiles, or one of some rows or columns.
    """
    if len(spec.tiles) != 1 or spec.tiles[0].rows is not None or spec.tiles[0].cols is not None:
        raise InputError("a codebook holds whole rows: give one tile without rows and cols")
    return spec.tiles[0]


def layout(
    spec: LayerSpec[Codebooks],
    shape: tuple[int, int],
    widths: Sequence[int],
    outliers: tuple[int, int] = (0, 0),
) -> LayerLayout:
    """What `quantize` will store of a matrix of this shape."""
    tile = CodebookLayout.of(widths, False, spec.options.codebook_bits)
    return LayerLayout(shape, (tile,), sum(outliers) or None)


def quantize(
    weight: Tensor,
    stats: GradientStats | None,
    spec: LayerSpec[Codebooks],
    widths: Sequence[int],
    outliers: tuple[int, int] = (0, 0),
) -> QuantizedWeight:
    """Cluster the rows of `weight` [out, in].

    Args:
        weight: float32 [out, in].
        stats: with the diagonal Fisher information [out, in]; None weighs all weights alike.
        spec: `codebook_bits`.
        widths: ascending; several make nested codes.
        outliers: how many weights stay float16, see `outlier_mask`; for one width only.

    Raises:
        InputError: see `kmeans.cluster`.
    """
    fisher = None if stats is None or stats.fisher is None else stats.fisher.to(weight.device)
    mask = outlier_mask(weight, fisher, *outliers)
    if mask is not None:
        fisher = torch.where(mask, 0.0, torch.ones_like(weight) if fisher is None else fisher)
    codes, centroids = kmeans.cluster(weight, fisher, widths[0], widths[-1])
    tile = kmeans.codebook(codes, centroids, widths, table_bits=spec.options.codebook_bits)
    sparse = None if mask is None else Sparse.of(weight - tile.dequantize(), mask)
    return QuantizedWeight((weight.shape[0], weight.shape[1]), (tile,), sparse)


def outlier_mask(weight: Tensor, fisher: Tensor | None, sensitive: int, large: int) -> Tensor | None:
    """Mask [out, in] of the most sensitive weights (by Fisher information) and the largest of the others.

    Weights of no Fisher information, such as those of dead input channels, come last: no centroid moves for them.
    """
    if sensitive + large == 0:
        return None
    mask = torch.zeros(weight.numel(), dtype=torch.bool, device=weight.device)
    if sensitive:
        score = weight.square() if fisher is None else fisher
        mask[score.flatten().topk(sensitive).indices] = True
    if large:
        size = weight.abs() if fisher is None else torch.where(fisher == 0, 0.0, weight.abs())
        mask[torch.where(mask, -1.0, size.flatten()).topk(large).indices] = True
    return mask.view_as(weight)
