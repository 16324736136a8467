"""AWQ and SmoothQuant of llm-compressor on the CPU: quantize, then measure perplexity with the model as it then runs.

Runs in llm-compressor's own environment (see README.md); both change more than the linear layers' weights, so the model
is evaluated where it was made:

    .../llmcompressor/bin/python bench/peers/llmcompressor_scaling.py awq --model HF_DIR --tokens tokens.npy --text TEXT
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from common import load_tokens, timed, versions
from ppl import measure, text_windows
from transformers import AutoModelForCausalLM, AutoTokenizer


def recipe(method: str) -> list[Any]:
    """AWQ: W4A16 in asymmetric groups of 64 (576 is no multiple of 128). SmoothQuant: W8A8 per channel and token."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    if method == "awq":
        weights = QuantizationArgs(num_bits=4, type="int", symmetric=False, strategy="group", group_size=64)
        scheme, before = QuantizationScheme(targets=["Linear"], weights=weights), AWQModifier()
    else:
        weights = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel")
        inputs = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
        scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
        before = SmoothQuantModifier(smoothing_strength=0.8)
    return [before, QuantizationModifier(config_groups={"linear": scheme}, ignore=["lm_head"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("method", choices=["awq", "smoothquant"])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, required=True, help="int64 [n, seq_len] ids, .npy")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not torch.accelerator.is_available():  # AWQ pins the inputs it offloads, which a CPU alone cannot
        torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign,assignment]
    from datasets import Dataset
    from llmcompressor import oneshot

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokens = load_tokens(args.tokens)
    rows = {"input_ids": tokens.tolist(), "attention_mask": torch.ones_like(tokens).tolist()}
    _, cost = timed(
        lambda: oneshot(
            model=model,
            tokenizer=str(args.model),
            dataset=Dataset.from_dict(rows),
            recipe=recipe(args.method),
            max_seq_length=tokens.shape[1],
            num_calibration_samples=tokens.shape[0],
            shuffle_calibration_samples=False,
            pipeline="sequential",
        )
    )
    windows = text_windows(AutoTokenizer.from_pretrained(args.model), args.text, args.windows, args.seq_len)
    result = {
        "method": f"llmcompressor {args.method}",
        "perplexity": measure(model.eval(), windows, None)["perplexity"],
        **cost,
    }
    print(json.dumps(result | {"versions": versions("llmcompressor", "torch", "transformers")}))


if __name__ == "__main__":
    main()
