"""Functions that a request offers: a tiny model's answers are held to them, in the form of its template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from tokenizers import AddedToken

from anybit import Engine
from anybit.kernels import cpu
from anybit.serve.constraint import Constraints
from anybit.serve.speech import HERMES, LLAMA, MISTRAL, MISTRAL_LIST, THOUGHTS, Speech
from anybit.serve.tools import Function, Tools, grammar
from tests import builders
from tests.serve.conftest import Client, refusal, serving

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu.available(), reason="the native extension is not built"),
]
CHAT = "/v1/chat/completions"
FORMS = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "mistral-list": MISTRAL_LIST}
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.description }}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls %}BEGIN{{ c.function.name }}MIDDLE{{ c.function.arguments | tojson }}END{% endfor %}"
    "{{ m.tool_call_id }}{% endfor %}{% if thinks is defined %}{{ thinks }}{% endif %}"
)
WEATHER = {
    "name": "weather",
    "description": "How it is.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "weather_now"}}]
HELLO = {"messages": [{"role": "user", "content": "a"}], "temperature": 0}


def tokenizer_of(family: str, tokens: bool, thinks: bool = False) -> Any:
    """One whose template is of a family; what marks calls and thoughts are tokens of their own, or text."""
    tokenizer = builders.byte_tokenizer()
    template, form = TEMPLATE + ("{# <think></think> #}" if thinks else ""), FORMS[family]
    for name, text in (("BEGIN", form.begin), ("MIDDLE", form.middle), ("END", form.end)):
        template = template.replace(name, f"{{{{ {json.dumps(text)} }}}}")
    tokenizer.chat_template = template
    words = [*form.words, "<think>", "</think>"] if tokens else []
    special = family.startswith("mistral")
    tokenizer.add_tokens([AddedToken(word, special=special, normalized=False) for word in words], special)
    return tokenizer


@contextmanager
def talking(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, family: str, tokens: bool = True, thinks: bool = False
) -> Iterator[Client]:
    """A server of a model with such a tokenizer."""
    monkeypatch.setattr(engine, "tokenizer", tokenizer_of(family, tokens, thinks))
    with serving(engine) as (client, _):
        yield client


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = [call["function"] for call in message["tool_calls"]]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def fits(call: tuple[str, Any]) -> bool:
    name, arguments = call
    if name == "weather_now":
        return bool(arguments == {})
    return bool(name == "weather" and arguments["city"] in ("Rome", "Oslo") and arguments["days"] in (1, 2))


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("family", FORMS)
def test_a_call_is_one_of_those_that_are_offered(
    other_engine: Engine, monkeypatch: pytest.MonkeyPatch, family: str, tokens: bool
) -> None:
    with talking(other_engine, monkeypatch, family, tokens) as client:
        asked = {**HELLO, "temperature": 1.5, "tools": TOOLS, "tool_choice": "required"}
        asked |= {"parallel_tool_calls": False, "n": 8, "seed": 3}
        whole = client.ok(CHAT, asked)
        for choice in whole["choices"]:
            assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
            (call,) = calls_of(choice["message"])
            assert fits(call)
        assert len({str(calls_of(choice["message"])) for choice in whole["choices"]}) > 1
        only = {**asked, "tool_choice": {"type": "function", "function": {"name": "weather_now"}}}
        for choice in client.ok(CHAT, only)["choices"]:
            assert calls_of(choice["message"]) == [("weather_now", {})]


def passes(text: str, family: str, tokens: bool, thinking: bool = False, **how: Any) -> bool:
    """Whether an answer is let through, by the grammar of two functions, to its end."""
    tokenizer = tokenizer_of(family, tokens)
    functions = [
        Function(tool["function"]["name"], tool["function"].get("parameters", {}), False) for tool in TOOLS
    ]
    offered = Tools(TOOLS, functions, how.get("required", False), how.get("several", True))
    speech = Speech(FORMS[family], ("weather", "weather_now"), THOUGHTS[0], thinking)
    end = tokenizer.convert_tokens_to_ids("</s>")
    backend = tokenizer.backend_tokenizer
    form = Constraints(backend, len(tokenizer), {end}).compile("grammar", grammar(offered, speech, backend))
    for token in [*tokenizer.encode(text, add_special_tokens=False), end]:
        if not form.allowed()[token]:
            return False
        if token != end:
            form.accept(token)
    return True


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("family", FORMS)
def test_what_is_let_through(family: str, tokens: bool) -> None:
    form = FORMS[family]
    rome, now = f'weather{form.middle}{{"city": "Rome", "days": 1}}', f"weather_now{form.middle}{{}}"
    one, other = form.begin + rome + form.end, form.begin + now + form.end
    two = form.begin + now + form.next + rome + form.end
    assert all(passes(text, family, tokens) for text in ("", "Hello.\n", '{"name": "Ann"}', one, other))
    assert passes("Well.\n" + one, family, tokens)
    assert passes(two, family, tokens) == (family != "llama")
    assert not passes(two, family, tokens, several=False)
    for right, wrong in (
        ('"Rome"', '"Rom"'),
        ('"days": 1', '"days": 3'),
        ('"days"', '"nights"'),
        ('"Rome", ', '"Rome",'),
    ):
        assert right in rome and not passes(one.replace(rome, rome.replace(right, wrong)), family, tokens)
    assert not passes(one.removesuffix("}" + form.end) + form.end, family, tokens)
    assert passes(one + "\n", family, tokens) == bool(form.end)
    assert passes(form.begin + form.next.join([now] * 32) + form.end, family, tokens) == bool(form.next)
    assert not passes(form.begin + form.next.join([now] * 33) + form.end, family, tokens)
    assert not passes(one + " more", family, tokens) and not passes(one[:-1], family, tokens)
    assert all(passes(text, family, tokens, required=True) for text in (one, other))
    assert not any(passes(text, family, tokens, required=True) for text in ("", "Hello.\n", "Well.\n" + one))
    for thought in ("<think>hm\n</think>\n\n", "<think></think>"):
        assert passes(thought + one, family, tokens, required=True)
        assert passes(thought.removeprefix("<think>") + one, family, tokens, thinking=True, required=True)
        assert passes(thought + "Hello.", family, tokens)
    assert not passes("<think>hm" + one, family, tokens, required=True)
    if (bare := form.bare) is not None:
        calls = [f"{now}{bare.next}{rome}{bare.end}", f"{now}{bare.end}", f"{now}{bare.end}\n"]
        assert all(passes(bare.begin + call, family, tokens) for call in calls)
        assert not passes(bare.begin + calls[0].replace("Rome", "Rom"), family, tokens)
        assert not passes(bare.begin + calls[0], family, tokens, required=True)


def test_a_stream_gives_the_same_calls(client_of_hermes: Client) -> None:
    asked = {**HELLO, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    message = client_of_hermes.ok(CHAT, asked)["choices"][0]["message"]
    events = client_of_hermes.events(CHAT, asked)
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    pieces = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert deltas[0] == {"role": "assistant", "content": ""} and not any(
        delta.get("content") for delta in deltas
    )
    assert pieces[0]["type"] == "function" and pieces[0]["id"] and {piece["index"] for piece in pieces} == {0}
    (call,) = message["tool_calls"]
    assert pieces[0]["function"]["name"] == call["function"]["name"]
    assert "".join(piece["function"]["arguments"] for piece in pieces) == call["function"]["arguments"]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_without_need_the_model_may_say_something(client_of_hermes: Client) -> None:
    asked = {**HELLO, "tools": TOOLS, "max_tokens": 8, "ignore_eos": True}
    choice = client_of_hermes.ok(CHAT, asked)["choices"][0]
    plain = client_of_hermes.ok(CHAT, {**asked, "tool_choice": "none"})["choices"][0]
    assert choice["finish_reason"] == plain["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"] and choice["message"]["content"]
    pushed = {**HELLO, "tools": TOOLS, "parallel_tool_calls": False, "logit_bias": {"259": 100}}
    assert fits(*calls_of(client_of_hermes.ok(CHAT, pushed)["choices"][0]["message"]))


@pytest.mark.parametrize("family", FORMS)
def test_several_calls(other_engine: Engine, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """A model that is kept from ending its text calls on, where its form has more than one call."""
    with talking(other_engine, monkeypatch, family) as client:
        asked = {**HELLO, "tools": TOOLS[1:], "tool_choice": "required", "max_tokens": 110}
        asked |= {"logit_bias": {"1": -100, str(other_engine.tokenizer.convert_tokens_to_ids("]")): -100}}
        choice = client.ok(CHAT, asked)["choices"][0]
        calls = [call["function"]["name"] for call in choice["message"]["tool_calls"]]
        assert calls == ["weather_now"] * len(calls) and (len(calls) > 1) == (family != "llama")
        assert len({call["id"] for call in choice["message"]["tool_calls"]}) == len(calls)


def test_a_thought_comes_before_a_call(other_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with talking(other_engine, monkeypatch, "hermes", thinks=True) as client:
        asked = {**HELLO, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        think, end = (
            str(token) for token in other_engine.tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
        )
        message = client.ok(CHAT, {**asked, "logit_bias": {end: 100}})["choices"][0]["message"]
        assert fits(*calls_of(message)) and "reasoning_content" not in message
        thought = {**asked, "max_tokens": 9, "logit_bias": {think: 100, end: -100}}
        choice = client.ok(CHAT, thought)["choices"][0]
        assert choice["finish_reason"] == "length" and choice["message"]["reasoning_content"]
        begun = {
            **HELLO,
            "chat_template_kwargs": {"thinks": "<think>\n"},
            "max_tokens": 9,
            "ignore_eos": True,
        }
        said = client.ok(CHAT, {**begun, "logit_bias": {end: -100}})["choices"][0]["message"]
        assert said["content"] == "" and said["reasoning_content"]
        deltas = [
            event["choices"][0]["delta"]
            for event in client.events(CHAT, {**begun, "logit_bias": {end: -100}})
        ]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == said["reasoning_content"]
        closed = client.ok(CHAT, {**begun, "logit_bias": {end: 100}, "max_tokens": 1})["choices"][0][
            "message"
        ]
        assert closed == {"role": "assistant", "content": "", "refusal": None}


def test_calls_and_what_they_gave_go_through_the_template(client_of_hermes: Client) -> None:
    asked_for = {
        "id": "c1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city":"Oslo"}'},
    }
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [asked_for], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "cold"},
    ]
    asked = {"messages": messages, "tools": TOOLS, "chat_template_kwargs": {"thinks": "!"}}
    tokens = client_of_hermes.ok("/tokenize", asked)["tokens"]
    text = client_of_hermes.ok("/detokenize", {"tokens": tokens})["prompt"]
    call = HERMES.begin + "weather" + HERMES.middle + '{"city": "Oslo"}' + HERMES.end
    assert text == f"How it is.[user]a[assistant]hm{call}[tool]coldc1!"


def test_the_official_client_calls(client_of_hermes: Client) -> None:
    api = openai.OpenAI(base_url=f"http://127.0.0.1:{client_of_hermes.port}/v1", api_key="none")
    asked: dict[str, Any] = {
        "model": "tiny", "messages": HELLO["messages"], "tools": TOOLS, "parallel_tool_calls": False,
        "tool_choice": {"type": "function", "function": {"name": "weather"}}, "temperature": 0,
    }  # fmt: skip
    (call,) = api.chat.completions.create(**asked).choices[0].message.tool_calls or []
    assert call.type == "function" and fits((call.function.name, json.loads(call.function.arguments)))
    with api.chat.completions.stream(**asked) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert (streamed.function.name, streamed.function.arguments) == (
        call.function.name,
        call.function.arguments,
    )


def tool(**changes: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {**WEATHER, **changes}}]}


def calling(**changes: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, **changes}
    return {"messages": [{"role": "assistant", "tool_calls": [call]}]}


DEEP = json.loads('{"a":' * 40 + "1" + "}" * 40)
NAMED = {"type": "function", "function": {"name": "f"}}
CALL = "messages[0].tool_calls[0].function"
BAD: list[tuple[dict[str, Any], str, str | None]] = [
    ({"tools": {}}, "a list of at most 128 functions", "tools"),
    ({"tools": TOOLS * 65}, "a list of at most 128 functions", "tools"),
    ({"tools": TOOLS + TOOLS}, "two functions of one name", "tools"),
    ({"tools": [5]}, "tools[0] is 5, expected an object", "tools[0]"),
    ({"tools": [{"type": "retrieval"}]}, 'this server has only "function"', "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "function is null", "tools[0].function"),
    (tool(name="a b"), "1 to 64 letters", "tools[0].function.name"),
    (tool(name='"'), "1 to 64 letters", "tools[0].function.name"),
    (tool(parameters=[]), "a schema of an object", "tools[0].function.parameters"),
    (tool(parameters={"type": "string"}), "a schema of an object", "tools[0].function.parameters"),
    (tool(parameters={"properties": {"a": {"type": "thing"}}}), "cannot be enforced", "tools"),
    (tool(strict=True, parameters={"properties": {"a": {"format": "odd"}}}), "Unknown format", "tools"),
    (tool(parameters={"a": "x" * 70_000}), "expected at most 65536", "tools"),
    (tool(parameters=DEEP), "nested deeper than 32", "tools[0].function.parameters"),
    (tool(price=3), "no parameter", "tools[0].function.price"),
    ({"tools": TOOLS, "tool_choice": "always"}, 'expected "none", "auto", "required"', "tool_choice"),
    ({"tool_choice": "required"}, "there are no tools", "tool_choice"),
    ({"tools": TOOLS, "tool_choice": NAMED}, "none of the tools", "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "has only", "tool_choice.type"),
    ({"tools": TOOLS, "guided_regex": "a"}, "give one of them", "tools"),
    ({"chat_template_kwargs": []}, "an object of at most 32 levels", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "which the request itself says", "chat_template_kwargs"),
    (calling(type="custom"), "has only", "messages[0].tool_calls[0].type"),
    (calling(function={"name": "f", "arguments": "{"}), "a JSON object", f"{CALL}.arguments"),
    (calling(function={"arguments": "{}"}), "name is null", f"{CALL}.name"),
    (calling(function={"name": "\ud800", "arguments": "{}"}), "not valid UTF-8", None),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "no parameter", "messages[0].tool_calls"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "words", "param"), BAD)
def test_what_cannot_be_is_said(
    client_of_hermes: Client, body: dict[str, Any], words: str, param: str | None
) -> None:
    status, message, of = refusal(client_of_hermes.ask(CHAT, {**HELLO, **body}))
    assert status == 400 and words in message and of == param


def test_a_model_without_tools_says_so(client: Client) -> None:
    status, message, param = refusal(client.ask(CHAT, {**HELLO, "tools": TOOLS}))
    assert (status, param) == (400, "tools") and "the chat template of tiny has no tools" in message
    assert client.ok("/v1/models")["data"][0]["tools"] is False
    assert client.ok(CHAT, {**HELLO, "tools": TOOLS, "tool_choice": "none", "max_tokens": 1})["choices"]


def test_a_schema_that_is_not_strict_is_kept_as_far_as_it_can_be(client_of_hermes: Client) -> None:
    odd = {"type": "object", "properties": {"a": {"enum": [1], "format": "odd"}}, "required": ["a"]}
    asked = {**HELLO, **tool(parameters={**odd, "additionalProperties": False}), "tool_choice": "required"}
    message = client_of_hermes.ok(CHAT, {**asked, "parallel_tool_calls": False})["choices"][0]["message"]
    assert calls_of(message) == [("weather", {"a": 1})]


@pytest.fixture(scope="module")
def client_of_hermes(other_engine: Engine) -> Iterator[Client]:
    with pytest.MonkeyPatch.context() as patch, talking(other_engine, patch, "hermes") as client:
        assert client.ok("/v1/models")["data"][0]["tools"] is True
        yield client
