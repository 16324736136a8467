"""`anybit inspect`, `verify`, `convert` and `plan`: what there is, and what there would be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from anybit.cli import tables
from anybit.cli.options import (
    Artifact,
    JsonFile,
    Level,
    Model,
    check_json,
    check_writable,
    emit,
    grouped,
    reporting,
)
from anybit.config import GROUP_SIZE, Json, parse_bytes
from anybit.errors import InputError


@grouped
def inspect(out: Artifact, level: Level, json_file: JsonFile = None) -> None:
    """Show what the artifact OUT is made of, measured from its files.

    Example: `anybit inspect out --json figures.json`
    """
    check_json(json_file)
    from anybit.artifact.sizes import inspect as inspect_artifact

    figures = inspect_artifact(out, **level.asked())
    emit(figures, json_file, tables.print_inspection)


def verify(out: Artifact) -> None:
    """Check the artifact OUT byte by byte: hashes of weights, config and tokenizer; headers, shapes, indices, scales.

    Hashes are integrity, not authenticity: they find damage, and do not say who made the files.
    """
    from anybit.artifact.verify import verify as verify_artifact

    advance: Any = None
    with reporting() as report:

        def progress(done: int, total: int) -> None:
            nonlocal advance
            advance = advance or report.task("verifying", total)
            advance(1)

        found = verify_artifact(out, progress)
    hashes = "hashes match" if found["hashes_checked"] else "no hashes stored (save_pretrained drops them)"
    typer.echo(f"{out}: {found['files']} files with {found['layers']} layers are whole; {hashes}")


def convert(
    source: Artifact,
    out: Annotated[Path, typer.Option("-o", "--out", help="Directory to make.")],
    coded: Annotated[
        bool, typer.Option("--coded/--expand", help="Planes entropy-coded, or as they are in memory.")
    ] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an artifact there.")] = False,
) -> None:
    """Write the artifact OUT of the method anybit again: of the newest format, its planes coded or expanded.

    It runs as before, bit for bit. Coded planes take less room; expanded ones load without work.

    Example: `anybit convert out -o smaller`
    """
    from anybit.artifact.convert import convert as convert_artifact

    with reporting() as report:
        convert_artifact(source, out, coded=coded, overwrite=overwrite, report=report)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    typer.echo(f"{out}: {size / 1e6:.1f} MB with the tokenizer")


def plan(
    model: Model,
    memory: Annotated[str | None, typer.Option(help="What the weights may take, e.g. 6GB.")] = None,
    group_size: Annotated[int, typer.Option(help="Input channels that share a scale.")] = GROUP_SIZE,
    symmetric: Annotated[bool, typer.Option("--symmetric/--asymmetric")] = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Write the editable map that --spec reads.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Show how large MODEL becomes at each width, and which widths fit a memory budget.

    Of an artifact: its levels, with the size and the expected increase of the loss at each.

    Examples:

        anybit plan MODEL --memory 6GB -o map.json

        anybit plan out --memory 120MB
    """
    check_json(json_file)
    from anybit.artifact.files import is_artifact
    from anybit.prepare import open_streamed

    if is_artifact(Path(model)):
        if out is not None or group_size != GROUP_SIZE or symmetric:
            raise InputError(
                f"{model} is made: --out, --group-size and --symmetric are for a model that is not quantized yet"
            )
        _plan_artifact(Path(model), memory, json_file)
        return
    if out is not None and out.exists():
        raise InputError(f"{out} exists, perhaps with your edits: choose another -o, or remove it")
    check_writable(out)
    opened = open_streamed(model)
    best = _plan_model(opened, memory, group_size, symmetric, json_file)
    if out is not None:
        entry = {"bits": best["bits"], "group_size": group_size, "symmetric": symmetric}
        layers = {name: entry for name in opened.all_linears()}
        out.write_text(json.dumps({"layers": layers}, indent=2) + "\n", encoding="utf-8")
        made = f"anybit quantize {model} -o OUT --method gptq --spec {out} --embed-bits {best['embed_bits']}"
        typer.echo(f"wrote {out}: edit it, then `{made}`", err=True)


def _plan_artifact(path: Path, memory: str | None, json_file: Path | None) -> None:
    """The levels of an artifact, and the largest that fits."""
    from anybit.artifact.sizes import table_of_levels

    levels = table_of_levels(path)
    most = None if memory is None else parse_bytes(memory)
    fitting = [r for r in levels if r["present"] and (most is None or r["memory_bytes"] <= most)]
    if not fitting:
        raise InputError(
            f"nothing fits {memory}: the smallest level takes {levels[0]['memory_bytes'] / 1e6:.1f} MB of memory"
        )
    emit({"levels": levels, "best": fitting[-1]}, json_file, tables.print_levels)


def _plan_model(
    opened: Any, memory: str | None, group_size: int, symmetric: bool, json_file: Path | None
) -> Json:
    """The sizes of a model at each width, and the widest that fits."""
    from anybit.plan import widths_for_memory

    rows = widths_for_memory(opened, None if memory is None else parse_bytes(memory), group_size, symmetric)
    fitting = [row for row in rows if row["fits"]]
    if not fitting:
        least = min(row["size_bytes"] for row in rows)
        raise InputError(
            f"nothing fits {memory}: the smallest, 2 bits with a 4-bit embedding, takes {least / 1e6:.1f} MB"
        )
    best = max(fitting, key=lambda row: (row["bits"], row["embed_bits"]))
    emit({"widths": rows, "best": best}, json_file, tables.print_plan)
    return best
