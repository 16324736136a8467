"""Second moments in C++."""

from __future__ import annotations

import pytest
import torch

from anybit.kernels import cpu

if not cpu.available():
    pytest.skip(str(cpu.why_not()), allow_module_level=True)

pytestmark = pytest.mark.native


@pytest.mark.parametrize(("tokens", "n"), [(1, 1), (3, 5), (7, 47), (64, 48), (65, 49), (300, 577)])
def test_moments_add_the_exact_products(tokens: int, n: int) -> None:
    if not cpu.has_bfloat16_dot():
        pytest.skip("no AVX512-BF16 on this machine")
    generator = torch.Generator().manual_seed(tokens * n)
    wide = torch.randn(tokens, n + 3, generator=generator).bfloat16()
    x, start = wide[:, 1 : n + 1], torch.randn(n, n, generator=generator)
    start = start + start.T
    results = []
    for threads in (1, 2, 3):
        hessian = start.clone()
        cpu.moments(x, hessian, threads)
        results.append(hessian)
    exact = start.double() + x.double().T @ x.double()
    torch.testing.assert_close(results[0].double(), exact, rtol=1e-5, atol=1e-5 * tokens**0.5)
    assert torch.equal(results[0], results[0].T)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_moments_refuse_what_does_not_fit() -> None:
    if not cpu.has_bfloat16_dot():
        pytest.skip("no AVX512-BF16 on this machine")
    x = torch.ones(4, 6).bfloat16()
    for bad_x, bad_h in (
        (x.float(), torch.zeros(6, 6)),
        (x, torch.zeros(5, 5)),
        (x, torch.zeros(6, 6).double()),
        (x.T, torch.zeros(4, 4)),
        (x, torch.zeros(6, 12)[:, ::2]),
    ):
        with pytest.raises(ValueError, match="expected"):
            cpu.moments(bad_x, bad_h)
