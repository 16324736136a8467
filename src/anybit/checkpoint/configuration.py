"""config.json of a model: refused where it asks for other files, code or an unknown model; else Transformers' own."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from anybit.checkpoint.detours import refuse_detours
from anybit.checkpoint.files import cause, read_json
from anybit.config import Json
from anybit.errors import InputError


def read_config(folder: Path) -> Json:
    """config.json, refused when it asks for code of its own or for a model nobody knows."""
    if not (folder / "config.json").exists():
        raise InputError(f"{folder} has no config.json; give a directory in the Hugging Face layout.")
    raw = read_json(folder / "config.json")
    refuse_detours(folder, raw)
    kind = raw.get("model_type")
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        return raw
    if "auto_map" in raw:
        raise InputError(
            f"{folder}: the model type {kind!r} needs code that comes with the model (auto_map), and anybit "
            "never runs such code; use a version of the model that Transformers supports itself."
        )
    raise InputError(
        f"{folder}/config.json has the model type {kind!r}, which the installed Transformers does not know; "
        "upgrade Transformers or use another model."
    )


def load_config(source: str, path: Path) -> PreTrainedConfig:
    """The configuration as Transformers builds it from config.json or from GGUF metadata."""
    folder, extra = transformers_address(path)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True, **extra)
        type(config).from_dict(json.loads(config.to_json_string()))  # as an artifact will have it
    except Exception as error:  # validation errors of config classes have no common base class
        raise InputError(
            f"{source} has a configuration that Transformers refuses ({cause(error)}); "
            "download the model again or upgrade Transformers."
        ) from error
    # Transformers takes anything, and refuses its name later.
    if not isinstance(config.dtype, torch.dtype | None):
        raise InputError(
            f"{source}: dtype is {config.dtype!r} in its config.json, expected a type such as 'bfloat16'; download the "
            "model again."
        )
    plain_outputs(config)
    return config


def plain_outputs(config: PreTrainedConfig) -> None:
    """Whatever config.json says: what measures and runs a model asks for logits by name, and for nothing else."""
    config.return_dict, config.output_hidden_states = True, False
    config.output_attentions = False


def transformers_address(path: Path) -> tuple[str, dict[str, str]]:
    """How `from_pretrained` wants a directory or a GGUF file named."""
    return (str(path.parent), {"gguf_file": path.name}) if path.is_file() else (str(path), {})
