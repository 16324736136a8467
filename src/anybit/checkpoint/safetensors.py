"""safetensors files: every header checked against its file, and tensors read one at a time.

A tensor is read into memory of its own, so that a process holds only what it keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from anybit.checkpoint.files import parse_object, regular_size, unique_keys
from anybit.config import Json
from anybit.errors import InputError
from anybit.formats.dtypes import Dtype
from anybit.lazy import Tensor, torch

HEADER_LIMIT = 100_000_000  # bytes of a safetensors header, as in the reference implementation
ALIGNMENT = 64  # bytes: where a tensor's memory begins, as kernels like it


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that lies in a file, checked."""

    shape: tuple[int, ...]
    dtype: Dtype
    load: Callable[..., Tensor]  # reads it; from safetensors files also `shape=` of a beginning


@dataclass(frozen=True)
class SafeTensor(StoredTensor):
    """One of a safetensors file, which is read with NumPy, too."""

    array: Callable[..., np.ndarray]  # its bytes as `dtype.numpy`; `shape=` of a beginning


def read_safetensors_header(path: Path) -> dict[str, SafeTensor]:
    """All tensors of a file in file order, checked against its size; no tensor is read.

    Raises `InputError` for anything the safetensors format forbids: see `_place`.
    """
    try:
        size = regular_size(path)
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if start == b"version ":  # https://git-lfs.github.com/spec/v1
                raise InputError(f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull`.")
            if len(start) < 8 or length > min(size - 8, HEADER_LIMIT):
                raise _bad(path, f"a header of {length} bytes is claimed in a file of {size}")
            header = parse_object(file.read(length), path, "the safetensors header", unique_keys)
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


def _place(path: Path, header: Json, start: int, size: int) -> dict[str, SafeTensor]:
    """Tensors by ascending offset; they must fill the data section without gap or overlap."""
    spans = sorted((*_check_entry(path, name, entry), name) for name, entry in header.items())
    tensors: dict[str, SafeTensor] = {}
    position = 0
    for begin, end, name in spans:
        if begin != position:
            raise _bad(path, f"tensor {name!r} begins at {begin}, but the one before it ends at {position}")
        shape, dtype = tuple(header[name]["shape"]), Dtype[header[name]["dtype"]]
        read = partial(_read_span, path, start + begin, dtype, shape=shape)
        tensors[name], position = SafeTensor(shape, dtype, partial(_tensor, read, dtype), read), end
    if start + position != size:
        cut = " (an interrupted download?)" if start + position > size else ""
        raise _bad(path, f"its tensors end at byte {start + position}, but the file has {size}{cut}")
    return tensors


def _check_entry(path: Path, name: str, entry: Any) -> tuple[int, int]:
    """`(begin, end)` of a header entry whose dtype, shape and extent agree; no integer overflows."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _bad(path, f"tensor {name!r} has not just the fields dtype, shape and data_offsets")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in Dtype.__members__:
        raise InputError(
            f"{path}: tensor {name!r} has the dtype {entry['dtype']!r}, but {', '.join(Dtype.__members__)} are read; "
            "use the model in one of these."
        )
    if not _sizes(shape) or len(shape) > 8 or not _sizes(offsets) or len(offsets) != 2:
        raise _bad(
            path, f"tensor {name!r} has the impossible shape {str(shape)[:80]} or offsets {str(offsets)[:80]}"
        )
    n_bytes = prod(shape) * Dtype[entry["dtype"]].itemsize
    if offsets[1] - offsets[0] != n_bytes:
        raise _bad(path, f"tensor {name!r} needs {n_bytes} bytes, but has the data_offsets {offsets}")
    return offsets[0], offsets[1]


def _sizes(values: Any) -> bool:
    """Whether this is a list of whole numbers that PyTorch can take as sizes."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**48 for value in values)


def _read_span(path: Path, begin: int, dtype: Dtype, *, shape: tuple[int, ...]) -> np.ndarray:
    """Read a tensor into fresh memory: no mapping of the file stays behind."""
    size = prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    raw = raw[-raw.ctypes.data % ALIGNMENT :][:size]
    rest = raw.data
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
    return (raw != 0 if dtype is Dtype.BOOL else raw.view(dtype.numpy)).reshape(shape)


def _tensor(read: Callable[..., np.ndarray], dtype: Dtype, **shape: tuple[int, ...]) -> Tensor:
    """What `read` gives, as a tensor."""
    return torch.from_numpy(read(**shape)).view(dtype.torch)
