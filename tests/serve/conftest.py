"""A server in a thread of the tests, with a tiny model, and a client that checks nothing by itself."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from transformers import BertConfig

import anybit
from anybit import Engine
from anybit.encoder import Encoder
from anybit.serve.http.app import State, app
from anybit.serve.http.connection import Connection
from anybit.serve.http.guard import Guard
from anybit.serve.run.runner import Limits
from anybit.serve.served import Served, ServedEncoder
from anybit.serve.server import deliver_to
from anybit.serve.settings import Settings
from tests import builders

PATIENCE = 60
SIZES = {  # of an encoder
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


class Client:
    """Asks a server."""

    def __init__(self, port: int, key: str | None = None) -> None:
        self.port, self.key = port, key

    def open(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        connection.request(method or ("GET" if body is None else "POST"), path, data, key | (headers or {}))
        return connection, connection.getresponse()

    def ask(self, path: str, body: Any = None, **how: Any) -> tuple[int, Any, dict[str, str]]:
        """Status, body and headers of an answer; the body is JSON where it says so."""
        connection, response = self.open(path, body, **how)
        data = response.read()
        connection.close()
        headers = {name.lower(): value for name, value in response.getheaders()}
        found = json.loads(data) if headers.get("content-type") == "application/json" else data.decode()
        return response.status, found, headers

    def ok(self, path: str, body: Any = None, **how: Any) -> Any:
        status, found, _ = self.ask(path, body, **how)
        assert status == 200, found
        return found

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream, parsed; the last one, [DONE], is checked and left out."""
        connection, response = self.open(path, {**body, "stream": True})
        assert response.status == 200 and response.getheader("content-type", "").startswith(
            "text/event-stream"
        )
        events = response.read().decode().split("\n\n")
        connection.close()
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def refusal(answer: tuple[int, Any, dict[str, str]]) -> tuple[int, str, str | None]:
    """Status, message and parameter of an error, whose form is OpenAI's."""
    status, found, _ = answer
    error = found["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"].endswith("_error")
    return status, error["message"], error["param"]


@contextmanager
def serving(
    engine: Engine | Encoder | None, guard: Guard | None = None, **limits: Any
) -> Iterator[tuple[Client, State]]:
    """A server with a model, or with one that never comes."""
    state = State(guard or Guard(), limits.pop("most_bytes", 1 << 20), limits.pop("most_requests", 300))
    config = uvicorn.Config(
        app(state), port=0, log_level="error", timeout_graceful_shutdown=1, http=Connection
    )
    server = uvicorn.Server(config)
    loop = (config.get_loop_factory() or asyncio.new_event_loop)()
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve()), daemon=True)
    thread.start()
    until(lambda: server.started)
    if engine is not None:
        state.served = served_of(engine, deliver_to(loop), **limits)
        state.served.runner.start()
    yield Client(server.servers[0].sockets[0].getsockname()[1]), state
    if state.served is not None:
        runner = state.served.runner
        until(lambda: not runner.running and not runner.waiting)
        runner.close(0)
        if isinstance(state.served, Served):
            blocks = state.served.runner.scheduler.blocks
            assert blocks.available == blocks.pages
    server.should_exit = True
    thread.join(PATIENCE)
    loop.close()
    assert state.requests == 0 and not any(state.of_keys.values())


def served_of(
    model: Engine | Encoder, deliver: Any, *, name: str = "tiny", **limits: Any
) -> Served | ServedEncoder:
    if isinstance(model, Encoder):
        return ServedEncoder(model, Settings(name, **limits))
    return Served(model, name, Limits(**{"pages": 64, **limits}), deliver)


@contextmanager
def slow_steps(monkeypatch: pytest.MonkeyPatch, seconds: float) -> Iterator[None]:
    """Let each step of every engine take so much longer."""
    step = Engine.step

    def slow(self: Engine, *rows: Any) -> Any:
        time.sleep(seconds)
        return step(self, *rows)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", slow)
        yield


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(scope="session")
def engine(anybit_artifact: Path) -> Engine:
    return Engine(anybit_artifact, threads=1)


@pytest.fixture(scope="session")
def other_engine(anybit_artifact: Path) -> Engine:
    """For servers beside `server`, whose pages are its engine's."""
    return Engine(anybit_artifact, threads=1)


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[tuple[Client, State]]:
    with serving(engine) as made:
        yield made


@pytest.fixture
def client(server: tuple[Client, State]) -> Client:
    return server[0]


@pytest.fixture
def state(server: tuple[Client, State]) -> State:
    return server[1]


@pytest.fixture(scope="session")
def encoder_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of 64 positions, whose files ask for the mean of the states."""
    folder = tmp_path_factory.mktemp("encoder")
    builders.save_encoder(BertConfig(**SIZES), folder / "bert")
    modes = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    (folder / "bert/1_Pooling").mkdir()
    (folder / "bert/1_Pooling/config.json").write_text(json.dumps(modes))
    anybit.quantize(folder / "bert", folder / "out", anybit.RTN(bits=4, group_size=16))
    return folder / "out"


@pytest.fixture(scope="session")
def encoder(encoder_artifact: Path) -> Encoder:
    return Encoder(str(encoder_artifact))
