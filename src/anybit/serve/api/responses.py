"""OpenAI's responses API: its bodies as chats, and answers in its form. Nothing is stored.

https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from anybit.config import Json
from anybit.serve.api import openai
from anybit.serve.api.exchange import Exchange
from anybit.serve.api.turns import Block, Event, Turn, as_here, joined, needed, passed, text_of
from anybit.serve.chat.constraint import DEEPEST, depth
from anybit.serve.chat.conversation import MOST_MESSAGES, MOST_TOOLS
from anybit.serve.chat.speech import CALL, CONTENT
from anybit.serve.errors import BadField, Refused
from anybit.serve.fields import Fields
from anybit.serve.served import Served

NAMES = {  # of fields that are others in a chat
    ".function.": ".",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
TEXTS = ("input_text", "output_text", "text")  # types of content that are text
INERT = (*openai.INERT, "client_metadata", "max_tool_calls", "prompt_cache_options")  # besides, see there
OUTER = 8  # levels around the schemas of tools, which are no deeper than forms
MOST_METADATA, LONGEST_NAME, LONGEST_VALUE = 16, 64, 512  # as OpenAI has it: pairs, characters
# What an answer may be asked to have and never needs: thoughts are no secret.
INCLUDED = ("reasoning.encrypted_content",)
# Fields of a body that its answer has again, and what they are where it has none.
REPEATED: Json = {
    "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True, "temperature": None,
    "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_p": None, "user": None,
    "reasoning": {"effort": None, "summary": None},
}  # fmt: skip


# ---- requests


def responses(served: Served, body: Json, key: str) -> openai.Wanted:
    """A body of /v1/responses.

    Raises:
        InputError: what of it cannot be.
        Refused: another model.
    """
    fields = Fields(body)
    for name in ("previous_response_id", "conversation", "prompt"):
        if name in fields:
            raise BadField(name, f"{name}: this server keeps nothing; send the whole conversation as input")
    fields.only("background", False)
    fields.only("truncation", "disabled")
    included = fields.any("include", [])
    if not isinstance(included, list) or any(one not in INCLUDED for one in included):
        raise fields.bad("include", included, f"a list of {', '.join(INCLUDED)} or nothing")
    chat = {
        **passed(fields),
        "messages": _messages(fields),
        **_tools(fields),
        **_text(fields),
        **_effort(fields),
    }
    chat["max_completion_tokens"] = fields.whole("max_output_tokens", None, 1, openai.MOST_TOKENS)
    chat["stream"] = fields.flag("stream")
    if (options := fields.inside("stream_options")) is not None:
        options.only("include_obfuscation", False)
        options.finish()
    _check_metadata(fields)
    fields.text("user")
    fields.accept(*INERT)
    fields.finish()
    with as_here(NAMES):
        wanted = openai.chat(served, chat, key)
    given = {name: value for name, value in body.items() if name in REPEATED and value is not None}
    for name, value in given.items():
        if depth(value) > DEEPEST + OUTER:
            raise BadField(name, f"{name} is nested deeper than {DEEPEST + OUTER} levels")
    given |= {name: REPEATED[name] | given[name] for name in ("text", "reasoning") if name in given}
    # Requests may hold halves of surrogate pairs, which have no form in UTF-8.
    said = json.loads(json.dumps(REPEATED | given, ensure_ascii=False).encode(errors="replace"))
    return replace(wanted, said=said)


def _check_metadata(fields: Fields) -> None:
    """Texts, which the answer repeats."""
    found = fields.any("metadata", {})
    texts = isinstance(found, dict) and all(isinstance(value, str) for value in found.values())
    if (
        not texts
        or len(found) > MOST_METADATA
        or any(len(name) > LONGEST_NAME or len(value) > LONGEST_VALUE for name, value in found.items())
    ):
        raise fields.bad(
            "metadata",
            found,
            f"at most {MOST_METADATA} strings, of {LONGEST_VALUE} characters, with names of {LONGEST_NAME}",
        )


def _messages(fields: Fields) -> list[Json]:
    """`instructions` and `input` as the messages of a chat."""
    made: list[Json] = []
    if (instructions := fields.text("instructions")) is not None:
        made.append({"role": "system", "content": instructions})
    found = fields.any("input")
    if isinstance(found, str):
        found = [{"role": "user", "content": found}]
    if not isinstance(found, list) or not 1 <= len(found) <= MOST_MESSAGES:
        raise BadField("input", f"input is expected to be a string, or a list of 1 to {MOST_MESSAGES} items")
    made += [_item(item, f"input[{i}].") for i, item in enumerate(found)]
    return joined(made)


def _item(found: Any, whose: str) -> Json:
    own = Fields(found, whose)
    kind = own.text("type", "message")
    own.accept("id", "status")
    made: Json
    if kind == "message":
        role = own.text("role")
        if role not in ("system", "developer", "user", "assistant"):
            raise own.bad("role", role, '"system", "developer", "user" or "assistant"')
        made = {"role": "system" if role == "developer" else role}
        made["content"] = text_of(own.any("content"), f"{whose}content", TEXTS)
        own.accept("phase")
    elif kind == "function_call":
        function = {"name": needed(own, "name"), "arguments": needed(own, "arguments")}
        calls = [{"id": needed(own, "call_id"), "type": "function", "function": function}]
        own.accept("namespace")
        made = {"role": "assistant", "content": "", "tool_calls": calls}
    elif kind == "function_call_output":
        made = {"role": "tool", "tool_call_id": needed(own, "call_id")}
        made["content"] = text_of(own.any("output"), f"{whose}output", TEXTS)
    elif kind == "reasoning":
        thoughts = [
            text_of(own.any(name, []), f"{whose}{name}", (text,))
            for name, text in (("content", "reasoning_text"), ("summary", "summary_text"))
        ]
        made = {"role": "assistant", "content": "", "reasoning_content": thoughts[0] or thoughts[1]}
        own.accept("encrypted_content")
    else:
        there = '"message", "function_call", "function_call_output" or "reasoning"'
        raise own.bad("type", kind, there)
    own.finish()
    return made


def _tools(fields: Fields) -> Json:
    """`tools` and what is said of them, as OpenAI's chats have it."""
    found, choice = fields.any("tools", []), fields.any("tool_choice", "auto")
    if not isinstance(found, list) or len(found) > MOST_TOOLS:
        raise BadField("tools", f"tools is expected to be a list of at most {MOST_TOOLS} functions")
    made: Json = {"tools": [tool for i, one in enumerate(found) for tool in _tool(one, f"tools[{i}].")]}
    if isinstance(choice, dict):
        own = Fields(choice, "tool_choice.")
        own.only("type", "function")
        choice = {"type": "function", "function": {"name": own.text("name")}}
        own.finish()
    return {**made, "tool_choice": choice, "parallel_tool_calls": fields.flag("parallel_tool_calls", True)}


def _tool(found: Any, whose: str, kinds: Sequence[str] = ("function", "namespace")) -> list[Json]:
    """A function; those of a namespace; or none, for a search of the web that may not reach it."""
    own = Fields(found, whose)
    kind = own.any("type", "function")
    if kind == "web_search" and own.any("external_web_access") is False:
        return []
    if kind == "namespace" and kind in kinds:
        inner = own.any("tools", [])
        if not isinstance(inner, list):
            raise own.bad("tools", inner, "a list of functions")
        own.text("name")  # which calls have again
        own.accept("description")
        own.finish()
        return [
            tool for i, one in enumerate(inner) for tool in _tool(one, f"{whose}tools[{i}].", ("function",))
        ]
    if kind != "function":  # tools of OpenAI's own servers are not here
        raise own.bad("type", kind, " or ".join(f'"{one}"' for one in kinds))
    function = {
        name: own.any(name) for name in ("name", "description", "parameters", "strict") if name in own
    }
    own.finish()
    return [{"type": "function", "function": function}]


def _text(fields: Fields) -> Json:
    """`text.format`, the form of a text."""
    asked = fields.inside("text")
    if asked is None:
        return {}
    asked.accept("verbosity")
    form = asked.inside("format")
    asked.finish()
    if form is None:
        return {}
    kind = form.text("type")
    if kind != "json_schema":
        form.finish()
        return {"response_format": {"type": kind}}
    form.accept("name", "description", "strict")  # a schema is always kept
    if "schema" not in form:
        raise form.bad("schema", None, "a schema")
    schema = form.any("schema")
    form.finish()
    return {"response_format": {"type": kind, "json_schema": {"schema": schema}}}


def _effort(fields: Fields) -> Json:
    """`reasoning.effort`."""
    asked = fields.inside("reasoning")
    if asked is None:
        return {}
    effort = asked.text("effort")
    asked.accept("summary", "generate_summary")  # thoughts are given out as they are
    asked.finish()
    return {} if effort is None else {"reasoning_effort": effort}


# ---- answers


class Response(Turn):
    """An answer of /v1/responses, whose blocks are its items."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange)
        self._created = int(time.time())
        self._number = -1  # of the last event
        spaces = [tool for tool in self.wanted.said.get("tools", []) if tool.get("type") == "namespace"]
        self._spaces = {
            tool.get("name"): space.get("name") for space in spaces for tool in space.get("tools") or ()
        }

    def answer(self) -> Json:
        cut = self.finish == "length"
        return {
            **self._head("incomplete" if cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._item(at, block) for at, block in enumerate(self.blocks)],
            "usage": self._usage(),
            "timings": self.figures(),
        }

    def numbered(self) -> Json:
        self._number += 1
        return {"sequence_number": self._number}

    def begin(self) -> Iterator[Event]:
        yield "response.created", {"response": self._head("in_progress")}
        yield "response.in_progress", {"response": self._head("in_progress")}

    def wait(self) -> Iterator[Event]:
        if not self.begun:
            self.begun = True
            yield from self.begin()
        else:
            yield "response.in_progress", {"response": self._head("in_progress")}

    def opened(self, at: int, block: Block) -> Iterator[Event]:
        yield "response.output_item.added", {"output_index": at, "item": self._item(at, block, "in_progress")}
        if block.kind != CALL:
            yield "response.content_part.added", {**self._place(at, block), "part": _part(block)}

    def added(self, at: int, block: Block, text: str) -> Iterator[Event]:
        logprobs: Json = {"logprobs": []} if block.kind == CONTENT else {}
        yield f"response.{_NAMES[block.kind]}.delta", {**self._place(at, block), "delta": text, **logprobs}

    def closed(self, at: int, block: Block) -> Iterator[Event]:
        place = self._place(at, block)
        if block.kind == CALL:
            done: Json = {"arguments": block.text, "name": block.name}
        else:
            done = {"text": block.text, **({"logprobs": []} if block.kind == CONTENT else {})}
        yield f"response.{_NAMES[block.kind]}.done", {**place, **done}
        if block.kind != CALL:
            yield "response.content_part.done", {**place, "part": _part(block)}
        yield "response.output_item.done", {"output_index": at, "item": self._item(at, block)}

    def end(self) -> Iterator[Event]:
        answer = self.answer()
        yield f"response.{answer['status']}", {"response": answer}

    def fail(self, found: Refused) -> Event:
        error = found.body()["error"]
        code, message = error["code"] or error["type"], error["message"]
        if not self.begun:
            return "error", {"code": code, "message": message, "param": error["param"]}
        failed = {**self._head("failed"), "error": {"code": code, "message": message}}
        return "response.failed", {"response": failed}

    def _head(self, status: str) -> Json:
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self.exchange.served.name,
            "output": [],
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
            **self.wanted.said,
        }

    def _item(self, at: int, block: Block, status: str = "completed") -> Json:
        if status == "completed" and self.finish == "length" and at == len(self.blocks) - 1:
            status = "incomplete"
        head = {"id": self._id(at, block), "status": status}
        parts = [] if status == "in_progress" else [_part(block)]
        if block.kind == CALL:
            call = {"call_id": block.id, "name": block.name, "arguments": block.text}
            if block.name in self._spaces:
                call["namespace"] = self._spaces[block.name]
            return {"type": "function_call", **head, **call}
        if block.kind == CONTENT:
            return {"type": "message", **head, "role": "assistant", "content": parts}
        return {"type": "reasoning", **head, "summary": [], "content": parts}

    def _id(self, at: int, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self.id}{at}"

    def _place(self, at: int, block: Block) -> Json:
        index = {} if block.kind == CALL else {"content_index": 0}
        return {"item_id": self._id(at, block), "output_index": at, **index}

    def _usage(self) -> Json:
        prompt, drawn = self.job.text.prompt, self.job.drawn
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self.job.text.cached or 0},
            "output_tokens": drawn,
            "output_tokens_details": {"reasoning_tokens": self.thought_tokens},
            "total_tokens": prompt + drawn,
        }


_NAMES = {"content": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
_PREFIXES = {"content": "msg", "reasoning": "rs", "call": "fc"}


def _part(block: Block) -> Json:
    if block.kind == CONTENT:
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": block.text}
