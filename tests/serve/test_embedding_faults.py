"""What is wrong with a request for embeddings is said, and harms nobody else."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anybit import Engine
from anybit.encoder import Encoder
from anybit.engine.engine import Floats, Tokens
from anybit.errors import InputError
from anybit.kernels import cpu
from anybit.serve.api.embeddings import embeddings
from anybit.serve.errors import Refused, refused
from anybit.serve.http.app import State
from anybit.serve.http.guard import Guard
from anybit.serve.served import ServedEncoder
from anybit.serve.settings import Settings
from tests.serve.conftest import Client, refusal, serving, until

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def server(encoder: Encoder) -> Iterator[tuple[Client, State]]:
    with serving(encoder) as made:
        yield made


@pytest.mark.parametrize(
    ("body", "status", "words", "param"),
    [
        ({}, 400, "input is expected to be a string, a list of strings", "input"),
        ({"input": None}, 400, "input is expected", "input"),
        ({"input": ""}, 400, "input is empty: give some text", "input"),
        ({"input": []}, 400, "input is empty", "input"),
        ({"input": ["a", ""]}, 400, "input[1] is empty", "input"),
        ({"input": [[5], []]}, 400, "input[1] is empty", "input"),
        ({"input": {}}, 400, "input is expected", "input"),
        ({"input": 5}, 400, "input is expected", "input"),
        ({"input": [1, "a"]}, 400, "input is expected", "input"),
        ({"input": [True]}, 400, "input is expected", "input"),
        ({"input": [1.5]}, 400, "input is expected", "input"),
        ({"input": [["a"]]}, 400, "input is expected", "input"),
        ({"input": [300]}, 400, "input: token ids run from 300 to 300, but the model's vocabulary has 300", "input"),
        ({"input": [[5], [-1]]}, 400, "input[1]: token ids run from -1", "input"),
        ({"input": [10**30]}, 400, "vocabulary has 300", "input"),
        ({"input": "a" * 63}, 400, "input has 65 tokens; the model takes up to 64: shorten it", "input"),
        ({"input": ["a", [5] * 65]}, 400, "input[1] has 65 tokens; the model takes up to 64", "input"),
        ({"input": "a" * 5000}, 400, "the text has 5000 bytes, which are more than the 64 tokens", "input"),
        ({"input": "\ud800"}, 400, "not valid UTF-8", "input"),
        ({"input": ["a"] * 2049}, 400, "input has 2049 texts, expected at most 2048", "input"),
        ({"input": "a", "dimensions": 49}, 400, "dimensions is 49, expected a whole number from 1 to 48", "dimensions"),
        ({"input": "a", "dimensions": 0}, 400, "dimensions is 0", "dimensions"),
        ({"input": "a", "dimensions": True}, 400, "dimensions is true", "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, 400, 'is "int8", expected "float" or "base64"', "encoding_format"),
        ({"input": "a", "encoding_format": 1}, 400, "encoding_format is 1", "encoding_format"),
        ({"input": "a", "model": "other"}, 404, "there is no model 'other' here", "model"),
        ({"input": "a", "model": "tiny@3"}, 400, "the model has one width, 4.00 bits, not 3", None),
        ({"input": "a", "bits": 3}, 400, "the model has one width, 4.00 bits, not 3", None),
        ({"input": "a", "bits": "lots"}, 400, 'bits is "lots"', "bits"),
        ({"input": "a", "truncate": True}, 400, "'truncate' is no parameter of this server", "truncate"),
        (b"{", 400, "the body is no JSON", None),
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_request_is_refused(
    client: Client, body: Any, status: int, words: str, param: str | None
) -> None:
    found = refusal(client.ask(PATH, body))
    assert found[0] == status and words in found[1], found
    if param is not None:
        assert found[2] == param


def test_a_text_without_end_is_refused_by_its_beginning(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing bounds the bytes of a token, such as WordPiece's."""
    served = ServedEncoder(encoder, Settings("tiny"))
    served._most_bytes = float("inf")
    with pytest.raises(
        InputError, match=r"1000000 characters, whose first 4096 are 4098 tokens; .* holds 64:"
    ):
        served.encode("a" * 1_000_000)
    monkeypatch.setattr("anybit.serve.served.BEGINNING", 1)
    assert len(served.encode("a" * 100)) == 102  # its beginning is no longer than twice the context


def test_as_many_as_allowed_are_embedded(client: Client) -> None:
    assert len(client.ok(PATH, {"input": ["a"] * 2048})["data"]) == 2048


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("input", "model", "bits", "dimensions", "encoding_format", "user")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_any_body_is_a_request_or_an_error_in_words(state: State, body: dict[str, Any]) -> None:
    try:
        wanted = embeddings(state.served, {"input": "a", **body}, "")
    except (InputError, Refused) as error:
        assert str(error) and 400 <= refused(error).status < 500
    else:
        assert wanted.texts and all(1 <= len(text) <= 64 for text in wanted.texts)


def test_each_kind_of_model_names_the_other_kinds_addresses(client: Client) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        status, said, _ = refusal(client.ask(path, {"prompt": "a"}))
        assert (
            status == 400
            and said == "tiny is an encoder, which embeds texts and writes none: use /v1/embeddings"
        )
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    assert "is an encoder" in refusal(client.ask("/tokenize", chat))[1]


@pytest.mark.native
@pytest.mark.skipif(not cpu.available(), reason="the native extension is not built")
def test_a_language_model_says_that_it_has_no_embeddings(other_engine: Engine) -> None:
    with serving(other_engine) as (client, _):
        status, said, _ = refusal(client.ask(PATH, {"input": "a"}))
        assert status == 400 and said.startswith("tiny is a language model, which has no embeddings")


# ---- faults while it serves


def slowly(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    embed = Encoder.embed

    def slow(self: Encoder, texts: Sequence[Tokens]) -> Floats:
        time.sleep(seconds)
        return embed(self, texts)

    monkeypatch.setattr(Encoder, "embed", slow)


def test_a_client_that_leaves_is_served_no_further(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch, 0.05)
    with serving(encoder, running=1) as (client, state):
        runner = state.served.runner
        body = json.dumps({"input": ["abc"] * 200}).encode()
        leaving = socket.create_connection(("127.0.0.1", client.port))
        leaving.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\n" % PATH.encode())
        leaving.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        until(lambda: runner.counters.batches >= 2)
        leaving.close()
        until(lambda: runner.waiting == 0 and runner.running == 0)
        assert runner.counters.batches < 100
        client.ok(PATH, {"input": "rain"})
        until(lambda: (PATH, 499) in state.metrics.answers)


def test_a_full_queue_says_when_to_come_again(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch, 0.1)
    with serving(encoder, running=1, waiting=1) as (client, state):
        runner = state.served.runner
        many = threading.Thread(target=client.ok, args=(PATH, {"input": ["abc"] * 20}))
        many.start()
        until(lambda: runner.running == 1 and runner.waiting > 0)
        status, _, headers = answer = client.ask(PATH, {"input": "a"})
        assert status == 429 and int(headers["retry-after"]) >= 1
        assert "1 requests wait already, and 1 may" in refusal(answer)[1]
        many.join()
        client.ok(PATH, {"input": "a"})


def test_large_requests_wait_up_to_a_bound(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch, 0.1)
    monkeypatch.setattr("anybit.serve.run.embedder.WAITING_BYTES", 5000)
    with serving(encoder, running=1) as (client, state):
        many = threading.Thread(target=client.ok, args=(PATH, {"input": ["abc"] * 20}))  # 4240 bytes
        many.start()
        until(lambda: state.served.runner.waiting > 0)
        status, _, headers = answer = client.ask(PATH, {"input": ["abc"] * 4})
        assert status == 429 and int(headers["retry-after"]) >= 1
        assert "more than the 5000 that may be taken" in refusal(answer)[1]
        client.ok(PATH, {"input": "abc"})
        many.join()
        client.ok(PATH, {"input": ["abc"] * 20})


def test_a_small_request_does_not_wait_for_the_whole_of_a_large_one(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(monkeypatch, 0.02)
    with serving(encoder, running=1) as (client, state):
        large = threading.Thread(target=client.ok, args=(PATH, {"input": ["abcdefgh"] * 60}))
        large.start()
        until(lambda: state.served.runner.counters.batches >= 2)
        client.ok(PATH, {"input": "a"})
        assert state.served.runner.waiting > 0
        large.join()


def test_what_fails_ends_its_own_request_alone(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    embed, begin = Encoder.embed, threading.Event()

    def faulty(self: Encoder, texts: Sequence[Tokens]) -> Floats:
        begin.wait(10)
        if any(99 in text for text in texts):
            raise RuntimeError("no such thing")
        made = embed(self, texts)
        made[[98 in text for text in texts]] = np.nan
        return made

    monkeypatch.setattr(Encoder, "embed", faulty)
    with serving(encoder) as (client, state):
        answers: dict[int, Any] = {}

        def ask(token: int) -> None:
            answers[token] = client.ask(PATH, {"input": [[5, 6], [5, token]]})

        threads = [threading.Thread(target=ask, args=(token,)) for token in (97, 98, 99, 96)]
        for i, thread in enumerate(threads):  # the first is under way while the others wait for one batch
            thread.start()
            until(lambda at=i: (state.served.runner.running, state.served.runner.waiting) == (2, 2 * at))
        begin.set()
        for thread in threads:
            thread.join()
        assert answers[96][0] == answers[97][0] == 200
        status, said, _ = refusal(answers[98])
        assert status == 500 and "an embedding holds NaN or Inf" in said
        status, said, _ = refusal(answers[99])
        assert status == 500 and "RuntimeError" in said
        assert client.ok("/health")["status"] == "ok"


def test_a_defect_of_the_thread_is_told_to_all(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anybit.serve.run.embedder.Embedder._count", lambda *_: 1 / 0)
    with serving(encoder, running=1) as (client, state):
        status, said, _ = refusal(client.ask(PATH, {"input": ["a", "b"]}))
        assert status == 500 and "RuntimeError" in said
        until(lambda: state.served.runner.broken is not None)
        assert "ZeroDivisionError" in refusal(client.ask(PATH, {"input": "a"}))[1]
        code, health, _ = client.ask("/health")
        assert (code, health["status"]) == (503, "broken")


@pytest.mark.parametrize(("patience", "status"), [(30.0, 200), (0.1, 503)])
def test_the_end_of_the_server_waits_for_what_it_has_and_cuts_what_is_late(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch, patience: float, status: int
) -> None:
    slowly(monkeypatch, 0.05)
    with serving(encoder, running=1) as (client, state):
        runner, answers = state.served.runner, []
        thread = threading.Thread(target=lambda: answers.append(client.ask(PATH, {"input": ["abc"] * 20})))
        thread.start()
        until(lambda: runner.counters.batches >= 1)
        runner.drain(patience)
        assert refusal(client.ask(PATH, {"input": "a"}))[:2] == (503, "the server is stopping")
        assert client.ask("/health")[1]["status"] == "stopping"
        thread.join()
        assert answers[0][0] == status
        if status == 503:
            assert refusal(answers[0])[1] == "the server has stopped"


def test_health_says_that_a_batch_is_stuck(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    embed, go_on = Encoder.embed, threading.Event()

    def held(self: Encoder, texts: Sequence[Tokens]) -> Floats:
        assert go_on.wait(60)
        return embed(self, texts)

    monkeypatch.setattr("anybit.serve.run.worker.STUCK", 0.05)
    monkeypatch.setattr(Encoder, "embed", held)
    with serving(encoder) as (client, _):
        thread = threading.Thread(target=client.ok, args=(PATH, {"input": "a"}))
        thread.start()
        until(lambda: client.ask("/health")[1]["status"] == "stuck")
        go_on.set()
        thread.join()
        # The answer is sent before the batch has ended.
        until(lambda: client.ask("/health")[1]["status"] == "ok")


def test_keys_and_bodies_have_limits(encoder: Encoder) -> None:
    with serving(encoder, Guard(keys=("secret",)), most_bytes=1000) as (client, _):
        assert refusal(client.ask(PATH, {"input": "a"}))[0] == 401
        client.key = "secret"
        assert refusal(client.ask(PATH, {"input": "a" * 1000}))[0] == 413
        client.ok(PATH, {"input": "a"})
    with serving(None) as (client, _):
        assert refusal(client.ask(PATH, {"input": "a"}))[0] == 503
