"""The page that `anybit compare` writes: a table, curves over bits per weight, widths per layer, time and memory."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anybit.artifact.model_card import quantized_notice
from anybit.compare import rows
from anybit.compare.page import picture, table_row, write_page
from anybit.compare.rows import Row, by_entry, label
from anybit.evaluation.perplexity import paired_bootstrap

WORST = 10  # curves show perplexities up to this many times the unquantized model's
CUT = 5  # bars of wall seconds reach so many times the median
MARKERS = "osD^vP*Xph<>"


def write_report(out: Path, results: Mapping[str, Any]) -> Path:
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
    marks = rows.machine_marks(results["cells"])
    parts = [
        f"<h1>{html.escape(results['model'])}: {len(cells)} compressed models compared</h1>",
        _introduction(results, base),
        f"<p class='note'>{html.escape(rows.made_on(results['cells'], marks))}</p>",
        "<h2>All figures</h2>",
        _table(base, cells, marks),
        rows.section(results, cells) if cells else "",
        "<h2>Quality against size</h2>",
        *(picture(figure, f"{name} against bits per weight") for name, figure in curves.items()),
        "<p class='note'>Models worse than ten times the unquantized perplexity are outside the first picture. The "
        "grey line is the Pareto front: no other model here is both smaller and better than one on it.</p>",
        _heatmaps(cells),
        *_took(cells),
        _left_out(results["left_out"]),
    ]
    return write_page(out / "report.html", f"anybit compare: {results['model']}", "\n".join(parts))


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


def _introduction(results: Mapping[str, Any], base: Row) -> str:
    s = results["settings"]
    calibrated = f"{s['samples']} windows of {s['seq_len']} tokens of {s['calibration']} (seed {s['seed']})"
    asked = (
        f" {', '.join(s['tasks'])}: zero-shot, {s['limit'] or 'all'} questions each." if s["tasks"] else ""
    )
    before = results.get("quantized_before")
    caveat = f"\n<p><b>{html.escape(quantized_notice(before))}</b></p>" if before else ""
    return f"""<p>Every model was made from the same checkpoint by <code>anybit compare</code> and measured in the same
way. Methods that calibrate saw {html.escape(calibrated)}; perplexity and divergence are over {base["tokens"]} tokens of
{html.escape(s["text"])} in windows of {s["seq_len"]}. {html.escape(asked)}</p>{caveat}
<ul>
<li><b>bpw</b>: stored bits per weight of the linear layers, everything counted (codes, scales, zero points, tables,
indices, padding); of a nested artifact what is read at this width, while size is that of the file with all widths.
<b>width</b> is what the method was asked for: W4A8 has 4-bit weights and rounds the layers' inputs to 8 bits, KV4 has a
KV-cache of 4 bits. two-four-sixteen counts its scales and zero points in the width (eq. 10 of its paper), the others do
not.</li>
<li><b>perplexity</b>: lower is better; the unquantized model has {_short(base["perplexity"])}. <b>KLD</b>: how far the
next token's probabilities are from the unquantized model's, in nats; 0 is the same model. <b>top-1</b>: how often both
would pick the same token.</li>
<li>Shaded rows are on the Pareto front of perplexity: nothing else here is both smaller and better.</li>
</ul>"""


def _table(base: Row, cells: Sequence[Row], marks: Mapping[str, str]) -> str:
    tasks = list(base["tasks"])
    heads = ["method", "width", "bpw", "size, MB", "perplexity", "over the base, 95 %"]
    heads += ["KLD mean", "KLD p99", "top-1, %"]
    heads += [f"{task}, %" for task in tasks] + ["wall, s", "processor, s", "peak, MB"]
    front = pareto(cells, "perplexity")
    blank = [""]
    first = [
        base["name"] + rows.mark(base, marks),
        "W16A16",
        "16",
        "",
        _short(base["perplexity"]),
        *4 * blank,
    ]
    lines = [table_row([*first, *_scores(base, tasks), *3 * blank])]
    for i, cell in enumerate(cells):
        kinds = ["best"] * (i in front) + ["first"] * (i == 0 or label(cells[i - 1]) != label(cell))
        name = label(cell) + rows.mark(cell, marks)
        lines.append(table_row([name, *_line(cell, base, tasks)], " ".join(kinds)))
    head = "".join(f"<th>{html.escape(h)}</th>" for h in heads)
    stderr = (
        "Accuracies are normalised by length where the task has that, ± one standard error. " if tasks else ""
    )
    resumed = (
        " *: stopped and resumed; its seconds are those since then."
        if any(c["resumed"] for c in cells)
        else ""
    )
    unknown = " ?: not recorded then." if any(c.get("processor_seconds") is None for c in cells) else ""
    note = (
        f"<p class='note'>{stderr}Intervals: paired bootstrap over the windows of text. Wall and processor seconds and "
        f"peak memory: of quantizing, see below.{unknown}{resumed}</p>"
    )
    return f"<div class='wide'><table><tr>{head}</tr>\n" + "\n".join(lines) + f"\n</table></div>{note}"


def _line(cell: Row, base: Row, tasks: Sequence[str]) -> list[str]:
    top1 = cell.get("top1_agreement")
    processor = cell.get("processor_seconds")
    return [
        width(cell),
        f"{cell['bits_per_weight']:.3f}",
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
    axes.set(xlabel="stored bits per weight (linear layers)", ylabel=label, yscale="log")
    if base is not None:
        axes.axhline(base, linestyle="--", color="#888", label="unquantized")
        axes.set_ylim(0.93 * base, WORST * base)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small", ncols=2)
    return figure


def _heatmaps(cells: Sequence[Row]) -> str:
    """Average widths by block and kind of layer, of every model whose layers differ."""
    mixed = [cell for cell in cells if np.ptp([layer["bits"] for layer in cell["layers"]] or [0]) > 0.05]
    if not mixed:
        return ""
    pictures = [picture(_heatmap(cell), f"widths of {label(cell)}, {width(cell)}") for cell in mixed]
    note = "<p>Average code width of each layer, block by block; models whose layers are all alike are not shown.</p>"
    return "\n".join(["<h2>Where the bits are</h2>", note, *pictures])


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


def _took(cells: Sequence[Row]) -> list[str]:
    """Pictures of time and memory, and how to read them."""
    if not cells:
        return []
    timed = [_timed(cell) for cell in cells]
    wall = any(not known for *_, known in timed)
    hatched = (
        "Hatched: wall seconds, of models made before processor seconds were recorded; other work on the machine "
        f"makes them longer, and beyond {CUT} times the median they are cut. "
    )
    return [
        "<h2>What quantizing took</h2>",
        picture(bars(cells), "time and memory of quantizing"),
        f"""<p class='note'>Processor seconds: of all threads together, whatever else the machine did; wall seconds far
above these divided by the threads say that it was busy with other work. {hatched if wall else ""}Both include
statistics that several models share (light), as if each had gathered its own. A nested artifact is made once for all of
its widths. Memory is the peak of the process that quantizes, or of the one that gathered the statistics.</p>""",
    ]


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
        style: dict[str, Any] = {} if known else {"hatch": "///", "edgecolor": "white", "linewidth": 0}
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


def _left_out(left_out: Sequence[Row]) -> str:
    if not left_out:
        return ""
    lines = "".join(
        f"<li>{html.escape(r['name'])} at {r['bits']:g} bits: {html.escape(r['reason'])}</li>"
        for r in left_out
    )
    return f"<h2>Not there</h2><ul>{lines}</ul>"
