"""LLM-MQ: one width for each layer (Li et al. 2023, "Mixed-precision Quantization for Efficient LLM Deployment").

Which width a layer gets is decided over the whole model (`sensitivity.layer_widths`); rounding is GPTQ's. The
inter-layer baseline of MixLLM's and 2/4/16's papers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar

from anybit.config import LayerSpec, Widths, option
from anybit.methods import gptq
from anybit.methods.method import (
    Allocation,
    Compensated,
    Method,
    Search,
    compensation_statistics,
    compensation_work,
)

if TYPE_CHECKING:
    from anybit.formats.layout import LayerLayout


@dataclass(frozen=True, kw_only=True)
class LLMMQ(Compensated):
    name: ClassVar = "llm-mq"
    widths_of: ClassVar = Widths(2, 4, fractional=True)
    for_encoders: ClassVar = False

    symmetric: bool = option(False, "Without zero points.", flag="--symmetric/--asymmetric")


def layout(spec: LayerSpec[Any], shape: tuple[int, int]) -> LayerLayout:
    """What will be stored of a matrix of this shape; before the widths are chosen, as if by rows of the two nearest."""
    from anybit.methods import tiling

    tile = spec.tiles[0]
    if len(spec.tiles) > 1 or tile.rows is not None or float(tile.bits).is_integer():
        return tiling.layout(spec, shape)
    low = int(tile.bits)
    wide = ceil((tile.bits - low) * shape[0] - 1e-9)
    rows = (tuple(range(wide)), tuple(range(wide, shape[0])))
    parts = [replace(tile, bits=bits, rows=r) for bits, r in zip((low + 1, low), rows) if r]
    parts = parts if len(parts) > 1 else [replace(parts[0], rows=None)]
    return tiling.layout(replace(spec, tiles=tuple(parts)), shape)


def stored_sizes(spec: LayerSpec[Any], shape: tuple[int, int]) -> list[int]:
    """Bytes of a matrix of this shape at each of the method's widths."""
    return [layout(with_width(spec, bits), shape).nbytes for bits in LLMMQ.widths_of.whole()]


def with_width(spec: LayerSpec[Any], bits: int) -> LayerSpec[Any]:
    """The spec of a layer that gets `bits` bits."""
    return replace(spec, tiles=(replace(spec.tiles[0], bits=bits),))


def allocate(search: Search) -> Allocation:
    """Widths by an integer program: the least estimated loss within the average width and the planned bytes."""
    from anybit.methods import sensitivity

    stored: Mapping[str, list[int]] = {n: stored_sizes(search.specs[n], s) for n, s in search.shapes.items()}
    limit = sum(search.layouts[n].nbytes for n in stored)
    widths = sensitivity.layer_widths(search, stored, limit)
    return Allocation({n: with_width(search.specs[n], bits) for n, bits in widths.items()})


METHOD = Method(
    LLMMQ,
    title="LLM-MQ: Mixed-precision Quantization for Efficient LLM Deployment",
    paper="Li et al. 2023",
    summary="a width per layer, by an integer program",
    quantize=gptq.compensated,
    layout=layout,
    statistics=compensation_statistics,
    work=lambda options: replace(compensation_work(options), passes=1),
    extra="search",
    allocate=allocate,
    searched=lambda options: [options.group_size],
)
