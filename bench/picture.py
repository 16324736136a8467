"""The README's picture: perplexity against stored bits per weight, from 2 to 6 bits, of every method.

python bench/picture.py [docs/smollm2.png]    # needs matplotlib; reads bench/results, measures nothing
"""

from __future__ import annotations

import sys
from pathlib import Path

from figures import load
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tables_quality import WIKITEXT, cells

ROOT = Path(__file__).resolve().parent.parent
SHOWN = {  # cells' name: label, color, marker
    "anybit": ("anybit, one artifact", "black", "o"),
    "cmpq": ("CMPQ", "tab:orange", "s"),
    "gptq": ("GPTQ", "tab:green", "D"),
    "squeezellm": ("SqueezeLLM", "tab:purple", "v"),
    "any-precision": ("Any-Precision", "tab:brown", "P"),
    "two-four-sixteen": ("2/4/16", "tab:blue", "<"),
    "llm-mq": ("LLM-MQ", "tab:cyan", "h"),
    "awq": ("AWQ", "royalblue", "^"),
    "mixllm": ("MixLLM, 8-bit inputs", "dimgray", "X"),
    "atom": ("Atom, inputs as wide", "tab:pink", "*"),
    "smoothquant": ("SmoothQuant, 8-bit inputs", "tab:olive", "p"),
    "rtn": ("RTN", "tab:red", ">"),
}
REACH = 7  # bits per weight: no line goes to a point far outside the frame
TICKS = [23, 25, 30, 40, 50, 60, 80]


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/smollm2.png"
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    base = load("smollm2-135m/results.json")["cells"][0]["perplexity"]
    axes.axhline(base, color="gray", linestyle="--", linewidth=1, label=f"unquantized, {base:.2f}")
    for name, look in reversed(SHOWN.items()):
        curve(axes, name, *look)
    axes.set(xlim=(2, 6.1), ylim=(22.2, 90), yscale="log")
    axes.set_xlabel("stored bits per weight of the linear layers, everything counted", fontsize=12)
    axes.set_ylabel("perplexity, WikiText-2 test", fontsize=12)
    axes.set_yticks(TICKS, list(map(str, TICKS)))
    axes.minorticks_off()
    axes.tick_params(labelsize=11)
    axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], fontsize=11, loc="upper right", framealpha=1)
    figure.savefig(target, dpi=150)


def curve(axes: Axes, name: str, label: str, color: str, marker: str) -> None:
    """A method's widths as a line; those that are worse than the frame shows leave it at the top."""
    found = [cell for path in WIKITEXT for cell in cells(path) if cell["name"] == name]
    points = sorted((c["bits_per_weight"], c["perplexity"]) for c in found if c["bits_per_weight"] < REACH)
    strong = name == "anybit"
    axes.plot(
        *zip(*points),
        marker=marker,
        color=color,
        label=label,
        linewidth=3 if strong else 1.2,
        markersize=7 if strong else 5,
        zorder=3 if strong else 2,
    )


if __name__ == "__main__":
    main()
