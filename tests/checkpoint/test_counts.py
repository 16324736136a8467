"""Numbers of config.json that no model of these files has are refused before any configuration class sees them."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from anybit.checkpoint.counts import LABELS, check_counts, leaves
from anybit.checkpoint.directory import open_checkpoint
from anybit.checkpoint.files import JSON_LIMIT
from anybit.checkpoint.safetensors import StoredTensor
from anybit.errors import InputError
from anybit.formats.dtypes import Dtype
from tests.builders import FAMILIES, MakeModel

HELD = [StoredTensor((100, 100), Dtype.F32, lambda: None)] * 40  # 1.6 MB in 40 tensors


def edit(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def test_a_model_of_millions_of_labels_is_refused_at_once(model_copy: MakeModel) -> None:
    folder = edit(model_copy("llama"), num_labels=30_000_000)
    begun = time.process_time()
    with pytest.raises(InputError, match="num_labels is 30000000, but 10000 is the limit"):
        open_checkpoint(folder)
    assert time.process_time() - begun < 5, "Transformers would take 40 s"


@pytest.mark.parametrize("layers", [-1, 0, 22, 10**12])
def test_layers_are_at_least_one_and_no_more_than_tensors(model_copy: MakeModel, layers: int) -> None:
    with pytest.raises(InputError, match=f"num_hidden_layers is {layers}, but"):
        open_checkpoint(edit(model_copy("llama"), num_hidden_layers=layers))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_labels": LABELS + 1}, "num_labels"),
        ({"text_config": {"num_labels": 10**9}}, "num_labels"),
        ({"id2label": dict.fromkeys(map(str, range(LABELS + 1)), "x")}, "id2label names 10001"),
        ({"text_config": {"n_layer": 41}}, "n_layer is 41, but the files hold only 40 tensors"),
        ({"num_experts": 10**6}, "num_experts"),
        ({"attention_types": [[["global", "local"], 10**9]]}, "attention_types"),
        ({"vocab_size": 2_000_000}, "vocab_size is 2000000, but the files hold only 1600000 bytes"),
        ({"num_attention_heads": 2**30}, "num_attention_heads"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings"),
        ({"n_positions": 2**24 + 1}, "n_positions is 16777217, but 16777216 is the limit"),
        ({"text_config": {"max_position_embeddings": 2**31 - 1}}, "max_position_embeddings"),
        ({"max_seq_len": 2**20 + 1}, "max_seq_len is 1048577, but 1048576 is the limit"),
        ({"n_ctx": 2**31 - 1}, "n_ctx"),
        ({"max_source_positions": 2**31 - 1}, "max_source_positions"),
        ({"anything": [[{"at": [10**30]}]]}, "at is 1000"),
        ({"anything": -(10**30)}, "anything is -1000"),
    ],
)
def test_numbers_that_no_such_model_has(config: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as refusal:
        check_counts("config.json", config, HELD)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 300


def test_numbers_that_models_have() -> None:
    held = {
        "num_hidden_layers": 40,
        "n_layers": 1,
        "decoder_layers": 0,
        "num_labels": LABELS,
        "head_dim": 128,
    }
    usual = {"max_window_layers": 28, "rope_theta": 10**12, "seed": 2**40, "eos_token_id": [128001, 128009]}
    far = {"max_position_embeddings": 10_485_760, "attention_types": [[["global", "local"], 12]]}
    flags = {"use_cache": True, "sliding_window": None, "id2label": {"0": "x"}, "rms_norm_eps": 1e300}
    check_counts("config.json", {**held, **usual, **far, **flags}, HELD)
    check_counts("config.json", {"quantization_config": {"shape": [10**40]}}, HELD)


def test_lists_without_end_are_refused_unread(model_copy: MakeModel) -> None:
    """Parsed, 30 million empty lists would take 3 GB and 40 s."""
    folder = model_copy("llama")
    (folder / "config.json").write_text('{"a": [' + "[]," * JSON_LIMIT + "[]]}")
    begun = time.process_time()
    with pytest.raises(InputError, match=rf"config.json has \d+ bytes, but {JSON_LIMIT} is the limit"):
        open_checkpoint(folder)
    assert time.process_time() - begun < 2


def test_lists_are_walked_where_they_are() -> None:
    """A copy of a long list, with its key at each entry, would take ten times as much."""
    config = {"a": [[]] * 1_000_000, "b": {"c": [1, {"d": "e"}]}}
    tracemalloc.start()
    try:
        assert list(leaves(config)) == [("c", 1), ("d", "e")]
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_nesting_is_no_recursion() -> None:
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    check_counts("config.json", {"deep": deep}, HELD)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_that_are_right_pass(model_dir: MakeModel, family: str) -> None:
    assert open_checkpoint(model_dir(family)).names()
