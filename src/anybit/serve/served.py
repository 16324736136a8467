"""The model that is served, and what requests need to know of it: one that writes texts, or one that embeds them."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from anybit.checkpoint.chat_template import render, template_of
from anybit.checkpoint.generation import not_native
from anybit.checkpoint.tokenizer import encode
from anybit.config import Json
from anybit.engine.sampling import Sampling
from anybit.engine.text import BROKEN, check_tokenizer
from anybit.errors import InputError
from anybit.serve.chat.constraint import LONGEST, Constraint, Constraints, alone
from anybit.serve.chat.conversation import Conversation, Prompt
from anybit.serve.chat.speech import PROBE, PROBED, Family, Speech, family_of, thought_form
from anybit.serve.chat.tools import Tools
from anybit.serve.errors import BadField, TooLong
from anybit.serve.run.embedder import Embedder
from anybit.serve.run.model import Embeds, Model
from anybit.serve.run.runner import Heard, Limits, Runner
from anybit.serve.run.worker import Worker
from anybit.serve.settings import Settings

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_BYTE = re.compile("<0x[0-9A-F]{2}>")
# Bytes by the characters that GPT-2 writes them as: printable ones as themselves, the others from U+0100 on.
_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = {chr(byte): byte for byte in _PLAIN} | {
    chr(256 + i): byte for i, byte in enumerate(b for b in range(256) if b not in _PLAIN)
}
BEGINNING = (
    64  # characters for each token of the context, by which a long text is refused without cutting up all
)


class Named:
    """A model under a name: what all kinds have in common.

    Args:
        name: as requests name it.
        tokenizer: Transformers'.
        vocabulary: token ids that there are.
        context: most tokens of a text.
    """

    runner: Worker  # the thread that has the model
    instead: str  # what those are told who ask for what only the other kind does, behind the name

    def __init__(self, name: str, tokenizer: Any, vocabulary: int, context: int) -> None:
        self.name, self.vocabulary, self.context = name, vocabulary, context
        self.tokenizer: Tokenizer = check_tokenizer(tokenizer)
        self._transformers = tokenizer
        self._most_bytes = self.context * _longest(self.tokenizer)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens that go around it or without.

        Raises:
            InputError: a text that is far longer than the context, by its bytes or its beginning: cutting it up takes
                seconds, and two hundred times its memory.
        """
        size = len(text.encode(errors="replace"))
        if size > self._most_bytes:
            raise TooLong(
                f"the text has {size} bytes, which are more than the {self.context} tokens that the context holds"
            )
        beginning = text[: BEGINNING * self.context]
        found = encode(self._transformers, beginning, special)
        if len(beginning) == len(text):
            return found
        if len(found) > 2 * self.context:  # what comes behind may join its last tokens, but not half of them
            raise TooLong(
                f"the text has {len(text)} characters, whose first {len(beginning)} are {len(found)} tokens; "
                f"the context holds {self.context}: shorten it"
            )
        return encode(self._transformers, text, special)

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens; special ones have none."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def encode_chat(self, chat: Conversation) -> Prompt:
        """A conversation as token ids, ready for the model's answer.

        Raises:
            InputError: there is no template, or it fails.
        """
        raise InputError(f"{self.name} {self.instead}")

    def card(self) -> Json:
        """What /v1/models says of it besides its name."""
        raise NotImplementedError

    def greeting(self) -> str:
        """What the command says of it behind its address."""
        raise NotImplementedError


class Served(Named):
    """A language model, which writes texts.

    Args:
        engine: runs it.
        name: as requests name it.
        limits: what texts share.
        deliver: see `Runner`.
    """

    runner: Runner
    instead = "is a language model, which has no embeddings: serve an encoder to have /v1/embeddings"

    def __init__(
        self, engine: Model, name: str, limits: Limits, deliver: Callable[[Heard], None] | None = None
    ) -> None:
        self.engine, self.runner = engine, Runner(engine, limits, deliver)
        context = min(engine.context, limits.pages * engine.page_tokens)
        super().__init__(name, engine.tokenizer, engine.vocabulary, context)
        # What the model's makers ask for and no text here has: the server starts without it.
        self.left_out = list(not_native(engine.generation, samples=True))
        sampling = engine.default_sampling(**dict.fromkeys(self.left_out))
        # OpenAI's default is temperature 1; a model whose makers want another has its own.
        self.sampling: Sampling = replace(sampling, temperature=1.0) if not sampling.temperature else sampling
        self._compiling = threading.Lock()
        # Now, as it reads the whole vocabulary and holds up all other threads. Who asks for a form is told what failed.
        with suppress(ImportError, ValueError):
            _ = self._constraints

    @property
    def kv_bytes(self) -> int:
        """What keys and values take at most."""
        engine, limits = self.engine, self.runner.limits
        own = engine.window_page_bytes if limits.window_pages else 0
        return limits.pages * (engine.page_bytes - own) + limits.window_pages * own

    @property
    def chats(self) -> bool:
        """Whether it has a chat template."""
        return bool(self.engine.tokenizer.chat_template)

    @cached_property
    def calls(self) -> Family | None:
        """How it writes calls of functions; None: it can be given no tools.

        Raises:
            InputError: its template fails, such as by taking too long; another time it may not.
        """
        if not self.chats:
            return None
        return family_of(render(self.name, self.engine.tokenizer, PROBE, [PROBED]))

    def encode_chat(self, chat: Conversation) -> Prompt:
        """A conversation as token ids, ready for the model's answer.

        Raises:
            InputError: there is no template, or it fails; there are tools, of which it knows nothing.
        """
        if not self.chats:
            raise InputError(f"{self.name} has no chat template: use /v1/completions")
        tools, given = chat.tools, chat.tools.given if chat.tools else None
        thought = thought_form(template_of(self.name, self.engine.tokenizer, given))
        text = render(self.name, self.engine.tokenizer, chat.messages, given, chat.variables)
        tokens = self.encode(text, special=False)  # the template has them
        thinking = thought is not None and text.rstrip().endswith(thought.begin)
        names = tuple(function.name for function in tools.functions) if tools else ()
        speech = Speech(self._calls_of(tools), names, thought, thinking)
        if tools is None and not speech.words:  # most: their texts are text alone
            return Prompt(tokens, speech, frozenset())
        added, known = self.tokenizer.get_added_tokens_decoder(), alone(self.tokenizer)
        words = frozenset(known.keys() & {*speech.words})
        shown = (at for word, at in known.items() if word in words or (tools and not added[at].special))
        return Prompt(tokens, replace(speech, tokens=words), frozenset(shown))

    @property
    def takes_tools(self) -> bool:
        """Whether its chat template has tools, in a form that is known."""
        with suppress(InputError):
            return self.calls is not None
        return False

    def _calls_of(self, tools: Tools | None) -> Family | None:
        """How calls of some tools are written.

        Raises:
            BadField: in no way that is known.
        """
        if tools is None:
            return None
        try:
            calls = self.calls
        except InputError as error:
            raise BadField("tools", f"{self.name} takes no tools: {error}") from None
        if calls is None:
            raise BadField(
                "tools", f"the chat template of {self.name} has no tools, or in a form that is not served"
            )
        return calls

    def word(self, token: int) -> str:
        """A token by itself, as log-probabilities name it: parts of characters as the vocabulary writes them."""
        text = str(self.tokenizer.decode([token], skip_special_tokens=False))
        raw = self.tokenizer.id_to_token(token) or f"<{token}>"
        if BROKEN in text or not text:
            return raw
        return f" {text}" if raw.startswith("▁") and not text.startswith(" ") else text

    def bytes_of(self, token: int) -> list[int] | None:
        """The bytes of a token's text, which may be a part of a character; None: the vocabulary does not say."""
        word = self.word(token)
        if word != self.tokenizer.id_to_token(token):
            return list(word.encode())
        if _BYTE.fullmatch(word):  # as SentencePiece writes one
            return [int(word[3:5], 16)]
        if type(self.tokenizer.decoder).__name__ == "ByteLevel" and all(c in _BYTES for c in word):
            return [_BYTES[c] for c in word]
        return list(word.encode()) if BROKEN not in self.decode([token]) else None

    def constraint(self, kind: str, form: str | Json, most: int = LONGEST) -> Constraint:
        """See `Constraints.compile`.

        Raises:
            InputError: also where llguidance is not there, or cannot read the tokenizer.
        """
        try:
            with self._compiling:
                constraints = self._constraints
        except (ImportError, ValueError) as error:
            raise InputError(f"{self.name} can be given no form ({error}): leave it out") from error
        return constraints.compile(kind, form, most)

    @cached_property
    def _constraints(self) -> Constraints:
        return Constraints(self.tokenizer, self.engine.vocabulary, self.engine.ends)

    def card(self) -> Json:
        """With its levels, the smallest first, and what keys and values take."""
        engine, scheduler = self.engine, self.runner.scheduler
        return {
            "chat": self.chats,
            "tools": self.takes_tools,
            "kv_bits": engine.kv_bits,
            "kv_bytes_per_token": self.kv_bytes / scheduler.capacity,
            "kv_bytes": self.kv_bytes,
            "levels": [
                {"bits": bits, "bytes_per_token": taken or None}
                for bits, taken in zip(engine.widths, engine.level_bytes)
            ],
        }

    def greeting(self) -> str:
        engine, scheduler = self.engine, self.runner.scheduler
        widths = f"{engine.widths[0]:.2f}"
        if len(engine.widths) > 1:
            widths += f" to {engine.widths[-1]:.2f}"
        names = ", ".join(self.left_out)
        without = f"; without what generation_config.json asks for by {names}" if names else ""
        return (
            f"widths {widths} bits, {engine.threads} threads; texts of up to {self.context} tokens, "
            f"{scheduler.capacity} in all, whose keys and values of {engine.kv_bits} bits take up to "
            f"{self.kv_bytes / 1e6:.0f} MB{without}"
        )


class ServedEncoder(Named):
    """An encoder, which embeds texts.

    Args:
        encoder: runs it.
        settings: its name, and how many texts are embedded together and requests wait, at most.
    """

    runner: Embedder
    instead = "is an encoder, which embeds texts and writes none: use /v1/embeddings"

    def __init__(self, encoder: Embeds, settings: Settings) -> None:
        shared = len(settings.keys) > 1
        self.encoder = encoder
        self.runner = Embedder(encoder, settings.running, settings.waiting, shared)
        super().__init__(settings.name, encoder.tokenizer, encoder.vocabulary, encoder.context)

    def card(self) -> Json:
        """With how it pools."""
        encoder = self.encoder
        return {
            "chat": False,
            "dimensions": encoder.dimensions,
            "pooling": encoder.pooling,
            "levels": [{"bits": bits, "bytes_per_token": None} for bits in encoder.widths],
        }

    def greeting(self) -> str:
        encoder = self.encoder
        what = {"mean": "the mean of the tokens' states", "cls": "the first token's state"}[encoder.pooling]
        return (
            f"widths {encoder.widths[-1]:.2f} bits, {encoder.threads} threads; embeddings of {encoder.dimensions} "
            f"dimensions and unit length, {what} ({encoder.pooling}, {encoder.pooled_by}); "
            f"texts of up to {encoder.context} tokens"
        )


def _longest(tokenizer: Tokenizer) -> float:
    """Bytes of text that one token can stand for; infinite where nothing bounds them."""
    if type(tokenizer.decoder).__name__ != "ByteLevel":
        return math.inf
    shrinks = 1 if tokenizer.normalizer is None else 4  # composing characters (NFC) makes a text shorter
    return shrinks * max(len(token.encode()) for token in tokenizer.get_vocab())
