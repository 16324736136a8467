"""Quantize a model with GPTQModel on the CPU and write the dequantized fp32 checkpoint (see README.md)."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import load_tokens, parse_arguments, save_dequantized, timed, versions

OPTIONS = "a field of GPTQModel's GPTQConfig: damp_percent, mse, static_groups, act_group_aware"


def config_fields(args: Any) -> dict[str, Any]:
    """The fields of GPTQConfig: what was asked, then --option."""
    fields = {
        "bits": args.bits,
        "group_size": args.group_size,
        "sym": args.symmetric,
        "desc_act": args.desc_act,
        "format": "gptq_v2",  # stores zero points as they are; v1 stores zero - 1, which 0 does not survive
        "offload_to_disk": False,
    }
    return fields | args.options


def quantize(args: Any) -> tuple[Any, dict[str, float]]:
    """The quantized GPTQModel wrapper and the time and memory of quantizing (packing included)."""
    from gptqmodel import GPTQModel, QuantizeConfig

    config = QuantizeConfig(**config_fields(args))
    model = GPTQModel.load(str(args.model), config, device="cpu", dtype=torch.float32)
    rows = [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])}
            for row in load_tokens(args.tokens)]  # fmt: skip
    _, cost = timed(lambda: model.quantize(rows, batch_size=1))
    return model, cost


def dequantized_weights(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """fp32 [out, in] by module name, through GPTQModel's own files and loader: what its user would get."""
    from gptqmodel import BACKEND, GPTQModel

    model.save(str(folder))
    # its CPU kernels refuse fp32 models
    loaded = GPTQModel.load(str(folder), device="cpu", backend=BACKEND.TORCH, dtype=torch.float16)
    layers = {n: m for n, m in loaded.model.named_modules() if hasattr(m, "qweight")}
    return {name: dequantize(layer) for name, layer in layers.items()}


def dequantize(layer: Any) -> torch.Tensor:
    """fp32 [out, in] of one packed layer; its scales are widened first: no product is rounded to fp16."""
    layer.scales = layer.scales.float()
    return layer.dequantize_weight().float().T.contiguous()


def main() -> None:
    args = parse_arguments(__doc__, OPTIONS)
    # read when gptqmodel is imported; its model loader wants two workers, so fewer is an error
    os.environ["GPTQMODEL_CPU_WORKERS"] = str(max(2, args.threads))
    torch.set_num_threads(args.threads)
    model, cost = quantize(args)
    with tempfile.TemporaryDirectory() as folder:
        save_dequantized(args.model, dequantized_weights(model, Path(folder)), args.out)
    settings = {name: getattr(model.quantize_config, name)
                for name in ("damp_percent", "mse", "static_groups", "act_group_aware")}  # fmt: skip
    print(json.dumps({"method": "gptqmodel", **cost, "settings": settings,
                      "versions": versions("gptqmodel", "torch", "transformers")}))  # fmt: skip


if __name__ == "__main__":
    main()
