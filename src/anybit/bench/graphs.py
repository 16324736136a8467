"""How long something takes on a GPU: calls replayed as a CUDA graph, so that launching them from Python does not count.

The variants of a row take turns, and each call reads other memory than the last, more of it than the L2 cache holds.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from anybit.errors import InputError

Run = Callable[[], object]
Save = Callable[[dict[str, Any]], None]  # what gets figures on the way


def nobody(figures: dict[str, Any]) -> None:
    """Keeps no figures on the way."""


COPY = 1 << 30  # bytes copied to measure the bandwidth
CALLS = 10  # in a graph, at least
MOST_COPIES = 256
WARM_UP = 2
LAUNCH = 200_000  # cycles that the GPU is kept busy while a graph is launched


@dataclass
class Variant:
    """A way to do something: calls that each have memory of their own."""

    nbytes: int  # that one moves
    runs: list[Run]


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
    """A copy within the GPU's memory: the measure of bandwidth."""
    source = torch.empty(COPY, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Variant(2 * COPY, [lambda: target.copy_(source)])


def copies(nbytes: int) -> int:
    """Of what a call reads, so that four times the L2 cache lies between two uses."""
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return min(MOST_COPIES, max(1, -(-4 * cache // nbytes)))


def times(variants: dict[str, Variant], rounds: int) -> dict[str, float]:
    """Median seconds of a call; the variants' graphs take turns. A variant that fails is left out, and said so."""
    graphs = {}
    for name, variant in variants.items():
        try:
            graphs[name] = _graph(variant.runs)
        except Exception as error:  # the others' figures count all the same
            print(f"{name} fails and is left out: {error}", file=sys.stderr)
    seconds: dict[str, list[float]] = {name: [] for name in graphs}
    for i in range(rounds + WARM_UP):
        for name, (graph, calls) in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(LAUNCH)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if i >= WARM_UP:
                seconds[name].append(begin.elapsed_time(end) / 1e3 / calls)
    return {name: statistics.median(of_variant) for name, of_variant in seconds.items()}


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
