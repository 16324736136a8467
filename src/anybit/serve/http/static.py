"""The web page: static files, which ask nobody but this server."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).with_name("page")
FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def routes() -> list[Route]:
    """An address for each file."""
    return [Route(path, partial(_file, name, kind), methods=["GET"]) for path, (name, kind) in FILES.items()]


async def _file(name: str, kind: str, request: Request) -> Response:
    return Response((FOLDER / name).read_bytes(), media_type=kind, headers=HEADERS)
