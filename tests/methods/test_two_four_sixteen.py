"""2/4/16: sizes, and the method against what it must do."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

import anybit
from anybit.artifact.sizes import inspect
from anybit.artifact.verify import verify
from anybit.calibration.stats import LinearStats
from anybit.config import TileSpec
from anybit.errors import InputError
from anybit.formats import TwoFour, TwoFourLayout
from anybit.formats.two_four import BLOCK
from anybit.formats.validate import validate
from anybit.formats.weight import QuantizedWeight, pack
from anybit.loader import load
from anybit.methods import gptq, two_four_blocks, two_four_sixteen
from anybit.methods.compensation import inverse_factor
from anybit.methods.two_four_sixteen import TwoFourSixteen, bits_eq10
from anybit.plan import fit_budget, make_plan
from tests import builders
from tests.builders import opened, random, two_four_spec, weight_and_stats

pytestmark = pytest.mark.native

SMALL: dict[str, Any] = {"samples": 3, "seq_len": 24}


@pytest.mark.parametrize("in_", [576, 1536, 4096])
@pytest.mark.parametrize("wide", [0.1, 0.25, 0.4])
@pytest.mark.parametrize("outliers", [0.0, 0.002])
def test_bits_per_weight_follow_eq_10(in_: int, wide: float, outliers: float) -> None:
    shape = (1024, in_)
    layout = two_four_sixteen.layout(two_four_spec(wide, outliers=outliers), shape)
    (tile,) = layout.tiles
    assert isinstance(tile, TwoFourLayout)
    share = 1 - tile.narrow / in_
    assert abs(share - wide) <= 0.5 * BLOCK / in_
    expected = bits_eq10(share, 16) + 20 / in_ + 32 * outliers + (32 / in_ if outliers else 0)
    bpw = 8 * layout.nbytes / (shape[0] * in_)
    aligned = TwoFour.is_aligned(tile.narrow, in_, 16)
    assert aligned == (wide == 0.25)
    saved = (6 / 16 - 16 / 48) * 0.75 if aligned else 0  # two of three scales are a bit shorter
    assert abs(bpw - (expected - saved)) < 0.02
    assert bpw < expected + 0.02


@pytest.mark.parametrize("group_size", [16, 8])
def test_shares_are_rounded_to_blocks_exactly(group_size: int) -> None:
    """The nearest number of blocks, halves to the even one, though the share is taken from eq. 10's average."""
    for percent in range(101):
        options = two_four_spec(percent / 100, group_size)
        for in_ in (16, 40, 48, 80, 100, 240, 560, 576, 800, 1440, 1536, 4000, 4096, 14336, 28000):
            wide = in_ - two_four_blocks.narrow_channels(options, in_)
            assert wide == 16 * min(in_ // 16, round(Fraction(percent * in_, 1600))), (percent, in_)


def test_the_average_of_the_paper() -> None:
    """2.85 bits at 25 % of the groups (it says 2.85 and 2.91 with 0.2 % of outliers)."""
    assert bits_eq10(0.25, 16) == pytest.approx(2.84, abs=0.005)
    assert two_four_blocks.share_of_wide(bits_eq10(0.3, 8), 8) == pytest.approx(0.3)
    with pytest.raises(InputError, match=r"at least 2\.453"):
        two_four_blocks.share_of_wide(2.4, 16)


def test_sensitive_blocks_get_4_bits() -> None:
    weight, stats = weight_and_stats(24, 96)
    assert stats.hessian is not None
    made = two_four_sixteen.quantize(weight, stats, two_four_spec(2 / 6))
    (tile,) = made.tiles
    assert isinstance(tile, TwoFour)
    damped = stats.hessian + 0.01 * stats.hessian.diagonal().mean() * torch.eye(96)
    diagonal = torch.linalg.inv(damped.double()).diagonal()
    scores = [
        float((weight[:, b : b + 16].double().square() / diagonal[b : b + 16].square()).sum())
        for b in range(0, 96, 16)
    ]
    assert set(tile.wide.nonzero()[:, 0].tolist()) == set(sorted(range(6), key=lambda i: -scores[i])[:2])


def test_outliers_are_the_largest_of_the_2_bit_blocks() -> None:
    weight, stats = weight_and_stats(30, 96)
    made = two_four_sixteen.quantize(weight, stats, two_four_spec(2 / 6, outliers=0.01))
    (tile,) = made.tiles
    assert isinstance(tile, TwoFour) and made.sparse is not None
    count = round(0.01 * weight.numel())
    assert len(made.sparse.values) == count
    narrow, wide = TwoFour.channels(tile.wide, 96)
    assert not set(made.sparse.columns.tolist()) & set(wide.tolist())
    largest = weight[:, narrow].abs().flatten().topk(count).values.min()
    assert (weight[made.sparse.rows, made.sparse.columns].abs() >= largest).all()
    group = dict(zip(narrow.tolist(), TwoFour.group_of(len(narrow), 16).tolist()))
    for row, column in zip(made.sparse.rows.tolist(), made.sparse.columns.tolist()):
        assert tile.codes[row, column] == tile.zeros[row, group[column]]  # the dense part holds 0 there


@pytest.mark.parametrize("dead", [range(64, 80), range(5, 192, 16), range(60, 90)])
def test_dead_channels_get_no_bits(dead: range) -> None:
    """Neither 4-bit blocks nor outliers: blocks are ranked by their live channels, and dead weights cost no range."""
    weight, stats = weight_and_stats(48, 192)
    live, gone = torch.ones(192).bool(), list(dead)
    live[gone] = False
    assert stats.hessian is not None
    hessian = stats.hessian * live * live[:, None]
    stats = LinearStats(stats.tokens, hessian.diagonal(), hessian)
    weight[:, gone] = 0
    loud = weight.clone()
    loud[:, gone] = 50 * random(48, len(gone), seed=8)
    options = two_four_spec(0.25, outliers=0.02, clip=True)
    made, expected = (two_four_sixteen.quantize(w, stats, options) for w in (loud, weight))
    (tile,) = made.tiles
    assert isinstance(tile, TwoFour) and made.sparse is not None
    assert live[made.sparse.columns.long()].all()
    assert not made.dequantize()[:, gone].any()
    assert torch.equal(made.dequantize(), expected.dequantize())

    ridge = 0.01 * hessian.diagonal().mean() * torch.eye(int(live.sum()))
    inverse = torch.linalg.inv((hessian[live][:, live] + ridge).double()).diagonal()
    scores = torch.zeros(192).double()
    scores[live] = weight[:, live].double().square().sum(0) / inverse.square()
    best = scores.view(12, 16).sum(1).topk(3).indices
    assert set(tile.wide.nonzero()[:, 0].tolist()) == set(best.tolist())


def output_error(weight: Tensor, made: QuantizedWeight, stats: LinearStats) -> float:
    delta = made.dequantize() - weight
    return float(((delta @ stats.hessian) * delta).sum())  # type: ignore[operator]


def test_every_part_pays() -> None:
    weight, stats = weight_and_stats(64, 192)
    weight[:, 32:80] *= 4

    def error(**options: Any) -> float:
        return output_error(weight, two_four_sixteen.quantize(weight, stats, two_four_spec(**options)), stats)

    assert error(wide=0.25) < 0.7 * error(wide=0.0)
    assert error(wide=0.25, outliers=0.01) < 0.9 * error(wide=0.25)
    assert error(wide=0.25, group_size=8) < error(wide=0.25)
    assert error(wide=0.25, clip=True) < error(wide=0.25)


def test_all_blocks_at_4_bits_are_gptq() -> None:
    """One scale per row from the original weights, natural order: GPTQ with whole rows as groups."""
    weight, stats = weight_and_stats(16, 64)
    made = two_four_sixteen.quantize(weight, stats, two_four_spec(1.0))
    plain = builders.layer_spec(tiles=(TileSpec(4, -1),), group_reorder=False)
    expected = gptq.quantize(weight, stats, plain)
    torch.testing.assert_close(made.dequantize(), expected.dequantize(), rtol=1e-3, atol=1e-3)


def test_sensitivity_uses_the_diagonal_of_the_inverse() -> None:
    weight, stats = weight_and_stats(4, 32)
    assert stats.hessian is not None
    factor = inverse_factor(stats.hessian, torch.arange(32), 0.01)
    inverse = (factor.T @ factor).diagonal()
    scores = two_four_blocks.sensitivity(weight, factor)
    torch.testing.assert_close(scores[1], (weight[:, 16:].square() / inverse[16:].square()).sum())


@pytest.mark.parametrize("last_at_4", [False, True])
def test_a_short_last_block_has_two_bits(last_at_4: bool) -> None:
    mask = torch.tensor([not last_at_4, False, last_at_4])
    small = torch.zeros(20, 2, dtype=torch.uint8)
    tile = TwoFour(mask, 16, torch.zeros(20, 40, dtype=torch.uint8), small, small, torch.ones(2, 2).half(), small[:2],
                   torch.ones(20).half(), small[:, 0])  # fmt: skip
    packed = pack(QuantizedWeight((20, 40), (tile,)))
    if not last_at_4:
        return validate("layer", packed)
    with pytest.raises(InputError, match="last block has 8 of 16 channels"):
        validate("layer", packed)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_artifacts(family: str, model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    config = builders.options("two-four-sixteen", wide_groups=0.5, exclusive_outliers=0.01, **SMALL)
    anybit.quantize(model_dir(family), tmp_path / "out", config)
    verify(tmp_path / "out")
    figures = inspect(tmp_path / "out")
    assert (
        2 < figures["bits"] < 4 < figures["bits_per_weight"]
    )  # tiny matrices: grids and row pointers weigh much
    logits = load(tmp_path / "out")(input_ids=torch.arange(5)[None]).logits
    assert torch.isfinite(logits).all()


def test_other_group_sizes_are_refused(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    config = builders.options("two-four-sixteen", group_size=32, **SMALL)
    with pytest.raises(InputError, match="8 or 16"):
        anybit.quantize(model_dir("llama"), tmp_path / "out", config)


@pytest.mark.parametrize(("hidden", "intermediate"), [(640, 1280), (192, 2048), (64, 4096)])
def test_a_budget_buys_the_widest_share(hidden: int, intermediate: int, tmp_path: Path) -> None:
    """Though the aligned layout, at a quarter of the blocks, takes less than layouts with fewer at 4 bits."""
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": 1}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=8, num_attention_heads=4, **sizes))
    model.save_pretrained(tmp_path)
    streamed, config = opened(tmp_path), builders.options("two-four-sixteen", exclusive_outliers=0.0)
    widths = [bits_eq10(0, 16) + k / 100 for k in range(55)] + [two_four_sixteen.ALIGNED_BITS]
    plans = [make_plan(streamed, builders.changed(config, bits=bits)) for bits in widths]
    aligned = plans[-1].bits_per_weight
    assert any(p.bits_per_weight > aligned and p.code_bits < plans[-1].code_bits for p in plans)
    for budget in (aligned - 0.001, aligned + 0.01, *(p.bits_per_weight for p in plans[10:45])):
        found = make_plan(streamed, fit_budget(streamed, TwoFourSixteen(exclusive_outliers=0.0, bpw=budget)))
        assert found.bits_per_weight <= budget
        assert found.code_bits == max(p.code_bits for p in plans if p.bits_per_weight <= budget), budget


@pytest.mark.parametrize("choice", ["first", "best"])
def test_widths_by_decoder_block(
    choice: str,
    model_dir: Callable[[str], Path],
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The paper's inter-layer split: whole blocks at 4 bits, the first or those that alone lower the loss most."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "bench" / "papers")
    lab, paper = importlib.import_module("lab"), importlib.import_module("two_four_sixteen")
    asked = [str(model_dir("llama")), "--calibration", str(text_file), "--text", f"own={text_file}"]
    asked += ["--samples", "4", "--seq-len", "32", "--max-tokens", "64", "--work", str(tmp_path)]
    experiments = paper.Experiments(lab.Lab(lab.arguments("").parse_args(asked), "test"))
    blocks = [[n for n in experiments.lab.shapes if f"layers.{i}." in n] for i in (0, 1)]
    low, high = (
        {name: experiments.quantize(name, paper.spec(wide)).dequantize() for name in blocks[0] + blocks[1]}
        for wide in (0.0, 1.0)
    )
    wide = 0
    if choice == "best":
        losses = []
        for block in blocks:
            experiments.lab.put(low | {name: high[name] for name in block})
            with torch.no_grad():
                logits = experiments.lab.model(input_ids=(ids := experiments.lab.tokens())).logits[:, :-1]
            losses.append(
                float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))
            )
        wide = losses.index(min(losses))
        assert wide == 1  # else nothing would tell the choices apart
    made = experiments.by_block(0.5, choice)()
    for i, block in enumerate(blocks):
        for name in block:
            assert torch.equal(made[name].dequantize(), (high if i == wide else low)[name])
