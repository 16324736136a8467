"""Steps of several texts: how much longer than one of a single text, in milliseconds and tokens per second.

python bench/engine_steps.py out --bits 4 [--depth 128] [--json figures.json]

All texts stand at the same depth, and each gets logits. Medians of steps of one process, on the engine alone.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import anybit
from anybit.engine.engine import Batch

TEXTS = (1, 2, 3, 4, 8, 16, 32)
STEPS, WARM_UP = 40, 8
STRIDE = 7919  # between tokens of prompts


def step_seconds(engine: anybit.Engine, texts: int, depth: int, level: int, page_tokens: int) -> float:
    """The median time of a step that computes one token of each text."""
    own = -(-(depth + STEPS) // page_tokens)
    pages = np.arange(texts * own, dtype=np.int32).reshape(texts, own)
    tokens = (np.arange(depth) * STRIDE % (engine.vocabulary - 100)).astype(np.int32)
    none = np.array([], np.int32)
    for text in range(texts):
        positions, one_text = np.arange(depth, dtype=np.int32), np.zeros(depth, np.int32)
        engine.step(Batch(tokens, positions, one_text, pages[text : text + 1], none), level)
    each, seconds = np.arange(texts, dtype=np.int32), []
    for i in range(STEPS):
        positions = np.full(texts, depth + i, np.int32)
        begun = time.perf_counter()
        engine.step(Batch(tokens[:texts], positions, each, pages, each), level)
        seconds.append(time.perf_counter() - begun)
    return median(seconds[WARM_UP:])


def measure(model: str, bits: float, depth: int, kv_bits: int) -> dict[str, Any]:
    from anybit import _native

    engine = anybit.Engine(model, kv_bits=kv_bits)
    level = max(i for i, width in enumerate(engine.widths) if width <= bits)
    engine.give_pages(max(TEXTS) * -(-(depth + STEPS) // _native.PAGE_TOKENS))
    found = {n: step_seconds(engine, n, depth, level, _native.PAGE_TOKENS) for n in TEXTS}
    return {
        "model": Path(model).name,
        "bits": engine.widths[level],
        "depth": depth,
        "kv_bits": kv_bits,
        "threads": engine.threads,
        "milliseconds": {n: 1000 * seconds for n, seconds in found.items()},
        "over_one": {n: seconds / found[1] for n, seconds in found.items()},
        "tokens_per_second": {n: n / seconds for n, seconds in found.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--bits", type=float, default=4)
    parser.add_argument("--depth", type=int, default=128)
    parser.add_argument("--kv-bits", type=int, default=16)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found = measure(asked.model, asked.bits, asked.depth, asked.kv_bits)
    print(
        f"{found['model']}, {found['bits']:.2f} bits, {found['threads']} threads, {asked.depth} tokens before"
    )
    for n in TEXTS:
        print(
            f"{n:3} texts: {found['milliseconds'][n]:7.2f} ms, {found['over_one'][n]:.2f} times one, "
            f"{found['tokens_per_second'][n]:.0f} tokens/s"
        )
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
