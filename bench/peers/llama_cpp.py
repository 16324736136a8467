"""Files of equal bytes: llama.cpp's quantizations with an importance matrix, and one artifact of the method anybit.

    python bench/peers/llama_cpp.py MODEL.gguf --tools llama.cpp/build/bin --calibration wiki.valid.tokens \
      --text wiki=wiki.test.raw --text c4=c4.jsonl -o bench/results/llama-cpp.json

MODEL is what both begin with; llama.cpp gets it as float16. The importance matrix is made of the calibration text, as
many tokens as anybit reads. A file of llama.cpp counts with its tensors alone, anybit's artifact with all files but
the tokenizer; it is cut to at most the bytes that the other has. anybit measures both, in float32: llama.cpp itself
rounds inputs to 8 bits. What is there already is not made again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from gguf import GGUFReader

TYPES = ("Q2_K", "IQ3_XXS", "Q3_K_M", "Q4_0", "Q4_K_M")
TOKENS = 65_536  # of the importance matrix: what anybit's default effort reads
CHUNK = 512  # llama-imatrix's
FIGURES = ("perplexity", "kld_mean", "top1_agreement", "tokens")


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
    parser.add_argument("--types", nargs="+", default=list(TYPES))
    parser.add_argument("--max-tokens", type=int, default=16_384)
    parser.add_argument("--seq-len", type=int, default=1_024)
    parser.add_argument("--work", type=Path, default=Path("build/peers/llama-cpp"))
    parser.add_argument("-o", "--out", type=Path, required=True)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    texts = dict(text.split("=", 1) for text in given.text)
    files = {kind: quantized(given, kind) for kind in given.types}
    artifact, budget = given.work / "anybit", max(map(tensor_bytes, files.values())) + 1_000_000
    if not artifact.exists():
        options = ["--size", str(budget), "--calibration", str(given.calibration)]
        anybit("quantize", str(given.model), "-o", str(artifact), *options)
    cells = []
    for kind, file in files.items():
        size = tensor_bytes(file)
        cells.append({
            "peer": kind,
            "bytes": size,
            "bpw": 8 * size / weights(file),
            "texts": {name: evaluated(given, file, text, ()) for name, text in texts.items()},
            "anybit": {name: evaluated(given, artifact, text, ("--size", str(size))) for name, text in texts.items()},
        })  # fmt: skip
    found = {
        "command": "python bench/peers/llama_cpp.py SmolLM2.gguf "
        + " ".join(f"--text {name}=..." for name in texts),
        "cells": cells,
    }
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


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


def evaluated(given: argparse.Namespace, model: Path, text: str, level: tuple[str, ...]) -> dict[str, Any]:
    """A model's figures on a text, beside the unquantized one."""
    out = given.work / "figures.json"
    anybit("eval", str(model), *level, "--text", text, "--base", str(given.model), "--seq-len", str(given.seq_len),
           "--max-tokens", str(given.max_tokens), "--json", str(out))  # fmt: skip
    found = json.loads(out.read_text(encoding="utf-8"))
    more = {key: found[key] for key in ("size_bytes", "base_perplexity") if key in found}
    return {key: found[key] for key in FIGURES} | more


def anybit(*arguments: str) -> None:
    run(Path(sys.executable), "-m", "anybit", *arguments)


def run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True)


if __name__ == "__main__":
    sys.exit(main())
