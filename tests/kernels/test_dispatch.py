"""Layers of each kind through the kernels and without them."""

from __future__ import annotations

import pytest
import torch

from anybit.formats.validate import validate
from anybit.formats.weight import pack, unpack
from anybit.kernels import cpu, reference
from anybit.kernels.dispatch import BoundWeight
from anybit.methods import METHODS
from tests.builders import outlier_inputs, random, rounded_layer

pytestmark = pytest.mark.native

KINDS = ("mixllm", "atom", "atom searched", "smoothquant", "static", "awq")


@pytest.mark.parametrize("kind", KINDS)
def test_layers_round_trip_and_multiply(kind: str) -> None:
    _, _, made, spec = rounded_layer(kind)
    packed = pack(made)
    validate("layer", packed)
    planned = METHODS[kind.split(maxsplit=1)[0].replace("static", "rtn")].layout(spec, made.shape)
    assert packed.layout == planned
    again = pack(unpack(packed))
    for field, tensor in packed.tensors.items():
        assert torch.equal(again.tensors[field].view(torch.uint8), tensor.view(torch.uint8)), field
    bound = BoundWeight(packed)
    for tokens in (1, 3, 40):
        x = outlier_inputs(tokens, made.shape[1], seed=tokens)
        expected = reference.int_matmul(x, made)
        size = float(expected.abs().max())
        torch.testing.assert_close(bound.matmul(x), expected, rtol=1e-4, atol=1e-5 * size)
        torch.testing.assert_close(reference.matmul(x, packed), expected, rtol=1e-4, atol=1e-5 * size)


def test_layers_without_the_native_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, made, _ = rounded_layer("mixllm")
    x = random(2, made.shape[1])
    expected = BoundWeight(pack(made)).matmul(x)
    monkeypatch.setattr(cpu, "_native", None)
    torch.testing.assert_close(BoundWeight(pack(made)).matmul(x), expected, rtol=1e-4, atol=1e-3)
