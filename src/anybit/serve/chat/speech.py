"""How a chat model writes what is no plain answer: thoughts before it, and calls of functions.

Each family was trained on a form of its own, which its chat template shows. `Splitter` takes a text apart as it comes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from anybit.config import Json
from anybit.engine.text import MARK, overlap

Kind = Literal["reasoning", "content", "call", "arguments"]
REASONING: Kind = "reasoning"
CONTENT: Kind = "content"
CALL: Kind = "call"
ARGUMENTS: Kind = "arguments"


@dataclass(frozen=True)
class TaggedCalls:
    """Calls behind a word: `begin` NAME `middle` ARGUMENTS, then `next` NAME `middle` ARGUMENTS and so on, then `end`.

    Attributes:
        begin: before the first name, behind any text.
        middle: between a name and its arguments, which are a JSON object.
        next: between arguments and the next name.
        end: behind the last arguments.
        words: parts of these that vocabularies have as tokens of their own. The first begins `begin`.
    """

    begin: str
    middle: str
    next: str
    end: str
    words: tuple[str, ...]


MOST_SPACE = 12  # characters between parts of a call, and around it: small models may write some without end
SPACE = rf"[ \t\r\n]{{0,{MOST_SPACE}}}"  # what has more is no call
FENCES = ("", "```", "```json")  # before the first of `BareCalls`, without whitespace


@dataclass(frozen=True)
class BareCalls:
    """Calls that are all of an answer: objects with "name" and a key for the arguments, maybe fenced as code.

    Patterns are those of Python's `re` and of llguidance alike, which must agree on what a call is.

    Attributes:
        key: of the arguments.
        several: one may follow another.
    """

    key: str
    several: bool

    def first(self, names: Sequence[str]) -> str:
        """A pattern of what stands before the arguments of the first; the name is group 1."""
        return f"{SPACE}(?:```(?:json)?{SPACE})?{self._head(names)}"

    def next(self, names: Sequence[str]) -> str:
        """The same of all others."""
        return rf"{SPACE}\}}{SPACE}{self._head(names)}"

    def _head(self, names: Sequence[str]) -> str:
        name = "|".join(map(re.escape, names))
        return rf'\{{{SPACE}"name":{SPACE}"({name})",{SPACE}"{self.key}":{SPACE}'


@dataclass(frozen=True)
class Family:
    """How calls are written, in a form that the model was trained on, and in one that it falls back to."""

    tagged: TaggedCalls | None = None
    bare: BareCalls | None = None

    def writes(self, text: str, name: str) -> bool:
        """Whether a chat template has written a call of a function like this."""
        if self.tagged is not None:
            return f"{self.tagged.begin}{name}{self.tagged.middle}" in text
        return self.bare is not None and re.search(self.bare.first([name]), text) is not None


HERMES = Family(  # Hermes, Qwen, Granite 4; Qwen2.5-Coder leaves the tags out
    TaggedCalls(
        '<tool_call>\n{"name": "',
        '", "arguments": ',
        '}\n</tool_call>\n<tool_call>\n{"name": "',
        "}\n</tool_call>",
        ("<tool_call>", "</tool_call>"),
    ),
    BareCalls("arguments", True),
)
MISTRAL = Family(TaggedCalls("[TOOL_CALLS]", "[ARGS]", "[TOOL_CALLS]", "", ("[TOOL_CALLS]", "[ARGS]")))
MISTRAL_LIST = Family(  # the older ones
    TaggedCalls('[TOOL_CALLS][{"name": "', '", "arguments": ', '}, {"name": "', "}]", ("[TOOL_CALLS]",))
)
LLAMA = Family(bare=BareCalls("parameters", False))  # from 3.1 on
FAMILIES = (HERMES, MISTRAL, MISTRAL_LIST, LLAMA)
PROBED: Json = {  # a function
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Says how calls are written.",
        "parameters": {"type": "object", "properties": {"of": {"type": "string", "description": "What."}}},
    },
}
PROBE: list[Json] = [  # a conversation in which it was called; ids are as Mistral's templates ask for
    {"role": "user", "content": "Probe."},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "123456789", "type": "function", "function": {"name": "probe", "arguments": {"of": "it"}}}
        ],
    },
    {"role": "tool", "tool_call_id": "123456789", "content": "Done."},
]


@dataclass(frozen=True)
class ThoughtForm:
    """A thought, which comes first, is `begin` THOUGHT `end`."""

    begin: str
    end: str

    @property
    def words(self) -> tuple[str, ...]:
        return self.begin, self.end


THOUGHTS = (ThoughtForm("<think>", "</think>"), ThoughtForm("[THINK]", "[/THINK]"))


def family_of(written: str) -> Family | None:
    """How a model writes calls, by what its chat template makes of `PROBE` and `PROBED`.

    Args:
        written: that.

    Returns:
        one of `FAMILIES`; None: the template leaves tools out, or writes calls in another form.
    """
    if PROBED["function"]["description"] not in written:
        return None
    return next((family for family in FAMILIES if family.writes(written, PROBED["function"]["name"])), None)


def thought_form(template: str) -> ThoughtForm | None:
    """How a model writes thoughts, by its chat template; None: it writes none."""
    return next((form for form in THOUGHTS if form.end in template), None)


@dataclass(frozen=True)
class Part:
    """A piece of an answer: of its thought, of what it says, the name of a call that begins, or of its arguments."""

    kind: Kind
    text: str


class _TaggedHeads:
    """Beginnings of a call, up to its arguments: `start` NAME `middle`."""

    def __init__(self, start: str, middle: str, names: Sequence[str]) -> None:
        self._start, self._heads = start, [f"{start}{name}{middle}{{" for name in names]
        one = "|".join(map(re.escape, names))
        self._pattern = re.compile(f"{re.escape(start)}({one}){re.escape(middle)}(?={{)")

    def find(self, text: str) -> re.Match[str] | None:
        """The first, its name as group 1."""
        return self._pattern.search(text)

    def match(self, text: str) -> re.Match[str] | None:
        """That which a text begins with."""
        return self._pattern.match(text)

    def held(self, text: str) -> int:
        """Characters at the end of a text that may be the beginning of one."""
        at = text.rfind(self._start)
        if at >= 0 and any(head.startswith(text[at:]) for head in self._heads):
            return len(text) - at
        return overlap(text, self._start)


class _BareHeads:
    """The same of calls without tags, where whitespace may be anywhere.

    Args:
        pattern: of them.
        begins: what they begin with, without whitespace.
        form: of the calls.
        names: of functions.
    """

    def __init__(self, pattern: str, begins: Sequence[str], form: BareCalls, names: Sequence[str]) -> None:
        self._heads = [f'{begin}{{"name":"{name}","{form.key}":{{' for begin in begins for name in names]
        self._pattern = re.compile(rf"{pattern}(?=\{{)")

    def match(self, text: str) -> re.Match[str] | None:
        """That which a text begins with, its name as group 1."""
        return self._pattern.match(text)

    def may_follow(self, text: str) -> bool:
        """Whether a text may be the beginning of one."""
        if _LONG_SPACE.search(text):
            return False
        found = "".join(text.split())
        return any(head.startswith(found) for head in self._heads)


_LONG_SPACE = re.compile(rf"\s{{{MOST_SPACE + 1}}}")


class _Heads:
    """Where calls begin: of each form those of the first and of all others; None: there are none."""

    def __init__(self, speech: Speech) -> None:
        tagged = speech.calls.tagged if speech.calls is not None else None
        bare = speech.calls.bare if speech.calls is not None else None
        names = speech.names
        self.tagged = self.tagged_next = self.bare = self.bare_next = None
        self.tag = ""  # that nothing but a call begins with
        if tagged is not None:
            self.tag = MARK + tagged.words[0] if tagged.words[0] in speech.tokens else ""
            middle = speech.mark(tagged.middle)
            self.tagged = _TaggedHeads(speech.mark(tagged.begin), middle, names)
            self.tagged_next = _TaggedHeads(speech.mark(tagged.next), middle, names)
        if bare is not None:
            self.bare = _BareHeads(bare.first(names), FENCES, bare, names)
            self.bare_next = _BareHeads(bare.next(names), ["}"], bare, names) if bare.several else None


@dataclass(frozen=True)
class Speech:
    """How an answer is to be read.

    Attributes:
        calls: how calls are written; None: there are none.
        names: functions that may be called.
        thought: how a thought is written; None: there is none.
        thinking: the prompt has begun one.
        tokens: words that the vocabulary has as tokens of their own. Spelled by others they are text.
    """

    calls: Family | None = None
    names: tuple[str, ...] = ()
    thought: ThoughtForm | None = None
    thinking: bool = False
    tokens: frozenset[str] = frozenset()

    @property
    def words(self) -> tuple[str, ...]:
        """What its forms are made of besides text."""
        of_calls = self.calls.tagged.words if self.calls is not None and self.calls.tagged is not None else ()
        return (*of_calls, *(self.thought.words if self.thought is not None else ()))

    def mark(self, text: str) -> str:
        """A part of a form as it comes: words that are tokens have a mark that nothing else has."""
        for word in self.tokens:
            text = text.replace(word, MARK + word)
        return text

    @cached_property
    def heads(self) -> _Heads:
        """Where its calls begin: made once for all texts of a request."""
        return _Heads(self)


PLAIN = Speech()  # text alone


class Splitter:
    """Takes a text apart as it comes; how it is cut changes nothing but where parts are.

    Whitespace around thoughts and before calls is left out. What is no call, up to its arguments, stays in the text.
    Behind a call nothing but calls is expected.

    Args:
        speech: how to read it. Tokens that stand for themselves alone, its words among them, have a mark, so that
            neither text can feign them nor they text.
    """

    def __init__(self, speech: Speech) -> None:
        self._thought = speech.thought and ThoughtForm(*map(speech.mark, speech.thought.words))
        self._heads = speech.heads
        self._more: _TaggedHeads | _BareHeads | None = None  # behind a call
        self._step: Callable[[bool], bool] = self._think if speech.thinking else self._open
        self._space: list[str] = []  # whitespace that has come behind all parts
        self._rest = ""  # what has come behind that
        self._trims = speech.thinking  # this whitespace is left out
        self._parts: list[Part] = []
        self._depth, self._quoted, self._escaped = 0, False, False  # in arguments
        self.calls = 0  # that have begun

    @property
    def inside(self) -> bool:
        """Whether the arguments of the last call have not ended."""
        return self._depth > 0

    @property
    def thinks(self) -> bool:
        """Whether a thought has begun and not ended."""
        return self._step == self._think

    def reason(self, finish: str | None) -> str | None:
        """Why a message has ended, by why its text has, once all of it was read."""
        return "tool_calls" if finish == "stop" and self.calls and not self.inside else finish

    def push(self, text: str) -> list[Part]:
        """The parts that some more text makes certain."""
        self._rest += text
        return self._taken(last=False)

    def finish(self) -> list[Part]:
        """The parts that are left when no text follows."""
        return self._taken(last=True)

    def _taken(self, last: bool) -> list[Part]:
        while self._step(last):
            pass
        parts, self._parts = self._parts, []
        return parts

    # Each step takes what it can of the rest, and says whether another one goes on with it.

    def _open(self, last: bool) -> bool:
        """Where a thought may begin, or calls with nothing before them."""
        rest, thought, bare = self._rest, self._thought, self._heads.bare
        if thought is not None and (begin := re.match(SPACE + re.escape(thought.begin), rest)) is not None:
            self._begin_part(rest[begin.end() :], self._think)
            return True
        if bare is not None and (head := bare.match(rest)) is not None:
            self._call(head, self._heads.bare_next)
            return True
        may_think = (
            thought is not None and not _LONG_SPACE.match(rest) and thought.begin.startswith(rest.lstrip())
        )
        if not last and (may_think or (bare is not None and bare.may_follow(rest))):
            return False
        self._step = self._say
        return True

    def _think(self, last: bool) -> bool:
        assert self._thought is not None
        thought, end, behind = self._rest.partition(self._thought.end)
        if not end:
            self._release(REASONING, overlap(thought, self._thought.end), last)
            return False
        self._add(REASONING, thought.rstrip())
        self._thought = None
        self._begin_part(behind, self._open)
        return True

    def _say(self, last: bool) -> bool:
        heads, tag = self._heads.tagged, self._heads.tag
        head = None if heads is None else heads.find(self._rest)
        if head is None:
            if last and tag and tag in self._rest:  # a call whose head was cut
                self._rest = self._rest.partition(tag)[0].rstrip()
            self._release(CONTENT, None if heads is None else heads.held(self._rest), last)
            return False
        self._add(CONTENT, self._rest[: head.start()].rstrip())
        self._call(head, self._heads.tagged_next)
        return True

    def _call(self, head: re.Match[str], more: _TaggedHeads | _BareHeads | None) -> None:
        """Go on behind the head of a call."""
        self._parts.append(Part(CALL, head[1]))
        self.calls += 1
        self._more = more
        self._begin_part(head.string[head.end() :], self._arguments)

    def _arguments(self, last: bool) -> bool:
        end = self._end_of_object()
        if end:
            self._parts.append(Part(ARGUMENTS, self._rest[:end]))
        self._rest = self._rest[end:]
        if end and not self._depth:
            self._step = self._behind
        return self._step == self._behind

    def _end_of_object(self) -> int:
        """Characters of the rest that belong to the object of the arguments."""
        for at, character in enumerate(self._rest):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = character == "\\", character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return len(self._rest)

    def _behind(self, last: bool) -> bool:
        """Another call, or the end of all, which is no text."""
        if self._more is None or (head := self._more.match(self._rest)) is None:
            return False
        self._call(head, self._more)
        return True

    def _begin_part(self, rest: str, step: Callable[[bool], bool]) -> None:
        """Go on with a part that whitespace does not begin."""
        self._rest, self._step, self._trims = rest, step, True
        self._space.clear()

    def _release(self, kind: Kind, held: int | None, last: bool) -> None:
        """Give out the rest, but for what may belong to a mark: characters at its end, and whitespace before them.

        Args:
            kind: of the part.
            held: so many; None: no mark can come.
            last: nothing follows.
        """
        certain = self._rest if last or not held else self._rest[:-held]
        text = certain if last or held is None else certain.rstrip()
        self._rest = self._rest[len(certain) :]
        if last:
            text, self._space = "".join([*self._space, text]), []
        self._add(kind, text)
        self._space.append(certain[len(text) :])

    def _add(self, kind: Kind, text: str) -> None:
        """A piece of a thought or a text, behind whitespace that has come."""
        text = text.replace(MARK, "")
        text = text.lstrip() if self._trims else text
        if text:
            space = "" if self._trims else "".join(self._space)
            self._parts.append(Part(kind, space + text))
            self._space.clear()
            self._trims = False
