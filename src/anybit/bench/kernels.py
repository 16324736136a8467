"""`anybit bench kernels`: a layer's matrix times a few vectors, beside PyTorch and the memory's bandwidth.

Every variant runs once a round, on weights that were not touched for a while, so they come from memory as they do when
a model decodes. What is timed is what a layer calls, rounding of activations included. Medians; quote ratios only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from anybit.errors import InputError
from anybit.formats import BLOCK, TwoFour
from anybit.kernels import cpu, info
from anybit.kernels.dispatch import Prepared
from anybit.progress import SILENT, Silent
from anybit.tensors import PackedWeight, stored_bytes, stored_tensors

Run = Callable[[], object]

COLD = 128 << 20  # bytes between two uses of the same weights: beyond any cache
MOST_COPIES = 1024  # of a matrix, so that toy shapes do not take minutes to make
SWEEP = 512 << 20  # bytes read to measure the bandwidth
WARM_UP = 3
GROUP = 128
SHAPES = (
    "4096x4096",
    "11008x4096",
    "4096x11008",
    "14336x4096",
    "576x576",
    "1536x576",
    "576x1536",
    "49152x576",
)
ATOM_OUTLIERS = 128
CODEBOOK_WIDTHS = (2, 3, 4, 5, 6, 8)
FAST = " A8"  # codebooks with byte centroids and inputs of 8 bits


def kernels(
    shapes: Sequence[str] = SHAPES,
    tokens: Sequence[int] = (1,),
    threads: Sequence[int] = (1,),
    rounds: int = 20,
    report: Silent = SILENT,
) -> dict[str, Any]:
    """Microseconds of every stored format at every shape `OUTxIN`, number of tokens and number of threads.

    Raises:
        InputError: no native extension, or a shape that is none.
    """
    if not cpu.available():
        raise InputError(f"the native extension is not there: {cpu.why_not()}")
    sizes = [_shape(shape) for shape in shapes]
    before, rows, bandwidth = torch.get_num_threads(), [], {}
    advance = report.task("kernels", len(sizes) * len(tokens) * len(threads))
    try:
        for n in threads:
            torch.set_num_threads(n)
            bandwidth[n] = read_bandwidth(rounds)
        for out, columns in sizes:
            for m in tokens:
                variants = _variants(out, columns, m)
                for n in threads:
                    torch.set_num_threads(n)
                    figures = _measure(variants, rounds, bandwidth[n])
                    rows.append({"out": out, "in": columns, "tokens": m, "threads": n, "variants": figures})
                    advance(1)
    finally:
        torch.set_num_threads(before)
    return {
        "bench": "kernels",
        **info()["cpu"],
        "group_size": GROUP,
        "read_gb_per_s": bandwidth,
        "rows": rows,
    }


def read_bandwidth(rounds: int = 5) -> float:
    """GB/s at which this machine reads memory on PyTorch's threads: the limit of any kernel at a few tokens."""
    buffer = torch.ones(SWEEP // 8, dtype=torch.int64)
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        buffer.sum()
        times.append(time.perf_counter() - begun)
    return SWEEP / statistics.median(times) / 1e9


def _shape(text: str) -> tuple[int, int]:
    sizes = text.split("x")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise InputError(f"shape {text!r}: expected OUTxIN, such as 4096x11008")
    return int(sizes[0]), int(sizes[1])


def layouts(out: int, columns: int) -> dict[str, dict[str, Any]]:
    """What each variant stores of a matrix."""

    def tile(bits: int, symmetric: bool, act_bits: int = 16, **more: Any) -> dict[str, Any]:
        made = {"format": "group_int", "bits": bits, "group_size": GROUP, "symmetric": symmetric, **more}
        return made if act_bits == 16 else made | {"act_bits": act_bits}

    def codebook(bits: int, by_channel: bool = False) -> dict[str, Any]:
        return {
            "format": "codebook",
            "bits": bits,
            "widths": [bits],
            "table_bits": 16,
            "by_channel": by_channel,
        }

    wide, outliers = max(1, out // 10), min(ATOM_OUTLIERS, columns // 4)
    tiles = {
        "W8": [tile(8, True)],
        "W4": [tile(4, False)],
        "W8A8": [tile(8, True, 8)],
        "W4A8": [tile(4, False, 8)],
        "W4A4": [tile(4, True, 4)],
        "MixLLM p10": [tile(8, True, 8, rows=wide), tile(4, False, 8, rows=out - wide)],
        "Atom W4A4": [tile(4, True, 4, cols=columns - outliers), tile(8, True, 8, cols=outliers)],
    }
    if columns % (4 * BLOCK) == 0:
        tiles["2/4/16"] = [TwoFour.description(columns * 3 // 4, columns, BLOCK)]
    tiles |= {f"codebook {bits}": [codebook(bits)] for bits in CODEBOOK_WIDTHS}
    tiles |= {f"by channel {bits}": [codebook(bits, by_channel=True)] for bits in (2, 3, 4)}
    tiles |= {f"codebook {bits}{FAST}": [codebook(bits)] for bits in CODEBOOK_WIDTHS}
    return {
        name: {"shape": [out, columns], "tiles": entry} for name, entry in tiles.items() if out > 1 < columns
    }


def random_weight(layout: dict[str, Any]) -> PackedWeight:
    """Valid bytes of a layout: random codes, scales of one size, indices in a random order where order is free."""
    out, columns = layout["shape"]
    rows, cols = torch.randperm(out), torch.randperm(columns)
    tensors: dict[str, Tensor] = {}
    for field, (dtype, shape) in stored_tensors(layout).items():
        kind = field.rpartition(".")[2]
        if kind == "rows":
            tensors[field], rows = rows[: shape[0]].sort().values.int(), rows[shape[0] :]
        elif kind == "cols":
            tensors[field], cols = cols[: shape[0]].int(), cols[shape[0] :]
        elif kind == "blocks":  # every fourth at 4 bits
            tensors[field] = torch.full(shape, 0x88, dtype=dtype)
            tensors[field][-1] &= (1 << (columns // BLOCK - 1) % 8 + 1) - 1
        elif dtype.is_floating_point:
            tensors[field] = torch.full(shape, 0.01 if kind == "scales" else 1.0, dtype=dtype)
        else:
            tensors[field] = torch.randint(0, 256, shape).to(dtype)
    return PackedWeight(layout, tensors)


def _variants(out: int, columns: int, tokens: int) -> dict[str, tuple[int, Run]]:
    x = torch.randn(tokens, columns)
    made = {
        "torch float32": _dense(out, columns, x, torch.float32),
        "torch bfloat16": _dense(out, columns, x, torch.bfloat16),
    }
    made |= {
        name: _quantized(layout, x, exact=not name.endswith(FAST))
        for name, layout in layouts(out, columns).items()
    }
    return made


def _dense(out: int, columns: int, x: Tensor, dtype: torch.dtype) -> tuple[int, Run]:
    nbytes, like = out * columns * dtype.itemsize, x.to(dtype)

    def make() -> Run:
        weight = torch.empty(out, columns, dtype=dtype).uniform_(-1, 1)
        return lambda: torch.nn.functional.linear(like, weight)

    return nbytes, _rotating(nbytes, make)


def _quantized(layout: dict[str, Any], x: Tensor, exact: bool) -> tuple[int, Run]:
    nbytes = stored_bytes(layout)

    def make() -> Run:
        prepared = Prepared(random_weight(layout), exact)
        return lambda: prepared.matmul(x)

    return nbytes, _rotating(nbytes, make)


def _rotating(nbytes: int, make: Callable[[], Run]) -> Run:
    """A function that runs one of several equal ones in turn, each with weights of `nbytes` of its own."""
    turns = cycle([make() for _ in range(min(MOST_COPIES, max(2, -(-COLD // nbytes))))])

    def run() -> object:
        turn = next(turns)
        return turn()

    return run


def _measure(
    variants: dict[str, tuple[int, Run]], rounds: int, bandwidth: float
) -> dict[str, dict[str, float]]:
    """Median microseconds, the variants taking turns, and the share of the bandwidth that their bytes mean."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(rounds + WARM_UP):
        for name, (_, run) in variants.items():
            begun = time.perf_counter()
            run()
            if i >= WARM_UP:
                times[name].append(time.perf_counter() - begun)
    figures = {}
    for name, (nbytes, _) in variants.items():
        seconds = statistics.median(times[name])
        rate = nbytes / seconds / 1e9
        figures[name] = {"us": 1e6 * seconds, "gb_per_s": rate, "of_bandwidth": rate / bandwidth}
    return figures
