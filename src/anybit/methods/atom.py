"""Atom: low-bit weights and activations, a few outlier channels at 8 bits (arXiv:2310.19102).

Input channels are sorted by the energy of their activations; those of the most energy come last, as a tile of 8-bit
weights and activations (section 4.1). The others share a grid per group of channels (section 4.2), which weights have
fixed and activations get token by token (section 4.3). Weights are rounded with GPTQ's compensation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from anybit.config import LayerSpec, TileSpec, Widths, at_least, option
from anybit.errors import InputError
from anybit.methods.method import (
    UNCLIPPED_BITS,
    Compensated,
    Method,
    Statistics,
    compensation_statistics,
    compensation_work,
)

if TYPE_CHECKING:
    from torch import Tensor

    from anybit.calibration.stats import LinearStats
    from anybit.formats.layout import LayerLayout
    from anybit.formats.weight import QuantizedWeight

OUTLIER_BITS = 8
MAX_OUTLIERS = 128  # the paper's number, for models from 4096 channels up


@dataclass(frozen=True, kw_only=True)
class Atom(Compensated):
    name: ClassVar = "atom"
    widths_of: ClassVar = Widths(2, 8)

    symmetric: bool = option(True, "Without zero points.", flag="--symmetric/--asymmetric")
    outlier_channels: int | None = option(
        None,
        "Input channels at 8 bits.",
        unset="16 at 576 channels to 128 from 4096",
        layer=True,
        **at_least(1),
    )

    def defaults(self) -> dict[str, Any]:
        bits = int(self.bits or self.default_bits)
        act_bits = bits if self.act_bits is None else self.act_bits
        return super().defaults() | {
            "act_bits": act_bits,
            "act_clip": 0.9 if act_bits < 8 and not self.act_search else 1.0,
            "clip_ratio": 1.0 if self.clip or bits == UNCLIPPED_BITS else 0.85,
        }


def layout(spec: LayerSpec[Atom], shape: tuple[int, int]) -> LayerLayout:
    """What `quantize` will store of a matrix of this shape."""
    from anybit.methods import tiling

    return tiling.layout(split(spec, range(shape[1])), shape)


def outlier_channels(in_features: int) -> int:
    """Outlier channels of a layer by default: 16 at 576 input channels, 48 at 1536, 128 from 4096."""
    return min(MAX_OUTLIERS, max(16, in_features // 512 * 16))


def split(spec: LayerSpec[Atom], order: Sequence[int]) -> LayerSpec[Atom]:
    """The spec of two tiles, of channels in ascending `order` [in].

    Raises:
        InputError: more than one tile already, or no channel left beside the outliers.
    """
    if len(spec.tiles) != 1 or spec.tiles[0].rows is not None or spec.tiles[0].cols is not None:
        raise InputError("atom chooses channels itself: give one tile without rows and cols")
    count = spec.options.outlier_channels or outlier_channels(len(order))
    if count >= len(order):
        raise InputError(
            f"{count} outlier channels of {len(order)} leave none: give fewer (outlier_channels, --outlier-channels)"
        )
    tile, channels = spec.tiles[0], list(order)
    outliers = TileSpec(
        OUTLIER_BITS,
        tile.group_size,
        tile.symmetric,
        cols=tuple(channels[-count:]),
        act_bits=None if spec.options.act_bits == 16 else OUTLIER_BITS,
        outliers=True,
    )
    return replace(spec, tiles=(replace(tile, cols=tuple(channels[:-count])), outliers))


def quantize(weight: Tensor, stats: LinearStats | None, spec: LayerSpec[Atom]) -> QuantizedWeight:
    """Quantize `weight` [out, in] in two tiles of columns.

    Args:
        weight: float32 [out, in].
        stats: Hessian [in, in] and `InputStats` of the layer's inputs.
        spec: `tiles[0].bits`, `act_bits`, `outlier_channels`, clipping, and GPTQ's options.

    Raises:
        InputError: no statistics; see `split` and `compensation.quantize`.
    """
    from anybit.methods import uniform

    return uniform.quantize(_quantize, weight, stats, spec)


def _quantize(weight: Tensor, stats: LinearStats | None, spec: LayerSpec[Any]) -> QuantizedWeight:
    """`quantize` of a matrix that is scaled already."""
    from anybit.methods import compensation

    if stats is None or stats.inputs is None:
        raise InputError("Atom needs the energy of the layer's inputs: calibrate first")
    order = stats.inputs.energy.argsort(stable=True)
    return compensation.quantize(weight, stats, split(spec, order.tolist()))


def statistics(options: Atom) -> Statistics:
    return replace(compensation_statistics(options), inputs=True)


METHOD = Method(
    Atom,
    title="Atom: Low-bit Quantization for Efficient and Accurate LLM Serving",
    paper="arXiv:2310.19102",
    summary="4-bit weights and activations, outlier channels at 8; its paper adds a 4-bit KV-cache, --kv-bits 4",
    compared="atom: bits=4",
    quantize=quantize,
    layout=layout,
    statistics=statistics,
    work=compensation_work,
)
