"""`anybit bench kernels --device cuda`, or `python -m anybit.bench.gpu PART` from a source tree.

Each part takes less than nine minutes on an H200 and needs torch, triton, transformers, safetensors and numpy alone.
`small` compares kernels with the reference and times nothing: in Triton's interpreter too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anybit.bench import picture
from anybit.config import Json
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


def _parts() -> dict[str, Callable[..., Json]]:
    from anybit.bench import gpu_attention, gpu_matmul, gpu_quantize

    return {
        "gemv": gpu_matmul.gemv,
        "gemm": gpu_matmul.gemm,
        "decode": gpu_matmul.decode,
        "attention": gpu_attention.attention,
        "activations": gpu_attention.quantize,
        "quantize": gpu_quantize.quantize,
    }


INTERPRETED = "without a GPU TRITON_INTERPRET=1 runs it in Triton's interpreter"
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
) -> Json:
    """The figures of a part.

    Args:
        part: of `PARTS`.
        rounds: whose median counts. Default: the part's own.
        small: correctness only.
        json_file: where the figures lie after every row, should it be the last.
        options: what to run of the parts `TAKEN`: `shapes` ("OUTxIN"), `tokens` (numbers), `dtype` (a name), `only`
            (beginnings of variants' names). None, or nothing in it: the part's own.

    Raises:
        InputError: no such part, shape, dtype or variant; an option that would be ignored; no GPU, unless small;
            kernels that do not run; if small, one that is wrong.

    A part that the GPU ends, because it answers no more after an error, has figures of what was before, and says so
    under `ended`.
    """
    from anybit.bench.gpu_targets import targets
    from anybit.bench.graphs import DeviceLostError
    from anybit.bench.variants import parse_shape
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
        hint = f"; {INTERPRETED}" if small else ""
        raise InputError(f"the GPU's kernels do not run: {why}{hint}")
    if rounds is not None:
        given["rounds"] = rounds

    def whole(figures: Json) -> Json:
        figures = {"bench": "gpu", "part": part} | figures
        return figures if small else figures | {"targets": targets(figures)}

    last: Json = {}

    def save(figures: Json) -> None:
        nonlocal last
        last = figures
        if not small:
            _write(json_file, whole(figures))

    try:
        last = _parts()[part](small=small, save=save, **given)
    except DeviceLostError as error:
        if small:
            raise InputError(str(error)) from error
        rest = " with `--only` and the other variants" if "only" in TAKEN.get(part, ()) else ""
        last["ended"] = f"{error}; what was measured before is kept, run the part again{rest}"
    return whole(last)


def _write(file: Path | None, figures: Json) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def lines(figures: Json) -> Iterator[str]:
    """A table of the figures, and they as one line of JSON."""
    yield f"{figures['part']} on {figures.get('device', 'no GPU: correctness only')}"
    if figures["part"] == "quantize":
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
    for name, why in figures.get("failed", {}).items():
        yield f"left out: {name}, {why}"
    for left_out in figures.get("left_out", ()):
        yield f"out of time, left out: {left_out}"
    if "ended" in figures:
        yield f"ended early: {figures['ended']}"
    for name, speed in figures.get("averages", {}).items():
        yield f"average over shapes and tokens, x float16: {name:20}{speed:6.2f}"
    if figures.get("targets"):
        width = max(len(target["target"]) for target in figures["targets"])
        yield f"\n{'target':{width}}{'wanted':>11}{'measured':>11}"
    for target in figures.get("targets", ()):
        measured, met = target["measured"], "met" if target["met"] else "not met"
        yield f"{target['target']:{width}}{target['wanted']:>11}{measured:11.4g}  {met}"
    yield json.dumps(figures)


def _quantizing(figures: Json) -> Iterator[str]:
    layer, clusters = figures.get("gptq"), figures["kmeans"]
    if layer is not None:
        plain = f"columns in plain PyTorch: {layer['plain_ms']:.0f} ms"
        yield f"GPTQ, 4 bits, {layer['shape']}: {layer['ms']:.1f} ms; {plain}"
    if "model_seconds" in clusters:  # all shapes were clustered
        speed = f"{clusters['ns_per_weight']:.2f} ns a weight, model {clusters['model_seconds']:.1f} s"
        yield f"k-means, 3 to 8 bits: {speed}"
    for method, seconds in figures["seconds_per_billion"].items():
        yield f"{method}: {seconds:.1f} s per billion weights"
    for row in figures.get("agreement", ()):
        same = f"{100 * row['equal_codes']:.2f} % of {row['codes']} codes equal"
        yield f"{row['what']}, beside {row['beside']}: {same}, weighted error {100 * row['error']:+.4f} %"


@dataclass
class Panel:
    """Of a plot: points by label, or bars where `x` is None."""

    title: str
    x: str | None
    y: str
    points: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    bars: dict[str, float] = field(default_factory=dict)
    lines: bool = True  # between points
    log: bool = False  # upwards
    one: str = ""  # what a speed of 1 is

    def add(self, label: str, x: float, y: float) -> None:
        self.points.setdefault(label, []).append((x, y))


def check_plot(path: Path | None, small: bool) -> None:
    """Refuse a plot that could not be drawn when the work is done.

    Raises:
        InputError: another kind of file; a run that times nothing.
    """
    from anybit.bench.picture import PICTURES

    if path is not None and path.suffix not in PICTURES:
        raise InputError(f"--plot {path}: expected a name that ends in {' or '.join(PICTURES)}")
    if path is not None and small:
        raise InputError("--plot would be ignored: with --small there are no times; leave it out")


def plot(figures: Json, path: Path) -> None:
    """What a part is about, drawn: see `_panels`. Without matplotlib it is said that nothing is."""
    try:
        import matplotlib.figure  # noqa: F401 - drawing needs it
    except ImportError:
        print(f"{path} is not drawn: matplotlib is not there", file=sys.stderr)
        return
    panels = _panels(figures)
    if not panels:
        print(f"{path} is not drawn: nothing was timed", file=sys.stderr)
        return
    figure = picture.grid(panels, min(3, len(panels)), _draw, loc="outside lower center", ncols=5)
    figure.suptitle(f"{figures['part']} on {figures['device']}", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw(axes: Any, panel: Panel) -> None:
    axes.set(title=panel.title, ylabel=panel.y)
    if panel.x is None:
        axes.bar(list(panel.bars), list(panel.bars.values()), color="C0")
        axes.bar_label(axes.containers[0], fmt="%.3g")
    else:
        for i, (label, points) in enumerate(panel.points.items()):
            marker = "os^vDPX*"[i % 8]  # as colors come again after ten
            axes.plot(*zip(*sorted(points)), marker, linestyle="-" if panel.lines else "", label=label)
        if panel.one:
            axes.axhline(1, linestyle="--", color="#555", label=panel.one)
        axes.set_xlabel(panel.x)
        if panel.lines:
            ticks = sorted({x for points in panel.points.values() for x, _ in points})
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    if panel.log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _panels(figures: Json) -> list[Panel]:
    """One per shape or model: speeds against stored bits (one token) or tokens; of a decode step tokens per second; of
    rounding inputs microseconds; of quantizing bars."""
    part = figures["part"]
    made: dict[str, Panel] = {}
    if part == "quantize":
        return _bars(figures)
    for row in figures["rows"]:
        if part == "attention":
            title = f"{row['model']}, {row['length']} tokens in the cache"
            panel = Panel(title, "batch", "speed over keys and values of float16", one="fp16")
        elif part == "activations":
            panel = Panel(f"{row['columns']} columns", "tokens", "microseconds", log=True)
        elif part == "decode":
            panel = Panel("all linears of a Llama-7B", "batch", "tokens per second", log=True)
        else:
            x = "stored bits per weight" if part == "gemv" else "tokens"
            speed = "speed over cuBLAS float16"
            panel = Panel(f"{row['out']} x {row['in']}", x, speed, lines=part != "gemv", one="cuBLAS float16")
        panel = made.setdefault(panel.title, panel)
        for name, variant in row["variants"].items():
            if part == "gemv":
                bits = 8e3 * variant["gb_per_s"] * variant["us"] / (row["out"] * row["in"])
                label = _family(name)
                if label is not None and "over_float16" in variant:
                    panel.add(label, bits, variant["over_float16"])
            elif part in ("gemm", "attention"):
                over = "over_float16" if part == "gemm" else "over_fp16"
                if over in variant and name not in ("fp16", "cuBLAS float16"):
                    panel.add(name, row["tokens" if part == "gemm" else "batch"], variant[over])
            else:
                panel.add(name, row["tokens"], variant["tokens_per_s" if part == "decode" else "us"])
    return list(made.values())


def _family(name: str) -> str | None:
    """What variants of several widths are drawn as; None: not at all."""
    from anybit.bench.picture import FAMILIES

    family = next((described[2] for begin, described in FAMILIES.items() if name.startswith(begin)), None)
    return family if family is None or "A8" not in name else f"{family}, 8-bit inputs"


def _bars(figures: Json) -> list[Panel]:
    layer = figures.get("gptq")
    rows = {"x".join(map(str, row["shape"])): row["ms"] for row in figures["kmeans"]["rows"]}
    panels = [
        Panel("methods", None, "seconds per billion weights", bars=figures["seconds_per_billion"]),
        Panel("k-means, 3 to 8 bits", None, "ms of a layer", bars=rows),
    ]
    if layer is not None:
        title = f"GPTQ, 4 bits, {'x'.join(map(str, layer['shape']))}"
        bars = {"kernel": layer["ms"], "plain PyTorch": layer["plain_ms"]}
        panels.append(Panel(title, None, "ms of a layer", bars=bars))
    return [panel for panel in panels if panel.bars]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m anybit.bench.gpu", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rounds", type=_whole, help="whose median counts")
    parser.add_argument("--small", action="store_true", help=f"correctness only; {INTERPRETED}")
    parser.add_argument("--shapes", type=_split, help="OUTxIN, comma-separated")
    parser.add_argument("--tokens", type=_wholes, help="comma-separated")
    parser.add_argument("--dtype", help="of inputs: float16 or bfloat16")
    parser.add_argument("--only", type=_split, help="variants, or how their names begin, comma-separated")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--plot", type=Path, help="also draw them: a .png, .svg or .pdf")
    given = vars(parser.parse_args())
    file, picture = given.pop("json"), given.pop("plot")
    try:
        check_plot(picture, given["small"])
        figures = run(json_file=file, **given)
    except InputError as error:
        parser.error(str(error))
    _write(file, figures)
    print("\n".join(lines(figures)))
    if picture is not None:
        plot(figures, picture)


def _whole(text: str) -> int:
    if not text.strip().isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1 up")
    return int(text)


def _wholes(text: str) -> tuple[int, ...]:
    return tuple(_whole(number) for number in text.split(","))


def _split(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


if __name__ == "__main__":
    main()
