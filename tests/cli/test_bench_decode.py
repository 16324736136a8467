"""`anybit bench decode` as a command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anybit.bench import contenders, decode
from tests.bench.decoding import Json, gguf, little, mistralrs, stand_in
from tests.cli.commands import Run, refused

pytestmark = pytest.mark.native


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    little(monkeypatch)


@pytest.fixture
def llama(tmp_path: Path) -> Json:
    return stand_in(tmp_path)


@pytest.fixture
def bench(run: Run) -> Callable[..., Any]:
    few = ("--rounds", "1", "--bits", "4", "--depths", "8", "--prompts", "9", "--threads", "1")
    return lambda *given: run("bench", "decode", *few, *given)


def test_the_command_says_what_it_found(bench: Run, tmp_path: Path) -> None:
    out, picture = tmp_path / "decode.json", tmp_path / "decode.svg"
    ran = bench("random:tiny", "--only", "anybit", "-o", out, "--plot", picture, "--targets")
    assert ran.code == 0, ran.err
    assert "anybit 4.00 int8" in ran.out and "not measured" in ran.out and "of limit" in ran.out
    assert json.loads(out.read_text())["cells"]
    assert "8 tokens before" in picture.read_text()


@pytest.mark.parametrize(("met", "code"), [(True, 0), (None, 0), (False, 1)])
def test_a_target_that_is_missed_is_an_exit_code(
    bench: Run, monkeypatch: pytest.MonkeyPatch, met: bool | None, code: int
) -> None:
    target = {"row": 1, "target": "speed", "must": 0.75, "measured": 0.5, "bound": 1.0, "met": met}
    figures = {"bench": "decode", "cells": [], "targets": [target]}
    monkeypatch.setattr(decode, "decode", lambda *_: figures)
    assert bench("random:tiny", "--targets").code == code
    assert ("MISSED" in bench("random:tiny", "--targets").out) is (code == 1)
    assert bench("random:tiny").code == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("random:huge",), ("random:huge", "Qwen3-0.6B")),
        (("random:tiny", "--bits", "9"), ("--bits 9", "1 to 8")),
        (("random:tiny", "--bits", "x"), ("--bits 'x'",)),
        (("random:tiny", "--depths", "0"), ("--depths", "from 1 up")),
        (("random:tiny", "--depths", "500"), ("reaches 512", "--depths")),
        (("random:tiny", "--kv-bits", "3"), ("--kv-bits 3", "16, 8, 4")),
        (("random:tiny", "--tokens", "8"), ("--tokens 8", "32 or more")),
        (("random:tiny", "--only", "vllm"), ("'vllm'", "Transformers")),
        (("random:tiny", "--llama-bench", "x"), ("--llama-bench", "--gguf")),
        (("random:tiny", "--gguf", "x.gguf"), ("--llama-bench", "--gguf", "--mistralrs")),
        (("random:tiny", "--mistralrs", "x"), ("--mistralrs", "--gguf")),
        (("random:tiny", "--mistralrs", "no/x", "--gguf", "{gguf}"), ("no/x", "does not start")),
        (("random:tiny", "--mistralrs", "{python}", "--gguf", "{gguf}"), ("--mistralrs", "No module named")),
        (("random:tiny", "--llama-bench", "x", "--gguf", "{gguf}"), ("--llama-bench x",)),
        (("random:tiny", "--llama-bench", "{program}", "--gguf", "{other}"), ("other.gguf", "width 128")),
        (("random:tiny", "--llama-bench", "{program}", "--gguf", "no.gguf"), ("no.gguf",)),
        (("random:tiny", "--plot", "x.bmp"), ("x.bmp", ".png")),
        (("random:tiny", "-o", "no/such/x.json"), ("cannot be written",)),
        (("random:tiny", "-o", "{gguf}"), ("tiny-Q4_0.gguf is no file",)),
        (("no/model",), ("no/model",)),
    ],
)
def test_what_cannot_be_timed_is_refused_before_any_work(
    bench: Run,
    llama: Json,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    monkeypatch.delattr(contenders.Source, "open")
    there = {"gguf": llama["ggufs"][0], "program": llama["llama_bench"]}
    there["other"] = gguf(tmp_path / "other.gguf", hidden=128)
    there["python"] = mistralrs(tmp_path)
    (tmp_path / "package" / "mistralrs.py").unlink()
    refused(bench(*(text.format(**there) for text in given)), *words)
