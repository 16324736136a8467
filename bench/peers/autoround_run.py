"""Quantize a model with AutoRound on the CPU and write the dequantized fp32 checkpoint (see README.md)."""

import json
from typing import Any

import torch
from common import load_tokens, parse_arguments, save_dequantized, timed, versions

OPTIONS = "an argument of AutoRound: iters, batch_size"


def quantize(args: Any) -> tuple[Any, dict[str, float]]:
    """The model with rounded weights, and the time and memory of rounding."""
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if args.desc_act:
        raise ValueError("AutoRound orders no columns: --no-desc-act")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokens = load_tokens(args.tokens)
    rows = [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in tokens]
    scheme = {"bits": args.bits, "group_size": args.group_size, "sym": args.symmetric, "data_type": "int"}
    rounding = AutoRound(
        model, AutoTokenizer.from_pretrained(args.model), scheme=scheme, dataset=rows, nsamples=len(tokens),
        seqlen=tokens.shape[1], device_map="cpu", **args.options,
    )  # fmt: skip
    (made, _), cost = timed(rounding.quantize)
    return made, cost


def main() -> None:
    args = parse_arguments(__doc__, OPTIONS)
    torch.set_num_threads(args.threads)
    model, cost = quantize(args)
    layers = {n: m for n, m in model.named_modules() if hasattr(m, "scale") and hasattr(m, "weight")}
    save_dequantized(
        args.model, {name: layer.weight.data.float() for name, layer in layers.items()}, args.out
    )
    print(json.dumps({"method": "autoround", **cost, "settings": args.options,
                      "versions": versions("auto-round", "torch", "transformers")}))  # fmt: skip


if __name__ == "__main__":
    main()
