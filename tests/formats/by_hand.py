"""Tiles of which every byte is known."""

from __future__ import annotations

import torch
from torch import Tensor

from anybit.formats import GroupInt
from anybit.formats.layout import LayerLayout
from anybit.formats.weight import PackedWeight, QuantizedWeight, pack


def tile(
    bits: int, codes: list[list[int]], group_size: int, zeros: list[list[int]] | None = None
) -> GroupInt:
    """A tile with the scales 1, 2, 3, ... row by row."""
    q = torch.tensor(codes, dtype=torch.uint8)
    groups = -(-q.shape[1] // group_size)
    scales = torch.arange(1, q.shape[0] * groups + 1).view(q.shape[0], groups).half()
    z = None if zeros is None else torch.tensor(zeros, dtype=torch.uint8)
    return GroupInt(bits, group_size, q, scales, z)


def packed(*tiles: GroupInt, shape: tuple[int, int] | None = None) -> PackedWeight:
    return pack(QuantizedWeight(shape or tuple(tiles[0].codes.shape), tiles))  # type: ignore[arg-type]


def hexes(tensor: Tensor) -> list[str]:
    """The rows of a uint8 tensor in hex, plane after plane."""
    return [bytes(row.tolist()).hex() for row in tensor.reshape(-1, tensor.shape[-1])]


def split(first: list[int], second: list[int]) -> tuple[LayerLayout, dict[str, Tensor]]:
    """Layout and tensors of a [3, 3] matrix in two row tiles."""
    a = tile(8, [[0, 1, 2], [3, 4, 5]], 4)
    b = tile(4, [[1, 1, 1]], 4, [[2]])
    rows = [torch.tensor(first, dtype=torch.int32), torch.tensor(second, dtype=torch.int32)]
    tiles = tuple(GroupInt(t.bits, 4, t.codes, t.scales, t.zeros, r) for t, r in zip((a, b), rows))
    weight = packed(*tiles, shape=(3, 3))
    return weight.layout, dict(weight.tensors)
