"""The picture of `anybit bench serve --plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anybit.bench.picture import grid
from anybit.config import Json


def plot_serve(figures: Json, ratios: Sequence[Json], path: Path) -> None:
    """For each trace the rates at saturation over the reference's beside the predicted, goodput, and latencies."""
    traces = list(dict.fromkeys(cell["trace"] for cell in figures["cells"]))
    panels = [
        (draw, trace, [(c, r) for c, r in zip(figures["cells"], ratios) if c["trace"] == trace])
        for trace in traces
        for draw in (_ratio_panel, _goodput_panel, _latency_panel)
    ]
    made = grid(
        panels, 3, lambda axes, panel: panel[0](axes, *panel[1:]), loc="outside upper center", ncols=5
    )
    made.savefig(path, dpi=110)


def _bars(axes: Any, rows: list[tuple[Json, Json]], series: dict[str, tuple[str, list[float]]]) -> None:
    height = 0.8 / len(series)
    for i, (label, (color, values)) in enumerate(series.items()):
        axes.barh([y + i * height for y in range(len(rows))], values, height, color=color, label=label)
    middle = height * (len(series) - 1) / 2
    axes.set_yticks(
        [y + middle for y in range(len(rows))], [cell["system"] for cell, _ in rows], fontsize="small"
    )
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x")


def _ratio_panel(axes: Any, trace: str, rows: list[tuple[Json, Json]]) -> None:
    series = {
        "measured": ("C0", [ratio["measured"] or 0.0 for _, ratio in rows]),
        "predicted": ("#bbb", [ratio["predicted"] or 0.0 for _, ratio in rows]),
    }
    _bars(axes, rows, series)
    axes.set(title=trace, xlabel="tokens/s at saturation over the reference's")


def _goodput_panel(axes: Any, trace: str, rows: list[tuple[Json, Json]]) -> None:
    series = {
        "completed": ("C2", [cell["load"]["requests_per_second"] for cell, _ in rows]),
        "good": ("C1", [cell["load"]["goodput"] for cell, _ in rows]),
    }
    _bars(axes, rows, series)
    axes.set(title=trace, xlabel="requests/s at the trace's times")


def _latency_panel(axes: Any, trace: str, rows: list[tuple[Json, Json]]) -> None:
    series = {
        f"{what} {part}": (color, [(cell["load"][f"{name}_{part}"] or 0.0) for cell, _ in rows])
        for what, name, colors in (
            ("first token", "first_token", ("C4", "C3")),
            ("token to token", "gap", ("C9", "C5")),
        )
        for part, color in zip(("p50", "p99"), colors)
    }
    _bars(axes, rows, series)
    axes.set(title=trace, xlabel="seconds at the trace's times")
    axes.set_xscale("log")
