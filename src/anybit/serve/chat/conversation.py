"""A conversation and what it offers: messages, functions to call, variables of the chat template."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from anybit.config import Json
from anybit.serve.chat.constraint import DEEPEST, depth
from anybit.serve.chat.speech import Speech
from anybit.serve.chat.tools import Function, Tools
from anybit.serve.errors import BadField
from anybit.serve.fields import Fields

MOST_MESSAGES = 4096
MOST_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
ROLES = ("system", "developer", "user", "assistant", "tool")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")  # to think; templates know some of them
NO_ARGUMENTS: Json = {"type": "object", "properties": {}, "additionalProperties": False}
OWN = ("messages", "tools", "add_generation_prompt")  # variables of a template that are the server's to set


@dataclass(frozen=True)
class Conversation:
    """What an answer is asked for.

    Attributes:
        messages: for the chat template, each with `role` and `content`.
        tools: functions that may be called; None: none.
        variables: of the chat template, besides.
    """

    messages: list[Json]
    tools: Tools | None = None
    variables: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Prompt:
    """A conversation, ready for the answer.

    Attributes:
        tokens: ids.
        speech: how to read the answer.
        shown: tokens that come out with a mark.
    """

    tokens: list[int]
    speech: Speech
    shown: frozenset[int]


def conversation(fields: Fields) -> Conversation:
    """What of a body is about the conversation.

    Raises:
        BadField: what of it cannot be.
    """
    found = fields.any("messages")
    if not isinstance(found, list) or not 1 <= len(found) <= MOST_MESSAGES:
        raise BadField("messages", f"messages is expected to be a list of 1 to {MOST_MESSAGES} messages")
    messages = [_message(message, f"messages[{i}].") for i, message in enumerate(found)]
    variables, effort = fields.any("chat_template_kwargs", {}), fields.text("reasoning_effort")
    if not isinstance(variables, dict) or depth(variables) > DEEPEST:
        raise fields.bad("chat_template_kwargs", variables, f"an object of at most {DEEPEST} levels")
    if taken := [name for name in OWN if name in variables]:
        raise BadField(
            "chat_template_kwargs", f"chat_template_kwargs has {taken[0]}, which the request itself says"
        )
    if effort is not None:
        if effort not in EFFORTS:
            raise fields.bad("reasoning_effort", effort, ", ".join(f'"{one}"' for one in EFFORTS))
        of_effort = {"enable_thinking": effort != "none", "reasoning_effort": effort}
        variables = of_effort | variables
    return Conversation(messages, _tools(fields), variables)


def _message(found: Any, whose: str) -> Json:
    """A message for the chat template: `content` as text, and arguments of calls as objects."""
    own = Fields(found, whose)
    role, content = own.text("role"), own.any("content")
    made: Json = {}
    if role not in ROLES:
        raise own.bad("role", role, ", ".join(f'"{one}"' for one in ROLES))
    if (name := own.text("name")) is not None:
        made["name"] = name
    if role == "assistant":
        calls = own.any("tool_calls", [])
        if not isinstance(calls, list) or len(calls) > MOST_TOOLS:
            raise own.bad("tool_calls", calls, f"a list of at most {MOST_TOOLS} calls")
        if calls:  # templates ask whether it is there
            made["tool_calls"] = [_call(call, f"{whose}tool_calls[{i}].") for i, call in enumerate(calls)]
        content = "" if content is None else content
        own.only("annotations", [])
        if (thought := own.text("reasoning_content")) is not None:
            made["reasoning_content"] = thought
    if role == "tool" and (of_call := own.text("tool_call_id")) is not None:
        made["tool_call_id"] = of_call
    own.finish()
    if isinstance(content, list):
        content = "".join(_part(part, f"{whose}content[{j}].") for j, part in enumerate(content))
    if not isinstance(content, str):
        raise own.bad("content", content, "a string, or a list of parts with text")
    return {"role": "system" if role == "developer" else role, "content": content, **made}


def _part(part: Any, whose: str) -> str:
    own = Fields(part, whose)
    own.only("type", "text")
    text = own.text("text")
    own.finish()
    if text is None:
        raise own.bad("text", None, "a string")
    return text


def _call(found: Any, whose: str) -> Json:
    """A call of an earlier answer."""
    own = Fields(found, whose)
    own.only("type", "function")
    own.accept("index")  # as streams have it
    name_of_call, inner = own.text("id"), own.inside("function")
    own.finish()
    if inner is None:
        raise own.bad("function", None, "an object with name and arguments")
    name, arguments = inner.text("name"), inner.text("arguments")
    inner.finish()
    if name is None:
        raise inner.bad("name", None, "a string")
    values: Json | str = arguments or {}
    if arguments:
        with suppress(
            ValueError, RecursionError
        ):  # what is no object, as of a call that was cut, stays a text
            found = json.loads(arguments)
            values = found if isinstance(found, dict) else arguments
        if depth(values) > DEEPEST:
            raise BadField(f"{whose}function.arguments", f"arguments is nested deeper than {DEEPEST} levels")
    made = {"type": "function", "function": {"name": name, "arguments": values}}
    return made if name_of_call is None else {"id": name_of_call, **made}


# ---- tools


def _tools(fields: Fields) -> Tools | None:
    """By `tools`, `tool_choice` and `parallel_tool_calls`; None: no function may be called."""
    found, choice = fields.any("tools", []), fields.any("tool_choice", "auto")
    several = fields.flag("parallel_tool_calls", True)
    if not isinstance(found, list) or len(found) > MOST_TOOLS:
        raise BadField("tools", f"tools is expected to be a list of at most {MOST_TOOLS} functions")
    made = [_tool(tool, f"tools[{i}].") for i, tool in enumerate(found)]
    functions = [function for _, function in made]
    names = [function.name for function in functions]
    if len({*names}) < len(names):
        raise BadField("tools", "tools has two functions of one name")
    if isinstance(choice, dict):
        own = Fields(choice, "tool_choice.")
        own.only("type", "function")
        if (inner := own.inside("function")) is None:
            raise own.bad("function", None, "an object with the name of a function")
        name = inner.text("name")
        inner.finish()
        own.finish()
        functions = [function for function in functions if function.name == name]
        if not functions:
            raise BadField("tool_choice", f"tool_choice names {name!r:.100}, which is none of the tools")
    elif choice not in ("none", "auto", "required"):
        raise fields.bad("tool_choice", choice, '"none", "auto", "required" or a function')
    elif choice == "required" and not functions:
        raise BadField("tool_choice", 'tool_choice is "required", and there are no tools')
    if choice == "none" or not functions:
        return None
    return Tools([given for given, _ in made], functions, choice != "auto", several)


def _tool(tool: Any, whose: str) -> tuple[Json, Function]:
    """A function for the template, and what may be called of it."""
    fields = Fields(tool, whose)
    fields.only("type", "function")
    own = fields.inside("function")
    if own is None:
        raise fields.bad("function", None, "an object with a name, a description and parameters")
    fields.finish()
    name, description, strict = own.text("name"), own.text("description"), own.flag("strict")
    schema = own.any("parameters", NO_ARGUMENTS)
    own.finish()
    if name is None or not NAME.fullmatch(name):
        raise own.bad("name", name, "1 to 64 letters, digits, _, . or -")
    param = f"{whose}function.parameters"
    if not isinstance(schema, dict):
        raise own.bad("parameters", schema, "a schema of an object")
    if (kind := schema.get("type", "object")) != "object":
        raise BadField(param, f"{param} has the type {json.dumps(kind):.60}, expected a schema of an object")
    if depth(schema) > DEEPEST:
        raise BadField(param, f"{param} is nested deeper than {DEEPEST} levels")
    given = {"name": name, "description": description or "", "parameters": schema}
    return {"type": "function", "function": given}, Function(name, schema, strict, param)
