"""The artifact of the method anybit on disk: a base layer, enhancement layers beside it, and damage to either."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from anybit.artifact import files, split
from anybit.artifact.sizes import inspect, table_of_levels
from anybit.artifact.verify import verify
from anybit.checkpoint.files import file_sha256
from anybit.errors import InputError
from anybit.kernels import cpu
from anybit.loader import load
from tests.probes import Recorder, logits

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"no native extension: {cpu.why_not()}")
IDS = torch.arange(3, 40)[None]


def write_index(path: Path, index: dict[str, Any]) -> None:
    """Write an edited anybit.index.json, and in config.json what it says of it: a forgery that thinks of everything."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    section = index[files.SECTION]
    stated = {"refinements": len(section) - 1, "list": files.list_hash(section)}
    config["quantization_config"][files.SECTION] = stated
    file.write_text(json.dumps(config))
    index["files"][file.name] = {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
    (path / "anybit.index.json").write_text(json.dumps(index))


def renamed(index: dict[str, Any], name: str) -> None:
    """Another name for the file of an enhancement layer, everywhere."""
    step = index[files.SECTION][5]
    index["files"][name] = index["files"].pop(step["file"])
    step["file"] = name


def index_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "anybit.index.json").read_text())


# ---- the artifact -------------------------------------------------------------------------------------------------


def test_the_base_layer_is_an_ordinary_index_and_enhancement_layers_lie_beside_it(
    anybit_artifact: Path,
) -> None:
    weight_map = json.loads((anybit_artifact / "model.safetensors.index.json").read_text())["weight_map"]
    assert not any("refine" in file for file in weight_map.values())
    assert not any(name.endswith(split.LOSSES) for name in weight_map)
    assert len(list(anybit_artifact.glob("refine-*.safetensors"))) == 60
    config = json.loads((anybit_artifact / "config.json").read_text())["quantization_config"]
    assert config["method"] == "anybit" and config["bits"] == 8
    found = verify(anybit_artifact)
    assert found["hashes_checked"] and found["files"] > 60


def test_the_table_of_levels_counts_every_byte(anybit_artifact: Path, tmp_path: Path) -> None:
    levels = table_of_levels(anybit_artifact)
    files = [
        f
        for f in anybit_artifact.iterdir()
        if not f.name.startswith(("tokenizer", "special", "chat_template"))
    ]
    assert levels[-1]["size_bytes"] == sum(f.stat().st_size for f in files)
    clone = shutil.copytree(anybit_artifact, tmp_path / "clone")
    (clone / ".git/lfs").mkdir(parents=True)
    (clone / ".git/lfs/object").write_bytes(bytes(1000))
    assert table_of_levels(clone) == levels
    assert [r["bits"] for r in levels] == sorted(r["bits"] for r in levels)
    assert all(b["loss"] <= a["loss"] and b["size_bytes"] > a["size_bytes"] for a, b in pairwise(levels))
    assert levels[-1]["bits"] == 8
    layers, embedding = (levels[0][name] for name in ("bits", "embedding_bits_per_weight"))
    assert layers < 2.0 < embedding  # on average 2: what the order gives the embedding the layers lack
    for at in (0, 13, 60):
        made = inspect(anybit_artifact, bits=levels[at]["bits"])
        assert made["bits"] == pytest.approx(levels[at]["bits"])
        assert made["bits_per_weight"] == pytest.approx(levels[at]["bits_per_weight"])
        assert made["size_bytes"] == levels[at]["size_bytes"]


def test_all_planes_are_the_codes_that_were_made(
    anybit_artifact: Path, model_dir: Callable[[str], Path]
) -> None:
    """At 8 bits every weight is close to the model's."""
    model = load(anybit_artifact)
    base = load(model_dir("llama"))
    for name, module in base.named_modules():
        if isinstance(module, torch.nn.Linear) and "layers" in name:
            dense = model.get_submodule(name).bound().dequantize()
            assert float((dense - module.weight).norm().detach() / module.weight.norm().detach()) < 0.1


def test_a_core_without_its_list_or_with_anothers_is_refused(anybit_copy: Path) -> None:
    index = index_of(anybit_copy)
    (anybit_copy / "anybit.index.json").unlink()
    for use in (load, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(InputError, match="copy it, too"):
            use(anybit_copy)
    (anybit_copy / "anybit.index.json").write_text(json.dumps(index))
    config = json.loads((anybit_copy / "config.json").read_text())
    config["quantization_config"][files.SECTION]["list"] = "0" * 64
    (anybit_copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="belong to different artifacts"):
        load(anybit_copy)


# ---- damage -------------------------------------------------------------------------------------------------------


def test_a_prefix_loads_and_generates_and_is_named(anybit_copy: Path) -> None:
    whole = load(anybit_copy, bits=table_of_levels(anybit_copy)[20]["bits"])
    for file in sorted(anybit_copy.glob("refine-*.safetensors"))[20:]:
        file.unlink()
    with pytest.raises(
        InputError, match=r"20 of 60 enhancement layers .*refine-00021-of-00060.*up to \d\.\d\d bits"
    ):
        verify(anybit_copy)
    model = load(anybit_copy)
    assert torch.equal(logits(model, IDS), logits(whole, IDS))
    assert model.generate(IDS, max_new_tokens=3, do_sample=False).shape == (1, IDS.shape[1] + 3)
    with pytest.raises(InputError, match="refine-00021-of-00060"):
        load(anybit_copy, bits=5.0)
    assert [r["present"] for r in table_of_levels(anybit_copy)] == [True] * 21 + [False] * 40


def test_a_hole_ends_the_prefix(anybit_copy: Path) -> None:
    (anybit_copy / files.enhancement_file(7, 60)).unlink()
    assert load(anybit_copy).levels[-1].bits == pytest.approx(table_of_levels(anybit_copy)[6]["bits"])


def test_a_flipped_byte_is_found(anybit_copy: Path) -> None:
    file = anybit_copy / files.enhancement_file(5, 60)
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(bytes(data))
    for use in (load, verify):
        with pytest.raises(InputError, match=r"refine-00005-of-00060.*SHA-256"):
            use(anybit_copy)
    load(anybit_copy, bits=table_of_levels(anybit_copy)[4]["bits"])


def test_reordered_enhancement_layers_are_found(anybit_copy: Path) -> None:
    one, two = (anybit_copy / files.enhancement_file(n, 60) for n in (3, 4))
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)
    with pytest.raises(InputError, match="exchanged"):
        load(anybit_copy)


def test_a_reordered_list_is_found(anybit_copy: Path) -> None:
    index = index_of(anybit_copy)
    levels = index[files.SECTION]
    levels[3], levels[4] = levels[4], levels[3]
    (anybit_copy / "anybit.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="reordered or the list was edited"):
        load(anybit_copy)


def test_a_flipped_byte_in_the_base_layer_is_found(anybit_copy: Path) -> None:
    file = anybit_copy / "model-00002-of-00003.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(bytes(data))
    for use in (load, verify, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(InputError, match=r"model-00002-of-00003.*SHA-256|v_proj.coded: .* damaged"):
            use(anybit_copy)
    index = index_of(anybit_copy)
    del index["files"][file.name]
    (anybit_copy / "anybit.index.json").write_text(json.dumps(index))
    for use in (load, verify):
        with pytest.raises(InputError, match="other shards"):
            use(anybit_copy)


def test_a_list_without_a_file_is_no_proof(anybit_copy: Path) -> None:
    index = index_of(anybit_copy)
    del index["files"]["config.json"]
    (anybit_copy / "anybit.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"does not list config\.json"):
        verify(anybit_copy)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda i: i["files"]["refine-00005-of-00060.safetensors"].update(bytes=1), "exchanged"),
        (lambda i: i["files"]["refine-00005-of-00060.safetensors"].update(bytes=math.inf), "damaged"),
        (lambda i: i[files.SECTION][5].update(bits=5.0), "damaged"),
        (lambda i: i[files.SECTION][0].update(bits=1e9), "damaged"),
        (
            lambda i: i[files.SECTION][5].update(bits=i[files.SECTION][5]["bits"] + 0.01),
            "another width",
        ),
        (lambda i: i[files.SECTION][0].update(bits=1.5), "another width"),
        (lambda i: i.update(format_version=99), "99"),
        (lambda i: renamed(i, "x" * 300), "does not belong|not a file"),
        (lambda i: renamed(i, "../x"), "does not belong|not a file"),
    ],
)
def test_what_the_list_states_is_checked(anybit_copy: Path, change: Callable[[Any], Any], word: str) -> None:
    index = index_of(anybit_copy)
    change(index)
    write_index(anybit_copy, index)
    for use in (load, verify):
        with pytest.raises(InputError, match=word):
            use(anybit_copy)


def test_an_edited_list_is_found(anybit_copy: Path) -> None:
    index = index_of(anybit_copy)
    for entry in index[files.SECTION]:
        entry["loss"] = 0.0
    (anybit_copy / "anybit.index.json").write_text(json.dumps(index))
    for use in (load, verify, table_of_levels):
        with pytest.raises(InputError, match="or were edited"):
            use(anybit_copy)


def test_a_download_under_way_is_a_prefix(anybit_copy: Path) -> None:
    for number in range(21, 61):
        (anybit_copy / files.enhancement_file(number, 60)).unlink()
    last = anybit_copy / files.enhancement_file(20, 60)
    for size in (last.stat().st_size // 2, 5, 0):
        last.write_bytes(last.read_bytes()[:size])
        assert load(anybit_copy).levels[-1].bits == pytest.approx(table_of_levels(anybit_copy)[19]["bits"])
        assert [r["present"] for r in table_of_levels(anybit_copy)] == [True] * 20 + [False] * 41
    with pytest.raises(
        InputError, match=r"19 of 60 enhancement layers .*refine-00020-of-00060.* not complete"
    ):
        verify(anybit_copy)
    for budget in ({"bpw": 16.0}, {"size": "1GB"}, {}):
        report = Recorder()
        load(anybit_copy, report=report, **budget)
        assert any("19 of 60 enhancement layers" in note for note in report.said), budget


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
def test_a_damaged_list_is_refused(anybit_copy: Path, section: Any) -> None:
    index = index_of(anybit_copy) | {files.SECTION: section}
    (anybit_copy / "anybit.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"anybit\.index\.json"):
        load(anybit_copy)


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
def test_steps_that_do_not_fit_are_refused(anybit_copy: Path, steps: list[list[int]], word: str) -> None:
    """Whoever can write hashes can write these: sizes and bounds are checked before memory is touched."""
    from safetensors.torch import save_file

    file = anybit_copy / files.enhancement_file(1, 60)
    words = torch.zeros(4, dtype=torch.int32).view(torch.uint32)
    save_file({"steps": torch.tensor(steps, dtype=torch.int32), "words": words}, file)
    index = index_of(anybit_copy)
    index["files"][file.name] = {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
    chain = index[files.SECTION][0]["chain"]
    for entry in index[files.SECTION][1:]:
        chain = entry["chain"] = files.link(chain, index["files"][entry["file"]]["sha256"])
    write_index(anybit_copy, index)
    with pytest.raises(InputError, match=word):
        load(anybit_copy, bits=2.2)


def test_the_card_speaks_of_all_layers(anybit_artifact: Path) -> None:
    levels, card = table_of_levels(anybit_artifact), (anybit_artifact / "README.md").read_text()
    low = levels[0]
    assert f"{low['bits']:.2f} to 8.00 bits (anybit)" in card
    rows = [line.split(" | ") for line in card.splitlines() if line.startswith("| ") and " MB | " in line]
    assert len(rows) == len(levels)
    for row, level in zip(rows, levels):
        assert row[0] == f"| {level['bits']:.2f}" and row[1] == f"{level['bits_per_weight']:.3f}"
        assert (
            abs(float(row[2].removesuffix(" MB")) - level["size_bytes"] / 1e6) <= 0.11
        )  # it cannot count itself
        assert row[3] == f"{level['loss']:.4f} |"
    (bits,) = re.findall(r'anybit\.load\("PATH", bits=(\S+)\)', card)
    (fewer,) = re.findall(r"set_bits\((\S+)\)", card)
    assert load(anybit_artifact, bits=float(bits)).set_bits(float(fewer)) < float(bits)
