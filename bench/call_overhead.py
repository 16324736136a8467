"""What a quantized layer costs beside its product: a call of the module, in an old commit and in this working tree.

    python bench/call_overhead.py [OLD_COMMIT] [--rounds 60] [--old-build FOLDER] [--output FILE]

Two processes, one with each tree's sources and native extension, hold the same layers of 64 inputs, and 64 or 576
outputs, of one token and one thread. They take turns, so that what else the machine does meets both alike. A call's
time grows with the outputs as the product does; what it has at no outputs is what stands beside the product. Figures
are medians over the rounds; the last line is JSON. Exit code: 0 it ran, 2 wrong usage.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from same_bytes import two_trees
from same_speed import ask, seconds

COLUMNS, FEW, MANY = 64, 64, 576  # inputs, and outputs of the two layers
FORMATS = ("W4", "codebook 4", "nested 4")
DTYPES = ("float32", "bfloat16")


def serve(tree: Path) -> None:
    """In a process of its own: for each index read, the seconds of one call of that layer."""
    # An editable install would import its own sources, whatever PYTHONPATH says.
    sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable")]
    import torch

    import anybit
    from anybit.bench.kernels import layouts, random_weight
    from anybit.layers import QuantLinear

    if not Path(anybit.__file__).is_relative_to(tree):
        raise SystemExit(f"{anybit.__file__} was imported, not the sources in {tree}: uninstall that anybit")
    torch.set_num_threads(1)
    runs = []
    for name in FORMATS:
        for dtype in DTYPES:
            for out in (FEW, MANY):
                weight = random_weight(layouts(out, COLUMNS)[name])
                layer = QuantLinear(weight.layout, bias=False)
                layer.load_state_dict(weight.tensors)
                x = torch.randn(1, 1, COLUMNS).to(getattr(torch, dtype))
                runs.append(lambda layer=layer, x=x: layer(x))
    print("ready", flush=True)
    with torch.no_grad():
        for line in sys.stdin:
            print(seconds(runs[int(line)], time.thread_time), flush=True)


@contextlib.contextmanager
def both_sides(trees: list[Path]) -> Iterator[list[Any]]:
    running: list[Any] = []
    try:
        for tree in trees:
            env, pipe = os.environ | {"PYTHONPATH": str(tree / "src")}, subprocess.PIPE
            argv = [sys.executable, __file__, "--serve", str(tree)]
            running.append(subprocess.Popen(argv, env=env, stdin=pipe, stdout=pipe, text=True, bufsize=1))
        for process in running:
            if process.stdout.readline() != "ready\n":
                raise SystemExit("a tree's process ended early: its reason stands above")
        yield running
    finally:
        for process in running:
            process.kill()


def measure(sides: list[Any], rounds: int) -> list[list[list[float]]]:
    """Microseconds of every run, by side, run and round; who begins changes from round to round."""
    n = 2 * len(FORMATS) * len(DTYPES)
    times: list[list[list[float]]] = [[[] for _ in range(n)] for _ in sides]
    for i in range(rounds):
        for at in range(n):
            for side in (i % 2, 1 - i % 2):
                times[side][at].append(1e6 * ask(sides[side], at))
    return times


def compare(times: list[list[list[float]]]) -> list[dict[str, Any]]:
    """A row per format and dtype, printed."""
    rows = []
    for at, (name, dtype) in enumerate((name, dtype) for name in FORMATS for dtype in DTYPES):
        row: dict[str, Any] = {"format": name, "dtype": dtype}
        for side, tree in enumerate(("old", "new")):
            few, many = times[side][2 * at], times[side][2 * at + 1]
            slope = statistics.median(b - a for a, b in zip(few, many)) / (MANY - FEW)
            row[f"{tree}_call_us"] = statistics.median(few)
            row[f"{tree}_beside_us"] = statistics.median(few) - FEW * max(slope, 0.0)
        row["ratio"] = row["new_beside_us"] / row["old_beside_us"]
        rows.append(row)
        print(
            f"{name} {dtype}: a call {row['old_call_us']:.1f} -> {row['new_call_us']:.1f} us, beside the product "
            f"{row['old_beside_us']:.1f} -> {row['new_beside_us']:.1f} us, ratio {row['ratio']:.2f}"
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", nargs="?", default="HEAD~1", metavar="OLD_COMMIT")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--old-build", type=Path, metavar="FOLDER", help="where the old extension is")
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with two_trees(args.commit, False, args.old_build) as trees, both_sides(trees) as sides:
        rows = compare(measure(sides, args.rounds))
    said = json.dumps({"load": os.getloadavg()[0], "layers": rows})
    if args.output is not None:
        args.output.write_text(said + "\n")
    print(said)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]))
    else:
        sys.exit(main())
