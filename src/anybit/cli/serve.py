"""`anybit serve`."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anybit.cli.options import Level, Model, grouped, reporting
from anybit.config import Json, check_kv_bits, parse_bytes
from anybit.engine.threads import check_threads
from anybit.errors import InputError, require_extra
from anybit.progress import Silent, no_other_bars
from anybit.serve.settings import Settings, is_key

if TYPE_CHECKING:
    from anybit.encoder import Encoder
    from anybit.serve.run.model import Model as ServedModel

NETWORK, LIMITS, COMPUTING = "Network", "Limits", "Computing"
KEYS_OF = "ANYBIT_API_KEY"  # the variable that may hold keys, with whitespace between them


@dataclass(frozen=True)
class Network:
    """Where it listens, and to whom."""

    host: Annotated[str, typer.Option(help="0.0.0.0: all addresses.", rich_help_panel=NETWORK)] = (
        Settings.host
    )
    port: Annotated[int, typer.Option(help="0: any that is free.", rich_help_panel=NETWORK)] = Settings.port
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Repeatable. Other users can read it in the process list; prefer ANYBIT_API_KEY.",
            envvar=KEYS_OF,
            show_envvar=False,
            rich_help_panel=NETWORK,
        ),
    ] = None
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Another host name that requests may use.", rich_help_panel=NETWORK),
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="A site whose scripts may ask, or *; repeatable.", rich_help_panel=NETWORK),
    ] = None


@dataclass(frozen=True)
class Shares:
    """What requests share."""

    kv_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of keys and values, e.g. 2GB. [default: a quarter of what is free]",
            rich_help_panel=LIMITS,
        ),
    ] = None
    context: Annotated[
        int | None,
        typer.Option(help="Most tokens of a text. [default: the model's]", min=1, rich_help_panel=LIMITS),
    ] = None
    max_running: Annotated[
        int, typer.Option(help="Texts that run together.", min=1, max=1024, rich_help_panel=LIMITS)
    ] = Settings.running
    max_waiting: Annotated[
        int,
        typer.Option(help="Texts that wait; more are told 429.", min=1, rich_help_panel=LIMITS),
    ] = Settings.waiting
    auto_bits: Annotated[
        float,
        typer.Option(
            help="The least width that load or a latency chooses.", min=1, max=8, rich_help_panel=LIMITS
        ),
    ] = Settings.auto_bits
    drain_seconds: Annotated[
        float,
        typer.Option(help="Seconds that texts may take after SIGTERM.", min=0, rich_help_panel=LIMITS),
    ] = Settings.patience


@dataclass(frozen=True)
class Computing:
    """How the model computes."""

    kv_bits: Annotated[
        int | None,
        typer.Option(help="KV-cache: 16, 8, 4, 3 or 2 bits.", rich_help_panel=COMPUTING),
    ] = None
    codebook_precision: Annotated[
        str, typer.Option(help="int8, or fp16: exact and slower.", rich_help_panel=COMPUTING)
    ] = "int8"
    threads: Annotated[
        int | None,
        typer.Option(help="CPU threads. [default: physical cores]", min=1, rich_help_panel=COMPUTING),
    ] = None
    pooling: Annotated[
        str | None,
        typer.Option(
            help="Of an encoder: mean or cls.",
            rich_help_panel=COMPUTING,
        ),
    ] = None


@grouped
def serve(
    model: Model,
    level: Level,
    network: Network,
    shares: Shares,
    computing: Computing,
    name: Annotated[
        str | None, typer.Option(help="As requests name the model. [default: the last part of MODEL]")
    ] = None,
) -> None:
    """Serve MODEL over HTTP as OpenAI's API has it: texts, each at a width of its own, or an encoder's embeddings.

    Example: `anybit serve out`, then open the page at http://127.0.0.1:8000
    """
    require_extra("serve", "anybit serve")
    budget = level.asked()
    keys = _keys(network.api_key)
    if not 0 <= network.port < 1 << 16:
        raise InputError(f"--port {network.port}: expected 0 to 65535")
    check_kv_bits(computing.kv_bits)
    kv_bytes = None if shares.kv_memory is None else parse_bytes(shares.kv_memory)
    check_threads(computing.threads)

    from anybit.serve.server import run

    def load() -> ServedModel | Encoder:
        with reporting() as report:
            return _load(model, budget, shares, computing, report)

    settings = Settings(
        name or Path(os.path.abspath(model)).name or model,
        network.host,
        network.port,
        keys,
        tuple(network.allow_host or ()),
        tuple(network.allow_origin or ()),
        kv_bytes,
        shares.max_running,
        shares.max_waiting,
        shares.auto_bits,
        patience=shares.drain_seconds,
    )
    loading = run(load, settings, lambda line: typer.echo(f"anybit: {line}", err=True))
    if loading:  # the interpreter's end would stop its thread within PyTorch, which aborts the process
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _keys(given: list[str] | None) -> tuple[str, ...]:
    """The keys of the command line, or those of the variable.

    Raises:
        InputError: one that no request could send; a variable that is set and holds none, which asks for a server that
            is open to all and was meant to be closed.
    """
    if not given and KEYS_OF in os.environ:
        raise InputError(f"{KEYS_OF} is set and holds no key: give it one, or unset it to serve without keys")
    for i, key in enumerate(given or ()):  # which are secrets, and not shown
        if not is_key(key):
            raise InputError(
                f"API key {i + 1} of {len(given or ())} is empty or has other characters than printable ASCII without "
                f"whitespace: give another by --api-key, or several with whitespace between them by {KEYS_OF}"
            )
    return tuple(given or ())


def _load(
    model: str, budget: Json, shares: Shares, computing: Computing, report: Silent
) -> ServedModel | Encoder:
    """The model, on the native engine where that runs it; an encoder, as what embeds texts."""
    from anybit.engine.description import Unsupported
    from anybit.engine.engine import Engine

    how: Json = {"kv_bits": computing.kv_bits, "threads": computing.threads, **budget}
    precision = computing.codebook_precision
    why = ""
    if computing.pooling is None:
        try:
            return Engine(model, codebook_precision=precision, context=shares.context, report=report, **how)
        except Unsupported as error:
            why = str(error)
    from anybit.checkpoint.architectures import is_encoder
    from anybit.loader import config_of

    if is_encoder(config_of(model)):
        return _encoder(model, budget, shares, computing, report)
    if computing.pooling is not None:
        raise InputError(f"{model} is no encoder, and has no embeddings to pool: leave --pooling out")
    report.say(f"runs inside Transformers, one text at a time: {why}")
    from anybit.in_transformers import InTransformers
    from anybit.serve.run.one_text import OneText

    with no_other_bars():
        inside = InTransformers(model, precision, report=report, **how)
    return OneText(inside, model, shares.context, precision)


def _encoder(model: str, budget: Json, shares: Shares, computing: Computing, report: Silent) -> Encoder:
    from anybit.encoder import Encoder

    for option, value in (("--kv-memory", shares.kv_memory), ("--kv-bits", computing.kv_bits)):
        if value is not None:
            raise InputError(f"{model} is an encoder, which has no KV-cache: leave {option} out")
    with no_other_bars():
        return Encoder(
            model,
            computing.codebook_precision,
            pooling=computing.pooling,
            context=shares.context,
            threads=computing.threads,
            report=report,
            **budget,
        )
