"""Tiny models whose attention and logits are computed in ways of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma2Config

SIZES = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4}
COMMON = {"vocab_size": 97, "initializer_range": 0.2, "max_position_embeddings": 64, **SIZES}


def whole_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def gemma2() -> Gemma2Config:
    return Gemma2Config(
        **COMMON,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=8,
        query_pre_attn_scalar=8,
        final_logit_softcapping=2.0,
        attn_logit_softcapping=3.0,
    )
