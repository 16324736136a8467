"""Quantizing on a GPU: GPTQ and nested k-means of layers of an LLM's shapes, and what a model of them would take.

How near the results are to the CPU's is measured in the same run: GPTQ's to the same method there, k-means' to an exact
one in plain PyTorch, and to the native one where that is built.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anybit.bench import graphs
from anybit.bench.graphs import Save, nobody
from anybit.calibration.stats import GradientStats, LinearStats
from anybit.config import Json, Options
from anybit.errors import InputError
from anybit.formats import GroupInt
from anybit.kernels import cpu, dispatch, reference
from anybit.methods import METHODS, gptq, kmeans
from anybit.methods.any_precision import AnyPrecision
from anybit.methods.gptq import GPTQ
from anybit.methods.rtn import RTN

BLOCKS = 32
LLAMA_7B = {(4096, 4096): 4, (11008, 4096): 2, (4096, 11008): 1}  # (out, in) -> layers of a block
WIDTHS = (3, 4, 5, 6, 7, 8)
TIMED = (RTN(bits=4), GPTQ(bits=4), AnyPrecision(widths=WIDTHS))
COMPARED = 8  # rows that are clustered exactly, a few seconds each
LEAST_SHARE = 2.0**-24  # of importance, where a row's mean is 1, as k-means has it
TOLERANCES = {"GPTQ": 1e-3, "k-means": 1e-3, "cut": 2e-2}  # of the weighted error, relative: seeds that
# differ in a code are cut elsewhere, with more luck or less

Clusters = tuple[Tensor, dict[int, Tensor]]  # as `kmeans.cluster` makes them


def quantize(rounds: int = 3, small: bool = False, save: Save = nobody) -> Json:
    """Times of 4-bit GPTQ and of k-means at 3 bits with cuts up to 8, on the GPU.

    Weights are drawn as an LLM's are shaped, Hessians are of correlated inputs. Times are medians in ms, the first call
    left out.

    Args:
        rounds: how often each is timed.
        small: tiny matrices instead, also without a GPU (in Triton's interpreter): whether all of it runs.
        save: gets the figures after every step: a shape's clusters, a layer, a method, a comparison.

    Returns:
        `gptq`: ms of a layer [4096, 4096], `plain_ms` with the column loop in PyTorch, and how many codes differ
        (`codes_differ`). `kmeans`: a row per shape, `model_seconds` of all layers of a 7B Llama, `ns_per_weight`.
        `seconds_per_billion`: of whole methods, by name. `agreement`: a row for what is compared with the CPU's, the
        share of `equal_codes`, the weighted `error` relative to the CPU's (0: the same), its `tolerance`. What `failed`
        (and why) or was `left_out` for time is not there, nor what needs it.

    Raises:
        InputError: no CUDA; if small, something fails.
    """
    if not small and not torch.cuda.is_available():
        raise InputError("this benchmark needs a GPU: PyTorch finds no CUDA here")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = {(2, 48): 1} if small else LLAMA_7B
    square = (2, 48) if small else (4096, 4096)
    rounds = 1 if small else rounds
    begun, clusters = time.monotonic(), {}
    kmeans: Json = {"rows": []}
    speeds: dict[str, float] = {}
    agreement: list[Json] = []
    found: Json = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "Triton's interpreter",
        "kmeans": kmeans,
        "seconds_per_billion": speeds,
        "agreement": agreement,
        "failed": {},
        "left_out": [],
    }

    def step(name: str, run: Callable[[], None]) -> None:
        if not small and graphs.late(begun):
            found["left_out"].append(name)
            return
        with graphs.noted(found["failed"], name):
            run()
        save(found)

    def cluster(shape: tuple[int, int]) -> None:
        row, clusters[shape] = _kmeans(shape, shapes[shape], rounds, device)
        kmeans["rows"].append(row)
        if len(kmeans["rows"]) == len(shapes):
            weights = sum(out * in_ * count for (out, in_), count in shapes.items())
            block_ms = sum(row["ms"] * row["layers"] for row in kmeans["rows"])
            kmeans["model_seconds"] = block_ms * BLOCKS / 1e3
            kmeans["ns_per_weight"] = block_ms * 1e6 / weights

    def compare() -> None:
        for row in _kmeans_beside_cpu(square, clusters.get(square), device):
            agreement.append(row)
            save(found)

    save(found)
    for shape in shapes:
        step(f"k-means, {shape[0]}x{shape[1]}", partial(cluster, shape))
    step("GPTQ", lambda: found.update(gptq=_gptq(square, rounds, device)))
    for options in TIMED if device == "cuda" else TIMED[:2]:  # the last one is the native kernel's on the CPU
        step(options.name, partial(_method, options, square, rounds, device, speeds))
    step("GPTQ beside the CPU's", lambda: agreement.append(_gptq_beside_cpu(square, device)))
    step("k-means beside the CPU's", compare)
    if small:
        graphs.check_all(found["failed"])
    return found


def _gptq(shape: tuple[int, int], rounds: int, device: str) -> Json:
    """A whole layer, Cholesky factor, clip search and assembly included."""
    weight, stats = _layer(shape, device)
    spec = GPTQ(bits=4).resolve().layer_spec()
    made = gptq.quantize(weight, stats, spec)
    ms = _median_ms(lambda: gptq.quantize(weight, stats, spec), rounds, device)
    with _blocks_by(reference.gptq_block):
        plain = gptq.quantize(weight, stats, spec)
        plain_ms = _median_ms(lambda: gptq.quantize(weight, stats, spec), 1, device)
    differ = int((made.dequantize() != plain.dequantize()).sum())
    return {"shape": list(shape), "ms": ms, "plain_ms": plain_ms, "codes_differ": differ}


@contextmanager
def _blocks_by(kernel: Callable[..., tuple[Tensor, Tensor]]) -> Iterator[None]:
    """GPTQ's blocks by another function."""
    usual = dispatch.gptq_block
    try:
        dispatch.gptq_block = kernel
        yield
    finally:
        dispatch.gptq_block = usual


def _gptq_beside_cpu(shape: tuple[int, int], device: str) -> Json:
    """The kernel's results and those of the same method on the CPU, its factorisation included."""
    from anybit.kernels.gpu.gptq import gptq_block

    weight, stats = _layer(shape, device)
    spec = GPTQ(bits=4).resolve().layer_spec()
    assert stats.hessian is not None
    with _blocks_by(gptq_block):
        ours = gptq.quantize(weight, stats, spec)
    there = LinearStats(stats.tokens, stats.squares.cpu(), stats.hessian.cpu())
    theirs = gptq.quantize(weight.cpu(), there, spec)
    codes, errors = [], []
    for made in (ours, theirs):
        (tile,) = made.tiles
        assert isinstance(tile, GroupInt)
        codes.append(tile.codes.cpu())
        error = weight.double() - made.dequantize().to(device).double()
        errors.append(float((error @ stats.hessian.double() * error).sum()))
    return _compared("GPTQ, 4 bits", "the CPU", codes, errors, TOLERANCES["GPTQ"])


def _kmeans_beside_cpu(shape: tuple[int, int], nested: Clusters | None, device: str) -> Iterator[Json]:
    """Some rows of one width, and of the nested clusters of all rows the seed and the widest cut."""
    weight, importance = (t[:COMPARED] for t in _rows(shape, device))
    one = _clustered(weight, importance, 4, 4, device)
    for seed, bits, ours in ((4, 4, one), (WIDTHS[0], WIDTHS[-1], nested)):
        if ours is None:
            continue
        given = weight.cpu(), importance.cpu(), seed, bits
        theirs = {"exact k-means": exact(*given)}
        if cpu.available():
            theirs["the native k-means"] = kmeans.cluster(*given)
        for width in dict.fromkeys((seed, bits)):
            what = f"k-means, {width} bits" + (f", cut from {seed}" if width > seed else "")
            tolerance = TOLERANCES["cut" if width > seed else "k-means"]
            for peer, made in theirs.items():
                both = (ours[0][:COMPARED].cpu(), ours[1][width][:COMPARED].cpu()), (made[0], made[1][width])
                codes = [c.long() >> (bits - width) for c, _ in both]
                errors = [
                    float((importance.cpu() * (table.gather(1, c) - weight.cpu()).square()).double().sum())
                    for c, (_, table) in zip(codes, both)
                ]
                yield _compared(what, peer, codes, errors, tolerance)


def _compared(what: str, peer: str, codes: list[Tensor], errors: list[float], tolerance: float) -> Json:
    """Ours beside theirs."""
    return {
        "what": what,
        "beside": peer,
        "codes": codes[0].numel(),
        "equal_codes": float((codes[0] == codes[1]).double().mean()),
        "error": errors[0] / errors[1] - 1 if errors[1] else float(errors[0] > 0),
        "tolerance": tolerance,
    }


def exact(weight: Tensor, importance: Tensor, seed_bits: int, bits: int) -> Clusters:
    """What `kmeans.cluster` comes near to, in plain PyTorch: the best of all intervals, then of all cuts."""
    widths = range(seed_bits, bits + 1)
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    tables = {b: torch.empty(len(weight), 2**b) for b in widths}
    place = torch.arange(weight.shape[1])
    for row, (values, counts) in enumerate(zip(weight.double(), importance.double())):
        value, order = values.sort()
        share = (counts / counts.mean()).clamp(min=LEAST_SHARE)[order]
        origin = value.mean()  # so that moments lose no digits
        mass, moment = (
            torch.nn.functional.pad(t.cumsum(0), (1, 0)) for t in (share, share * (value - origin))
        )
        edges = _best_intervals(mass, moment, 2**seed_bits)
        for b in widths:
            if b > seed_bits:
                edges = _best_cuts(mass, moment, edges)
            within, sums = mass[edges].diff(), moment[edges].diff()
            means = torch.where(within > 0, sums / within + origin, -torch.inf).cummax(0).values
            tables[b][row] = means.float()
        codes[row, order] = torch.searchsorted(edges[1:-1].contiguous(), place, right=True).to(torch.uint8)
    return codes, tables


def _taken(mass: Tensor, moment: Tensor) -> Tensor:
    """What a cluster takes off the squared error."""
    return torch.where(mass > 0, moment.square() / mass, 0.0)


def _best_intervals(mass: Tensor, moment: Tensor, clusters: int) -> Tensor:
    """Edges, int64 [clusters + 1], by dynamic programming over all boundaries."""
    taken = _taken(mass - mass[:, None], moment - moment[:, None])  # [begin, end]
    taken.masked_fill_(torch.ones_like(taken, dtype=torch.bool).tril(-1), -torch.inf)
    best, begins = taken[0], []
    for _ in range(1, clusters):
        best, begin = (best[:, None] + taken).max(0)
        begins.append(begin)
    at = torch.tensor(len(mass) - 1)
    edges = [at]
    for begin in reversed(begins):
        at = begin[at]
        edges.append(at)
    return torch.stack([torch.zeros_like(at), *reversed(edges)])


def _best_cuts(mass: Tensor, moment: Tensor, edges: Tensor) -> Tensor:
    """Every cluster cut in two; what cannot be cut leaves its second half empty."""
    made = [int(edges[0])]
    for first, last in zip(edges.tolist(), edges[1:].tolist()):
        at = slice(first + 1, last)
        halves = _taken(mass[at] - mass[first], moment[at] - moment[first])
        halves += _taken(mass[last] - mass[at], moment[last] - moment[at])
        made += [first + 1 + int(halves.argmax()) if len(halves) else last, last]
    return torch.tensor(made)


def _kmeans(shape: tuple[int, int], layers: int, rounds: int, device: str) -> tuple[Json, Clusters]:
    """Figures of a layer's nested clusters, and these."""
    weight, importance = _rows(shape, device)
    made: list[Clusters] = []

    def run() -> None:
        made[:] = [_clustered(weight, importance, WIDTHS[0], WIDTHS[-1], device)]

    if device == "cuda":
        run()
    ms = _median_ms(run, rounds, device)
    row = {"shape": list(shape), "layers": layers, "ms": ms, "ns_per_weight": ms * 1e6 / weight.numel()}
    return row, made[0]


def _clustered(weight: Tensor, importance: Tensor, seed_bits: int, bits: int, device: str) -> Clusters:
    """By the GPU's kernels, interpreted where there is none."""
    if device == "cuda":
        return kmeans.cluster(weight, importance, seed_bits, bits)
    from anybit.kernels.gpu import kmeans as interpreted

    codes, tables = interpreted.kmeans(weight, importance, seed_bits, bits)
    widths = range(seed_bits, bits + 1)
    return codes, dict(zip(widths, tables.split([2**b for b in widths], dim=1)))


def _method(
    options: Options, shape: tuple[int, int], rounds: int, device: str, speeds: dict[str, float]
) -> None:
    """Seconds per billion weights of a method as a run calls it, without calibration, packing and files."""
    weight, moments = _layer(shape, device)
    method, spec = METHODS[options.name], options.resolve().layer_spec()
    wanted = method.statistics(spec.options)
    stats = GradientStats(1, 1, _rows(shape, device)[1]) if wanted.fisher else moments if wanted else None

    def call() -> None:
        method.quantize(weight, stats, spec)

    call()
    speeds[options.name] = _median_ms(call, rounds, device) * 1e6 / weight.numel()


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
