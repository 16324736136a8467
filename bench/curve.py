"""Whether one artifact's curve over its widths is monotone: neighbours of a `anybit compare` run, window by window.

anybit compare MODEL -o OUT -m 'anybit: bits=[2, 2.1, 2.2, ...]' --text test.txt
python bench/curve.py OUT [--name anybit] [--text test.txt]
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of `anybit compare`")
    parser.add_argument("--name", default="anybit", help="which entry's cells")
    parser.add_argument("--text", help="measured on which text, where there are several")
    args = parser.parse_args()
    cells = [json.loads(file.read_text()) for file in (args.out / "cells").glob("*.json")]
    cells = sorted(
        (c for c in cells if c["name"] == args.name and args.text in (None, c["text"])),
        key=lambda c: c["bits"],
    )
    if len(found := {c["text"] for c in cells}) > 1:
        parser.error(f"{args.out} has cells of several texts: name one of {sorted(found)} with --text")
    if len(cells) < 2:
        parser.error(f"{args.out} has {len(cells)} cells named {args.name!r}: a curve needs two")
    print(
        "| bits | bpw | perplexity | KLD mean | to the next, 1e-4 nats, ± 2 standard errors |\n|---|---|---|---|---|"
    )
    rises = 0
    for cell, after in pairwise([*cells, cells[-1]]):
        change = (
            (np.array(after["window_nll"]) - cell["window_nll"]) * len(cell["window_nll"]) / cell["tokens"]
        )
        mean, error = 1e4 * change.mean(), 2e4 * change.std(ddof=1) / len(change) ** 0.5
        rises += bool(mean > error)
        step = "" if after is cell else f"{mean:+.1f} ± {error:.1f}"
        figures = f"{cell['bits_per_weight']:.3f} | {cell['perplexity']:.2f} | {cell['kld_mean']:.4f}"
        print(f"| {cell['bits']:g} | {figures} | {step} |")
    print(f"\nsteps up by more than two standard errors: {rises} of {len(cells) - 1}")


if __name__ == "__main__":
    main()
