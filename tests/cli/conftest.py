"""Fixtures of the command's tests: the command, a model, an artifact."""

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import anybit
from anybit.cli import main as cli
from tests import builders
from tests.cli.commands import Ran, Run


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("inspect", out)`: the command in this process, as the installed script calls it."""

    def call(*arguments: object, stdin: str = "") -> Ran:
        monkeypatch.setattr(sys, "argv", ["anybit", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return Ran(int(exit_.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture
def llama(model_dir: Callable[[str], Path]) -> Path:
    return model_dir("llama")


@pytest.fixture(scope="session")
def made(model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An RTN artifact at 4 bits; never change it."""
    out = tmp_path_factory.mktemp("cli") / "made"
    anybit.quantize(model_dir("llama"), out, builders.options("rtn", group_size=32))
    return out
