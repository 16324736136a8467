"""Statistics of a model's linear layers over calibration text, in two modes.

`sequential` (GPTQ-like methods): forward passes block by block, input moments collected in hooks.
`global` (salience, Fisher): one backward pass per sample; every layer's weight gradient is reduced as soon as it
exists, so at most one is alive.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute
from transformers.pytorch_utils import Conv1D

from anybit.errors import InputError
from anybit.stats import GradientStats, LinearStats
from anybit.streaming import StreamedModel, linear_shape

ACTIVATION_BUDGET = 2 << 30  # bytes of hidden states held in memory; more go to disk
LOGIT_CHUNK = 256  # positions whose logits are alive at a time


class Activations:
    """Hidden states between two blocks, one [1, seq_len, hidden] per sample; on disk where they are large."""

    def __init__(self, samples: int, directory: Path, budget: int = ACTIVATION_BUDGET) -> None:
        self._kept: list[Tensor | None] = [None] * samples
        self._directory, self._budget = directory, budget
        self._file: Any = None

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, i: int, hidden: Tensor) -> None:
        hidden = hidden.detach().cpu().contiguous()
        size = hidden.numel() * hidden.element_size()
        if size * len(self) <= self._budget:
            self._kept[i] = hidden
            return
        if self._file is None:  # anonymous: nothing is left behind, however the process ends
            self._file = tempfile.TemporaryFile(dir=self._directory)
        self._kept[i] = hidden.new_empty(0).expand(0)
        self._shape, self._dtype, self._size = hidden.shape, hidden.dtype, size
        self._file.seek(i * size)
        self._file.write(hidden.view(torch.uint8).numpy().data)

    def get(self, i: int) -> Tensor:
        kept = self._kept[i]
        assert kept is not None, f"sample {i} was never put"
        if self._file is None:
            return kept
        self._file.seek(i * self._size)
        buffer = bytearray(self._size)
        self._file.readinto(buffer)
        return torch.frombuffer(buffer, dtype=self._dtype).view(self._shape)


@contextmanager
def collecting(linears: Mapping[str, nn.Module], hessian: bool) -> Iterator[dict[str, LinearStats]]:
    """Collect the input moments of linear layers while a block runs under this context.

    Layers that read the same tensor (q/k/v, gate/up) share one `LinearStats`, accumulated once.

    Args:
        linears: layer name -> module.
        hessian: collect X^T X; else only the channel norms.
    """
    stats: dict[str, LinearStats] = {}
    leaders: list[tuple[Tensor, str]] = []  # inputs seen in the current forward and who saw them first
    seen: set[str] = set()

    def hook(name: str, x: Tensor) -> None:
        if name in seen:  # the next forward has begun
            seen.clear()
            leaders.clear()
        seen.add(name)
        leader = next((other for tensor, other in leaders if tensor is x), None)
        if leader is not None and stats.setdefault(name, stats[leader]) is stats[leader]:
            return
        leaders.append((x, name))
        if name not in stats:
            stats[name] = LinearStats.empty(x.shape[-1], hessian, x.device)
        stats[name].add(x)

    def hook_of(name: str) -> Any:
        return lambda module, args: hook(name, args[0])

    handles = [module.register_forward_pre_hook(hook_of(name)) for name, module in linears.items()]
    try:
        yield stats
    finally:
        for handle in handles:
            handle.remove()


def gradient_statistics(
    streamed: StreamedModel,
    tokens: Tensor,  # int64 [samples, seq_len], seq_len >= 2
    layers: Iterable[str],
    *,
    fisher: bool = False,
    deltas: Mapping[str, Tensor] | None = None,
) -> dict[str, GradientStats]:
    """Global mode: gradients of each sample's mean negative log-likelihood, reduced layer by layer.

    The whole model is loaded; its blocks are recomputed in the backward pass and the logits are made in chunks,
    so that memory is the weights, one block's activations and one linear's weight gradient.

    Args:
        streamed: the model; materialised by this call.
        tokens: one backward pass per row.
        layers: names of the linear layers.
        fisher: accumulate the diagonal Fisher information, float32 [out, in] per layer.
        deltas: weight perturbation [out, in] per layer; gives `products`, one number per sample and output
            channel (MixLLM, arXiv:2412.14590, eq. 5).

    Raises:
        InputError: windows too short to predict a token, or gradients that are NaN or Inf.
    """
    if tokens.shape[1] < 2:
        raise InputError("gradients need windows of at least 2 tokens: a window of 1 has nothing to predict")
    model = load_whole(streamed)
    stats = {}
    for name in layers:
        shape = linear_shape(model.get_submodule(name))
        products = torch.zeros(len(tokens), shape[0]) if deltas is not None else None
        stats[name] = GradientStats(0, 0, torch.zeros(shape) if fisher else None, products, torch.zeros(shape[0]))

    def reduce(name: str, x: Tensor, gradient: Tensor) -> None:
        s = stats[name]
        x, gradient = x.reshape(-1, x.shape[-1]).float(), gradient.reshape(-1, gradient.shape[-1]).float()
        s.tokens += len(x)
        s.output_moment += gradient.square().sum(0)
        if s.fisher is not None or deltas is not None:
            of_weight = gradient.T @ x  # [out, in], freed on return
            if s.fisher is not None:
                s.fisher += of_weight.square()
            if s.products is not None and deltas is not None:
                s.products[s.samples] = (of_weight * deltas[name]).sum(1)
        s.samples += 1

    with _reduced(model, stats, reduce), _recomputed(streamed.blocks):
        for row in tokens:
            sample_loss(model, row).backward()
    for name, s in stats.items():
        if not torch.isfinite(s.output_moment).all():
            raise InputError(f"{name}: its gradients hold NaN or Inf on the calibration text; is the checkpoint intact?")
    return stats


def load_whole(streamed: StreamedModel) -> Any:
    """The full-precision model with all weights in memory, frozen."""
    model = streamed.model
    for name, module in streamed.outside_modules().items():
        streamed.materialise(module, name)
    model.tie_weights()
    for i, block in enumerate(streamed.blocks):
        streamed.materialise(block, streamed.block_name(i))
    return model.requires_grad_(False)


def sample_loss(model: Any, tokens: Tensor) -> Tensor:
    """Mean negative log-likelihood of tokens [seq_len], logits made in chunks of positions and recomputed backward."""
    decoder, head = getattr(model, model.base_model_prefix), model.get_output_embeddings()
    hidden = decoder(input_ids=tokens[None], use_cache=False).last_hidden_state[0, :-1]
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)

    def chunk_loss(h: Tensor, target: Tensor) -> Tensor:
        logits = head(h).float()
        logits = torch.tanh(logits / cap) * cap if cap else logits
        return nn.functional.cross_entropy(logits, target, reduction="sum")

    total = hidden.new_zeros((), dtype=torch.float32)
    for a in range(0, len(hidden), LOGIT_CHUNK):
        target = tokens[1 + a : 1 + a + LOGIT_CHUNK]
        total = total + recompute(chunk_loss, hidden[a : a + LOGIT_CHUNK], target, use_reentrant=False)
    return total / len(hidden)


class _ReducedLinear(torch.autograd.Function):
    """A linear layer whose weight gradient goes to a reducer instead of into memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, reduce: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.reduce = reduce
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.reduce(x, gradients[0])
        return gradients[0] @ weight, None, None, None


@contextmanager
def _reduced(model: Any, names: Iterable[str], reduce: Any) -> Iterator[None]:
    """Route the named linears through `_ReducedLinear`, and make the embeddings the root of the graph."""
    patched = []

    def forward_of(name: str, module: Any) -> Any:
        weight = module.weight.T if isinstance(module, Conv1D) else module.weight
        return lambda x: _ReducedLinear.apply(x, weight, module.bias, lambda x, g: reduce(name, x, g))

    for name in names:
        module = model.get_submodule(name)
        module.forward = forward_of(name, module)
        patched.append(module)
    handle = model.get_input_embeddings().register_forward_hook(lambda m, a, out: out.detach().requires_grad_())
    try:
        yield
    finally:
        handle.remove()
        for module in patched:
            del module.forward


@contextmanager
def _recomputed(blocks: nn.ModuleList) -> Iterator[None]:
    """Recompute each block in the backward pass instead of keeping its activations."""

    def forward_of(original: Any) -> Any:
        return lambda *args, **kwargs: recompute(original, *args, use_reentrant=False, **kwargs)

    for block in blocks:
        block.forward = forward_of(block.forward)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward
