"""generation_config.json: which tokens end a text, and how the model's makers want tokens drawn.

Transformers' `generate` would follow everything that the file says: beams and sequences in any number, constraints,
caches, other models. One sequence is made here, token by token, so only what is meant for that counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anybit.checkpoint.files import cause, read_json
from anybit.config import Json
from anybit.errors import InputError

# What changes how the next token is drawn: the least and the largest value that has a meaning.
DRAWING = {
    "top_k": (0, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 1e3),
}


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
        if type(token) is not int or not 0 <= token < (vocabulary or math.inf):
            raise InputError(
                f"{source}: generation_config.json ends texts by the token {token!r:.50}, but the vocabulary has "
                f"{vocabulary}: use the file that belongs to the model"
            )
        kept["eos_token_id"] = stops
    for name, (least, most) in DRAWING.items():
        value = stored.get(name)
        if value is None:
            continue
        if type(value) not in (int, type(most)) or not least <= value <= most:
            raise InputError(
                f"{source}: {name} in generation_config.json is {value!r:.50}, expected {least:g} to {most:g}: use the "
                "file that belongs to the model"
            )
        kept[name] = value
    return kept
