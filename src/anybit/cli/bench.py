"""`anybit bench`: speed on this machine, beside a peer or a limit, in one run."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from anybit.cli import tables
from anybit.cli.options import (
    STDOUT,
    Device,
    JsonFile,
    check_json,
    check_writable,
    emit,
    given,
    grouped,
    named,
    numbers,
    refuse_ignored,
    reporting,
    set_threads,
    whole_numbers,
)
from anybit.config import Json
from anybit.errors import InputError, require_extra


def bench_quantize(
    rounds: Annotated[int, typer.Option(help="Rounds whose median counts.", min=1)] = 3,
    json_file: JsonFile = None,
) -> None:
    """Clustering weights, beside flash1dkmeans where that is installed, and nested codes: weights per second of one
    core. Then attention of many tokens, beside PyTorch's."""
    from anybit.bench import clustering

    check_json(json_file)
    emit(clustering.quantize(rounds), json_file, tables.print_bench_quantize)


@dataclass(frozen=True)
class Timed:
    """What is timed."""

    shapes: Annotated[
        str | None,
        typer.Option(help="OUTxIN, comma-separated. [default: LLM shapes, SmolLM2-135M's, Gemma 3 270M's]"),
    ] = None
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Numbers of tokens multiplied at once, comma-separated. [default: 1; with cuda the part's]"
        ),
    ] = None
    rounds: Annotated[
        int | None,
        typer.Option(help="Rounds whose median counts. [default: 20; with cuda the part's]", min=1),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            help="What the model computes in: bfloat16 or float32; with cuda float16 or bfloat16. [default: the first]"
        ),
    ] = None
    only: Annotated[
        str | None,
        typer.Option(help="Variants, or how their names begin, comma-separated, e.g. W4A8,codebook."),
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Also draw time against bits, with the memory's limit, or a part: a .png, .svg or .pdf."
        ),
    ] = None

    def common(self) -> Json:
        """As the benchmarks of both devices take it."""
        return {"shapes": named("shapes", self.shapes), "only": named("only", self.only)}


@dataclass(frozen=True)
class OnCpu:
    """What only the CPU's benchmark has a use for."""

    threads: Annotated[
        str | None, typer.Option(help="Numbers of threads, comma-separated. [default: 1 and all]")
    ] = None
    isa: Annotated[
        str | None, typer.Option(help="Instruction sets to compare, comma-separated. [default: the best]")
    ] = None
    cached: Annotated[
        bool,
        typer.Option(
            "--cached", help="Rates of parts of the matrices that stay in the cache: what bounds a kernel."
        ),
    ] = False

    def given(self) -> Json:
        return given(threads=self.threads, isa=self.isa, cached=self.cached or None)


@dataclass(frozen=True)
class OnGpu:
    """What only the GPU's benchmark has a use for."""

    part: Annotated[
        str | None,
        typer.Option(
            help="With cuda: gemv, gemm, decode, attention, activations or quantize. [default: gemv]"
        ),
    ] = None
    small: Annotated[
        bool,
        typer.Option(
            "--small",
            help="With cuda: compare kernels with the reference, time nothing; TRITON_INTERPRET=1: without a GPU.",
        ),
    ] = False

    def given(self) -> Json:
        return given(part=self.part, small=self.small or None)


@grouped
def bench_kernels(
    timed: Timed, cpu: OnCpu, gpu: OnGpu, device: Device = "cpu", json_file: JsonFile = None
) -> None:
    """Matrix products of every stored format, beside PyTorch, ggml (where llama-cpp-python is installed), a product
    that only reads bfloat16, and the memory's bandwidth. With --device cuda the GPU, beside cuBLAS and a copy.

    The default shapes take some 8 GB of memory and 10 minutes."""
    check_json(json_file)
    check_plot(timed.plot)
    if device == "cuda":
        refuse_ignored(cpu.given(), "it is for --device cpu")
        _on_gpu(timed, gpu, json_file)
    elif device == "cpu":
        refuse_ignored(gpu.given(), "it is for --device cuda")
        _on_cpu(timed, cpu, json_file)
    else:
        raise InputError(f"--device {device}: expected cpu or cuda")


def check_plot(plot: Path | None) -> None:
    """Refuse a picture that could not be drawn when the work is done."""
    from anybit.bench.picture import PICTURES

    check_writable(plot)
    if plot is not None and plot.suffix not in PICTURES:
        raise InputError(f"--plot {plot}: expected a name that ends in {' or '.join(PICTURES)}")
    if plot is not None:
        require_extra("plots", "--plot")


def _on_gpu(timed: Timed, asked: OnGpu, json_file: Path | None) -> None:
    from anybit.bench import gpu

    gpu.check_plot(timed.plot, asked.small)
    tokens = timed.tokens and whole_numbers("tokens", timed.tokens)
    figures = gpu.run(
        asked.part or "gemv", timed.rounds, asked.small, None if json_file == STDOUT else json_file,
        tokens=tokens, dtype=timed.dtype, **timed.common(),
    )  # fmt: skip
    emit(figures, json_file, lambda f: typer.echo("\n".join(gpu.lines(f))))
    if timed.plot is not None:
        gpu.plot(figures, timed.plot)


def _on_cpu(timed: Timed, asked: OnCpu, json_file: Path | None) -> None:
    from anybit.bench import kernels

    if asked.cached:
        refuse_ignored(given(plot=timed.plot), "with --cached there are rates, not times of whole matrices")
    counts = (
        whole_numbers("threads", asked.threads) if asked.threads else tuple(sorted({1, os.cpu_count() or 1}))
    )
    for count in counts:
        set_threads(count)
    common = timed.common()
    with reporting() as report:
        sweep = kernels.Sweep(
            shapes=common["shapes"] or kernels.SHAPES,
            tokens=whole_numbers("tokens", timed.tokens or "1"),
            threads=counts,
            rounds=timed.rounds or 20,
            dtype=timed.dtype or "bfloat16",
            isas=named("isa", asked.isa),
            only=common["only"],
            cached=asked.cached,
        )
        figures = kernels.kernels(sweep, report)
    emit(figures, json_file, tables.print_bench_kernels)
    if timed.plot is not None:
        from anybit.bench import picture

        picture.plot(figures, timed.plot)


@dataclass(frozen=True)
class Decoded:
    """What decodes, and behind how many tokens."""

    bits: Annotated[str, typer.Option(help="Average widths, comma-separated.")] = "2.5,3,4,8"
    depths: Annotated[str, typer.Option(help="Tokens before those that are decoded, comma-separated.")] = (
        "128"
    )
    prompts: Annotated[str, typer.Option(help="Tokens of prompts, comma-separated; 0: none.")] = "512"
    kv_bits: Annotated[
        str, typer.Option(help="Keys and values: 16, 8 and 4 bits, comma-separated, in llama.cpp alike.")
    ] = "16"
    tokens: Annotated[int, typer.Option(help="Tokens decoded in a round.", min=1)] = 32
    rounds: Annotated[int, typer.Option(help="Rounds whose median counts.", min=1)] = 5
    threads: Annotated[
        int | None, typer.Option(help="Of everybody. [default: the engine's, physical cores]", min=1)
    ] = None
    only: Annotated[
        str | None,
        typer.Option(help="Contenders, or how their names begin, comma-separated, e.g. anybit,llama.cpp."),
    ] = None
    text: Annotated[
        Path | None,
        typer.Option(help="Also perplexities on this file, of the engine at its widths and of peers' files."),
    ] = None
    base: Annotated[
        str | None, typer.Option(help="Also divergences from this model, which the others are made of.")
    ] = None

    def plan(self) -> Json:
        """As `bench.decode.Plan` takes it."""
        prompts = () if self.prompts.strip() == "0" else whole_numbers("prompts", self.prompts)
        return {
            "bits": numbers("bits", self.bits),
            "depths": whole_numbers("depths", self.depths),
            "prompts": prompts,
            "kv_bits": whole_numbers("kv-bits", self.kv_bits),
            "tokens": self.tokens,
            "rounds": self.rounds,
            "threads": self.threads or 0,
            "only": named("only", self.only),
            "text": self.text,
            "base": self.base,
        }


FILES_PANEL = "llama.cpp and mistral.rs"


@dataclass(frozen=True)
class Peer:
    """llama.cpp and mistral.rs."""

    llama_bench: Annotated[
        Path | None, typer.Option(help="llama.cpp's program of this name.", rich_help_panel=FILES_PANEL)
    ] = None
    mistralrs: Annotated[
        Path | None,
        typer.Option(
            help="A Python interpreter that has the package of this name: mistral.rs, with --kv-bits 16.",
            rich_help_panel=FILES_PANEL,
        ),
    ] = None
    gguf: Annotated[
        list[Path] | None,
        typer.Option(
            help="A file for them, of one of the models; several times for several.",
            rich_help_panel=FILES_PANEL,
        ),
    ] = None


@grouped
def bench_decode(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Artifacts, models, or random:SHAPE with Qwen3-0.6B, Qwen3-1.7B or Llama-3.1-8B.",
        ),
    ],
    decoded: Decoded,
    peer: Peer,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", help="JSON, written after every cell; what it has is not measured again."
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw it: a .png, .svg or .pdf.")] = None,
    targets: Annotated[
        bool, typer.Option("--targets", help="Compare with what is to be reached; exit code 1 on a miss.")
    ] = False,
) -> None:
    """Tokens per second of this engine, Transformers with the same weights, llama.cpp and mistral.rs, beside the
    memory's rate.

    Everybody takes turns in rounds, and nobody else should run: peers lose most by it. Cells during which others took
    processors do not count for --targets."""
    from anybit.bench import decode

    check_writable(out)
    check_plot(plot)
    set_threads(decoded.threads)
    with reporting() as report:
        plan = decode.Plan(
            models=models,
            **decoded.plan(),
            llama_bench=peer.llama_bench,
            mistralrs=peer.mistralrs,
            ggufs=tuple(peer.gguf or ()),
        )
        figures = decode.decode(plan, out, report)
    tables.print_bench_decode(figures)
    if plot is not None:
        from anybit.bench import picture

        picture.plot_decode(figures, plot)
    if targets:
        tables.print_decode_targets(figures)
    if out is None:
        typer.echo(json.dumps(figures))
    if targets and any(target["met"] is False for target in figures["targets"]):
        raise typer.Exit(1)
