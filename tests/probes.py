"""What tests watch a run with: its progress, the bytes that it stores, a disk that fills, this machine's kernels."""

import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from anybit.artifact import writer
from anybit.kernels import cpu
from anybit.progress import Silent


class Recorder(Silent):
    """Progress as it was told: lines, and of each task the steps done and expected."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.done: dict[str, list[int]] = {}

    def say(self, text: str) -> None:
        self.said.append(text)

    def task(self, description: str, total: int) -> Callable[[int], None]:
        self.done[description] = [0, total]

        def advance(steps: int) -> None:
            self.done[description][0] += steps

        return advance


def stored(path: Path) -> dict[str, Tensor]:
    """All tensors of an artifact by name."""
    return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}


def digests(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.iterdir())}


def stop_at(monkeypatch: pytest.MonkeyPatch, shard: int) -> None:
    """Let the disk be full at the shard of this number, counted from 1."""
    count = itertools.count(1)

    def save(*arguments: Any, **options: Any) -> None:
        if next(count) == shard:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        original(*arguments, **options)

    original = writer.save_file
    monkeypatch.setattr(writer, "save_file", save)


def isas() -> tuple[str, ...]:
    """What this machine can run; a build without the native extension can run nothing."""
    if not cpu.available():
        pytest.skip("the native extension is not built")
    return cpu.matmul_isas()
