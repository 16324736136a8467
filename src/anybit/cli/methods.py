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

LONGEST = 24  # columns of a flag in a line


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
    """Panel, flag, default and help of every option of a method."""
    usual = options()
    for item in fields(options):
        said = about(item)
        decided = usual.defaults().get(item.name)
        default = (
            item.default if item.default not in (None, ()) else said.unset if decided is None else decided
        )
        flag = flag_of(item.name)
        if isinstance(item.default, bool):
            flag = "/".join(filter(None, flags_of(item)))
            flag = flag if len(flag) <= LONGEST else flag.replace("/", "/\n")
            default = "on" if item.default else "off"
        expected = f". Takes {said.expected}" if said.expected else ""
        help_ = f"{said.help.removesuffix('.')}{expected}".replace("`", "")
        yield said.panel or "Method", flag, "" if default is None else _worded(default), help_


def _worded(default: Any) -> str:
    if isinstance(default, float):
        return f"{default:g}"
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _print_all() -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("method", no_wrap=True)
    table.add_column("bits", no_wrap=True)
    table.add_column("what it does")
    for method in METHODS.values():
        widths = method.options.widths_of
        table.add_row(
            method.name, f"{widths.least:g}-{widths.high:g}{'*' * widths.fractional}", method.summary
        )
    Console(highlight=False).print(table, "* any average between them", sep="\n")


def _print_one(method: Method) -> None:
    console = Console(highlight=False)
    source = f" ({method.paper})" if method.paper else ""
    console.print(
        f"{method.name}: {method.title or method.summary}{source}; {method.options.widths_of} bits",
        markup=False,
    )
    rows = list(_rows(method.options))
    flags = max(len(line) for row in rows for line in row[1].splitlines())
    for panel in dict.fromkeys(row[0] for row in sorted(rows, key=lambda row: row[0] != "Method")):
        table = Table(box=None, pad_edge=False)
        table.add_column(panel, no_wrap=True, min_width=flags)
        table.add_column("default", min_width=len("default"), max_width=16, overflow="fold")
        table.add_column("")
        for row in rows:
            if row[0] == panel:
                table.add_row(*row[1:])
        console.print("", table, sep="\n")
