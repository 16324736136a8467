"""Block-wise finetuning of 2/4/16 (10.1145/3676536.3676796, section 3.3: "like quantization aware training").

After a block's linears are quantized, their codes, scales and outliers are trained together, so that the block gives
what the unquantized block gives in the unquantized model. What is rounded is rounded in every forward pass, and its
gradient passes straight through (Bengio et al., arXiv:1308.3432). The map of 2- and 4-bit blocks, the positions of
outliers and all zero points stay, hence the layout too.

Deviations: the paper trains the model end to end and does not say how; here it is block after block, on the
calibration windows alone, with a share of them held out to stop early.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

from anybit.calibration.moments import Activations
from anybit.calibration.streaming import BlockCall
from anybit.formats import TwoFour
from anybit.formats.bits import FP16_MAX, safe
from anybit.formats.weight import QuantizedWeight
from anybit.progress import Advance, ignore

HELD_OUT = 8  # every so many calibration windows, one is held out
PATIENCE = 3  # epochs in a row without a new best before a block is left
BATCH_TOKENS = 2048  # at most, per step,
STEPS = 8  # of which an epoch has at least so many, where there are the windows
BETAS = (0.9, 0.95)  # of Adam
CODE_RATE = 0.01  # learning rates: of codes, in codes,
SCALE_RATE = 0.002  # and of everything else, relative to its size
STEP_SECONDS = 2.5e-8  # of a step, per weight and thread: rounding, its gradient and Adam
BYTES_PER_WEIGHT = (
    36  # float32 codes, the best ones, dense weights, both's gradients, two moments; rounding's own
)
SLACK = 0.49  # how far from its code a weight may be
REACH = 2.0  # factor that a scale or outlier may move by


class _StraightThrough(torch.autograd.Function):
    """`rounding(latent)`, whose gradient goes to `latent` as it is."""

    @staticmethod
    def forward(ctx: Any, latent: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
        return rounding(latent)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def _whole(latent: Tensor) -> Tensor:
    return _StraightThrough.apply(latent, torch.round)


def _half(latent: Tensor) -> Tensor:
    return _StraightThrough.apply(latent, lambda values: values.clamp(-FP16_MAX, FP16_MAX).half().float())


class Trainable:
    """A 2/4/16 weight whose codes, scales and outliers can be trained.

    Args:
        start: the quantized weight: a `TwoFour` tile [out, in] and perhaps outliers.
        wanted: float32 [out, in]: the weights that the start's codes were rounded from.
    """

    def __init__(self, start: QuantizedWeight, wanted: Tensor) -> None:
        (tile,) = start.tiles
        assert isinstance(tile, TwoFour)
        self.start, self.tile, self.sparse = start, tile, start.sparse
        c = tile.codes.shape[1]
        narrow, wide = TwoFour.channels(tile.wide, c)
        device = tile.codes.device
        self.top = torch.full((c,), 3.0, device=device).index_fill(0, wide, 15.0)
        self.scale_top = TwoFour.scale_tops(len(narrow), c, tile.group_size).float().to(device)
        codes = tile.codes.float()
        scale = replace(tile, codes=codes + 1).dequantize() - tile.dequantize()
        missed = (wanted - tile.dequantize()) / safe(scale)
        self.codes = codes + missed.masked_fill(scale == 0, 0).clamp(-SLACK, SLACK)
        if self.sparse is not None:
            at = (self.sparse.rows, self.sparse.columns)
            self.codes[at] = codes[at]
        self.scale_codes = tile.scale_codes.float()
        self.scale_factors = torch.ones(tile.scale_scales.shape, device=device)
        self.wide_factors = torch.ones(tile.wide_scales.shape, device=device)
        self.value_factors = torch.ones(0 if self.sparse is None else len(self.sparse.values), device=device)
        for parameter in (self.codes, *self.others()):
            parameter.requires_grad_()

    def others(self) -> list[Tensor]:
        """The parameters besides the codes."""
        return [self.scale_codes, self.scale_factors, self.wide_factors, self.value_factors]

    def rounded(self) -> QuantizedWeight:
        """What the parameters stand for, in float tensors that gradients pass."""
        tile, sparse = self.tile, self.sparse
        made = replace(
            tile,
            codes=_whole(self.codes),
            scale_codes=_whole(self.scale_codes),
            scale_scales=_half(self.scale_factors * tile.scale_scales.float()),
            wide_scales=_half(self.wide_factors * tile.wide_scales.float()),
        )
        if sparse is not None:
            sparse = replace(sparse, values=_half(self.value_factors * sparse.values.float()))
        return replace(self.start, tiles=(made,), sparse=sparse)

    @torch.no_grad()
    def stored(self) -> QuantizedWeight:
        """The same in the types that are stored."""
        made = self.rounded()
        (tile,), sparse = made.tiles, made.sparse
        assert isinstance(tile, TwoFour)
        tile = replace(
            tile,
            codes=tile.codes.to(torch.uint8),
            scale_codes=tile.scale_codes.to(torch.uint8),
            scale_scales=tile.scale_scales.half(),
            wide_scales=tile.wide_scales.half(),
        )
        if sparse is not None:
            sparse = replace(sparse, values=sparse.values.half())
        return replace(made, tiles=(tile,), sparse=sparse)

    def backward(self, gradient: Tensor) -> None:
        """Add to the parameters' gradients, given that of the dequantized weight [out, in]."""
        self.rounded().dequantize().backward(gradient)
        assert self.codes.grad is not None
        if self.sparse is not None:  # under an outlier the dense part holds 0
            self.codes.grad[self.sparse.rows, self.sparse.columns] = 0

    @torch.no_grad()
    def confine(self) -> None:
        """Keep codes where they round to codes, and all else near its start."""
        for codes, top in ((self.codes, self.top), (self.scale_codes, self.scale_top)):
            torch.clamp(codes, torch.full_like(top, -SLACK), top + SLACK, out=codes)
        for factor in (self.scale_factors, self.wide_factors, self.value_factors):
            factor.clamp_(1 / REACH, REACH)


@dataclass(frozen=True)
class Task:
    """A block and what it is to give."""

    block: nn.Module
    call: BlockCall
    inputs: Activations  # of the quantized model so far, [1, seq_len, hidden] per window
    targets: Activations  # the unquantized block's outputs in the unquantized model


@torch.enable_grad()
def finetune(
    task: Task, weights: Mapping[str, Trainable], epochs: int, seed: int, advance: Advance = ignore
) -> tuple[dict[str, QuantizedWeight], list[float]]:
    """Train the linears of a block together.

    Args:
        task: the block; its parameters no longer ask for gradients afterwards, and stay as they are.
        weights: by the linears' names in the block.
        epochs: passes over the windows that are not held out, at most.
        seed: of the windows' order.
        advance: told of passes, `passes(windows, epochs)` in all.

    Returns:
        The weights that are best on the held-out windows, the start among them, and the error there (the mean of
        `_error`) before training and after each epoch; nothing where there are no weights.
    """
    windows = len(task.inputs)
    if not weights:
        advance(passes(windows, epochs))
        return {}, []
    task.block.requires_grad_(False)
    training, held_out = split(windows)
    batch = batch_size(windows, task.inputs.get(0).shape[1])
    others = [p for w in weights.values() for p in w.others()]
    codes = [w.codes for w in weights.values()]
    parameters = [*codes, *others]
    groups = [{"params": codes, "full_rate": CODE_RATE}, {"params": others, "full_rate": SCALE_RATE}]
    optimizer = torch.optim.Adam(groups, betas=BETAS, fused=True)
    steps, step, failures = epochs * ceil(len(training) / batch), 0, 0
    generator = torch.Generator().manual_seed(seed)
    best = [p.detach().clone() for p in parameters]
    errors, best_epoch = [error_of(task, weights, held_out)], 0
    for epoch in range(1, epochs + 1):
        order = [training[i] for i in torch.randperm(len(training), generator=generator).tolist()]
        for a in range(0, len(order), batch):
            _step(task, weights, order[a : a + batch], optimizer, (1 - step / steps) / 2**failures)
            step += 1
        errors.append(error_of(task, weights, held_out))
        advance(passes(windows, 1))
        if errors[epoch] < errors[best_epoch]:
            _copy(parameters, best)
            best_epoch = epoch
        else:  # begin again from the best, at half the rate
            _copy(best, parameters)
            failures += 1
        if epoch - best_epoch == PATIENCE:
            advance(passes(windows, epochs - epoch))
            break
    return {name: w.stored() for name, w in weights.items()}, errors


@torch.no_grad()
def _copy(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    for a, b in zip(source, target):
        b.copy_(a)


def passes(windows: int, epochs: int) -> int:
    """Forward passes of one window that so many epochs take, a backward pass counted as two."""
    training, held_out = split(windows)
    return epochs * (3 * len(training) + len(held_out))


def batch_size(windows: int, seq_len: int) -> int:
    """Windows per step."""
    return max(1, min(BATCH_TOKENS // seq_len, len(split(windows)[0]) // STEPS))


def split(windows: int) -> tuple[list[int], list[int]]:
    """Windows to train on and, evenly spread, to hold out."""
    held_out = list(range(windows - 1, -1, -HELD_OUT))
    return [i for i in range(windows) if i not in held_out], held_out


def _step(
    task: Task,
    weights: Mapping[str, Trainable],
    batch: Sequence[int],
    optimizer: torch.optim.Optimizer,
    rate: float,
) -> None:
    """One step along the gradient of the error over a batch of windows, at a share of the full learning rates."""
    with torch.no_grad():
        dense = {name: w.rounded().dequantize() for name, w in weights.items()}
    for leaf in dense.values():
        leaf.requires_grad_()
    for i in batch:
        _error(task, dense, i).backward()
    optimizer.zero_grad()
    for name, weight in weights.items():  # the graph of one linear at a time
        gradient = dense.pop(name).grad
        assert gradient is not None
        weight.backward(gradient)
    for group in optimizer.param_groups:
        group["lr"] = rate * group["full_rate"]
    optimizer.step()
    for weight in weights.values():
        weight.confine()


@torch.no_grad()
def error_of(task: Task, weights: Mapping[str, Trainable], windows: Sequence[int]) -> float:
    """The mean of `_error` over some windows."""
    dense = {name: w.rounded().dequantize() for name, w in weights.items()}
    return sum(float(_error(task, dense, i)) for i in windows) / len(windows)


def _error(task: Task, dense: Mapping[str, Tensor], window: int) -> Tensor:
    """Mean over a window's tokens of the output's squared error over its squared size."""
    parameters = {}
    for name, weight in dense.items():
        module = task.block.get_submodule(name)
        assert isinstance(module.weight, Tensor)
        parameters[f"{name}.weight"] = (weight.T if isinstance(module, Conv1D) else weight).to(
            module.weight.dtype
        )
    output = functional_call(
        task.block, parameters, (task.inputs.get(window), *task.call.args), task.call.kwargs
    )
    output = output[0] if isinstance(output, tuple) else output
    target = task.targets.get(window).float()
    wrong = (output.float() - target).square().sum(-1)
    return (wrong / target.square().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)).mean()
