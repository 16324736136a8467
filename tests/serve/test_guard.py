"""Who may ask a server: keys, names of the server, pages elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from anybit import Engine
from anybit.kernels import cpu
from anybit.serve.guard import Guard
from tests.serve.conftest import Client, refusal, serving

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu.available(), reason="the native extension is not built"),
]
COMPLETIONS = "/v1/completions"
SHORT = {"prompt": "abc", "max_tokens": 3, "temperature": 0}


def test_keys(other_engine: Engine) -> None:
    with serving(other_engine, Guard(keys=("first", "sec ond"))) as (client, state):
        answer = client.ask(COMPLETIONS, SHORT)
        assert refusal(answer)[0] == 401 and answer[2]["www-authenticate"] == "Bearer"
        for key in ("", "firs", "first2", "é"):
            headers = {"Authorization": f"Bearer {key}".encode().decode("latin-1")}
            assert client.ask("/v1/models", headers=headers)[0] == 401
        assert client.ask("/v1/models", headers={"Authorization": "Basic first"})[0] == 401
        assert client.ask("/metrics")[0] == 401
        for path in ("/", "/health", "/page.js"):
            assert client.ask(path)[0] == 200
        for key in ("first", "sec ond"):
            Client(client.port, key).ok(COMPLETIONS, SHORT)
        assert state.served is not None


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
