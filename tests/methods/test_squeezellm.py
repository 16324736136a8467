"""SqueezeLLM: codebooks by row, and weights kept sparsely."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import anybit
from anybit.calibration.stats import GradientStats
from anybit.errors import InputError
from anybit.formats.validate import validate
from anybit.formats.weight import pack
from anybit.loader import load
from anybit.methods import METHODS, cmpq, row_codebooks, squeezellm
from tests import builders
from tests.builders import MakeModel, cmpq_spec, codebook_spec, correlated_moments, random_matrix
from tests.probes import check_whole_way, logits

SMALL: dict[str, Any] = {"samples": 2, "seq_len": 16}


def fisher_of(weight: torch.Tensor, seed: int = 1) -> GradientStats:
    values = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)).exp()
    return GradientStats(1, 1, values)


@pytest.mark.parametrize("shape", [(20, 48), (7, 33), (1, 5), (16, 1)])
@pytest.mark.parametrize(
    "options",
    [
        {"bits": 2},
        {"bits": 5, "codebook_bits": 8},
        {"bits": 3, "sensitive_outliers": 0.02, "magnitude_outliers": 0.03},
        {"bits": 6, "widths": (3, 4, 6)},
        {"bits": 8, "widths": (2, 8), "codebook_bits": 4},
    ],
)
def test_rows_round_trip_and_multiply(shape: tuple[int, int], options: dict[str, Any]) -> None:
    weight = random_matrix(*shape)
    made = codebook_spec(**options)
    method = METHODS[made.options.name]
    check_whole_way(method.quantize(weight, fisher_of(weight), made), method.layout(made, shape))


def test_outliers_are_kept() -> None:
    weight = random_matrix(30, 64)
    weight[3, 5] = 40.0
    stats = fisher_of(weight)
    assert stats.fisher is not None
    stats.fisher[7, 9] = 1e6
    made = squeezellm.quantize(
        weight, stats, codebook_spec(2, sensitive_outliers=0.001, magnitude_outliers=0.001)
    )
    assert made.sparse is not None
    assert len(made.sparse.values) == 2 * round(0.001 * weight.numel())
    dense = made.dequantize()
    torch.testing.assert_close(dense[3, 5], weight[3, 5], rtol=1e-3, atol=0)
    torch.testing.assert_close(dense[7, 9], weight[7, 9], rtol=1e-3, atol=1e-3)


def test_dead_weights_are_no_outliers() -> None:
    """Large weights of channels whose inputs are always 0: no gradient, no norm, no error at the output."""
    weight, dead = random_matrix(30, 64), [5, 40]
    weight[:, dead] = 40.0 * random_matrix(30, 2)
    fisher = fisher_of(weight)
    assert fisher.fisher is not None
    fisher.fisher[:, dead] = 0
    mask = row_codebooks.outlier_mask(weight, fisher.fisher, 19, 19)
    assert mask is not None and mask.any() and not mask[:, dead].any()

    stats = correlated_moments(weight)
    assert stats.hessian is not None
    for channel in dead:
        stats.squares[channel] = stats.hessian[channel] = stats.hessian[:, channel] = 0
    for compensate in (False, True):
        made = cmpq.quantize(weight, stats, cmpq_spec(2.5, error_outliers=0.01, compensate=compensate))
        assert made.sparse is not None and not set(made.sparse.columns.tolist()) & set(dead)


def test_sensitive_weights_are_nearer() -> None:
    weight, stats = random_matrix(16, 200), fisher_of(random_matrix(16, 200))
    weighted = squeezellm.quantize(weight, stats, codebook_spec(3)).dequantize() - weight
    plain = squeezellm.quantize(weight, None, codebook_spec(3)).dequantize() - weight
    assert (stats.fisher * weighted.square()).sum() < 0.95 * (stats.fisher * plain.square()).sum()  # type: ignore[operator]
    assert plain.square().sum() < weighted.square().sum()


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 1e6])
def test_weights_that_have_no_codebook_are_refused(value: float) -> None:
    weight = random_matrix(4, 40)
    weight[2, 3] = value
    with pytest.raises(InputError, match=r"cannot be clustered|beyond float16"):
        squeezellm.quantize(weight, None, codebook_spec(3))
    with pytest.raises(InputError, match=r"cannot be clustered|beyond float16"):
        cmpq.quantize(weight, correlated_moments(weight), cmpq_spec(3))


TOKENS = torch.arange(3, 27).view(2, 12)


def test_outliers_beyond_float16_are_refused() -> None:
    weight = random_matrix(8, 60)
    weight[1, 1] = 1e5
    with pytest.raises(InputError, match="beyond float16"):
        squeezellm.quantize(weight, None, codebook_spec(3, magnitude_outliers=0.01))


@pytest.mark.parametrize("bits", [4, 6])
def test_hostile_codes_of_small_tables_are_refused(bits: int) -> None:
    weight = random_matrix(5, 12)
    options = {"channel_outliers": 0.0, "error_outliers": 0.0, "codebook_bits": 8}
    packed = pack(cmpq.quantize(weight, correlated_moments(weight), cmpq_spec(bits, **options)))
    planes = packed.tensors["planes"]
    planes.view(torch.uint8).fill_(255)
    with pytest.raises(InputError, match="planes hold the code"):
        validate("layer", packed)


@pytest.mark.slow
def test_one_width_may_be_named(model_dir: MakeModel, tmp_path: Path) -> None:
    anybit.quantize(model_dir("llama"), tmp_path / "out", builders.options("squeezellm", bits=3, **SMALL))
    assert torch.equal(logits(load(tmp_path / "out", bits=3), TOKENS), logits(load(tmp_path / "out"), TOKENS))
    with pytest.raises(InputError, match="one width"):
        load(tmp_path / "out", bits=4)
