"""Functions that a request offers for calls, and the grammar that holds an answer to them.

The grammar lets through only names that are offered and arguments that their schema allows, in the family's own form.
So a call is whole JSON at every width.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anybit.config import Json
from anybit.serve.speech import CallForm, Speech, ThoughtForm

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Of arguments: as templates write them, so that a call that comes back as history is the same tokens.
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MOST_CALLS = 32  # of an answer
NEWLINE = "\n"
PYTHON_TAG = "<|python_tag|>"  # Llama may write it before a call


@dataclass(frozen=True)
class Function:
    """One that may be called.

    Attributes:
        name: of letters, digits, `_`, `.` and `-`.
        schema: of its arguments, which are an object.
        strict: a keyword of the schema that cannot be kept is an error; otherwise it is left out.
    """

    name: str
    schema: Json
    strict: bool


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


def grammar(tools: Tools, speech: Speech, tokenizer: Tokenizer) -> str:
    """What an answer may be, in llguidance's Lark: a thought, if the model writes any, then a text, calls, or both.

    Args:
        tools: what is offered.
        speech: how the model writes calls and thoughts.
        tokenizer: of the model.
    """
    lark, rules, calls, bare = _Lark(tokenizer), dict[str, str](), speech.calls, speech.bare
    assert calls is not None
    word = calls.words[0] if calls.words else ""
    text = "/(?s:.*)/"
    if bare is not None:  # which the lexer reads beside a text, until all of a call's head is there
        names = "|".join(_escaped(name) for name in speech.names)
        text += f" & ~/{_escaped(bare.begin)}({names}){_escaped(bare.middle)}(?s:.*)/"
    begin = calls.begin
    if tools.required:
        start = "calls"
    elif not word:
        start = "(text | calls)"
    elif lark.has(word):
        start = "(text? calls? | bare)" if bare is not None else "text? calls?"
    else:  # the text's own characters, of which the lexer finds the end
        start = "(text | before calls | bare)" if bare is not None else "(text | before calls)"
        rules |= {f"before[suffix={json.dumps(word)}]": "BEFORE", "BEFORE": text}
        begin = begin.removeprefix(word)
    if (thought := speech.thought) is not None and all(map(lark.has, thought.words)):
        opening, closing = map(lark.literal, thought.words)
        rules["thought"] = f"said? {closing}" if speech.thinking else f"{opening} said? {closing}"
        rules["said"] = _text("SAID", lark, thought)
        rules["SAID"] = "/(?s:.+)/"
        start = rf"(thought /\s+/?)? {start}" if tools.required else f"thought? {start}"
    elif thought is not None and tools.required:
        opening = "" if speech.thinking else _escaped(thought.begin)
        rules[f"thought[suffix={json.dumps(thought.end)}]"] = f"/{opening}(?s:.*)/"
        start = rf"(thought /\s+/?)? {start}"
    tag = f"{lark.literal(PYTHON_TAG)}? " if not word and lark.has(PYTHON_TAG) else ""
    rules["calls"] = tag + _calls(tools, calls, begin, lark)
    if bare is not None and word and not tools.required:
        rules["bare"] = _calls(tools, bare, bare.begin, lark)
    for i, function in enumerate(tools.functions):
        guidance = LAYOUT | {"lenient": not function.strict}
        rules[f"arguments_{i}"] = (
            f"%json {json.dumps({'type': 'object', **function.schema, 'x-guidance': guidance})}"
        )
    rules |= {"text": _text("TEXT", lark, thought, calls), "TEXT": text}
    return "\n".join(f"{name}: {rule}" for name, rule in {"start": start, **rules}.items())


def _calls(tools: Tools, form: CallForm, begin: str, lark: _Lark) -> str:
    """Calls of a form whose beginning is read up to `begin`. A head is one literal, so that no text is half of one."""

    def one_of(before: str) -> str:
        heads = [lark.literal(before + function.name + form.middle) for function in tools.functions]
        return " | ".join(f"{head} arguments_{i}" for i, head in enumerate(heads))

    again = f"({one_of(form.next)}){{0,{MOST_CALLS - 1}}}" if form.next and tools.several else ""
    # A newline behind the last: models that expect to end there may write it, and are not to be held to one call more.
    end = f"({lark.literal(form.end)} | {lark.literal(form.end + NEWLINE)})" if form.end else ""
    return f"({one_of(begin)}) {again} {end}"


def _text(terminal: str, lark: _Lark, *forms: CallForm | ThoughtForm | None) -> str:
    """What may be said beside some forms: a terminal's texts, and tokens that stand for themselves alone."""
    return f"({' | '.join([terminal, *lark.plain(*forms)])})+"


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

    def plain(self, *forms: CallForm | ThoughtForm | None) -> list[str]:
        """Added tokens that a text may have, but for those of a form."""
        marks = {self._added.get(word) for form in forms if form is not None for word in form.words}
        found = sorted(self._plain - marks)
        return [f"<[{','.join(map(str, found))}]>"] if found else []


def _escaped(text: str) -> str:
    """A text for a regular expression between slashes."""
    return re.sub(r"([^A-Za-z0-9 \"<>])", r"\\\1", text)
