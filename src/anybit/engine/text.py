"""Text out of tokens as they come: whole characters, and an end at the first stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from anybit.engine.description import Unsupported
from anybit.errors import InputError

BROKEN = "\N{REPLACEMENT CHARACTER}"  # what decoders give for bytes that are no character, or not yet
CONTEXT = 8  # tokens of a prompt that the first new one is decoded after
MARK = "\udcff"  # before the word of a token that is shown; half of a surrogate pair, which no text has
LONGEST = 32  # tokens without one whole character: what comes is no text, and is no longer waited for
LATE = 3  # bytes that a character which is not yet whole can have, and so tokens


class TextStream:
    """Turns the tokens of one request into pieces of text, which together are the text of all of them.

    A piece ends where both a token and a character end. Special tokens have no text, unless they are shown. Of
    the stop strings, the one that is complete first ends the text, whichever tokens it comes in; of those complete at
    once, the longest. What could be the beginning of one is held back.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: str | Sequence[str] = (),
        prompt: Sequence[int] = (),
        shown: Collection[int] = (),
    ) -> None:
        """A stream of what follows a prompt.

        Args:
            tokenizer: decodes the tokens.
            stop: strings that end the text; neither they nor what follows is given out.
            prompt: tokens that the text continues: some decoders drop a space at the beginning of a text, which is none
                here. Left out: the text is one of its own.
            shown: tokens that come out as `MARK` and their words in the vocabulary, so that no text can feign them.

        Raises:
            InputError: a stop string that is empty, or no string.
        """
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        for text in self._stop:
            if not isinstance(text, str) or not text:
                raise InputError(f"stop is {text!r:.50}, expected strings of at least one character")
        self.stopped: str | None = None  # the stop string that came
        self._tokenizer = tokenizer
        self._shown = frozenset(shown)
        self._special = {at for at, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._stream = self._after(list(prompt[-LONGEST - CONTEXT :]))
        self._pending: list[int] = []  # tokens whose text is not known yet
        self._held = ""  # text that may begin a stop string

    def push(self, token: int) -> str:
        """The text that a token makes certain, which may be none; after a stop string, none."""
        if self.stopped is not None:
            return ""
        if token in self._shown:
            known, self._stream, self._pending = self._decode(self._pending), self._after([token]), []
            return self._released(f"{known}{MARK}{self._tokenizer.id_to_token(token)}")
        return "" if token in self._special else self._released(self._decoded(token))

    def finish(self) -> str:
        """What is left when no token follows."""
        if self.stopped is not None:
            return ""
        text = self._released(self._decode(self._pending))
        text, self._held, self._pending = text + self._held, "", []
        return text

    def _after(self, tokens: list[int]) -> DecodeStream:
        """Decodes what follows these tokens; of those at their end that make no whole character nothing is known."""
        ends = range(len(tokens), max(0, len(tokens) - LONGEST), -1)
        contexts = (tokens[max(0, end - CONTEXT) : end] for end in ends)
        whole = (context for context in contexts if not self._decode(context).endswith(BROKEN))
        return DecodeStream(ids=next(whole, []), skip_special_tokens=True)

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _decoded(self, token: int) -> str:
        self._pending.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except (
            Exception
        ):  # tokenizers has no class for it: these bytes void the ones before, which are given out
            return self._anew(self._pending, [])
        if text is not None:
            self._pending = []
        elif len(self._pending) > LONGEST:
            return self._anew(self._pending[:-LATE], self._pending[-LATE:])
        return text or ""

    def _anew(self, known: list[int], late: list[int]) -> str:
        """The text of tokens as they are, after which the late ones are decoded."""
        self._stream, self._pending = self._after(known[-1:]), []
        return self._decode(known) + "".join(map(self._decoded, late))

    def _released(self, piece: str) -> str:
        """What of the text held back and a new piece is certain, up to a stop string."""
        text = self._held + piece
        if not self._stop:
            return text
        plain = text.replace(MARK, "")
        ends = [(plain.find(stop) + len(stop), -len(stop), stop) for stop in self._stop if stop in plain]
        if ends:
            end, _, self.stopped = min(ends)
            self._held = ""
            return _beginning(text, end - len(self.stopped))
        held = max(overlap(plain, stop) for stop in self._stop)
        certain = _beginning(text, len(plain) - held)
        self._held = text[len(certain) :]
        return certain


def _beginning(text: str, characters: int) -> str:
    """The beginning of a text, of so many characters besides marks."""
    end = characters
    while (more := characters + text.count(MARK, 0, end)) != end:
        end = more
    return text[:end]


def check_tokenizer(tokenizer: Any) -> Tokenizer:
    """What decodes a tokenizer's tokens.

    Raises:
        Unsupported: there is none, or it is none of the library tokenizers.
    """
    found = getattr(tokenizer, "backend_tokenizer", None)
    if found is None:
        raise Unsupported("its tokenizer is none of the library tokenizers, or was not given")
    return found


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text begin a stop string that it does not contain."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
