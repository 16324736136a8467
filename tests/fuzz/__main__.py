"""Mutate everything that comes from outside, and see that errors in words or right results come of it.

    python -m tests.fuzz --cases 10000                   new seeds; `make fuzz N=10000` is the same
    python -m tests.fuzz --kind ggufs --seed 17 --cases 1    one case again: how it was damaged, and what came of it

A case is a seed: it picks what is damaged, how, and at which door it comes in, and runs in a process of its own, which
is limited in time and memory. Any of them may end in a clear error or in a right result, and in nothing else. The last
line is JSON. Ends with 1 where something else happened; the command that does it again stands beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random

import tests.conftest  # noqa: F401 - one thread, no network, the build that ANYBIT_BUILD names
from tests.fuzz import artifacts, checkpoints, commands, ggufs, layouts, native
from tests.fuzz.bases import Bases
from tests.fuzz.limits import GOOD, Child, Finding, Verdict, start

KINDS: dict[str, tuple[Callable[[Random, Bases, Path], str], int]] = {  # the case, its share of a hundred
    "artifacts": (artifacts.case, 36),
    "checkpoints": (checkpoints.case, 20),
    "ggufs": (ggufs.case, 13),
    "layouts": (layouts.case, 8),
    "native": (native.case, 8),
    "commands": (commands.case, 15),
}
Case = tuple[str, int]  # kind, seed


def run(case: Case, bases: Bases) -> Callable[[Path], str]:
    kind, seed = case
    return lambda folder: KINDS[kind][0](Random(f"{kind} {seed}"), bases, folder)


def warm_up(bases: Bases, root: Path) -> None:
    """What commands import on their way, imported once, instead of in every case: what is whole goes through.

    Raises:
        Finding: it does not, and then no damaged one would either.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        outcomes = [
            through(bases.artifacts["rtn"], bases.measured("rtn")) for through in artifacts.COMMANDS.values()
        ]
        for name in ("gptq-bert", "rtn-gptj"):
            outcomes.append(artifacts.COMMANDS["eval"](bases.artifacts[name], bases.measured(name)))
        for family, model in [*bases.models.items(), *(("llama", file) for file in bases.ggufs.values())]:
            outcomes.append(checkpoints.enter("dry run", model, root, bases, family))
        for model in (bases.models["llama"], *bases.ggufs.values()):
            outcomes += [
                checkpoints.enter(door, model, root, bases, "llama") for door in ("plan", "generate")
            ]
    if set(outcomes) != {"right"}:
        raise Finding(f"whole models and artifacts are refused: {outcomes}")


def verdicts(
    cases: Iterable[Case], bases: Bases, root: Path, workers: int
) -> Iterator[tuple[Case, Child, Verdict]]:
    """Of all cases as they end, `workers` at a time."""
    waiting, running = deque(cases), list[tuple[Case, Child]]()
    while waiting or running:
        while waiting and len(running) < workers:
            case = waiting.popleft()
            running.append((case, start(run(case, bases), root / f"{case[0]}-{case[1]}")))
        left = []
        for case, child in running:
            verdict = child.verdict()
            if verdict is None:
                left.append((case, child))
            else:
                yield case, child, verdict
        if len(left) == len(running):
            time.sleep(0.002)
        running = left


def planned(kinds: list[str], seed: int, count: int) -> list[Case]:
    """Cases with consecutive seeds, the kinds by their shares."""
    shares = [KINDS[kind][1] for kind in kinds]
    rng = Random(seed)
    return [(rng.choices(kinds, shares)[0], seed + i) for i in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, help="of the first case; default: a new one")
    parser.add_argument("--kind", choices=KINDS, action="append", help="default: all")
    parser.add_argument("--workers", type=int, default=2, help="cases at a time")
    args = parser.parse_args()
    seed = secrets.randbelow(10**9) if args.seed is None else args.seed
    begun, root = time.monotonic(), Path(tempfile.mkdtemp(prefix="anybit-fuzz-")).resolve()
    counts, slowest, bad = {kind: Counter[str]() for kind in args.kind or KINDS}, {}, 0
    try:
        bases = Bases.make(root / "bases")
        warm_up(bases, root)
        print(f"seeds from {seed}, bases made in {time.monotonic() - begun:.0f} s", flush=True)
        for case, child, verdict in verdicts(
            planned(list(counts), seed, args.cases), bases, root, args.workers
        ):
            kind, number = case
            counts[kind][verdict.outcome] += 1
            slowest[kind] = max(slowest.get(kind, 0), round(verdict.seconds, 2))
            if verdict.outcome not in GOOD:
                bad += 1
                print(f"{verdict.outcome}: python -m tests.fuzz --kind {kind} --seed {number} --cases 1\n"
                      f"{verdict.said}", flush=True)  # fmt: skip
            if verdict.outcome not in GOOD or args.cases == 1:
                print((child.folder / "log").read_text(errors="replace"), flush=True)
            shutil.rmtree(child.folder)
            done = sum(found.total() for found in counts.values())
            if done % 500 == 0:
                print(f"{done} cases, {bad} of them bad, {time.monotonic() - begun:.0f} s", flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    figures = {
        "seed": seed,
        "cases": {kind: dict(sorted(found.items())) for kind, found in counts.items()},
        "bad": bad,
        "slowest_cpu_s": slowest,
        "seconds": round(time.monotonic() - begun),
    }
    print(json.dumps(figures))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
