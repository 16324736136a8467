"""A tiny model and its tokenizer, built here; models as GGUF files."""

from pathlib import Path

import gguf as gguf_package
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

INDEX = "model.safetensors.index.json"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def build_model(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def build_tokenizer() -> PreTrainedTokenizerFast:
    words = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", "hello", "world"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = TEMPLATE
    return fast


def converted(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    """What llama.cpp's converter writes: its names, q and k permuted for llama, norms + 1 for gemma3.

    Names come from the gguf package's own table, the permutation from convert_hf_to_gguf.py.
    """
    config, tensors = model.config, {}
    arch = next(key for key, name in gguf_package.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf_package.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = weight.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
            name.split(".")[-2]
        )
        if architecture == "llama" and heads:
            split = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
            value = np.ascontiguousarray(split.swapaxes(1, 2).reshape(value.shape))
        if architecture == "gemma3" and name.endswith("norm.weight"):
            value = value + 1
        tensors[table.get_name(name, try_suffixes=(".weight", ".bias"))] = value
    return tensors


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    kind: Kind = Kind.F32,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **extra: object,
) -> Path:
    """A GGUF file of a Transformers model: matrices as `kind`, the rest as F32; perhaps with a tokenizer of bytes."""
    config, writer = model.config, GGUFWriter(path, architecture)
    writer.add_name(str(extra.pop("name", "tiny")))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters.get("rope_theta", 10000.0))
    writer.add_vocab_size(config.vocab_size)
    if architecture == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    if architecture in ("gemma3", "qwen3"):
        writer.add_key_length(config.head_dim)
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    for key, value in extra.items():
        writer.add_uint32(key.replace("__", "."), value)
    if tokenizer is not None:
        words = [*tokenizer.convert_ids_to_tokens(range(len(tokenizer))), "Āā"]  # bytes 0 and 1
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(words + [f"<unused {i}>" for i in range(len(words), config.vocab_size)])
        writer.add_token_types([3] * 3 + [1] * (len(words) - 3) + [5] * (config.vocab_size - len(words)))
        writer.add_token_merges(["Ā ā"])  # Transformers reads no tokenizer without any
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_chat_template(TEMPLATE)
    for name, value in converted(model, architecture).items():
        packed = gguf_package.quants.quantize(value, kind) if value.ndim == 2 else value
        writer.add_tensor(name, packed, raw_dtype=kind if value.ndim == 2 else Kind.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
