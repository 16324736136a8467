"""Quantized models compiled and exported."""

import gc
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from anybit.errors import InputError
from anybit.formats.weight import unpack
from anybit.layers import QuantLinear
from tests.probes import a_layer

pytestmark = pytest.mark.slow  # compiling takes seconds
IDS = torch.tensor([[7, 101, 30, 30, 99, 250, 3, 17, 64, 5, 200, 41, 77, 8, 9, 10, 11, 120, 13, 14, 15]])


def test_a_model_is_compiled_whole(artifact_of: Callable[..., Path]) -> None:
    """Quantized layers and embeddings are operators to torch.compile, also those that have never run."""
    model = AutoModelForCausalLM.from_pretrained(artifact_of("llama", embed_bits=8))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(IDS, use_cache=False).logits, model(IDS, use_cache=False).logits)


@pytest.mark.parametrize("act_bits", [16, 8])
def test_operators_keep_their_contract(artifact_of: Callable[..., Path], act_bits: int) -> None:
    layer = a_layer(artifact_of("llama", act_bits=act_bits))
    for dtype, gradient in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        x = torch.randn(2, 3, layer.in_features, dtype=dtype, requires_grad=gradient)
        torch.library.opcheck(torch.ops.anybit.matmul.default, (x, [], layer._name, layer.out_features))
    grad = torch.randn(2, 3, layer.out_features)
    torch.library.opcheck(
        torch.ops.anybit.matmul_backward.default, (grad, [], layer._name, layer.in_features)
    )
    embedding = AutoModelForCausalLM.from_pretrained(
        artifact_of("llama", embed_bits=8)
    ).get_input_embeddings()
    torch.library.opcheck(
        torch.ops.anybit.rows.default, (IDS.reshape(-1), [], embedding._name, embedding.embedding_dim)
    )


@pytest.mark.parametrize("act_bits", [16, 8])
def test_gradients_are_those_of_the_stored_matrix(artifact_of: Callable[..., Path], act_bits: int) -> None:
    """Eager and compiled, of one token and of many; straight through the rounding of inputs."""
    layer = a_layer(artifact_of("llama", act_bits=act_bits))
    dense = unpack(layer.packed).dequantize()
    for run, tokens in itertools.product((layer, torch.compile(layer, backend="aot_eager")), (1, 20)):
        x = torch.randn(tokens, layer.in_features, requires_grad=True)
        factor = torch.randn(tokens, layer.out_features)
        y = run(x)
        (y * factor).sum().backward()
        torch.testing.assert_close(x.grad, factor @ dense, rtol=1e-4, atol=1e-4)
        assert torch.equal(y.detach(), layer(x.detach()))


def test_gradients_are_of_the_weight_that_ran(artifact_of: Callable[..., Path]) -> None:
    """Though the layer runs at another width by then, or is gone; and of second order."""
    layer = a_layer(artifact_of("llama", method="any-precision", bits=None, group_size=None))
    x = torch.randn(3, layer.in_features, requires_grad=True)
    dense = unpack(layer.packed.at_width(8)).dequantize()
    y = layer(x)
    layer.set_level(layer.layout.at_width(3))
    del layer
    gc.collect()
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    torch.testing.assert_close(grad, 2 * y @ dense, rtol=1e-4, atol=1e-4)
    grad.square().sum().backward()
    twice = dense.T @ dense
    torch.testing.assert_close(x.grad, 8 * x.detach() @ twice @ twice, rtol=1e-3, atol=1e-3)


class Logits(nn.Module):
    """What `torch.export` can take: tensors in, a tensor out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids, use_cache=False).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_model_is_exported_for_any_number_of_tokens(
    artifact_of: Callable[..., Path], tmp_path: Path, dtype: torch.dtype
) -> None:
    model = Logits(AutoModelForCausalLM.from_pretrained(artifact_of("llama-tied", embed_bits=8), dtype=dtype))
    length = torch.export.Dim("length", min=2, max=64)
    with torch.no_grad():
        program = torch.export.export(model, (IDS,), dynamic_shapes={"ids": {1: length}})
        torch.export.save(program, tmp_path / "program.pt2")
        again = torch.export.load(tmp_path / "program.pt2").module()
        for ids in (IDS, IDS[:, :7], torch.cat([IDS, IDS], 1)):
            assert torch.equal(again(ids), model(ids))


def test_lengths_do_not_compile_an_embedding_anew(artifact_of: Callable[..., Path]) -> None:
    embedding = AutoModelForCausalLM.from_pretrained(
        artifact_of("llama", embed_bits=8)
    ).get_input_embeddings()
    compiled = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    run = torch.compile(embedding, backend=backend)
    with torch.no_grad():
        for n in range(2, 12):
            assert torch.equal(run(IDS[:, :n]), embedding(IDS[:, :n]))
    assert len(compiled) <= 2


@torch.no_grad()
def test_an_exported_program_sees_other_weights(artifact_of: Callable[..., Path]) -> None:
    layer = a_layer(artifact_of("llama"))
    x = torch.randn(4, layer.in_features)
    program = torch.export.export(layer, (x,)).module()
    before = program(x)
    held = dict(program.named_buffers())
    other = {**held, "scales": held["scales"] * 2}
    torch.testing.assert_close(torch.func.functional_call(program, other, (x,)), 2 * before)
    assert torch.equal(program(x), before)
    held["scales"].mul_(4)
    torch.testing.assert_close(program(x), 4 * before)


@pytest.mark.parametrize("change", ["{}", "no json", "another width", "another shape", "a tensor more"])
def test_damaged_programs_are_refused(artifact_of: Callable[..., Path], change: str) -> None:
    layer = a_layer(artifact_of("llama"))
    stored, weight = [layer.get_buffer(f) for f in layer.layout.stored_tensors()], layer._described
    given = json.loads(weight)
    if change == "another width":
        given["running"]["tiles"][0]["bits"] = 3
    if change == "another shape":
        given["layout"]["shape"][0] *= 2
    if change == "a tensor more":
        stored = [*stored, stored[0]]
    weight = json.dumps(given) if change.startswith("a") else change
    with pytest.raises(InputError, match="exported program is damaged"):
        torch.ops.anybit.matmul(torch.randn(1, layer.in_features), stored, weight, layer.out_features)


EXPORTED = """
import sys, torch, anybit.layers  # which registers the operators
program, inputs = torch.export.load(sys.argv[1]).module(), torch.load(sys.argv[2], weights_only=True)
torch.save(program(inputs), sys.argv[3])
"""


@pytest.mark.e2e
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_holds_its_weights(
    artifact_of: Callable[..., Path], tmp_path: Path, strict: bool
) -> None:
    """It runs in a process where other layers live, and none of the model it was made of."""
    model = AutoModelForCausalLM.from_pretrained(artifact_of("llama", embed_bits=8))
    layer = next(m for m in model.modules() if isinstance(m, QuantLinear))
    parts = {"layer": (layer, torch.randn(4, layer.in_features)), "ids": (model.model.embed_tokens, IDS)}
    for name, (module, x) in parts.items():
        with torch.no_grad():
            before = module(x)
            with pytest.raises(Exception, match=r"call `model.cpu\(\)` before torch.export"):
                torch.export.export(module, (x,), strict=strict)
            module.cpu()
            torch.export.save(torch.export.export(module, (x,), strict=strict), tmp_path / "program.pt2")
        torch.save(x, tmp_path / "x.pt")
        files = [str(tmp_path / file) for file in ("program.pt2", "x.pt", "y.pt")]
        subprocess.run([sys.executable, "-c", EXPORTED, *files], check=True)
        assert torch.equal(torch.load(tmp_path / "y.pt", weights_only=True), before), name


def test_an_exported_program_keeps_the_width_of_its_layer(artifact_of: Callable[..., Path]) -> None:
    layer = a_layer(artifact_of("llama", method="any-precision", bits=None, group_size=None))
    x = torch.randn(4, layer.in_features)
    layer.set_level(layer.layout.at_width(4))
    with torch.no_grad():
        program = torch.export.export(layer, (x,)).module()
    at_four = layer(x)
    layer.set_level(layer.layout)
    assert torch.equal(program(x), at_four) and not torch.equal(layer(x), at_four)


def test_a_compiled_program_outlives_no_model(artifact_of: Callable[..., Path]) -> None:
    layer = a_layer(artifact_of("llama"))
    x, name, out = torch.randn(1, layer.in_features), layer._name, layer.out_features
    assert torch.equal(torch.ops.anybit.matmul(x, [], name, out), layer(x))
    del layer
    gc.collect()
    with pytest.raises(InputError, match="runs only while its model lives"):
        torch.ops.anybit.matmul(x, [], name, out)


def layer(name: str, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["quantization_config"]["layers"][name].update(changes)
