"""What all tables of results share: reading bench/results, writing Markdown, saying whether a target was met."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
CLAIM = ["claim", "target", "measured", "target met?"]
WIDTH = 120


def load(path: str) -> Any:
    return json.loads((RESULTS / path).read_text(encoding="utf-8"))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|\n" for line in lines)


def verdict(found: Sequence[tuple[Any, bool]]) -> str:
    """ "met", "missed", or which were met and which were missed."""
    met, missed = ([str(name) for name, is_met in found if is_met is wanted] for wanted in (True, False))
    if not met or not missed:
        return "**missed**" if missed else "met"
    return f"met: {', '.join(met)}; **missed**: {', '.join(missed)}"


def typed(name: str) -> str:
    """A table of bench/results/typed with its command in front; digits stay as they are written there."""
    file, _, key = name.partition("/")
    text = (RESULTS / f"typed/{file}.json").read_text(encoding="utf-8")
    table = json.loads(text, parse_float=str, parse_int=str)["tables"][key]
    rows = markdown(table["columns"], table["rows"])
    if "command" not in table:
        return rows
    return how(table) + rows


def how(made: Any) -> str:
    """The line above a table that says by which command its figures were made, and where."""
    text = f"`{made['command']}`" + (f", machine {made['machine']}:" if "machine" in made else ":")
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False) + "\n\n"
