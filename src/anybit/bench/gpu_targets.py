"""What the GPU's kernels are to reach, beside what a run of the benchmark measured.

Only what a run measured counts: an average over tokens needs all of them, and what is missing has no row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import mean
from typing import Any

from anybit.bench.gpu_matmul import TOKENS
from anybit.config import Json

Row = Json
Target = Json  # "target", "wanted" (">= 0.8"), "measured", "met"

LARGE = 11008 * 4096  # weights of a matrix, from which one token is to be fast
FAMILIES = {"W{}": "group int", "codebook {}": "codebooks by row"}  # of all widths
ONE_TOKEN = {
    8: (0.80, 1.8),
    4: (0.65, 3.4),
    3: (0.55, 4.4),
}  # bits: share of a copy, speed over cuBLAS float16
WIDTHS = range(3, 9)


def targets(figures: Json) -> list[Target]:
    """The targets of a part that its figures are enough for, in their order."""
    return list(OF_PARTS.get(figures["part"], _none)(figures))


def _none(figures: Json) -> Iterator[Target]:
    yield from ()


def _least(target: str, wanted: float, measured: float) -> Target:
    return {
        "target": target,
        "wanted": f">= {wanted:g}",
        "measured": measured,
        "met": bool(measured >= wanted),
    }


def _most(target: str, wanted: float, measured: float) -> Target:
    return {
        "target": target,
        "wanted": f"<= {wanted:g}",
        "measured": measured,
        "met": bool(measured <= wanted),
    }


def _with(rows: Sequence[Row], *names: str) -> list[Row]:
    """The rows that have all of these variants."""
    return [row for row in rows if all(name in row["variants"] for name in names)]


def _gemv(figures: Json) -> Iterator[Target]:
    large = [row for row in figures["rows"] if row["tokens"] == 1 and row["out"] * row["in"] >= LARGE]
    for pattern, family in FAMILIES.items():
        for bits, (share, speed) in ONE_TOKEN.items():
            name = pattern.format(bits)
            if rows := _with(large, name):
                if shares := [_packed_share(row, name, bits) for row in rows if "copy_gb_per_s" in row]:
                    what = f"{family}, {bits} bits: share of a copy, packed weights alone"
                    yield _least(what, share, min(shares))
                if speeds := _speeds(rows, name):
                    yield _least(f"{family}, {bits} bits: speed over cuBLAS float16", speed, min(speeds))
        names = [pattern.format(bits) for bits in WIDTHS]
        if rows := _with(large, *names):
            times = [[row["variants"][name]["us"] for name in names] for row in rows]
            worst = max(less / more for row in times for less, more in pairwise(row))
            yield _most(
                f"{family}, {WIDTHS[0]} to {WIDTHS[-1]} bits: time over that of the next width", 1, worst
            )


def _speeds(rows: Sequence[Row], name: str) -> list[float]:
    """Over cuBLAS float16, of the rows where that was measured."""
    variants = [row["variants"][name] for row in rows]
    return [variant["over_float16"] for variant in variants if "over_float16" in variant]


def _packed_share(row: Row, name: str, bits: int) -> float:
    """Of a copy's bandwidth: the weights' own bits, without scales and tables."""
    rate = bits / 8 * row["out"] * row["in"] / row["variants"][name]["us"] / 1e3
    return rate / row["copy_gb_per_s"]


def _gemm(figures: Json) -> Iterator[Target]:
    rows = figures["rows"]
    over = f"{TOKENS[0]} to {TOKENS[-1]} tokens: speed over cuBLAS float16"
    for name, wanted in (("W4A8", 1.9), ("W8A8", 2.0)):
        if (speed := _average(rows, name)) is not None:
            yield _least(f"{name}, {over}", wanted, speed)
    both = _with(rows, "W4A8", "MixLLM p10")
    if (speed := _average(both, "MixLLM p10")) is not None:
        ratio = speed / _average(both, "W4A8")
        yield _least("W4.4A8 (MixLLM p10), the same: over W4A8's", 0.95, ratio)
    at_512 = [row for row in rows if row["tokens"] == 512]
    if both := _with(at_512, "Atom W4A4", "W8A8"):
        ratios = [row["variants"]["W8A8"]["us"] / row["variants"]["Atom W4A4"]["us"] for row in both]
        yield _least("Atom W4A4, 512 tokens: speed over W8A8", 1, min(ratios))
    if speeds := _speeds(_with(at_512, "Atom W4A4"), "Atom W4A4"):
        yield _least("Atom W4A4, 512 tokens: speed over cuBLAS float16", 1.9, min(speeds))


def _average(rows: Sequence[Row], name: str) -> Any:
    """Speed over float16, over all numbers of tokens and the shapes that were measured with all. None: no shape was."""
    shapes: dict[tuple[int, int], dict[int, float]] = {}
    for row in _with(rows, name):
        of_shape = shapes.setdefault((row["out"], row["in"]), {})
        for speed in _speeds([row], name):
            of_shape[row["tokens"]] = speed
    whole = [[by[m] for m in TOKENS] for by in shapes.values() if set(TOKENS) <= by.keys()]
    return mean(map(mean, whole)) if whole else None


def _attention(figures: Json) -> Iterator[Target]:
    for row in _with(figures["rows"], "int4", "fp16"):
        if (row["batch"], row["length"]) == (128, 1024):
            variants = row["variants"]
            peer = min(variants[name]["us"] for name in ("fp16", "sdpa") if name in variants)
            what = (
                f"{row['model']}, int4 KV, batch 128, length 1024: speed over the faster of fp16 KV and SDPA"
            )
            yield _least(what, 3.3, peer / variants["int4"]["us"])


def _quantize(figures: Json) -> Iterator[Target]:
    if "model_seconds" in figures["kmeans"]:
        yield _most("k-means of a 7B model, 3 to 8 bits: seconds", 60, figures["kmeans"]["model_seconds"])
    if (layer := figures.get("gptq")) is not None:
        what = f"GPTQ, 4 bits, {'x'.join(map(str, layer['shape']))}"
        yield _most(f"{what}: ms", 1000, layer["ms"])
        yield _least(f"{what}: speed over plain PyTorch", 1, layer["plain_ms"] / layer["ms"])
    for row in figures["agreement"]:
        what = f"{row['what']}: weighted error apart from that of {row['beside']}, relative"
        yield _most(what, row["tolerance"], abs(row["error"]))


OF_PARTS: dict[str, Callable[[Json], Iterator[Target]]] = {
    "gemv": _gemv,
    "gemm": _gemm,
    "attention": _attention,
    "quantize": _quantize,
}
