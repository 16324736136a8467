"""Ways out of a model's own files that its config.json could ask for."""

from __future__ import annotations

from pathlib import Path

from anybit.checkpoint.counts import leaves
from anybit.config import Json
from anybit.errors import InputError


def refuse_detours(folder: Path, raw: Json) -> None:
    """Refuse what would make Transformers load other weights than those that are checked here, or code of the hub.

    Raises:
        InputError: with the field, or the file.
    """
    if raw.get("transformers_weights") is not None:
        raise InputError(
            f"{folder}/config.json names other weights (transformers_weights: {raw['transformers_weights']!r}); "
            "remove that line to use those in model.safetensors or its shards."
        )
    for key, value in leaves(raw):
        if key.endswith(("attn_implementation", "experts_implementation")) and "/" in str(value):
            raise InputError(
                f"{folder}/config.json names code of the hub ({key}: {value!r}), which anybit never runs; remove that "
                "line."
            )
    if (folder / "adapter_config.json").exists():
        raise InputError(
            f"{folder} holds an adapter (adapter_config.json), which Transformers may add to the weights; "
            "merge it into its base, or remove the file."
        )
