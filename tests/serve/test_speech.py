"""Answers taken apart: thoughts, texts and calls, however the text is cut."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest

from anybit.serve.message import Message
from anybit.serve.speech import (
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_LIST,
    PROBED,
    THOUGHTS,
    CallForm,
    Speech,
    call_form,
    thought_form,
)

assert HERMES.bare is not None
BARE = HERMES.bare
FORMS = [HERMES, LLAMA, MISTRAL, MISTRAL_LIST]
THINK = THOUGHTS[0]
NAMES = ("f0", "f1", "f2", "f0.more")
ARGUMENTS = [
    '{"a": "}\\"{ <tool_call> [TOOL_CALLS] \\\\"}',
    '{"b": [1, {"c": {}}], "d": "é\U0001f600"}',
    "{}",
]


def written(form: CallForm, count: int) -> str:
    calls = [f"f{i}{form.middle}{arguments}" for i, arguments in enumerate(ARGUMENTS[:count])]
    return form.begin + form.next.join(calls) + form.end


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
    assert message.finish("length") == "length"
    assert message.finish("stop") == ("tool_calls" if "tool_calls" in made else "stop")
    return made


def called(count: int) -> list[tuple[str, str]]:
    return [(f"f{i}", arguments) for i, arguments in enumerate(ARGUMENTS[:count])]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("before", ["", "Let me see.\n\n"])
@pytest.mark.parametrize("thought", ["", "hm <tool\n\nhm"])
def test_calls_are_found_wherever_a_text_is_cut(form: CallForm, before: str, thought: str) -> None:
    before, count = ("", 1) if form is LLAMA else (before, 3)
    text = (f"<think>\n{thought}\n</think>\n\n" if thought else "") + before + written(form, count)
    speech, draw = Speech(form, NAMES, THINK), random.Random(0)
    whole = Message(speech).whole(text)
    assert [
        (call["function"]["name"], call["function"]["arguments"]) for call in whole["tool_calls"]
    ] == called(count)
    assert all(call["type"] == "function" and "index" not in call for call in whole["tool_calls"])
    assert whole["content"] == (before.strip() or None) and whole.get("reasoning_content", "") == thought
    assert Message(speech).whole(text + "\n")["content"] == whole["content"]
    several = [sorted(draw.sample(range(len(text)), 3)) for _ in range(100)]
    for cuts in [None, *[[at] for at in range(len(text))], *several]:
        made = said(text, speech, cuts)
        assert made.get("content") == whole["content"] and made.get("reasoning_content", "") == thought
        assert [(call["name"], call["arguments"]) for call in made["tool_calls"]] == called(count)
        assert len({call["id"] for call in made["tool_calls"]}) == count
        assert all(
            len(call["id"]) == 9 and call["id"].isalnum() for call in made["tool_calls"]
        )  # Mistral's rule


@pytest.mark.parametrize("speech", [Speech(), *(Speech(form, NAMES, THINK) for form in FORMS)])
@pytest.mark.parametrize(
    "text", ["", " \n", " a b\n ", "a <tool_call> b", "[TOOL_CALLS", "<thin", '{"nam', "a\n<tool_call>\n{"]
)
def test_a_text_without_calls_stays_as_it_is(speech: Speech, text: str) -> None:
    if speech.calls is MISTRAL and text.startswith("[TOOL"):
        text = text[:-1]
    assert said(text, speech) == ({"content": text} if text else {})
    whole = Message(speech).whole(text)
    assert whole == {"role": "assistant", "content": text, "refusal": None}


@pytest.mark.parametrize(
    ("text", "thinking", "thought", "content"),
    [
        ("<think>\n\n</think>\n\nyes\n", False, None, "yes\n"),
        ("\n<think>so</think>yes", False, "so", "yes"),
        ("so\n</think>\n\nyes", True, "so", "yes"),
        ("so on", True, "so on", None),
        ("<think>so on", False, "so on", None),
        ("yes <think>no</think>", False, None, "yes <think>no</think>"),
        ("yes", False, None, "yes"),
    ],
)
def test_a_thought_comes_first(text: str, thinking: bool, thought: str | None, content: str | None) -> None:
    made = said(text, Speech(None, (), THINK, thinking))
    assert (made.get("reasoning_content"), made.get("content")) == (thought, content)
    whole = Message(Speech(None, (), THINK, thinking)).whole(text)
    assert (whole.get("reasoning_content"), whole["content"] or None) == (thought, content)


@pytest.mark.parametrize("form", FORMS)
def test_a_call_that_was_cut_has_what_there_is(form: CallForm) -> None:
    text = written(form, 1)
    whole = text.index(form.middle) + len(form.middle)
    for end in range(len(text)):
        made = said(text[:end], Speech(form, NAMES))
        if end < whole:
            assert made == ({"content": text[:end]} if end else {})
        else:
            assert made["tool_calls"][0]["arguments"] == ARGUMENTS[0][: end - whole]


def test_calls_may_lack_their_tags_where_nothing_stands_before_them() -> None:
    for thought in ("", "<think>hm</think>\n"):
        made = said(thought + written(BARE, 3), Speech(HERMES, NAMES, THINK))
        assert [(call["name"], call["arguments"]) for call in made["tool_calls"]] == called(3)
    text = "So: " + written(BARE, 1)
    assert said(text, Speech(HERMES, NAMES)) == {"content": text}


@pytest.mark.parametrize("form", [*FORMS, BARE])
def test_what_is_no_call_of_a_function_that_is_offered_is_text(form: CallForm) -> None:
    for name in ("f", "f01", "Ann"):
        text = f"{form.begin}{name}{form.middle}{{}}{form.end}\n"
        assert said(text, Speech(HERMES if form is BARE else form, NAMES)) == {"content": text}
    assert said('{"name": "f0", "age": 3}', Speech(LLAMA, NAMES)) == {"content": '{"name": "f0", "age": 3}'}


def test_streams_give_arguments_as_they_come() -> None:
    message = Message(Speech(HERMES, NAMES))
    text = written(HERMES, 1)
    given = [message.delta(character, False) for character in text]
    pieces = [delta["tool_calls"][0]["function"]["arguments"] for delta in given if delta.get("tool_calls")]
    assert pieces == ["", *ARGUMENTS[0]]


SHOWN = PROBED["function"]["description"]


@pytest.mark.parametrize("form", FORMS)
def test_a_template_shows_how_calls_are_written(form: CallForm) -> None:
    call = f"probe{form.middle}"
    assert call_form(f"{SHOWN} Probe. {form.begin}{call}") is form
    assert call_form(f"Probe. {form.begin}{call}") is None  # it leaves tools out
    assert call_form(f"{SHOWN} {call}") is call_form(f"{SHOWN} <function=probe>") is None


def test_a_template_shows_how_thoughts_are_written() -> None:
    assert thought_form("{{ content.split('</think>')[-1] }}") is THINK
    assert thought_form("[THINK]{{ thought }}[/THINK]") is THOUGHTS[1]
    assert thought_form("{{ messages[0].content }}") is None


def test_arguments_are_json() -> None:
    for arguments in ARGUMENTS:
        json.loads(arguments)
