"""The scheduler's rows as an engine takes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from anybit.engine.engine import Batch, Tokens
from anybit.serve.scheduler import Rows


def batch_of(rows: Sequence[Rows], windowed: bool) -> tuple[Batch, list[int]]:
    """Rows of some texts as an engine takes them, and how many logits are wanted of each.

    Args:
        rows: of one step.
        windowed: whether blocks with a sliding window have pages of their own.
    """
    tokens = [r.tokens for r in rows]
    counts = np.array([len(own) for own in tokens])
    starts = np.cumsum(counts) - counts
    positions = [np.arange(r.first, r.first + len(own)) for r, own in zip(rows, tokens)]
    pages = _table([r.text.pages for r in rows])
    wanted = [
        np.arange(start + (0 if r.text.every else r.count - r.last), start + count)
        for start, count, r in zip(starts, counts, rows)
    ]
    batch = Batch(
        np.concatenate(tokens).astype(np.int32),
        np.concatenate(positions).astype(np.int32),
        np.repeat(np.arange(len(rows)), counts).astype(np.int32),
        pages,
        np.concatenate(wanted).astype(np.int32),
        _table([r.text.window_pages for r in rows], pages.shape[1]) if windowed else None,
    )
    return batch, [len(own) for own in wanted]


def _table(pages: Sequence[Sequence[int]], width: int = 0) -> Tokens:
    """Pages of some texts, int32 [texts, n]; in place of what no token reads stands page 0 of the cache."""
    made = np.zeros((len(pages), max(width, *map(len, pages))), np.int32)
    for row, own in zip(made, pages):
        row[: len(own)] = own
    return np.maximum(made, 0)
