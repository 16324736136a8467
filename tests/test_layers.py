"""Quantized layers as modules: copies, memory, state dicts, inputs that are not their own."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import AutoModelForCausalLM

from anybit.errors import InputError
from anybit.formats.weight import unpack
from anybit.layers import PackedModule, QuantLinear
from tests.probes import a_layer, logits

IDS = torch.tensor([[7, 101, 30, 30, 99, 250, 3, 17, 64, 5, 200, 41, 77, 8, 9, 10, 11, 120, 13, 14, 15]])


@pytest.mark.parametrize("family", ["llama-tied", "llama"])
def test_deepcopy_is_independent(artifact_of: Callable[..., Path], family: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(artifact_of(family, embed_bits=8))
    before = logits(model, IDS)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin, IDS), before)
    for module in twin.modules():
        if isinstance(module, PackedModule):
            stored = module.state_dict()
            module.load_state_dict(stored | {"scales": torch.zeros_like(stored["scales"])})
    assert torch.count_nonzero(logits(twin, IDS)) == 0, "the copy's head must read the copy's embedding"
    assert torch.equal(logits(model, IDS), before)


def test_a_copy_of_a_model_that_other_threads_run(artifact_of: Callable[..., Path]) -> None:
    model, stop, failed = AutoModelForCausalLM.from_pretrained(artifact_of("llama", embed_bits=8)), [], []
    expected = logits(model, IDS)

    def runs() -> None:
        while not stop:
            failed.extend([1] if not torch.equal(logits(model, IDS), expected) else [])

    workers = [threading.Thread(target=runs) for _ in range(2)]
    for worker in workers:
        worker.start()
    try:
        for _ in range(10):
            assert torch.equal(logits(copy.deepcopy(model), IDS), expected)
    finally:
        stop.append(1)
        for worker in workers:
            worker.join()
    assert not failed
    packed = [m for m in model.modules() if isinstance(m, PackedModule)]
    assert all(m.get_buffer("codes").numel() == 0 for m in packed)  # the copies left it as it was


def test_a_layer_refuses_inputs_that_are_not_its_own(artifact_of: Callable[..., Path]) -> None:
    layer = a_layer(artifact_of("llama"))
    for x in (
        torch.randn(3, layer.in_features // 2),
        torch.randn(0, 2 * layer.in_features),
        torch.tensor(1.0),
    ):
        with pytest.raises(InputError, match="this layer takes floats"):
            layer(x)
    with pytest.raises(InputError, match="int64"):
        layer(torch.ones(1, layer.in_features, dtype=torch.int64))
    with pytest.raises(InputError, match="output features"):
        torch.ops.anybit.matmul(torch.randn(1, layer.in_features), [], layer._name, layer.out_features + 1)
    embedding = AutoModelForCausalLM.from_pretrained(
        artifact_of("llama", embed_bits=8)
    ).get_input_embeddings()
    with pytest.raises(InputError, match="expected integers"):
        embedding(torch.tensor([3.7]))
    assert layer(torch.randn(0, layer.in_features)).shape == (0, layer.out_features)


class Subclass(torch.Tensor):
    """Of PyTorch's tensors, with nothing of its own."""


STRANGE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "another sign": lambda x: torch._neg_view(-x),
    "a subclass": lambda x: x.as_subclass(Subclass),
    "inference": lambda x: torch.inference_mode()(x.clone)(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", STRANGE)
def test_tensors_whose_memory_is_not_their_numbers(
    artifact_of: Callable[..., Path], kind: str, dtype: torch.dtype
) -> None:
    layer = a_layer(artifact_of("llama"))
    x = torch.randn(3, layer.in_features, dtype=dtype)
    with torch.no_grad():
        for run in (layer, layer.matmul, layer.bound().matmul):
            assert torch.equal(run(STRANGE[kind](x)), run(x))


@torch.no_grad()
def test_tensors_without_memory(artifact_of: Callable[..., Path]) -> None:
    for bound in (False, True):  # the first call of a layer is one of these, or not
        layer = a_layer(artifact_of("llama"))
        x = torch.randn(3, layer.in_features)
        expected = layer(x) if bound else None
        with FakeTensorMode() as mode:
            y = layer(mode.from_tensor(x))
        assert isinstance(y, FakeTensor) and y.shape == (3, layer.out_features)
        assert layer(x.to("meta")).is_meta
        assert expected is None or torch.equal(layer(x), expected)
    shrunk = torch.randn(3, layer.in_features)
    shrunk.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="with its numbers in memory"):
        layer(shrunk)
    empty = torch.randn(0, layer.in_features)
    empty.untyped_storage().resize_(0)
    assert layer(empty).shape == (0, layer.out_features)


@torch.no_grad()
def test_transforms_and_traces_of_a_layer(artifact_of: Callable[..., Path]) -> None:
    layer = a_layer(artifact_of("llama"))
    x = torch.randn(4, 2, layer.in_features)
    expected = layer(x)
    torch.testing.assert_close(torch.func.vmap(layer)(x), expected)
    torch.testing.assert_close(torch.func.vmap(layer, 1, 1)(x), expected)
    torch.testing.assert_close(torch.func.functionalize(layer)(x), expected)
    other = torch.randn(4, 2, layer.in_features)
    for traced in (make_fx(layer)(x), torch.jit.trace(layer, x)):
        assert torch.equal(traced(other), layer(other))


def test_forward_mode_differentiation_is_refused(artifact_of: Callable[..., Path]) -> None:
    """A tangent is never lost without a word; a tensor that has none is multiplied."""
    layer = a_layer(artifact_of("llama"))
    x = torch.randn(3, layer.in_features)
    expected = layer(x)
    with torch.no_grad(), forward_ad.dual_level():
        assert torch.equal(layer(x), expected)
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        for run in (layer, layer.matmul, layer.bound().matmul):
            with pytest.raises(ValueError, match="tangent of forward-mode differentiation"):
                run(dual)
    with pytest.raises(InputError, match="use reverse mode"):
        torch.func.jvp(layer, (x,), (torch.ones_like(x),))


def test_a_layer_that_is_released_while_it_runs(artifact_of: Callable[..., Path]) -> None:
    layer = a_layer(artifact_of("llama"))
    x, stop, failed = torch.randn(1, layer.in_features), threading.Event(), []
    expected = layer(x)

    def runs() -> None:
        try:
            while not stop.is_set():
                assert torch.equal(layer(x), expected)
        except Exception as error:
            failed.append(error)

    worker = threading.Thread(target=runs)
    worker.start()
    for _ in range(300):
        layer.release()
    stop.set()
    worker.join()
    assert not failed


def test_a_bias_begins_as_zeros(artifact_of: Callable[..., Path]) -> None:
    made = QuantLinear(a_layer(artifact_of("llama")).layout, bias=True)
    assert made.bias is not None and torch.count_nonzero(made.bias) == 0


def test_stored_bytes_are_held_once_and_come_back(artifact_of: Callable[..., Path]) -> None:
    """What the kernels have put into their own order is not kept a second time, and is there for whoever asks."""
    model = AutoModelForCausalLM.from_pretrained(artifact_of("llama", embed_bits=8))
    stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = logits(model, IDS)
    packed = [m for m in model.modules() if isinstance(m, PackedModule)]
    assert all(m.get_buffer("codes").numel() == m.get_buffer("scales").numel() == 0 for m in packed)
    for module in packed:
        assert all(torch.equal(t, module.packed.tensors[f]) for f, t in module.packed.tensors.items())
    assert all(m.get_buffer("codes").numel() == 0 for m in packed)  # asking changes nothing
    again = model.state_dict()
    assert all(m.get_buffer("codes").numel() == 0 for m in packed)
    assert again.keys() == stored.keys() and all(torch.equal(again[n], t) for n, t in stored.items())
    assert torch.equal(logits(model, IDS), before)
    assert torch.equal(logits(model.to(torch.float32), IDS), before)


def test_a_state_dict_is_whole_while_another_thread_runs_the_model(artifact_of: Callable[..., Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(artifact_of("llama"))
    sizes, stop = {name: tensor.shape for name, tensor in model.state_dict().items()}, threading.Event()

    def runs() -> None:
        while not stop.is_set():
            logits(model, IDS)
            for module in model.modules():
                if isinstance(module, PackedModule):
                    module.release()  # what a copy does, so that the next run takes the bytes again

    worker = threading.Thread(target=runs)
    worker.start()
    try:
        for _ in range(100):
            assert {name: tensor.shape for name, tensor in model.state_dict().items()} == sizes
    finally:
        stop.set()
        worker.join()


def test_gemma3_embedding_is_scaled_and_its_head_is_not(artifact_of: Callable[..., Path]) -> None:
    path = artifact_of("gemma3", embed_bits=8)
    model = AutoModelForCausalLM.from_pretrained(path)
    embedding = model.get_input_embeddings()
    table = unpack(embedding.packed).dequantize()
    torch.testing.assert_close(embedding(IDS), table[IDS] * 48**0.5)
    hidden = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model.get_output_embeddings()(hidden), hidden @ table.T, rtol=1e-4, atol=1e-4)


def test_generates_with_a_cache_what_it_generates_without(artifact_of: Callable[..., Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(artifact_of("llama", embed_bits=8))
    texts = [
        model.generate(
            IDS, max_new_tokens=8, do_sample=False, use_cache=cached, eos_token_id=None, pad_token_id=1
        )
        for cached in (True, False)
    ]
    assert texts[0].shape[1] == IDS.shape[1] + 8
    assert torch.equal(*texts)


def layer(name: str, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["quantization_config"]["layers"][name].update(changes)
