"""Anthropic's messages and OpenAI's responses: translated to chats, and back."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import anthropic as official
import openai
import pytest

from anybit import Engine
from anybit.engine.sampling import Drawn
from anybit.errors import InputError
from anybit.kernels import cpu
from anybit.serve.api import anthropic, exchange, responses
from anybit.serve.api import openai as chats
from anybit.serve.api.openai import Wanted
from anybit.serve.api.turns import Turn
from anybit.serve.chat.speech import HERMES, THOUGHTS, Speech
from anybit.serve.errors import BadField, Refused
from anybit.serve.http.app import State
from anybit.serve.http.guard import Guard
from anybit.serve.run.job import Progress, Times
from anybit.serve.run.request import Request
from tests.serve.conftest import Client, refusal, serving, slow_steps
from tests.serve.test_tools import WEATHER, against_blanks, fits, talking

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu.available(), reason="the native extension is not built"),
]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
COUNT = "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0}
MOST = sys.float_info.max
SCHEMA = WEATHER["parameters"]
THEIRS = {"name": "weather", "description": "How it is.", "input_schema": SCHEMA}
FUNCTION = {"type": "function", **WEATHER}


def streamed(client: Client, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """The events of a stream, each with its name."""
    connection, response = client.open(path, {**body, "stream": True})
    assert response.status == 200 and response.getheader("content-type", "").startswith("text/event-stream")
    found = []
    for event in response.read().decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        said = json.loads(data.removeprefix("data: "))
        assert name == f"event: {said['type']}"
        found.append((said["type"], said))
    connection.close()
    return found


def asked_of(parse: Callable[..., Wanted], body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The chat that a body becomes."""
    found: list[Any] = []

    def take(served: Any, chat: Any, key: str) -> Wanted:
        found.append(chat)
        return Wanted(True, [Request([1, 2, 3])])

    monkeypatch.setattr(chats, "chat", take)
    parse(SimpleNamespace(context=64), body, "")
    return {name: value for name, value in found[0].items() if value not in (None, [], False)}


def nested(levels: int) -> Any:
    """A schema so deep."""
    made: Any = {"type": "object"}
    for _ in range(levels):
        made = {"type": "object", "properties": {"a": made}}
    return made


def said(role: str, *blocks: Any) -> list[Any]:
    """The messages of a conversation that is one message of blocks."""
    return [{"role": role, "content": [*blocks]}]


# ---- bodies


def test_a_body_of_messages_becomes_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": "tiny@3.5",
        "max_tokens": 9,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.3; cch=5;"},
            {"type": "text", "text": "Be kind.", **cached}, {"type": "text", "text": "Be short."}],
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be quick."}]},
            {"role": "user", "content": "How is it in Rome?"},
            {"role": "user", "content": [{"type": "text", "text": "And in Oslo?", **cached}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I ask."},
                    {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}},
                    {"type": "tool_use", "id": "b", "name": "weather", "input": {"city": "Oslo"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": "warm"},
                    {"type": "tool_result", "tool_use_id": "b", "is_error": True,
                     "content": [{"type": "text", "text": "un"}, {"type": "text", "text": "known"}]},
                    {"type": "text", "text": "So?"},
                ],
            },
        ],
        "tools": [{**THEIRS, **cached}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "u"},
        "top_k": 5,
        "bits": 3,
    }  # fmt: skip
    calls = [
        {
            "id": name,
            "type": "function",
            "function": {"name": "weather", "arguments": f'{{"city": "{city}"}}'},
        }
        for name, city in (("a", "Rome"), ("b", "Oslo"))
    ]
    assert asked_of(anthropic.messages, body, monkeypatch) == {
        "model": "tiny@3.5",
        "messages": [
            {"role": "system", "content": "Be kind.\n\nBe short.\n\nBe quick."},
            {"role": "user", "content": "How is it in Rome?\n\nAnd in Oslo?"},
            {"role": "assistant", "content": "I ask.", "reasoning_content": "hm", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "a", "content": "warm"},
            {"role": "tool", "tool_call_id": "b", "content": "Error: un\n\nknown"},
            {"role": "user", "content": "So?"},
        ],
        "tools": [{"type": "function", "function": WEATHER}],
        "tool_choice": "required",
        "reasoning_effort": "medium",
        "top_k": 5,
        "bits": 3,
    }


@pytest.mark.parametrize(
    ("theirs", "own"),
    [
        ({"tool_choice": {"type": "auto"}}, {"tool_choice": "auto", "parallel_tool_calls": True}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none", "parallel_tool_calls": True}),
        (
            {"tool_choice": {"type": "tool", "name": "f"}, "tools": [{"name": "f", "input_schema": {}}]},
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
                "tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": True,
            },
        ),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}, {"reasoning_effort": "none"}),
        ({"thinking": {"type": "adaptive"}}, {"reasoning_effort": "medium"}),
        ({"stop_sequences": ["x"]}, {"stop": ["x"]}),
        (
            {"output_config": {"effort": "max", "format": {"type": "json_schema", "schema": SCHEMA}}},
            {
                "reasoning_effort": "xhigh",
                "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            },
        ),
        ({"stream": True}, {"stream": True}),
    ],
)  # fmt: skip
def test_fields_of_messages(theirs: Any, own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"max_tokens": 9, "messages": HELLO, **theirs}
    assert asked_of(anthropic.messages, body, monkeypatch) == {"messages": HELLO, **own}


def test_a_body_of_responses_becomes_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {
        "model": "tiny",
        "instructions": "Be kind.",
        "input": [
            {"role": "developer", "content": "Be short."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "How is it in Rome?"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "id": "m", "status": "completed",
             "content": [{"type": "output_text", "text": "I ask.", "annotations": [], "logprobs": []}]},
            {"type": "function_call", "id": "f", "call_id": "a", "name": "weather", "arguments": "{}"},
            {"type": "function_call", "call_id": "b", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "warm"},
            {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "cold"}]},
            {"role": "user", "content": "So?"},
        ],
        "tools": [FUNCTION],
        "tool_choice": {"type": "function", "name": "weather"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "low", "format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        "include": ["reasoning.encrypted_content"],
        "max_output_tokens": 9,
        "store": True,
        "top_p": 0.5,
        "stream": True,
    }  # fmt: skip
    calls = [
        {"id": name, "type": "function", "function": {"name": "weather", "arguments": "{}"}} for name in "ab"
    ]
    assert asked_of(responses.responses, body, monkeypatch) == {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "Be kind.\n\nBe short."},
            {"role": "user", "content": "How is it in Rome?"},
            {"role": "assistant", "content": "I ask.", "reasoning_content": "hm", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "a", "content": "warm"},
            {"role": "tool", "tool_call_id": "b", "content": "cold"},
            {"role": "user", "content": "So?"},
        ],
        "tools": [{"type": "function", "function": WEATHER}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": True,
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        "max_completion_tokens": 9,
        "top_p": 0.5,
        "stream": True,
    }


def test_what_codex_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    space = {"type": "namespace", "name": "agents", "description": "Others.", "tools": [FUNCTION]}
    search = {"type": "web_search", "external_web_access": False}
    body = {
        "input": "a",
        "tools": [{**FUNCTION, "name": "shell"}, space, search],
        "client_metadata": {"a": "b"},
    }
    found = asked_of(responses.responses, body, monkeypatch)
    assert [tool["function"]["name"] for tool in found["tools"]] == ["shell", "weather"]
    called = [
        {"type": "function_call", "call_id": "c", "name": "weather", "namespace": "agents", "arguments": "{}"}
    ]
    assert asked_of(responses.responses, {"input": [*HELLO, *called, *HELLO]}, monkeypatch)["messages"]


@pytest.mark.parametrize("space", [{}, {"tools": None}, {"tools": []}])
def test_a_namespace_may_be_empty(client: Client, space: Any) -> None:
    asked = {"input": "a", "max_output_tokens": 2, "tools": [{"type": "namespace", "name": "n", **space}]}
    assert client.ok(RESPONSES, asked)["tools"] == asked["tools"]


def test_a_call_says_its_namespace() -> None:
    exchange: Any = Told([SPOKEN], "stop", True)
    exchange.wanted.said["tools"] = [{"type": "namespace", "name": "agents", "tools": [FUNCTION]}]
    whole = asyncio.run(responses.Response(exchange).whole())
    assert json.loads(b"".join(whole))["output"][2]["namespace"] == "agents"


def test_what_a_system_says_later_becomes_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {
        "max_tokens": 9,
        "messages": [*HELLO, {"role": "system", "content": "Now."}],
        "system": "Be kind.",
    }
    assert asked_of(anthropic.messages, body, monkeypatch)["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hello\n\nNow."},
    ]


def test_a_summary_stands_for_a_thought_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    thought = {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "hm"}],
        "encrypted_content": "x",
    }
    body = {"input": [thought, {"role": "assistant", "content": "a"}, *HELLO]}
    first = asked_of(responses.responses, body, monkeypatch)["messages"][0]
    assert first == {"role": "assistant", "content": "a", "reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": HELLO}, "max_tokens"),
        ({"max_tokens": 0, "messages": HELLO}, "max_tokens"),
        ({"max_tokens": 9}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
        (
{"messages": said("user", {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]})},
            "messages[0].content[0].content[0].type",
        ),
        ({"messages": [*HELLO, {"role": "assistant", "content": "a"}]}, "messages"),
        (
{"messages": [*said("assistant", {"type": "tool_use", "id": "a", "name": "f", "input": 3}), *HELLO]},
            "messages[0].content[0].input",
        ),
        (
{"messages": [*said("assistant", {"type": "tool_use", "id": "a", "name": "f", "input": nested(900)}), *HELLO]},
            "messages[0].content[0].input",
        ),
        ({"system": 3}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f g", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [THEIRS], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tools": [THEIRS], "tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 3}}}, "output_config.format.schema"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"speed": "fast"}, "speed"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{**THEIRS, "allowed_callers": ["code_execution_20260120"]}]}, "tools[0].allowed_callers"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}, *HELLO]},
            "messages[1].content[0].name",
        ),
        ({"n": 2}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"thinking": {"type": "enabled", "display": "loud"}}, "thinking.display"),
        ({"output_config": {"effort": "none"}}, "output_config.effort"),
    ],
)  # fmt: skip
def test_bodies_of_messages_that_cannot_be(server: tuple[Client, State], body: Any, param: str) -> None:
    served = server[1].served
    whole = body if "max_tokens" in body or body == {"messages": HELLO} else {"max_tokens": 9, **body}
    if "messages" not in whole and param != "messages":
        whole["messages"] = HELLO
    with pytest.raises(BadField) as error:
        anthropic.messages(served, whole, "")  # type: ignore[arg-type]
    assert error.value.param == param and "function" not in str(error.value).replace("functions", "")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": "a", "previous_response_id": "r"}, "previous_response_id"),
        ({"input": "a", "conversation": "c"}, "conversation"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "truncation": "auto"}, "truncation"),
        ({"input": "a", "include": ["message.output_text.logprobs"]}, "include"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        (
            {"input": "a", "tools": [{"type": "function", "name": "f", "parameters": 3}]},
            "tools[0].parameters",
        ),
        (
            {"input": "a", "tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}},
            "tool_choice",
        ),
        ({"input": "a", "reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "schema": 3}}}, "text.format.schema"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"input": "a", "top_logprobs": 3}, "top_logprobs"),
        ({"input": "a", "metadata": 5}, "metadata"),
        ({"input": "a", "user": [1]}, "user"),
        ({"input": [*HELLO, *HELLO, {"type": "function_call", "arguments": "{}"}]}, "input[2].name"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id"),
        ({"input": "a", "tools": [{"type": "web_search", "external_web_access": True}]}, "tools[0].type"),
        ({"input": "a", "tools": [{"type": "namespace", "tools": 3}]}, "tools[0].tools"),
        ({"input": "a", "tools": [{"type": "namespace", "name": []}]}, "tools[0].name"),
        (
            {"input": "a", "tools": [{"type": "namespace", "tools": [{"type": "namespace"}]}]},
            "tools[0].tools[0].type",
        ),
        ({"input": "a", "tools": [{**FUNCTION, "parameters": nested(99)}]}, "tools[0].parameters"),
        (
            {"input": "a", "tools": [{"type": "web_search", "external_web_access": False, "a": nested(99)}]},
            "tools",
        ),
        ({"input": "a", "metadata": {"a": 5}}, "metadata"),
        ({"input": "a", "metadata": {"a" * 65: ""}}, "metadata"),
        ({"input": "a", "metadata": {"a": "b" * 513}}, "metadata"),
        ({"input": "a", "metadata": dict.fromkeys(map(str, range(17)), "b")}, "metadata"),
        ({"input": "a", "bits": 10**400}, "bits"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "stop": "x"}, "stop"),
    ],
)
def test_bodies_of_responses_that_cannot_be(server: tuple[Client, State], body: Any, param: str) -> None:
    with pytest.raises(BadField) as error:
        responses.responses(server[1].served, body, "")  # type: ignore[arg-type]
    assert error.value.param == param and param.rpartition(".")[2] in str(error.value)


ODD = [
    None,
    True,
    0,
    -1,
    2**70,
    0.5,
    "",
    "a",
    "\ud800",
    [],
    {},
    [[]],
    [None],
    {"type": "text"},
    {"a": {"b": []}},
]
WHOLE = {
    "system": [{"type": "text", "text": "a"}],
    "messages": [
        *HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm"},
                {"type": "tool_use", "id": "a", "name": "f", "input": {}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "b"}]},
    ],
    "thinking": {"type": "enabled"},
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    "stop_sequences": ["x"],
    "max_tokens": 3,
}
WHOLE_INPUT = {
    "instructions": "a",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "b"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "c"},
    ],
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    "include": [],
    "stream_options": {},
}


def places(value: Any) -> list[tuple[Any, Any]]:
    """Everything within a value, each as what holds it and where."""
    keys = [*value] if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [place for key in keys for place in ((value, key), *places(value[key]))]


@pytest.mark.parametrize(
    ("parse", "whole"),
    [(anthropic.messages, WHOLE), (responses.responses, WHOLE_INPUT)],
    ids=["messages", "responses"],
)
def test_odd_bodies_are_refused_or_served(server: tuple[Client, State], parse: Any, whole: Any) -> None:
    """Every value of a body replaced by every odd one; and by nothing."""
    served, outcomes = server[1].served, set()
    parse(served, whole, "")
    for at in range(len(places(whole))):
        for odd in [*ODD, KeyError]:
            body = json.loads(json.dumps(whole))
            holder, key = places(body)[at]
            if odd is KeyError:
                del holder[key]
            else:
                holder[key] = odd
            try:
                outcomes.add(parse(served, body, "").chat)
            except (InputError, Refused):
                outcomes.add(False)
    assert outcomes == {True, False}


# ---- answers, of a text that is given

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SPOKEN = f"<think>\nhm\n</think>\n\nI ask.\n{CALL}"
SPEECH = Speech(HERMES, ("weather",), THOUGHTS[0])


class Told:
    """An exchange of one text, in pieces that are given."""

    def __init__(self, pieces: list[str], finish: str, shown: bool) -> None:
        self.pieces, self.finish = pieces, finish
        said = {"instructions": "Be kind.", "thoughts": shown}
        self.wanted = Wanted(True, [Request([1])], speech=SPEECH, most=len(pieces), said=said)
        text, stream = SimpleNamespace(prompt=5, cached=2), SimpleNamespace(stopped=None)
        job = SimpleNamespace(
            text=text, stream=stream, drawn=0, times=Times(), levels={0: 3}, drafted=0, accepted=0
        )
        self.jobs, self.served = [job], SimpleNamespace(name="tiny", engine=SimpleNamespace(widths=[3.0]))

    async def progress(self) -> AsyncIterator[list[tuple[int, Progress]]]:
        for at, piece in enumerate(self.pieces):
            self.jobs[0].drawn += 1
            last = at + 1 == len(self.pieces)
            if last and self.finish == "fault":
                raise Refused(500, "broken")
            yield [(0, Progress(piece, Drawn(7), self.finish if last else None))]


def told(
    form: Callable[[Any], Turn], pieces: list[str], finish: str = "stop", shown: bool = True
) -> tuple[Any, list[Any]]:
    """The whole answer, and the events of a stream."""

    async def both() -> tuple[bytes, str]:
        exchange: Any = Told(pieces, finish, shown)
        events = "".join([event async for event in form(exchange).events()])
        exchange = Told(pieces, finish, shown)
        whole = b"" if finish == "fault" else b"".join(await form(exchange).whole())
        return whole, events

    whole, events = asyncio.run(both())
    return json.loads(whole or b"{}"), [
        json.loads(event.split("data: ")[1]) for event in events.split("\n\n")[:-1]
    ]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_the_blocks_of_a_message(size: int) -> None:
    pieces = [SPOKEN[at : at + size] for at in range(0, len(SPOKEN), size)]
    whole, events = told(anthropic.Message, pieces)
    use = whole["content"][2]
    assert whole["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": anthropic.SIGNATURE},
        {"type": "text", "text": "I ask."},
        {"type": "tool_use", "id": use["id"], "name": "weather", "input": {"city": "Rome"}},
    ]
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "tiny")
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
    usage = {"input_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2}
    thoughts = whole["usage"].pop("output_tokens_details")["thinking_tokens"]
    assert whole["usage"] == {**usage, "output_tokens": len(pieces)}
    assert events[0]["message"]["usage"].pop("output_tokens_details")["thinking_tokens"] == 0
    if size == 1:  # from the last character of its tag to the last but one of the other's
        assert thoughts == len(">\nhm\n</think")
    assert whole["timings"]["bits"] == {"min": 3.0, "mean": 3.0, "max": 3.0}

    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert events[0]["message"]["content"] == [] and events[0]["message"]["usage"] == {
        **usage,
        "output_tokens": 0,
    }
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    blocks: list[dict[str, Any]] = []
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "input": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1 and not blocks[-1].get("ended")
            (name,) = event["delta"].keys() - {"type"}
            if name == "signature":
                assert event["delta"] == {"type": "signature_delta", "signature": anthropic.SIGNATURE}
                continue
            assert event["delta"]["type"] == {
                "text": "text_delta", "thinking": "thinking_delta", "partial_json": "input_json_delta"
            }[name]  # fmt: skip
            blocks[-1]["input" if name == "partial_json" else name] += event["delta"][name]
        else:
            assert event == {"type": "content_block_stop", "index": len(blocks) - 1}
            blocks[-1]["ended"] = True
    assert all(block["ended"] for block in blocks)
    assert (blocks[0]["thinking"], blocks[1]["text"]) == ("hm", "I ask.")
    assert json.loads(blocks[2]["input"]) == {"city": "Rome"} and blocks[2]["name"] == "weather"


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_the_items_of_a_response(size: int) -> None:
    pieces = [SPOKEN[at : at + size] for at in range(0, len(SPOKEN), size)]
    whole, events = told(responses.Response, pieces)
    thought, text, call = whole["output"]
    assert thought["type"] == "reasoning" and thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert text["type"] == "message" and text["role"] == "assistant"
    assert text["content"] == [{"type": "output_text", "text": "I ask.", "annotations": [], "logprobs": []}]
    assert (call["type"], call["name"]) == ("function_call", "weather")
    assert json.loads(call["arguments"]) == {"city": "Rome"}
    assert {item["status"] for item in whole["output"]} == {whole["status"]} == {"completed"}
    assert whole["instructions"] == "Be kind." and whole["incomplete_details"] is None
    usage = whole["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (5, len(pieces))
    assert usage["input_tokens_details"] == {"cached_tokens": 2}
    if size == 1:
        assert usage["output_tokens_details"] == {"reasoning_tokens": len(">\nhm\n</think")}

    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last["type"] == "response.completed"
    texts = {0: "", 1: "", 2: ""}
    for event in events[2:-1]:
        kind, at = event["type"], event["output_index"]
        if kind == "response.output_item.added":
            assert event["item"]["status"] == "in_progress" and not texts[at]
        elif kind.endswith(".delta"):
            texts[at] += event["delta"]
        elif kind in ("response.output_text.done", "response.reasoning_text.done"):
            assert event["text"] == texts[at]
        elif kind == "response.function_call_arguments.done":
            assert event["arguments"] == texts[at]
        elif kind == "response.output_item.done":
            assert event["item"] == last["response"]["output"][at]
        else:
            assert kind in ("response.content_part.added", "response.content_part.done")
    assert texts == {0: "hm", 1: "I ask.", 2: call["arguments"]}


def test_a_call_that_was_cut_is_no_json() -> None:
    cut = SPOKEN[: SPOKEN.index("Rome")]
    whole, events = told(anthropic.Message, [cut], finish="length")
    assert whole["content"][2]["input"] == {} and whole["stop_reason"] == "max_tokens"
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    whole, events = told(responses.Response, [cut], finish="length")
    assert whole["output"][2]["arguments"] == '{"city": "'
    assert [item["status"] for item in whole["output"]] == ["completed", "completed", "incomplete"]
    assert whole["status"] == "incomplete" and whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events[-1]["type"] == "response.incomplete" and events[-2]["item"]["status"] == "incomplete"


def test_thoughts_may_be_omitted() -> None:
    whole, events = told(anthropic.Message, [*SPOKEN], shown=False)
    assert whole["content"][0] == {"type": "thinking", "thinking": "", "signature": anthropic.SIGNATURE}
    assert whole["content"][1]["text"] == "I ask." and "hm" not in str(events)


def test_an_answer_may_be_empty() -> None:
    whole, events = told(anthropic.Message, [""])
    assert whole["content"] == [] and whole["stop_reason"] == "end_turn"
    assert [event["type"] for event in events] == ["message_start", "message_delta", "message_stop"]
    whole, events = told(responses.Response, [""])
    assert whole["output"] == [] and events[-1]["type"] == "response.completed"


def test_an_error_that_comes_late_ends_the_stream() -> None:
    _, events = told(anthropic.Message, ["a", "b"], finish="fault")
    assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "broken"}}
    _, events = told(responses.Response, ["a", "b"], finish="fault")
    failed = events[-1]["response"]
    assert events[-1]["type"] == "response.failed" and failed["status"] == "failed"
    assert failed["error"] == {"code": "server_error", "message": "broken"}
    _, events = told(responses.Response, ["a"], finish="fault")
    assert [event["type"] for event in events] == ["error"] and events[0]["message"] == "broken"


# ---- over HTTP


def test_all_apis_say_the_same(client: Client) -> None:
    said = client.ok(CHAT, {"messages": HELLO, "max_tokens": 12, **GREEDY})
    text, asked = said["choices"][0]["message"]["content"], {"max_tokens": 12, "messages": HELLO, **GREEDY}
    assert text
    for bits in ({}, {"bits": 3}):
        theirs = client.ok(CHAT, {"messages": HELLO, "max_tokens": 12, **GREEDY, **bits})
        message = client.ok(MESSAGES, {**asked, **bits})
        assert message["content"] == [{"type": "text", "text": theirs["choices"][0]["message"]["content"]}]
        assert message["timings"]["bits"] == theirs["timings"]["bits"]
        counted = message["usage"]
        assert (
            counted["input_tokens"] + counted["cache_read_input_tokens"] == theirs["usage"]["prompt_tokens"]
        )
        assert counted["output_tokens"] == theirs["usage"]["completion_tokens"]
    assert client.ok(COUNT, {"messages": HELLO}) == {"input_tokens": said["usage"]["prompt_tokens"]}
    events = streamed(client, MESSAGES, asked)
    assert "".join(event["delta"]["text"] for kind, event in events if kind == "content_block_delta") == text

    asked = {"input": "hello", "max_output_tokens": 12, **GREEDY}
    response = client.ok(RESPONSES, asked)
    assert response["output"][0]["content"][0]["text"] == text and response["temperature"] == 0
    events = streamed(client, RESPONSES, asked)
    assert "".join(event["delta"] for kind, event in events if kind == "response.output_text.delta") == text


def test_why_a_message_ends(client: Client, state: State) -> None:
    asked = {"messages": HELLO, **GREEDY}
    short = client.ok(MESSAGES, {**asked, "max_tokens": 3})
    assert (short["stop_reason"], short["usage"]["output_tokens"]) == ("max_tokens", 3)
    text = client.ok(MESSAGES, {**asked, "max_tokens": 12})["content"][0]["text"]
    stopped = client.ok(MESSAGES, {**asked, "max_tokens": 12, "stop_sequences": [text[2:4]]})
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", text[2:4])
    # More than the context holds may be asked for, and is not silently less.
    long = client.ok(MESSAGES, {**asked, "max_tokens": 10**6, "ignore_eos": True})
    counted = long["usage"]
    assert counted["input_tokens"] + counted["cache_read_input_tokens"] + counted["output_tokens"] == (
        state.ready().context
    )
    assert long["stop_reason"] == "model_context_window_exceeded"
    for length in (200, 9999):
        user = [{"role": "user", "content": "a" * length}]
        status, error, _ = client.ask(MESSAGES, {"messages": user, "max_tokens": 3})
        assert status == 400 and error["error"]["message"].startswith("prompt is too long: the ")
        assert "context holds" in error["error"]["message"] and "more are" not in error["error"]["message"]
        _, error, _ = client.ask(RESPONSES, {"input": user})
        assert error["error"]["code"] == "context_length_exceeded"


def test_errors_have_the_form_of_their_api(client: Client, other_engine: Engine) -> None:
    bad = {"max_tokens": 3, "messages": HELLO, "model": "claude"}
    for path in (MESSAGES, COUNT):
        status, found, _ = client.ask(path, bad)
        assert (status, found["type"], found["error"]["type"]) == (404, "error", "not_found_error")
        assert "'claude'" in found["error"]["message"] and set(found["error"]) == {"type", "message"}
        status, found, _ = client.ask(path, b"{")
        assert (status, found["error"]["type"]) == (400, "invalid_request_error")
        assert client.ask(path)[0] == 405
    assert client.ask(f"{MESSAGES}/batches")[1]["type"] == "error"
    assert refusal(client.ask(RESPONSES, {"input": "a", "model": "gpt"}))[0] == 404
    with serving(other_engine, Guard(keys=("secret",))) as (guarded, _):
        asked = {"max_tokens": 3, "messages": HELLO}
        status, found, _ = guarded.ask(MESSAGES, asked)
        assert (status, found["error"]["type"]) == (401, "authentication_error")
        assert guarded.ask(MESSAGES, asked, headers={"x-api-key": "wrong"})[0] == 401
        assert guarded.ask(MESSAGES, asked, headers={"x-api-key": "secret"})[0] == 200
        assert guarded.ask(CHAT, asked, headers={"x-api-key": "secret"})[0] == 200
        for first, second in (("secret", "other"), ("other", "secret")):
            both = {"x-api-key": first, "Authorization": f"Bearer {second}"}
            assert guarded.ask(MESSAGES, asked, headers=both)[0] == 200
        both = {"x-api-key": "other", "Authorization": "Basic secret"}
        assert guarded.ask(MESSAGES, asked, headers=both)[0] == 401


def test_a_stream_says_that_it_is_alive(other_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "SILENT_SECONDS", 0.02)
    with slow_steps(monkeypatch, 0.2), serving(other_engine) as (client, _):
        asked = {"messages": HELLO, "max_tokens": 2}
        kinds = [kind for kind, _ in streamed(client, MESSAGES, asked)]
        begins = kinds.index("message_start")
        assert begins > 2 and {*kinds[:begins]} == {"ping"} and kinds[begins:].count("ping") > 2
        found = streamed(client, RESPONSES, {"input": "hello", "max_output_tokens": 6})
        kinds = [kind for kind, _ in found]
        assert kinds[0] == "response.created" and kinds.count("response.created") == 1
        assert {*kinds[1 : kinds.index("response.output_item.added")]} == {"response.in_progress"}
        assert "response.in_progress" in kinds[kinds.index("response.output_item.added") :]
        assert [said["sequence_number"] for _, said in found] == [*range(len(found))]
        connection, response = client.open(CHAT, {**asked, "stream": True})
        said = response.read().decode()
        connection.close()
        assert said.startswith(": waiting\n\n: waiting\n\n") and said.endswith("data: [DONE]\n\n")
        assert ": waiting" in said.partition("data: ")[2]


def test_a_thought_that_is_not_shown_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "SILENT_SECONDS", 0.0)
    _, events = told(anthropic.Message, ["<think>", "a", "b", "</think>", "c"], shown=False)
    kinds = [event["type"] for event in events]
    assert kinds.count("ping") >= 2 and "thinking_delta" not in str(events)


def test_what_an_answer_repeats_may_be_half_a_pair(client: Client) -> None:
    asked = {"input": "a", "metadata": {"\ud800": "b\ud800"}, "max_output_tokens": 3}
    assert client.ok(RESPONSES, asked)["metadata"] == {"?": "b?"}
    assert streamed(client, RESPONSES, asked)[-1][1]["response"]["metadata"] == {"?": "b?"}
    low = client.ok(RESPONSES, {**asked, "text": {"verbosity": "low"}, "reasoning": {"effort": "low"}})
    assert low["text"] == {"verbosity": "low", "format": {"type": "text"}}
    assert low["reasoning"] == {"effort": "low", "summary": None}
    assert refusal(client.ask(RESPONSES, b'{"input": "a", "metadata": {"a": 1e999}}'))[0] == 400


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"a": 1e999, "b": -1e999, "c": 0.5, "d": 7}', {"a": MOST, "b": -MOST, "c": 0.5, "d": 7}),
        ('{"a": 1' + 5000 * "0" + ', "b": ' + str(2**70) + "}", {"a": MOST, "b": 2**70}),
        ('{"a": ' + 5000 * "[", {}),
        ('{"a": ' + 40 * "[" + 40 * "]" + "}", {}),
    ],
)
def test_whatever_arguments_a_model_writes_an_answer_is_json(written: str, read: Any) -> None:
    whole, _ = told(anthropic.Message, ['<tool_call>\n{"name": "weather", "arguments": ', written], "length")
    assert whole["content"][-1]["input"] == read


def test_stop_sequences_beside_tools(other_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"max_tokens": 2, "messages": HELLO, "tools": [THEIRS], "stop_sequences": ["x"]}
    with talking(other_engine, monkeypatch, "hermes") as client:
        status, found, _ = client.ask(MESSAGES, asked)
        assert status == 400 and found["error"]["message"].startswith("stop_sequences could end a call")
        client.ok(MESSAGES, {**asked, "tool_choice": {"type": "none"}})  # no call can be made


def test_tools_over_both(other_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with talking(other_engine, monkeypatch, "hermes") as client:
        hot = {"temperature": 1.5, "seed": 3}
        asked = {
            "max_tokens": 200,
            "messages": HELLO,
            "tools": [THEIRS],
            "tool_choice": {"type": "any"},
            **hot,
        }
        message = client.ok(MESSAGES, asked)
        uses = [block for block in message["content"] if block["type"] == "tool_use"]
        assert uses and all(fits((use["name"], use["input"])) for use in uses)
        assert message["stop_reason"] == "tool_use"
        assert client.ok(COUNT, {"messages": HELLO, "tools": [THEIRS]})["input_tokens"] == sum(
            message["usage"][name] for name in ("input_tokens", "cache_read_input_tokens")
        )
        asked = {"input": "hello", "tools": [FUNCTION], "tool_choice": "required", **hot}
        response = client.ok(RESPONSES, asked)
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
            (use["name"], use["input"]) for use in uses
        ]
        assert response["tools"] == [FUNCTION]


def test_efforts_are_variables_of_the_template(other_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with talking(other_engine, monkeypatch, "hermes") as client:
        template = "{{ enable_thinking }}{{ reasoning_effort }}{{ messages[0].content }}"
        monkeypatch.setattr(other_engine.tokenizer, "chat_template", template)

        def tokens(**more: Any) -> Any:
            return client.ok("/tokenize", {"messages": HELLO, **more})["count"]

        assert tokens(reasoning_effort="none") == len("Falsenonehello")
        assert tokens(reasoning_effort="low") == len("Truelowhello")
        assert tokens(reasoning_effort="low", chat_template_kwargs={"enable_thinking": ""}) == len("lowhello")
        assert client.ok(COUNT, {"messages": HELLO, "thinking": {"type": "disabled"}})["input_tokens"] == 14
        assert (
            refusal(client.ask(CHAT, {"messages": HELLO, "reasoning_effort": "much"}))[2]
            == "reasoning_effort"
        )


@pytest.mark.e2e
def test_the_official_clients(client: Client) -> None:
    at = f"http://127.0.0.1:{client.port}"
    theirs = official.Anthropic(base_url=at, api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "messages": HELLO, "extra_body": GREEDY}
    message = theirs.messages.create(**asked)
    with theirs.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert message.content[0].text == text == final.content[0].text  # type: ignore[union-attr]
    assert (
        final.stop_reason == message.stop_reason and final.usage.output_tokens == message.usage.output_tokens
    )
    counted = theirs.messages.count_tokens(model="tiny", messages=HELLO)  # type: ignore[arg-type]
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    assert [(model.id, model.type, model.created_at.year) for model in theirs.models.list()] == [
        ("tiny", "model", 1970)
    ]
    with pytest.raises(official.NotFoundError, match="claude"):
        theirs.messages.create(**{**asked, "model": "claude"})

    api = openai.OpenAI(base_url=f"{at}/v1", api_key="none", max_retries=0)
    whole = api.responses.create(model="tiny", input="hello", temperature=0, max_output_tokens=12)
    assert whole.output_text == text and whole.usage is not None
    with api.responses.stream(model="tiny", input="hello", temperature=0, max_output_tokens=12) as events:
        last: Any = [*events][-1]
    assert last.response.output_text == text and last.type == "response.incomplete"
    with pytest.raises(openai.BadRequestError, match="keeps nothing"):
        api.responses.create(model="tiny", input="hello", previous_response_id="r")


@pytest.mark.e2e
@pytest.mark.parametrize("thinks", [False, True], ids=["tools", "thoughts"])
def test_the_official_clients_stream_more_than_texts(
    other_engine: Engine, monkeypatch: pytest.MonkeyPatch, thinks: bool
) -> None:
    thought = {"chat_template_kwargs": {"thinks": "<think>\n"}, "ignore_eos": True, **GREEDY}
    with talking(other_engine, monkeypatch, "hermes", thinks=thinks) as client:
        at = f"http://127.0.0.1:{client.port}"
        greedy = {**GREEDY, "logit_bias": against_blanks(other_engine)}
        asked: Any = {"model": "tiny", "max_tokens": 200, "messages": HELLO, "extra_body": greedy}
        if thinks:
            asked |= {"max_tokens": 12, "extra_body": thought}
        else:
            asked |= {"tools": [THEIRS], "tool_choice": {"type": "any"}}
        with official.Anthropic(base_url=at, api_key="none", max_retries=0).messages.stream(
            **asked
        ) as stream:
            block = stream.get_final_message().content[-1]
        asked = {"model": "tiny", "input": "hello", "extra_body": greedy}
        if thinks:
            asked |= {"max_output_tokens": 12, "extra_body": thought}
        else:
            asked |= {"tools": [FUNCTION], "tool_choice": "required"}
        with openai.OpenAI(base_url=f"{at}/v1", api_key="none", max_retries=0).responses.stream(
            **asked
        ) as events:
            last: Any = [*events][-1]
        item = last.response.output[-1]
        if thinks:
            assert block.type == "thinking" and item.type == "reasoning"
            assert block.thinking == item.content[0].text != ""
        else:
            assert block.type == "tool_use" and item.type == "function_call"
            assert (block.name, block.input) == (item.name, json.loads(item.arguments))
            assert fits((block.name, block.input))
