"""A quantized KV-cache for Transformers: asymmetric, a scale per head and token (Atom, arXiv:2310.19102, section 4.4).

Keys are quantized after their rotary embedding. A part of them that is constant before it is taken away first and put
back when they are read: in models with biases it is far larger than all else. Keys and values are turned by a Hadamard
matrix, which spreads a head's outliers (QuaRot, arXiv:2404.00456, does so inside the model). The native engine rounds
alike. What attention gets is always dequantized, the newest token included: a model computes the same whether its cache
was filled at once or token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from anybit.config import KV_BITS
from anybit.errors import InputError
from anybit.formats.rope import ROPE_TYPES, frequencies
from anybit.formats.states import QuantizedStates, rotated

FIRST = 32  # tokens whose mean is the centre of the keys behind them: a page of the native engine's
# What models, `generate` and outputs call a cache: Transformers 5.24 renamed it.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class Turn:
    """The rotary embedding of a layer: the rotation that a position stands for; without frequencies, none."""

    def __init__(self, frequencies: Tensor | None = None, scale: float = 1.0) -> None:
        self._frequencies, self._scale = frequencies, scale

    def forth(self, states: Tensor, first: int, tokens: int) -> Tensor:
        """States [..., tokens or 1, d] turned as those of positions from `first` on."""
        return self._turned(states, first, tokens, 1.0, self._scale)

    def back(self, states: Tensor, first: int) -> Tensor:
        """States [..., tokens, d] as they were before."""
        return self._turned(states, first, states.shape[-2], -1.0, 1 / self._scale)

    def _turned(self, states: Tensor, first: int, tokens: int, sign: float, scale: float) -> Tensor:
        if self._frequencies is None:
            return states.expand(*states.shape[:-2], tokens, states.shape[-1])
        positions = torch.arange(first, first + tokens, device=states.device, dtype=torch.float32)
        angles = positions[:, None] * self._frequencies.to(states.device)
        cosines, sines = angles.cos() * scale, angles.sin() * (sign * scale)
        x, y = states.chunk(2, -1)
        return torch.cat([x * cosines - y * sines, y * cosines + x * sines], -1)


class QuantizedLayer(CacheLayerMixin):
    """Keys and values of one layer of attention, quantized.

    Keys are less a centre, turned as they are, before they are rounded: their layer's bias in the first `FIRST`
    positions, and behind them the mean of those. That is a constant before the rotary embedding, and most of a key.

    Args:
        bits: width of the codes.
        window: how many tokens are kept; None: all.
        turn: the layer's rotary embedding.
        bias: of its keys [heads, d]; None: none, or one that a norm follows.
    """

    is_croppable = True

    def __init__(
        self, bits: int, window: int | None = None, turn: Turn | None = None, bias: Tensor | None = None
    ) -> None:
        super().__init__()
        self.bits, self.window = bits, window
        self._turn, self._bias = turn or Turn(), bias
        self.is_sliding = window is not None
        self.cumulative_length = 0  # tokens seen
        self._keys: QuantizedStates | None = None
        self._values: QuantizedStates | None = None
        self._sum: Tensor | None = (
            None  # float32 [batch, heads, 1, d]: of the first keys, as they were before
        )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._sum = torch.zeros_like(key_states[:, :, :1], dtype=torch.float32)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add states [batch, heads, tokens, d]; returns all kept ones, dequantized."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        of_first = max(0, FIRST - self.cumulative_length)
        for part in (key_states[:, :, :of_first], key_states[:, :, of_first:]):
            if part.shape[2] > 0:
                self._add_keys(part.float())
        values = QuantizedStates.of(rotated(value_states), self.bits)
        keys, values = self._keys, values if self._values is None else self._values.then(values)
        assert keys is not None
        self._values = values
        read = self._read(keys, self.cumulative_length - keys.tokens).to(self.dtype)
        if self.window is not None:
            first = max(0, keys.tokens - self.window + 1)
            self._each(lambda t: t[:, :, first:].clone())  # a view would keep the rest alive
        return read, rotated(values.dequantize())

    def _add_keys(self, keys: Tensor) -> None:
        """Add keys float32 [batch, heads, tokens, d] that share a centre."""
        at = self.cumulative_length
        rest = QuantizedStates.of(rotated(keys - self._centre(at, keys.shape[2])), self.bits)
        if at < FIRST:
            assert self._sum is not None
            self._sum = self._sum + self._turn.back(self._read(rest, at), at).sum(2, keepdim=True)
        self._keys = rest if self._keys is None else self._keys.then(rest)
        self.cumulative_length += keys.shape[2]

    def _centre(self, first: int, tokens: int) -> Tensor:
        """What keys of positions from `first` on are less, float32 [batch, heads, tokens, d]."""
        assert self._sum is not None
        bias = (
            torch.zeros_like(self._sum)
            if self._bias is None
            else self._bias.float().to(self._sum.device)[:, None]
        )
        of_first = min(max(0, FIRST - first), tokens)
        parts = [
            self._turn.forth(bias.expand_as(self._sum), first, of_first),
            self._turn.forth(self._sum / FIRST, first + of_first, tokens - of_first),
        ]
        return torch.cat(parts, 2)

    def _read(self, rest: QuantizedStates, first: int) -> Tensor:
        """Keys float32 from their codes, of positions from `first` on."""
        return rotated(rest.dequantize()) + self._centre(first, rest.tokens)

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys.map(change), self._values.map(change)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.window is None:
            return self.cumulative_length + query_length, 0
        kept = min(self.cumulative_length, self.window - 1)
        return kept + query_length, self.cumulative_length - kept

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_max_length(self) -> int:
        return -1 if self.window is None else self.window

    def offload(self) -> None:
        self._of_batch(lambda t: t.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized:
            self._of_batch(lambda t: t.to(self.device, non_blocking=True))

    def reset(self) -> None:
        self._keys = self._values = self._sum = None
        self.is_initialized, self.cumulative_length = False, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens.

        Raises:
            ValueError: a positive number, or tokens that a window has already dropped.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give the tokens to remove as a negative number")
        if tokens_to_remove == 0 or self._keys is None:
            return
        if self.window is not None and self.cumulative_length >= self.window:
            raise ValueError(
                "a sliding window cannot be cropped once it is full: its earlier tokens are gone"
            )
        self._each(lambda t: t[:, :, :tokens_to_remove].clone())
        self.cumulative_length += tokens_to_remove
        if self.cumulative_length < FIRST:  # all of them are kept
            keys = self._read(self._keys, 0)
            self._sum = self._turn.back(keys, 0).sum(2, keepdim=True)

    def _of_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        self._each(change)
        self._sum = None if self._sum is None else change(self._sum)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._of_batch(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._of_batch(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._of_batch(lambda t: t[indices])

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(states.nbytes for states in (self._keys, self._values) if states is not None)


class QuantizedCache(Cache):
    """A KV-cache of 8, 4, 3 or 2 bits: `model.generate(..., cache=QuantizedCache(model.config, bits=4))`.

    Before Transformers 5.24 the argument is called `past_key_values`.

    Each head of each token takes `d * bits / 8` bytes and 4 for its scale and minimum, `d` its dimension.

    Args:
        config: of the model; which layers attend to a window only, and their rotary embeddings, are read from it.
        bits: width of the codes.
        biases: of each layer's keys, [heads, d] or None; see `key_biases`. Without them a model that has some loses
            more to the rounding.

    Raises:
        InputError: a width that there is not.
    """

    def __init__(
        self, config: PreTrainedConfig, bits: int, biases: Sequence[Tensor | None] | None = None
    ) -> None:
        if bits not in KV_BITS[:-1]:
            raise InputError(
                f"a KV-cache of {bits} bits: expected one of {', '.join(map(str, KV_BITS[:-1]))}"
            )
        layers = []
        for i, layer in enumerate(DynamicCache(config=config).layers):
            how = _turn(config, i), biases[i] if biases and i < len(biases) else None
            if type(layer) is DynamicLayer:
                layers.append(QuantizedLayer(bits, None, *how))
            elif type(layer) is DynamicSlidingWindowLayer:
                layers.append(QuantizedLayer(bits, layer.sliding_window, *how))
            else:  # states of another kind of layer, which are few
                layers.append(layer)
        super().__init__(layers=layers)
        self.bits = bits

    @property
    def nbytes(self) -> int:
        """Bytes of all codes, scales and minima."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, QuantizedLayer))


def _turn(config: PreTrainedConfig, index: int) -> Turn:
    """The rotary embedding of a layer, where it is of a known type and turns whole heads."""
    text = config.get_text_config()
    rope, types = getattr(text, "rope_parameters", None), getattr(text, "layer_types", None)
    rope = rope.get(types[index], rope) if isinstance(rope, dict) and types else rope
    no_rope = getattr(text, "no_rope_layers", None)
    if (
        not isinstance(rope, dict)
        or rope.get("rope_type") not in ROPE_TYPES
        or (no_rope and not no_rope[index])
    ):
        return Turn()
    if rope.get("partial_rotary_factor", 1) != 1:
        return Turn()
    angles, scale = frequencies(rope, head_size(text), text.max_position_embeddings)
    return Turn(torch.from_numpy(angles), scale)


def kv_heads(config: Any) -> int:
    """Heads that keys and values have, of a configuration of a text model."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def head_size(config: Any) -> int:
    """Numbers of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def kv_numbers(config: Any) -> int:
    """Numbers of a token's keys and values, in all blocks."""
    return 2 * int(config.num_hidden_layers) * kv_heads(config) * head_size(config)


def key_biases(model: Any) -> list[Tensor | None]:
    """The biases of a model's keys by layer, [heads, d]; None where there is none, or a norm follows."""
    found: dict[int, Tensor] = {}
    for name, module in model.named_modules():
        index = getattr(module, "layer_idx", None)  # which attention of a vision tower has not
        if not name.endswith(".self_attn") or not isinstance(index, int):
            continue
        bias = getattr(getattr(module, "k_proj", None), "bias", None)
        if bias is not None and getattr(module, "k_norm", None) is None and hasattr(module, "head_dim"):
            found[index] = bias.detach().view(-1, module.head_dim)
    return [found.get(i) for i in range(max(found, default=-1) + 1)]


@contextmanager
def quantized_attention(model: Any, bits: int) -> Iterator[None]:
    """Let every forward pass that brings no cache read keys and values of `bits` bits; 16: as ever.

    `generate` brings its own: hand it a `QuantizedCache`.
    """

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if kwargs.get(CACHE) is None:
            kwargs = {**kwargs, CACHE: QuantizedCache(module.config, bits, biases), "use_cache": True}
        return args, kwargs

    biases = key_biases(model)
    handle = model.register_forward_pre_hook(hook, with_kwargs=True) if bits != 16 else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()
