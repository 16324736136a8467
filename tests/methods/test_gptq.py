"""RTN, clip search and GPTQ against slow and obvious oracles in numpy float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from anybit.calibration.stats import LinearStats
from anybit.config import TileSpec
from anybit.errors import InputError
from anybit.formats.weight import QuantizedWeight, pack, validate
from anybit.kernels import cpu, reference
from anybit.methods import clip, gptq, grid, rtn
from anybit.methods.tiling import column_sets
from tests import builders


def random_weight(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def inputs(tokens: int, columns: int, seed: int = 1) -> Tensor:
    """Correlated inputs [tokens, columns] of very different sizes, as a language model's are."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) * 0.3 + torch.eye(columns)
    size = torch.exp(torch.randn(columns, generator=generator))
    return torch.randn(tokens, columns, generator=generator) @ mix * size


def statistics(x: Tensor) -> LinearStats:
    stats = LinearStats.empty(x.shape[1], hessian=True)
    stats.add(x)
    return stats


def loss(weight: Tensor, made: QuantizedWeight | np.ndarray, hessian: Tensor) -> float:
    """tr(D H D^T): the squared error of the layer's outputs over the calibration tokens."""
    dense = made.dequantize().numpy() if isinstance(made, QuantizedWeight) else made
    delta = dense.astype(np.float64) - weight.numpy().astype(np.float64)
    return float(((delta @ hessian.numpy().astype(np.float64)) * delta).sum())


# ---- RTN


def scalar_grid(values: np.ndarray, bits: int, symmetric: bool, ratio: float = 1.0) -> tuple[np.float32, int]:
    """Scale and zero point of one group of one row, as docs/formats.md and the paper have them."""
    top, half = 2**bits - 1, 2 ** (bits - 1)
    low, high = min(values.min(), 0), max(values.max(), 0)
    scale = max(-low, high) / (half - 1) if symmetric else (high - low) / top
    scale = np.float32(np.float16(np.float32(scale * ratio)))
    if symmetric:
        return scale, half
    return scale, 0 if scale == 0 else int(min(max(np.rint(-low * ratio / scale), 0), top))


def scalar_code(value: float, scale: float, zero: int, bits: int) -> int:
    return zero if scale == 0 else int(min(max(np.rint(value / scale) + zero, 0), 2**bits - 1))


def rtn_oracle(weight: Tensor, bits: int, group_size: int, symmetric: bool) -> tuple[np.ndarray, ...]:
    """codes [out, in], scales and zeros [out, groups], one weight at a time in float32."""
    w = weight.numpy()
    size = w.shape[1] if group_size == -1 else group_size
    groups = -(-w.shape[1] // size)
    codes = np.zeros(w.shape, np.uint8)
    scales, zeros = np.zeros((len(w), groups), np.float16), np.zeros((len(w), groups), np.uint8)
    for i, row in enumerate(w):
        for g in range(groups):
            scale, zero = scalar_grid(row[g * size : (g + 1) * size], bits, symmetric)
            scales[i, g], zeros[i, g] = scale, zero
            for j in range(g * size, min((g + 1) * size, len(row))):
                codes[i, j] = scalar_code(row[j], scale, zero, bits)
    return codes, scales, zeros


def check_rtn(weight: Tensor, bits: int, group_size: int, symmetric: bool) -> QuantizedWeight:
    made = rtn.quantize(weight, None, builders.layer_spec(bits, group_size, symmetric=symmetric))
    validate("layer", pack(made))
    codes, scales, zeros = rtn_oracle(weight, bits, group_size, symmetric)
    (tile,) = made.tiles
    assert np.array_equal(tile.codes.numpy(), codes)
    assert np.array_equal(tile.scales.numpy(), scales)
    assert tile.zeros is None if symmetric else np.array_equal(tile.zeros.numpy(), zeros)  # type: ignore[union-attr]
    assert tile.group_size == (weight.shape[1] if group_size == -1 else group_size)
    assert tile.rows is None and tile.cols is None
    return made


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", range(2, 9))
def test_rtn_is_the_oracle(bits: int, symmetric: bool) -> None:
    for rows, columns, group_size in [
        (3, 40, 16),
        (1, 1, 128),
        (5, 7, -1),
        (2, 33, 32),
        (4, 9, 1),
        (1, 130, 128),
    ]:
        weight = random_weight(rows, columns, seed=bits)
        check_rtn(weight, bits, group_size, symmetric)
        check_rtn(weight.abs(), bits, group_size, symmetric)  # the range includes 0 all the same
        check_rtn(-weight.abs(), bits, group_size, symmetric)


def test_halves_go_to_the_even_code() -> None:
    weight = torch.tensor([[-8.0, 7.0, 0.5, 1.5, 2.5, -0.5, -1.5]])  # asymmetric 4 bits: scale 1, zero 8
    assert check_rtn(weight, 4, -1, False).tiles[0].codes.tolist() == [[0, 15, 8, 10, 10, 8, 6]]
    weight = torch.tensor([[7.0, 0.5, 1.5, -2.5, -3.5]])  # symmetric: scale 1, offset 8
    assert check_rtn(weight, 4, -1, True).tiles[0].codes.tolist() == [[15, 8, 10, 6, 4]]


def test_the_symmetric_grid_has_one_more_code_below_zero() -> None:
    weight = torch.tensor([[4.0, -7.0]])
    tile = check_rtn(weight, 3, -1, True).tiles[0]
    assert tile.scales.tolist() == [[pytest.approx(7 / 3, rel=1e-3)]] and tile.codes.tolist() == [[6, 1]]
    fine = grid.encode(torch.tensor([-4.0, 4.0]), torch.tensor(1.0), torch.tensor(4.0), torch.tensor(7.0))
    assert fine.tolist() == [0, 7]  # -4 is on the grid, 4 is clamped to 3


def test_the_scale_is_rounded_before_the_codes() -> None:
    weight = torch.tensor([[0.0, 2049.0 * 0.5 * 15, 15363.7]])
    scale = float(np.float16(np.float32(2049.0 * 0.5)))
    assert scale == 1024.0  # 1024.5 is between two half-precision numbers
    made = check_rtn(weight, 4, -1, False)
    assert made.tiles[0].scales.item() == scale
    assert made.tiles[0].codes.tolist() == [[0, 15, 15]]


@pytest.mark.parametrize("symmetric", [False, True])
def test_rows_and_groups_of_zeros_stay_zero(symmetric: bool) -> None:
    weight = random_weight(4, 40)
    weight[1] = 0
    weight[2, 16:32] = 0
    dense = check_rtn(weight, 3, 16, symmetric).dequantize()
    assert torch.equal(dense[1], torch.zeros(40)) and torch.equal(dense[2, 16:32], torch.zeros(16))
    assert dense[2, :16].abs().max() > 0


@pytest.mark.parametrize("symmetric", [False, True])
def test_weights_too_small_for_a_half_precision_scale_become_zero(symmetric: bool) -> None:
    weight = random_weight(3, 8)
    weight[1] *= 1e-9
    made = check_rtn(weight, 4, -1, symmetric)
    assert made.tiles[0].scales[1].item() == 0 and not made.dequantize()[1].any()
    weight[1] *= 1e3  # subnormal scales: coarse, but within one step
    scale = check_rtn(weight, 4, -1, symmetric).tiles[0].scales[1].item()
    assert 0 < scale < 6.1e-5


@pytest.mark.parametrize("value", [1e9, -1e9, float("inf"), float("nan")])
def test_weights_too_large_for_a_half_precision_scale_are_refused(value: float) -> None:
    weight = random_weight(3, 8)
    weight[2, 5] = value
    for symmetric in (False, True):
        spec = builders.layer_spec(8, 4, symmetric=symmetric)
        with pytest.raises(InputError, match="float16"):
            rtn.quantize(weight, None, spec)
        with pytest.raises(InputError, match="float16"):
            gptq.quantize(weight, statistics(inputs(30, 8)), spec)


def test_padding_a_ragged_group_changes_nothing() -> None:
    weight = random_weight(3, 37).abs() + 1
    ragged = rtn.quantize(weight, None, builders.layer_spec(4, 16)).dequantize()
    alone = rtn.quantize(weight[:, 32:], None, builders.layer_spec(4, 5)).dequantize()
    assert torch.equal(ragged[:, 32:], alone)


def test_tiles_by_rows_and_columns_are_quantized_each_on_its_own() -> None:
    weight = random_weight(5, 24)
    by_rows = builders.layer_spec(
        tiles=(TileSpec(8, 16, True, rows=(1, 4)), TileSpec(4, 16, False, rows=(0, 2, 3)))
    )
    dense = rtn.quantize(weight, None, by_rows).dequantize()
    wide = rtn.quantize(weight[[1, 4]], None, builders.layer_spec(8, 16, symmetric=True)).dequantize()
    narrow = rtn.quantize(weight[[0, 2, 3]], None, builders.layer_spec(4, 16)).dequantize()
    assert torch.equal(dense[[1, 4]], wide) and torch.equal(dense[[0, 2, 3]], narrow)
    last, first = tuple(range(23, 7, -1)), tuple(range(8))
    by_cols = builders.layer_spec(tiles=(TileSpec(4, 8, True, cols=last), TileSpec(2, 16, cols=first)))
    made = rtn.quantize(weight, None, by_cols)
    assert [t.cols.tolist() for t in made.tiles] == [list(last), list(first)]  # type: ignore[union-attr]
    four = rtn.quantize(weight[:, list(last)], None, builders.layer_spec(4, 8, symmetric=True)).dequantize()
    two = rtn.quantize(weight[:, :8], None, builders.layer_spec(2, 16)).dequantize()
    assert torch.equal(made.dequantize()[:, list(last)], four) and torch.equal(made.dequantize()[:, :8], two)
    validate("layer", pack(made))


@pytest.mark.parametrize(
    ("tiles", "word"),
    [
        ((TileSpec(rows=(0, 1)),), "leave out 2"),
        ((TileSpec(rows=(0, 1)), TileSpec(rows=(1, 2, 3))), "same weights"),
        ((TileSpec(), TileSpec()), "same weights"),
        ((TileSpec(rows=(0, 4)), TileSpec(rows=(1, 2, 3))), "below 4"),
        ((TileSpec(rows=(-1, 0)), TileSpec(rows=(1, 2))), "below 4"),
        ((TileSpec(rows=(1, 0)), TileSpec(rows=(2, 3))), "ascending"),
        ((TileSpec(rows=()), TileSpec()), "no rows"),
        ((TileSpec(rows=(0, 1), group_size=16), TileSpec(rows=(2, 3), group_size=8)), "group_size"),
        ((TileSpec(cols=(0, 1, 2)), TileSpec(cols=(3, 4))), "1 input channels are in no tile"),
        ((TileSpec(cols=(0, 1, 2)), TileSpec(cols=(3, 4, 5, 6))), "channel 6"),
        ((TileSpec(cols=(0, 1, 2)), TileSpec(cols=(2, 3, 4, 5))), "channel 2 is in two tiles"),
        ((TileSpec(cols=(-1, 0, 1, 2, 3, 4)),), "channel -1"),
        ((TileSpec(cols=(0, 0, 1, 2, 3, 4)),), "channel 0 is in two tiles"),
        ((TileSpec(cols=()), TileSpec()), "no columns"),
        ((TileSpec(), TileSpec(cols=(0, 1, 2, 3, 4, 5))), "channel 0 is in two tiles"),
        (tuple(TileSpec(rows=(0,)) for _ in range(300)), "300 tiles"),
    ],
)
def test_tilings_that_do_not_fit_are_refused(tiles: tuple[TileSpec, ...], word: str) -> None:
    with pytest.raises(InputError, match=word):
        column_sets(builders.layer_spec(tiles=tiles), (4, 6))


# ---- clip search


def clip_oracle(
    weight: Tensor, hessian: np.ndarray, bits: int, group_size: int, symmetric: bool
) -> np.ndarray:
    """Error of every ratio, [ratios, out, groups], one group of one row at a time."""
    w = weight.numpy().astype(np.float64)
    groups = -(-w.shape[1] // group_size)
    errors = np.zeros((len(clip.RATIOS), len(w), groups))
    for k, ratio in enumerate(clip.RATIOS):
        for i in range(len(w)):
            for g in range(groups):
                span = slice(g * group_size, min((g + 1) * group_size, w.shape[1]))
                scale, zero = scalar_grid(w[i, span], bits, symmetric, ratio)
                codes = np.array([scalar_code(v, scale, zero, bits) for v in w[i, span]])
                delta = float(scale) * (codes - zero) - w[i, span]
                errors[k, i, g] = delta @ hessian[span, span] @ delta
    return errors


@pytest.mark.parametrize(("bits", "symmetric"), [(2, False), (3, True), (4, False)])
def test_clip_search_is_brute_force(bits: int, symmetric: bool) -> None:
    weight, x = random_weight(4, 21) ** 3, inputs(50, 21)
    columns = column_sets(builders.layer_spec(bits, 8, symmetric=symmetric), (4, 21))[0]
    for stats, h in [(statistics(x), (x.T @ x).numpy().astype(np.float64)), (None, np.eye(21))]:
        ratios = clip.search(weight, columns, stats)
        errors = clip_oracle(weight, h, bits, 8, symmetric)
        chosen = np.abs(np.array(clip.RATIOS)[:, None, None] - ratios.numpy()).argmin(0)
        best = np.take_along_axis(errors, chosen[None], 0)[0]
        assert np.allclose(best, errors.min(0), rtol=1e-4)  # the same ratio, or one as good
        assert (chosen != 0).any()


def test_compensated_clip_search_is_brute_force() -> None:
    weight, cost = random_weight(4, 21) ** 3, torch.rand(21) + 0.1
    columns = column_sets(builders.layer_spec(3, 8), (4, 21))[0]
    ratios = clip.search_compensated(weight, columns, cost)
    errors = clip_oracle(weight, np.diag(cost.numpy().astype(np.float64)), 3, 8, False)
    chosen = np.abs(np.array(clip.RATIOS)[:, None, None] - ratios.numpy()).argmin(0)
    best = np.take_along_axis(errors, chosen[None], 0)[0]
    assert np.allclose(best, errors.min(0), rtol=1e-4)
    assert (chosen != 0).any()


def test_clip_search_of_exact_weights_clips_nothing() -> None:
    weight = torch.tensor([[0.0, 1, 2, 3], [0, 0, 0, 0]])
    columns = column_sets(builders.layer_spec(2, 4), (2, 4))[0]
    assert clip.search(weight, columns, None).tolist() == [[1], [1]]


def test_clipping_lowers_the_loss() -> None:
    weight, x = random_weight(96, 64), inputs(400, 64)
    stats = statistics(x)
    assert stats.hessian is not None
    for method in (rtn.quantize, gptq.quantize):
        plain = method(weight, stats, builders.layer_spec(3, 32))
        clipped = method(weight, stats, builders.layer_spec(3, 32, clip=True))
        assert loss(weight, clipped, stats.hessian) < loss(weight, plain, stats.hessian)


# ---- GPTQ


@dataclass
class Group:
    """A group of input channels in processing order, and the grid of each row in it."""

    channels: list[int]
    bits: list[int]
    symmetric: list[bool]


def groups_in_order(energy: np.ndarray, rows: int, spec: builders.LayerSpec) -> list[Group]:
    """What GPTQ walks through, from the options' definitions; energy [in] is the Hessian's diagonal."""
    groups: list[Group] = []
    for cols in dict.fromkeys(t.cols for t in spec.tiles):
        tiles = [t for t in spec.tiles if t.cols == cols]
        channels = list(range(len(energy)) if cols is None else cols)
        if spec.desc_act:
            channels.sort(key=lambda j: -energy[j])
        size = len(channels) if tiles[0].group_size == -1 else tiles[0].group_size
        of_row = {i: t for t in tiles for i in (range(rows) if t.rows is None else t.rows)}
        bits, symmetric = [of_row[i].bits for i in range(rows)], [of_row[i].symmetric for i in range(rows)]
        for start in range(0, len(channels), size):
            groups.append(Group(channels[start : start + size], bits, symmetric))
    if spec.group_reorder and not spec.desc_act:
        groups.sort(key=lambda g: -float(np.mean(energy[g.channels])))
    return groups


def eliminate(inverse: np.ndarray, j: int) -> np.ndarray:
    """The inverse Hessian without channel j."""
    return inverse - np.outer(inverse[:, j], inverse[j]) / inverse[j, j]


def ratios_of(weight: Tensor, group: Group, cost: np.ndarray, clipped: bool) -> np.ndarray:
    """Clipping ratio of each row: least final cost of the original weights' errors."""
    ratio = np.ones(len(weight))
    for i in range(len(weight) if clipped else 0):
        one, h = weight[i : i + 1, group.channels], np.diag(cost[group.channels])
        errors = clip_oracle(one, h, group.bits[i], len(group.channels), group.symmetric[i])
        ratio[i] = clip.RATIOS[int(errors[:, 0, 0].argmin())]
    return ratio


def gptq_oracle(weight: Tensor, stats: LinearStats, spec: builders.LayerSpec) -> np.ndarray:
    """Optimal brain quantization, column by column, with the explicit inverse Hessian; dense [out, in]."""
    assert stats.hessian is not None
    w, h = weight.numpy().astype(np.float64), stats.hessian.numpy().astype(np.float64)
    diagonal = h.diagonal().copy()
    dead = diagonal == 0
    mean = diagonal.mean() if diagonal.any() else 1.0
    h[np.diag_indices(len(h))] += np.where(dead, mean, spec.damp * mean)
    w[:, dead] = 0
    groups = groups_in_order(diagonal, len(w), spec)
    inverse, cost = np.linalg.inv(h), np.zeros(len(h))
    for j in [j for group in groups for j in group.channels]:
        cost[j], inverse = 1 / inverse[j, j], eliminate(inverse, j)
    inverse, dense, left = np.linalg.inv(h), np.zeros_like(w), np.ones(len(h), bool)
    for group in groups:
        ratio = ratios_of(torch.tensor(np.where(dead, 0, weight)), group, cost, spec.clip)
        fitted = [
            scalar_grid(w[i, group.channels], group.bits[i], group.symmetric[i], ratio[i])
            for i in range(len(w))
        ]
        for j in group.channels:
            left[j] = False
            for i, (scale, zero) in enumerate(fitted):
                dense[i, j] = float(scale) * (scalar_code(w[i, j], float(scale), zero, group.bits[i]) - zero)
                error = (w[i, j] - dense[i, j]) / inverse[j, j]
                w[i, left] -= error * inverse[j, left]
            inverse = eliminate(inverse, j)
    return dense


MIXED_ROWS = (TileSpec(8, 16, True, rows=(0, 3, 4)), TileSpec(4, 16, False, rows=(1, 2, 5, 6, 7)))
FIRST, REST = tuple(range(2, 50, 3)), tuple(j for j in range(50) if j not in range(2, 50, 3))
MIXED_COLUMNS = (TileSpec(2, 16, False, cols=REST), TileSpec(4, -1, True, cols=FIRST))
SPECS = {
    "asymmetric": builders.layer_spec(4, 16, group_reorder=False),
    "symmetric": builders.layer_spec(4, 16, symmetric=True, group_reorder=False),
    "two bits, whole rows": builders.layer_spec(2, -1),
    "three bits, ragged": builders.layer_spec(3, 12, symmetric=True),
    "group reorder": builders.layer_spec(3, 8),
    "group reorder, symmetric": builders.layer_spec(3, 8, symmetric=True),
    "group of one": builders.layer_spec(4, 1),
    "eight bits": builders.layer_spec(8, 16),
    "strong damping": builders.layer_spec(4, 16, damp=0.5),
    "desc_act": builders.layer_spec(4, 16, desc_act=True),
    "desc_act, whole rows": builders.layer_spec(3, -1, symmetric=True, desc_act=True),
    "clip": builders.layer_spec(3, 16, clip=True),
    "clip, desc_act": builders.layer_spec(3, 16, symmetric=True, clip=True, desc_act=True),
    "8 and 4 bits by rows": builders.layer_spec(tiles=MIXED_ROWS),
    "8 and 4 bits by rows, desc_act": builders.layer_spec(tiles=MIXED_ROWS, desc_act=True),
    "2 and 4 bits by columns": builders.layer_spec(tiles=MIXED_COLUMNS),
    "2 and 4 bits by columns, natural": builders.layer_spec(
        tiles=MIXED_COLUMNS, group_reorder=False, clip=True
    ),
    "2 and 4 bits by columns, desc_act": builders.layer_spec(tiles=MIXED_COLUMNS, desc_act=True),
}


def check_gptq(weight: Tensor, stats: LinearStats, spec: builders.LayerSpec) -> QuantizedWeight:
    """GPTQ makes the oracle's matrix but for rare ties, with a loss that is as low."""
    assert stats.hessian is not None
    made = gptq.quantize(weight, stats, spec)
    validate("layer", pack(made))
    dense, expected = made.dequantize().numpy(), gptq_oracle(weight, stats, spec)
    assert np.isfinite(dense).all()
    equal = np.isclose(
        dense, expected, rtol=2e-3, atol=1e-6
    )  # one unit of a half-precision scale apart at most
    assert equal.mean() >= 0.995, f"{(~equal).sum()} of {equal.size} weights differ"
    ours, theirs = loss(weight, made, stats.hessian), loss(weight, expected, stats.hessian)
    assert ours == pytest.approx(theirs, rel=0.01, abs=1e-3)
    return made


@pytest.mark.parametrize("name", SPECS)
def test_gptq_is_the_oracle(name: str) -> None:
    check_gptq(random_weight(8, 50), statistics(inputs(200, 50)), SPECS[name])


@pytest.mark.parametrize(
    "name", ["asymmetric", "desc_act", "clip", "8 and 4 bits by rows", "2 and 4 bits by columns"]
)
def test_gptq_with_dead_channels_and_fewer_tokens_than_channels(name: str) -> None:
    x = inputs(20, 50)
    x[:, [0, 5, 17, 48]] = 0
    made = check_gptq(random_weight(8, 50), statistics(x), SPECS[name])
    assert not made.dequantize()[:, [0, 5, 17, 48]].any()


def test_weights_of_dead_channels_change_nothing() -> None:
    x, weight = inputs(200, 50), random_weight(8, 50)
    x[:, [0, 17]] = 0
    other = weight.clone()
    other[:, [0, 17]] = 40.0
    for name, method in (
        ("asymmetric", gptq),
        ("clip", gptq),
        ("clip, desc_act", gptq),
        ("asymmetric", rtn),
        ("clip", rtn),
    ):
        first, second = (method.quantize(w, statistics(x), SPECS[name]).dequantize() for w in (weight, other))
        assert torch.equal(first, second)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_gptq_with_a_rank_deficient_hessian(rank: int) -> None:
    x = inputs(rank, 50) if rank else torch.zeros(4, 50)
    check_gptq(random_weight(8, 50), statistics(x), builders.layer_spec(4, 16, damp=0.01))


def test_gptq_over_more_columns_than_a_block() -> None:
    assert gptq.BLOCK < 300
    weight, stats = random_weight(3, 300), statistics(inputs(600, 300))
    for spec in (
        builders.layer_spec(4, -1),
        builders.layer_spec(3, 200, symmetric=True),
        builders.layer_spec(4, 128, desc_act=True),
    ):
        check_gptq(weight, stats, spec)


def test_gptq_of_one_column() -> None:
    made = check_gptq(random_weight(4, 1), statistics(inputs(9, 1)), builders.layer_spec(4, 128))
    assert torch.equal(
        made.dequantize(), rtn.quantize(random_weight(4, 1), None, builders.layer_spec(4)).dequantize()
    )


def test_gptq_on_independent_channels_is_rtn() -> None:
    weight, stats = random_weight(6, 40), statistics(torch.eye(40) * 3)
    for spec in (builders.layer_spec(4, 16), builders.layer_spec(3, 16, symmetric=True)):
        assert torch.equal(
            gptq.quantize(weight, stats, spec).dequantize(), rtn.quantize(weight, None, spec).dequantize()
        )


def test_desc_act_stores_its_permutation_and_group_reorder_none() -> None:
    weight, stats = random_weight(8, 50), statistics(inputs(200, 50))
    energy = stats.squares
    (tile,) = gptq.quantize(weight, stats, SPECS["desc_act"]).tiles
    assert tile.cols is not None and tile.cols.dtype == torch.int32
    assert torch.equal(tile.cols.long(), torch.argsort(energy, descending=True, stable=True))
    assert gptq.quantize(weight, stats, SPECS["group reorder"]).tiles[0].cols is None
    tiles = gptq.quantize(weight, stats, SPECS["2 and 4 bits by columns, desc_act"]).tiles
    for made, channels in zip(tiles, (REST, FIRST)):
        assert made.cols is not None and sorted(made.cols.tolist()) == list(channels)
        assert (energy[made.cols.long()].diff() <= 0).all()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_gptq_beats_rtn_on_correlated_inputs(bits: int) -> None:
    for seed in range(3):
        weight, stats = random_weight(16, 96, seed), statistics(inputs(400, 96, seed + 10))
        assert stats.hessian is not None
        spec = builders.layer_spec(bits, 32)
        rounded = loss(weight, rtn.quantize(weight, None, spec), stats.hessian)
        for options in ({}, {"desc_act": True}, {"group_reorder": False}):
            made = gptq.quantize(weight, stats, builders.layer_spec(bits, 32, **options))
            assert loss(weight, made, stats.hessian) < 0.95 * rounded


@pytest.mark.parametrize(
    "name", ["clip", "clip, desc_act", "8 and 4 bits by rows", "2 and 4 bits by columns"]
)
def test_methods_are_pure_and_deterministic(name: str) -> None:
    weight, stats = random_weight(8, 50), statistics(inputs(200, 50))
    assert stats.hessian is not None
    before, hessian, random = weight.clone(), stats.hessian.clone(), torch.get_rng_state()
    for method in (rtn.quantize, gptq.quantize):
        spec = SPECS[name]
        first, again = pack(method(weight, stats, spec)), pack(method(weight, stats, spec))
        assert first.layout == again.layout
        assert all(torch.equal(first.tensors[f], again.tensors[f]) for f in first.tensors)
    assert torch.equal(weight, before) and torch.equal(stats.hessian, hessian) and stats.tokens == 200
    assert torch.equal(torch.get_rng_state(), random)


def test_gptq_refuses_what_it_cannot_use() -> None:
    weight = random_weight(2, 2)
    with pytest.raises(InputError, match="Hessian"):
        gptq.quantize(weight, None, builders.layer_spec())
    with pytest.raises(InputError, match="Hessian"):
        gptq.quantize(weight, LinearStats.empty(2, hessian=False), builders.layer_spec())
    indefinite = torch.tensor([[1.0, 100.0], [100.0, 1.0]])
    with pytest.raises(InputError, match="positive definite"):
        gptq.quantize(weight, LinearStats(1, indefinite.diagonal(), indefinite), builders.layer_spec())


def test_damping_is_raised_until_the_factorisation_works() -> None:
    slightly_indefinite = torch.tensor([[1.0, 1.05], [1.05, 1.0]])  # 1 % is too little, 10 % is enough
    factor = gptq.inverse_factor(slightly_indefinite, torch.arange(len(slightly_indefinite)), 0.01)
    damped = slightly_indefinite + 0.1 * torch.eye(2)
    assert torch.allclose(factor.T @ factor, torch.linalg.inv(damped), rtol=1e-4)
    assert torch.equal(factor, factor.triu())


def test_the_factor_is_that_of_the_inverse() -> None:
    h = statistics(inputs(300, 40)).hessian
    assert h is not None
    factor = gptq.inverse_factor(h, torch.arange(len(h)), 0.01).double()
    damped = h.double() + 0.01 * h.diagonal().mean() * torch.eye(40)
    assert torch.allclose(factor.T @ factor @ damped, torch.eye(40, dtype=torch.float64), atol=1e-3)


# ---- the native column loop


@pytest.mark.skipif(not cpu.available(), reason=f"no native extension: {cpu.why_not()}")
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 16), (16, 33), (37, 128)])
def test_the_native_block_is_the_reference_to_the_bit(rows: int, columns: int) -> None:
    weight = random_weight(rows, columns)
    h = statistics(inputs(2 * columns, columns)).hessian
    assert h is not None
    factor = gptq.inverse_factor(h, torch.arange(len(h)), 0.01).contiguous()
    bits = torch.arange(rows) % 7 + 2
    scale, zero = grid.fit(weight, bits, bits % 3 == 0)
    scale[::4] = 0  # a group of zeros that compensation has filled since: no grid, so the zero point
    slow, fast = weight.clone(), weight.clone()
    expected = reference.gptq_block(slow, factor, scale, zero, 2.0**bits - 1)
    made = cpu.gptq_block(fast, factor, scale, zero, 2.0**bits - 1)
    assert torch.equal(made[0], expected[0])
    assert torch.equal(made[1].view(torch.int32), expected[1].view(torch.int32))
    assert torch.equal(fast.view(torch.int32), slow.view(torch.int32))
    assert (expected[0][::4] == zero[::4, None]).all()


@pytest.mark.skipif(not cpu.available(), reason=f"no native extension: {cpu.why_not()}")
def test_gptq_makes_the_same_bytes_without_the_native_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, stats = random_weight(9, 150), statistics(inputs(200, 150))
    specs = [builders.layer_spec(4, 64), builders.layer_spec(3, -1, symmetric=True, desc_act=True, clip=True)]
    fast = [pack(gptq.quantize(weight, stats, spec)) for spec in specs]
    monkeypatch.setattr(cpu, "_native", None)
    for spec, expected in zip(specs, fast):
        made = pack(gptq.quantize(weight, stats, spec))
        assert all(torch.equal(made.tensors[f], expected.tensors[f]) for f in expected.tensors)
