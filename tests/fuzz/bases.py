"""What is damaged: tiny models of several families, artifacts of every stored format, GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import anybit
from tests.builders import byte_tokenizer, config_of, options, save_random
from tests.checkpoint.models import write_gguf

FAMILIES = ("llama", "llama-tied", "gpt2", "opt", "qwen3", "gemma3")
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
    "cmpq": ("gemma3", options("cmpq", bits=2.5, **SHORT)),
}
GGUFS = {"float": Kind.F32, "blocks": Kind.Q8_0, "fours": Kind.Q4_0}
TEXT = "the quick brown fox jumps over the lazy dog and runs away from all of the other animals " * 8
TOKENS = torch.tensor([[5, 100, 77, 263, 0, 18, 44, 5, 9]])


@dataclass(frozen=True)
class Bases:
    models: Mapping[str, Path]
    artifacts: Mapping[str, Path]
    ggufs: Mapping[str, Path]
    logits: Mapping[str, torch.Tensor]  # of every artifact
    text: Path

    @staticmethod
    def make(root: Path) -> Bases:
        """Build all of them in a folder, the same each time."""
        root.mkdir(parents=True)
        text = root / "text.txt"
        text.write_text(TEXT)
        models = {family: _model(root / "models" / family, family) for family in FAMILIES}
        artifacts = {name: root / "artifacts" / name for name in ARTIFACTS}
        for name, (family, chosen) in ARTIFACTS.items():
            anybit.quantize(
                models[family],
                artifacts[name],
                chosen,
                **({"calibration": str(text)} if chosen.calibrated else {}),
            )
        logits = {
            name: logits_of(AutoModelForCausalLM.from_pretrained(path)) for name, path in artifacts.items()
        }
        (root / "ggufs").mkdir()
        ggufs = {name: _gguf(root / "ggufs" / f"{name}.gguf", kind) for name, kind in GGUFS.items()}
        return Bases(models, artifacts, ggufs, logits, text)


def _model(folder: Path, family: str) -> Path:
    save_random(config_of(family), folder)
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


@torch.no_grad()
def logits_of(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=TOKENS).logits
