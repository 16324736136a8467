"""What an artifact is made of, measured from its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Unpack

import torch

from anybit.artifact.levels import Budget, Levels
from anybit.artifact.reader import open_artifact
from anybit.checkpoint.directory import Checkpoint
from anybit.config import Json
from anybit.errors import InputError
from anybit.formats import TwoFourLayout
from anybit.formats.layout import LayerLayout, code_bits
from anybit.methods.two_four_sixteen import bits_eq10


def table_of_levels(path: Path) -> list[Json]:
    """What an artifact is at each of its levels: see `Levels.table`.

    Raises:
        InputError: see `open_artifact`.
    """
    return Levels(open_artifact(path)).table()


def inspect(path: Path, **at: Unpack[Budget]) -> Json:
    """What an artifact is made of, its sizes taken from its files.

    Args:
        path: the artifact.
        at: the budget of the level that is looked at; the largest that is there by default.

    Returns:
        `method`, `bits` (average width), `bits_eq10` (2/4/16: the same with its scales), `bits_per_weight` (8 x bytes
        read of all linear layers in the blocks / their weights, whether they are quantized or not),
        `file_bits_per_weight` (of the files: see `Levels.file_bits_per_weight`),
        `levels` (see `Levels.table`), `kv_bits`, `size_bytes` (files but the tokenizer, as far as they are read),
        `calibration`, `layers` and what else the artifact says of its making. JSON-able.

    Raises:
        InputError: see `open_artifact` and `Levels.choose`.
    """
    artifact = open_artifact(path)
    levels, quantization, checkpoint = Levels(artifact), artifact.quantization, artifact.checkpoint
    chosen = levels.choose(**at)
    level = levels.last if chosen is None else chosen
    quantized, embeddings = levels.layouts(level)
    layers = {**quantized, **levels.unquantized}
    return {
        "method": quantization.get("method"),
        "bits": code_bits(layers.values()),
        "bits_eq10": _bits_eq10(artifact.stored.layers),
        "bits_per_weight": levels.bits_per_weight(level),
        "file_bits_per_weight": levels.file_bits_per_weight(level),
        "levels": levels.table(),
        "size_bytes": levels.sizes[level].size_bytes,
        "kv_bits": quantization.get("kv_bits", 16),
        "weights": levels.weights,
        "calibration": quantization.get("calibration"),
        "base": quantization.get("base"),
        "options": quantization.get("options"),
        "embeddings": [_describe(name, x, checkpoint) for name, x in embeddings.items()],
        "layers": [_describe(name, x, checkpoint) for name, x in layers.items()],
    }


def _bits_eq10(layouts: Mapping[str, LayerLayout]) -> float | None:
    """Average width as 2/4/16 counts it, over the layers stored so; None where there are none."""
    weights, bits = 0, 0.0
    for layout in layouts.values():
        tile = layout.tiles[0]
        if isinstance(tile, TwoFourLayout):
            weights += layout.weights
            bits += layout.weights * bits_eq10(1 - tile.narrow / layout.shape[1], tile.group_size)
    return bits / weights if weights else None


def _describe(name: str, layout: LayerLayout, checkpoint: Checkpoint) -> Json:
    """One layer's line of `inspect`."""
    line = {
        "name": name,
        "shape": list(layout.shape),
        "bits": code_bits([layout]),
        "bits_per_weight": 8 * layout.nbytes / layout.weights,
        "bytes": layout.nbytes,
        "tiles": [tile.to_json() for tile in layout.tiles],
    }
    channels = _channel_bits(name, layout, checkpoint)
    return line | {"channel_bits": channels} if channels else line


def _channel_bits(name: str, layout: LayerLayout, checkpoint: Checkpoint) -> list[float]:
    """The width of every input channel, where a layer's channels differ in width.

    Raises:
        InputError: channels that the matrix does not have.
    """
    tiles = layout.tiles
    if len(tiles) < 2 or any(tile.rows is not None or tile.cols is None for tile in tiles):
        return []
    bits = torch.zeros(layout.shape[1])
    for placed in layout.placed():
        field = f"{name}.{placed.prefix}cols"
        cols = checkpoint.read(field).long()
        if int(cols.min()) < 0 or int(cols.max()) >= layout.shape[1]:
            raise InputError(
                f"{field} points outside 0..{layout.shape[1] - 1}: the artifact is damaged; copy it again"
            )
        bits[cols] = placed.layout.bits
    return [int(width) if width == int(width) else width for width in bits.tolist()]
