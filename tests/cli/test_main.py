"""The command line: help, interrupts, and mistakes that every command answers with one line and exit code 2."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import typer

import anybit
from anybit.cli import main as cli
from anybit.config import flag_of, flags_of
from anybit.errors import InputError
from anybit.methods import METHODS
from tests import builders
from tests.cli.commands import Run, refused

COMMANDS = (
    "quantize",
    "methods",
    "eval",
    "generate",
    "chat",
    "serve",
    "inspect",
    "verify",
    "convert",
    "plan",
    "compare",
    "demo",
    "bench",
)
RTN = ("--method", "rtn", "--group-size", "32")


@pytest.fixture
def gptq(text_file: Path) -> tuple[str, ...]:
    """Options of a calibrated run that takes a moment."""
    return (
        *("--method", "gptq", "--samples", "4", "--seq-len", "32"),
        *("--calibration", str(text_file), "--group-size", "32"),
    )


# ---- help and version


def test_version(run: Run) -> None:
    assert run("--version").out.strip() == f"anybit {anybit.__version__}"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(run: Run, command: str) -> None:
    ran = run(command, "--help")
    assert ran.code == 0
    assert command in ran.out and "--help" in ran.out
    assert len(ran.out.strip().splitlines()) <= 60, "more than a screen: hide what one method alone has"


def test_options_of_one_method_are_listed_by_its_name(run: Run) -> None:
    everything = run("methods").out
    for method in METHODS.values():
        assert method.name in everything
        ran = run("methods", method.name)
        assert ran.code == 0 and method.title.partition(":")[0] in " ".join(ran.out.split())
        assert "`" not in ran.out
        for item in fields(method.options):
            told = flags_of(item) if isinstance(item.default, bool) else (flag_of(item.name),)
            assert all(flag in ran.out for flag in told), (method.name, item.name)
    assert re.search(r"--clip/--no-clip +on ", run("methods", "gptq").out)
    refused(run("methods", "awesome"), "awesome", "gptq")


def test_the_least_width_that_is_named_can_be_had(run: Run) -> None:
    assert " 2.46-4* " in run("methods").out
    shown = " ".join(run("methods", "two-four-sixteen").out.split())
    for size, least, words in ((16, "2.46", "from {} to 4"), (8, "2.91", "8 takes {} bits or more")):
        assert words.format(least) in shown
        assert builders.options("two-four-sixteen", float(least), size).bits == float(least)
        layout = METHODS["two-four-sixteen"].layout
        with pytest.raises(InputError, match=r"at least|no 2\.45-bit width"):
            less = builders.options("two-four-sixteen", float(least) - 0.01, size)
            layout(builders.spec_of(less), (64, 64))


def test_commands_are_all_listed(run: Run) -> None:
    assert set(typer.main.get_command(cli.app).commands) == set(COMMANDS)  # type: ignore[attr-defined]
    assert all(command in run("--help").out for command in COMMANDS)


def test_help_imports_nothing_heavy() -> None:
    code = f"""
import sys
from anybit.cli.main import main
for command in {["", *COMMANDS]!r}:
    sys.argv = ["anybit", *command.split(), "--help"]
    try:
        main()
    except SystemExit as exit_:
        assert not exit_.code
heavy = {{"torch", "transformers", "numpy", "safetensors", "matplotlib"}} & set(sys.modules)
sys.exit(str(heavy) if heavy else 0)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_module_is_the_command() -> None:
    command = [sys.executable, "-m", "anybit", "--version"]
    assert subprocess.run(command, capture_output=True, check=True).stdout.startswith(b"anybit ")


def test_models_that_are_none(run: Run, made: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out"
    refused(run("quantize", tmp_path / "nowhere", "-o", out), "does not exist")
    refused(run("quantize", tmp_path / "empty", "-o", out), "config.json")
    refused(run("quantize", made, "-o", out), "already quantized")
    refused(run("inspect", tmp_path / "nowhere"), "does not exist")
    refused(run("inspect", tmp_path / "empty"), "not an anybit artifact")
    refused(run("verify", tmp_path / "empty"), "not an anybit artifact")
    refused(run("plan", tmp_path / "empty"), "config.json")
    refused(run("generate", tmp_path / "empty", "-p", "hi"), "config.json")


def test_current_directory_as_a_model(
    run: Run, llama: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    assert run("inspect", ".").code == 0
    assert run("generate", ".", "-p", "abc", "--max-new-tokens", "2").code == 0
    monkeypatch.chdir(llama)
    assert run("generate", ".", "-p", "abc", "--max-new-tokens", "2").code == 0
    assert run("quantize", ".", "-o", tmp_path / "out", *RTN).code == 0
    figures = json.loads(run("inspect", tmp_path / "out", "--json", "-").out)
    assert figures["base"]["name"] == "llama"


# ---- interruption


CTRL_C = """
import os, signal, sys
from anybit.cli import main as cli

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits it ignored
calls, fsync = [], os.fsync
def interrupted(descriptor):
    calls.append(descriptor)
    if len(calls) == 6:  # in the middle: the second shard is written, but not yet noted
        os.kill(os.getpid(), signal.SIGINT)
    fsync(descriptor)
os.fsync = interrupted
cli.main()
"""


@pytest.mark.e2e
def test_ctrl_c_ends_with_130_and_can_be_resumed(
    run: Run, llama: Path, gptq: tuple[str, ...], tmp_path: Path
) -> None:
    options = (*gptq, "--threads", "1")
    assert run("quantize", llama, "-o", tmp_path / "whole", *options).code == 0
    command = [sys.executable, "-c", CTRL_C, "quantize", str(llama), "-o", str(tmp_path / "out"), *options]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 130, process.stderr
    assert process.stderr.endswith("\nanybit: interrupted; the same command resumes\n")
    assert "Traceback" not in process.stderr
    assert not (tmp_path / "out").exists()
    ran = run("quantize", llama, "-o", tmp_path / "out", *options)
    assert ran.code == 0 and "resumes: 1 of 3 shards" in ran.err
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name
    assert not (tmp_path / "out.partial").exists()


def test_interrupts_and_system_errors_are_no_tracebacks(
    run: Run, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(error: BaseException) -> Callable[..., None]:
        def call(*arguments: object, **options: object) -> None:
            raise error

        return call

    monkeypatch.setattr("anybit.artifact.sizes.inspect", raises(KeyboardInterrupt()))
    ran = run("inspect", made)
    assert (ran.code, ran.err.strip()) == (130, "anybit: interrupted")
    monkeypatch.setattr("anybit.artifact.sizes.inspect", raises(OSError(28, "No space left on device", "/x")))
    refused(run("inspect", made), "/x: No space left on device", "make room")
    monkeypatch.setattr("anybit.artifact.sizes.inspect", raises(InputError("so it is")))
    refused(run("inspect", made), "so it is")


def test_reader_that_goes_away() -> None:
    reader, pipe = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "anybit", "--help"]
    ran = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    os.close(pipe)
    assert (ran.returncode, ran.stderr) == (1, "")
