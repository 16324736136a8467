"""What a layer's description says: its stored tensors, their bytes, and the widths that it can be read at."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from anybit.errors import InputError
from anybit.formats import FORMATS, Codebook, Float16, Sparse
from anybit.formats.base import Fields

QUANT_METHOD = "anybit"  # what config.json calls us
FORMAT_VERSION = 1  # of the stored bytes and their description


def tile_prefix(i: int, tiles: int) -> str:
    """What the fields of tile i of so many begin with."""
    return f"{i}." if tiles > 1 else ""


def stored_tensors(layout: Mapping[str, Any]) -> Fields:
    """Field -> (dtype, shape) of every tensor that a layer of this layout stores.

    The one place that knows the shapes: it sizes buffers at load, predicts bytes before any work and checks
    what a file holds.
    """
    out_features, in_features = layout["shape"]
    stored: Fields = {}
    for i, tile in enumerate(layout["tiles"]):
        r, c = tile.get("rows", out_features), tile.get("cols", in_features)
        fields = FORMATS[tile["format"]].fields(tile, r, c)
        fields |= {"rows": (torch.int32, (r,))} if "rows" in tile else {}
        fields |= {"cols": (torch.int32, (c,))} if "cols" in tile else {}
        prefix = tile_prefix(i, len(layout["tiles"]))
        stored |= {prefix + field: entry for field, entry in fields.items()}
    if "sparse" in layout:
        fields = Sparse.fields(layout["sparse"], (out_features, in_features))
        stored |= {f"sparse.{field}": entry for field, entry in fields.items()}
    if "input_scale" in layout:
        stored["input_scale"] = (torch.float16, (in_features,))
    return stored


def stored_bytes(layout: Mapping[str, Any]) -> int:
    """Bytes of all tensors of a layer of this layout."""
    return sum(dtype.itemsize * prod(shape) for dtype, shape in stored_tensors(layout).values())


def bits_per_weight(layouts: Mapping[str, Mapping[str, Any]]) -> float:
    """Stored bits per weight over layers: 8 x bytes of codes, scales, zeros, indices and padding / weights."""
    weights = sum(prod(layout["shape"]) for layout in layouts.values())
    return 8 * sum(stored_bytes(layout) for layout in layouts.values()) / weights if weights else 0.0


def code_bits(layouts: Mapping[str, Mapping[str, Any]]) -> float:
    """Average width of the codes alone, weighted by the number of weights that have codes.

    Columns of a quantized matrix that stay float16 are outliers, not codes.
    """
    weights, bits = 0, 0
    for layout in layouts.values():
        out_features, in_features = layout["shape"]
        for tile in layout["tiles"]:
            if tile["format"] != Float16.NAME:
                area = tile.get("rows", out_features) * (tile.get("cols", in_features) - tile.get("kept", 0))
                weights, bits = weights + area, bits + area * tile["bits"]
    return bits / weights if weights else 16.0 * bool(layouts)


def stored_widths(layout: Mapping[str, Any]) -> tuple[int, ...]:
    """The widths that a layer can run at: several for a nested one, else its own."""
    nested = [
        tuple(t["widths"]) for t in layout["tiles"] if t["format"] == Codebook.NAME and not t["by_channel"]
    ]
    return nested[0] if len(nested) == 1 == len(layout["tiles"]) else ()


def at_width(layout: Mapping[str, Any], bits: float) -> dict[str, Any]:
    """The layout of a nested layer read at one of its widths; a layer that is not nested stays as it is.

    Raises:
        InputError: a width that it does not have.
    """
    widths = stored_widths(layout)
    if len(widths) < 2:
        return dict(layout)
    if bits not in widths:
        raise InputError(f"the artifact has the widths {', '.join(map(str, widths))}, not {bits:g}")
    bits = int(bits)
    return {**layout, "tiles": [{**layout["tiles"][0], "bits": bits, "widths": [bits]}]}


def widest(layout: Mapping[str, Any]) -> dict[str, Any]:
    """The layout of a layer read at its widest."""
    return at_width(layout, max(stored_widths(layout), default=0))
