"""Files of a model: what they are called, JSON of bounded size, and hashes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from anybit.config import Json
from anybit.errors import InputError

JSON_LIMIT = 10_000_000  # bytes of config.json and the like
INDEX_LIMIT = 100_000_000  # of an index, which names every tensor
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
ASSETS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tekken.json", "*.tiktoken"),
    *("tokenizer.model", "spiece.model", "sentencepiece*.model"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
    *LICENCES,
)
INDEX = "model.safetensors.index.json"  # which shard holds which tensor
NAME_BYTES = 255  # of a file's name: what file systems take
HASHES = "anybit.index.json"  # size and SHA-256 of all shards, refinements, config.json and the index
POOLING = "1_Pooling/config.json"  # sentence-transformers': how token states become one embedding
TEMPLATES = "additional_chat_templates"  # folder of NAME.jinja; Transformers prefers its default.jinja
OPENED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", *LICENCES)  # beside the weights


def regular_size(path: Path) -> int:
    """Bytes of a file. Whoever opened a pipe or a device instead would wait for it.

    Raises:
        InputError: it is not a regular file, nor a link to one.
        OSError: it cannot be found.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path} is not a regular file; put the file itself there.")
    return status.st_size


def check_files(folder: Path) -> None:
    """Refuse a folder in which Transformers would open what is no file, and wait for it, or a file from elsewhere.

    Weights may lie on another disk: of them, links are followed.

    Raises:
        InputError: a pipe, a socket or a device; see also `check_link`.
    """
    for path in (*folder.iterdir(), *folder.glob("*/*")):
        try:
            kind = path.stat().st_mode
        except OSError:  # a link that leads nowhere is as good as no file
            continue
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
            raise InputError(f"{path} is not a regular file; put the file itself there.")
    for file in (*matching(folder, OPENED), *files_below(folder)):
        check_link(file, folder)


def files_below(folder: Path) -> list[Path]:
    """The files in folders of a model's `folder` that belong to it: how it pools, further chat templates."""
    templates = folder / TEMPLATES
    pooling = [folder / POOLING] if (folder / POOLING).is_file() else []
    return [*pooling, *(matching(templates, ("*.jinja",)) if templates.is_dir() else ())]


def is_name_of_file(name: str) -> bool:
    """Whether a name is that of a file of a model's own folder, or of one of `files_below`."""
    below = name == POOLING or re.fullmatch(rf"{TEMPLATES}/[^/]+\.jinja", name)
    own = Path(name).name == name and "\0" not in name
    return (bool(below) or own) and len(name.encode()) <= NAME_BYTES


def read_json(path: Path, limit: int = JSON_LIMIT) -> Json:
    """A JSON object from a file of at most `limit` bytes."""
    return parse_object(_read_bounded(path, limit), path, "the file", dict)


def read_json_list(path: Path) -> list[Any]:
    """The same of a JSON array."""
    value = _parse(_read_bounded(path, JSON_LIMIT), path, "the file", dict)
    if not isinstance(value, list):
        raise InputError(f"{path}: the file is not a JSON array; download it again.")
    return value


def _read_bounded(path: Path, limit: int) -> bytes:
    try:
        size = regular_size(path)
        if size > limit:
            raise InputError(f"{path} has {size} bytes, but {limit} is the limit.")
        return path.read_bytes()
    except InputError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        why = getattr(error, "strerror", None) or cause(error)
        raise InputError(f"{path} cannot be read ({why}); check its name and permissions.") from error


def parse_object(data: bytes, path: Path, what: str, hook: Callable[[list], dict]) -> Json:
    """Parse a JSON object; `hook` turns a list of keys and values into a dict."""
    value = _parse(data, path, what, hook)
    if not isinstance(value, dict):
        raise InputError(f"{path}: {what} is not a JSON object; download it again.")
    return value


def _parse(data: bytes, path: Path, what: str, hook: Callable[[list], dict]) -> Any:
    try:
        text = data.decode()
        value = json.loads(text, object_pairs_hook=hook)
        if "\\ud" in text or "\\uD" in text:  # half of a surrogate pair is no text, and no file can hold it
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: {what} is not valid JSON ({cause(error)}); download it again.") from error
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> Json:
    """A JSON object that must not name a key twice."""
    keys = dict(pairs)
    if len(keys) < len(pairs):
        raise ValueError("a key occurs twice")
    return keys


def cause(error: BaseException) -> str:
    """The first line of an exception's message, without its final stop."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(". ")[:300]


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_whole(path: Path, write: Callable[[Path], object], mode: int | None = None) -> None:
    """Have `write` make a file under another name, and give it its own once it is on the disk: whole or not at all.

    Args:
        path: the file.
        write: makes it at the path that it is given.
        mode: who may read it; default: as `write` leaves it. safetensors leaves files that only their owner reads.

    Raises:
        Exception: what `write` does. No unfinished file stays, and what was at `path` does.
    """
    unfinished = path.with_name(path.name + ".new")
    try:
        write(unfinished)
        if mode is not None:
            unfinished.chmod(mode)
        sync(unfinished)
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's or a directory's contents survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unwritable(file: Path, error: Exception, kept: str = "") -> InputError:
    """What to say of a file that could not be written, and of what was written before.

    Args:
        file: the file.
        error: an OSError, or safetensors' own.
        kept: a clause, if any.
    """
    again = "run the same command again" + (f"; {kept}" if kept else "")
    if "os error 28" in str(error) or getattr(error, "errno", None) == errno.ENOSPC:
        free = shutil.disk_usage(file.parent).free
        return InputError(
            f"the disk is full ({free / 1e6:.0f} MB free at {file.parent}): make room and {again}"
        )
    return InputError(f"{file.name} cannot be written to {file.parent} ({error}): mend that and {again}")


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


def matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """The files of `folder` that match, links to files among them."""
    return [
        file
        for file in sorted(folder.iterdir())
        if file.is_file() and any(fnmatch(file.name, pattern) for pattern in patterns)
    ]


def check_link(file: Path, folder: Path) -> None:
    """Refuse a file that is a link out of the model's `folder`: an artifact would publish what it leads to.

    The hub's cache is made of links: `snapshots/REVISION/FILE` leads to `blobs/HASH`.
    """
    home, target = folder.resolve(), file.resolve()
    blobs = home.parents[1] / "blobs" if home.parent.name == "snapshots" else home
    if not (target.is_relative_to(home) or target.is_relative_to(blobs)):
        raise InputError(
            f"{file} leads to {target}, out of the model's directory: put the file itself there, or remove the link."
        )
