"""`anybit compare`: cells, their cache, kills, shared statistics, and the report."""

from __future__ import annotations

import fcntl
import html
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import anybit
from anybit.artifact.writer import Cost, read_cost
from anybit.checkpoint.directory import open_checkpoint
from anybit.cli.main import main
from anybit.compare import Settings, compare, parse_entry
from anybit.compare import job as compare_job
from anybit.compare import machine as compare_machine
from anybit.compare import pace as compare_pace
from anybit.compare.base import quantized_before
from anybit.compare.cells import plan_cells
from anybit.compare.job import START, Job
from anybit.compare.pace import Pace
from anybit.compare.report import bars, pareto, width, width_grid, write_report
from anybit.compare.rows import label, resolved
from anybit.config import DESCRIPTIONS
from anybit.errors import InputError
from anybit.progress import no_other_bars
from tests import builders

BARS = {"name": "rtn", "method": "rtn", "bits": 3, "act_bits": 16, "kv_bits": 16, "peak_memory_bytes": 1}
ENTRIES = ("rtn: group_size=16", "squeezellm", "any-precision", "mixllm: group_size=16, name='Mix <LLM>'")


@pytest.fixture
def settings(text_file: Path) -> Settings:
    return Settings(str(text_file), 3, 32, 0, str(text_file), 256)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantize here: a process of its own takes seconds to begin."""
    monkeypatch.setattr(compare_job, "run_apart", lambda job, file: compare_job.run(job))


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
    monkeypatch.setattr(compare_job, "run_apart", lambda job, file: compare_job.run(job))
    results = compare(model, tmp_path / "out", entries, (3, 4), settings)
    assert results["cells"][:2] == own["cells"]
    base, *cells = results["cells"]
    assert [(c["name"], c["bits"]) for c in cells] == [
        (name, bits) for name in ("rtn (group_size=16)", "squeezellm", "any-precision") for bits in (3, 4)
    ]
    options = {"samples": 3, "seq_len": 32}
    configs = [
        builders.options("rtn", 3, 16, **options),
        builders.options("squeezellm", 4, **options),
        builders.options("any-precision", **options),
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
    monkeypatch.setattr(compare_job, "run_apart", lambda job, file: jobs.append(job) or compare_job.run(job))
    assert run(model, tmp_path, settings, ENTRIES[:1]) == first and not jobs
    more = run(model, tmp_path, settings, ("rtn: group_size=16", "rtn"))
    assert more["cells"][:3] == first["cells"] and ["group_size" in job.config for job in jobs] == [
        False,
        False,
    ]
    other = Settings(**{**vars(settings), "max_tokens": 128})
    run(model, tmp_path, other, ENTRIES[:1], keep=True)
    assert len(jobs) == 4  # another evaluation: other cells, of artifacts that were not kept
    base, *cells = run(model, tmp_path, Settings(**{**vars(other), "max_tokens": 64}), ENTRIES[:1])["cells"]
    assert len(jobs) == 4 and [c["tokens"] for c in (base, *cells)] == [62] * 3  # of artifacts that were
    run(model, tmp_path, Settings(**{**vars(other), "seed": 1}), ENTRIES[:1])
    assert len(jobs) == 6  # other calibration: other artifacts


@pytest.mark.usefixtures("in_process")
def test_gradients_are_gathered_once_and_counted_for_each(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path
) -> None:
    results = run(
        model_dir("llama"), tmp_path, settings, ("squeezellm", "any-precision", "mixllm"), keep=True
    )
    folders = list(tmp_path.glob("work/statistics/*"))
    assert sum(not f.name.startswith("base-") for f in folders) == 1  # MixLLM at 4 bits looks for no row
    (file,) = tmp_path.glob("work/statistics/*/statistics/complete")
    cost = json.loads(file.read_text())["seconds"]
    assert cost > 0
    shared = {(c["name"], c["bits"]): c["shared_seconds"] for c in results["cells"][1:]}
    codebooks = ("squeezellm", "any-precision")
    assert shared.pop(("mixllm", 4)) == 0
    assert shared == {(name, bits): cost for name in codebooks for bits in (3, 4)}  # whoever gathered them
    assert all(c["seconds"] > c["shared_seconds"] for c in results["cells"][1:])
    kept = sorted(p.name for p in tmp_path.glob("work/*") if p.is_dir() and p.name != "statistics")
    assert len(kept) == 4 and sum(name.startswith("any-precision") for name in kept) == 1
    assert all(anybit.load(tmp_path / "work" / name) for name in kept)


def test_shared_statistics_give_the_same_bytes(
    model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path
) -> None:
    for config in (
        builders.options("squeezellm", 3, samples=2, seq_len=32),
        builders.options("mixllm", 5, 16, samples=2, seq_len=32),
        builders.options("llm-mq", 3, 16, samples=2, seq_len=32),
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
        assert made[0].statistics is None and made[1].taken_over is None
        assert made[2].statistics == made[1].statistics
        assert made[2].taken_over == made[2].statistics
        assert 0 < made[2].taken_over.seconds < made[1].seconds and made[2].taken_over.processor_seconds > 0
        files = [{f.name: f.read_bytes() for f in m.path.glob("*.safetensors")} for m in made]
        assert files[0] == files[1] == files[2]


@pytest.mark.parametrize(
    ("entries", "moment"),
    [
        (("rtn", "gptq"), "cells/rtn-3-*.json"),
        (("squeezellm", "any-precision"), "work/statistics/*"),
        (("squeezellm", "any-precision"), "work/*.partial"),
        (("any-precision",), "cells/any-precision-3-*.json"),
    ],
    ids=["after a cell", "gathering gradients", "quantizing", "between nested widths"],
)
def test_a_killed_run_goes_on(
    entries: tuple[str, ...],
    moment: str,
    model_dir: Callable[[str], Path],
    settings: Settings,
    tmp_path: Path,
) -> None:
    """Killed without warning: what was done is not done again, and the end is the same."""
    model, out, s = model_dir("llama"), tmp_path / "killed", settings
    command = [
        *(sys.executable, "-m", "anybit", "compare", str(model), "-o", str(out), "--bits", "3,4"),
        *(option for entry in entries for option in ("-m", entry)),
        *("--calibration", s.calibration, "--samples", "3", "--seq-len", "32"),
        *("--text", s.text, "--max-tokens", "256", "--threads", "1"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(out.glob(moment)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {file.name: file.stat().st_mtime_ns for file in out.glob("cells/*.json")}
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    after = {file.name: file.stat().st_mtime_ns for file in out.glob("cells/*.json")}
    assert len(after) == 1 + 2 * len(entries) and all(after[name] == at for name, at in before.items())
    assert entries[-1] in again.stdout and (out / "report.html").is_file()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_job, "run_apart", lambda job, file: compare_job.run(job))
        whole = run(model, tmp_path / "whole", settings, entries)
    found = json.loads((out / "results.json").read_text())["cells"]
    for key in ("name", "bits", "perplexity", "kld_mean", "size_bytes"):
        assert [c.get(key) for c in found] == [c.get(key) for c in whole["cells"]]


def test_an_orphan_ends(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    child = (
        "import os, threading, time; from anybit.compare.job import _end_with;"
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


def test_a_process_whose_parent_is_gone_before_it_begins_ends(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    file = tmp_path / "job"
    file.write_text(json.dumps(vars(Job("nowhere", "", {}, "", "", 1, False, gone.pid))))
    slow = "import time, anybit.compare.job as job; job.run = lambda _: time.sleep(100)\n"
    ended = subprocess.run([sys.executable, "-c", slow + START, str(file)], check=False, timeout=60)
    assert ended.returncode == 1


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
    def fails_at_3(job: Job, file: Path) -> dict[str, Any]:
        if job.config["bits"] == 3:
            raise InputError("no <memory>")
        return compare_job.run(job)

    monkeypatch.setattr(compare_job, "run_apart", fails_at_3)
    results = run(model_dir("llama"), tmp_path, settings, ("rtn", "mixllm"))
    assert [(c["name"], c["bits"]) for c in results["cells"][1:]] == [("rtn", 4), ("mixllm", 4)]
    assert [(r["name"], r["bits"], r["failed"]) for r in results["left_out"]] == [
        ("mixllm", 3, False),
        ("rtn", 3, True),
    ]
    assert "no &lt;memory&gt;" in (tmp_path / "report.html").read_text()


def test_what_can_happen_to_a_process_is_said(
    model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(**options: Any) -> Job:
        artifact = str(tmp_path / "artifact")
        return Job(
            str(model_dir("llama")),
            artifact,
            options,
            "builtin",
            str(tmp_path / "shared"),
            1,
            False,
            os.getpid(),
        )

    def ends(code: str) -> Callable[[], dict[str, Any]]:
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        (tmp_path / "python").write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / "python").chmod(0o755)
        return lambda: compare_job.run_apart(job(method="rtn"), tmp_path / "job")

    made = compare_job.run_apart(job(method="rtn", bits=3), tmp_path / "job")
    assert made["seconds"] > 0 and made["peak_memory_bytes"] > 50e6 and made["shared_seconds"] == 0
    with pytest.raises(InputError, match="no 9-bit width"):
        compare_job.run_apart(job(method="rtn", bits=9), tmp_path / "job")
    with pytest.raises(InputError, match="killed by SIGKILL, perhaps for want of memory"):
        ends("kill -9 $$")()
    with pytest.raises(InputError, match="ended with code 3"):
        ends("exit 3")()
    assert not (tmp_path / "job").exists()


def test_an_unforeseen_error_is_the_cells_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(job: Job) -> dict[str, Any]:
        raise MemoryError("no room\nat all")

    monkeypatch.setattr(compare_job, "run", fails)
    monkeypatch.setattr(
        compare_job.threading, "Thread", lambda **_: type("T", (), {"start": lambda self: None})()
    )
    file = tmp_path / "job"
    file.write_text(json.dumps(vars(Job("", "", {}, "", "", 1, False, os.getpid()))))
    compare_job.main(file)
    assert json.loads(file.read_text()) == {"error": "MemoryError: no room"}


@pytest.mark.usefixtures("in_process")
def test_the_report_shows_every_cell(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path
) -> None:
    results = run(model_dir("llama"), tmp_path, settings)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Mix &lt;LLM&gt;" in page and "Mix <LLM>" not in page
    for cell in results["cells"][1:]:
        assert (
            f"<td>{html.escape(label(cell))}</td><td>{width(cell)}</td><td>{cell['bits_per_weight']:.3f}</td>"
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
    assert entry.method == "any-precision" and entry.options == {"widths": (3, 4), "codebook_bits": 8}
    assert parse_entry("mixllm: bits=[4.4, 5]").bits == (4.4, 5.0) and parse_entry("cmpq: bits=3").bits == (
        3.0,
    )
    assert entry.name == "any-precision (widths=[3, 4], codebook_bits=8)"
    assert parse_entry("gptq: name='plain: GPTQ', clip=false").name == "plain: GPTQ"
    for text, match in (
        ("gptqq", "unknown method"),
        ("gptq: clip", "expected METHOD"),
        ("gptq: clip=false, clip=true", "expected METHOD"),
        ("gptq: clap=true", "'clap' is no option"),
        ("gptq: method='rtn'", "'method' is no option"),
        ("gptq: bits='3'", "bits must be"),
        ("gptq: name='unquantized'", "name of the model itself"),
    ):
        with pytest.raises(InputError, match=match):
            parse_entry(text)


@pytest.mark.usefixtures("in_process")
def test_mistakes_show_before_any_work(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path
) -> None:
    model, out = model_dir("llama"), tmp_path / "out"
    for entries, match in (
        (("rtn: damp=0.1",), "no use for it"),
        (("gptq: group_size=0",), "group size"),
        (("gptq", "gptq"), "same name"),
        ((), "nothing to compare"),
    ):
        with pytest.raises(InputError, match=match):
            run(model, out, settings, entries)
    with pytest.raises(InputError, match="rtn: it has whole widths"):
        compare(model, out, [parse_entry("rtn")], (2.5,), settings)
    with pytest.raises(InputError, match="none"):
        run(model, out, Settings(**{**vars(settings), "text": str(tmp_path / "none.txt")}))
    assert not out.exists()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "work").mkdir()
    for taken in (tmp_path / "thesis", model_dir("llama") / "config.json"):
        with pytest.raises(InputError, match="holds something else"):
            run(model, taken, settings, ("rtn",))
    assert (tmp_path / "thesis" / "work").exists()


@pytest.mark.usefixtures("in_process")
def test_widths_that_an_entry_does_not_have_are_left_out(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path
) -> None:
    entries = (
        "rtn",
        "any-precision",
        "two-four-sixteen: group_size=8",
        "cmpq: bits=2.5",
        "llm-mq: bits=[7, 8]",
    )
    results = compare(model_dir("llama"), tmp_path, [parse_entry(e) for e in entries], (2.6, 4, 4), settings)
    made = [(c["name"], c["bits"]) for c in results["cells"][1:]]
    assert made == [
        ("rtn", 4),
        ("any-precision", 4),
        (entries[2].replace(": ", " (") + ")", 4),
        ("cmpq", 2.5),
    ]
    reasons = [r["reason"] for r in results["left_out"]]
    assert [r["bits"] for r in results["left_out"]] == [2.6, 2.6, 2.6, 7, 8]
    assert "whole widths" in reasons[0] and "3, 4, 5, 6, 7, 8" in reasons[1] and "at least 2.9" in reasons[2]
    with pytest.raises(InputError, match=r"no method has any of the widths asked for .*llm-mq: it has"):
        compare(model_dir("llama"), tmp_path, [parse_entry("llm-mq")], (7,), settings)
    with pytest.raises(InputError, match=r"rtn .*group size 0"):
        compare(model_dir("llama"), tmp_path, [parse_entry("rtn: group_size=0")], (4,), settings)


@pytest.mark.usefixtures("in_process")
def test_kept_artifacts_outlive_later_runs_and_one_run_at_a_time(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path
) -> None:
    model = model_dir("llama")
    run(model, tmp_path, settings, ("rtn",), keep=True)
    kept = sorted(p.name for p in (tmp_path / "work").glob("rtn-*") if p.is_dir())
    run(model, tmp_path, settings, ("rtn", "gptq: group_size=16"))
    assert kept == sorted(p.name for p in (tmp_path / "work").glob("*-*") if p.is_dir())
    shared = sorted((tmp_path / "work" / "statistics").iterdir())
    other = Settings(**{**vars(settings), "max_tokens": 128})
    run(
        model, tmp_path, other, ("rtn", "gptq: group_size=16")
    )  # measures what is kept, and makes what is not
    assert kept == sorted(p.name for p in (tmp_path / "work").glob("*-*") if p.is_dir())
    assert len(shared) == 1 and shared == sorted((tmp_path / "work" / "statistics").iterdir())
    with (tmp_path / "compare.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another `anybit compare`"):
            run(model, tmp_path, settings, ("rtn",))


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("change", ["tokenizer", "weights", "calibration", "seed"])
def test_a_cell_belongs_to_all_that_its_figures_depend_on(
    model_copy: Callable[[str], Path], settings: Settings, tmp_path: Path, change: str
) -> None:
    model, out = model_copy("llama"), tmp_path / "out"
    run(model, out, settings, ("rtn",))
    if change == "tokenizer":
        swapped = (model / "tokenizer.json").read_text().replace('"a":', '"@":').replace('"b":', '"a":')
        (model / "tokenizer.json").write_text(swapped.replace('"@":', '"b":'))
    elif change == "weights":
        weights = load_file(model / "model.safetensors")
        save_file({k: v * 1.01 for k, v in weights.items()}, model / "model.safetensors", {"format": "pt"})
    elif change == "calibration":
        (tmp_path / "other.txt").write_text("other words " * 400)
        settings = Settings(**{**vars(settings), "calibration": str(tmp_path / "other.txt")})
    else:
        settings = Settings(**{**vars(settings), "seed": 1})
    run(model, out, settings, ("rtn",))
    of_base = change in ("tokenizer", "weights")  # its figures do not depend on calibration
    assert len(list(out.glob("cells/*.json"))) == 5 + of_base


def test_a_report_stands_whatever_is_missing(tmp_path: Path) -> None:
    machine = {"processor": "one", "threads": 1, "anybit": "0", "torch": "2", "transformers": "5"}
    base = {
        "name": "unquantized",
        "bits": 16.0,
        "perplexity": None,
        "tokens": 0,
        "tasks": {"gsm8k": {"exact_match": 0.5}},
    }
    base |= {"machine": machine}
    cell = {
        "name": "$x$ _",
        "bits": 3.0,
        "act_bits": 16,
        "kv_bits": 16,
        "bits_per_weight": 3.1,
        "size_bytes": 1,
        "method": "rtn",
        "options": {},
    }
    cell |= {"perplexity": None, "kld_mean": None, "tasks": {"gsm8k": {"exact_match": None}}, "layers": []}
    cell |= {"seconds": 1.0, "shared_seconds": 0.0, "peak_memory_bytes": 1, "resumed": False, "tokens": 2}
    cell |= {"window_nll": [1.0], "machine": {**machine, "processor": "another"}}
    results = {"model": "m", "settings": vars(Settings()), "machine": machine, "left_out": []}
    for cells in ([base], [base, cell]):
        page = write_report(tmp_path, {**results, "cells": cells}).read_text(encoding="utf-8")
        assert "none" in page
    assert "one, 1 threads" in page and "; rows marked ¹ on another" in page and "$x$ _ [rtn] ¹" in page


def test_bars_show_processor_seconds_and_cut_long_waits() -> None:
    def cell(**seconds: float) -> dict[str, Any]:
        shared = {f"shared_{name}": 0.25 * value for name, value in seconds.items()}
        return {**BARS, **seconds, **shared}

    cells = [cell(seconds=1700.0, processor_seconds=120.0), cell(seconds=100.0), cell(seconds=900.0)]
    time, _ = bars(cells).axes
    assert [patch.get_width() for patch in time.patches] == [90, 30, 75, 25, 675, 225]
    assert [patch.get_hatch() for patch in time.patches] == 2 * [None] + 4 * ["///"]
    assert [text.get_text() for text in time.texts] == ["900"] and time.get_xlim()[1] < 700


def test_encoders_are_refused(tmp_path: Path, settings: Settings, tokenizer: PreTrainedTokenizerFast) -> None:
    config = BertConfig(
        vocab_size=264, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    BertModel(config).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    with pytest.raises(InputError, match="is an encoder"):
        run(tmp_path / "bert", tmp_path / "out", settings)


@pytest.mark.usefixtures("in_process")
def test_the_report_shows_cells_of_earlier_runs_that_compare(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path
) -> None:
    model = model_dir("llama")
    run(model, tmp_path, settings, ("squeezellm", "rtn: group_size=16"))
    run(model, tmp_path, Settings(**{**vars(settings), "max_tokens": 128}), ("gptq: group_size=16",))
    run(model, tmp_path, Settings(**{**vars(settings), "seed": 1}), ("rtn: group_size=16",))
    for file in tmp_path.glob("cells/*.json"):  # as cells of before are
        cell = json.loads(file.read_text())
        for key in ("source", "processor_seconds", "shared_processor_seconds"):
            cell.pop(key, None)
        file.write_text(json.dumps(cell))
    again = [parse_entry("rtn: group_size=16, name='plain'"), parse_entry("atom: group_size=16")]
    results = compare(model, tmp_path, again, (4,), settings)
    shown = [(c["name"], c["bits"]) for c in results["cells"]]
    assert shown == [
        ("unquantized", 16),
        ("plain", 3),  # of the first run, by the name of this one
        ("plain", 4),
        ("atom (group_size=16)", 4),
        ("squeezellm", 3),
        ("squeezellm", 4),
    ]
    assert [
        (c["name"], c["bits"]) for c in json.loads((tmp_path / "results.json").read_text())["cells"]
    ] == shown
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "The code was not the same for all: unrecorded (5 rows)" in page and "Hatched" in page
    assert "<td>plain [rtn]</td><td>W3A16</td>" in page and "gptq" not in page


@pytest.mark.usefixtures("in_process")
def test_a_name_of_an_earlier_run_that_is_taken_gives_way(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path
) -> None:
    run(model_dir("llama"), tmp_path, settings, ("rtn: group_size=16, name='mine'",))
    results = run(model_dir("llama"), tmp_path, settings, ("rtn: group_size=24, name='mine'",))
    assert [c["name"] for c in results["cells"][1:]] == 2 * ["mine"] + 2 * ["rtn (group_size=16)"]


@pytest.mark.usefixtures("in_process")
def test_another_name_quantizes_nothing_again(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(model_dir("llama"), tmp_path, settings, ("rtn", "any-precision"), keep=True)
    monkeypatch.setattr(compare_job, "run_apart", lambda job, file: pytest.fail("made again"))
    renamed = ("rtn: name='plain rounding'", "any-precision: name='all widths'")
    again = run(model_dir("llama"), tmp_path, settings, renamed)
    assert [c["name"] for c in again["cells"][1:]] == 2 * ["plain rounding"] + 2 * ["all widths"]
    assert [{**c, "name": ""} for c in again["cells"]] == [{**c, "name": ""} for c in first["cells"]]
    other = Settings(**{**vars(settings), "max_tokens": 128})
    run(model_dir("llama"), tmp_path, other, renamed)  # of artifacts that were kept under the other name


@pytest.mark.usefixtures("in_process")
def test_cells_say_what_made_them(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path
) -> None:
    results = run(model_dir("llama"), tmp_path, settings, ("rtn", "squeezellm"))
    (source,) = {cell["source"] for cell in results["cells"]}
    assert len(source) == 12 and "source" not in (tmp_path / "report.html").read_text()
    for cell in results["cells"][1:]:
        assert cell["processor_seconds"] > cell["shared_processor_seconds"] >= 0
        assert (cell["shared_processor_seconds"] > 0) == (cell["name"] == "squeezellm")
    page = (tmp_path / "report.html").read_text()
    assert "processor, s" in page and "Hatched" not in page and "The code was not the same" not in page


def test_source_changes_with_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.py").write_text("x = 1")
    monkeypatch.setattr(compare_machine.anybit, "__file__", str(tmp_path / "__init__.py"))
    before = compare_machine.source()
    assert compare_machine.source() == before
    (tmp_path / "sub" / "a.py").write_text("x = 2")
    assert compare_machine.source() != before


def test_statistics_of_unknown_processor_seconds_leave_the_sum_unknown(tmp_path: Path) -> None:
    (tmp_path / "complete").write_text('{"seconds": 2.0, "peak_memory_bytes": 5}')
    old, new = read_cost(tmp_path / "complete"), Cost(1.0, 7, 3.0)
    assert old == Cost(2.0, 5, None)
    assert Cost.sum([old, new]) == Cost(3.0, 7, None) and Cost.sum([new, new]) == Cost(2.0, 7, 6.0)


@pytest.mark.usefixtures("in_process")
def test_the_report_says_what_its_rows_are_and_how_to_make_them(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = ("gptq: group_size=16, clip=false, name='a \"<plain>\" one'", "any-precision: widths=[3, 4]")
    first = run(model_dir("llama"), tmp_path / "out", settings, entries)
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "group_size=16, clip=false" in html.unescape(page) and "<code>widths=[3, 4]</code>" in page
    assert DESCRIPTIONS["gptq"] in html.unescape(page) and "quantized before" not in page
    command = shlex.split(html.unescape(page.partition("<pre>")[2].partition("</pre>")[0]))
    command[2] = str(model_dir("llama"))
    command[command.index("OUT")] = str(tmp_path / "out")
    for option in ("--calibration", "--text"):
        command[command.index(option) + 1] = settings.text
    monkeypatch.setattr(compare_job, "run_apart", lambda job, file: pytest.fail("another cell"))
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    again = json.loads((tmp_path / "out" / "results.json").read_text())["cells"]
    assert [(c["name"], c["bits"]) for c in again] == [(c["name"], c["bits"]) for c in first["cells"]]


def test_resolved_options() -> None:
    def of(method: str, bits: float, **options: Any) -> dict[str, Any]:
        return resolved({"name": "", "method": method, "bits": bits, "options": options})

    assert of("rtn", 3) == {"group_size": 128}
    assert of("gptq", 3, clip=False, embed_bits=8) == {"group_size": 128, "embed_bits": 8, "clip": False}
    assert of("gptq", 3, clip=True, embed_bits=16) == {"group_size": 128}
    assert of("atom", 8) == {"group_size": 128, "outlier_channels": None}
    assert of("two-four-sixteen", 2.6) == {"group_size": 16, "exclusive_outliers": 0.002}
    assert of("anybit", 2.5, kept_channels=0.0) == {"kept_channels": 0.0}
    assert of("any-precision", 2, widths=[2, 3]) == {"widths": (2, 3)}
    assert of("squeezellm", 3, sensitive_outliers=0.01) == {
        "sensitive_outliers": 0.01,
        "magnitude_outliers": 0.0,
    }


@pytest.mark.usefixtures("in_process")
def test_a_base_that_was_quantized_is_told(
    settings: Settings, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = tmp_path / "model"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=264, **sizes)).save_pretrained(model)
    tokenizer.save_pretrained(model)
    assert quantized_before(open_checkpoint(model)) is None
    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        if weight.ndim == 2 and ".layers." in name:
            blocks = weight.reshape(-1, 32)
            step = blocks.abs().amax(1, keepdim=True) / 7
            weights[name] = ((blocks / step).round() * step).reshape(weight.shape)
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    results = run(model, tmp_path / "out", settings, ("rtn",))
    assert results["quantized_before"].startswith("at most 1")
    assert "base weights had been quantized before" in (tmp_path / "out" / "report.html").read_text()


def test_the_pace_foresees_from_cells_that_are_alike(
    model_dir: Callable[[str], Path], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(compare_pace.time, "monotonic", lambda: now)
    entries = [parse_entry(e) for e in ("rtn", "gptq: group_size=16", "any-precision")]
    pace = Pace(plan_cells(open_checkpoint(model_dir("llama")), entries, (3, 4), settings)[0])
    said = []
    for seconds in (6, 6, 300, 330, 600, 30):
        said.append(pace.begin())
        now += seconds
        pace.end()
    assert said == [
        *("cell 1 of 6", "cell 2 of 6", "cell 3 of 6"),  # the others are calibrated, rtn is not
        "cell 4 of 6",  # a second width of an artifact is unlike the first
        "cell 5 of 6",
        "cell 6 of 6",
    ]
    pace = Pace(plan_cells(open_checkpoint(model_dir("llama")), entries[:2], (3, 4), settings)[0])
    said = []
    for seconds in (6, 6, 300, 330):
        said.append(pace.begin())
        now += seconds
        pace.end()
    assert said == ["cell 1 of 4", "cell 2 of 4", "cell 3 of 4", "cell 4 of 4, ETA 5 min"]


def test_other_bars_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    bar = importlib.import_module("tqdm.auto").tqdm
    with no_other_bars():
        assert list(bar(range(3), desc="theirs")) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    list(bar(range(3), desc="theirs"))
    assert "theirs" in capsys.readouterr().err
