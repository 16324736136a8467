"""`anybit bench kernels`: a layer's matrix times a few vectors, beside PyTorch, ggml and the memory's bandwidth.

Every variant runs once a round, so its weights come from memory, as they do when a model decodes; and so does plain
reading, whose rate is the limit. What is timed is what a layer calls, rounding of activations included. Medians; quote
ratios of one run only.

With `cached` the weights are few and in the cache, and the rate is that at which a kernel computes: where it is below
the limit, instructions bound the kernel and not the memory. It is the rate of the rows beyond the first `ROWS`: what
every call costs, 10 to 20 us, is about as much as kernels take for all that the cache holds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anybit.bench import ggml
from anybit.bench.reading import reader, settle
from anybit.bench.variants import ISA, OWN, ROWS, chosen, parse_shape
from anybit.compare.machine import machine
from anybit.config import Json
from anybit.errors import InputError
from anybit.formats import (
    CodebookLayout,
    Float16Layout,
    GroupIntLayout,
    NestedLayout,
    Sparse,
    TileLayout,
    TwoFourLayout,
)
from anybit.formats.layout import LayerLayout
from anybit.formats.two_four import BLOCK
from anybit.formats.weight import PackedWeight
from anybit.kernels import cpu, info
from anybit.kernels.cpu_layer import Layer
from anybit.kernels.dispatch import BoundWeight
from anybit.progress import SILENT, Silent

Run = Callable[[], object]
Make = Callable[[int], "Variant"]  # of a matrix of so many rows

CACHE = 32 << 20  # bytes, where the machine does not say
MOST_COPIES = 1024  # of a matrix, so that toy shapes do not take minutes to make
READ = 256 << 20  # bytes read at a time to measure the bandwidth
CACHED = 512 << 10  # bytes of a matrix that is to stay in the cache
LEAST_SECONDS = 1e-7  # that can be measured
WARM_UP = 3
WARM = 1e-2  # seconds; clocks take some 5 ms to rise after a rest
GROUP = 128
SHAPES = (  # of LLMs, of SmolLM2-135M and its head, of Gemma 3 270M
    "4096x4096",
    "11008x4096",
    "4096x11008",
    "14336x4096",
    "576x576",
    "1536x576",
    "576x1536",
    "49152x576",
    "1024x640",
    "2048x640",
    "640x2048",
)
ATOM_OUTLIERS = 128
SPARSE = 0.005  # of the weights
WIDTHS = range(2, 9)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}  # that the kernels take
INT8 = " A8"  # codebooks with byte centroids and inputs of 8 bits
LIMIT = "memory read"


@dataclass
class Variant:
    """A way to multiply one matrix."""

    nbytes: int  # that it reads
    make: Callable[[], Run]  # one with weights of its own
    wake: Run | None = None  # before it is timed
    rest: Run | None = None  # after
    about: dict[str, str] = field(default_factory=dict)  # what is known once it is made


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is timed: every stored format at every shape, number of tokens and number of threads.

    Raises:
        InputError: no native extension, a shape that is none or too small for `cached`, another dtype, an instruction
            set that is not here.
    """

    shapes: Sequence[str] = SHAPES  # `OUTxIN`
    tokens: Sequence[int] = (1,)  # multiplied at once, from 1 up
    threads: Sequence[int] = (1,)  # from 1 up
    rounds: int = 20
    dtype: str = "bfloat16"  # what the model computes in, a key of `DTYPES`
    isas: Sequence[str] = ()  # instruction sets to compare, of `cpu.matmul_isas()`; the best by default
    only: Sequence[str] = ()  # variants of these names, or that begin so where there is none; all by default
    cached: bool = False  # parts of the matrices that stay in the cache

    def __post_init__(self) -> None:
        if not cpu.available():
            raise InputError(f"the native extension is not there: {cpu.why_not()}")
        _ = self.sizes  # refuses what is no shape
        if self.dtype not in DTYPES:
            raise InputError(f"dtype {self.dtype!r}: the kernels take {' and '.join(DTYPES)}")
        for isa in self.isas:
            if isa not in cpu.matmul_isas():
                raise InputError(f"instruction set {isa!r}: this machine has {', '.join(cpu.matmul_isas())}")

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The shapes as (out, in)."""
        return [parse_shape(shape, 2 * ROWS if self.cached else 1) for shape in self.shapes]

    def variants(self, out: int, columns: int, m: int = 1, n: int = 1) -> dict[str, Make]:
        """Of a shape, for m tokens and n threads."""
        rows = ROWS if self.cached else out
        return _variants((rows, columns), m, n, DTYPES[self.dtype], self.isas)


def kernels(sweep: Sweep, report: Silent = SILENT) -> Json:
    """Microseconds of what a sweep names.

    Raises:
        InputError: a variant that is not here.
    """
    sizes = sweep.sizes
    there = dict.fromkeys(name for size in sizes for name in sweep.variants(*size))
    kept = chosen(sweep.only, there) if sweep.only else there
    before, rows = torch.get_num_threads(), []
    reading = rotating(Variant(READ, _reader), -(-_cold() // READ))
    read = Variant(READ, lambda: reading, rest=settle)
    advance = report.task("kernels", len(sizes) * len(sweep.tokens) * len(sweep.threads))
    try:
        for out, columns in sizes:
            for m, n in product(sweep.tokens, sweep.threads):
                torch.set_num_threads(n)
                makes = {
                    name: make
                    for name, make in sweep.variants(out, columns, m, n).items()
                    if name in kept or name.startswith("torch")
                }
                row = {"out": out, "in": columns, "tokens": m, "threads": n}
                rows.append({**row, **_measure(makes, out, read, sweep.rounds, sweep.cached)})
                advance(1)
    finally:
        torch.set_num_threads(before)
    return {
        "bench": "kernels",
        **info()["cpu"],
        "machine": machine(),
        "dtype": sweep.dtype,
        "isas": list(sweep.isas) or [cpu.matmul_isa()],
        "rounds": sweep.rounds,
        "group_size": GROUP,
        "peer": ggml.version(),
        "cached_bytes": CACHED if sweep.cached else None,
        "rows": rows,
    }


def layouts(out: int, columns: int) -> dict[str, LayerLayout]:
    """What each variant stores of a matrix."""

    def tile(bits: int, symmetric: bool, act_bits: int = 16, **place: Any) -> TileLayout:
        return GroupIntLayout(bits=bits, group_size=GROUP, symmetric=symmetric, act_bits=act_bits, **place)

    def codebook(bits: int, by_channel: bool = False) -> TileLayout:
        return CodebookLayout.of([bits], by_channel, table_bits=16)

    wide, outliers = max(1, out // 10), min(ATOM_OUTLIERS, columns // 4)
    tiles: dict[str, list[TileLayout]] = {f"W{bits}": [tile(bits, bits == 8)] for bits in WIDTHS}
    tiles |= {f"W{bits}A8": [tile(bits, bits == 8, 8)] for bits in WIDTHS}
    tiles["W4A4"] = [tile(4, True, 4)]
    if out > 1:
        tiles["MixLLM p10"] = [tile(8, True, 8, rows=wide), tile(4, False, 8, rows=out - wide)]
    if outliers:
        tiles["Atom W4A4"] = [tile(4, True, 4, cols=columns - outliers), tile(8, True, 8, cols=outliers)]
    if columns % (4 * BLOCK) == 0:
        tiles["2/4/16"] = [TwoFourLayout.of(columns * 3 // 4, columns, BLOCK)]
    tiles |= {f"codebook {bits}": [codebook(bits)] for bits in WIDTHS}
    whole = [bits for bits in WIDTHS if 2**bits <= out]  # whose tables have all entries
    tiles |= {f"by channel {bits}": [codebook(bits, by_channel=True)] for bits in whole}
    tiles |= {f"codebook {bits}{INT8}": [codebook(bits)] for bits in WIDTHS}
    kept = columns // 128
    tiles |= {f"nested {bits}": [NestedLayout.of([out] * bits, kept, kept_bits=8)] for bits in WIDTHS}
    mixed = [out, out, out * 3 // 4, out // 2, out // 4]  # an average of 3.5 bits
    tiles |= {f"nested {bits}{INT8}": [NestedLayout.of([out] * bits, kept, kept_bits=8)] for bits in WIDTHS}
    tiles["nested 2 to 5"] = [NestedLayout.of([n for n in mixed if n], kept, gains=True, kept_bits=8)]
    made = {name: LayerLayout((out, columns), tuple(entry)) for name, entry in tiles.items()}
    made["codebook 4 + sparse"] = replace(made["codebook 4"], sparse=int(SPARSE * out * columns))
    return made


def random_weight(layout: LayerLayout) -> PackedWeight:
    """Valid bytes of a layout: random codes, scales of one size, indices in a random order where order is free."""
    out, columns = layout.shape
    rows, cols = torch.randperm(out), torch.randperm(columns)
    tensors: dict[str, Tensor] = {}
    for name, (stored, shape) in layout.stored_tensors().items():
        dtype = stored.torch
        kind = name.rpartition(".")[2]
        if name.startswith("sparse."):
            continue
        if kind == "rows":
            tensors[name], rows = rows[: shape[0]].sort().values.int(), rows[shape[0] :]
        elif kind == "cols":
            tensors[name], cols = cols[: shape[0]].int(), cols[shape[0] :]
        elif kind == "order":
            tensors[name] = rows.to(torch.int32 if dtype == torch.int32 else torch.int16).view(dtype)
        elif kind == "kept":
            index = cols[: shape[0]].sort().values
            tensors[name] = index.to(torch.int32 if dtype == torch.int32 else torch.int16).view(dtype)
        elif kind == "blocks":  # every fourth at 4 bits
            tensors[name] = torch.full(shape, 0x88, dtype=dtype)
            tensors[name][-1] &= (1 << (columns // BLOCK - 1) % 8 + 1) - 1
        elif dtype.is_floating_point:
            tensors[name] = torch.full(shape, 0.01 if kind == "scales" else 1.0, dtype=dtype)
        else:
            random = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
            tensors[name] = random.view(dtype)[..., 0].contiguous()
    if layout.sparse is not None:
        chosen = torch.randperm(out * columns)[: layout.sparse].sort().values
        counts = torch.bincount(chosen // columns, minlength=out)
        ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        part = Sparse(torch.ones(len(chosen)).half(), chosen % columns, ends.int())
        tensors |= {f"sparse.{field}": tensor for field, tensor in part.tensors(columns).items()}
    return PackedWeight(layout, tensors)


def _variants(
    shape: tuple[int, int],  # out, in
    tokens: int,
    threads: int,
    dtype: torch.dtype,
    isas: Sequence[str],
) -> dict[str, Make]:
    """What can run at a shape, and at more rows."""
    x = torch.randn(tokens, shape[1])
    made: dict[str, Make] = {
        "torch float32": partial(_dense, x),
        "torch bfloat16": partial(_dense, x.bfloat16()),
        OWN: partial(_own, x),
    }
    for name in layouts(*shape):
        for isa in isas or (None,):
            mark = f"{ISA}{isa}" if isas else ""
            made[name + mark] = partial(_quantized, name, x.to(dtype), isa)
    return made | {f"ggml {kind}": partial(_peer, kind, x, threads) for kind in ggml.kinds(shape[1])}


def _reader() -> Run:
    return reader(READ)


def _dense(x: Tensor, out: int) -> Variant:
    def make() -> Run:
        weight = torch.empty(out, x.shape[1], dtype=x.dtype).uniform_(-1, 1)
        return lambda: torch.nn.functional.linear(x, weight)

    return Variant(out * x.shape[1] * x.dtype.itemsize, make, rest=settle)


def _own(x: Tensor, out: int) -> Variant:
    def make() -> Run:
        layout = LayerLayout((out, x.shape[1]), (Float16Layout(),))
        values = torch.empty(layout.shape, dtype=torch.bfloat16).uniform_(-1, 1)
        layer = Layer(layout, {"values": values})
        return lambda: layer.matmul(x)

    return Variant(2 * out * x.shape[1], make)


def _quantized(name: str, x: Tensor, isa: str | None, out: int) -> Variant:
    layout = layouts(out, x.shape[1])[name]

    def make() -> Run:
        bound = BoundWeight(random_weight(layout), "int8" if name.endswith(INT8) else "fp16", isa)
        return lambda: bound.matmul(x)

    return Variant(layout.nbytes, make)


def _peer(kind: str, x: Tensor, threads: int, out: int) -> Variant:
    pool = ggml.Threads(threads)

    def rest() -> None:
        pool.rest()
        settle()  # where the library computes on OpenMP's threads

    def make() -> Run:
        product = ggml.Product(kind, out, x, pool)
        made.about["order"] = product.order
        return product

    made = Variant(ggml.nbytes(kind, out, x.shape[1]), make, pool.wake, rest)
    return made


def _cold() -> int:
    """Bytes between two uses of the same weights: far beyond the last cache that the machine has."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text()
        return 4 * int(text.strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return 4 * CACHE


def rotating(variant: Variant, copies: int) -> Run:
    """A function that runs one of several equal ones in turn, each with weights of its own."""
    turns = cycle([variant.make() for _ in range(copies)])

    def run() -> object:
        turn = next(turns)
        return turn()

    return run


def _measure(makes: dict[str, Make], out: int, reader: Variant, rounds: int, cached: bool) -> Json:
    """Median microseconds and bytes per second, beside those of reading, with its least and most."""
    parts = {name: make(ROWS) for name, make in makes.items()} if cached else {}
    rows = {
        name: ROWS * min(out // ROWS, max(2, CACHED // parts[name].nbytes)) if cached else out
        for name in makes
    }
    wholes = {name: make(rows[name]) for name, make in makes.items()}
    least = {f"{name} of {ROWS} rows": part for name, part in parts.items()}
    times = _times({LIMIT: reader} | wholes | least, rounds, cached)
    read = [READ / seconds / 1e9 for seconds in times[LIMIT]]
    limit = statistics.median(read)
    figures: dict[str, Json] = {}
    for name, whole in wholes.items():
        nbytes, seconds = whole.nbytes, statistics.median(times[name])
        figures[name] = {"rows": rows[name], "us": 1e6 * seconds}
        if cached:
            nbytes -= parts[name].nbytes
            seconds -= statistics.median(times[f"{name} of {ROWS} rows"])
        rate = nbytes / max(seconds, LEAST_SECONDS) / 1e9
        figures[name] |= {"gb_per_s": rate, "of_limit": rate / limit, **whole.about}
    return {"read_gb_per_s": limit, "read_gb_per_s_range": [min(read), max(read)], "variants": figures}


def _times(variants: dict[str, Variant], rounds: int, cached: bool) -> dict[str, list[float]]:
    """Seconds of every round, the variants taking turns, their weights in the cache or not.

    What runs after another library, or after a rest, finds its code cold, its threads asleep and the clocks low. A
    layer of a model runs after others of its kind, so calls with weights that are not timed go before, for `WARM`
    seconds.
    """
    nbytes = sum(v.nbytes for v in variants.values())
    copies = 1 if cached else min(MOST_COPIES, -(-_cold() // nbytes))
    timed = {name: rotating(variant, copies) for name, variant in variants.items()}
    before = timed if cached else {name: variant.make() for name, variant in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(rounds + WARM_UP):
        for name, variant in variants.items():
            if variant.wake is not None:
                variant.wake()
            warm = time.perf_counter() + WARM
            while True:
                before[name]()
                if time.perf_counter() >= warm:
                    break
            begun = time.perf_counter()
            timed[name]()
            if i >= WARM_UP:
                times[name].append(time.perf_counter() - begun)
            if variant.rest is not None:
                variant.rest()
    return times
