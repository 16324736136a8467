"""CONTRIBUTING's recipe for a format, done: what its file and one line in `FORMATS` give."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import anybit
from anybit.artifact.sizes import inspect, table_of_levels
from anybit.artifact.verify import verify
from anybit.errors import InputError
from anybit.formats import FORMATS
from anybit.formats.layout import LayerLayout
from anybit.formats.validate import validate
from anybit.formats.weight import PackedWeight, QuantizedWeight, pack, unpack
from anybit.kernels.dispatch import BoundWeight
from anybit.methods import METHODS
from tests.builders import random

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
(CODE,) = re.findall(r'```python\n("""Format "ternary".*?)```', TEXT, re.S)


@pytest.fixture
def ternary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The file as CONTRIBUTING has it, among the formats for the length of a test."""
    file = tmp_path / "ternary.py"
    file.write_text(CODE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("ternary", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ternary", module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(FORMATS, "ternary", module.TernaryLayout)
    return module


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales: weights beyond half of a row's mean magnitude keep their sign."""
    scales = weight.abs().mean(1)
    codes = weight.sign() * (weight.abs() > scales[:, None] / 2) + 1
    return codes.to(torch.uint8), scales.half()


@pytest.fixture
def artifact(
    ternary: ModuleType, model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A model whose layers a method stores in the format."""

    def layout(spec: Any, shape: tuple[int, int]) -> LayerLayout:
        return LayerLayout(shape, (ternary.TernaryLayout(),))

    def quantize(weight: torch.Tensor, stats: None, spec: Any) -> QuantizedWeight:
        return QuantizedWeight(tuple(weight.shape), (ternary.Ternary(*rounded(weight)),))

    monkeypatch.setitem(METHODS, "rtn", replace(METHODS["rtn"], layout=layout, quantize=quantize))
    return anybit.quantize(model_dir("llama"), tmp_path / "out", anybit.RTN(bits=2)).path


def test_the_stored_bytes(ternary: ModuleType) -> None:
    tile = ternary.Ternary(torch.tensor([[0, 1, 2, 2, 1]], dtype=torch.uint8), torch.tensor([2.0]).half())
    packed = pack(QuantizedWeight((1, 5), (tile,)))
    assert packed.layout.to_json() == {"shape": [1, 5], "tiles": [{"format": "ternary", "bits": 2}]}
    assert packed.tensors["codes"].tolist() == [[0b10100100, 0b01]]
    assert unpack(packed).dequantize().tolist() == [[-2, 0, 2, 2, 0]]
    assert LayerLayout.from_json("layer", json.loads(json.dumps(packed.layout.to_json()))) == packed.layout


def test_what_comes_from_outside_is_checked(ternary: ModuleType) -> None:
    described = {"shape": [1, 5], "tiles": [{"format": "ternary", "bits": 2}]}
    for change in ({"bits": 3}, {"bits": None}, {"colour": 1}, {"rows": 2}):
        with pytest.raises(InputError, match="layer: "):
            LayerLayout.from_json("layer", {**described, "tiles": [{**described["tiles"][0], **change}]})
    layout, scales = LayerLayout.from_json("layer", described), torch.ones(1).half()
    for codes, scale, word in ((255, scales, "beyond 2"), (0, scales * torch.nan, "NaN")):
        tensors = {"codes": torch.full((1, 2), codes, dtype=torch.uint8), "scales": scale}
        with pytest.raises(InputError, match=word):
            validate("layer", PackedWeight(layout, tensors))


def test_it_multiplies(ternary: ModuleType) -> None:
    weight, x = random(7, 33), random(3, 33)
    packed = pack(QuantizedWeight((7, 33), (ternary.Ternary(*rounded(weight)),)))
    codes, scales = rounded(weight)
    expected = x @ ((codes.float() - 1) * scales.float()[:, None]).T
    torch.testing.assert_close(BoundWeight(packed).matmul(x), expected)


def test_an_artifact_of_it(artifact: Path, model_dir: Callable[[str], Path]) -> None:
    """Quantized, verified, loaded, run, inspected and sized."""
    assert verify(artifact)["hashes_checked"]
    stored = load_file(next(model_dir("llama").glob("*.safetensors")))
    model = anybit.load(artifact)
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "layout")}
    assert len(layers) == 14
    for name, layer in layers.items():
        codes, scales = rounded(stored[f"{name}.weight"].float())
        dense = (codes.float() - 1) * scales.float()[:, None]
        torch.testing.assert_close(layer(torch.eye(layer.in_features)).T, dense)
    assert torch.isfinite(model(torch.arange(3, 9)[None]).logits).all()
    figures = inspect(artifact)
    nbytes = sum(layer.packed.nbytes for layer in layers.values())
    assert figures["bits"] == 2 and figures["bits_per_weight"] == 8 * nbytes / figures["weights"]
    (level,) = table_of_levels(artifact)
    assert level["size_bytes"] == figures["size_bytes"]


def test_a_damaged_artifact_of_it(artifact: Path) -> None:
    shard = artifact / "model-00002-of-00003.safetensors"
    tensors = load_file(shard)
    field = next(name for name in tensors if name.endswith(".codes"))
    save_file({**tensors, field: torch.full_like(tensors[field], 255)}, shard, metadata={"format": "pt"})
    with pytest.raises(InputError, match=rf"{re.escape(field)}.*beyond 2"):
        anybit.load(artifact)
