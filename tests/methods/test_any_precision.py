"""Any-Precision: one artifact of several widths; codebook methods on several families."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import anybit
from anybit.artifact.sizes import inspect, table_of_levels
from anybit.artifact.verify import verify
from anybit.checkpoint import safetensors as checkpoint_module
from anybit.errors import InputError
from anybit.layers import PackedModule
from anybit.loader import load
from tests import builders
from tests.builders import MakeModel
from tests.probes import logits

SMALL: dict[str, Any] = {"samples": 2, "seq_len": 16}


@pytest.fixture(scope="module")
def parent(model_dir: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("parent") / "out"
    anybit.quantize(model_dir("llama"), out, builders.options("any-precision", **SMALL))
    return out


TOKENS = torch.arange(3, 27).view(2, 12)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "opt", "gemma3"])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("squeezellm", {"bits": 3, "magnitude_outliers": 0.004, "embed_bits": 8}),
        ("any-precision", {"widths": (3, 5)}),
        ("cmpq", {"bits": 3.4, "embed_bits": 8}),
    ],
)
def test_every_method_on_every_family(
    family: str, method: str, options: dict[str, Any], model_dir: MakeModel, tmp_path: Path
) -> None:
    config = builders.options(method, **options, **SMALL)
    anybit.quantize(model_dir(family), tmp_path / "out", config)
    verify(tmp_path / "out")
    loaded = load(tmp_path / "out")
    got = logits(loaded, TOKENS)
    assert torch.isfinite(got).all()
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again"), TOKENS), got)
    assert not (tmp_path / "out.partial").exists()


def test_one_file_serves_every_width(parent: Path) -> None:
    model = load(parent)
    buffers = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    seen = {}
    for bits in (3, 8, 4, 5, 6, 7, 3):
        model.set_bits(bits)
        seen[bits] = logits(model, TOKENS)
        torch.testing.assert_close(seen[bits], logits(load(parent, bits=bits), TOKENS), rtol=1e-5, atol=1e-5)
    assert {name: buffer.data_ptr() for name, buffer in model.named_buffers()} == buffers
    distances = [float((seen[b] - seen[8]).square().mean()) for b in (3, 4, 5, 6, 7)]
    assert distances == sorted(distances, reverse=True)


def test_only_the_planes_of_the_width_are_read(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = checkpoint_module._read_span

    def counted(*args: Any, **kwargs: Any) -> np.ndarray:
        array = original(*args, **kwargs)
        read.append(array.nbytes)
        return array

    monkeypatch.setattr(checkpoint_module, "_read_span", counted)
    sizes = {}
    for bits in (3, 7):
        read.clear()
        model = load(parent, bits=bits)
        sizes[bits] = sum(read)
        packed = [m for m in model.modules() if isinstance(m, PackedModule)]
        assert packed
        assert all(m.planes.shape[0] == bits for m in packed)
        tables = [b for b in range(2, 9) if hasattr(packed[0], f"codebook_{b}")]
        assert tables == list(range(3, bits + 1))
        assert [level.bits for level in model.levels] == tables
    figures = {bits: inspect(parent, bits=bits) for bits in (3, 7)}
    assert sizes[7] - sizes[3] == figures[7]["size_bytes"] - figures[3]["size_bytes"]


def test_what_inspect_tells_of_widths(parent: Path) -> None:
    figures = inspect(parent)
    assert figures["bits"] == 8
    assert [level["bits"] for level in figures["levels"]] == [3, 4, 5, 6, 7, 8]
    assert figures["levels"][-1]["bits_per_weight"] == figures["bits_per_weight"]
    assert figures["levels"][-1]["size_bytes"] == figures["size_bytes"]
    assert figures["file_bits_per_weight"] > figures["bits_per_weight"]
    assert inspect(parent, bits=4)["bits"] == 4
    stored = sum(
        tensor.numel() * tensor.element_size()
        for file in parent.glob("*.safetensors")
        for name, tensor in load_file(file).items()
        if ".layers." in name and "norm" not in name and "bias" not in name
    )
    assert figures["file_bits_per_weight"] == pytest.approx(8 * stored / figures["weights"])
    with pytest.raises(InputError, match="3, 4, 5, 6, 7, 8"):
        inspect(parent, bits=2)


def test_widths_that_are_not_there(parent: Path, model_dir: MakeModel, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="3, 4, 5, 6, 7, 8, not 2"):
        load(parent, bits=2)
    model = load(parent)
    with pytest.raises(InputError, match="not 9"):
        model.set_bits(9)
    with pytest.raises(InputError, match="no artifact of several widths"):
        load(model_dir("llama"), bits=4)
    anybit.quantize(model_dir("llama"), tmp_path / "rtn", builders.options("rtn"))
    with pytest.raises(InputError, match=r"one width, 4\.00 bits, not 3"):
        load(tmp_path / "rtn", bits=3)
    model = load(tmp_path / "rtn", bits=4)
    assert model.set_bits(4) == 4
    with pytest.raises(InputError, match=r"one width, 4\.00 bits, not 5"):
        model.set_bits(5)
    with pytest.raises(InputError, match="no levels"):
        anybit.set_bits(load(model_dir("llama")), 4)


def test_budgets_pick_a_width(parent: Path) -> None:
    """As of the method anybit: the largest level that fits, or an error with what the smallest takes."""
    levels = table_of_levels(parent)
    for i, level in enumerate(levels):
        for budget in ({"bpw": level["bits_per_weight"]}, {"size": level["size_bytes"]}):
            assert inspect(parent, **budget)["bits"] == level["bits"]
            assert load(parent, **budget).levels[-1].bits == level["bits"]
            less = {key: value - (1 if key == "size" else 1e-6) for key, value in budget.items()}
            if i:
                assert inspect(parent, **less)["bits"] == levels[i - 1]["bits"]
            else:
                with pytest.raises(InputError, match=r"not to be had.*at its smallest, 3\.00 bits, takes"):
                    inspect(parent, **less)


def test_a_width_between_two_runs_the_lower(parent: Path) -> None:
    model = load(parent, bits=4.6)
    assert model.levels[-1].bits == 4
    assert anybit.set_bits(model, 3.9) == 3
    assert torch.equal(logits(model, TOKENS), logits(load(parent, bits=3), TOKENS))


def test_a_width_loaded_alone_can_be_saved(parent: Path, tmp_path: Path) -> None:
    model = load(parent, bits=4)
    model.save_pretrained(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(again, TOKENS), logits(model, TOKENS))
    assert inspect(tmp_path / "out")["bits"] == 4


@pytest.mark.slow
def test_eval_and_generate_take_a_width(parent: Path) -> None:
    figures = anybit.evaluate(parent, bits=3, seq_len=16, max_tokens=64)
    assert figures["bits"] == 3
    assert figures["bits_per_weight"] == inspect(parent, bits=3)["bits_per_weight"]


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda t: t.__setitem__("planes", t["planes"][:, :, :-1].contiguous()), "planes"),
        (lambda t: t.__setitem__("planes", t["planes"][:-1].contiguous()), "planes"),
        (lambda t: t.__setitem__("codebook_4", t["codebook_4"][:, :-1].contiguous()), "codebook_4"),
        (lambda t: t.pop("codebook_5"), "codebook_5"),
        (lambda t: t["codebook_3"].view(torch.uint8)[0].copy_(torch.arange(16)), "codebook_3"),
        (lambda t: t["codebook_6"].fill_(torch.nan), "codebook_6"),
    ],
)
def test_damaged_tensors_are_named(
    parent: Path, tmp_path: Path, damage: Callable[[dict[str, torch.Tensor]], Any], word: str
) -> None:
    import shutil

    shutil.copytree(parent, tmp_path / "out")
    file = sorted((tmp_path / "out").glob("model-*.safetensors"))[1]
    tensors = load_file(file)
    name = "model.layers.0.self_attn.q_proj"
    layer = {
        key.removeprefix(f"{name}."): tensors.pop(key) for key in list(tensors) if key.startswith(f"{name}.")
    }
    if word == "codebook_3":
        layer["codebook_3"] = layer["codebook_3"].flip(1).contiguous()
    else:
        damage(layer)
    save_file(tensors | {f"{name}.{f}": t for f, t in layer.items()}, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=f"{name}.{word}"):
        load(tmp_path / "out")


def test_flipped_bytes_are_found(parent: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(parent, tmp_path / "out")
    file = sorted((tmp_path / "out").glob("model-*.safetensors"))[1]
    data = bytearray(file.read_bytes())
    data[-100] ^= 16
    file.write_bytes(data)
    with pytest.raises(InputError, match=file.name):
        verify(tmp_path / "out")


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        ({"bits": 4, "widths": [3, 4]}, "stores all of its widths"),
        ({"bits": 4}, "bits would be ignored"),
        ({"widths": [4, 3]}, "ascending"),
        ({"widths": None}, "widths"),
        ({"codebook_bits": 7}, "16, 8, 4"),
        ({"group_size": 32, "damp": 0.5}, "unknown field .damp. of any-precision"),
        ({"error_outliers": 0.01}, "unknown field .error_outliers."),
        ({"sensitive_outliers": 0.01}, "unknown field .sensitive_outliers."),
    ],
)
def test_specs_that_cannot_be(entry: dict[str, Any], word: str, model_dir: MakeModel, tmp_path: Path) -> None:
    from anybit.config import read_spec_map
    from anybit.plan import make_plan
    from tests.builders import opened

    config = builders.options("any-precision", **SMALL)
    (tmp_path / "map.json").write_text(json.dumps({"model.layers.0.self_attn.q_proj": entry}))
    with pytest.raises(InputError, match=f"spec.*{word}"):
        spec_map = read_spec_map(tmp_path / "map.json", builders.spec_of(config))
        make_plan(opened(model_dir("llama")), config, spec_map)
