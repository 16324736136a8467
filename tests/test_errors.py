"""Messages quote files, which may hold anything."""

from __future__ import annotations

import pytest
import torch

from anybit.errors import LONGEST, InputError, about_layer, enough_memory, printable


def test_a_message_is_one_line_that_steers_no_terminal() -> None:
    message = str(InputError("model\x1b[2J\n\r.norm \u202e is missing: é stays"))
    assert message == r"model\x1b[2J\n\r.norm \u202e is missing: é stays"


def test_what_steers_is_written_out() -> None:
    assert printable("\x1b[2J\x9b\r\n\u202eé日") == r"\x1b[2J\x9b\r\n\u202eé日"


def test_a_message_has_an_end() -> None:
    message = str(InputError("begins " + "x" * 10**7 + " ends"))
    assert message.startswith("begins xxx") and message.endswith("xxx ends")
    assert len(message) == LONGEST + len(" ... ")


def test_words_about_a_layer_come_first() -> None:
    with pytest.raises(InputError, match=r"^model\.norm: too short$"), about_layer("model.norm"):
        raise InputError("too short")


def test_a_full_memory_is_a_sentence() -> None:
    with (
        pytest.raises(InputError, match=r"the memory is full \(.*allocate.*\): take less"),
        enough_memory("take less"),
    ):
        torch.empty(2**46, dtype=torch.float64)
    with (
        pytest.raises(InputError, match=r"the memory is full \(MemoryError\): take less"),
        enough_memory("take less"),
    ):
        raise MemoryError
    with (
        pytest.raises(InputError, match=r"the GPU's memory is full \(CUDA.*\): take less"),
        enough_memory("take less"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory\nthere is more to say")


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes"), enough_memory("take less"):
        raise RuntimeError("shapes do not fit")
    with pytest.raises(InputError, match="no such file"), enough_memory("take less"):
        raise InputError("no such file")
