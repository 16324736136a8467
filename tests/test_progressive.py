"""One file, any size: the order of planes, the artifact that is cut along it, and its sizes at load and at run time."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_convert import Recorder
from torch import Tensor
from transformers import AutoModelForCausalLM

import anybit
from anybit import driver as convert
from anybit.artifact import refinements, writer
from anybit.artifact.reader import curve, inspect, verify
from anybit.artifact.writer import ArtifactWriter
from anybit.calibration.streaming import StreamedModel
from anybit.calibration.texts import calibration_set
from anybit.checkpoint.directory import open_checkpoint
from anybit.checkpoint.files import file_sha256
from anybit.cli import main as cli
from anybit.config import QuantizeConfig, parse_layer_spec
from anybit.errors import InputError
from anybit.formats import Nested
from anybit.formats import tables as shapes
from anybit.integrations import transformers as integration
from anybit.kernels import cpu
from anybit.layers import QuantLinear
from anybit.loader import load, load_tokenizer
from anybit.methods import anybit as nested
from anybit.methods import ordering as progressive
from anybit.methods import sensitivity as salience

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"no native extension: {cpu.why_not()}")
CONFIG = QuantizeConfig(method="anybit", samples=4, seq_len=32, kept_channels=0.05)
IDS = torch.arange(3, 40)[None]


@pytest.fixture(scope="module")
def artifact(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[[str], Path], text_file: Path
) -> Path:
    out = tmp_path_factory.mktemp("progressive") / "out"
    anybit.quantize(model_dir("llama"), out, CONFIG, calibration=str(text_file))
    return out


@pytest.fixture
def copy(artifact: Path, tmp_path: Path) -> Path:
    """An artifact of one's own to break."""
    return Path(shutil.copytree(artifact, tmp_path / "copy"))


def write_index(path: Path, index: dict[str, Any]) -> None:
    """Write an edited anybit.index.json, and in config.json what it says of it: a forgery that thinks of everything."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    section = index[progressive.SECTION]
    stated = {"refinements": len(section) - 1, "list": progressive.list_hash(section)}
    config["quantization_config"][progressive.SECTION] = stated
    file.write_text(json.dumps(config))
    index["files"][file.name] = {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
    (path / "anybit.index.json").write_text(json.dumps(index))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def index_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "anybit.index.json").read_text())


# ---- the order ----------------------------------------------------------------------------------------------------


def random_losses(rows: int, seed: int) -> Tensor:
    """Losses that fall about fourfold with a bit, rows in about falling order."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.rand(rows, 1, generator=generator).sort(0, descending=True).values * 10
    noise = 1 + 0.5 * torch.rand(rows, 8, generator=generator)
    return first * 4.0 ** -torch.arange(8) * noise


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=4), st.integers(0, 10**6))
def test_every_prefix_is_a_nested_model(rows: list[int], seed: int) -> None:
    losses = {str(i): random_losses(n, seed + i) for i, n in enumerate(rows)}
    columns = {name: 33 * (i + 1) for i, name in enumerate(losses)}
    steps = progressive.order(losses, columns)
    before: progressive.Counts = steps.counts(0)
    assert all(counts == (len(losses[name]),) for name, counts in before.items())
    for end in range(len(steps.layer) + 1):
        counts = steps.counts(end)
        for name, now in counts.items():
            assert list(now) == sorted(now, reverse=True)
            had = [*before[name], *[0] * 8]
            assert all(n >= h for n, h in zip(now, had))
        before = counts
    assert all(counts == (len(losses[n]),) * 8 for n, counts in before.items())
    weights = sum(len(x) * columns[n] for n, x in losses.items())
    assert steps.bits(len(steps.layer)) == 8 and steps.weights == weights
    last = sum(float(x[:, -1].double().sum()) for x in losses.values())
    if all((x.diff(dim=1) <= 0).all() for x in losses.values()):
        assert steps.loss_after(len(steps.layer)) == pytest.approx(last, rel=1e-6)


def test_a_prefix_is_the_best_of_its_size() -> None:
    """With losses that are convex and ranked alike, greedy steps solve the allocation: compared with all others."""
    losses = {
        "a": torch.tensor([[64.0 * s / 4**b for b in range(8)] for s in (5, 1)]).repeat_interleave(8, 0),
        "b": torch.tensor([[64.0 * s / 4**b for b in range(8)] for s in (3,)]).repeat_interleave(8, 0),
    }
    steps = progressive.order(losses, {"a": 32, "b": 32})
    for budget in range(len(steps.layer) + 1):
        found = steps.loss_after(budget)
        best = min(
            8 * 64 * (5 / 4**i + 1 / 4**j + 3 / 4**k)
            for i in range(8)
            for j in range(8)
            for k in range(8)
            if i + j + k == budget
        )
        assert found == pytest.approx(best, rel=1e-6)


def test_ties_keep_the_order_of_layers_planes_and_rows() -> None:
    losses = {name: torch.ones(16, 8) * 4.0 ** -torch.arange(8) for name in ("x", "y")}
    steps = progressive.order(losses, {"x": 32, "y": 32})
    assert steps.layer[:4].tolist() == [0, 0, 1, 1] and steps.plane[:5].tolist() == [2, 2, 2, 2, 3]


def test_steps_are_ranked_by_what_a_byte_saves() -> None:
    """Two layers whose rows gain the same; one's planes take two words a row, the other's one."""
    losses = {name: torch.ones(16, 8) * 4.0 ** -torch.arange(8) for name in ("wide", "narrow")}
    steps = progressive.order(losses, {"wide": 64, "narrow": 32})
    assert steps.layer[:2].tolist() == [1, 1] and steps.plane[:4].tolist() == [2, 2, 2, 2]


def test_a_short_last_group_of_rows_counts_by_its_rows() -> None:
    losses = torch.cat([torch.ones(8, 8), 10 * torch.ones(1, 8)]) * 4.0 ** -torch.arange(
        8
    )  # rows out of order
    steps = progressive.order({"x": losses}, {"x": 32})
    assert steps.loss_after(len(steps.layer)) == pytest.approx(float(losses[:, -1].sum()), rel=1e-6)


JOINED = ("m.q_proj", "m.k_proj", "m.v_proj"), ("m.o_proj",), ("n.gate_proj", "n.up_proj"), ("n.down_proj",)


def test_whole_layers_step_together() -> None:
    names = [name for group in JOINED for name in group]
    losses = {name: random_losses(8 * i + 5, i) for i, name in enumerate(names)}
    columns = {name: 33 * (i + 1) for i, name in enumerate(names)}
    steps = progressive.order(losses, columns, whole=True)
    weights = sum(len(loss) * columns[name] for name, loss in losses.items())
    seen, before = set(), -1.0
    for bits in np.linspace(1, 8, 400):
        end = steps.upto(bits)
        counts = steps.counts(end)
        assert steps.bits(end) <= bits + 1e-9 and steps.bits(end) >= before
        before = steps.bits(end)
        for group in JOINED:
            assert {set(counts[name]) == {len(losses[name])} for name in group} == {True}  # no row alone
            assert len({len(counts[name]) for name in group}) == 1  # one width for all that are joined
        seen.add(end)
        if (
            end
        ):  # a rung is the best there is for its bytes: each step saves more per byte than those left out
            rate = steps.gain / (steps.rows * -(-np.array([columns[names[i]] for i in steps.layer]) // 32))
            assert rate[:end].min() >= rate[end:].max(initial=0) - 1e-12
    assert len(seen) == 7 * len(JOINED) + 1 and steps.bits(len(steps.layer)) == 8 and steps.weights == weights


def test_pooling_is_the_isotonic_regression() -> None:
    values = np.array([[3.0, 1.0, 2.0, 2.0, 5.0, 0.0], [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]])
    expected = [[3.0, 2.5, 2.5, 2.5, 2.5, 0.0], values[1].tolist()]
    np.testing.assert_allclose(progressive.falling(values), expected)


def test_the_ladder() -> None:
    assert progressive.ladder(2.0) == [2.0]
    assert progressive.ladder(2.25) == pytest.approx([2.0, 2.1, 2.2, 2.25])
    assert len(progressive.ladder(8)) == 61 and progressive.ladder(8)[-1] == 8


# ---- the artifact -------------------------------------------------------------------------------------------------


def test_the_core_is_an_ordinary_index_and_refinements_lie_beside_it(artifact: Path) -> None:
    weight_map = json.loads((artifact / "model.safetensors.index.json").read_text())["weight_map"]
    assert not any("refine" in file for file in weight_map.values())
    assert not any(name.endswith(progressive.LOSSES) for name in weight_map)
    assert len(list(artifact.glob("refine-*.safetensors"))) == 60
    config = json.loads((artifact / "config.json").read_text())["quantization_config"]
    assert config["method"] == "anybit" and config["bits"] == 8
    assert verify(artifact)["hashes_checked"]


def test_the_curve_counts_every_byte(artifact: Path) -> None:
    rungs = curve(artifact)
    files = [
        f for f in artifact.iterdir() if not f.name.startswith(("tokenizer", "special", "chat_template"))
    ]
    assert rungs[-1]["size_bytes"] == sum(f.stat().st_size for f in files)
    assert [r["bits"] for r in rungs] == sorted(r["bits"] for r in rungs)
    assert all(b["loss"] <= a["loss"] and b["size_bytes"] > a["size_bytes"] for a, b in pairwise(rungs))
    assert rungs[0]["bits"] == pytest.approx(2.0, abs=0.1) and rungs[-1]["bits"] == 8
    for at in (0, 13, 60):
        made = inspect(artifact, rungs[at]["bits"])
        assert made["bits"] == pytest.approx(rungs[at]["bits"])
        assert made["bits_per_weight"] == pytest.approx(rungs[at]["bits_per_weight"])
        assert made["size_bytes"] == rungs[at]["size_bytes"]


def test_all_planes_are_the_codes_that_were_made(artifact: Path, model_dir: Callable[[str], Path]) -> None:
    """At 8 bits every weight is close to the model's."""
    model = load(artifact)
    base = load(model_dir("llama"))
    for name, module in base.named_modules():
        if isinstance(module, torch.nn.Linear) and "layers" in name:
            dense = model.get_submodule(name).prepared().dequantize()
            assert float((dense - module.weight).norm().detach() / module.weight.norm().detach()) < 0.1


@pytest.mark.parametrize("bits", [2.1, 3.3, 5.0, 8.0])
def test_a_width_at_load_is_the_same_at_run_time(artifact: Path, bits: float) -> None:
    at_load, whole = load(artifact, bits=bits), load(artifact)
    everything = logits(whole)
    assert whole.set_bits(bits) <= bits + 1e-6
    assert torch.equal(logits(whole), logits(at_load))
    assert bits == 8 or not torch.equal(logits(whole), everything)
    whole.set_bits(8)
    assert torch.equal(logits(whole), everything)


def test_switching_copies_no_plane(artifact: Path) -> None:
    model = load(artifact)
    before = {n: b.data_ptr() for n, b in model.named_buffers() if "plane" in n}
    for bits in (2.5, 6.0, 3.1):
        model.set_bits(bits)
        logits(model)
    assert before == {n: b.data_ptr() for n, b in model.named_buffers() if "plane" in n}


def test_only_what_a_width_needs_is_read(copy: Path) -> None:
    for file in sorted(copy.glob("refine-*.safetensors"))[12:]:
        file.write_bytes(b"damaged")
    model = load(copy, bits=3.0)
    planes = [b.numel() for n, b in model.named_buffers() if "plane" in n]
    assert sum(planes) < sum(b.numel() for n, b in load(copy, bits=3.2).named_buffers() if "plane" in n)
    with pytest.raises(InputError, match=r"not complete.* 3\.5 bits need more"):
        load(copy, bits=3.5)


def test_budgets_of_bytes(artifact: Path) -> None:
    rungs = curve(artifact)
    target = rungs[20]
    for budget in ({"bpw": target["bits_per_weight"]}, {"size": target["size_bytes"]}):
        model = load(artifact, **budget)
        assert model.ladder.bits[-1] == pytest.approx(target["bits"])
        less = {key: value - 1e-3 if key == "bpw" else value - 1 for key, value in budget.items()}
        assert load(artifact, **less).ladder.bits[-1] == pytest.approx(rungs[19]["bits"])
    for budget in ({"bpw": 0.5}, {"size": 1000}):
        with pytest.raises(InputError, match="not to be had"):
            load(artifact, **budget)
    with pytest.raises(InputError, match="give one of them"):
        load(artifact, bits=3, bpw=3.3)


@pytest.mark.parametrize("bits", [1.0, 1.9, 8.2, 20])
def test_widths_that_are_not_there_are_refused(artifact: Path, bits: float) -> None:
    with pytest.raises(InputError, match=r"from \d\.\d\d to 8\.00 bits"):
        load(artifact, bits=bits)
    model = load(artifact)
    with pytest.raises(InputError, match=r"from \d\.\d\d to 8\.00 bits"):
        model.set_bits(bits)


def test_transformers_loads_all_refinements(artifact: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(artifact).eval()
    assert torch.equal(logits(model), logits(load(artifact)))
    assert model.set_bits(3.0) == pytest.approx(3.0, abs=0.1)


def test_what_runs_can_be_saved_as_one_model(artifact: Path, tmp_path: Path) -> None:
    model = load(artifact, bits=4.0)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(logits(again), logits(model))


def test_the_core_alone_is_a_width(artifact: Path) -> None:
    model = load(artifact, bits=2.0)
    assert model.set_bits(2.0) == pytest.approx(2.0, abs=0.05)
    with pytest.raises(InputError, match=r"to \d\.\d\d bits"):
        model.set_bits(4)


def test_a_core_without_its_list_or_with_anothers_is_refused(copy: Path) -> None:
    index = index_of(copy)
    (copy / "anybit.index.json").unlink()
    for use in (load, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(InputError, match="copy it, too"):
            use(copy)
    (copy / "anybit.index.json").write_text(json.dumps(index))
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"][progressive.SECTION]["list"] = "0" * 64
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="belong to different artifacts"):
        load(copy)


def test_copies_run_alike(artifact: Path) -> None:
    model = load(artifact, bits=3.0)
    before = logits(model)
    assert torch.equal(logits(deepcopy(model)), before)
    assert torch.equal(logits(model), before)


def test_a_kill_at_any_moment_of_publishing_loses_nothing(
    artifact: Path,
    model_dir: Callable[[str], Path],
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """OUT holds the old artifact, the new one or nothing, and then a rerun finishes it: never a part of one."""
    publish, remaining = ArtifactWriter._publish, 0
    out, names = tmp_path / "out", ("_remove", "_sync")

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal remaining
            remaining -= 1
            if remaining == 0:
                raise Killed
            return function(*arguments)

        return call

    def watched(self: ArtifactWriter) -> None:
        with monkeypatch.context() as patch:
            for name in names:
                patch.setattr(writer, name, counted(getattr(writer, name)))
            patch.setattr(Path, "rename", counted(Path.rename))
            publish(self)

    monkeypatch.setattr(ArtifactWriter, "_publish", watched)
    whole, moments = index_of(artifact), 0
    anybit.quantize(model_dir("llama"), out, QuantizeConfig(method="rtn"))
    again = {"calibration": str(text_file), "overwrite": True}
    for moment in range(1, 50):
        remaining = moment
        try:
            anybit.quantize(model_dir("llama"), out, CONFIG, **again)
            break
        except Killed:
            moments += 1
        if out.exists():
            assert verify(out)
        else:
            with pytest.raises(InputError, match="not finished: repeat"):
                load(out)
        remaining = 0
        anybit.quantize(model_dir("llama"), out, CONFIG, **again)
        assert index_of(out) == whole and verify(out) and not out.with_name("out.partial").exists()
        shutil.rmtree(out)
        anybit.quantize(model_dir("llama"), out, QuantizeConfig(method="rtn"))
    assert moments >= 5


def test_a_cut_that_another_run_drops_leaves_nothing(
    model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> Any:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(ArtifactWriter, "finish", killed)
        with pytest.raises(Killed):
            anybit.quantize(model_dir("llama"), tmp_path / "out", CONFIG, calibration=str(text_file))
    anybit.quantize(model_dir("llama"), tmp_path / "out", QuantizeConfig(method="rtn"), overwrite=True)
    assert not (tmp_path / "out.partial").exists()


# ---- damage -------------------------------------------------------------------------------------------------------


def test_a_prefix_loads_and_generates_and_is_named(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = load(copy, bits=4.0)
    for file in sorted(copy.glob("refine-*.safetensors"))[20:]:
        file.unlink()
    with pytest.raises(
        InputError, match=r"20 of 60 refinements .*refine-00021-of-00060.*up to \d\.\d\d bits"
    ):
        verify(copy)
    model = load(copy)
    assert torch.equal(logits(model), logits(whole))
    assert model.generate(IDS, max_new_tokens=3, do_sample=False).shape == (1, IDS.shape[1] + 3)
    with pytest.raises(InputError, match="refine-00021-of-00060"):
        load(copy, bits=5.0)
    assert [r["present"] for r in curve(copy)] == [True] * 21 + [False] * 40


def test_a_hole_ends_the_prefix(copy: Path) -> None:
    (copy / progressive.refinement_file(7, 60)).unlink()
    assert load(copy).ladder.bits[-1] == pytest.approx(curve(copy)[6]["bits"])


def test_a_flipped_byte_is_found(copy: Path) -> None:
    file = copy / progressive.refinement_file(5, 60)
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(bytes(data))
    for use in (load, verify):
        with pytest.raises(InputError, match=r"refine-00005-of-00060.*SHA-256"):
            use(copy)
    load(copy, bits=2.3)


def test_reordered_refinements_are_found(copy: Path) -> None:
    one, two = (copy / progressive.refinement_file(n, 60) for n in (3, 4))
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)
    with pytest.raises(InputError, match="exchanged"):
        load(copy)


def test_a_reordered_list_is_found(copy: Path) -> None:
    index = index_of(copy)
    rungs = index[progressive.SECTION]
    rungs[3], rungs[4] = rungs[4], rungs[3]
    (copy / "anybit.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="reordered or the list was edited"):
        load(copy)


def test_a_flipped_byte_in_the_core_is_found(copy: Path) -> None:
    file = copy / "model-00002-of-00003.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(bytes(data))
    for use in (load, verify, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(InputError, match=r"model-00002-of-00003.*SHA-256"):
            use(copy)
    index = index_of(copy)
    del index["files"][file.name]
    (copy / "anybit.index.json").write_text(json.dumps(index))
    for use in (load, verify):
        with pytest.raises(InputError, match="other shards"):
            use(copy)


def test_a_list_without_a_file_is_no_proof(copy: Path) -> None:
    index = index_of(copy)
    del index["files"]["config.json"]
    (copy / "anybit.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"does not list config\.json"):
        verify(copy)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda i: i["files"]["refine-00005-of-00060.safetensors"].update(bytes=1), "exchanged"),
        (lambda i: i["files"]["refine-00005-of-00060.safetensors"].update(bytes=math.inf), "damaged"),
        (lambda i: i[progressive.SECTION][5].update(bits=5.0), "damaged"),
        (lambda i: i[progressive.SECTION][0].update(bits=1e9), "damaged"),
        (
            lambda i: i[progressive.SECTION][5].update(bits=i[progressive.SECTION][5]["bits"] + 0.01),
            "another width",
        ),
        (lambda i: i[progressive.SECTION][0].update(bits=1.5), "another width"),
        (lambda i: i.update(format_version=99), "99"),
    ],
)
def test_what_the_list_states_is_checked(copy: Path, change: Callable[[Any], Any], word: str) -> None:
    index = index_of(copy)
    change(index)
    write_index(copy, index)
    for use in (load, verify):
        with pytest.raises(InputError, match=word):
            use(copy)


def test_an_edited_curve_is_found(copy: Path) -> None:
    index = index_of(copy)
    for entry in index[progressive.SECTION]:
        entry["loss"] = 0.0
    (copy / "anybit.index.json").write_text(json.dumps(index))
    for use in (load, verify, curve):
        with pytest.raises(InputError, match="or were edited"):
            use(copy)


def test_numbers_of_numpy_are_numbers(artifact: Path) -> None:
    assert load(artifact, bits=np.float64(3.3)).ladder.bits[-1] == load(artifact, bits=3.3).ladder.bits[-1]
    assert load(artifact, size=np.int64(10**9)).ladder.bits[-1] == 8


def test_a_download_under_way_is_a_prefix(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(21, 61):
        (copy / progressive.refinement_file(number, 60)).unlink()
    last = copy / progressive.refinement_file(20, 60)
    for size in (last.stat().st_size // 2, 5, 0):
        last.write_bytes(last.read_bytes()[:size])
        assert load(copy).ladder.bits[-1] == pytest.approx(curve(copy)[19]["bits"])
        assert [r["present"] for r in curve(copy)] == [True] * 20 + [False] * 41
    with pytest.raises(InputError, match=r"19 of 60 refinements .*refine-00020-of-00060.* not complete"):
        verify(copy)
    for budget in ({"bpw": 16.0}, {"size": "1GB"}, {}):
        report = Recorder()
        load(copy, report=report, **budget)
        assert any("19 of 60 refinements" in note for note in report.said), budget


def test_a_width_between_two_is_said(artifact: Path) -> None:
    report = Recorder()
    low, high = (curve(artifact)[i]["bits"] for i in (12, 13))
    load(artifact, bits=(low + high) / 2, report=report)
    assert report.said == [f"runs at {low:.2f} bits, the largest width up to {(low + high) / 2:g}"]


@pytest.mark.parametrize(
    "budget", [{"bits": "3"}, {"bpw": "3"}, {"size": [1]}, {"size": "1 parsec"}, {"bits": True}]
)
def test_budgets_of_another_kind_are_refused(artifact: Path, budget: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="expected a number"):
        load(artifact, **budget)


@pytest.mark.parametrize(
    "section",
    [
        [],
        [{"file": "x"}],
        [{"file": "", "bits": "y", "loss": 0, "chain": ""}],
        [{"file": "", "bits": math.nan, "loss": 0, "chain": ""}],
        [{"file": "", "bits": 2, "loss": 0, "chain": ""}, {"file": "", "bits": 3, "loss": 0, "chain": ""}],
        "text",
    ],
)
def test_a_damaged_list_is_refused(copy: Path, section: Any) -> None:
    index = index_of(copy) | {progressive.SECTION: section}
    (copy / "anybit.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"anybit\.index\.json"):
        load(copy)


@pytest.mark.parametrize(
    ("steps", "word"),
    [
        ([[999, 3, 8]], "layer or plane"),
        ([[0, 9, 8]], "layer or plane"),
        ([[0, 1, 10**9]], "layer or plane"),
        ([[0, 3, -8]], "layer or plane"),
        ([[0, 8, 8]], "longer than those before"),
        ([[1, 3, 1], [0, 3, 1]], "out of order"),
        ([[0, 2, 10**9]], "longer than those before"),
        ([[0, 3, 1]], "holds 4 words, its steps need"),
    ],
)
def test_steps_that_do_not_fit_are_refused(copy: Path, steps: list[list[int]], word: str) -> None:
    """Whoever can write hashes can write these: sizes and bounds are checked before memory is touched."""
    from safetensors.torch import save_file

    file = copy / progressive.refinement_file(1, 60)
    words = torch.zeros(4, dtype=torch.int32).view(torch.uint32)
    save_file({"steps": torch.tensor(steps, dtype=torch.int32), "words": words}, file)
    index = index_of(copy)
    index["files"][file.name] = {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
    chain = index[progressive.SECTION][0]["chain"]
    for entry in index[progressive.SECTION][1:]:
        chain = entry["chain"] = progressive.link(chain, index["files"][entry["file"]]["sha256"])
    write_index(copy, index)
    with pytest.raises(InputError, match=word):
        load(copy, bits=2.2)


# ---- the run ------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


def interrupt(*_: Any) -> None:
    raise Killed


@pytest.mark.parametrize("at", ["write_shard", "write_cut", "finish"])
def test_a_killed_run_resumes_and_ends_in_the_same_bytes(
    artifact: Path,
    model_dir: Callable[[str], Path],
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: str,
) -> None:
    calls, original = [], getattr(ArtifactWriter, at)

    def killed(self: ArtifactWriter, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 2 or at == "finish":
            raise Killed
        return original(self, *args, **kwargs)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(ArtifactWriter, at, killed)
        with pytest.raises(Killed):
            anybit.quantize(model_dir("llama"), out, CONFIG, calibration=str(text_file))
    assert not out.exists()
    result = anybit.quantize(model_dir("llama"), out, CONFIG, calibration=str(text_file))
    assert result.resumed_shards == (1 if at == "write_shard" else 3)
    files = {f.name: f.read_bytes() for f in artifact.iterdir()}
    assert {f.name: f.read_bytes() for f in out.iterdir()} == files
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("one_shot", [False, True])
def test_blocks_are_calibrated_behind_quantized_ones(
    model_dir: Callable[[str], Path],
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    one_shot: bool,
) -> None:
    """The second block's inputs are what the first one gives at the tuned width, or unquantized (one-shot); each token
    counts by the unquantized model's gradients."""
    seen: dict[str, Tensor] = {}
    original = nested.compress

    def watched(weight: Tensor, stats: Any, *rest: Any) -> nested.Compressed:
        made = original(weight, stats, *rest)
        seen[str(len(seen))] = stats.hessian.clone()
        return made

    monkeypatch.setattr(convert.nested, "compress", watched)
    config = QuantizeConfig("anybit", samples=4, seq_len=32, tune_for=2.5, one_shot=one_shot)
    with monkeypatch.context() as patch:  # keep all planes and losses
        patch.setattr(ArtifactWriter, "begin_cut", interrupt)
        with pytest.raises(Killed):
            anybit.quantize(model_dir("llama"), tmp_path / "out", config, calibration=str(text_file))
    model = AutoModelForCausalLM.from_pretrained(model_dir("llama"), dtype=convert.compute_dtype())
    if not one_shot:
        stored = load_file(next((tmp_path / "out.partial" / "artifact").glob("model-00002-of-*.safetensors")))
        losses = {n.removesuffix(".losses"): t for n, t in stored.items() if n.endswith(".losses")}
        columns = {n: model.get_submodule(n).in_features for n in losses}
        kept = {n: round(c / 128) for n, c in columns.items()}
        steps = progressive.order(losses, {n: c - kept[n] for n, c in columns.items()})
        for name, counts in steps.counts(steps.upto(2.5)).items():
            shape = (len(losses[name]), columns[name])
            tensors = {f: stored[f"{name}.{f}"] for f in ("order", "scales", "shapes")}
            if kept[name]:
                tensors |= {f: stored[f"{name}.{f}"] for f in ("kept", "kept_values")}
            planes = {f"plane_{p}": stored[f"{name}.plane_{p}"][:n] for p, n in enumerate(counts, 1)}
            tile = Nested.description(counts, kept[name])
            dense = Nested.read(tile, tensors | planes, *shape).dequantize()
            model.get_submodule(name).weight.data.copy_(dense)
    inputs: list[Tensor] = []
    first = model.model.layers[1].self_attn.q_proj
    first.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0].float()))
    tokens = calibration_set(load_tokenizer(model_dir("llama")), str(text_file), 4, 32, 0).tokens
    with torch.no_grad():
        for row in tokens:
            model(input_ids=row[None])
    streamed = StreamedModel(open_checkpoint(model_dir("llama")), convert.compute_dtype())
    weights = salience.output_moments(streamed, tokens, streamed.all_linears()).tokens
    of_layer = weights["model.layers.1.self_attn.q_proj"]
    expected = sum((x.T * w) @ x for x, w in zip(inputs, of_layer))
    torch.testing.assert_close(seen["7"], expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_moments_are_those_of_autograd(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """Also part by part, and read back from finished parts."""
    streamed = StreamedModel(open_checkpoint(model_dir("llama")), torch.float32)
    shapes = streamed.all_linears()
    tokens = torch.randint(3, 100, (6, 24), generator=torch.Generator().manual_seed(0))
    found = salience.output_moments(streamed, tokens, shapes, tmp_path)
    again = salience.output_moments(streamed, tokens, shapes, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(model_dir("llama"), dtype=torch.float32)
    for name in ("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj"):
        outputs: list[Tensor] = []
        hook = model.get_submodule(name).register_forward_hook(lambda *a, o=outputs: o.append(a[2]))
        gradients = []
        for row in tokens:
            loss = model(input_ids=row[None], labels=row[None]).loss
            gradients.append(torch.autograd.grad(loss, outputs[-1])[0][0])
        hook.remove()
        squared = torch.stack(gradients).square()  # [samples, seq_len, out]
        by_token = squared.sum(2)
        torch.testing.assert_close(found.outputs[name], 12 * squared.sum(1).mean(0), rtol=1e-3, atol=1e-9)
        torch.testing.assert_close(found.tokens[name], by_token / by_token.mean(), rtol=1e-3, atol=1e-4)
        assert torch.equal(again.outputs[name], found.outputs[name])
        assert torch.equal(again.tokens[name], found.tokens[name])


@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_other_scores_rank_the_rows(
    model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path, kind: str
) -> None:
    config = QuantizeConfig("anybit", samples=4, seq_len=32, salience=kind)
    anybit.quantize(model_dir("llama"), tmp_path / "out", config, calibration=str(text_file))
    rungs = curve(tmp_path / "out")
    assert [r["loss"] for r in rungs] == sorted((r["loss"] for r in rungs), reverse=True)
    streamed = StreamedModel(open_checkpoint(model_dir("llama")), convert.compute_dtype())
    text = calibration_set(streamed.checkpoint.tokenizer(), str(text_file), 4, 32, 0)
    scores = salience.width_scores(streamed, text.tokens, streamed.all_linears(), kind).outputs
    last = sum(float(score[:, -1].double().sum()) for score in scores.values())
    assert rungs[-1]["loss"] == pytest.approx(last, rel=0.05)  # but for what pooling moves
    other = "diagonal" if kind == "full" else "full"
    for shared in ("output", other, kind):  # statistics are those of the score asked for
        config = replace(config, salience=shared)
        asked = {"calibration": str(text_file), "statistics": tmp_path / "shared", "overwrite": True}
        anybit.quantize(model_dir("llama"), tmp_path / "again", config, **asked)
    assert curve(tmp_path / "again") == rungs
    with pytest.raises(InputError, match="output, full, diagonal"):
        QuantizeConfig("anybit", salience="second-order")


def test_scores_are_the_loss_of_rounding(model_dir: Callable[[str], Path]) -> None:
    """By autograd: `|p + p^2 / 2|` and `sum (g d)^2 / 2` of every row and width, mean over samples."""
    streamed = StreamedModel(open_checkpoint(model_dir("llama")), torch.float32)
    shapes = streamed.all_linears()
    tokens = torch.randint(3, 100, (3, 24), generator=torch.Generator().manual_seed(0))
    found = {k: salience.width_scores(streamed, tokens, shapes, k).outputs for k in ("full", "diagonal")}
    model = AutoModelForCausalLM.from_pretrained(model_dir("llama"), dtype=torch.float32)
    name = "model.layers.1.mlp.down_proj"
    weight = model.get_submodule(name).weight
    kinds, scales = nested.fit(weight.detach())
    expected = {kind: torch.zeros(len(weight), 8) for kind in found}
    for row in tokens:
        (gradient,) = torch.autograd.grad(model(input_ids=row[None], labels=row[None]).loss, weight)
        for bits in range(1, 9):
            change = gradient * (nested.rounding(weight.detach(), kinds, scales, bits) - weight.detach())
            whole = change.sum(1)
            expected["full"][:, bits - 1] += (whole + whole**2 / 2).abs() / len(tokens)
            expected["diagonal"][:, bits - 1] += change.square().sum(1) / 2 / len(tokens)
    for kind, scores in found.items():
        torch.testing.assert_close(scores[name], expected[kind], rtol=1e-3, atol=1e-9)


def test_rows_are_rounded_to_the_nearest_entries() -> None:
    weight = torch.randn(9, 50, generator=torch.Generator().manual_seed(1))
    kinds, scales = nested.fit(weight)
    for bits in (1, 3, 8):
        entries = shapes.table(bits)[kinds.long()] * scales[:, None]
        nearest = (weight[:, :, None] - entries[:, None]).abs().amin(2)
        error = (nested.rounding(weight, kinds, scales, bits) - weight).abs()
        torch.testing.assert_close(error, nearest)


def test_whole_layers_have_one_width_at_every_size(
    model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path
) -> None:
    config = QuantizeConfig(method="anybit", samples=4, seq_len=32, kept_channels=0.05, whole_layers=True)
    anybit.quantize(model_dir("llama"), tmp_path / "out", config, calibration=str(text_file))
    assert verify(tmp_path / "out")
    model, base = load(tmp_path / "out"), logits(load(model_dir("llama")))
    errors = []
    for bits in (8.0, 5.0, 3.3, 2.5):
        assert model.set_bits(bits) <= bits
        widths = {
            name: module.bits for name, module in model.named_modules() if isinstance(module, QuantLinear)
        }
        assert all(width == int(width) for width in widths.values()) and len(set(widths.values())) > (
            bits < 8
        )
        for group in (
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            ("mlp.gate_proj", "mlp.up_proj"),
        ):
            assert len({widths[f"model.layers.0.{name}"] for name in group}) == 1
        errors.append(float((logits(model) - base).norm()))
    assert errors == sorted(errors)


def test_fewer_bits_make_a_shorter_ladder(
    artifact: Path, model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path
) -> None:
    config = QuantizeConfig(method="anybit", bits=3.25, samples=4, seq_len=32, kept_channels=0.05)
    result = anybit.quantize(model_dir("llama"), tmp_path / "out", config, calibration=str(text_file))
    rungs = curve(tmp_path / "out")
    assert len(rungs) == 14 and result.bits == pytest.approx(rungs[-1]["bits"])
    assert rungs[-1]["bits"] == pytest.approx(3.25, abs=0.05)
    for short, long in zip(rungs[:-1], curve(artifact)):
        assert short["bits"] == long["bits"]
    assert torch.equal(logits(load(tmp_path / "out", bits=3.0)), logits(load(artifact, bits=3.0)))


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "opt", "qwen3", "llama-tied"])
def test_other_families(
    family: str, model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path
) -> None:
    anybit.quantize(model_dir(family), tmp_path / "out", CONFIG, calibration=str(text_file))
    base, model = logits(load(model_dir(family))), load(tmp_path / "out")
    errors = []
    for bits in (8.0, 5.0, 2.5):
        model.set_bits(bits)
        errors.append(float((logits(model) - base).norm() / base.norm()))
    assert errors == sorted(errors) and errors[0] < 0.25 * errors[2]


def test_a_block_may_be_left_alone(model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, exclude=("model.layers.0.*",))
    anybit.quantize(model_dir("llama"), tmp_path / "out", config, calibration=str(text_file))
    assert verify(tmp_path / "out") and load(tmp_path / "out", bits=3.0)


def test_a_spec_says_nothing_of_widths(
    model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path
) -> None:
    name, default = "model.layers.0.mlp.up_proj", CONFIG.layer_spec()
    with pytest.raises(InputError, match="leave bits and tiles out"):
        anybit.quantize(
            model_dir("llama"), tmp_path / "out", CONFIG,
            spec_map={name: parse_layer_spec(name, {"bits": 3}, default)}, calibration=str(text_file),
        )  # fmt: skip
    with pytest.raises(InputError, match="tune_for 20"):
        parse_layer_spec(name, {"tune_for": 20.0}, default)
    own = parse_layer_spec(name, {"kept_channels": 0.0}, default)
    anybit.quantize(
        model_dir("llama"), tmp_path / "out", CONFIG, spec_map={name: own}, calibration=str(text_file)
    )
    kept = {layer["name"]: layer["tiles"][0]["kept"] for layer in inspect(tmp_path / "out")["layers"]}
    assert kept[name] == 0 and all(kept[other] > 0 for other in kept if other != name)


def test_the_card_speaks_of_core_and_refinements(artifact: Path) -> None:
    rungs, card = curve(artifact), (artifact / "README.md").read_text()
    low, high = rungs[0], rungs[-1]
    assert f"{low['bits']:.2f} to 8.00 bits (anybit)" in card
    assert f"{low['bits_per_weight']:.3f} (core) to {high['bits_per_weight']:.3f} |" in card
    assert f"{(high['size_bytes'] - low['size_bytes']) / 1e6:.1f} MB (refinements)" in card
    (bits,) = re.findall(r'anybit\.load\("PATH", bits=(\S+)\)', card)
    (fewer,) = re.findall(r"set_bits\((\S+)\)", card)
    assert load(artifact, bits=float(bits)).set_bits(float(fewer)) < float(bits)


def test_options_are_checked() -> None:
    with pytest.raises(InputError, match="tune_for 9"):
        QuantizeConfig(method="anybit", tune_for=9.0)
    with pytest.raises(InputError, match="group_size"):
        QuantizeConfig(method="anybit", group_size=64)
    with pytest.raises(InputError, match=r"no 1\.5-bit width"):
        QuantizeConfig(method="anybit", bits=1.5)
    with pytest.raises(InputError, match="tune_for"):
        QuantizeConfig(method="gptq", tune_for=4.0)


# ---- the command --------------------------------------------------------------------------------------------------


def command(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["anybit", *arguments])
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    shown = capsys.readouterr()
    return int(exit_.value.code or 0), shown.out + shown.err


def test_the_curve_is_printed(
    artifact: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rungs = curve(artifact)
    budget = f"{rungs[10]['size_bytes']}B"
    code, shown = command(["plan", str(artifact), "--memory", budget], capsys, monkeypatch)
    lines = shown.splitlines()
    assert code == 0 and len(lines) == 62
    (best,) = [line for line in lines if "the best that fits" in line]
    assert best.startswith(f"{rungs[10]['bits']:.2f} ")
    code, shown = command(["plan", str(artifact), "--json"], capsys, monkeypatch)
    assert json.loads(shown)["curve"] == rungs
    code, shown = command(["plan", str(artifact), "--memory", "1kB"], capsys, monkeypatch)
    assert code == 2 and "nothing fits 1kB: the core takes" in shown
    code, shown = command(["plan", str(artifact), "-o", "map.json"], capsys, monkeypatch)
    assert code == 2 and "is made" in shown


@pytest.mark.parametrize(
    ("option", "bits"), [("--bits=3.05", 3.0), ("--bits=8", 8.0), ("--bpw=100", 8.0), ("--size=1GB", 8.0)]
)
def test_sizes_on_the_command_line(
    artifact: Path,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    bits: float,
) -> None:
    figures = tmp_path / "figures.json"
    arguments = ["--text", str(text_file), "--seq-len", "32", "--max-tokens", "64", "--json", str(figures)]
    code, _ = command(["eval", str(artifact), option, *arguments], capsys, monkeypatch)
    found = json.loads(figures.read_text())
    assert code == 0 and found["bits"] == pytest.approx(bits, abs=0.06)
    code, shown = command(["inspect", str(artifact), option, "--json"], capsys, monkeypatch)
    made = json.loads(shown)
    assert code == 0 and made["bits_per_weight"] == found["bits_per_weight"]
    assert made["refinements"]["all"] == 60
    code, shown = command(
        ["generate", str(artifact), option, "-p", "abc", "--max-new-tokens", "2"], capsys, monkeypatch
    )
    assert code == 0 and "abc" in shown


def test_sizes_of_other_artifacts_are_refused(
    model_dir: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    anybit.quantize(model_dir("llama"), tmp_path / "rtn", QuantizeConfig(method="rtn"))
    for option in ("--bpw=3", "--size=1MB"):
        for model in (tmp_path / "rtn", model_dir("llama")):
            code, shown = command(["eval", str(model), option], capsys, monkeypatch)
            assert code == 2 and ("artifacts of the method anybit" in shown or "no artifact of" in shown)
    code, shown = command(["plan", str(tmp_path / "rtn")], capsys, monkeypatch)
    assert code == 2 and "has one size" in shown


def test_the_prediction_holds(
    model_dir: Callable[[str], Path],
    tmp_path: Path,
    artifact: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = [
        "quantize",
        str(model_dir("llama")),
        "-o",
        str(tmp_path / "x"),
        "--method",
        "anybit",
        "--dry-run",
    ]
    code, _ = command(
        [*asked, "--kept-channels=0.05", "--json", str(tmp_path / "p.json")], capsys, monkeypatch
    )
    predicted = json.loads((tmp_path / "p.json").read_text())
    made = inspect(artifact)
    assert code == 0 and predicted["bits"] == made["bits"] == 8
    assert made["size_bytes"] <= predicted["size_bytes"] * 1.001


# ---- the hub ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("upto", "there"), [(None, 60), (5, 60), (0, 60), (None, 7), (9, 7)])
def test_of_a_hub_id_only_what_is_needed_is_fetched(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, upto: int | None, there: int
) -> None:
    """Transformers has fetched the core; the list and as many refinements as asked for, and there, come after it."""
    fetched: list[str] = []
    for file in artifact.glob("model-*"):
        shutil.copy(file, tmp_path)

    def cached_file(name: str, file: str, revision: str | None = None, **options: Any) -> str | None:
        assert (name, revision) == ("someone/model", "abc")
        if file.startswith("refine") and int(file.split("-")[1]) > there:
            assert options == {"_raise_exceptions_for_missing_entries": False}
            return None
        fetched.append(file)
        return str(shutil.copy(artifact / file, tmp_path))

    monkeypatch.setattr(integration, "cached_file", cached_file)
    quantization = json.loads((artifact / "config.json").read_text())["quantization_config"]
    model = SimpleNamespace(name_or_path="someone/model", config=SimpleNamespace(_commit_hash="abc"))
    asked = integration.AnybitConfig(**{k: v for k, v in quantization.items() if k != "quant_method"})
    folder = integration._fetch_refinements(model, asked, upto)
    count = min(there, 60 if upto is None else upto)
    expected = [progressive.refinement_file(n, 60) for n in range(1, count + 1)]
    assert folder == tmp_path and fetched == ["anybit.index.json", *expected]
    assert refinements.read_progressive(folder, quantization).present == count + 1
