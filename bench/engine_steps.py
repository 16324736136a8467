"""Steps of several texts: how much longer than one of a single text, in milliseconds and tokens per second.

python bench/engine_steps.py out --bits 4 [--beside 3] [--depth 128] [--json figures.json]
python bench/engine_steps.py out --against other --megabytes 65,75,85 [--json figures.json]

All texts stand at the same depth, and each gets logits. Medians of steps of one process, on the engine alone. Two
artifacts take turns, each at its widest level of no more than so many bytes in memory.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import anybit
from anybit.engine.engine import Batch

TEXTS = (1, 2, 3, 4, 8, 16, 32)
RACES, PAIRS = (1, 4, 8), 9  # texts of each step where two artifacts take turns, and how often they do
STEPS, WARM_UP = 40, 8
STRIDE = 7919  # between tokens of prompts


def step_seconds(
    engine: anybit.Engine, texts: int, depth: int, levels: Sequence[int], page_tokens: int
) -> float:
    """The median time of computing one token of each text; at several levels each has as many texts, and a step."""
    own = -(-(depth + STEPS) // page_tokens)
    pages = np.arange(texts * own, dtype=np.int32).reshape(texts, own)
    tokens = (np.arange(depth) * STRIDE % (engine.vocabulary - 100)).astype(np.int32)
    none = np.array([], np.int32)
    for text in range(texts):
        positions, one_text = np.arange(depth, dtype=np.int32), np.zeros(depth, np.int32)
        level = levels[text * len(levels) // texts]
        engine.step(Batch(tokens, positions, one_text, pages[text : text + 1], none), level)
    of_level, seconds = texts // len(levels), []
    each = np.arange(of_level, dtype=np.int32)
    for i in range(STEPS):
        positions = np.full(of_level, depth + i, np.int32)
        begun = time.perf_counter()
        for k, level in enumerate(levels):
            at = pages[k * of_level : (k + 1) * of_level]
            engine.step(Batch(tokens[:of_level], positions, each, at, each), level)
        seconds.append(time.perf_counter() - begun)
    return median(seconds[WARM_UP:])


def level_of(engine: anybit.Engine, bits: float) -> int:
    """The widest level of up to so many bits."""
    return max(i for i, width in enumerate(engine.widths) if width <= bits)


def measure(model: str, bits: float, depth: int, kv_bits: int, beside: float | None) -> dict[str, Any]:
    from anybit import _native

    engine = anybit.Engine(model, kv_bits=kv_bits)
    level = level_of(engine, bits)
    engine.give_pages(max(TEXTS) * -(-(depth + STEPS) // _native.PAGE_TOKENS))
    found = {n: step_seconds(engine, n, depth, [level], _native.PAGE_TOKENS) for n in TEXTS}
    mixed = None
    if beside is not None:  # in turns with what it is compared with
        other = level_of(engine, beside)
        pairs = [
            [
                step_seconds(engine, 4, depth, levels, _native.PAGE_TOKENS)
                for levels in ([other, level], [level])
            ]
            for _ in range(5)
        ]
        mixed = {"bits": engine.widths[other], "over_the_wider_alone": median(a / b for a, b in pairs)}
    return {
        "model": Path(model).name,
        "bits": engine.widths[level],
        "depth": depth,
        "kv_bits": kv_bits,
        "threads": engine.threads,
        "milliseconds": {n: 1000 * seconds for n, seconds in found.items()},
        "two_widths": mixed,
        "over_one": {n: seconds / found[1] for n, seconds in found.items()},
        "tokens_per_second": {n: n / seconds for n, seconds in found.items()},
    }


def against(model: str, other: str, megabytes: Sequence[float], depth: int, kv_bits: int) -> dict[str, Any]:
    """Two artifacts at equal bytes of quantized matrices: the ratios of pairs of runs, who begins changes."""
    engines = [anybit.Engine(path, kv_bits=kv_bits) for path in (model, other)]
    for engine in engines:
        engine.give_pages(max(RACES) * -(-(depth + STEPS) // engine.page_tokens))
    rows = []
    for size in megabytes:
        levels = [max(i for i, taken in enumerate(e.level_bytes) if taken <= 1e6 * size) for e in engines]
        for texts in RACES:
            seconds: list[list[float]] = [[], []]
            for k in range(PAIRS):
                for i in ((0, 1), (1, 0))[k % 2]:
                    engine = engines[i]
                    found = step_seconds(engine, texts, depth, [levels[i]], engine.page_tokens)
                    seconds[i].append(found)
            ratios = [a / b for a, b in zip(*seconds)]
            rows.append({
                "megabytes": size, "texts": texts,
                "bits": [e.widths[level] for e, level in zip(engines, levels)],
                "megabytes_taken": [e.level_bytes[level] / 1e6 for e, level in zip(engines, levels)],
                "milliseconds": [1000 * median(own) for own in seconds],
                "ratio": median(ratios), "least": min(ratios), "most": max(ratios),
            })  # fmt: skip
    return {"model": Path(model).name, "other": Path(other).name, "depth": depth, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--bits", type=float, default=4)
    parser.add_argument(
        "--beside", type=float, help="also two texts of so many bits and two of --bits, over four of these"
    )
    parser.add_argument("--against", help="another artifact, at equal bytes")
    parser.add_argument("--megabytes", default="65,75,85", help="of quantized matrices, for --against")
    parser.add_argument("--depth", type=int, default=128)
    parser.add_argument("--kv-bits", type=int, default=16)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.against is not None:
        sizes = [float(size) for size in asked.megabytes.split(",")]
        raced = against(asked.model, asked.against, sizes, asked.depth, asked.kv_bits)
        for row in raced["rows"]:
            print(
                f"{row['megabytes']:g} MB, {row['texts']} texts: {row['milliseconds'][0]:.2f} ms over "
                f"{row['milliseconds'][1]:.2f}: {row['ratio']:.2f} ({row['least']:.2f} to {row['most']:.2f})"
            )
        write(asked.json, raced)
        return
    found = measure(asked.model, asked.bits, asked.depth, asked.kv_bits, asked.beside)
    print(
        f"{found['model']}, {found['bits']:.2f} bits, {found['threads']} threads, {asked.depth} tokens before"
    )
    for n in TEXTS:
        print(
            f"{n:3} texts: {found['milliseconds'][n]:7.2f} ms, {found['over_one'][n]:.2f} times one, "
            f"{found['tokens_per_second'][n]:.0f} tokens/s"
        )
    if (mixed := found["two_widths"]) is not None:
        print(
            f"two of four texts at {mixed['bits']:.2f} bits: {mixed['over_the_wider_alone']:.2f} times the wider alone"
        )
    write(asked.json, found)


def write(to: Path | None, found: dict[str, Any]) -> None:
    if to is not None:
        to.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
