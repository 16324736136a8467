"""Text streams against decoding everything at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from anybit.engine.text import BROKEN, LONGEST, MARK, TextStream
from anybit.errors import InputError
from tests.builders import byte_tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "naïve café, Straße, žluťoučký kůň, Ελληνικά, русский текст",
    "日本語の文章です。中文字符、한국어 문장",
    "emoji 😀 and 👨‍👩‍👧‍👦 and 🏳️‍🌈 and 🇨🇿 with e\u0301 combined",
    "  two spaces\n\n\tand code: if (a < b) { return a + b; }\n",
]
HEX = [f"<0x{byte:02X}>" for byte in range(256)]


def learned() -> Tokenizer:
    """Byte-level BPE with merges, some within characters, as of GPT-2, Llama 3, SmolLM2 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def falling_back() -> Tokenizer:
    """Words with a mark for the space before, and bytes for what is no word, as of Llama 2 and Gemma."""
    words = ["<unk>", *HEX, "▁", *"abdehiklnoprstuvwxy", "th", "the", "▁the", "▁d", "▁do", "▁dog"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "d"), ("▁d", "o"), ("▁do", "g")]
    merges = [pair for pair in merges if "g" not in pair] + [("▁do", "g")]
    vocabulary = {word: at for at, word in enumerate([*words, "g"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


TOKENIZERS = {
    "bytes": byte_tokenizer().backend_tokenizer,
    "byte-level": learned(),
    "byte-fallback": falling_back(),
}


def run(stream: TextStream, ids: Sequence[int]) -> list[str]:
    return [*map(stream.push, ids), stream.finish()]


def whole(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of tokens, without the last of them while these end within a character."""
    texts = (tokenizer.decode(ids[:n]) for n in range(len(ids), -1, -1))
    return next(text for text in texts if not text.endswith(BROKEN))


def cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """A text up to the stop string that is complete first: tried character by character."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def certain(text: str, stops: Sequence[str]) -> str:
    """A text without the longest end that begins a stop string."""
    ends = [text[at:] for at in range(len(text))]
    held = next((end for end in ends if any(s.startswith(end) and s != end for s in stops)), "")
    return text[: len(text) - len(held)]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_after_every_token_all_is_out_that_ends_with_a_character(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    stream, out = TextStream(tokenizer), ""
    for n, token in enumerate(ids, 1):
        piece = stream.push(token)
        out += piece
        assert BROKEN not in piece
        assert out == whole(tokenizer, ids[:n])
    assert stream.finish() == ""
    assert out == text


words = st.sampled_from([*"ab cé😀", "ab", "the", "dog", "👨‍👩‍👧", "日本"])


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(list(TOKENIZERS)),
    st.lists(words, max_size=25).map("".join),
    st.lists(st.lists(words, min_size=1, max_size=4).map("".join), max_size=4),
)
def test_stop_strings_end_the_text_wherever_tokens_divide_it(kind: str, text: str, stops: list[str]) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text).ids
    expected, by = cut(tokenizer.decode(ids), stops)
    stream, out = TextStream(tokenizer, stops), ""
    for n, token in enumerate(ids, 1):
        out += stream.push(token)
        so_far = whole(tokenizer, ids[:n])
        ended, found = cut(so_far, stops)
        assert stream.stopped == found
        assert out == (certain(so_far, stops) if found is None else ended)
    assert out + stream.finish() == expected
    assert stream.stopped == by


@pytest.mark.parametrize(
    ("text", "stops", "expected", "stopped"),
    [
        ("hello", "l", "he", "l"),  # one string is one stop string
        ("abcd", ["abcd", "bc"], "a", "bc"),  # complete first, even where it comes in one token
        ("abc", ["bc", "c", "abc"], "", "abc"),  # complete at once: the longest
        ("aaab", ["aab"], "a", "aab"),
        ("abababc", ["ababc"], "ab", "ababc"),
        ("abab", ["ababc"], "abab", None),  # held back, and let go
        ("é😀é", ["😀"], "é", "😀"),
        ("a\n\nUser: b", ["\n\nUser:", "\n\nSystem:"], "a", "\n\nUser:"),
        ("abc", [], "abc", None),
    ],
)
def test_stop_strings_by_hand(text: str, stops: str | list[str], expected: str, stopped: str | None) -> None:
    tokenizer = TOKENIZERS["bytes"]
    stream = TextStream(tokenizer, stops)
    assert "".join(run(stream, tokenizer.encode(text).ids)) == expected
    assert stream.stopped == stopped
    assert stream.push(tokenizer.encode("x").ids[0]) + stream.finish() == ("" if stopped else "x")


@pytest.mark.parametrize(
    ("tokens", "stops", "expected"),
    [
        (["a", 0, "b"], (), f"a{MARK}<x>b"),
        ([0, 0, "\u00e9", 0], (), f"{MARK}<x>{MARK}<x>\u00e9{MARK}<x>"),
        (["\u00e9"[:1], "ab", 0, "c"], ["b<x>c"], "\u00e9a"),
        (["a", 0, "b"], ["<x>"], "a"),
        (["a", 0, "b", 0, "c"], ["b<x>d", ">b<x>c"], f"a{MARK}<x"),
        ([0, "ab"], ["abc"], f"{MARK}<x>ab"),
        ([0, 0, "c"], ["><x>c"], f"{MARK}<x"),
    ],
)
def test_tokens_that_are_shown_have_a_mark_that_stop_strings_do_not_see(
    tokens: list[Any], stops: list[str], expected: str
) -> None:
    tokenizer = Tokenizer.from_str(TOKENIZERS["bytes"].to_str())
    tokenizer.add_special_tokens([AddedToken("<x>", special=True)])
    shown = tokenizer.token_to_id("<x>")
    ids = [one for part in tokens for one in ([shown] if part == 0 else tokenizer.encode(part).ids)]
    assert "".join(run(TextStream(tokenizer, stops, shown=[shown]), ids)) == expected
    assert MARK not in "".join(run(TextStream(tokenizer), ids))


def test_what_was_no_whole_character_comes_before_a_token_that_is_shown() -> None:
    tokenizer = Tokenizer.from_str(TOKENIZERS["bytes"].to_str())
    tokenizer.add_special_tokens([AddedToken("<x>", special=True)])
    shown, (first, second) = tokenizer.token_to_id("<x>"), tokenizer.encode("\u00e9").ids
    assert run(TextStream(tokenizer, shown=[shown]), [first, shown, second]) == [
        "", f"{BROKEN}{MARK}<x>", "", BROKEN,
    ]  # fmt: skip


def test_a_stop_string_in_one_token_is_as_one_in_many() -> None:
    tokenizer = Tokenizer(models.WordLevel({"abcd": 0, "a": 1, "b": 2, "c": 3, "d": 4}, "a"))
    tokenizer.decoder = decoders.Fuse()
    for ids in ([0], [1, 2, 3, 4]):
        assert "".join(run(TextStream(tokenizer, ["abcd", "bc"]), ids)) == "a"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 329), max_size=80))
def test_bytes_of_no_character_come_out_as_they_are_decoded(ids: list[int]) -> None:
    """Any tokens; only those of long runs without a character may be decoded apart."""
    tokenizer = TOKENIZERS["byte-level"]
    pieces = run(TextStream(tokenizer), ids)
    expected = tokenizer.decode(ids)
    if not any(
        len(list(run_)) > LONGEST for broken, run_ in itertools.groupby(expected, BROKEN.__eq__) if broken
    ):
        assert "".join(pieces) == expected


@pytest.mark.parametrize("size", [LONGEST - 1, LONGEST, LONGEST + 1, 5 * LONGEST + 2])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_long_runs_without_a_character_do_not_wait_for_one(kind: str, size: int) -> None:
    tokenizer = TOKENIZERS[kind]
    after = tokenizer.encode("😀 the").ids
    broken = [byte_id(kind, 0xFF)] * size
    stream = TextStream(tokenizer)
    pieces = run(stream, [*broken, *after])
    text = "".join(pieces)
    assert text.count(BROKEN) == size
    assert text.strip(BROKEN).strip() == "😀 the"
    waiting = longest_wait(pieces[:-1])
    assert waiting <= LONGEST + 4  # and the character's own tokens


def byte_id(kind: str, byte: int) -> int:
    """The token of one byte."""
    tokenizer = TOKENIZERS[kind]
    if kind == "byte-fallback":
        return int(tokenizer.token_to_id(HEX[byte]))
    decoded = {tokenizer.decode([at]) for at in range(tokenizer.get_vocab_size())}
    assert BROKEN in decoded
    return int(tokenizer.token_to_id(chr(byte)))  # 0xFF is its own letter of the alphabet


def longest_wait(pieces: Sequence[str]) -> int:
    return max(len(list(empty)) for is_empty, empty in itertools.groupby(pieces, "".__eq__) if is_empty)


def test_bytes_that_void_those_before_them() -> None:
    """A run of bytes that is no UTF-8 is broken as a whole, its beginning too, which is out already."""
    tokenizer = TOKENIZERS["byte-fallback"]
    of = tokenizer.token_to_id
    ids = [of("<0x41>"), of("<0xFF>"), of("b"), of("▁the"), of("▁dog")]
    assert tokenizer.decode(ids) == f"{BROKEN}{BROKEN}b the dog"
    assert run(TextStream(tokenizer), ids) == ["A", "", f"{BROKEN}b", " the", " dog", ""]


def test_a_character_that_stays_half_comes_at_the_end() -> None:
    tokenizer = TOKENIZERS["bytes"]
    ids = tokenizer.encode("a😀").ids[:-1]
    assert run(TextStream(tokenizer), ids) == ["a", "", "", "", BROKEN]
    assert run(TextStream(tokenizer, [BROKEN]), ids) == ["a", "", "", "", ""]
    stream = TextStream(tokenizer, [f"a{BROKEN}b"])
    assert run(stream, ids) == ["", "", "", "", f"a{BROKEN}"]


def test_special_tokens_have_no_text() -> None:
    tokenizer = learned()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    ids = tokenizer.encode("<s>the<|end|> dog<tool></s>").ids
    stream = TextStream(tokenizer, ["<|end|>"])
    assert "".join(run(stream, ids)) == "the dog<tool>" == tokenizer.decode(ids)
    inside = [ids_of for ids_of in tokenizer.encode("é", add_special_tokens=False).ids]
    end = tokenizer.token_to_id("<|end|>")
    mixed = [token for pair in zip(inside, [end] * len(inside), strict=True) for token in pair]
    assert "".join(run(TextStream(tokenizer), mixed)) == tokenizer.decode(mixed)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_first_token_follows_the_prompt(kind: str) -> None:
    """Alone it loses its space where the mark of a space begins a text."""
    tokenizer = TOKENIZERS[kind]
    prompt, ids = tokenizer.encode("the dog").ids, tokenizer.encode("the dog the dog").ids
    assert ids[: len(prompt)] == prompt
    assert "".join(run(TextStream(tokenizer, prompt=prompt), ids[len(prompt) :])) == " the dog"
    alone = "".join(run(TextStream(tokenizer), ids[len(prompt) :]))
    assert alone == tokenizer.decode(ids[len(prompt) :])


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_prompt_that_ends_within_a_character_is_not_given_out(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    prompt = [*tokenizer.encode("the").ids, byte_id(kind, 0xFF)]
    text = "".join(run(TextStream(tokenizer, prompt=prompt), tokenizer.encode("dog").ids))
    assert text.strip() == "dog"


@pytest.mark.parametrize("end", [BROKEN, BROKEN * 8, "é"], ids=["broken", "all broken", "half"])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_space_after_a_prompt_without_a_whole_end(kind: str, end: str) -> None:
    """The last token that ends with a character stands for the prompt: nothing else shows where a text begins."""
    tokenizer = TOKENIZERS[kind]
    words, following = tokenizer.encode("the").ids, tokenizer.encode("the dog").ids
    assert following[: len(words)] == words
    prompt = [*words, *tokenizer.encode(end).ids]
    prompt = prompt[:-1] if end == "é" else prompt
    assert tokenizer.decode(prompt).endswith(BROKEN)
    text = "".join(run(TextStream(tokenizer, prompt=prompt), following[len(words) :]))
    assert text == " dog"


@pytest.mark.parametrize("stop", ["", ["a", ""], [None], [b"a"], [3]])
def test_stop_strings_that_are_none_are_refused(stop: Any) -> None:
    with pytest.raises(InputError, match="expected strings of at least one character"):
        TextStream(TOKENIZERS["bytes"], stop)
