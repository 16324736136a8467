"""What else ran: the processors' time that other processes took while something was measured."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
IDLE = (3, 4)  # columns of idle time and of waiting for disks
GUEST = slice(8, None)  # columns that others hold already


class Used(NamedTuple):
    """Seconds since some beginning."""

    wall: float
    own: float | None  # processor time of this process and the children that ended
    all: float | None  # of everybody


def used() -> Used:
    """As it is now; None where the system does not say."""
    own = os.times()
    return Used(time.perf_counter(), sum(own[:4]), _busy())


def others(before: Used, after: Used) -> float | None:
    """Processors that others took between two moments, on average."""
    if before.all is None or after.all is None or before.own is None or after.own is None:
        return None
    took = (after.all - before.all) - (after.own - before.own)
    return max(0.0, took) / max(after.wall - before.wall, 1e-9)


def _busy() -> float | None:
    """Seconds that all processors together were not idle; a hypervisor that takes one counts."""
    try:
        columns = [int(number) for number in STAT.read_text().split("\n", 1)[0].split()[1:]][: GUEST.start]
        return (sum(columns) - sum(columns[i] for i in IDLE)) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
