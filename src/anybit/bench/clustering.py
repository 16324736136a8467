"""`anybit bench quantize`: what quantizing spends its time on, beside others' code where there is some: clustering rows
by weighted k-means, nested codes, attention of many tokens in bfloat16.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from anybit.config import Json
from anybit.errors import InputError
from anybit.formats import tables
from anybit.kernels import cpu
from anybit.methods.anybit import BITS
from anybit.methods.compensation import BLOCK
from anybit.methods.nested_codes import Grids, fit, profile

Clusterer = Callable[[Tensor, Tensor, int], Tensor]  # weights and importances [n, m], bits -> rounded weights
# heads of queries and of keys, tokens, numbers of a head
ATTENTION = ((9, 3, 1024, 64), (9, 3, 2048, 64), (14, 2, 2048, 64), (16, 8, 2048, 128))
SHAPES = ((512, 576), (256, 1536), (128, 4096), (64, 11008))  # rows and weights per row of what is clustered


def quantize(rounds: int = 3) -> Json:
    """Clustering rows by weighted k-means on one thread, beside `flash1dkmeans` where it is installed; the codes of the
    method anybit, in a first pass and in one of descent; and attention on all threads, where there is a kernel for it.

    Rows are drawn as an LLM's are shaped: normal with a heavy tail, importances log-normal over some orders of
    magnitude. Rounds of both alternate; a rate is the median's.

    Raises:
        InputError: no native extension.
    """
    if not cpu.available():
        raise InputError(f"the native extension is not there: {cpu.why_not()}")
    peer = _peer()
    contenders: dict[str, Clusterer] = {"anybit": _ours} | ({} if peer is None else {"peer": peer})
    rows = [_measure(contenders, n, m, bits, rounds) for n, m in SHAPES for bits in (3, 4)]
    name = None if peer is None else "flash1dkmeans"
    return {
        "bench": "quantize",
        "peer": name,
        "rows": rows,
        "nested": _nested(),
        "codes": _codes(rounds),
        "attention": [_attention(*shape, rounds) for shape in ATTENTION] if cpu.has_bfloat16_dot() else [],
    }


def _measure(contenders: dict[str, Clusterer], n: int, m: int, bits: int, rounds: int) -> Json:
    weight, importance = _rows(n, m)
    row: Json = {"rows": n, "columns": m, "bits": bits}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            begun = time.perf_counter()
            result = run(weight, importance, bits)
            seconds[name].append(time.perf_counter() - begun)
            row[f"{name}_loss"] = float((importance * (result - weight).square()).double().sum())
    for name, times in seconds.items():
        row[f"{name}_weights_per_second"] = n * m / statistics.median(times)
    return row


def _ours(weight: Tensor, importance: Tensor, bits: int) -> Tensor:
    codes, centroids = cpu.kmeans(weight, importance, bits, bits, threads=1)
    return centroids.gather(1, codes.long())


def _nested() -> dict[str, float]:
    """Nested codes of 3 to 8 bits, one thread."""
    weight, importance = _rows(512, 4096)
    begun = time.perf_counter()
    cpu.kmeans(weight, importance, 3, 8, threads=1)
    return {"weights_per_second": weight.numel() / (time.perf_counter() - begun)}


def _codes(rounds: int) -> dict[str, float]:
    """Nested codes of all widths, one block of columns of 1024 rows: weights per second of every pass, one thread."""
    rows, generator = 1024, torch.Generator().manual_seed(0)
    weight, _ = _rows(rows, BLOCK)
    inputs = torch.randn(4 * BLOCK, BLOCK, generator=generator) * torch.rand(BLOCK, generator=generator).exp()
    hessian = inputs.T @ inputs / len(inputs)
    factor = torch.linalg.cholesky(torch.linalg.inv(hessian)).T.contiguous()
    grids = Grids(*fit(weight), tables.tables())
    kinds, scales, all_tables = grids.kinds, grids.scales, grids.tables
    weights, targets = profile(3.0).repeat(rows, 1), weight.expand(BITS, rows, BLOCK).contiguous()
    seconds: dict[str, list[float]] = {"first": [], "descent": []}
    for _ in range(rounds):
        begun = time.perf_counter()
        codes, _ = cpu.nested_codes(targets, factor, all_tables, kinds, scales, weights, threads=1)
        seconds["first"].append(time.perf_counter() - begun)
        errors = torch.stack([grids.values(codes, bits) for bits in range(1, BITS + 1)]) - weight
        slopes = errors @ hessian
        losses = (slopes * errors).sum(2).T.contiguous()
        begun = time.perf_counter()
        cpu.nested_descent(
            slopes, hessian, weight, all_tables, kinds, scales, weights, codes, errors, losses, threads=1
        )
        seconds["descent"].append(time.perf_counter() - begun)
    return {
        f"{name}_weights_per_second": weight.numel() / statistics.median(t) for name, t in seconds.items()
    }


def _attention(heads: int, shared: int, tokens: int, size: int, rounds: int) -> Json:
    """Causal attention of so many heads of queries and of keys, forward: milliseconds, and PyTorch's, in turns."""
    query, key, value = (torch.randn(1, h, tokens, size).bfloat16() for h in (heads, shared, shared))
    ways: dict[str, Callable[[], Any]] = {
        "anybit_ms": lambda: cpu.causal_attention(query, key, value, size**-0.5),
        "torch_ms": lambda: scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, run in ways.items():
            begun = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begun)
    shape = {"heads": heads, "key_heads": shared, "tokens": tokens, "head_size": size}
    return shape | {name: 1e3 * statistics.median(found[1:]) for name, found in seconds.items()}


def _rows(n: int, m: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(n, m, generator=generator)
    weight = normal * (1 + 2 * (torch.rand(n, m, generator=generator) < 0.01)) * 0.02
    return weight, torch.randn(n, m, generator=generator).mul(1.5).exp()


def _peer() -> Clusterer | None:
    """flash1dkmeans over all rows in one compiled loop, sorting and prefix sums included, as ours are."""
    try:
        from flash1dkmeans import numba_kmeans_1d_k_cluster as cluster
        from numba import njit
    except ImportError:
        return None

    @njit
    def rows_of(weight: Any, importance: Any, k: int) -> Any:
        out = np.empty(weight.shape, dtype=np.float32)
        for i in range(weight.shape[0]):
            order = np.argsort(weight[i])
            x, w = weight[i][order].astype(np.float64), importance[i][order].astype(np.float64)
            mass, moment, square = np.cumsum(w), np.cumsum(w * x), np.cumsum(w * x * x)
            centroids, borders = cluster(x, k, 50, mass, moment, square, 0, len(x))
            for c in range(k):
                out[i][order[borders[c] : borders[c + 1]]] = centroids[c]
        return out

    def run(weight: Tensor, importance: Tensor, bits: int) -> Tensor:
        return torch.from_numpy(rows_of(weight.numpy(), importance.numpy(), 2**bits))

    run(*_rows(2, 64), 3)  # compile
    return run
