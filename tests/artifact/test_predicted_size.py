"""Predicted sizes against the files of real artifacts: sizes are never too small, and widths count every layer."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

import anybit
from anybit.artifact.contents import Plan
from anybit.artifact.reader import open_artifact
from anybit.artifact.sizes import inspect
from anybit.artifact.verify import verify
from anybit.artifact.writer import ArtifactWriter
from anybit.config import LayerSpec, SpecMap, TileSpec
from anybit.errors import InputError
from anybit.estimate import scratch_bytes
from anybit.plan import make_plan
from anybit.prepare import open_streamed
from tests import builders
from tests.builders import COMMON, SIZES, byte_tokenizer

SHORT = {"samples": 3, "seq_len": 24, "group_size": 32}
ROWS = (TileSpec(8, 32, rows=tuple(range(8))), TileSpec(3, 32, rows=tuple(range(8, 48))))


def planned(model: Path, config: builders.Options, spec_map: SpecMap | None = None) -> Plan:
    return make_plan(open_streamed(model), config, spec_map)


def real_bytes(out: Path) -> int:
    """All files but the tokenizer, listed here by hand."""
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"}
    return sum(file.stat().st_size for file in out.iterdir() if file.name not in tokenizer)


def check_size(
    model: Path, text: Path, out: Path, config: builders.Options, specs: SpecMap | None = None
) -> int:
    """Quantize, and hold the prediction against the files."""
    predicted = planned(model, config, specs).size_bytes
    anybit.quantize(model, out, config, spec_map=specs, calibration=str(text))
    real = real_bytes(out)
    assert inspect(out)["size_bytes"] == real
    assert real <= predicted <= real + max(5_000, real // 100), (predicted, real)
    return real


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"method": "gptq", "bits": 3, "desc_act": True}),
        ("gpt2", {"method": "rtn", "bits": 3, "exclude": ("*.1.*",)}),
        ("gemma3", {"method": "rtn", "bits": 2, "symmetric": True, "embed_bits": 8}),
        ("opt", {"method": "gptq", "bits": 8, "embed_bits": 4}),
    ],
)
def test_size_is_never_exceeded_and_close(
    model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    check_size(model_dir(family), text_file, tmp_path / "out", builders.options(**SHORT, **options))


FAMILIES = ("llama", "gpt2", "llama-tied", "gemma3")
CASES = list(itertools.product([8, None], [2, 2.1, 2.25, 4.5, 8]))


@pytest.mark.parametrize(
    ("family", "embed_bits", "bits"), [(FAMILIES[i % 4], *case) for i, case in enumerate(CASES)]
)
def test_size_of_base_and_enhancement_layers(
    model_dir: Callable[[str], Path],
    text_file: Path,
    tmp_path: Path,
    family: str,
    embed_bits: int | None,
    bits: float,
) -> None:
    """Layers of the base layer may have any plane, and those whose rows are padded more may get more of the width.

    What embeddings get is not known before: all of their planes are counted.
    """
    config = builders.options("anybit", bits, samples=3, seq_len=24, embed_bits=embed_bits)
    plan = planned(model_dir(family), config)
    anybit.quantize(model_dir(family), tmp_path / "out", config, calibration=str(text_file))
    real = real_bytes(tmp_path / "out")
    assert inspect(tmp_path / "out")["size_bytes"] == real <= plan.size_bytes
    assert plan.size_bytes <= (3 if embed_bits is None else 1.5) * real  # a tiny model
    assert inspect(tmp_path / "out")["bits_per_weight"] <= plan.bits_per_weight


def test_disk_that_the_method_anybit_takes_besides(
    model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just before the artifact gets its name, all planes lie beside it, a byte a weight."""
    config = builders.options("anybit", samples=3, seq_len=24)
    streamed, publish, taken = open_streamed(model_dir("llama")), ArtifactWriter._publish, []

    def watched(self: ArtifactWriter) -> None:
        taken.append(sum(f.stat().st_size for f in self.folder.rglob("*") if f.is_file()))
        publish(self)

    monkeypatch.setattr(ArtifactWriter, "_publish", watched)
    anybit.quantize(model_dir("llama"), tmp_path / "out", config, calibration=str(text_file))
    made = make_plan(streamed, config)
    needed = scratch_bytes(streamed, made, config) + made.size_bytes
    assert taken[0] <= needed <= 1.05 * taken[0]


def test_size_counts_the_licence(model_copy: Callable[[str], Path], text_file: Path, tmp_path: Path) -> None:
    model, config = model_copy("llama"), builders.options("rtn", **SHORT)
    without = check_size(model, text_file, tmp_path / "without", config)
    (model / "LICENSE").write_bytes(b"x" * 60_000)
    with_it = check_size(model, text_file, tmp_path / "with", config)
    listed = [(tmp_path / out / "anybit.index.json").stat().st_size for out in ("with", "without")]
    assert with_it == without + 60_000 + listed[0] - listed[1]


def test_size_with_several_tiles(model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path) -> None:
    config = builders.options("rtn", **SHORT)
    specs = {f"model.layers.{i}.self_attn.q_proj": LayerSpec(config, ROWS) for i in range(2)}
    check_size(model_dir("llama"), text_file, tmp_path / "out", config, specs)


def test_size_of_many_layers(text_file: Path, tmp_path: Path) -> None:
    config = LlamaConfig(**COMMON, **{**SIZES, "num_hidden_layers": 30})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    options = builders.options("rtn", **SHORT)
    real = check_size(tmp_path / "model", text_file, tmp_path / "out", options)
    predicted = planned(tmp_path / "model", options).size_bytes
    assert predicted < real + 20_000


def test_values_beyond_float16_do_not_exceed_it(
    model_copy: Callable[[str], Path], text_file: Path, tmp_path: Path
) -> None:
    """They make the dtype in the header a letter longer."""
    model = model_copy("llama")
    tensors = load_file(model / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name][0, 0] = 1e5
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    check_size(model, text_file, tmp_path / "out", builders.options("rtn", **SHORT))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_bits_count_all_linear_layers_of_the_blocks(
    model_dir: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    config = builders.options("rtn", **SHORT, exclude=("*.1.*",))
    plan, out = planned(model_dir(family), config), tmp_path / "out"
    made = anybit.quantize(model_dir(family), out, config)
    stored = {n: t for f in out.glob("*.safetensors") for n, t in load_file(f).items()}
    base = load_file(model_dir(family) / "model.safetensors")
    block = {"llama": "layers.", "gpt2": "h."}[family]
    linear = {n.removesuffix(".weight"): t for n, t in base.items() if block in n and t.ndim == 2}
    fields = ("weight", "codes", "scales", "zeros")
    data = sum(stored[f"{n}.{f}"].nbytes for n in linear for f in fields if f"{n}.{f}" in stored)
    weights = sum(t.numel() for t in linear.values())
    assert plan.bits_per_weight == made.bits_per_weight == 8 * data / weights > 10
    halves = [16 * t.numel() if ".1." in n else 4 * t.numel() for n, t in linear.items()]
    assert plan.code_bits == made.bits == sum(halves) / weights
    layers = {layer["name"]: layer for layer in inspect(out)["layers"]}
    assert layers.keys() == linear.keys()
    dense = {n: layer for n, layer in layers.items() if ".1." in n}
    for name, layer in dense.items():
        assert layer["tiles"] == [{"format": "dense", "dtype": "float16", "bits": 16}]
        assert layer["bits"] == layer["bits_per_weight"] == 16 and layer["bytes"] == 2 * linear[name].numel()
    recorded = json.loads((out / "config.json").read_text())["quantization_config"]["dense"]
    assert recorded == {name: layer["shape"] for name, layer in dense.items()}
    assert verify(out)["hashes_checked"]
    AutoModelForCausalLM.from_pretrained(out).save_pretrained(tmp_path / "again")  # in the base's float32
    assert inspect(tmp_path / "again")["bits"] == (sum(halves) + 16 * weights / 2) / weights


@pytest.mark.parametrize(
    ("dense", "words"),
    [
        ([1], "must be an object"),
        ({"model.norm": [48]}, "expected .out, in."),
        ({"model.norm": [48, True]}, "expected .out, in."),
        ({"model.layers.9.x": [48, 48]}, "no such tensor"),
        ({"lm_head": [48, 48]}, r"has it as \[264, 48\]"),
    ],
)
def test_lies_about_dense_layers_are_refused(
    model_dir: Callable[[str], Path], tmp_path: Path, dense: Any, words: str
) -> None:
    out = tmp_path / "out"
    anybit.quantize(model_dir("llama"), out, builders.options("rtn", **SHORT))
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["dense"] = dense
    (out / "config.json").write_text(json.dumps(config))
    for reader in (open_artifact, inspect):
        with pytest.raises(InputError, match=words):
            reader(out)


def test_artifacts_without_the_list_are_read(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    anybit.quantize(model_dir("llama"), out, builders.options("rtn", **SHORT))
    before = inspect(out)
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]["dense"]
    (out / "config.json").write_text(json.dumps(config))
    assert inspect(out)["bits_per_weight"] == before["bits_per_weight"]
