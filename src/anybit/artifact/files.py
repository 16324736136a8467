"""Files of an artifact: their names, and what lists them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anybit.checkpoint.files import cause, read_json
from anybit.config import Json
from anybit.errors import InputError
from anybit.formats.layout import QUANT_METHOD

SECTION = "progressive"  # of anybit.index.json: the enhancement layers
PLANES = "plane_bytes"  # of an enhancement layer there: what its planes take in memory
EMBEDDING = "embedding_bytes"  # of those: planes of embeddings
TOKENIZER_FILES = (
    "tokenizer",
    "vocab",
    "merges",
    "special_tokens",
    "added_tokens",
    "chat_template",
    "spiece",
    "sentencepiece",
    "tekken",
)


def is_artifact(path: Path) -> bool:
    """Whether a directory's config.json says that anybit wrote it."""
    try:
        config = read_json(path / "config.json")
        return config["quantization_config"]["quant_method"] == QUANT_METHOD
    except (InputError, KeyError, TypeError):
        return False


def is_tokenizer_file(name: str) -> bool:
    """Whether a file belongs to the tokenizer, which reported sizes leave out."""
    return name.startswith(TOKENIZER_FILES) or name.endswith((".tiktoken", ".jinja"))


def partial_folder(out: Path) -> Path:
    """`OUT.partial`, where a run that makes OUT works and an unfinished one leaves its shards."""
    out = resolved(out)
    return out.parent / f"{out.name}.partial"


def resolved(out: Path) -> Path:
    """OUT without links and "..", of which not all need exist.

    Raises:
        InputError: links that lead in a circle.
    """
    try:
        return out.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"{out} is no place for a directory ({cause(error)}): choose another one") from error


def shard_file(shard: int, shards: int) -> str:
    """File name of a shard, counted from 0."""
    return f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"


def enhancement_file(number: int, count: int) -> str:
    """Name of an enhancement layer's file, counted from 1."""
    return f"refine-{number:05d}-of-{count:05d}.safetensors"


def list_hash(section: Sequence[Json]) -> str:
    """What config.json says of the list of enhancement layers: whoever edits widths or losses in it is found out."""
    return hashlib.sha256(json.dumps(section, sort_keys=True).encode()).hexdigest()


def link(chain: str, sha256: str) -> str:
    """The running hash after a file: it vouches for all files before, in their order."""
    return hashlib.sha256((chain + sha256).encode()).hexdigest()


def dump_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
