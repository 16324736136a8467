"""How far a model reaches, by its configuration and its modules."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModel, BertConfig, GPT2Config, LlamaConfig, OPTConfig, PreTrainedConfig

from anybit.checkpoint.architectures import max_positions
from tests.engine.models import YARN

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA = LlamaConfig(**SIZES, intermediate_size=16, max_position_embeddings=256)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, 1024),
        (BertConfig(**SIZES, intermediate_size=16, max_position_embeddings=64), 64),
        (GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=64), 64),
        (OPTConfig(**SIZES, ffn_dim=16, word_embed_proj_dim=16, max_position_embeddings=64), 64),
    ],
    ids=lambda case: getattr(case, "model_type", ""),
)
def test_yarn_lengthens_no_table(config: PreTrainedConfig, expected: int) -> None:
    """A stray `rope_parameters` in a config.json of learned positions means nothing."""
    config.rope_parameters = YARN
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    assert max_positions(model) == expected


def test_parameters_that_are_no_numbers_lengthen_nothing() -> None:
    with torch.device("meta"):
        model = AutoModel.from_config(LLAMA)
    model.config.rope_parameters = YARN | {"factor": "4"}
    assert max_positions(model) == 256
