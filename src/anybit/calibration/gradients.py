"""Gradients of a language model's loss at its linear layers: one backward pass per calibration sample.

Every layer's weight gradient is reduced as soon as it exists, so at most one is alive.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute
from transformers.pytorch_utils import Conv1D

from anybit.calibration.stats import GradientStats, VocabularyStats
from anybit.calibration.streaming import StreamedModel, linear_shape, map_large_arrays
from anybit.errors import InputError
from anybit.kernels.attention import QuickAttention
from anybit.progress import SILENT, Advance, Silent, ignore

GRADIENT_CHUNK = 2**22  # weights whose gradient is alive at a time
LOGIT_CHUNK = 256  # positions whose logits are alive at a time


def gradient_statistics(
    streamed: StreamedModel,
    tokens: Tensor,  # int64 [samples, seq_len], seq_len >= 2
    layers: Iterable[str],
    *,
    fisher: bool | Path = False,
    deltas: Sequence[Callable[[str, int, int], Tensor]] = (),
    vocabulary: VocabularyStats | None = None,
    advance: Advance = ignore,
) -> dict[str, GradientStats]:
    """Global mode: gradients of each sample's mean negative log-likelihood, reduced layer by layer.

    The whole model is loaded; its blocks are recomputed in the backward pass and the logits are made in chunks,
    so that memory is the weights, one block's activations and one linear's weight gradient. On a GPU it also holds the
    Fisher information, float32, until all samples are in: a sample's does not fit through the bus in the time it takes.

    Args:
        streamed: the model; materialised by this call.
        tokens: one backward pass per row.
        layers: names of the linear layers.
        fisher: accumulate the diagonal Fisher information, float32 [out, in] per layer. Where this is a directory, it
            is in the end mapped from files there instead of held in memory; `spilled_statistics` finds it again.
        deltas: perturbations, each a function `delta(name, first, last)` of some rows of a layer's weight, float32
            [rows, in]; they give `products`, one number per perturbation, sample and output channel (MixLLM,
            arXiv:2412.14590, eq. 4), and `diagonal`.
        vocabulary: gets what embedding and head do on these samples.
        advance: called with 1 after each sample.

    Raises:
        InputError: windows too short to predict a token, logits that are not the head's output, or gradients
            that are NaN or Inf.
    """
    if tokens.shape[1] < 2:
        raise InputError("gradients need windows of at least 2 tokens: a window of 1 has nothing to predict")
    model, device = load_for_loss(streamed), streamed.device
    spill = fisher if isinstance(fisher, Path) else None
    mapped = spill if device.type == "cpu" else None  # gathered in the files themselves
    tokens = tokens.to(device)
    stats = {}
    for i, name in enumerate(layers):
        shape = linear_shape(model.get_submodule(name))
        information = None
        if fisher and mapped is not None:
            information = _allocated(_spill_file(mapped, i), shape)
        elif fisher:
            information = torch.zeros(shape, device=device)
        stats[name] = _empty(information, len(deltas), tokens, shape[0])

    def reduce(name: str, x: Tensor, _: Tensor, gradient: Tensor) -> None:
        _add_sample(stats[name], name, x, gradient, deltas)

    with reduced(model, stats, reduce) as embedded, recomputed(streamed.blocks):
        for row in tokens:
            sample_loss(model, row, vocabulary).backward()
            if vocabulary is not None:
                vocabulary.add_sample(row, gradient_of_embedding(model, embedded[0]))
            advance(1)
    for i, (name, s) in enumerate(stats.items()):
        s.check(name)
        if s.fisher is not None and spill is not None and mapped is None:
            s.fisher = _allocated(_spill_file(spill, i), linear_shape(model.get_submodule(name))).copy_(
                s.fisher
            )
    return stats


def _empty(fisher: Tensor | None, deltas: int, tokens: Tensor, out: int) -> GradientStats:
    """Sums of no sample yet: of `out` output channels, for so many perturbations and all `tokens`."""
    products = torch.zeros(deltas, len(tokens), out, device=tokens.device)
    diagonal = torch.zeros(deltas, out, device=tokens.device)
    output_moment, token_moment = torch.zeros(out, device=tokens.device), torch.zeros_like(tokens).float()
    return GradientStats(0, 0, fisher, products, output_moment, diagonal, token_moment)


def _add_sample(
    s: GradientStats,
    name: str,
    x: Tensor,
    gradient: Tensor,
    deltas: Sequence[Callable[[str, int, int], Tensor]],
) -> None:
    """Add a sample's inputs [..., in] and gradients [..., out] of a layer to its sums."""
    assert s.output_moment is not None
    x, gradient = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    s.tokens += len(x)
    squared = gradient.float().square()
    s.output_moment += squared.sum(0)
    s.token_moment[s.samples] = squared.sum(1)
    if s.fisher is not None or deltas:
        rows = max(1, GRADIENT_CHUNK // x.shape[1])
        for a in range(0, gradient.shape[1], rows):
            b = min(a + rows, gradient.shape[1])
            of_weight = (gradient[:, a:b].T @ x).float()  # [rows, in], freed at once
            if s.fisher is not None:
                s.fisher[a:b].addcmul_(of_weight, of_weight)
            for k, delta in enumerate(deltas):
                change = delta(name, a, b).mul_(of_weight)
                s.products[k, s.samples, a:b] = change.sum(1)
                s.diagonal[k, a:b] += change.square_().sum(1)
    s.samples += 1


def spilled_statistics(layers: Mapping[str, tuple[int, int]], spill: Path) -> dict[str, GradientStats] | None:
    """The Fisher information that `gradient_statistics` spilled for the same layers {name: (out, in)}.

    None where a file is missing or has another size.
    """
    for i, (out, in_) in enumerate(layers.values()):
        file = _spill_file(spill, i)
        if not file.is_file() or file.stat().st_size != 4 * out * in_:
            return None
    return {
        name: GradientStats(0, 0, _mapped(_spill_file(spill, i), shape))
        for i, (name, shape) in enumerate(layers.items())
    }


def _spill_file(folder: Path, i: int) -> Path:
    return folder / f"fisher-{i}.bin"


def _allocated(file: Path, shape: tuple[int, int]) -> Tensor:
    """float32 zeros [shape] in a new file whose space is reserved: a mapped write cannot report a full disk.

    Raises:
        InputError: no room.
    """
    with file.open("wb") as stream:
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(stream.fileno(), 0, 4 * shape[0] * shape[1])
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise InputError(
                    f"the disk is full at {file.parent}: make room and run the same command again"
                ) from error
    return _mapped(file, shape).zero_()


def _mapped(file: Path, shape: tuple[int, int]) -> Tensor:
    size = shape[0] * shape[1]
    return torch.from_file(str(file), shared=True, size=size).view(shape)


def load_whole(streamed: StreamedModel, report: Silent = SILENT) -> Any:
    """The full-precision model with all weights in memory, frozen."""
    model = streamed.model
    if not any(parameter.is_meta for parameter in model.parameters()):
        return model
    advance = report.task(f"loading {streamed.checkpoint.source}", len(streamed.blocks))
    for name, module in streamed.outside_modules().items():
        streamed.materialise(module, name)
    model.tie_weights()
    for i in range(len(streamed.blocks)):
        streamed.materialise_block(i)
        advance(1)
    return model.requires_grad_(False)


def sample_loss(model: Any, tokens: Tensor, vocabulary: VocabularyStats | None = None) -> Tensor:
    """Mean negative log-likelihood of tokens [seq_len]; logits are made once, in chunks of positions.

    `vocabulary` gets what the head does.
    """
    targets = tokens[1:, None]

    def likelihood(part: slice, chunk: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        slope, aims = logits.log_softmax(-1), targets[part]
        loss = -slope.gather(1, aims).sum()
        slope.exp_()
        if vocabulary is not None:
            vocabulary.add_head(chunk, slope)
        return loss, slope.scatter_add_(1, aims, slope.new_full(aims.shape, -1.0))

    return head_loss(model, final_hidden(model, tokens[None])[0, :-1], likelihood)


def gradient_of_embedding(model: Any, embedded: Tensor) -> Tensor:
    """The gradient [seq_len, hidden] at what is looked up, of what the embedding gave: Gemma's is scaled."""
    assert embedded.grad is not None
    scale = float(getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0))
    return embedded.grad[0].float() * scale


# Of some positions, their hidden states and their logits: the sum of their losses, and its gradient at the logits.
ChunkLoss = Callable[[slice, Tensor, Tensor], tuple[Tensor, Tensor]]


def head_loss(model: Any, hidden: Tensor, of_chunk: ChunkLoss) -> Tensor:
    """The mean over positions of a loss of the logits that the head makes of hidden states [seq_len, hidden]."""
    loss: Tensor = _HeadLoss.apply(hidden, model, of_chunk)
    return loss


class _HeadLoss(torch.autograd.Function):
    """See `head_loss`.

    The gradient of a chunk is made together with its loss, while its logits are there: they are neither kept for the
    backward pass, [seq_len, vocabulary] in all, nor made a second time in it.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, model: Any, of_chunk: ChunkLoss) -> Tensor:
        gradient = torch.empty_like(hidden)
        total = hidden.new_zeros((), dtype=torch.float32)
        for a in range(0, len(hidden), LOGIT_CHUNK):
            part = slice(a, a + LOGIT_CHUNK)
            with torch.enable_grad():
                chunk = hidden[part].detach().requires_grad_()
                logits = logits_of(model, chunk)
            loss, slope = of_chunk(part, chunk.detach(), logits.detach())
            total += loss
            (gradient[part],) = torch.autograd.grad(logits, chunk, slope.div_(len(hidden)))
        ctx.save_for_backward(gradient)
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0], None, None


def final_hidden(model: Any, tokens: Tensor) -> Tensor:
    """What the head reads, [n, seq_len, hidden]."""
    return model.base_model(input_ids=tokens, use_cache=False, return_dict=True).last_hidden_state


def logits_of(model: Any, hidden: Tensor) -> Tensor:
    """Logits of what the head reads, float32 [..., vocabulary]."""
    return soft_capped(model, model.get_output_embeddings()(hidden).float())


def soft_capped(model: Any, logits: Tensor) -> Tensor:
    """Logits as the model gives them, of what its head puts out."""
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return torch.tanh(logits / cap) * cap if cap else logits


def load_for_loss(streamed: StreamedModel) -> Any:
    """The whole model, whose loss is that of `logits_of`.

    Raises:
        InputError: logits that are not the head's output.
    """
    known = not any(parameter.is_meta for parameter in streamed.model.parameters())
    map_large_arrays()
    model = load_whole(streamed)
    if not known:
        rows = len(model.get_input_embeddings().weight)
        tokens = [rows // 3, rows // 2]  # not both are padding, whose embedding may be 0 and tell nothing
        _check_logits(model, torch.tensor([tokens], device=streamed.device))
    return model


@torch.no_grad()
def _check_logits(model: Any, tokens: Tensor) -> None:
    """`logits_of` are the model's: some architectures scale them, and their loss would silently be another."""
    own = model(input_ids=tokens, use_cache=False, return_dict=True).logits.float()
    ours = logits_of(model, final_hidden(model, tokens))
    if not torch.allclose(ours, own, rtol=0.01, atol=0.01 * float(own.abs().max()), equal_nan=True):
        raise InputError(
            f"{model.config.model_type} changes the logits after its head in a way that anybit does not know: "
            "methods that need gradients do not work for this architecture yet; choose rtn or gptq"
        )


class _ReducedLinear(torch.autograd.Function):
    """A linear layer whose weight gradient goes to a reducer instead of into memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, reduce: Any) -> Tensor:
        out = nn.functional.linear(x, weight, bias)
        ctx.save_for_backward(x, weight, out)
        ctx.reduce = reduce
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, out = ctx.saved_tensors
        ctx.reduce(x, out, gradients[0])
        return gradients[0] @ weight, None, None, None


@contextmanager
def reduced(model: Any, names: Iterable[str], reduce: Any) -> Iterator[list[Tensor]]:
    """Route the named linears through `_ReducedLinear`, and make the embeddings the root of the graph.

    `reduce` gets a layer's name, its inputs, its outputs and their gradient.

    The list has what the embedding gave last, whose gradient is there after a backward pass.
    """
    patched: list[Any] = []
    embedded: list[Tensor] = []

    def root(module: Any, arguments: Any, out: Tensor) -> Tensor:
        embedded[:] = [out.detach().requires_grad_()]
        return embedded[0]

    def forward_of(name: str, module: Any) -> Any:
        weight = module.weight.T if isinstance(module, Conv1D) else module.weight
        return lambda x: _ReducedLinear.apply(x, weight, module.bias, partial(reduce, name))

    for name in names:
        module = model.get_submodule(name)
        module.forward = forward_of(name, module)
        patched.append(module)
    handle = model.get_input_embeddings().register_forward_hook(root)
    try:
        yield embedded
    finally:
        handle.remove()
        for module in patched:
            del module.forward


@contextmanager
def recomputed(blocks: nn.ModuleList) -> Iterator[None]:
    """Recompute each block in the backward pass instead of keeping its activations."""

    def forward_of(original: Any) -> Any:
        def quick(*args: Any, **kwargs: Any) -> Any:
            with QuickAttention():  # in the backward pass, too
                return original(*args, **kwargs)

        return lambda *args, **kwargs: recompute(
            quick, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
        )

    for block in blocks:
        block.forward = forward_of(block.forward)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward
