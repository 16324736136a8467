"""How long an engine's steps take, for benchmarks: behind random keys and values, and without drawing tokens."""

from __future__ import annotations

import time

from anybit.engine.engine import Engine
from anybit.engine.filler import fill
from anybit.errors import InputError

STRIDE = 7919  # between tokens: rows of the embedding far apart


def step_seconds(engine: Engine, depth: int, steps: int, bits: float | None = None) -> list[float]:
    """Seconds of each of some decoding steps, one token behind another.

    Args:
        engine: nothing else runs on it.
        depth: tokens before the first, from 0 up; their keys and values are random numbers, and no prompt is computed.
        steps: how many.
        bits: see `Engine.stream`.

    Raises:
        InputError: more tokens than the context holds.
    """
    level, made = engine._level_of(bits), []
    if depth < 0 or not 1 <= steps <= engine.context - depth:
        raise InputError(f"{steps} steps behind {depth} tokens: the context holds {engine.context}")
    cache = engine._cache
    with cache.hold(depth + steps) as text:
        pages, window_pages = cache.tables(text)
        fill(cache.native, cache.sizes[:3], (pages[0], window_pages[0]), engine.threads)
        text.tokens = [0] * depth
        for token in far_apart(steps, engine.vocabulary):
            begun = time.perf_counter()
            engine._run(text, [token], level)
            made.append(time.perf_counter() - begun)
    return made


def prompt_seconds(engine: Engine, tokens: int, bits: float | None = None) -> float:
    """Seconds until the logits behind a prompt are there; see `step_seconds`."""
    level = engine._level_of(bits)
    if not 1 <= tokens <= engine.context:
        raise InputError(f"a prompt of {tokens} tokens: the context holds {engine.context}")
    with engine._cache.hold(tokens) as text:
        begun = time.perf_counter()
        engine._run(text, far_apart(tokens, engine.vocabulary), level)
        return time.perf_counter() - begun


def far_apart(count: int, vocabulary: int) -> list[int]:
    """Token ids whose rows of the embedding lie far apart."""
    return [i * STRIDE % vocabulary for i in range(count)]
