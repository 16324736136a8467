"""The method anybit, matrix by matrix: nested codes and what each width loses."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from anybit.calibration.stats import LinearStats
from anybit.config import LayerSpec
from anybit.errors import InputError
from anybit.formats import Nested, NestedLayout
from anybit.formats import tables as shapes
from anybit.formats.nested import codes_of_kept, weights_of_kept
from anybit.kernels import cpu, reference
from anybit.methods import nested_codes
from anybit.methods.compensation import inverse_factor
from tests import builders

pytestmark = pytest.mark.native

needs_native = pytest.mark.skipif(not cpu.available(), reason=f"no native extension: {cpu.why_not()}")
BITS = range(1, 9)


def problem(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, LinearStats]:
    """A weight matrix, and statistics of inputs that correlate."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5 + torch.eye(columns)
    x = torch.randn(4 * columns + 16, columns, generator=generator) @ mix
    stats = LinearStats.empty(columns, hessian=True)
    stats.add(x)
    return torch.randn(rows, columns, generator=generator), stats


def code_oracle(
    z: np.ndarray, table: dict[int, np.ndarray], weights: np.ndarray, known: tuple[int, ...] = ()
) -> int:
    """One code, number by number in float32: what is known first, then candidates in the order of the widths."""
    half = np.float32(0.5)
    candidates = list(known)
    most = len(z)
    for b in range(1, most + 1):
        if weights[b - 1] == 0:
            continue
        middles = half * (table[b][:-1] + table[b][1:])
        code = int((z[b - 1] > middles).sum())
        for wider in range(b + 1, most + 1):
            low, high = table[wider][2 * code], table[wider][2 * code + 1]
            code = 2 * code + int(z[wider - 1] > half * (low + high))
        candidates.append(code)

    def cost(code: int) -> np.float32:
        total = np.float32(0)
        for own in range(1, most + 1):
            miss = z[own - 1] - table[own][code >> (most - own)]
            total += weights[own - 1] * (miss * miss)
        return total

    return min(candidates, key=cost)  # the first of equals


def codes_oracle(
    targets: np.ndarray, inverse: np.ndarray, table: dict[int, np.ndarray], scale: float, weights: np.ndarray
) -> tuple[list[int], np.ndarray]:
    """One row, number by number in float32."""
    targets, made = targets.copy(), []
    errors = np.zeros_like(targets)
    for j in range(targets.shape[1]):
        made.append(code_oracle(targets[:, j] / np.float32(scale if scale > 0 else 1), table, weights))
        for b in range(1, len(targets) + 1):
            value = np.float32(scale) * table[b][made[-1] >> (len(targets) - b)]
            errors[b - 1, j] = (targets[b - 1, j] - value) / inverse[j, j]
            targets[b - 1, j + 1 :] -= errors[b - 1, j] * inverse[j, j + 1 :]
    return made, errors


def compress(
    weight: torch.Tensor, stats: LinearStats | None, spec: LayerSpec[Any], worth: torch.Tensor | None = None
) -> SimpleNamespace:
    """The tile and the losses of nested codes, whose rows errors are worth so much."""
    made = nested_codes.quantize(weight, None if stats is None else replace(stats, outputs=worth), spec)
    return SimpleNamespace(tile=made.tiles[0], losses=made.losses)


@needs_native
@pytest.mark.parametrize("isa", ["portable", cpu.isa() if cpu.available() else "portable"])
@pytest.mark.parametrize("most", [8, 7, 4, 1])
def test_nested_codes_are_the_oracle(isa: str, most: int) -> None:
    rows, columns = 7, 33
    weight, stats = problem(rows, columns)
    assert stats.hessian is not None
    factor = inverse_factor(stats.hessian, torch.arange(columns), 0.01).contiguous()
    kinds = torch.tensor([0, 3, 5, 8, 11, 13, 15], dtype=torch.uint8)
    scales = torch.tensor([0.5, 1, 1.2, 1, 0.9, 1, 0])
    weights = builders.width_weights(3.0, rows)
    weights[2] = torch.tensor([3.0, 0, 0, 1, 0, 2, 0, 0])
    weights = weights[:, :most].contiguous() if most > 1 else torch.ones(rows, 1)
    targets = weight.expand(most, rows, columns).clone()
    tables = shapes.tables()[:, : (2 << most) - 2].contiguous()
    codes, errors = cpu.nested_codes(targets, factor, tables, kinds, scales, weights, threads=2, isa=isa)
    for r in range(rows):
        table = {b: shapes.table(b)[int(kinds[r])].numpy() for b in range(1, most + 1)}
        made, expected = codes_oracle(
            targets[:, r].numpy(), factor.numpy(), table, float(scales[r]), weights[r].numpy()
        )
        assert codes[r].tolist() == made
        np.testing.assert_array_equal(errors[:, r].numpy(), expected)


@needs_native
def test_every_instruction_set_and_number_of_threads_gives_the_same_bytes() -> None:
    weight, stats = problem(40, 150)
    assert stats.hessian is not None
    factor = inverse_factor(stats.hessian, torch.arange(150), 0.01)[:128, :128].contiguous()
    targets = weight[:, :128].expand(8, 40, 128).clone()
    kinds, scales = cpu.nested_fit(
        weight[:, :128].contiguous(), torch.ones(128), shapes.table(3).contiguous()
    )
    weights = builders.width_weights(4.0, 40)
    found = [
        cpu.nested_codes(targets, factor, shapes.tables(), kinds, scales, weights, threads, isa)
        for threads in (1, 3)
        for isa in ("portable", cpu.isa())
    ]
    assert all(torch.equal(c, found[0][0]) and torch.equal(e, found[0][1]) for c, e in found)


def descent_problem(rows: int, columns: int) -> dict[str, Tensor]:
    """What `nested_descent` is given, of codes that are not bad, a row of zeros among them."""
    weight, stats = problem(rows, columns)
    assert stats.hessian is not None
    weight[-1] = 0
    hessian = (stats.hessian / stats.tokens).contiguous()
    kinds, scales = cpu.nested_fit(weight, hessian.diagonal().contiguous(), shapes.table(3).contiguous())
    kinds[: min(rows, 16)] = torch.arange(min(rows, 16), dtype=torch.uint8)
    scales[-1] = 0
    weights = builders.width_weights(3.0, rows)
    weights[0] = torch.tensor([3.0, 0, 0, 1, 0, 2, 0, 0])
    targets = weight.expand(8, rows, columns).clone()
    codes = torch.empty(rows, columns, dtype=torch.uint8)
    eye = torch.eye(min(columns, 128))
    for a in range(0, columns, 128):
        part = targets[:, :, a : a + 128]
        size = part.shape[2]
        codes[:, a : a + 128] = cpu.nested_codes(
            part, eye[:size, :size].contiguous(), shapes.tables(), kinds, scales, weights
        )[0]
    errors = values_of(codes, kinds, scales) - weight
    losses = ((errors @ hessian) * errors).sum(2).T.contiguous()
    return {
        "slopes": errors @ hessian, "hessian": hessian, "weight": weight, "tables": shapes.tables(),
        "kinds": kinds, "scales": scales, "weights": weights, "codes": codes, "errors": errors, "losses": losses,
    }  # fmt: skip


def values_of(codes: Tensor, kinds: Tensor, scales: Tensor) -> Tensor:
    """What codes at 8 bits stand for at every width, float32 [8, rows, n]."""
    tables = [shapes.table(b)[kinds.long()] * scales[:, None] for b in BITS]
    return torch.stack([t.gather(1, (codes >> (8 - b)).long()) for b, t in zip(BITS, tables)])


def descended(given: dict[str, Tensor], by: Any = cpu, **how: Any) -> dict[str, Tensor]:
    """What `nested_descent` makes of copies."""
    copies = {name: tensor.clone() for name, tensor in given.items()}
    by.nested_descent(*copies.values(), **how)
    return copies


@needs_native
@pytest.mark.parametrize("isa", ["portable", cpu.isa() if cpu.available() else "portable"])
def test_descent_is_the_oracle(isa: str) -> None:
    """Number by number in float32: the best code where all others stay, and what that changes."""
    rows, columns = 18, 33
    given = descent_problem(rows, columns)
    made = descended(given, isa=isa, threads=2)
    hessian, weight = given["hessian"].numpy(), given["weight"].numpy()
    for r in range(rows):
        table = {b: shapes.table(b)[int(given["kinds"][r])].numpy() for b in BITS}
        scale, weights = given["scales"][r].numpy(), given["weights"][r].numpy()
        slopes, losses = given["slopes"][:, r].numpy().copy(), given["losses"][r].numpy().copy()
        for j in range(columns):
            old = int(given["codes"][r, j])
            before = np.array([scale * table[b][old >> (8 - b)] for b in BITS])
            z = (before - slopes[:, j] / hessian[j, j]) / np.float32(scale if scale > 0 else 1)
            code = code_oracle(z, table, weights, (old,))
            assert made["codes"][r, j] == code
            value = np.array([scale * table[b][code >> (8 - b)] for b in BITS])
            step = value - before
            losses += step * (np.float32(2) * slopes[:, j] + step * hessian[j, j])
            slopes[:, j + 1 :] += step[:, None] * hessian[j, j + 1 :]
            np.testing.assert_array_equal(made["errors"][:, r, j], value - weight[r, j])
        np.testing.assert_array_equal(made["losses"][r], losses)


@needs_native
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 7), (40, 128)])
def test_descent_of_pytorch_is_the_native_one(rows: int, columns: int) -> None:
    given = descent_problem(rows, columns)
    native, ours = descended(given), descended(given, reference)
    assert (native["codes"] != given["codes"]).any() or columns < 7
    for name, tensor in native.items():
        assert torch.equal(tensor, ours[name]), name


@needs_native
def test_descent_gives_the_same_bytes_everywhere() -> None:
    given = descent_problem(40, 128)
    found = [
        descended(given, isa=isa, threads=threads) for threads in (1, 3) for isa in ("portable", cpu.isa())
    ]
    for other in found[1:]:
        assert all(torch.equal(tensor, other[name]) for name, tensor in found[0].items())


@needs_native
def test_descent_works_on_views_of_larger_matrices() -> None:
    given = descent_problem(6, 40)
    alone = descended(given)
    wide = {n: torch.zeros(*t.shape[:-1], 90, dtype=t.dtype) for n, t in given.items()}
    views = dict(given)
    for name in ("hessian", "weight", "codes", "errors"):
        wide[name][..., 20:60] = given[name]
        views[name] = wide[name][..., 20:60]
    views["losses"] = given["losses"].clone()
    cpu.nested_descent(*views.values())
    for name in ("codes", "errors", "losses"):
        assert torch.equal(views[name], alone[name])
    assert (wide["codes"][:, :20] == 0).all() and (wide["errors"][..., 60:] == 0).all()


@needs_native
@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("hessian", lambda t: -t, r"hessian\[0, 0\] is -.*expected a positive number"),
        ("kinds", lambda t: t + 16, r"shapes\[0\] is not below 16"),
        ("weights", lambda t: t[:1], "weights is float32"),
        ("codes", lambda t: t.int(), "codes is int32"),
        ("errors", lambda t: t[:7], "errors is float32"),
        ("losses", lambda t: t.T, "losses is float32"),
    ],
)
def test_descent_refuses_what_does_not_fit(name: str, change: Any, words: str) -> None:
    given = descent_problem(20, 30)
    with pytest.raises(ValueError, match=words):
        cpu.nested_descent(*(given | {name: change(given[name])}).values())


@needs_native
@pytest.mark.parametrize(("rows", "columns"), [(24, 40), (9, 300)])
def test_every_pass_of_descent_lowers_the_objective(rows: int, columns: int) -> None:
    """By weights over the widths, row by row; the more passes, the lower, and less with each."""
    weight, stats = problem(rows, columns)
    found = []
    for passes in (0, 1, 2, 4):
        spec = builders.layer_spec(kept_channels=0.02, descent=passes, gains=False)
        made = compress(weight, stats, spec)
        losses = torch.empty(rows, 8)
        losses[made.tile.order] = made.losses
        found.append((losses * nested_codes.profile(3.0)).sum(1))
    assert all((after <= before * (1 + 1e-5)).all() for before, after in itertools.pairwise(found))
    means = [float(f.mean()) for f in found]
    assert means[1] < 0.97 * means[0] and means[0] - means[1] > means[1] - means[2] > 0


@needs_native
def test_products_in_bfloat16_choose_codes_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, stats = problem(64, 300)
    assert stats.hessian is not None
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(nested_codes, "_product_dtype", lambda work, dtype=dtype: dtype)
        tile = compress(weight, stats, builders.layer_spec(kept_channels=0.0, gains=False)).tile
        losses = []
        for bits in BITS:
            error = replace(tile, counts=(64,) * bits, codes=tile.codes >> (8 - bits)).dequantize() - weight
            losses.append(float(((error @ stats.hessian) * error).sum()))
        found.append(losses)
    for exact, rounded in zip(*found, strict=True):
        assert rounded < 1.02 * exact
    assert found[0] != found[1]


@needs_native
@pytest.mark.parametrize(
    ("rows", "columns", "kept", "gains"),
    [
        (24, 40, 0.0, True),
        (9, 200, 0.05, True),
        (9, 200, 0.05, False),
        (3, 1, 0.0, True),
        (16, 300, 0.02, True),
    ],
)
@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-3), (torch.bfloat16, 1e-2)])
def test_losses_are_those_of_the_stored_codes(
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    columns: int,
    kept: float,
    gains: bool,
    dtype: torch.dtype,
    off: float,
) -> None:
    """`sum_j e_j^2` of GPTQ's scaled errors, and what descent takes off and gains change, is `D H D^T` with the damped
    Hessian; rows are then brought nearer to each other. Products in bfloat16 round some of it."""
    monkeypatch.setattr(nested_codes, "_product_dtype", lambda work: dtype)
    weight, stats = problem(rows, columns)
    assert stats.hessian is not None
    worth = torch.rand(rows, generator=torch.Generator().manual_seed(3)) + 0.1
    made = compress(weight, stats, builders.layer_spec(kept_channels=kept, gains=gains), worth)
    damped = stats.hessian + 0.01 * stats.hessian.diagonal().mean() * torch.eye(columns)
    for bits in BITS:
        tile = replace(made.tile, counts=(rows,) * bits, codes=made.tile.codes >> (8 - bits))
        error = tile.dequantize() - weight
        expected = (worth / stats.tokens * ((error @ damped) * error).sum(1))[tile.order]
        nearer = expected**nested_codes.TRUST  # rows of a layer, whose sum stays
        expected = nearer * (expected.sum() / nearer.sum())
        torch.testing.assert_close(made.losses[:, bits - 1], expected, rtol=off, atol=1e-9)


@needs_native
def test_other_columns_make_up_for_the_rounding_of_kept_channels() -> None:
    """Of large inputs that others nearly say, 8 bits cost little; rounded alone they cost more."""
    generator = torch.Generator().manual_seed(0)
    weight, large = torch.randn(40, 200, generator=generator), torch.tensor([3, 50, 120, 199])
    x, mix = torch.randn(800, 200, generator=generator), torch.randn(200, 4, generator=generator)
    x[:, large] = 5 * x @ mix + torch.randn(800, 4, generator=generator)
    stats = LinearStats.empty(200, hessian=True)
    stats.add(x)
    assert stats.hessian is not None
    weight[7] = 0
    spec = {"kept_channels": 0.02, "gains": False, "damp": 1e-5}
    exact, rounded = (
        compress(weight, stats, builders.layer_spec(**spec, kept_bits=bits)).tile for bits in (16, 8)
    )
    assert torch.equal(exact.kept, large) and torch.equal(rounded.kept, large)
    assert rounded.kept_scales is not None and rounded.kept_values.dtype == torch.int8

    def loss(tile: Nested) -> float:
        error = tile.dequantize() - weight
        return float(((error @ stats.hessian) * error).sum())

    codes = codes_of_kept(exact.kept_weights, exact.scales, rounded.kept_scales)
    alone = replace(exact, kept_values=codes, kept_scales=rounded.kept_scales)
    assert loss(rounded) < 1.5 * loss(exact) < 0.1 * loss(alone)
    assert not rounded.dequantize()[7].any()


def test_kept_channels_are_rounded_one_after_the_other() -> None:
    """As GPTQ does, to the nearest codes, whose scale is the one with the least errors."""
    weight, stats = problem(30, 12)
    assert stats.hessian is not None
    channels = torch.tensor([2, 3, 9])
    rest = torch.tensor([j for j in range(12) if j not in channels])
    factor = inverse_factor(stats.hessian, torch.cat([channels, rest]), 0.01)
    scales = (torch.rand(30, generator=torch.Generator().manual_seed(1)) + 0.5).half().float()
    scales[4] = 0
    made = nested_codes.keep(weight, channels, scales, factor[:3].clone(), 8)
    assert made.scales is not None
    work = weight[:, channels].clone()

    def errors(column: Tensor, scale: Tensor) -> Tensor:
        return (column - weights_of_kept(codes_of_kept(column, scales, scale), scales, scale))[:, 0]

    for j in range(3):
        own = errors(work[:, j : j + 1], made.scales[j : j + 1])
        torch.testing.assert_close(own, work[:, j] - made.weights[:, j], rtol=1e-3, atol=1e-5)
        largest = (work[:, j] / scales).where(scales > 0, 0).abs().max() * 2**14 / 127**2
        for share in nested_codes.KEPT_RANGES:
            other = errors(work[:, j : j + 1], (share * largest).half()[None])
            assert own.square().sum() <= other.square().sum() * (1 + 1e-3)
        scaled = own / factor[j, j]
        torch.testing.assert_close(made.errors[:, j], scaled, rtol=1e-3, atol=1e-4)
        work[:, j + 1 :] -= scaled[:, None] * factor[j, j + 1 : 3]
    assert not made.values[4].any() and torch.equal(made.errors[4, :1], weight[4, 2:3] / factor[0, 0])


def test_a_row_unlike_the_others_does_not_spoil_their_kept_channels() -> None:
    """Rows whose coded weights are tiny or none have larger scales; a channel may be zero."""
    weight, scales = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)), torch.ones(64)
    weight[:, 1], weight[60] = 0, 0
    weight[62] *= 1e-6
    scales[60:] = torch.tensor([0.0, 0.0, 1e-6, 6e-8])
    raised = nested_codes.reaching(scales, weight)
    assert torch.equal(raised[:61], scales[:61]) and raised[62] == scales[62]
    assert 0 < float(raised[61]) < 0.01 and 0 < float(raised[63]) < 0.01
    made = nested_codes.keep(weight, torch.arange(3), raised, torch.eye(3), 8)
    off = (made.weights - weight).abs()
    assert (off <= 0.1 * (weight.abs() + 1)).all()
    assert float(off[61].max()) < 0.1 and float(off[63].max()) < 0.1
    assert not made.weights[:, 1].any() and not made.weights[60].any()
    none = nested_codes.keep(weight, torch.zeros(0, dtype=torch.int64), scales, torch.zeros(0, 3), 8)
    assert torch.equal(nested_codes.reaching(scales, weight[:, :0]), scales) and none.values.shape == (64, 0)
    assert (nested_codes.reaching(torch.zeros(64), weight)[weight.any(1)] > 0).all()


@needs_native
@pytest.mark.parametrize("kept_bits", [8, 16])
def test_gains_make_up_for_half_of_what_is_missing(kept_bits: int) -> None:
    """Of an output `y` a row gives `s y` and an error that does not go with it: with its gain, `sqrt(s) y`."""
    weight, stats = problem(24, 200)
    assert stats.hessian is not None
    weight[5] = 0
    without, made = (
        compress(weight, stats, builders.layer_spec(gains=g, kept_bits=kept_bits)).tile for g in (False, True)
    )
    assert without.gains is None and made.gains is not None
    damped = stats.hessian + 0.01 * stats.hessian.diagonal().mean() * torch.eye(200)
    coded = Nested.coded(200, made.kept)
    off = (made.dequantize() - weight)[:, made.kept]  # which the others make up for
    wanted = weight[:, coded] @ damped[coded][:, coded] - off @ damped[made.kept][:, coded]
    wanted = wanted @ damped[coded][:, coded].inverse()
    heard = wanted @ damped[coded][:, coded]
    energy = (heard * wanted).sum(1)

    def slopes(tile: Nested, bits: int) -> Tensor:
        cut = replace(tile, counts=(24,) * bits, codes=tile.codes >> (8 - bits))
        return (cut.dequantize()[:, coded] * heard).sum(1) / energy

    live = torch.arange(24) != 5
    for bits in (2, 3):
        before, after = slopes(without, bits)[live], slopes(made, bits)[live]
        assert (before < 1).all() or kept_bits == 8  # a target that was moved may be met better than its row
        assert (before < 1).double().mean() > 0.9 and float(before.min()) < {2: 0.95, 3: 0.99}[bits]
        torch.testing.assert_close(
            after, before.clamp(max=1).sqrt() * before.clamp(min=1), rtol=0, atol=0.6 / 64
        )
    assert torch.equal(slopes(made, 4)[live], slopes(without, 4)[live])
    assert not made.dequantize()[5].any()


def test_rows_come_nearer_to_their_layer() -> None:
    losses = torch.rand(20, 8, generator=torch.Generator().manual_seed(0)) ** 4
    losses[3], losses[:, 7], losses[5, 2] = 0, 0, -1e-3
    made = nested_codes._evened(losses)
    known = losses.clamp(min=0)
    torch.testing.assert_close(made.sum(0), known.sum(0))
    assert (made >= 0).all() and (made[3] == 0).all() and (made[:, 7] == 0).all()
    for bits in range(7):
        assert made[:, bits].argsort().tolist() == known[:, bits].argsort().tolist()
        spread, before = (x[6:, bits].log().std() for x in (made, known))
        torch.testing.assert_close(spread, nested_codes.TRUST * before)


@needs_native
def test_every_width_is_compensated() -> None:
    """At each width the joint codes lose less than rounding to the same tables; tuned widths lose least."""
    weight, stats = problem(64, 96)
    assert stats.hessian is not None
    alone = LinearStats(stats.tokens, stats.squares, torch.diag(stats.hessian.diagonal()))
    rounded = compress(weight, alone, builders.layer_spec(kept_channels=0.0)).tile
    for tuned in (2.0, 3.0, 5.0):
        made = compress(weight, stats, builders.layer_spec(kept_channels=0.0, tune_for=tuned)).tile

        def loss(tile: Nested, bits: int) -> float:
            cut = replace(tile, counts=(64,) * bits, codes=tile.codes >> (8 - bits))
            error = cut.dequantize() - weight
            assert stats.hessian is not None
            return float(((error @ stats.hessian) * error).sum())

        for bits in range(max(2, round(tuned) - 2), round(tuned) + 3):
            assert loss(made, bits) < loss(rounded, bits), (tuned, bits)
        assert loss(made, round(tuned)) < 0.95 * loss(rounded, round(tuned))


@needs_native
def test_rows_fall_in_sensitivity() -> None:
    weight, stats = problem(30, 48)
    worth = torch.linspace(1, 100, 30)
    made = compress(weight, stats, builders.layer_spec(kept_channels=0.0), worth)
    mean = made.losses[:, 1:5].log().mean(1)
    assert (mean.diff() <= 0).all() and sorted(made.tile.order.tolist()) == list(range(30))


@needs_native
def test_dead_channels_and_rows_of_zeros() -> None:
    weight, stats = problem(10, 40)
    assert stats.hessian is not None
    hessian = stats.hessian.clone()
    hessian[5], hessian[:, 5] = 0, 0
    weight[3] = 0
    made = compress(
        weight,
        LinearStats(stats.tokens, hessian.diagonal(), hessian),
        builders.layer_spec(kept_channels=1 / 128),
    )
    dense = made.tile.dequantize()
    assert torch.isfinite(dense).all() and (dense[3] == 0).all() and torch.isfinite(made.losses).all()


def test_what_it_needs_is_asked_for() -> None:
    with pytest.raises(InputError, match="calibrate first"):
        compress(torch.ones(2, 2), None, builders.layer_spec(kept_channels=1 / 128))


def test_the_planned_layout_has_the_average_width() -> None:
    for bits, counts in ((2, [48, 48]), (3.5, [48, 48, 48, 24]), (8, [48] * 8)):
        spec = builders.layer_spec(bits, kept_channels=1 / 128)
        layout = nested_codes.layout(spec, (48, 256))
        assert layout.tiles == (NestedLayout.of(counts, 2, gains=True, kept_bits=8),)
        assert layout.stored_tensors()["plane_1"][1] == (48, 8)
