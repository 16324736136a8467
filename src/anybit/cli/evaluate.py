"""`anybit eval`, `anybit compare` and `anybit demo`: what measures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from anybit.cli import tables
from anybit.cli.options import (
    EvalTokens,
    JsonFile,
    Level,
    Model,
    Running,
    Source,
    Threads,
    ZeroShot,
    check_json,
    check_seed,
    emit,
    grouped,
    numbers,
    reporting,
    set_threads,
)
from anybit.config import SAMPLES, Json, Options
from anybit.errors import InputError


@dataclass(frozen=True)
class Text:
    """What a model is measured on."""

    text: Annotated[
        str | None, typer.Option(help="A .txt or .jsonl file. [default: the built-in text's other half]")
    ] = None
    dataset: Annotated[str | None, typer.Option(help="A hub dataset, e.g. wikitext2, instead of --text.")] = (
        None
    )
    pairs: Annotated[
        Path | None,
        typer.Option(help="Encoders: sentence1, sentence2, score as .jsonl, .tsv or .csv."),
    ] = None
    seq_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens per window; of an encoder, per sentence. [default: 2048, or what the model reaches]",
            min=1,
        ),
    ] = None
    max_tokens: EvalTokens = None
    base: Annotated[str | None, typer.Option(help="Full-precision model to measure the divergence from.")] = (
        None
    )

    def asked(self) -> Json:
        """As `anybit.evaluate` takes it."""
        if self.text and self.dataset:
            raise InputError("--text and --dataset name the same thing: give one of them")
        named = {name: getattr(self, name) for name in ("pairs", "seq_len", "max_tokens", "base")}
        return {"text": self.text or self.dataset, **named}


@grouped
def evaluate(
    model: Model, on: Text, tasks: ZeroShot, level: Level, running: Running, json_file: JsonFile = None
) -> None:
    """Measure MODEL: perplexity, divergence from a base model, zero-shot tasks; of an encoder its embeddings.

    Perplexity is taken over non-overlapping windows of the text as it is; a BOS token is put before each window if and
    only if the tokenizer does so.

    Example: `anybit eval out --text my.txt --base MODEL --json figures.json`
    """
    check_json(json_file)
    asked = on.asked() | tasks.asked() | level.asked() | running.asked()
    set_threads(running.threads)
    from anybit.evaluation.measure import evaluate as measure

    with reporting() as report:
        figures = measure(model, report=report, **asked)
    emit(figures, json_file, tables.print_evaluation if "perplexity" in figures else tables.print_embeddings)


@dataclass(frozen=True)
class Compared:
    """What all cells of a comparison have in common."""

    calibration: Annotated[
        str,
        typer.Option(help="builtin, a .txt or .jsonl file, or a hub dataset.", rich_help_panel="Calibration"),
    ] = "builtin"
    samples: Annotated[
        int, typer.Option(help="Calibration windows.", min=1, rich_help_panel="Calibration")
    ] = SAMPLES
    seq_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens per window, of calibration and evaluation. [default: 2048, or the model's positions if fewer]",
            min=2,
            rich_help_panel="Calibration",
        ),
    ] = None
    seed: Annotated[
        int,
        typer.Option(
            help="Picks the calibration windows.", callback=check_seed, rich_help_panel="Calibration"
        ),
    ] = Options.seed
    text: Annotated[str, typer.Option(help="Text to measure on.", rich_help_panel="Evaluation")] = (
        "builtin-eval"
    )
    max_tokens: EvalTokens = None


@dataclass(frozen=True)
class Cells:
    """Which cells there are, and what stays of them."""

    method: Annotated[
        list[str] | None,
        typer.Option(
            "-m",
            "--method",
            help="A method, and its options after a colon. Repeatable. `bits=[4.4, 5]` among them: its own widths. "
            "[default: anybit, the five systems, rtn and gptq]",
        ),
    ] = None
    bits: Annotated[str, typer.Option(help="Widths; a method is left out at those it does not have.")] = "3,4"
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep artifacts and statistics in OUT/work, for other texts.")
    ] = False


@grouped
def compare(
    model: Source,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for cells, pictures and report.html.")],
    cells: Cells,
    common: Compared,
    tasks: ZeroShot,
    threads: Threads = None,
) -> None:
    """Compress MODEL by several methods at several widths, measure each, and write OUT/report.html.

    What is done lies in OUT/cells: the same command goes on where it was killed, and one with more methods or widths
    makes only the new ones. The report shows all cells there that were made of the same model and calibration and
    measured in the same way: those of this command first, then those of earlier ones.

    Example: `anybit compare MODEL -o compared -m rtn -m 'gptq: group_size=64' --bits 2,3,4 --max-tokens 16384`
    """
    from anybit import compare as comparing

    set_threads(threads)
    settings = comparing.Settings(**vars(common), **tasks.asked())
    with reporting() as report:
        entries = [comparing.parse_entry(name) for name in cells.method or comparing.USUAL]
        widths = numbers("bits", cells.bits)
        results = comparing.compare(model, out, entries, widths, settings, keep=cells.keep, report=report)
    emit(results, None, tables.print_comparison)
    typer.echo(f"report: {out / 'report.html'}")
    if any(row["failed"] for row in results["left_out"]):
        raise typer.Exit(1)


def demo(
    out: Annotated[
        Path, typer.Option("-o", "--out", help="Directory for the model, the artifacts and the report.")
    ] = Path("demo"),
    threads: Threads = None,
) -> None:
    """The whole way on a real model: fetch SmolLM2-135M, compress it three ways, measure, generate, report."""
    from anybit.demo import run

    set_threads(threads)
    with reporting() as report:
        run(out, report)
