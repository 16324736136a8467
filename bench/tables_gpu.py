"""Tables of the GPU's kernels, from what `python -m anybit.bench.gpu PART --json bench/results/gpu/PART.json` wrote."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from figures import CLAIM, load, markdown, verdict

Shape = tuple[int, int]  # out, in

PEER = "cuBLAS float16"
SHAPES = [(4096, 4096), (11008, 4096), (14336, 4096)]
BOUNDED = [(4096, 4096), (11008, 4096), (4096, 11008), (14336, 4096)]
TOKENS = [1, 8, 16, 64, 256, 512, 1024]
ONE_TOKEN = [  # layouts that stand for their families
    *("W2", "W3", "W4", "W8", "W4A8", "W8A8", "MixLLM p10", "Atom W4A4", "2/4/16"),
    *(
        "codebook 3",
        "codebook 4",
        "codebook 8",
        "by channel 4",
        "nested 2",
        "nested 3",
        "nested 4",
        "nested 8",
    ),
]
WITH_TARGETS = ["gemv", "gemm", "attention", "quantize"]
WORDS = {">=": "at least", "<=": "at most"}


def rows(part: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = load(f"gpu/{part}.json")["rows"]
    return found


def one_token() -> str:
    """Microseconds, share of a copy's rate and speed over cuBLAS."""
    of = {(row["out"], row["in"]): row["variants"] for row in rows("gemv")}
    head = ["layout"]
    for out, columns in SHAPES:
        head += [f"{out} x {columns}, us", "% of copy", "x cuBLAS"]
    lines = []
    for name in [PEER, *ONE_TOKEN]:
        line = [name]
        for shape in SHAPES:
            found = of[shape][name]
            line += [f"{found['us']:.1f}", f"{100 * found['of_copy']:.0f}", f"{found['over_float16']:.2f}"]
        lines.append(line)
    return markdown(head, lines)


def bounds() -> str:
    """What the compiled code would allow, and what was measured, in % of a copy's rate."""
    table = load("typed/gpu.json")["tables"]["bounds"]
    names = table["columns"][3:]
    of = {f"{row['out']} x {row['in']}": row["variants"] for row in rows("gemv")}
    lines = []
    for shape, parts, warps, *computed in table["rows"]:
        shares = [100 * of[shape][name]["of_copy"] for name in names]
        lines.append([shape, f"{parts}", f"{warps}", *(f"{c} / {s:.0f}" for c, s in zip(computed, shares))])
    return markdown([*table["columns"][:3], *names], lines)


def more_tokens() -> str:
    """The same of the formats that `gemm` leaves out."""
    found = rows("gemm-more")
    averages = load("gpu/gemm-more.json")["averages"]
    lines = [
        [name, *(f"{over_shapes(found, name, count):.2f}" for count in TOKENS), f"{average:.2f}"]
        for name, average in averages.items()
    ]
    return markdown(["layout", *map(str, TOKENS), "all"], lines)


def tokens() -> str:
    """Speed over cuBLAS float16, average over the shapes."""
    found = rows("gemm")
    whole, bfloat16 = (load(f"gpu/{part}.json")["averages"] for part in ("gemm", "gemm-bfloat16"))
    lines = []
    for name, average in whole.items():
        speeds = [over_shapes(found, name, count) for count in TOKENS]
        lines.append([name, *(f"{speed:.2f}" for speed in speeds), f"{average:.2f}", f"{bfloat16[name]:.2f}"])
    return markdown(["layout", *map(str, TOKENS), "all", "all, bfloat16"], lines)


def over_shapes(found: Sequence[dict[str, Any]], name: str, count: int) -> float:
    return mean(row["variants"][name]["over_float16"] for row in found if row["tokens"] == count)


def decode() -> str:
    """Steps of all linears of a Llama-7B."""
    found = rows("decode")
    head = ["layout"]
    for row in found:
        head += [f"batch {row['tokens']}, tokens/s", "x float16"]
    lines = []
    for name in found[0]["variants"]:
        line = [name]
        for row in found:
            step = row["variants"][name]
            line += [f"{step['tokens_per_s']:.0f}", f"{step['over_float16']:.2f}"]
        lines.append(line)
    return markdown(head, lines)


def attention() -> str:
    """Microseconds of a layer's step, and its speed over the faster of the two of 16 bits."""
    head = [
        "model",
        "tokens in the cache",
        "batch",
        "4 bits, us",
        "8 bits",
        "16 bits",
        "SDPA",
        "4 bits, speed",
        "8 bits",
    ]
    lines = []
    for row in rows("attention"):
        us = {name: found["us"] for name, found in row["variants"].items()}
        fastest = min(us["fp16"], us["sdpa"])
        times = [f"{us[name]:.1f}" for name in ("int4", "int8", "fp16", "sdpa")]
        speeds = [f"{fastest / us[name]:.2f}" for name in ("int4", "int8")]
        lines.append([row["model"], f"{row['length']}", f"{row['batch']}", *times, *speeds])
    return markdown(head, lines)


def activations() -> str:
    """Microseconds of rounding inputs of 4096 columns, and the speed over PyTorch at all widths."""
    found = rows("activations")
    narrow = [row for row in found if row["columns"] == min(row["columns"] for row in found)]
    lines = []
    for name in narrow[0]["variants"]:
        speeds = [row["variants"][name]["over_torch"] for row in found]
        times = [f"{row['variants'][name]['us']:.1f}" for row in narrow]
        lines.append([name, *times, f"{min(speeds):.0f} to {max(speeds):.0f}"])
    counts = [f"{row['tokens']} tokens" for row in narrow]
    counts[0] = f"{narrow[0]['columns']} columns, 1 token, us"
    return markdown(["rounding", *counts, "over PyTorch, all widths"], lines)


def quantizing() -> str:
    found = load("gpu/quantize.json")
    layer, clusters = found["gptq"], found["kmeans"]
    shape = " x ".join(map(str, layer["shape"]))
    lines = [
        [
            f"GPTQ, 4 bits, {shape}",
            f"{layer['ms']:.0f} ms; its columns in plain PyTorch {layer['plain_ms']:.0f} ms",
        ],
        ["k-means of a Llama-7B, 3 to 8 bits", f"{clusters['model_seconds']:.1f} s"],
    ]
    for method, seconds in found["seconds_per_billion"].items():
        lines.append([f"`{method}`, a billion weights", f"{seconds:.2g} s"])
    for row in found["agreement"]:
        same = f"{100 * row['equal_codes']:.2f} % of {row['codes']} codes equal"
        lines.append([f"{row['what']}, beside {row['beside']}", f"{same}, error {100 * row['error']:+.4f} %"])
    return markdown(["what", "figure"], lines)


def short(value: float) -> str:
    return f"{value:.2g}" if value < 0.01 else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def targets() -> str:
    lines = []
    for part in WITH_TARGETS:
        for target in load(f"gpu/{part}.json")["targets"]:
            sign, wanted = target["wanted"].split()
            measured = short(target["measured"])
            lines.append(
                [target["target"], f"{WORDS[sign]} {wanted}", measured, verdict([("", target["met"])])]
            )
    return markdown(CLAIM, lines)
