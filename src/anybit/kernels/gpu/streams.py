"""Kernels that do not need each other's results, at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack

import torch


class _Pools(threading.local):
    """Streams of each device, and how many of them the outermost call and those within it have taken."""

    def __init__(self) -> None:
        self.streams: dict[torch.device, list[torch.cuda.Stream]] = {}
        self.taken: dict[torch.device, int] = {}


_pools = _Pools()


def concurrently(device: torch.device, *runs: Callable[[], None]) -> None:
    """Launch the first on the current stream and each other on one of its own; the current stream waits for them all.

    A run may use what was launched before, writes to memory of its own, and what it allocates dies with it: memory that
    others read is allocated by the caller. Calls may lie in each other, and within the capture of a CUDA graph, whose
    branches the runs become. Where there are no streams, one runs after the other.
    """
    if device.type != "cuda" or len(runs) < 2:
        for run in runs:
            run()
        return
    current, streams = torch.cuda.current_stream(device), _pools.streams.setdefault(device, [])
    before = _pools.taken.get(device, 0)
    with ExitStack() as at_end:
        if before == 0:  # a stream given back earlier would have the next run wait for the last
            at_end.callback(_pools.taken.__setitem__, device, 0)
        for run in runs[1:]:
            at = _pools.taken[device] = _pools.taken.get(device, 0) + 1
            if at > len(streams):
                streams.append(torch.cuda.Stream(device))
            side = streams[at - 1]
            side.wait_stream(current)
            at_end.callback(
                current.wait_stream, side
            )  # also after an error: the caller's memory is freed then
            with torch.cuda.stream(side):
                run()
        runs[0]()
