"""Decoding speed inside Transformers: artifacts and their base model, each in float32 and bfloat16, in one run.

Every contender generates the same number of tokens greedily from the same prompt; rounds are interleaved and medians
reported. The last line is one JSON object.

    python bench/decode.py MODEL ARTIFACT [ARTIFACT ...] [--tokens 64] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from anybit.generate import Generator
from anybit.kernels import info

PROMPT = "The history of the lighthouse begins with fires that were lit on hills to guide sailors home, and"


def tokens_per_second(generator: Generator, count: int) -> float:
    """Decode rate with the prefill taken out: time of `count` new tokens minus time of one."""
    ids = generator.encode(PROMPT)
    times = []
    for new in (1, count + 1):
        start = time.perf_counter()
        made = generator.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=new,
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )
        times.append(time.perf_counter() - start)
        assert made.shape[1] == ids.shape[1] + new
    return count / (times[1] - times[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("artifacts", nargs="+")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    contenders = {
        f"{label} {dtype}": Generator(path, dtype=dtype)
        for label, path in (("base", args.model), *zip(args.artifacts, args.artifacts))
        for dtype in ("float32", "bfloat16")
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    with torch.no_grad():
        for generator in contenders.values():
            tokens_per_second(generator, 8)
        for _ in range(args.rounds):
            for name, generator in contenders.items():
                rates[name].append(tokens_per_second(generator, args.tokens))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, rate in medians.items():
        print(f"{name:40} {rate:8.1f} tokens/s  {rate / medians['base float32']:.2f}x float32")
    print(
        json.dumps(
            {"bench": "decode", "threads": args.threads, "kernel": info(), "tokens_per_second": medians}
        )
    )


if __name__ == "__main__":
    main()
