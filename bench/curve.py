"""One artifact at all its widths: whether the curve falls, window by window, and where it lies beside other methods.

anybit compare MODEL -o OUT -m 'anybit: bits=[2, 2.1, 2.2, ...]' --text test.txt --max-tokens 8192
python bench/curve.py OUT [--text test.txt] [--tokens 8184] [--others OTHER_OUT --plot curve.png] [--json curve.json]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

SHOWN = ("bits", "bits_per_weight", "perplexity", "kld_mean", "tokens", "window_nll")
WORST = 4  # perplexities up to this many times the best are drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of `anybit compare`")
    parser.add_argument("--name", default="anybit", help="which entry's cells")
    parser.add_argument("--text", help="measured on which text, where there are several")
    parser.add_argument(
        "--others", type=Path, help="a comparison on the same text, to be drawn beside the curve"
    )
    parser.add_argument("--tokens", type=int, help="scored tokens, where there are several numbers of them")
    parser.add_argument("--plot", type=Path, help="picture to write")
    parser.add_argument("--json", type=Path, help="the curve's figures")
    args = parser.parse_args()
    cells = [c for c in read(args.out) if c["name"] == args.name]
    cells = [c for c in cells if args.text in (None, c["text"]) and args.tokens in (None, c["tokens"])]
    cells.sort(key=lambda c: c["bits"])
    settings = {(c["text"], c["tokens"]) for c in cells}
    if len(settings) > 1:
        parser.error(
            f"{args.out} has cells of {sorted(settings)} (text, tokens): name one with --text and --tokens"
        )
    if len(cells) < 2:
        parser.error(f"{args.out} has {len(cells)} cells named {args.name!r}: a curve needs two")
    table(cells)
    if args.json:
        kept = [{key: cell[key] for key in SHOWN} for cell in cells]
        args.json.write_text(json.dumps({"text": cells[0]["text"], "cells": kept}) + "\n")
    if args.plot:
        draw(cells, read(args.others) if args.others else [], args.plot)


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted((out / "cells").glob("*.json"))]


def table(cells: Sequence[dict[str, Any]]) -> None:
    """Every width, and by how much the next one's loss differs."""
    print("| bits | bpw | perplexity | KLD mean | to the next, 1e-4 nats, ± 2 standard errors |")
    print("|---|---|---|---|---|")
    rises = 0
    for cell, after in pairwise([*cells, cells[-1]]):
        change = (np.array(after["window_nll"]) - cell["window_nll"]) / per_window(cell)
        mean, error = 1e4 * change.mean(), 2e4 * change.std(ddof=1) / len(change) ** 0.5
        rises += bool(mean > error)
        step = "" if after is cell else f"{mean:+.1f} ± {error:.1f}"
        figures = f"{cell['bits_per_weight']:.3f} | {cell['perplexity']:.2f} | {cell['kld_mean']:.4f}"
        print(f"| {cell['bits']:g} | {figures} | {step} |")
    print(f"\nsteps up by more than two standard errors: {rises} of {len(cells) - 1}")


def per_window(cell: dict[str, Any]) -> float:
    """Scored tokens of a window."""
    return cell["tokens"] / len(cell["window_nll"])


def draw(cells: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]], plot: Path) -> None:
    """Perplexity over bits per weight; of the others over the same first windows."""
    from matplotlib import pyplot

    windows = len(cells[0]["window_nll"])
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    points: dict[str, list[tuple[float, float]]] = {}
    for cell in others:
        if cell["name"] == cells[0]["name"] or cell["text"] != cells[0]["text"]:
            continue
        fits = len(cell["window_nll"]) >= windows and per_window(cell) == per_window(cells[0])
        if cell["bits"] == 16 or not fits:
            continue
        loss = sum(cell["window_nll"][:windows]) / (windows * per_window(cell))
        points.setdefault(cell["name"], []).append((cell["bits_per_weight"], float(np.exp(loss))))
    axes.plot(
        [c["bits_per_weight"] for c in cells],
        [c["perplexity"] for c in cells],
        "k.-",
        label="anybit, one artifact",
    )
    for marker, (name, found) in zip("osD^vP*Xph<>12348" * 2, sorted(points.items())):
        axes.plot(*zip(*sorted(found)), marker, markersize=5, alpha=0.8, label=name)
    best = cells[-1]["perplexity"]
    axes.set(
        xlabel="bits per weight, everything counted", ylabel="perplexity", yscale="log", xlim=(2, 8.5),
        ylim=(0.97 * best, WORST * best),
    )  # fmt: skip
    ticks = [round(best * factor) for factor in (1, 1.25, 1.5, 2, 3, 4)]
    axes.set_yticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    figure.savefig(plot, dpi=120)


if __name__ == "__main__":
    main()
