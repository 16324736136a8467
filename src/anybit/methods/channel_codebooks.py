"""A codebook per input channel, at any average width: the algorithm of CMPQ (arXiv:2410.13056).

Input channels get widths by their activation norm (algorithm 1, extended from 2..4 bits to 2..8), each channel a
codebook over its output weights (section 3.2.1). Two kinds of outliers stay float16 (section 3.2.2): whole channels
with the largest activations, and the weights that a first clustering represents worst.

Beyond the paper (`compensate`): channels are clustered one after another, and what each loses is compensated in those
not yet clustered, as GPTQ does (arXiv:2210.17323, algorithm 1). Every channel has its own codebook, so any order is
free: the largest norms first, and the float16 channels, which lose nothing, last.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from anybit.calibration.stats import LinearStats
from anybit.config import LayerSpec
from anybit.errors import InputError
from anybit.formats import Codebook, CodebookLayout, Float16, Float16Layout, Sparse, TileLayout
from anybit.formats.base import to_half
from anybit.formats.layout import LayerLayout
from anybit.formats.weight import QuantizedWeight
from anybit.methods import grid, kmeans
from anybit.methods.cmpq import CMPQ
from anybit.methods.compensation import BLOCK, inverse_factor

EXTREMES = 0.01  # share of channels that 3 bits on average give to 4 and to 2 bits


def layout(spec: LayerSpec[CMPQ], shape: tuple[int, int]) -> LayerLayout:
    """What `quantize` will store of a matrix of this shape: the counts follow from it, only the choice needs data."""
    counts, kept = allocation(spec, shape[1])
    table_bits = spec.options.codebook_bits
    tiles: list[TileLayout] = [
        CodebookLayout.of([bits], True, table_bits, cols=count) for bits, count in counts.items()
    ]
    if kept:
        tiles.append(Float16Layout(cols=kept))
    if len(tiles) == 1:
        tiles = [replace(tiles[0], cols=None)]  # all channels, in natural order
    return LayerLayout(shape, tuple(tiles), _worst(spec, shape, kept) or None)


def allocation(spec: LayerSpec[CMPQ], in_features: int) -> tuple[dict[int, int], int]:
    """How many input channels get each width, and how many stay float16 (those of the largest norms).

    Quantiles are taken over all channels, before the float16 ones leave.
    """
    if len(spec.tiles) != 1 or spec.tiles[0].rows is not None or spec.tiles[0].cols is not None:
        raise InputError("cmpq chooses channels itself: give one tile without rows and cols")
    bits = spec.tiles[0].bits
    low = int(bits)
    high = round((bits - low) * in_features)
    counts = {low: in_features - high, low + 1: high}
    if bits == 3:
        extreme = round(EXTREMES * in_features)
        counts = {2: extreme, 3: in_features - 2 * extreme, 4: extreme}
    kept = (
        min(in_features - 1, max(1, round(spec.options.channel_outliers * in_features)))
        if spec.options.channel_outliers
        else 0
    )
    left = kept
    for width in sorted(counts, reverse=True):
        taken = min(left, counts[width])
        counts[width] -= taken
        left -= taken
    return {width: count for width, count in counts.items() if count}, kept


def quantize(weight: Tensor, stats: LinearStats | None, spec: LayerSpec[CMPQ]) -> QuantizedWeight:
    """Cluster the input channels of `weight` [out, in]; with `compensate` on the CPU, wherever the weight is.

    Args:
        weight: float32 [out, in].
        stats: with the squared activation norms [in], and to compensate with the Hessian [in, in].
        spec: `tiles[0].bits`, the average width; outlier shares; `codebook_bits`; `compensate`, `damp`.

    Raises:
        InputError: no statistics; see `kmeans.cluster` and `compensation.inverse_factor`.
    """
    if stats is None:
        raise InputError("CMPQ needs the norms of the layer's inputs: calibrate first")
    if spec.options.compensate and stats.hessian is None:
        raise InputError("compensating errors needs the Hessian of the layer's inputs: calibrate with it")
    shape, device = (weight.shape[0], weight.shape[1]), weight.device
    weight = grid.without_dead(weight, stats.squares)
    counts, kept = allocation(spec, shape[1])
    order = torch.argsort(stats.squares.to(device), stable=True)  # ascending norms: narrow widths first
    coded, outliers = order[: shape[1] - kept], order[shape[1] - kept :].sort().values
    channels = dict(zip(counts, coded.split(list(counts.values()))))
    channels = {width: chosen.sort().values for width, chosen in channels.items()}
    mask, worst = None, _worst(spec, shape, kept)
    if worst or not spec.options.compensate:
        tiles = [_cluster(weight, None, chosen, width, spec) for width, chosen in channels.items()]
    if worst:
        error = (weight - QuantizedWeight(shape, tuple(tiles)).dequantize()).abs()
        error[:, outliers] = -1  # these stay as they are
        mask = torch.zeros(weight.numel(), dtype=torch.bool, device=device)
        mask[error.flatten().topk(worst).indices] = True
        mask = mask.view(shape)
    if (
        spec.options.compensate and stats.hessian is not None
    ):  # channel after channel is too little at a time for a GPU
        weight, outliers, order = weight.cpu(), outliers.cpu(), order.cpu()
        mask = None if mask is None else mask.cpu()
        channels = {width: chosen.cpu() for width, chosen in channels.items()}
        tiles, weight = _compensated(weight, mask, stats.hessian, order, channels, spec)
    elif mask is not None:
        tiles = [_cluster(weight, mask, chosen, width, spec) for width, chosen in channels.items()]
    if kept:
        tiles.append(Float16(to_half(weight[:, outliers]), cols=outliers.to(torch.int32)))  # type: ignore[arg-type]
    sparse = None
    if mask is not None:
        sparse = Sparse.of(weight - QuantizedWeight(shape, tuple(tiles)).dequantize(), mask)
    return QuantizedWeight(shape, tuple(tiles), sparse)


def _cluster(
    weight: Tensor, mask: Tensor | None, channels: Tensor, width: int, spec: LayerSpec[CMPQ]
) -> Codebook:
    """The tile of some channels; masked weights do not count."""
    columns = weight[:, channels].T.contiguous()
    importance = None if mask is None else (~mask[:, channels].T).float().contiguous()
    codes, centroids = kmeans.cluster(columns, importance, width, width)
    cols = channels.to(torch.int32) if len(channels) < weight.shape[1] else None
    return kmeans.codebook(
        codes, centroids, (width,), table_bits=spec.options.codebook_bits, by_channel=True, cols=cols
    )


def _compensated(
    weight: Tensor,
    mask: Tensor | None,
    hessian: Tensor,
    order: Tensor,  # int64 [in], channels by ascending norm: the coded ones, then the float16 ones
    channels: dict[int, Tensor],
    spec: LayerSpec[CMPQ],
) -> tuple[list[Codebook], Tensor]:
    """Cluster channel after channel, each error compensated in those to come: the tiles, and what they stand for.

    The second result [out, in] is `weight` with all compensation in it: what float16 channels and masked weights
    are to be stored as.
    """
    width_of = {int(channel): width for width, chosen in channels.items() for channel in chosen}
    coded = len(width_of)
    order = torch.cat([order[:coded].flip(0), order[coded:]])
    factor = inverse_factor(hessian, order, spec.options.damp).cpu()
    work = weight.T[order]  # [in, out]: a channel is a contiguous row
    done: dict[int, Codebook] = {}
    for a in range(0, coded, BLOCK):
        b = min(a + BLOCK, coded)
        errors = torch.empty(b - a, weight.shape[0])
        for j in range(a, b):
            channel = int(order[j])
            tile = _cluster(
                work[j : j + 1].T,
                None if mask is None else mask[:, channel : channel + 1],
                torch.zeros(1, dtype=torch.int64),
                width_of[channel],
                spec,
            )
            error = (work[j] - tile.dequantize()[:, 0]) / factor[j, j]
            if mask is not None:
                error[mask[:, channel]] = 0
            work[j + 1 : b].addr_(factor[j, j + 1 : b], error, alpha=-1)
            errors[j - a] = error
            done[channel] = tile
        work[b:].addmm_(factor[a:b, b:].T, errors, alpha=-1)
    target = torch.empty_like(weight)
    target[:, order] = work.T
    return [
        _joined([done[int(c)] for c in chosen], chosen, weight.shape[1]) for chosen in channels.values()
    ], target


def _joined(tiles: list[Codebook], channels: Tensor, in_features: int) -> Codebook:
    """One tile of single channels of the same width."""
    first = tiles[0]

    def along(name: str) -> Tensor | None:
        return None if getattr(first, name) is None else torch.cat([getattr(t, name) for t in tiles])

    return replace(
        first,
        codes=torch.cat([t.codes for t in tiles]),
        tables=(torch.cat([t.tables[0] for t in tiles]),),
        table_scale=along("table_scale"),
        table_min=along("table_min"),
        cols=channels.to(torch.int32) if len(channels) < in_features else None,
    )


def _worst(spec: LayerSpec[CMPQ], shape: tuple[int, int], kept: int) -> int:
    """Weights that a first clustering represents worst; no more than there are beside `kept` float16 channels."""
    return min(round(spec.options.error_outliers * shape[0] * shape[1]), shape[0] * (shape[1] - kept))
