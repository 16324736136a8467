"""The tables of docs/security.md: mutations and kills, from the last lines of the programs that ran them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from figures import load, markdown

GOOD = ("error", "right")


def mutations() -> str:
    """Cases by kind over all runs, and the seeds that they began with."""
    runs: list[dict[str, Any]] = load("security.json")["mutations"]
    found: dict[str, Counter[str]] = {}
    for run in runs:
        for kind, outcomes in run["cases"].items():
            found.setdefault(kind, Counter()).update(outcomes)
    total = sum(found.values(), Counter())
    rows = [_row(kind, outcomes) for kind, outcomes in found.items()]
    rows += [_row("all", total)] if len(found) > 1 else []
    head = ["damaged", "cases", "clear errors", "right results", "anything else"]
    parts = [f"{run['seed']} ({sum(sum(c.values()) for c in run['cases'].values()):,} cases)" for run in runs]
    return markdown(head, rows) + f"\nSeeds from {', '.join(parts)}.\n"


def _row(kind: str, outcomes: Counter[str]) -> list[str]:
    good = [outcomes[name] for name in GOOD]
    return [kind, *(f"{n:,}" for n in (outcomes.total(), *good, outcomes.total() - sum(good)))]


def kills() -> str:
    """Kills and runs by method; a run with any fault did not end in the same bytes."""
    run = load("security.json")["kills"]
    faulty = Counter(fault["method"] for fault in run["faults"])
    rows = [
        [method, str(n), str(runs), str(runs - faulty[method]), str(run["files_compared"][method])]
        for method, n in run["by_method"].items()
        for runs in [run["runs_by_method"][method]]
    ]
    total = ["all", str(run["kills"]), str(run["runs"]), str(run["runs"] - faulty.total()), ""]
    head = ["method", "kills", "runs", "of them ended in the same bytes", "files compared"]
    said = "; ".join(f"{fault['method']}: {fault['fault']}" for fault in run["faults"])
    return markdown(head, [*rows, total]) + f"\nFaults: {said or 'none'}. Seed {run['seed']}.\n"
