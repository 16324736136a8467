"""`anybit compare` and its processes: kills, orphans, cells that fail."""

from __future__ import annotations

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

from anybit.compare import Settings
from anybit.compare import job as compare_job
from anybit.compare.job import START, Job
from anybit.errors import InputError
from tests.compare.runs import run


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("entries", "moments"),
    [
        (("rtn", "any-precision"), ("cells/rtn-3-*.json", "cells/any-precision-3-*.json")),
        (("squeezellm",), ("work/statistics/*", "work/*.partial")),
    ],
    ids=["after a cell and between nested widths", "gathering gradients and quantizing"],
)
def test_a_killed_run_goes_on(
    entries: tuple[str, ...],
    moments: tuple[str, str],
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
    before: dict[str, int] = {}
    for moment in moments:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while not list(out.glob(moment)):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        before = {file.name: file.stat().st_mtime_ns for file in out.glob("cells/*.json")} | before
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


@pytest.mark.e2e
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


@pytest.mark.e2e
def test_a_process_whose_parent_is_gone_before_it_begins_ends(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    file = tmp_path / "job"
    file.write_text(json.dumps(vars(Job("nowhere", "", "", {}, "", "", 1, False, gone.pid))))
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


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_a_cell_that_fails_is_reported_and_the_others_are_made(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_at_3(job: Job, file: Path) -> dict[str, Any]:
        if job.options["bits"] == 3:
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


@pytest.mark.e2e
def test_what_can_happen_to_a_process_is_said(
    model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(method: str, **options: Any) -> Job:
        return Job(
            str(model_dir("llama")),
            str(tmp_path / "artifact"),
            method,
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
        return lambda: compare_job.run_apart(job("rtn"), tmp_path / "job")

    made = compare_job.run_apart(job("rtn", bits=3), tmp_path / "job")
    assert made["seconds"] > 0 and made["peak_memory_bytes"] > 50e6 and made["shared_seconds"] == 0
    with pytest.raises(InputError, match="no 9-bit width"):
        compare_job.run_apart(job("rtn", bits=9), tmp_path / "job")
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
    file.write_text(json.dumps(vars(Job("", "", "", {}, "", "", 1, False, os.getpid()))))
    compare_job.main(file)
    assert json.loads(file.read_text()) == {"error": "MemoryError: no room"}
