"""GGUF files (versions 2 and 3, little-endian): a reader that trusts no number in the file.

The whole header is checked against the file's size before any tensor is read: counts, string lengths,
shapes, block sizes, offsets, overlaps. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
Tensors are dequantized to fp32 by the `gguf` package, a few million weights at a time, and given the
names and the row order that Transformers uses.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

from anybit.checkpoint.files import regular_size
from anybit.errors import InputError

HEADER_LIMIT = 128 * 2**20  # bytes; real headers (a vocabulary of 262 144 words) stay below 16 MB
STRING_LIMIT = 16 * 2**20  # bytes; the longest real ones are chat templates
KEY_LIMIT = 65_535  # bytes, from the specification
CHUNK_WEIGHTS = 2**22  # weights dequantized at a time: bounds what lies beside the result at 2 × 16 MiB

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_FLOATS = ["F32", "F16", "BF16"]
# The block formats that hold weights and that gguf.quants can dequantize.
_BLOCKS = [
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


@dataclass(frozen=True)
class GgufFile:
    """A checked header."""

    path: Path
    metadata: dict[str, Any]  # numbers, strings and `GgufArray`s
    tensors: dict[str, GgufTensor]  # by the file's names, in the file's order

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])


@dataclass(frozen=True)
class Family:
    """How llama.cpp's converter changed a family of models, so that it can be undone."""

    block: dict[str, str]  # module names inside a decoder block: GGUF -> Transformers
    permuted: bool = False  # rows of q and k interleaved for ggml's rotary embedding
    norm_offset: float = 0.0  # what was added to every norm's weight


_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH_NORM = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FAMILIES = {
    "llama": Family(_LLAMA, permuted=True),  # Mistral too: llama.cpp writes it as llama
    "qwen2": Family(_LLAMA),
    "qwen3": Family(_LLAMA | _QK_NORM),
    "gemma3": Family(_LLAMA | _QK_NORM | _SANDWICH_NORM, norm_offset=1.0),
}
# Derived from the configuration, no parameters of the model; Transformers leaves them out as well.
_NO_WEIGHTS = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")


class _Header:
    """A cursor over the header that refuses to step past the file's end or the header limit."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self._file, self.path, self.size, self.position = file, path, size, 0

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes. Raises `InputError` when the file ends before."""
        end = self.position + count
        if end > min(self.size, HEADER_LIMIT):
            limit = f"the file ends at {self.size}" if end > self.size else f"a header ends by {HEADER_LIMIT}"
            raise _bad(self.path, f"{what} would reach byte {end}, but {limit}")
        self.position = end
        data = self._file.read(count)
        if len(data) != count:
            raise _bad(self.path, f"{what} could not be read: the file became shorter")
        return data

    def number(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def text(self, what: str, limit: int) -> str:
        """A string: its length, then UTF-8."""
        length = self.number("Q", f"the length of {what}")
        if length > limit:
            raise _bad(self.path, f"{what} claims {length} bytes, but {limit} is the limit")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise _bad(self.path, f"{what} is not UTF-8") from error

    def require(self, count: int, width: int, what: str) -> None:
        """Refuse a count whose entries, at least `width` bytes each, cannot fit into the rest of the file."""
        if count * width > self.size - self.position:
            raise _bad(self.path, f"it claims {count} {what}, which do not fit into {self.size} bytes")


def _bad(path: Path, what: str) -> InputError:
    """One sentence for a file that breaks the format."""
    return InputError(f"{path} is not a valid GGUF file: {what}; download or convert it again.")


def open_gguf(path: str | Path) -> GgufFile:
    """Read and check a GGUF header. Tensor data is not touched.

    Raises `InputError` for anything that is not a well-formed, little-endian, single-file GGUF of
    version 2 or 3 of an architecture in `FAMILIES`.
    """
    path = Path(path)
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
    tensors = _place_tensors(header, entries, _alignment(path, metadata))
    gguf = GgufFile(path, metadata, tensors)
    _check_model(gguf)
    return gguf


def _read_preamble(header: _Header) -> tuple[int, int]:
    """`(tensors, metadata entries)`, after the magic and the version."""
    magic = header.take(4, "the magic number")
    if magic != b"GGUF":
        raise _bad(header.path, f"it begins with {magic!r} instead of b'GGUF'")
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


def _read_metadata(header: _Header, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        key = header.text(f"metadata key {index}", KEY_LIMIT)
        if key in metadata:
            raise _bad(header.path, f"the metadata key {key!r} occurs twice")
        metadata[key] = _read_value(header, header.number("I", f"the type of {key!r}"), key)
    return metadata


def _read_value(header: _Header, kind: int, key: str) -> Any:
    """A number, a string, or a `GgufArray` whose contents are stepped over."""
    if kind in _SCALARS:
        return header.number(_SCALARS[kind], f"the value of {key!r}")
    if kind == _STRING:
        return header.text(f"the value of {key!r}", STRING_LIMIT)
    if kind != _ARRAY:
        raise _bad(header.path, f"{key!r} has the unknown type {kind}")
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
        raise _bad(
            header.path, f"{key!r} is an array of the type {element}, where numbers or strings are expected"
        )


def _read_tensor_entry(header: _Header) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    """`(name, shape in torch order, type, offset in the data section)`."""
    name = header.text("a tensor name", KEY_LIMIT)
    dimensions = header.number("I", f"the number of dimensions of {name!r}")
    if not 1 <= dimensions <= 4:
        raise _bad(header.path, f"tensor {name!r} has {dimensions} dimensions, but 1 to 4 are possible")
    shape = tuple(header.number("Q", f"the shape of {name!r}") for _ in range(dimensions))[::-1]
    kind = header.number("I", f"the type of {name!r}")
    return name, shape, _weight_type(header.path, name, kind), header.number("Q", f"the offset of {name!r}")


def _weight_type(path: Path, name: str, kind: int) -> GGMLQuantizationType:
    """The tensor type behind GGUF's number, if it is one that holds weights."""
    known = {int(each): each for each in GGMLQuantizationType if each.name in _FLOATS + _BLOCKS}
    if kind not in known:
        raise InputError(
            f"{path}: tensor {name!r} has the GGUF type {kind}, but weights are read from "
            f"{', '.join(_FLOATS + _BLOCKS)}; convert the model to one of these, best F16 or BF16."
        )
    return known[kind]


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if type(value) is not int or not 8 <= value <= 2**16 or value & (value - 1):
        raise _bad(path, f"general.alignment is {value!r}, but a power of two from 8 to 65536 is expected")
    return value


def _place_tensors(
    header: _Header, entries: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]], alignment: int
) -> dict[str, GgufTensor]:
    """Sizes and file offsets of all tensors, checked: aligned, inside the file, no two over each other."""
    start = -(-header.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise _bad(header.path, f"tensor {name!r} occurs twice")
        n_bytes = _stored_bytes(header.path, name, shape, kind)
        if offset % alignment:
            raise _bad(header.path, f"tensor {name!r} lies at offset {offset}, not a multiple of {alignment}")
        if start + offset + n_bytes > header.size:
            reach = f"tensor {name!r} reaches byte {start + offset + n_bytes}"
            raise _bad(header.path, f"{reach}, but the file ends at {header.size} (an interrupted download?)")
        tensors[name] = GgufTensor(name, shape, kind, start + offset, n_bytes)
    for left, right in pairwise(sorted(tensors.values(), key=lambda tensor: tensor.offset)):
        if left.offset + left.n_bytes > right.offset:
            raise _bad(header.path, f"the tensors {left.name!r} and {right.name!r} overlap")
    return tensors


def _stored_bytes(path: Path, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    """Bytes of a tensor; rows are whole numbers of blocks. Python integers: nothing overflows."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if 0 in shape or prod(shape) >= 2**63:
        raise _bad(path, f"tensor {name!r} has the impossible shape {list(shape)}")
    if shape[-1] % block:
        raise _bad(path, f"tensor {name!r} has rows of {shape[-1]} weights, but {kind.name} packs by {block}")
    return prod(shape) // block * block_bytes


def _check_model(gguf: GgufFile) -> None:
    """Architecture, the numbers that Transformers builds its configuration from, and names."""
    architecture = gguf.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise InputError(
            f"{gguf.path} holds the architecture {architecture!r}, but GGUF is read for "
            f"{', '.join(FAMILIES)}; use the model's safetensors directory instead."
        )
    if gguf.metadata.get("split.count", 1) not in (0, 1):
        raise InputError(f"{gguf.path} is one part of a split GGUF; join them with llama-gguf-split --merge.")
    sizes = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count")
    blocks, *_ = [_positive(gguf, key) for key in sizes]
    if blocks > len(gguf.tensors):
        raise _bad(gguf.path, f"it claims {blocks} decoder blocks but has only {len(gguf.tensors)} tensors")
    for name in hf_names(gguf).values():
        heads, rows = _heads(gguf, name), gguf.tensors[name].shape[0]
        if heads is not None and rows % (2 * heads):
            raise _bad(gguf.path, f"tensor {name!r} has {rows} rows for {heads} attention heads")


def _positive(gguf: GgufFile, key: str) -> int:
    """A size from the metadata, e.g. `llama.block_count`."""
    key = f"{gguf.architecture}.{key}"
    value = gguf.metadata.get(key)
    if type(value) is not int or not 1 <= value < 2**31:
        raise _bad(gguf.path, f"the metadata key {key!r} is {value!r}, but a positive integer is expected")
    return value


def _heads(gguf: GgufFile, name: str) -> int | None:
    """Heads whose rows the converter permuted in this tensor; None for a tensor it left alone."""
    module = name.rsplit(".", 1)[0].rsplit(".", 1)[-1]
    if not FAMILIES[gguf.architecture].permuted or module not in ("attn_q", "attn_k"):
        return None
    grouped = module == "attn_k" and f"{gguf.architecture}.attention.head_count_kv" in gguf.metadata
    return _positive(gguf, "attention.head_count_kv" if grouped else "attention.head_count")


def hf_names(gguf: GgufFile) -> dict[str, str]:
    """`{Transformers' name: the file's name}` in the file's order; unknown tensors raise `InputError`."""
    blocks = _positive(gguf, "block_count")
    names = {}
    for name in gguf.tensors:
        if _NO_WEIGHTS.fullmatch(name):
            continue
        hf_name = _hf_name(FAMILIES[gguf.architecture], name, blocks)
        if hf_name is None:
            raise InputError(
                f"{gguf.path}: tensor {name!r} is not known in a {gguf.architecture} model of {blocks} "
                "blocks (mixtures of experts are not read from GGUF); use the model's safetensors directory."
            )
        names[hf_name] = name
    return names


def _hf_name(family: Family, name: str, blocks: int) -> str | None:
    """Transformers' name of a tensor, or None."""
    match = re.fullmatch(r"(?:blk\.(0|[1-9]\d{0,8})\.)?(\w+)\.(weight|bias)", name, re.ASCII)
    if match is None:
        return None
    block, module, suffix = match.groups()
    if block is None:
        return f"{_TOP[module]}.{suffix}" if module in _TOP else None
    if int(block) >= blocks or module not in family.block:
        return None
    return f"model.layers.{block}.{family.block[module]}.{suffix}"


def read_tensor(gguf: GgufFile, name: str) -> torch.Tensor:
    """The tensor with the file's name `name` as fp32, in Transformers' row order, in fresh memory."""
    weight = _dequantized(gguf.path, gguf.tensors[name])
    heads = _heads(gguf, name)
    if heads is not None:  # ggml: [heads, head_dim/2, 2, ...] -> Transformers: [heads, 2, head_dim/2, ...]
        weight = weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)
    offset = FAMILIES[gguf.architecture].norm_offset
    return weight.sub_(offset) if offset and name.endswith("norm.weight") else weight


def _dequantized(path: Path, tensor: GgufTensor) -> torch.Tensor:
    """Read and dequantize some rows at a time: the gguf package would need twice the fp32 tensor at once."""
    columns = tensor.shape[-1]
    rows = prod(tensor.shape) // columns
    row_bytes = tensor.n_bytes // rows
    out = torch.empty(rows, columns, dtype=torch.float32)
    step = max(1, CHUNK_WEIGHTS // columns)
    with path.open("rb", buffering=0) as file:
        file.seek(tensor.offset)
        for row in range(0, rows, step):
            count = min(step, rows - row)
            raw = np.fromfile(file, dtype=np.uint8, count=count * row_bytes)
            if raw.size != count * row_bytes:
                raise _bad(path, f"tensor {tensor.name!r} could not be read: the file became shorter")
            with np.errstate(all="ignore"):  # scales of Inf or NaN are the caller's to report, not numpy's
                values = dequantize(raw.reshape(count, row_bytes), tensor.type)
            out[row : row + count] = torch.from_numpy(np.ascontiguousarray(values))
    return out.view(tensor.shape)


def block_type(gguf: GgufFile) -> str | None:
    """The quantized type that holds the most weights, e.g. "Q4_1"; None for a file of plain floats."""
    weights: Counter[str] = Counter()
    for tensor in gguf.tensors.values():
        if tensor.type.name in _BLOCKS:
            weights[tensor.type.name] += prod(tensor.shape)
    return weights.most_common(1)[0][0] if weights else None


def write_summary(gguf: GgufFile, path: Path) -> None:
    """Write a GGUF file with all that Transformers' configuration depends on, and nothing else.

    Transformers gives the same configuration for it as for the whole file, but without minutes or
    megabytes spent on the vocabulary, and never sees bytes that were not checked here.
    """
    writer = GGUFWriter(path, gguf.architecture)  # which writes general.architecture itself
    kinds = {bool: GGUFValueType.BOOL, float: GGUFValueType.FLOAT64}
    for key, value in gguf.metadata.items():
        if isinstance(value, str) and key not in ("general.architecture", "tokenizer.chat_template"):
            writer.add_string(key, value)
        elif isinstance(value, (int, float)) and key != "general.alignment":
            whole = GGUFValueType.INT64 if value < 0 else GGUFValueType.UINT64
            writer.add_key_value(key, value, kinds.get(type(value), whole))
    words = gguf.metadata.get("tokenizer.ggml.tokens")
    if isinstance(words, GgufArray) and f"{gguf.architecture}.vocab_size" not in gguf.metadata:
        writer.add_vocab_size(words.length)
    if "output.weight" in gguf.tensors:  # its absence means tied embeddings
        writer.add_tensor("output.weight", np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
