"""What the HTML reports share: one self-contained page, pictures inside it, tables."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1c1c1c }
table { border-collapse: collapse; width: 100% } td, th { padding: .4rem .8rem; text-align: right }
th { border-bottom: 2px solid #444; vertical-align: bottom } td { border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left }
blockquote { border-left: 4px solid #0a6; margin: .5rem 0 1.5rem; padding: .2rem 1rem; background: #f5f8f7 }
img { max-width: 100% } .note { color: #555; font-size: .9rem }
.wide { overflow-x: auto } .wide td { white-space: nowrap }
.wide td, .wide th { padding: .2rem .4rem; font-size: .8rem } .wide td:first-child { white-space: normal }
pre { white-space: pre-wrap; background: #f5f5f5; padding: .5rem .8rem; font-size: .85rem }
tr.best td { background: #eaf5ef } tr.first td { border-top: 2px solid #bbb }
"""


def write_page(path: Path, title: str, body: str) -> Path:
    """Write a page; `body` is HTML, `title` is not. Returns the path."""
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title><style>{STYLE}</style></head>
<body>
{body}
</body></html>
"""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def table_row(values: Sequence[str], kind: str = "") -> str:
    """A table row of texts, which are escaped; `kind`: its CSS class."""
    cells = "".join(f"<td>{html.escape(value)}</td>" for value in values)
    return f'<tr class="{kind}">{cells}</tr>' if kind else f"<tr>{cells}</tr>"


def picture(figure: Any, description: str) -> str:
    """A matplotlib figure as an image inside the page."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<p><img alt="{html.escape(description, quote=True)}" src="data:image/png;base64,{data}"></p>'
