"""`anybit bench kernels` as a command."""

import json
from pathlib import Path

import pytest

from anybit.bench import ggml, kernels
from anybit.kernels import cpu
from tests.cli.commands import Run, refused


@pytest.fixture
def bench(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("bench", "kernels", ...)`, one round of a small shape on one thread with little to read."""
    if not cpu.available():
        pytest.skip("the native extension is not built")
    monkeypatch.setattr(kernels, "_cold", lambda: 1 << 20)
    monkeypatch.setattr(kernels, "READ", 1 << 20)
    few = ("--shapes", "128x256", "--rounds", "1", "--threads", "1")
    return lambda *arguments, **more: run("bench", "kernels", *few, *arguments, **more)


def test_bench_kernels_draws_when_its_figures_are_out(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures, picture = tmp_path / "speed.json", tmp_path / "speed.png"
    ran = bench("--only", "nested, W7", "--plot", picture, "--json", figures)
    assert ran.code == 0 and picture.stat().st_size > 10_000
    assert json.loads(ran.out.splitlines()[-1]) == json.loads(figures.read_text())
    figures.unlink()
    drawn: list[str] = []
    monkeypatch.setattr("anybit.bench.picture.plot", lambda *_: drawn.append(figures.read_text()))
    assert bench("--only", "W7", "--plot", picture, "--json", figures).code == 0
    assert "W7" in drawn[0]


def test_bench_kernels_in_the_cache(bench: Run) -> None:
    ran = bench("--only", "W4", "--cached")
    assert ran.code == 0 and "in the cache" in ran.out and "x bfloat16" not in ran.out
    assert json.loads(ran.out.splitlines()[-1])["rows"][0]["variants"]["W4"]["rows"] == 128


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--threads", "0"), ("--threads", "from 1 up")),
        (("--threads=-1",), ("--threads", "from 1 up")),
        (("--tokens", "2,0"), ("--tokens", "from 1 up")),
        (("--tokens=-3",), ("--tokens", "from 1 up")),
        (("--dtype", "int8"), ("int8", "bfloat16 and float32")),
        (("--dtype", "float16"), ("float16", "bfloat16 and float32")),
        (("--shapes", "3x2", "--only", "Atom"), ("'Atom'", "MixLLM")),
        (("--shapes", ""), ("--shapes ''", "separated by commas")),
        (("--only", "W4,"), ("--only 'W4,'", "separated by commas")),
        (("--only", "W9"), ("'W9'", "W8A8")),
        (("--isa", "avx9"), ("avx9", "portable")),
        (("--shapes", "127x64", "--cached"), ("127x64", "128 or more")),
        (("--plot", "speed.png", "--cached"), ("--plot would be ignored",)),
        (("--plot", "speed.bmp"), ("speed.bmp", ".png")),
        (("--plot", "speed"), ("speed", ".png")),
        (("--plot", "no/such/speed.png"), ("cannot be written",)),
        (("--json", "no/such/speed.json"), ("cannot be written",)),
    ],
)
def test_bench_kernels_refuses_before_it_measures(
    bench: Run, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], words: tuple[str, ...]
) -> None:
    monkeypatch.delattr(kernels, "_measure")
    refused(bench(*given), *words)


def test_bench_kernels_says_why_there_is_no_ggml(bench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml, "library", lambda: None)
    refused(bench("--only", "W4,ggml q4_0"), "'ggml q4_0'", "llama-cpp-python", "codebook 2")
