"""Artifacts on disk: opened with every header checked.

`writer` makes them. Only a finished artifact bears the name OUT; an unfinished run leaves `OUT.partial`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from anybit.artifact.config_json import StoredLayers
from anybit.artifact.enhancements import Enhancements, read_enhancements
from anybit.artifact.files import SECTION, is_artifact, partial_folder
from anybit.checkpoint.directory import Checkpoint, open_checkpoint
from anybit.checkpoint.files import read_json
from anybit.config import Json
from anybit.errors import InputError
from anybit.formats.validate import check_version


def read_config(path: Path) -> Json:
    """config.json of an artifact, its version checked.

    Raises:
        InputError: not an artifact, an unfinished one, a newer format, or calibration that is not described.
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


@dataclass(frozen=True)
class Artifact:
    """An artifact whose headers fit what its config.json says."""

    path: Path
    quantization: Json  # `quantization_config` of its config.json
    stored: StoredLayers
    checkpoint: Checkpoint
    enhancements: Enhancements | None  # None: it has one file of each tensor, and no more


def open_artifact(path: Path) -> Artifact:
    """An artifact, every header held against its config.json.

    Raises:
        InputError: see `read_config`, `open_checkpoint` and `read_enhancements`; a tensor that is missing or has
            another shape.
    """
    quantization = read_config(path)["quantization_config"]
    stored = StoredLayers.from_json(f"{path}/config.json", quantization)
    checkpoint = open_checkpoint(path)
    for name, layout in stored.packed.items():
        for field, (dtype, shape) in layout.stored_tensors().items():
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
    for name, matrix in stored.unquantized.items():
        found = checkpoint.tensors.get(f"{name}.weight")
        if found is None or sorted(found.shape) != sorted(matrix):  # GPT-2 stores [in, out]
            held = "no such tensor" if found is None else f"it as {list(found.shape)}"
            raise InputError(
                f"{path} should hold {name}.weight as {list(matrix)} and has {held}: the artifact is damaged; copy it "
                "again"
            )
    found_layers = read_enhancements(path, quantization.get(SECTION), stored)
    return Artifact(path, quantization, stored, checkpoint, found_layers)
