"""`anybit eval` at work and refusing."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.commands import Run, recomputed_bits_per_weight, refused


def test_eval_writes_its_figures(run: Run, llama: Path, made: Path, text_file: Path, tmp_path: Path) -> None:
    text = ("--text", text_file, "--seq-len", "64", "--max-tokens", "1000")
    ran = run("eval", made, *text, "--base", llama, "--json", tmp_path / "r.json")
    assert ran.code == 0, ran.err
    figures = json.loads((tmp_path / "r.json").read_text())
    assert (figures["seq_len"], figures["tokens"], figures["tail_tokens"]) == (64, 15 * 63, 40)
    assert figures["bits_per_weight"] == pytest.approx(recomputed_bits_per_weight(made))
    assert figures["kld_p99"] >= figures["kld_mean"] > 0
    assert 0 <= figures["top1_agreement"] <= 1
    alone = tmp_path / "alone.json"
    assert run("eval", llama, *text, "--json", alone).code == 0
    base = json.loads(alone.read_text())
    assert base["bits_per_weight"] is None and "kld_mean" not in base
    assert base["perplexity"] == pytest.approx(figures["base_perplexity"])
    assert base["perplexity"] != pytest.approx(figures["perplexity"], rel=1e-4)
    for shown in (f"{figures['perplexity']:.4f}", "top-1 agreement", "bits per weight", "40 tokens"):
        assert shown in ran.out
    itself = run("eval", llama, *text, "--base", llama, "--json", alone)
    assert itself.code == 0
    assert json.loads(alone.read_text())["kld_mean"] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_eval_refuses(run: Run, made: Path, model_copy: Callable[[str], Path], tmp_path: Path) -> None:
    refused(run("eval", made, "--text", "a.txt", "--dataset", "wikitext2"), "--dataset")
    refused(run("eval", made, "--text", tmp_path / "nowhere.txt"), "nowhere.txt")
    refused(run("eval", made, "--dtype", "float8"), "float8", "bfloat16")
    refused(run("eval", made, "--codebook-precision", "int4"), "'int4'", "fp16 or int8")
    refused(run("eval", made, "--tasks-dir", tmp_path), "tasks_dir", "--tasks")
    refused(run("eval", made, "--limit", "3"), "limit", "--tasks")
    for command in (("eval", made), ("generate", made, "-p", "x"), ("chat", made)):
        refused(run(*command, "--device", "tpu"), "tpu", "expected cpu or cuda")
    refused(run("eval", made, "--json", tmp_path / "no" / "r.json"), "cannot be written")
    untokenized = model_copy("llama")
    (untokenized / "tokenizer.json").unlink()
    refused(run("eval", untokenized), "tokenizer")
