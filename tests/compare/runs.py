"""Comparisons on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anybit.compare import Settings, compare, parse_entry

ENTRIES = ("rtn: group_size=16", "squeezellm", "any-precision", "mixllm: group_size=16, name='Mix <LLM>'")


def run(
    model: Path, out: Path, settings: Settings, entries: tuple[str, ...] = ENTRIES, **more: Any
) -> dict[str, Any]:
    return compare(model, out, [parse_entry(e) for e in entries], (3, 4), settings, **more)
