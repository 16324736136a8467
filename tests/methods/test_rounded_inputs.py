"""Artifacts of the methods that round inputs, against an oracle layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import anybit
from anybit.artifact.sizes import inspect
from anybit.artifact.verify import verify
from anybit.formats.weight import QuantizedWeight, unpack
from anybit.kernels import reference
from anybit.layers import QuantLinear
from anybit.loader import load
from tests import builders
from tests.builders import MakeModel, opened, token_rows
from tests.probes import logits

pytestmark = pytest.mark.native

SMALL: dict[str, Any] = {"samples": 3, "seq_len": 24}
METHODS = [
    ("mixllm", {"wide_rows": 0.1}),
    ("mixllm", {"bits": 5.3, "salience": "diagonal"}),
    ("mixllm", {"bits": 4}),
    ("atom", {"outlier_channels": 8}),
    ("atom", {"outlier_channels": 8, "bits": 3, "clip": False, "act_search": False}),
    ("atom", {"outlier_channels": 8, "act_bits": 8}),
    ("awq", {}),
    ("smoothquant", {}),
    ("smoothquant", {"act_static": True}),
    ("gptq", {"scaling": "awq", "act_bits": 8}),
    ("rtn", {"bits": 8, "act_bits": 8, "group_size": -1}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "method", "options"),
    [(("gpt2", "llama")[i % 2], *method) for i, method in enumerate(METHODS)],
)
def test_artifacts_compute_what_they_say(
    family: str, method: str, options: dict[str, Any], model_dir: MakeModel, tmp_path: Path
) -> None:
    config = builders.options(method, **{"group_size": 16, **options}, **SMALL)
    anybit.quantize(model_dir(family), tmp_path / "out", config)
    verify(tmp_path / "out")
    model = load(tmp_path / "out")
    tokens = token_rows(2, 7)
    by_tile = logits(model, tokens[:1, :5])  # 5 tokens: the decode path
    by_matrix = logits(model, tokens)  # 14 tokens: the dense path
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.forward = oracle_forward(unpack(module.packed), module.bias)
    expected = logits(model, tokens)
    # A sum in another order moves an activation to the next code now and then.
    size = float(expected.abs().max())
    assert float((by_tile - expected[:1, :5]).abs().max()) < 0.02 * size
    assert float((by_matrix - expected).abs().max()) < 0.02 * size
    figures = inspect(tmp_path / "out")
    assert figures["method"] == method
    if "bits" in options and method == "mixllm":
        assert figures["bits"] == pytest.approx(options["bits"], abs=0.1)


def oracle_forward(weight: QuantizedWeight, bias: Tensor | None) -> Any:
    def forward(x: Tensor) -> Tensor:
        y = reference.int_matmul(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1)
        return y if bias is None else y + bias

    return forward


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gptq", "rtn"])
@pytest.mark.parametrize("option", [{"scaling": "awq"}, {"act_bits": 8, "act_static": True}])
def test_a_spec_may_ask_for_inputs(
    method: str, option: dict[str, Any], model_dir: MakeModel, tmp_path: Path
) -> None:
    folder = model_dir("llama")
    name = list(opened(folder).all_linears())[-1]
    config = builders.options(method, group_size=16, **SMALL)
    anybit.quantize(folder, tmp_path / "out", config, spec_map={name: builders.spec_of(config).but(**option)})
    (line,) = [line for line in inspect(tmp_path / "out")["layers"] if line["name"] == name]
    fields = load(tmp_path / "out").get_submodule(name).packed.tensors
    assert "input_scale" in fields or "act_scales" in fields, line
