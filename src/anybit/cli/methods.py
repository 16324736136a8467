"""`anybit methods`: what there is to choose from, and all options of one method."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from anybit.config import Options, about, flag_of, flags_of
from anybit.methods import METHODS, Method, find


def methods(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A method, to see its options.")] = None,
) -> None:
    """List the methods, or all options of one.

    Example: `anybit methods gptq`
    """
    if name is None:
        _print_all()
    else:
        _print_one(find(name))


def _rows(options: type[Options]) -> Iterator[tuple[str, str, str, str]]:
    """Panel, flags, default and help of every option of a method."""
    usual = options()
    for item in fields(options):
        said = about(item)
        flags = "/".join(filter(None, flags_of(item))) if str(item.type) == "bool" else flag_of(item.name)
        decided = usual.defaults().get(item.name)
        default = (
            item.default if item.default not in (None, ()) else said.unset if decided is None else decided
        )
        if isinstance(item.default, bool):
            default = flags_of(item)[not item.default] if "/" in flags else "no"
        expected = f" ({said.expected})" if said.expected else ""
        yield said.panel or "Method", flags, "" if default is None else _worded(default), said.help + expected


def _worded(default: Any) -> str:
    if isinstance(default, float):
        return f"{default:g}"
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _print_all() -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("method", "bits", "what it does", "paper"):
        table.add_column(title, overflow="fold")
    for method in METHODS.values():
        table.add_row(method.name, str(method.options.widths_of), method.summary, method.paper)
    Console().print(table)


def _print_one(method: Method) -> None:
    console = Console(highlight=False)
    source = f" ({method.paper})" if method.paper else ""
    console.print(
        f"{method.name}: {method.title or method.summary}{source}; {method.options.widths_of} bits",
        markup=False,
    )
    rows = list(_rows(method.options))
    for panel in dict.fromkeys(row[0] for row in sorted(rows, key=lambda row: row[0] != "Method")):
        table = Table(title=panel, title_justify="left", box=None, pad_edge=False)
        for title in ("option", "default", ""):
            table.add_column(title, no_wrap=title == "option")
        for row in rows:
            if row[0] == panel:
                table.add_row(*row[1:])
        console.print(table)
