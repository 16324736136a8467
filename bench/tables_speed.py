"""Tables of speed on a CPU, from what `anybit bench kernels --json` wrote."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from figures import CLAIM, how, load, markdown, verdict

Shape = tuple[int, int]  # out, in

LARGE = [(11008, 4096), (4096, 11008), (14336, 4096)]
SHAPES = [(4096, 4096), *LARGE]
NARROW = [(576, 576), (1536, 576), (576, 1536), (49152, 576), (1024, 640), (2048, 640), (640, 2048)]
FORMATS = {
    "group int": "W{}",
    "group int, 8-bit inputs": "W{}A8",
    "codebook by row": "codebook {}",
    "codebook by row, 8-bit inputs": "codebook {} A8",
    "codebook by channel": "by channel {}",
    "bitplanes of `anybit`": "nested {}",
}
READERS = ["group int, 8-bit inputs", "codebook by row, 8-bit inputs", "group int"]  # of the summary
TORCH = "torch bfloat16"
WIDTHS = [str(bits) for bits in range(2, 9)]


class Run:
    """One file of bench/results/kernels: microseconds and share of the memory's read rate of every variant."""

    def __init__(self, name: str) -> None:
        rows = load(f"kernels/{name}.json")["rows"]
        self.rows = {((r["out"], r["in"]), r["tokens"], r["threads"]): r["variants"] for r in rows}
        self.variants = list(dict.fromkeys(v for r in rows for v in r["variants"]))

    def share(self, variant: str, shape: Shape, threads: int) -> float | None:
        """Percent of the memory's read rate."""
        found = self.rows[shape, 1, threads].get(variant)
        return None if found is None else 100 * found["of_limit"]

    def speed(self, variant: str, peer: str, at: tuple[Any, int, int]) -> float | None:
        found = self.rows[at]
        return found[peer]["us"] / found[variant]["us"] if variant in found else None

    def bits(self, variant: str, shape: Shape = (11008, 4096)) -> float:
        found = self.rows[shape, 1, 1][variant]
        return 8 * found["gb_per_s"] * 1e3 * found["us"] / math.prod(shape)


def pair(values: Iterable[float | None], form: Callable[[float], str]) -> str:
    """ "one thread / two threads", or nothing where it was not measured."""
    found = list(values)
    return "" if None in found else " / ".join(form(v) for v in found if v is not None)


def coarse(value: float) -> str:
    return f"{value:.2f}" if value < 2 else f"{value:.1f}"


def spread(values: Sequence[float]) -> str:
    """ "least to most", or nothing of nothing."""
    ends = dict.fromkeys(f"{end(values):.0f}" for end in (min, max) if values)
    return " to ".join(ends)


def read_rate(name: str, threads: int, shapes: Sequence[Shape]) -> str:
    """Percent of the memory's rate, least and most of some shapes."""
    run, rows = Run(name), []
    for label, pattern in FORMATS.items():
        found = [[run.share(pattern.format(b), shape, threads) for shape in shapes] for b in range(2, 9)]
        row = [spread([v for v in values if v is not None]) for values in found]
        if any(row):
            rows.append([label, *row])
    return markdown(["bits", *WIDTHS], rows)


def over_torch() -> str:
    """Speed over torch's bfloat16 at 4096 x 11008."""
    run, rows = Run("decode-b"), []
    for label, pattern in FORMATS.items():
        found = (
            [run.speed(pattern.format(b), TORCH, ((4096, 11008), 1, t)) for t in (1, 2)] for b in range(2, 9)
        )
        rows.append([label, *(pair(values, "{:.1f}".format) for values in found)])
    return markdown(["bits", *WIDTHS], rows)


def all_kernels() -> str:
    """Every variant: percent of the memory's rate, stored bits, speed over torch's bfloat16."""
    run, rows = Run("decode-b"), []
    for variant in run.variants:
        if variant.startswith("torch"):
            continue
        row = [pair((run.share(variant, s, t) for t in (1, 2)), "{:.0f}".format) for s in SHAPES]
        row.append(f"{run.bits(variant):.2f}")
        row += [pair((run.speed(variant, TORCH, (s, 1, t)) for t in (1, 2)), "{:.1f}".format) for s in SHAPES]
        rows.append([variant, *row])
    shapes = [f"{out} x {columns}" for out, columns in SHAPES]
    return markdown(["", *shapes, "bits", *shapes], rows)


def computing() -> str:
    """Percent of the memory's rate at 4096 inputs, one thread: weights in the cache / weights from memory."""
    cached, memory, rows = Run("cached-b"), Run("decode-b"), []
    alone = {"2/4/16": 3, "codebook 4 + sparse": 4, "own bfloat16": 16}  # the column they stand in
    for label, pattern in [*FORMATS.items(), *((name, name) for name in alone)]:
        row = []
        for bits in (*range(2, 9), 16):
            variant = pattern.format(bits)
            there = variant in cached.variants and alone.get(label, bits) == bits
            found = (run.share(variant, (4096, 4096), 1) if there else None for run in (cached, memory))
            row.append(pair(found, "{:.0f}".format))
        rows.append([label, *row])
    return markdown(["bits", *WIDTHS, "16"], rows)


def speeds(name: str, tokens: int, variants: str) -> str:
    """Speed over torch's bfloat16 by shape."""
    run, rows = Run(name), []
    form = "{:.1f}".format if tokens == 1 else coarse
    for shape in dict.fromkeys(shape for shape, *_ in run.rows if shape in NARROW):
        row = [
            pair((run.speed(v, TORCH, (shape, tokens, t)) for t in (1, 2)), form) for v in variants.split(",")
        ]
        rows.append([f"{shape[0]} x {shape[1]}", *row])
    return markdown(["out x in", *variants.split(",")], rows)


def narrow() -> str:
    return speeds("decode-b", 1, "W4,W8,W4A8,W8A8,MixLLM p10,Atom W4A4,2/4/16,codebook 3,codebook 4,codebook 4 A8,"
                  "by channel 4,nested 3,nested 4,own bfloat16,ggml q4_0,ggml q4_K")  # fmt: skip


def narrow_prefill() -> str:
    return speeds("narrow-b", 512, "W4,W8,W4A8,MixLLM p10,Atom W4A4,2/4/16,codebook 4,by channel 4,nested 4")


def same_speed() -> str:
    """New time over old time, least to most over shapes and types of inputs."""
    rows = load("kernels/same-speed.json")["rows"]
    said = []
    for name in dict.fromkeys(row["format"] for row in rows):
        found = [name]
        for shape in dict.fromkeys((row["out"], row["columns"]) for row in rows):
            for threads in (1, 2):
                key = (name, *shape, threads)
                of = [r["ratio"] for r in rows if (r["format"], r["out"], r["columns"], r["threads"]) == key]
                found.append(f"{min(of):.2f} to {max(of):.2f}")
        said.append(found)
    shapes = dict.fromkeys((row["out"], row["columns"]) for row in rows)
    head = [f"{out} x {columns}, {n} thread{'s' * (n > 1)}" for out, columns in shapes for n in (1, 2)]
    return markdown(["format", *head], said)


def same_speed_few(name: str) -> str:
    """New time over old time by number of tokens."""
    found = load(f"kernels/{name}.json")
    rows = found["rows"]
    ratios = {(r["format"], r["out"], r["columns"], r["tokens"]): f"{r['ratio']:.2f}" for r in rows}
    tokens = sorted({row["tokens"] for row in rows})
    said = [
        [name, f"{out} x {columns}", *(ratios[name, out, columns, n] for n in tokens)]
        for name, out, columns in dict.fromkeys(key[:3] for key in ratios)
    ]
    table = markdown(["format", "matrix", *(f"{n} token{'s' * (n > 1)}" for n in tokens)], said)
    return how(found) + table if "command" in found else table


def call_overhead() -> str:
    """Microseconds beside the product, of the old tree and the new one."""
    rows = load("call_overhead.json")["layers"]
    said = [
        [
            row["format"],
            row["dtype"],
            *(f"{row[f'{tree}_beside_us']:.1f}" for tree in ("old", "new")),
            f"{row['ratio']:.2f}",
        ]
        for row in rows
    ]
    return markdown(["format", "inputs", "before, us", "now, us", "ratio"], said)


def tokens(name: str) -> str:
    """Speed over torch's bfloat16 by number of tokens, 4096 x 4096."""
    run, rows = Run(name), []
    variants = [v for v in run.variants if v not in (TORCH, "W4A4")]
    for count in sorted({n for _, n, _ in run.rows}):
        found = ([run.speed(v, TORCH, ((4096, 4096), count, t)) for t in (1, 2)] for v in variants)
        rows.append([str(count), *(pair(values, coarse) for values in found)])
    return markdown(["tokens", *variants], rows)


def kernel_targets() -> str:
    """One token on two threads: the least of the three LARGE shapes, where no shape is named."""
    run, rows = Run("decode-b"), []
    for label in READERS:
        pattern = FORMATS[label]
        shares = [(b, min(run.share(pattern.format(b), s, 2) or 0 for s in LARGE)) for b in range(2, 7)]
        measured = " / ".join(f"{share:.0f}" for _, share in shares)
        met = verdict([(b, share >= 85) for b, share in shares])
        rows.append([f"memory's read rate, {label}, 2 to 6 bits", "85 %", f"{measured} %", met])
    kinds = [(kind, run.speed(kind, TORCH, ((4096, 11008), 1, 2)) or 0) for kind in ("W4A4", "W4A8", "W4")]
    measured = ", ".join(f"{kind} {speed:.2f}" for kind, speed in kinds)
    met = verdict([(kind, speed >= 5) for kind, speed in kinds])
    rows.append(["4 bits over torch's bfloat16, 4096 x 11008", "5 times", measured, met])
    rows += [over_own(run), over_ggml(run)]
    return markdown(CLAIM, [*rows, prefill()])


def least(run: Run, variants: Sequence[str], peer: str) -> float:
    """Speed of the fastest variant over a peer, where it is least."""
    return min(max(run.speed(v, peer, (s, 1, 2)) or 0 for v in variants) for s in LARGE)


def over_own(run: Run) -> list[str]:
    targets = {2: 6.5, 3: 4.5, 4: 3.3, 6: 2.1, 8: 1.5}
    found = {b: least(run, [f"W{b}A8", f"codebook {b} A8", f"W{b}A4"], "own bfloat16") for b in targets}
    measured = " / ".join(f"{speed:.1f}" for speed in found.values())
    claim = "the fastest of each width over our bfloat16, 2 / 3 / 4 / 6 / 8 bits"
    met = verdict([(b, found[b] >= target) for b, target in targets.items()])
    return [claim, " / ".join(map(str, targets.values())) + " times", measured, met]


def over_ggml(run: Run) -> list[str]:
    peers = {"W4A8": ("q4_0", 1.1), "W3A8": ("q3_K", 2.0), "W2A8": ("q2_K", 2.3)}
    found = {v: least(run, [v], f"ggml {peer}") for v, (peer, _) in peers.items()}
    claim = "W4A8, W3A8, W2A8 over ggml's q4_0, q3_K, q2_K"
    met = verdict([(v, found[v] >= target) for v, (_, target) in peers.items()])
    measured = " / ".join(f"{speed:.2f}" for speed in found.values())
    return [claim, " / ".join(str(target) for _, target in peers.values()) + " times", measured, met]


def prefill() -> list[str]:
    run = Run("tokens-b")
    kinds = ("W4A8", "W4", "codebook 4", "2/4/16", "nested 4")
    found = [(v, min(run.speed(v, TORCH, ((4096, 4096), 512, t)) or 0 for t in (1, 2))) for v in kinds]
    claim = "512 tokens over torch's bfloat16 GEMM, 4096 x 4096"
    met = verdict([(v, speed >= 1) for v, speed in found])
    return [claim, "1.0 times", ", ".join(f"{v} {speed:.2f}" for v, speed in found), met]
