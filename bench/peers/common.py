"""What the two peer runners share: arguments, tokens, measuring, and the dequantized checkpoint they write.

Runs in each peer's own environment, so it imports nothing of anybit.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def parse_arguments(description: str, options_help: str) -> argparse.Namespace:
    """The command line of a runner; `args.options` is the parsed `{name: value}` of every --option."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True, help="fp32 Hugging Face directory")
    parser.add_argument("--tokens", type=Path, required=True, help="int64 [n, seq_len] ids, .npy")
    parser.add_argument("-o", "--out", type=Path, required=True, help="directory for the dequantized model")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    symmetry = parser.add_mutually_exclusive_group(required=True)
    symmetry.add_argument("--symmetric", dest="symmetric", action="store_true")
    symmetry.add_argument("--asymmetric", dest="symmetric", action="store_false")
    parser.add_argument("--desc-act", action=argparse.BooleanOptionalAction, required=True)
    parser.add_argument("--option", dest="options", action="append", default=[], metavar="NAME=JSON",
                        help=options_help)  # fmt: skip
    args = parser.parse_args()
    args.options = parse_options(parser, args.options)
    return args


def parse_options(parser: argparse.ArgumentParser, pairs: list[str]) -> dict[str, Any]:
    """`["mse=2.0", 'observer="mse"']` -> `{"mse": 2.0, "observer": "mse"}`; ends the program for others."""
    options = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            separator = ""
        if not separator:
            parser.error(f"--option {pair}: expected NAME=JSON, for example mse=2.0 or observer='\"mse\"'")
    return options


def load_tokens(path: Path) -> torch.Tensor:
    """Calibration ids, int64 [n, seq_len]; raises ValueError for another shape."""
    tokens = torch.from_numpy(np.load(path, allow_pickle=False)).long()
    if tokens.ndim != 2:
        raise ValueError(f"{path} holds an array of shape {list(tokens.shape)}; expected [n, seq_len]")
    return tokens


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """The result of `work()`, its wall seconds, and the peak resident memory of the process so far in MB."""
    start = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts KiB
    return result, {"seconds": round(seconds, 2), "peak_mb": round(peak, 1)}


def save_dequantized(base: Path, weights: Mapping[str, torch.Tensor], out: Path) -> None:
    """Write `base` to `out` in fp32 with the `weights` [out, in], by module name, in place of its own.

    Raises ValueError if the quantized layers are not exactly the linear layers of the decoder blocks:
    a peer that skipped a layer would otherwise look better than it is.
    """
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    head = model.get_output_embeddings()
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head}
    if linears.keys() != weights.keys():
        raise ValueError(f"quantized layers differ: {sorted(linears.keys() ^ weights.keys())[:4]}")
    for name, module in linears.items():
        module.weight.data.copy_(weights[name])
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(base).save_pretrained(out)


def versions(*packages: str) -> dict[str, str]:
    """Installed version by package name; "absent" for one that is not installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found
