"""Artifacts inside Transformers: logits against the base model with its weights replaced, and round trips."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

import anybit
from anybit.artifact.sizes import inspect
from anybit.artifact.verify import verify
from anybit.config import LayerSpec, TileSpec
from anybit.formats.layout import LayerLayout
from anybit.formats.weight import PackedWeight, unpack
from anybit.integrations.transformers import AnybitConfig, register
from anybit.layers import QuantEmbedding, QuantLinear, TiedHead
from tests import builders
from tests.builders import FAMILIES
from tests.probes import logits, stored

IDS = torch.tensor([[7, 101, 30, 30, 99, 250, 3, 17, 64, 5, 200, 41, 77, 8, 9, 10, 11, 120, 13, 14, 15]])
TIED = ("llama-tied", "gemma3", "gpt2", "opt")


def oracle(base: Path, path: Path) -> nn.Module:
    """The base model with every weight replaced by what the artifact's bytes stand for."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    quantization = json.loads((path / "config.json").read_text())["quantization_config"]
    layouts = {**quantization["layers"], **quantization["embeddings"]}
    tensors = stored(path)
    state = {}
    for name, layout in layouts.items():
        parsed = LayerLayout.from_json(name, layout)
        fields = {field: tensors.pop(f"{name}.{field}") for field in parsed.stored_tensors()}
        dense = unpack(PackedWeight(parsed, fields)).dequantize()
        state[f"{name}.weight"] = dense.T if isinstance(model.get_submodule(name), Conv1D) else dense
    missing, unexpected = model.load_state_dict(state | tensors, strict=False)
    assert not unexpected
    assert set(missing) <= set(model.all_tied_weights_keys)
    return model.eval()


def assert_same_function(model: nn.Module, expected: nn.Module) -> None:
    """Many tokens (dequantized GEMM) and one token (fused kernel) give the oracle's logits."""
    torch.testing.assert_close(logits(model, IDS), logits(expected, IDS), rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        one = model(IDS[:, :1]).logits, expected(IDS[:, :1]).logits
    torch.testing.assert_close(*one, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("embed_bits", [16, 8, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_base_with_dequantized_weights(
    artifact_of: Callable[..., Path], model_dir: Callable[[str], Path], family: str, embed_bits: int
) -> None:
    path = artifact_of(family, embed_bits=embed_bits)
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
    artifact_of: Callable[..., Path], model_dir: Callable[[str], Path], options: dict[str, Any]
) -> None:
    path = artifact_of("llama", **options)
    assert_same_function(AutoModelForCausalLM.from_pretrained(path), oracle(model_dir("llama"), path))


def test_mixed_widths_in_one_matrix(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    rows, columns = tuple(range(0, 48, 3)), tuple(reversed(range(16)))
    rest = tuple(i for i in range(48) if i not in rows)
    config = builders.options("rtn", group_size=32)
    tiles = {
        "model.layers.0.self_attn.q_proj": (TileSpec(8, 16, rows=rows), TileSpec(3, 16, rows=rest)),
        "model.layers.1.self_attn.o_proj": (
            TileSpec(8, 16, cols=columns),
            TileSpec(4, 32, True, cols=tuple(range(16, 48))),
        ),
    }
    spec_map = {name: LayerSpec(config, made) for name, made in tiles.items()}
    anybit.quantize(model_dir("llama"), tmp_path / "out", config, spec_map=spec_map)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert len(model.model.layers[0].self_attn.q_proj.layout.tiles) == 2
    assert_same_function(model, oracle(model_dir("llama"), tmp_path / "out"))
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(model, IDS), logits(again, IDS))


@pytest.mark.parametrize(
    ("family", "embed_bits"), [("llama", 16), ("llama", 8), ("llama-tied", 16), ("gemma3", 4), ("gpt2", 8)]
)
def test_save_pretrained_round_trip(
    artifact_of: Callable[..., Path], tmp_path: Path, family: str, embed_bits: int
) -> None:
    path = artifact_of(family, embed_bits=embed_bits)
    model = AutoModelForCausalLM.from_pretrained(path)
    before = logits(model, IDS)  # the kernels are bound now, which must not change what is saved
    model.save_pretrained(tmp_path / "again")
    expected, found = stored(path), stored(tmp_path / "again")
    assert found.keys() == expected.keys()
    for name in packed_fields(path):
        assert found[name].dtype == expected[name].dtype
        assert torch.equal(found[name], expected[name]), name
    for name in expected.keys() - packed_fields(path):
        assert torch.equal(found[name].float(), expected[name].float()), name
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(again, IDS), before)
    assert inspect(tmp_path / "again")["bits_per_weight"] == inspect(path)["bits_per_weight"]
    assert verify(tmp_path / "again") == {
        "files": 1,
        "layers": len(inspect(path)["layers"] + inspect(path)["embeddings"]),
        "hashes_checked": False,
    }


def packed_fields(path: Path) -> set[str]:
    quantization = json.loads((path / "config.json").read_text())["quantization_config"]
    layouts = {**quantization["layers"], **quantization["embeddings"]}
    parsed = {name: LayerLayout.from_json(name, layout) for name, layout in layouts.items()}
    return {f"{name}.{field}" for name, layout in parsed.items() for field in layout.stored_tensors()}


def test_artifact_files_are_readable_by_others(artifact_of: Callable[..., Path]) -> None:
    """safetensors itself makes files that only their owner reads."""
    for file in artifact_of("llama").iterdir():
        assert file.stat().st_mode & 0o444 == 0o444, file.name


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_computing_in_another_dtype_keeps_the_stored_one(
    artifact_of: Callable[..., Path], family: str, dtype: torch.dtype
) -> None:
    path = artifact_of(family, embed_bits=8, exclude=("*o_proj",))
    expected = {n: t for n, t in stored(path).items() if n in packed_fields(path)}
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    moved = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    logits(moved, IDS)
    moved.to(dtype)
    for model in (loaded, moved):
        state = model.state_dict()
        for name, tensor in expected.items():
            assert state[name].dtype == tensor.dtype, name
            assert torch.equal(state[name], tensor), name
        assert logits(model, IDS).dtype == dtype
    assert (
        loaded.get_submodule(next(n for n, _ in loaded.named_modules() if n.endswith("o_proj"))).weight.dtype
        == dtype
    )
    full = logits(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), IDS).flatten()
    for model in (loaded, moved):
        assert nn.functional.cosine_similarity(full, logits(model, IDS).float().flatten(), dim=0) > 0.99


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


@pytest.mark.e2e
def test_either_import_order_registers_and_none_only_warns(artifact_of: Callable[..., Path]) -> None:
    path = str(artifact_of("llama"))
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
    before = [dict(m) for m in (AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING)]
    register()
    assert before == [AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING]
    assert before[0]["anybit"] is AnybitConfig


def test_quantizing_on_load_is_refused(model_dir: Callable[[str], Path]) -> None:
    config = AnybitConfig(format_version=1, method="rtn", bits=4, layers={}, embeddings={})
    with pytest.raises(ValueError, match="pre-quantized"):
        AutoModelForCausalLM.from_pretrained(model_dir("llama"), quantization_config=config)
