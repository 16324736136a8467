"""Artifacts whose config.json lies are refused when they are loaded."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import anybit
from anybit.errors import InputError
from anybit.formats.layout import LayerLayout
from anybit.layers import QuantLinear
from tests import builders


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
    "newer version": (lambda c: c["quantization_config"].update(format_version=3), "upgrade anybit"),
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
def test_lying_config_is_refused_when_loaded(
    artifact_of: Callable[..., Path], tmp_path: Path, lie: str
) -> None:
    edit, message = LIES[lie]
    path = edited(artifact_of("llama"), tmp_path, edit)
    with pytest.raises(InputError, match=message):
        AutoModelForCausalLM.from_pretrained(path)
    with pytest.raises(InputError, match=rf"{message}|lacks the tensor|config\.json asks for"):
        anybit.load(path)


def test_embedding_that_is_none_is_refused(artifact_of: Callable[..., Path], tmp_path: Path) -> None:
    def edit(config: dict[str, Any]) -> None:
        embeddings = config["quantization_config"]["embeddings"]
        embeddings["model.norm"] = embeddings.pop("model.embed_tokens")

    with pytest.raises(InputError, match="RMSNorm"):
        AutoModelForCausalLM.from_pretrained(edited(artifact_of("llama", embed_bits=8), tmp_path, edit))


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
    artifact_of: Callable[..., Path], tmp_path: Path, change: dict[str, int]
) -> None:
    path = edited(artifact_of("llama"), tmp_path, lambda config: config.update(change))
    with pytest.raises(InputError) as refusal:
        anybit.load(path)
    assert "\n" not in str(refusal.value)


def test_load_refuses_to_make_up_a_missing_tensor(artifact_of: Callable[..., Path], tmp_path: Path) -> None:
    """Transformers itself warns and goes on with random numbers."""
    path = edited(artifact_of("llama"), tmp_path, lambda config: None)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    file = path / index["weight_map"].pop("model.norm.weight")
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"model\.norm\.weight"):
        anybit.load(path)


def test_config_of_an_artifact_is_plain(
    artifact_of: Callable[..., Path], model_dir: Callable[[str], Path]
) -> None:
    path = artifact_of("llama", embed_bits=8)
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


def renamed(path: Path, old: str, new: str) -> None:
    """Give a stored tensor another name, in its shard and in the index."""
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"][new] = index["weight_map"].pop(old)
    shard = path / index["weight_map"][new]
    save_file(
        {new if n == old else n: t for n, t in load_file(shard).items()}, shard, metadata={"format": "pt"}
    )
    file.write_text(json.dumps(index))


@pytest.mark.parametrize("name", [f"{Q}.codes", f"{Q}.scales", "model.norm.weight"])
def test_a_missing_tensor_is_refused(artifact_of: Callable[..., Path], tmp_path: Path, name: str) -> None:
    """Transformers would run on what lay in memory, and `save_pretrained` would store it."""
    path = edited(artifact_of("llama"), tmp_path, lambda config: None)
    renamed(path, name, f"{name}.moved")
    for load in (AutoModelForCausalLM.from_pretrained, anybit.load):
        with pytest.raises(InputError, match=rf"lacks the tensor {re.escape(name)}|lacks {re.escape(name)}"):
            load(path)


def test_a_tensor_too_many_is_refused(artifact_of: Callable[..., Path], tmp_path: Path) -> None:
    path = edited(artifact_of("llama"), tmp_path, lambda config: None)
    shard = path / "model-00001-of-00003.safetensors"
    save_file(
        {**load_file(shard), "model.extra": load_file(shard)["model.norm.weight"]},
        shard,
        metadata={"format": "pt"},
    )
    with pytest.raises(InputError, match=r"holds model\.extra"):
        AutoModelForCausalLM.from_pretrained(path)


def rewritten(path: Path, header: Callable[[bytes], bytes]) -> None:
    """Change the headers of all shards, as text; the data stays."""
    for shard in path.glob("*.safetensors"):
        data = shard.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        text = header(data[8:end])
        shard.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


@pytest.mark.parametrize("spaces", range(1, 8))
def test_headers_of_any_length_are_as_good(
    artifact_of: Callable[..., Path], tmp_path: Path, spaces: int
) -> None:
    """safetensors asks for no alignment, and Transformers maps the files: numbers lie at odd addresses."""
    path = edited(artifact_of("llama-tied", embed_bits=8), tmp_path, lambda config: None)
    ids = torch.arange(6)[None]
    expected = AutoModelForCausalLM.from_pretrained(path)(ids).logits
    rewritten(path, lambda text: text + b" " * spaces)
    for load in (AutoModelForCausalLM.from_pretrained, anybit.load):
        model = load(path)
        assert torch.equal(model(ids).logits, expected)
        assert all(t.data_ptr() % t.itemsize == 0 for t in model.state_dict().values())


@pytest.mark.parametrize(
    ("kept", "words"),
    [(torch.nan, "NaN or Inf"), (-torch.inf, "NaN or Inf"), (None, "int32, expected a floating")],
)
def test_weights_that_nothing_can_be_computed_with(
    artifact_of: Callable[..., Path], tmp_path: Path, kept: float | None, words: str
) -> None:
    path = edited(artifact_of("llama"), tmp_path, lambda config: None)
    shard = next(f for f in path.glob("*.safetensors") if "model.norm.weight" in load_file(f))
    tensors = load_file(shard)
    if kept is None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].view(torch.int32)
    else:
        tensors["model.norm.weight"][3] = kept
    save_file(tensors, shard, metadata={"format": "pt"})
    for load in (AutoModelForCausalLM.from_pretrained, anybit.load):
        with pytest.raises(InputError, match=rf"model\.norm\.weight .*{words}"):
            load(path)


def test_buffers_start_as_zeros() -> None:
    layer = QuantLinear(LayerLayout.from_json("layer", {"shape": [40, 80], "tiles": [TILE]}), bias=False)
    assert all(not tensor.any() for tensor in layer.buffers())


@pytest.mark.parametrize("detour", ["transformers_weights", "adapter"])
def test_other_weights_beside_the_artifacts_are_refused(
    artifact_of: Callable[..., Path], tmp_path: Path, detour: str
) -> None:
    """Transformers would load what nobody has checked."""
    first = "model-00001-of-00003.safetensors"
    change = {"transformers_weights": first} if detour == "transformers_weights" else {}
    path = edited(artifact_of("llama"), tmp_path, lambda config: config.update(change))
    if detour == "adapter":
        (path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match=r"transformers_weights|adapter_config\.json"):
        anybit.load(path)
    if detour == "transformers_weights":
        with pytest.raises(InputError, match=r"lacks the tensor|names other weights"):
            AutoModelForCausalLM.from_pretrained(path)
