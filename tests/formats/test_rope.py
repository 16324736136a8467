"""Frequencies of rotary embeddings: Transformers' own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from anybit.formats.rope import frequencies, reached
from tests.engine.models import LINEAR, LLAMA3, YARN

THETA = {"rope_theta": 500000.0}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", **THETA},
    "linear": LINEAR,
    "llama3": LLAMA3,
    "llama3 of 8k": LLAMA3 | {"original_max_position_embeddings": 8192, "high_freq_factor": 4.0, **THETA},
    "yarn": YARN,
    "yarn, not truncated": YARN | {"truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn, scaled": YARN | {"mscale": 0.8, "mscale_all_dim": 0.5},
    "yarn, stated": YARN | {"attention_factor": 1.25},
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("head_size", [24, 64, 80, 128])
def test_frequencies_are_those_of_transformers(name: str, head_size: int) -> None:
    config = LlamaConfig(head_dim=head_size, max_position_embeddings=4096, rope_parameters=ROPES[name])
    module = LlamaRotaryEmbedding(config)
    angles, scale = frequencies(config.rope_parameters, head_size, 4096)
    assert angles.dtype == np.float32 and scale == pytest.approx(module.attention_scaling)
    np.testing.assert_allclose(angles, module.inv_freq.numpy(), rtol=3e-7)
    if name == "default":
        assert (angles == module.inv_freq.numpy()).mean() > 0.95


@pytest.mark.parametrize(
    "rope",
    [
        YARN | {"factor": "4"},
        YARN | {"factor": [4.0]},
        YARN | {"factor": 1e308},
        YARN | {"original_max_position_embeddings": None},
        YARN | {"original_max_position_embeddings": "256"},
        {"rope_type": "yarn", "factor": 4.0},
        {"full_attention": "yarn"},
    ],
    ids=str,
)
def test_what_is_no_number_lengthens_nothing(rope: dict[str, Any]) -> None:
    assert reached(YARN, 256) == 1024
    assert reached(rope, 256) == 256 and reached(rope, None) is None
