"""What else ran: the processors' time that other processes took while something was measured."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
IDLE = (3, 4)  # columns of idle time and of waiting for disks
GUEST = slice(8, None)  # columns that others hold already


class Used(NamedTuple):
    """Seconds since some beginning."""

    wall: float
    own: float  # processor time of this process and the children that ended
    all: float | None  # of everybody; None: the system does not say


def used() -> Used:
    """As it is now."""
    own = os.times()
    return Used(time.perf_counter(), sum(own[:4]), _busy())


def others(spans: Sequence[tuple[Used, Used]]) -> float | None:
    """Processors that others took within some spans of time together, on average; None: the system does not say."""
    took, wall = 0.0, 0.0
    for before, after in spans:
        if before.all is None or after.all is None:
            return None
        took += (after.all - before.all) - (after.own - before.own)
        wall += after.wall - before.wall
    return max(0.0, took) / wall if wall else None


def _busy() -> float | None:
    """Seconds that all processors together were not idle; a hypervisor that takes one counts."""
    try:
        columns = [int(number) for number in STAT.read_text().split("\n", 1)[0].split()[1:]][: GUEST.start]
        return (sum(columns) - sum(columns[i] for i in IDLE)) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
