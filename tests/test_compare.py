"""`anybit compare`: cells, their cache, kills, shared statistics, and the report."""

from __future__ import annotations

import html
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import anybit
from anybit import compare as comparing
from anybit.compare import Settings, compare, parse_entry
from anybit.compare_report import pareto, width, width_grid
from anybit.errors import InputError
from anybit.spec import QuantizeConfig

ENTRIES = ("rtn: group_size=16", "squeezellm", "any-precision", "mixllm: group_size=16, name='Mix <LLM>'")


@pytest.fixture
def settings(text_file: Path) -> Settings:
    return Settings(str(text_file), 3, 32, 0, str(text_file), 256)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantize here: a process of its own takes seconds to begin."""
    monkeypatch.setattr(comparing, "_in_own_process", comparing._quantize)


def run(
    model: Path, out: Path, settings: Settings, entries: tuple[str, ...] = ENTRIES, **more: Any
) -> dict[str, Any]:
    return compare(model, out, [parse_entry(e) for e in entries], (3, 4), settings, **more)


def test_every_cell_is_what_quantize_and_eval_give(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_dir("llama")
    entries = [parse_entry(e) for e in ENTRIES[:3]]
    own = compare(model, tmp_path / "out", entries[:1], (3,), settings)  # in a process of its own
    monkeypatch.setattr(comparing, "_in_own_process", comparing._quantize)
    results = compare(model, tmp_path / "out", entries, (3, 4), settings)
    assert results["cells"][:2] == own["cells"]
    base, *cells = results["cells"]
    assert [(c["name"], c["bits"]) for c in cells] == [
        (name, bits) for name in ("rtn (group_size=16)", "squeezellm", "any-precision") for bits in (3, 4)
    ]
    options = {"samples": 3, "seq_len": 32}
    configs = [
        QuantizeConfig("rtn", 3, 16, **options),
        QuantizeConfig("squeezellm", 4, **options),
        QuantizeConfig("any-precision", **options),
    ]
    measured = {"text": settings.text, "seq_len": 32, "max_tokens": 256}
    for config, cell, bits in zip(configs, (cells[0], cells[3], cells[4]), (None, None, 3)):
        made = anybit.quantize(model, tmp_path / config.method, config, calibration=settings.calibration)
        figures = anybit.evaluate(made.path, base=model, bits=bits, **measured)
        for key in ("perplexity", "kld_mean", "bits_per_weight", "size_bytes", "window_nll"):
            assert cell[key] == figures[key], (config.method, key)
        assert cell["peak_memory_bytes"] > 50e6 and cell["seconds"] > 0 and not cell["resumed"]
    assert base["perplexity"] == anybit.evaluate(model, **measured)["perplexity"]
    assert base["bits"] == 16 and "kld_mean" not in base
    assert not (tmp_path / "out" / "work").exists()


@pytest.mark.usefixtures("in_process")
def test_finished_cells_are_not_made_again(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_dir("llama")
    first = run(model, tmp_path, settings, ENTRIES[:1])
    jobs = []
    monkeypatch.setattr(
        comparing, "_in_own_process", lambda job: jobs.append(job) or comparing._quantize(job)
    )
    assert run(model, tmp_path, settings, ENTRIES[:1]) == first and not jobs
    more = run(model, tmp_path, settings, ("rtn: group_size=16", "rtn"))
    assert more["cells"][:3] == first["cells"] and [job.config.group_size for job in jobs] == [128, 128]
    other = Settings(**{**vars(settings), "max_tokens": 128})
    run(model, tmp_path, other, ENTRIES[:1])
    assert len(jobs) == 4  # another evaluation: other cells


@pytest.mark.usefixtures("in_process")
def test_gradients_are_gathered_once_and_counted_for_each(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path
) -> None:
    results = run(
        model_dir("llama"), tmp_path, settings, ("squeezellm", "any-precision", "mixllm"), keep=True
    )
    costs = sorted(
        json.loads(file.read_text())["seconds"] for file in tmp_path.glob("work/statistics/*/cost.json")
    )
    assert len(costs) == 1  # MixLLM at 4 bits looks for no row
    shared = {(c["name"], c["bits"]): c["shared_seconds"] for c in results["cells"][1:]}
    assert shared["squeezellm", 3] == 0  # it gathered them
    assert shared["squeezellm", 4] == shared["any-precision", 3] == shared["any-precision", 4] == costs[0]
    assert all(c["seconds"] > c["shared_seconds"] for c in results["cells"][1:])
    kept = sorted(p.name for p in tmp_path.glob("work/*") if p.is_dir() and p.name != "statistics")
    assert len(kept) == 4 and sum(name.startswith("any-precision") for name in kept) == 1
    assert all(anybit.load(tmp_path / "work" / name) for name in kept)


def test_shared_statistics_give_the_same_bytes(
    model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path
) -> None:
    for config in (
        QuantizeConfig("squeezellm", 3, samples=2, seq_len=32),
        QuantizeConfig("mixllm", 5, 16, samples=2, seq_len=32),
        QuantizeConfig("llm-mq", 3, 16, samples=2, seq_len=32),
    ):
        made = [
            anybit.quantize(
                model_dir("llama"),
                tmp_path / f"{config.method}-{i}",
                config,
                calibration=str(text_file),
                statistics=folder,
            )
            for i, folder in enumerate([None, tmp_path / "shared", tmp_path / "shared"])
        ]
        assert [bool(m.statistics) for m in made] == [False, False, True]
        files = [{f.name: f.read_bytes() for f in m.path.glob("*.safetensors")} for m in made]
        assert files[0] == files[1] == files[2]


def test_a_killed_run_goes_on(model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path) -> None:
    """Killed without warning once the first cell is there: nothing of it is lost, and the orphan ends by itself."""
    s = settings
    command = [
        *(sys.executable, "-m", "anybit", "compare", str(model_dir("llama")), "-o", str(tmp_path / "killed")),
        *("-m", "rtn", "-m", "gptq", "--bits", "3", "--calibration", s.calibration, "--samples", "3"),
        *("--seq-len", "32", "--text", s.text, "--max-tokens", "256", "--threads", "1"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    cells = tmp_path / "killed" / "cells"
    deadline = time.monotonic() + 120
    while not list(cells.glob("rtn-3-*.json")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {file.name: file.stat().st_mtime_ns for file in cells.glob("*.json")}
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    after = {file.name: file.stat().st_mtime_ns for file in cells.glob("*.json")}
    assert len(after) == 3 and all(after[name] == at for name, at in before.items())
    assert "gptq" in again.stdout and (tmp_path / "killed" / "report.html").is_file()


def test_an_orphan_ends(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    child = (
        "import os, threading, time; from anybit.compare import _end_with;"
        f"open({str(pid_file)!r}, 'w').write(str(os.getpid()));"
        "threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start(); time.sleep(100)"
    )
    parent = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(100)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent])
    deadline = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    while _alive(int(pid_file.read_text())):
        assert time.monotonic() < deadline, "the orphan goes on"
        time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


@pytest.mark.usefixtures("in_process")
def test_a_cell_that_fails_is_reported_and_the_others_are_made(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_at_3(job: comparing._Job) -> dict[str, Any]:
        if job.config.bits == 3:
            raise InputError("no <memory>")
        return comparing._quantize(job)

    monkeypatch.setattr(comparing, "_in_own_process", fails_at_3)
    results = run(model_dir("llama"), tmp_path, settings, ("rtn", "mixllm"))
    assert [(c["name"], c["bits"]) for c in results["cells"][1:]] == [("rtn", 4), ("mixllm", 4)]
    assert [(r["name"], r["bits"], r["failed"]) for r in results["left_out"]] == [
        ("mixllm", 3, False),
        ("rtn", 3, True),
    ]
    assert "no &lt;memory&gt;" in (tmp_path / "report.html").read_text()


def test_a_process_that_is_killed_is_a_failed_cell(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path
) -> None:
    job = comparing._Job("no model", tmp_path, QuantizeConfig("rtn"), "builtin", tmp_path, 1, False)
    with pytest.raises(InputError, match="no model"):
        comparing._in_own_process(job)
    with pytest.raises(InputError, match="killed"):
        comparing._in_own_process(_Deadly())


class _Deadly:
    """Kills the process that unpacks it."""

    def __reduce__(self) -> Any:
        return os.abort, ()


@pytest.mark.usefixtures("in_process")
def test_the_report_shows_every_cell(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path
) -> None:
    results = run(model_dir("llama"), tmp_path, settings)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Mix &lt;LLM&gt;" in page and "Mix <LLM>" not in page
    for cell in results["cells"][1:]:
        assert (
            f"<td>{html.escape(cell['name'])}</td><td>{width(cell)}</td><td>{cell['bits_per_weight']:.3f}</td>"
            in page
        )
        assert f"<td>{cell['kld_mean']:.4f}</td>" in page
    assert page.count("data:image/png;base64,iVBOR") == 3  # two curves and the bars: all layers are alike
    assert settings.text not in page and str(tmp_path) not in (tmp_path / "results.json").read_text()
    assert (tmp_path / "perplexity.png").stat().st_size > 1000 and (tmp_path / "kld.png").is_file()


@pytest.mark.usefixtures("in_process")
def test_mixed_widths_have_a_heatmap(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path
) -> None:
    compare(model_dir("llama"), tmp_path, [parse_entry("llm-mq: group_size=16")], (2.5,), settings)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,iVBOR") == 4 and "Where the bits are" in page


def test_width_grid() -> None:
    layers = [
        {"name": "model.layers.1.attn.q", "bits": 3},
        {"name": "model.layers.0.attn.q", "bits": 2},
        {"name": "model.layers.1.mlp.up", "bits": 4},
        {"name": "head", "bits": 8},
    ]
    kinds, grid = width_grid(layers)
    assert kinds == ["attn.q", "mlp.up", "head"]
    assert grid[0].tolist() == [2, 3] and grid[1, 1] == 4 and grid[2, 0] == 8 and grid[1, 0] != grid[1, 0]


def test_pareto() -> None:
    def cell(bpw: float, perplexity: float | None) -> dict[str, Any]:
        return {"bits_per_weight": bpw, "perplexity": perplexity}

    cells = [cell(4, 20), cell(3, 30), cell(3.5, 31), cell(3, 29), cell(5, 20), cell(2, None), cell(2.5, 100)]
    assert pareto(cells, "perplexity") == {0, 3, 6}


def test_entries() -> None:
    entry = parse_entry("any-precision: widths=[3, 4], codebook_bits=8")
    assert entry.options == {"method": "any-precision", "widths": (3, 4), "codebook_bits": 8}
    assert entry.name == "any-precision (widths=[3, 4], codebook_bits=8)"
    assert parse_entry("gptq: name='plain: GPTQ', clip=false").name == "plain: GPTQ"
    for text, match in (
        ("gptqq", "unknown method"),
        ("gptq: clip", "expected METHOD"),
        ("gptq: clip=false, clip=true", "expected METHOD"),
    ):
        with pytest.raises(InputError, match=match):
            parse_entry(text)


@pytest.mark.usefixtures("in_process")
def test_mistakes_show_before_any_work(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path
) -> None:
    model, out = model_dir("llama"), tmp_path / "out"
    for entries, match in (
        (("gptq: clap=true",), "'clap' is no option"),
        (("gptq: bits=3",), "'bits' is no option"),
        (("rtn: damp=0.1",), "no use for it"),
        (("gptq: group_size=0",), "group size"),
        (("gptq", "gptq"), "same name"),
        ((), "nothing to compare"),
    ):
        with pytest.raises(InputError, match=match):
            run(model, out, settings, entries)
    with pytest.raises(InputError, match="no method has any"):
        compare(model, out, [parse_entry("rtn")], (2.5,), settings)
    with pytest.raises(InputError, match="none"):
        run(model, out, Settings(**{**vars(settings), "text": str(tmp_path / "none.txt")}))
    assert not list(out.glob("cells/*"))
