"""Functions that a request offers for calls, and the grammar that holds an answer to them.

The grammar lets through only names that are offered and arguments that their schema allows, in the family's own form.
So a call is whole JSON at every width.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from anybit.config import Json
from anybit.errors import InputError
from anybit.serve.chat.constraint import LONGEST, Constraint, alone
from anybit.serve.chat.speech import SPACE, BareCalls, Speech, TaggedCalls
from anybit.serve.errors import BadField

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_CALLS = 32  # of an answer
MOST_GRAMMAR = 1 << 20  # bytes: all schemas, and 128 names several times
PYTHON_TAG = "<|python_tag|>"  # Llama may write it before a call
# Keywords of a schema: those for readers, those without schemas inside, and those with schemas by names.
SAID = ("description", "title", "examples", "default", "$schema", "$id", "$comment", "deprecated")
VALUES = ("enum", "const", "required", "dependentRequired")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
INSIDE = ("properties", "items", "prefixItems")  # schemas of values that are within the value
# Keywords beside which an object is closed already, or a schema says what else it may have.
OPEN = (
    "additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "not", "if",
    "$ref", "dependentSchemas",
)  # fmt: skip


@dataclass(frozen=True)
class Function:
    """One that may be called.

    Attributes:
        name: of letters, digits, `_`, `.` and `-`.
        schema: of its arguments, which are an object.
        strict: the whole schema is kept, or it is an error; otherwise as much of it as llguidance knows.
        param: where a request has its schema.
    """

    name: str
    schema: Json
    strict: bool
    param: str = "tools"

    @cached_property
    def kept(self) -> Json:
        """What of the schema arguments are held to."""
        return dict(closed(self.schema))

    @property
    def enforced(self) -> Json:
        """The same as llguidance takes it."""
        guidance = {"whitespace_pattern": SPACE, "lenient": not self.strict}
        return {"type": "object", **self.kept, "x-guidance": guidance}


@dataclass(frozen=True)
class Tools:
    """What a request offers.

    Attributes:
        given: for the chat template.
        functions: that may be called.
        required: the answer is a call.
        several: or some calls.
    """

    given: Sequence[Json]
    functions: Sequence[Function]
    required: bool
    several: bool


def closed(schema: Any, closes: bool = True) -> Any:
    """A schema without what is said to readers; an object has no other properties than those that are named.

    Small models make properties up where they may. Where other parts of a schema may speak of the same object it stays
    as it is.

    Args:
        schema: of JSON.
        closes: nothing else speaks of its value.
    """
    if isinstance(schema, list):
        return [closed(item, closes) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closes = closes and not any(name in schema for name in OPEN)
    made: Json = {}
    for name, value in schema.items():
        within = closes and name in INSIDE
        if name in VALUES:
            made[name] = value
        elif name in NAMED and isinstance(value, dict):
            made[name] = {key: closed(inner, within) for key, inner in value.items()}
        elif name not in SAID:
            made[name] = closed(value, within)
    known, needed = made.get("properties"), made.get("required", [])
    if (
        closes
        and isinstance(known, dict)
        and isinstance(needed, list)
        and all(name in [*known] for name in needed)
    ):
        made["additionalProperties"] = False
    return made


def held_to(
    tools: Tools, speech: Speech, tokenizer: Tokenizer, compile_form: Callable[[str, Any, int], Constraint]
) -> Constraint:
    """The form of answers that may be calls of some tools.

    Args:
        tools: what is offered.
        speech: how the model writes calls and thoughts.
        tokenizer: of the model.
        compile_form: see `Constraints.compile`.

    Raises:
        BadField: a schema that llguidance does not know in full, and is strict; schemas that are too large.
    """
    size = sum(len(json.dumps(function.kept)) for function in tools.functions)
    if size > LONGEST:
        raise BadField(
            "tools",
            f"the schemas of tools have {size} bytes without descriptions, expected at most {LONGEST}",
        )

    def compiled(known: Tools) -> Constraint:
        return compile_form("grammar", grammar(known, speech, tokenizer), MOST_GRAMMAR)

    with suppress(InputError):
        return compiled(tools)
    functions = [_enforceable(function, compile_form) for function in tools.functions]
    try:
        return compiled(replace(tools, functions=functions))
    except InputError as error:
        raise BadField("tools", f"tools: {error}") from None


def _enforceable(function: Function, compile_form: Callable[[str, Any, int], Constraint]) -> Function:
    """A function whose schema can be kept; where that need not be, one of any arguments.

    Raises:
        BadField: its schema cannot be kept, and is strict.
    """
    try:
        compile_form("json_schema", function.enforced, LONGEST)
    except InputError as error:
        if function.strict:
            raise BadField(function.param, f"{function.param}: {error}") from None
        return replace(function, schema={})
    return function


# ---- the grammar


def grammar(tools: Tools, speech: Speech, tokenizer: Tokenizer) -> str:
    """What an answer may be, in llguidance's Lark: a thought, if the model writes any, then a text, calls, or both.

    Args:
        tools: what is offered.
        speech: how the model writes calls and thoughts.
        tokenizer: of the model.
    """
    assert speech.calls is not None
    lark, tagged, bare = _Lark(tokenizer), speech.calls.tagged, speech.calls.bare
    rules = {
        f"arguments_{i}": f"%json {json.dumps(function.enforced)}"
        for i, function in enumerate(tools.functions)
    }
    if tools.required:
        answer = "tagged" if tagged is not None else "bare"
    else:
        answer, of_text = _text(speech, lark)
        rules |= of_text
    if tagged is not None:
        rules |= _tagged(tools, tagged, lark, read="before" in rules)
    if bare is not None and "bare" in answer:
        rules |= _bare(tools, bare, lark)
    if speech.thought is not None:
        answer, of_thought = _thought(answer, tools.required, speech, lark)
        rules |= of_thought
    if "before" in rules:  # which is lexed up to a tag of the text's own characters
        assert tagged is not None
        rules[f"before[suffix={json.dumps(tagged.words[0])}]"] = rules.pop("before")
    return "\n".join(f"{name}: {rule}" for name, rule in {"start": answer, **rules}.items())


def _text(speech: Speech, lark: _Lark) -> tuple[str, dict[str, str]]:
    """What an answer may be where no call is asked for, and the rules of its text.

    A text is read beside the heads of bare calls. Where all of one is there it is no text any more, and what follows
    are arguments.
    """
    assert speech.calls is not None
    tagged, bare = speech.calls.tagged, speech.calls.bare
    no_call = f" & ~/{bare.first(speech.names)}(?s:.*)/" if bare is not None else ""
    rules = {"text": lark.text("TEXT", speech.words), "TEXT": f"/(?s:.+)/{no_call}"}
    answer = "text"
    if tagged is not None and lark.has(tagged.words[0]):
        answer = "text tagged?"
    elif tagged is not None:  # without other tokens: a tag behind one would be no end of `before`
        answer = "text | before tagged"
        rules |= {"text": "TEXT?", "before": "BEFORE", "BEFORE": f"/(?s:.*)/{no_call}"}
    return (f"{answer} | bare" if bare is not None else answer), rules


def _tagged(tools: Tools, form: TaggedCalls, lark: _Lark, read: bool) -> dict[str, str]:
    """Rules of calls behind a word.

    Args:
        tools: what is offered.
        form: of the calls.
        lark: of the tokenizer.
        read: the word was lexed with the text before it.
    """
    begin = form.begin.removeprefix(form.words[0]) if read else form.begin
    again = f"({lark.literal(form.next)} call){{0,{MOST_CALLS - 1}}}" if tools.several else ""
    # A newline behind the last: models that expect to end there write it, and are not to be held to one call more.
    end = f"({lark.literal(form.end)} | {lark.literal(form.end + chr(10))})" if form.end else ""
    rules = {"tagged": f"{lark.literal(begin)} call {again} {end}"}
    rules["call"] = " | ".join(f"call_{i}" for i in range(len(tools.functions)))
    for i, function in enumerate(tools.functions):
        rules[f"call_{i}"] = f"{lark.literal(function.name + form.middle)} arguments_{i}"
    return rules


def _bare(tools: Tools, form: BareCalls, lark: _Lark) -> dict[str, str]:
    """Rules of calls without tags. A head is one terminal, as a text beside it is another until all of it is there."""
    several = form.several and tools.several
    functions = list(enumerate(tools.functions))
    again = " | ".join(f"NEXT_{i} arguments_{i}" for i, _ in functions)
    tag = f"{lark.literal(PYTHON_TAG)}? " if lark.has(PYTHON_TAG) else ""
    first = " | ".join(f"FIRST_{i} arguments_{i}" for i, _ in functions)
    rules = {
        "bare": f"{tag}({first}) {f'({again}){{0,{MOST_CALLS - 1}}}' if several else ''} END",
        "END": rf"/{SPACE}\}}{SPACE}(```{SPACE})?/",
    }
    rules |= {f"FIRST_{i}": f"/{form.first([function.name])}/" for i, function in functions}
    return rules | {f"NEXT_{i}": f"/{form.next([function.name])}/" for i, function in functions if several}


def _thought(answer: str, required: bool, speech: Speech, lark: _Lark) -> tuple[str, dict[str, str]]:
    """A thought before what an answer may be, and its rules."""
    form = speech.thought
    assert form is not None
    rules = {"said": lark.text("SAID", speech.words), "SAID": "/(?s:.+)/"}
    if all(map(lark.has, form.words)):
        opening, closing = map(lark.literal, form.words)
        rules["thought"] = f"said {closing}" if speech.thinking else f"/{SPACE}/ {opening} said {closing}"
    else:
        rules["said"] = "SAID?"
        opening = "" if speech.thinking else SPACE + re.escape(form.begin)
        rules[f"thought[suffix={json.dumps(form.end)}]"] = f"/{opening}(?s:.*)/"
    if required:
        gap = f"/{SPACE}/ " if "tagged" in answer else ""
        return (f"thought {gap}{answer}" if speech.thinking else f"(thought {gap})? {answer}"), rules
    return (f"said | thought ({answer})" if speech.thinking else f"thought? ({answer})"), rules


class _Lark:
    """Texts as llguidance's Lark has them, in which some tokens stand for themselves alone."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._alone = alone(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._sayable = {at for at in self._alone.values() if not added[at].special}
        self._words = re.compile(f"({'|'.join(map(re.escape, self._alone)) or '(?!)'})")

    def has(self, word: str) -> bool:
        """Whether a word is a token of its own."""
        return word in self._alone

    def literal(self, text: str) -> str:
        parts = [part for part in self._words.split(text) if part]
        return " ".join(f"<[{self._alone[p]}]>" if p in self._alone else json.dumps(p) for p in parts)

    def text(self, terminal: str, words: Sequence[str]) -> str:
        """Any text of a terminal, and between such the other tokens that a text may have.

        Args:
            terminal: never twice in a row: a text that it refuses would be two texts that it allows.
            words: that a text may not have as tokens.
        """
        found = sorted(self._sayable - {self._alone.get(word) for word in words})
        return f"{terminal}? (<[{','.join(map(str, found))}]> {terminal}?)*" if found else f"{terminal}?"
