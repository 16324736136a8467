"""`anybit bench kernels`: a layer's matrix times a few vectors, beside PyTorch, ggml and the memory's bandwidth.

Every variant runs once a round, so its weights come from memory, as they do when a model decodes; and so does plain
reading, whose rate is the limit. What is timed is what a layer calls, rounding of activations included. Medians; quote
ratios of one run only.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anybit.bench import ggml
from anybit.errors import InputError
from anybit.formats import BLOCK, Nested, Sparse, TwoFour
from anybit.kernels import cpu, info
from anybit.kernels.dispatch import Prepared
from anybit.progress import SILENT, Silent
from anybit.tensors import PackedWeight, stored_bytes, stored_tensors

Run = Callable[[], object]

CACHE = 32 << 20  # bytes, where the machine does not say
MOST_COPIES = 1024  # of a matrix, so that toy shapes do not take minutes to make
READ = 32 << 20  # bytes read at a time to measure the bandwidth
WARM_UP = 3
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
INT_WIDTHS = (2, 3, 4, 5, 6, 8)
CHANNEL_WIDTHS = (2, 3, 4, 6, 8)
CODEBOOK_WIDTHS = (2, 3, 4, 5, 6, 8)
NESTED_WIDTHS = (2, 3, 4, 5)
FAST = " A8"  # codebooks with byte centroids and inputs of 8 bits
LIMIT = "memory read"
OWN = "own bfloat16"  # a product that does nothing but read 16 bits a weight


@dataclass
class Variant:
    """A way to multiply one matrix."""

    nbytes: int  # that it reads
    make: Callable[[], Run]  # one with weights of its own
    wake: Run | None = None  # before it is timed
    rest: Run | None = None  # after


def kernels(  # noqa: PLR0913 - what can be varied
    shapes: Sequence[str] = SHAPES,
    tokens: Sequence[int] = (1,),
    threads: Sequence[int] = (1,),
    rounds: int = 20,
    dtype: str = "bfloat16",
    isas: Sequence[str] = (),
    only: Sequence[str] = (),
    report: Silent = SILENT,
) -> dict[str, Any]:
    """Microseconds of every stored format at every shape `OUTxIN`, number of tokens and number of threads.

    Args:
        dtype: what the model computes in, "bfloat16" or "float32".
        isas: instruction sets to compare, of `cpu.matmul_isas()`. Default: the best.
        only: variants whose name begins so. Default: all.

    Raises:
        InputError: no native extension, a shape that is none, an instruction set that is not here, no such variant.
    """
    if not cpu.available():
        raise InputError(f"the native extension is not there: {cpu.why_not()}")
    sizes = [_shape(shape) for shape in shapes]
    for isa in isas:
        if isa not in cpu.matmul_isas():
            raise InputError(f"instruction set {isa!r}: this machine has {', '.join(cpu.matmul_isas())}")
    known = dict.fromkeys([OWN, *_names(isas), *(f"ggml {kind}" for kind in ggml.TYPES)])
    for name in only:
        if not any(k.startswith(name) for k in known):
            raise InputError(f"no variant begins with {name!r}: there are {', '.join(known)}")
    before, rows = torch.get_num_threads(), []
    advance = report.task("kernels", len(sizes) * len(tokens) * len(threads))
    try:
        for out, columns in sizes:
            for m in tokens:
                for n in threads:
                    torch.set_num_threads(n)
                    variants = _variants(out, columns, m, n, getattr(torch, dtype), isas, tuple(only))
                    figures = _measure(variants, rounds)
                    limit = figures.pop(LIMIT)["gb_per_s"]
                    for figure in figures.values():
                        figure["of_limit"] = figure["gb_per_s"] / limit
                    row = {"out": out, "in": columns, "tokens": m, "threads": n, "read_gb_per_s": limit}
                    rows.append({**row, "variants": figures})
                    advance(1)
    finally:
        torch.set_num_threads(before)
    peer = "ggml" if ggml.library() is not None else None
    return {
        "bench": "kernels",
        **info()["cpu"],
        "dtype": dtype,
        "group_size": GROUP,
        "peer": peer,
        "rows": rows,
    }


def _shape(text: str) -> tuple[int, int]:
    sizes = text.split("x")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise InputError(f"shape {text!r}: expected OUTxIN, such as 4096x11008")
    return int(sizes[0]), int(sizes[1])


def _names(isas: Sequence[str]) -> list[str]:
    """Our variants, once for each instruction set."""
    marks = [f" @{isa}" for isa in isas] if len(isas) > 1 else [""]
    return [f"{name}{mark}" for name in layouts(4096, 4096) for mark in marks]


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
    tiles = {f"W{bits}": [tile(bits, bits == 8)] for bits in INT_WIDTHS}
    tiles |= {f"W{bits}A8": [tile(bits, bits == 8, 8)] for bits in INT_WIDTHS}
    tiles |= {
        "W4A4": [tile(4, True, 4)],
        "MixLLM p10": [tile(8, True, 8, rows=wide), tile(4, False, 8, rows=out - wide)],
        "Atom W4A4": [tile(4, True, 4, cols=columns - outliers), tile(8, True, 8, cols=outliers)],
    }
    if columns % (4 * BLOCK) == 0:
        tiles["2/4/16"] = [TwoFour.description(columns * 3 // 4, columns, BLOCK)]
    tiles |= {f"codebook {bits}": [codebook(bits)] for bits in CODEBOOK_WIDTHS}
    whole = [bits for bits in CHANNEL_WIDTHS if 2**bits <= out]  # whose tables have all entries
    tiles |= {f"by channel {bits}": [codebook(bits, by_channel=True)] for bits in whole}
    tiles |= {f"codebook {bits}{FAST}": [codebook(bits)] for bits in CODEBOOK_WIDTHS}
    kept = columns // 128
    tiles |= {f"nested {bits}": [Nested.description([out] * bits, kept)] for bits in NESTED_WIDTHS}
    mixed = [out, out, out * 3 // 4, out // 2, out // 4]  # an average of 3.5 bits
    tiles["nested 2 to 5"] = [Nested.description([n for n in mixed if n], kept)]
    made: dict[str, dict[str, Any]] = {
        name: {"shape": [out, columns], "tiles": entry} for name, entry in tiles.items() if out > 1 < columns
    }
    if "codebook 4" in made:
        made["codebook 4 + sparse"] = made["codebook 4"] | {"sparse": int(SPARSE * out * columns)}
    return made


def random_weight(layout: dict[str, Any]) -> PackedWeight:
    """Valid bytes of a layout: random codes, scales of one size, indices in a random order where order is free."""
    out, columns = layout["shape"]
    rows, cols = torch.randperm(out), torch.randperm(columns)
    tensors: dict[str, Tensor] = {}
    for field, (dtype, shape) in stored_tensors(layout).items():
        kind = field.rpartition(".")[2]
        if field.startswith("sparse."):
            continue
        if kind == "rows":
            tensors[field], rows = rows[: shape[0]].sort().values.int(), rows[shape[0] :]
        elif kind == "cols":
            tensors[field], cols = cols[: shape[0]].int(), cols[shape[0] :]
        elif kind == "order":
            tensors[field] = rows.to(torch.int32 if dtype == torch.int32 else torch.int16).view(dtype)
        elif kind == "kept":
            index = cols[: shape[0]].sort().values
            tensors[field] = index.to(torch.int32 if dtype == torch.int32 else torch.int16).view(dtype)
        elif kind == "blocks":  # every fourth at 4 bits
            tensors[field] = torch.full(shape, 0x88, dtype=dtype)
            tensors[field][-1] &= (1 << (columns // BLOCK - 1) % 8 + 1) - 1
        elif dtype.is_floating_point:
            tensors[field] = torch.full(shape, 0.01 if kind == "scales" else 1.0, dtype=dtype)
        else:
            tensors[field] = torch.randint(0, 256, shape).to(dtype)
    if "sparse" in layout:
        chosen = torch.randperm(out * columns)[: layout["sparse"]].sort().values
        counts = torch.bincount(chosen // columns, minlength=out)
        ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        part = Sparse(torch.ones(len(chosen)).half(), chosen % columns, ends.int())
        tensors |= {f"sparse.{field}": tensor for field, tensor in part.tensors(columns).items()}
    return PackedWeight(layout, tensors)


def _variants(
    out: int,
    columns: int,
    tokens: int,
    threads: int,
    dtype: torch.dtype,
    isas: Sequence[str],
    only: tuple[str, ...],
) -> dict[str, Variant]:
    x = torch.randn(tokens, columns)
    ours: dict[str, Variant] = {OWN: Variant(2 * out * columns, lambda: _own(out, x))}
    for name, layout in layouts(out, columns).items():
        exact = not name.endswith(FAST)
        for isa in isas or (None,):
            mark = f" @{isa}" if len(isas) > 1 else ""
            ours[name + mark] = _quantized(layout, x.to(dtype), exact, isa)
    if ggml.library() is not None:
        for kind in ggml.TYPES:
            if ggml.fits(kind, columns):
                ours[f"ggml {kind}"] = _peer(kind, out, x, threads)
    return {
        LIMIT: Variant(READ, _reader),
        "torch float32": _dense(out, x),
        "torch bfloat16": _dense(out, x.bfloat16()),
    } | {name: variant for name, variant in ours.items() if not only or name.startswith(only)}


def _reader() -> Run:
    data = torch.randint(0, 256, (READ // 8,))
    return data.sum


def _dense(out: int, x: Tensor) -> Variant:
    def make() -> Run:
        weight = torch.empty(out, x.shape[1], dtype=x.dtype).uniform_(-1, 1)
        return lambda: torch.nn.functional.linear(x, weight)

    return Variant(out * x.shape[1] * x.dtype.itemsize, make)


def _own(out: int, x: Tensor) -> Run:
    layer = cpu.Layer(out, x.shape[1])
    layer.add(cpu.Float16(torch.empty(out, x.shape[1], dtype=torch.bfloat16).uniform_(-1, 1), None))
    return lambda: layer.matmul(x)


def _quantized(layout: dict[str, Any], x: Tensor, exact: bool, isa: str | None) -> Variant:
    def make() -> Run:
        prepared = Prepared(random_weight(layout), exact, isa)
        return lambda: prepared.matmul(x)

    return Variant(stored_bytes(layout), make)


def _peer(kind: str, out: int, x: Tensor, threads: int) -> Variant:
    product = ggml.Product(kind, out, x, threads)  # one: others evict it
    return Variant(product.nbytes, lambda: product, product.wake, product.rest)


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


def _measure(variants: dict[str, Variant], rounds: int) -> dict[str, dict[str, float]]:
    """Median microseconds and bytes per second, the variants taking turns."""
    copies = min(MOST_COPIES, -(-_cold() // sum(v.nbytes for v in variants.values())))
    runs = {name: rotating(variant, copies) for name, variant in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(rounds + WARM_UP):
        for name, variant in variants.items():
            if variant.wake is not None:
                variant.wake()
            begun = time.perf_counter()
            runs[name]()
            if i >= WARM_UP:
                times[name].append(time.perf_counter() - begun)
            if variant.rest is not None:
                variant.rest()
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {
        name: {"us": 1e6 * seconds, "gb_per_s": variants[name].nbytes / seconds / 1e9}
        for name, seconds in medians.items()
    }


def plot(figures: dict[str, Any], path: Path) -> None:
    """Time against stored bits per weight, a panel for each shape and number of tokens and threads."""
    from matplotlib.figure import Figure

    rows = figures["rows"]
    across = min(3, math.isqrt(len(rows) - 1) + 1)
    down = -(-len(rows) // across)
    figure = Figure(figsize=(5.2 * max(2, across), 1 + 3.5 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for axes, row in zip(panels, rows):
        _panel(axes, row)
    for axes in panels[len(rows) :]:
        axes.set_visible(False)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=5, fontsize="small"
    )
    figure.savefig(path, dpi=110)


FAMILIES = {  # names that begin so: how they are drawn
    "ggml": ("s", "C3", "ggml"),
    "codebook": ("o", "C0", "codebooks by row"),
    "by channel": ("v", "C2", "codebooks by channel"),
    "2/4/16": ("D", "C4", "2/4/16"),
    "MixLLM": ("*", "C5", "MixLLM"),
    "Atom": ("P", "C6", "Atom"),
    "W": ("^", "C1", "group int"),
}


def _panel(axes: Any, row: dict[str, Any]) -> None:
    weights = row["out"] * row["in"]
    shown: dict[str, list[tuple[float, float]]] = {}
    for name, figure in row["variants"].items():
        bits = 8 * figure["gb_per_s"] * figure["us"] * 1e3 / weights
        family = next((f for f in FAMILIES if name.startswith(f)), None)
        if family is not None:
            label = FAMILIES[family][2] + (", 8-bit inputs" if name.endswith("A8") else "")
            shown.setdefault(label, []).append((bits, figure["us"]))
    for label, points in shown.items():
        marker, color, _ = next(v for v in FAMILIES.values() if label.startswith(v[2]))
        fill = "full" if label.endswith("inputs") else "none"
        axes.plot(*zip(*sorted(points)), marker, color=color, fillstyle=fill, label=label)
    most = max(bits for points in shown.values() for bits, _ in points) + 0.5
    limit = [weights / 8 * bits / row["read_gb_per_s"] / 1e3 for bits in (0, most)]
    axes.plot((0, most), limit, color="#888", label="the memory's bandwidth")
    for name, style in (("torch bfloat16", "--"), (OWN, ":")):
        if name in row["variants"]:
            axes.axhline(row["variants"][name]["us"], linestyle=style, color="#555", label=name)
    many = f"{row['tokens']} token(s), {row['threads']} thread(s), {row['read_gb_per_s']:.0f} GB/s"
    axes.set(
        xlabel="stored bits per weight", ylabel="microseconds", title=f"{row['out']} x {row['in']}, {many}"
    )
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
