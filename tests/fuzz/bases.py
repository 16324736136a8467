"""What is damaged: tiny models of several families, artifacts of every stored format, GGUF files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoConfig, BertConfig, LlamaForCausalLM

import anybit
from anybit.checkpoint.architectures import auto_class
from tests.builders import (
    COMMON,
    SIZES,
    byte_tokenizer,
    config_of,
    config_with_tables,
    options,
    save_encoder,
    save_random,
)
from tests.checkpoint.models import write_gguf

WITH_TABLES = ("gptj", "mpt")  # of all their positions
ENCODERS = ("bert",)
FAMILIES = ("llama", "llama-tied", "gpt2", "opt", "qwen3", "gemma3", *WITH_TABLES, *ENCODERS)
SHORT = {"samples": 3, "seq_len": 24}
ARTIFACTS = {  # name -> family, options
    "anybit": ("llama", options("anybit", kept_channels=0.05, **SHORT)),
    "rtn": ("llama-tied", options("rtn", bits=4, group_size=32, embed_bits=8)),
    "gptq": ("gpt2", options("gptq", bits=3, group_size=32, kv_bits=4, **SHORT)),
    "smoothquant": ("qwen3", options("smoothquant", **SHORT)),
    "mixllm": ("llama", options("mixllm", group_size=16, wide_rows=0.2, **SHORT)),
    "atom": ("llama", options("atom", group_size=16, outlier_channels=8, **SHORT)),
    "two-four-sixteen": ("llama", options("two-four-sixteen", **SHORT)),
    "squeezellm": ("opt", options("squeezellm", bits=3, magnitude_outliers=0.01, **SHORT)),
    "any-precision": ("llama", options("any-precision", widths=(3, 5), **SHORT)),
    "rtn-gptj": ("gptj", options("rtn", bits=4, group_size=16)),
    "gptq-bert": ("bert", options("gptq", bits=4, group_size=16, **SHORT)),
    "cmpq": ("gemma3", options("cmpq", bits=2.5, **SHORT)),
}
GGUFS = {"float": Kind.F32, "blocks": Kind.Q8_0, "fours": Kind.Q4_0}
TEXT = "the quick brown fox jumps over the lazy dog and runs away from all of the other animals " * 8
PAIRS = "sentence1\tsentence2\tscore\nthe fox runs\tthe dog runs\t2.5\na bird\tthe end of all\t1\n"
TOKENS = torch.tensor([[5, 100, 77, 263, 0, 18, 44, 5, 9]])


@dataclass(frozen=True)
class Bases:
    models: Mapping[str, Path]
    artifacts: Mapping[str, Path]
    ggufs: Mapping[str, Path]
    logits: Mapping[str, torch.Tensor]  # of every artifact; of encoders, their states
    text: Path
    pairs: Path  # of sentences

    def measured(self, name: str) -> tuple[object, ...]:
        """What `eval` is told besides the model: a few words of text, or some pairs for an encoder."""
        family = ARTIFACTS[name][0] if name in ARTIFACTS else name
        if family in ENCODERS:
            return "--pairs", self.pairs
        return "--text", self.text, "--seq-len", "32", "--max-tokens", "64"

    @staticmethod
    def make(root: Path) -> Bases:
        """Build all of them in a folder, the same each time."""
        root.mkdir(parents=True)
        text = root / "text.txt"
        text.write_text(TEXT)
        pairs = root / "pairs.tsv"
        pairs.write_text(PAIRS)
        models = {family: _model(root / "models" / family, family) for family in FAMILIES}
        artifacts = {name: root / "artifacts" / name for name in ARTIFACTS}
        for name, (family, chosen) in ARTIFACTS.items():
            anybit.quantize(
                models[family],
                artifacts[name],
                chosen,
                **({"calibration": str(text)} if chosen.calibrated else {}),
            )
        logits = {name: logits_of(whole(path)) for name, path in artifacts.items()}
        (root / "ggufs").mkdir()
        ggufs = {name: _gguf(root / "ggufs" / f"{name}.gguf", kind) for name, kind in GGUFS.items()}
        return Bases(models, artifacts, ggufs, logits, text, pairs)


def _model(folder: Path, family: str) -> Path:
    if family in ENCODERS:
        save_encoder(BertConfig(**{**COMMON, **SIZES, "pad_token_id": 0}), folder)
        modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in ("Transformer", "Pooling")]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    else:
        save_random(config_with_tables(family) if family in WITH_TABLES else config_of(family), folder)
        byte_tokenizer().save_pretrained(folder)
    (folder / "LICENSE").write_text("do what you like")
    return folder


def _gguf(path: Path, kind: Kind) -> Path:
    """A llama whose rows are whole blocks, with a tokenizer of bytes."""
    config = config_of("llama")
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 96, 16
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return write_gguf(path, LlamaForCausalLM(config), "llama", kind, tokenizer=byte_tokenizer())


def whole(path: Path) -> torch.nn.Module:
    """A model or an artifact as plain Transformers loads it."""
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    return auto_class(config).from_pretrained(path, local_files_only=True)


@torch.no_grad()
def logits_of(model: torch.nn.Module) -> torch.Tensor:
    """Logits, or the states of an encoder."""
    return model(input_ids=TOKENS)[0]
