"""The tables of `anybit bench serve`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import typer

from anybit.cli.tables import print_table
from anybit.config import Json

if TYPE_CHECKING:
    from anybit.bench.serving_figures import Bounds


def print_bench_serve(f: Json, ratios: Sequence[Json], bounds: Bounds) -> None:
    """For each trace: what everybody had, what came of the load, what saturation was predicted to be."""
    rows = sorted(zip(f["cells"], ratios), key=lambda row: row[0]["trace"])
    for trace, group in groupby(rows, key=lambda row: row[0]["trace"]):
        _print_trace(trace, list(group), bounds)


def _print_trace(trace: str, rows: list[tuple[Json, Json]], bounds: Bounds) -> None:
    cells = [cell for cell, _ in rows]
    one = cells[0]
    typer.echo("")
    typer.echo(
        f"{trace}: {one['requests']} requests, {one['clipped']} shortened to {one['context']} tokens; "
        f"{one['key']['memory'] / 1e6:.0f} MB for weights, keys and values; "
        f"{one['load']['offered']} requests sent at {one['load']['tokens_per_second_offered']:.0f} tokens/s, prompts "
        f"included, of {one['load']['tokens_per_second_asked']:.0f} planned"
    )
    print_table(
        ("<", "weights MB", "KV MB", "KV bits", "KV tokens", "texts", "peak MB", "client", "server", "others"),
        [
            (
                cell["system"], f"{cell['weight_bytes'] / 1e6:.0f}", f"{cell['kv_bytes'] / 1e6:.0f}",
                str(cell["kv_bits"]), "unbound" if cell["engine"] == "mistral.rs" else str(cell["kv_tokens"]),
                str(cell["running"]), "" if cell["peak_bytes"] is None else f"{cell['peak_bytes'] / 1e6:.0f}",
                *(_number(cell["load"][who], "{:.2f}") for who in ("client", "server", "others")),
            )
            for cell in cells
        ],
    )  # fmt: skip
    typer.echo("")
    head = (
        "<",
        "offered",
        "done",
        "refused",
        "failed",
        "late",
        "req/s",
        "out tok/s",
        "tok/s",
        "TTFT p50 s",
        "p99",
    )
    print_table(
        (*head, "ITL p50 ms", "p99", "goodput", "streams", "preempted", "bits"),
        [(cell["system"], *_loaded(cell["load"])) for cell in cells],
    )
    typer.echo(
        f"goodput: requests/s with the first token within {bounds.first:g} s and "
        f"{1000 * bounds.per_prompt_token:g} ms per prompt token, then one within {1000 * bounds.gap:g} ms on average"
    )
    typer.echo("")
    print_table(
        ("<at saturation", "tok/s", "predicted", "times the reference", "predicted", "texts predicted"),
        [
            (
                cell["system"], f"{cell['saturation']['tokens_per_second']:.0f}",
                f"{cell['predicted']['tokens_per_second']:.0f}", _number(ratio["measured"], "{:.2f}"),
                _number(ratio["predicted"], "{:.2f}"), f"{cell['predicted']['together']:.1f}",
            )
            for cell, ratio in rows
        ],
    )  # fmt: skip
    for cell in cells:
        for error in cell["load"]["errors"] + cell["saturation"]["errors"]:
            typer.echo(f"{cell['system']}: {error}")
        if cell["engine"] == "mistral.rs":
            typer.echo(
                f"{cell['system']}: its package has no HTTP server; a small one in Python stands before it, and "
                "nothing bounds its cache"
            )


def _loaded(load: Json) -> list[str]:
    bits = load["bits"]
    return [
        *(str(load[name]) for name in ("offered", "completed", "refused", "failed", "unfinished")),
        f"{load['requests_per_second']:.2f}",
        f"{load['output_tokens_per_second']:.0f}",
        f"{load['tokens_per_second']:.0f}",
        _number(load["first_token_p50"], "{:.2f}"),
        _number(load["first_token_p99"], "{:.2f}"),
        *(_number(load[name] and 1000 * load[name], "{:.0f}") for name in ("gap_p50", "gap_p99")),
        f"{load['goodput']:.2f}",
        str(load["most_at_once"]),
        _number(load["preemptions"], "{:.0f}"),
        "" if bits is None else _widths(bits),
    ]


def _widths(bits: Json) -> str:
    if bits["min"] == bits["max"]:
        return f"{bits['mean']:.2f}"
    return f"{bits['mean']:.2f} ({bits['min']:.2f} to {bits['max']:.2f})"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
