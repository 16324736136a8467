"""The scheduler's rows as an engine takes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from anybit.engine.engine import Batch, Tokens
from anybit.serve.schedule.scheduler import Rows


def batch_of(rows: Sequence[Rows], windowed: bool) -> tuple[Batch, list[int]]:
    """Rows of some texts as an engine takes them, and how many logits are wanted of each.

    Args:
        rows: of one step.
        windowed: whether blocks with a sliding window have pages of their own.
    """
    # Lists, and one array of each at the end: a step leaves the caches full of weights, so that numpy's calls are slow.
    tokens: list[int] = []
    positions: list[int] = []
    texts: list[int] = []
    wanted: list[int] = []
    counts = []
    for text, r in enumerate(rows):
        own = r.tokens
        start, count = len(tokens), len(own)
        tokens += own
        positions += range(r.first, r.first + count)
        texts += [text] * count
        begin = 0 if r.text.every else r.count - r.last
        wanted += range(start + begin, start + count)
        counts.append(count - begin)
    pages = _table([r.text.pages for r in rows])
    batch = Batch(
        np.array(tokens, np.int32),
        np.array(positions, np.int32),
        np.array(texts, np.int32),
        pages,
        np.array(wanted, np.int32),
        _table([r.text.window_pages for r in rows], pages.shape[1]) if windowed else None,
    )
    return batch, counts


def _table(pages: Sequence[Sequence[int]], width: int = 0) -> Tokens:
    """Pages of some texts, int32 [texts, n]; in place of what no token reads stands page 0 of the cache."""
    longest = max(width, *map(len, pages))
    made = np.array([[*own, *[0] * (longest - len(own))] for own in pages], np.int32)
    return np.maximum(made, 0, out=made)
