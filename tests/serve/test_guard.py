"""Who may ask a server: keys, names of the server, pages elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from anybit import Engine
from anybit.cli.main import app
from anybit.errors import InputError
from anybit.kernels import cpu
from anybit.serve.http.guard import Guard
from tests.serve.conftest import Client, refusal, serving

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu.available(), reason="the native extension is not built"),
]
COMPLETIONS = "/v1/completions"
SHORT = {"prompt": "abc", "max_tokens": 3, "temperature": 0}


def test_keys(other_engine: Engine) -> None:
    with serving(other_engine, Guard(keys=("first", "sec,ond"))) as (client, state):
        answer = client.ask(COMPLETIONS, SHORT)
        assert refusal(answer)[0] == 401 and answer[2]["www-authenticate"] == "Bearer"
        for key in ("", "firs", "first2", "é"):
            headers = {"Authorization": f"Bearer {key}".encode().decode("latin-1")}
            assert client.ask("/v1/models", headers=headers)[0] == 401
        assert client.ask("/v1/models", headers={"Authorization": "Basic first"})[0] == 401
        assert client.ask("/metrics")[0] == 401
        for path in ("/", "/health", "/page.js"):
            assert client.ask(path)[0] == 200
        for key in ("first", "sec,ond"):
            Client(client.port, key).ok(COMPLETIONS, SHORT)
        assert state.served is not None


@pytest.fixture
def keys_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The keys of a server that `anybit serve` would start, or its error."""

    def call(variable: str | None, *options: str) -> Any:
        found: list[Any] = []
        monkeypatch.setattr(
            "anybit.serve.server.run", lambda load, settings, say: found.append(settings.keys)
        )
        environment = {"ANYBIT_API_KEY": variable}
        made = CliRunner().invoke(app, ["serve", "no/model", *options], env=environment)
        return found[0] if found else made.exception

    return call


@pytest.mark.parametrize(
    ("variable", "options", "keys"),
    [
        (None, [], ()),
        ("first", [], ("first",)),
        ("first  second\n", [], ("first", "second")),
        ("a,b", [], ("a,b",)),
        ("first", ["--api-key", "other"], ("other",)),
        (" ", ["--api-key", "one", "--api-key", "two"], ("one", "two")),
    ],
    ids=str,
)
def test_keys_of_the_command(keys_of: Any, variable: str | None, options: list[str], keys: Any) -> None:
    assert keys_of(variable, *options) == keys


@pytest.mark.parametrize(
    ("variable", "options", "words"),
    [
        ("", [], "ANYBIT_API_KEY is set and holds no key"),
        (" \n", [], "ANYBIT_API_KEY is set and holds no key"),
        ("schlüssel", [], "API key 1 of 1 is empty or has other characters"),
        (None, ["--api-key", ""], "API key 1 of 1 is empty"),
        (None, ["--api-key", "fine", "--api-key", "sec ond"], "API key 2 of 2 is empty or has other"),
        (None, ["--api-key", "a\tb"], "API key 1 of 1"),
    ],
    ids=str,
)
def test_a_key_that_no_request_can_send_is_refused(
    keys_of: Any, variable: str | None, options: list[str], words: str
) -> None:
    error = keys_of(variable, *options)
    assert isinstance(error, InputError) and words in str(error)
    assert "ond" not in str(error) and "schl" not in str(error)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost:1"}, 200),
        ({"Host": "127.0.0.1"}, 200),
        ({"Host": "[::1]:80"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": "[evil"}, 403),
        ({"Host": "127.0.0.1@evil.example"}, 403),
        ({"Host": "here.example"}, 200),
        ({"Host": "localhost:1", "Origin": "http://localhost:1"}, 200),
        ({"Host": "localhost:1", "Origin": "http://localhost:2"}, 403),
        ({"Host": "localhost:1", "Origin": "null"}, 403),
        ({"Host": "localhost:1", "Origin": "https://app.example"}, 200),
        ({"Host": "localhost:1", "Origin": "https://evil.example"}, 403),
    ],
    ids=str,
)
def test_hosts_and_origins(headers: dict[str, str], status: int, guarded: Client) -> None:
    found, _, answered = guarded.ask("/v1/models", headers=headers)
    assert found == status
    allowed = answered.get("access-control-allow-origin")
    assert allowed == ("https://app.example" if headers.get("Origin") == "https://app.example" else None)


@pytest.fixture(scope="module")
def guarded(other_engine: Engine) -> Iterator[Client]:
    with serving(other_engine, Guard(hosts=("here.example",), origins=("https://app.example",))) as (
        client,
        _,
    ):
        yield client


def test_a_browser_asks_first(guarded: Client, client: Client) -> None:
    asks = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization"}  # fmt: skip
    status, _, headers = guarded.ask(COMPLETIONS, headers=asks, method="OPTIONS")
    assert status == 200 and headers["access-control-allow-origin"] == "https://app.example"
    status, _, headers = client.ask(COMPLETIONS, headers=asks, method="OPTIONS")
    assert status == 403 and "access-control-allow-origin" not in headers
