"""Matrix times one vector: the native 4- and 8-bit kernels against torch float32 and bfloat16.

    python bench/gemv.py [--shapes 4096x11008,576x1536] [--threads 1,2] [--rounds 30] [--tokens 1]

Every variant runs once a round, on weights that were not touched for 128 MB of other weights, so they come
from memory as they do when a model decodes. Medians; the last line is one JSON object. Quote ratios only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import cycle

import torch
from torch import Tensor

from anybit.kernels import cpu

COLD = 128 << 20  # bytes between two uses of the same weights
GROUP = 128


def rotating(nbytes: int, make: Callable[[], Callable[[], object]]) -> Callable[[], object]:
    """A function that runs one of several equal ones in turn, each with weights of `nbytes` of its own."""
    turns = cycle([make() for _ in range(max(2, -(-COLD // nbytes)))])

    def run() -> object:
        return next(turns)()

    return run


def dense(out: int, columns: int, x: Tensor, dtype: torch.dtype) -> tuple[int, Callable[[], object]]:
    nbytes, like = out * columns * dtype.itemsize, x.to(dtype)

    def make() -> Callable[[], object]:
        weight = torch.empty(out, columns, dtype=dtype).uniform_(-1, 1)
        return lambda: torch.nn.functional.linear(like, weight)

    return nbytes, rotating(nbytes, make)


def quantized(out: int, columns: int, x: Tensor, bits: int) -> tuple[int, Callable[[], object]]:
    groups, row = -(-columns // GROUP), -(-columns * bits // 128) * 16
    nbytes, y = out * (row + 3 * groups), torch.zeros(x.shape[0], out)

    def make() -> Callable[[], object]:
        codes = torch.randint(0, 256, (out, row), dtype=torch.uint8)
        scales = torch.rand(out, groups).half()
        zeros = torch.randint(0, 2**bits, (out, groups), dtype=torch.uint8)
        tile = cpu.group_int(codes, scales, zeros, None, bits=bits, group_size=GROUP, columns=columns)
        return lambda: tile.matmul(x, y)

    return nbytes, rotating(nbytes, make)


def measure(
    variants: dict[str, tuple[int, Callable[[], object]]], rounds: int
) -> dict[str, dict[str, float]]:
    """Median microseconds and the GB/s of weight bytes that they mean, the variants taking turns."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(rounds + 3):
        for name, (_, run) in variants.items():
            start = time.perf_counter()
            run()
            if i >= 3:  # warm
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(t) for name, t in times.items()}
    return {name: {"us": 1e6 * t, "gb_per_s": variants[name][0] / t / 1e9} for name, t in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="4096x11008,576x1536", help="out x in, comma-separated")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(0)
    results = []
    for shape in args.shapes.split(","):
        out, columns = map(int, shape.split("x"))
        x = torch.randn(args.tokens, columns)
        variants = {
            "torch float32": dense(out, columns, x, torch.float32),
            "torch bfloat16": dense(out, columns, x, torch.bfloat16),
            "int8": quantized(out, columns, x, 8),
            "int4": quantized(out, columns, x, 4),
        }
        for threads in map(int, args.threads.split(",")):
            torch.set_num_threads(threads)
            row = measure(variants, args.rounds)
            results.append({"out": out, "in": columns, "tokens": args.tokens, "threads": threads, **row})
            print(f"{out} x {columns}, {args.tokens} token(s), {threads} thread(s)")
            for name, r in row.items():
                fp32, bf16 = (row[base]["us"] / r["us"] for base in ("torch float32", "torch bfloat16"))
                speed = f"{r['us']:9.1f} us {r['gb_per_s']:6.1f} GB/s"
                print(f"  {name:15}{speed} {fp32:6.2f} x fp32 {bf16:6.2f} x bf16")
    print(json.dumps({"bench": "gemv", "isa": cpu.isa(), "group_size": GROUP, "results": results}))


if __name__ == "__main__":
    main()
