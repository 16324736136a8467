"""`anybit bench serve`."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from anybit.cli import tables_serve
from anybit.cli.bench import FILES_PANEL, check_plot
from anybit.cli.options import check_writable, grouped, reporting
from anybit.config import Json, parse_bytes
from anybit.engine.threads import check_threads
from anybit.errors import InputError, require_extra

if TYPE_CHECKING:
    from anybit.bench.serving import Plan

LOAD, GOOD = "Load", "Goodput"


@dataclass(frozen=True)
class Loaded:
    """How much is asked for, and for how long."""

    memory: Annotated[str, typer.Option(help="Of each server's weights, keys and values, e.g. 400MB.")]
    trace: Annotated[
        list[Path],
        typer.Option(
            help="CSV with TIMESTAMP, ContextTokens, GeneratedTokens, such as Azure's; repeatable.",
            rich_help_panel=LOAD,
        ),
    ]
    requests: Annotated[
        int, typer.Option(help="Of each trace the first so many, at most.", min=2, rich_help_panel=LOAD)
    ] = 200
    load: Annotated[
        float, typer.Option(help="Share of the first system's rate at saturation.", rich_help_panel=LOAD)
    ] = 0.8
    seconds: Annotated[
        float,
        typer.Option(help="Of a cell: as many requests are sent as fit in.", min=1, rich_help_panel=LOAD),
    ] = 300
    saturation: Annotated[
        float, typer.Option(help="Seconds that measure saturation.", min=1, rich_help_panel=LOAD)
    ] = 60
    drain: Annotated[
        float, typer.Option(help="Seconds that requests have at the end.", min=0, rich_help_panel=LOAD)
    ] = 30
    running: Annotated[
        int, typer.Option(help="Texts together, at most.", min=1, max=1024, rich_help_panel=LOAD)
    ] = 32
    threads: Annotated[
        int | None, typer.Option(help="Of every server. [default: the engine's, physical cores]", min=1)
    ] = None


@dataclass(frozen=True)
class Good:
    """What a request must keep."""

    ttft: Annotated[float, typer.Option(help="Seconds to the first token.", min=0, rich_help_panel=GOOD)] = (
        2.0
    )
    ttft_per_token: Annotated[
        float,
        typer.Option(help="Milliseconds more for each token of the prompt.", min=0, rich_help_panel=GOOD),
    ] = 2.0
    itl: Annotated[
        float, typer.Option(help="Mean milliseconds from token to token.", min=0, rich_help_panel=GOOD)
    ] = 100.0


@dataclass(frozen=True)
class Peers:
    """llama.cpp and mistral.rs."""

    llama_server: Annotated[
        Path | None,
        typer.Option(
            help="llama.cpp's program of this name, or a Python interpreter that has xllamacpp.",
            rich_help_panel=FILES_PANEL,
        ),
    ] = None
    slots: Annotated[
        int | None,
        typer.Option(
            help="Of llama.cpp. [default: as many of the longest requests as its cache holds]",
            min=1,
            rich_help_panel=FILES_PANEL,
        ),
    ] = None
    mistralrs: Annotated[
        Path | None,
        typer.Option(
            help="A Python interpreter that has mistralrs; it has no server of its own, and no bound for its cache.",
            rich_help_panel=FILES_PANEL,
        ),
    ] = None
    gguf: Annotated[
        list[Path] | None,
        typer.Option(help="A file of the same model for them; repeatable.", rich_help_panel=FILES_PANEL),
    ] = None


@grouped
def bench_serve(
    systems: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=MODEL[@BITS]...",
            help="What anybit serves: @3.3 or @auto or @3-4.5, and +kv8 or +kv4. The first is the reference.",
        ),
    ],
    loaded: Loaded,
    good: Good,
    peers: Peers,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            help="JSON, written after every cell; what it has of the same plan is not measured again.",
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw it: a .png, .svg or .pdf.")] = None,
) -> None:
    """Servers under a trace's load, over HTTP and with equal memory: throughput, latencies, goodput, beside what
    computing, bytes and pages predict.

    Example: anybit bench serve bf16=model anybit-4=out@4 --trace conv.csv --memory 400MB -o serve.json

    A cell takes up to --saturation + --seconds + --drain. Nobody else should run."""
    require_extra("serve", "anybit bench serve")
    check_writable(out)
    check_plot(plot)
    check_threads(loaded.threads)
    plan = _plan(systems, loaded, good, peers)
    from anybit.bench import serving

    with reporting() as report, _ends_servers():
        figures = serving.serve(plan, out, report)
    ratios = serving.ratios(figures["cells"])
    tables_serve.print_bench_serve(figures, ratios, plan.bounds)
    if plot is not None:
        from anybit.bench import picture_serve

        picture_serve.plot_serve(figures, ratios, plot)
    if out is None:
        typer.echo(json.dumps(figures))


def _plan(names: list[str], loaded: Loaded, good: Good, peers: Peers) -> Plan:
    from anybit.bench.servers import Programs
    from anybit.bench.serving import Plan
    from anybit.bench.serving_figures import Bounds
    from anybit.bench.systems import Peer, parsed
    from anybit.bench.traces import read_trace

    systems = [parsed(name) for name in names]
    programs = Programs(peers.llama_server, peers.mistralrs)
    if bool(peers.gguf) != bool(programs.given):
        raise InputError("--gguf belongs with --llama-server or --mistralrs: give a file and who serves it")
    for engine in programs.given:
        for file in peers.gguf or ():
            name = f"{engine} {file.stem}"
            systems.append(Peer(name, str(file), engine=engine, asked_kv=16, like=systems[0]))
    how: Json = {
        name: getattr(loaded, name) for name in ("load", "seconds", "saturation", "drain", "running")
    }
    return Plan(
        systems=systems,
        traces=[read_trace(path, loaded.requests) for path in loaded.trace],
        memory=parse_bytes(loaded.memory),
        threads=loaded.threads or 0,
        slots=peers.slots,
        bounds=Bounds(good.ttft, good.ttft_per_token / 1000, good.itl / 1000),
        programs=programs,
        **how,
    )


@contextmanager
def _ends_servers() -> Iterator[None]:
    """Let SIGTERM end what was started, as Ctrl-C does."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
