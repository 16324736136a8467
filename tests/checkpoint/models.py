"""A tiny model and its tokenizer, built here."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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
