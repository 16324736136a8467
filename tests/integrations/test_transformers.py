"""Artifacts inside Transformers: logits against the base model with its weights replaced, and round trips."""

import copy
import gc
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

import anybit
from anybit.artifact.reader import inspect, verify
from anybit.config import TileSpec
from anybit.errors import InputError
from anybit.formats.weight import PackedWeight, at_width, stored_tensors, unpack
from anybit.integrations.transformers import AnybitConfig, register
from anybit.layers import PackedModule, QuantEmbedding, QuantLinear, TiedHead
from tests import builders
from tests.builders import FAMILIES
from tests.probes import stored

IDS = torch.tensor([[7, 101, 30, 30, 99, 250, 3, 17, 64, 5, 200, 41, 77, 8, 9, 10, 11, 120, 13, 14, 15]])
TIED = ("llama-tied", "gemma3", "gpt2", "opt")


@pytest.fixture(scope="module")
def artifact(
    model_dir: Callable[[str], Path], text_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """`artifact("llama", embed_bits=8)`: made once per set of options; never change it."""
    root = tmp_path_factory.mktemp("artifacts")

    def make(family: str, **options: Any) -> Path:
        out = root / "-".join([family, *(f"{key}{value}" for key, value in options.items())])
        if not out.exists():
            config = builders.options(
                **{"method": "rtn", "bits": 4, "group_size": 32, "samples": 3, "seq_len": 24, **options}
            )
            anybit.quantize(model_dir(family), out, config, calibration=str(text_file))
        return out

    return make


def a_layer(path: Path) -> QuantLinear:
    model = AutoModelForCausalLM.from_pretrained(path)
    return next(m for m in model.modules() if isinstance(m, QuantLinear))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def oracle(base: Path, path: Path) -> nn.Module:
    """The base model with every weight replaced by what the artifact's bytes stand for."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    quantization = json.loads((path / "config.json").read_text())["quantization_config"]
    layouts = {**quantization["layers"], **quantization["embeddings"]}
    tensors = stored(path)
    state = {}
    for name, layout in layouts.items():
        fields = {field: tensors.pop(f"{name}.{field}") for field in stored_tensors(layout)}
        dense = unpack(PackedWeight(layout, fields)).dequantize()
        state[f"{name}.weight"] = dense.T if isinstance(model.get_submodule(name), Conv1D) else dense
    missing, unexpected = model.load_state_dict(state | tensors, strict=False)
    assert not unexpected
    assert set(missing) <= set(model.all_tied_weights_keys)
    return model.eval()


def assert_same_function(model: nn.Module, expected: nn.Module) -> None:
    """Many tokens (dequantized GEMM) and one token (fused kernel) give the oracle's logits."""
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        one = model(IDS[:, :1]).logits, expected(IDS[:, :1]).logits
    torch.testing.assert_close(*one, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("embed_bits", [16, 8, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_base_with_dequantized_weights(
    artifact: Callable[..., Path], model_dir: Callable[[str], Path], family: str, embed_bits: int
) -> None:
    path = artifact(family, embed_bits=embed_bits)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert_same_function(model, oracle(model_dir(family), path))
    quantized = [m for m in model.modules() if isinstance(m, QuantLinear)]
    assert len(quantized) == len(inspect(path)["layers"]) + (embed_bits < 16 and family not in TIED)
    names = stored(path)
    if embed_bits < 16:
        assert isinstance(model.get_input_embeddings(), QuantEmbedding)
        assert isinstance(model.get_output_embeddings(), TiedHead if family in TIED else QuantLinear)
    vocabulary = [n for n, t in names.items() if t.shape[0] == 264]
    once = 1 if embed_bits == 16 else 3  # weight, or codes, scales and zeros
    assert len(vocabulary) == once * (1 if family in TIED else 2), vocabulary


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 3, "symmetric": True},
        {"bits": 8, "group_size": -1},
        {"bits": 2, "method": "gptq"},
        {"bits": 4, "method": "gptq", "desc_act": True},
        {"bits": 5, "clip": True},
        {"bits": 4, "exclude": ("*mlp*",)},
    ],
    ids="-".join,
)
def test_every_kind_of_layer_loads(
    artifact: Callable[..., Path], model_dir: Callable[[str], Path], options: dict[str, Any]
) -> None:
    path = artifact("llama", **options)
    assert_same_function(AutoModelForCausalLM.from_pretrained(path), oracle(model_dir("llama"), path))


def test_mixed_widths_in_one_matrix(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    rows, columns = tuple(range(0, 48, 3)), tuple(reversed(range(16)))
    rest = tuple(i for i in range(48) if i not in rows)
    spec_map = {
        "model.layers.0.self_attn.q_proj": builders.layer_spec(
            tiles=(TileSpec(8, 16, rows=rows), TileSpec(3, 16, rows=rest))
        ),
        "model.layers.1.self_attn.o_proj": builders.layer_spec(
            tiles=(TileSpec(8, 16, cols=columns), TileSpec(4, 32, True, cols=tuple(range(16, 48))))
        ),
    }
    config = builders.options("rtn", group_size=32)
    anybit.quantize(model_dir("llama"), tmp_path / "out", config, spec_map=spec_map)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert len(model.model.layers[0].self_attn.q_proj.layout["tiles"]) == 2
    assert_same_function(model, oracle(model_dir("llama"), tmp_path / "out"))
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(model), logits(again))


@pytest.mark.parametrize(
    ("family", "embed_bits"), [("llama", 16), ("llama", 8), ("llama-tied", 16), ("gemma3", 4), ("gpt2", 8)]
)
def test_save_pretrained_round_trip(
    artifact: Callable[..., Path], tmp_path: Path, family: str, embed_bits: int
) -> None:
    path = artifact(family, embed_bits=embed_bits)
    model = AutoModelForCausalLM.from_pretrained(path)
    before = logits(model)  # the kernels are bound now, which must not change what is saved
    model.save_pretrained(tmp_path / "again")
    expected, found = stored(path), stored(tmp_path / "again")
    assert found.keys() == expected.keys()
    for name in packed_fields(path):
        assert found[name].dtype == expected[name].dtype
        assert torch.equal(found[name], expected[name]), name
    for name in expected.keys() - packed_fields(path):
        assert torch.equal(found[name].float(), expected[name].float()), name
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(again), before)
    assert inspect(tmp_path / "again")["bits_per_weight"] == inspect(path)["bits_per_weight"]
    assert verify(tmp_path / "again") == {
        "shards": 1,
        "layers": len(inspect(path)["layers"] + inspect(path)["embeddings"]),
        "hashes_checked": False,
    }


def packed_fields(path: Path) -> set[str]:
    quantization = json.loads((path / "config.json").read_text())["quantization_config"]
    layouts = {**quantization["layers"], **quantization["embeddings"]}
    return {f"{name}.{field}" for name, layout in layouts.items() for field in stored_tensors(layout)}


def test_artifact_files_are_readable_by_others(artifact: Callable[..., Path]) -> None:
    """safetensors itself makes files that only their owner reads."""
    for file in artifact("llama").iterdir():
        assert file.stat().st_mode & 0o444 == 0o444, file.name


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_computing_in_another_dtype_keeps_the_stored_one(
    artifact: Callable[..., Path], family: str, dtype: torch.dtype
) -> None:
    path = artifact(family, embed_bits=8, exclude=("*o_proj",))
    expected = {n: t for n, t in stored(path).items() if n in packed_fields(path)}
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    moved = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    logits(moved)
    moved.to(dtype)
    for model in (loaded, moved):
        state = model.state_dict()
        for name, tensor in expected.items():
            assert state[name].dtype == tensor.dtype, name
            assert torch.equal(state[name], tensor), name
        assert logits(model).dtype == dtype
    assert (
        loaded.get_submodule(next(n for n, _ in loaded.named_modules() if n.endswith("o_proj"))).weight.dtype
        == dtype
    )
    full = logits(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)).flatten()
    for model in (loaded, moved):
        assert nn.functional.cosine_similarity(full, logits(model).float().flatten(), dim=0) > 0.99


@pytest.mark.parametrize("family", ["llama-tied", "llama"])
def test_deepcopy_is_independent(artifact: Callable[..., Path], family: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(artifact(family, embed_bits=8))
    before = logits(model)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), before)
    for module in twin.modules():
        if isinstance(module, PackedModule):
            stored = module.state_dict()
            module.load_state_dict(stored | {"scales": torch.zeros_like(stored["scales"])})
    assert torch.count_nonzero(logits(twin)) == 0, "the copy's head must read the copy's embedding"
    assert torch.equal(logits(model), before)


def test_a_model_is_compiled_whole(artifact: Callable[..., Path]) -> None:
    """Quantized layers and embeddings are operators to torch.compile, also those that have never run."""
    model = AutoModelForCausalLM.from_pretrained(artifact("llama", embed_bits=8))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(IDS, use_cache=False).logits, model(IDS, use_cache=False).logits)


@pytest.mark.parametrize("act_bits", [16, 8])
def test_operators_keep_their_contract(artifact: Callable[..., Path], act_bits: int) -> None:
    layer = a_layer(artifact("llama", act_bits=act_bits))
    for dtype, gradient in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        x = torch.randn(2, 3, layer.in_features, dtype=dtype, requires_grad=gradient)
        torch.library.opcheck(torch.ops.anybit.matmul.default, (x, [], layer._name, layer.out_features))
    grad = torch.randn(2, 3, layer.out_features)
    torch.library.opcheck(
        torch.ops.anybit.matmul_backward.default, (grad, [], layer._name, layer.in_features)
    )
    embedding = AutoModelForCausalLM.from_pretrained(artifact("llama", embed_bits=8)).get_input_embeddings()
    torch.library.opcheck(
        torch.ops.anybit.rows.default, (IDS.reshape(-1), [], embedding._name, embedding.embedding_dim)
    )


@pytest.mark.parametrize("act_bits", [16, 8])
def test_gradients_are_those_of_the_stored_matrix(artifact: Callable[..., Path], act_bits: int) -> None:
    """Eager and compiled, of one token and of many; straight through the rounding of inputs."""
    layer = a_layer(artifact("llama", act_bits=act_bits))
    dense = unpack(layer.packed).dequantize()
    for run, tokens in itertools.product((layer, torch.compile(layer, backend="aot_eager")), (1, 20)):
        x = torch.randn(tokens, layer.in_features, requires_grad=True)
        factor = torch.randn(tokens, layer.out_features)
        y = run(x)
        (y * factor).sum().backward()
        torch.testing.assert_close(x.grad, factor @ dense, rtol=1e-4, atol=1e-4)
        assert torch.equal(y.detach(), layer(x.detach()))


def test_gradients_are_of_the_weight_that_ran(artifact: Callable[..., Path]) -> None:
    """Though the layer runs at another width by then, or is gone; and of second order."""
    layer = a_layer(artifact("llama", method="any-precision", bits=None, group_size=128))
    x = torch.randn(3, layer.in_features, requires_grad=True)
    dense = unpack(layer.packed.at_width(8)).dequantize()
    y = layer(x)
    layer.run_as(at_width(layer.layout, 3))
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
    artifact: Callable[..., Path], tmp_path: Path, dtype: torch.dtype
) -> None:
    model = Logits(AutoModelForCausalLM.from_pretrained(artifact("llama-tied", embed_bits=8), dtype=dtype))
    length = torch.export.Dim("length", min=2, max=64)
    with torch.no_grad():
        program = torch.export.export(model, (IDS,), dynamic_shapes={"ids": {1: length}})
        torch.export.save(program, tmp_path / "program.pt2")
        again = torch.export.load(tmp_path / "program.pt2").module()
        for ids in (IDS, IDS[:, :7], torch.cat([IDS, IDS], 1)):
            assert torch.equal(again(ids), model(ids))


def test_lengths_do_not_compile_an_embedding_anew(artifact: Callable[..., Path]) -> None:
    embedding = AutoModelForCausalLM.from_pretrained(artifact("llama", embed_bits=8)).get_input_embeddings()
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
def test_an_exported_program_sees_other_weights(artifact: Callable[..., Path]) -> None:
    layer = a_layer(artifact("llama"))
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
def test_damaged_programs_are_refused(artifact: Callable[..., Path], change: str) -> None:
    layer = a_layer(artifact("llama"))
    stored, weight = [layer.get_buffer(f) for f in stored_tensors(layer.layout)], layer._described
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


def test_a_copy_of_a_model_that_other_threads_run(artifact: Callable[..., Path]) -> None:
    model, stop, failed = AutoModelForCausalLM.from_pretrained(artifact("llama", embed_bits=8)), [], []
    expected = logits(model)

    def runs() -> None:
        while not stop:
            failed.extend([1] if not torch.equal(logits(model), expected) else [])

    workers = [threading.Thread(target=runs) for _ in range(2)]
    for worker in workers:
        worker.start()
    try:
        for _ in range(10):
            assert torch.equal(logits(copy.deepcopy(model)), expected)
    finally:
        stop.append(1)
        for worker in workers:
            worker.join()
    assert not failed
    packed = [m for m in model.modules() if isinstance(m, PackedModule)]
    assert all(m.get_buffer("codes").numel() == 0 for m in packed)  # the copies left it as it was


EXPORTED = """
import sys, torch, anybit.layers  # which registers the operators
program, inputs = torch.export.load(sys.argv[1]).module(), torch.load(sys.argv[2], weights_only=True)
torch.save(program(inputs), sys.argv[3])
"""


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_holds_its_weights(
    artifact: Callable[..., Path], tmp_path: Path, strict: bool
) -> None:
    """It runs in a process where other layers live, and none of the model it was made of."""
    model = AutoModelForCausalLM.from_pretrained(artifact("llama", embed_bits=8))
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


def test_an_exported_program_keeps_the_width_of_its_layer(artifact: Callable[..., Path]) -> None:
    layer = a_layer(artifact("llama", method="any-precision", bits=None, group_size=128))
    x = torch.randn(4, layer.in_features)
    layer.run_as(at_width(layer.layout, 4))
    with torch.no_grad():
        program = torch.export.export(layer, (x,)).module()
    at_four = layer(x)
    layer.run_as(layer.layout)
    assert torch.equal(program(x), at_four) and not torch.equal(layer(x), at_four)


def test_a_compiled_program_outlives_no_model(artifact: Callable[..., Path]) -> None:
    layer = a_layer(artifact("llama"))
    x, name, out = torch.randn(1, layer.in_features), layer._name, layer.out_features
    assert torch.equal(torch.ops.anybit.matmul(x, [], name, out), layer(x))
    del layer
    gc.collect()
    with pytest.raises(InputError, match="runs only while its model lives"):
        torch.ops.anybit.matmul(x, [], name, out)


def test_a_layer_refuses_inputs_that_are_not_its_own(artifact: Callable[..., Path]) -> None:
    layer = a_layer(artifact("llama"))
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
    embedding = AutoModelForCausalLM.from_pretrained(artifact("llama", embed_bits=8)).get_input_embeddings()
    with pytest.raises(InputError, match="expected integers"):
        embedding(torch.tensor([3.7]))
    assert layer(torch.randn(0, layer.in_features)).shape == (0, layer.out_features)


def test_stored_bytes_are_held_once_and_come_back(artifact: Callable[..., Path]) -> None:
    """What the kernels have put into their own order is not kept a second time, and is there for whoever asks."""
    model = AutoModelForCausalLM.from_pretrained(artifact("llama", embed_bits=8))
    stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = logits(model)
    packed = [m for m in model.modules() if isinstance(m, PackedModule)]
    assert all(m.get_buffer("codes").numel() == m.get_buffer("scales").numel() == 0 for m in packed)
    for module in packed:
        assert all(torch.equal(t, module.packed.tensors[f]) for f, t in module.packed.tensors.items())
    assert all(m.get_buffer("codes").numel() == 0 for m in packed)  # asking changes nothing
    again = model.state_dict()
    assert all(m.get_buffer("codes").numel() == 0 for m in packed)
    assert again.keys() == stored.keys() and all(torch.equal(again[n], t) for n, t in stored.items())
    assert torch.equal(logits(model), before)
    assert torch.equal(logits(model.to(torch.float32)), before)


def test_a_state_dict_is_whole_while_another_thread_runs_the_model(artifact: Callable[..., Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(artifact("llama"))
    sizes, stop = {name: tensor.shape for name, tensor in model.state_dict().items()}, threading.Event()

    def runs() -> None:
        while not stop.is_set():
            logits(model)
            for module in model.modules():
                if isinstance(module, PackedModule):
                    module._give_back()  # what a copy does, so that the next run takes the bytes again

    worker = threading.Thread(target=runs)
    worker.start()
    try:
        for _ in range(100):
            assert {name: tensor.shape for name, tensor in model.state_dict().items()} == sizes
    finally:
        stop.set()
        worker.join()


def test_gemma3_embedding_is_scaled_and_its_head_is_not(artifact: Callable[..., Path]) -> None:
    path = artifact("gemma3", embed_bits=8)
    model = AutoModelForCausalLM.from_pretrained(path)
    embedding = model.get_input_embeddings()
    table = unpack(embedding.packed).dequantize()
    torch.testing.assert_close(embedding(IDS), table[IDS] * 48**0.5)
    hidden = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model.get_output_embeddings()(hidden), hidden @ table.T, rtol=1e-4, atol=1e-4)


def test_generates_with_a_cache_what_it_generates_without(artifact: Callable[..., Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(artifact("llama", embed_bits=8))
    texts = [
        model.generate(
            IDS, max_new_tokens=8, do_sample=False, use_cache=cached, eos_token_id=None, pad_token_id=1
        )
        for cached in (True, False)
    ]
    assert texts[0].shape[1] == IDS.shape[1] + 8
    assert torch.equal(*texts)


# ---- registration


def start_python(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
total = float(model(torch.tensor([[7, 101, 30]])).logits.sum())
print(type(model.model.layers[0].mlp.up_proj).__name__, total)
"""


def test_either_import_order_registers_and_none_only_warns(artifact: Callable[..., Path]) -> None:
    path = str(artifact("llama"))
    with torch.no_grad():
        total = float(AutoModelForCausalLM.from_pretrained(path)(torch.tensor([[7, 101, 30]])).logits.sum())
    orders = ("import anybit\n", "import transformers\nimport anybit\n", "")
    started = [start_python(order + LOAD, path) for order in orders]  # at once: each imports for seconds
    *registered, without = [process.communicate() for process in started]
    for output, errors in registered:
        kind, value = output.split()
        assert kind == "QuantLinear", errors
        assert float(value) == pytest.approx(total, rel=1e-4)
    # What the README warns of: without us, Transformers makes the weights up. If it stops, say so there.
    assert "Unknown quantization type, got anybit" in without[1]
    assert without[0].startswith("Linear")


def test_import_costs_neither_torch_nor_transformers() -> None:
    code = "import sys, anybit; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    assert start_python(code).communicate()[0].strip() == "[]"


def test_registering_again_is_harmless() -> None:
    register()
    register()


def test_quantizing_on_load_is_refused(model_dir: Callable[[str], Path]) -> None:
    config = AnybitConfig(format_version=1, method="rtn", bits=4, layers={}, embeddings={})
    with pytest.raises(ValueError, match="pre-quantized"):
        AutoModelForCausalLM.from_pretrained(model_dir("llama"), quantization_config=config)


# ---- artifacts that lie


def edited(path: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    copied = tmp_path / "edited"
    copied.mkdir()
    for file in path.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    config = json.loads((copied / "config.json").read_text())
    edit(config)
    (copied / "config.json").write_text(json.dumps(config))
    return copied


def rename(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def edit(config: dict[str, Any]) -> None:
        layers = config["quantization_config"]["layers"]
        layers[new] = layers.pop(old)

    return edit


def layer(name: str, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["quantization_config"]["layers"][name].update(changes)


Q = "model.layers.0.self_attn.q_proj"
TILE = {"format": "group_int", "bits": 4, "group_size": 32, "symmetric": False}
LIES = {
    "newer version": (lambda c: c["quantization_config"].update(format_version=2), "upgrade anybit"),
    "version of another type": (lambda c: c["quantization_config"].update(format_version="1"), "damaged"),
    "layers of another type": (
        lambda c: c["quantization_config"].update(layers=[1]),
        "object of layer names",
    ),
    "unknown layer": (rename(Q, "model.layers.7.self_attn.q_proj"), "does not have"),
    "no linear layer": (rename(Q, "model.norm"), "not a Linear"),
    "shape": (layer(Q, shape=[96, 24]), r"\[96, 24\]"),
    "gigantic shape": (layer(Q, shape=[2**31 - 1, 2**31 - 1]), str(2**31 - 1)),
    "overflowing shape": (layer(Q, shape=[2**62, 48]), "positive sizes"),
    "negative shape": (layer(Q, shape=[-48, 48]), "positive sizes"),
    "no tiles": (layer(Q, tiles=[]), "tiles"),
    "unknown format": (layer(Q, tiles=[{**TILE, "format": "pickle"}]), "formats"),
    "width": (layer(Q, tiles=[{**TILE, "bits": 64}]), "1..8"),
    "group size": (layer(Q, tiles=[{**TILE, "group_size": 0}]), "group_size"),
    "rows beyond the matrix": (layer(Q, tiles=[{**TILE, "rows": 49}]), "more rows"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lying_config_is_refused_when_loaded(artifact: Callable[..., Path], tmp_path: Path, lie: str) -> None:
    edit, message = LIES[lie]
    path = edited(artifact("llama"), tmp_path, edit)
    with pytest.raises(InputError, match=message):
        AutoModelForCausalLM.from_pretrained(path)
    with pytest.raises(InputError):
        anybit.load(path)


def test_embedding_that_is_none_is_refused(artifact: Callable[..., Path], tmp_path: Path) -> None:
    def edit(config: dict[str, Any]) -> None:
        embeddings = config["quantization_config"]["embeddings"]
        embeddings["model.norm"] = embeddings.pop("model.embed_tokens")

    with pytest.raises(InputError, match="RMSNorm"):
        AutoModelForCausalLM.from_pretrained(edited(artifact("llama", embed_bits=8), tmp_path, edit))


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 64},
        {"vocab_size": 300},
        {"num_hidden_layers": 10**9},
        {"num_attention_heads": 0},
        {"hidden_size": 2**40},
    ],
    ids=str,
)
def test_load_refuses_a_config_that_is_not_the_weights(
    artifact: Callable[..., Path], tmp_path: Path, change: dict[str, int]
) -> None:
    path = edited(artifact("llama"), tmp_path, lambda config: config.update(change))
    with pytest.raises(InputError) as refusal:
        anybit.load(path)
    assert "\n" not in str(refusal.value)


def test_load_refuses_to_make_up_a_missing_tensor(artifact: Callable[..., Path], tmp_path: Path) -> None:
    """Transformers itself warns and goes on with random numbers."""
    path = edited(artifact("llama"), tmp_path, lambda config: None)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    file = path / index["weight_map"].pop("model.norm.weight")
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"model\.norm\.weight"):
        anybit.load(path)


def test_config_of_an_artifact_is_plain(
    artifact: Callable[..., Path], model_dir: Callable[[str], Path]
) -> None:
    path = artifact("llama", embed_bits=8)
    text = (path / "config.json").read_text() + (path / "README.md").read_text()
    assert str(model_dir("llama").parent) not in text, "where the base lay is nobody's business"
    config = AutoConfig.from_pretrained(path)
    assert config.quantization_config["quant_method"] == "anybit"
    assert config.architectures == ["LlamaForCausalLM"]


def test_a_config_that_lost_a_layer_is_refused(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    anybit.quantize(model_dir("llama"), tmp_path / "out", builders.options("rtn"))
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    name = next(iter(config["quantization_config"]["layers"]))
    for change in (lambda layers: layers.pop(name), lambda layers: layers.clear()):
        change(config["quantization_config"]["layers"])
        file.write_text(json.dumps(config))
        with pytest.raises(InputError, match="says nothing of"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "out")
