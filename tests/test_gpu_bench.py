"""`anybit bench kernels --device cuda`: what of it needs no GPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from anybit.bench import gpu as bench
from anybit.errors import InputError
from anybit.kernels import gpu

if not gpu.available():
    pytest.skip(f"the GPU's kernels do not run: {gpu.why_not()}", allow_module_level=True)


@pytest.mark.parametrize("part", bench.PARTS)
def test_a_small_run_checks_and_times_nothing(part: str) -> None:
    only = ("W4A8", "codebook 4") if part in bench.OF_MATRICES else ()
    figures = bench.run(part, small=True, only=only)
    assert figures["part"] == part
    if part == "quantize":
        assert figures["gptq"]["codes_differ"] == 0 and figures["kmeans"]["ns_per_weight"] > 0
    else:
        assert figures["checked"] and figures["rows"] == []
    assert json.loads(list(bench.lines(figures))[-1]) == json.loads(json.dumps(figures))


def test_what_is_wrong_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    from anybit.kernels import reference

    right = reference.int_matmul
    monkeypatch.setattr(reference, "int_matmul", lambda x, weight: right(x, weight) * 1.02)
    with pytest.raises(InputError, match=r"W4A8, .* off; do not use it"):
        bench.run("gemm", small=True, only=("W4A8",))


def test_wrong_options_are_refused() -> None:
    with pytest.raises(InputError, match="expected one of gemv"):
        bench.run("gemmv")
    with pytest.raises(InputError, match="no variant begins with 'W9'"):
        bench.run("gemv", small=True, only=("W9",))
    with pytest.raises(InputError, match="--only would be ignored"):
        bench.run("attention", small=True, only=("W4",))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to time")
def test_nothing_is_timed_without_a_gpu() -> None:
    with pytest.raises(InputError, match="no CUDA device"):
        bench.run("gemm", only=("W4A8",))


def timed(part: str, tokens: tuple[int, ...]) -> dict[str, Any]:
    variant = {"us": 10.0, "gb_per_s": 1000.0, "of_copy": 0.5, "over_float16": 2.0}
    rows = [
        {"out": out, "in": 4096, "tokens": m, "copy_gb_per_s": 2000.0, "variants": {"W4": variant}}
        for out in (4096, 11008)
        for m in tokens
    ]
    return {
        "bench": "gpu",
        "part": part,
        "device": "a GPU",
        "checked": {},
        "rows": rows,
        "averages": {"W4": 2.0},
    }


def test_figures_are_shown_and_drawn(tmp_path: Path) -> None:
    for part, tokens in (("gemv", (1,)), ("gemm", (1, 16, 256))):
        figures = timed(part, tokens)
        shown = list(bench.lines(figures))
        assert "out 11008, in 4096, tokens 1; copy 2000 GB/s" in "\n".join(shown)
        assert any(line.startswith("W4 ") and "50.00" in line for line in shown)
        bench.plot(figures, tmp_path / f"{part}.png")
        assert (tmp_path / f"{part}.png").stat().st_size > 5000
