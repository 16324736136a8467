"""One file, any size: an artifact of the method anybit at load and at run time."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from anybit.artifact import files
from anybit.artifact.config_json import StoredLayers
from anybit.artifact.enhancements import read_enhancements
from anybit.artifact.sizes import table_of_levels
from anybit.errors import InputError
from anybit.integrations import transformers as integration
from anybit.kernels import cpu
from anybit.loader import load
from tests.probes import Recorder, logits

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"no native extension: {cpu.why_not()}")
IDS = torch.arange(3, 40)[None]


@pytest.mark.parametrize("bits", [2.1, 3.3, 5.0, 8.0])
def test_a_width_at_load_is_the_same_at_run_time(anybit_artifact: Path, bits: float) -> None:
    at_load, whole = load(anybit_artifact, bits=bits), load(anybit_artifact)
    everything = logits(whole, IDS)
    assert round(whole.set_bits(bits), 2) <= bits + 1e-6
    assert torch.equal(logits(whole, IDS), logits(at_load, IDS))
    assert bits == 8 or not torch.equal(logits(whole, IDS), everything)
    whole.set_bits(8)
    assert torch.equal(logits(whole, IDS), everything)


def test_switching_copies_no_plane(anybit_artifact: Path) -> None:
    model = load(anybit_artifact)
    before = {n: b.data_ptr() for n, b in model.named_buffers() if "plane" in n}
    for bits in (2.5, 6.0, 3.1):
        model.set_bits(bits)
        logits(model, IDS)
    assert before == {n: b.data_ptr() for n, b in model.named_buffers() if "plane" in n}


def test_only_what_a_width_needs_is_read(anybit_copy: Path) -> None:
    widths = [level["bits"] for level in table_of_levels(anybit_copy)]
    for file in sorted(anybit_copy.glob("refine-*.safetensors"))[12:]:
        file.write_bytes(b"damaged")
    model, larger = (load(anybit_copy, bits=widths[at]) for at in (10, 12))
    planes, more = (sum(b.numel() for n, b in m.named_buffers() if "plane" in n) for m in (model, larger))
    assert planes < more
    with pytest.raises(InputError, match=rf"not complete.* {widths[15]:g} bits need more"):
        load(anybit_copy, bits=widths[15])


def test_budgets_of_bytes(anybit_artifact: Path) -> None:
    levels = table_of_levels(anybit_artifact)
    target = levels[20]
    for budget in ({"bpw": target["bits_per_weight"]}, {"size": target["size_bytes"]}):
        model = load(anybit_artifact, **budget)
        assert model.levels[-1].bits == pytest.approx(target["bits"])
        less = {key: value - 1e-3 if key == "bpw" else value - 1 for key, value in budget.items()}
        assert load(anybit_artifact, **less).levels[-1].bits == pytest.approx(levels[19]["bits"])
    for budget in ({"bpw": 0.5}, {"size": 1000}):
        with pytest.raises(InputError, match="not to be had"):
            load(anybit_artifact, **budget)
    with pytest.raises(InputError, match="give one of them"):
        load(anybit_artifact, bits=3, bpw=3.3)


@pytest.mark.parametrize("bits", [1.0, 1.6, 8.2, 20])
def test_widths_that_are_not_there_are_refused(anybit_artifact: Path, bits: float) -> None:
    with pytest.raises(InputError, match=r"from \d\.\d\d to 8\.00 bits"):
        load(anybit_artifact, bits=bits)
    model = load(anybit_artifact)
    with pytest.raises(InputError, match=r"from \d\.\d\d to 8\.00 bits"):
        model.set_bits(bits)


def test_transformers_loads_all_levels(anybit_artifact: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(anybit_artifact).eval()
    assert torch.equal(logits(model, IDS), logits(load(anybit_artifact), IDS))
    assert model.set_bits(3.0) == pytest.approx(3.0, abs=0.1)


def test_what_runs_can_be_saved_as_one_model(anybit_artifact: Path, tmp_path: Path) -> None:
    model = load(anybit_artifact, bits=4.0)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(logits(again, IDS), logits(model, IDS))


def test_the_base_layer_alone_is_a_width(anybit_artifact: Path) -> None:
    bits = table_of_levels(anybit_artifact)[0]["bits"]
    model = load(anybit_artifact, bits=bits)
    assert model.set_bits(bits) == bits
    with pytest.raises(InputError, match=r"one width, \d\.\d\d bits, not 4"):
        model.set_bits(4)


def test_copies_run_alike(anybit_artifact: Path) -> None:
    model = load(anybit_artifact, bits=3.0)
    before = logits(model, IDS)
    assert torch.equal(logits(deepcopy(model), IDS), before)
    assert torch.equal(logits(model, IDS), before)


def test_numbers_of_numpy_are_numbers(anybit_artifact: Path) -> None:
    assert (
        load(anybit_artifact, bits=np.float64(3.3)).levels[-1].bits
        == load(anybit_artifact, bits=3.3).levels[-1].bits
    )
    assert load(anybit_artifact, size=np.int64(10**9)).levels[-1].bits == 8


def test_a_width_between_two_is_said(anybit_artifact: Path) -> None:
    report = Recorder()
    low, high = (table_of_levels(anybit_artifact)[i]["bits"] for i in (12, 13))
    load(anybit_artifact, bits=(low + high) / 2, report=report)
    assert report.said == [f"runs at {low:.2f} bits, the largest width up to {(low + high) / 2:g}"]


@pytest.mark.parametrize(
    "budget", [{"bits": "3"}, {"bpw": "3"}, {"size": [1]}, {"size": "1 parsec"}, {"bits": True}]
)
def test_budgets_of_another_kind_are_refused(anybit_artifact: Path, budget: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="expected a number"):
        load(anybit_artifact, **budget)


@pytest.mark.parametrize("there", [60, 7])
def test_of_a_hub_id_all_that_is_there_is_fetched(
    anybit_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: int
) -> None:
    """Transformers has fetched the base layer; the list and the enhancement layers that are there come after it."""
    fetched: list[str] = []
    for file in anybit_artifact.glob("model-*"):
        shutil.copy(file, tmp_path)

    def cached_file(name: str, file: str, revision: str | None = None, **options: Any) -> str | None:
        assert (name, revision) == ("someone/model", "abc")
        if file.startswith("refine") and int(file.split("-")[1]) > there:
            assert options == {"_raise_exceptions_for_missing_entries": False}
            return None
        fetched.append(file)
        return str(shutil.copy(anybit_artifact / file, tmp_path))

    monkeypatch.setattr(integration, "cached_file", cached_file)
    quantization = json.loads((anybit_artifact / "config.json").read_text())["quantization_config"]
    model = SimpleNamespace(name_or_path="someone/model", config=SimpleNamespace(_commit_hash="abc"))
    stated, stored = quantization[files.SECTION], StoredLayers.from_json("config.json", quantization)
    folder = integration._fetch_enhancements(model, stated, stored)
    expected = [files.enhancement_file(n, 60) for n in range(1, there + 1)]
    assert folder == tmp_path and fetched == ["anybit.index.json", *expected]
    found = read_enhancements(folder, stated, stored)
    assert found is not None and found.present == there + 1
