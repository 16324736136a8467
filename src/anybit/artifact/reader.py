"""Artifacts on disk: opened with every header checked.

`writer` makes them. Only a finished artifact bears the name OUT; an unfinished run leaves `OUT.partial`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from anybit.artifact.config_json import StoredLayers
from anybit.artifact.enhancements import Enhancements, read_enhancements
from anybit.artifact.files import SECTION, is_artifact, partial_folder
from anybit.checkpoint.detours import refuse_detours
from anybit.checkpoint.files import check_files, read_json
from anybit.checkpoint.safetensors import SafeTensor
from anybit.checkpoint.weight_files import read_headers
from anybit.config import Json
from anybit.errors import InputError
from anybit.formats.validate import check_version

if TYPE_CHECKING:
    from anybit.checkpoint.directory import Checkpoint


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
    config: Json  # config.json
    stored: StoredLayers
    files: tuple[Path, ...]  # of the weights, but for enhancement layers
    tensors: Mapping[str, SafeTensor]  # of these files, by name
    enhancements: Enhancements | None  # None: it has one file of each tensor, and no more

    @property
    def quantization(self) -> Json:
        """`quantization_config` of its config.json."""
        found: Json = self.config["quantization_config"]
        return found

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The same as a model of Transformers, which this imports.

        Raises:
            InputError: see `open_checkpoint`.
        """
        from anybit.checkpoint.configuration import read_config as refuse_unknown_models
        from anybit.checkpoint.directory import described
        from anybit.checkpoint.generation import check_generation

        check_generation(self.path)
        raw = refuse_unknown_models(self.path)
        return described(str(self.path), self.path, raw, self.files, self.tensors)


def open_artifact(path: Path) -> Artifact:
    """An artifact and its model, every header held against its config.json.

    Raises:
        InputError: see `open_stored` and `open_checkpoint`.
    """
    artifact = open_stored(path)
    assert artifact.checkpoint
    return artifact


def open_stored(path: Path) -> Artifact:
    """An artifact, every header held against its config.json; whether Transformers knows the model is not asked.

    Raises:
        InputError: see `read_config`, `read_headers` and `read_enhancements`; a tensor that is missing or has another
            shape.
    """
    config = read_config(path)
    refuse_detours(path, config)
    stored = StoredLayers.from_json(f"{path}/config.json", config["quantization_config"])
    check_files(path)
    files, tensors = read_headers(path)
    for name, layout in stored.packed.items():
        for field, (dtype, shape) in layout.stored_tensors().items():
            found = tensors.get(f"{name}.{field}")
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
        found = tensors.get(f"{name}.weight")
        if found is None or sorted(found.shape) != sorted(matrix):  # GPT-2 stores [in, out]
            held = "no such tensor" if found is None else f"it as {list(found.shape)}"
            raise InputError(
                f"{path} should hold {name}.weight as {list(matrix)} and has {held}: the artifact is damaged; copy it "
                "again"
            )
    found_layers = read_enhancements(path, config["quantization_config"].get(SECTION), stored)
    return Artifact(path, config, stored, files, tensors, found_layers)
