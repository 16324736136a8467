"""The `anybit` command: a skin over the Python API. Heavy imports happen inside the commands."""

from __future__ import annotations

import errno
import sys
from typing import Annotated, Any

import typer

import anybit
from anybit.cli import artifact, bench, bench_serve, evaluate, methods, quantize, run, serve
from anybit.errors import InputError, printable, raised_by_a_model

app = typer.Typer(
    name="anybit",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="""Compress large language models to any average bit-width and run them fast.

    A first run:

        anybit quantize MODEL -o out

        anybit eval out --bits 3.5 --text my.txt --base MODEL

        anybit generate out --bits 3.5 -p "The capital of France is"

    MODEL is an HF directory, a hub id, a .gguf file, or an artifact that anybit made.
    """,
)
benchmarks = typer.Typer(
    no_args_is_help=True, help="Measure this machine: speed beside a peer or a limit, in one run."
)
for function in (quantize.quantize, methods.methods):
    app.command()(function)
app.command(name="eval")(evaluate.evaluate)
for function in (
    run.generate, run.chat, serve.serve, artifact.inspect, artifact.verify, artifact.convert, artifact.plan,
    evaluate.compare, evaluate.demo,
):  # fmt: skip
    app.command()(function)
benchmarks.command(name="quantize")(bench.bench_quantize)
benchmarks.command(name="kernels")(bench.bench_kernels)
benchmarks.command(name="decode")(bench.bench_decode)
benchmarks.command(name="serve")(bench_serve.bench_serve)
app.add_typer(benchmarks, name="bench")

# Click's base class of usage errors, which typer may or may not bring along under its own name.
_USAGE_ERROR: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"anybit {anybit.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of all commands."""


def main() -> None:
    """Entry point: bad input is one line and exit code 2, Ctrl-C is 130, a defect keeps its traceback (1)."""
    try:
        code = typer.main.get_command(app).main(prog_name="anybit", standalone_mode=False)
        if code == 130:  # what typer makes of Ctrl-C, without a word
            raise KeyboardInterrupt
    except InputError as error:
        code = _complain(str(error), 2)
    except _USAGE_ERROR as error:
        error.show()
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        resumes = "; the same command resumes" if sys.argv[1:2] in (["quantize"], ["compare"]) else ""
        code = _complain(f"interrupted{resumes}", 130)
    except OSError as error:
        if error.errno is None:
            raise
        remedy = ": make room and run the same command again" if error.errno == errno.ENOSPC else ""
        code = _complain(": ".join(filter(None, [error.filename, error.strerror])) + remedy, 2)
    except Exception as error:
        if not raised_by_a_model(error):
            raise
        code = _complain(
            f"the model does not run ({type(error).__name__}: {str(error).strip()[:200]}): its config.json and its "
            "weights do not belong together, or it is of a kind that is not supported; copy both again",
            2,
        )
    sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str, code: int) -> int:
    typer.echo(f"anybit: {printable(message)}", err=True)
    return code


if __name__ == "__main__":
    main()
