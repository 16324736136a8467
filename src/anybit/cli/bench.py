"""`anybit bench`: speed on this machine, beside a peer or a limit, in one run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from anybit.cli import tables
from anybit.cli.options import (
    Device,
    JsonFile,
    check_writable,
    emit,
    given,
    grouped,
    named,
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
    """Clustering weights: weights per second of one core, beside flash1dkmeans where that is installed."""
    from anybit.bench import clustering

    check_writable(json_file)
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
    from anybit.bench.picture import PICTURES

    for file in (json_file, timed.plot):
        check_writable(file)
    if timed.plot is not None and timed.plot.suffix not in PICTURES:
        raise InputError(f"--plot {timed.plot}: expected a name that ends in {' or '.join(PICTURES)}")
    if timed.plot is not None:
        require_extra("plots", "--plot")
    if device == "cuda":
        refuse_ignored(cpu.given(), "it is for --device cpu")
        _on_gpu(timed, gpu, json_file)
    elif device == "cpu":
        refuse_ignored(gpu.given(), "it is for --device cuda")
        _on_cpu(timed, cpu, json_file)
    else:
        raise InputError(f"--device {device}: expected cpu or cuda")


def _on_gpu(timed: Timed, asked: OnGpu, json_file: Path | None) -> None:
    from anybit.bench import gpu

    gpu.check_plot(timed.plot, asked.small)
    tokens = timed.tokens and whole_numbers("tokens", timed.tokens)
    figures = gpu.run(
        asked.part or "gemv", timed.rounds, asked.small, json_file,
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
