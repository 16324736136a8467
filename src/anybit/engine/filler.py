"""Random keys and values for a KV-cache, without a prompt: what a benchmark decodes behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from anybit.config import Json
from anybit.engine.source import plain_layer
from anybit.formats.dtypes import Dtype
from anybit.kernels import cpu

if TYPE_CHECKING:
    from anybit import _native

WIDTH = 32  # hidden size and vocabulary of the decoder that writes them
TOGETHER = 16  # pages that are written by one step


def fill(
    cache: _native.KvCache,
    sizes: tuple[int, int, int],
    pages: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]],
    threads: int,
) -> None:
    """Write every token of some pages.

    Args:
        sizes: blocks, KV heads and head size of the cache.
        pages: int32 [n] each: of most blocks, and of those that have their own.

    Memory that nothing wrote is one page of zeros to the system, which a processor reads from its cache. So the keys
    and values have to be there. A tiny decoder with the same cache writes them, a text of one page after another.
    """
    decoder, level = _decoder(*sizes)
    tokens, generator = cpu._native.PAGE_TOKENS, np.random.default_rng(0)
    together = min(TOGETHER, max(1, len(np.unique(pages[1])) - 1))  # pages that take turns, each once
    for first in range(0, len(pages[0]), together):
        table, window_table = (each[first : first + together, None].copy() for each in pages)
        rows = len(table) * tokens
        decoder.step(
            generator.integers(0, WIDTH, rows, np.int32),
            np.tile(np.arange(tokens, dtype=np.int32), len(table)),
            np.repeat(np.arange(len(table), dtype=np.int32), tokens),
            table,
            np.zeros(0, np.int32),
            np.zeros((0, WIDTH), np.float32),
            level,
            cache,
            threads,
            window_table,
        )


def _decoder(blocks: int, kv_heads: int, head_size: int) -> tuple[_native.Decoder, int]:
    """A decoder with keys and values of some sizes and hardly anything else; its blocks share their matrices."""
    random, norm = np.random.default_rng(0), np.ones(WIDTH, np.float32)

    def layer(out: int, columns: int) -> _native.Layer:
        values = random.standard_normal((out, columns)) / columns**0.5
        return plain_layer("a matrix", values.astype(np.float16), Dtype.F16)

    numbers = kv_heads * head_size
    description: Json = {
        "vocabulary": WIDTH,
        "hidden": WIDTH,
        "intermediate": WIDTH,
        "heads": kv_heads,
        "kv_heads": kv_heads,
        "head_size": head_size,
        "activation": "silu",
        "epsilon": 1e-6,
        "softmax_scale": head_size**-0.5,
        "attention_softcap": 0.0,
        "embedding_scale": 1.0,
        "logit_softcap": 0.0,
        "final_norm": norm,
        "ropes": [],
        "blocks": [{"window": 0, "rope": -1, "attention_norm": norm, "mlp_norm": norm}] * blocks,
    }
    decoder = cpu._native.Decoder(description, False)
    square, asked = layer(WIDTH, WIDTH), layer(numbers, WIDTH)
    block = [
        asked,
        layer(numbers, WIDTH),
        layer(numbers, WIDTH),
        layer(WIDTH, numbers),
        square,
        square,
        square,
    ]
    return decoder, decoder.add_level(square, square, [block] * blocks)
