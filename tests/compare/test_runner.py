"""`anybit compare`: cells, their cache, shared statistics."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

import anybit
from anybit.artifact.writer import read_cost
from anybit.checkpoint.directory import open_checkpoint
from anybit.compare import Settings, compare, parse_entry
from anybit.compare import job as compare_job
from anybit.compare import machine as compare_machine
from anybit.compare.cells import with_window
from anybit.cost import Cost
from anybit.errors import InputError
from tests import builders
from tests.compare.runs import ENTRIES, run


def test_windows_are_as_long_as_the_model_reaches(model_dir: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(model_dir("llama"))
    assert with_window(checkpoint, Settings()).seq_len == 128
    assert with_window(checkpoint, Settings(seq_len=2048)).seq_len == 2048, "which is refused"


@pytest.mark.e2e
def test_every_cell_is_what_quantize_and_eval_give(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_dir("llama")
    entries = [parse_entry(e) for e in ENTRIES[:3]]
    own = compare(model, tmp_path / "out", entries[:1], (3,), settings)  # in a process of its own
    monkeypatch.setattr(compare_job, "run_apart", lambda job, file: compare_job.run(job))
    results = compare(model, tmp_path / "out", entries, (3, 4), settings)
    assert results["cells"][:2] == own["cells"]
    base, *cells = results["cells"]
    assert [(c["name"], c["bits"]) for c in cells] == [
        (name, bits) for name in ("rtn (group_size=16)", "squeezellm", "any-precision") for bits in (3, 4)
    ]
    options = {"samples": 3, "seq_len": 32}
    configs = [
        builders.options("rtn", 3, 16, **options),
        builders.options("squeezellm", 4, **options),
        builders.options("any-precision", **options),
    ]
    measured = {"text": settings.text, "seq_len": 32, "max_tokens": 256, "engine": "transformers"}
    for config, cell, bits in zip(configs, (cells[0], cells[3], cells[4]), (None, None, 3)):
        made = anybit.quantize(model, tmp_path / config.name, config, calibration=settings.calibration)
        figures = anybit.evaluate(made.path, base=model, bits=bits, **measured)
        for key in ("perplexity", "kld_mean", "bits_per_weight", "size_bytes", "window_nll"):
            assert cell[key] == figures[key], (config.name, key)
        assert cell["peak_memory_bytes"] > 50e6 and cell["seconds"] > 0 and not cell["resumed"]
    assert base["perplexity"] == anybit.evaluate(model, **measured)["perplexity"]
    assert base["bits"] == 16 and "kld_mean" not in base
    assert not (tmp_path / "out" / "work").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_finished_cells_are_not_made_again(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_dir("llama")
    first = run(model, tmp_path, settings, ENTRIES[:1])
    jobs = []
    monkeypatch.setattr(compare_job, "run_apart", lambda job, file: jobs.append(job) or compare_job.run(job))
    assert run(model, tmp_path, settings, ENTRIES[:1]) == first and not jobs
    more = run(model, tmp_path, settings, ("rtn: group_size=16", "rtn"))
    assert more["cells"][:3] == first["cells"] and ["group_size" in job.options for job in jobs] == [
        False,
        False,
    ]
    other = Settings(**{**vars(settings), "max_tokens": 128})
    run(model, tmp_path, other, ENTRIES[:1], keep=True)
    assert len(jobs) == 4  # another evaluation: other cells, of artifacts that were not kept
    base, *cells = run(model, tmp_path, Settings(**{**vars(other), "max_tokens": 64}), ENTRIES[:1])["cells"]
    assert len(jobs) == 4 and [c["tokens"] for c in (base, *cells)] == [62] * 3  # of artifacts that were
    run(model, tmp_path, Settings(**{**vars(other), "seed": 1}), ENTRIES[:1])
    assert len(jobs) == 6  # other calibration: other artifacts


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_gradients_are_gathered_once_and_counted_for_each(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path
) -> None:
    results = run(
        model_dir("llama"), tmp_path, settings, ("squeezellm", "any-precision", "mixllm"), keep=True
    )
    folders = list(tmp_path.glob("work/statistics/*"))
    assert sum(not f.name.startswith("base-") for f in folders) == 1  # MixLLM at 4 bits looks for no row
    (file,) = tmp_path.glob("work/statistics/*/statistics/complete")
    cost = json.loads(file.read_text())["seconds"]
    assert cost > 0
    shared = {(c["name"], c["bits"]): c["shared_seconds"] for c in results["cells"][1:]}
    codebooks = ("squeezellm", "any-precision")
    assert shared.pop(("mixllm", 4)) == 0
    assert shared == {(name, bits): cost for name in codebooks for bits in (3, 4)}  # whoever gathered them
    assert all(c["seconds"] > c["shared_seconds"] for c in results["cells"][1:])
    kept = sorted(p.name for p in tmp_path.glob("work/*") if p.is_dir() and p.name != "statistics")
    assert len(kept) == 4 and sum(name.startswith("any-precision") for name in kept) == 1
    assert all(anybit.load(tmp_path / "work" / name) for name in kept)


@pytest.mark.slow
def test_shared_statistics_give_the_same_bytes(
    model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path
) -> None:
    for config in (
        builders.options("squeezellm", 3, samples=2, seq_len=32),
        builders.options("mixllm", 5, 16, samples=2, seq_len=32),
        builders.options("llm-mq", 3, 16, samples=2, seq_len=32),
    ):
        made = [
            anybit.quantize(
                model_dir("llama"),
                tmp_path / f"{config.name}-{i}",
                config,
                calibration=str(text_file),
                statistics=folder,
            )
            for i, folder in enumerate([None, tmp_path / "shared", str(tmp_path / "shared")])
        ]
        assert made[0].statistics is None and made[1].taken_over is None
        assert made[2].statistics == made[1].statistics
        assert made[2].taken_over == made[2].statistics
        assert 0 < made[2].taken_over.seconds < made[1].seconds and made[2].taken_over.processor_seconds > 0
        files = [{f.name: f.read_bytes() for f in m.path.glob("*.safetensors")} for m in made]
        assert files[0] == files[1] == files[2]


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_widths_that_an_entry_does_not_have_are_left_out(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path
) -> None:
    entries = (
        "rtn",
        "any-precision",
        "two-four-sixteen: group_size=8",
        "cmpq: bits=2.5",
        "llm-mq: bits=[7, 8]",
    )
    results = compare(model_dir("llama"), tmp_path, [parse_entry(e) for e in entries], (2.6, 4, 4), settings)
    made = [(c["name"], c["bits"]) for c in results["cells"][1:]]
    assert made == [
        ("rtn", 4),
        ("any-precision", 4),
        (entries[2].replace(": ", " (") + ")", 4),
        ("cmpq", 2.5),
    ]
    reasons = [r["reason"] for r in results["left_out"]]
    assert [r["bits"] for r in results["left_out"]] == [2.6, 2.6, 2.6, 7, 8]
    for reason, words in zip(reasons, ("whole widths", "runs at 3, 4, 5, 6, 7, 8 bits", "at least 2.9")):
        assert words in reason
    with pytest.raises(InputError, match=r"no method has any of the widths asked for .*llm-mq: it has"):
        compare(model_dir("llama"), tmp_path, [parse_entry("llm-mq")], (7,), settings)
    with pytest.raises(InputError, match=r"rtn .*group_size .*0: expected a whole number from 1"):
        compare(model_dir("llama"), tmp_path, [parse_entry("rtn: group_size=0")], (4,), settings)


@pytest.mark.e2e
@pytest.mark.usefixtures("in_process")
def test_kept_artifacts_outlive_later_runs_and_one_run_at_a_time(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path
) -> None:
    model = model_dir("llama")
    run(model, tmp_path, settings, ("rtn",), keep=True)
    kept = sorted(p.name for p in (tmp_path / "work").glob("rtn-*") if p.is_dir())
    run(model, tmp_path, settings, ("rtn", "gptq: group_size=16"))
    assert kept == sorted(p.name for p in (tmp_path / "work").glob("*-*") if p.is_dir())
    shared = sorted((tmp_path / "work" / "statistics").iterdir())
    other = Settings(**{**vars(settings), "max_tokens": 128})
    run(
        model, tmp_path, other, ("rtn", "gptq: group_size=16")
    )  # measures what is kept, and makes what is not
    assert kept == sorted(p.name for p in (tmp_path / "work").glob("*-*") if p.is_dir())
    assert len(shared) == 1 and shared == sorted((tmp_path / "work" / "statistics").iterdir())
    with (tmp_path / "compare.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another `anybit compare`"):
            run(model, tmp_path, settings, ("rtn",))


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("change", ["tokenizer", "weights", "calibration", "seed"])
def test_a_cell_belongs_to_all_that_its_figures_depend_on(
    model_copy: Callable[[str], Path], settings: Settings, tmp_path: Path, change: str
) -> None:
    model, out = model_copy("llama"), tmp_path / "out"
    run(model, out, settings, ("rtn",))
    if change == "tokenizer":
        swapped = (model / "tokenizer.json").read_text().replace('"a":', '"@":').replace('"b":', '"a":')
        (model / "tokenizer.json").write_text(swapped.replace('"@":', '"b":'))
    elif change == "weights":
        weights = load_file(model / "model.safetensors")
        save_file({k: v * 1.01 for k, v in weights.items()}, model / "model.safetensors", {"format": "pt"})
    elif change == "calibration":
        (tmp_path / "other.txt").write_text("other words " * 400)
        settings = Settings(**{**vars(settings), "calibration": str(tmp_path / "other.txt")})
    else:
        settings = Settings(**{**vars(settings), "seed": 1})
    run(model, out, settings, ("rtn",))
    of_base = change in ("tokenizer", "weights")  # its figures do not depend on calibration
    assert len(list(out.glob("cells/*.json"))) == 5 + of_base


def test_encoders_are_refused(tmp_path: Path, settings: Settings, tokenizer: PreTrainedTokenizerFast) -> None:
    config = BertConfig(
        vocab_size=264, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    BertModel(config).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    with pytest.raises(InputError, match="is an encoder"):
        run(tmp_path / "bert", tmp_path / "out", settings)


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_another_name_quantizes_nothing_again(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(model_dir("llama"), tmp_path, settings, ("rtn", "any-precision"), keep=True)
    monkeypatch.setattr(compare_job, "run_apart", lambda job, file: pytest.fail("made again"))
    renamed = ("rtn: name='plain rounding'", "any-precision: name='all widths'")
    again = run(model_dir("llama"), tmp_path, settings, renamed)
    assert [c["name"] for c in again["cells"][1:]] == 2 * ["plain rounding"] + 2 * ["all widths"]
    assert [{**c, "name": ""} for c in again["cells"]] == [{**c, "name": ""} for c in first["cells"]]
    other = Settings(**{**vars(settings), "max_tokens": 128})
    run(model_dir("llama"), tmp_path, other, renamed)  # of artifacts that were kept under the other name


@pytest.mark.usefixtures("in_process")
def test_cells_say_what_made_them(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path
) -> None:
    results = run(model_dir("llama"), tmp_path, settings, ("rtn", "squeezellm"))
    (source,) = {cell["source"] for cell in results["cells"]}
    assert len(source) == 12 and "source" not in (tmp_path / "report.html").read_text()
    for cell in results["cells"][1:]:
        assert cell["processor_seconds"] > cell["shared_processor_seconds"] >= 0
        assert (cell["shared_processor_seconds"] > 0) == (cell["name"] == "squeezellm")
    page = (tmp_path / "report.html").read_text()
    assert "processor, s" in page and "Hatched" not in page and "The code was not the same" not in page


def test_source_changes_with_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.py").write_text("x = 1")
    monkeypatch.setattr(compare_machine.anybit, "__file__", str(tmp_path / "__init__.py"))
    before = compare_machine.source()
    assert compare_machine.source() == before
    (tmp_path / "sub" / "a.py").write_text("x = 2")
    assert compare_machine.source() != before


def test_statistics_of_unknown_processor_seconds_leave_the_sum_unknown(tmp_path: Path) -> None:
    (tmp_path / "complete").write_text('{"seconds": 2.0, "peak_memory_bytes": 5}')
    old, new = read_cost(tmp_path / "complete"), Cost(1.0, 7, 3.0)
    assert old == Cost(2.0, 5, None)
    assert Cost.sum([old, new]) == Cost(3.0, 7, None) and Cost.sum([new, new]) == Cost(2.0, 7, 6.0)
