"""Tokenizers and chat templates without Transformers: the tokens and texts that it gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, Qwen2Tokenizer

from anybit.checkpoint.chat_template import render
from anybit.checkpoint.stored_tokenizer import StoredTokenizer
from anybit.checkpoint.tokenizer import encode
from anybit.errors import InputError
from tests.builders import byte_tokenizer

TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "h\u00e9llo <b>\n 1"},
    {"role": "assistant", "content": "  yes\n"},
    {"role": "user", "content": "and?"},
]


def qwen() -> Qwen2Tokenizer:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = {letter: i for i, letter in enumerate(bytes_to_unicode().values())}
    vocabulary = letters | {"he": 256, "ll": 257, "\u0120h": 258}
    made = Qwen2Tokenizer(vocabulary, [("h", "e"), ("l", "l"), ("\u0120", "h")])
    made.chat_template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    return made


MAKERS: dict[str, Callable[[], Any]] = {"bytes": byte_tokenizer, "qwen": qwen}


@pytest.fixture(scope="module", params=MAKERS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, StoredTokenizer]:
    folder = tmp_path_factory.mktemp("tokenizer")
    MAKERS[request.param]().save_pretrained(folder)
    found = StoredTokenizer.read(folder)
    assert found is not None
    return AutoTokenizer.from_pretrained(folder), found


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(max_size=40) | st.text("hello e\u0301\u00e9 \n\t'1<|endoftext|>", max_size=40),
    special=st.booleans(),
)
def test_tokens_are_those_of_transformers(
    pair: tuple[Any, StoredTokenizer], text: str, special: bool
) -> None:
    theirs, own = pair
    ids = encode(own, text, special)
    assert ids == encode(theirs, text, special)
    assert own.decode(ids, skip_special_tokens=True) == theirs.backend_tokenizer.decode(
        ids, skip_special_tokens=True
    )


def test_what_else_is_asked_of_it(pair: tuple[Any, StoredTokenizer]) -> None:
    theirs, own = pair
    assert (own.eos_token_id, own.pad_token_id, len(own)) == (
        theirs.eos_token_id,
        theirs.pad_token_id,
        len(theirs),
    )
    assert own.chat_template == theirs.chat_template
    assert dict(own.special_tokens_map) == {
        k: v for k, v in theirs.special_tokens_map.items() if isinstance(v, str)
    }
    assert render("m", own, TALK) == theirs.apply_chat_template(
        TALK, add_generation_prompt=True, tokenize=False
    )


def changed(folder: Path, **fields: Any) -> Path:
    byte_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | fields
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "fields",
    [
        {"tokenizer_class": "LlamaTokenizer"},
        {"tokenizer_class": None},
        {"add_bos_token": True},
        {"eos_token": "<never seen>"},
        {"eos_token": None},
        {"additional_special_tokens": ["<never seen>"]},
        {"added_tokens_decoder": {"300": {"content": "<never seen>"}}},
        {"added_tokens_decoder": "x"},
        {"chat_template": [{"name": "default", "template": "a"}]},
        {"auto_map": {"AutoTokenizer": ["a.b", None]}},
    ],
)
def test_what_is_left_to_transformers(tmp_path: Path, fields: Any) -> None:
    if "chat_template" in fields:
        changed(tmp_path)
        (tmp_path / "chat_template.jinja").unlink()
    assert StoredTokenizer.read(changed(tmp_path)) is not None
    folder = changed(tmp_path, **fields)
    if "chat_template" in fields:
        (folder / "chat_template.jinja").unlink()
    assert StoredTokenizer.read(folder) is None


def test_files_that_are_missing_or_damaged(tmp_path: Path) -> None:
    assert StoredTokenizer.read(tmp_path) is None
    changed(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InputError, match="is not valid UTF-8"):
        StoredTokenizer.read(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("a" * (1 << 20) + "b")
    with pytest.raises(InputError, match="but 1048576 is the limit"):
        StoredTokenizer.read(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    assert StoredTokenizer.read(tmp_path) is None


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}\n  {%- if m.role == 'user' %}\n{{ m['content'] | trim }}\n  {% endif %}\n{% endfor %}",
        "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ m.role[:1] }}{% endfor %}",
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}",
        "{{ messages | tojson(indent=2) }}{{ {'b': '<', 'a': 1} | tojson(sort_keys=true) }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ nothing }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{{ tools is none }}{{ documents is defined }}{{ add_generation_prompt }}{{ strftime_now('%Y') }}",
        "{% macro say(m) %}[{{ m.content }}]{% endmacro %}{{ messages | map('string') | list }}{{ say(messages[0]) }}",
        "{{ dict(a=1).items() | list }}{{ range(3) | list }}{{ messages[-1].content.upper() }}",
    ],
)
def test_templates_find_what_transformers_gives_them(template: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    expected = tokenizer.apply_chat_template(TALK, add_generation_prompt=True, tokenize=False)
    assert render("m", tokenizer, TALK) == expected
