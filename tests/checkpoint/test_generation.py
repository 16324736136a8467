"""Generation configs: what counts where one sequence is made, and what no such file says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from anybit.checkpoint.directory import open_checkpoint
from anybit.checkpoint.generation import (
    DRAWING,
    FORMS,
    IN_TRANSFORMERS,
    SAMPLED_BY_TRANSFORMERS,
    TOKENS,
    for_one_sequence,
    not_native,
)
from anybit.errors import InputError
from anybit.generate import Generator
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
        "encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2, "sequence_bias": [[[1, 2], -0.5]],
        "exponential_decay_length_penalty": [5, 1.1], "watermarking_config": {"bias": 2.0}, "eos_token_id": 1,
    }  # fmt: skip
    assert for_one_sequence("m", asked, 8) == asked
    known = IN_TRANSFORMERS | SAMPLED_BY_TRANSFORMERS
    assert asked.keys() | {"typical_p"} == known.keys() | {"eos_token_id"}
    assert for_one_sequence("m", {"bad_words_ids": [], "suppress_tokens": None, "sequence_bias": []}, 8) == {}
    endless = {"exponential_decay_length_penalty": [5, 1.1]}  # there is no end to make likelier
    assert for_one_sequence("m", endless, 8) == {}


def test_what_transformers_alone_has_is_named() -> None:
    ours = {"eos_token_id": 1, "top_k": 5, "suppress_tokens": [], "typical_p": 1.0}
    assert not_native(ours, samples=True) == {}
    theirs = {"min_length": 3, "typical_p": 0.9}
    assert not_native(theirs, samples=True) == theirs
    assert not_native(theirs, samples=False) == {"min_length": 3}


def test_whole_numbers_are_fractions_where_transformers_wants_them(model_copy: MakeModel) -> None:
    """And a watermark of every field is one: what is kept runs there."""
    folder = model_copy("llama")
    watermark = {
        "greenlist_ratio": 0.5, "bias": 2, "hashing_key": 3, "seeding_scheme": "lefthash", "context_width": 1,
    }  # fmt: skip
    asked = {
        "repetition_penalty": 2, "encoder_repetition_penalty": 2, "encoder_no_repeat_ngram_size": 2,
        "sequence_bias": [[[3], -1000], [[4, 5], 1]], "exponential_decay_length_penalty": [4, 2], "eos_token_id": 9,
        "watermarking_config": watermark,
    }  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(asked))
    inside = Generator(str(folder), engine="transformers")
    kept = inside.runner.model.generation_config  # type: ignore[attr-defined]
    assert kept.watermarking_config.to_dict() == watermark and kept.repetition_penalty == 2
    for temperature in (0.0, 0.7):
        assert 3 not in inside.generate([5, 6, 7], 12, temperature=temperature)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("sequence_bias", [3, {"a": 1}, [[[1], 1, 2]], [[[8], 1.0]], [[[], 1.0]], [[[1], "x"]], [[[1], 1e9]]]),
        ("exponential_decay_length_penalty", [3, [1], [-1, 1.1], [1.5, 1.1], [1, 0], [1, "x"], [1, float("inf")]]),
        ("watermarking_config", [3, {"x": 1}, {"bias": "x"}, {"greenlist_ratio": 1}, {"hashing_key": 0},
                                 {"context_width": 1.5}, {"seeding_scheme": "x"}]),
    ],
)  # fmt: skip
def test_forms_that_are_none(name: str, values: list[Any]) -> None:
    expected = rf"{name} in generation_config\.json is .*, expected {FORMS[name][:9]}"
    for value in values:
        with pytest.raises(InputError, match=expected):
            for_one_sequence("m", {name: value, "eos_token_id": 1}, 8)


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
