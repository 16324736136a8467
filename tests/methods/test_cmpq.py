"""CMPQ: codebooks by channel, widths by channel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import anybit
from anybit import methods
from anybit.artifact.sizes import inspect
from anybit.calibration.stats import LinearStats
from anybit.errors import InputError
from anybit.formats import Codebook, Float16
from anybit.methods import cmpq
from tests import builders
from tests.builders import MakeModel, cmpq_spec, codebook_spec, correlated_moments, random_matrix
from tests.probes import check_whole_way

SMALL: dict[str, Any] = {"samples": 2, "seq_len": 16}


@pytest.mark.parametrize("shape", [(20, 48), (7, 33), (40, 250), (3, 5), (1, 7), (9, 1)])
@pytest.mark.parametrize(
    "options",
    [
        {"bits": 2.0},
        {"bits": 2.3, "error_outliers": 0.02},
        {"bits": 3.0},
        {"bits": 4.0, "codebook_bits": 4},
        {"bits": 7.5, "channel_outliers": 0.0, "error_outliers": 0.0},
        {"bits": 5.0, "channel_outliers": 0.0, "error_outliers": 0.0},
        {"bits": 2.3, "error_outliers": 0.02, "compensate": False},
        {"bits": 3.0, "codebook_bits": 4, "compensate": False},
    ],
)
def test_channels_round_trip_and_multiply(shape: tuple[int, int], options: dict[str, Any]) -> None:
    weight = random_matrix(*shape)
    made = cmpq_spec(**options)
    quantized = cmpq.quantize(weight, correlated_moments(weight), made)
    check_whole_way(quantized, cmpq.layout(made, shape))


def test_channel_widths_follow_algorithm_1() -> None:
    weight = random_matrix(40, 400)
    stats = correlated_moments(weight)
    rank = stats.squares.argsort().argsort()
    none = {"channel_outliers": 0.0, "error_outliers": 0.0, "compensate": False}
    for bits, narrow in ((2.25, 300), (2.5, 200), (3.75, 100), (6.1, 360)):
        made = cmpq.quantize(weight, stats, cmpq_spec(bits, **none))
        low, high = made.tiles
        assert (low.bits, high.bits) == (int(bits), int(bits) + 1)
        assert set(rank[low.cols.long()].tolist()) == set(range(narrow))  # type: ignore[union-attr]
        assert set(rank[high.cols.long()].tolist()) == set(range(narrow, 400))  # type: ignore[union-attr]
    at_3 = cmpq.quantize(weight, stats, cmpq_spec(3, **none)).tiles
    assert [(t.bits, len(t.cols)) for t in at_3] == [(2, 4), (3, 392), (4, 4)]  # type: ignore[arg-type]
    kept = cmpq.quantize(weight, stats, cmpq_spec(3, compensate=False)).tiles[-1]
    assert isinstance(kept, Float16)
    assert set(rank[kept.cols.long()].tolist()) == {398, 399}  # type: ignore[union-attr]
    assert torch.equal(kept.values, weight[:, kept.cols.long()].half())  # type: ignore[union-attr]


@pytest.mark.parametrize("options", [{"bits": 2.4}, {"bits": 3, "error_outliers": 0.01}])
def test_compensation_lowers_the_output_error(options: dict[str, Any]) -> None:
    weight = random_matrix(60, 120)
    stats = correlated_moments(weight)
    assert stats.hessian is not None

    def error(compensate: bool) -> float:
        made = cmpq.quantize(weight, stats, cmpq_spec(**options, compensate=compensate))
        delta = made.dequantize() - weight
        return float((delta @ stats.hessian * delta).sum())  # type: ignore[operator]

    assert error(True) < 0.8 * error(False)


def test_compensation_needs_a_hessian() -> None:
    weight = random_matrix(4, 40)
    norms = LinearStats(1, correlated_moments(weight).squares, None)
    cmpq.quantize(weight, norms, cmpq_spec(3, compensate=False))
    with pytest.raises(InputError, match="Hessian"):
        cmpq.quantize(weight, norms, cmpq_spec(3))


def test_channels_with_fewer_weights_than_centroids_store_fewer() -> None:
    weight = random_matrix(5, 12)
    made = cmpq.quantize(
        weight,
        correlated_moments(weight),
        codebook_spec(4, channel_outliers=0.0, error_outliers=0.0, compensate=False),
    )
    (tile,) = made.tiles
    assert isinstance(tile, Codebook)
    assert tile.tables[0].shape == (12, 5)
    torch.testing.assert_close(made.dequantize(), weight, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_channel_widths_are_shown(model_dir: MakeModel, tmp_path: Path) -> None:
    anybit.quantize(model_dir("llama"), tmp_path / "out", builders.options("cmpq", bits=2.5, **SMALL))
    figures = inspect(tmp_path / "out")
    assert json.dumps(figures)
    for layer in figures["layers"]:
        assert len(layer["channel_bits"]) == layer["shape"][1]
        assert set(layer["channel_bits"]) == {2, 3, 16}
    assert figures["bits"] == pytest.approx(2.5, abs=0.03)


def test_a_size_finds_an_average_width(model_dir: MakeModel) -> None:
    from anybit.plan import fit_budget, make_plan
    from tests.builders import opened

    streamed = opened(model_dir("llama"))
    sizes = {b: make_plan(streamed, builders.options("cmpq", bits=b, **SMALL)).size_bytes for b in (3, 4)}
    size = (sizes[3] + sizes[4]) // 2
    found = fit_budget(streamed, methods.options("cmpq", size=size, **SMALL))
    assert found.bits is not None
    assert 3 < found.bits < 4
    assert make_plan(streamed, found).size_bytes <= size
    with pytest.raises(InputError, match="size follows from widths"):
        methods.options("any-precision", size=size)
