"""Nested codes of every output row, compensated for all widths at once: the algorithm of the method anybit.

Error compensation as in GPTQ (arXiv:2210.17323) is made for one width: what it adds to later columns undoes that
width's errors, and codes of another width that share their leading bits are left with errors that nothing undoes. So
here every width keeps its own account. It has its own targets (the weights, and what its own errors so far ask of
them), and a column's code is the one whose leading bits miss the targets of all widths least, by a weighted sum. Any
width then is compensated, those with the larger weights more.

That pass looks only ahead. The next ones revisit every column with all others fixed: cyclic coordinate descent, as
LNQ does in GuidedQuant (arXiv:2505.07004), here on the weighted sum over the widths of `E H E^T`. It never rises, but
for the rounding of products.

Rows share the tables of a few shapes (`anybit.formats.tables`) and have a scale each. The input channels with the
largest second moments come first, at 8 bits for all widths, and all others make up for their rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from anybit.calibration.stats import LinearStats, VocabularyCost
from anybit.config import LayerSpec
from anybit.errors import InputError
from anybit.formats import Nested, NestedLayout
from anybit.formats import tables as shapes
from anybit.formats.base import to_half
from anybit.formats.layout import LayerLayout
from anybit.formats.nested import GAIN_BITS, GAIN_STEP, KEPT_UNIT, MOST_KEPT, codes_of_kept, weights_of_kept
from anybit.formats.weight import QuantizedWeight
from anybit.kernels import cpu, dispatch
from anybit.methods import grid
from anybit.methods.anybit import BITS, AnyBit, vocabulary_spec
from anybit.methods.compensation import BLOCK, damped_factor

CHUNK = 1 << 24  # targets held at a time
DEVICE_CHUNK = (
    1 << 29
)  # the same elsewhere than on the CPU, where a column costs the same for any number of rows
KEPT_RANGES = (1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)  # see `keep`: shares of the largest
MOST_RATIO = 1024  # see `reaching`: of SmolLM2's matrices the largest is 547
FIT_BITS = 3  # width at which a row's shape and scale are fitted
LEAST = 0.03  # what errors far from the tuned width count: all planes must come close to the weights
VOCABULARY_FACTOR = 1.5  # errors of embedding and head count so much more than is estimated (docs/log.md)
GAIN = 0.5  # power of what is missing of a row's outputs, by which its gain makes up for it (docs/log.md)
MOST_MISSING = 0.5  # more than a gain can make up for
RANKED = slice(1, 5)  # widths 2 to 5, whose losses rank rows
TRUST = 0.75  # power of the losses of a layer's rows: other texts differ from the few tokens that they are known from


def layout(spec: LayerSpec[AnyBit], shape: tuple[int, int]) -> LayerLayout:
    """A matrix of the average width; which layers get more of it, and which less, is for data to say."""
    bits = spec.tiles[0].bits
    some = round((bits - int(bits)) * shape[0])
    counts = [shape[0]] * int(bits) + ([some] if some else [])
    kept, options = kept_channels(spec, shape[1]), spec.options
    return LayerLayout(
        shape, (NestedLayout.of(counts, kept, gains=options.gains, kept_bits=options.kept_bits),)
    )


def kept_channels(spec: LayerSpec[AnyBit], in_features: int) -> int:
    """How many input channels are kept at more bits."""
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
        spec: `kept_channels`, `kept_bits`, `tune_for`, `damp`, `descent`, `gains`.

    Returns:
        the weight, with the `losses` of every stored row at widths 1 to 8.

    Raises:
        InputError: no Hessian, or one that stays singular at a thousandfold damping; no native extension (on the CPU).
    """
    if stats is None or stats.hessian is None:
        raise InputError("the method anybit needs the Hessian of the layer's inputs: calibrate first")
    made = _made(weight, stats.hessian.to(weight.device), spec)
    return made.weight(_in_nats(made.losses, stats))


def quantize_vocabulary(weight: Tensor, cost: VocabularyCost, options: AnyBit) -> QuantizedWeight:
    """Nested codes of an embedding, of a head, or of a matrix that is both: `weight` [vocabulary, hidden].

    Args:
        weight: float32; not changed.
        cost: of errors, by what the matrix does.
        options: see `quantize`.

    Returns:
        the weight, whose `losses` rank its rows beside those of linear layers.

    Raises:
        InputError: see `quantize`.
    """
    made = _made(weight, cost.hessian().to(weight.device), vocabulary_spec(options))
    losses = torch.empty_like(made.losses)
    for rows in _row_slices(weight, made.codes.shape[1]):
        own, errors = weight[rows][:, made.coded], torch.empty_like(weight[rows])
        errors[:, made.kept.channels] = made.kept.weights[rows] - weight[rows][:, made.kept.channels]
        for bits in range(1, BITS + 1):
            errors[:, made.coded] = made.grids[rows].values(made.codes[rows], bits) - own
            losses[rows, bits - 1] = VOCABULARY_FACTOR * cost.of(errors, rows)
    return made.weight(losses)


@dataclass(frozen=True)
class _Made:
    """Codes of all rows, which are in their own order still."""

    codes: Tensor  # uint8 [out, n] at 8 bits, channels in natural order
    losses: Tensor  # float32 [out, 8]: E H E^T
    grids: Grids
    coded: Tensor  # int64 [n] channels that have codes
    kept: Kept  # others
    gains: Tensor | None  # uint8 [out], see `formats.Nested`

    def weight(self, losses: Tensor) -> QuantizedWeight:
        """The stored matrix, of rows that cost float32 [out, 8]."""
        worth = losses[:, RANKED].clamp(min=1e-30).log().mean(1)
        order = torch.argsort(worth, descending=True, stable=True)
        grids, codes, kept = self.grids, self.codes[order], self.kept
        tile = Nested(
            counts=(len(order),) * BITS,
            order=order,
            scales=to_half(grids.scales)[order],
            shapes=grids.kinds[order],
            codes=codes,
            kept=kept.channels,
            kept_values=kept.values[order],
            gains=None if self.gains is None else self.gains[order],
            kept_scales=kept.scales,
        )
        shape = (len(order), len(self.coded) + len(kept.channels))
        return QuantizedWeight(shape, (tile,), losses=losses[order])


def _made(weight: Tensor, hessian: Tensor, spec: LayerSpec[AnyBit]) -> _Made:
    """Codes of a matrix, some rows at a time; all share the scales of kept channels."""
    if weight.device.type == "cpu" and not cpu.available():
        raise InputError(f"the method anybit needs the native extension, which is not there: {cpu.why_not()}")
    diagonal = hessian.diagonal()
    kept = diagonal.topk(kept_channels(spec, weight.shape[1])).indices.sort().values
    coded = Nested.coded(weight.shape[1], kept)
    processed = torch.argsort(diagonal[coded], descending=True, stable=True)
    columns = coded[processed]
    factor, ridge = damped_factor(hessian, torch.cat([kept, columns]), spec.options.damp)
    of_kept = factor[: len(kept)].clone()  # the large factor can go
    factor = factor[len(kept) :, len(kept) :].contiguous()
    within = hessian[columns][:, columns]
    within.diagonal().add_(ridge[len(kept) :])
    importance, weights = factor.diagonal().square().reciprocal(), profile(spec.options.tune_for)
    codes = weight.new_empty(len(weight), len(coded), dtype=torch.uint8)
    losses = weight.new_empty(len(weight), BITS)
    kinds, scales = codes.new_empty(len(weight)), weight.new_empty(len(weight))
    steps = codes.new_zeros(len(weight)) if spec.options.gains else None
    tables = shapes.tables().to(weight.device)

    def columns_of(rows: slice) -> Tensor:
        return grid.without_dead(weight[rows], diagonal)[:, columns]

    for rows in _row_slices(weight, len(coded)):
        kinds[rows], scales[rows] = dispatch.nested_fit(columns_of(rows), importance, _fitting_table(weight))
    if spec.options.kept_bits == 8:
        scales = reaching(scales, weight[:, kept])
    scales = to_half(scales).float()
    held = keep(weight, kept, scales, of_kept, spec.options.kept_bits)  # all rows: they share scales
    for rows in _row_slices(weight, len(coded)):
        work = columns_of(rows)
        if held.scales is not None:
            work -= held.errors[rows] @ of_kept[:, len(kept) :]
        grids = Grids(kinds[rows], scales[rows], tables)
        of_row = weights.to(weight.device).repeat(len(work), 1)
        part, losses[rows] = _sweep(work, factor, grids, of_row)
        _descend(work, within, grids, of_row, part, losses[rows], spec.options.descent or 0)
        if steps is not None:
            steps[rows] = _gains(work, within, grids, part, losses[rows])
        losses[rows] += held.errors[rows].square().sum(1, keepdim=True)
        codes[rows, processed] = part
    return _Made(codes, losses, Grids(kinds, scales, tables), coded, held, steps)


@dataclass(frozen=True)
class Kept:
    """The channels that have no codes in planes, and their weights."""

    channels: Tensor  # int64 [k], ascending
    values: Tensor  # [out, k]: float16, or int8 with
    scales: Tensor | None  # float16 [k], see `formats.Nested`
    weights: Tensor  # float32 [out, k]: what they stand for
    errors: Tensor  # float32 [out, k]: what is off, over each channel's diagonal entry of the factor


def keep(weight: Tensor, channels: Tensor, scales: Tensor, factor: Tensor, bits: int) -> Kept:
    """Store the weights of some channels at `bits`, 8 or 16.

    At 8 bits they are rounded one channel after the other, the next ones making up for it as in GPTQ. Codes reach a
    channel's largest weight over its row's scale, or that of `KEPT_RANGES` with the least squared error.

    Args:
        weight: float32 [out, in].
        channels: int64 [k], ascending.
        scales: float32 [out], of rows, far enough for these weights (`reaching`).
        factor: float32 [k, in]: the first rows of the factor of the inverse Hessian, these channels first.
        bits: of a weight.

    Returns:
        what is stored, and the errors that columns behind these channels are to make up for.

    Raises:
        InputError: at 16 bits, weights that float16 does not reach.
    """
    given = weight[:, channels]
    if bits == 16 or not len(channels):
        half = to_half(given)
        return Kept(channels, half, None, half.float(), torch.zeros_like(given))
    rest, errors, weights = given.clone(), torch.zeros_like(given), torch.zeros_like(given)
    values, of_channels = torch.zeros_like(given, dtype=torch.int8), given.new_zeros(len(channels)).half()
    ranges = torch.tensor(KEPT_RANGES).to(given.device) / (MOST_KEPT**2 * KEPT_UNIT)
    limits = torch.finfo(torch.float16)
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    for j in range(len(channels)):
        column = rest[:, j, None]
        tried = ranges * (rest[:, j] * inverse).abs().max()
        tried = tried.clamp(limits.smallest_normal, limits.max).half()  # smaller ones have fewer bits
        codes = codes_of_kept(column, scales, tried)
        found = weights_of_kept(codes, scales, tried)
        best = (found - column).square().sum(0).argmin()
        of_channels[j], values[:, j], weights[:, j] = tried[best], codes[:, best], found[:, best]
        errors[:, j] = (rest[:, j] - weights[:, j]) / factor[j, j]
        rest[:, j + 1 :] -= errors[:, j : j + 1] * factor[j, j + 1 : len(channels)]
    return Kept(channels, values, of_channels, weights, errors)


def reaching(scales: Tensor, kept: Tensor) -> Tensor:
    """Scales of rows [out], larger where their kept weights [out, k] are far beyond what those of other rows are.

    Codes of a kept channel have one scale for all rows. Over its row's scale, a weight may be up to `MOST_RATIO` times
    as large as that of the median row.

    Args:
        scales: float32 [out].
        kept: float32 [out, k], the weights.
    """
    if not kept.numel():
        return scales
    ratios = kept.abs() / scales[:, None]
    there = ratios.isfinite() & (ratios > 0)
    usual = torch.where(there, ratios, torch.nan).nanmedian(0).values.nan_to_num(1.0)
    return torch.maximum(scales, (kept.abs() / (MOST_RATIO * usual)).amax(1))


def _row_slices(weight: Tensor, columns: int) -> Iterator[slice]:
    """Rows that are worked on at a time."""
    chunk = CHUNK if weight.device.type == "cpu" else DEVICE_CHUNK
    rows = max(1, chunk // (BITS * columns))
    return (slice(a, min(a + rows, len(weight))) for a in range(0, len(weight), rows))


def _in_nats(losses: Tensor, stats: LinearStats) -> Tensor:
    """What rows cost at every width, [out, 8], from `E H E^T` and from what an output's error is worth (`_evened`).

    Without gradients rows cost what their errors do, whatever the text.
    """
    worth = None if stats.outputs is None else stats.outputs.to(losses.device)
    if worth is None:
        return losses / stats.tokens
    return _evened(worth if worth.ndim == 2 else losses * (worth / stats.tokens)[:, None])


def _evened(losses: Tensor) -> Tensor:
    """Losses [out, 8] that differ less from row to row, each width's sum as it was.

    What other texts ask of a row lies between what the calibration text does and the mean of its layer.
    """
    losses = losses.clamp(min=0)
    made = losses**TRUST
    return made * (losses.sum(0) / made.sum(0).clamp(min=1e-30))


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
class Grids:
    """Where the entries of some rows lie: scale times a shape's table."""

    kinds: Tensor  # uint8 [r]: shapes
    scales: Tensor  # float32 [r]
    tables: Tensor  # float32 [shapes, 2 + 4 + ... + 256]

    def __getitem__(self, rows: slice) -> Grids:
        return Grids(self.kinds[rows], self.scales[rows], self.tables)

    def values(self, codes: Tensor, bits: int) -> Tensor:
        """What codes uint8 [r, n] at 8 bits stand for at a width, float32 [r, n]."""
        table = self.tables[self.kinds.long(), 2**bits - 2 : 2 ** (bits + 1) - 2] * self.scales[:, None]
        return table.gather(1, (codes >> (BITS - bits)).long())


def _sweep(
    work: Tensor,  # float32 [r, n]
    factor: Tensor,  # float32 [n, n], upper
    grids: Grids,
    weights: Tensor,  # float32 [r, 8]
) -> tuple[Tensor, Tensor]:
    """Codes uint8 [r, n] at 8 bits, and the loss of every row at every width, float32 [r, 8]."""
    targets = work.expand(BITS, *work.shape).clone()
    codes = torch.empty_like(work, dtype=torch.uint8)
    losses = work.new_zeros(len(work), BITS)
    ahead = factor.to(_product_dtype(work))
    for a, b in _blocks(work.shape[1]):
        codes[:, a:b], errors = dispatch.nested_codes(
            targets[:, :, a:b], factor[a:b, a:b], grids.tables, grids.kinds, grids.scales, weights
        )
        losses += errors.square().sum(2).T
        for width, error in enumerate(errors):
            if ahead is factor:
                targets[width, :, b:].addmm_(error, factor[a:b, b:], alpha=-1)
            else:
                targets[width, :, b:] -= error.to(ahead.dtype) @ ahead[a:b, b:]
    return codes, losses


def _descend(
    work: Tensor,  # float32 [r, n]
    hessian: Tensor,  # float32 [n, n], symmetric, damped
    grids: Grids,
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
    dtype = _product_dtype(work)
    rounded, columns = errors.to(dtype), hessian.to(dtype)
    for _ in range(passes):
        for a, b in _blocks(work.shape[1]):
            slopes = (rounded.view(-1, work.shape[1]) @ columns[a:b].T).float().view(BITS, -1, b - a)
            dispatch.nested_descent(
                slopes, hessian[a:b, a:b], work[:, a:b], grids.tables, grids.kinds, grids.scales, weights,
                codes[:, a:b], errors[:, :, a:b], losses,
            )  # fmt: skip
            if rounded is not errors:
                rounded[:, :, a:b] = errors[:, :, a:b]


def _product_dtype(work: Tensor) -> torch.dtype:
    """What errors are multiplied in by Hessians and factors.

    These products take most of the time in wide layers. In bfloat16 they are off by 2^-9 at random, which is little
    beside what the choice of a code leaves: losses on other text stay as they are (docs/log.md), and those that are
    returned are off by some thousandths at most. On a GPU the columns take the time, one after the other.
    """
    return dispatch.compute_dtype() if work.device.type == "cpu" else torch.float32


def _gains(work: Tensor, hessian: Tensor, grids: Grids, codes: Tensor, losses: Tensor) -> Tensor:
    """Gains of rows of few bits, uint8 [r] as they are stored; the losses [r, 8] become those with them.

    Codes that err least give less than they should: of an output `y` a row gives `s y`, and an error that does not go
    with `y`. What is missing is missing in every layer and adds up along the model, while errors differ in sign. A
    gain of `s^(-1/2)` stands between the least error and an output that is right on average.
    """
    heard = work @ hessian
    energy = (heard * work).sum(1, keepdim=True)  # W H W^T
    widths = range(1, GAIN_BITS + 1)
    common = torch.stack([(heard * grids.values(codes, bits)).sum(1) for bits in widths], 1)  # Q H W^T
    missing = ((energy - common[:, 1:]) / energy.clamp(min=1e-30)).clamp(0, MOST_MISSING)
    steps = (((1 - missing) ** -GAIN - 1) / GAIN_STEP).round().clamp(max=15)  # [r, 2]: of 2 bits, and of 3
    gain = 1 + GAIN_STEP * torch.cat([steps[:, :1], steps], 1)
    own = losses[:, :GAIN_BITS] + 2 * common - energy  # Q H Q^T
    losses[:, :GAIN_BITS] += (gain - 1) * ((gain + 1) * own - 2 * common)
    return (16 * steps[:, 1] + steps[:, 0]).to(torch.uint8)


def _blocks(columns: int) -> Iterator[tuple[int, int]]:
    """First and last column, exclusive, of every block."""
    return ((a, min(a + BLOCK, columns)) for a in range(0, columns, BLOCK))
