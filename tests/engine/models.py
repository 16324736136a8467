"""Small random models of every family that the engine runs, with weights of bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 300
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
# Name: model type, and what of its configuration is not as in `random_model`.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 24, "attention_bias": True, "mlp_bias": True}),
    "smollm2": ("llama", {"tie_word_embeddings": True, "num_attention_heads": 9, "num_key_value_heads": 3,
                          "hidden_size": 72}),
    "smollm3": ("smollm3", {}),
    "mistral": ("mistral", {"sliding_window": 70}),
    "qwen2": ("qwen2", {}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 2,
                                "rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True, "rope_parameters": LINEAR}),
    "gemma2": ("gemma2", {"head_dim": 24, "sliding_window": 40, "query_pre_attn_scalar": 32,
                          "attn_logit_softcapping": 2.0}),
    "gemma3": ("gemma3_text", {"head_dim": 80, "sliding_window": 40, "query_pre_attn_scalar": 32,
                               "final_logit_softcapping": 5.0}),
}  # fmt: skip


def saved_model(folder: Path, tokenizer: Any, family: str, positions: int) -> None:
    """A random model of 16-bit weights, whose end of text is no likely token, as an HF directory."""
    model = random_model(family, vocab_size=len(tokenizer), eos_token_id=0, max_position_embeddings=positions)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def random_model(family: str, **changes: Any) -> Any:
    """A model of 4 blocks whose logits are spread, in float32; its numbers are of bfloat16."""
    kind, own = FAMILIES[family]
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
        "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    config = AutoConfig.for_model(kind, **sizes | own | changes)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(3)
            parameter.copy_(parameter.bfloat16().float())
    return model


def saved(
    folder: Path, tokenizer: Any, family: str = "llama", dtype: torch.dtype = torch.bfloat16, **how: Any
) -> Path:
    """A plain checkpoint of such a model; `how` is for `save_pretrained`."""
    random_model(family, vocab_size=len(tokenizer)).to(dtype).save_pretrained(folder, **how)
    tokenizer.save_pretrained(folder)
    return folder
