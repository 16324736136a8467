"""Functions that a request offers for calls, and the grammar that holds an answer to them.

The grammar lets through only names that are offered and arguments that their schema allows, in the family's own form.
So a call is whole JSON at every width.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anybit.config import Json
from anybit.serve.speech import FENCE, NEXT, BareCalls, Speech, TaggedCalls

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_CALLS = 32  # of an answer
MOST_GRAMMAR = 1 << 20  # bytes: all schemas, and 128 names several times
PYTHON_TAG = "<|python_tag|>"  # Llama may write it before a call
SPACE = r"[ \n\t]{0,12}"  # between parts of a call: small models may write whitespace without end
# Keywords of a schema that say nothing of values, and those that hold schemas by names of the user's.
SAID = ("description", "title", "examples", "default", "$schema", "$id", "$comment", "deprecated")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
OPEN = (
    "additionalProperties",
    "unevaluatedProperties",
    "patternProperties",
    "allOf",
    "anyOf",
    "oneOf",
    "$ref",
    "if",
)


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

    @property
    def enforced(self) -> Json:
        """The schema as llguidance takes it."""
        guidance = {"whitespace_pattern": SPACE, "lenient": not self.strict}
        return {"type": "object", **enforced(self.schema), "x-guidance": guidance}


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


def enforced(schema: Any) -> Any:
    """A schema without what is said to readers; objects whose properties are named have no others, unless it says so.

    Small models make properties up where they may.
    """
    if isinstance(schema, list):
        return [enforced(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made: Json = {}
    for name, value in schema.items():
        if name in NAMED and isinstance(value, dict):
            made[name] = {key: enforced(inner) for key, inner in value.items()}
        elif name in ("enum", "const"):
            made[name] = value
        elif name not in SAID:
            made[name] = enforced(value)
    if "properties" in made and not any(name in made for name in OPEN):
        made["additionalProperties"] = False
    return made


def grammar(tools: Tools, speech: Speech, tokenizer: Tokenizer) -> str:
    """What an answer may be, in llguidance's Lark: a thought, if the model writes any, then a text, calls, or both.

    Args:
        tools: what is offered.
        speech: how the model writes calls and thoughts.
        tokenizer: of the model.
    """
    lark = _Lark(tokenizer)
    assert speech.calls is not None
    tagged, bare = speech.calls.tagged, speech.calls.bare
    if tools.required:
        bare = bare if tagged is None else None
        answer, rules = ("tagged" if tagged is not None else "bare"), dict[str, str]()
    else:
        answer, rules = _text(tagged, bare, speech, lark)
    if tagged is not None:
        word = "" if "before" in answer else tagged.words[0]
        rules |= _tagged(tools, tagged, word + tagged.begin.removeprefix(tagged.words[0]), lark)
    if bare is not None:
        rules |= _bare(tools, bare, lark)
    for i, function in enumerate(tools.functions):
        rules[f"arguments_{i}"] = f"%json {json.dumps(function.enforced)}"
    if speech.thought is not None:
        answer, of_thought = _thought(answer, tools.required, speech, lark)
        rules |= of_thought
    return "\n".join(f"{name}: {rule}" for name, rule in {"start": answer, **rules}.items())


def _text(
    tagged: TaggedCalls | None, bare: BareCalls | None, speech: Speech, lark: _Lark
) -> tuple[str, dict[str, str]]:
    """What an answer may be where no call is asked for, and the rules of its text.

    A text is read beside the heads of bare calls. Where all of one is there it is no text any more, and what follows
    are arguments.
    """
    no_call = ""
    if bare is not None:
        no_call = f" & ~/{FENCE}{bare.head(speech.names, _escaped)}(?s:.*)/"
    rules = {"text": f"({' | '.join(['TEXT', *lark.plain(speech.words)])})+", "TEXT": f"/(?s:.+)/{no_call}"}
    answer = "text?"
    if tagged is not None and lark.has(tagged.words[0]):
        answer = "text? tagged?"
    elif tagged is not None:  # a tag of the text's own characters, whose end the lexer finds
        answer = "text? | before tagged"
        rules |= {f"before[suffix={json.dumps(tagged.words[0])}]": "BEFORE", "BEFORE": f"/(?s:.*)/{no_call}"}
    return (f"{answer} | bare" if bare is not None else answer), rules


def _tagged(tools: Tools, form: TaggedCalls, begin: str, lark: _Lark) -> dict[str, str]:
    """Rules of calls whose beginning is read up to `begin`."""
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
    functions = range(len(tools.functions))
    again = " | ".join(f"NEXT_{i} arguments_{i}" for i in functions) if form.several and tools.several else ""
    again = f"({again}){{0,{MOST_CALLS - 1}}}" if again else ""
    tag = f"{lark.literal(PYTHON_TAG)}? " if lark.has(PYTHON_TAG) else ""
    first = " | ".join(f"HEAD_{i} arguments_{i}" for i in functions)
    rules = {"bare": f"{tag}({first}) {again} END", "END": r"/\s*\}\s*(```\s*)?/"}
    for i, function in enumerate(tools.functions):
        head = form.head([function.name], _escaped)
        rules[f"HEAD_{i}"] = f"/{FENCE}{head}/"
        if again:
            rules[f"NEXT_{i}"] = f"/{NEXT}{head}/"
    return {name: rule.replace(r"\s*", SPACE) for name, rule in rules.items()}


def _thought(answer: str, required: bool, speech: Speech, lark: _Lark) -> tuple[str, dict[str, str]]:
    """A thought before what an answer may be, and its rules."""
    form = speech.thought
    assert form is not None
    rules = {"said": f"({' | '.join(['SAID', *lark.plain(speech.words)])})+", "SAID": "/(?s:.+)/"}
    if all(map(lark.has, form.words)):
        opening, closing = map(lark.literal, form.words)
        rules["thought"] = f"said? {closing}" if speech.thinking else f"{opening} said? {closing}"
    else:
        opening = "" if speech.thinking else _escaped(form.begin)
        rules[f"thought[suffix={json.dumps(form.end)}]"] = f"/{opening}(?s:.*)/"
    if required:
        return (r"thought /\s+/? " if speech.thinking else r"(thought /\s+/?)? ") + answer, rules
    return f"said? | thought ({answer})" if speech.thinking else f"thought? ({answer})", rules


class _Lark:
    """Texts as llguidance's Lark has them, in which a tokenizer's added tokens stand for themselves alone."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._added = {token.content: at for at, token in tokenizer.get_added_tokens_decoder().items()}
        self._plain = {at for at, token in tokenizer.get_added_tokens_decoder().items() if not token.special}

    def has(self, word: str) -> bool:
        """Whether a word is a token of its own."""
        return word in self._added

    def literal(self, text: str) -> str:
        words = "|".join(map(re.escape, self._added)) or "(?!)"
        parts = [part for part in re.split(f"({words})", text) if part]
        return " ".join(f"<[{self._added[p]}]>" if p in self._added else json.dumps(p) for p in parts)

    def plain(self, words: Sequence[str]) -> list[str]:
        """Added tokens that a text may have, but for some words."""
        found = sorted(self._plain - {self._added.get(word) for word in words})
        return [f"<[{','.join(map(str, found))}]>"] if found else []


def _escaped(text: str) -> str:
    """A text for a regular expression between slashes."""
    return re.sub(r"([^A-Za-z0-9 \"<>])", r"\\\1", text)
