"""The page that `anybit compare` writes: a table, curves over bits per weight, widths per layer, time and memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anybit.artifact.model_card import quantized_notice
from anybit.compare import rows
from anybit.compare.page import png, write_page
from anybit.compare.rows import Row, by_entry, label
from anybit.config import Json
from anybit.evaluation.perplexity import paired_bootstrap

WORST = 10  # curves show perplexities up to this many times the unquantized model's
CUT = 5  # bars of wall seconds reach so many times the median
HEADS = (
    "method",
    "width",
    "bpw",
    "in the files",
    "size, MB",
    "perplexity",
    "over the base, 95 %",
    "KLD mean",
    "KLD p99",
    "top-1, %",
)
COSTS = ("wall, s", "processor, s", "peak, MB")
MARKERS = "osD^vP*Xph<>"


def write_report(out: Path, results: Json) -> Path:
    """Write `report.html`, `perplexity.png` and, where it was measured, `kld.png` from `compare`'s results."""
    base, *cells = results["cells"]
    labels = {
        "perplexity": "perplexity",
        "kld_mean": "KL divergence from the unquantized model, nats per token",
    }
    curves = {
        key.removesuffix("_mean"): _curve(
            cells, key, label, base["perplexity"] if key == "perplexity" else None
        )
        for key, label in labels.items()
        if any(cell.get(key) is not None for cell in cells)
    }
    for name, figure in curves.items():
        figure.savefig(out / f"{name}.png", dpi=120)
    before = results.get("quantized_before")
    marks = rows.machine_marks(results["cells"])
    tasks = list(base["tasks"])
    return write_page(
        out / "report.html",
        "report.html",
        title=f"anybit compare: {results['model']}",
        model=results["model"],
        settings=results["settings"],
        caveat=quantized_notice(before) if before else None,
        base=base,
        base_perplexity=_short(base["perplexity"]),
        count=len(cells),
        made_on=rows.made_on(results["cells"], marks),
        heads=[*HEADS, *(f"{task}, %" for task in tasks), *COSTS],
        rows=_rows(base, cells, tasks, marks),
        unknown=any(
            c.get(key) is None for c in cells for key in ("processor_seconds", "file_bits_per_weight")
        ),
        resumed=any(c["resumed"] for c in cells),
        what_the_rows_are=rows.section(results, cells) if cells else "",  # HTML
        curves=[(name, png(figure)) for name, figure in curves.items()],
        heatmaps=[(f"{label(cell)}, {width(cell)}", png(_heatmap(cell))) for cell in cells if _mixed(cell)],
        bars=png(bars(cells)) if cells else None,
        hatched=any(not known for *_, known in map(_timed, cells)),
        cut=CUT,
        left_out=results["left_out"],
    )


def pareto(cells: Sequence[Row], figure: str) -> set[int]:
    """Indices of the cells that no other cell beats in both bits per weight and `figure` (lower is better)."""
    points = [(i, c["bits_per_weight"], c.get(figure)) for i, c in enumerate(cells)]
    ordered = sorted((b, f, i) for i, b, f in points if f is not None)
    front, best = set(), float("inf")
    for _, value, i in ordered:
        if value < best:
            front.add(i)
            best = value
    return front


def _rows(
    base: Row, cells: Sequence[Row], tasks: Sequence[str], marks: Mapping[str, str]
) -> list[tuple[str, list[str]]]:
    """The table's rows: CSS classes and the texts under `heads`; the unquantized model is the first."""
    front = pareto(cells, "perplexity")
    unmeasured = [""] * 4
    shown = [
        base["name"] + rows.mark(base, marks),
        "W16A16",
        "16",
        "16",
        "",
        _short(base["perplexity"]),
        *unmeasured,
    ]
    found = [("", [*shown, *_scores(base, tasks), *[""] * len(COSTS)])]
    for i, cell in enumerate(cells):
        kinds = ["best"] * (i in front) + ["first"] * (i == 0 or label(cells[i - 1]) != label(cell))
        name = label(cell) + rows.mark(cell, marks)
        found.append((" ".join(kinds), [name, *_line(cell, base, tasks)]))
    return found


def _line(cell: Row, base: Row, tasks: Sequence[str]) -> list[str]:
    top1 = cell.get("top1_agreement")
    processor = cell.get("processor_seconds")
    return [
        width(cell),
        f"{cell['bits_per_weight']:.3f}",
        rows.in_files(cell),
        f"{cell['size_bytes'] / 1e6:.1f}",
        _short(cell["perplexity"]),
        _over(cell, base),
        _short(cell.get("kld_mean"), 4),
        _short(cell.get("kld_p99"), 2),
        "" if top1 is None else f"{100 * top1:.1f}",
        *_scores(cell, tasks),
        f"{cell['seconds']:.0f}" + ("*" if cell["resumed"] else ""),
        "?" if processor is None else f"{processor:.0f}",
        f"{cell['peak_memory_bytes'] / 1e6:.0f}",
    ]


def width(cell: Row) -> str:
    """ "W2.5A16", and "W4A4KV4" where the KV-cache is quantized."""
    cache = f"KV{cell['kv_bits']}" if cell["kv_bits"] != 16 else ""
    return f"W{cell['bits']:g}A{cell['act_bits']}{cache}"


def _short(value: float | None, digits: int = 2) -> str:
    if value is None:
        return "none"
    return f"{value:.3g}" if value >= 10_000 else f"{value:.{digits}f}"


def _over(cell: Row, base: Row) -> str:
    """By how much a perplexity is above the base's, as an interval."""
    if cell["perplexity"] is None or base["perplexity"] is None:
        return ""
    per_window = cell["tokens"] // len(cell["window_nll"])
    bounds = paired_bootstrap(cell["window_nll"], base["window_nll"], per_window)
    if bounds[0] > np.log(WORST):
        return f"> x {WORST}"
    low, high = (100 * (float(np.exp(bound)) - 1) for bound in bounds)
    return f"{low:+.1f} to {high:+.1f} %"


def _scores(cell: Row, tasks: Sequence[str]) -> list[str]:
    found = []
    for task in tasks:
        scores = cell["tasks"].get(task, {})
        key = next((key for key in ("acc_norm", "acc") if scores.get(key) is not None), None)
        error = scores.get(f"{key}_stderr")
        score = "" if key is None else f"{100 * scores[key]:.1f}"
        found.append(score + ("" if error is None else f" ± {100 * error:.1f}"))
    return found


def _curve(cells: Sequence[Row], key: str, label: str, base: float | None = None) -> Any:
    """A figure against stored bits per weight, a line per method, with the Pareto front in grey."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 5), layout="constrained")
    axes = figure.subplots()
    shown = [c for c in cells if c.get(key) is not None]
    front = sorted((shown[i] for i in pareto(shown, key)), key=lambda c: c["bits_per_weight"])
    axes.plot([c["bits_per_weight"] for c in front], [c[key] for c in front], color="#bbb", linewidth=7, alpha=0.6,
              solid_capstyle="round", label="Pareto front", zorder=0)  # fmt: skip
    for i, (name, same) in enumerate(by_entry(shown).items()):
        points = sorted((c["bits_per_weight"], c[key]) for c in same)
        axes.plot(*zip(*points), marker=MARKERS[i % len(MARKERS)], color=f"C{i % 10}", label=_plain(name),
                  linewidth=1.2, linestyle="-" if i < 10 else ":")  # fmt: skip
    axes.set(xlabel="bits per weight of the linear layers, in memory", ylabel=label, yscale="log")
    if base is not None:
        axes.axhline(base, linestyle="--", color="#888", label="unquantized")
        axes.set_ylim(0.93 * base, WORST * base)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small", ncols=2)
    return figure


def _mixed(cell: Row) -> bool:
    """Whether the layers' widths differ."""
    return bool(np.ptp([layer["bits"] for layer in cell["layers"]] or [0]) > 0.05)


def _heatmap(cell: Row) -> Any:
    from matplotlib.figure import Figure

    kinds, grid = width_grid(cell["layers"])
    figure = Figure(figsize=(8.5, 0.9 + 0.28 * len(kinds)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(grid, aspect="auto", cmap="viridis", interpolation="nearest", vmin=2, vmax=8)
    axes.set_yticks(range(len(kinds)), kinds, fontsize="small")
    axes.set(xlabel="block", title=f"{_plain(label(cell))}, {width(cell)}")
    figure.colorbar(image, ax=axes, label="bits")
    return figure


def _plain(name: str) -> str:
    """A name that matplotlib takes as it is: no mathematics, no label that it hides."""
    return name.replace("$", r"\$").lstrip("_") or " "


def width_grid(layers: Sequence[Row]) -> tuple[list[str], np.ndarray]:
    """Kinds of layers, and their widths [kinds, blocks]; NaN where a block has no such layer.

    A layer's block is the first number in its name, its kind what follows it.
    """
    places = {}
    for layer in layers:
        found = re.search(r"(?:^|\.)(\d+)\.(.+)$", layer["name"])
        block, kind = (int(found[1]), found[2]) if found else (0, layer["name"])
        places[block, kind] = layer["bits"]
    kinds = list(dict.fromkeys(kind for _, kind in places))
    grid = np.full((len(kinds), 1 + max(block for block, _ in places)), np.nan)
    for (block, kind), bits in places.items():
        grid[kinds.index(kind), block] = bits
    return kinds, grid


def _timed(cell: Row) -> tuple[float, float, bool]:
    """Seconds of a cell's own and of shared statistics, and whether they are the processor's, not those on the wall."""
    known = cell.get("processor_seconds") is not None
    kind = "processor_" if known else ""
    shared = cell[f"shared_{kind}seconds"]
    return cell[f"{kind}seconds"] - shared, shared, known


def bars(cells: Sequence[Row]) -> Any:
    """A figure of seconds, the processor's where they are known, and of peak memory."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 1.2 + 0.24 * len(cells)), layout="constrained")
    time, memory = figure.subplots(1, 2, sharey=True)
    at = np.arange(len(cells))
    totals = [own + shared for own, shared, _ in map(_timed, cells)]
    reach = max([CUT * float(np.median(totals)), *(t for t, c in zip(totals, cells) if _timed(c)[2])])
    for y, (own, shared, known) in enumerate(_timed(cell) for cell in cells):
        style: Json = {} if known else {"hatch": "///", "edgecolor": "white", "linewidth": 0}
        time.barh(y, own, color="C0", **style)
        time.barh(y, shared, left=own, color="C0", alpha=0.4, **style)
        if own + shared > reach:
            time.text(
                0.97 * reach,
                y,
                f"{own + shared:.0f}",
                ha="right",
                va="center",
                fontsize="small",
                backgroundcolor="white",
            )
    memory.barh(at, [c["peak_memory_bytes"] / 1e6 for c in cells], color="C1")
    time.set_yticks(at, [f"{_plain(label(c))}, {width(c)}" for c in cells], fontsize="small")
    time.set_xlim(0, 1.03 * min(reach, max(totals)) or 1)
    time.set_ylim(len(cells) - 0.5, -0.5)
    time.set(xlabel="processor seconds" if any(_timed(c)[2] for c in cells) else "wall seconds")
    memory.set(xlabel="peak memory, MB")
    for axes in (time, memory):
        axes.grid(alpha=0.3, axis="x")
    return figure
