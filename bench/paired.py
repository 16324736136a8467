"""Is a change worth it? How far artifacts stray from their base, window by window and width by width.

    python bench/paired.py MODEL NAME=ARTIFACT NAME=ARTIFACT... --text valid.txt --skip 0.6 --json paired.json

Each is held against the first. The criterion is the mean over the widths of the logarithm of the ratio of mean
divergences, KL(base || artifact) per token, with an interval of 95 % from windows drawn anew (paired bootstrap): below
0, the change pays. Windows of 1024 tokens are spread over the text behind its first `--skip`, which artifacts may be
calibrated on. Weights are dequantized and run in `--dtype`, the base too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anybit.calibration.texts import read_text, token_ids
from anybit.layers import PackedModule
from anybit.loader import load, load_tokenizer

LENGTH = 1024  # tokens of a window
CHUNK = 256  # positions whose logits are alive at a time
RESAMPLES = 2000
PARTS = ("all", "layers", "embedding")
DTYPES = ("bfloat16", "float32")  # the first is the faster one where processors multiply it
Said = tuple[Tensor, Tensor]  # hidden states and the head that makes logits of them


def windows_of(tokenizer: Any, text: str, skip: float, count: int) -> Tensor:
    """int64 [n, LENGTH], evenly spaced behind the line in which the skipped share ends."""
    start = text.index("\n", int(skip * len(text))) + 1 if skip else 0
    ids = token_ids(tokenizer, text[start:])
    found = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    return found[:: max(1, len(found) // count)][:count]


def said(model: Any, windows: Tensor) -> Said:
    """What the head reads, [windows, LENGTH, hidden], and the head, which may be the embedding: both are quantized."""
    states = [model.base_model(input_ids=w[None], use_cache=False).last_hidden_state for w in windows]
    return torch.cat(states), model.get_output_embeddings().weight


def window_figures(base: Said, own: Said, ids: Tensor) -> tuple[float, float]:
    """Of one window: mean divergence from the base and mean negative log-likelihood, in nats per scored token."""
    divergence = loss = 0.0
    for a in range(0, LENGTH - 1, CHUNK):
        b = min(a + CHUNK, LENGTH - 1)
        p, q = ((states[a:b] @ head.T).float().log_softmax(-1) for states, head in (base, own))
        loss -= float(q.gather(1, ids[a + 1 : b + 1, None]).sum())
        divergence += float((p.exp() * (p - q)).sum())
    return divergence / (LENGTH - 1), loss / (LENGTH - 1)


def put_weights(base: Any, made: Any, part: str = "all") -> None:
    """Give the base an artifact's weights: all of them, as methods may change norms too, or those of one of `PARTS`."""
    packed = {name: module for name, module in made.named_modules() if isinstance(module, PackedModule)}
    outside = base.get_input_embeddings(), base.get_output_embeddings()
    for name, module in packed.items():
        own = base.get_submodule(name)
        if part == "all" or (part == "embedding") == (own in outside):
            own.weight.copy_(module.bound().dequantize())
    if part == "all":
        parameters = dict(base.named_parameters())
        for name, parameter in made.named_parameters():
            if name.rpartition(".")[0] not in packed:
                parameters[name].copy_(parameter)


def figures(known: Said, model: Any, windows: Tensor) -> dict[str, Any]:
    """Of every window, a model's divergence from what the base said, and its loss."""
    (states, known_head), (own, head) = known, said(model, windows)
    pairs = [window_figures((s, known_head), (o, head), ids) for s, o, ids in zip(states, own, windows)]
    kld, nll = zip(*pairs)
    return {"kld": kld, "nll": nll}


def measure(
    base: Any, known: Said, artifact: Path, widths: Sequence[float], windows: Tensor, part: str
) -> dict[str, Any]:
    """Figures of every window at every width beside what the base said; the base's weights are overwritten."""
    made, found = load(artifact), {}
    for bits in widths:
        made.set_bits(bits)
        put_weights(base, made, part)
        found[f"{bits:g}"] = of = figures(known, base, windows)
        print(
            f"{artifact.name} {bits:g}: {np.exp(np.mean(of['nll'])):.3f}, {np.mean(of['kld']):.4f}",
            flush=True,
        )
    return found


def ratio(old: dict[str, Any], new: dict[str, Any]) -> tuple[float, float, float]:
    """The criterion, and its interval's ends."""
    a, b = (np.array([of[width]["kld"] for width in old]) for of in (old, new))  # [widths, windows]
    drawn = np.random.default_rng(0).integers(0, a.shape[1], (RESAMPLES, a.shape[1]))
    means = np.log(b[:, drawn].mean(2) / a[:, drawn].mean(2)).mean(0)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(np.log(b.mean(1) / a.mean(1)).mean()), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("artifacts", nargs="+", metavar="NAME=ARTIFACT")
    parser.add_argument("--text", required=True, help="as `anybit eval --text` takes it")
    parser.add_argument("--skip", type=float, default=0.0, help="share of the text that is left out")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--bits", default="2.3,2.5,3,3.5,4")
    parser.add_argument(
        "--part", choices=PARTS, default="all", help="what is quantized: embedding and head, or the rest"
    )
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    parser.add_argument("--json", type=Path, help="every figure of every window")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    base = load(args.model, dtype=args.dtype)
    windows = windows_of(load_tokenizer(args.model), read_text(args.text), args.skip, args.windows)
    states, head = said(base, windows)
    known = states, head.clone()
    widths = [float(bits) for bits in args.bits.split(",")]
    given = dict(text.split("=", 1) for text in args.artifacts)
    cells = {
        name: measure(base, known, Path(path), widths, windows, args.part) for name, path in given.items()
    }
    first = next(iter(cells.values()))
    criteria = {name: ratio(first, found) for name, found in cells.items()}
    for name, (mean, low, high) in criteria.items():
        print(f"{name}: {mean:+.4f}, {low:+.4f} to {high:+.4f}")
    if args.json:
        made = {"command": " ".join(["python", "bench/paired.py", *sys.argv[1:]]), "windows": len(windows)}
        args.json.write_text(json.dumps(made | {"criteria": criteria, "cells": cells}) + "\n")


if __name__ == "__main__":
    main()
