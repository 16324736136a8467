"""Runs of the method anybit that are killed: nothing published is lost, and the bytes are the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import anybit
from anybit.artifact import writer
from anybit.artifact.verify import verify
from anybit.artifact.writer import ArtifactWriter
from anybit.errors import InputError
from anybit.kernels import cpu
from anybit.loader import load
from tests import builders
from tests.builders import ANYBIT
from tests.probes import Killed

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"no native extension: {cpu.why_not()}")


def index_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "anybit.index.json").read_text())


@pytest.mark.e2e
def test_a_kill_at_any_moment_of_publishing_loses_nothing(
    anybit_artifact: Path,
    model_dir: Callable[[str], Path],
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """OUT holds the old artifact, the new one or nothing, and then a rerun finishes it: never a part of one."""
    publish, remaining = ArtifactWriter._publish, 0
    out, names = tmp_path / "out", ("_remove", "sync")

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal remaining
            remaining -= 1
            if remaining == 0:
                raise Killed
            return function(*arguments)

        return call

    def watched(self: ArtifactWriter) -> None:
        with monkeypatch.context() as patch:
            for name in names:
                patch.setattr(writer, name, counted(getattr(writer, name)))
            patch.setattr(Path, "rename", counted(Path.rename))
            publish(self)

    monkeypatch.setattr(ArtifactWriter, "_publish", watched)
    whole, moments = index_of(anybit_artifact), 0
    anybit.quantize(model_dir("llama"), out, builders.options("rtn"))
    again = {"calibration": str(text_file), "overwrite": True}
    for moment in range(1, 50):
        remaining = moment
        try:
            anybit.quantize(model_dir("llama"), out, ANYBIT, **again)
            break
        except Killed:
            moments += 1
        if out.exists():
            assert verify(out)
        else:
            with pytest.raises(InputError, match="not finished: repeat"):
                load(out)
        remaining = 0
        anybit.quantize(model_dir("llama"), out, ANYBIT, **again)
        assert index_of(out) == whole and verify(out) and not out.with_name("out.partial").exists()
        shutil.rmtree(out)
        anybit.quantize(model_dir("llama"), out, builders.options("rtn"))
    assert moments >= 5


def test_a_cut_that_another_run_drops_leaves_nothing(
    model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> Any:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(ArtifactWriter, "finish", killed)
        with pytest.raises(Killed):
            anybit.quantize(model_dir("llama"), tmp_path / "out", ANYBIT, calibration=str(text_file))
    anybit.quantize(model_dir("llama"), tmp_path / "out", builders.options("rtn"), overwrite=True)
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("at", ["write_shard", "write_split", "finish"])
def test_a_killed_run_resumes_and_ends_in_the_same_bytes(
    anybit_artifact: Path,
    model_dir: Callable[[str], Path],
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: str,
) -> None:
    calls, original = [], getattr(ArtifactWriter, at)

    def killed(self: ArtifactWriter, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 2 or at == "finish":
            raise Killed
        return original(self, *args, **kwargs)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(ArtifactWriter, at, killed)
        with pytest.raises(Killed):
            anybit.quantize(model_dir("llama"), out, ANYBIT, calibration=str(text_file))
    assert not out.exists()
    result = anybit.quantize(model_dir("llama"), out, ANYBIT, calibration=str(text_file))
    assert result.resumed_shards == (1 if at == "write_shard" else 3)
    files = {f.name: f.read_bytes() for f in anybit_artifact.iterdir()}
    assert {f.name: f.read_bytes() for f in out.iterdir()} == files
    assert not (tmp_path / "out.partial").exists()
