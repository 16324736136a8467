"""`anybit convert`: artifacts written again, of the newest format, their planes coded or expanded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import anybit
from anybit.artifact import files
from anybit.artifact.convert import convert
from anybit.artifact.sizes import inspect, table_of_levels
from anybit.artifact.verify import verify
from anybit.artifact.writer import ArtifactWriter
from anybit.checkpoint.files import file_sha256
from anybit.errors import InputError
from anybit.kernels import cpu
from anybit.layers import PackedModule
from anybit.loader import load
from tests.artifact.test_enhancements import index_of, write_index
from tests.conftest import ANYBIT
from tests.probes import logits

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"no native extension: {cpu.why_not()}")
IDS = torch.arange(3, 40)[None]


def planes(path: Path, **at: Any) -> dict[str, torch.Tensor]:
    """All stored tensors of a loaded artifact."""
    model, made = load(path, **at), {}
    for name, layer in model.named_modules():
        if isinstance(layer, PackedModule):
            made |= {f"{name}.{field}": t.view(torch.uint8) for field, t in layer.packed.tensors.items()}
    return made


def same(a: Path, b: Path) -> bool:
    one, other = planes(a), planes(b)
    return one.keys() == other.keys() and all(torch.equal(t, other[name]) for name, t in one.items())


def weights(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.glob("*.safetensors")}


def first_format(path: Path) -> None:
    """What version 1 wrote: no sizes of planes in the list."""
    index = index_of(path)
    for entry in index[files.SECTION]:
        entry.pop(files.PLANES, None)
    index["format_version"] = 1
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["format_version"] = 1
    (path / "config.json").write_text(json.dumps(config))
    write_index(path, index)


def test_planes_are_coded_and_expanded_without_loss(anybit_artifact: Path, tmp_path: Path) -> None:
    """Expanded and coded again it is the same bytes; whichever way, it computes the same."""
    expanded, coded = tmp_path / "expanded", tmp_path / "coded"
    convert(anybit_artifact, expanded, coded=False)
    assert not any("coded" in name for file in expanded.glob("*.safetensors") for name in load_file(file))
    assert "coded_bytes" not in (expanded / "config.json").read_text()
    assert inspect(expanded)["options"]["coded"] is False
    for row in table_of_levels(expanded):  # but for the headers of files, and what lists their steps
        more = row["file_bits_per_weight"] - row["bits_per_weight"]
        assert 0 <= more < 60 * 8 * 3000 / inspect(expanded)["weights"]
        assert 0 <= row["size_bytes"] - row["memory_bytes"] < 60 * 3000
    convert(expanded, coded)
    assert weights(coded) == weights(anybit_artifact)
    assert (coded / "config.json").read_text() == (anybit_artifact / "config.json").read_text()
    assert index_of(coded)[files.SECTION] == index_of(anybit_artifact)[files.SECTION]
    for path in (expanded, coded):
        assert verify(path)["hashes_checked"]
        assert same(path, anybit_artifact)
        for bits in (2.5, 8):
            assert torch.equal(
                logits(load(path, bits=bits), IDS), logits(load(anybit_artifact, bits=bits), IDS)
            )
        rows, old = table_of_levels(path), table_of_levels(anybit_artifact)
        keys = ("bits", "bits_per_weight", "embedding_bits_per_weight", "loss", "present")
        assert [[row[key] for key in keys] for row in rows] == [[row[key] for key in keys] for row in old]
        for row, was in zip(rows, old):  # config.json and the list of files differ
            assert abs(row["memory_bytes"] - was["memory_bytes"]) < 20_000
            assert row["memory_bytes"] > was["size_bytes"] - 20_000
    assert (
        table_of_levels(coded)[9]["file_bits_per_weight"]
        < table_of_levels(expanded)[9]["file_bits_per_weight"]
    )


def test_the_first_format_is_converted(anybit_artifact: Path, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    convert(anybit_artifact, old, coded=False)
    first_format(old)
    assert same(old, anybit_artifact)
    convert(old, new)
    assert weights(new) == weights(anybit_artifact)
    assert json.loads((new / "config.json").read_text())["quantization_config"]["format_version"] == 2
    assert verify(new)["hashes_checked"]


def test_an_artifact_without_gains_is_converted_as_it_is(
    model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path
) -> None:
    made, coded, expanded = (tmp_path / name for name in ("made", "coded", "expanded"))
    anybit.quantize(model_dir("llama"), made, replace(ANYBIT, gains=False), calibration=str(text_file))
    first_format(made)
    convert(made, expanded, coded=False)
    convert(expanded, coded)
    names = {
        path: {n for f in path.glob("*.safetensors") for n in load_file(f)} for path in (coded, expanded)
    }
    assert not any(name.endswith(".gains") for of in names.values() for name in of)
    assert [any("coded" in name for name in names[path]) for path in (coded, expanded)] == [True, False]
    wanted = logits(load(made, bits=2.5), IDS)
    for path in (coded, expanded):
        assert same(path, made)
        assert torch.equal(logits(load(path, bits=2.5), IDS), wanted)


def test_what_is_there_of_a_prefix_is_converted(anybit_copy: Path, tmp_path: Path) -> None:
    missing = index_of(anybit_copy)[files.SECTION][8]["file"]
    (anybit_copy / missing).unlink()
    convert(anybit_copy, tmp_path / "new")
    assert len(table_of_levels(tmp_path / "new")) == 8
    assert verify(tmp_path / "new")["hashes_checked"]
    assert same(tmp_path / "new", anybit_copy)


def test_the_card_has_the_new_sizes(anybit_artifact: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    convert(anybit_artifact, old)
    card = (old / "README.md").read_text()
    heading = "| bits | bits per weight in memory | size of the files |"
    assert heading in card
    (old / "README.md").write_text(
        card.replace(heading, "| bits | bits per weight | size |")
    )  # of earlier versions
    convert(old, tmp_path / "new", coded=False)
    card = (tmp_path / "new" / "README.md").read_text()
    assert heading in card
    rows = re.findall(r"^\| (\d\.\d\d) \| [\d.]+ \| ([\d.]+) MB \|", card, re.M)
    sizes = table_of_levels(tmp_path / "new")
    assert len(rows) == len(sizes)
    for (bits, size), row in zip(rows, sizes, strict=True):
        assert float(bits) == pytest.approx(row["bits"], abs=0.006)
        assert float(size) == pytest.approx(row["size_bytes"] / 1e6, abs=0.06)
    assert "## Use" in card


def test_a_conversion_that_was_cut_off_ends_in_the_same_bytes(
    anybit_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between shards, and between enhancement layers; no other conversion takes over what it left."""
    out, whole = tmp_path / "out", tmp_path / "whole"
    convert(anybit_artifact, whole)

    def fail(*_: Any) -> Any:
        raise KeyboardInterrupt

    for stops in ("write_split", "finish"):
        with monkeypatch.context() as patch:
            patch.setattr(ArtifactWriter, stops, fail)
            with pytest.raises(KeyboardInterrupt):
                convert(anybit_artifact, out)
        assert not out.exists()
        with pytest.raises(InputError, match="unfinished run"):
            convert(anybit_artifact, out, coded=False)
    convert(anybit_artifact, out)
    assert weights(out) == weights(whole)
    assert index_of(out) == index_of(whole)


def test_what_cannot_be_converted_is_refused(
    artifact_of: Callable[..., Path], anybit_artifact: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="made by rtn and has no enhancement layers"):
        convert(artifact_of("llama"), tmp_path / "new")
    with pytest.raises(InputError, match="does not exist"):
        convert(tmp_path / "none", tmp_path / "new")
    convert(anybit_artifact, tmp_path / "new")
    with pytest.raises(InputError, match="already holds an artifact"):
        convert(anybit_artifact, tmp_path / "new")
    convert(anybit_artifact, tmp_path / "new", overwrite=True)


def test_a_damaged_artifact_is_not_converted(anybit_copy: Path, tmp_path: Path) -> None:
    file = anybit_copy / index_of(anybit_copy)[files.SECTION][3]["file"]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(InputError, match=f"{file.name}.*SHA-256"):
        convert(anybit_copy, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("change", ["cut", "longer", "gone"])
def test_a_forged_stream_is_refused(anybit_copy: Path, change: str) -> None:
    """Hashes made anew over a stream that is not whole: nothing is read beyond it, and a sentence says where."""
    index = index_of(anybit_copy)
    name = index[files.SECTION][1]["file"]
    file = anybit_copy / name
    tensors, chain = load_file(file), index[files.SECTION][0]["chain"]
    stream = tensors["coded"]
    tensors["coded"] = {"cut": stream[:-3], "longer": torch.cat([stream, stream[:1]]), "gone": stream[:0]}[
        change
    ]
    save_file({key: t.contiguous() for key, t in tensors.items()}, file, metadata={"after": chain})
    index["files"][name] = {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
    for entry in index[files.SECTION][1:]:
        chain = entry["chain"] = files.link(chain, index["files"][entry["file"]]["sha256"])
    write_index(anybit_copy, index)
    bits = index[files.SECTION][1]["bits"]
    with pytest.raises(InputError, match=rf"{name}: the coded planes are damaged"):
        load(anybit_copy, bits=bits)
    with pytest.raises(InputError, match=rf"{name}: the coded planes are damaged"):
        verify(anybit_copy)


def test_options_leave_planes_expanded(anybit_artifact: Path, model_dir: Callable[[str], Path], text_file: Path,
                                       tmp_path: Path) -> None:  # fmt: skip
    options = replace(ANYBIT, coded=False)
    anybit.quantize(model_dir("llama"), tmp_path / "out", options, calibration=str(text_file))
    convert(anybit_artifact, tmp_path / "expanded", coded=False)
    assert weights(tmp_path / "out") == weights(tmp_path / "expanded")
    assert inspect(tmp_path / "out")["options"]["coded"] is False


def test_a_base_alone_is_copied(anybit_copy: Path, tmp_path: Path) -> None:
    """Without any enhancement layer."""
    for file in anybit_copy.glob("refine-*"):
        file.unlink()
    convert(anybit_copy, tmp_path / "new", coded=False)
    assert same(tmp_path / "new", anybit_copy)
