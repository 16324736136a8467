"""The picture of `anybit bench kernels --plot`: time against stored bits per weight."""

from __future__ import annotations

import math
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


def plot(figures: Json, path: Path) -> None:
    """Time against stored bits per weight, a panel for each shape and number of tokens and threads."""
    from matplotlib.figure import Figure

    rows = figures["rows"]
    across = min(3, math.isqrt(len(rows) - 1) + 1)
    down = -(-len(rows) // across)
    figure = Figure(figsize=(5.2 * max(2, across), 1 + 3.5 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for axes, row in zip(panels, rows):
        _panel(axes, row)
    for axes in panels[len(rows) :]:
        axes.set_visible(False)
    entries = [zip(*reversed(axes.get_legend_handles_labels())) for axes in panels]
    shown = {label: line for panel in entries for label, line in panel}  # not every panel has all
    figure.legend(shown.values(), shown.keys(), loc="outside upper center", ncols=5, fontsize="small")
    figure.savefig(path, dpi=110)


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
