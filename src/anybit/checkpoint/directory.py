"""Checkpoints: what the user names as MODEL, opened, validated, and read one tensor at a time.

A Hugging Face directory (one `model.safetensors`, or shards with an index), a hub id, or a GGUF file.
Every header is checked against its file when the checkpoint is opened, before any work; a tensor is
read into memory of its own, so that a process holds only what it keeps. Pickles are never read and
code that comes with a model is never run.
"""

from __future__ import annotations

import hashlib
import importlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from anybit.checkpoint.configuration import load_config, read_config, transformers_address
from anybit.checkpoint.counts import check_counts
from anybit.checkpoint.files import (
    ASSETS,
    LICENCES,
    PICKLES,
    check_files,
    check_link,
    files_below,
    matching,
)
from anybit.checkpoint.generation import check_generation
from anybit.checkpoint.hub import download
from anybit.checkpoint.safetensors import StoredTensor
from anybit.checkpoint.tokenizer import read_tokenizer
from anybit.checkpoint.weight_files import pickled, read_headers
from anybit.config import Json
from anybit.errors import InputError
from anybit.formats.dtypes import Dtype

if TYPE_CHECKING:
    from anybit.checkpoint.gguf import GgufFile

# What is made of a GGUF file's metadata, as far as they have it.
REBUILT = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "tokenizer.model", "vocab.json", "merges.txt", "generation_config.json"),
)


@dataclass(frozen=True)
class Checkpoint:
    """An opened model: its configuration and its tensors by checkpoint name, in file order."""

    source: str  # what the user typed
    path: Path  # the directory, or the .gguf file
    config: PreTrainedConfig
    files: tuple[Path, ...]  # all weight files
    tensors: Mapping[str, StoredTensor]
    gguf: GgufFile | None = None

    def names(self) -> list[str]:
        """Tensor names as Transformers has them, in file order. A tied head is simply absent."""
        return list(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name).shape

    def dtype(self, name: str) -> Dtype:
        """The dtype `read` returns: the stored one, or float32 for everything in a GGUF file."""
        return self._stored(name).dtype

    def read(self, name: str) -> torch.Tensor:
        """The tensor in fresh memory. Raises `InputError` if there is none of this name."""
        return self._stored(name).load()

    def read_beginning(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """As many of a safetensors tensor's first entries as make up `shape`; the rest is not read."""
        stored = self._stored(name)
        assert prod(shape) <= prod(stored.shape), f"{name} is {stored.shape}, not {shape}"
        return stored.load(shape=shape)

    def _stored(self, name: str) -> StoredTensor:
        if name not in self.tensors:
            raise InputError(
                f"{self.source} has no tensor {name!r}; its files or its config.json are incomplete."
            )
        return self.tensors[name]

    def weight_bytes(self) -> int:
        """Bytes of all weight files."""
        return sum(file.stat().st_size for file in self.files)

    def weights(self) -> int:
        """Of all tensors of the files."""
        return sum(prod(tensor.shape) for tensor in self.tensors.values())

    def sha256(self, progress: Callable[[int], None] | None = None) -> str:
        """SHA-256 of the weight files (sorted by name) and config.json, one after the other.

        `cat model-*.safetensors config.json | sha256sum` gives the same; for GGUF, `sha256sum FILE`.
        `progress` is called with the bytes read since the last call; the sum is that of all files.
        """
        digest, buffer = hashlib.sha256(), memoryview(bytearray(2**22))
        for file in self.files if self.gguf else (*self.files, self.path / "config.json"):
            with file.open("rb", buffering=0) as stream:
                while count := stream.readinto(buffer):
                    digest.update(buffer[:count])
                    if progress is not None:
                        progress(count)
        return digest.hexdigest()

    def quantized_before(self) -> str | None:
        """How the weights were quantized already, e.g. "Q4_1" or "fp8"; None for full precision."""
        if self.gguf is not None:
            return _gguf_reader().block_type(self.gguf)
        earlier = getattr(self.config, "quantization_config", None)
        if earlier is None:
            return None
        method = (
            earlier.get("quant_method") if isinstance(earlier, dict) else getattr(earlier, "quant_method", "")
        )
        return str(getattr(method, "value", method) or "unknown")

    def notes(self) -> list[str]:
        """Sentences about this checkpoint that its user should see."""
        if self.gguf is not None and "rope_freqs.weight" in self.gguf.tensors:
            return [
                f"{self.source}: rope_freqs.weight (frequency scaling for long contexts) is left out, as in "
                "Transformers; beyond the original context length the model differs from llama.cpp's."
            ]
        return []

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer. Raises `InputError` if there is none that can be used."""
        folder, extra = transformers_address(self.path)
        return read_tokenizer(self.source, folder, **extra)

    def asset_files(self) -> list[Path]:
        """The files that `copy_assets` copies as they are. Raises `InputError` for links out of the model."""
        if self.gguf is None:
            found = [*matching(self.path, ASSETS), *files_below(self.path)]
        elif Path(self.source).is_dir():  # a folder made for this model; beside a bare file lies anything
            found = matching(self.path.parent, LICENCES)
        else:
            found = []
        for file in found:
            check_link(file, self._folder())
        return found

    def asset_names(self) -> list[str]:
        """At least the names that `copy_assets` returns."""
        copied = [str(file.relative_to(self._folder())) for file in self.asset_files()]
        return copied + list(REBUILT if self.gguf else ())

    def _folder(self) -> Path:
        return self.path.parent if self.gguf else self.path

    def copy_assets(self, out: Path) -> list[str]:
        """Put tokenizer, chat template, generation config and licence into `out`; returns the names.

        The files are readable by everybody. From GGUF, they are rebuilt from its metadata.
        """
        out.mkdir(parents=True, exist_ok=True)
        names = _rebuild_assets(self, out) if self.gguf else []
        for file in self.asset_files():
            name = str(file.relative_to(self._folder()))
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, out / name)
            names.append(name)
        for name in names:
            (out / name).chmod(0o644)
        return sorted(names)


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Open MODEL: a directory, a `.gguf` file or a hub id, every header checked.

    Raises `InputError` for what cannot be read: no weights or only pickles, missing, truncated or
    hostile files, an unknown architecture, one that needs its own code.
    """
    path = Path(model)
    if not path.exists():
        path = download(str(model))
    if path.is_dir():
        path = _sole_gguf(path) or path
    if path.is_dir():
        return _open_directory(str(model), path)
    if path.suffix != ".gguf":
        raise InputError(_not_a_model(path))
    return _open_gguf(str(model), path)


def _not_a_model(path: Path) -> str:
    if any(fnmatch(path.name, pattern) for pattern in PICKLES):
        return pickled(str(path), path.name)
    expected = "a model directory, a .gguf file or a hub id is expected"
    hint = (
        "name the directory that holds it" if path.suffix in (".safetensors", ".json") else "check the path"
    )
    return f"{path} is a file, but {expected}; {hint}."


def _sole_gguf(folder: Path) -> Path | None:
    """The one .gguf file of a directory that has no safetensors."""
    files = sorted(folder.glob("*.gguf"))
    if not files or any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json")):
        return None
    if len(files) > 1:
        raise InputError(f"{folder} holds {len(files)} .gguf files; name one of them, such as {files[0]}.")
    return files[0]


# ---- Hugging Face directories


def _open_directory(source: str, folder: Path) -> Checkpoint:
    check_files(folder)
    check_generation(folder)
    raw = read_config(folder)
    return described(source, folder, raw, *read_headers(folder))


def described(
    source: str, folder: Path, raw: Json, files: tuple[Path, ...], tensors: Mapping[str, StoredTensor]
) -> Checkpoint:
    """The model of a directory, from its config.json, `raw`, and what its weight files hold.

    Raises:
        InputError: a configuration that is none, or that of other weights.
    """
    check_counts(f"{folder}/config.json", raw, tensors.values())
    return Checkpoint(source, folder, load_config(source, folder), files, tensors)


# ---- GGUF


def _gguf_reader() -> ModuleType:
    """`anybit.checkpoint.gguf`, imported when it is needed: a machine that reads no such files can lack the package."""
    try:
        return importlib.import_module("anybit.checkpoint.gguf")
    except ImportError as error:
        raise InputError("reading .gguf files needs the package gguf: pip install gguf") from error


def _open_gguf(source: str, path: Path) -> Checkpoint:
    gguf_reader = _gguf_reader()
    gguf = gguf_reader.open_gguf(path)
    with TemporaryDirectory() as folder:
        summary = Path(folder) / "metadata.gguf"
        gguf_reader.write_summary(gguf, summary)
        config = load_config(source, summary)
    config.name_or_path = str(path.parent)
    tensors = {
        name: StoredTensor(gguf.tensors[own].shape, Dtype.F32, partial(gguf_reader.read_tensor, gguf, own))
        for name, own in gguf_reader.hf_names(gguf).items()
    }
    check_counts(str(path), config.to_dict(), tensors.values(), "its header is damaged: download it again.")
    return Checkpoint(source, path, config, (path,), tensors, gguf)


def _rebuild_assets(checkpoint: Checkpoint, out: Path) -> list[str]:
    """Tokenizer and generation config from GGUF metadata."""
    saved = [Path(file).name for file in checkpoint.tokenizer().save_pretrained(out)]
    names = {name for name in saved if (out / name).is_file()}
    if ids := _special_ids(checkpoint.gguf.metadata if checkpoint.gguf else {}):
        GenerationConfig(**ids).save_pretrained(out)
        names.add("generation_config.json")
    return sorted(names)


def _special_ids(metadata: Json) -> Json:
    """What ends and begins a text, as far as the file says: end of text and end of turn both stop."""
    found = {
        role: metadata[key]
        for role in ("bos", "eos", "eot", "padding")
        if isinstance(metadata.get(key := f"tokenizer.ggml.{role}_token_id"), int)
    }
    stops = sorted({found[role] for role in ("eos", "eot") if role in found})
    ids = {"bos_token_id": found.get("bos"), "pad_token_id": found.get("padding")}
    if stops:
        ids["eos_token_id"] = stops[0] if len(stops) == 1 else stops
    return {name: value for name, value in ids.items() if value is not None}
