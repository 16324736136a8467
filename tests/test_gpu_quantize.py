"""Quantizing on a GPU: Triton kernels against their oracles, and every method on a device that is not the CPU.

Without a GPU the kernels run in Triton's interpreter, and the device is a fake one that finds tensors of two devices
that meet.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from anybit import driver
from anybit.bench import gpu_quantize
from anybit.errors import InputError
from anybit.formats import tables as shapes
from anybit.kernels import cpu, dispatch, reference
from anybit.methods import METHODS
from anybit.methods.compensation import inverse_factor
from tests import builders
from tests.fake_device import NAME, Away, FakeDevice, held
from tests.interpreted import spread

pytest.importorskip("triton", reason="the GPU kernels need the package triton")

from anybit.kernels.gpu import gptq
from anybit.kernels.gpu import kmeans as gpu_kmeans

pytestmark = pytest.mark.gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_native = pytest.mark.skipif(not cpu.available(), reason=f"no native extension: {cpu.why_not()}")


def factor_of(n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * n, n, generator=generator)
    return inverse_factor(x.T @ x, torch.arange(n), 0.01)


# ---- GPTQ's block --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows, n", [(1, 128), (33, 1), (33, 77), (2, 16)])
def test_gptq_block_is_the_oracle_to_the_bit(rows: int, n: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, n, generator=generator)
    scale = (torch.rand(rows, generator=generator) * 0.3).half().float()
    scale[::5] = 0  # groups of nothing but zeros
    zero, top = torch.full((rows,), 7.0), torch.full((rows,), 15.0)
    ours, expected = weight.clone().to(DEVICE), weight.clone()
    grid = (factor_of(n), scale, zero, top)
    made = gptq.gptq_block(ours, *(t.contiguous().to(DEVICE) for t in grid))
    oracle = reference.gptq_block(expected, *grid)
    assert torch.equal(made[0].cpu(), oracle[0])
    assert torch.equal(made[1].cpu(), oracle[1])
    assert torch.equal(ours.cpu(), expected)


def test_gptq_block_rounds_halves_to_even_and_clamps() -> None:
    weight = torch.tensor([[0.5, 1.5, 2.5, -0.5, 1e9, -1e9, torch.nan]], device=DEVICE)
    one = torch.ones(1, device=DEVICE)
    codes, _ = gptq.gptq_block(weight, torch.eye(7, device=DEVICE), one, 4 * one, 15 * one)
    assert codes[0].tolist() == [4, 6, 6, 4, 15, 0, 0]


def test_gptq_block_refuses_wide_blocks() -> None:
    one = torch.ones(1, device=DEVICE)
    with pytest.raises(InputError, match="up to 128"):
        gptq.gptq_block(torch.zeros(1, 129, device=DEVICE), torch.eye(129, device=DEVICE), one, one, one)


# ---- k-means -------------------------------------------------------------------------------------------------------


def rows_of(kind: str, rows: int, n: int) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(n)
    weight = torch.randn(rows, n, generator=generator)
    if kind == "normal":
        return weight, None
    importance = torch.randn(rows, n, generator=generator).mul(1.5).exp()
    if kind == "heavy":  # as an LLM's
        return weight * (1 + 2 * (torch.rand(rows, n, generator=generator) < 0.01)) * 0.02, importance
    if kind == "equal values":
        return (weight * 4).round(), importance
    return (weight * 0.02).bfloat16().float(), importance.where(importance > 0.2, 0.0)


def losses(
    weight: Tensor, importance: Tensor | None, made: tuple[Tensor, Tensor], bits: int, of: range
) -> Tensor:
    """Weighted squared error of every row at a width of nested codes, float64 [rows]."""
    tables = dict(zip(of, made[1].cpu().split([2**b for b in of], 1)))
    codes = (made[0].cpu() >> (of[-1] - bits)).long()
    error = (tables[bits].gather(1, codes) - weight).double().square()
    return (error if importance is None else error * importance).sum(1)


def lloyd(weight: Tensor, importance: Tensor | None, clusters: int) -> Tensor:
    """The loss of Lloyd's iteration from quantiles, float64 [rows]."""
    x = weight.double()
    share = torch.ones_like(x) if importance is None else importance.double()
    centres = x.quantile((torch.arange(clusters).double() + 0.5) / clusters, dim=1).T
    for _ in range(50):
        near = (x[..., None] - centres[:, None]).abs().argmin(-1)
        mass = torch.zeros_like(centres).scatter_add_(1, near, share)
        moment = torch.zeros_like(centres).scatter_add_(1, near, share * x)
        centres = torch.where(mass > 0, moment / mass, centres)
    return (share * (x - centres.gather(1, near)).square()).sum(1)


@needs_native
@pytest.mark.parametrize(
    "kind, shape",
    spread(["normal", "heavy", "equal values", "bfloat16"], [(3, 9, 2, 5), (3, 400, 3, 8), (2, 600, 4, 4)]),
)
def test_kmeans_is_as_good_as_the_native_one(kind: str, shape: tuple[int, int, int, int]) -> None:
    rows, n, seed_bits, bits = shape
    weight, importance = rows_of(kind, rows, n)
    given = None if importance is None else importance.to(DEVICE)
    made = gpu_kmeans.kmeans(weight.to(DEVICE), given, seed_bits, bits)
    native = cpu.kmeans(weight, importance, seed_bits, bits)
    widths = range(seed_bits, bits + 1)
    nothing = 1e-9 * float(weight.square().sum())
    alike = torch.ones(rows, dtype=torch.bool)  # seeds; the cuts of others are by chance better or worse
    for b in widths:
        ours, theirs = (losses(weight, importance, each, b, widths) for each in (made, native))
        assert (ours <= 1.005 * theirs + nothing)[alike].all(), (b, ours / theirs)
        if b == seed_bits:
            alike = (ours - theirs).abs() <= 1e-6 * theirs + nothing
            assert alike.sum() >= rows - 1
    assert (
        losses(weight, importance, made, seed_bits, widths)
        <= lloyd(weight, importance, 2**seed_bits) * (1 + 1e-6) + nothing
    ).all()
    for table in made[1].split([2**b for b in widths], 1):
        assert (table.diff(dim=1) >= 0).all()


@needs_native
def test_kmeans_in_parts_and_with_one_importance_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, importance = rows_of("heavy", 5, 90)
    assert importance is not None
    at_once = gpu_kmeans.kmeans(weight.to(DEVICE), importance[0].to(DEVICE), 2, 3)
    monkeypatch.setattr(gpu_kmeans, "CHUNK", 2 * 90)
    in_parts = gpu_kmeans.kmeans(weight.to(DEVICE), importance[0].to(DEVICE), 2, 3)
    assert all(torch.equal(a, b) for a, b in zip(at_once, in_parts))
    native = cpu.kmeans(weight, importance[0], 2, 3)
    assert torch.equal(at_once[0].cpu(), native[0])
    torch.testing.assert_close(at_once[1].cpu(), native[1])


def test_kmeans_refuses_what_has_no_clusters() -> None:
    weight = torch.ones(1, 4, device=DEVICE)
    for bad, importance in ((weight * torch.nan, None), (weight, -weight)):
        with pytest.raises(ValueError, match="NaN or Inf, or an importance is negative"):
            gpu_kmeans.kmeans(bad, importance, 2, 3)
    with pytest.raises(ValueError, match="expected 1 to 8"):
        gpu_kmeans.kmeans(weight, None, 4, 3)


# ---- nested codes in PyTorch ---------------------------------------------------------------------------------------


@needs_native
def test_nested_codes_of_pytorch_are_the_native_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randn(17, 40, generator=generator).expand(8, 17, 40).clone()
    scales = torch.rand(17, generator=generator) + 0.5
    scales[3] = 0
    kinds = torch.randint(0, 16, (17,), generator=generator, dtype=torch.uint8)
    given = (
        targets,
        factor_of(40).contiguous(),
        shapes.tables(),
        kinds,
        scales,
        builders.width_weights(3.0, len(kinds)),
    )
    ours, native = reference.nested_codes(*given), cpu.nested_codes(*given)
    assert all(torch.equal(a, b) for a, b in zip(ours, native))


@needs_native
def test_nested_fit_of_pytorch_is_as_good_as_the_native_one() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(20, 150, generator=generator) * torch.rand(20, 1, generator=generator)
    weight[2] = 0
    importance = torch.rand(150, generator=generator)
    table = shapes.table(3).contiguous()

    def cost(kinds: Tensor, scales: Tensor) -> Tensor:
        entries = table[kinds.long()] * scales[:, None]
        return ((weight[..., None] - entries[:, None]).square().amin(-1) * importance).sum(1)

    ours, native = reference.nested_fit(weight, importance, table), cpu.nested_fit(weight, importance, table)
    torch.testing.assert_close(cost(*ours), cost(*native), rtol=1e-4, atol=0)


# ---- every method on another device --------------------------------------------------------------------------------

MORE = {  # options that open other ways through a method
    "gptq": {"desc_act": True, "act_bits": 8, "act_search": True},
    "awq": {"act_bits": 8, "act_static": True},
    "cmpq": {"compensate": False, "codebook_bits": 8},
    "two-four-sixteen": {"finetune": True, "finetune_epochs": 1},
    "squeezellm": {"sensitive_outliers": 0.01, "magnitude_outliers": 0.01},
    "anybit": {"salience": "diagonal"},
    "mixllm": {"search": "progressive", "wide_rows": 0.04},
}


def stored(folder: Path) -> dict[str, Tensor]:
    return {k: t for file in sorted(folder.glob("*.safetensors")) for k, t in load_file(file).items()}


def test_the_fake_device_finds_tensors_that_meet_others() -> None:
    with FakeDevice():
        x = torch.zeros(3, device=NAME)
        assert x.device.type == NAME and (x + torch.tensor(1.0)).tolist() == [1, 1, 1]
        assert torch.equal((x + torch.ones(3, device=NAME)).cpu(), torch.ones(3))
        with pytest.raises(AssertionError, match="two devices"):
            x + torch.ones(3)
        with pytest.raises(AssertionError, match="two devices"):
            x[torch.tensor([0, 1])]


@needs_native
@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_keeps_to_its_device(
    method: str,
    more: bool,
    model_dir: Callable[[str], Path],
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if more and method not in MORE:
        pytest.skip(f"{method} has no other way")
    options: dict[str, Any] = (
        {"group_size": 16} if method in ("rtn", "gptq", "awq", "mixllm", "atom", "llm-mq") else {}
    )
    if method == "anybit":  # half a minute each, as it is
        options["exclude"] = ("model.layers.1.*", "*.k_proj", "*.o_proj", "*.gate_proj", "*.up_proj")
    config = builders.options(method, samples=3, seq_len=32, **options, **(MORE[method] if more else {}))
    for name, value in (
        ("prepare._check_device", lambda device: None),
        ("prepare.compute_dtype", lambda device: torch.float32),
        ("kernels.dispatch.compute_dtype", lambda: torch.float32),
        ("fingerprint._arithmetic", lambda streamed: [str(streamed.device)]),
    ):
        monkeypatch.setattr(f"anybit.{name}", value)
    native = dispatch.kmeans

    def kmeans(weight: Tensor, importance: Tensor | None, seed_bits: int, bits: int) -> tuple[Tensor, ...]:
        """The native kernel in place of Triton's, which does not take tensors of the fake device."""
        made = native(held(weight), held(importance), seed_bits, bits)
        return tuple(Away(t) for t in made) if isinstance(weight, Away) else made

    monkeypatch.setattr(dispatch, "kmeans", kmeans)
    adam = torch.optim.Adam
    monkeypatch.setattr(torch.optim, "Adam", lambda groups, betas, fused: adam(groups, betas=betas))

    def run(device: str) -> dict[str, Tensor]:
        out = tmp_path / device
        with sdpa_kernel(SDPBackend.MATH):  # the only one that the fake device has
            driver.quantize(model_dir("llama"), out, config, calibration=str(text_file), device=device)
        return stored(out)

    expected = run("cpu")
    with FakeDevice():
        made = run(NAME)
    assert made.keys() == expected.keys()
    fixed = expected.keys() - {"coded"}  # which is as long as codes are many, of the method anybit
    assert all(made[name].shape == expected[name].shape for name in fixed)
    if method != "anybit":  # whose fit of scales sums in another order
        away = {name: float((made[name] != t).float().mean()) for name, t in expected.items()}
        assert max(away.values()) < 0.01, away


# ---- the benchmark -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")
def test_without_a_gpu_it_is_said() -> None:
    with pytest.raises(InputError, match="needs a GPU"):
        gpu_quantize.quantize()
    with pytest.raises(InputError, match="finds no CUDA"):
        driver.quantize("nowhere", "out", builders.options("rtn"), device="cuda")
