"""Messages quote files, which may hold anything."""

from __future__ import annotations

import pytest

from anybit.errors import LONGEST, InputError, about_layer


def test_a_message_is_one_line_that_steers_no_terminal() -> None:
    message = str(InputError("model\x1b[2J\n\r.norm \u202e is missing: é stays"))
    assert message == r"model\x1b[2J\n\r.norm \u202e is missing: é stays"


def test_a_message_has_an_end() -> None:
    message = str(InputError("begins " + "x" * 10**7 + " ends"))
    assert message.startswith("begins xxx") and message.endswith("xxx ends")
    assert len(message) == LONGEST + len(" ... ")


def test_words_about_a_layer_come_first() -> None:
    with pytest.raises(InputError, match=r"^model\.norm: too short$"), about_layer("model.norm"):
        raise InputError("too short")
