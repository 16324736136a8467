"""Products of every stored format on a GPU, beside cuBLAS and a copy of the GPU's memory; random weights of LLM shapes.

Correctness comes first: a variant that differs from the reference at an awkward shape is an error, not a figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anybit.bench import graphs
from anybit.bench.graphs import Run, Save, Variant, nobody
from anybit.bench.kernels import FAST, layouts, random_weight
from anybit.errors import InputError
from anybit.kernels import reference
from anybit.kernels.dispatch import Prepared
from anybit.tensors import PackedWeight, stored_bytes, unpack

SHAPES = ((4096, 4096), (11008, 4096), (4096, 11008), (14336, 4096), (4096, 14336))  # out, in
TOKENS = (1, 2, 4, 8, 16, 64, 256, 512, 1024)
GEMM = ("W4", "W8", "W4A8", "W8A8", "MixLLM p10", "W4A4", "Atom W4A4", "codebook 4", "by channel 4", "2/4/16")
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
CHECKED_TOKENS = (
    1,
    17,
    100,
    300,
)  # one for every kernel that numbers of tokens choose; interpreted, the first two
LIMIT, FP16, BF16 = "copy", "cuBLAS float16", "cuBLAS bfloat16"
RATE = 8192  # rows and columns of the products that measure the matrix units
ERROR = 2e-3  # of a product's norm: float16's outputs, and weights that meet the tensor cores


def gemv(
    rounds: int = 20, small: bool = False, only: Sequence[str] = (), save: Save = nobody
) -> dict[str, Any]:
    """One token, every layout: microseconds, GB/s of stored bytes, share of a copy's, speed over cuBLAS.

    Args:
        only: variants whose name begins so. Default: all.
        small: check correctness only; runs in Triton's interpreter too.
        save: gets the figures after every row.

    Raises:
        InputError: without a GPU, unless small; a variant that there is not; a kernel that is wrong.
    """
    return _run(SHAPES, (1,), _names(only, tuple(layouts(*AWKWARD))), rounds, small, save)


def gemm(
    rounds: int = 10, small: bool = False, only: Sequence[str] = (), save: Save = nobody
) -> dict[str, Any]:
    """Several tokens, the formats of serving; as `gemv`, with TFLOP/s and the average speed over `TOKENS`."""
    return _run(SHAPES[1:3], TOKENS, _names(only, GEMM), rounds, small, save)


def decode(
    rounds: int = 10, small: bool = False, only: Sequence[str] = (), save: Save = nobody
) -> dict[str, Any]:
    """Tokens per second of all linears of a Llama-7B, one step as a CUDA graph, at batch 1, 16 and 128."""
    names = _names(only, DECODE)
    checked = _check(names)
    if small:
        return {"checked": checked, "rows": []}
    device = graphs.cuda()
    rows: list[dict[str, Any]] = []
    found = {"device": torch.cuda.get_device_name(device), "checked": checked, "rows": rows}
    for batch in (1, 16, 128):
        steps = {name: _step(name, batch, rounds, device) for name in ("float16", *names)}
        figures = {name: step for name, step in steps.items() if step is not None}
        for figure in figures.values():
            figure["over_float16"] = figures["float16"]["us"] / figure["us"]
        rows.append({"tokens": batch, "variants": figures})
        save(found)
    return found


def _names(only: Sequence[str], there: Sequence[str]) -> list[str]:
    names = [name for name in there if not name.endswith(FAST)]  # an option of the CPU's kernels
    for begin in only:
        if not any(name.startswith(begin) for name in names):
            raise InputError(f"no variant begins with {begin!r}: there are {', '.join(names)}")
    return [name for name in names if not only or name.startswith(tuple(only))]


def _run(
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int],
    names: Sequence[str],
    rounds: int,
    small: bool,
    save: Save,
) -> dict[str, Any]:
    checked = _check(names)
    if small:
        return {"checked": checked, "rows": []}
    device = graphs.cuda()
    rows: list[dict[str, Any]] = []
    found = {"device": torch.cuda.get_device_name(device), "checked": checked, "rows": rows}
    found["matrix_rates"] = _rates(rounds, device)
    for shape in shapes:
        for m in tokens:
            rows.append(
                {"out": shape[0], "in": shape[1], "tokens": m} | _row(shape, m, names, rounds, device)
            )
            torch.cuda.empty_cache()
            found["averages"] = _averages(rows, names)
            save(found)
    return found


def _check(names: Sequence[str]) -> dict[str, float]:
    """The largest error of every variant at awkward shapes.

    Raises:
        InputError: one that is too large.
    """
    device = graphs.any_device()
    errors: dict[str, float] = {}
    for name in names:
        weight = _random(layouts(*AWKWARD)[name], device)
        prepared, readable = Prepared(weight, on_gpu=True), unpack(_moved(weight, "cpu"))
        for tokens in CHECKED_TOKENS if device.type == "cuda" else CHECKED_TOKENS[:2]:
            x = torch.randn(tokens, AWKWARD[1], device=device).half()
            wanted = reference.int_matmul(x.cpu().float(), readable).double()
            made = prepared.matmul(x).cpu().double()
            error = float((made - wanted).norm() / wanted.norm())
            if not error < ERROR:
                raise InputError(f"{name}, {AWKWARD}, {tokens} token(s): {error:.2g} off; do not use it")
            errors[name] = max(error, errors.get(name, 0.0))
    return errors


def _random(layout: dict[str, Any], device: torch.device | str) -> PackedWeight:
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


def _row(
    shape: tuple[int, int], tokens: int, names: Sequence[str], rounds: int, device: torch.device
) -> dict[str, Any]:
    out, columns = shape
    x = torch.randn(tokens, columns, device=device).half()
    variants = {LIMIT: graphs.copy(device), FP16: _dense(x, out), BF16: _dense(x.bfloat16(), out)}
    described = layouts(out, columns)
    variants |= {name: _quantized(described[name], x) for name in names if name in described}
    seconds = graphs.times(variants, rounds)
    copy = 2 * graphs.COPY / seconds.pop(LIMIT) / 1e9
    figures = {}
    for name, taken in seconds.items():
        rate = variants[name].nbytes / taken / 1e9
        figures[name] = {
            "us": 1e6 * taken,
            "gb_per_s": rate,
            "of_copy": rate / copy,
            "tflops": 2 * tokens * out * columns / taken / 1e12,
            "over_float16": seconds[FP16] / taken,
            "over_bfloat16": seconds[BF16] / taken,
        }
    return {"copy_gb_per_s": copy, "variants": figures}


def _dense(x: Tensor, out: int) -> Variant:
    nbytes = out * x.shape[1] * x.element_size()
    weights = [
        torch.randn(out, x.shape[1], device=x.device, dtype=x.dtype) for _ in range(graphs.copies(nbytes))
    ]
    return Variant(nbytes, [partial(torch.nn.functional.linear, x, weight) for weight in weights])


def _quantized(layout: dict[str, Any], x: Tensor) -> Variant:
    nbytes = stored_bytes(layout)
    return Variant(
        nbytes, [partial(_prepared(layout, x.device).matmul, x) for _ in range(graphs.copies(nbytes))]
    )


def _prepared(layout: dict[str, Any], device: torch.device) -> Prepared:
    with device:
        return Prepared(_random(layout, device))


def _step(name: str, batch: int, rounds: int, device: torch.device) -> dict[str, Any] | None:
    """All linears of a decode step; blocks beyond the first few read the weights of those again. None: it fails."""
    runs: list[Run] = []
    nbytes = 0
    x = {columns: torch.randn(batch, columns, device=device).half() for _, columns in BLOCK}
    for _ in range(OWN_BLOCKS):
        for out, columns in BLOCK:
            if name == "float16":
                weight = torch.randn(out, columns, device=device).half()
                runs.append(partial(torch.nn.functional.linear, x[columns], weight))
                nbytes += 2 * weight.numel()
            else:
                layout = layouts(out, columns)[name]
                runs.append(partial(_prepared(layout, device).matmul, x[columns]))
                nbytes += stored_bytes(layout)

    def step() -> None:
        for _ in range(BLOCKS // OWN_BLOCKS):
            for run in runs:
                run()

    seconds = graphs.times({name: Variant(0, [step])}, rounds).get(name)
    if seconds is None:
        return None
    nbytes *= BLOCKS // OWN_BLOCKS
    return {"us": 1e6 * seconds, "tokens_per_s": batch / seconds, "gb_per_s": nbytes / seconds / 1e9}


def _rates(rounds: int, device: torch.device) -> dict[str, float]:
    """TFLOP/s, or TOP/s, of large products."""
    a, b = (torch.randn(RATE, RATE, device=device) for _ in range(2))
    small = [t.mul(20).clamp(-127, 127).to(torch.int8) for t in (a, b)]
    variants = {
        "float16": Variant(0, [partial(torch.mm, a.half(), b.half())]),
        "bfloat16": Variant(0, [partial(torch.mm, a.bfloat16(), b.bfloat16())]),
        "int8": Variant(0, [partial(torch._int_mm, small[0], small[1].T.contiguous().T)]),
    }
    return {name: 2 * RATE**3 / taken / 1e12 for name, taken in graphs.times(variants, rounds).items()}


def _averages(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, float]:
    """Speed over cuBLAS float16, averaged over shapes and tokens."""
    speeds = {
        name: [row["variants"][name]["over_float16"] for row in rows if name in row["variants"]]
        for name in names
    }
    return {name: sum(of_name) / len(of_name) for name, of_name in speeds.items() if of_name}
