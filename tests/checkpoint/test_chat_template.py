"""Chat templates that are programs without end, without bounds, or out of their sandbox."""

from __future__ import annotations

import multiprocessing
import time

import pytest
from transformers import PreTrainedTokenizerFast

from anybit.checkpoint import chat_template
from anybit.checkpoint.chat_template import PATIENCE, render
from anybit.errors import InputError
from tests.builders import byte_tokenizer

ASKED = [{"role": "user", "content": "h\u00e9llo"}]


def having(template: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_a_template_is_rendered_as_transformers_does(tokenizer: PreTrainedTokenizerFast) -> None:
    expected = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, tokenize=False)
    assert render("m", tokenizer, ASKED) == expected == "[user]h\u00e9llo[assistant]"


def test_a_busy_machine_is_no_reason_to_refuse(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template takes no time, but gets none either."""
    real = chat_template._limit_memory

    def late() -> None:
        time.sleep(2.5)
        real()

    monkeypatch.setattr(chat_template, "_limit_memory", late)
    assert render("m", tokenizer, ASKED) == "[user]h\u00e9llo[assistant]"


FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set x = namespace(a='aaaaaaaa') %}{% for i in range(60) %}{% set x.a = x.a ~ x.a %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (FOREVER, "more than 20? s"),
        (DOUBLING, "[Mm]emory|more than 20? s"),  # whichever a busy machine runs out of first
        ("{{ 'a' * 20_000_000 }}", "memory"),  # longer than any conversation
        ("{{ ''.__class__.__mro__ }}", "SecurityError: access to attribute '__class__'"),
        ("{{ raise_exception('not like this') }}", "not like this"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages[7].content }}", "UndefinedError"),
        ("{{ '\\ud800' }}", "UnicodeEncodeError"),
    ],
)
def test_templates_that_cannot_be_used(template: str, words: str) -> None:
    begun = time.monotonic()
    with pytest.raises(InputError, match=words) as refusal:
        render("some model", having(template), ASKED)
    assert time.monotonic() - begun < PATIENCE + 8
    message = str(refusal.value)
    assert message.startswith("the chat template of some model cannot be used") and "\n" not in message
    assert multiprocessing.active_children() == []
