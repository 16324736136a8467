"""A model inside Transformers, for the server: what the native engine does not run is served one text at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from anybit.engine.engine import Batch, Floats, ends_of
from anybit.engine.sampling import Sampling
from anybit.errors import InputError
from anybit.in_transformers import InTransformers
from anybit.kv_cache import CACHE, QuantizedCache, key_biases, kv_numbers

PROBE = [6, 3, 1, 1, 1]  # tokens at a time
APART = 0.1  # of their range, logits may be apart; a cache that is not kept puts them further


class OneText:
    """Has of `Engine` what the server asks for, at one width and for one text at a time.

    Args:
        inside: the model.
        name: as the user gave it.
        context: most tokens of a text; default: what the model reaches.
        precision: of codebooks, as it was loaded.

    Raises:
        InputError: a context beyond what the model reaches, or a model that does not say how far it reaches; one whose
            logits are others token by token, or whose keys and values are of no known size.
    """

    together = False  # texts wait for each other, and none is drafted

    def __init__(
        self, inside: InTransformers, name: str, context: int | None = None, precision: str = "fp16"
    ) -> None:
        reached = inside.context
        if reached is None and context is None:
            raise InputError(f"{name} does not say how many tokens it reaches: give --context")
        if reached is not None and context is not None and context > reached:
            raise InputError(f"--context {context}: {name} reaches {reached} tokens")
        self._inside, self.name = inside, name
        self.context = context or reached or 0
        self.tokenizer, self.generation = inside.tokenizer, inside.generation
        self.vocabulary: int = inside.vocabulary or len(inside.tokenizer)
        self.kv_bits, self.codebook_precision = inside.kv_bits, precision
        self.threads = torch.get_num_threads()
        levels = getattr(inside.model, "levels", ())
        self.widths = [levels[-1].bits if levels else 16.0]
        self.page_tokens = self.context  # the scheduler's page is a whole text: none is shared
        self._cache: Any = None
        self.page_bytes = self._text_bytes()
        self._check_cache()

    def _text_bytes(self) -> int:
        """Bytes of keys and values of a text as long as the context, scales left out."""
        config = self._inside.model.config.get_text_config()
        bits = self.kv_bits if self.kv_bits != 16 else 8 * self._inside.model.dtype.itemsize
        try:
            return kv_numbers(config) * self.context * bits // 8
        except (AttributeError, TypeError, ValueError, ArithmeticError) as error:
            raise InputError(
                f"{self.name} cannot be served: its config.json does not say how large keys and values are ({error})"
            ) from error

    def _check_cache(self) -> None:
        """Refuse a model that takes no such cache, or computes otherwise with it: some with states of their own do."""
        model, cache = self._inside.model, DynamicCache(config=self._inside.model.config)
        ids = torch.arange(sum(PROBE))[None] * 7 % self.vocabulary
        try:
            with torch.inference_mode():
                whole = model(ids, use_cache=False).logits[0].float()
                parts = [
                    model(part, use_cache=True, **{CACHE: cache}).logits[0].float()
                    for part in ids.split(PROBE, dim=1)
                ]
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise InputError(
                f"{self.name} cannot be served: it does not take its text in parts ({error})"
            ) from error
        apart = float((torch.cat(parts) - whole).abs().max() / (whole.max() - whole.min()).clamp(min=1e-9))
        if apart > APART:
            raise InputError(
                f"{self.name} cannot be served: token by token its logits are {100 * apart:.0f} % of their range apart "
                "from those of a whole text"
            )

    @property
    def level_bytes(self) -> list[int]:
        """Bytes of all weights."""
        tensors = [*self._inside.model.parameters(), *self._inside.model.buffers()]
        return [sum(tensor.nbytes for tensor in tensors)]

    @property
    def ends(self) -> set[int]:
        """Tokens that end a text."""
        return ends_of(self.generation, self.tokenizer)

    def default_sampling(self, **changes: Any) -> Sampling:
        """What generation_config.json asks for."""
        return Sampling.from_generation_config(self.generation | changes)

    window = window_page_bytes = 0

    def give_pages(self, count: int, window_pages: int = 0) -> None:
        """As `Engine` has it: memory is taken as texts grow."""

    def _empty_cache(self) -> Any:
        model = self._inside.model
        if self.kv_bits == 16:
            return DynamicCache(config=model.config)
        return QuantizedCache(model.config, self.kv_bits, key_biases(model))

    def step(self, batch: Batch, level: int) -> Floats:
        """`Engine.step`, of one text, whose first token begins it anew. What is wanted are the last rows.

        Raises:
            InputError: NaN or Inf.
        """
        model, tokens = self._inside.model, batch.tokens
        if batch.positions[0] == 0:
            self._cache = self._empty_cache()
        ids = torch.from_numpy(np.asarray(tokens, np.int64))[None]
        wanted = len(batch.wanted)
        kept = max(1, wanted)
        with torch.inference_mode():
            made = model(ids, use_cache=True, logits_to_keep=kept, **{CACHE: self._cache}).logits[0, -kept:]
        logits: Floats = made.float().numpy()[kept - wanted :]
        if not all(np.isfinite(row).all() for row in logits):  # of a prompt, they may be a gigabyte
            raise InputError(f"{self.name}: its logits hold NaN or Inf: its weights are damaged, or overflow")
        return logits
