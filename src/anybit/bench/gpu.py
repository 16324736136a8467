"""`anybit bench kernels --device cuda`, or `python -m anybit.bench.gpu PART` from a source tree.

Each part takes less than nine minutes on an H200 and needs torch, triton, transformers, safetensors and numpy alone.
`small` compares kernels with the reference and times nothing: in Triton's interpreter too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from anybit.errors import InputError

COLUMNS = {  # of a table: the figure, its heading, its factor
    "us": ("us", 1.0),
    "gb_per_s": ("GB/s", 1.0),
    "of_copy": ("% of copy", 100.0),
    "tflops": ("TOP/s", 1.0),
    "of_matrix_rate": ("% of rate", 100.0),
    "tokens_per_s": ("tokens/s", 1.0),
    "over_float16": ("x float16", 1.0),
    "over_bfloat16": ("x bfloat16", 1.0),
    "over_fp16": ("x fp16 KV", 1.0),
    "over_sdpa": ("x SDPA", 1.0),
    "over_torch": ("x torch", 1.0),
}


def _parts() -> dict[str, Callable[..., dict[str, Any]]]:
    from anybit.bench import gpu_attention, gpu_matmul, gpu_quantize

    return {
        "gemv": gpu_matmul.gemv,
        "gemm": gpu_matmul.gemm,
        "decode": gpu_matmul.decode,
        "attention": gpu_attention.attention,
        "activations": gpu_attention.quantize,
        "quantize": gpu_quantize.quantize,
    }


PARTS = ("gemv", "gemm", "decode", "attention", "activations", "quantize")
TAKEN = {  # by parts: options, of `run` and of the command
    "gemv": ("shapes", "dtype", "only"),
    "gemm": ("shapes", "tokens", "dtype", "only"),
    "decode": ("tokens", "dtype", "only"),
}


def run(
    part: str,
    rounds: int | None = None,
    small: bool = False,
    json_file: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The figures of a part.

    Args:
        part: of `PARTS`.
        rounds: whose median counts. Default: the part's own.
        small: correctness only.
        json_file: where the figures of these parts lie after every row, should it be the last.
        options: what to run of the parts `TAKEN`: `shapes` ("OUTxIN"), `tokens` (numbers), `dtype` (a name), `only`
            (beginnings of variants' names). None, or nothing in it: the part's own.

    Raises:
        InputError: no such part, shape, dtype or variant; an option that would be ignored; no GPU, unless small;
            kernels that do not run or are wrong.
    """
    from anybit.bench.kernels import parse_shape
    from anybit.kernels import gpu

    if part not in PARTS:
        raise InputError(f"--part {part}: expected one of {', '.join(PARTS)}")
    given = {name: value for name, value in options.items() if value}
    for name in given:
        if name not in TAKEN.get(part, ()) or (small and name == "shapes"):
            parts = ", ".join(part for part, taken in TAKEN.items() if name in taken)
            raise InputError(f"--{name} would be ignored: it is for timing the parts {parts}; leave it out")
    if "shapes" in given:
        given["shapes"] = [parse_shape(shape) for shape in given["shapes"]]
    if (why := gpu.why_not()) is not None:
        raise InputError(f"the GPU's kernels do not run: {why}")
    if rounds is not None:
        given["rounds"] = rounds
    head = {"bench": "gpu", "part": part}
    if part in TAKEN:
        given["save"] = lambda figures: _write(json_file, head | figures)
    return head | _parts()[part](small=small, **given)


def _write(file: Path | None, figures: dict[str, Any]) -> None:
    if file is not None:
        file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def lines(figures: dict[str, Any]) -> Iterator[str]:
    """A table of the figures, and they as one line of JSON."""
    yield f"{figures['part']} on {figures.get('device', 'no GPU: correctness only')}"
    if "gptq" in figures:
        yield from _quantizing(figures)
    elif not figures["rows"]:
        yield f"checked against the reference: {len(figures['checked'])} variants"
    for row in figures.get("rows", ()):
        said = ", ".join(f"{name} {value}" for name, value in row.items() if isinstance(value, int | str))
        shown = {
            key: head for key, head in COLUMNS.items() if any(key in v for v in row["variants"].values())
        }
        copy = f"; copy {row['copy_gb_per_s']:.0f} GB/s" if "copy_gb_per_s" in row else ""
        yield f"\n{said}{copy}"
        yield " " * 24 + "".join(f"{heading:>11}" for heading, _ in shown.values())
        for name, variant in row["variants"].items():
            cells = (
                f"{variant[key] * times:11.2f}" if key in variant else " " * 11
                for key, (_, times) in shown.items()
            )
            yield f"{name:24}{''.join(cells)}"
    for name, rate in figures.get("matrix_rates", {}).items():
        yield f"products of {name}, large and square: {rate:.0f} TFLOP/s or TOP/s"
    for left_out in figures.get("left_out", ()):
        yield f"out of time, left out: {left_out}"
    for name, speed in figures.get("averages", {}).items():
        yield f"average over shapes and tokens, x float16: {name:20}{speed:6.2f}"
    yield json.dumps(figures)


def _quantizing(figures: dict[str, Any]) -> Iterator[str]:
    layer, clusters = figures["gptq"], figures["kmeans"]
    yield f"GPTQ, 4 bits, {layer['shape']}: {layer['ms']:.1f} ms; columns in plain PyTorch: {layer['plain_ms']:.0f} ms"
    yield f"k-means, 3 to 8 bits: {clusters['ns_per_weight']:.2f} ns a weight, model {clusters['model_seconds']:.1f} s"
    for method, seconds in figures["seconds_per_billion"].items():
        yield f"{method}: {seconds:.1f} s per billion weights"


def plot(figures: dict[str, Any], path: Path) -> None:
    """Speed over the first of float16's figures: against bits where one token is multiplied, else against tokens."""
    from matplotlib.figure import Figure

    rows = figures["rows"]
    shapes = list(dict.fromkeys((row["out"], row["in"]) for row in rows))
    figure = Figure(figsize=(5.5 * len(shapes), 4.5), layout="constrained")
    for axes, shape in zip(figure.subplots(1, len(shapes), squeeze=False)[0], shapes):
        of_shape = [row for row in rows if (row["out"], row["in"]) == shape]
        for name in of_shape[0]["variants"]:
            points = [(row["tokens"], row["variants"][name]) for row in of_shape if name in row["variants"]]
            if figures["part"] == "gemv":
                bits = 8e3 * points[0][1]["gb_per_s"] * points[0][1]["us"] / (shape[0] * shape[1])
                axes.plot(bits, points[0][1]["over_float16"], "o")
                axes.annotate(name, (bits, points[0][1]["over_float16"]), fontsize="xx-small")
            else:
                axes.plot([m for m, _ in points], [v["over_float16"] for _, v in points], "o-", label=name)
        one = figures["part"] == "gemv"
        axes.set(title=f"{shape[0]} x {shape[1]}", xlabel="stored bits per weight" if one else "tokens")
        axes.set(ylabel="speed over cuBLAS float16", ylim=(0, None))
        if not one:
            axes.set_xscale("log", base=2)
            axes.legend(fontsize="x-small")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m anybit.bench.gpu", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--small", action="store_true", help="correctness only")
    parser.add_argument("--shapes", type=_split, help="OUTxIN, comma-separated")
    parser.add_argument("--tokens", type=lambda text: tuple(map(int, _split(text))), help="comma-separated")
    parser.add_argument("--dtype", help="of inputs: float16 or bfloat16")
    parser.add_argument("--only", type=_split, help="variants whose names begin so, comma-separated")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = vars(parser.parse_args())
    file = given.pop("json")
    try:
        figures = run(json_file=file, **given)
    except InputError as error:
        parser.error(str(error))
    _write(file, figures)
    print("\n".join(lines(figures)))


def _split(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


if __name__ == "__main__":
    main()
