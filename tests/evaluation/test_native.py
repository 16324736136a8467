"""Perplexity by the native engine is Transformers', and what it cannot measure is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import anybit
from anybit.errors import InputError
from anybit.kernels import cpu
from anybit.loader import load_tokenizer
from tests.builders import Said

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu.available(), reason="the native extension is not built"),
]


@pytest.mark.parametrize("kv_bits", [16, 4])
def test_perplexity_is_that_of_transformers(anybit_artifact: Path, text_file: Path, kv_bits: int) -> None:
    how: dict[str, Any] = {"text": str(text_file), "seq_len": 64, "max_tokens": 640, "kv_bits": kv_bits}
    inside = anybit.evaluate(anybit_artifact, engine="transformers", **how)
    natively = anybit.evaluate(anybit_artifact, threads=1, **how)
    assert natively["perplexity"] == pytest.approx(inside["perplexity"], rel=1e-3)
    assert natively["kv_bits"] == kv_bits
    assert natively["engine"].startswith("native engine: 1 thread, exact inputs")
    assert inside["engine"] == "Transformers, float32"


def test_divergence_from_a_base(anybit_artifact: Path, model_dir: Any, text_file: Path) -> None:
    how: dict[str, Any] = {
        "text": str(text_file),
        "seq_len": 64,
        "max_tokens": 320,
        "base": model_dir("llama"),
    }
    inside, natively = (anybit.evaluate(anybit_artifact, engine=e, **how) for e in ("transformers", "native"))
    assert natively["kld_mean"] == pytest.approx(inside["kld_mean"], rel=1e-2)


def test_what_the_engine_does_not_measure(anybit_artifact: Path, text_file: Path) -> None:
    how: dict[str, Any] = {"text": str(text_file), "seq_len": 64, "max_tokens": 64, "engine": "native"}
    with pytest.raises(InputError, match=r"dtype bfloat16 on cpu \(--dtype, --device\)"):
        anybit.evaluate(anybit_artifact, **how, dtype="bfloat16")
    with pytest.raises(InputError, match="a KV-cache of 3 bits"):
        anybit.evaluate(anybit_artifact, **how, kv_bits=3)
    with pytest.raises(InputError, match="need Transformers; leave engine"):
        anybit.evaluate(anybit_artifact, **how, tasks=("piqa",))
    with pytest.raises(InputError, match="expected one of auto, native, transformers"):
        anybit.evaluate(anybit_artifact, text=str(text_file), engine="llama.cpp")


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"kv_bits": 3}, "a KV-cache of 3 bits; the engine has 16, 8, 4"),
        ({"dtype": "bfloat16"}, "dtype bfloat16 on cpu (--dtype, --device); the engine has float32 on cpu"),
    ],
)
def test_what_it_does_not_measure_transformers_does(
    anybit_artifact: Path, text_file: Path, how: dict[str, Any], why: str
) -> None:
    report = Said()
    asked: dict[str, Any] = {"text": str(text_file), "seq_len": 64, "max_tokens": 64, **how}
    found = anybit.evaluate(anybit_artifact, report=report, **asked)
    assert f"runs inside Transformers: {why}" in report.lines
    assert found["engine"] == f"Transformers, {how.get('dtype', 'float32')}"


def test_a_checkpoint_of_16_bits_and_one_of_32(model_dir: Any, tmp_path: Path, text_file: Path) -> None:
    """The one runs natively, the other inside Transformers."""
    how: dict[str, Any] = {"text": str(text_file), "seq_len": 64, "max_tokens": 128}
    inside = anybit.evaluate(model_dir("llama"), report=(report := Said()), **how)
    assert inside["engine"] == "Transformers, float32"
    assert any("holds numbers of more than 16 bits" in line for line in report.lines)
    anybit.load(model_dir("llama"), dtype="bfloat16").save_pretrained(tmp_path / "model")
    load_tokenizer(model_dir("llama")).save_pretrained(tmp_path / "model")
    natively = anybit.evaluate(tmp_path / "model", **how)
    assert natively["engine"].startswith("native engine")
    again = anybit.evaluate(tmp_path / "model", engine="transformers", **how)
    assert natively["perplexity"] == pytest.approx(again["perplexity"], rel=1e-3)
