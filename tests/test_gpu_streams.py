"""Launches that do not wait for each other. Without a GPU streams are sets: of what has surely happened before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from anybit.kernels.gpu import streams
from anybit.kernels.gpu.streams import concurrently

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


class Stream:
    current: Stream

    def __init__(self, device: torch.device | None = None) -> None:
        self.before: set[str] = set()

    def wait_stream(self, other: Stream) -> None:
        self.before |= other.before


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], set[str]]:
    """Launches something of a name on the current stream: what it comes after."""

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        outer, Stream.current = Stream.current, stream
        try:
            yield
        finally:
            Stream.current = outer

    Stream.current = Stream()
    monkeypatch.setattr(streams, "_pools", streams._Pools())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream.current)

    def made(name: str) -> set[str]:
        before = set(Stream.current.before)
        Stream.current.before.add(name)
        return before

    return made


def test_runs_wait_for_what_was_before_and_not_for_each_other(launch: Callable[[str], set[str]]) -> None:
    seen: dict[str, set[str]] = {}

    def run(name: str, *inner: str) -> None:
        seen[name] = launch(name)
        concurrently(CUDA, *(partial(run, other) for other in inner))

    launch("inputs")
    for _ in range(2):
        launch("more")
        concurrently(CUDA, partial(run, "a", "b", "c"), partial(run, "d", "e", "f"), partial(run, "g"))
        before = {"inputs", "more"}
        assert seen["a"] == seen["d"] == seen["g"] == before
        assert seen["b"] == seen["c"] == {"a", *before}
        assert seen["e"] == seen["f"] == {"d", *before}
        assert launch("sum") == {*seen, *before}
        Stream.current.before = {"inputs"}
        for stream in streams._pools.streams[CUDA]:
            stream.before.clear()
    assert len(streams._pools.streams[CUDA]) == 4  # used again


def test_what_follows_an_error_waits_too(launch: Callable[[str], set[str]]) -> None:
    with pytest.raises(ZeroDivisionError):
        concurrently(CUDA, lambda: None, lambda: launch("a"), lambda: 1 // 0)
    assert "a" in launch("b") and streams._pools.taken[CUDA] == 0


def test_one_after_the_other_without_streams() -> None:
    made: list[int] = []
    concurrently(torch.device("cpu"), partial(made.append, 0), partial(made.append, 1))
    assert made == [0, 1]
