"""MixLLM: rows at 8 bits where the loss needs them, and the search that chooses them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import anybit
from anybit.artifact.sizes import inspect
from anybit.config import LayerSpec, TileSpec
from anybit.errors import InputError
from anybit.methods import mixllm, rtn, sensitivity
from anybit.methods.method import Search
from anybit.plan import make_plan
from tests import builders
from tests.builders import MakeModel, opened, random, token_rows

SMALL: dict[str, Any] = {"samples": 3, "seq_len": 24}


def loss_changes(folder: Path, tokens: Tensor, name: str) -> Tensor:
    """What rounding each row alone really does to the mean loss, from the model's own forward pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weight = model.get_submodule(name).weight
    original = weight.detach().clone()
    rounded = rtn.quantize(original, None, builders.layer_spec(tiles=(TileSpec(4),))).dequantize()

    @torch.no_grad()
    def losses() -> Tensor:
        return torch.stack([model(input_ids=row[None], labels=row[None]).loss.double() for row in tokens])

    base, found = losses(), []
    for row in range(len(original)):
        with torch.no_grad():
            weight[row] = rounded[row]
            found.append((losses() - base).abs().mean())
            weight[row] = original[row]
    return torch.stack(found)


def test_salience_predicts_the_loss(model_dir: MakeModel) -> None:
    streamed, tokens = opened(model_dir("llama")), token_rows(4, 24)
    shapes = streamed.all_linears()
    scores = sensitivity._scores(
        Search(streamed, tokens, shapes, builders.options("mixllm")), "", lambda n: None
    )
    name = "model.layers.1.self_attn.v_proj"
    real = loss_changes(model_dir("llama"), tokens, name)
    order = torch.stack([scores[name].argsort().argsort(), real.argsort().argsort()]).float()
    assert torch.corrcoef(order)[0, 1] > 0.8


def test_rows_are_chosen_globally() -> None:
    shapes = {"a": (4, 10), "b": (3, 100)}
    scores = {"a": torch.tensor([5.0, 1.0, 4.0, 1.0]), "b": torch.tensor([4.0, 9.0, 0.0])}
    assert sensitivity.choose(scores, shapes, 3 / 7, by_rows=True) == {"a": (0, 2), "b": (1,)}
    assert sensitivity.choose(scores, shapes, 0.0, by_rows=True) == {"a": (), "b": ()}
    assert sensitivity.choose(scores, shapes, 1.0, by_rows=False) == {"a": (0, 1, 2, 3), "b": (0, 1, 2)}
    assert sensitivity.choose(scores, shapes, 120 / 340, by_rows=False) == {"a": (0, 2), "b": (1,)}
    tied = {"a": torch.zeros(4), "b": torch.zeros(3)}
    assert sensitivity.choose(tied, shapes, 2 / 7, by_rows=True) == {"a": (0, 1), "b": ()}


@pytest.mark.slow
def test_an_interrupted_search_goes_on(
    model_dir: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = token_rows(9, 12)
    config = builders.options("mixllm", wide_rows=0.2, search="progressive")
    streamed = opened(model_dir("llama"))
    shapes = streamed.all_linears()
    whole = sensitivity.salient_rows(Search(streamed, tokens, shapes, config))
    calls: list[int] = []
    real = sensitivity.gradient_statistics

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(args[1]))
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(sensitivity, "gradient_statistics", counted)
    with pytest.raises(KeyboardInterrupt):
        sensitivity.salient_rows(Search(opened(model_dir("llama")), tokens, shapes, config, folder=tmp_path))
    done = len(calls) - 1
    assert (
        sensitivity.salient_rows(Search(opened(model_dir("llama")), tokens, shapes, config, folder=tmp_path))
        == whole
    )
    assert len(calls) - done - 1 == 10 * 3 - done  # 10 passes of 4 + 4 + 1 samples
    rows = sum(len(r) for r in whole.values())
    assert rows == int(0.2 * sum(out for out, _ in shapes.values()) + 1e-6)


@pytest.mark.slow
def test_wide_rows_are_the_salient_ones(model_dir: MakeModel, tmp_path: Path) -> None:
    config = builders.options("mixllm", wide_rows=0.25, group_size=16, **SMALL)
    anybit.quantize(model_dir("llama"), tmp_path / "out", config)
    tiles = [t for line in inspect(tmp_path / "out")["layers"] for t in line["tiles"]]
    shapes = opened(model_dir("llama")).all_linears()
    wide = sum(
        t.get("rows", shapes[line["name"]][0])
        for line in inspect(tmp_path / "out")["layers"]
        for t in line["tiles"]
        if t["bits"] == 8
    )
    assert wide == int(0.25 * sum(out for out, _ in shapes.values()))
    assert all(t["act_bits"] == 8 and t["symmetric"] == (t["bits"] == 8) for t in tiles)


@pytest.mark.parametrize("bits", [4.04, 4.5, 6.0])
def test_a_plan_before_the_search_is_no_smaller_than_the_artifact(bits: float, model_dir: MakeModel) -> None:
    streamed = opened(model_dir("llama"))
    config = builders.options("mixllm", bits=bits, group_size=16, **SMALL)
    planned, shapes = make_plan(streamed, config), streamed.all_linears()
    for seed in range(4):
        scores = {name: random(out, seed=seed + i).abs() for i, (name, (out, _)) in enumerate(shapes.items())}
        rows = sensitivity.choose(scores, shapes, config.wide_share, by_rows=False)
        specs = {n: mixllm.with_rows(planned.specs[n], rows[n], shapes[n][0]) for n in rows}
        assert make_plan(streamed, config, specs).tensor_bytes <= 1.01 * planned.tensor_bytes


@pytest.mark.slow
def test_a_spec_takes_layers_out_of_the_search(model_dir: MakeModel, tmp_path: Path) -> None:
    folder, config = model_dir("llama"), builders.options("mixllm", wide_rows=0.3, group_size=16, **SMALL)
    names = list(opened(folder).all_linears())
    one = {names[0]: LayerSpec(config, (TileSpec(4, 16),))}
    anybit.quantize(folder, tmp_path / "one", config, spec_map=one)
    lines = {line["name"]: line["tiles"] for line in inspect(tmp_path / "one")["layers"]}
    assert [tile["bits"] for tile in lines[names[0]]] == [4]
    assert any(len(tiles) == 2 for tiles in lines.values())
    everything = dict.fromkeys(names, LayerSpec(config, (TileSpec(8, 16, True),)))
    anybit.quantize(folder, tmp_path / "all", config, spec_map=everything)
    assert inspect(tmp_path / "all")["bits"] == 8
    with pytest.raises(InputError, match="bits 4 or 8"):
        anybit.quantize(
            folder,
            tmp_path / "no",
            config,
            spec_map={names[0]: LayerSpec(config, (TileSpec(6, 16),))},
        )


@pytest.mark.slow
def test_a_refused_run_keeps_its_search(
    model_dir: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stops a run after hours of search, the same command goes on from there."""
    config = builders.options("mixllm", wide_rows=0.2, group_size=16, samples=9, seq_len=16)
    real, calls = sensitivity.gradient_statistics, []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise InputError("the disk is full")
        return real(*args, **kwargs)

    monkeypatch.setattr(sensitivity, "gradient_statistics", failing)
    with pytest.raises(InputError, match="the disk is full"):
        anybit.quantize(model_dir("llama"), tmp_path / "out", config)
    with pytest.raises(InputError, match="--overwrite"):
        anybit.quantize(model_dir("llama"), tmp_path / "out", replace(config, salience="diagonal"))
    anybit.quantize(model_dir("llama"), tmp_path / "out", config)
    assert len(calls) == 4  # three parts of at most 4 samples; two were there
    anybit.quantize(model_dir("llama"), tmp_path / "again", config)
    assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "out" / "config.json").read_text()


def test_a_disk_that_fills_during_the_search_is_a_sentence(
    model_dir: MakeModel, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the same command goes on from the parts before."""

    def full(found: Any, file: Path, **options: Any) -> None:
        if "samples-4" in file.name:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save_file(found, file, **options)

    monkeypatch.setattr(sensitivity, "save_file", full)
    run = {"calibration": str(text_file)}
    config = builders.options("mixllm", bits=4.4, samples=6, seq_len=24)
    with pytest.raises(InputError, match=r"the disk is full .* make room and run the same command again"):
        anybit.quantize(model_dir("llama"), tmp_path / "out", config, **run)
    left = [file.name for file in (tmp_path / "out.partial").rglob("samples-*")]
    assert left == ["samples-0.safetensors"]
    monkeypatch.undo()
    assert anybit.quantize(model_dir("llama"), tmp_path / "out", config, **run).path == tmp_path / "out"
