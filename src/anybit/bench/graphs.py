"""How long something takes on a GPU: calls replayed as a CUDA graph, so that launching them from Python does not count.

The variants of a row take turns, and each call reads other memory than the last, more of it than the L2 cache holds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from anybit.config import Json
from anybit.errors import InputError

Run = Callable[[], object]
Save = Callable[[Json], None]  # what gets figures on the way


def nobody(figures: Json) -> None:
    """Keeps no figures on the way."""


LIMIT = "copy"  # the variant that measures the bandwidth
COPY = 1 << 30  # bytes copied to measure the bandwidth
CALLS = 10  # in a graph, at least
MOST_COPIES = 256
WARM_UP = 2
LAUNCH = 200_000  # cycles that the GPU is kept busy while a graph is launched
MINUTES = 8  # after which a part begins nothing more, so that it ends within nine


@dataclass
class Variant:
    """A way to do something: calls that each have memory of their own."""

    nbytes: int  # that one moves
    runs: list[Run]


class DeviceLostError(RuntimeError):
    """An error after which every call of this process to the GPU fails."""


@contextmanager
def noted(failed: dict[str, str], name: str) -> Iterator[None]:
    """Note why something fails, and go on: the others' figures count all the same.

    Raises:
        DeviceLostError: there is no going on.
    """
    try:
        yield
    except DeviceLostError:
        raise
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"
        print(f"{name} is left out: {failed[name]}", file=sys.stderr)
        if _lost():
            why = failed[name].splitlines()[0]
            raise DeviceLostError(f"after {name} ({why}) every call to the GPU fails") from error


def _lost() -> bool:
    """Whether the GPU answers no more."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def check_all(failed: dict[str, str]) -> None:
    """What a run that only checks ends with.

    Raises:
        InputError: something failed.
    """
    if failed:
        raise InputError("; ".join(f"{name} fails: {why}" for name, why in failed.items()))


def late(begun: float) -> bool:
    """Whether a part that began then, by `time.monotonic`, is to begin nothing more."""
    return time.monotonic() - begun > 60 * MINUTES


def cuda() -> torch.device:
    """The GPU.

    Raises:
        InputError: there is none.
    """
    if not torch.cuda.is_available():
        raise InputError("no CUDA device: nothing to time; --small compares with the reference only")
    return torch.device("cuda", torch.cuda.current_device())


def any_device() -> torch.device:
    """The GPU, or where Triton's interpreter runs."""
    return cuda() if torch.cuda.is_available() else torch.device("cpu")


def copy(device: torch.device) -> Variant:
    """A copy within the GPU's memory: the measure of bandwidth.

    A kernel that inverts bits. `copy_` becomes a graph's memory node, which moves two thirds of that on an H200.
    """
    source = torch.zeros(COPY // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return Variant(2 * COPY, [lambda: torch.bitwise_not(source, out=target)])


def copies(nbytes: int) -> int:
    """Of what a call reads, so that four times the L2 cache lies between two uses."""
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return min(MOST_COPIES, max(1, -(-4 * cache // nbytes)))


def times(
    variants: dict[str, Variant], rounds: int, failed: dict[str, str], where: str = ""
) -> dict[str, float]:
    """Median seconds of a call; the variants' graphs take turns.

    Args:
        failed: gets the variants that fail, which are left out, and why.
        where: what follows their names there.
    """
    graphs = {}
    for name, variant in variants.items():
        with noted(failed, name + where):
            graphs[name] = _graph(variant.runs)
    seconds: dict[str, list[float]] = {name: [] for name in graphs}
    for i in range(rounds + WARM_UP):
        for name in list(seconds):
            with noted(failed, name + where):
                taken = _replayed(*graphs[name])
                if i >= WARM_UP:
                    seconds[name].append(taken)
            if name + where in failed:
                del seconds[name]
    return {name: statistics.median(of_variant) for name, of_variant in seconds.items()}


def copied(seconds: dict[str, float]) -> float | None:
    """GB/s of the copy, which is taken from among the times. None: it failed."""
    taken = seconds.pop(LIMIT, None)
    return None if taken is None else 2 * COPY / taken / 1e9


def rates(taken: float, nbytes: int, copy: float | None) -> dict[str, float]:
    """Of a call: microseconds, GB/s, and its share of a copy's."""
    made = {"us": 1e6 * taken, "gb_per_s": nbytes / taken / 1e9}
    return made if copy is None else made | {"of_copy": made["gb_per_s"] / copy}


def of_row(copy: float | None, variants: Json) -> Json:
    """What the figures of a row end with; a copy that failed is not among them."""
    return ({} if copy is None else {"copy_gb_per_s": copy}) | {"variants": variants}


def _replayed(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Seconds of one of its calls."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(LAUNCH)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def _graph(runs: list[Run]) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of calls with each run's memory in turn, and how many calls."""
    turns = -(-CALLS // len(runs))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles what is captured
        for run in runs:
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(turns):
            for run in runs:
                run()
    return graph, turns * len(runs)
