"""GGUF files as models: their names, their rows and their configuration as Transformers has them.

Tensors are dequantized to fp32 by the `gguf` package, a few million weights at a time.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFValueType, GGUFWriter
from gguf.quants import dequantize

from anybit.checkpoint.gguf_header import BLOCKS, GgufArray, GgufTensor, bad_gguf, read_header
from anybit.config import Json
from anybit.errors import InputError

CHUNK_WEIGHTS = 2**22  # weights dequantized at a time: bounds what lies beside the result at 2 × 16 MiB


@dataclass(frozen=True)
class GgufFile:
    """A checked header."""

    path: Path
    metadata: Json  # numbers, strings and `GgufArray`s
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


def open_gguf(path: str | Path) -> GgufFile:
    """Read and check a GGUF header. Tensor data is not touched.

    Raises `InputError` for what `read_header` refuses, and for an architecture that is not in `FAMILIES`.
    """
    path = Path(path)
    gguf = GgufFile(path, *read_header(path))
    _check_model(gguf)
    return gguf


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
        raise bad_gguf(
            gguf.path, f"it claims {blocks} decoder blocks but has only {len(gguf.tensors)} tensors"
        )
    for name in hf_names(gguf).values():
        heads, rows = _heads(gguf, name), gguf.tensors[name].shape[0]
        if heads is not None and rows % (2 * heads):
            raise bad_gguf(gguf.path, f"tensor {name!r} has {rows} rows for {heads} attention heads")


def _positive(gguf: GgufFile, key: str) -> int:
    """A size from the metadata, e.g. `llama.block_count`."""
    key = f"{gguf.architecture}.{key}"
    value = gguf.metadata.get(key)
    if type(value) is not int or not 1 <= value < 2**31:
        raise bad_gguf(
            gguf.path, f"the metadata key {key!r} is {value!r}, but a positive integer is expected"
        )
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
                raise bad_gguf(path, f"tensor {tensor.name!r} could not be read: the file became shorter")
            with np.errstate(all="ignore"):  # scales of Inf or NaN are the caller's to report, not numpy's
                values = dequantize(raw.reshape(count, row_bytes), tensor.type)
            out[row : row + count] = torch.from_numpy(np.ascontiguousarray(values))
    return out.view(tensor.shape)


def block_type(gguf: GgufFile) -> str | None:
    """The quantized type that holds the most weights, e.g. "Q4_1"; None for a file of plain floats."""
    weights: Counter[str] = Counter()
    for tensor in gguf.tensors.values():
        if tensor.type.name in BLOCKS:
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
