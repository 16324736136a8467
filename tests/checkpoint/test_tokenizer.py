"""Tokenizers whose rules fail, and texts that are none."""

from __future__ import annotations

import pytest
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from anybit.checkpoint.tokenizer import check_ids, encode, read_tokenizer
from anybit.errors import InputError
from tests.builders import MakeModel, byte_tokenizer


def test_encode_is_the_tokenizers_own(tokenizer: PreTrainedTokenizerFast) -> None:
    assert encode(tokenizer, "abc") == tokenizer("abc")["input_ids"]


def test_bytes_that_are_no_utf8_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(InputError, match=r"not valid UTF-8 \(character 2\)"):
        encode(tokenizer, b"ab\xff".decode("utf-8", "surrogateescape"))


def test_a_pattern_beyond_the_librarys_limit_is_a_sentence() -> None:
    """The library panics, and its panic is no `Exception`."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    assert encode(tokenizer, "ab")
    with pytest.raises(InputError, match=r"fails on this text \(.*retry-limit"):
        encode(tokenizer, "x" * 60)


def test_a_damaged_file_is_a_sentence(model_copy: MakeModel) -> None:
    folder = model_copy("llama")
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}')
    with pytest.raises(InputError, match="no usable tokenizer"):
        read_tokenizer("m", folder)


def test_tokens_of_another_model() -> None:
    check_ids([0, 9], 10)
    check_ids([], 10)
    check_ids([10**9], None)
    for ids in ([10], [3, -1]):
        with pytest.raises(InputError, match="vocabulary has 10"):
            check_ids(ids, 10)
