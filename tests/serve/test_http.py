"""Answers over HTTP: OpenAI's shapes, the engine's own text, widths, forms and figures."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import numpy as np
import pytest

from anybit import Engine, Sampling
from anybit.kernels import cpu
from anybit.serve.http.app import State
from anybit.serve.served import Named, Served
from tests.serve.conftest import Client, served_of, serving

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu.available(), reason="the native extension is not built"),
]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 12}
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def alone(other_engine: Engine) -> Any:
    """What the engine itself makes of a prompt."""

    def make(prompt: str, n: int, bits: float | None = None, **sampling: Any) -> str:
        banned = {token: -np.inf for token in other_engine.ends}
        how = Sampling(**{"logit_bias": banned, **sampling})
        return other_engine.generate(other_engine.encode(prompt), n, how, bits=bits).text

    return make


def bias_against_the_end(engine: Engine) -> dict[str, int]:
    return {str(token): -100 for token in engine.ends}


# ---- texts


def test_a_completion_is_the_engines(client: Client, engine: Engine, alone: Any) -> None:
    asked = {
        "prompt": "one two",
        "temperature": 0,
        "max_tokens": 12,
        "logit_bias": bias_against_the_end(engine),
    }
    made = client.ok(COMPLETIONS, asked)
    assert made["object"] == "text_completion" and made["model"] == "tiny" and made["id"].startswith("cmpl-")
    (choice,) = made["choices"]
    assert choice == {
        "index": 0, "text": alone("one two", 12), "logprobs": None, "finish_reason": "length",
    }  # fmt: skip
    assert made["usage"] == {
        "prompt_tokens": 7, "completion_tokens": 12, "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    timings = made["timings"]
    assert timings["bits"]["min"] == timings["bits"]["max"] == engine.widths[-1]
    assert timings["decode_tokens_per_second"] > 0 and timings["prefill_seconds"] > 0


def test_a_chat_goes_through_the_template(client: Client, engine: Engine, alone: Any) -> None:
    how = {"temperature": 0, "max_tokens": 9, "logit_bias": bias_against_the_end(engine)}
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
    made = client.ok(CHAT, {"messages": messages, **how})
    assert made["object"] == "chat.completion"
    message = made["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert message["content"] == alone("[system]be kind[user]hello[assistant]", 9)


def test_a_name_goes_through_the_template(other_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}[{{ m.role }}{{ '=' + m.name if m.name is defined }}]{{ m.content }}{% endfor %}"
    monkeypatch.setattr(other_engine.tokenizer, "chat_template", template)
    with serving(other_engine) as (client, _):
        messages = [{"role": "user", "content": "hi", "name": "Ann"}, {"role": "assistant", "content": "ho"}]
        tokens = client.ok("/tokenize", {"messages": messages})["tokens"]
        assert client.ok("/detokenize", {"tokens": tokens})["prompt"] == "[user=Ann]hi[assistant]ho"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_token_ids_stand_beside_texts(client: Client, engine: Engine, path: str) -> None:
    """As llama-benchy asks for them."""
    asked = GREEDY | ({"prompt": "one two"} if path == COMPLETIONS else HELLO)
    asked |= {"return_token_ids": True, "cache_prompt": False, "min_tokens": 12}
    (choice,) = client.ok(path, asked)["choices"]
    text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    assert len(choice["token_ids"]) == 12
    assert engine.tokenizer.decode(choice["token_ids"], skip_special_tokens=True) == text
    pieces = [piece for event in client.events(path, asked) for piece in event["choices"]]
    assert [token for piece in pieces for token in piece.get("token_ids", [])] == choice["token_ids"]
    assert "token_ids" not in client.ok(path, {**asked, "return_token_ids": False})["choices"][0]


def test_an_answer_opens_with_its_first_token(client: Client) -> None:
    """Clients time the first event of a stream."""
    events = client.events(CHAT, {**HELLO, **GREEDY, "n": 3, "temperature": 1})
    said = [(choice["index"], "role" in choice["delta"]) for event in events for choice in event["choices"]]
    opened = [at for at, (_, opens) in enumerate(said) if opens]
    assert sorted(said[at][0] for at in opened) == [0, 1, 2]
    assert all(said[at + 1] == (said[at][0], False) for at in opened)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_is_the_whole_in_pieces(client: Client, path: str) -> None:
    asked = {"n": 3, "seed": 5, "temperature": 1, "max_tokens": 20, "ignore_eos": True, "logprobs": 1}
    asked |= {"prompt": "abc"} if path == COMPLETIONS else {**HELLO, "logprobs": True, "top_logprobs": 1}
    whole = client.ok(path, asked)
    events = client.events(path, {**asked, "stream_options": {"include_usage": True}})
    texts, finish, logprobs = [""] * 3, [None] * 3, [[], [], []]  # type: ignore[var-annotated]
    for event in events[:-1]:
        assert event["usage"] is None
        for choice in event["choices"]:
            at = choice["index"]
            texts[at] += choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "")
            finish[at] = choice["finish_reason"] or finish[at]
            if choice["logprobs"]:
                logprobs[at] += choice["logprobs"]["tokens" if path == COMPLETIONS else "content"]
    said = [c["text"] if path == COMPLETIONS else c["message"]["content"] for c in whole["choices"]]
    assert texts == said and len({*texts}) == 3
    assert finish == [c["finish_reason"] for c in whole["choices"]]
    assert logprobs == [
        c["logprobs"]["tokens" if path == COMPLETIONS else "content"] for c in whole["choices"]
    ]
    assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]
    assert any("timings" in event for event in events)
    if path == CHAT:
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert {event["object"] for event in events} == {"chat.completion.chunk"}


def test_stop_strings_are_left_out(client: Client) -> None:
    whole = client.ok(COMPLETIONS, {"prompt": "abc", **GREEDY})["choices"][0]["text"]
    stop = whole[3:5]
    made = client.ok(COMPLETIONS, {"prompt": "abc", **GREEDY, "stop": ["never there", stop]})["choices"][0]
    assert made["text"] == whole[: whole.index(stop)] and made["finish_reason"] == "stop"
    assert client.ok(COMPLETIONS, {"prompt": "abc", **GREEDY, "stop": stop})["choices"][0] == made


def test_several_prompts_as_text_and_as_tokens(client: Client) -> None:
    one = client.ok(COMPLETIONS, {"prompt": "abc", **GREEDY})["choices"][0]["text"]
    two = client.ok(COMPLETIONS, {"prompt": "other", **GREEDY})["choices"][0]["text"]
    tokens = client.ok("/tokenize", {"prompt": "abc"})["tokens"]
    assert client.ok(COMPLETIONS, {"prompt": tokens, **GREEDY})["choices"][0]["text"] == one
    made = client.ok(COMPLETIONS, {"prompt": [tokens, "other"], "n": 2, **GREEDY})
    assert [(c["index"], c["text"]) for c in made["choices"]] == [(0, one), (1, one), (2, two), (3, two)]
    assert made["usage"]["prompt_tokens"] == 8 and made["usage"]["completion_tokens"] == 48


def test_a_prompt_that_was_there_is_not_computed_again(client: Client) -> None:
    asked = {"prompt": "cached " * 12, **GREEDY}
    first, second = client.ok(COMPLETIONS, asked), client.ok(COMPLETIONS, asked)
    assert first["choices"] == second["choices"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 64


# ---- log-probabilities


def test_log_probabilities_of_a_completion_with_its_prompt(client: Client, other_engine: Engine) -> None:
    """As lm-eval asks for them."""
    asked = {"prompt": "some text", "max_tokens": 1, "logprobs": 2, "echo": True, "temperature": 0}
    made = client.ok(COMPLETIONS, asked)["choices"][0]
    found, ids = made["logprobs"], other_engine.encode("some text")
    rows = other_engine.logits(ids).astype(np.float64)
    rows -= np.log(np.exp(rows).sum(1, keepdims=True))
    assert found["tokens"][:9] == list("some text") and len(found["tokens"]) == 10
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    wanted = [rows[i, ids[i + 1]] for i in range(8)] + [rows[8].max()]
    assert found["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-4)
    for token, top in zip(found["tokens"][1:], found["top_logprobs"][1:]):
        assert token in top and 2 <= len(top) <= 3
    assert found["text_offset"][:3] == [0, 1, 2] and made["text"].startswith("some text")
    none = client.ok(COMPLETIONS, {**asked, "max_tokens": 0})["choices"][0]
    assert none["text"] == "some text" and len(none["logprobs"]["tokens"]) == 9
    streamed = [e["choices"][0] for e in client.events(COMPLETIONS, asked) if e["choices"]]
    assert "".join(choice["text"] for choice in streamed) == made["text"]
    assert [t for c in streamed if c["logprobs"] for t in c["logprobs"]["tokens"]] == found["tokens"]
    assert [o for c in streamed if c["logprobs"] for o in c["logprobs"]["text_offset"]] == found[
        "text_offset"
    ]


def test_log_probabilities_of_a_chat(client: Client) -> None:
    made = client.ok(CHAT, {**HELLO, "max_tokens": 4, "logprobs": True, "top_logprobs": 3, "temperature": 0})
    entries = made["choices"][0]["logprobs"]["content"]
    assert len(entries) == made["usage"]["completion_tokens"]
    for entry in entries:
        top = entry["top_logprobs"]
        assert len(top) == 3 and top[0]["token"] == entry["token"] and top[0]["logprob"] == entry["logprob"]
        assert [t["logprob"] for t in top] == sorted((t["logprob"] for t in top), reverse=True)


def test_bytes_of_parts_of_a_character_make_the_character(client: Client, state: State) -> None:
    """The tokenizer has bytes for tokens, of which a client puts characters together."""
    tokens = client.ok("/tokenize", {"prompt": "ü€ a"})["tokens"]
    biases = {str(token): 100 for token in tokens[:1]}
    asked = {**HELLO, "max_tokens": 2, "logprobs": True, "logit_bias": biases, "temperature": 0}
    entries = client.ok(CHAT, asked)["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [["ü".encode()[0]]] * 2
    assert isinstance(state.served, Served)
    made = b"".join(bytes(state.served.bytes_of(token) or []) for token in tokens)
    assert made.decode() == "ü€ a"


def test_timings_come_once(client: Client) -> None:
    """With the last piece of the last text, also where several end together."""
    events = client.events(COMPLETIONS, {"prompt": "abc", "max_tokens": 3, "ignore_eos": True, "n": 4})
    told = [i for i, event in enumerate(events) if "timings" in event]
    assert told == [len(events) - 1]


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/embeddings"])
def test_times_begin_where_the_request_comes(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """What a template, a tokenizer or a form takes is waited for, too."""
    encode = Named.encode

    def slow(self: Named, *given: Any) -> list[int]:
        time.sleep(0.2)
        return encode(self, *given)

    monkeypatch.setattr(Named, "encode", slow)
    embeds = path != COMPLETIONS
    with serving(request.getfixturevalue("encoder" if embeds else "other_engine")) as (client, state):
        made = client.ok(path, {"input": "abc"} if embeds else {"prompt": "abc", "max_tokens": 2})
        assert embeds or made["timings"]["queue_seconds"] >= 0.2
        assert (state.metrics.embedding if embeds else state.metrics.first)._sum >= 0.2


# ---- widths


def test_every_width_by_field_and_by_name(client: Client, engine: Engine, alone: Any) -> None:
    asked = {"prompt": "abc", "temperature": 0, "max_tokens": 8, "logit_bias": bias_against_the_end(engine)}
    for bits in (engine.widths[0], engine.widths[len(engine.widths) // 2]):
        made = client.ok(COMPLETIONS, {**asked, "bits": bits})
        named = client.ok(COMPLETIONS, {**asked, "model": f"tiny@{bits}"})
        assert made["choices"] == named["choices"]
        assert made["choices"][0]["text"] == alone("abc", 8, bits)
        assert made["timings"]["bits"] == pytest.approx({"min": bits, "mean": bits, "max": bits})
    for how in ({"bits": "auto"}, {"model": "tiny@auto"}, {"latency_target_ms": 1000}):
        served = client.ok(COMPLETIONS, {**asked, **how})["timings"]["bits"]
        assert engine.widths[0] <= served["min"] <= served["mean"] <= served["max"] <= engine.widths[-1]


# ---- forms


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "how",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}},
        {"guided_json": SCHEMA},
        {"structured_outputs": {"json": SCHEMA}},
    ],
    ids=["response_format", "guided", "structured"],
)
def test_a_schema_is_kept(client: Client, how: Any) -> None:
    for seed in range(3):
        made = client.ok(CHAT, {**HELLO, "temperature": 1.5, "seed": seed, "max_tokens": 80, **how})[
            "choices"
        ][0]
        if made["finish_reason"] == "stop":
            found = json.loads(made["message"]["content"])
            assert set(found) == {"name", "age"} and len(found["name"]) <= 5 and found["age"] <= 99
        else:
            assert re.match(r'\{\s*"name"', made["message"]["content"])


@pytest.mark.parametrize(
    ("how", "pattern"),
    [
        ({"guided_regex": "(ab|c){2,4}!"}, "(ab|c){2,4}!"),
        ({"structured_outputs": {"choice": ["a.b", "c (d)", "ü"]}}, r"a\.b|c \(d\)|ü"),
        ({"guided_grammar": 'start: word+ "."\nword: "x" | "yz"'}, r"(x|yz)+\."),
    ],
    ids=["regex", "choice", "grammar"],
)
def test_a_form_is_kept(client: Client, how: Any, pattern: str) -> None:
    asked = {"prompt": "abc", "max_tokens": 60, "temperature": 1.2, "n": 4, "seed": 2, **how}
    for choice in client.ok(COMPLETIONS, asked)["choices"]:
        if choice["finish_reason"] == "stop":
            assert re.fullmatch(pattern, choice["text"])


def test_forms_are_ready_before_the_first_request(
    other_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the vocabulary holds up everybody. Where that fails, forms alone are refused."""
    made = served_of(other_engine, None)
    monkeypatch.setattr("anybit.serve.served.Constraints", lambda *_: 1 / 0)
    assert isinstance(made, Served) and made.constraint("regex", "a|b") is not None

    def fails(*_: Any) -> Any:
        raise ValueError("can't determine decoder type")

    monkeypatch.setattr("anybit.serve.served.Constraints", fails)
    with serving(other_engine) as (client, _):
        client.ok(COMPLETIONS, {"prompt": "abc", "max_tokens": 1})
        status, found, _ = client.ask(COMPLETIONS, {"prompt": "abc", "guided_regex": "a"})
        assert status == 400 and "tiny can be given no form (can't determine" in found["error"]["message"]


def test_an_object_is_json(client: Client) -> None:
    asked = {**HELLO, "response_format": {"type": "json_object"}, "max_tokens": 40, "temperature": 0}
    assert client.ok(CHAT, asked)["choices"][0]["message"]["content"].startswith("{")
    client.ok(CHAT, {**HELLO, "response_format": {"type": "text"}, "max_tokens": 1})


# ---- other addresses


def test_models(client: Client, engine: Engine) -> None:
    (card,) = client.ok("/v1/models")["data"]
    assert card == client.ok("/v1/models/tiny") == client.ok("/v1/models/tiny@3.5")
    assert (card["id"], card["object"], card["owned_by"], card["chat"]) == ("tiny", "model", "anybit", True)
    assert [level["bits"] for level in card["levels"]] == engine.widths
    taken = [level["bytes_per_token"] for level in card["levels"]]
    assert taken == sorted(taken) and taken[0] > 0
    status, found, _ = client.ask("/v1/models/other")
    assert status == 404 and found["error"]["code"] == "model_not_found"


def test_tokens_there_and_back(client: Client) -> None:
    made = client.ok("/tokenize", {"prompt": "grün"})
    assert made["count"] == len(made["tokens"]) == 5
    assert client.ok("/detokenize", {"tokens": made["tokens"]}) == {"prompt": "grün"}
    chat = client.ok("/tokenize", HELLO)["tokens"]
    assert client.ok("/detokenize", {"tokens": chat})["prompt"] == "[user]hello[assistant]"


def test_health_and_metrics(client: Client, state: State) -> None:
    client.ok(COMPLETIONS, {"prompt": "abc", "max_tokens": 3, "ignore_eos": True})
    health = client.ok("/health")
    assert health["status"] == "ok" and health["seconds_since_step"] >= 0 == health["running"]
    text = client.ok("/metrics")
    sample = re.compile(r'^anybit_[a-z_]+(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? [-+0-9.einf]+$')
    for line in text.splitlines():
        assert line.startswith(("# HELP anybit_", "# TYPE anybit_")) or sample.match(line), line
    drawn = sum(float(line.split()[1]) for line in text.splitlines() if "generated_tokens_total{" in line)
    assert drawn == sum(state.served.runner.served.values()) >= 3  # type: ignore[union-attr]
    assert re.search(r'anybit_time_to_first_token_seconds_bucket\{le="\+Inf"\} [1-9]', text)
    assert 'anybit_requests_total{path="/v1/completions",status="200"}' in text


def test_the_page_asks_nobody_else(client: Client) -> None:
    for path in ("/", "/page.css", "/page.js"):
        status, text, headers = client.ask(path)
        assert status == 200 and "default-src 'none'" in headers["content-security-policy"]
        assert not re.search(r"https?://(?!www\.w3\.org)", text) and "@import" not in text
        assert not re.search(r"<script(?! src=)| style=|\son[a-z]+=|<style", text)


def test_the_page_sends_what_was_typed(client: Client) -> None:
    """No value is dropped in silence: the server says what is wrong with one. No field claims to know a default."""
    html, script = client.ask("/")[1], client.ask("/page.js")[1]
    fields = dict(re.findall(r'<input id="(\w+)" inputmode="\w+" ([^>]*)>', html))
    names = re.search(r"NUMBERS = (\[.*?\]);", script)
    assert names is not None and list(fields) == json.loads(names[1])
    assert {*fields.values()} == {'placeholder="default"', 'placeholder="random"', 'value="512"'}
    assert "validity" not in script and "step=" not in "".join(fields.values())
    for body, said in (
        ({"temperature": "0,75"}, 'temperature is "0,75", expected a number'),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"max_tokens": "many"}, 'max_tokens is "many", expected a whole number'),
    ):
        status, found, _ = client.ask(COMPLETIONS, {"prompt": "abc", **body})
        assert status == 400 and said in found["error"]["message"]
