"""Sizes of one file on the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import anybit
from anybit.artifact.sizes import inspect, table_of_levels
from anybit.cli import main as cli
from anybit.kernels import cpu
from tests import builders

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"no native extension: {cpu.why_not()}")


def command(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["anybit", *arguments])
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    shown = capsys.readouterr()
    return int(exit_.value.code or 0), shown.out + shown.err


def test_the_levels_are_printed(
    anybit_artifact: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    levels = table_of_levels(anybit_artifact)
    budget = f"{levels[10]['memory_bytes']}B"
    code, shown = command(["plan", str(anybit_artifact), "--memory", budget], capsys, monkeypatch)
    lines = shown.splitlines()
    assert code == 0 and len(lines) == 62
    (best,) = [line for line in lines if "the best that fits" in line]
    assert best.startswith(f"{levels[10]['bits']:.2f} ")
    code, shown = command(["plan", str(anybit_artifact), "--json", "-"], capsys, monkeypatch)
    assert json.loads(shown)["levels"] == levels
    code, shown = command(["plan", str(anybit_artifact), "--memory", "1kB"], capsys, monkeypatch)
    assert code == 2 and "nothing fits 1kB: the smallest level takes" in shown
    code, shown = command(["plan", str(anybit_artifact), "-o", "map.json"], capsys, monkeypatch)
    assert code == 2 and "is made" in shown


@pytest.mark.parametrize(
    ("option", "budget"), [("--bits=3.05", 3.05), ("--bits=8", 8.0), ("--bpw=100", 8.0), ("--size=1GB", 8.0)]
)
def test_sizes_on_the_command_line(
    anybit_artifact: Path,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    budget: float,
) -> None:
    figures = tmp_path / "figures.json"
    bits = max(level["bits"] for level in table_of_levels(anybit_artifact) if level["bits"] <= budget)
    arguments = ["--text", str(text_file), "--seq-len", "32", "--max-tokens", "64", "--json", str(figures)]
    code, _ = command(["eval", str(anybit_artifact), option, *arguments], capsys, monkeypatch)
    found = json.loads(figures.read_text())
    assert code == 0 and found["bits"] == pytest.approx(bits, abs=0.01)
    code, shown = command(["inspect", str(anybit_artifact), option, "--json", "-"], capsys, monkeypatch)
    made = json.loads(shown)
    assert code == 0 and made["bits_per_weight"] == found["bits_per_weight"]
    assert len(made["levels"]) == 61 and made["levels"][-1]["bits"] == 8
    code, shown = command(
        ["generate", str(anybit_artifact), option, "-p", "abc", "--max-new-tokens", "2"], capsys, monkeypatch
    )
    assert code == 0 and "abc" in shown


@pytest.mark.slow
def test_an_artifact_of_one_width_has_one_level(
    model_dir: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    anybit.quantize(model_dir("llama"), tmp_path / "rtn", builders.options("rtn"))
    for option in ("--bpw=3", "--size=1kB"):
        code, shown = command(["eval", str(tmp_path / "rtn"), option], capsys, monkeypatch)
        assert code == 2 and "at its smallest, 4.00 bits, takes" in shown
        code, shown = command(["eval", str(model_dir("llama")), option], capsys, monkeypatch)
        assert code == 2 and "no artifact of" in shown
    made = inspect(tmp_path / "rtn")
    for budget in ({"bits": 4}, {"bpw": made["bits_per_weight"]}, {"size": made["size_bytes"]}):
        assert inspect(tmp_path / "rtn", **budget) == made
    code, shown = command(["plan", str(tmp_path / "rtn")], capsys, monkeypatch)
    heads, row = shown.splitlines()
    assert code == 0 and heads.split()[0] == "bits"
    assert row.split()[:2] == ["4.00", f"{made['bits_per_weight']:.3f}"] and "not known" in row


def test_the_prediction_holds(
    model_dir: Callable[[str], Path],
    tmp_path: Path,
    anybit_artifact: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = [
        "quantize",
        str(model_dir("llama")),
        "-o",
        str(tmp_path / "x"),
        "--method",
        "anybit",
        "--dry-run",
    ]
    code, _ = command(
        [*asked, "--kept-channels=0.05", "--json", str(tmp_path / "p.json")], capsys, monkeypatch
    )
    predicted = json.loads((tmp_path / "p.json").read_text())
    made = inspect(anybit_artifact)
    assert code == 0 and predicted["bits"] == made["bits"] == 8
    assert made["size_bytes"] <= predicted["size_bytes"] * 1.001
