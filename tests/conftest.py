"""Fixtures of the whole suite: one thread, no network, tiny models of several families, a byte tokenizer."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the suite shares its machine
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch

os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))  # before triton

import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

if "ANYBIT_BUILD" in os.environ:  # `make check-native`: that build instead of the editable install's
    sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable")]
    sys.path.insert(0, os.environ["ANYBIT_BUILD"])

SPECIAL = ("<s>", "</s>", "<unk>")
VOCABULARY = 256 + len(SPECIAL) + 5  # every byte, the special tokens, and rows that no token uses
SIZES = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
COMMON = {**TOKENS, "max_position_embeddings": 128, "initializer_range": 0.2}
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes to tokens, one to one: it encodes any text and gives it back."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def config_of(family: str) -> PreTrainedConfig:
    """Odd sizes on purpose: 48 and 80 channels are no multiples of the usual groups."""
    if family in ("llama", "llama-tied"):
        tied = family.endswith("tied")
        return LlamaConfig(**COMMON, **SIZES, num_key_value_heads=2, tie_word_embeddings=tied)
    if family == "qwen3":
        return Qwen3Config(**COMMON, **SIZES, num_key_value_heads=2, head_dim=12, tie_word_embeddings=False)
    if family == "gemma3":
        return Gemma3TextConfig(**COMMON, **SIZES, num_key_value_heads=1, head_dim=12, sliding_window=16)
    if family == "gpt2":
        return GPT2Config(**TOKENS, n_embd=48, n_layer=2, n_head=4, n_positions=128, initializer_range=0.2)
    if family == "opt":
        return OPTConfig(
            **TOKENS,
            hidden_size=48,
            ffn_dim=80,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
            word_embed_proj_dim=48,
            init_std=0.2,
        )
    raise ValueError(family)


FAMILIES = ("llama", "llama-tied", "qwen3", "gemma3", "gpt2", "opt")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def model_dir(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast
) -> Callable[[str], Path]:
    """`model_dir("llama")`: a complete directory with random float32 weights; never change it."""
    root = tmp_path_factory.mktemp("models")

    def make(family: str) -> Path:
        folder = root / family
        if not folder.exists():
            with torch.random.fork_rng():
                torch.manual_seed(FAMILIES.index(family))
                model = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32)
                for name, parameter in model.named_parameters():
                    if name.endswith("bias"):  # they start at zero, where a lost one would not show
                        torch.nn.init.normal_(parameter, std=0.2)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def model_copy(model_dir: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """`model_copy("llama")`: a directory of one's own to break."""

    def make(family: str) -> Path:
        return Path(shutil.copytree(model_dir(family), tmp_path / f"copy-of-{family}"))

    return make


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4000 tokens of reproducible words."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(1, 7))) for _ in range(60)]
    path = tmp_path_factory.mktemp("texts") / "words.txt"
    path.write_text(" ".join(rng.choices(words, k=2000))[:4000])
    return path
