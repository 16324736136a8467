"""The README's picture, and one of files of equal bytes; needs matplotlib, reads bench/results, measures nothing.

python bench/picture.py    # docs/smollm2.png: perplexity against bits per weight, from 2 to 6 bits, of every method
                           # docs/llama-cpp.png: divergence against the bytes of files, on every text
"""

from __future__ import annotations

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
    every_method(ROOT / "docs/smollm2.png")
    equal_bytes(ROOT / "docs/llama-cpp.png")


def every_method(target: Path) -> None:
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


def equal_bytes(target: Path) -> None:
    cells = sorted(load("llama-cpp.json")["cells"], key=lambda cell: cell["bytes"])
    texts = list(cells[0]["texts"])
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, text in zip(figure.subplots(1, len(texts), sharey=True), texts):
        theirs = [(cell["bytes"] / 1e6, cell["texts"][text]["kld_mean"]) for cell in cells]
        ours = [(cell["size_bytes"] / 1e6, cell["anybit"][text]["kld_mean"]) for cell in cells]
        axes.plot(*zip(*theirs), "s", color="tab:orange", label="llama.cpp, importance matrix")
        axes.plot(*zip(*ours), "o-", color="black", label="anybit, one artifact")
        for cell, place in zip(cells, theirs):
            axes.annotate(cell["peer"], place, textcoords="offset points", xytext=(5, 4), fontsize=8)
        axes.set(title=text, yscale="log", xlabel="MB")
        axes.margins(x=0.35, y=0.1)
        axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    figure.axes[0].set_ylabel("mean KLD, SmolLM2-135M")
    figure.savefig(target, dpi=130)


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
