"""The examples of docs/serve.md, as they stand there."""

from __future__ import annotations

import configparser
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from anybit import Engine
from anybit.encoder import Encoder
from anybit.kernels import cpu
from anybit.serve.api import openai as limits
from anybit.serve.api.embeddings import MOST_INPUTS
from anybit.serve.chat.constraint import DEEPEST, LONGEST
from anybit.serve.chat.conversation import MOST_TOOLS
from anybit.serve.chat.tools import MOST_CALLS
from anybit.serve.http.app import PARSERS
from anybit.serve.http.connection import HEADER_SECONDS, UNREAD_SECONDS
from anybit.serve.run.embedder import BATCH_TOKENS, WAITING_BYTES
from anybit.serve.settings import Settings
from tests.serve.conftest import serving
from tests.serve.test_tools import tokenizer_of

PAGE = (Path(__file__).parents[2] / "docs/serve.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.S)


COMMANDS = [f"curl {part.strip()}" for block in blocks("sh") for part in block.split("curl")[1:]]


def answered(command: str, here: str) -> Any:
    asked = f"{command.replace('localhost:8000', here)} -sS"
    ran = subprocess.run(["sh", "-c", asked], capture_output=True, check=False)
    assert ran.returncode == 0
    return json.loads(ran.stdout)


@pytest.mark.e2e
@pytest.mark.native
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.skipif(not cpu.available(), reason="the native extension is not built")
def test_every_example_runs(
    other_engine: Engine, encoder: Encoder, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for the one with tools, of which this model's template has none."""
    with serving(other_engine, name="out") as (client, _), serving(encoder, name="out") as (embedding, _):
        here = f"localhost:{client.port}"
        assert len(COMMANDS) == 11
        for command in COMMANDS:
            if '"tools"' in command:
                continue
            if "/v1/embeddings" in command:
                found = answered(command, f"localhost:{embedding.port}")
                assert len(found["data"]) == 2, found
                continue
            found = answered(command, here)
            if "/v1/messages" in command:
                assert found["stop_reason"] in ("end_turn", "max_tokens"), found
            elif "/v1/responses" in command:
                assert found["status"] in ("completed", "incomplete"), found
            else:
                assert found["choices"][0]["finish_reason"] in ("stop", "length"), found
        names: dict[str, Any] = {}
        for python in blocks("python"):
            exec(compile(python.replace("localhost:8000", here), "docs/serve.md", "exec"), names)
            assert capsys.readouterr().out


@pytest.mark.e2e
@pytest.mark.native
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.skipif(not cpu.available(), reason="the native extension is not built")
def test_the_example_with_tools_runs(other_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_engine, "tokenizer", tokenizer_of("hermes", tokens=True))
    with serving(other_engine, name="out") as (client, _):
        (command,) = (command for command in COMMANDS if '"tools"' in command)
        (choice,) = answered(command, f"localhost:{client.port}")["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls" and call["function"]["name"] == "weather"
        assert [*json.loads(call["function"]["arguments"])] == ["city"]


def test_the_table_of_limits_is_true() -> None:
    settings = Settings("x")
    for said in (
        f"`--max-running` {settings.running}, `--max-waiting` {settings.waiting} |",
        f"| requests at a time | {settings.most_requests} |",
        f"| body | {settings.most_bytes >> 20} MiB, within 30 seconds |",
        f"| texts of a request | {limits.MOST_TEXTS}:",
        f"| inputs of a request for embeddings | {MOST_INPUTS}, each at most the context |",
        f"| requests for embeddings that wait | {settings.waiting} (`--max-waiting`), whose tokens and embeddings take "
        f"up to {WAITING_BYTES >> 20} MiB;",
        f"batches of up to {BATCH_TOKENS} tokens",
        f"| stop strings | {limits.MOST_STOPS} of {limits.LONGEST_STOP} characters |",
        f"| likely tokens beside each | {limits.MOST_LOGPROBS} |",
        f"each token with those likely beside it | {limits.MOST_REPORTED} |",
        f"| 2^{math.log2(limits.MOST_LOGITS):.0f} divided by the vocabulary, in tokens |",
        f"| headers of a request | {HEADER_SECONDS:.0f} seconds |",
        f"| a client that reads nothing of its answer | {UNREAD_SECONDS} seconds",
        f"| tools | {MOST_TOOLS},",
        f"| calls of an answer | {MOST_CALLS} |",
        f"| form | {LONGEST >> 10} KiB, {DEEPEST} levels,",
    ):
        assert said in PAGE
    assert PARSERS == 4
    assert "Four threads render templates" in PAGE and "at most three of them" in PAGE


def test_the_unit_parses() -> None:
    (unit,) = blocks("ini")
    parsed = configparser.ConfigParser()
    parsed.read_string(unit)
    assert "anybit serve" in parsed["Service"]["ExecStart"]
    patience = Settings("x").patience
    assert int(parsed["Service"]["TimeoutStopSec"]) > patience
