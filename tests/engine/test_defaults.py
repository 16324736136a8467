"""config.json as Transformers completes it, which is the oracle."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from transformers import AutoConfig

from anybit.config import Json
from anybit.engine.defaults import DEFAULTS, LEGACY_ROPE, with_defaults
from anybit.engine.description import FAMILIES, READ, Unsupported

SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 8, "num_attention_heads": 4,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# What files of the hub say, in the words of older versions of Transformers.
OLDER: list[Json] = [
    {"model_type": "llama", "rope_scaling": None},
    {"model_type": "llama", "rope_theta": 5e5, "num_key_value_heads": 2, "rope_scaling": LLAMA3},
    {"model_type": "llama", "rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 2.0},
     "tie_word_embeddings": True},
    {"model_type": "mistral", "rope_theta": 1e6, "sliding_window": None, "head_dim": 16},
    {"model_type": "mistral", "num_key_value_heads": 4},
    {"model_type": "qwen2", "rope_theta": 1e6, "sliding_window": 512, "max_window_layers": 3,
     "use_sliding_window": False},
    {"model_type": "qwen2", "sliding_window": 512, "max_window_layers": 3, "use_sliding_window": True,
     "rope_scaling": YARN | {"original_max_position_embeddings": 512}},
    {"model_type": "qwen3", "rope_theta": 1e6, "rope_scaling": YARN, "attention_bias": True},
    {"model_type": "smollm3", "rope_theta": 5e6, "no_rope_layer_interval": 3},
    {"model_type": "smollm3", "no_rope_layers": [1, 0] * 4, "use_sliding_window": True, "sliding_window": 128},
    {"model_type": "gemma2", "rope_theta": 1e4, "query_pre_attn_scalar": 144, "sliding_window": 100},
    {"model_type": "gemma2", "final_logit_softcapping": None, "attn_logit_softcapping": None},
    {"model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None,
     "sliding_window_pattern": 3, "head_dim": 32},
    {"model_type": "gemma3_text", "rope_theta": 2e6, "rope_local_base_freq": 2e4,
     "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    {"model_type": "gemma3_text", "rope_scaling": {"type": "linear", "factor": 8.0}},
    {"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}},
]  # fmt: skip


def transformers(config: Json) -> Json:
    """What Transformers makes of it, of the fields that the engine reads."""
    given = deepcopy(
        {key: value for key, value in config.items() if key != "model_type"}
    )  # it writes into them
    made = AutoConfig.for_model(config["model_type"], **given).to_dict()
    return {key: value for key, value in made.items() if key in READ[config["model_type"]]}


def alike(raw: Json) -> None:
    expected, found = transformers(raw), with_defaults(raw)
    for field, derived in {"num_key_value_heads": 4, "head_dim": 16}.items():  # `describe` knows them
        if found.get(field) is None:
            found[field] = derived
    for field in expected.keys() - {*LEGACY_ROPE}:
        assert found.get(field) == expected[field], field


@pytest.mark.parametrize("family", FAMILIES)
def test_every_default(family: str) -> None:
    alike(SIZES | {"model_type": family})
    made = transformers(SIZES | {"model_type": family})
    assert {*DEFAULTS[family]} <= made.keys()
    alike(made | {"model_type": family})  # as the installed version writes it


@pytest.mark.parametrize("older", OLDER, ids=lambda config: config["model_type"])
def test_older_files(older: Json) -> None:
    alike(SIZES | older)


@pytest.mark.parametrize(
    ("family", "change", "why"),
    [
        ("gpt2", {}, "its family is 'gpt2'"),
        ("gemma2", {"hidden_activation": None}, "hidden_activation = None"),
        ("mistral", {"num_key_value_heads": None}, "num_key_value_heads = None"),
        ("qwen2", {"layer_types": ["full_attention"]}, "has 1 layer_types for 8 layers"),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters of its own"),
        ("smollm3", {"no_rope_layer_interval": 0}, "is not what the engine reads"),
        ("smollm3", {"no_rope_layers": [0], "use_sliding_window": True, "sliding_window": 9}, "is not what"),
        ("llama", {"rope_scaling": "yarn"}, "is not what the engine reads"),
        ("gemma3_text", {"rope_parameters": ["default"]}, "is not what the engine reads"),
        ("gemma3_text", {"num_hidden_layers": "8"}, "is not what the engine reads"),
    ],
)
def test_what_is_left_to_transformers(family: str, change: Any, why: str) -> None:
    with pytest.raises(Unsupported, match=why):
        with_defaults(SIZES | {"model_type": family} | change)
