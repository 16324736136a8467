"""`anybit serve` as a process of its own, and the clients that people use."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from typer.testing import CliRunner

from anybit import Engine
from anybit.cli.main import app
from anybit.errors import InputError
from anybit.kernels import cpu
from anybit.serve.server import run
from anybit.serve.settings import Settings
from tests.serve.conftest import PATIENCE, Client, serving, until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.native,
    pytest.mark.skipif(not cpu.available(), reason="the native extension is not built"),
]


def command(model: Path | str, *options: str) -> list[str]:
    return [sys.executable, "-m", "anybit", "serve", str(model), "--port", "0", "--threads", "1", *options]


@contextlib.contextmanager
def process(
    model: Path, *options: str, key: str | None = None, said: list[str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    """A server that has loaded its model; `said` gets the lines that it printed, the greeting last."""
    env = {**os.environ, **({"ANYBIT_API_KEY": key} if key else {})}
    running = subprocess.Popen(command(model, *options), stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert running.stderr is not None
        for line in running.stderr:
            if said is not None:
                said.append(line)
            if found := re.search(r"at http://127\.0\.0\.1:(\d+), widths", line):
                break
        else:
            raise AssertionError(f"it ended with {running.wait()}")
        yield running, Client(int(found[1]), key)
    finally:
        running.kill()
        running.wait()
        running.stderr.close()  # type: ignore[union-attr]


def test_the_openai_client_and_an_end_that_waits(anybit_artifact: Path) -> None:
    with process(anybit_artifact, "--name", "tiny", key="secret") as (running, client):
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"http://127.0.0.1:{client.port}/v1", api_key="no").models.list()
        api = openai.OpenAI(base_url=f"http://127.0.0.1:{client.port}/v1", api_key="secret", max_retries=0)
        assert [model.id for model in api.models.list()] == ["tiny"]
        hello: Any = [{"role": "user", "content": "hello"}]
        chat = api.chat.completions.create(
            model="tiny@3",
            messages=hello,
            max_tokens=8,
            seed=1,
            logprobs=True,
            extra_body={"ignore_eos": True},
        )
        assert chat.choices[0].finish_reason == "length" and chat.usage.completion_tokens == 8  # type: ignore[union-attr]
        assert len(chat.choices[0].logprobs.content) == 8  # type: ignore[union-attr, arg-type]
        assert chat.timings["bits"]["max"] <= 3.05  # type: ignore[attr-defined]
        pieces = list(
            api.chat.completions.create(
                model="tiny@3", messages=hello, max_tokens=8, seed=1, stream=True,
                stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
            )
        )  # fmt: skip
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        assert text == chat.choices[0].message.content
        assert pieces[-1].usage.completion_tokens == 8  # type: ignore[union-attr]
        made = api.completions.create(model="tiny", prompt=["a", "b"], max_tokens=4, temperature=0)
        assert [choice.index for choice in made.choices] == [0, 1]
        with pytest.raises(openai.BadRequestError, match="temperature is -1"):
            api.completions.create(model="tiny", prompt="a", temperature=-1)
        with pytest.raises(openai.NotFoundError):
            api.completions.create(model="other", prompt="a")
        # The server is asked to end while a text is on its way: it comes whole, and the server ends well.
        stream = api.completions.create(
            model="tiny",
            prompt="a",
            max_tokens=120,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        first = next(iter(stream))
        running.send_signal(signal.SIGTERM)
        rest = list(stream)
        assert first.choices[0].finish_reason is None and rest[-1].choices[0].finish_reason == "length"
        assert running.wait(PATIENCE) == 0
        with pytest.raises(OSError):
            client.ask("/health")


def test_ctrl_c_ends_an_idle_server_at_once(anybit_artifact: Path) -> None:
    with process(anybit_artifact) as (running, _):
        begun = time.monotonic()
        running.send_signal(signal.SIGINT)
        assert running.wait(PATIENCE) == 0 and time.monotonic() - begun < 10


LOADS_FOR_EVER = """
import sys, torch
import anybit.cli.serve as serve
from anybit.cli.main import app

def load(*_):
    a = torch.ones(300, 300)
    while True:
        a @ a

serve._load = load
app(["serve", "model", "--port", sys.argv[1]])
"""


def test_a_server_that_still_loads_ends_well() -> None:
    """Its thread is within PyTorch then, which aborts a process that ends around it."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    running = subprocess.Popen(
        [sys.executable, "-c", LOADS_FOR_EVER, str(port)], stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: listens(port))
        running.send_signal(signal.SIGTERM)
        assert (running.communicate(timeout=PATIENCE)[1], running.returncode) == ("", 0)
    finally:
        running.kill()
        running.wait()


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kv-bits", "5"], "--kv-bits 5 is not one of 2, 3, 4, 8, 16"),
        (["--auto-bits", "99"], "less than or equal to 8"),
    ],
)
def test_options_are_checked_before_a_model_is_loaded(options: list[str], words: str) -> None:
    made = CliRunner().invoke(app, ["serve", "no/model", *options])
    said = " ".join(f"{made.exception} {made.output}".replace("│", " ").split())
    assert words in said and "no/model" not in said


def test_a_model_that_only_transformers_runs_is_served_and_the_command_says_so(
    model_dir: Callable[[str], Path],
) -> None:
    said: list[str] = []
    with process(model_dir("gpt2"), said=said) as (_, client):
        reply = client.ok("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True})
        assert reply["usage"]["completion_tokens"] == 4
    assert "runs inside Transformers, one text at a time" in "".join(said) and "gpt2" in "".join(said)


def test_the_openai_client_and_an_encoder(encoder_artifact: Path) -> None:
    said: list[str] = []
    with process(encoder_artifact, "--name", "tiny", key="secret", said=said) as (running, client):
        assert "the mean of the tokens' states (mean, by 1_Pooling/config.json)" in said[-1]
        assert "embeddings of 48 dimensions" in said[-1] and "one text at a time" not in "".join(said)
        api = openai.OpenAI(base_url=f"http://127.0.0.1:{client.port}/v1", api_key="secret", max_retries=0)
        texts = ["rain", "a cat sat down", "dogs ran far away"]
        as_bytes = api.embeddings.create(model="tiny", input=texts)  # the client asks for base64 by itself
        as_numbers = api.embeddings.create(model="tiny", input=texts, encoding_format="float")
        assert np.array_equal(
            [one.embedding for one in as_bytes.data], [one.embedding for one in as_numbers.data]
        )
        assert [one.index for one in as_bytes.data] == [0, 1, 2] and as_bytes.model == "tiny"
        assert as_bytes.usage.prompt_tokens == as_bytes.usage.total_tokens == sum(len(t) + 2 for t in texts)
        short = api.embeddings.create(model="tiny@4", input="rain", dimensions=3)
        assert len(short.data[0].embedding) == 3
        with pytest.raises(openai.BadRequestError, match="input has 102 tokens; the model takes up to 64"):
            api.embeddings.create(model="tiny", input="a" * 100)
        with pytest.raises(openai.BadRequestError, match="use /v1/embeddings"):
            api.completions.create(model="tiny", prompt="a")
        # A request that is on its way is answered before the server ends.
        answers: list[int] = []
        many = ["some words for a text"] * 1500
        thread = threading.Thread(
            target=lambda: answers.append(len(api.embeddings.create(model="tiny", input=many).data))
        )
        thread.start()
        until(lambda: client.ok("/health")["running"] > 0)
        running.send_signal(signal.SIGTERM)
        thread.join(PATIENCE)
        assert answers == [1500] and running.wait(PATIENCE) == 0


def test_a_server_that_cannot_begin_says_why(other_engine: Engine) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(InputError, match=r"nothing can listen at 127\.0\.0\.1:.* another --host or --port"),
    ):
        run(lambda: other_engine, Settings("tiny", port=taken.getsockname()[1]), print)
    with pytest.raises(InputError, match=r"may take 100 bytes, .* give them more \(--kv-memory\)"):
        run(lambda: other_engine, Settings("tiny", port=0, kv_bytes=100), print)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    result = CliRunner().invoke(app, ["serve", "no/model"])
    assert "anybit serve needs llguidance" in str(result.exception)
    assert "pip install 'anybit[serve]'" in str(result.exception)


def test_lm_eval_asks_for_log_probabilities(other_engine: Engine, anybit_artifact: Path) -> None:
    """Its `local-completions`, on the same texts as the engine itself."""
    pytest.importorskip("tenacity")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    with serving(other_engine) as (client, _):
        model = LocalCompletionsAPI(
            base_url=f"http://127.0.0.1:{client.port}/v1/completions", model="tiny",
            tokenizer=str(anybit_artifact), tokenizer_backend="huggingface", max_length=100, batch_size=2,
        )  # fmt: skip
        pairs = [("some text", " follows"), ("another", " one"), ("a third", " text")]
        asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
        found = model.loglikelihood(asked, disable_tqdm=True)
    for (context, continuation), (total, greedy) in zip(pairs, found):
        assert total == pytest.approx(log_likelihood(other_engine, context, continuation), abs=1e-3)
        ids, n = other_engine.encode(context + continuation), len(continuation)
        rows = other_engine.logits(ids)
        assert bool(greedy) == all(rows[i - 1].argmax() == ids[i] for i in range(len(ids) - n, len(ids)))


def log_likelihood(engine: Engine, context: str, continuation: str) -> float:
    """Of a continuation, by the engine's own logits; its tokenizer makes a token of every byte."""
    ids, n = engine.encode(context + continuation), len(continuation)
    rows = engine.logits(ids).astype(float)
    rows -= np.log(np.exp(rows).sum(1, keepdims=True))
    return float(sum(rows[i - 1, ids[i]] for i in range(len(ids) - n, len(ids))))


@pytest.mark.slow
def test_the_command_of_lm_eval(other_engine: Engine, anybit_artifact: Path, tmp_path: Path) -> None:
    """`lm-eval run --model local-completions`, as docs/serve.md has it, on a task of its own: the engine's choices."""
    pytest.importorskip("tenacity")
    pytest.importorskip("lm_eval")
    asked = [
        ("some text", [" follows", " is"], 0),
        ("another", [" one", " two", " x"], 1),
        ("a", ["b", "c"], 1),
    ]
    lines = [{"context": context, "choices": choices, "gold": gold} for context, choices, gold in asked]
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "tiny.yaml").write_text(
        f"""task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {tmp_path / "asked.jsonl"}}}}}
validation_split: validation
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
    )
    with serving(other_engine) as (client, _):
        server = f"base_url=http://127.0.0.1:{client.port}/v1/completions,model=tiny"
        tokenizer = f"tokenizer={anybit_artifact},tokenizer_backend=huggingface,max_length=100"
        command = ["run", "--model", "local-completions", "--model_args", f"{server},{tokenizer}", "--tasks", "tiny",
                   "--include_path", str(tmp_path), "--batch_size", "2", "--output_path", str(tmp_path / "out"),
                   "--log_samples"]  # fmt: skip
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
        subprocess.run([sys.executable, "-m", "lm_eval", *command], check=True, env={**os.environ, **offline})
    (samples,) = (tmp_path / "out").rglob("samples_tiny*.jsonl")
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(found) == len(asked)
    for said, (context, choices, _) in zip(sorted(found, key=lambda s: s["doc_id"]), asked, strict=True):
        wanted = [log_likelihood(other_engine, context, choice) for choice in choices]
        assert [float(one[0]) for one in said["filtered_resps"]] == pytest.approx(wanted, abs=1e-3)


@pytest.mark.slow
def test_two_hundred_clients_at_once(other_engine: Engine) -> None:
    """Some leave, some ask for nonsense; the others get what they would get alone."""
    asked = {"prompt": "abc", "max_tokens": 20, "ignore_eos": True, "temperature": 0}
    with serving(other_engine, running=16, waiting=300, pages=40) as (client, state):
        wanted = {}
        for at in (0, len(other_engine.widths) - 1):
            bits = other_engine.widths[at]
            wanted[bits] = client.ok("/v1/completions", {**asked, "bits": bits})["choices"][0]["text"]
        answers: list[str] = []

        def ask(i: int) -> None:
            if i % 10 == 7:
                answers.append(f"refused {client.ask('/v1/completions', {**asked, 'n': -i})[0]}")
                return
            bits = [*wanted][i % 2]
            body = {**asked, "bits": bits}
            if i % 10 == 3:
                connection, _ = client.open("/v1/completions", {**body, "stream": True, "max_tokens": 100})
                connection.close()
                answers.append("left")
            elif i % 3:
                events = client.events("/v1/completions", body)
                text = "".join(choice["text"] for event in events for choice in event["choices"])
                answers.append(f"streamed {text == wanted[bits]}")
            else:
                text = client.ok("/v1/completions", body)["choices"][0]["text"]
                answers.append(f"whole {text == wanted[bits]}")

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        found = Counter(answers)
        assert found["refused 400"] == found["left"] == 20
        assert found["streamed True"] + found["whole True"] == 160
        assert state.served is not None
        until(lambda: client.ok("/health")["running"] == 0)  # who left is served no further


def test_a_model_behind_a_link_is_named_as_it_was_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Settings] = []
    monkeypatch.setattr("anybit.serve.server.run", lambda load, settings, say: asked.append(settings))
    (tmp_path / "9f3c0d").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "9f3c0d")
    for given in (tmp_path / "out", f"{tmp_path}/other/../out/"):
        CliRunner().invoke(app, ["serve", str(given)])
    assert [settings.name for settings in asked] == ["out", "out"]
