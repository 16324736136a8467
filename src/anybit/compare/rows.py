"""What the rows of a report are: names, methods, options, where they were made, and the command that makes them."""

from __future__ import annotations

import html
import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence

from anybit.compare.cells import Settings, cell_of, default_name, entry_of, toml
from anybit.config import Json
from anybit.methods import METHODS, changed

Row = Json
TOLD = (  # whatever they are
    *("group_size", "outlier_channels", "exclusive_outliers", "sensitive_outliers", "magnitude_outliers"),
    *("channel_outliers", "error_outliers", "kept_channels"),
)
ELSEWHERE = ("method", "bits", "wide_rows", "wide_groups", "samples", "seq_len", "seed")
MARKS = "¹²³⁴⁵⁶⁷⁸⁹"


def label(cell: Row) -> str:
    """A cell's name, with its method where the name does not say it."""
    name, method = cell["name"], cell["method"]
    return name if method in name.lower() else f"{name} [{method}]"


def in_files(cell: Row) -> str:
    """Bits per weight that the files take; of a cell that was made before that was recorded a question mark."""
    found = cell.get("file_bits_per_weight")
    return "?" if found is None else f"{found:.3f}"


def by_entry(cells: Sequence[Row]) -> dict[str, list[Row]]:
    """Cells by label, in order."""
    found: dict[str, list[Row]] = {}
    for cell in cells:
        found.setdefault(label(cell), []).append(cell)
    return found


def section(results: Json, cells: Sequence[Row]) -> str:
    """HTML: every entry in a sentence, with its options, and the command that makes them all."""
    lines = []
    for name, (cell, *_) in by_entry(cells).items():
        options = ", ".join(
            f"{key}={'by width of the layer' if value is None else json.dumps(value)}"
            for key, value in resolved(cell).items()
        )
        said = f"{METHODS[cell['method']].summary}. " + (
            f"<code>{html.escape(options)}</code>" if options else ""
        )
        lines.append(f"<li><b>{html.escape(name)}</b>: {said}</li>")
    return f"""<h2>What the rows are</h2>
<ul>
{chr(10).join(lines)}
</ul>
<p class="note">Beside each: group size (-1: a whole row), outliers (a share of weights or channels kept at more bits,
or so many channels at 8), and options other than the method's own (see <code>anybit quantize --help</code>). This makes
them all:</p>
<pre>{html.escape(command(results, cells))}</pre>"""


def resolved(cell: Row) -> Json:
    """Group size and outliers of a cell's method, and its options that are not the method's own."""
    made = cell_of(cell, Settings()).options
    shown = {name: getattr(made, name) for name in TOLD if hasattr(made, name)} | changed(made)
    return {name: value for name, value in shown.items() if name not in ELSEWHERE}


def command(results: Json, cells: Sequence[Row]) -> str:
    """The command line that makes these cells; models and texts by their names."""
    s = results["settings"]
    words = ["anybit", "compare", results["model"], "-o", "OUT"]
    for same in by_entry(cells).values():
        entry = entry_of(same[0])
        bits = [int(b) if float(b).is_integer() else b for b in (cell["bits"] for cell in same)]
        named = {} if entry.name == default_name(entry.method, entry.options) else {"name": entry.name}
        words += ["-m", f"{entry.method}: {toml({**entry.options, **named, 'bits': bits})}"]
    options = {key: s[key] for key in ("calibration", "samples", "seq_len", "seed", "text", "max_tokens")}
    options |= {"tasks": ",".join(s["tasks"]) or None, "tasks_dir": s.get("tasks_dir"), "limit": s["limit"]}
    ((options["threads"], _),) = Counter(cell["machine"]["threads"] for cell in cells).most_common(1)
    for key, value in options.items():
        words += [] if value is None else [f"--{key.replace('_', '-')}", str(value)]
    return shlex.join(words)


def machine_marks(cells: Sequence[Row]) -> dict[str, str]:
    """Machines with their versions, those of most cells first, and the mark of the rows made there."""
    counted = Counter(_machine(cell["machine"]) for cell in cells)
    return dict(zip([name for name, _ in counted.most_common()], ["", *MARKS]))


def mark(cell: Row, marks: Mapping[str, str]) -> str:
    found = marks.get(_machine(cell["machine"]), "")
    return f" {found}" if found else ""


def made_on(cells: Sequence[Row], marks: Mapping[str, str]) -> str:
    """Where the cells were made, in a line; a second one where the code was not the same for all."""
    (most, _), *others = marks.items()
    text = f"Made on {most}" + "".join(f"; rows marked {sign} on {name}" for name, sign in others) + "."
    sources = Counter(cell.get("source", "unrecorded") for cell in cells)
    if len(sources) > 1:
        states = ", ".join(f"{name} ({count} rows)" for name, count in sources.most_common())
        text += f" The code was not the same for all: {states}."
    return text


def _machine(m: Row) -> str:
    return (
        f"{m['processor']}, {m['threads']} threads, anybit {m['anybit']}, torch {m['torch']}, transformers "
        f"{m['transformers']}"
    )
