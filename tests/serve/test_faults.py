"""What is wrong with a request is said, and harms nobody else."""

from __future__ import annotations

import errno
import http.client
import io
import json
import shutil
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anybit import Engine
from anybit.engine.engine import Batch
from anybit.errors import InputError
from anybit.kernels import cpu
from anybit.serve.api import openai, replies
from anybit.serve.errors import Refused, refused
from anybit.serve.fields import MOST_INSIDE, read_json
from anybit.serve.http import connection
from anybit.serve.http.app import PARSERS, State
from anybit.serve.http.guard import Guard
from anybit.serve.served import Named
from tests.serve.conftest import PATIENCE, Client, refusal, serving, slow_steps, until

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu.available(), reason="the native extension is not built"),
]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
LONG = {"prompt": "abc", "max_tokens": 100, "ignore_eos": True, "temperature": 0}


@pytest.mark.parametrize(
    ("path", "body", "status", "words", "param"),
    [
        (COMPLETIONS, b"{", 400, "the body is no JSON", None),
        (COMPLETIONS, b"", 400, "the body is no JSON", None),
        (COMPLETIONS, b"[1]", 400, "the body is a list of 1, expected a JSON object", None),
        (COMPLETIONS, b"\xff\xfe", 400, "the body is no JSON", None),
        (COMPLETIONS, b'{"a":' * 40_000, 400, "the body is no JSON", None),
        (COMPLETIONS, b'{"prompt":"a","seed":' + b"9" * 5000 + b"}", 400, "the body is no JSON", None),
        (COMPLETIONS, b'{"prompt":"a","temperature":NaN}', 400, "NaN is no number of JSON", None),
        (COMPLETIONS, b'{"prompt":"a","temperature":1e999}', 400, "1e999 is too large a number", None),
        (COMPLETIONS, b'{"prompt":"\\ud800"}', 400, "not valid UTF-8", None),
        (COMPLETIONS, {}, 400, "prompt is expected to be a string", "prompt"),
        (COMPLETIONS, {"prompt": ""}, 400, "the prompt is empty", None),
        (COMPLETIONS, {"prompt": []}, 400, "the prompt is empty", None),
        (COMPLETIONS, {"prompt": {}}, 400, "prompt is expected", "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, 400, "the prompt is empty", None),
        (COMPLETIONS, {"prompt": [1, "a"]}, 400, "prompt is expected", "prompt"),
        (COMPLETIONS, {"prompt": [999]}, 400, "vocabulary has", None),
        (COMPLETIONS, {"prompt": [-1]}, 400, "vocabulary has", None),
        (COMPLETIONS, {"prompt": ["a"] * 65}, 400, "prompt has 65 texts, expected at most 64", "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 33, "n": 2}, 400, "33 prompts by n = 2: at most 64 texts", "prompt"),
        (COMPLETIONS, {"prompt": "a" * 500}, 400, "the prompt has 500 tokens", None),
        (COMPLETIONS, {"prompt": "a" * 5000}, 400, "5000 bytes, which are more than the 128 tokens", None),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 5000}]}, 400, "more than the 128 tokens", None),
        (COMPLETIONS, {"prompt": "a" * 100, "max_tokens": 29}, 400, "129; the context holds 128", None),
        (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, 400, "max_tokens is -1, expected a whole", "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, 400, "max_tokens is 1.5", "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": True}, 400, "max_tokens is true", "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400, "expected 1 or more without echo", "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, 400, 'temperature is "hot"', "temperature"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, 400, "temperature is -1", "temperature"),
        (COMPLETIONS, {"prompt": "a", "top_p": 2}, 400, "top_p is 2", "top_p"),
        (COMPLETIONS, {"prompt": "a", "n": 0}, 400, "n is 0", "n"),
        (COMPLETIONS, {"prompt": "a", "stop": [""]}, 400, "stop is", "stop"),
        (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 10_000}, 400, "stop has 10000 strings", "stop"),
        (COMPLETIONS, {"prompt": "a", "stop": "x" * 1000}, 400, "strings of 1 to 256", "stop"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"a": 1}}, 400, "token ids as names", "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"9999": 1}}, 400, "logit_bias names token 9999", None),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": "x"}}, 400, "numbers from -100", "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, 400, "logprobs is 21", "logprobs"),
        (COMPLETIONS, {"prompt": "a", "min_tokens": 4}, 400, "min_tokens needs ignore_eos: true", "min_tokens"),
        (COMPLETIONS, {"prompt": "a", "frobnicate": 1}, 400, "is no parameter of this server", "frobnicate"),
        (COMPLETIONS, b'{"prompt":"a","\\ud800":1}', 400, "is no parameter of this server", "\\ud800"),
        (CHAT, b'{"messages":[{"role":"user","content":"a","\\ud800":1}]}', 400, "no parameter", "messages[0].\\ud800"),
        (COMPLETIONS, {"prompt": "a", "best_of": 3}, 400, "best_of is 3", "best_of"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, 400, 'suffix is "b"', "suffix"),
        (COMPLETIONS, {"prompt": "a", "stream": "yes"}, 400, 'stream is "yes"', "stream"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {}}, 400, "needs stream: true", "stream_options"),
        (COMPLETIONS, {"prompt": "a", "stream_options": 5, "stream": True}, 400, "expected an object", None),
        (COMPLETIONS, {"prompt": "a", "model": "gpt-5"}, 404, "there is no model 'gpt-5' here", "model"),
        (COMPLETIONS, {"prompt": "a", "model": "tiny@"}, 400, "model asks for '' bits", "model"),
        (COMPLETIONS, {"prompt": "a", "model": "tiny@x"}, 400, "model asks for 'x' bits", "model"),
        (COMPLETIONS, {"prompt": "a", "model": "tiny@nan"}, 400, "bits is NaN", "bits"),
        (COMPLETIONS, {"prompt": "a", "model": "tiny@3", "bits": 4}, 400, "give one of them", "bits"),
        (COMPLETIONS, {"prompt": "a", "bits": 10**400}, 400, "bits is 1000", "bits"),
        (COMPLETIONS, {"prompt": "a", "bits": 17}, 400, "the model has average widths from", None),
        (COMPLETIONS, {"prompt": "a", "bits": "lots"}, 400, 'bits is "lots"', "bits"),
        (COMPLETIONS, {"prompt": "a", "bits": 3, "latency_target_ms": 5}, 400, "chooses the width", None),
        (COMPLETIONS, {"prompt": "a", "latency_target_ms": 0}, 400, "latency_target_ms is 0", "latency_target_ms"),
        (CHAT, {"messages": []}, 400, "messages is expected", "messages"),
        (CHAT, {"messages": [5]}, 400, "expected an object", "messages[0]"),
        (CHAT, {"messages": [{"role": "cook", "content": ""}]}, 400, 'role is "cook"', "messages[0].role"),
        (CHAT, {"messages": [{"role": "user"}]}, 400, "content is null", "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "has only", None),
        (CHAT, {"messages": [{"role": "user", "content": "a", "x": 1}]}, 400, "no parameter", "messages[0].x"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "name": 5}]}, 400, "name is 5", "messages[0].name"),
        (CHAT, b'{"messages":[{"role":"user","content":"a","name":"\\ud800"}]}', 400, "not valid UTF-8", None),
        (CHAT, {**HELLO, "tools": [{}]}, 400, "function is null", "tools[0].function"),
        (CHAT, {**HELLO, "top_logprobs": 2}, 400, "needs logprobs: true", "top_logprobs"),
        (CHAT, {**HELLO, "max_tokens": 2, "max_completion_tokens": 3}, 400, "differ", "max_tokens"),
        (CHAT, {**HELLO, "response_format": {"type": "xml"}}, 400, 'type is "xml"', "response_format.type"),
        (CHAT, {**HELLO, "guided_json": "x"}, 400, "expected to be a schema", "guided_json"),
        (CHAT, {**HELLO, "guided_json": {"type": "thing"}}, 400, "cannot be enforced", "guided_json"),
        (CHAT, {**HELLO, "guided_json": {"not": {}}}, 400, "Unimplemented", "guided_json"),
        (CHAT, {**HELLO, "guided_json": {"$ref": "http://x/y"}}, 400, "cannot be enforced", "guided_json"),
        (CHAT, {**HELLO, "guided_json": {"a": "x" * 70_000}}, 400, "expected at most 65536", "guided_json"),
        (CHAT, {**HELLO, "guided_regex": "("}, 400, "unclosed group", "guided_regex"),
        (CHAT, {**HELLO, "guided_regex": "a(?!b)"}, 400, "look-around", "guided_regex"),
        (CHAT, {**HELLO, "guided_regex": "(a{1000}){1000}{1000}"}, 400, "too many expressions", None),
        (CHAT, {**HELLO, "guided_grammar": "start: x"}, 400, "unknown name", "guided_grammar"),
        (CHAT, {**HELLO, "guided_regex": "a", "guided_json": {}}, 400, "give one", None),
        (CHAT, {**HELLO, "structured_outputs": {"xgrammar": 1}}, 400, "no parameter", None),
        (CHAT, {**HELLO, "structured_outputs": {}}, 400, "names no form", "structured_outputs"),
        (CHAT, {**HELLO, "structured_outputs": {"choice": []}}, 400, "has 0 strings, expected 1", "choice"),
        (CHAT, {**HELLO, "guided_choice": []}, 400, "has 0 strings, expected 1", "guided_choice"),
        ("/tokenize", {"prompt": "a", "model": "gpt-5"}, 404, "there is no model 'gpt-5' here", "model"),
        ("/detokenize", {"tokens": [5], "model": "gpt-5"}, 404, "there is no model 'gpt-5' here", "model"),
        ("/tokenize", {}, 400, "give either prompt", "prompt"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens is expected", "tokens"),
        ("/detokenize", {"tokens": [5] * 129}, 400, "tokens has 129 ids, expected at most 128", "tokens"),
        ("/v1/embeddings", {"input": "a"}, 400, "is a language model, which has no embeddings", None),
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_request_is_refused(
    client: Client, path: str, body: Any, status: int, words: str, param: str | None
) -> None:
    found = refusal(client.ask(path, body))
    assert found[0] == status and words in found[1]
    if param is not None:
        assert found[2] == param


def test_a_schema_without_end_is_refused_or_cut(client: Client) -> None:
    deep: Any = {}
    for _ in range(40):
        deep = {"type": "object", "properties": {"a": deep}}
    assert "nested deeper" in refusal(client.ask(CHAT, {**HELLO, "guided_json": deep}))[1]
    itself = {"type": "array", "items": {"$ref": "#"}, "minItems": 1}
    made = client.ok(CHAT, {**HELLO, "guided_json": itself, "max_tokens": 30, "temperature": 0})
    assert made["choices"][0]["finish_reason"] in ("length", "stop")


@pytest.mark.parametrize(
    "form",
    [
        {"guided_regex": "(.*a){200}" * 20},
        {"guided_regex": "[ab]{0,100000}c"},
        {"guided_regex": "(x+x+)+y" * 200},
        {"guided_grammar": 'start: a\na: a a | "x" |'},
        {"guided_json": {"anyOf": [{"type": "string", "pattern": f"(a|b)*c{i}d*"} for i in range(1000)]}},
    ],
    ids=["regex", "counted", "nested", "ambiguous", "alternatives"],
)
def test_a_hostile_form_takes_little_time(client: Client, form: dict[str, Any]) -> None:
    """It is refused, or followed; others are served meanwhile."""
    begun = time.monotonic()
    status, found, _ = client.ask(CHAT, {**HELLO, **form, "max_tokens": 30, "temperature": 0})
    assert status == 200 or "error" in found
    assert client.ask(COMPLETIONS, LONG)[0] == 200
    assert time.monotonic() - begun < 20


@pytest.mark.slow
def test_a_template_without_end_and_one_that_fails(other_engine: Engine) -> None:
    with serving(other_engine) as (client, _):
        tokenizer = other_engine.tokenizer
        before = tokenizer.chat_template
        try:
            loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
            for template, words in ((loop, "it takes more than 2 s"), ("{{ raise_exception('no') }}", "no")):
                tokenizer.chat_template = template
                answers: list[Any] = []
                thread = threading.Thread(target=lambda got=answers: got.append(client.ask(CHAT, HELLO)))
                thread.start()
                assert client.ok(COMPLETIONS, LONG)["choices"][0]["finish_reason"] == "length"
                thread.join()
                status, message, _ = refusal(answers[0])
                assert status == 400 and words in message
            tokenizer.chat_template = None
            assert "has no chat template" in refusal(client.ask(CHAT, HELLO))[1]
            assert client.ok("/v1/models")["data"][0]["chat"] is False
        finally:
            tokenizer.chat_template = before


@pytest.mark.parametrize("inside", [b"[],", b"{},", b'[{"a":"\\"["}],'], ids=str)
def test_a_body_of_many_small_parts_is_refused_before_it_is_read(inside: bytes) -> None:
    body = b'{"prompt":[' + inside * (MOST_INSIDE + 1) + b"[]]}"
    with pytest.raises(Refused, match="more than 50000 objects and lists"):
        read_json(body)


def test_a_text_may_have_as_many_brackets_as_it_likes() -> None:
    text = '{["' * MOST_INSIDE + "\n\\"
    assert read_json(json.dumps({"prompt": text, "n": 1}).encode()) == {"prompt": text, "n": 1}


def test_a_text_that_does_not_end_takes_no_longer_than_others() -> None:
    """Tried from each of its quotes on, it would take hours; nothing else of the server runs meanwhile."""
    body = b"[" * (MOST_INSIDE + 1) + b'"' + b'\\"' * 1_000_000
    begun = time.process_time()
    with pytest.raises(Refused):
        read_json(body)
    assert time.process_time() - begun < 5


# ---- clients


def test_who_leaves_while_a_prompt_is_read_is_not_served(
    other_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, encode = threading.Event(), Named.encode

    def slow(self: Named, text: str, *how: Any) -> list[int]:
        assert go_on.wait(PATIENCE)
        return encode(self, text, *how)

    monkeypatch.setattr(Named, "encode", slow)
    with serving(other_engine) as (client, state):
        body = json.dumps(LONG).encode()
        leaving = socket.create_connection(("127.0.0.1", client.port))
        leaving.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\n" % COMPLETIONS.encode())
        leaving.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        until(lambda: state.requests == 1)
        leaving.close()
        until(lambda: state.metrics.answers[COMPLETIONS, 499] == 1)
        go_on.set()
        assert state.served is not None and not state.served.runner.waiting
        client.ok(COMPLETIONS, {"prompt": "a", "max_tokens": 1})


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_is_served_no_further(
    client: Client, state: State, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    assert state.served is not None
    runner = state.served.runner
    wanted = client.ok(COMPLETIONS, LONG)["choices"]
    with slow_steps(monkeypatch, 0.02):
        body = json.dumps({**LONG, "stream": stream, "n": 2}).encode()
        leaving = socket.create_connection(("127.0.0.1", client.port))
        leaving.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\n" % COMPLETIONS.encode())
        leaving.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        until(lambda: len(runner.scheduler.running) == 2)
        jobs = list(runner._jobs.values())
        until(lambda: jobs[0].drawn > 2)
        answers: list[Any] = []
        staying = threading.Thread(target=lambda: answers.append(client.ok(COMPLETIONS, LONG)))
        staying.start()
        leaving.close()
        until(lambda: all(job.finished == "cancelled" for job in jobs))
        assert max(job.drawn for job in jobs) < 90
    staying.join()
    assert answers[0]["choices"] == wanted


def test_a_client_that_reads_a_byte_now_and_then_holds_up_nobody(client: Client) -> None:
    """Its window is small, so that what it has not read waits on the server's side; it gets all of it in the end."""
    wanted = client.ok(COMPLETIONS, {**LONG, "n": 8})["choices"]
    body = json.dumps({**LONG, "stream": True, "n": 8}).encode()
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    slow.settimeout(PATIENCE)
    slow.connect(("127.0.0.1", client.port))
    slow.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\n" % COMPLETIONS.encode())
    slow.sendall(b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    heard, others_done = [slow.recv(1)], threading.Event()

    def read() -> None:
        while not others_done.wait(0.05):
            heard.append(slow.recv(1))

    reading = threading.Thread(target=read, daemon=True)  # should an assertion fail meanwhile
    reading.start()
    for _ in range(5):
        assert client.ok(COMPLETIONS, LONG)["choices"][0]["text"] == wanted[0]["text"]
    others_done.set()
    reading.join()
    while piece := slow.recv(1 << 16):
        heard.append(piece)
    slow.close()
    lines = [line for line in b"".join(heard).splitlines() if line.startswith(b"data: ")]
    assert lines[-1] == b"data: [DONE]"
    events = [line[6:] for line in lines[:-1]]
    texts = [""] * 8
    for choice in (choice for event in events for choice in json.loads(event)["choices"]):
        texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in wanted]


def test_what_others_leave_off_may_be_written_off(client: Client) -> None:
    client.ok(CHAT, {**HELLO, "max_tokens": 1, "logprobs": False, "top_logprobs": 0, "stop": []})
    client.events(CHAT, {**HELLO, "max_tokens": 1, "stream_options": {"include_obfuscation": False}})


def test_log_probabilities_of_prompts_are_bounded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"prompt": ["abc", "de"], "max_tokens": 0, "echo": True, "logprobs": 3}
    client.ok(COMPLETIONS, asked)
    monkeypatch.setattr(openai, "MOST_REPORTED", 19)
    status, said, param = refusal(client.ask(COMPLETIONS, asked))
    assert (status, param) == (400, "logprobs") and "20 log-probabilities (5 tokens of prompts and 0" in said
    assert "at most 19" in said and client.ask(COMPLETIONS, {**asked, "n": 2, "logprobs": 1})[0] == 400


def test_log_probabilities_of_texts_are_bounded_too(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "MOST_REPORTED", 60)
    asked = {"prompt": "abc", "max_tokens": 5, "ignore_eos": True, "n": 3, "logprobs": 3}
    client.ok(COMPLETIONS, asked)
    status, said, param = refusal(client.ask(COMPLETIONS, {**asked, "max_tokens": 6}))
    assert (status, param) == (400, "logprobs") and "0 tokens of prompts and 18 of texts, 4 for each" in said
    assert (
        "96 log-probabilities (9 tokens of prompts and 15"
        in refusal(client.ask(COMPLETIONS, {**asked, "echo": True}))[1]
    )
    chat = {**HELLO, "ignore_eos": True, "logprobs": True, "top_logprobs": 3}
    assert client.ask(CHAT, {**chat, "max_tokens": 16})[0] == 400
    # Who has not said how many tokens gets as many as there is room for.
    made = client.ok(CHAT, {**chat, "n": 2})["choices"]
    assert [len(choice["logprobs"]["content"]) for choice in made] == [7, 7]
    assert {choice["finish_reason"] for choice in made} == {"length"}
    monkeypatch.setattr(openai, "MOST_REPORTED", 1000)
    (choice,) = client.ok(CHAT, chat)["choices"]
    assert len(choice["logprobs"]["content"]) == 128 - len(client.ok("/tokenize", HELLO)["tokens"])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_long_answer_is_written_in_pieces(
    client: Client, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What writes JSON holds up all other threads until its call ends."""
    asked = {"max_tokens": 100, "ignore_eos": True, "n": 8, "seed": 3, "temperature": 1}
    asked |= {"prompt": "abc", "echo": True, "logprobs": 20} if path == COMPLETIONS else HELLO
    asked |= {} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 20}
    wanted = client.ok(path, asked)["choices"]
    sizes, write = [], replies._dumps

    def writing(value: Any) -> str:
        sizes.append(len(write(value)))
        return write(value)

    monkeypatch.setattr(replies, "_dumps", writing)
    monkeypatch.setattr(replies, "ITEMS", 10)
    assert client.ok(path, asked)["choices"] == wanted
    assert max(sizes) < 30_000 < sum(sizes) / 10


@pytest.mark.parametrize("value", [{}, [], {"a": [], "b": {}}, [1, {"c": ["ü", None]}, 2.5], "x"], ids=str)
def test_json_in_parts_is_json(value: Any) -> None:
    assert json.loads("".join(replies.parts(value))) == value


@pytest.mark.parametrize("count", [0, 1, replies.ITEMS, replies.ITEMS + 1, 3 * replies.ITEMS])
def test_a_list_in_parts_is_a_list(count: int) -> None:
    assert json.loads("".join(replies.parts({"a": iter(range(count))}))) == {"a": [*range(count)]}


def test_a_connection_without_a_request_ends(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first byte, and within headers, of the first request and of the next."""
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.3)
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for sent in (b"", whole[:30], whole + whole[:30]):
        silent = socket.create_connection(("127.0.0.1", client.port), timeout=PATIENCE)
        silent.sendall(sent)
        heard = b""
        while piece := silent.recv(1000):
            heard += piece
        assert heard.count(b"HTTP/1.1 200") == (sent != b"" and sent.startswith(whole))
        silent.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="needs Linux")
def test_a_client_that_never_reads_is_gone_after_a_while(
    client: Client, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's writing would wait for it for ever."""
    monkeypatch.setattr(connection, "UNREAD_SECONDS", 1)
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    deaf.connect(("127.0.0.1", client.port))
    pipelined = b"GET /page.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 400
    deaf.settimeout(0.5)
    with suppress(TimeoutError):
        deaf.sendall(pipelined)
    until(lambda: state.requests <= 1)
    with pytest.raises(OSError):
        for _ in range(PATIENCE):
            time.sleep(0.5)
            deaf.send(b"x")
    deaf.close()


def test_bodies_have_a_limit_and_a_time(other_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anybit.serve.http.app.BODY_SECONDS", 0.2)
    with serving(other_engine, most_bytes=1000) as (client, _):
        assert refusal(client.ask(COMPLETIONS, {"prompt": "a" * 1000}))[0] == 413
        connection = http.client.HTTPConnection("127.0.0.1", client.port)
        connection.request("POST", COMPLETIONS, iter([b"x" * 600, b"x" * 600]), encode_chunked=True,
                           headers={"Transfer-Encoding": "chunked"})  # fmt: skip
        assert connection.getresponse().status == 413
        connection.close()
        late = socket.create_connection(("127.0.0.1", client.port))
        late.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert late.recv(100).startswith(b"HTTP/1.1 408")
        late.close()


def test_a_full_queue_says_when_to_come_again(other_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(other_engine, running=1, waiting=1) as (client, state), slow_steps(monkeypatch, 0.005):
        assert state.served is not None
        threads = [threading.Thread(target=client.ask, args=(COMPLETIONS, LONG)) for _ in range(2)]
        scheduler = state.served.runner.scheduler
        threads[0].start()
        until(lambda: len(scheduler.running) == 1)
        threads[1].start()
        until(lambda: scheduler.waiting_count == 1)
        answer = client.ask(COMPLETIONS, LONG)
        assert refusal(answer)[0] == 429 and int(answer[2]["retry-after"]) >= 1
        for thread in threads:
            thread.join()
        client.ok(COMPLETIONS, LONG)


def test_a_key_leaves_requests_for_others(other_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        serving(other_engine, Guard(keys=("one", "two")), most_requests=4) as (client, state),
        slow_steps(monkeypatch, 0.01),
    ):
        first, second = Client(client.port, "one"), Client(client.port, "two")
        threads = [threading.Thread(target=first.ok, args=(COMPLETIONS, LONG)) for _ in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: state.requests == 2)
        status, said, _ = refusal(first.ask(COMPLETIONS, LONG))
        assert status == 429 and "2 requests of this key are answered already" in said
        second.ok(COMPLETIONS, LONG)
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(
    ("keys", "threads"), [(("one", "two"), PARSERS - 1), (("one",), PARSERS), ((), PARSERS)], ids=str
)
def test_a_key_leaves_a_parser_for_others(
    other_engine: Engine, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...], threads: int
) -> None:
    """Templates, tokenizing and forms of one key hold all threads but one; alone it may have all of them."""
    go_on, held, encode = threading.Event(), list[str](), Named.encode

    def slow(self: Named, text: str, *how: Any) -> list[int]:
        if text == "slow":
            held.append(text)
            assert go_on.wait(PATIENCE)
        return encode(self, text, *how)

    monkeypatch.setattr(Named, "encode", slow)
    with serving(other_engine, Guard(keys=keys)) as (client, _):
        first, asked = Client(client.port, "one"), ("/tokenize", {"prompt": "slow"})
        asking = [threading.Thread(target=first.ok, args=asked) for _ in range(2 * PARSERS)]
        for thread in asking:
            thread.start()
        until(lambda: client.ok("/health")["requests"] == 2 * PARSERS + 1 and len(held) == threads)
        if len(keys) > 1:
            Client(client.port, "two").ok("/tokenize", {"prompt": "fast"})
        assert len(held) == threads
        go_on.set()
        for thread in asking:
            thread.join()
        assert len(held) == 2 * PARSERS


def test_too_many_requests_at_a_time(other_engine: Engine) -> None:
    with serving(other_engine, most_requests=0) as (client, _):
        assert refusal(client.ask(COMPLETIONS, LONG))[0] == 429
        assert client.ok("/health")["status"] == "ok"


def test_what_can_never_fit_the_cache_names_both_numbers(other_engine: Engine) -> None:
    with serving(other_engine, pages=2) as (client, _):
        status, message, _ = refusal(client.ask(COMPLETIONS, {"prompt": "a" * 60, "max_tokens": 20}))
        assert status == 400 and "80; the context holds 64" in message
        status, message, _ = refusal(client.ask(COMPLETIONS, {"prompt": "a" * 64}))
        assert status == 400 and "the prompt has 64 tokens" in message


def test_a_defect_in_a_step_is_an_error_of_its_own_request(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Engine.step

    def faulty(self: Engine, batch: Batch, level: int) -> Any:
        if 99 in batch.tokens:
            raise RuntimeError("no such thing")
        return step(self, batch, level)

    monkeypatch.setattr(Engine, "step", faulty)
    bad = {"prompt": [5, 99], "max_tokens": 5}
    status, message, _ = refusal(client.ask(COMPLETIONS, bad))
    assert status == 500 and "RuntimeError" in message
    _, response = client.open(COMPLETIONS, {**bad, "stream": True})
    assert b'"type":"server_error"' in response.read()
    client.ok(COMPLETIONS, LONG)


def test_damaged_weights_are_the_servers_fault(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(self: Engine, *rows: Any) -> Any:
        raise InputError("tiny: the MLP of block 1 gives NaN or Inf: its weights are damaged")

    monkeypatch.setattr(Engine, "step", damaged)
    status, said, _ = refusal(client.ask(COMPLETIONS, LONG))
    assert status == 500 and "the MLP of block 1 gives NaN" in said


def test_a_full_disk_for_logs_harms_nobody(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Engine, "step", lambda self, *rows: 1 / 0)
    monkeypatch.setattr(sys, "stderr", Full())
    assert refusal(client.ask(COMPLETIONS, LONG))[0] == 500
    monkeypatch.undo()
    client.ok(COMPLETIONS, LONG)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = (
    "prompt", "messages", "model", "bits", "latency_target_ms", "n", "max_tokens", "max_completion_tokens", "echo",
    "logprobs", "top_logprobs", "stream", "stream_options", "stop", "seed", "logit_bias", "response_format",
    "guided_json", "guided_regex", "guided_grammar", "guided_choice", "structured_outputs", "tools", "best_of",
    "suffix", "user", "ignore_eos", "min_tokens", "return_token_ids", "cache_prompt", *openai.NUMBERS,
    "tool_choice", "parallel_tool_calls", "chat_template_kwargs",
)  # fmt: skip


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4), st.booleans())
def test_any_body_is_a_request_or_an_error_in_words(state: State, body: dict[str, Any], chat: bool) -> None:
    assert state.served is not None
    if chat:
        body = {"messages": [{"role": "user", "content": "a"}], **body}
    try:
        wanted = (openai.chat if chat else openai.completions)(
            state.served, body if chat else {"prompt": "a", **body}, ""
        )
    except (InputError, Refused) as error:
        assert str(error) and 400 <= refused(error).status < 500
    else:
        assert 1 <= len(wanted.requests) * wanted.n <= openai.MOST_TEXTS


# ---- states


def test_nothing_is_served_before_the_model_is_there() -> None:
    with serving(None) as (client, _):
        status, body, _ = client.ask("/health")
        assert (status, body) == (503, {"status": "loading"})
        status, message, _ = refusal(client.ask(COMPLETIONS, LONG))
        assert status == 503 and "loading" in message
        assert refusal(client.ask("/metrics"))[0] == refusal(client.ask("/v1/models"))[0] == 503


@pytest.mark.parametrize("embeds", [False, True], ids=["texts", "embeddings"])
@pytest.mark.parametrize(("patience", "status"), [(PATIENCE, 200), (0.01, 503)])
def test_a_request_that_came_before_the_end_has_until_it(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    patience: float,
    status: int,
    embeds: bool,
) -> None:
    """Also when its text is still waiting to be cut into tokens then, and nothing else is computed."""
    path, body = ("/v1/embeddings", {"input": "a"}) if embeds else (COMPLETIONS, LONG)
    answers, go_on, encode = list[Any](), threading.Event(), Named.encode

    def held(self: Named, *given: Any) -> list[int]:
        assert go_on.wait(PATIENCE)
        return encode(self, *given)

    monkeypatch.setattr(Named, "encode", held)
    with serving(request.getfixturevalue("encoder" if embeds else "other_engine")) as (client, state):
        assert state.served is not None
        thread = threading.Thread(target=lambda: answers.append(client.ask(path, body)))
        thread.start()
        until(lambda: state.requests == 1)
        time.sleep(0.05)
        state.served.runner.drain(patience)
        assert refusal(client.ask(path, body))[:2] == (503, "the server is stopping")
        time.sleep(0.05)
        go_on.set()
        thread.join()
    assert answers[0][0] == status
    if status == 503:
        assert refusal(answers[0])[1] == "the server is stopping"


def test_a_text_that_the_end_of_the_server_cuts_is_told_so(
    other_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(other_engine) as (client, state), slow_steps(monkeypatch, 0.02):
        assert state.served is not None
        connection, stream = client.open(COMPLETIONS, {**LONG, "stream": True})
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(client.ask(COMPLETIONS, LONG)))
        thread.start()
        until(lambda: len(state.served.runner.scheduler.running) == 2)  # type: ignore[union-attr]
        state.served.runner.drain(0.05)
        assert refusal(client.ask(COMPLETIONS, LONG))[:2] == (503, "the server is stopping")
        thread.join()
        assert refusal(answers[0])[:2] == (503, "the server has stopped")
        assert b'"message":"the server has stopped"' in stream.read()
        connection.close()
        assert client.ask("/health")[0] == 503


def test_health_says_that_a_step_is_stuck(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anybit.serve.run.worker.STUCK", 0.05)
    seen: list[Any] = []

    def stuck() -> bool:
        seen.append(client.ask("/health"))
        return bool(seen[-1][0] == 503)

    with slow_steps(monkeypatch, 0.5):
        thread = threading.Thread(target=client.ask, args=(COMPLETIONS, {**LONG, "max_tokens": 1}))
        thread.start()
        until(stuck)
        assert seen[-1][1]["status"] == "stuck" and seen[-1][1]["step_seconds"] >= 0.05
        thread.join()
    until(lambda: client.ask("/health")[0] == 200)  # the answer is sent before the step has ended


def test_model_files_that_disappear_harm_nobody(anybit_artifact: Path, tmp_path: Path) -> None:
    """Weights of all widths, the tokenizer and the chat template are in memory when a server says that it is ready."""
    copy, answers = tmp_path / "model", []
    shutil.copytree(anybit_artifact, copy)
    for gone in (False, True):
        with serving(Engine(copy, threads=1)) as (client, _):
            if gone:
                shutil.rmtree(copy)
            asked = [(COMPLETIONS, LONG | {"bits": bits}) for bits in (2.5, 4, 8)] + [
                (CHAT, HELLO | {"max_tokens": 5})
            ]
            answers.append([client.ok(path, body)["choices"] for path, body in asked])
    assert answers[0][:3] == answers[1][:3] and answers[1][3]
    with pytest.raises(InputError, match="model"):
        Engine(copy)
