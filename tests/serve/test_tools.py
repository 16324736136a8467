"""Functions that a request offers: a tiny model's answers are held to them, in the form of its template."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from anybit import Engine
from anybit.checkpoint import chat_template
from anybit.engine.text import MARK, TextStream
from anybit.kernels import cpu
from anybit.serve.chat.constraint import Constraints, alone
from anybit.serve.chat.conversation import NO_ARGUMENTS
from anybit.serve.chat.message import Message
from anybit.serve.chat.speech import HERMES, LLAMA, MISTRAL, MISTRAL_LIST, THOUGHTS, Family, Speech, Splitter
from anybit.serve.chat.tools import (
    INSIDE,
    NAMED,
    OPEN,
    PYTHON_TAG,
    SAID,
    VALUES,
    Function,
    Tools,
    closed,
    grammar,
)
from tests import builders
from tests.serve.conftest import Client, refusal, serving

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu.available(), reason="the native extension is not built"),
]
CHAT = "/v1/chat/completions"
FAMILIES = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "mistral-list": MISTRAL_LIST}
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.description }}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls %}BEGIN{{ c.function.name }}MIDDLE{{ c.function.arguments | tojson }}END{% endfor %}"
    "{{ m.tool_call_id }}{% endfor %}{% if thinks is defined %}{{ thinks }}{% endif %}"
)
WEATHER = {
    "name": "weather",
    "description": "How it is.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "weather_now"}}]
CUT = "\N{SYMBOL FOR NULL}"
HELLO = {"messages": [{"role": "user", "content": "a"}], "temperature": 0}


def around(family: Family) -> tuple[str, str, str]:
    """What stands around the name and the arguments of a call."""
    if (form := family.tagged) is not None:
        return form.begin, form.middle, form.end
    assert family.bare is not None
    return '{"name": "', f'", "{family.bare.key}": ', "}"


def tokenizer_of(family: str, tokens: bool, thinks: bool = False, more: tuple[str, ...] = ()) -> Any:
    """One whose template is of a family; what marks calls and thoughts are tokens of their own, or text."""
    tokenizer = builders.byte_tokenizer()
    template = TEMPLATE + ("{# <think></think> #}" if thinks else "")
    for name, text in zip(("BEGIN", "MIDDLE", "END"), around(FAMILIES[family]), strict=True):
        template = template.replace(name, f"{{{{ {json.dumps(text)} }}}}")
    tokenizer.chat_template = template
    words = [*Speech(FAMILIES[family], thought=THOUGHTS[0]).words] if tokens else []
    special = family.startswith("mistral")
    tokenizer.add_tokens([AddedToken(word, special=special, normalized=False) for word in words], special)
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in more])
    return tokenizer


@contextmanager
def talking(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, family: str, tokens: bool = True, thinks: bool = False
) -> Iterator[Client]:
    """A server of a model with such a tokenizer."""
    monkeypatch.setattr(engine, "tokenizer", tokenizer_of(family, tokens, thinks))
    with serving(engine) as (client, _):
        yield client


def against_blanks(engine: Engine) -> dict[str, float]:
    """A bias: where a form allows blanks, random weights may write nothing else until the text is full."""
    return {str(token): -50.0 for token in engine.tokenizer("\t\n\r ", add_special_tokens=False)["input_ids"]}


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = [call["function"] for call in message["tool_calls"]]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def fits(call: tuple[str, Any]) -> bool:
    name, arguments = call
    if name == "weather_now":
        return bool(arguments == {})
    return bool(name == "weather" and arguments["city"] in ("Rome", "Oslo") and arguments["days"] in (1, 2))


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_is_one_of_those_that_are_offered(
    other_engine: Engine, monkeypatch: pytest.MonkeyPatch, family: str, tokens: bool
) -> None:
    with talking(other_engine, monkeypatch, family, tokens) as client:
        asked = {**HELLO, "temperature": 1.5, "tools": TOOLS, "tool_choice": "required"}
        spaces = other_engine.tokenizer.encode(" \n\t\r\f\v", add_special_tokens=False)
        asked |= {"parallel_tool_calls": False, "n": 8, "seed": 3}
        asked |= {"logit_bias": {str(token): -50 for token in spaces}}  # the context is short
        whole = client.ok(CHAT, asked)
        for choice in whole["choices"]:
            assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
            (call,) = calls_of(choice["message"])
            assert fits(call)
        assert len({str(calls_of(choice["message"])) for choice in whole["choices"]}) > 1
        only = {**asked, "tool_choice": {"type": "function", "function": {"name": "weather_now"}}}
        for choice in client.ok(CHAT, only)["choices"]:
            assert calls_of(choice["message"]) == [("weather_now", {})]


def offered(**how: Any) -> Tools:
    functions = [
        Function(one["function"]["name"], one["function"].get("parameters", NO_ARGUMENTS), False)
        for one in TOOLS
    ]
    return Tools(TOOLS, functions, how.get("required", False), how.get("several", True))


def passes(
    text: str, family: str, tokens: bool, thinking: bool = False, more: tuple[str, ...] = (), **how: Any
) -> bool:
    """Whether an answer is let through, by the grammar of two functions, to its end."""
    tokenizer = tokenizer_of(family, tokens, more=more)
    speech = Speech(FAMILIES[family], ("weather", "weather_now"), THOUGHTS[0], thinking)
    backend, end = tokenizer.backend_tokenizer, tokenizer.convert_tokens_to_ids("</s>")
    form = Constraints(backend, len(tokenizer), {end}).compile(
        "grammar", grammar(offered(**how), speech, backend)
    )
    pieces = text.split(CUT)  # tokens do not go over it
    ids = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    for token in [*ids, end]:
        if not form.allowed()[token]:
            return False
        if token != end:
            form.accept(token)
    return True


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_let_through(family: str, tokens: bool) -> None:
    begin, middle, end = around(FAMILIES[family])
    rome, now = f'weather{middle}{{"city": "Rome", "days": 1}}', f"weather_now{middle}{{}}"
    one, other = begin + rome + end, begin + now + end
    assert all(passes(text, family, tokens) for text in ("", "Hello.\n", '{"name": "Ann"}', one, other))
    assert passes("Well.\n" + one, family, tokens)
    for right, wrong in (
        ('"Rome"', '"Rom"'),
        ('"days": 1', '"days": 3'),
        ('"days"', '"nights"'),
        ("}", ', "x": 1}'),
    ):
        assert right in rome and not passes(one.replace(rome, rome.replace(right, wrong)), family, tokens)
    assert passes(one.replace('"Rome", ', '"Rome",\n    '), family, tokens)  # whitespace, but not without end
    assert not passes(one.replace('"Rome", ', '"Rome",' + " " * 13), family, tokens)
    assert not passes(one.removesuffix("}" + end) + end, family, tokens)
    assert not passes(one + " more", family, tokens) and not passes(one[:-1], family, tokens)
    assert all(passes(text, family, tokens, required=True) for text in (one, other))
    assert not any(passes(text, family, tokens, required=True) for text in ("", "Hello.\n", "Well.\n" + one))
    for thought in ("<think>hm\n</think>\n\n", "<think></think>"):
        begun = thought.removeprefix("<think>")
        assert passes(thought + one, family, tokens, required=True)
        assert passes(begun + one, family, tokens, thinking=True, required=True)
        assert passes(begun + one, family, tokens, thinking=True) and passes(
            "hm", family, tokens, thinking=True
        )
        assert passes(thought + "Hello.", family, tokens) and passes(thought + one, family, tokens)
        assert not passes(thought + one.replace("Rome", "Rom"), family, tokens)
    assert not passes(one, family, tokens, thinking=True, required=True)  # a call in a thought is none
    spelled = FAMILIES[family].tagged is None or not tokens
    assert passes(one, family, tokens, thinking=True) == spelled
    assert not passes("<think>hm" + one, family, tokens, required=True)


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.tagged])
def test_several_calls_are_let_through(family: str, tokens: bool) -> None:
    form = FAMILIES[family].tagged
    assert form is not None
    rome, now = f'weather{form.middle}{{"city": "Rome", "days": 1}}', f"weather_now{form.middle}{{}}"
    two = form.begin + now + form.next + rome + form.end
    assert passes(two, family, tokens) and not passes(two, family, tokens, several=False)
    assert passes(two + "\n", family, tokens) == bool(form.end)
    assert passes(form.begin + form.next.join([now] * 32) + form.end, family, tokens)
    assert not passes(form.begin + form.next.join([now] * 33) + form.end, family, tokens)


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("family", ["hermes", "llama"])
@pytest.mark.parametrize(
    "before", ["", "\n", "<think>hm</think>\n", "<think>hm</think>", "```json\n", "\n```\n"]
)
def test_calls_without_tags_are_held_to_schemas_too(family: str, tokens: bool, before: str) -> None:
    key = "arguments" if family == "hermes" else "parameters"
    call = '{"name": "weather", "KEY": {"city": "Rome", "days": 1}}'.replace("KEY", key)
    indented = json.dumps(json.loads(call), indent=4)
    for text in (
        call,
        indented,
        call + "\n",
        indented + "\n```",
        call.replace(": ", ":"),
        call.replace(" ", "\r\n"),
    ):
        assert passes(before + text, family, tokens)
        assert not passes(before + text.replace("Rome", "Rom"), family, tokens)
    assert passes(f"{before}{call}\n{indented}", family, tokens) == (family == "hermes")
    assert not passes(f"{before}{call}\n{indented}", family, tokens, several=False)
    assert passes(
        before + call.replace("weather", "whether").replace("Rome", "Rom"), family, tokens
    )  # no call
    # Other whitespace than calls have, and more of it: text for both.
    odd_ones = [json.dumps(json.loads(call), indent=16), " " * 13 + call, call.replace(": ", ": " + " " * 12)]
    for text in (*odd_ones, "\u3000" + call, call.replace(" ", "\xa0")):
        said = (before + text).replace("Rome", "Rom")
        assert passes(said, family, tokens)
        splitter = Splitter(Speech(FAMILIES[family], ("weather",), THOUGHTS[0]))
        splitter.push(said)
        assert not splitter.calls
    for odd in ('"x"', "3", "[]", "{"):
        assert not passes(f'{before}{{"name": "weather", "{key}": {odd}', family, tokens)


def test_calls_without_tags_are_at_most_32() -> None:
    call = '{"name": "weather_now", "arguments": {}}'
    assert passes("\n".join([call] * 32), "hermes", True) and not passes(
        "\n".join([call] * 33), "hermes", True
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_may_have_other_added_tokens(family: str) -> None:
    more = ("\n\n", "  ", "<a>")
    assert passes("a  <a>b\n\n<a>", family, True, more=more)
    assert passes("<think>a  <a>b</think>a", family, True, more=more)


def test_which_tokens_are_no_text() -> None:
    """Llguidance says."""
    tokenizer = builders.byte_tokenizer()
    for special, words in (
        (False, ["\n\n", "  ", "<a>", "[b]", "ab", "<a\nb>"]),
        (True, ["<c>", "[d]", "\t\t"]),
    ):
        tokenizer.add_tokens([AddedToken(word, special=special, normalized=False) for word in words], special)
    backend, end = tokenizer.backend_tokenizer, tokenizer.convert_tokens_to_ids("</s>")
    allowed = Constraints(backend, len(tokenizer), {end}).compile("regex", "(?s:.*)").allowed()
    text = {token.content for at, token in backend.get_added_tokens_decoder().items() if allowed[at]}
    assert {*alone(backend)} == {
        token.content for token in backend.get_added_tokens_decoder().values()
    } - text | {"</s>"}


def test_names_mean_themselves() -> None:
    """A point in a name is no pattern."""
    assert not re.fullmatch(
        HERMES.bare.first(["a.b"]) if HERMES.bare else "", '{"name": "axb", "arguments": '
    )


def test_llama_may_say_that_it_calls() -> None:
    call = '{"name": "weather_now", "parameters": {}}'
    for required in (False, True):
        assert passes(PYTHON_TAG + call, "llama", True, more=(PYTHON_TAG,), required=required)
    assert not passes(PYTHON_TAG + "Hello", "llama", True, more=(PYTHON_TAG,), required=True)


@pytest.mark.parametrize("family", ["hermes", "mistral", "mistral-list"])
def test_a_tag_that_is_a_token_is_text_when_it_is_spelled(family: str) -> None:
    form = FAMILIES[family].tagged
    assert form is not None
    spelled = (
        form.begin[:3]
        + CUT
        + form.begin[3:]
        + "weather"
        + form.middle[:2]
        + CUT
        + form.middle[2:]
        + '{"city": 5'
    )
    assert passes(spelled, family, True)
    speech = Speech(FAMILIES[family], ("weather",), tokens=frozenset(form.words))
    splitter = Splitter(speech)
    assert "".join(part.text for part in (*splitter.push(spelled), *splitter.finish())) == spelled
    assert not splitter.calls


def test_schemas_are_kept_without_what_is_said_to_readers() -> None:
    said = {"title": "t", "description": "d", "examples": [1], "default": 2, "$comment": "c"}
    inner = {
        "type": "object",
        "properties": {"title": {"type": "string", **said}},
        "required": ["title"],
        **said,
    }
    schema = {"type": "object", "properties": {"description": inner, "b": {"enum": [{"title": 1}]}}}
    bare = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
    closes = {"additionalProperties": False}
    within = {"description": {**bare, **closes}, "b": {"enum": [{"title": 1}]}}
    assert closed(schema) == {"type": "object", "properties": within, **closes}
    assert closed({"items": inner, "dependentRequired": {"title": ["a"]}}) == {
        "items": {**bare, **closes}, "dependentRequired": {"title": ["a"]},
    }  # fmt: skip
    # Where something else may speak of the same object, it is not closed.
    for keyword in ("allOf", "anyOf", "oneOf"):
        assert closed({"properties": {"a": inner}, keyword: [inner]}) == {
            "properties": {"a": bare},
            keyword: [bare],
        }
    for keyword in ("not", "if"):
        assert closed({"properties": {}, keyword: inner}) == {"properties": {}, keyword: bare}
    assert closed({"$ref": "#/$defs/a", "$defs": {"a": inner}}) == {"$ref": "#/$defs/a", "$defs": {"a": bare}}
    assert closed({"properties": {}, "required": ["a"]}) == {"properties": {}, "required": ["a"]}
    for opens in ({"additionalProperties": True}, {"patternProperties": {"^x": {"type": "string"}}}):
        assert closed({"properties": {}, **opens}) == {"properties": {}, **opens}


KEYWORDS = st.sampled_from([*SAID, *VALUES, *NAMED, *INSIDE, *OPEN, "type", "a"])
SCHEMAS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS, inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(KEYWORDS, SCHEMAS, max_size=4))
def test_any_object_may_be_called_a_schema(schema: dict[str, Any]) -> None:
    once = closed(schema)
    assert closed(once) == once and {*once} <= {*schema, "additionalProperties"}


def test_whatever_is_let_through_is_a_call_that_fits_or_text() -> None:
    """Answers that are drawn at random from what the grammar allows, led by bits of calls, good and bad."""
    draw, calls = random.Random(7), 0
    for family, tokens, thinking, required in itertools.product(
        FAMILIES, (True, False), (True, False), (True, False)
    ):
        tokenizer = tokenizer_of(family, tokens, more=("\n\n", "  ", "<a>"))
        backend, end = tokenizer.backend_tokenizer, tokenizer.convert_tokens_to_ids("</s>")
        added, known = backend.get_added_tokens_decoder(), alone(backend)
        speech = Speech(FAMILIES[family], ("weather", "weather_now"), THOUGHTS[0], thinking)
        words = frozenset(known.keys() & {*speech.words})
        speech = replace(speech, tokens=words)
        compiled = Constraints(backend, len(tokenizer), {end}).compile(
            "grammar", grammar(offered(required=required), speech, backend)
        )
        shown = [at for word, at in known.items() if word in words or not added[at].special]
        for _ in range(25):
            form, ids, left = (
                compiled.copy(),
                list[int](),
                tokenizer.encode(drawn(draw, family), add_special_tokens=False),
            )
            while len(ids) < 250:
                allowed = form.allowed()
                token = left.pop(0) if left else end
                if not allowed[token]:
                    token = int(draw.choice([at for at in range(len(tokenizer)) if allowed[at]]))
                if token == end:
                    break
                form.accept(token)
                ids.append(token)
            stream, message = TextStream(backend, (), (), shown), Message(speech)
            pieces = [*map(stream.push, ids), stream.finish()]
            made = [message.delta(piece, at == len(pieces) - 1) for at, piece in enumerate(pieces)]
            found = list[list[str]]()
            for call in (call for delta in made for call in delta.get("tool_calls", [])):
                if "id" in call:
                    found.append([call["function"]["name"], ""])
                found[-1][1] += call["function"]["arguments"]
            said = "".join(delta.get("content", "") + delta.get("reasoning_content", "") for delta in made)
            assert MARK not in said
            if len(ids) < 250:  # it has ended by itself
                told = (family, tokens, thinking, required, "".join(pieces))
                assert all(
                    is_json(arguments) and fits((name, json.loads(arguments))) for name, arguments in found
                ), told
                assert found or not required, told
            calls += len(found)
    assert calls > 100


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def drawn(draw: random.Random, family: str) -> str:
    """Bits of a call, and of what looks like one."""
    begin, middle, end = around(FAMILIES[family])
    arguments = ['{"city": "Rome", "days": 1}', "{}", '{"city": "Rom"}', "[]", '"x"', "{"]
    spaces = ["", "", " ", "\n", "\r\n", "\n\n", "  ", " " * 14, "\u3000", "\xa0", "\x1c", "\x0b"]
    others = ["<a>", "<think>", "</think>", "```json", "```", "Hi", "}", "{", begin[:3] + CUT + begin[3:]]
    made = ""
    for _ in range(draw.randint(1, 4)):
        name, given = draw.choice(["weather", "weather_now", "whether"]), draw.choice(arguments)
        call = f"{begin}{name}{middle}{given}{draw.choice([end, end, ''])}"
        bare = f'{{SPACE"name":SPACE"{name}",SPACE"{draw.choice(["arguments", "parameters"])}":SPACE{given}SPACE}}'
        bare = "".join(draw.choice(spaces) + part for part in bare.split("SPACE"))
        made += draw.choice(spaces) + draw.choice([call, bare, bare, draw.choice(others)])
    return made.replace(CUT, "")


def test_a_stream_gives_the_same_calls(client_of_hermes: Client) -> None:
    asked = {**HELLO, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    message = client_of_hermes.ok(CHAT, asked)["choices"][0]["message"]
    events = client_of_hermes.events(CHAT, asked)
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    pieces = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert deltas[0] == {"role": "assistant", "content": ""} and not any(
        delta.get("content") for delta in deltas
    )
    assert pieces[0]["type"] == "function" and pieces[0]["id"] and {piece["index"] for piece in pieces} == {0}
    (call,) = message["tool_calls"]
    assert pieces[0]["function"]["name"] == call["function"]["name"]
    assert "".join(piece["function"]["arguments"] for piece in pieces) == call["function"]["arguments"]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_without_need_the_model_may_say_something(client_of_hermes: Client) -> None:
    asked = {**HELLO, "tools": TOOLS, "max_tokens": 8, "ignore_eos": True}
    choice = client_of_hermes.ok(CHAT, asked)["choices"][0]
    plain = client_of_hermes.ok(CHAT, {**asked, "tool_choice": "none"})["choices"][0]
    assert choice["finish_reason"] == plain["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"] and choice["message"]["content"]
    pushed = {**HELLO, "tools": TOOLS, "parallel_tool_calls": False, "logit_bias": {"259": 100}}
    assert fits(*calls_of(client_of_hermes.ok(CHAT, pushed)["choices"][0]["message"]))


@pytest.mark.parametrize("family", FAMILIES)
def test_several_calls(other_engine: Engine, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """A model that is kept from ending its text calls on, where its form has more than one call."""
    with talking(other_engine, monkeypatch, family) as client:
        asked = {**HELLO, "tools": TOOLS[1:], "tool_choice": "required", "max_tokens": 110}
        asked |= {"logit_bias": {"1": -100, str(other_engine.tokenizer.convert_tokens_to_ids("]")): -100}}
        choice = client.ok(CHAT, asked)["choices"][0]
        calls = [call["function"]["name"] for call in choice["message"]["tool_calls"]]
        assert calls == ["weather_now"] * len(calls) and (len(calls) > 1) == (family != "llama")
        assert len({call["id"] for call in choice["message"]["tool_calls"]}) == len(calls)


def test_a_thought_comes_before_a_call(other_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with talking(other_engine, monkeypatch, "hermes", thinks=True) as client:
        asked = {**HELLO, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        think, end = (
            str(token) for token in other_engine.tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
        )
        biased = {**asked, "logit_bias": {end: 100, **against_blanks(other_engine)}}
        message = client.ok(CHAT, biased)["choices"][0]["message"]
        assert fits(*calls_of(message)) and "reasoning_content" not in message
        thought = {**asked, "max_tokens": 9, "logit_bias": {think: 100, end: -100}}
        choice = client.ok(CHAT, thought)["choices"][0]
        assert choice["finish_reason"] == "length" and choice["message"]["reasoning_content"]
        begun = {
            **HELLO,
            "chat_template_kwargs": {"thinks": "<think>\n"},
            "max_tokens": 9,
            "ignore_eos": True,
        }
        said = client.ok(CHAT, {**begun, "logit_bias": {end: -100}})["choices"][0]["message"]
        assert said["content"] == "" and said["reasoning_content"]
        deltas = [
            event["choices"][0]["delta"]
            for event in client.events(CHAT, {**begun, "logit_bias": {end: -100}})
        ]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == said["reasoning_content"]
        closed = client.ok(CHAT, {**begun, "logit_bias": {end: 100}, "max_tokens": 1})["choices"][0][
            "message"
        ]
        assert closed == {"role": "assistant", "content": "", "refusal": None}


def test_calls_and_what_they_gave_go_through_the_template(client_of_hermes: Client) -> None:
    asked_for = {
        "id": "c1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city":"Oslo"}'},
    }
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [asked_for], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "cold"},
    ]
    asked = {"messages": messages, "tools": TOOLS, "chat_template_kwargs": {"thinks": "!"}}
    tokens = client_of_hermes.ok("/tokenize", asked)["tokens"]
    text = client_of_hermes.ok("/detokenize", {"tokens": tokens})["prompt"]
    begin, middle, end = around(HERMES)
    call = f'{begin}weather{middle}{{"city": "Oslo"}}{end}'
    assert text == f"How it is.[user]a[assistant]hm{call}[tool]coldc1!"


def test_the_official_client_calls(client_of_hermes: Client) -> None:
    api = openai.OpenAI(base_url=f"http://127.0.0.1:{client_of_hermes.port}/v1", api_key="none")
    asked: dict[str, Any] = {
        "model": "tiny", "messages": HELLO["messages"], "tools": TOOLS, "parallel_tool_calls": False,
        "tool_choice": {"type": "function", "function": {"name": "weather"}}, "temperature": 0,
    }  # fmt: skip
    (call,) = api.chat.completions.create(**asked).choices[0].message.tool_calls or []
    assert call.type == "function" and fits((call.function.name, json.loads(call.function.arguments)))
    with api.chat.completions.stream(**asked) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert (streamed.function.name, streamed.function.arguments) == (
        call.function.name,
        call.function.arguments,
    )


def tool(**changes: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {**WEATHER, **changes}}]}


def calling(**changes: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, **changes}
    return {"messages": [{"role": "assistant", "tool_calls": [call]}]}


DEEP = json.loads('{"a":' * 40 + "1" + "}" * 40)
NAMED = {"type": "function", "function": {"name": "f"}}
PARAMETERS = "tools[0].function.parameters"
CALL = "messages[0].tool_calls[0].function"
BAD: list[tuple[dict[str, Any], str, str | None]] = [
    ({"tools": {}}, "a list of at most 128 functions", "tools"),
    ({"tools": TOOLS * 65}, "a list of at most 128 functions", "tools"),
    ({"tools": TOOLS + TOOLS}, "two functions of one name", "tools"),
    ({"tools": [5]}, "tools[0] is 5, expected an object", "tools[0]"),
    ({"tools": [{"type": "retrieval"}]}, 'this server has only "function"', "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "function is null", "tools[0].function"),
    (tool(name="a b"), "1 to 64 letters", "tools[0].function.name"),
    (tool(name='"'), "1 to 64 letters", "tools[0].function.name"),
    (tool(parameters=[]), "a schema of an object", PARAMETERS),
    (tool(parameters={"type": "string"}), "a schema of an object", PARAMETERS),
    (tool(parameters={"type": ["object", "null"]}), 'has the type ["object", "null"]', PARAMETERS),
    (tool(strict=True, parameters={"properties": {"a": {"type": "thing"}}}), "cannot be enforced", PARAMETERS),
    (tool(strict=True, parameters={"properties": {"a": {"format": "odd"}}}), "Unknown format", PARAMETERS),
    (tool(parameters={"a": "x" * 70_000}), "expected at most 65536", "tools"),
    (tool(parameters=DEEP), "nested deeper than 32", PARAMETERS),
    ({"tools": TOOLS, "stop": "a"}, "leave it or tools out", "stop"),
    (tool(price=3), "no parameter", "tools[0].function.price"),
    ({"tools": TOOLS, "tool_choice": "always"}, 'expected "none", "auto", "required"', "tool_choice"),
    ({"tool_choice": "required"}, "there are no tools", "tool_choice"),
    ({"tools": TOOLS, "tool_choice": NAMED}, "none of the tools", "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "has only", "tool_choice.type"),
    ({"tools": TOOLS, "guided_regex": "a"}, "give one of them", "tools"),
    ({"chat_template_kwargs": []}, "an object of at most 32 levels", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "which the request itself says", "chat_template_kwargs"),
    (calling(type="custom"), "has only", "messages[0].tool_calls[0].type"),
    (calling(function={"name": "f", "arguments": json.dumps(DEEP)}), "deeper than 32", f"{CALL}.arguments"),
    (calling(function={"arguments": "{}"}), "name is null", f"{CALL}.name"),
    (calling(function={"name": "\ud800", "arguments": "{}"}), "not valid UTF-8", None),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "no parameter", "messages[0].tool_calls"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "words", "param"), BAD)
def test_what_cannot_be_is_said(
    client_of_hermes: Client, body: dict[str, Any], words: str, param: str | None
) -> None:
    status, message, of = refusal(client_of_hermes.ask(CHAT, {**HELLO, **body}))
    assert status == 400 and words in message and of == param


def test_a_model_without_tools_says_so(client: Client) -> None:
    status, message, param = refusal(client.ask(CHAT, {**HELLO, "tools": TOOLS}))
    assert (status, param) == (400, "tools") and "the chat template of tiny has no tools" in message
    assert client.ok("/v1/models")["data"][0]["tools"] is False
    assert client.ok(CHAT, {**HELLO, "tools": TOOLS, "tool_choice": "none", "max_tokens": 1})["choices"]


@pytest.mark.parametrize(
    ("odd", "arguments"),
    [
        ({"properties": {"a": {"enum": [1], "format": "odd"}}, "required": ["a"]}, {"a": 1}),
        ({"properties": {"a": {"enum": [1]}}, "required": ["a"], "title": "t"}, {"a": 1}),
        (
            {"properties": {"a": {"enum": [1], "pattern": "^(?!x)"}}, "required": ["a"]},
            None,
        ),  # not to be known
        ({"$ref": "http://x/y"}, None),
    ],
)
def test_a_schema_that_is_not_strict_is_kept_as_far_as_it_can_be(
    client_of_hermes: Client, odd: dict[str, Any], arguments: Any
) -> None:
    asked = {**HELLO, **tool(parameters=odd), "tool_choice": "required", "parallel_tool_calls": False}
    asked |= {"logit_bias": {str(ord("}") + 3 - 33): 100}}  # objects end as soon as they may
    message = client_of_hermes.ok(CHAT, {**asked, "max_tokens": 90})["choices"][0]["message"]
    ((name, found),) = calls_of(message)
    assert name == "weather" and (found == arguments or (arguments is None and isinstance(found, dict)))


def test_many_tools_fit(client_of_hermes: Client) -> None:
    properties = {
        f"property_{i}": {"type": "string", "description": "What it is for. " * 9} for i in range(8)
    }
    tools = [
        {
            "type": "function",
            "function": {"name": f"{i:062}", "parameters": {"properties": properties if i < 40 else {}}},
        }
        for i in range(128)
    ]
    named = {"type": "function", "function": {"name": f"{127:062}"}}
    asked = {**HELLO, "tools": tools, "parallel_tool_calls": False}
    assert client_of_hermes.ok(CHAT, {**asked, "max_tokens": 1})["choices"]
    message = client_of_hermes.ok(CHAT, {**asked, "tool_choice": named})["choices"][0]["message"]
    assert calls_of(message) == [(f"{127:062}", {})]


def test_a_form_is_the_whole_answer_also_where_the_prompt_begins_a_thought(
    other_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with talking(other_engine, monkeypatch, "hermes", thinks=True) as client:
        asked = {**HELLO, "chat_template_kwargs": {"thinks": "<think>\n"}, "guided_choice": ["yes"]}
        message = client.ok(CHAT, asked)["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "yes", "refusal": None}


def test_history_is_taken_as_others_have_written_it(client_of_hermes: Client) -> None:
    """What OpenAI's answers have, an answer of no text, and arguments that were cut."""
    call = {
        "id": "c",
        "type": "function",
        "index": 0,
        "function": {"name": "weather", "arguments": '{"city": "Os'},
    }
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "annotations": [], "refusal": None, "audio": None},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "no JSON"}]},
    ]
    tokens = client_of_hermes.ok("/tokenize", {"messages": messages})["tokens"]
    text = client_of_hermes.ok("/detokenize", {"tokens": tokens})["prompt"]
    assert text.startswith("[user]a[assistant][assistant]") and text.endswith(
        'weather", "arguments": "{\\"city\\": \\"Os"}\n</tool_call>[tool]no JSONc'
    )


def test_a_template_that_fails_once_is_asked_again(
    other_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with talking(other_engine, monkeypatch, "hermes") as client, monkeypatch.context() as patch:
        patch.setattr(chat_template, "SECONDS", 0)
        assert client.ok("/v1/models")["data"][0]["tools"] is False
        status, message, _ = refusal(client.ask(CHAT, {**HELLO, "tools": TOOLS}))
        assert status == 400 and "takes more than 0 s" in message
        patch.undo()
        assert client.ok("/v1/models")["data"][0]["tools"] is True


@pytest.fixture(scope="module")
def client_of_hermes(other_engine: Engine) -> Iterator[Client]:
    with pytest.MonkeyPatch.context() as patch, talking(other_engine, patch, "hermes") as client:
        assert client.ok("/v1/models")["data"][0]["tools"] is True
        yield client
