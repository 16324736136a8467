"""Second moments of the inputs of linear layers, collected while blocks run over calibration text."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anybit.calibration.stats import LinearStats

ACTIVATION_BUDGET = 2 << 30  # bytes of hidden states held in memory; more go to disk
ATTENTION_QUERIES = 256  # queries per sample that value tokens are weighted by


class Activations:
    """Hidden states between two blocks, one [1, seq_len, hidden] per sample; on disk where they are large.

    Others stay on the device that the blocks run on: a sample's way over the bus takes about as long as a block's
    forward pass on it, and a GPU has the 2 GB.
    """

    def __init__(
        self,
        samples: int,
        directory: Path,
        budget: int = ACTIVATION_BUDGET,
        device: torch.device | str = "cpu",
    ) -> None:
        self._kept: list[Tensor | None] = [None] * samples
        self._directory, self._budget, self._device = directory, budget, device
        self._file: Any = None

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, i: int, hidden: Tensor) -> None:
        hidden = hidden.detach().to(self._device).contiguous()
        size = hidden.numel() * hidden.element_size()
        if size * len(self) <= self._budget:
            self._kept[i] = hidden
            return
        if self._file is None:  # anonymous: nothing is left behind, however the process ends
            self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115 - lives as long as self
        self._kept[i] = hidden.new_empty(0).expand(0)
        self._shape, self._dtype, self._size = hidden.shape, hidden.dtype, size
        self._file.seek(i * size)
        self._file.write(hidden.view(torch.uint8).cpu().numpy().data)

    def get(self, i: int) -> Tensor:
        kept = self._kept[i]
        assert kept is not None, f"sample {i} was never put"
        if self._file is None:
            return kept
        self._file.seek(i * self._size)
        buffer = bytearray(self._size)
        self._file.readinto(buffer)
        return torch.frombuffer(buffer, dtype=self._dtype).view(self._shape).to(self._device)


class Collected(Exception):
    """Ends a forward pass of which nothing more is to be collected."""


class Collector(TorchFunctionMode):
    """Collects the input moments of linear layers while blocks run under it (a context manager).

    Layers that read the same tensor (q/k, gate/up) share one `LinearStats`, accumulated once.

    With `attention`, a value projection's tokens count by the attention they receive. Token t's value error
    `d v_t` reaches output i as `a_it d v_t`; neglecting that the errors of different tokens correlate, the squared
    error summed over outputs is `sum_t w_t |d v_t|^2` with `w_t = sum_i a_it^2` over queries and heads. Uniform
    weights miss that most queries attend to the first token, whose value must be exact. (Token importance from
    attention: RSQ, arXiv:2503.01820, there on all layers.) Layers that are not called `v_proj`, and attention that
    is not PyTorch's `scaled_dot_product_attention`, keep uniform weights.

    With `importance` a part of a layer's moments are those of weighted tokens, and the rest those of all tokens alike
    (see `collected`), whatever the attention.

    Args:
        linears: layer name -> module, of one block.
        hessian: collect X^T X; else only the channel norms.
        attention: weight the inputs of layers called `v_proj` by received attention.
        inputs: collect `InputStats` too.
        importance: of layers' tokens, with mean 1: {sample: float32 [seq_len]}, of some of the samples.
        whole: run blocks to their ends. Else, where the first forward pass called every layer once, the next ones end
            with the last layer's inputs: `Collected` is raised.
        plain_share: of the moments, of all tokens alike, where others count by importance; from 0 to 1.
    """

    def __init__(
        self,
        linears: Mapping[str, nn.Module],
        hessian: bool,
        attention: bool = False,
        inputs: bool = False,
        importance: Mapping[str, Mapping[int, Tensor]] | None = None,
        whole: bool = True,
        plain_share: float = 0.5,
    ) -> None:
        super().__init__()
        self.whole, self._each_once, self._plain_share = whole, False, plain_share
        self._called: list[str] = []  # layers, in the current forward
        self._details, self._importance, self._sample = inputs, importance or {}, 0
        self.stats: dict[str, LinearStats] = {}
        self._weighted: dict[str, LinearStats] = {}
        self._linears, self._hessian, self._attention = linears, hessian, attention
        self._inputs: list[tuple[Tensor, str]] = []  # what the current forward's layers read, by first reader
        self._value: tuple[str, Tensor] | None = (
            None  # a value projection's input, until attention tells weights
        )
        self._handles: list[Any] = []

    def __enter__(self) -> Collector:
        for name, module in self._linears.items():
            self._handles.append(module.register_forward_pre_hook(self._hook(name)))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*error)

    def finish_forward(self) -> None:
        """To be called after each forward of the block."""
        if self._value is not None:  # the block's attention is not PyTorch's: all tokens alike
            self._add(*self._value)
        if self._sample == 0:
            self._each_once = self._all_called_once()
        self._inputs, self._value, self._called = [], None, []
        self._sample += 1

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._read(name, args[0])
            self._called.append(name)
            if not self.whole and self._each_once and self._value is None and self._all_called_once():
                raise Collected

        return hook

    def _all_called_once(self) -> bool:
        """Whether the current forward has called every layer, and none again."""
        return sorted(self._called) == sorted(self._linears)

    def _read(self, name: str, x: Tensor) -> None:
        """A layer is about to multiply x."""
        if (importance := self._importance.get(name, {}).get(self._sample)) is not None:
            self._add_weighted(name, x, importance.to(x.device))
        if self._attention and name.endswith(".v_proj") and name not in self._importance:
            self._value = (name, x)
            return
        leader = next((other for known, other in self._inputs if known is x), None)
        if leader is not None:
            self.stats[name] = self.stats[leader]
            return
        self._inputs.append((x, name))
        self._add(name, x)

    def _add(self, name: str, x: Tensor, importance: Tensor | None = None) -> None:
        if name not in self.stats:
            self.stats[name] = LinearStats.empty(x.shape[-1], self._hessian, x.device, self._details)
        self.stats[name].add(x, importance)

    def _add_weighted(self, name: str, x: Tensor, importance: Tensor) -> None:
        if name not in self._weighted:
            self._weighted[name] = LinearStats.empty(x.shape[-1], self._hessian, x.device)
        weighted = x * importance.sqrt()[:, None].to(
            x.dtype
        )  # in the dtype of x, which the native sum is made for
        self._weighted[name].add(weighted)

    def collected(self) -> dict[str, LinearStats]:
        """The statistics of every layer. Those with importance are mixed: `H / n` is `plain_share` of the mean of all
        tokens, and of the mean of weighted ones the rest. To be called once.

        Weights alone would leave few tokens that count: 7 to 20 % of them, as an effective number.
        """
        found = {}
        for name, stats in self.stats.items():
            weighted = self._weighted.pop(name, None)
            found[name] = stats if weighted is None else _mixed(weighted, stats, self._plain_share)
        return found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention and self._value is not None:
            name, x = self._value
            self._value = None
            self._add(name, x, attention_received(*args, **kwargs))
        return func(*args, **kwargs)


def _mixed(weighted: LinearStats, plain: LinearStats, plain_share: float) -> LinearStats:
    """Statistics of as many tokens as `plain` whose mean is between both means; `weighted` is used up."""
    share = (1 - plain_share) * plain.tokens / weighted.tokens
    if weighted.hessian is None or plain.hessian is None:
        return replace(plain, squares=weighted.squares * share + plain.squares * plain_share)
    hessian = weighted.hessian.mul_(share).add_(plain.hessian, alpha=plain_share)
    return replace(plain, squares=hessian.diagonal(), hessian=hessian)


def attention_received(  # noqa: PLR0913 - the signature of PyTorch's attention
    query: Tensor,  # [1, heads, T, d]
    key: Tensor,  # [1, KV heads, T, d]
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Sum of squared attention probabilities that each of T tokens gets from evenly spaced queries, float32 [T]."""
    length = query.shape[2]
    step = max(1, length // ATTENTION_QUERIES)
    picked = torch.arange(step - 1, length, step, device=query.device)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = (query[:, :, picked].float() @ key.float().transpose(-1, -2)) * (
        scale or query.shape[-1] ** -0.5
    )
    if attn_mask is not None:
        mask = attn_mask.expand(*attn_mask.shape[:-2], length, length)[..., picked, :]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if is_causal:
        scores = scores.masked_fill(torch.arange(length, device=query.device) > picked[:, None], -torch.inf)
    return step * scores.softmax(-1).nan_to_num().square().sum((0, 1, 2))
