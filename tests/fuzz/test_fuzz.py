"""A small fixed set of mutations; and the harness itself, which must see what must not happen."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from anybit.checkpoint import files as anybit_files
from anybit.errors import InputError
from anybit.formats import Float16Layout
from anybit.formats.layout import LayerLayout
from anybit.formats.weight import PackedWeight
from tests.fuzz import doors, limits, mutate
from tests.fuzz.doors import in_words, raised_by_anybit, refusals, same_product
from tests.fuzz.limits import Finding, finish

ROOT = Path(__file__).resolve().parents[2]
CASES = 200  # under two minutes on 2 cores, the making of models and artifacts included


def raises(error: BaseException) -> Callable[[Path], str]:
    def run(folder: Path) -> str:
        raise error

    return run


def sleeps(folder: Path) -> str:
    time.sleep(60)
    return "right"


def computes(folder: Path) -> str:
    while True:
        pass


def opens_a_pipe(folder: Path) -> str:
    os.mkfifo(folder / "pipe")
    return (folder / "pipe").read_text()


def connects(folder: Path) -> str:
    socket.create_connection(("127.0.0.1", 9))
    return "right"


PLANTED: dict[str, tuple[str, Callable[[Path], str]]] = {
    "right": ("right", lambda folder: "right"),
    "error": ("error", lambda folder: "error"),
    "inside": ("right", lambda folder: "right" if (folder / "a").write_text("x") else ""),
    "wrong": ("wrong", raises(Finding("other logits"))),
    "an exception": ("traceback", raises(KeyError("x"))),
    "memory": ("memory", lambda folder: str(len(bytearray(3 << 30)))),
    "memory in other words": ("memory", raises(RuntimeError("DefaultCPUAllocator: can't allocate memory"))),
    "a signal": ("crash", lambda folder: str(ctypes.string_at(0))),
    "an exit": ("crash", lambda folder: os._exit(7)),
    "a loop": ("hang", computes),
    "sleep": ("hang", sleeps),
    "a pipe": ("hang", opens_a_pipe),
    "a file elsewhere": ("outside", lambda folder: "right" if (folder / "../b").write_text("x") else ""),
    "a link elsewhere": ("outside", lambda folder: os.symlink("/", folder / "../c") or "right"),
    "left over": ("outside", lambda folder: "right" if (folder / "tmp/x").write_text("x") else ""),
    "a program": ("outside", lambda folder: str(subprocess.run(["true"], check=True))),
    "a connection": ("outside", connects),
}


@pytest.mark.slow
@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_what_must_not_happen_is_seen(planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WALL_SECONDS", 4)
    monkeypatch.setattr(limits, "CPU_SECONDS", 2)
    expected, run = PLANTED[planted]
    verdict = finish(run, tmp_path / "case")
    assert verdict.outcome == expected, verdict


@pytest.mark.parametrize(
    "message", ["", "two\nlines", "x" * 4000, "this needs more: DefaultCPUAllocator: can't allocate memory"]
)
def test_an_error_that_is_no_line_is_a_finding(message: str) -> None:
    with pytest.raises(Finding):
        in_words(message)


DENSE = PackedWeight(
    LayerLayout((3, 4), (Float16Layout(),)),
    {"values": torch.tensor([[1.0, 2, 3, 4], [1e4, 1e4, 1e4, 1e4], [torch.inf, 0, 0, 0]]).half()},
)
X = torch.tensor([[1.0, 1, 1, 1], [1e-3, 0, 0, 1e-3]])
Y = torch.tensor([[10.0, 4e4, torch.inf], [5e-3, 20, torch.inf]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("token", "row", "other"),
    [(0, 0, torch.nan), (0, 0, torch.inf), (1, 1, torch.nan), (0, 0, 10.5), (1, 0, 6e-3), (1, 1, 22.0)],
)
def test_a_product_that_is_wrong_is_seen(token: int, row: int, other: float, dtype: torch.dtype) -> None:
    """Beside a large row, a large token and one that is not finite; NaN is wrong, too."""
    same_product("layer", DENSE, X.to(dtype), Y.to(dtype))
    y = Y.clone()
    y[token, row] = other
    with pytest.raises(Finding, match=rf"layer computes .* at \({token}, {row}\)"):
        same_product("layer", DENSE, X.to(dtype), y.to(dtype))


def raised(run: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as found:
        run()
    return found.value


def test_whose_an_exception_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch raises is anybit's where anybit called it, and Transformers' where that did."""

    def fails(*_: object, **__: object) -> None:
        torch.ones(2).view(3)

    monkeypatch.setattr(anybit_files, "file_sha256", fails)
    ours = raised(lambda: anybit_files.check_sha256(Path(__file__), "x"))
    theirs = raised(lambda: Conv1D(2, 3)(torch.ones(5)))
    assert raised_by_anybit(ours) and not raised_by_anybit(theirs)
    nowhere = raised(fails)
    assert not raised_by_anybit(nowhere)


@pytest.mark.parametrize(
    ("wrote", "expected"),
    [
        ("Traceback (most recent call last)", "traceback of"),
        ("anybit: no such file\nand more", "without a sentence"),
        ("a remark of a library\nanybit: no such file", None),
    ],
)
def test_what_libraries_write_past_python_is_seen(
    wrote: str, expected: str | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        os.write(2, wrote.encode())
        raise SystemExit(2)

    monkeypatch.setattr(doors.cli, "main", main)
    if expected is None:
        assert doors.command("verify") == "error"
    else:
        with pytest.raises(Finding, match=expected):
            doors.command("verify")
    assert capfd.readouterr().err == ""


def test_what_steers_a_terminal_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors.cli, "main", lambda: print("layer \x1b[2J"))
    with pytest.raises(Finding, match="steers a terminal"):
        doors.command("inspect", "out")
    assert doors.command("generate", "out") == doors.command("inspect", "\x1b") == "right"


def test_a_refusal_is_an_entry() -> None:
    with refusals() as refused:
        raise InputError("no such thing: take another")
    assert refused == ["no such thing: take another"]


def test_mutations_hang_on_the_seed_alone(tmp_path: Path) -> None:
    data = {"a": [1, 2, {"b": "c"}], "d": 1.5}
    made = [mutate.damaged_json(Random(seed), data) for seed in (1, 1, 2, 3)]
    assert made[0] == made[1] and len(set(made)) == 3
    assert data == {"a": [1, 2, {"b": "c"}], "d": 1.5}
    raw = [mutate.damaged_bytes(Random(seed), bytes(100)) for seed in (1, 1, 2)]
    assert raw[0] == raw[1] != raw[2]


def test_hashes_made_anew_are_those_of_the_files(anybit_copy: Path) -> None:
    """What an attacker does, `verify` cannot tell: else damaged bytes would be refused for their hash alone."""
    from anybit.artifact.verify import verify

    shard = sorted(anybit_copy.glob("model-*.safetensors"))[0]
    tensors, metadata = mutate.read_shard(shard)
    header = json.dumps(mutate.header_of(tensors, metadata)).encode() + b" " * 8
    mutate.write_shard(shard, tensors, header)
    with pytest.raises(InputError, match=r"SHA-256|other shards"):
        verify(anybit_copy)
    mutate.rehash(anybit_copy)
    assert verify(anybit_copy)["hashes_checked"]


@pytest.mark.slow
@pytest.mark.e2e
def test_a_fixed_set_of_mutations_gives_errors_or_right_results() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--seed", "3", "--cases", str(CASES), "--workers", "2"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["bad"] == 0
    for kind in ("artifacts", "checkpoints", "ggufs", "native", "commands"):  # both ways are exercised
        assert found["cases"][kind].get("error", 0) > 2 and found["cases"][kind].get("right", 0) > 0, found
    assert found["cases"]["layouts"]["right"] > 5
