"""GPTQ's block in C++ against an oracle in Python, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from anybit.kernels import cpu
from tests.kernels.cases import ISAS

if not cpu.available():
    pytest.skip(str(cpu.why_not()), allow_module_level=True)

from anybit import _native

pytestmark = pytest.mark.native


def gptq_oracle(w, hinv, scale, zero, maxq):  # type: ignore[no-untyped-def]
    """The inner loop of GPTQ as its text says it, in float32."""
    w = w.copy()
    codes, error = np.zeros(w.shape, np.uint8), np.zeros_like(w)
    for i in range(w.shape[1]):
        s, z = scale[:, i], zero[:, i]
        ratio = np.divide(w[:, i], s, out=np.zeros_like(s), where=s != 0)
        q = np.clip(np.rint(ratio) + z, 0, maxq)
        error[:, i] = (w[:, i] - s * (q - z)) / hinv[i, i]
        w[:, i + 1 :] -= error[:, i, None] * hinv[i, None, i + 1 :]
        codes[:, i] = q
    return w, codes, error


def gptq_problem(rows: int, n: int):  # type: ignore[no-untyped-def]
    rng = np.random.default_rng([rows, n])
    w = rng.standard_normal((rows, n)).astype(np.float32)
    hinv = np.triu(rng.uniform(-0.3, 0.3, (n, n)) + 2 * np.eye(n)).astype(np.float32)
    maxq = rng.choice([3.0, 15.0, 255.0], rows).astype(np.float32)
    scale = rng.uniform(0.01, 0.6, (rows, n)).astype(np.float32)
    scale[0, ::3] = 0
    w[-1, 0] = 1e9  # far outside the grid
    zero = np.floor(rng.uniform(0, 1, (rows, n)) * (maxq[:, None] + 1)).astype(np.float32)
    return w, hinv, scale, zero, maxq


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (3, 17), (16, 128), (37, 40), (130, 128)])
def test_gptq_block_is_the_oracle_to_the_bit(rows: int, n: int, isa: str) -> None:
    w, hinv, scale, zero, maxq = gptq_problem(rows, n)
    want = gptq_oracle(w, hinv, scale, zero, maxq)
    for threads in (1, 2, 3):
        block = torch.from_numpy(w.copy())
        given = [torch.from_numpy(a) for a in (hinv, scale, zero, maxq)]
        codes, error = cpu.gptq_block(block, *given, threads=threads, isa=isa)
        assert np.array_equal(codes.numpy(), want[1])
        assert np.array_equal(block.numpy(), want[0])
        assert np.array_equal(error.numpy(), want[2])


def test_gptq_block_takes_one_scale_per_row_and_a_slice_of_a_matrix() -> None:
    w, hinv, scale, zero, maxq = gptq_problem(20, 24)
    scale, zero = scale[:, :1].repeat(24, 1), zero[:, :1].repeat(24, 1)
    want = gptq_oracle(w, hinv, scale, zero, maxq)
    matrix = torch.full((20, 40), 3.0)
    matrix[:, 8:32] = torch.from_numpy(w)
    given = [torch.from_numpy(a) for a in (hinv, scale[:, 0], zero[:, 0], maxq)]
    codes, _ = cpu.gptq_block(matrix[:, 8:32], *given)
    assert np.array_equal(matrix[:, 8:32].numpy(), want[0]) and np.array_equal(codes.numpy(), want[1])
    assert (matrix[:, :8] == 3.0).all() and (matrix[:, 32:] == 3.0).all()


def test_gptq_block_survives_nan() -> None:
    w, hinv, scale, zero, maxq = gptq_problem(3, 8)
    w[1, 2], zero[2, 1] = np.nan, np.nan
    given = [torch.from_numpy(a) for a in (w, hinv, scale, zero, maxq)]
    codes, _ = cpu.gptq_block(*given)
    assert (codes.numpy() <= maxq[:, None]).all()


@pytest.mark.parametrize("at", range(7))
def test_gptq_block_refuses_what_does_not_fit(at: int) -> None:
    def given() -> list[torch.Tensor]:
        square, row = torch.eye(8), torch.ones(8)
        return [
            torch.zeros(8, 8),
            square,
            square + 1,
            square,
            row,
            torch.zeros(8, 8, dtype=torch.uint8),
            square + 0,
        ]

    _native.gptq_block(*given(), 1)
    for bad in (torch.zeros(8, 9), torch.zeros(8, 8).double(), torch.zeros(()), torch.zeros(2, 8, 8)):
        arguments = given()
        arguments[at] = bad
        with pytest.raises(ValueError, match="expected"):
            _native.gptq_block(*arguments, 1)


def test_gptq_block_refuses_a_broken_factor_and_codes_beyond_a_byte() -> None:
    w, hinv, scale, zero, maxq = (torch.from_numpy(a) for a in gptq_problem(4, 8))
    for broken in (0.0, -1.0, float("nan"), float("inf")):
        bad = hinv.clone()
        bad[5, 5] = broken
        with pytest.raises(ValueError, match=r"hinv\[5, 5\]"):
            cpu.gptq_block(w, bad, scale, zero, maxq)
    with pytest.raises(ValueError, match="maxq"):
        cpu.gptq_block(w, hinv, scale, zero, maxq + 256)
