"""A GGUF file of a shape with random weights, for llama.cpp beside `anybit bench decode random:SHAPE`.

python bench/peers/random_gguf.py Qwen3-0.6B f16.gguf
llama-quantize f16.gguf Q4_0.gguf Q4_0

Weights have 16 bits, so that llama-quantize decides what each tensor becomes, as in its users' files. The tokenizer
knows bytes, and tokens that no text has: llama-bench needs none, but mistral.rs is asked in text.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

from anybit.bench.random_model import SHAPES, random_config

STEP = 0.02  # standard deviation of weights
ARCHITECTURES = {"qwen3": gguf.MODEL_ARCH.QWEN3, "llama": gguf.MODEL_ARCH.LLAMA}
SPLITS = {"qwen3": "qwen2", "llama": "llama-bpe"}  # names of the rules by which a text is cut


def write(shape: str, path: Path) -> None:
    kind, config = SHAPES[shape][0], random_config(shape)
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[kind]])
    describe(writer, config)
    add_tokenizer(writer, config.vocab_size, SPLITS[kind])

    def matrix(name: str, rows: int, columns: int) -> None:
        values = generator.standard_normal((rows, columns), np.float32) * STEP
        writer.add_tensor(name, values.astype(np.float16))

    def norm(name: str, size: int) -> None:
        writer.add_tensor(name, np.ones(size, np.float32))

    hidden, inner, head = config.hidden_size, config.intermediate_size, head_size(config)
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    matrix("token_embd.weight", config.vocab_size, hidden)
    if not config.tie_word_embeddings:
        matrix("output.weight", config.vocab_size, hidden)
    norm("output_norm.weight", hidden)
    for block in range(config.num_hidden_layers):
        own = f"blk.{block}"
        norm(f"{own}.attn_norm.weight", hidden)
        norm(f"{own}.ffn_norm.weight", hidden)
        if kind == "qwen3":
            norm(f"{own}.attn_q_norm.weight", head)
            norm(f"{own}.attn_k_norm.weight", head)
        matrix(f"{own}.attn_q.weight", queries, hidden)
        matrix(f"{own}.attn_k.weight", keys, hidden)
        matrix(f"{own}.attn_v.weight", keys, hidden)
        matrix(f"{own}.attn_output.weight", hidden, queries)
        matrix(f"{own}.ffn_gate.weight", inner, hidden)
        matrix(f"{own}.ffn_up.weight", inner, hidden)
        matrix(f"{own}.ffn_down.weight", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=True)
    writer.close()


def describe(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size(config))
    writer.add_value_length(head_size(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)


def add_tokenizer(writer: gguf.GGUFWriter, size: int, split: str) -> None:
    """Byte-level BPE of one merge: a token for each byte, one of two bytes, others to fill the vocabulary, an end."""
    alphabet = list(bytes_to_unicode().values())
    tokens = [*alphabet, "aa"]
    tokens += [f"token{i}" for i in range(len(tokens), size - 1)] + ["<|end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (size - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["a a"])
    writer.add_eos_token_id(size - 1)
    writer.add_add_bos_token(False)


def head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=[*SHAPES])
    parser.add_argument("out", type=Path)
    asked = parser.parse_args()
    write(asked.shape, asked.out)


if __name__ == "__main__":
    main()
