"""The report of `anybit compare`."""

from __future__ import annotations

import html
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from anybit.checkpoint.directory import open_checkpoint
from anybit.cli.main import main
from anybit.compare import Settings, compare, parse_entry
from anybit.compare import job as compare_job
from anybit.compare.base import quantized_before
from anybit.compare.report import bars, pareto, width, width_grid, write_report
from anybit.compare.rows import label
from anybit.methods import METHODS
from tests.compare.runs import run

BARS = {"name": "rtn", "method": "rtn", "bits": 3, "act_bits": 16, "kv_bits": 16, "peak_memory_bytes": 1}


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_the_report_shows_every_cell(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path
) -> None:
    results = run(model_dir("llama"), tmp_path, settings)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Mix &lt;LLM&gt;" in page and "Mix <LLM>" not in page
    for cell in results["cells"][1:]:
        assert (
            f"<td>{html.escape(label(cell))}</td><td>{width(cell)}</td><td>{cell['bits_per_weight']:.3f}</td>"
            f"<td>{cell['file_bits_per_weight']:.3f}</td>" in page
        )
        assert f"<td>{cell['kld_mean']:.4f}</td>" in page
    assert page.count("data:image/png;base64,iVBOR") == 3  # two curves and the bars: all layers are alike
    assert settings.text not in page and str(tmp_path) not in (tmp_path / "results.json").read_text()
    assert (tmp_path / "perplexity.png").stat().st_size > 1000 and (tmp_path / "kld.png").is_file()


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_mixed_widths_have_a_heatmap(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path
) -> None:
    compare(model_dir("llama"), tmp_path, [parse_entry("llm-mq: group_size=16")], (2.5,), settings)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,iVBOR") == 4 and "Where the bits are" in page


def test_width_grid() -> None:
    layers = [
        {"name": "model.layers.1.attn.q", "bits": 3},
        {"name": "model.layers.0.attn.q", "bits": 2},
        {"name": "model.layers.1.mlp.up", "bits": 4},
        {"name": "head", "bits": 8},
    ]
    kinds, grid = width_grid(layers)
    assert kinds == ["attn.q", "mlp.up", "head"]
    assert grid[0].tolist() == [2, 3] and grid[1, 1] == 4 and grid[2, 0] == 8 and grid[1, 0] != grid[1, 0]


def test_pareto() -> None:
    def cell(bpw: float, perplexity: float | None) -> dict[str, Any]:
        return {"bits_per_weight": bpw, "perplexity": perplexity}

    cells = [cell(4, 20), cell(3, 30), cell(3.5, 31), cell(3, 29), cell(5, 20), cell(2, None), cell(2.5, 100)]
    assert pareto(cells, "perplexity") == {0, 3, 6}


def test_a_report_stands_whatever_is_missing(tmp_path: Path) -> None:
    machine = {"processor": "one", "threads": 1, "anybit": "0", "torch": "2", "transformers": "5"}
    base = {
        "name": "unquantized",
        "bits": 16.0,
        "perplexity": None,
        "tokens": 0,
        "tasks": {"gsm8k": {"exact_match": 0.5}},
    }
    base |= {"machine": machine}
    cell = {
        "name": "$x$ _",
        "bits": 3.0,
        "act_bits": 16,
        "kv_bits": 16,
        "bits_per_weight": 3.1,
        "size_bytes": 1,
        "method": "rtn",
        "options": {},
    }
    cell |= {"perplexity": None, "kld_mean": None, "tasks": {"gsm8k": {"exact_match": None}}, "layers": []}
    cell |= {"seconds": 1.0, "shared_seconds": 0.0, "peak_memory_bytes": 1, "resumed": False, "tokens": 2}
    cell |= {"window_nll": [1.0], "machine": {**machine, "processor": "another"}}
    results = {"model": "m", "settings": vars(Settings()), "machine": machine, "left_out": []}
    for cells in ([base], [base, cell]):
        page = write_report(tmp_path, {**results, "cells": cells}).read_text(encoding="utf-8")
        assert "none" in page
    assert "one, 1 threads" in page and "; rows marked ¹ on another" in page and "$x$ _ [rtn] ¹" in page
    assert "<td>3.100</td><td>?</td><td>0.0</td>" in page  # older runs did not record what files take


def test_bars_show_processor_seconds_and_cut_long_waits() -> None:
    def cell(**seconds: float) -> dict[str, Any]:
        shared = {f"shared_{name}": 0.25 * value for name, value in seconds.items()}
        return {**BARS, **seconds, **shared}

    cells = [cell(seconds=1700.0, processor_seconds=120.0), cell(seconds=100.0), cell(seconds=900.0)]
    time, _ = bars(cells).axes
    assert [patch.get_width() for patch in time.patches] == [90, 30, 75, 25, 675, 225]
    assert [patch.get_hatch() for patch in time.patches] == 2 * [None] + 4 * ["///"]
    assert [text.get_text() for text in time.texts] == ["900"] and time.get_xlim()[1] < 700


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_the_report_shows_cells_of_earlier_runs_that_compare(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path
) -> None:
    model = model_dir("llama")
    run(model, tmp_path, settings, ("squeezellm", "rtn: group_size=16"))
    run(model, tmp_path, Settings(**{**vars(settings), "max_tokens": 128}), ("gptq: group_size=16",))
    run(model, tmp_path, Settings(**{**vars(settings), "seed": 1}), ("rtn: group_size=16",))
    for file in tmp_path.glob("cells/*.json"):  # as cells of before are
        cell = json.loads(file.read_text())
        for key in ("source", "processor_seconds", "shared_processor_seconds"):
            cell.pop(key, None)
        file.write_text(json.dumps(cell))
    again = [parse_entry("rtn: group_size=16, name='plain'"), parse_entry("atom: group_size=16")]
    results = compare(model, tmp_path, again, (4,), settings)
    shown = [(c["name"], c["bits"]) for c in results["cells"]]
    assert shown == [
        ("unquantized", 16),
        ("plain", 3),  # of the first run, by the name of this one
        ("plain", 4),
        ("atom (group_size=16)", 4),
        ("squeezellm", 3),
        ("squeezellm", 4),
    ]
    assert [
        (c["name"], c["bits"]) for c in json.loads((tmp_path / "results.json").read_text())["cells"]
    ] == shown
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "The code was not the same for all: unrecorded (5 rows)" in page and "Hatched" in page
    assert "<td>plain [rtn]</td><td>W3A16</td>" in page and "gptq" not in page


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_a_name_of_an_earlier_run_that_is_taken_gives_way(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path
) -> None:
    run(model_dir("llama"), tmp_path, settings, ("rtn: group_size=16, name='mine'",))
    results = run(model_dir("llama"), tmp_path, settings, ("rtn: group_size=24, name='mine'",))
    assert [c["name"] for c in results["cells"][1:]] == 2 * ["mine"] + 2 * ["rtn (group_size=16)"]


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_the_report_says_what_its_rows_are_and_how_to_make_them(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = ("gptq: group_size=16, clip=false, name='a \"<plain>\" one'", "any-precision: widths=[3, 4]")
    first = run(model_dir("llama"), tmp_path / "out", settings, entries)
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "group_size=16, clip=false" in html.unescape(page) and "<code>widths=[3, 4]</code>" in page
    assert METHODS["gptq"].summary in html.unescape(page) and "quantized before" not in page
    command = shlex.split(html.unescape(page.partition("<pre>")[2].partition("</pre>")[0]))
    command[2] = str(model_dir("llama"))
    command[command.index("OUT")] = str(tmp_path / "out")
    for option in ("--calibration", "--text"):
        command[command.index(option) + 1] = settings.text
    monkeypatch.setattr(compare_job, "run_apart", lambda job, file: pytest.fail("another cell"))
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    again = json.loads((tmp_path / "out" / "results.json").read_text())["cells"]
    assert [(c["name"], c["bits"]) for c in again] == [(c["name"], c["bits"]) for c in first["cells"]]


@pytest.mark.usefixtures("in_process")
def test_a_base_that_was_quantized_is_told(
    settings: Settings, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = tmp_path / "model"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=264, **sizes)).save_pretrained(model)
    tokenizer.save_pretrained(model)
    assert quantized_before(open_checkpoint(model)) is None
    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        if weight.ndim == 2 and ".layers." in name:
            blocks = weight.reshape(-1, 32)
            step = blocks.abs().amax(1, keepdim=True) / 7
            weights[name] = ((blocks / step).round() * step).reshape(weight.shape)
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    results = run(model, tmp_path / "out", settings, ("rtn",))
    assert results["quantized_before"].startswith("at most 1")
    assert "base weights had been quantized before" in (tmp_path / "out" / "report.html").read_text()
