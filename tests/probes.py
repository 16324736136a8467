"""What tests watch a run with: its progress, the bytes that it stores, a disk that fills, this machine's kernels."""

import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from anybit.artifact import writer
from anybit.formats.validate import validate
from anybit.formats.weight import pack, unpack
from anybit.kernels import cpu
from anybit.kernels.dispatch import BoundWeight
from anybit.layers import QuantLinear
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


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens).logits


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


def interrupt(*_: Any) -> None:
    raise Killed


def check_whole_way(quantized: Any, planned: dict[str, Any]) -> None:
    """Stored as planned, valid, read back equal, and multiplied by the native kernels as by the reference."""
    packed = pack(quantized)
    assert packed.layout == planned
    validate("layer", packed)
    again = pack(unpack(packed))
    assert again.layout == packed.layout
    for field, tensor in packed.tensors.items():
        assert torch.equal(again.tensors[field].view(torch.uint8), tensor.view(torch.uint8)), field
    dense = quantized.dequantize()
    bound = BoundWeight(packed)
    assert torch.equal(bound.dequantize(), dense)
    for tokens in (1, 3, 20):
        x = torch.randn(tokens, dense.shape[1], generator=torch.Generator().manual_seed(tokens))
        torch.testing.assert_close(bound.matmul(x), x @ dense.T, rtol=1e-4, atol=1e-4)


def a_layer(path: Path) -> QuantLinear:
    model = AutoModelForCausalLM.from_pretrained(path)
    return next(m for m in model.modules() if isinstance(m, QuantLinear))
