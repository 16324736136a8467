"""Atom: low-bit weights and activations, a few outlier channels at 8 bits (arXiv:2310.19102).

Input channels are sorted by the energy of their activations; those of the most energy come last, as a tile of 8-bit
weights and activations (section 4.1). The others share a grid per group of channels (section 4.2), which weights have
fixed and activations get token by token (section 4.3). Weights are rounded with GPTQ's compensation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anybit.calibration.stats import LinearStats
from anybit.config import LayerSpec, TileSpec
from anybit.errors import InputError
from anybit.formats.weight import QuantizedWeight
from anybit.methods import gptq, tiling

OUTLIER_BITS = 8
MAX_OUTLIERS = 128  # the paper's number, for models from 4096 channels up


def layout(spec: LayerSpec, shape: tuple[int, int]) -> dict[str, Any]:
    """What `quantize` will store of a matrix of this shape."""
    return tiling.layout(split(spec, torch.arange(shape[1])), shape)


def outlier_channels(in_features: int) -> int:
    """Outlier channels of a layer by default: 16 at 576 input channels, 48 at 1536, 128 from 4096."""
    return min(MAX_OUTLIERS, max(16, in_features // 512 * 16))


def split(spec: LayerSpec, order: Tensor) -> LayerSpec:
    """The spec of two tiles, of channels in ascending `order` [in].

    Raises:
        InputError: more than one tile already, or no channel left beside the outliers.
    """
    if len(spec.tiles) != 1 or spec.tiles[0].rows is not None or spec.tiles[0].cols is not None:
        raise InputError("atom chooses channels itself: give one tile without rows and cols")
    count = spec.outlier_channels or outlier_channels(len(order))
    if count >= len(order):
        raise InputError(
            f"{count} outlier channels of {len(order)} leave none: give fewer (outlier_channels, --outlier-channels)"
        )
    tile, channels = spec.tiles[0], order.tolist()
    act_bits = None if spec.act_bits == 16 else OUTLIER_BITS
    return replace(
        spec,
        tiles=(
            replace(tile, cols=tuple(channels[:-count])),
            TileSpec(OUTLIER_BITS, tile.group_size, tile.symmetric, None, tuple(channels[-count:]), act_bits),
        ),
    )


def quantize(weight: Tensor, stats: LinearStats | None, spec: LayerSpec) -> QuantizedWeight:
    """Quantize `weight` [out, in] in two tiles of columns.

    Args:
        weight: float32 [out, in].
        stats: Hessian [in, in] and `InputStats` of the layer's inputs.
        spec: `tiles[0].bits`, `act_bits`, `outlier_channels`, clipping, and GPTQ's options.

    Raises:
        InputError: no statistics; see `split` and `gptq.quantize`.
    """
    if stats is None or stats.inputs is None:
        raise InputError("Atom needs the energy of the layer's inputs: calibrate first")
    order = torch.argsort(stats.inputs.energy, stable=True)
    return gptq.quantize(weight, stats, split(spec, order))
