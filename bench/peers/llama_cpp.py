"""Files of equal bytes: llama.cpp's quantizations with an importance matrix, and artifacts of anybit.

    python bench/peers/llama_cpp.py MODEL.gguf --tools llama.cpp/build/bin --calibration wiki.valid.tokens \
      --text wiki=wiki.test.raw --text c4=c4.jsonl --json bench/results/llama-cpp.json

MODEL is what both begin with; llama.cpp gets it as float16. The importance matrix is made of the calibration text, as
many tokens as anybit reads. A file of llama.cpp counts with its tensors alone, anybit's artifact with all files but
the tokenizer; it is cut to at most the bytes that the other has. `--artifact NAME=DIR@BITS` measures other artifacts
on the same texts. All weights are dequantized and run in `--dtype`, the base too. llama.cpp itself rounds inputs to 8
bits, which is not counted against it. What is there already is not made again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from gguf import GGUFReader

from anybit.artifact.levels import Budget
from anybit.artifact.sizes import inspect
from anybit.calibration.texts import read_text
from anybit.loader import load, load_tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from paired import DTYPES, Said, figures, put_weights, ratio, said, windows_of

TYPES = ("Q2_K", "IQ3_XXS", "Q3_K_M", "Q4_0", "Q4_K_M")
TOKENS = 65_536  # of the importance matrix: what anybit's default effort reads
CHUNK = 512  # llama-imatrix's


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a .gguf file")
    parser.add_argument(
        "--tools", type=Path, required=True, help="folder of llama-quantize and llama-imatrix"
    )
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", action="append", required=True, help="NAME=FILE, several times")
    parser.add_argument(
        "--artifact", action="append", default=[], help="NAME=DIR or NAME=DIR@BITS, measured as it is"
    )
    parser.add_argument("--types", nargs="+", default=list(TYPES))
    parser.add_argument("--windows", type=int, default=16, help="of 1024 tokens, spread over each text")
    parser.add_argument(
        "--dtype", choices=DTYPES, default=DTYPES[0], help="the first, where processors have it"
    )
    parser.add_argument("--work", type=Path, default=Path("build/peers/llama-cpp"))
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    files = {kind: quantized(given, kind) for kind in given.types}
    artifact, budget = given.work / "anybit", max(map(tensor_bytes, files.values())) + 1_000_000
    if not artifact.exists():
        options = ["--size", str(budget), "--calibration", str(given.calibration)]
        run(Path(sys.executable), "-m", "anybit", "quantize", given.model, "-o", artifact, *options)
    torch.set_grad_enabled(False)
    texts = Texts(given)
    cells: list[dict[str, Any]] = []
    levels: dict[int, Any] = {}  # figures of the artifact by the bytes of its files: sizes may share a level
    for kind, file in files.items():
        size = tensor_bytes(file)
        taken = inspect(artifact, size=size)["size_bytes"]
        if taken not in levels:
            levels[taken] = texts.measure(artifact, size=size)
        theirs, own = texts.measure(file), levels[taken]
        held = {text: ratio({"": theirs[text]}, {"": own[text]}) for text in theirs}
        cells.append({
            "peer": kind, "bytes": size, "bpw": 8 * size / weights(file), "texts": means(theirs),
            "anybit": means(own), "size_bytes": taken, "kld_ratio": held,
        })  # fmt: skip
        print(json.dumps(cells[-1]), flush=True)
    others, asked = [], []
    for name, path in (pair.split("=", 1) for pair in given.artifact):
        place, at, bits = path.partition("@")
        asked.append((name, at + bits))
        level: dict[str, Any] = {"bits": float(bits)} if bits else {}
        about = inspect(Path(place), **level)
        sizes = {key: about[key] for key in ("bits_per_weight", "size_bytes")}
        others.append({"name": name, **sizes, "texts": means(texts.measure(Path(place), **level))})
        print(json.dumps(others[-1]), flush=True)
    shown = [given.model.name, "--windows", str(given.windows)]
    if given.dtype != DTYPES[0]:
        shown += ["--dtype", given.dtype]
    if given.types != list(TYPES):
        shown += ["--types", *given.types]
    shown += [f"--text {name}=..." for name in texts.windows]
    shown += [f"--artifact '{name}=DIR{at}'" for name, at in asked]
    found = {
        "command": " ".join(["python bench/peers/llama_cpp.py", *shown]),
        "base": texts.base_perplexity, "cells": cells, "others": others,
    }  # fmt: skip
    given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


class Texts:
    """Windows of every text, and what the base says of them."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._dtype = given.dtype
        self._base = load(given.model, dtype=given.dtype)
        tokenizer = load_tokenizer(given.model)
        files = dict(text.split("=", 1) for text in given.text)
        self.windows = {
            name: windows_of(tokenizer, read_text(file), 0.0, given.windows) for name, file in files.items()
        }
        self._known: dict[str, Said] = {}
        for name, windows in self.windows.items():
            states, head = said(self._base, windows)
            self._known[name] = states, head.clone()
        self.base_perplexity = {
            name: perplexity(figures(self._known[name], self._base, windows)["nll"])
            for name, windows in self.windows.items()
        }

    def measure(self, model: Path, **at: Unpack[Budget]) -> dict[str, dict[str, Any]]:
        """Of every text, divergence and loss of every window; the base's weights are overwritten."""
        if model.is_dir():
            put_weights(self._base, load(model, **at))
            other = self._base
        else:
            other = load(model, dtype=self._dtype)
        return {name: figures(self._known[name], other, windows) for name, windows in self.windows.items()}


def means(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    return {
        text: {"perplexity": perplexity(of["nll"]), "kld_mean": float(np.mean(of["kld"]))}
        for text, of in found.items()
    }


def perplexity(losses: Any) -> float:
    return float(np.exp(np.mean(losses)))


def quantized(given: argparse.Namespace, kind: str) -> Path:
    """llama.cpp's file of a type."""
    plain, matrix, made = (given.work / name for name in ("f16.gguf", "imatrix.gguf", f"{kind}.gguf"))
    tools = given.tools
    if not plain.exists():
        run(tools / "llama-quantize", "--allow-requantize", given.model, plain, "F16")
    if not matrix.exists():
        chunks = str(TOKENS // CHUNK)
        run(tools / "llama-imatrix", "-m", plain, "-f", given.calibration, "-o", matrix, "--chunks", chunks,
            "-c", str(CHUNK), "--process-output")  # fmt: skip
    if not made.exists():
        run(tools / "llama-quantize", "--imatrix", matrix, plain, made, kind)
    return made


def tensor_bytes(file: Path) -> int:
    return sum(int(tensor.n_bytes) for tensor in GGUFReader(file).tensors)


def weights(file: Path) -> int:
    return sum(int(tensor.n_elements) for tensor in GGUFReader(file).tensors)


def run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True)


if __name__ == "__main__":
    sys.exit(main())
