"""`anybit bench kernels` on the CPU: what is timed, and what is compared before it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from anybit.bench import ggml, kernels, picture
from anybit.bench.variants import ROWS, chosen
from anybit.errors import InputError
from anybit.formats.validate import validate
from anybit.formats.weight import unpack
from anybit.kernels import reference
from anybit.kernels.dispatch import BoundWeight
from tests.builders import random
from tests.probes import isas

pytestmark = pytest.mark.native


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few copies of the matrices, and little to read."""
    isas()
    monkeypatch.setattr(kernels, "_cold", lambda: 1 << 20)
    monkeypatch.setattr(kernels, "READ", 1 << 20)


@pytest.mark.slow
@pytest.mark.usefixtures("small_cache")
def test_the_benchmark_times_what_there_is() -> None:
    figures = kernels.kernels(kernels.Sweep(shapes=("33x70",), tokens=(1, 3), threads=(1, 2), rounds=1))
    assert [(r["out"], r["in"], r["tokens"], r["threads"]) for r in figures["rows"]] == [
        (33, 70, m, n) for m in (1, 3) for n in (1, 2)
    ]
    assert {"torch bfloat16", "W4", "W4A8", "W8A8", "W4A4", "MixLLM p10", "Atom W4A4"} <= figures["rows"][0][
        "variants"
    ].keys()
    assert all(v["us"] > 0 for row in figures["rows"] for v in row["variants"].values())
    assert torch.get_num_threads() == 1
    for row in figures["rows"]:
        low, high = row["read_gb_per_s_range"]
        assert 0 < low <= row["read_gb_per_s"] <= high
    with pytest.raises(InputError, match="OUTxIN"):
        kernels.kernels(kernels.Sweep(shapes=("33",)))
    with pytest.raises(InputError, match="more than"):
        kernels.kernels(kernels.Sweep(shapes=("99999999999x4096",)))


def test_the_benchmark_takes_other_weights_each_time() -> None:
    used: list[int] = []

    def make() -> Callable[[], object]:
        number = made.pop()
        return lambda: used.append(number)

    made = list(range(5))
    run = kernels.rotating(kernels.Variant(1, make), 5)
    for _ in range(10):
        run()
    assert used == [4, 3, 2, 1, 0] * 2


def test_the_benchmark_reads_far_more_than_the_cache_holds_on_all_threads(
    monkeypatch: pytest.MonkeyPatch, small_cache: None
) -> None:
    monkeypatch.setattr(kernels, "_cold", lambda: 5 * kernels.READ)
    used: list[tuple[int, int]] = []
    parts = iter(range(9))

    def reader() -> Callable[[], object]:
        part = next(parts)
        return lambda: used.append((part, torch.get_num_threads()))

    assert kernels._reader().func.__self__.nbytes == kernels.READ  # type: ignore[attr-defined]
    monkeypatch.setattr(kernels, "_reader", reader)
    monkeypatch.setattr(kernels, "WARM", 0)
    kernels.kernels(kernels.Sweep(shapes=("8x8",), threads=(1, 2), rounds=2, only=("W4",)))
    # Three rounds of warming up, two that count, and before each another call.
    assert used == [(i % 5, 1 + (i >= 10)) for i in range(20)]


@pytest.mark.usefixtures("small_cache")
def test_the_rate_in_the_cache_is_without_the_cost_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def times(variants: dict[str, kernels.Variant], rounds: int, cached: bool) -> dict[str, list[float]]:
        assert cached
        return {name: [1e-3 + v.nbytes / 2e9] * rounds for name, v in variants.items()}

    monkeypatch.setattr(kernels, "_times", times)
    figures = kernels.kernels(kernels.Sweep(shapes=("500x512",), rounds=1, cached=True))
    assert figures["cached_bytes"] == kernels.CACHED
    variants = figures["rows"][0]["variants"]
    for figure in variants.values():
        assert figure["gb_per_s"] == pytest.approx(2)
        assert figure["rows"] % ROWS == 0
    assert variants["torch float32"]["rows"] == 256 and variants["W2"]["rows"] == 448  # of 512 KiB; of all
    monkeypatch.setattr(kernels, "CACHED", 1)
    figures = kernels.kernels(kernels.Sweep(shapes=("128x64",), rounds=1, cached=True, only=("W4",)))
    assert figures["rows"][0]["variants"]["W4"]["rows"] == 128


@pytest.mark.parametrize("cached", [True, False])
def test_what_is_timed_is_warm_and_its_weights_are_only_where_they_shall_be(
    monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    monkeypatch.setattr(kernels, "_cold", lambda: 6)
    used: list[str] = []
    counts = {"a": 0, "b": 0}

    def make(name: str) -> Callable[[], object]:
        counts[name] += 1
        mark = f"{name}{counts[name]}"
        return lambda: used.append(mark)

    begun = time.perf_counter()
    variants = {name: kernels.Variant(1, lambda name=name: make(name)) for name in "ab"}
    times = kernels._times(variants, 2, cached)
    assert time.perf_counter() - begun >= 10 * kernels.WARM
    assert [len(seconds) for seconds in times.values()] == [2, 2]
    calls = [(mark, len(list(same))) for mark, same in itertools.groupby(used)]
    if cached:  # the very weights are used right before
        assert counts == {"a": 1, "b": 1} and [mark for mark, _ in calls] == ["a1", "b1"] * 5
        assert all(n > 1 for _, n in calls)
    else:  # three are timed in turn, six bytes apart, and are used for nothing else
        timed = [f"{name}{1 + i % 3}" for i in range(5) for name in "ab"]
        assert [mark for mark, _ in calls] == [m for mark in timed for m in (f"{mark[0]}4", mark)]
        assert all(n == 1 for mark, n in calls if not mark.endswith("4"))


def test_variants_are_chosen_by_name_or_beginning() -> None:
    there = ["W4 @avx2", "W4 @avx512", "W4A8 @avx2", "W8", "codebook 4", "codebook 4 + sparse"]
    assert chosen(["codebook 4", "W4"], there) == ["W4 @avx2", "W4 @avx512", "codebook 4"]
    assert chosen(["code", "W4A8 @avx2"], there) == ["W4A8 @avx2", *there[4:]]


def test_the_benchmark_has_every_width_and_draws_every_format() -> None:
    names = kernels.layouts(256, 256)
    for bits in range(2, 9):
        assert {f"W{bits}", f"W{bits}A8", f"by channel {bits}", f"nested {bits}"} <= names.keys()
        assert {f"codebook {bits}", f"codebook {bits} A8"} <= names.keys()
    assert all(name.startswith(tuple(picture.FAMILIES)) for name in names)


@pytest.mark.slow
@pytest.mark.usefixtures("small_cache")
def test_panels_without_points_are_drawn(tmp_path: Path) -> None:
    figures = kernels.kernels(kernels.Sweep(shapes=("8x8", "9x8"), rounds=1, only=("own",)))
    picture.plot(figures, tmp_path / "speed.svg")
    assert "9 x 8" in (tmp_path / "speed.svg").read_text()


@pytest.mark.usefixtures("small_cache")
def test_the_benchmark_compares_instruction_sets_and_draws(tmp_path: Path) -> None:
    best = isas()[-1]
    figures = kernels.kernels(
        kernels.Sweep(
            shapes=("32x256",), rounds=1, dtype="float32", isas=("portable", best), only=("W4A8", "codebook")
        )
    )
    (row,) = figures["rows"]
    assert {f"W4A8 @{best}", "W4A8 @portable", "codebook 4 + sparse @portable"} <= row["variants"].keys()
    assert not any(name.startswith("W8") for name in row["variants"]) and row["read_gb_per_s"] > 0
    picture.plot(figures, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 10_000
    wrongs: tuple[tuple[dict[str, Any], str], ...] = (
        ({"isas": ("avx9",)}, "avx9"),
        ({"only": ("W4", "V4")}, "begins with 'V4'"),
        ({"only": ("",)}, "begins with ''"),
        ({"dtype": "float16"}, "bfloat16 and float32"),
        ({"cached": True}, "128 or more"),
    )
    for wrong, match in wrongs:
        with pytest.raises(InputError, match=match):
            kernels.kernels(kernels.Sweep(shapes=("32x256",), **wrong))


@pytest.mark.skipif(ggml.library() is None, reason="llama-cpp-python is not installed")
@pytest.mark.parametrize("kind", ggml.TYPES)
@pytest.mark.parametrize("tokens", [1, 3])
def test_the_peer_multiplies_the_same(kind: str, tokens: int) -> None:
    x = random(tokens, 512)
    threads = ggml.Threads(2)
    product = ggml.Product(kind, 128, x, threads)
    threads.wake()
    product()
    threads.rest()
    weight = torch.randn(ggml.ROWS, 512, generator=torch.Generator().manual_seed(0)).repeat(2, 1)
    expected, y = x @ weight.T, product.output()
    assert float((y - expected).norm() / expected.norm()) < 2.0 / 2 ** int(kind[1])


TINY = ((40, 64), (1, 1), (1, 64), (3, 2), (5, 4))


@pytest.mark.parametrize(
    ("shape", "name"), [(shape, name) for shape in TINY for name in kernels.layouts(*shape)]
)
def test_the_benchmark_multiplies_valid_weights(shape: tuple[int, int], name: str) -> None:
    packed = kernels.random_weight(kernels.layouts(*shape)[name])
    validate("layer", packed)
    x = random(2, shape[1])
    expected = reference.int_matmul(x, unpack(packed))
    torch.testing.assert_close(BoundWeight(packed).matmul(x), expected, rtol=1e-4, atol=1e-3)
