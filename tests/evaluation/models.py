"""Tiny models with seeded weights."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig

VOCABULARY = 61
POSITIONS = 32


def seeded(of: type[Any], config: PreTrainedConfig, seed: int = 0) -> Any:
    """A model with random weights; the test's own random numbers are not touched."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return of(config).eval()


def tiny_llama(seed: int, vocabulary: int = VOCABULARY) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=POSITIONS,
        initializer_range=0.5,  # far from uniform, so that the figures differ
    )
    return seeded(LlamaForCausalLM, config, seed)
