"""Texts of a given form (a JSON schema, a regular expression, a grammar), by llguidance."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from anybit.config import Json
from anybit.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONGEST = 64 << 10  # bytes of a schema, an expression or a grammar
DEEPEST = 32  # levels of a schema
KINDS = ("json_schema", "regex", "grammar")
# Of llguidance: what one form may take to compile, and one token. About half of its defaults.
COMPILE_FUEL, STEP_FUEL, STATES, SYMBOLS = 500_000, 100_000, 50_000, 200_000


class Constraint:
    """What tokens may come next in one text."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def allowed(self) -> NDArray[np.bool_]:
        """Whether each token may come next, bool [vocabulary].

        Raises:
            InputError: the form takes too much time.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, count=self._vocabulary, bitorder="little").view(bool)

    def accept(self, token: int) -> None:
        """Go on behind a token that was allowed."""
        self._matcher.consume_token(token)
        self._check()

    @property
    def finished(self) -> bool:
        """Whether the text is whole and nothing may follow."""
        return bool(self._matcher.is_stopped())

    def copy(self) -> Constraint:
        """The same place in the same form, for another text of the same request.

        The lexer's states are one for all copies, and so is their limit. That is why forms are not kept for requests to
        come: texts of one would fail for what others have drawn.
        """
        return Constraint(self._matcher.deep_copy(), self._vocabulary)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InputError(
                f"the form cannot be followed any further ({_said(self._matcher)}): make it simpler"
            )


class Constraints:
    """Compiles forms for one model; made once, as it reads the whole vocabulary.

    Args:
        tokenizer: of the model.
        vocabulary: tokens that logits have.
        ends: tokens that end a text.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, ends: set[int]) -> None:
        from llguidance import LLParserLimits, LLTokenizer

        self._vocabulary = vocabulary
        size = max(vocabulary, tokenizer.get_vocab_size(with_added_tokens=True))
        self._tokenizer = LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=sorted(ends) or None)
        self._limits = LLParserLimits(
            initial_lexer_fuel=COMPILE_FUEL,
            step_lexer_fuel=STEP_FUEL,
            max_lexer_states=STATES,
            max_grammar_size=SYMBOLS,
            verbose_errors=False,
        )

    def compile(self, kind: str, form: str | Json, most: int = LONGEST) -> Constraint:
        """A form, ready for a text's first token.

        Args:
            kind: one of `KINDS`.
            form: a schema as JSON, a regular expression that the whole text matches, or a grammar in llguidance's Lark.
            most: bytes of it.

        Raises:
            InputError: a form that is not understood in full, or too large.
        """
        from llguidance import LLMatcher

        text = json.dumps(form) if kind == "json_schema" else str(form)
        size = len(text.encode(errors="replace"))
        if size > most:
            raise InputError(f"{kind} has {size} bytes, expected at most {most}")
        if kind == "json_schema" and depth(form) > DEEPEST:
            raise InputError(f"{kind} is nested deeper than {DEEPEST} levels")
        try:
            matcher = LLMatcher(self._tokenizer, _grammar(kind, text), limits=self._limits, log_level=0)
        except ValueError as error:
            raise InputError(f"{kind} cannot be enforced ({str(error)[:300]})") from None
        if not matcher.is_error():
            matcher.compute_bitmask()  # some forms fail only here
        if matcher.is_error():
            raise InputError(f"{kind} cannot be enforced ({_said(matcher)})")
        return Constraint(matcher, self._vocabulary)


def alone(tokenizer: Tokenizer) -> dict[str, int]:
    """Tokens that are no text for llguidance, by their words: special ones, and added ones in angle brackets."""
    added = tokenizer.get_added_tokens_decoder().items()
    return {
        token.content: at for at, token in added if token.special or re.fullmatch("<.*>", token.content, re.S)
    }


def _grammar(kind: str, text: str) -> str:
    """A form as llguidance takes it."""
    from llguidance import LLMatcher

    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text)
    return LLMatcher.grammar_from_regex(text) if kind == "regex" else LLMatcher.grammar_from_lark(text)


def _said(matcher: Any) -> str:
    said = str(matcher.get_error()).replace("<non-verbose/>", "").replace("\n", " ")
    return said.strip()[:300]


def depth(form: Any) -> int:
    """Levels of nested objects and lists; found without recursion, as it comes from anyone."""
    deepest, found = 0, [(form, 1)]
    while found:
        value, depth = found.pop()
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        if inner is not None:
            deepest = max(deepest, depth)
            found += [(item, depth + 1) for item in inner]
    return deepest
