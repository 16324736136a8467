"""How many threads a process may use well."""

from __future__ import annotations

import os
import sys
import weakref
from pathlib import Path
from typing import Any

from anybit.engine.cgroups import cgroups
from anybit.errors import InputError

THREADS_PER_PROCESSOR = 4  # more than this only costs memory, and far more ends the process
TOPOLOGY = Path("/sys/devices/system/cpu")


def default_threads() -> int:
    """As many as there are physical cores in the process' affinity, at most what its cgroups grant it, at least 1."""
    granted = [quota for group in cgroups("cpu") if (quota := _quota(group)) is not None]
    return max(1, min(_cores(), *granted, os.cpu_count() or 1))


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


class _Resting:
    """PyTorch, as long as engines live."""

    engines = 0
    threads = 1  # that it had before


def rest_pytorch(engine: object) -> None:
    """Where PyTorch is there, let it have one thread until the last engine is gone: its own would spin beside."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if _Resting.engines == 0:
        _Resting.threads = torch.get_num_threads()
    _Resting.engines += 1
    torch.set_num_threads(1)
    weakref.finalize(engine, _wake_pytorch, torch)


def _wake_pytorch(torch: Any) -> None:
    _Resting.engines -= 1
    if _Resting.engines == 0:
        torch.set_num_threads(_Resting.threads)
