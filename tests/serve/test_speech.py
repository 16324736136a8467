"""Answers taken apart: thoughts, texts and calls, however the text is cut."""

from __future__ import annotations

import json
import random
import time
from itertools import pairwise
from typing import Any

import pytest

from anybit.engine.text import MARK
from anybit.serve.chat.message import Message
from anybit.serve.chat.speech import (
    FAMILIES,
    HERMES,
    LLAMA,
    MISTRAL,
    PLAIN,
    PROBED,
    THOUGHTS,
    Family,
    Speech,
    Splitter,
    family_of,
    thought_form,
)

THINK = THOUGHTS[0]
NAMES = ("f0", "f1", "f2", "f0.more")
ARGUMENTS = [
    '{"a": "}\\"{ <tool_call> [TOOL_CALLS] \\\\"}',
    '{"b": [1, {"c": {}}], "d": "é\U0001f600"}',
    "{}",
]
INDENTED = '```json\n{\n  "name": "f0",\n  "arguments": {\n    "a": "}"\n  }\n}\n```\n'


def tagged(family: Family, count: int) -> str:
    form = family.tagged
    assert form is not None
    calls = [f"f{i}{form.middle}{arguments}" for i, arguments in enumerate(ARGUMENTS[:count])]
    return form.begin + form.next.join(calls) + form.end


def bare(family: Family, count: int) -> str:
    form = family.bare
    assert form is not None
    return "\n".join(
        f'{{"name": "f{i}", "{form.key}": {arguments}}}' for i, arguments in enumerate(ARGUMENTS[:count])
    )


def called(count: int) -> list[tuple[str, str]]:
    return [(f"f{i}", arguments) for i, arguments in enumerate(ARGUMENTS[:count])]


def said(text: str, speech: Speech, cuts: list[int] | None = None) -> dict[str, Any]:
    """The message of a text that comes in pieces, its deltas put together as clients do."""
    message, made = Message(speech), dict[str, Any]()
    ends = sorted({0, *(range(len(text)) if cuts is None else cuts), len(text)})
    pieces = [text[a:b] for a, b in pairwise(ends)] or [""]
    for at, piece in enumerate(pieces):
        delta = message.delta(piece, at == len(pieces) - 1)
        for name in ("reasoning_content", "content"):
            if name in delta:
                made[name] = made.get(name, "") + delta[name]
        for call in delta.get("tool_calls", []):
            calls = made.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({"name": call["function"]["name"], "arguments": "", "id": call["id"]})
            assert call["index"] == len(calls) - 1
            calls[-1]["arguments"] += call["function"]["arguments"]
    made["finish"] = message.finish("stop")
    assert message.finish("length") == "length" and MARK not in json.dumps(made)
    return made


def same_however_it_is_cut(text: str, speech: Speech, **expected: Any) -> None:
    """Checks the whole message, and deltas of every single cut and of many threefold ones."""
    calls = expected.pop("calls", [])
    draw = random.Random(0)
    whole = Message(speech).whole(text)
    assert [
        (one["function"]["name"], one["function"]["arguments"]) for one in whole.pop("tool_calls", [])
    ] == calls
    content = expected.get("content", None if calls else "")
    assert whole == {"role": "assistant", "refusal": None, **expected, "content": content}
    several = [sorted(draw.sample(range(len(text) + 1), min(3, len(text)))) for _ in range(100)]
    for cuts in [None, *[[at] for at in range(len(text))], *several]:
        made = said(text, speech, cuts)
        assert made.pop("finish") == ("tool_calls" if calls else "stop")
        told = made.pop("tool_calls", [])
        assert [(one["name"], one["arguments"]) for one in told] == calls and made == expected
        assert len({one["id"] for one in told}) == len(told)
        assert all(len(one["id"]) == 9 and one["id"].isalnum() for one in told)  # Mistral's rule


@pytest.mark.parametrize("tokens", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family.tagged])
@pytest.mark.parametrize("before", ["", "Let me see.\n\n"])
@pytest.mark.parametrize("thought", ["", "hm <tool\n\nhm"])
def test_calls_are_found_wherever_a_text_is_cut(
    family: Family, before: str, thought: str, tokens: bool
) -> None:
    text = (f"<think>\n{thought}\n</think>\n\n" if thought else "") + before + tagged(family, 3)
    speech = Speech(family, NAMES, THINK)
    if tokens:
        speech = Speech(family, NAMES, THINK, tokens=frozenset(speech.words))
        inside = json.dumps(ARGUMENTS)
        assert "<tool_call>" in inside and "[TOOL_CALLS]" in inside  # as text, which has no mark
        marked = speech.mark(text)
        for word in speech.words:
            marked = marked.replace(f" {MARK}{word}", f" {word}")
        text = marked
    expected = {"reasoning_content": thought} if thought else {}
    expected |= {"content": before.strip()} if before else {}
    for behind in ("", "\n"):
        same_however_it_is_cut(text + behind, speech, calls=called(3), **expected)


@pytest.mark.parametrize("family", [HERMES, LLAMA])
@pytest.mark.parametrize("before", ["", "\n", "<think>\nhm\n</think>\n\n"])
def test_calls_may_have_no_tags_where_nothing_stands_before_them(family: Family, before: str) -> None:
    count = 3 if family is HERMES else 1
    expected = {"reasoning_content": "hm"} if "hm" in before else {}
    speech = Speech(family, NAMES, THINK)
    same_however_it_is_cut(before + bare(family, count), speech, calls=called(count), **expected)
    text = "So: " + bare(family, 1)
    same_however_it_is_cut(text, speech, content=text)


def test_calls_without_tags_may_be_indented_and_fenced() -> None:
    call = ("f0", '{\n    "a": "}"\n  }')
    same_however_it_is_cut(INDENTED, Speech(HERMES, NAMES), calls=[call])
    two = INDENTED.replace("\n```\n", "\n") + INDENTED.removeprefix("```json\n")
    same_however_it_is_cut(two, Speech(HERMES, NAMES), calls=[call, call])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_no_call_of_a_function_that_is_offered_is_text(family: Family) -> None:
    for name in ("f", "f01", "Ann"):
        if family.tagged is not None:
            text = f"{family.tagged.begin}{name}{family.tagged.middle}{{}}{family.tagged.end}\n"
            same_however_it_is_cut(text, Speech(family, NAMES), content=text)
        if family.bare is not None:
            text = f'{{"name": "{name}", "{family.bare.key}": {{}}}}\n'
            same_however_it_is_cut(text, Speech(family, NAMES), content=text)
    for text in ('{"name": "f0", "age": 3}', '{"name": "f0", "arguments": 3}', '```json\n{"a": 1}\n```'):
        same_however_it_is_cut(text, Speech(family, NAMES), content=text)


def test_tags_that_are_tokens_are_text_when_they_are_spelled() -> None:
    """The grammar holds what follows the token to a call, and nothing what follows the same letters."""
    speech = Speech(HERMES, NAMES, tokens=frozenset(("<tool_call>", "</tool_call>")))
    text = "So: " + tagged(HERMES, 1)
    same_however_it_is_cut(text, speech, content=text)


@pytest.mark.parametrize("speech", [PLAIN, *(Speech(family, NAMES, THINK) for family in FAMILIES)])
@pytest.mark.parametrize(
    "text", ["", " \n", " a b\n ", "a <tool_call> b", "[TOOL", "<thin", '{"nam', "a\n<tool_call>\n{"]
)
def test_a_text_without_calls_stays_as_it_is(speech: Speech, text: str) -> None:
    same_however_it_is_cut(text, speech, **({"content": text} if text else {}))


@pytest.mark.parametrize("tokens", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize(
    ("text", "thinking", "thought", "content"),
    [
        ("<think>\n\n</think>\n\nyes\n", False, None, "yes\n"),
        ("\n<think>so</think>yes", False, "so", "yes"),
        ("so\n\nso\n</think>\n\nyes", True, "so\n\nso", "yes"),
        ("so on", True, "so on", None),
        ("<think>so on", False, "so on", None),
        ("yes <think>no</think>", False, None, "yes <think>no</think>"),
        ("yes", False, None, "yes"),
    ],
)
def test_a_thought_comes_first(
    text: str, thinking: bool, thought: str | None, content: str | None, tokens: bool
) -> None:
    speech = Speech(None, (), THINK, thinking, frozenset(THINK.words if tokens else ()))
    expected = {"reasoning_content": thought, "content": content}
    given = {name: value for name, value in expected.items() if value is not None}
    same_however_it_is_cut(speech.mark(text), speech, **given)


@pytest.mark.parametrize("tokens", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_was_cut_has_what_there_is(family: Family, tokens: bool) -> None:
    speech = Speech(family, NAMES)
    speech = Speech(family, NAMES, tokens=frozenset(speech.words if tokens else ()))
    text = (
        bare(family, 1)
        if family.tagged is None
        else speech.mark(tagged(family, 1).replace(ARGUMENTS[0], "@"))
    )
    text = text.replace("@", ARGUMENTS[0])
    begins = text.index(ARGUMENTS[0])
    ends = begins + len(ARGUMENTS[0])
    marked = tokens and family.tagged is not None
    for end in range(len(MARK + speech.words[0]) if marked else 1, len(text)):  # a token comes whole
        made = said(text[:end], speech)
        if end <= begins:
            assert "tool_calls" not in made and made["finish"] == "stop"
            assert made.get("content") == (None if marked else text[:end])
        else:
            assert (
                made["tool_calls"][0]["arguments"] == ARGUMENTS[0][: end - begins] and "content" not in made
            )
            assert made["finish"] == ("tool_calls" if end >= ends else "stop")


def test_streams_give_arguments_as_they_come() -> None:
    message = Message(Speech(HERMES, NAMES))
    given = [message.delta(character, False) for character in tagged(HERMES, 1)]
    pieces = [delta["tool_calls"][0]["function"]["arguments"] for delta in given if delta.get("tool_calls")]
    assert pieces == [ARGUMENTS[0][0], *ARGUMENTS[0][1:]]


@pytest.mark.parametrize(
    "speech", [Speech(HERMES, NAMES, THINK), Speech(None, (), THINK, True), Speech(MISTRAL, NAMES)]
)
@pytest.mark.parametrize("before", ["", "a", "```", "{", '{"name":'])
def test_whitespace_without_end_takes_no_more_time_than_text(speech: Speech, before: str) -> None:
    """Of each piece alone, whatever came before it: a model may write nothing else."""
    splitter, count = Splitter(speech), 20_000
    told = splitter.push(before)
    begun = time.process_time()
    for _ in range(count):
        told += splitter.push(" " * 80)
    assert time.process_time() - begun < 2  # it would be some forty seconds
    parts = [*told, *splitter.push("b"), *splitter.finish()]
    space = "" if speech.thinking and not before else " " * 80 * count
    assert "".join(part.text for part in parts).removeprefix(before) == space + "b"


SHOWN = PROBED["function"]["description"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_shows_how_calls_are_written(family: Family) -> None:
    if (form := family.tagged) is not None:
        call = f"{form.begin}probe{form.middle}{{}}"
    else:
        assert family.bare is not None
        call = f'{{"name": "probe", "{family.bare.key}": {{}}}}'
    assert family_of(f"{SHOWN} Probe. {call}") is family
    assert family_of(f"Probe. {call}") is None  # it leaves tools out
    assert family_of(f"{SHOWN} <function=probe>") is None


def test_a_template_shows_how_thoughts_are_written() -> None:
    assert thought_form("{{ content.split('</think>')[-1] }}") is THINK
    assert thought_form("[THINK]{{ thought }}[/THINK]") is THOUGHTS[1]
    assert thought_form("{{ messages[0].content }}") is None
