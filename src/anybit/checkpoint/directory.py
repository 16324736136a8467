"""Checkpoints: what the user names as MODEL, opened, validated, and read one tensor at a time.

A Hugging Face directory (one `model.safetensors`, or shards with an index), a hub id, or a GGUF file.
Every header is checked against its file when the checkpoint is opened, before any work; a tensor is
read into memory of its own, so that a process holds only what it keeps. Pickles are never read and
code that comes with a model is never run.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from anybit.errors import InputError

if TYPE_CHECKING:
    from anybit.checkpoint.gguf import GgufFile

HEADER_LIMIT = 100_000_000  # bytes of a safetensors header, as in the reference implementation
JSON_LIMIT = 100_000_000  # bytes of config.json or of an index
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
_LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
_ASSETS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tekken.json", "*.tiktoken"),
    *("tokenizer.model", "spiece.model", "sentencepiece*.model"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
    *_LICENCES,
)
INDEX = "model.safetensors.index.json"  # which shard holds which tensor
HASHES = "anybit.index.json"  # size and SHA-256 of all shards, refinements, config.json and the index
POOLING = "1_Pooling/config.json"  # sentence-transformers': how token states become one embedding
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that lies in a file, checked."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # of what `load` returns
    load: Callable[
        ..., torch.Tensor
    ]  # reads it into fresh memory; in safetensors files also `shape=` of a beginning


@dataclass(frozen=True)
class Checkpoint:
    """An opened model: its configuration and its tensors by checkpoint name, in file order."""

    source: str  # what the user typed
    path: Path  # the directory, or the .gguf file
    config: PreTrainedConfig
    files: tuple[Path, ...]  # all weight files
    tensors: dict[str, StoredTensor]
    gguf: GgufFile | None = None

    def names(self) -> list[str]:
        """Tensor names as Transformers has them, in file order. A tied head is simply absent."""
        return list(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name).shape

    def dtype(self, name: str) -> torch.dtype:
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
        folder, extra = _transformers_address(self.path)
        try:
            return AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True, **extra
            )
        except Exception as error:  # whatever a broken tokenizer file makes Transformers and tokenizers raise
            raise InputError(
                f"{self.source} has no usable tokenizer ({_cause(error)}); "
                "put its tokenizer files beside the weights."
            ) from error

    def asset_files(self) -> list[Path]:
        """The files that `copy_assets` copies as they are."""
        if self.gguf is None:
            pooling = self.path / POOLING
            return _matching(self.path, _ASSETS) + ([pooling] if pooling.is_file() else [])
        if Path(self.source).is_dir():  # a folder made for this model; beside a bare file lies anything
            return _matching(self.path.parent, _LICENCES)
        return []

    def copy_assets(self, out: Path) -> list[str]:
        """Put tokenizer, chat template, generation config and licence into `out`; returns the names.

        The files are readable by everybody. From GGUF, they are rebuilt from its metadata.
        """
        out.mkdir(parents=True, exist_ok=True)
        names = _rebuild_assets(self, out) if self.gguf else []
        folder = self.path.parent if self.gguf else self.path
        for file in self.asset_files():
            name = str(file.relative_to(folder))
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
        path = _download(str(model))
    if path.is_dir():
        path = _sole_gguf(path) or path
    if path.is_dir():
        return _open_directory(str(model), path)
    if path.suffix != ".gguf":
        raise InputError(_not_a_model(path))
    return _open_gguf(str(model), path)


def _not_a_model(path: Path) -> str:
    if any(fnmatch(path.name, pattern) for pattern in _PICKLES):
        return _pickled(str(path), path.name)
    expected = "a model directory, a .gguf file or a hub id is expected"
    hint = (
        "name the directory that holds it" if path.suffix in (".safetensors", ".json") else "check the path"
    )
    return f"{path} is a file, but {expected}; {hint}."


def _pickled(place: str, name: str) -> str:
    return (
        f"{place} has only pickled weights ({name}), which anybit does not read because a pickle can run "
        "code; convert it with Transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)."
    )


def _sole_gguf(folder: Path) -> Path | None:
    """The one .gguf file of a directory that has no safetensors."""
    files = sorted(folder.glob("*.gguf"))
    if not files or any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json")):
        return None
    if len(files) > 1:
        raise InputError(f"{folder} holds {len(files)} .gguf files; name one of them, such as {files[0]}.")
    return files[0]


# ---- the hub


def _download(model: str) -> Path:
    """Fetch a hub id into the local cache (or find it there): weights, configuration, tokenizer, licence."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    part = r"[A-Za-z0-9][\w.-]*"
    weights = (".gguf", ".safetensors", *(pattern[1:] for pattern in _PICKLES))
    if not re.fullmatch(f"{part}(/{part})?", model, re.ASCII) or model.endswith(weights):
        raise InputError(
            f"{model} does not exist; give a model directory, a .gguf file or a hub id (owner/name)."
        )
    wanted = ["*.safetensors", "*.safetensors.index.json", "config.json", HASHES, POOLING]
    wanted += _ASSETS
    unwanted = ["[!1]*/*", "1_[!P]*/*", "consolidated*"]  # folders, but for the one with POOLING
    try:
        folder = snapshot_download(model, allow_patterns=wanted, ignore_patterns=unwanted)
    except GatedRepoError as error:
        raise InputError(
            f"{model} is gated: accept its terms on the hub, log in with `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise InputError(
            f"{model} is neither a local path nor a model on the hub; check the spelling."
        ) from error
    except Exception as error:  # no network, a proxy, a full disk, a server's error: each with its own class
        raise InputError(
            f"{model} is no local path and could not be fetched from the hub ({_cause(error)}); "
            "check the spelling and the network, or give a directory."
        ) from error
    return Path(folder)


def _cause(error: Exception) -> str:
    """The first line of an exception's message, without its final stop."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(". ")[:300]


# ---- Hugging Face directories


def _open_directory(source: str, folder: Path) -> Checkpoint:
    raw = _read_config(folder)
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
    _check_layer_count(folder, raw, len(tensors))
    config = _load_config(source, folder)
    return Checkpoint(source, folder, config, tuple(stored), tensors)


def _read_config(folder: Path) -> dict[str, Any]:
    """config.json, refused when it asks for code of its own or for a model nobody knows."""
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} has no config.json; give a directory in the Hugging Face layout.")
    raw = read_json(folder / "config.json")
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


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size."""
    try:
        if path.stat().st_size > JSON_LIMIT:
            raise InputError(f"{path} has {path.stat().st_size} bytes, but {JSON_LIMIT} is the limit.")
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); check its permissions.") from error
    return _parse_object(data, path, "the file", dict)


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_sha256(file: Path, expected: str) -> None:
    """Hold a file's bytes against their hash.

    Raises:
        InputError: it is missing, or they differ.
    """
    if not file.is_file():
        raise InputError(f"{file} is missing: the artifact is incomplete; copy it again")
    if file_sha256(file) != expected:
        raise InputError(
            f"{file} does not have the bytes that were written (SHA-256 differs): it was damaged or edited; "
            "copy it again"
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object that must not name a key twice."""
    keys = dict(pairs)
    if len(keys) < len(pairs):
        raise ValueError("a key occurs twice")
    return keys


def _parse_object(data: bytes, path: Path, what: str, hook: Callable[[list], dict]) -> dict[str, Any]:
    """Parse a JSON object; `hook` turns a list of keys and values into a dict."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=hook)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: {what} is not valid JSON ({_cause(error)}); download it again.") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: {what} is not a JSON object; download it again.")
    return value


def _find_shards(folder: Path) -> dict[str, Path]:
    """`{tensor name: shard}` from the index; empty if the model is one `model.safetensors`."""
    if (folder / "model.safetensors").is_file():
        return {}
    index = folder / INDEX
    if not index.is_file():
        raise InputError(_no_weights(folder))
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index} has no weight_map; download it again.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not re.fullmatch(r"[\w-][\w. -]*\.safetensors", file):
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
    pickles = [file.name for pattern in _PICKLES for file in sorted(folder.glob(pattern))]
    if pickles:
        return _pickled(str(folder), pickles[0])
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    found = f"only {others[0]}" if others else "no weights"
    return (
        f"{folder} holds {found}, but model.safetensors or model.safetensors.index.json with its shards is "
        "expected; download the whole model (an adapter must be merged into its base first)."
    )


def _check_index(shards: dict[str, Path], stored: dict[Path, dict[str, StoredTensor]]) -> None:
    for name, file in shards.items():
        if name not in stored[file]:
            raise InputError(
                f"{file} lacks the tensor {name!r} that the index places there; download it again."
            )


def _check_layer_count(path: Path, raw: dict[str, Any], tensors: int) -> None:
    """A layer has at least one tensor; a huge count would make configuration classes build huge lists."""
    text = raw.get("text_config")
    for part in (raw, text if isinstance(text, dict) else {}):
        for key in _LAYER_COUNTS:
            if isinstance(part.get(key), int) and part[key] > tensors:
                raise InputError(
                    f"{path}/config.json: {key} is {part[key]}, but the files hold only {tensors} tensors; "
                    "use the config.json that belongs to them."
                )


def _load_config(source: str, path: Path) -> PreTrainedConfig:
    """The configuration as Transformers builds it from config.json or from GGUF metadata."""
    folder, extra = _transformers_address(path)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True, **extra)
    except Exception as error:  # validation errors of config classes have no common base class
        raise InputError(
            f"{source} has a configuration that Transformers refuses ({_cause(error)}); "
            "download the model again or upgrade Transformers."
        ) from error


def _transformers_address(path: Path) -> tuple[str, dict[str, str]]:
    """How `from_pretrained` wants a directory or a GGUF file named."""
    return (str(path.parent), {"gguf_file": path.name}) if path.is_file() else (str(path), {})


# ---- safetensors


def read_safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """All tensors of a file in file order, checked against its size; no tensor is read.

    Raises `InputError` for anything the safetensors format forbids: see `_place`.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if start == b"version ":  # https://git-lfs.github.com/spec/v1
                raise InputError(f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull`.")
            if len(start) < 8 or length > min(size - 8, HEADER_LIMIT):
                raise _bad(path, f"a header of {length} bytes is claimed in a file of {size}")
            header = _parse_object(file.read(length), path, "the safetensors header", _unique)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); check its permissions.") from error
    _check_metadata(path, header.pop("__metadata__", None))
    return _place(path, header, 8 + length, size)


def _bad(path: Path, what: str) -> InputError:
    return InputError(f"{path} is not a valid safetensors file: {what}; download it again.")


def _check_metadata(path: Path, metadata: Any) -> None:
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise _bad(path, "__metadata__ is not an object of strings")


def _place(path: Path, header: dict[str, Any], start: int, size: int) -> dict[str, StoredTensor]:
    """Tensors by ascending offset; they must fill the data section without gap or overlap."""
    spans = sorted((*_check_entry(path, name, entry), name) for name, entry in header.items())
    tensors, position = {}, 0
    for begin, end, name in spans:
        if begin != position:
            raise _bad(path, f"tensor {name!r} begins at {begin}, but the one before it ends at {position}")
        shape, dtype = tuple(header[name]["shape"]), DTYPES[header[name]["dtype"]]
        load = partial(_read_span, path, start + begin, dtype, shape=shape)
        tensors[name], position = StoredTensor(shape, dtype, load), end
    if start + position != size:
        cut = " (an interrupted download?)" if start + position > size else ""
        raise _bad(path, f"its tensors end at byte {start + position}, but the file has {size}{cut}")
    return tensors


def _check_entry(path: Path, name: str, entry: Any) -> tuple[int, int]:
    """`(begin, end)` of a header entry whose dtype, shape and extent agree; no integer overflows."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _bad(path, f"tensor {name!r} has not just the fields dtype, shape and data_offsets")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        raise InputError(
            f"{path}: tensor {name!r} has the dtype {entry['dtype']!r}, but {', '.join(DTYPES)} are read; "
            "use the model in one of these."
        )
    if not _sizes(shape) or len(shape) > 8 or not _sizes(offsets) or len(offsets) != 2:
        raise _bad(
            path, f"tensor {name!r} has the impossible shape {str(shape)[:80]} or offsets {str(offsets)[:80]}"
        )
    n_bytes = prod(shape) * DTYPES[entry["dtype"]].itemsize
    if offsets[1] - offsets[0] != n_bytes:
        raise _bad(path, f"tensor {name!r} needs {n_bytes} bytes, but has the data_offsets {offsets}")
    return offsets[0], offsets[1]


def _sizes(values: Any) -> bool:
    """Whether this is a list of whole numbers that PyTorch can take as sizes."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**48 for value in values)


def _read_span(path: Path, begin: int, dtype: torch.dtype, *, shape: tuple[int, ...]) -> torch.Tensor:
    """Read a tensor into fresh memory: no mapping of the file stays behind."""
    raw = torch.empty(prod(shape) * dtype.itemsize, dtype=torch.uint8)
    rest = raw.numpy().data
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(begin)
            while rest:
                count = file.readinto(rest)
                if not count:
                    raise _bad(path, "it became shorter while it was read")
                rest = rest[count:]
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); check the disk.") from error
    # Any byte but 0 and 1 would be an invalid bool.
    return (raw.ne(0) if dtype == torch.bool else raw.view(dtype)).reshape(shape)


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
        config = _load_config(source, summary)
    config.name_or_path = str(path.parent)
    tensors = {
        name: StoredTensor(
            gguf.tensors[own].shape, torch.float32, partial(gguf_reader.read_tensor, gguf, own)
        )
        for name, own in gguf_reader.hf_names(gguf).items()
    }
    return Checkpoint(source, path, config, (path,), tensors, gguf)


def _rebuild_assets(checkpoint: Checkpoint, out: Path) -> list[str]:
    """Tokenizer and generation config from GGUF metadata."""
    saved = [Path(file).name for file in checkpoint.tokenizer().save_pretrained(out)]
    names = {name for name in saved if (out / name).is_file()}
    if ids := _special_ids(checkpoint.gguf.metadata if checkpoint.gguf else {}):
        GenerationConfig(**ids).save_pretrained(out)
        names.add("generation_config.json")
    return sorted(names)


def _special_ids(metadata: dict[str, Any]) -> dict[str, Any]:
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


def _matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """The files of `folder` that match, links to files (the hub's cache is made of them) among them."""
    return [
        file
        for file in sorted(folder.iterdir())
        if file.is_file() and any(fnmatch(file.name, pattern) for pattern in patterns)
    ]
