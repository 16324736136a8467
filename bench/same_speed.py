"""Is every product as fast as it was? An old commit's kernels against this working tree's, turn about.

    python bench/same_speed.py [OLD_COMMIT] [--shapes 4096x4096,1536x576] [--tokens 1] [--threads 1,2] [--rounds 40]
        [--formats W4,nested] [--dtypes bfloat16,float32] [--isa avx2] [--old-build FOLDER]

Two processes, one with each tree's sources and native extension, bind the same weights and wait. Then they take
turns: a variant is timed in one and right afterwards in the other, who begins changes from round to round. So what
else the machine does meets both alike. Of one thread it is the processor's time that counts, of more the clock's.
Weights rotate, so that they come from memory, unless so many copies fit the cache. What counts is the median over the
rounds of new time over old time. Where weights lie in memory differs from process to process and is worth some
percent. So both start anew --starts times, whose ratios are shown from least to most and count by their geometric
mean.
The last line is JSON. Exit code: 0 it ran, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any, NamedTuple

from same_bytes import two_trees
from same_products import bind

FORMATS = (
    *("W2", "W4", "W8", "W4A8", "2/4/16", "by channel 4", "nested 4", "nested 2 to 5"),
    *("codebook 3", "codebook 4", "codebook 4 A8", "codebook 4 + sparse"),
)
WARM = 2e-3  # seconds before every figure
LEAST = 1e-3  # seconds that a figure takes, in calls


class Variant(NamedTuple):
    format: str
    out: int
    columns: int
    dtype: str
    tokens: int
    threads: int

    def __str__(self) -> str:
        return f"{self.format} {self.out}x{self.columns} {self.dtype} tokens {self.tokens} threads {self.threads}"


# ---- one side ----------------------------------------------------------------------------------------------


def serve(tree: Path, variants: Sequence[Variant], isa: str | None, copies: int) -> None:
    """In a process of its own: for each index read, the seconds of one call of that variant."""
    # An editable install would import its own sources, whatever PYTHONPATH says.
    sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable")]
    import torch

    import anybit

    if not Path(anybit.__file__).is_relative_to(tree):
        raise SystemExit(f"{anybit.__file__} was imported, not the sources in {tree}: uninstall that anybit")
    weights: dict[tuple[str, int, int], list[Any]] = {}
    runs = []
    for variant in variants:
        key = variant[:3]
        if key not in weights:
            weights[key] = bound(*key, isa, copies)
        x = torch.randn(variant.tokens, variant.columns).to(getattr(torch, variant.dtype))
        runs.append(rotating(weights[key], x))
    print("ready", flush=True)
    for line in sys.stdin:
        at = int(line)
        torch.set_num_threads(variants[at].threads)
        clock = time.thread_time if variants[at].threads == 1 else time.perf_counter
        print(seconds(runs[at], clock), flush=True)


def bound(name: str, out: int, columns: int, isa: str | None, copies: int) -> list[Any]:
    import torch

    from anybit.bench.kernels import layouts, random_weight

    torch.manual_seed(0)
    layout, int8 = layouts(out, columns)[name], name.endswith(" A8")
    return [bind(random_weight(layout), int8, isa) for _ in range(copies)]


def rotating(weights: Sequence[Any], x: Any) -> Callable[[], object]:
    turns = cycle(weights)
    return lambda: next(turns).matmul(x)


def seconds(run: Callable[[], object], clock: Callable[[], float]) -> float:
    begun = clock()
    calls = 0
    while clock() - begun < WARM:
        run()
        calls += 1
    calls = max(1, int(calls * LEAST / WARM))
    begun = clock()
    for _ in range(calls):
        run()
    return (clock() - begun) / calls


# ---- both ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def both_sides(trees: list[Path], variants: list[Variant], isa: str, copies: int) -> Iterator[list[Any]]:
    running: list[Any] = []
    try:
        for tree in trees:
            argv = [sys.executable, __file__, "--serve", str(tree), json.dumps(variants), isa, str(copies)]
            env = os.environ | {"PYTHONPATH": str(tree / "src")}
            pipe = subprocess.PIPE
            running.append(subprocess.Popen(argv, env=env, stdin=pipe, stdout=pipe, text=True, bufsize=1))
        for process in running:
            if process.stdout.readline() != "ready\n":
                raise SystemExit("a tree's process ended early: its reason stands above")
        yield running
    finally:
        for process in running:
            process.kill()


def ask(process: Any, at: int) -> float:
    process.stdin.write(f"{at}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def medians(sides: list[Any], variants: list[Variant], rounds: int) -> list[tuple[float, float, float]]:
    """Per variant the median microseconds of the old and the new side, and of new over old time."""
    times: list[list[tuple[float, float]]] = [[] for _ in variants]
    for i in range(rounds):
        for at in range(len(variants)):
            first = ask(sides[i % 2], at)
            second = ask(sides[1 - i % 2], at)
            times[at].append((second, first) if i % 2 else (first, second))
    middle = statistics.median
    return [
        (
            1e6 * middle(a for a, _ in pairs),
            1e6 * middle(b for _, b in pairs),
            middle(b / a for a, b in pairs),
        )
        for pairs in times
    ]


def compare(variants: list[Variant], starts: list[list[tuple[float, float, float]]]) -> list[dict[str, Any]]:
    """A row per variant, printed."""
    rows = []
    for variant, figures in zip(variants, zip(*starts)):
        old, new, ratios = (list(column) for column in zip(*figures))
        row = variant._asdict() | {"old_us": min(old), "new_us": min(new), "ratios": sorted(ratios)}
        row["ratio"] = statistics.geometric_mean(ratios)
        rows.append(row)
        span = " to ".join(f"{ratio:.3f}" for ratio in (min(ratios), max(ratios)))
        print(f"{variant}: {min(old):.1f} -> {min(new):.1f} us, ratio {row['ratio']:.3f} ({span})")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", nargs="?", default="HEAD~1", metavar="OLD_COMMIT")
    parser.add_argument("--shapes", default="4096x4096,1536x576", help="OUTxIN, comma-separated")
    parser.add_argument("--tokens", default="1")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--formats", default=",".join(FORMATS), help="names of `anybit bench kernels`")
    parser.add_argument("--isa", default="", help="default: the best of this machine")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--starts", type=int, default=3, help="of both processes")
    parser.add_argument("--copies", type=int, default=8, help="of every matrix, which rotate")
    parser.add_argument("--old-build", type=Path, metavar="FOLDER", help="where the old extension is")
    args = parser.parse_args()
    shapes = [[int(n) for n in shape.split("x")] for shape in args.shapes.split(",")]
    numbers = [[int(n) for n in text.split(",")] for text in (args.tokens, args.threads)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    variants = [
        Variant(name, out, columns, dtype, tokens, threads)
        for name, (out, columns), dtype, tokens, threads in product(
            args.formats.split(","), shapes, args.dtypes.split(","), *numbers
        )
    ]
    starts = []
    with two_trees(args.commit, False, args.old_build) as trees:
        for _ in range(args.starts):
            with both_sides(trees, variants, args.isa, args.copies) as sides:
                starts.append(medians(sides, variants, args.rounds))
    rows = compare(variants, starts)
    ratio = statistics.geometric_mean(row["ratio"] for row in rows)
    print(f"geometric mean of the ratios: {ratio:.4f}; {sum(row['ratio'] > 1.02 for row in rows)} above 1.02")
    print(json.dumps({"ratio": ratio, "isa": args.isa or None, "rounds": args.rounds, "rows": rows}))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        given = [Variant(*one) for one in json.loads(sys.argv[3])]
        serve(Path(sys.argv[2]), given, sys.argv[4] or None, int(sys.argv[5]))
    else:
        sys.exit(main())
