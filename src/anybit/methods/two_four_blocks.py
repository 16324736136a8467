"""2- and 4-bit blocks of input channels in one matrix: the algorithm of 2/4/16 (10.1145/3676536.3676796).

Blocks of 16 input channels whose weights matter most (eq. 9) get 4 bits, the others 2 bits in small groups whose
scales are rounded a second time (section 3.3). Outliers are taken from 2-bit blocks only (section 4). Errors are
compensated in later channels, block after block in natural order, as GPTQ does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anybit.calibration.stats import LinearStats
from anybit.config import LayerSpec
from anybit.errors import InputError
from anybit.formats import Sparse, TwoFour, TwoFourLayout
from anybit.formats.bits import safe, split_groups
from anybit.formats.layout import LayerLayout
from anybit.formats.two_four import BLOCK, SECOND_GROUP
from anybit.formats.weight import QuantizedWeight
from anybit.methods import clip, grid
from anybit.methods.compensation import inverse_factor
from anybit.methods.two_four_sixteen import TwoFourSixteen, bits_eq10


def layout(spec: LayerSpec[TwoFourSixteen], shape: tuple[int, int]) -> LayerLayout:
    """What `compensate` will store of a matrix of this shape; which blocks and weights stand out is for data to say."""
    narrow = narrow_channels(spec, shape[1])
    tile = TwoFourLayout.of(narrow, shape[1], spec.tiles[0].group_size)
    return LayerLayout(shape, (tile,), _outliers(spec, shape, narrow) or None)


def share_of_wide(bits: float, group_size: int) -> float:
    """The share of 4-bit blocks at which eq. 10 gives `bits`.

    Raises:
        InputError: fewer bits than 2-bit blocks alone take.
    """
    least = bits_eq10(0, group_size)
    if bits < least - 1e-9:
        raise InputError(
            f"2/4/16 in groups of {group_size} takes at least {least:.3f} bits by eq. 10, not {bits:g}: its average "
            "counts scales and zero points"
        )
    return max(0.0, (bits - least) / (4 - least))


def narrow_channels(spec: LayerSpec[TwoFourSixteen], in_features: int) -> int:
    """How many input channels have 2 bits: all but `round(share * in / 16)` blocks, a short last block among them.

    Halves are rounded to the even number.
    """
    tile = spec.tiles[0]
    if len(spec.tiles) != 1 or tile.rows is not None or tile.cols is not None:
        raise InputError("two-four-sixteen chooses channels itself: give one tile without rows and cols")
    if tile.group_size not in (8, BLOCK):
        raise InputError(f"group_size {tile.group_size}: 2-bit groups have 8 or {BLOCK} channels")
    whole = in_features // BLOCK
    share = share_of_wide(tile.bits, tile.group_size)
    blocks = round(
        share * in_features / BLOCK, 9
    )  # without the float errors of the share, which would decide halves
    return in_features - min(whole, round(blocks)) * BLOCK


def compensate(
    weight: Tensor, stats: LinearStats | None, spec: LayerSpec[TwoFourSixteen]
) -> tuple[QuantizedWeight, Tensor]:
    """Quantize `weight` [out, in].

    Args:
        weight: float32 [out, in]; not changed.
        stats: with the Hessian [in, in] of the layer's inputs.
        spec: `tiles[0].bits` (eq. 10), `tiles[0].group_size` (8 or 16), `exclusive_outliers`, `clip`, `damp`.

    Returns:
        the quantized weight, and the weights that it rounded: float32 [out, in], errors before theirs compensated.

    Raises:
        InputError: no Hessian, or one that stays singular; a share or group size that there is not.
    """
    if stats is None or stats.hessian is None:
        raise InputError("2/4/16 needs the Hessian of the layer's inputs: calibrate first")
    shape = (weight.shape[0], weight.shape[1])
    weight = grid.without_dead(weight, stats.hessian.diagonal())
    narrow = narrow_channels(spec, shape[1])
    factor = inverse_factor(stats.hessian.to(weight.device), torch.arange(shape[1]), spec.options.damp)
    wide = _wide_blocks(weight, factor, (shape[1] - narrow) // BLOCK)
    mask = _outlier_mask(weight, wide, _outliers(spec, shape, narrow))
    tile, values = _sweep(weight.clone(), factor, wide, mask, spec)
    sparse = None if mask is None else Sparse.of(values, mask)
    return QuantizedWeight(shape, (tile,), sparse), values


def sensitivity(weight: Tensor, factor: Tensor) -> Tensor:
    """Eq. 9 of every block of 16 input channels: squared weights over the squared diagonal of the inverse Hessian."""
    diagonal = factor.square().sum(0)  # factor^T factor is the inverse
    channels = weight.square().sum(0) / diagonal.square()
    return split_groups(channels[None], BLOCK)[0].sum(-1)


def _wide_blocks(weight: Tensor, factor: Tensor, count: int) -> Tensor:
    """The most sensitive blocks, bool [blocks]; a last block of fewer than 16 channels stays at 2 bits."""
    scores = sensitivity(weight, factor)
    if weight.shape[1] % BLOCK:
        scores[-1] = -1
    wide = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
    wide[torch.argsort(scores, descending=True, stable=True)[:count]] = True
    return wide


def _outliers(spec: LayerSpec[TwoFourSixteen], shape: tuple[int, int], narrow: int) -> int:
    return min(round(spec.options.exclusive_outliers * shape[0] * shape[1]), shape[0] * narrow)


def _outlier_mask(weight: Tensor, wide: Tensor, count: int) -> Tensor | None:
    """The largest weights of the 2-bit blocks, bool [out, in]."""
    if count == 0:
        return None
    size = weight.abs()
    size[:, TwoFour.channels(wide, weight.shape[1])[1]] = -1
    mask = torch.zeros(weight.numel(), dtype=torch.bool, device=weight.device)
    mask[size.flatten().topk(count).indices] = True
    return mask.view(weight.shape)


def _sweep(
    work: Tensor,  # float32 [out, in]; compensated in place
    factor: Tensor,
    wide: Tensor,
    mask: Tensor | None,
    spec: LayerSpec[TwoFourSixteen],
) -> tuple[TwoFour, Tensor]:
    """Block after block: the tile, and the compensated weights as they were when their turn came."""
    (out, c), size, device = work.shape, spec.tiles[0].group_size, work.device
    at_2, at_4 = TwoFour.channels(wide, c)
    tops = TwoFour.scale_tops(len(at_2), c, size)
    cost = factor.diagonal().square().reciprocal()
    made = _Grids(out, len(tops), device)
    wide_scale, wide_zero = torch.zeros(2, out, device=device)
    if len(at_4):
        wide_scale, wide_zero = _fit(work[:, at_4], cost[at_4], 4, spec.options.clip)
    codes = torch.empty(out, c, dtype=torch.uint8, device=device)
    group = 0
    for i, is_wide in enumerate(wide.tolist()):
        a, b = i * BLOCK, min((i + 1) * BLOCK, c)
        errors = torch.empty(out, b - a, device=device)
        if is_wide:
            scale, zero, top = wide_scale[:, None].expand(-1, b - a), wide_zero[:, None].expand(-1, b - a), 15
        else:
            count = -(-(b - a) // size)
            kept = work[:, a:b] if mask is None else work[:, a:b].masked_fill(mask[:, a:b], 0)
            found = made.fit(group, kept, cost[a:b], tops[group : group + count], size, spec.options.clip)
            scale, zero = (t.repeat_interleave(size, 1)[:, : b - a] for t in found)
            top, group = 3, group + count
        for j in range(a, b):
            s, z = scale[:, j - a], zero[:, j - a]
            q = (torch.round(work[:, j] / safe(s)) + z).clamp(0, top)
            if mask is not None:
                q = torch.where(mask[:, j], z, q)
            error = (work[:, j] - s * (q - z)) / factor[j, j]
            if mask is not None:
                error = error.masked_fill(mask[:, j], 0)
            codes[:, j] = q.to(torch.uint8)
            errors[:, j - a] = error
            work[:, j + 1 : b] -= error[:, None] * factor[j, j + 1 : b]
        work[:, b:].addmm_(errors, factor[a:b, b:], alpha=-1)
    half, zero4 = wide_scale.half(), wide_zero.to(torch.uint8)
    return TwoFour(wide, size, codes, *made.stored(), half, zero4), work


class _Grids:
    """Grids of the 2-bit groups while they are fitted."""

    def __init__(self, out: int, groups: int, device: torch.device) -> None:
        self.parts = -(-out // SECOND_GROUP)
        self.zeros, self.codes = torch.zeros(2, out, groups, device=device)
        self.scales, self.scale_zeros = torch.zeros(2, self.parts, groups, device=device)

    def fit(
        self, first: int, weight: Tensor, cost: Tensor, tops: Tensor, size: int, search: bool
    ) -> tuple[Tensor, Tensor]:
        """Scale and zero point of each group of a block, float32 [out, count], the scale rounded to second order."""
        scales, zeros = [], []
        for k, top in enumerate(tops.tolist()):
            part = weight[:, k * size : (k + 1) * size]
            wanted, zero = _fit(part, cost[k * size : (k + 1) * size], 2, search)
            scale = self._second_order(first + k, wanted, float(top))
            zero = torch.round(zero * wanted / safe(scale)).clamp(0, 3)
            self.zeros[:, first + k] = zero
            scales.append(scale)
            zeros.append(zero)
        return torch.stack(scales, 1), torch.stack(zeros, 1)

    def _second_order(self, g: int, scale: Tensor, top: float) -> Tensor:
        """Scales [out] of group g as codes over 16 rows each; returns what the codes stand for."""
        out = len(scale)
        padded = torch.cat([scale, scale[-1:].expand(self.parts * SECOND_GROUP - out)])
        rows = padded.view(self.parts, SECOND_GROUP)
        low, high = rows.amin(1), rows.amax(1)
        step = torch.maximum((high - low) / top, high / (top + 15)).half().float()
        zero = torch.round(low / safe(step)).clamp(0, 15)
        codes = (torch.round(rows / safe(step)[:, None]) - zero[:, None]).clamp(0, top)
        self.scales[:, g], self.scale_zeros[:, g] = step, zero
        self.codes[:, g] = codes.flatten()[:out]
        return (step[:, None] * (codes + zero[:, None])).flatten()[:out]

    def stored(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        byte = torch.uint8
        return self.zeros.to(byte), self.codes.to(byte), self.scales.half(), self.scale_zeros.to(byte)


def _fit(weight: Tensor, cost: Tensor, bits: int, search: bool) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each row of weights [out, n]; clipped for the least compensated error if asked to."""
    width, asymmetric = (torch.tensor([[value]], device=weight.device) for value in (bits, False))
    groups, ratio = weight[:, None], weight.new_ones(1, 1)
    if search:
        ratio = clip.least_of_rows(groups, width, asymmetric, lambda delta: (delta.square() * cost).sum(-1))
    scale, zero = grid.fit(groups, width, asymmetric, ratio)
    return scale[:, 0], zero[:, 0]
