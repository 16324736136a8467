"""Generation configs: what counts where one sequence is made, and what no such file says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from anybit.checkpoint.directory import open_checkpoint
from anybit.checkpoint.generation import (
    DRAWING,
    IN_TRANSFORMERS,
    SAMPLED_BY_TRANSFORMERS,
    TOKENS,
    for_one_sequence,
)
from anybit.errors import InputError
from tests.builders import MakeModel


def test_what_counts_is_kept_and_the_rest_is_not() -> None:
    stored = GenerationConfig(
        eos_token_id=[1, 7], top_k=20, top_p=0.8, repetition_penalty=1.05, num_beams=4, num_return_sequences=3,
        output_hidden_states=True, stop_strings=["x"], bos_token_id=10**9, pad_token_id=-1, max_length=5,
    )  # fmt: skip
    made = for_one_sequence("m", stored.to_dict(), 8)
    assert made == {"eos_token_id": [1, 7], "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}


def test_there_need_be_none() -> None:
    assert for_one_sequence("m", {}, None) == {}


@pytest.mark.parametrize("stops", [8, -1, [1, 8], "x", [[1]], 1.5, True, [None]])
def test_tokens_that_the_model_does_not_have(stops: Any) -> None:
    with pytest.raises(InputError, match="the vocabulary has 8"):
        for_one_sequence("m", {"eos_token_id": stops}, 8)


@pytest.mark.parametrize("name", DRAWING)
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "x", [], True, 10**12])
def test_numbers_without_a_meaning(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"{name} in generation_config\.json is"):
        for_one_sequence("m", {name: value}, 8)


def test_what_transformers_alone_has_is_kept() -> None:
    asked = {
        "top_h": 0.5, "epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4, "no_repeat_ngram_size": 3, "min_length": 4,
        "min_new_tokens": 2, "guidance_scale": 1.5, "bad_words_ids": [[1], [2, 3]], "suppress_tokens": [4],
        "begin_suppress_tokens": [5], "forced_bos_token_id": 6, "forced_eos_token_id": [1, 7],
    }  # fmt: skip
    assert for_one_sequence("m", asked, 8) == asked
    assert asked.keys() | {"typical_p"} == IN_TRANSFORMERS.keys() | SAMPLED_BY_TRANSFORMERS.keys()
    assert for_one_sequence("m", {"bad_words_ids": [], "suppress_tokens": None}, 8) == {}


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("value", [8, -1, [8], [[1, 8]], [[]], "x", [True], 0.5, {"a": 1}, [[[1]]]])
def test_lists_of_tokens_that_are_none(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"{name} in generation_config\.json is .* of a vocabulary of 8"):
        for_one_sequence("m", {name: value}, 8)


@pytest.mark.parametrize("text", ["{", "[]", '{"top_k": ' + "1" * 5000 + "}", '{"x": "\\ud800"}'])
def test_a_file_that_no_artifact_could_load(model_copy: MakeModel, text: str) -> None:
    """It would be copied as it is."""
    folder: Path = model_copy("llama")
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(InputError, match=r"generation_config\.json"):
        open_checkpoint(folder)
