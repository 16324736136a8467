"""Products of every stored format on a GPU, beside cuBLAS and a copy of the GPU's memory; random weights of LLM shapes.

Correctness comes first: a variant that fails or differs from the reference at an awkward shape has no figures, and it
is said why; without timing it is an error.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from anybit.bench import graphs
from anybit.bench.graphs import LIMIT, Run, Save, Variant, nobody
from anybit.bench.kernels import INT8, layouts, random_weight
from anybit.bench.variants import chosen
from anybit.config import Json
from anybit.errors import InputError
from anybit.formats.layout import LayerLayout
from anybit.formats.weight import PackedWeight, unpack
from anybit.kernels import reference
from anybit.kernels.dispatch import BoundWeight

SHAPES = ((4096, 4096), (11008, 4096), (4096, 11008), (14336, 4096), (4096, 14336))  # out, in
TOKENS = (1, 2, 4, 8, 16, 64, 256, 512, 1024)
BATCHES = (1, 16, 128)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}  # of inputs
GEMM = (
    "W2",
    "W3",
    "W4",
    "W8",
    "W4A8",
    "W8A8",
    "MixLLM p10",
    "W4A4",
    "Atom W4A4",
    "codebook 4",
    "by channel 4",
    "2/4/16",
)
DECODE = (
    "W4",
    "W3",
    "W4A8",
    "W8A8",
    "MixLLM p10",
    "Atom W4A4",
    "codebook 3",
    "codebook 4",
    "by channel 3",
    "2/4/16",
)
BLOCK = ((4096, 4096),) * 4 + ((11008, 4096),) * 2 + ((4096, 11008),)  # the linears of a block of Llama-7B
BLOCKS = 32
OWN_BLOCKS = 4  # with weights of their own: together more than the L2 cache holds
AWKWARD = (272, 704)  # out, in: ragged for every kernel, and with room for all formats
# Numbers of tokens up to so many share kernels, which are checked at a ragged number; `MANY_TOKENS` beyond.
AWKWARD_TOKENS = {1: 1, 16: 13, 64: 50, 256: 200}
MANY_TOKENS = 300
FP16, BF16 = "cuBLAS float16", "cuBLAS bfloat16"
RATE = 8192  # rows and columns of the products that measure the matrix units
# Of a product's norm, by dtype: outputs are rounded to it, and so are weights that meet the tensor cores.
ERRORS = {"float16": 2e-3, "bfloat16": 1.6e-2}


def gemv(
    rounds: int = 20,
    small: bool = False,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    dtype: str = "float16",
    only: Sequence[str] = (),
    save: Save = nobody,
) -> Json:
    """One token, every layout: microseconds, GB/s of stored bytes, share of a copy's, speed over cuBLAS.

    Args:
        small: check correctness only; runs in Triton's interpreter too.
        shapes: (out, in).
        dtype: of inputs and outputs, of `DTYPES`.
        only: variants of these names, or that begin so. Default: all.
        save: gets the figures after every row.

    Raises:
        InputError: without a GPU, unless small; a dtype or variant that there is not; if small, a kernel that is wrong.
    """
    return _run(shapes, (1,), dtype, _names(only), rounds, small, save)


def gemm(
    rounds: int = 10,
    small: bool = False,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    tokens: Sequence[int] = TOKENS,
    dtype: str = "float16",
    only: Sequence[str] = (),
    save: Save = nobody,
) -> Json:
    """Several tokens; as `gemv`, with shares of the matrix units' rate and the average speed over shapes and tokens.

    Args:
        only: variants of these names, or that begin so. Default: those of `GEMM`.
    """
    return _run(shapes, tokens, dtype, _names(only, GEMM), rounds, small, save)


def decode(
    rounds: int = 10,
    small: bool = False,
    tokens: Sequence[int] = BATCHES,
    dtype: str = "float16",
    only: Sequence[str] = (),
    save: Save = nobody,
) -> Json:
    """Tokens per second of all linears of a Llama-7B, one step as a CUDA graph, at every batch of `tokens`.

    Args:
        only: variants of these names, or that begin so. Default: those of `DECODE`.
    """
    begun, names = time.monotonic(), _names(only, DECODE)
    found = _checked(names, tokens, dtype, small, save)
    if small:
        return found
    device, failed = graphs.cuda(), found["failed"]
    found["matrix_rates"] = _rates(rounds, device, failed)
    found["left_out"] = []
    for batch in tokens:
        if graphs.late(begun):
            found["left_out"].append(f"{batch} tokens")
            continue
        where = f", {batch} token(s)"
        copy = graphs.copied(graphs.times({LIMIT: graphs.copy(device)}, rounds, failed, where))
        figures = {}
        for name in (dtype, *found["checked"]):
            with graphs.noted(failed, name + where):
                step = _step(name, batch, dtype, rounds, device, failed)
                if step is not None:
                    figures[name] = _figures(*step, copy, found["matrix_rates"].get(_unit(name, dtype)))
                    figures[name]["tokens_per_s"] = batch / step[0]
        for figure in figures.values():
            if dtype in figures:
                figure[f"over_{dtype}"] = figures[dtype]["us"] / figure["us"]
        found["rows"].append({"tokens": batch} | graphs.of_row(copy, figures))
        save(found)
    return found


def _names(only: Sequence[str], usual: Sequence[str] = ()) -> list[str]:
    """The variants of these names, or that begin so, or the usual ones of a part (none: all)."""
    there = [name for name in layouts(*AWKWARD) if not name.endswith(INT8)]  # an option of the CPU's kernels
    if only:
        return chosen(only, there)
    return [name for name in there if not usual or name in usual]


def _run(
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int],
    dtype: str,
    names: Sequence[str],
    rounds: int,
    small: bool,
    save: Save,
) -> Json:
    begun = time.monotonic()
    found = _checked(names, tokens, dtype, small, save)
    if small:
        return found
    device, names, failed = graphs.cuda(), list(found["checked"]), found["failed"]
    found["matrix_rates"] = _rates(rounds, device, failed)
    found["left_out"] = []
    for out, columns in shapes:
        weights: _Weights | None = None
        for m in tokens:
            where = f"{out}x{columns}, {m} token(s)"
            if graphs.late(begun):
                found["left_out"].append(where)
                continue
            with graphs.noted(failed, where):
                weights = weights or _Weights((out, columns), names, device)
                x = torch.randn(m, columns, device=device, dtype=DTYPES[dtype])
                row = weights.times(x, rounds, found["matrix_rates"], failed)
                found["rows"].append({"out": out, "in": columns, "tokens": m} | row)
                found["averages"] = _averages(found["rows"], names)
            save(found)
        del weights
        torch.cuda.empty_cache()
    return found


def _checked(names: Sequence[str], tokens: Sequence[int], dtype: str, small: bool, save: Save) -> Json:
    """What figures begin with: the largest error of every variant at awkward shapes, and why others `failed`.

    Raises:
        InputError: a dtype that there is not; no GPU, unless small; if small, a variant that failed.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r}: the GPU's kernels are timed with {' and '.join(DTYPES)}")
    device = graphs.any_device()
    if not small:
        graphs.cuda()  # or say that there is none, before all the work
    ms = sorted({_awkward(m) for m in tokens})
    where = {} if small else {"device": torch.cuda.get_device_name(device)}
    found: Json = {**where, "dtype": dtype, "checked": {}, "failed": {}, "rows": []}
    save(found)
    for name in names:
        with graphs.noted(found["failed"], name):
            found["checked"][name] = _error(name, ms if device.type == "cuda" else ms[:2], dtype, device)
    if small:
        graphs.check_all(found["failed"])
    return found


def _awkward(tokens: int) -> int:
    """A ragged number of tokens for which the same kernels run as for `tokens`."""
    return next((m for most, m in AWKWARD_TOKENS.items() if tokens <= most), MANY_TOKENS)


def _error(name: str, tokens: Sequence[int], dtype: str, device: torch.device) -> float:
    """The largest error of a product.

    Raises:
        ValueError: it is too large.
    """
    weight = _random(layouts(*AWKWARD)[name], device)
    bound, readable = BoundWeight(weight, on_gpu=True), unpack(_moved(weight, "cpu"))
    errors = []
    for m in tokens:
        x = torch.randn(m, AWKWARD[1], device=device).to(DTYPES[dtype])
        wanted = reference.int_matmul(x.cpu().float(), readable).double()
        errors.append(float((bound.matmul(x).cpu().double() - wanted).norm() / wanted.norm()))
        if not errors[-1] < ERRORS[dtype]:
            raise ValueError(f"{AWKWARD}, {m} token(s): {errors[-1]:.2g} off; do not use it")
    return max(errors)


def _random(layout: LayerLayout, device: torch.device | str) -> PackedWeight:
    """Valid bytes: random codes, and random floats."""
    weight = random_weight(layout)
    tensors = {
        field: t
        if not t.is_floating_point() or field.endswith("act_clip")  # which tiles by rows share
        else torch.rand(t.shape, device=t.device).add(0.1).to(t.dtype)
        for field, t in weight.tensors.items()
    }
    return _moved(PackedWeight(layout, tensors), device)


def _moved(weight: PackedWeight, device: torch.device | str) -> PackedWeight:
    return PackedWeight(weight.layout, {field: t.to(device) for field, t in weight.tensors.items()})


class _Weights:
    """Of every variant, as many matrices of a shape as lie beyond the cache: made once for all numbers of tokens."""

    def __init__(self, shape: tuple[int, int], names: Sequence[str], device: torch.device) -> None:
        self.shape = shape
        self.copy = graphs.copy(device)
        described = layouts(*shape)
        self.nbytes = {FP16: 2 * shape[0] * shape[1], BF16: 2 * shape[0] * shape[1]}
        self.nbytes |= {name: described[name].nbytes for name in names if name in described}
        self.dense = {
            name: [
                torch.randn(*shape, device=device, dtype=dtype)
                for _ in range(graphs.copies(self.nbytes[name]))
            ]
            for name, dtype in ((FP16, torch.float16), (BF16, torch.bfloat16))
        }
        self.quantized = {
            name: [_bound(described[name], device) for _ in range(graphs.copies(nbytes))]
            for name, nbytes in self.nbytes.items()
            if name in described
        }

    def times(self, x: Tensor, rounds: int, rates: Mapping[str, float], failed: dict[str, str]) -> Json:
        """Figures of every variant that runs with these inputs."""
        variants = {LIMIT: self.copy}
        for name, dense in self.dense.items():
            given = x.to(dense[0].dtype)
            variants[name] = Variant(
                self.nbytes[name], [partial(torch.nn.functional.linear, given, w) for w in dense]
            )
        for name, bound in self.quantized.items():
            variants[name] = Variant(self.nbytes[name], [partial(w.matmul, x) for w in bound])
        out, columns = self.shape
        seconds = graphs.times(variants, rounds, failed, f", {out}x{columns}, {len(x)} token(s)")
        copy, figures = graphs.copied(seconds), {}
        for name, taken in seconds.items():
            operations = 2 * len(x) * self.shape[0] * self.shape[1]
            unit = _unit(name, str(x.dtype).removeprefix("torch."))
            figures[name] = _figures(taken, self.nbytes[name], operations, copy, rates.get(unit))
            for peer, over in ((FP16, "over_float16"), (BF16, "over_bfloat16")):
                if peer in seconds:
                    figures[name][over] = seconds[peer] / taken
        return graphs.of_row(copy, figures)


def _figures(
    taken: float, nbytes: int, operations: int, copy: float | None, unit: float | None
) -> dict[str, float]:
    """Of a call: its rates, and their shares of a copy's GB/s and of the matrix unit's TFLOP/s or TOP/s."""
    flops = operations / taken / 1e12
    made = graphs.rates(taken, nbytes, copy) | {"tflops": flops}
    return made if unit is None else made | {"of_matrix_rate": flops / unit}


def _unit(name: str, dtype: str) -> str:
    """Which of `_rates` bounds a variant."""
    if name in (FP16, BF16):
        return "float16" if name == FP16 else "bfloat16"
    layout = layouts(*AWKWARD).get(name)
    return "int8" if layout is not None and all(tile.rounds_inputs for tile in layout.tiles) else dtype


def _bound(layout: LayerLayout, device: torch.device) -> BoundWeight:
    with device:
        return BoundWeight(_random(layout, device), on_gpu=True)


def _step(
    name: str, batch: int, dtype: str, rounds: int, device: torch.device, failed: dict[str, str]
) -> tuple[float, int, int] | None:
    """Seconds, bytes and operations of all linears of a decode step. None: it fails.

    Blocks beyond the first few read the weights of those again.
    """
    runs: list[Run] = []
    nbytes = operations = 0
    x = {columns: torch.randn(batch, columns, device=device).to(DTYPES[dtype]) for _, columns in BLOCK}
    for _ in range(OWN_BLOCKS):
        for out, columns in BLOCK:
            operations += 2 * batch * out * columns
            if name == dtype:
                weight = torch.randn(out, columns, device=device, dtype=DTYPES[dtype])
                runs.append(partial(torch.nn.functional.linear, x[columns], weight))
                nbytes += 2 * weight.numel()
            else:
                layout = layouts(out, columns)[name]
                runs.append(partial(_bound(layout, device).matmul, x[columns]))
                nbytes += layout.nbytes

    def step() -> None:
        for _ in range(BLOCKS // OWN_BLOCKS):
            for run in runs:
                run()

    seconds = graphs.times({name: Variant(0, [step])}, rounds, failed, f", {batch} token(s)").get(name)
    torch.cuda.empty_cache()
    turns = BLOCKS // OWN_BLOCKS
    return None if seconds is None else (seconds, turns * nbytes, turns * operations)


def _rates(rounds: int, device: torch.device, failed: dict[str, str]) -> dict[str, float]:
    """TFLOP/s, or TOP/s, of large products."""
    a, b = (torch.randn(RATE, RATE, device=device) for _ in range(2))
    small = [t.mul(20).clamp(-127, 127).to(torch.int8) for t in (a, b)]
    variants = {
        "float16": Variant(0, [partial(torch.mm, a.half(), b.half())]),
        "bfloat16": Variant(0, [partial(torch.mm, a.bfloat16(), b.bfloat16())]),
        "int8": Variant(0, [partial(torch._int_mm, small[0], small[1].T.contiguous().T)]),
    }
    seconds = graphs.times(variants, rounds, failed, ", large and square")
    return {name: 2 * RATE**3 / taken / 1e12 for name, taken in seconds.items()}


def _averages(rows: Sequence[Json], names: Sequence[str]) -> dict[str, float]:
    """Speed over cuBLAS float16, averaged over shapes and tokens."""
    speeds = {
        name: [
            row["variants"][name]["over_float16"]
            for row in rows
            if "over_float16" in row["variants"].get(name, ())
        ]
        for name in names
    }
    return {name: sum(of_name) / len(of_name) for name, of_name in speeds.items() if of_name}
