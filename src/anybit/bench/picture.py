"""Pictures of benchmarks: `anybit bench kernels --plot` and `anybit bench decode --plot`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from anybit.bench.variants import OWN
from anybit.config import Json

PICTURES = (".png", ".svg", ".pdf")
FAMILIES = {  # names that begin so: how they are drawn
    "ggml": ("s", "C3", "ggml"),
    "codebook": ("o", "C0", "codebooks by row"),
    "by channel": ("v", "C2", "codebooks by channel"),
    "nested": ("X", "C8", "nested"),
    "2/4/16": ("D", "C4", "2/4/16"),
    "MixLLM": ("*", "C5", "MixLLM"),
    "Atom": ("P", "C6", "Atom"),
    "W": ("^", "C1", "group int"),
}


def grid(items: Sequence[Any], across: int, draw: Callable[[Any, Any], None], **legend: Any) -> Any:
    """A figure with a panel for each item, `draw(axes, item)`, and one legend of all lines, if there are any."""
    from matplotlib.figure import Figure

    down = max(1, -(-len(items) // across))
    figure = Figure(figsize=(5.2 * max(2, across), 1 + 3.5 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for axes, item in zip(panels, items):
        draw(axes, item)
    for axes in panels[len(items) :]:
        axes.set_visible(False)
    entries = [zip(*reversed(axes.get_legend_handles_labels())) for axes in panels]
    shown = {label: line for panel in entries for label, line in panel}  # not every panel has all
    if shown:
        figure.legend(shown.values(), shown.keys(), fontsize="small", **legend)
    return figure


def plot(figures: Json, path: Path) -> None:
    """Time against stored bits per weight, a panel for each shape and number of tokens and threads."""
    rows = figures["rows"]
    across = min(3, math.isqrt(len(rows) - 1) + 1)
    grid(rows, across, _panel, loc="outside upper center", ncols=5).savefig(path, dpi=110)


def _panel(axes: Any, row: Json) -> None:
    weights = row["out"] * row["in"]
    shown: dict[str, list[tuple[float, float]]] = {}
    for name, figure in row["variants"].items():
        bits = 8 * figure["gb_per_s"] * figure["us"] * 1e3 / weights
        family = next((f for f in FAMILIES if name.startswith(f)), None)
        if family is not None:
            label = FAMILIES[family][2] + (", 8-bit inputs" if "A8" in name else "")
            shown.setdefault(label, []).append((bits, figure["us"]))
    for label, points in shown.items():
        marker, color, _ = next(v for v in FAMILIES.values() if label.startswith(v[2]))
        fill = "full" if label.endswith("inputs") else "none"
        axes.plot(*zip(*sorted(points)), marker, color=color, fillstyle=fill, label=label)
    most = max((bits for points in shown.values() for bits, _ in points), default=16) + 0.5
    limit = [weights / 8 * bits / row["read_gb_per_s"] / 1e3 for bits in (0, most)]
    axes.plot((0, most), limit, color="#888", label="the memory's bandwidth")
    for name, style in (("torch bfloat16", "--"), (OWN, ":")):
        if name in row["variants"]:
            axes.axhline(row["variants"][name]["us"], linestyle=style, color="#555", label=name)
    many = f"{row['tokens']} token(s), {row['threads']} thread(s), {row['read_gb_per_s']:.0f} GB/s"
    axes.set(
        xlabel="stored bits per weight", ylabel="microseconds", title=f"{row['out']} x {row['in']}, {many}"
    )
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


ENGINES = {
    "anybit": ("o", "C0"),
    "Transformers": ("^", "C1"),
    "llama.cpp": ("s", "C3"),
    "mistral.rs": ("D", "C4"),
}


def plot_decode(figures: Json, path: Path) -> None:
    """Tokens per second against what a token reads, a panel for each model and depth, with the memory's rate."""
    cells = [cell for cell in figures["cells"] if cell["test"] == "decode"]
    across = min(3, max(1, len(cells)))
    grid(cells, across, _decode_panel, loc="outside upper center", ncols=4).savefig(path, dpi=110)


def _decode_panel(axes: Any, cell: Json) -> None:
    series: dict[tuple[str, str], list[Json]] = {}
    for contender in cell["contenders"].values():
        how = contender.get("precision") or contender.get("dtype") or ""
        how += "" if contender["kv_bits"] == 16 else f" KV {contender['kv_bits']}"
        series.setdefault((contender["engine"], how), []).append(contender)
    for (engine, how), found in series.items():
        marker, color = ENGINES[engine]
        points = sorted((c["bytes_per_token"] / 1e6, c["tokens_per_second"]) for c in found)
        fill = "none" if how.startswith(("fp16", "float32")) else "full"
        line = "" if "file" in found[0] else "-"
        axes.plot(*zip(*points), marker + line, color=color, fillstyle=fill, label=f"{engine} {how}".strip())
    every = sorted(
        (c["bytes_per_token"] / 1e6, c["read_gb_per_s"] * 1e9 / c["bytes_per_token"])
        for c in cell["contenders"].values()
    )
    axes.plot(*zip(*every), ":", color="#888", label="the memory's rate")
    name = cell["shape"] or Path(cell["model"]).name
    axes.set(xlabel="MB that a token reads", ylabel="tokens per second")
    axes.set_title(f"{name}{', random' if cell['random'] else ''}, {cell['tokens']} tokens before")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
