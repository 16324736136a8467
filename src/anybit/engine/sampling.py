"""How the next token is chosen from logits.

The order is that of Transformers' logits processors: logit bias, repetition penalty, then frequency and presence
penalty, which Transformers lacks and vLLM has at this place, temperature, top-k, top-p, min-p. Log-probabilities are
those of the model itself: of the logits as they come, before any of this, as vLLM reports them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anybit.checkpoint.generation import DRAWING, not_native
from anybit.config import MAX_SEED
from anybit.engine.distribution import Distribution, Floats, Tokens, distribution, kth_largest
from anybit.errors import InputError

# The least and the largest value that has a meaning.
RANGES: dict[str, tuple[float, float]] = {
    **{name: DRAWING[name] for name in ("top_k", "top_p", "min_p", "repetition_penalty")},
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
TEMPERATURES = (1e-7, 1e5)  # besides 0
BIASES = (-100.0, 100.0)  # besides -inf
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Sampling:
    """What one request wants of its tokens; the defaults choose the likeliest.

    Raises:
        InputError: a value without a meaning.
    """

    temperature: float = 0.0  # 0: the likeliest token
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # of tokens of the prompt and the output; 1: off
    presence_penalty: float = 0.0  # of tokens of the output, once
    frequency_penalty: float = 0.0  # of tokens of the output, each time
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # by token; -inf bans it
    seed: int | None = None  # None: another one each time
    logprobs: int | None = (
        None  # so many of the likeliest are reported beside the token drawn; None: none, nor its own
    )

    def __post_init__(self) -> None:
        for name, (least, most) in RANGES.items():
            _check(name, getattr(self, name), least, most)
        if self.temperature != 0 or isinstance(self.temperature, bool):
            _check("temperature", self.temperature, *TEMPERATURES, besides="0 for the likeliest token")
        if not isinstance(self.logit_bias, Mapping):
            raise InputError(
                f"logit_bias is {self.logit_bias!r:.50}, expected a mapping of tokens to numbers"
            )
        for token, bias in self.logit_bias.items():
            if bias != -math.inf:
                _check(f"logit_bias of token {token!r:.20}", bias, *BIASES, besides="-inf to ban the token")
        if self.seed is not None:
            _check("seed", self.seed, 0, MAX_SEED, besides="None for another one each time")
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, 0, 2**31 - 1, besides="None for none")

    @classmethod
    def from_generation_config(cls, values: Mapping[str, Any]) -> Sampling:
        """What Transformers' `generate` would do with the fields of a generation_config.json; others are not looked at.

        Where the file asks for sampling and names no top_k, it is 50, the default of Transformers 5.

        Raises:
            InputError: a value without a meaning; what changes a token and this engine lacks.
        """
        given = {name: value for name, value in values.items() if value is not None}
        samples = given.get("do_sample", False)
        for name, asked in not_native(given, samples).items():
            raise InputError(
                f"generation_config.json asks for {name} {asked!r:.50}, which the native engine lacks: "
                "remove it, or run the model inside Transformers"
            )
        kept = {name: given[name] for name in ("repetition_penalty",) if name in given}
        if not samples:
            return cls(**kept)
        kept |= {name: given[name] for name in ("temperature", "top_k", "top_p", "min_p") if name in given}
        return cls(**{"temperature": 1.0, "top_k": 50, **kept})

    @property
    def penalizes(self) -> bool:
        """Whether tokens that came before count."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token, and what `Sampling.logprobs` asked for."""

    token: int
    logprob: float | None = None  # of the token, by the model
    top: tuple[tuple[int, float], ...] = ()  # tokens and their log-probabilities, the likeliest first


class Sampler:
    """Draws the tokens of one request.

    It has a random stream of its own and takes one number of it per token, whatever the logits: the same seed and the
    same logits give the same text, alone or in a batch.
    """

    def __init__(self, sampling: Sampling, vocabulary: int, prompt: Sequence[int] | Tokens) -> None:
        """A sampler for logits [vocabulary] after a prompt.

        Raises:
            InputError: a bias of a token that the vocabulary lacks, or more `logprobs` than it has tokens.
        """
        for token in sampling.logit_bias:
            if type(token) is not int or not 0 <= token < vocabulary:
                raise InputError(
                    f"logit_bias names token {token!r:.20}, expected ids from 0 to {vocabulary - 1}"
                )
        if sampling.logprobs is not None and sampling.logprobs > vocabulary:
            raise InputError(
                f"logprobs is {sampling.logprobs}, but the vocabulary has {vocabulary} tokens: ask for fewer"
            )
        self.sampling, self.vocabulary = sampling, vocabulary
        self._random = np.random.Generator(np.random.PCG64(sampling.seed))
        self._biased = np.array(list(sampling.logit_bias), np.int64)
        self._bias = np.array(list(sampling.logit_bias.values()), np.float32)
        self._seen = _Seen(prompt, vocabulary) if sampling.penalizes else None

    def draw(self, logits: Floats, allowed: NDArray[np.bool_] | None = None) -> Drawn:
        """The next token after logits float32 [vocabulary], which are left as they are; -inf marks tokens out of reach.

        Args:
            logits: the model's.
            allowed: bool [vocabulary]; tokens that may come, where not all may. What is reported is the model's own
                all the same.

        Raises:
            InputError: logits with NaN or infinity, or no token within reach.
        """
        token = self.token(logits, allowed)
        return Drawn(token) if self.sampling.logprobs is None else self.report(token, logits)

    def token(self, logits: Floats, allowed: NDArray[np.bool_] | None = None) -> int:
        """`draw` without a report."""
        reached = logits if allowed is None else np.where(allowed, logits, np.float32(-np.inf))
        if self.sampling.temperature == 0:
            token = self._likeliest(self._penalized(reached))
        else:
            token = self._distribution(reached).token(self._random.random())
        if self._seen is not None:
            self._seen.add(token)
        return token

    def ahead(self) -> Sampler:
        """One that draws what this one is going to draw from the same logits; this one stays as it is."""
        twin = copy.copy(self)
        twin._random, twin._seen = copy.deepcopy(self._random), self._seen and self._seen.copy()
        return twin

    def probabilities(self, logits: Floats) -> Floats:
        """The distribution, [vocabulary], that `draw` would draw from.

        Raises:
            InputError: see `draw`.
        """
        return self._distribution(logits).dense(self.vocabulary)

    def _distribution(self, logits: Floats) -> Distribution:
        scores, options = self._penalized(logits), self.sampling
        best = self._likeliest(scores)
        if options.temperature == 0:
            return Distribution(np.array([best]), np.ones(1, np.float32))
        if abs(float(scores[best])) > LARGEST * min(options.temperature, 1):
            raise InputError(
                f"logits up to {scores[best]:.3g} cannot be divided by a temperature of {options.temperature:g}: "
                "raise it, or use 0 for the likeliest token"
            )
        with np.errstate(over="ignore"):  # scores that become -inf were out of reach
            return distribution(scores, options.temperature, options.top_k, options.top_p, options.min_p)

    def _penalized(self, logits: Floats) -> Floats:
        """Scores [vocabulary]: the logits themselves where nothing changes them."""
        if logits.shape != (self.vocabulary,) or logits.dtype != np.float32:
            raise InputError(
                f"the logits are {logits.dtype} {logits.shape}, expected float32 ({self.vocabulary},)"
            )
        if not len(self._biased) and self._seen is None:
            return logits
        scores = logits.copy()
        with np.errstate(invalid="ignore"):  # infinity that is banned becomes NaN, and is refused
            scores[self._biased] += self._bias
        if self._seen is not None:
            self._seen.penalize(scores, self.sampling)
        return scores

    def _likeliest(self, scores: Floats) -> int:
        """The first token of the highest score; NaN and infinity count as highest, and are refused."""
        best = int(scores.argmax())
        if math.isfinite(scores[best]):
            return best
        if scores[best] == -math.inf:
            raise InputError("no token is within reach: all logits are -inf; ban fewer tokens")
        raise InputError(
            f"the model's logits are not finite (token {best}: {scores[best]}): its weights are damaged, or too "
            "large for the arithmetic it runs in"
        )

    def report(self, token: int, logits: Floats) -> Drawn:
        """A token, its log-probability after logits [vocabulary], and those of the likeliest that are asked for."""
        count = self.sampling.logprobs or 0
        highest = logits.max()
        with np.errstate(over="ignore"):
            total = float(highest) + math.log(np.exp(logits - highest).sum(dtype=np.float64))
        top: Tokens = np.empty(0, np.int64)
        if count:
            top = np.flatnonzero(logits >= kth_largest(logits, count))
            top = top[np.argsort(-logits[top], kind="stable")][:count]
        pairs = tuple((int(at), float(logits[at]) - total) for at in top)
        return Drawn(token, float(logits[token]) - total, pairs)


class _Seen:
    """The distinct tokens of a prompt and its output, and how often the output has each."""

    def __init__(self, prompt: Sequence[int] | Tokens, vocabulary: int) -> None:
        known = np.unique(np.asarray(prompt, np.int64))
        known = known[(known >= 0) & (known < vocabulary)]  # an embedding may have more tokens than the head
        self._places = {int(token): place for place, token in enumerate(known)}
        self._tokens = np.concatenate([known, np.empty(64, np.int64)])  # both grow by doubling
        self._counts = np.zeros(len(self._tokens), np.float32)

    def copy(self) -> _Seen:
        """The same tokens, to be counted on from here."""
        twin = copy.copy(self)
        twin._places = dict(self._places)
        twin._tokens, twin._counts = self._tokens.copy(), self._counts.copy()
        return twin

    def add(self, token: int) -> None:
        """Count a token of the output."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._tokens[place] = token
        self._counts[place] += 1

    def penalize(self, scores: Floats, sampling: Sampling) -> None:
        """Penalize scores [vocabulary] in place; a repetition penalty divides those above 0, multiplies others."""
        tokens, counts = self._tokens[: len(self._places)], self._counts[: len(self._places)]
        penalty, changed = np.float32(sampling.repetition_penalty), scores[tokens]
        changed = np.where(changed < 0, changed * penalty, changed / penalty)
        changed -= np.float32(sampling.frequency_penalty) * counts
        changed -= np.float32(sampling.presence_penalty) * (counts > 0)
        scores[tokens] = changed


def _check(name: str, value: Any, least: float, most: float, besides: str = "") -> None:
    """Refuse what is no number of this kind and range."""
    kinds = (int,) if type(most) is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        kind = "a whole number" if kinds == (int,) else "a number"
        instead = f", or {besides}" if besides else ""
        raise InputError(f"{name} is {value!r:.50}, expected {kind} from {least:g} to {most:g}{instead}")
