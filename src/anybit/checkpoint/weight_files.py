"""The weight files of a directory: one `model.safetensors`, or shards with an index."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from anybit.checkpoint.files import INDEX, INDEX_LIMIT, NAME_BYTES, PICKLES, read_json
from anybit.checkpoint.safetensors import SafeTensor, read_safetensors_header
from anybit.errors import InputError


def read_headers(folder: Path) -> tuple[tuple[Path, ...], dict[str, SafeTensor]]:
    """The weight files of a directory, and their tensors by name, in file order; every header is checked.

    Raises:
        InputError: no weights or only pickles; files that are missing or damaged, or not as the index says.
    """
    shards = _find_shards(folder)
    stored = {file: read_safetensors_header(file) for file in sorted(set(shards.values()))}
    if not shards:
        stored = {folder / "model.safetensors": read_safetensors_header(folder / "model.safetensors")}
    _check_index(shards, stored)
    tensors = {
        name: tensor
        for file, held in stored.items()
        for name, tensor in held.items()
        if not shards or shards.get(name) == file
    }
    return tuple(stored), tensors


def _find_shards(folder: Path) -> dict[str, Path]:
    """`{tensor name: shard}` from the index; empty if the model is one `model.safetensors`."""
    if (folder / "model.safetensors").is_file():
        return {}
    index = folder / INDEX
    if not index.is_file():
        raise InputError(_no_weights(folder))
    weight_map = read_json(index, INDEX_LIMIT).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index} has no weight_map; download it again.")
    for name, file in weight_map.items():
        shard = isinstance(file, str) and re.fullmatch(r"[\w-][\w. -]*\.safetensors", file)
        if not shard or len(file.encode()) > NAME_BYTES:
            raise InputError(
                f"{index}: {name!r} points to {file!r}, but the name of a .safetensors file in the same "
                "directory is expected; download the index again."
            )
    missing = sorted({file for file in weight_map.values() if not (folder / file).is_file()})
    if missing:
        raise InputError(
            f"{folder} lacks {len(missing)} of {len(set(weight_map.values()))} shards, the first is "
            f"{missing[0]}; download the missing ones."
        )
    return {name: folder / file for name, file in weight_map.items()}


def _no_weights(folder: Path) -> str:
    pickles = [file.name for pattern in PICKLES for file in sorted(folder.glob(pattern))]
    if pickles:
        return pickled(str(folder), pickles[0])
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    found = f"only {others[0]}" if others else "no weights"
    return (
        f"{folder} holds {found}, but model.safetensors or model.safetensors.index.json with its shards is "
        "expected; download the whole model (an adapter must be merged into its base first)."
    )


def _check_index(shards: Mapping[str, Path], stored: Mapping[Path, Mapping[str, SafeTensor]]) -> None:
    for name, file in shards.items():
        if name not in stored[file]:
            raise InputError(
                f"{file} lacks the tensor {name!r} that the index places there; download it again."
            )


def pickled(place: str, name: str) -> str:
    """What to say of weights that are a pickle."""
    return (
        f"{place} has only pickled weights ({name}), which anybit does not read because a pickle can run "
        "code; convert it with Transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)."
    )
