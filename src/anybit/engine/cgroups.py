"""The control groups of this process, whose limits hold beside the machine's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIPS = Path("/proc/self/cgroup")


def cgroups(controller: str) -> Iterator[Path]:
    """Folders of the groups that may limit something, "cpu" or "memory", and of all groups that they are in."""
    try:
        lines = MEMBERSHIPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2: one tree for all
            root = ROOT
        elif controller in controllers.split(","):
            root = ROOT / controllers
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder != root and root not in folder.parents:
                break
            yield folder
