"""The model that is served, and what requests need to know of it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from anybit.checkpoint.chat_template import render
from anybit.checkpoint.tokenizer import encode
from anybit.config import Json
from anybit.engine.sampling import Sampling
from anybit.engine.text import BROKEN, check_tokenizer
from anybit.errors import InputError
from anybit.serve.constraint import Constraint, Constraints
from anybit.serve.model import Model
from anybit.serve.runner import Heard, Limits, Runner

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Served:
    """A model under a name.

    Args:
        engine: runs it.
        name: as requests name it.
        limits: what texts share.
        deliver: see `Runner`.
    """

    def __init__(
        self, engine: Model, name: str, limits: Limits, deliver: Callable[[Heard], None] | None = None
    ) -> None:
        self.engine, self.name = engine, name
        self.tokenizer: Tokenizer = check_tokenizer(engine.tokenizer)
        self.runner = Runner(engine, limits, deliver)
        self.context: int = min(engine.context, limits.pages * engine.page_tokens)
        sampling = engine.default_sampling()
        # OpenAI's default is temperature 1; a model whose makers want another has its own.
        self.sampling: Sampling = replace(sampling, temperature=1.0) if not sampling.temperature else sampling
        self._most_bytes = self.context * _longest(self.tokenizer)
        self._compiling = threading.Lock()

    @property
    def chats(self) -> bool:
        """Whether it has a chat template."""
        return bool(self.engine.tokenizer.chat_template)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens that go around it or without.

        Raises:
            InputError: a text that no number of tokens within the context can be: cutting it up takes two hundred times
                its memory.
        """
        size = len(text.encode(errors="replace"))
        if size > self._most_bytes:
            raise InputError(
                f"the prompt has {size} bytes, which are more than the {self.context} tokens that the context holds"
            )
        return encode(self.engine.tokenizer, text, special)

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the model's answer.

        Raises:
            InputError: there is no template, or it fails.
        """
        if not self.chats:
            raise InputError(f"{self.name} has no chat template: use /v1/completions")
        text = render(self.name, self.engine.tokenizer, messages)
        return self.encode(text, special=False)  # the template has them

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens; special ones have none."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def word(self, token: int) -> str:
        """A token by itself, as log-probabilities name it: parts of characters as the vocabulary writes them."""
        text = str(self.tokenizer.decode([token], skip_special_tokens=False))
        raw = self.tokenizer.id_to_token(token) or f"<{token}>"
        if BROKEN in text or not text:
            return raw
        return f" {text}" if raw.startswith("▁") and not text.startswith(" ") else text

    def constraint(self, kind: str, form: str | Json) -> Constraint:
        """See `Constraints.compile`."""
        with self._compiling:
            constraints = self._constraints
        return constraints.compile(kind, form)

    @cached_property
    def _constraints(self) -> Constraints:
        return Constraints(self.tokenizer, self.engine.vocabulary, self.engine.ends)


def _longest(tokenizer: Tokenizer) -> float:
    """Bytes of text that one token can stand for; infinite where nothing bounds them."""
    if type(tokenizer.decoder).__name__ != "ByteLevel":
        return math.inf
    shrinks = 1 if tokenizer.normalizer is None else 4  # composing characters (NFC) makes a text shorter
    return shrinks * max(len(token.encode()) for token in tokenizer.get_vocab())
