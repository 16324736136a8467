"""Grids of quantized activations: how far they should reach (Atom, arXiv:2310.19102, section 4.3)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from anybit.formats import GroupInt
from anybit.formats.bits import split_groups
from anybit.formats.weight import QuantizedWeight
from anybit.kernels.reference import quantize_activations

RATIOS = tuple(1 - 0.04 * k for k in range(13))  # 1.00 down to 0.52


def search_clip(weight: QuantizedWeight, x: Tensor) -> QuantizedWeight:
    """Choose every group's clipping ratio of inputs for the least output error on a sample.

    What a group's rounding errors E [n, size] cost at the output is `|E W^T|^2`, W the group's columns.

    Args:
        weight: dynamic tiles with `act_bits`; others stay as they are.
        x: float32 [n, in], a sample of inputs, scaled as the tiles see them.
    """
    dense = replace(weight, input_scale=None).dequantize()
    tiles, shared = [], None
    for tile in weight.tiles:
        if not isinstance(tile, GroupInt) or tile.act_clip is None:
            tiles.append(tile)
            continue
        if tile.rows is None or shared is None:  # tiles by rows read the same inputs
            cols = slice(None) if tile.cols is None else tile.cols.long()
            shared = _best_ratios(dense[:, cols], x[:, cols], tile)
        tiles.append(replace(tile, act_clip=shared))
    return replace(weight, tiles=tuple(tiles))


def _best_ratios(dense: Tensor, x: Tensor, tile: GroupInt) -> Tensor:
    """float16 [groups] for columns `dense` [out, c] and inputs [n, c]."""
    columns = split_groups(dense, tile.group_size).transpose(0, 1)  # [groups, out, size]
    gram = columns.transpose(1, 2) @ columns
    inputs = split_groups(x, tile.group_size)
    best = torch.full((len(gram),), torch.inf, device=gram.device)
    ratios = torch.ones_like(best).half()
    for ratio in torch.tensor(RATIOS, device=gram.device).half():
        clip = ratio.expand(len(gram))
        codes, scales = quantize_activations(x, tile.act_bits, tile.group_size, clip, None)
        errors = split_groups(codes.float(), tile.group_size) * scales[..., None] - inputs
        errors = errors.transpose(0, 1)
        cost = ((errors @ gram) * errors).sum((1, 2))
        ratios = torch.where(cost < best, ratio, ratios)
        best = torch.minimum(cost, best)
    return ratios
