"""What the HTML reports share: templates that escape what they are given, and pictures inside the page."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def write_page(path: Path, template: str, **values: Any) -> Path:
    """Write the page of a file in `templates`. Returns the path."""
    pages = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(pages.get_template(template).render(values), encoding="utf-8")
    return path


def png(figure: Any) -> str:
    """A matplotlib figure as a picture that a page can hold: PNG in base64."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return base64.b64encode(buffer.getvalue()).decode()
