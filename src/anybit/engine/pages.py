"""Who has which page of the KV-cache."""

from __future__ import annotations

import os
from pathlib import Path

from anybit.errors import InputError


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


def free_memory() -> int:
    """Bytes that the system can give without swapping; what it has where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
