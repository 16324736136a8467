"""Quantizing on a GPU: GPTQ and nested k-means of layers of an LLM's shapes, and what a model of them would take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anybit.errors import InputError
from anybit.kernels import dispatch, reference
from anybit.methods import gptq, kmeans, registry, squeezellm
from anybit.spec import LayerSpec
from anybit.stats import GradientStats, LinearStats

BLOCKS = 32
LLAMA_7B = {(4096, 4096): 4, (11008, 4096): 2, (4096, 11008): 1}  # (out, in) -> layers of a block
WIDTHS = (3, 4, 5, 6, 7, 8)


def quantize(rounds: int = 3, small: bool = False) -> dict[str, Any]:
    """Times of 4-bit GPTQ and of k-means at 3 bits with cuts up to 8, on the GPU.

    Weights are drawn as an LLM's are shaped, Hessians are of correlated inputs. Times are medians in ms, the first call
    left out.

    Args:
        rounds: how often each is timed.
        small: tiny matrices instead, also without a GPU (in Triton's interpreter): whether all of it runs.

    Returns:
        `gptq`: ms of a layer [4096, 4096], `plain_ms` with the column loop in PyTorch, and how many codes differ
        (`codes_differ`). `kmeans`: a row per shape, `model_seconds` of all layers of a 7B Llama, `ns_per_weight`.
        `seconds_per_billion`: of whole methods, by name.

    Raises:
        InputError: no CUDA.
    """
    if not small and not torch.cuda.is_available():
        raise InputError("this benchmark needs a GPU: PyTorch finds no CUDA here")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = {(2, 48): 1} if small else LLAMA_7B
    square = (2, 48) if small else (4096, 4096)
    rows = [_kmeans(shape, count, rounds, device) for shape, count in shapes.items()]
    weights = sum(out * in_ * count for (out, in_), count in shapes.items())
    block_ms = sum(row["ms"] * row["layers"] for row in rows)
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "Triton's interpreter",
        "gptq": _gptq(square, rounds, device),
        "kmeans": {
            "rows": rows,
            "model_seconds": block_ms * BLOCKS / 1e3,
            "ns_per_weight": block_ms * 1e6 / weights,
        },
        "seconds_per_billion": _methods(square, rounds, device),
    }


def _gptq(shape: tuple[int, int], rounds: int, device: str) -> dict[str, Any]:
    """A whole layer, Cholesky factor, clip search and assembly included."""
    weight, stats = _layer(shape, device)
    spec = LayerSpec.uniform(4, clip=True)
    made = gptq.quantize(weight, stats, spec)
    ms = _median_ms(lambda: gptq.quantize(weight, stats, spec), rounds, device)
    fast = dispatch.gptq_block
    try:
        dispatch.gptq_block = reference.gptq_block
        plain = gptq.quantize(weight, stats, spec)
        plain_ms = _median_ms(lambda: gptq.quantize(weight, stats, spec), 1, device)
    finally:
        dispatch.gptq_block = fast
    differ = int((made.dequantize() != plain.dequantize()).sum())
    return {"shape": list(shape), "ms": ms, "plain_ms": plain_ms, "codes_differ": differ}


def _kmeans(shape: tuple[int, int], layers: int, rounds: int, device: str) -> dict[str, Any]:
    weight, importance = _rows(shape, device)

    def run() -> Any:
        if device == "cpu":
            from anybit.kernels.gpu import kmeans as interpreted

            return interpreted.kmeans(weight, importance, WIDTHS[0], WIDTHS[-1])
        return kmeans.cluster(weight, importance, WIDTHS[0], WIDTHS[-1])

    run()
    ms = _median_ms(run, rounds, device)
    return {"shape": list(shape), "layers": layers, "ms": ms, "ns_per_weight": ms * 1e6 / weight.numel()}


def _methods(shape: tuple[int, int], rounds: int, device: str) -> dict[str, float]:
    """Seconds per billion weights of methods as a run calls them, without calibration, packing and files."""
    weight, stats = _layer(shape, device)
    fisher = GradientStats(1, 1, _rows(shape, device)[1])
    calls: dict[str, Callable[[], Any]] = {
        "rtn": lambda: registry.quantize("rtn", weight, None, LayerSpec.uniform(4)),
        "gptq": lambda: registry.quantize("gptq", weight, stats, LayerSpec.uniform(4, clip=True)),
        "any-precision": lambda: squeezellm.quantize(weight, fisher, LayerSpec(widths=WIDTHS)),
    }
    if device == "cpu":
        del calls["any-precision"]  # the native kernel's
    made = {}
    for name, call in calls.items():
        call()
        made[name] = _median_ms(call, rounds, device) * 1e6 / weight.numel()
    return made


def _rows(shape: tuple[int, int], device: str) -> tuple[Tensor, Tensor]:
    """Weights, normal with a heavy tail, and importances, log-normal over some orders of magnitude."""
    generator = torch.Generator(device).manual_seed(0)
    normal, importance = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
    tail = torch.rand(shape, generator=generator, device=device) < 0.01
    return normal * (1 + 2 * tail) * 0.02, importance.mul(1.5).exp()


def _layer(shape: tuple[int, int], device: str) -> tuple[Tensor, LinearStats]:
    """Weights, and second moments of inputs that are correlated and of unlike sizes."""
    weight, _ = _rows(shape, device)
    n = shape[1]
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(4 * n, n, generator=generator, device=device)
    x = x + x.roll(1, 1)
    stats = LinearStats.empty(n, True, device)
    stats.add(x * torch.randn(n, generator=generator, device=device).exp())
    return weight, stats


def _median_ms(call: Callable[[], Any], rounds: int, device: str) -> float:
    times = []
    for _ in range(rounds):
        _wait(device)
        begun = time.perf_counter()
        call()
        _wait(device)
        times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
