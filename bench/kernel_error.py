"""Error of the native kernels against double precision: random matrices of every format, and the layers of artifacts.

    python bench/kernel_error.py [ARTIFACT ...] [--text FILE]

A relative error is the norm of a product's difference from the exact one over the norm of that. Inputs of random
matrices are normal; those of an artifact's layers are what the model hands them on the first tokens of a text. Exact is
the stored matrix times what the layer sees of float32 inputs (formats with inputs of 8 or 4 bits round them first: that
is theirs). "few" are four tokens, as in decoding, "many" are 32, as in prefill; "torch" multiplies the dense matrix in
bfloat16.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from anybit.bench.kernels import INT8, layouts, random_weight
from anybit.calibration.texts import read_text
from anybit.checkpoint.tokenizer import encode
from anybit.formats.weight import PackedWeight
from anybit.kernels import reference
from anybit.kernels.dispatch import BoundWeight
from anybit.layers import QuantLinear
from anybit.loader import load, load_tokenizer

SHAPE = (1024, 4096)
FEW, MANY = 4, 32
MODES = ("float32, few", "float32, many", "bfloat16, few", "bfloat16, many", "int8", "torch")


def errors(weight: PackedWeight, x: Tensor) -> dict[str, float]:
    """Relative error of every way to multiply x float32 [MANY, in]."""
    dense = reference.dequantize(weight)
    exact = reference.round_inputs(x, weight).double() @ dense.double().T
    bound, fast, half = BoundWeight(weight), BoundWeight(weight, "int8"), x.bfloat16()

    def error(product: Callable[[Tensor], Tensor], inputs: Tensor) -> float:
        wanted = exact[: len(inputs)]
        return float((product(inputs).double() - wanted).norm() / wanted.norm())

    found = {
        "float32, few": error(bound.matmul, x[:FEW]),
        "float32, many": error(bound.matmul, x),
        "bfloat16, few": error(bound.matmul, half[:FEW]),
        "bfloat16, many": error(bound.matmul, half),
        "torch": error(lambda a: linear(reference.round_inputs(a, weight), dense.bfloat16()), half),
    }
    return found if fast.codebook_precision == "fp16" else found | {"int8": error(fast.matmul, x)}


def random_errors() -> dict[str, dict[str, float]]:
    """Of a random matrix in every format."""
    torch.manual_seed(0)
    x = torch.randn(MANY, SHAPE[1])
    made = {}
    for name, layout in layouts(*SHAPE).items():
        if not name.endswith(INT8):
            weight = random_weight(layout)
            for field, tensor in weight.tensors.items():
                if "codebook" in field and tensor.is_floating_point():
                    tensor.normal_()
            made[name] = errors(weight, x)
    return made


def layer_errors(path: str, text: str) -> dict[str, list[float]]:
    """Of an artifact's layers on what they are given; a list over layers for every mode."""
    model, tokenizer = load(path), load_tokenizer(path)
    inputs: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            module.register_forward_pre_hook(
                lambda _, given, name=name: inputs.__setitem__(name, given[0].detach().flatten(0, -2))
            )
    with torch.no_grad():
        model(torch.tensor([encode(tokenizer, text)[:MANY]]))
    modules = dict(model.named_modules())
    each = [errors(modules[name].packed.at_width(modules[name].bits), x) for name, x in inputs.items()]
    return {mode: [e[mode] for e in each] for mode in MODES if mode in each[0]}


def print_row(name: str, row: dict[str, float]) -> None:
    print(f"{name:24}" + "".join(f"{row[mode]:16.1e}" if mode in row else " " * 16 for mode in MODES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifacts", nargs="*")
    parser.add_argument("--text", default="builtin-eval", help="a .txt file")
    args = parser.parse_args()
    print(f"{'':24}" + "".join(f"{mode:>16}" for mode in MODES))
    for name, row in random_errors().items():
        print_row(name, row)
    for path in args.artifacts:
        rows = layer_errors(path, read_text(args.text))
        for label, pick in (("median", statistics.median), ("worst", max)):
            print_row(f"{Path(path).name}, {label}", {mode: pick(values) for mode, values in rows.items()})


if __name__ == "__main__":
    main()
