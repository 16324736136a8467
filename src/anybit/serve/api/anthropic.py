"""Anthropic's messages API: its bodies as OpenAI's chats, and answers in its form.

https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from anybit.config import Json
from anybit.errors import printable
from anybit.serve.api import openai
from anybit.serve.api.turns import Block, Event, Turn, as_here, block_text, joined, needed, passed, text_of
from anybit.serve.chat.constraint import DEEPEST, depth
from anybit.serve.chat.conversation import MOST_MESSAGES, MOST_TOOLS, conversation
from anybit.serve.chat.speech import CALL, CONTENT, REASONING
from anybit.serve.errors import BadField, Refused, TooLong
from anybit.serve.fields import Fields
from anybit.serve.served import Served

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
NAMES = {  # of fields that are others in a chat
    ".function.parameters": ".input_schema",
    ".function.": ".",
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
}
# Efforts, and what they are in a chat.
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
CONVERSATION = (  # fields of a chat, which make its prompt
    "messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort",
)  # fmt: skip
BILLING = "x-anthropic-billing-header:"  # how a block begins that is for Anthropic's servers
MOST_DIGITS = 300  # of a whole number in the arguments of a call
SIGNATURE = "anybit"  # of thoughts: some clients drop those that have none
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# What clients send that changes nothing of an answer here.
INERT = (
    "metadata", "service_tier", "context_management", "cache_control", "inference_geo", "diagnostics",
    "user_profile_id", "workspace_id",
)  # fmt: skip
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(found: Refused) -> Json:
    """A refusal in Anthropic's form."""
    kind = KINDS.get(found.status, "api_error" if found.status >= 500 else "invalid_request_error")
    # Coding agents know by these words that a conversation has to be shortened.
    message = f"prompt is too long: {found.message}" if found.code == TooLong.code else found.message
    return {"type": "error", "error": {"type": kind, "message": printable(message)}}


# ---- requests


def messages(served: Served, body: Json, key: str) -> openai.Wanted:
    """A body of /v1/messages.

    Raises:
        InputError: what of it cannot be.
        Refused: another model.
    """
    fields = Fields(body)
    most = fields.whole("max_tokens", None, 1, openai.MOST_TOKENS)
    if most is None:
        raise fields.bad("max_tokens", None, f"a whole number from 1 to {openai.MOST_TOKENS}")
    chat = {**passed(fields), "stream": fields.flag("stream")}
    shown = _conversation(fields, chat)
    stop = fields.texts("stop_sequences", openai.MOST_STOPS, openai.LONGEST_STOP, least=0)
    chat["stop"] = list(stop or ())
    fields.only("speed", "standard")
    fields.accept(*INERT)
    fields.finish()
    with as_here(NAMES):
        wanted = openai.chat(served, chat, key)
    (request,) = wanted.requests
    room = served.context - len(request.tokens)
    request = replace(request, most=min(most, room) if room > 0 else None)
    return replace(wanted, requests=[request], most=most, said={"thoughts": shown})


def count(served: Served, body: Json, key: str) -> int:
    """The tokens of a body of /v1/messages/count_tokens.

    Raises:
        InputError: what of it cannot be.
        Refused: another model.
    """
    fields = Fields(body)
    openai.asked_bits(served, fields)
    chat = passed(fields)
    _conversation(fields, chat)
    fields.accept(*INERT)
    fields.finish()
    chat = {name: chat[name] for name in CONVERSATION if name in chat}
    with as_here(NAMES):
        return len(served.encode_chat(conversation(Fields(chat))).tokens)


def _conversation(fields: Fields, chat: Json) -> bool:
    """Give a chat of OpenAI's what of a body is about the conversation; returns whether thoughts are shown."""
    made: list[Json] = []
    if (system := fields.any("system")) is not None:
        if isinstance(system, list):
            # Claude Code's is another in each conversation, whose prompts would not be found in the cache.
            system = [block for block in system if not _is_billing(block)]
        if text := text_of(system, "system", ("text",)):
            made.append({"role": "system", "content": text})
    found = fields.any("messages")
    if not isinstance(found, list) or not 1 <= len(found) <= MOST_MESSAGES:
        raise BadField("messages", f"messages is expected to be a list of 1 to {MOST_MESSAGES} messages")
    for i, message in enumerate(found):
        made += _message(message, f"messages[{i}].")
    if made[-1]["role"] == "assistant":
        raise BadField("messages", "the last message is the assistant's: this server begins answers itself")
    effort, form = _output(fields)
    thinks, shown = _thinking(fields)
    if thinks is not None or effort is not None:
        chat["reasoning_effort"] = "none" if thinks is False else effort or "medium"
    chat |= {"messages": joined(made), **_tools(fields), "response_format": form}
    return shown


def _is_billing(block: Any) -> bool:
    text = block.get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and text.startswith(BILLING)


def _message(found: Any, whose: str) -> list[Json]:
    """A message as one of a chat, or several: results of calls are messages of their own."""
    own = Fields(found, whose)
    role, content = own.text("role"), own.any("content")
    own.finish()
    if role not in ("user", "assistant", "system"):
        raise own.bad("role", role, '"user", "assistant" or "system"')
    if isinstance(content, str) or role == "system":
        return [{"role": role, "content": text_of(content, f"{whose}content", ("text",))}]
    if not isinstance(content, list):
        raise own.bad("content", content, "a string, or a list of blocks")
    made = [_block(block, role, f"{whose}content[{j}].") for j, block in enumerate(content)]
    return [{"role": role, "content": "", **one} for one in made] or [{"role": role, "content": ""}]


def _block(found: Any, role: str, whose: str) -> Json:
    own = Fields(found, whose)
    kind = own.any("type")
    if kind == "text":
        return {"content": block_text(Fields(found, whose), ("text",))}
    own.accept("cache_control")
    if role == "user" and kind == "tool_result":
        made: Json = {"role": "tool", "tool_call_id": needed(own, "tool_use_id")}
        text = text_of(own.any("content", ""), f"{whose}content", ("text",))
        made["content"] = f"Error: {text}" if own.flag("is_error") else text
        own.accept("toolset_name")
    elif role == "assistant" and kind == "tool_use":
        name, arguments = needed(own, "name"), own.any("input", {})
        if not isinstance(arguments, dict) or depth(arguments) > DEEPEST:
            raise own.bad("input", arguments, f"an object of at most {DEEPEST} levels")
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        made = {"tool_calls": [{"id": needed(own, "id"), "type": "function", "function": function}]}
        own.accept("caller", "toolset_name")
    elif role == "assistant" and kind == "thinking":
        made = {"reasoning_content": needed(own, "thinking")}
        own.accept("signature")
    elif role == "assistant" and kind == "redacted_thinking":  # which nobody here can read
        own.accept("data")
        made = {}
    else:
        there = '"text", "tool_result"' if role == "user" else '"text", "thinking", "tool_use"'
        raise own.bad("type", kind, there)
    own.finish()
    return made


def _tools(fields: Fields) -> Json:
    """`tools` and `tool_choice` as OpenAI's chats have them."""
    found, choice = fields.any("tools", []), fields.inside("tool_choice")
    if not isinstance(found, list) or len(found) > MOST_TOOLS:
        raise BadField("tools", f"tools is expected to be a list of at most {MOST_TOOLS} functions")
    made: Json = {"tools": [_tool(tool, f"tools[{i}].") for i, tool in enumerate(found)]}
    if choice is None:
        return made
    kind, name = choice.text("type"), choice.text("name")
    made["parallel_tool_calls"] = not choice.flag("disable_parallel_tool_use")
    choice.finish()
    if kind == "tool" and name is not None:
        made["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif kind in CHOICES and name is None:
        made["tool_choice"] = CHOICES[kind]
    else:
        raise choice.bad("type", kind, '"auto", "any", "none", or "tool" with a name')
    return made


def _tool(found: Any, whose: str) -> Json:
    own = Fields(found, whose)
    own.only("type", "custom")  # tools of Anthropic's own servers are not here
    function = {name: own.any(name) for name in ("name", "description", "strict") if name in own}
    function["parameters"] = own.any("input_schema")
    if function["parameters"] is None:
        raise own.bad("input_schema", None, "a schema of an object")
    own.only("allowed_callers", ["direct"])
    own.accept("cache_control", "input_examples", "eager_input_streaming", "defer_loading")
    own.finish()
    return {"type": "function", "function": function}


def _thinking(fields: Fields) -> tuple[bool | None, bool]:
    """`thinking`: whether there are thoughts, where that is said, and whether they are shown."""
    asked = fields.inside("thinking")
    if asked is None:
        return None, True
    kind, display = asked.text("type"), asked.text("display", "summarized")
    asked.accept("budget_tokens")
    asked.finish()
    if kind not in ("enabled", "adaptive", "between_tools", "disabled"):
        raise asked.bad("type", kind, '"enabled", "adaptive", "between_tools" or "disabled"')
    if display not in ("summarized", "omitted"):
        raise asked.bad("display", display, '"summarized" or "omitted"')
    return kind != "disabled", display == "summarized"


def _output(fields: Fields) -> tuple[str | None, Json | None]:
    """`output_config`: how much effort is made, and the form of a text."""
    asked = fields.inside("output_config")
    if asked is None:
        return None, None
    effort, inner = asked.text("effort"), asked.inside("format")
    asked.finish()
    if effort not in (None, *EFFORTS):
        raise asked.bad("effort", effort, ", ".join(f'"{one}"' for one in EFFORTS))
    form: Json | None = None
    if inner is not None:
        inner.only("type", "json_schema")
        if "schema" not in inner:
            raise inner.bad("schema", None, "a schema")
        form = {"type": "json_schema", "json_schema": {"schema": inner.any("schema")}}
        inner.finish()
    return EFFORTS[effort] if effort else None, form


# ---- answers


class Message(Turn):
    """An answer of /v1/messages."""

    def answer(self) -> Json:
        return {
            **self._head(),
            "content": [self._content(block) for block in self.blocks],
            **self._why(),
            "usage": self._usage(),
            "timings": self.figures(),
        }

    def begin(self) -> Iterator[Event]:
        usage = {**self._usage(), "output_tokens": 0}
        start = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield "message_start", {"message": start}

    def wait(self) -> Iterator[Event]:
        yield "ping", {}

    def opened(self, at: int, block: Block) -> Iterator[Event]:
        signed = {"signature": ""} if block.kind == REASONING else {}
        yield "content_block_start", {"index": at, "content_block": {**self._content(block), **signed}}

    def added(self, at: int, block: Block, text: str) -> Iterator[Event]:
        if block.kind == CALL:
            delta = {"type": "input_json_delta", "partial_json": text}
        elif block.kind == CONTENT:
            delta = {"type": "text_delta", "text": text}
        elif not self.wanted.said["thoughts"]:
            return
        else:
            delta = {"type": "thinking_delta", "thinking": text}
        yield "content_block_delta", {"index": at, "delta": delta}

    def closed(self, at: int, block: Block) -> Iterator[Event]:
        if block.kind == REASONING:
            signed = {"type": "signature_delta", "signature": SIGNATURE}
            yield "content_block_delta", {"index": at, "delta": signed}
        yield "content_block_stop", {"index": at}

    def end(self) -> Iterator[Event]:
        yield "message_delta", {"delta": self._why(), "usage": self._usage(), "timings": self.figures()}
        yield "message_stop", {}

    def fail(self, found: Refused) -> Event:
        return "error", error_body(found)

    def _head(self) -> Json:
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.exchange.served.name,
        }

    def _why(self) -> Json:
        """Why the answer has ended."""
        stopped = self.job.stream.stopped
        if self.finish == "tool_calls":
            reason = "tool_use"
        elif self.finish == "length":
            fits = self.job.drawn == self.wanted.most
            reason = "max_tokens" if fits else "model_context_window_exceeded"
        else:
            reason = "end_turn" if stopped is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stopped}

    def _usage(self) -> Json:
        cached = self.job.text.cached or 0
        return {
            "input_tokens": self.job.text.prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.job.drawn,
            "output_tokens_details": {"thinking_tokens": self.thought_tokens},
        }

    def _content(self, block: Block) -> Json:
        if block.kind == CALL:
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": _arguments(block.text)}
        if block.kind == CONTENT:
            return {"type": "text", "text": block.text}
        thought = block.text if self.wanted.said["thoughts"] else ""
        return {"type": "thinking", "thinking": thought, "signature": SIGNATURE}


def _arguments(text: str) -> Json:
    """Of a call; none where a limit has cut them, as they are no JSON then."""
    try:
        found = json.loads(text, parse_float=_number, parse_int=_number)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and depth(found) <= DEEPEST else {}


def _number(text: str) -> float:
    """What a model has written, which JSON bounds nowhere: the nearest number that others can read."""
    if text.lstrip("-").isdigit() and len(text) <= MOST_DIGITS:
        return int(text)
    return min(max(float(text), -sys.float_info.max), sys.float_info.max)
