"""How many threads a process may use well."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from anybit.errors import InputError

THREADS_PER_PROCESSOR = 4  # more than this only costs memory, and far more ends the process
CGROUPS = Path("/sys/fs/cgroup")
TOPOLOGY = Path("/sys/devices/system/cpu")


def default_threads() -> int:
    """As many as there are physical cores in the process' affinity, at most what its cgroups grant it, at least 1."""
    return max(1, min(_cores(), *_granted(), os.cpu_count() or 1))


def check_threads(threads: int | None) -> None:
    """Refuse, with InputError, none or threads by the thousand."""
    processors = os.cpu_count() or 1
    most = THREADS_PER_PROCESSOR * processors
    if threads is not None and not 1 <= threads <= most:
        raise InputError(
            f"threads (--threads) {threads}: this machine has {processors} processors; give 1 to {most}"
        )


def _cores() -> int:
    """Physical cores among the processors that the process may run on."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return len({_siblings(processor) for processor in allowed})


def _siblings(processor: int) -> str:
    """What the processors of one core have in common; a processor alone where the system does not say."""
    try:
        return (TOPOLOGY / f"cpu{processor}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return f"{processor}"


def _granted(memberships: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """Processors that each cgroup of the process and its ancestors grant, rounded up."""
    try:
        lines = memberships.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root = CGROUPS
        elif "cpu" in controllers.split(","):
            root = CGROUPS / controllers
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder != root and root not in folder.parents:
                break
            if (quota := _quota(folder)) is not None:
                yield quota


def _quota(group: Path) -> int | None:
    """Processors that one cgroup grants; None: it says nothing, or no limit."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
        granted = -(-int(quota) // int(period))  # "max" is no number
    except (OSError, ValueError):
        return None
    return granted if granted > 0 else None
