"""Headers of GGUF files (versions 2 and 3, little-endian): a reader that trusts no number in the file.

The whole header is checked against the file's size before any tensor is read: counts, string lengths,
shapes, block sizes, offsets, overlaps. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from anybit.checkpoint.files import regular_size
from anybit.config import Json
from anybit.errors import InputError

HEADER_LIMIT = 128 * 2**20  # bytes; real headers (a vocabulary of 262 144 words) stay below 16 MB
STRING_LIMIT = 16 * 2**20  # bytes; the longest real ones are chat templates
KEY_LIMIT = 65_535  # bytes, from the specification

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
FLOATS = ["F32", "F16", "BF16"]
# The block formats that hold weights and that gguf.quants can dequantize.
BLOCKS = [
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4"),
]


@dataclass(frozen=True)
class GgufArray:
    """A metadata array: its element type (GGUF's number) and length; the contents stay in the file."""

    element_type: int
    length: int


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies, checked against the file."""

    name: str  # as in the file, e.g. "blk.0.attn_q.weight"
    shape: tuple[int, ...]  # torch order: [out, in]
    type: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    n_bytes: int


def read_header(path: Path) -> tuple[Json, dict[str, GgufTensor]]:
    """`(metadata, tensors by name, in file order)`. Tensor data is not touched.

    Raises `InputError` for anything that is not a well-formed, little-endian, single-file GGUF of
    version 2 or 3.
    """
    try:
        size = regular_size(path)
        with path.open("rb", buffering=2**20) as file:
            header = _Header(file, path, size)
            tensor_count, metadata_count = _read_preamble(header)
            metadata = _read_metadata(header, metadata_count)
            entries = [_read_tensor_entry(header) for _ in range(tensor_count)]
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); check the path and its permissions."
        ) from error
    return metadata, _place_tensors(header, entries, _alignment(path, metadata))


class _Header:
    """A cursor over the header that refuses to step past the file's end or the header limit."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self._file, self.path, self.size, self.position = file, path, size, 0

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes. Raises `InputError` when the file ends before."""
        end = self.position + count
        if end > min(self.size, HEADER_LIMIT):
            limit = f"the file ends at {self.size}" if end > self.size else f"a header ends by {HEADER_LIMIT}"
            raise bad_gguf(self.path, f"{what} would reach byte {end}, but {limit}")
        self.position = end
        data = self._file.read(count)
        if len(data) != count:
            raise bad_gguf(self.path, f"{what} could not be read: the file became shorter")
        return data

    def number(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def text(self, what: str, limit: int) -> str:
        """A string: its length, then UTF-8."""
        length = self.number("Q", f"the length of {what}")
        if length > limit:
            raise bad_gguf(self.path, f"{what} claims {length} bytes, but {limit} is the limit")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise bad_gguf(self.path, f"{what} is not UTF-8") from error

    def require(self, count: int, width: int, what: str) -> None:
        """Refuse a count whose entries, at least `width` bytes each, cannot fit into the rest of the file."""
        if count * width > self.size - self.position:
            raise bad_gguf(self.path, f"it claims {count} {what}, which do not fit into {self.size} bytes")


def bad_gguf(path: Path, what: str) -> InputError:
    """One sentence for a file that breaks the format."""
    return InputError(f"{path} is not a valid GGUF file: {what}; download or convert it again.")


def _read_preamble(header: _Header) -> tuple[int, int]:
    """`(tensors, metadata entries)`, after the magic and the version."""
    magic = header.take(4, "the magic number")
    if magic != b"GGUF":
        raise bad_gguf(header.path, f"it begins with {magic!r} instead of b'GGUF'")
    version = header.number("I", "the version")
    if version not in (2, 3):
        swapped = " (a big-endian file)" if version in (2 << 24, 3 << 24) else ""
        raise InputError(
            f"{header.path} has GGUF version {version}{swapped}, but little-endian 2 and 3 are read; "
            "convert it again with a current llama.cpp."
        )
    tensor_count = header.number("Q", "the tensor count")
    metadata_count = header.number("Q", "the metadata count")
    header.require(tensor_count, 8 + 1 + 4 + 8 + 4 + 8, "tensors")
    header.require(metadata_count, 8 + 1 + 4 + 1, "metadata entries")
    return tensor_count, metadata_count


def _read_metadata(header: _Header, count: int) -> Json:
    metadata: Json = {}
    for index in range(count):
        key = header.text(f"metadata key {index}", KEY_LIMIT)
        if key in metadata:
            raise bad_gguf(header.path, f"the metadata key {key!r} occurs twice")
        metadata[key] = _read_value(header, header.number("I", f"the type of {key!r}"), key)
    return metadata


def _read_value(header: _Header, kind: int, key: str) -> Any:
    """A number, a string, or a `GgufArray` whose contents are stepped over."""
    if kind in _SCALARS:
        return header.number(_SCALARS[kind], f"the value of {key!r}")
    if kind == _STRING:
        return header.text(f"the value of {key!r}", STRING_LIMIT)
    if kind != _ARRAY:
        raise bad_gguf(header.path, f"{key!r} has the unknown type {kind}")
    element, length = header.number("I", f"the type of {key!r}"), header.number("Q", f"the length of {key!r}")
    _skip_array(header, element, length, key)
    return GgufArray(element, length)


def _skip_array(header: _Header, element: int, length: int, key: str) -> None:
    """Step over an array's contents. Arrays of arrays, which no model has, are refused."""
    if element in _SCALARS:
        width = struct.calcsize("<" + _SCALARS[element])
        header.require(length, width, f"elements of {key!r}")
        header.take(length * width, f"the array {key!r}")
    elif element == _STRING:
        header.require(length, 8, f"elements of {key!r}")
        for _ in range(length):
            header.text(f"an element of {key!r}", KEY_LIMIT)
    else:
        raise bad_gguf(
            header.path, f"{key!r} is an array of the type {element}, where numbers or strings are expected"
        )


def _read_tensor_entry(header: _Header) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    """`(name, shape in torch order, type, offset in the data section)`."""
    name = header.text("a tensor name", KEY_LIMIT)
    dimensions = header.number("I", f"the number of dimensions of {name!r}")
    if not 1 <= dimensions <= 4:
        raise bad_gguf(header.path, f"tensor {name!r} has {dimensions} dimensions, but 1 to 4 are possible")
    shape = tuple(header.number("Q", f"the shape of {name!r}") for _ in range(dimensions))[::-1]
    kind = header.number("I", f"the type of {name!r}")
    return name, shape, _weight_type(header.path, name, kind), header.number("Q", f"the offset of {name!r}")


def _weight_type(path: Path, name: str, kind: int) -> GGMLQuantizationType:
    """The tensor type behind GGUF's number, if it is one that holds weights."""
    known = {int(each): each for each in GGMLQuantizationType if each.name in FLOATS + BLOCKS}
    if kind not in known:
        raise InputError(
            f"{path}: tensor {name!r} has the GGUF type {kind}, but weights are read from "
            f"{', '.join(FLOATS + BLOCKS)}; convert the model to one of these, best F16 or BF16."
        )
    return known[kind]


def _alignment(path: Path, metadata: Json) -> int:
    value = metadata.get("general.alignment", 32)
    if type(value) is not int or not 8 <= value <= 2**16 or value & (value - 1):
        raise bad_gguf(
            path, f"general.alignment is {value!r}, but a power of two from 8 to 65536 is expected"
        )
    return value


def _place_tensors(
    header: _Header, entries: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]], alignment: int
) -> dict[str, GgufTensor]:
    """Sizes and file offsets of all tensors, checked: aligned, inside the file, no two over each other."""
    start = -(-header.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise bad_gguf(header.path, f"tensor {name!r} occurs twice")
        n_bytes = _stored_bytes(header.path, name, shape, kind)
        if offset % alignment:
            raise bad_gguf(
                header.path, f"tensor {name!r} lies at offset {offset}, not a multiple of {alignment}"
            )
        if start + offset + n_bytes > header.size:
            reach = f"tensor {name!r} reaches byte {start + offset + n_bytes}"
            raise bad_gguf(
                header.path, f"{reach}, but the file ends at {header.size} (an interrupted download?)"
            )
        tensors[name] = GgufTensor(name, shape, kind, start + offset, n_bytes)
    for left, right in pairwise(sorted(tensors.values(), key=lambda tensor: tensor.offset)):
        if left.offset + left.n_bytes > right.offset:
            raise bad_gguf(header.path, f"the tensors {left.name!r} and {right.name!r} overlap")
    return tensors


def _stored_bytes(path: Path, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    """Bytes of a tensor; rows are whole numbers of blocks. Python integers: nothing overflows."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if 0 in shape or prod(shape) >= 2**63:
        raise bad_gguf(path, f"tensor {name!r} has the impossible shape {list(shape)}")
    if shape[-1] % block:
        raise bad_gguf(
            path, f"tensor {name!r} has rows of {shape[-1]} weights, but {kind.name} packs by {block}"
        )
    return prod(shape) // block * block_bytes
