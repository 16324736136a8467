"""The demo's report: one self-contained HTML page."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import Any

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c1c1c }
table { border-collapse: collapse; width: 100% } td, th { padding: .4rem .8rem; text-align: right }
th { border-bottom: 2px solid #444 } td { border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left }
blockquote { border-left: 4px solid #0a6; margin: .5rem 0 1.5rem; padding: .2rem 1rem; background: #f5f8f7 }
img { max-width: 100% } .note { color: #555; font-size: .9rem }
"""


def write_report(path: Path, rows: list[dict[str, Any]], prompt: str) -> Path:
    """Write the page; rows as `demo` makes them, the first one the full-precision model.

    Returns:
        The path.
    """
    cells = "\n".join(_table_row(row) for row in rows)
    texts = "\n".join(
        f"<h3>{html.escape(row['name'])}</h3><blockquote><b>{html.escape(prompt)}</b>{html.escape(row['text'])}</blockquote>"
        for row in rows
    )
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>anybit: SmolLM2-135M, compressed</title><style>{STYLE}</style></head>
<body>
<h1>SmolLM2-135M-Instruct, compressed</h1>
<p>Perplexity (lower is better) over {rows[0]["tokens"]} tokens of the evaluation half of anybit's built-in text, in
windows of 1024; GPTQ was calibrated on its other half, RTN looks at no text.</p>
<table><tr><th>model</th><th>bits per weight</th><th>size</th><th>perplexity</th><th>time to quantize</th></tr>
{cells}
</table>
<p><img alt="Perplexity against bits per weight" src="data:image/png;base64,{_plot(rows)}"></p>
<p class="note">Bits per weight counts everything stored for the linear layers: codes, scales, zero points, padding.
The size includes the embedding, at 8 bits where the model is quantized. The base model comes from a GGUF file that was
quantized before (Q4_1, a grid of its own): errors at 4 bits and above are measured against that base.</p>
<h2>The same prompt, continued greedily by each</h2>
{texts}
</body></html>
"""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def _table_row(row: dict[str, Any]) -> str:
    width = "&ndash;" if row["bits_per_weight"] is None else f"{row['bits_per_weight']:.3f}"
    taken = "&ndash;" if row["seconds"] is None else f"{row['seconds']:.0f} s"
    values = [
        html.escape(row["name"]),
        width,
        f"{row['size_bytes'] / 1e6:.1f} MB",
        f"{row['perplexity']:.2f}",
        taken,
    ]
    return "<tr>" + "".join(f"<td>{value}</td>" for value in values) + "</tr>"


def _plot(rows: list[dict[str, Any]]) -> str:
    """Perplexity against bits per weight as a base64 PNG; the base model is the dashed line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.axhline(rows[0]["perplexity"], linestyle="--", color="#888", label=rows[0]["name"])
    for row in rows[1:]:
        axes.plot(row["bits_per_weight"], row["perplexity"], "o", markersize=9, label=row["name"])
    axes.set(xlabel="stored bits per weight (linear layers)", ylabel="perplexity (log scale)", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return base64.b64encode(buffer.getvalue()).decode()
