"""One perplexity for every contender: non-overlapping windows, no BOS, fp32; runs in anybit's environment."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def text_windows(tokenizer: Any, text: Path, count: int, seq_len: int) -> torch.Tensor:
    """The first `count` non-overlapping windows of the text's ids, int64 [count, seq_len], no special tokens.

    Raises ValueError if the text is shorter than that.
    """
    ids = tokenizer(text.read_bytes().decode("utf-8"), add_special_tokens=False)["input_ids"]
    if len(ids) < count * seq_len:
        raise ValueError(f"{text} has {len(ids)} tokens; {count} windows of {seq_len} need {count * seq_len}")
    return torch.tensor(ids[: count * seq_len]).view(count, seq_len)


@torch.inference_mode()
def perplexity(model: torch.nn.Module, windows: torch.Tensor) -> float:
    """exp of the mean negative log likelihood of windows [n, seq_len]; n · (seq_len - 1) scored positions."""
    total = 0.0
    for window in windows:
        logits = model(window[None], use_cache=False).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
    return math.exp(total / (windows.shape[0] * (windows.shape[1] - 1)))


def load_model(folder: Path) -> torch.nn.Module:
    """A causal LM in fp32; anybit's own artifacts need anybit imported to load."""
    config = json.loads((folder / "config.json").read_text())
    if config.get("quantization_config", {}).get("quant_method") == "anybit":
        import anybit  # noqa: F401  registers the format with Transformers
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=1024)
    args = parser.parse_args()
    windows = text_windows(AutoTokenizer.from_pretrained(args.model), args.text, args.windows, args.seq_len)
    result = {"perplexity": perplexity(load_model(args.model), windows), "tokens": windows[:, 1:].numel()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
