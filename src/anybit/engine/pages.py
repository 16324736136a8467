"""The KV-cache of an engine: how many pages there are, and who has which."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from anybit.engine.cgroups import cgroups
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
    """A text's pages, and what is in them."""

    pages: list[int] = field(default_factory=list)
    window_pages: list[int] = field(default_factory=list)  # of blocks that have pages of their own
    tokens: list[int] = field(
        default_factory=list
    )  # whose keys and values are in the cache, from the first on
    written: int = (
        0  # tokens up to which pages may have been written: more than `tokens` where those were wrong
    )

    @property
    def done(self) -> int:
        return len(self.tokens)

    def write(self, count: int) -> None:
        """So many tokens are about to be computed, which may fail halfway."""
        self.written = max(self.written, self.done + count)

    def shared(self, ids: Sequence[int]) -> int:
        """How many of these tokens are there already."""
        pairs = zip(self.tokens, ids)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(self.done, len(ids)))


@dataclass(frozen=True)
class Room:
    """How a cache is laid out."""

    pages: int
    window_pages: int  # of blocks with a sliding window, where they have pages of their own
    ring: int  # pages of a text beyond its window: the first, those of window and chunk, and one where they begin
    fits: int  # tokens of a text that there is memory for


def room(windows: list[int], block_bytes: int, reached: int, memory: int) -> Room:
    """The layout in which the longest text fits; of two that hold as much, the one that takes less memory.

    Args:
        windows: of each block; 0: none.
        block_bytes: of a page of one block.
        reached: tokens that a text has at most.
        memory: bytes for all of it.
    """
    page, window = cpu._native.PAGE_TOKENS, sum(w > 0 for w in windows)
    most, ring = -(-reached // page), pages_of_window(max(windows), CHUNK, page)
    there = min(most, memory // (len(windows) * block_bytes))
    plain = Room(there, 0, ring, min(reached, there * page))
    own = WINDOWED_TEXTS * ring
    left, rest = memory - own * window * block_bytes, (len(windows) - window) * block_bytes
    if window == 0 or own >= most or left < rest:
        return plain
    there = min(most, left // rest) if rest else most
    return plain if there < plain.pages else Room(there, own, ring, min(reached, there * page))


class Cache:
    """Keys and values of texts of up to `context` tokens.

    Blocks with a sliding window have pages of their own where that takes less memory and no text gets shorter by it. A
    text beyond the window then has a few of them, and uses those that the window has passed again. Its first page
    stays, for it has the centres of keys. `WINDOWED_TEXTS` such texts can be there at a time.

    The text that ended last keeps its pages until another begins, which goes on from there where it begins alike.

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
        self.windows = windows = [block["window"] for block in description["blocks"]]
        self.sizes = len(windows), description["kv_heads"], description["head_size"], kv_bits
        self.page_bytes = cpu._native.KvCache(*self.sizes, 1).page_bytes  # of all blocks
        memory = int(free_memory() * KV_SHARE)
        most = reached if wanted is None else max(1, min(wanted, reached))
        found = room(windows, self.page_bytes // len(windows), most, memory)
        if wanted is not None and not 1 <= wanted <= found.fits:
            found = room(windows, self.page_bytes // len(windows), reached, memory)
            raise InputError(
                f"a context of {wanted} tokens: expected 1 to {found.fits}; the model reaches {reached}, and memory "
                f"holds keys and values of {found.fits}"
            )
        if found.fits < 1:
            raise Unsupported(
                f"no memory for a KV-cache: a page of {cpu._native.PAGE_TOKENS} tokens takes {self.page_bytes} bytes"
            )
        self.context, self._ring = found.fits, found.ring
        self._windowed = [found.window_pages > 0 and window > 0 for window in windows]
        self._make(found.pages, found.window_pages)

    def _make(self, pages: int, window_pages: int) -> None:
        self.native = cpu._native.KvCache(*self.sizes, pages, self._windowed, window_pages)
        tokens = cpu._native.PAGE_TOKENS
        self._pages, self._window_pages = Pages(pages, tokens), Pages(window_pages, tokens)
        self._last: tuple[int, Held] | None = None  # the level and pages of the text that ended last

    def share(self, pages: int, window_pages: int) -> None:
        """Have so many pages, empty ones, for whoever gives them out; see `Engine.give_pages`."""
        self._windowed = [window_pages > 0 and window > 0 for window in self.windows]
        self._make(pages, window_pages)

    @contextmanager
    def hold(self, tokens: int) -> Iterator[Held]:
        """Pages for so many tokens, which no other text can take before the end.

        Raises:
            InputError: too few are free.
        """
        held, pool = Held(), self._pages
        try:
            self._extend(held, tokens)
            yield held
        finally:
            self._release(held, pool)

    @contextmanager
    def going_on(self, ids: Sequence[int], most: int, level: int) -> Iterator[Held]:
        """Pages for a text that begins with `ids` and has at most `most` tokens more, computed at a level.

        Where the text that ended last began alike, its pages and what is in them: all tokens but the last at most, as
        somebody wants to know what comes behind that one.

        Raises:
            InputError: too few are free.
        """
        held, pool = self._taken_over(ids, level), self._pages
        try:
            self._extend(held, len(ids) + most)
            yield held
        finally:
            if self._pages is pool and held.done:
                self._let_go()
                self._last = level, held
            else:
                self._release(held, pool)

    def _taken_over(self, ids: Sequence[int], level: int) -> Held:
        """The text that ended last, cut to what these tokens share with it; an empty one where that is no use.

        Less than a page is none, as centres of keys are means over the first. Where windows have pages of their own,
        those that the shared part looks back at may be written over: `room` leaves a chunk in between.
        """
        if self._last is not None:
            known, held = self._last
            shared = min(held.shared(ids), len(ids) - 1)
            ring = len(held.window_pages) * self._pages.tokens
            near = held.written - shared <= CHUNK - self._pages.tokens
            there = not held.window_pages or held.written <= ring or near
            if known == level and shared >= self._pages.tokens and there:
                self._last = None
                del held.tokens[shared:]
                return held
        self._let_go()
        return Held()

    def _extend(self, held: Held, tokens: int) -> None:
        """Give a text what it wants; the text that ended last makes room if need be."""
        try:
            self._extend_now(held, tokens)
        except InputError:
            if self._last is None:
                raise
            self._let_go()
            self._extend_now(held, tokens)

    def _extend_now(self, held: Held, tokens: int) -> None:
        self._pages.extend(held.pages, tokens)
        if any(self._windowed):
            self._take_ring(held, tokens)

    def _release(self, held: Held, pool: Pages) -> None:
        """Take back all pages of a text, if they are of the pool that there is now."""
        if pool is self._pages:
            self._pages.release(held.pages)
            self._window_pages.release(held.window_pages)

    def _let_go(self) -> None:
        """Free the pages of the text that ended last."""
        if self._last is not None:
            self._release(self._last[1], self._pages)
            self._last = None

    def _take_ring(self, held: Held, tokens: int) -> None:
        needed = min(tokens, self._ring * cpu._native.PAGE_TOKENS)
        try:
            self._window_pages.extend(held.window_pages, needed)
        except InputError:
            raise InputError(
                f"too many texts are open: the engine holds {WINDOWED_TEXTS} beyond the model's window at a time; end "
                "one of them first"
            ) from None

    def tables(self, held: Held) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Pages of a text, int32 [1, n] each: of most blocks, and of those that have their own.

        After the first one, those take turns: each is written again once window and chunk have passed it.
        """
        pages = np.array([held.pages], np.int32)
        if not held.window_pages:
            return pages, pages
        turns = np.arange(len(held.pages))
        turns[1:] = 1 + (turns[1:] - 1) % max(1, len(held.window_pages) - 1)
        return pages, np.array(held.window_pages, np.int32)[None, turns]


def pages_of_window(window: int, tokens: int, page_tokens: int) -> int:
    """Pages that a text beyond a sliding window needs: the first, those of window and the next `tokens`, and one in
    which they begin.
    """
    return 1 + -(-(window + tokens) // page_tokens) + 1


def free_memory() -> int:
    """Bytes that the system, and each cgroup of the process, can give without swapping."""
    granted = [left for group in cgroups("memory") if (left := _left(group)) is not None]
    return max(0, min([_free_of_machine(), *granted]))


def _free_of_machine() -> int:
    """What the machine has where it does not say how much is free."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _left(group: Path) -> int | None:
    """Bytes that one cgroup still grants; None: it says nothing, or no limit. Cached files count as free."""
    try:
        if (group / "memory.max").exists():
            limit, used = ((group / f"memory.{name}").read_text() for name in ("max", "current"))
        else:
            limit, used = ((group / f"memory.{name}_in_bytes").read_text() for name in ("limit", "usage"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = stat.get("total_inactive_file", stat.get("inactive_file", 0))
        return int(limit) - int(used) + int(cached)  # "max" is no number
    except (OSError, ValueError):
        return None
