"""GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers (arXiv:2210.17323).

Algorithm 1 with blocked lazy updates, on any tiling of widths. Deviations:
group scales are fitted at the group's start from the compensated weights; clipping ratios are searched on
the original weights; whole groups may be processed in order of importance while storage stays natural
(MixLLM, arXiv:2412.14590, section 3.4); the Cholesky factor of the inverse Hessian comes from one
factorisation and one triangular inverse instead of three factorisations.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from anybit.calibration.stats import LinearStats
from anybit.config import LayerSpec
from anybit.errors import InputError
from anybit.formats.weight import QuantizedWeight
from anybit.kernels import dispatch
from anybit.methods import clip, grid
from anybit.methods.method import Compensated
from anybit.methods.tiling import ColumnSet, assemble, column_sets

BLOCK = 128  # columns between lazy updates of the rest of the matrix
DAMP_RETRIES = 3


def quantize(
    weight: Tensor, stats: LinearStats | None, spec: LayerSpec[Compensated], by_energy: bool = False
) -> QuantizedWeight:
    """Quantize `weight` [out, in] column by column, each error compensated in the columns not yet quantized.

    Args:
        weight: float32 [out, in]; not changed.
        stats: with the Hessian [in, in] of the layer's inputs.
        spec: tiling and options (`group_reorder`, `clip`, `damp`).
        by_energy: store columns in order of falling activation energy (act-order).

    Raises:
        InputError: no Hessian, or one that stays singular at a thousandfold damping.
    """
    if stats is None or stats.hessian is None:
        raise InputError("GPTQ needs the Hessian of the layer's inputs: calibrate first")
    shape = (weight.shape[0], weight.shape[1])
    hessian = stats.hessian.to(weight.device)
    diagonal = hessian.diagonal()
    sets = column_sets(spec, shape, weight.device)
    if by_energy:
        sets = [_by_energy(s, diagonal) for s in sets]
    order = _group_order(sets, diagonal, spec.options.group_reorder and not by_energy)
    perm = torch.cat([sets[s].group(g) for s, g in order])
    weight = grid.without_dead(weight, diagonal)
    work = weight[:, perm]
    factor = inverse_factor(hessian, perm, spec.options.damp)
    column_cost = torch.empty_like(diagonal)
    column_cost[perm] = factor.diagonal().square().reciprocal()
    ratios = [
        clip.search_compensated(weight[:, s.cols], s, column_cost[s.cols])
        if spec.options.clip
        else s.fixed_ratio(spec)[:, None].expand(-1, s.groups)
        for s in sets
    ]
    codes, scales, zeros = _sweep(work, factor, sets, order, ratios)
    return assemble(shape, spec, stats, sets, codes, scales, zeros)


def _by_energy(columns: ColumnSet, diagonal: Tensor) -> ColumnSet:
    """The column set stored in order of falling activation energy (act-order)."""
    order = torch.argsort(diagonal[columns.cols], descending=True, stable=True)
    return dataclasses.replace(columns, cols=columns.cols[order], stored=True)


def _group_order(sets: list[ColumnSet], diagonal: Tensor, by_importance: bool) -> list[tuple[int, int]]:
    """(column set, group) pairs in processing order; importance is a group's mean activation energy."""
    order = [(s, g) for s, columns in enumerate(sets) for g in range(columns.groups)]
    if not by_importance:
        return order
    energy = torch.stack([diagonal[sets[s].group(g)].mean() for s, g in order]).tolist()
    return [order[i] for i in sorted(range(len(order)), key=lambda i: -energy[i])]


def inverse_factor(hessian: Tensor, order: Tensor, damp: float) -> Tensor:
    """Upper R with `R^T R = H^-1`, H [in, in] taken in `order` and damped by `damp` times its mean diagonal.

    See `damped_factor`.
    """
    return damped_factor(hessian, order, damp)[0]


def damped_factor(hessian: Tensor, order: Tensor, damp: float) -> tuple[Tensor, Tensor]:
    """Upper R with `R^T R = H^-1`, H [in, in] taken in `order`, and what its diagonal was damped by, in `order`, too.

    That is `damp` times the mean diagonal; each failure of the factorisation damps ten times more. With J the reversal,
    `J H J = L L^T` gives `H = (J L J)(J L J)^T`, J L J upper, so `R = J L^-1 J`: one factorisation, one triangular
    inverse, and three matrices of this size alive at most besides `hessian`.

    Raises:
        InputError: not positive definite at a thousandfold damping.
    """
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    mean = diagonal.mean() if not dead.all() else diagonal.new_ones(())
    reverse = order.flip(0).to(hessian.device)
    for attempt in range(DAMP_RETRIES + 1):
        ridge = torch.where(dead, mean, damp * 10**attempt * mean)[reverse]
        damped = hessian.index_select(0, reverse).index_select(1, reverse)
        damped.diagonal().add_(ridge)
        lower, failed = torch.linalg.cholesky_ex(damped)
        del damped
        if not failed:
            identity = torch.eye(len(lower), device=lower.device)
            inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
            del lower, identity
            if torch.isfinite(inverse.sum()):
                return inverse.flip(0, 1), ridge.flip(0)
    raise InputError(
        f"the Hessian is not positive definite even with {damp * 10**DAMP_RETRIES:g} damping: use more "
        "calibration tokens, or raise damp"
    )


def _sweep(
    work: Tensor,  # float32 [out, in], columns in processing order; compensated in place
    factor: Tensor,  # float32 [in, in], in processing order
    sets: list[ColumnSet],
    order: list[tuple[int, int]],
    ratios: list[Tensor],  # per set: [out, groups]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The column loop of algorithm 1 over groups in processing order: codes, scales and zeros of every set."""
    out_features, device = work.shape[0], work.device
    codes = [torch.empty(out_features, len(s.cols), dtype=torch.uint8, device=device) for s in sets]
    scales = [torch.empty(out_features, s.groups, device=device) for s in sets]
    zeros = [torch.empty_like(scale) for scale in scales]
    start = 0
    for s, g in order:
        columns, size = sets[s], len(sets[s].group(g))
        bits = columns.bits
        scale, zero = grid.fit(work[:, start : start + size], bits, columns.symmetric, ratios[s][:, g])
        scales[s][:, g], zeros[s][:, g] = scale, zero
        top = 2.0**bits - 1
        for offset in range(0, size, BLOCK):
            a, b = start + offset, start + min(offset + BLOCK, size)
            block = work[:, a:b].contiguous()
            q, error = dispatch.gptq_block(block, factor[a:b, a:b].contiguous(), scale, zero, top)
            at = g * columns.group_size + offset
            codes[s][:, at : at + b - a] = q
            work[:, b:].addmm_(error, factor[a:b, b:], alpha=-1)
        start += size
    return codes, scales, zeros
