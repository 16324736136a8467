"""Nested codes of every output row, compensated for all widths at once: the algorithm of the method anybit.

Error compensation as in GPTQ (arXiv:2210.17323) is made for one width: what it adds to later columns undoes that
width's errors, and codes of another width that share their leading bits are left with errors that nothing undoes. So
here every width keeps its own account. It has its own targets (the weights, and what its own errors so far ask of
them), and a column's code is the one whose leading bits miss the targets of all widths least, by a weighted sum. Any
width then is compensated, those with the larger weights more.

Rows share the tables of a few shapes (`anybit.formats.tables`) and have a scale each. The input channels with the
largest second moments stay float16 and come first, as nothing need be undone for them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anybit.calibration.stats import LinearStats
from anybit.config import LayerSpec
from anybit.errors import InputError
from anybit.formats import Nested, NestedLayout
from anybit.formats import tables as shapes
from anybit.formats.base import to_half
from anybit.formats.layout import LayerLayout
from anybit.formats.weight import QuantizedWeight
from anybit.kernels import cpu, dispatch
from anybit.methods import grid
from anybit.methods.anybit import BITS, AnyBit
from anybit.methods.compensation import BLOCK, inverse_factor

CHUNK = 1 << 24  # targets held at a time
DEVICE_CHUNK = (
    1 << 29
)  # the same elsewhere than on the CPU, where a column costs the same for any number of rows
FIT_BITS = 3  # width at which a row's shape and scale are fitted
LEAST = 0.03  # what errors far from the tuned width count: all planes must come close to the weights
RANKED = slice(1, 5)  # widths 2 to 5, whose losses rank rows


def layout(spec: LayerSpec[AnyBit], shape: tuple[int, int]) -> LayerLayout:
    """A matrix of the average width; which layers get more of it, and which less, is for data to say."""
    bits = spec.tiles[0].bits
    some = round((bits - int(bits)) * shape[0])
    counts = [shape[0]] * int(bits) + ([some] if some else [])
    return LayerLayout(shape, (NestedLayout.of(counts, kept_channels(spec, shape[1])),))


def kept_channels(spec: LayerSpec[AnyBit], in_features: int) -> int:
    """How many input channels stay float16."""
    return min(in_features - 1, round(spec.options.kept_channels * in_features))


def profile(tuned: float) -> Tensor:
    """How much the error of each width from 1 to 8 counts where an average of `tuned` bits matters most, float32 [8].

    Errors fall fourfold with a bit, which `4**b` makes up for. Widths up to a bit from `tuned` count alike, farther
    ones less, down to `LEAST`; 1 bit does not count.
    """
    widths = torch.arange(1, BITS + 1)
    far = ((widths - tuned).abs() - 1).clamp(min=0)
    return torch.where(widths == 1, 0.0, 4.0**widths * (10.0 ** (-far / 2)).clamp(min=LEAST))


def quantize(weight: Tensor, stats: LinearStats | None, spec: LayerSpec[AnyBit]) -> QuantizedWeight:
    """Nested codes of `weight` [out, in]: all planes of all rows, rows in order of falling sensitivity.

    Args:
        weight: float32 [out, in]; not changed.
        stats: with the Hessian [in, in] of the layer's inputs, and what ranks rows (`LinearStats.outputs`).
        spec: `kept_channels`, `tune_for`, `damp`.

    Returns:
        the weight, with the `losses` of every stored row at widths 1 to 8.

    Raises:
        InputError: no Hessian, or one that stays singular at a thousandfold damping; no native extension (on the CPU).
    """
    if stats is None or stats.hessian is None:
        raise InputError("the method anybit needs the Hessian of the layer's inputs: calibrate first")
    if weight.device.type == "cpu" and not cpu.available():
        raise InputError(f"the method anybit needs the native extension, which is not there: {cpu.why_not()}")
    out_features, in_features = weight.shape
    diagonal = stats.hessian.to(weight.device).diagonal()
    kept = diagonal.topk(kept_channels(spec, in_features)).indices.sort().values
    coded = Nested.coded(in_features, kept)
    coded_order = torch.argsort(diagonal[coded], descending=True, stable=True)
    factor = inverse_factor(
        stats.hessian.to(weight.device), torch.cat([kept, coded[coded_order]]), spec.options.damp
    )
    factor = factor[len(kept) :, len(kept) :].contiguous()
    work = grid.without_dead(weight, diagonal)[:, coded[coded_order]]
    cost = factor.diagonal().square().reciprocal()
    kinds, scales = dispatch.nested_fit(work, cost, _fitting_table(weight))
    scales = to_half(scales)
    codes = torch.empty_like(work, dtype=torch.uint8)
    losses = work.new_empty(out_features, BITS)
    weights = profile(spec.options.tune_for).to(weight.device)
    chunk = CHUNK if work.device.type == "cpu" else DEVICE_CHUNK
    rows = max(1, chunk // (BITS * work.shape[1]))
    for a in range(0, out_features, rows):
        part = slice(a, min(a + rows, out_features))
        codes[part], losses[part] = _sweep(work[part], factor, kinds[part], scales[part].float(), weights)
    natural = torch.empty_like(codes)
    natural[:, coded_order] = codes
    sensitivity = None if stats.outputs is None else stats.outputs.to(weight.device)
    if sensitivity is not None and sensitivity.ndim == 2:
        losses = sensitivity
    else:
        losses *= 1 / stats.tokens if sensitivity is None else sensitivity[:, None] / stats.tokens
    worth = losses[:, RANKED].clamp(min=1e-30).log().mean(1)
    order = torch.argsort(worth, descending=True, stable=True)
    tile = Nested(
        (out_features,) * BITS,
        order,
        scales[order],
        kinds[order],
        natural[order],
        kept,
        to_half(weight[:, kept])[order],
    )
    return QuantizedWeight((out_features, in_features), (tile,), losses=losses[order])


def fit(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The shape uint8 [r] and scale float32 [r] of every row of `weight` [r, c], all inputs alike."""
    return dispatch.nested_fit(weight.contiguous(), weight.new_ones(weight.shape[1]), _fitting_table(weight))


def rounding(weight: Tensor, kinds: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Rows [r, c] rounded to the nearest entries of their shapes at a width."""
    rounded = torch.empty_like(weight)
    for kind in kinds.unique():
        table, rows = shapes.table(bits)[int(kind)].to(weight.device), kinds == kind
        edges = (table[1:] + table[:-1]) / 2
        rounded[rows] = table[torch.bucketize(weight[rows] / scales[rows, None], edges)]
    return rounded * scales[:, None]


def _fitting_table(weight: Tensor) -> Tensor:
    """The entries of every shape at `FIT_BITS`, beside the weight."""
    return shapes.table(FIT_BITS).contiguous().to(weight.device)


def _sweep(
    work: Tensor,  # float32 [r, n]
    factor: Tensor,  # float32 [n, n], upper
    kinds: Tensor,  # uint8 [r]
    scales: Tensor,  # float32 [r]
    weights: Tensor,  # float32 [8]
) -> tuple[Tensor, Tensor]:
    """Codes uint8 [r, n] at 8 bits, and the loss of every row at every width, float32 [r, 8]."""
    targets = work.expand(BITS, *work.shape).clone()
    codes = torch.empty_like(work, dtype=torch.uint8)
    losses = work.new_zeros(len(work), BITS)
    tables, n = shapes.tables().to(work.device), work.shape[1]
    for a in range(0, n, BLOCK):
        b = min(a + BLOCK, n)
        codes[:, a:b], errors = dispatch.nested_codes(
            targets[:, :, a:b], factor[a:b, a:b], tables, kinds, scales, weights
        )
        losses += errors.square().sum(2).T
        for width, error in enumerate(errors):
            targets[width, :, b:].addmm_(error, factor[a:b, b:], alpha=-1)
    return codes, losses
