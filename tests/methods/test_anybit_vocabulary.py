"""Embedding and head as nested rows, their planes in one order with those of the layers."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import anybit
from anybit import Engine, methods
from anybit.artifact import files
from anybit.artifact.config_json import own_windows_note
from anybit.artifact.convert import convert
from anybit.artifact.levels import Levels
from anybit.artifact.reader import open_artifact
from anybit.artifact.sizes import inspect, table_of_levels
from anybit.artifact.split import Cut
from anybit.artifact.verify import verify
from anybit.calibration.own_texts import OwnTexts
from anybit.calibration.stats import ExpectedTokens, VocabularyCost
from anybit.errors import InputError
from anybit.formats.weight import pack, unpack
from anybit.kernels import cpu
from anybit.layers import PackedModule, QuantEmbedding, TiedHead
from anybit.loader import load
from anybit.methods import METHODS, nested_codes, ordering, sensitivity
from anybit.methods.anybit import DRAWN, WRITTEN_PER_TAKEN, kinds_of_windows
from tests import builders
from tests.artifact.test_enhancements import index_of, write_index
from tests.probes import logits

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"no native extension: {cpu.why_not()}")
IDS = torch.arange(3, 40)[None]
SHORT: dict[str, Any] = {"samples": 3, "seq_len": 24}
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[[str], Path], text_file: Path) -> Make:
    """Artifacts of families, each made once."""
    there: dict[tuple[Any, ...], Path] = {}

    def make(family: str, **options: Any) -> Path:
        key = (family, *options.items())
        if key not in there:
            there[key] = tmp_path_factory.mktemp("vocabulary") / "out"
            config = builders.options("anybit", **SHORT, **options)
            anybit.quantize(model_dir(family), there[key], config, calibration=str(text_file))
        return there[key]

    return make


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gemma3"])
def test_a_model_computes_with_the_rows_of_its_level(made: Make, family: str) -> None:
    path = made(family)
    model = load(path)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, QuantEmbedding)
    assert isinstance(head, TiedHead if family != "llama" else PackedModule)
    widths = []
    for level in table_of_levels(path)[::12]:
        bits = model.set_bits(level["bits"])
        part = load(path, bits=bits)
        assert torch.equal(logits(model, IDS), logits(part, IDS))
        stored = unpack(part.get_input_embeddings().packed).dequantize()
        scale = float(getattr(embedding, "scale", 1.0))
        torch.testing.assert_close(embedding(IDS)[0], stored[IDS[0]] * scale)
        h = torch.randn(3, stored.shape[1])
        multiplied = part.get_output_embeddings()
        matrix = stored if isinstance(multiplied, TiedHead) else unpack(multiplied.packed).dequantize()
        torch.testing.assert_close(head(h), h @ matrix.T, rtol=1e-4, atol=1e-4)
        widths.append(embedding.bits)
    assert widths == sorted(widths) and widths[0] < widths[-1] == 8


@pytest.mark.parametrize("salience", ["output", "full"])
def test_rows_that_the_model_expects_in_texts_of_its_own_come_first(
    model_dir: Callable[[str], Path],
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    salience: str,
) -> None:
    asked, row = [], 50

    def written(streamed: Any, texts: int, length: int, *given: Any) -> OwnTexts:
        asked.append((texts, length, given[0]))
        certain = torch.zeros(builders.VOCABULARY)
        certain[row] = 1
        return OwnTexts(torch.full((texts, length), row), ExpectedTokens(certain, certain / 4))

    monkeypatch.setattr(sensitivity, "write_texts", written)

    def first_rows(**options: Any) -> list[int]:
        config = builders.options("anybit", **SHORT, salience=salience, seed=3, **options)
        out = tmp_path / "-".join(map(str, options.values()))
        anybit.quantize(model_dir("llama"), out, config, calibration=str(text_file))
        model = load(out)
        matrices = model.get_input_embeddings(), model.get_output_embeddings()
        return [int(unpack(matrix.packed).tiles[0].order[0]) for matrix in matrices]

    assert row not in first_rows(own_texts=0)
    assert asked == []
    assert first_rows(own_texts=0.4) == [row, row]
    assert asked == [(2, SHORT["seq_len"], 3)]


def test_an_artifact_says_what_of_its_text_is_the_models_own(made: Make) -> None:
    path = made("llama")
    assert inspect(path)["calibration"]["samples"] == SHORT["samples"]
    assert inspect(path)["calibration"]["own_windows"] == 1
    assert ", 1 of these windows by the model itself" in (path / "README.md").read_text()
    assert own_windows_note({"samples": 3}) == own_windows_note({"own_windows": 0}) == ""


def test_texts_of_the_models_own_take_time() -> None:
    def passes(**options: Any) -> float:
        config = methods.options("anybit", samples=8, gradient_samples=2, seq_len=256, **options).resolve()
        return METHODS["anybit"].work(config).passes

    assert passes(own_texts=0) == 0.25
    assert (
        passes(own_texts=0.5) == passes(own_texts=0.5, embed_bits=8) == 0.25 + DRAWN * WRITTEN_PER_TAKEN / 2
    )


@pytest.mark.parametrize(
    ("samples", "share", "given", "kinds"),
    [
        (1, 0.25, 1, (1, 0)),
        (2, 0.25, 2, (1, 1)),
        (3, 0.25, 3, (2, 1)),
        (6, 0.25, 6, (4, 2)),
        (32, 0.25, 32, (24, 8)),
        (1, 0.9, 1, (1, 0)),
        (4, 0.9, 4, (1, 3)),
        (64, 0, 64, (64, 0)),
        (16, 0.25, 14, (12, 4)),  # a text with enough for its share
        (16, 0.25, 3, (3, 1)),  # one without: all of it, and a share beside it
        (16, 0.25, 1, (1, 0)),
        (64, 0.9, 2, (2, 18)),
    ],
)
def test_a_share_of_the_windows_is_the_models_own(
    samples: int, share: float, given: int, kinds: tuple[int, int]
) -> None:
    assert kinds_of_windows(samples, share, given) == kinds


def test_all_planes_come_close_to_the_base(made: Make, model_dir: Callable[[str], Path]) -> None:
    base = AutoModelForCausalLM.from_pretrained(model_dir("llama-tied")).get_input_embeddings().weight
    own = unpack(load(made("llama-tied")).get_input_embeddings().packed).dequantize()
    errors = (own - base).norm(dim=1) / base.norm(dim=1)
    assert float(errors.max()) < 0.03


def test_transformers_loads_and_saves_it(made: Make, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(made("llama-tied"))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(model, IDS), logits(again, IDS))


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_a_size_is_kept(
    made: Make, model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path, family: str
) -> None:
    """What is left for whom the order says. Descriptions are as large as all planes here, and counted before."""
    levels, sizes = table_of_levels(made(family)), []
    for at in (30, 45, 60):
        out, size = tmp_path / str(at), levels[at]["size_bytes"]
        config = methods.options("anybit", size=size, **SHORT)
        anybit.quantize(model_dir(family), out, config, calibration=str(text_file))
        found = inspect(out)
        assert found["size_bytes"] <= size
        assert found["options"]["bits"] == pytest.approx(max(2, found["bits"]))
        assert verify(out)["hashes_checked"]
        sizes.append(found["size_bytes"])
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


def test_a_cut_takes_what_there_is_room_for() -> None:
    """The last step that fits, of steps that take bytes of any matrix."""
    losses = {
        "embed": torch.rand(50, 8).sort(1, True).values,
        "layer": torch.rand(70, 8).sort(1, True).values,
    }
    columns = {"embed": 40, "layer": 100}
    steps = ordering.order(losses, columns, beside=["embed"])
    words = np.array([2, 4])[steps.layer]
    taken = 4 * (50 * 2 + 70 * 4) + np.concatenate([[0], (4 * steps.rows * words).cumsum()])

    class Written:
        """Planes in files that have nothing else, nothing coded."""

        def file_bytes(self, counts: ordering.Counts, before: ordering.Counts | None, coded: bool) -> int:
            assert not coded
            sizes = [
                sum(4 * -(-columns[n] // 32) * sum(of) for n, of in x.items()) for x in (counts, before or {})
            ]
            return sizes[0] - sizes[1]

    planes: Any = Written()
    for room in (taken[0], taken[3], taken[3] + 1, taken[-2] + 1, taken[-1], 10 * taken[-1]):
        ends = Cut(8, False, False, ["embed"], int(room)).ends(steps, planes)
        assert taken[ends[-1]] <= room and (ends[-1] + 1 == len(taken) or taken[ends[-1] + 1] > room)
        every = Cut(8, False, False, ["embed"]).ends(steps, planes)
        assert ends[:-1] == every[: len(ends) - 1] and ends[-1] <= every[len(ends) - 1]
    half = Cut(4, False, False, ["embed"]).ends(steps, planes)[-1]
    assert steps.bits(half) <= 4 < steps.bits(half + 1)
    assert steps.all_bits(half) != pytest.approx(steps.bits(half), abs=0.01)


def test_a_size_that_is_too_small_is_refused_before_any_work(
    model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path
) -> None:
    config = methods.options("anybit", size=20_000, **SHORT)
    with pytest.raises(InputError, match="not to be had"):
        anybit.quantize(model_dir("llama"), tmp_path / "out", config, calibration=str(text_file))
    assert not list(tmp_path.iterdir())


def test_sizes_of_layers_do_not_count_embeddings(made: Make) -> None:
    path = made("llama-tied")
    for level, row in enumerate(table_of_levels(path)):
        layers, _ = Levels(open_artifact(path)).layouts(level)
        real = 8 * sum(x.nbytes for x in layers.values()) / sum(x.weights for x in layers.values())
        files_too = 60 * 8 * 2000 / sum(x.weights for x in layers.values())  # headers and steps
        assert real <= row["bits_per_weight"] <= real + files_too
        average = sum(sum(x.tiles[0].counts) * x.shape[1] for x in layers.values())
        assert row["bits"] == pytest.approx(average / sum(x.weights for x in layers.values()), abs=0.01)


def test_what_is_stated_of_embeddings_is_checked(made: Make, tmp_path: Path) -> None:
    for change in (1, -1):
        copy = Path(shutil.copytree(made("llama-tied"), tmp_path / str(change)))
        index = index_of(copy)
        at = next(i for i, e in enumerate(index[files.SECTION]) if e.get(files.EMBEDDING))
        index[files.SECTION][at][files.EMBEDDING] += 4 * change
        write_index(copy, index)
        with pytest.raises(InputError, match="another width"):
            load(copy)
    write_index(
        copy, index | {files.SECTION: [e | {files.EMBEDDING: math.nan} for e in index[files.SECTION]]}
    )
    with pytest.raises(InputError, match="damaged"):
        load(copy)


def test_artifacts_of_format_1_load(made: Make, tmp_path: Path) -> None:
    """They have no nested embeddings, coded planes, gains or kept channels of 8 bits, and another number."""
    old = made("llama-tied", embed_bits=8, kept_bits=16, kept_channels=0.05, gains=False, coded=False)
    copy = Path(shutil.copytree(old, tmp_path / "copy"))
    assert not any(files.EMBEDDING in entry for entry in index_of(copy)[files.SECTION])
    file = copy / "config.json"
    config = json.loads(file.read_text())
    (tile,) = next(iter(config["quantization_config"]["layers"].values()))["tiles"]
    assert tile["kept"] > 0 and not tile.keys() & {"coded_bytes", "gains", "kept_bits"}
    config["quantization_config"]["format_version"] = 1
    file.write_text(json.dumps(config))
    write_index(copy, index_of(copy) | {"format_version": 1})
    expected = logits(load(old), IDS)
    assert torch.equal(logits(load(copy), IDS), expected)
    convert(copy, tmp_path / "new")
    assert torch.equal(logits(load(tmp_path / "new"), IDS), expected)
    assert Engine(copy).generate(IDS[0].tolist(), 4).tokens == Engine(old).generate(IDS[0].tolist(), 4).tokens


def test_rows_that_count_get_more_planes() -> None:
    """Of rows alike, those of more probability or that are looked up more often come first."""
    generator = torch.Generator().manual_seed(0)
    weight, h = torch.randn(64, 32, generator=generator), torch.randn(500, 32, generator=generator)
    share = torch.full((64,), 1e-4)
    share[7] = share[9] = 0.05
    cost = VocabularyCost(h.T @ h / 500, share, torch.ones(32) * 1e-2, torch.full((64,), 1e-4))
    made = nested_codes.quantize_vocabulary(weight, cost, builders.options("anybit"))
    assert set(made.tiles[0].order[:2].tolist()) == {7, 9}
    assert made.losses is not None
    tile = made.tiles[0]
    for bits in (3, 8):
        counts = (64,) * bits
        errors = replace(tile, counts=counts, codes=tile.codes >> (8 - bits)).dequantize() - weight
        expected = nested_codes.VOCABULARY_FACTOR * cost.of(errors, slice(0, 64))[tile.order]
        torch.testing.assert_close(made.losses[:, bits - 1], expected, rtol=1e-3, atol=1e-9)
    assert pack(made).layout == METHODS["anybit"].embedding_layout(builders.options("anybit"), (64, 32))
