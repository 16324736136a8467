"""What the next token is drawn from: temperature, top-k, top-p and min-p, in this order.

The arithmetic is that of Transformers' logits processors, `TemperatureLogitsWarper` to `MinPLogitsWarper`: float32, and
running sums for top-p in float64. Of tokens equally likely at the bound, top-k keeps all. Top-p drops the lowest ids
first, as Transformers would if it sorted stably; torch leaves open which it drops. What differs is that no vocabulary
is sorted where a part of it will do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Tokens = NDArray[np.int64]

BLOCK = 512  # numbers that one running sum covers: longer ones are as slow as an addition's latency


@dataclass(frozen=True, slots=True)
class Distribution:
    """The tokens that may come next, and how likely each is."""

    tokens: Tokens | None  # [n], ascending; None: the whole vocabulary
    probabilities: Floats  # [n], of sum 1

    def only(self, kept: Tokens) -> Distribution:
        """Some of the tokens, by ascending place, with probabilities of sum 1 again."""
        probabilities = self.probabilities[kept]
        probabilities /= np.float32(probabilities.sum(dtype=np.float64))
        return Distribution(kept if self.tokens is None else self.tokens[kept], probabilities)

    def token(self, uniform: float) -> int:
        """The token where the running sum of probabilities, in the order of token ids, passes a number in [0, 1)."""
        at = _passes(self.probabilities, uniform)
        return at if self.tokens is None else int(self.tokens[at])

    def dense(self, vocabulary: int) -> Floats:
        """The probabilities of all tokens, [vocabulary]."""
        if self.tokens is None:
            return self.probabilities
        out = np.zeros(vocabulary, np.float32)
        out[self.tokens] = self.probabilities
        return out


def distribution(scores: Floats, temperature: float, top_k: int, top_p: float, min_p: float) -> Distribution:
    """The distribution that scores [vocabulary] give: the largest is finite, -inf marks tokens that cannot come.

    Args:
        scores: logits, biased and penalized.
        temperature: above 0.
        top_k: so many tokens of the highest scores, and what equals the last of them; 0: all.
        top_p: the fewest likely tokens that together have this probability; 1: all.
        min_p: tokens at least this likely, as a share of the likeliest token's probability; 0: all.
    """
    tokens = _highest(scores, top_k, temperature) if 0 < top_k < len(scores) else None
    if tokens is not None:
        scores = scores[tokens]
    drawn_from = Distribution(tokens, _softmax(scores, temperature))
    if top_p < 1:
        drawn_from = drawn_from.only(_nucleus(drawn_from.probabilities, scores, top_p))
    if min_p > 0:
        probabilities = drawn_from.probabilities
        least = np.float32(min_p) * probabilities.max()
        drawn_from = drawn_from.only(np.flatnonzero(probabilities >= least))
    return drawn_from


def kth_largest(scores: Floats, k: int) -> np.float32:
    """The k-th largest of scores [n], 0 < k <= n, none of them NaN.

    The k-th largest of the maxima of columns is no larger, so few numbers besides those wanted are above it.
    """
    rows = len(scores) // max(2048, 16 * k)
    if rows > 1:
        maxima = scores[: len(scores) // rows * rows].reshape(rows, -1).max(0)
        scores = scores[np.flatnonzero(scores >= np.partition(maxima, -k)[-k])]
    return np.float32(np.partition(scores, -k)[-k])


def _highest(scores: Floats, k: int, temperature: float) -> Tokens:
    """The tokens of the k highest scores, and those whose score over the temperature equals the last of these."""
    least = kth_largest(scores, k)
    collapsed = abs(least) * np.float32(2**-22) + np.float32(1e-30)  # what may equal it after the division
    tokens = np.flatnonzero(scores >= least - collapsed)
    if len(tokens) == k:
        return tokens
    values = scores[tokens] / np.float32(temperature)
    return tokens[values >= kth_largest(values, k)]


def _softmax(scores: Floats, temperature: float) -> Floats:
    """Probabilities, made in one array: fresh pages cost more than the arithmetic."""
    out = scores / np.float32(temperature)
    out -= out.max()
    np.exp(out, out=out)
    out /= np.float32(out.sum(dtype=np.float64))
    return out


def _nucleus(probabilities: Floats, scores: Floats, top_p: float) -> Tokens:
    """Where the fewest likely tokens are that together have this probability.

    Going up from the lowest score, tokens are dropped while their sum is at most 1 - top_p. Those below half of that
    over n sum to less: they are dropped without being sorted.
    """
    limit = np.float32(1 - top_p)
    likely = np.compress(probabilities >= limit / np.float32(2 * len(probabilities)), probabilities)
    likely.sort()
    mass = float(likely.sum(dtype=np.float64))
    dropped = float(probabilities.sum(dtype=np.float64)) - mass
    above = float(np.nextafter(limit, np.float32(2)))
    passed = (float(limit) + above) / 2  # larger sums round to more than the limit in float32
    first = _passes(likely, (passed - dropped) / mass)
    kept = np.flatnonzero(probabilities >= likely[first])
    ties = first - int(np.searchsorted(likely, likely[first]))  # dropped, as likely as the first one kept
    if not ties:
        return kept
    equal = np.flatnonzero(probabilities[kept] == likely[first])
    lowest = scores[kept[equal]].argsort(kind="stable")  # they may differ where probabilities no longer do
    return np.delete(kept, equal[lowest[:ties]])


def _passes(weights: Floats, share: float) -> int:
    """The first place where the running sum of weights [n] is above a share of their sum; none of weight 0."""
    if len(weights) > 2 * BLOCK:
        sums = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK), dtype=np.float64).cumsum()
        block = _above(sums, share * sums[-1])
        before = sums[block - 1] if block else 0.0
        start = block * BLOCK
        within = weights[start : start + BLOCK].cumsum(dtype=np.float64)
        return start + _above(within, share * sums[-1] - before)
    sums = weights.cumsum(dtype=np.float64)
    return _above(sums, share * sums[-1])


def _above(sums: NDArray[np.float64], limit: float) -> int:
    """The first of ascending sums above a limit; where rounding leaves none, the first that equals the last."""
    return min(int(np.searchsorted(sums, limit, side="right")), int(np.searchsorted(sums, sums[-1])))
