"""Perplexity by the native engine is Transformers', and what it cannot measure is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import anybit
from anybit.errors import InputError
from anybit.kernels import cpu

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu.available(), reason="the native extension is not built"),
]


@pytest.mark.parametrize("kv_bits", [16, 4])
def test_perplexity_is_that_of_transformers(anybit_artifact: Path, text_file: Path, kv_bits: int) -> None:
    how: dict[str, Any] = {"text": str(text_file), "seq_len": 64, "max_tokens": 640, "kv_bits": kv_bits}
    inside = anybit.evaluate(anybit_artifact, **how)
    natively = anybit.evaluate(anybit_artifact, engine="native", threads=1, **how)
    assert natively["perplexity"] == pytest.approx(inside["perplexity"], rel=1e-3)
    assert natively["kv_bits"] == kv_bits
    assert "1 thread, exact inputs" in natively["engine"] and "engine" not in inside


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
    how: dict[str, Any] = {"text": str(text_file), "seq_len": 64, "engine": "native"}
    with pytest.raises(InputError, match="in float32 on the CPU"):
        anybit.evaluate(anybit_artifact, **how, dtype="bfloat16")
    with pytest.raises(InputError, match="a KV-cache of 3 bits"):
        anybit.evaluate(anybit_artifact, **how, kv_bits=3)
    with pytest.raises(InputError, match="expected native or transformers"):
        anybit.evaluate(anybit_artifact, text=str(text_file), engine="llama.cpp")
