"""Perplexity of methods x widths on one model and text, with stored bits per weight; with --kld also divergence.

Writes a Markdown table and, with --plot, the README's picture. The last line is one JSON object.

    python bench/quality.py MODEL --calibration calib.txt --text test.txt --bits 4 3 2 [--plot docs/smollm2.png]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import anybit
from anybit.progress import Terminal

METHODS: dict[str, dict[str, Any]] = {
    "RTN": {"method": "rtn"},
    "GPTQ, textbook": {"method": "gptq", "clip": False, "attention_weights": False},
    "GPTQ": {"method": "gptq"},
}


def measure(args: argparse.Namespace, options: dict[str, Any], bits: int, out: Path) -> dict[str, Any]:
    """Quantize and evaluate one cell."""
    config = anybit.QuantizeConfig(
        **options, bits=bits, group_size=args.group_size, samples=args.samples, seq_len=args.seq_len
    )
    made = anybit.quantize(args.model, out, config, calibration=args.calibration)
    base = args.model if args.kld else None
    figures = anybit.evaluate(
        out, text=args.text, seq_len=args.seq_len, max_tokens=args.max_tokens, base=base
    )
    keys = ("perplexity", "kld_mean", "kld_p99", "top1_agreement", "tokens", "window_nll")
    cell = {key: figures.get(key) for key in keys}
    return cell | {"bits": bits, "bits_per_weight": made.bits_per_weight, "seconds": made.seconds}


def show(rows: list[dict[str, Any]], kld: bool) -> None:
    """The rows as a Markdown table."""
    columns = [
        "method",
        "bits",
        "bpw",
        "perplexity",
        *(["KLD mean", "KLD p99", "top-1"] if kld else []),
        "seconds",
    ]
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for r in rows:
        cells = [r["method"], str(r["bits"]), f"{r['bits_per_weight']:.3f}", f"{r['perplexity']:.2f}"]
        if kld:
            cells += [f"{r['kld_mean']:.4f}", f"{r['kld_p99']:.3f}", f"{100 * r['top1_agreement']:.1f} %"]
        print("| " + " | ".join([*cells, f"{r['seconds']:.0f}"]) + " |", flush=True)


def plot(rows: list[dict[str, Any]], base: float, path: Path, title: str) -> None:
    """Perplexity against stored bits per weight, a line per method, the base model dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for method in dict.fromkeys(row["method"] for row in rows):
        points = [row for row in rows if row["method"] == method]
        x = [row["bits_per_weight"] for row in points]
        axes.plot(x, [row["perplexity"] for row in points], "o-", label=method)
    axes.axhline(base, linestyle="--", color="#888", label="unquantized")
    axes.set(xlabel="stored bits per weight (linear layers)", ylabel="perplexity", yscale="log", title=title)
    axes.set_ylim(0.9 * base, 10 * base)  # a model ten times worse than its base is no model
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--calibration", default="builtin")
    parser.add_argument("--text", default="builtin-eval")
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3, 2])
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=16384)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument(
        "--kld", action="store_true", help="divergence from the unquantized model (twice the time)"
    )
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--title", default="")
    args = parser.parse_args()
    report, rows = Terminal(), []
    with tempfile.TemporaryDirectory() as folder:
        for method in args.methods:
            for bits in args.bits:
                report.say(f"{method}, {bits} bits")
                cell = measure(args, METHODS[method], bits, Path(folder) / f"{len(rows)}")
                rows.append({"method": method, **cell})
    base = anybit.evaluate(args.model, text=args.text, seq_len=args.seq_len, max_tokens=args.max_tokens)
    show(rows, args.kld)
    print(f"unquantized: {base['perplexity']:.2f} over {base['tokens']} tokens")
    if args.plot:
        plot(rows, base["perplexity"], args.plot, args.title)
    print(
        json.dumps(
            {"bench": "quality", "group_size": args.group_size, "base": base["perplexity"], "rows": rows}
        )
    )


if __name__ == "__main__":
    main()
