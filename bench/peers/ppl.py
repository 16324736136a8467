"""Perplexity, and divergence from the base, of every contender: windows that do not overlap, no BOS, fp32.

Runs in anybit's environment. The last line is JSON: {text: {"perplexity", "kld", "tokens"}}.
"""

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
def measure(model: torch.nn.Module, windows: torch.Tensor, base: torch.nn.Module | None) -> dict[str, Any]:
    """Of windows [n, seq_len], n · (seq_len - 1) scored positions: exp of the mean negative log likelihood, and the
    mean KL divergence from `base`, in nats.
    """
    total = divergence = 0.0
    for window in windows:
        logs = model(window[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        total += torch.nn.functional.nll_loss(logs, window[1:], reduction="sum").item()
        if base is not None:
            wanted = base(window[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
            divergence += (wanted.exp() * (wanted - logs)).sum(-1).double().sum().item()
    tokens = windows[:, 1:].numel()
    kld = None if base is None else divergence / tokens
    return {"perplexity": math.exp(total / tokens), "kld": kld, "tokens": tokens}


def load_model(folder: Path) -> torch.nn.Module:
    """A causal LM in fp32; anybit's own artifacts need anybit imported to load."""
    config = json.loads((folder / "config.json").read_text())
    if config.get("quantization_config", {}).get("quant_method") == "anybit":
        import anybit  # noqa: F401  registers the format with Transformers
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True, nargs="+")
    parser.add_argument("--base", type=Path, help="what divergence is measured from")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=1024)
    args = parser.parse_args()
    tokenizer, model = AutoTokenizer.from_pretrained(args.model), load_model(args.model)
    base = None if args.base is None else load_model(args.base)
    windows = {text: text_windows(tokenizer, text, args.windows, args.seq_len) for text in args.text}
    print(json.dumps({text.stem: measure(model, own, base) for text, own in windows.items()}))


if __name__ == "__main__":
    main()
