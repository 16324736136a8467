"""What a piece of work took: wall and processor time, and the most memory."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cost:
    """What a piece of work took."""

    seconds: float
    peak_memory_bytes: int  # of the process that did it
    processor_seconds: float | None = None  # of its threads together; None: not known

    @staticmethod
    def clock() -> tuple[float, float]:
        """Wall and processor seconds of this process, for `since`."""
        return time.perf_counter(), time.process_time()

    @staticmethod
    def since(begun: tuple[float, float]) -> Cost:
        """Of this process, since a `clock`."""
        wall, processor = Cost.clock()
        return Cost(wall - begun[0], peak_memory_bytes(), processor - begun[1])

    @staticmethod
    def sum(costs: Sequence[Cost]) -> Cost:
        """Of all of them, one after the other."""
        known = [c.processor_seconds for c in costs if c.processor_seconds is not None]
        return Cost(
            seconds=sum(c.seconds for c in costs),
            peak_memory_bytes=max(c.peak_memory_bytes for c in costs),
            processor_seconds=sum(known) if len(known) == len(costs) else None,
        )


def peak_memory_bytes() -> int:
    """The most memory that this process ever held."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux; there `getrusage` would count the process that started this one, too
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return 1024 * int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
