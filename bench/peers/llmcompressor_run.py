"""Quantize a model with llm-compressor on the CPU and write the dequantized checkpoint (see README.md)."""

import json
from typing import Any

import torch
from common import load_tokens, parse_arguments, save_dequantized, timed, versions
from transformers import AutoModelForCausalLM

OPTIONS = 'observer ("memoryless_minmax", "memoryless_mse", ...), dampening_frac, block_size'


def recipe(args: Any) -> Any:
    """The GPTQModifier: --desc-act is activation ordering "static" (the group one was removed upstream)."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.modifiers.gptq import GPTQModifier

    options = dict(args.options)
    observer = {"observer": options.pop("observer")} if "observer" in options else {}
    weights = QuantizationArgs(num_bits=args.bits, type="int", symmetric=args.symmetric, strategy="group",
                               group_size=args.group_size, **observer)  # fmt: skip
    groups = {"linear": QuantizationScheme(targets=["Linear"], weights=weights)}
    actorder = "static" if args.desc_act else None
    return GPTQModifier(config_groups=groups, ignore=["lm_head"], actorder=actorder, **options)


def quantize(args: Any) -> tuple[Any, dict[str, float]]:
    """The model with dequantized weights in place, and the time and memory of quantizing (no packing)."""
    from datasets import Dataset
    from llmcompressor import oneshot

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokens = load_tokens(args.tokens)
    mask = torch.ones_like(tokens)
    rows = Dataset.from_dict({"input_ids": tokens.tolist(), "attention_mask": mask.tolist()})
    arguments = {
        "model": model,
        "tokenizer": str(args.model),
        "dataset": rows,
        "recipe": recipe(args),
        "max_seq_length": tokens.shape[1],
        "num_calibration_samples": tokens.shape[0],
        "shuffle_calibration_samples": False,
        "pipeline": "sequential",
    }
    _, cost = timed(lambda: oneshot(**arguments))
    return model, cost


def dequantized_weights(model: Any) -> dict[str, torch.Tensor]:
    """fp32 [out, in] by module name: GPTQModifier leaves the dequantized values in `weight`."""
    return {n: m.weight.data for n, m in model.named_modules() if hasattr(m, "weight_scale")}


def main() -> None:
    args = parse_arguments(__doc__, OPTIONS)
    torch.set_num_threads(args.threads)
    model, cost = quantize(args)
    save_dequantized(args.model, dequantized_weights(model), args.out)
    weights = next(m for m in model.modules() if hasattr(m, "weight_scale")).quantization_scheme.weights
    settings = {"observer": str(weights.observer), "actorder": str(weights.actorder)} | args.options
    print(json.dumps({"method": "llmcompressor", **cost, "settings": settings,
                      "versions": versions("llmcompressor", "torch", "transformers")}))  # fmt: skip


if __name__ == "__main__":
    main()
