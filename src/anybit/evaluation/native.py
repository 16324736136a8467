"""The native engine, as what `evaluation.perplexity` asks for logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from anybit.engine.engine import Engine


class NativeModel(nn.Module):
    """A model of Transformers whose weights an engine has: its configuration, and the engine's logits at a width."""

    device = torch.device("cpu")

    def __init__(self, engine: Engine, config: Any, bits: float | None = None) -> None:
        super().__init__()
        self.engine, self.config, self.bits = engine, config, bits
        self.kv_bits = engine.kv_bits

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        """Logits float32 [1, tokens, vocabulary] of one text, input_ids [1, tokens]."""
        logits = self.engine.logits(input_ids[0].tolist(), self.bits, batch_invariant=False)
        return SimpleNamespace(logits=torch.from_numpy(logits)[None])
