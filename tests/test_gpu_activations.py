"""Activations to int8 codes in one kernel against the plain functions: on a GPU, or interpreted."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from anybit.errors import InputError

pytest.importorskip("triton", reason="Triton is not installed")

from anybit.kernels.gpu.activations import WIDEST, Grid, Norm, quantize, quantize_and_sum, reference

pytestmark = pytest.mark.gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def grid(bits: int, size: int, c: int, static: bool) -> Grid:
    ratio = (0.5 + 0.5 * random(-(-c // size)).sigmoid()).half()
    return Grid(bits, size, scales=ratio / 8) if static else Grid(bits, size, clip=ratio)


def moved(how: Grid) -> Grid:
    clip, scales = (None if x is None else x.to(DEVICE) for x in (how.clip, how.scales))
    return Grid(how.bits, how.group_size, clip, scales)


def check(x: Tensor, how: Grid, multiple: int = 1, **fields: Tensor) -> None:
    codes, scales = quantize(
        x.to(DEVICE), moved(how), multiple=multiple, **{k: v.to(DEVICE) for k, v in fields.items()}
    )
    wanted = reference(x, how, multiple=multiple, **fields)  # on the CPU, which divides
    assert torch.equal(codes.cpu(), wanted[0])
    torch.testing.assert_close(scales.cpu(), wanted[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    "bits, size, c", [(8, 128, 256), (4, 128, 300), (2, 7, 50), (5, 1000, 33), (8, 16, 5000), (3, 1, 3)]
)
def test_codes_and_scales_are_the_references(
    bits: int, size: int, c: int, static: bool, dtype: torch.dtype
) -> None:
    x = (random(3, c) * 3).to(dtype)
    x[0, :20] = 0
    check(x, grid(bits, size, c, static), multiple=64)


@pytest.mark.parametrize("static", [False, True])
def test_reordered_and_scaled_inputs(static: bool) -> None:
    x, cols = random(3, 100).half(), torch.randperm(100)[:70].int()
    scale = random(100, seed=1).abs().half() + 0.5
    check(x, grid(4, 32, 70, static), cols=cols)
    check(x, grid(4, 32, 100, static), input_scale=scale)
    check(x, grid(8, 32, 70, static), multiple=16, cols=cols, input_scale=scale)


def test_a_group_wider_than_a_block() -> None:
    c = WIDEST + 100
    check(random(2, c).half(), grid(8, c, c, static=False), multiple=128)
    check(random(2, c).half(), grid(8, WIDEST + 7, c, static=True))


@pytest.mark.parametrize(
    "size, c, span",
    [(96, 200, 32), (128, 5000, 128), (16, 700, 16), (50, 50, 128), (3 * WIDEST, WIDEST + 300, 128)],
)
def test_sums_of_codes(size: int, c: int, span: int) -> None:
    x, how = random(3, c).half().to(DEVICE), moved(grid(8, size, c, static=False))
    want = quantize(x, how, multiple=2 * span)
    codes, scales, sums = quantize_and_sum(x, how, span, multiple=2 * span)
    assert torch.equal(codes, want[0]) and torch.equal(scales, want[1]) and sums is not None
    assert torch.equal(sums, codes.view(3, -1, span).sum(2, dtype=torch.int32))


def test_halves_round_to_even() -> None:
    x = torch.tensor([[7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 6.5]])
    codes, scales = quantize(x.to(DEVICE), moved(Grid(4, 8, clip=torch.ones(1).half())))
    assert codes.tolist() == [[7, 0, 2, 2, 0, -2, -2, 6]] and scales.tolist() == [[1.0]]


def test_what_a_grid_does_not_reach() -> None:
    x = torch.tensor([[100.0, -100.0, 1e30, -1e30, 0.0, 1.0]])
    check(x, Grid(8, 6, scales=torch.tensor([0.5]).half()))
    check(x, Grid(8, 2, scales=torch.zeros(3).half()))
    check(x, Grid(8, 2, clip=torch.tensor([0.5, 0.25, 1.0]).half()))
    check(torch.full((1, 4), 1e-44), Grid(8, 2, clip=torch.ones(2).half()))


def test_nan_and_inf_spoil_their_group() -> None:
    x = random(4, 24)
    x[0, 3], x[1, 9], x[2, 23] = math.nan, math.inf, -math.inf
    for static in (False, True):
        check(x, grid(8, 8, 24, static))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("c", [64, 4500])
def test_rms_norm_comes_first(c: int, dtype: torch.dtype) -> None:
    x, cols = (random(3, c) * 5).to(dtype), torch.randperm(c)[: c - 3].int()
    norm = Norm((random(c, seed=1) + 2).to(dtype), 1e-5)
    how, scale = grid(8, 32, c - 3, static=False), random(c, seed=2).abs().half()
    on_device = Norm(norm.weight.to(DEVICE), norm.eps)
    codes, scales = quantize(
        x.to(DEVICE), moved(how), cols=cols.to(DEVICE), input_scale=scale.to(DEVICE), norm=on_device
    )
    wanted, wanted_scales = reference(x, how, cols=cols, input_scale=scale, norm=norm)
    # Sums in another order; an interpreted kernel cuts bfloat16 off instead of rounding.
    near = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(scales.cpu(), wanted_scales, rtol=near, atol=0)
    apart = (codes.cpu().int() - wanted.int()).abs()
    assert apart.max() <= (3 if dtype == torch.bfloat16 else 1)
    if dtype != torch.bfloat16:
        assert (apart > 0).float().mean() < 1e-3


def test_a_norm_of_whole_numbers_is_exact() -> None:
    x = torch.tensor([[3.0, -3.0, 3.0, 3.0], [8.0, 0.0, 0.0, 0.0]])  # roots of the mean square 3 and 4
    weight, clip = torch.tensor([1.0, 2.0, 127.0, 0.5]), torch.ones(1).half()
    how, norm = Grid(8, 4, clip=clip.to(DEVICE)), Norm(weight.to(DEVICE), 0.0)
    codes, scales = quantize(x.to(DEVICE), how, norm=norm)
    assert codes.tolist() == [[1, -2, 127, 0], [127, 0, 0, 0]]
    torch.testing.assert_close(scales.cpu(), torch.tensor([[1.0], [2 / 127]]))


def test_no_rows() -> None:
    codes, scales = quantize(torch.empty(0, 8, device=DEVICE), moved(grid(8, 4, 8, False)), multiple=16)
    assert codes.shape == (0, 16) and scales.shape == (0, 2)


def test_what_cannot_be_is_refused() -> None:
    x, how = torch.zeros(2, 8, device=DEVICE), moved(grid(8, 4, 8, False))
    for arguments, words in (
        ({"x": x[0]}, r"\[8\]: expected \[m, in\]"),
        ({"x": x.int()}, "int32"),
        ({"grid": Grid(9, 4, how.clip)}, "9 bits"),
        ({"grid": Grid(8, 0, how.clip)}, "groups of 0"),
        ({"grid": Grid(8, 4)}, "either clip"),
        ({"grid": Grid(8, 4, how.clip, how.clip)}, "either clip"),
        ({"grid": Grid(8, 8, how.clip)}, r"clip torch.float16 \[2\]"),
        ({"cols": torch.arange(8, device=DEVICE)}, "cols torch.int64"),
        ({"input_scale": torch.ones(8, device=DEVICE)}, "input_scale torch.float32"),
        ({"norm": Norm(torch.ones(7, device=DEVICE), 1e-5)}, "norm's weight"),
        ({"multiple": 0}, "multiple of 0"),
    ):
        with pytest.raises(InputError, match=words):
            quantize(**{"x": x, "grid": how} | arguments)
