"""What tests build: configurations, which come from nowhere else, and weights, inputs, statistics and models."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
    MptConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from anybit import methods
from anybit.calibration.stats import LinearStats
from anybit.calibration.streaming import StreamedModel
from anybit.checkpoint.directory import open_checkpoint
from anybit.config import LayerSpec, Options, TileSpec
from anybit.formats.weight import QuantizedWeight
from anybit.methods import METHODS, mixllm, nested_codes
from anybit.methods.two_four_sixteen import bits_eq10
from anybit.progress import Silent

CLASSES = [
    METHODS[name].options
    for name in ("gptq", "atom", "two-four-sixteen", "squeezellm", "any-precision", "cmpq", "anybit")
]
GIVEN: dict[Options, dict[str, Any]] = {}  # what the options that `options` made were made of
MakeModel = Callable[[str], Path]  # the fixtures `model_dir` and `model_copy`
FAMILIES = ("llama", "llama-tied", "qwen3", "gemma3", "gpt2", "opt")
SPECIAL = ("<s>", "</s>", "<unk>")
VOCABULARY = 256 + len(SPECIAL) + 5  # every byte, the special tokens, and rows that no token uses
SIZES = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
COMMON = {**TOKENS, "max_position_embeddings": 128, "initializer_range": 0.2}
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


class Said(Silent):
    """A report that keeps the lines it is given."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


# ---- configurations


def options(
    method: str = "anybit", bits: float | None = None, group_size: int | None = None, **rest: Any
) -> Options:
    """What decides an artifact's bytes, nothing left open; what is left out is the method's default."""
    given = {"bits": bits, "group_size": group_size, **rest}
    given = {name: value for name, value in given.items() if value is not None}
    made = methods.options(method, **given).resolve()
    GIVEN[made] = given
    return made


def changed(config: Options, **rest: Any) -> Options:
    """The same options but for these; defaults that hang on them are decided anew."""
    return options(config.name, **{**GIVEN[config], **rest})


def spec_of(config: Options) -> LayerSpec[Any]:
    """How each layer is quantized with these options."""
    return config.resolve().layer_spec()


def layer_spec(
    bits: float | None = None,
    group_size: int = 128,
    symmetric: bool = False,
    *,
    tiles: tuple[TileSpec, ...] | None = None,
    **rest: Any,
) -> LayerSpec[Any]:
    """How one layer is quantized: in one tile, or in these `tiles`, by options of the first method that has them.

    No clipping and no rounding of inputs, where nothing else is said.
    """
    if tiles is not None:
        assert (bits, group_size, symmetric) == (None, 128, False), "tiles say their own widths and groups"
    else:
        tiles = (TileSpec(4 if bits is None else bits, group_size, symmetric),)
    found = next(c for c in CLASSES if rest.keys() <= {item.name for item in fields(c)})
    plain = {"clip": False, "clip_ratio": 1.0, "act_bits": 16, "act_clip": 1.0}
    plain = {name: value for name, value in plain.items() if hasattr(found, name)}
    return LayerSpec(found(**{**plain, **rest}).resolve(), tiles)


def two_four_spec(
    wide: float = 0.25, group_size: int = 16, outliers: float = 0.0, **rest: Any
) -> LayerSpec[Any]:
    """2/4/16 with this share of groups at 4 bits."""
    tile = TileSpec(bits_eq10(wide, group_size), group_size)
    return layer_spec(tiles=(tile,), exclusive_outliers=outliers, **rest)


def codebook_spec(bits: float = 3, **options: Any) -> LayerSpec[Any]:
    return layer_spec(tiles=(TileSpec(bits),), **({"codebook_bits": 16} | options))


def cmpq_spec(bits: float = 3, **options: Any) -> LayerSpec[Any]:
    return codebook_spec(bits, **({"compensate": True} | options))


ANYBIT = options("anybit", samples=4, seq_len=32, kept_channels=0.05)


# ---- matrices and statistics


def width_weights(tuned: float, rows: int) -> Tensor:
    """What errors at widths 1 to 8 count where an average of so many bits matters most, float32 [rows, 8]."""
    return nested_codes.profile(tuned).repeat(rows, 1)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_matrix(out: int, in_: int) -> torch.Tensor:
    return torch.randn(out, in_, generator=torch.Generator().manual_seed(out * 1000 + in_))


def correlated_inputs(tokens: int, columns: int, seed: int = 1) -> Tensor:
    """Correlated inputs [tokens, columns] of very different sizes, as a language model's are."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) * 0.3 + torch.eye(columns)
    size = torch.exp(torch.randn(columns, generator=generator))
    return torch.randn(tokens, columns, generator=generator) @ mix * size


def outlier_inputs(tokens: int, channels: int, seed: int = 3) -> Tensor:
    """A few channels much larger than the others, as in language models."""
    x = random(tokens, channels, seed=seed)
    x[:, :: max(2, channels // 5)] *= 20
    return x


def second_moments(x: Tensor) -> LinearStats:
    stats = LinearStats.empty(x.shape[1], hessian=True)
    stats.add(x)
    return stats


def stats_of(x: Tensor) -> LinearStats:
    made = LinearStats.empty(x.shape[1], hessian=True, inputs=True)
    for row in x.split(64):
        made.add(row)
    return made


def correlated_moments(weight: torch.Tensor, seed: int = 2) -> LinearStats:
    """Moments of inputs whose channels correlate and differ in size."""
    n, generator = weight.shape[1], torch.Generator().manual_seed(seed)
    x = torch.randn(8 * n, n, generator=generator) @ torch.randn(n, n, generator=generator) / n**0.5
    x = x + torch.randn(8 * n, n, generator=generator) * (0.1 + torch.rand(n, generator=generator))
    return LinearStats(len(x), x.square().sum(0), x.T @ x)


def weight_and_stats(out: int, in_: int) -> tuple[Tensor, LinearStats]:
    """A weight matrix whose columns differ in size, and statistics of inputs that correlate."""
    mixed = outlier_inputs(4 * in_ + 64, in_) @ (torch.eye(in_) + 0.3 * random(in_, in_, seed=5) / in_**0.5)
    return random(out, in_, seed=2) * (1 + random(1, in_, seed=6).abs()), stats_of(mixed)


def rounded_layer(
    kind: str, shape: tuple[int, int] = (40, 72)
) -> tuple[Tensor, LinearStats, QuantizedWeight, LayerSpec]:
    """A layer of each kind with quantized activations, the method's own function having made it."""
    weight, stats = random(*shape, seed=1), stats_of(outlier_inputs(256, shape[1]))
    size = 32
    if kind == "mixllm":
        plain = layer_spec(tiles=(TileSpec(4, size),), clip=True, act_bits=8)
        spec = mixllm.with_rows(plain, range(3, shape[0], 7), shape[0])
    elif kind == "atom":
        spec = layer_spec(
            tiles=(TileSpec(4, size, True),), act_bits=4, act_clip=0.9, outlier_channels=8, clip_ratio=0.85
        )
    elif kind == "atom searched":
        spec = layer_spec(
            tiles=(TileSpec(3, size, True),), act_bits=3, act_search=True, outlier_channels=8, clip=True
        )
    elif kind == "smoothquant":
        spec = layer_spec(tiles=(TileSpec(8, -1, True),), act_bits=8, scaling="smoothquant")
    elif kind == "static":
        spec = layer_spec(tiles=(TileSpec(8, -1, True),), act_bits=8, act_static=True)
    else:
        spec = layer_spec(tiles=(TileSpec(4, size),), clip=True, scaling="awq")
    method = kind.split(maxsplit=1)[0].replace("static", "rtn")
    return weight, stats, METHODS[method].quantize(weight, stats, spec), spec


# ---- models


def token_rows(samples: int, length: int) -> Tensor:
    """Tokens [samples, length] of a vocabulary of 97."""
    return torch.randint(0, 97, (samples, length), generator=torch.Generator().manual_seed(length))


def opened(folder: Path, dtype: torch.dtype = torch.float32) -> StreamedModel:
    return StreamedModel(open_checkpoint(folder), dtype)


def save_random(config: PreTrainedConfig, folder: Path) -> Path:
    """A checkpoint of random float32 weights, biases too."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # they start at zero, where a lost one would not show
                torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(folder)
    return folder


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


def save_encoder(config: PreTrainedConfig, folder: Path) -> Path:
    """An encoder with random weights and a byte tokenizer that begins with <s>, ends with </s> and pads."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModel.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = "<unk>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.save_pretrained(folder)
    return folder


def config_with_tables(family: str) -> PreTrainedConfig:
    """GPT-J and MPT, which compute tables of all their positions."""
    if family == "gptj":
        return GPTJConfig(**TOKENS, n_embd=48, n_layer=2, n_head=4, n_positions=128, rotary_dim=8)
    return MptConfig(**TOKENS, d_model=48, n_layers=2, n_heads=4, expansion_ratio=2, max_seq_len=128)


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
