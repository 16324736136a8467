"""Plain reading of memory: the limit of whatever multiplies a matrix with a few vectors."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

READ_COLUMNS = 1 << 14
SETTLE = 5e-3  # seconds; OpenMP's workers spin for a millisecond or two
MOST = 1 << 30  # bytes of a buffer; caches are far smaller
LEAST_SECONDS = 0.1  # that reading is timed for
ROW = 4 * READ_COLUMNS  # bytes


def reader(nbytes: int) -> Callable[[], object]:
    """A float32 matrix times a vector: what reads fastest of PyTorch's functions, on all its threads."""
    data, x = torch.ones(nbytes // ROW, READ_COLUMNS), torch.ones(READ_COLUMNS)
    return partial(data.mv, x)


def settle() -> None:
    """Wait until PyTorch's workers no longer look for work, which keeps a core from what runs next."""
    time.sleep(SETTLE)


class Buffer:
    """Memory to read, for some threads; parts of it are of any size up to `nbytes`, or to `MOST`."""

    def __init__(self, nbytes: int, threads: int) -> None:
        self._data = torch.ones(max(1, min(nbytes, MOST) // ROW), READ_COLUMNS)
        self._x, self._threads = torch.ones(READ_COLUMNS), threads

    def rate(self, nbytes: int) -> float:
        """Bytes per second of reading a part again and again: as much of it stays in the cache as of a model."""
        part = self._data[: max(1, nbytes // ROW)]
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            part.mv(self._x)
            begun, passes = time.perf_counter(), 0
            while (taken := time.perf_counter() - begun) < LEAST_SECONDS or passes < 2:
                part.mv(self._x)
                passes += 1
            return part.nbytes * passes / taken
        finally:
            torch.set_num_threads(before)
            settle()
