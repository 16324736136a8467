"""Tables of whole models' speed, from what `anybit bench decode -o bench/results/engine/decode.json` wrote."""

from __future__ import annotations

import re
from typing import Any

from figures import load, markdown


def cells(test: str) -> list[dict[str, Any]]:
    return [cell for cell in load("engine/decode.json")["cells"] if cell["test"] == test]


def named(name: str) -> str:
    """A contender as a reader knows it: no precision in this project's words, no file's name."""
    name = re.sub(r"^anybit ([\d.]+) int8$", r"anybit, \1 bits, inputs of 8 bits", name)
    name = re.sub(r"^anybit ([\d.]+) fp16$", r"anybit, \1 bits, exact inputs", name)
    name = re.sub(r"^Transformers ([\d.]+) (\w+)$", r"Transformers, \1 bits, \2", name)
    return re.sub(r"^llama\.cpp (?:.*-)?(Q\w+)\.gguf( flash)?$", r"llama.cpp \1\2", name)


def decode() -> str:
    """One token behind others; the most that other processes took stands above each model's rows."""
    head = ["model", "who", "MB a token", "tokens/s", "range", "of the read rate"]
    rows = []
    for cell in cells("decode"):
        for name, found in cell["contenders"].items():
            low, high = found["range"]
            limit = f"{100 * found['of_limit']:.0f} %" if name.startswith("anybit") else ""
            size = f"{found['bytes_per_token'] / 1e6:.0f}"
            speed = f"{found['tokens_per_second']:.0f}"
            rows.append([cell["shape"], named(name), size, speed, f"{low:.0f} to {high:.0f}", limit])
    return markdown(head, rows)


def prefill() -> str:
    """A prompt, from nothing."""
    rows = []
    for cell in cells("prefill"):
        for name, found in cell["contenders"].items():
            low, high = found["range"]
            speed = f"{found['tokens_per_second']:.0f}"
            rows.append([cell["shape"], named(name), f"{cell['tokens']}", speed, f"{low:.0f} to {high:.0f}"])
    return markdown(["model", "who", "tokens", "tokens/s", "range"], rows)


def disturbed() -> str:
    """How much of two processors others took, at most, in each cell."""
    rows = [
        [cell["shape"], cell["test"], f"{max(found['others'] for found in cell['contenders'].values()):.2f}"]
        for cell in [*cells("decode"), *cells("prefill")]
    ]
    return markdown(["model", "test", "processors that others took, at most"], rows)
