"""generation_config.json: which tokens end a text, and how the model's makers want tokens drawn.

Transformers' `generate` would follow everything that the file says: beams and sequences in any number, constraints,
caches, other models. One sequence is made here, token by token, so only what is meant for that counts. Of this the
native engine has a part. A model whose file asks for more runs inside Transformers, which gets it all. Stop strings of
the file are left out, as Transformers' `generate` refuses them without a tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from anybit.checkpoint.files import cause, read_json
from anybit.config import Json
from anybit.errors import InputError

# Numbers that change what the next token is: the least and the largest value that has a meaning.
DRAWING = {
    "top_k": (0, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (1e-6, 1.0),
    "top_h": (1e-6, 1.0),
    "epsilon_cutoff": (0.0, 1.0),
    "eta_cutoff": (0.0, 1.0),
    "repetition_penalty": (1e-3, 1e3),
    "encoder_repetition_penalty": (1e-3, 1e3),
    "no_repeat_ngram_size": (0, 2**31 - 1),
    "encoder_no_repeat_ngram_size": (0, 2**31 - 1),
    "min_length": (0, 2**31 - 1),
    "min_new_tokens": (0, 2**31 - 1),
    "guidance_scale": (0.0, 1e3),
}
# Tokens that change it: how deep they lie in lists, each way that Transformers takes.
TOKENS = {
    "bad_words_ids": (2,),
    "suppress_tokens": (1,),
    "begin_suppress_tokens": (1,),
    "forced_bos_token_id": (0,),
    "forced_eos_token_id": (0, 1),
}
# What changes it and has a form of its own, in words.
FORMS = {
    "sequence_bias": "a list of lists of tokens, each with a number from -1000 to 1000",
    "exponential_decay_length_penalty": "a number of tokens and a factor from 0.001 to 1000",
    "watermarking_config": "an object with any of greenlist_ratio, bias, hashing_key, seeding_scheme and context_width",
}
# What of these Transformers alone has, and the value that changes nothing, beside null. Some count where tokens are
# sampled, the others always.
SAMPLED_BY_TRANSFORMERS = {"typical_p": 1, "top_h": None, "epsilon_cutoff": 0, "eta_cutoff": 0}
IN_TRANSFORMERS = {
    "no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": 0, "guidance_scale": 1, "bad_words_ids": [],
    "suppress_tokens": [], "begin_suppress_tokens": [], "forced_bos_token_id": None, "forced_eos_token_id": None,
    "encoder_repetition_penalty": 1, "encoder_no_repeat_ngram_size": 0, "sequence_bias": [],
    "exponential_decay_length_penalty": None, "watermarking_config": None,
}  # fmt: skip


def check_generation(folder: Path) -> None:
    """An artifact gets the file as it is, and must load with it."""
    if not (folder / "generation_config.json").exists():
        return
    read_json(folder / "generation_config.json")
    from transformers import GenerationConfig  # which takes seconds

    try:
        GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise InputError(
            f"{folder}/generation_config.json is not what Transformers reads ({cause(error)}); download it again, or "
            "remove it."
        ) from error


def read_generation(folder: Path) -> Json:
    """What the file of a folder says; nothing where there is none."""
    path = folder / "generation_config.json"
    return read_json(path) if path.exists() else {}


def not_native(stored: Mapping[str, Any], samples: bool) -> Json:
    """What of a generation config changes a token and the native engine lacks, with what it asks for.

    Args:
        stored: the fields of the config.
        samples: whether tokens are sampled, and not the likeliest taken.
    """
    neutral = IN_TRANSFORMERS | (SAMPLED_BY_TRANSFORMERS if samples else {})
    return {name: stored[name] for name, none in neutral.items() if stored.get(name) not in (None, none)}


def for_one_sequence(source: str, stored: Mapping[str, Any], vocabulary: int | None) -> Json:
    """What of a generation config counts where one sequence is made.

    Args:
        source: the model, as errors name it.
        stored: the fields of the config that came with it.
        vocabulary: how many tokens the model has; None: unknown.

    Raises:
        InputError: tokens that the model does not have, or numbers without a meaning.
    """
    kept: Json = {}
    stops = stored.get("eos_token_id")
    for token in stops if isinstance(stops, list) else [] if stops is None else [stops]:
        if not _are_tokens(token, 0, vocabulary):
            raise InputError(
                f"{source}: generation_config.json ends texts by the token {token!r:.50}, but the vocabulary has "
                f"{vocabulary}: use the file that belongs to the model"
            )
        kept["eos_token_id"] = stops
    for name in (*DRAWING, *TOKENS, *FORMS):
        value: Any = stored.get(name)
        if hasattr(value, "to_dict"):  # a watermark's, where Transformers has loaded the file
            value = value.to_dict()
        if value is None or (name not in DRAWING and value == []):
            continue
        if expected := _expected_instead(name, value, vocabulary):
            raise InputError(
                f"{source}: {name} in generation_config.json is {value!r:.50}, expected {expected}: use the file that "
                "belongs to the model"
            )
        kept[name] = type(DRAWING[name][1])(value) if name in DRAWING else value
    if "sequence_bias" in kept:  # Transformers takes no whole numbers for what may be a fraction
        kept["sequence_bias"] = [[tokens, float(bias)] for tokens, bias in kept["sequence_bias"]]
    if "eos_token_id" not in kept:
        kept.pop("exponential_decay_length_penalty", None)  # which makes that token likelier
    return kept


def _expected_instead(name: str, value: Any, vocabulary: int | None) -> str | None:
    """What a field should be; None: its value is that."""
    if name in DRAWING:
        least, most = DRAWING[name]
        good = type(value) in (int, type(most)) and least <= value <= most
        return None if good else f"{least:g} to {most:g}"
    if name in FORMS:
        return None if _has_form(name, value, vocabulary) else FORMS[name]
    if any(_are_tokens(value, depth, vocabulary) for depth in TOKENS[name]):
        return None
    kinds = ("a token", "a list of tokens", "a list of lists of tokens")
    return " or ".join(kinds[depth] for depth in TOKENS[name]) + f" of a vocabulary of {vocabulary}"


def _has_form(name: str, value: Any, vocabulary: int | None) -> bool:
    """Whether one of `FORMS` is what Transformers computes with."""
    if name == "watermarking_config":
        return isinstance(value, dict) and all(
            key in WATERMARK and WATERMARK[key](given) for key, given in value.items()
        )
    if not isinstance(value, list | tuple):
        return False
    if name == "exponential_decay_length_penalty":
        return len(value) == 2 and _is_whole(value[0], 0) and _is_number(value[1], 1e-3, 1e3)
    return all(
        isinstance(each, list) and len(each) == 2 and _are_tokens(each[0], 1, vocabulary)
        and _is_number(each[1], -1e3, 1e3)
        for each in value
    )  # fmt: skip


def _is_number(value: Any, least: float, most: float) -> bool:
    return type(value) in (int, float) and least <= value <= most


def _is_whole(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < 2**31


WATERMARK: dict[str, Callable[[Any], bool]] = {  # fields of Transformers' WatermarkingConfig
    "greenlist_ratio": lambda value: _is_number(value, 1e-6, 1 - 1e-6),
    "bias": lambda value: _is_number(value, -1e3, 1e3),
    "hashing_key": lambda value: _is_whole(value, 1),
    "seeding_scheme": lambda value: value in ("lefthash", "selfhash"),
    "context_width": lambda value: _is_whole(value, 1),
}


def _are_tokens(value: Any, depth: int, vocabulary: int | None) -> bool:
    """Whether a value is a token of the model, or a list of some, or of such lists, so deep."""
    if depth:
        whole = isinstance(value, list) and value
        return bool(whole) and all(_are_tokens(each, depth - 1, vocabulary) for each in value)
    return type(value) is int and 0 <= value < (vocabulary or math.inf)
