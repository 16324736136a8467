"""Artifacts on disk: opened with every header checked.

`writer` makes them. Only a finished artifact bears the name OUT; an unfinished run leaves `OUT.partial`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anybit.artifact.config_json import check_layers
from anybit.artifact.files import is_artifact, partial_folder
from anybit.checkpoint.directory import Checkpoint, open_checkpoint
from anybit.checkpoint.files import read_json
from anybit.errors import InputError
from anybit.formats.layout import (
    stored_tensors,
)
from anybit.formats.validate import check_version


def read_config(path: Path) -> dict[str, Any]:
    """config.json of an artifact, its version and its layers checked.

    Raises:
        InputError: not an artifact, an unfinished one, a newer format, or damaged layer descriptions.
    """
    refuse_unfinished(path)
    if not path.exists():
        raise InputError(f"{path} does not exist: name a directory that `anybit quantize` made")
    if not is_artifact(path):
        raise InputError(
            f"{path} is not an anybit artifact (no config.json that says so): make one with `anybit quantize`"
        )
    config = read_json(path / "config.json")
    quantization = config["quantization_config"]
    check_version(quantization.get("format_version"))
    check_layers(f"{path}/config.json", quantization)
    calibration = quantization.get("calibration")
    if calibration is not None and not (
        isinstance(calibration, dict) and {"source", "samples", "seq_len"} <= calibration.keys()
    ):
        raise InputError(f"{path}/config.json: calibration must be null or name source, samples and seq_len")
    return config


def refuse_unfinished(path: Path) -> None:
    """Say what is the matter with an artifact that does not exist yet.

    Raises:
        InputError: only its unfinished run exists.
    """
    partial = partial_folder(path)
    if not path.exists() and partial.exists():
        raise InputError(
            f"{path} is not finished: repeat the `anybit quantize` command to resume it ({partial})"
        )


def open_artifact(path: Path) -> tuple[dict[str, Any], Checkpoint]:
    """An artifact's `quantization_config` and its opened files; every header fits what the config says.

    Raises:
        InputError: see `read_config` and `open_checkpoint`; a tensor that is missing or has another shape.
    """
    quantization = read_config(path)["quantization_config"]
    checkpoint = open_checkpoint(path)
    for name, layout in {**quantization["layers"], **quantization["embeddings"]}.items():
        for field, (dtype, shape) in stored_tensors(layout).items():
            found = checkpoint.tensors.get(f"{name}.{field}")
            if found is None:
                raise InputError(
                    f"{path} lacks the tensor {name}.{field}: the artifact is incomplete; copy it again"
                )
            if (found.dtype, found.shape) != (dtype, shape):
                raise InputError(
                    f"{path}: {name}.{field} is {found.dtype} {list(found.shape)}, but config.json asks for "
                    f"{dtype} {list(shape)}: the artifact is damaged; copy it again"
                )
    for name, shape in quantization["dense"].items():
        found = checkpoint.tensors.get(f"{name}.weight")
        if found is None or sorted(found.shape) != sorted(shape):  # GPT-2 stores [in, out]
            held = "no such tensor" if found is None else f"it as {list(found.shape)}"
            raise InputError(
                f"{path} should hold {name}.weight as {shape} and has {held}: the artifact is damaged; copy it again"
            )
    return quantization, checkpoint
