"""Who uses which page of the KV-cache, and which pages hold the beginning of a prompt that may come again."""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import OrderedDict
from collections.abc import Sequence

Hash = bytes


def chain(seed: Hash, tokens: Sequence[int], page_tokens: int, known: Sequence[Hash] = ()) -> list[Hash]:
    """Hashes of the full pages of a text; each covers the seed and all tokens up to its page's end.

    Args:
        seed: of all else that keys and values depend on: the model, its width, the cache's bits.
        tokens: of the text.
        page_tokens: tokens of a page.
        known: hashes of the first pages, if there are some.
    """
    made = list(known)
    for first in range(len(made) * page_tokens, len(tokens) - page_tokens + 1, page_tokens):
        page = array("q", tokens[first : first + page_tokens]).tobytes()
        made.append(hashlib.sha256((made[-1] if made else seed) + page).digest())
    return made


class Blocks:
    """The pages of a cache: free, in use, or idle, which is kept for a prompt that begins alike and taken when needed.

    A page in use has a count of those who use it. Only a page that is full and will not be written again is published,
    and only published pages are shared.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(
            range(pages)
        )  # a heap: the lowest first, so that memory that was touched is used again
        self._users = [0] * pages
        self._page_of: dict[Hash, int] = {}
        self._hash_of: dict[int, Hash] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # the longest unused first

    @property
    def available(self) -> int:
        """Pages that can be taken now."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        return self.pages - self.available

    def take(self, count: int) -> list[int]:
        """Pages that nobody else uses; there must be as many available."""
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._free:
            page = heapq.heappop(self._free)
        else:
            page, _ = self._idle.popitem(last=False)
            del self._page_of[self._hash_of.pop(page)]
        self._users[page] = 1
        return page

    def known(self, key: Hash) -> bool:
        """Whether there is a page with this content that may be shared."""
        return key in self._page_of

    def matching(self, hashes: Sequence[Hash]) -> int:
        """How many of a text's first pages are here."""
        return next((i for i, key in enumerate(hashes) if key not in self._page_of), len(hashes))

    def share(self, hashes: Sequence[Hash]) -> list[int]:
        """Pages of a text's beginning that are here, used once more from now on."""
        pages = [self._page_of[key] for key in hashes[: self.matching(hashes)]]
        for page in pages:
            self._idle.pop(page, None)
            self._users[page] += 1
        return pages

    def publish(self, page: int, key: Hash) -> None:
        """Let others share a page that is full, unless another one with the same content is in use."""
        if page in self._hash_of:
            return
        known = self._page_of.get(key)
        if known is not None:
            if self._users[known]:
                return
            del self._idle[known], self._hash_of[known]
            heapq.heappush(self._free, known)
        self._page_of[key], self._hash_of[page] = page, key

    def release(self, pages: list[int]) -> None:
        """Give up a text's pages. Its last pages are lost before its first, without which they are of no use."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._hash_of:
                self._idle[page] = None
            else:
                heapq.heappush(self._free, page)
        pages.clear()
