"""Runs killed at every step resume to the same bytes."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anybit import driver
from anybit.artifact.verify import verify
from anybit.cli import main as cli
from anybit.errors import InputError
from tests import builders
from tests.probes import digests, stop_at

GPTQ = builders.options("gptq", bits=3, group_size=32, samples=5, seq_len=40)
RTN = builders.options("rtn", bits=4, group_size=32)


# A process that has everything imported and forks for each run: a real SIGKILL, without seconds of imports.
SERVER = """
import json, os, signal, sys
from pathlib import Path
import torch
from anybit.cli import main as cli

torch.set_num_threads(1)

def quantize(arguments):
    sys.argv = ["anybit", "quantize", *arguments]
    try:
        cli.main()
    except SystemExit as end:
        return end.code

def child(job):  # the file operation of number `kill_at` never happens
    done = 0
    def counting(call):
        def counted(*args, **options):
            nonlocal done
            if done == job["kill_at"]:
                os.kill(os.getpid(), job["signal"])
            done += 1
            return call(*args, **options)
        return counted
    for name in ("fsync", "replace", "rename", "unlink", "rmdir", "mkdir", "truncate"):
        setattr(os, name, counting(getattr(os, name)))
    code = quantize(job["arguments"])
    Path(job["count"]).write_text(str(done))
    return code

answers, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    job = json.loads(line)
    if "wait" in job:
        status = os.waitpid(job["wait"], os.WUNTRACED)[1]
        answer = -os.WSTOPSIG(status) if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)
    elif job["kill_at"] == "never mind":
        answer = quantize(job["arguments"])  # here: what is imported and cached on the way stays
    else:
        answer = os.fork()
        if answer == 0:
            os._exit(child(job))
    print(answer, file=answers, flush=True)
"""


class Runs:
    """`anybit quantize` in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self._count = folder / "count"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.server = subprocess.Popen([sys.executable, "-c", SERVER], text=True, **pipes)  # type: ignore[call-overload]

    def _ask(self, **job: Any) -> int:
        self.server.stdin.write(json.dumps(job) + "\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())

    def warm_up(self, arguments: list[str]) -> None:
        assert self._ask(arguments=arguments, kill_at="never mind") == 0

    def start(self, arguments: list[str], kill_at: int | None = None, sent: int = signal.SIGKILL) -> int:
        """Number of the process, to which `sent` comes before its file operation `kill_at`."""
        self._count.unlink(missing_ok=True)
        return self._ask(arguments=arguments, kill_at=kill_at, signal=sent, count=str(self._count))

    def wait(self, process: int) -> int:
        """Exit code; negative: the signal that ended or stopped it."""
        return self._ask(wait=process)

    def run(self, arguments: list[str], kill_at: int | None = None) -> int:
        return self.wait(self.start(arguments, kill_at))

    def steps(self) -> int:
        """File operations of the last run, which was not killed."""
        return int(self._count.read_text())


METHODS = {
    "rtn": ["--method", "rtn", "--embed-bits", "8"],
    "gptq": ["--method", "gptq"],
    "gptq one-shot": ["--method", "gptq", "--one-shot", "--desc-act"],
    "any-precision": ["--method", "any-precision", "--widths", "3,5"],
    "cmpq": ["--method", "cmpq", "--bits", "2.5"],
    "mixllm": ["--method", "mixllm", "--wide-rows", "0.2"],
    "atom": ["--method", "atom", "--scaling", "smoothquant", "--outlier-channels", "8", "--act-search"],
}
Job = Callable[[str, str], list[str]]


@pytest.fixture(scope="module")
def arguments(model_dir: Callable[[str], Path], text_file: Path) -> Callable[[Path, str], list[str]]:
    def make(out: Path, method: str) -> list[str]:
        text = ["--samples", "6", "--seq-len", "64", "--calibration", str(text_file)]
        group = ["--group-size", "32"] if method.startswith(("rtn", "gptq", "mixllm", "atom")) else []
        options = ["--threads", "1", *group, *([] if method == "rtn" else text)]
        return [str(model_dir("llama")), "-o", str(out), *METHODS[method], *options]

    return make


@pytest.fixture
def job(arguments: Callable[[Path, str], list[str]], tmp_path: Path) -> Job:
    """`job("out", "gptq")`: the options that make tmp_path / "out"."""
    return lambda name, method: arguments(tmp_path / name, method)


@pytest.fixture(scope="module")
def runs(
    arguments: Callable[[Path, str], list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("runs")
    made = Runs(folder)
    made.warm_up(arguments(folder / "warm", "gptq"))
    yield made
    made.server.communicate()


@pytest.mark.e2e
@pytest.mark.parametrize("method", METHODS)
def test_killed_at_any_step_it_resumes_to_the_same_bytes(
    runs: Runs, job: Job, tmp_path: Path, method: str
) -> None:
    assert runs.run(job("whole", method)) == 0
    expected, steps = digests(tmp_path / "whole"), runs.steps()
    assert steps > 20
    rng = random.Random(1)
    early = rng.sample(range(steps - 14), 6)  # the last ones, which publish, all
    for step in sorted(early + (list(range(steps - 14, steps)) if method == "rtn" else [steps - 5])):
        out = tmp_path / f"out{step}"
        assert runs.run(job(out.name, method), kill_at=step) == -signal.SIGKILL
        if out.exists():  # only ever whole
            assert digests(out) == expected, step
            shutil.rmtree(out)  # what is left beside it must not disturb another run
        if step in early:  # twice, now at the start of the resumption
            runs.run(job(out.name, method), kill_at=rng.randrange(4))
        assert runs.run(job(out.name, method)) == 0, step
        assert digests(out) == expected, step
        assert not out.with_name(f"{out.name}.partial").exists(), step


@pytest.mark.e2e
def test_killed_at_random_moments(runs: Runs, job: Job, tmp_path: Path) -> None:
    """Between file operations, where the time goes."""
    begun = time.monotonic()
    assert runs.run(job("whole", "gptq")) == 0
    duration, expected = time.monotonic() - begun, digests(tmp_path / "whole")
    rng = random.Random(0)
    killed = 0
    for trial in range(6):
        out = tmp_path / f"out{trial}"
        for _ in range(2):
            delay = rng.uniform(0.2, 0.9) * duration
            process = runs.start(job(out.name, "gptq"))
            time.sleep(delay)
            assert not out.exists() or digests(out) == expected
            os.kill(process, signal.SIGKILL)  # it may just have ended: nobody has waited for it yet
            if runs.wait(process) == -signal.SIGKILL:
                killed += 1
            else:
                duration = delay  # the machine is faster than it was
            if out.exists():
                break
        else:
            assert runs.run(job(out.name, "gptq")) == 0
        assert digests(out) == expected
    assert killed > 0


@pytest.mark.e2e
def test_overwriting_is_as_safe(runs: Runs, job: Job, tmp_path: Path) -> None:
    """Killed at any step of the exchange, there is the old artifact, the new one, or a run that resumes."""
    assert runs.run(job("old", "rtn")) == runs.run(job("new", "gptq")) == 0
    old, new = digests(tmp_path / "old"), digests(tmp_path / "new")
    shutil.copytree(tmp_path / "old", tmp_path / "counted")
    assert runs.run([*job("counted", "gptq"), "--overwrite"]) == 0
    assert digests(tmp_path / "counted") == new
    seen, steps = set(), runs.steps()
    for step in range(steps - 17, steps):  # among them: the old one out of the way, the new one in its place
        out = tmp_path / f"out{step}"
        shutil.copytree(tmp_path / "old", out)
        assert runs.run([*job(out.name, "gptq"), "--overwrite"], kill_at=step) == -signal.SIGKILL
        state = digests(out) if out.exists() else None
        assert state in (old, new, None)
        seen.add("old" if state == old else "new" if state == new else "none")
        if state != new:
            assert runs.run([*job(out.name, "gptq"), "--overwrite"]) == 0
        assert digests(out) == new
    assert seen == {"old", "new", "none"}


def run_here(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    monkeypatch.setattr(sys, "argv", ["anybit", "quantize", *arguments])
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return exit_.value.code, capsys.readouterr().err


@pytest.mark.slow
def test_two_runs_and_other_options_are_refused(
    runs: Runs,
    job: Job,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert runs.run(job("whole", "gptq")) == 0
    process = runs.start(job("out", "gptq"), kill_at=runs.steps() // 2, sent=signal.SIGSTOP)
    assert runs.wait(process) == -signal.SIGSTOP
    code, errors = run_here(job("out", "gptq"), capsys, monkeypatch)
    assert code == 2 and "another process is writing" in errors
    os.kill(process, signal.SIGKILL)
    runs.wait(process)
    for option in (
        ["--bits", "3"],
        ["--seed", "7"],
        ["--samples", "5"],
        ["--damp", "0.02"],
        ["--embed-bits", "8"],
    ):
        code, errors = run_here([*job("out", "gptq"), *option], capsys, monkeypatch)
        assert code == 2 and "unfinished run with another model, text" in errors and "--overwrite" in errors
    code, errors = run_here(job("out", "gptq"), capsys, monkeypatch)
    assert code == 0 and "resumes: " in errors
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_another_model_or_text_is_refused(
    model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(monkeypatch, 2)
    with pytest.raises(InputError, match="disk is full"):
        driver.quantize(model_dir("llama"), tmp_path / "out", GPTQ, calibration=str(text_file))
    monkeypatch.undo()
    other = tmp_path / "words.txt"
    other.write_text(text_file.read_text()[::-1])
    with pytest.raises(InputError, match="unfinished run with another model, text"):
        driver.quantize(model_dir("llama"), tmp_path / "out", GPTQ, calibration=str(other))
    with pytest.raises(InputError, match="unfinished run with another model, text"):
        driver.quantize(model_dir("qwen3"), tmp_path / "out", GPTQ, calibration=str(text_file))
    made = driver.quantize(
        model_dir("qwen3"), tmp_path / "out", GPTQ, calibration=str(text_file), overwrite=True
    )
    assert made.resumed_shards == 0
    verify(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("config", [GPTQ, RTN])
def test_a_damaged_finished_shard_is_made_again(
    model_dir: Callable[[str], Path],
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: builders.Options,
) -> None:
    driver.quantize(model_dir("llama"), tmp_path / "whole", config, calibration=str(text_file))
    stop_at(monkeypatch, 3)
    with pytest.raises(InputError, match="disk is full"):
        driver.quantize(model_dir("llama"), tmp_path / "out", config, calibration=str(text_file))
    monkeypatch.undo()
    shard = tmp_path / "out.partial" / "artifact" / "model-00002-of-00003.safetensors"
    data = bytearray(shard.read_bytes())
    data[-5] ^= 4
    shard.write_bytes(data)
    again = driver.quantize(model_dir("llama"), tmp_path / "out", config, calibration=str(text_file))
    assert again.resumed_shards == 1
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
