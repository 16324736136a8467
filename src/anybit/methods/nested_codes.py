"""Nested codes of every output row, compensated for all widths at once: the algorithm of the method anybit.

Error compensation as in GPTQ (arXiv:2210.17323) is made for one width: what it adds to later columns undoes that
width's errors, and codes of another width that share their leading bits are left with errors that nothing undoes. So
here every width keeps its own account. It has its own targets (the weights, and what its own errors so far ask of
them), and a column's code is the one whose leading bits miss the targets of all widths least, by a weighted sum. Any
width then is compensated, those with the larger weights more.

That pass looks only ahead. The next ones revisit every column with all others fixed: cyclic coordinate descent, as
LNQ does in GuidedQuant (arXiv:2505.07004), here on the weighted sum over the widths of `E H E^T`, which never rises.

Rows share the tables of a few shapes (`anybit.formats.tables`) and have a scale each. The input channels with the
largest second moments stay float16 and come first, as nothing need be undone for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
from anybit.methods.compensation import BLOCK, damped_factor

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
        spec: `kept_channels`, `tune_for`, `damp`, `descent`.

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
    hessian = stats.hessian.to(weight.device)
    diagonal = hessian.diagonal()
    kept = diagonal.topk(kept_channels(spec, in_features)).indices.sort().values
    coded = Nested.coded(in_features, kept)
    processed = torch.argsort(diagonal[coded], descending=True, stable=True)
    columns = coded[processed]
    factor, ridge = damped_factor(hessian, torch.cat([kept, columns]), spec.options.damp)
    factor = factor[len(kept) :, len(kept) :].contiguous()
    hessian = hessian[columns][:, columns]
    hessian.diagonal().add_(ridge[len(kept) :])
    work = grid.without_dead(weight, diagonal)[:, columns]
    kinds, scales = dispatch.nested_fit(work, factor.diagonal().square().reciprocal(), _fitting_table(weight))
    scales = to_half(scales)
    grids = _Grids(kinds, scales.float(), shapes.tables().to(weight.device))
    weights = profile(spec.options.tune_for).to(weight.device)
    codes, losses = _coded(work, factor, hessian, grids, weights, spec.options.descent or 0)
    natural = torch.empty_like(codes)
    natural[:, processed] = codes
    losses = _in_nats(losses, stats)
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


def _in_nats(losses: Tensor, stats: LinearStats) -> Tensor:
    """What rows cost at every width, [out, 8], from `E H E^T` and from what an output's error is worth."""
    worth = None if stats.outputs is None else stats.outputs.to(losses.device)
    if worth is None:
        return losses / stats.tokens
    return worth if worth.ndim == 2 else losses * (worth / stats.tokens)[:, None]


def _coded(
    work: Tensor,  # float32 [out, n]
    factor: Tensor,  # float32 [n, n], upper
    hessian: Tensor,  # float32 [n, n], damped
    grids: _Grids,
    weights: Tensor,  # float32 [8]
    passes: int,
) -> tuple[Tensor, Tensor]:
    """Codes uint8 [out, n] at 8 bits and losses float32 [out, 8], some rows at a time."""
    codes = torch.empty_like(work, dtype=torch.uint8)
    losses = work.new_empty(len(work), BITS)
    chunk = CHUNK if work.device.type == "cpu" else DEVICE_CHUNK
    rows = max(1, chunk // (BITS * work.shape[1]))
    for a in range(0, len(work), rows):
        part = slice(a, min(a + rows, len(work)))
        of_row = weights.repeat(part.stop - a, 1)
        codes[part], losses[part] = _sweep(work[part], factor, grids[part], of_row)
        _descend(work[part], hessian, grids[part], of_row, codes[part], losses[part], passes)
    return codes, losses


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


@dataclass(frozen=True)
class _Grids:
    """Where the entries of some rows lie: scale times a shape's table."""

    kinds: Tensor  # uint8 [r]: shapes
    scales: Tensor  # float32 [r]
    tables: Tensor  # float32 [shapes, 2 + 4 + ... + 256]

    def __getitem__(self, rows: slice) -> _Grids:
        return _Grids(self.kinds[rows], self.scales[rows], self.tables)

    def values(self, codes: Tensor, bits: int) -> Tensor:
        """What codes uint8 [r, n] at 8 bits stand for at a width, float32 [r, n]."""
        table = self.tables[self.kinds.long(), 2**bits - 2 : 2 ** (bits + 1) - 2] * self.scales[:, None]
        return table.gather(1, (codes >> (BITS - bits)).long())


def _sweep(
    work: Tensor,  # float32 [r, n]
    factor: Tensor,  # float32 [n, n], upper
    grids: _Grids,
    weights: Tensor,  # float32 [r, 8]
) -> tuple[Tensor, Tensor]:
    """Codes uint8 [r, n] at 8 bits, and the loss of every row at every width, float32 [r, 8]."""
    targets = work.expand(BITS, *work.shape).clone()
    codes = torch.empty_like(work, dtype=torch.uint8)
    losses = work.new_zeros(len(work), BITS)
    for a, b in _blocks(work.shape[1]):
        codes[:, a:b], errors = dispatch.nested_codes(
            targets[:, :, a:b], factor[a:b, a:b], grids.tables, grids.kinds, grids.scales, weights
        )
        losses += errors.square().sum(2).T
        for width, error in enumerate(errors):
            targets[width, :, b:].addmm_(error, factor[a:b, b:], alpha=-1)
    return codes, losses


def _descend(
    work: Tensor,  # float32 [r, n]
    hessian: Tensor,  # float32 [n, n], damped
    grids: _Grids,
    weights: Tensor,  # float32 [r, 8]
    codes: Tensor,  # uint8 [r, n], changed
    losses: Tensor,  # float32 [r, 8], changed
    passes: int,
) -> None:
    """Coordinate descent on the sum over the widths of `weights * E H E^T`, E [r, n] the errors of a width.

    The gradient `E H` is made for a block of columns at a time, from the errors as they then are.
    """
    if passes == 0:
        return
    errors = torch.stack([grids.values(codes, bits) - work for bits in range(1, BITS + 1)])
    for _ in range(passes):
        for a, b in _blocks(work.shape[1]):
            slopes = (errors.view(-1, work.shape[1]) @ hessian[:, a:b]).view(BITS, -1, b - a)
            dispatch.nested_descent(
                slopes, hessian[a:b, a:b], work[:, a:b], grids.tables, grids.kinds, grids.scales, weights,
                codes[:, a:b], errors[:, :, a:b], losses,
            )  # fmt: skip


def _blocks(columns: int) -> Iterator[tuple[int, int]]:
    """First and last column, exclusive, of every block."""
    return ((a, min(a + BLOCK, columns)) for a in range(0, columns, BLOCK))
