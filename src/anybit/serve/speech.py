"""How a chat model writes what is no plain answer: thoughts before it, and calls of functions.

Each family was trained on a form of its own, which its chat template shows. `Splitter` takes a text apart as it comes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from anybit.config import Json
from anybit.engine.text import overlap

Kind = Literal["reasoning", "content", "call", "arguments"]
REASONING: Kind = "reasoning"
CONTENT: Kind = "content"
CALL: Kind = "call"
ARGUMENTS: Kind = "arguments"


@dataclass(frozen=True)
class CallForm:
    """Calls are `begin` NAME `middle` ARGUMENTS, then `next` NAME `middle` ARGUMENTS for each other one, then `end`.

    Attributes:
        begin: before the first name.
        middle: between a name and its arguments, which are a JSON object.
        next: between arguments and the next name; empty: one answer has one call.
        end: behind the last arguments.
        words: parts of these that vocabularies have as tokens of their own. The first begins `begin`, and a text may
            stand before it. None: nothing stands before the first call.
        bare: a form without words that models fall back to.
    """

    begin: str
    middle: str
    next: str
    end: str
    words: tuple[str, ...] = ()
    bare: CallForm | None = None


LLAMA = CallForm('{"name": "', '", "parameters": ', "", "}")  # from 3.1 on
HERMES = CallForm(  # Hermes, Qwen, Granite 4
    '<tool_call>\n{"name": "',
    '", "arguments": ',
    '}\n</tool_call>\n<tool_call>\n{"name": "',
    "}\n</tool_call>",
    ("<tool_call>", "</tool_call>"),
    CallForm('{"name": "', '", "arguments": ', '}\n{"name": "', "}"),  # Qwen2.5-Coder leaves the tags out
)
MISTRAL = CallForm("[TOOL_CALLS]", "[ARGS]", "[TOOL_CALLS]", "", ("[TOOL_CALLS]", "[ARGS]"))
MISTRAL_LIST = CallForm(  # before Mistral Small 3.2
    '[TOOL_CALLS][{"name": "', '", "arguments": ', '}, {"name": "', "}]", ("[TOOL_CALLS]",)
)
FORMS = (HERMES, LLAMA, MISTRAL, MISTRAL_LIST)
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


def call_form(written: str) -> CallForm | None:
    """How a model writes calls, by what its chat template makes of `PROBE` and `PROBED`.

    Args:
        written: that.

    Returns:
        one of `FORMS`; None: the template leaves tools out, or writes calls in another form.
    """
    if PROBED["function"]["description"] not in written:
        return None
    return next((form for form in FORMS if f"{form.begin}probe{form.middle}" in written), None)


def thought_form(template: str) -> ThoughtForm | None:
    """How a model writes thoughts, by its chat template; None: it writes none."""
    return next((form for form in THOUGHTS if form.end in template), None)


@dataclass(frozen=True)
class Speech:
    """How an answer is to be read.

    Attributes:
        calls: how calls are written; None: there are none.
        names: functions that may be called.
        thought: how a thought is written; None: there is none.
        thinking: the prompt has begun one.
    """

    calls: CallForm | None = None
    names: tuple[str, ...] = ()
    thought: ThoughtForm | None = None
    thinking: bool = False

    @property
    def bare(self) -> CallForm | None:
        """The form of calls that nothing stands before."""
        return self.calls if self.calls is None or not self.calls.words else self.calls.bare

    @property
    def tagged(self) -> CallForm | None:
        """The form of calls that a text may stand before."""
        return self.calls if self.calls is not None and self.calls.words else None

    @property
    def words(self) -> tuple[str, ...]:
        """What its forms are made of besides text."""
        return tuple(word for form in (self.calls, self.thought) if form is not None for word in form.words)


PLAIN = Speech()  # text alone


@dataclass(frozen=True)
class Part:
    """A piece of an answer: of its thought, of what it says, the name of a call that begins, or of its arguments."""

    kind: Kind
    text: str


class _Heads:
    """Beginnings of a call, up to its arguments: `start` NAME `middle`."""

    def __init__(self, start: str, form: CallForm, names: Sequence[str]) -> None:
        self._start, self._heads = start, [start + name + form.middle for name in names]
        escaped = (re.escape(start), "|".join(map(re.escape, names)), re.escape(form.middle))
        self._pattern = re.compile("{}({}){}".format(*escaped))
        self.form = form

    def find(self, text: str) -> re.Match[str] | None:
        """The first, its name as group 1."""
        return self._pattern.search(text)

    def match(self, text: str) -> re.Match[str] | None:
        """That which a text begins with."""
        return self._pattern.match(text)

    def may_follow(self, text: str) -> bool:
        """Whether a text may be the beginning of one."""
        return any(head.startswith(text) for head in self._heads)

    def held(self, text: str) -> int:
        """Characters at the end of a text that may be the beginning of one."""
        at = text.rfind(self._start)
        return len(text) - at if at >= 0 and self.may_follow(text[at:]) else overlap(text, self._start)


class Splitter:
    """Takes a text apart as it comes; how it is cut changes nothing but where parts are.

    Whitespace around thoughts and before calls is left out. What is no call, up to its arguments, stays in the text.

    Args:
        speech: how to read it.
    """

    def __init__(self, speech: Speech) -> None:
        self._thought = speech.thought
        tagged, bare, names = speech.tagged, speech.bare, speech.names
        self._tagged = _Heads(tagged.begin, tagged, names) if tagged is not None else None
        self._bare = _Heads(bare.begin, bare, names) if bare is not None else None
        self._more: _Heads | None = None  # behind a call
        self._end = ""  # of the calls that came
        self._step: Callable[[bool], bool] = self._think if speech.thinking else self._open
        self._rest = ""  # what has come and is in no part yet
        self._parts: list[Part] = []
        self._trims = speech.thinking  # whitespace that comes now is left out
        self._names = names
        self._depth, self._quoted, self._escaped = 0, False, False  # in arguments

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
        found, thought, bare = self._rest.lstrip(), self._thought, self._bare
        if thought is not None and found.startswith(thought.begin):
            self._rest, self._trims = found.removeprefix(thought.begin), True
            self._step = self._think
            return True
        if bare is not None and (head := bare.match(found)) is not None:
            self._call(bare.form, head, found)
            return True
        begins_thought = thought is not None and thought.begin.startswith(found)
        if not last and (begins_thought or (bare is not None and bare.may_follow(found))):
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
        self._rest, self._step, self._thought, self._trims = behind, self._open, None, True
        return True

    def _say(self, last: bool) -> bool:
        head = None if self._tagged is None else self._tagged.find(self._rest)
        if self._tagged is None or head is None:
            self._release(CONTENT, None if self._tagged is None else self._tagged.held(self._rest), last)
            return False
        self._add(CONTENT, self._rest[: head.start()].rstrip())
        self._call(self._tagged.form, head, self._rest)
        return True

    def _call(self, form: CallForm, head: re.Match[str], text: str) -> None:
        """Go on behind the head of a call."""
        self._add(CALL, head[1])
        self._rest, self._step = text[head.end() :], self._arguments
        self._more, self._end = _Heads(form.next, form, self._names) if form.next else None, form.end

    def _arguments(self, last: bool) -> bool:
        if not self._rest:
            return False
        end = self._end_of_object()
        self._add(ARGUMENTS, self._rest[:end])
        self._rest = self._rest[end:]
        if self._depth:
            return False
        self._step = self._behind
        return True

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
        more = self._more
        if more is not None and (head := more.match(self._rest)) is not None:
            self._call(more.form, head, self._rest)
            return True
        if not last and (
            self._end.startswith(self._rest) or (more is not None and more.may_follow(self._rest))
        ):
            return False
        self._rest, self._step, self._trims = self._rest.removeprefix(self._end), self._say, True
        return True

    def _release(self, kind: Kind, held: int | None, last: bool) -> None:
        """Give out the rest, but for what may belong to a mark: characters at its end, and whitespace before them.

        Args:
            kind: of the part.
            held: so many; None: no mark can come.
            last: nothing follows.
        """
        certain = self._rest
        if held is not None and not last:
            certain = certain[: len(certain) - held].rstrip()
        self._rest = self._rest[len(certain) :]
        self._add(kind, certain)

    def _add(self, kind: Kind, text: str) -> None:
        text = text.lstrip() if self._trims and kind in (REASONING, CONTENT) else text
        if text:
            self._parts.append(Part(kind, text))
            self._trims = False
