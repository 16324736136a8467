"""A quantized KV-cache for Transformers: asymmetric, a scale per head and token (Atom, arXiv:2310.19102, section 4.4).

Keys are quantized after their rotary embedding, and both are turned by a Hadamard matrix first, which spreads a head's
outliers (QuaRot, arXiv:2404.00456, does so inside the model). The native engine rounds alike. What attention gets is
always dequantized, the newest token included: a model computes the same whether its cache was filled at once or token
by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from anybit.config import KV_BITS
from anybit.errors import InputError
from anybit.formats.states import QuantizedStates, rotated

# What models, `generate` and outputs call a cache: Transformers 5.24 renamed it.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class QuantizedLayer(CacheLayerMixin):
    """Keys and values of one layer of attention, quantized; `window` limits how many tokens are kept."""

    is_croppable = True

    def __init__(self, bits: int, window: int | None = None) -> None:
        super().__init__()
        self.bits, self.window = bits, window
        self.is_sliding = window is not None
        self.cumulative_length = 0  # tokens seen
        self._keys: QuantizedStates | None = None
        self._values: QuantizedStates | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add states [batch, heads, tokens, d]; returns all kept ones, dequantized."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = (QuantizedStates.of(rotated(x), self.bits) for x in (key_states, value_states))
        if self._keys is not None and self._values is not None:
            keys, values = self._keys.then(keys), self._values.then(values)
        self.cumulative_length += key_states.shape[2]
        self._keys, self._values = keys, values
        if self.window is not None:
            first = max(0, keys.tokens - self.window + 1)
            self._each(lambda t: t[:, :, first:].clone())  # a view would keep the rest alive
        return rotated(keys.dequantize()), rotated(values.dequantize())

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
        self._each(lambda t: t.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized:
            self._each(lambda t: t.to(self.device, non_blocking=True))

    def reset(self) -> None:
        self._keys = self._values = None
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

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._each(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._each(lambda t: t[indices])

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(states.nbytes for states in (self._keys, self._values) if states is not None)


class QuantizedCache(Cache):
    """A KV-cache of 8, 4, 3 or 2 bits: `model.generate(..., cache=QuantizedCache(model.config, bits=4))`.

    Before Transformers 5.24 the argument is called `past_key_values`.

    Each head of each token takes `d * bits / 8` bytes and 4 for its scale and minimum, `d` its dimension.

    Args:
        config: of the model; which layers attend to a window only is read from it.
        bits: width of the codes.

    Raises:
        InputError: a width that there is not.
    """

    def __init__(self, config: PreTrainedConfig, bits: int) -> None:
        if bits not in KV_BITS[:-1]:
            raise InputError(
                f"a KV-cache of {bits} bits: expected one of {', '.join(map(str, KV_BITS[:-1]))}"
            )
        layers = []
        for layer in DynamicCache(config=config).layers:
            if type(layer) is DynamicLayer:
                layers.append(QuantizedLayer(bits))
            elif type(layer) is DynamicSlidingWindowLayer:
                layers.append(QuantizedLayer(bits, layer.sliding_window))
            else:  # states of another kind of layer, which are few
                layers.append(layer)
        super().__init__(layers=layers)
        self.bits = bits

    @property
    def nbytes(self) -> int:
        """Bytes of all codes, scales and minima."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, QuantizedLayer))


@contextmanager
def quantized_attention(model: Any, bits: int) -> Iterator[None]:
    """Let every forward pass that brings no cache read keys and values of `bits` bits; 16: as ever.

    `generate` brings its own: hand it a `QuantizedCache`.
    """

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if kwargs.get(CACHE) is None:
            kwargs = {**kwargs, CACHE: QuantizedCache(module.config, bits), "use_cache": True}
        return args, kwargs

    handle = model.register_forward_pre_hook(hook, with_kwargs=True) if bits != 16 else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()
