"""LLM-MQ: one width for each layer (Li et al. 2023, "Mixed-precision Quantization for Efficient LLM Deployment").

Which width a layer gets is decided over the whole model (`salience.layer_widths`); rounding is GPTQ's. The inter-layer
baseline of MixLLM's and 2/4/16's papers.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

from anybit.config import METHOD_WIDTHS, LayerSpec
from anybit.formats.layout import stored_bytes
from anybit.methods import tiling


def layout(spec: LayerSpec, shape: tuple[int, int]) -> dict[str, Any]:
    """What will be stored of a matrix of this shape; before the widths are chosen, as if by rows of the two nearest."""
    tile = spec.tiles[0]
    if len(spec.tiles) > 1 or tile.rows is not None or float(tile.bits).is_integer():
        return tiling.layout(spec, shape)
    low = int(tile.bits)
    wide = ceil((tile.bits - low) * shape[0] - 1e-9)
    rows = (tuple(range(wide)), tuple(range(wide, shape[0])))
    parts = [replace(tile, bits=bits, rows=r) for bits, r in zip((low + 1, low), rows) if r]
    parts = parts if len(parts) > 1 else [replace(parts[0], rows=None)]
    return tiling.layout(replace(spec, tiles=tuple(parts)), shape)


def stored_sizes(spec: LayerSpec, shape: tuple[int, int]) -> list[int]:
    """Bytes of a matrix of this shape at each of the method's widths."""
    widths = METHOD_WIDTHS["llm-mq"].whole()
    return [stored_bytes(layout(with_width(spec, bits), shape)) for bits in widths]


def with_width(spec: LayerSpec, bits: int) -> LayerSpec:
    """The spec of a layer that gets `bits` bits."""
    return replace(spec, tiles=(replace(spec.tiles[0], bits=bits),))
