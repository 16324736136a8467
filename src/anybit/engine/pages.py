"""The KV-cache of an engine: how many pages there are, and who has which."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from anybit.engine.description import Unsupported
from anybit.errors import InputError
from anybit.kernels import cpu

CHUNK = 256  # tokens of a prompt that go through the model together
KV_SHARE = 0.5  # of the memory that is free, at most, for keys and values
WINDOWED_TEXTS = 4  # texts beyond their window that may be there at a time


class Pages:
    """The free pages of a cache. The lowest are given out first, so that memory that was touched is used again."""

    def __init__(self, count: int, tokens: int) -> None:
        self.count, self.tokens = count, tokens  # pages; tokens of each
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def extend(self, held: list[int], length: int) -> None:
        """Let a sequence that holds some pages have enough for so many tokens.

        Raises:
            InputError: too few are free; then nothing changes.
        """
        missing = -(-length // self.tokens) - len(held)
        if missing > len(self._free):
            raise InputError(
                f"{length} tokens need {missing} more pages of {self.tokens} in the KV-cache, {len(self._free)} are "
                "free: shorten the text, or give the engine a longer context"
            )
        held.extend(self._free.pop() for _ in range(missing))

    def release(self, held: list[int]) -> None:
        """Take back all pages of a sequence."""
        self._free.extend(held)
        self._free.sort(reverse=True)
        held.clear()


@dataclass
class Held:
    """A text's pages; the first `done` of its tokens are in the cache."""

    pages: list[int] = field(default_factory=list)
    window_pages: list[int] = field(default_factory=list)  # of blocks that have pages of their own
    done: int = 0


class Cache:
    """Keys and values of texts of up to `context` tokens.

    Blocks with a sliding window have pages of their own, as soon as that takes less memory: a text beyond the window
    has a few of them, and those that the window has passed are used again. Its first page stays, for it has the
    centres of keys.

    Args:
        description: the decoder's; see `describe`.
        kv_bits: 16, 8 or 4.
        reached: tokens that the model reaches.
        wanted: tokens that a text may have; default: what the model reaches, and memory holds.

    Raises:
        InputError: more are wanted than there can be.
        Unsupported: there is no memory for a page.
    """

    def __init__(self, description: dict[str, Any], kv_bits: int, reached: int, wanted: int | None) -> None:
        windows = [block["window"] for block in description["blocks"]]
        self.sizes = len(windows), description["kv_heads"], description["head_size"], kv_bits
        self._page = page = cpu._native.PAGE_TOKENS
        self.page_bytes = cpu._native.KvCache(*self.sizes, 1).page_bytes  # of all blocks
        block_bytes = self.page_bytes // len(windows)
        self._ring = 1 + -(-(max(windows) + CHUNK) // page) + 1  # pages that a text needs beyond its window
        self._windowed = [window > 0 for window in windows]
        own = WINDOWED_TEXTS * self._ring
        if not any(windows) or own >= -(-(wanted or reached) // page):
            self._windowed, own = [False] * len(windows), 0
        windowed_bytes = sum(self._windowed) * block_bytes
        left = int(free_memory() * KV_SHARE) - own * windowed_bytes
        fits = left // max(1, self.page_bytes - windowed_bytes) * page if left > 0 else 0
        if wanted is not None and not 1 <= wanted <= min(reached, fits):
            raise InputError(
                f"a context of {wanted} tokens: expected 1 to {min(reached, fits)}; the model reaches {reached}, and "
                f"memory holds keys and values of {fits}"
            )
        self.context = min(reached, fits) if wanted is None else wanted
        if self.context < 1:
            needed = max(self.page_bytes, own * windowed_bytes)
            raise Unsupported(f"no memory for a KV-cache: it takes {needed} bytes at least")
        self._make(-(-self.context // page), own)

    def _make(self, pages: int, window_pages: int) -> None:
        self.native = cpu._native.KvCache(*self.sizes, pages, self._windowed, window_pages)
        self._pages, self._window_pages = Pages(pages, self._page), Pages(window_pages, self._page)

    @property
    def free(self) -> int:
        """Pages that nobody has, of both kinds."""
        return self._pages.free + self._window_pages.free

    def share(self, pages: int) -> None:
        """Have so many pages, empty ones, of all blocks: for whoever gives them out."""
        self._windowed = [False] * len(self._windowed)
        self._make(pages, 0)

    @contextmanager
    def hold(self, tokens: int) -> Iterator[Held]:
        """Pages for so many tokens, which no other text can take before the end.

        Raises:
            InputError: too few are free.
        """
        held = Held()
        try:
            self._pages.extend(held.pages, tokens)
            if any(self._windowed):
                self._window_pages.extend(held.window_pages, min(tokens, self._ring * self._page))
            yield held
        finally:
            self._pages.release(held.pages)
            self._window_pages.release(held.window_pages)

    def tables(self, held: Held) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Pages of a text, int32 [1, n] each: of most blocks, and of those that have their own.

        After the first one, those take turns: page p is written when window and chunk have passed the one before.
        """
        pages = np.array([held.pages], np.int32)
        if not held.window_pages:
            return pages, pages
        turns = np.arange(len(held.pages))
        turns[1:] = 1 + (turns[1:] - 1) % max(1, len(held.window_pages) - 1)
        return pages, np.array(held.window_pages, np.int32)[None, turns]


def free_memory() -> int:
    """Bytes that the system can give without swapping; what it has where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
