"""The order of planes over a whole model: every prefix is the best of its size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anybit.formats import NestedLayout
from anybit.formats.dtypes import Dtype
from anybit.formats.layout import LayerLayout
from anybit.kernels import cpu
from anybit.methods import ordering

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"no native extension: {cpu.why_not()}")


def random_losses(rows: int, seed: int) -> Tensor:
    """Losses that fall about fourfold with a bit, rows in about falling order."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.rand(rows, 1, generator=generator).sort(0, descending=True).values * 10
    noise = 1 + 0.5 * torch.rand(rows, 8, generator=generator)
    return first * 4.0 ** -torch.arange(8) * noise


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=4), st.integers(0, 10**6))
def test_every_prefix_is_a_nested_model(rows: list[int], seed: int) -> None:
    losses = {str(i): random_losses(n, seed + i) for i, n in enumerate(rows)}
    columns = {name: 33 * (i + 1) for i, name in enumerate(losses)}
    steps = ordering.order(losses, columns)
    before: ordering.Counts = steps.counts(0)
    assert all(counts == (len(losses[name]),) for name, counts in before.items())
    for end in range(len(steps.layer) + 1):
        counts = steps.counts(end)
        for name, now in counts.items():
            assert list(now) == sorted(now, reverse=True)
            had = [*before[name], *[0] * 8]
            assert all(n >= h for n, h in zip(now, had))
        before = counts
    assert all(counts == (len(losses[n]),) * 8 for n, counts in before.items())
    weights = sum(len(x) * columns[n] for n, x in losses.items())
    assert steps.bits(len(steps.layer)) == 8 and steps.weights == weights
    last = sum(float(x[:, -1].double().sum()) for x in losses.values())
    if all((x.diff(dim=1) <= 0).all() for x in losses.values()):
        assert steps.loss_after(len(steps.layer)) == pytest.approx(last, rel=1e-6)


def test_a_prefix_is_the_best_of_its_size() -> None:
    """With losses that are convex and ranked alike, greedy steps solve the allocation: compared with all others."""
    losses = {
        "a": torch.tensor([[64.0 * s / 4**b for b in range(8)] for s in (5, 1)]).repeat_interleave(8, 0),
        "b": torch.tensor([[64.0 * s / 4**b for b in range(8)] for s in (3,)]).repeat_interleave(8, 0),
    }
    steps = ordering.order(losses, {"a": 32, "b": 32})
    for budget in range(len(steps.layer) + 1):
        found = steps.loss_after(budget)
        best = min(
            8 * 64 * (5 / 4**i + 1 / 4**j + 3 / 4**k)
            for i in range(8)
            for j in range(8)
            for k in range(8)
            if i + j + k == budget
        )
        assert found == pytest.approx(best, rel=1e-6)


def test_ties_keep_the_order_of_layers_planes_and_rows() -> None:
    losses = {name: torch.ones(16, 8) * 4.0 ** -torch.arange(8) for name in ("x", "y")}
    steps = ordering.order(losses, {"x": 32, "y": 32})
    assert steps.layer[:4].tolist() == [0, 0, 1, 1] and steps.plane[:5].tolist() == [2, 2, 2, 2, 3]


def test_steps_are_ranked_by_what_a_byte_saves() -> None:
    """Two layers whose rows gain the same; one's planes take two words a row, the other's one."""
    losses = {name: torch.ones(16, 8) * 4.0 ** -torch.arange(8) for name in ("wide", "narrow")}
    steps = ordering.order(losses, {"wide": 64, "narrow": 32})
    assert steps.layer[:2].tolist() == [1, 1] and steps.plane[:4].tolist() == [2, 2, 2, 2]


def test_a_short_last_group_of_rows_counts_by_its_rows() -> None:
    losses = torch.cat([torch.ones(8, 8), 10 * torch.ones(1, 8)]) * 4.0 ** -torch.arange(
        8
    )  # rows out of order
    steps = ordering.order({"x": losses}, {"x": 32})
    assert steps.loss_after(len(steps.layer)) == pytest.approx(float(losses[:, -1].sum()), rel=1e-6)


JOINED = ("m.q_proj", "m.k_proj", "m.v_proj"), ("m.o_proj",), ("n.gate_proj", "n.up_proj"), ("n.down_proj",)


def test_whole_layers_step_together() -> None:
    names = [name for group in JOINED for name in group]
    losses = {name: random_losses(8 * i + 5, i) for i, name in enumerate(names)}
    columns = {name: 33 * (i + 1) for i, name in enumerate(names)}
    steps = ordering.order(losses, columns, whole=True)
    weights = sum(len(loss) * columns[name] for name, loss in losses.items())
    seen, before = set(), -1.0
    for bits in np.linspace(1, 8, 400):
        end = steps.upto(bits)
        counts = steps.counts(end)
        assert steps.bits(end) <= bits + 1e-9 and steps.bits(end) >= before
        before = steps.bits(end)
        for group in JOINED:
            assert {set(counts[name]) == {len(losses[name])} for name in group} == {True}  # no row alone
            assert len({len(counts[name]) for name in group}) == 1  # one width for all that are joined
        seen.add(end)
        if (
            end
        ):  # a rung is the best there is for its bytes: each step saves more per byte than those left out
            rate = steps.gain / (steps.rows * -(-np.array([columns[names[i]] for i in steps.layer]) // 32))
            assert rate[:end].min() >= rate[end:].max(initial=0) - 1e-12
    assert len(seen) == 7 * len(JOINED) + 1 and steps.bits(len(steps.layer)) == 8 and steps.weights == weights


def test_pooling_is_the_isotonic_regression() -> None:
    values = np.array([[3.0, 1.0, 2.0, 2.0, 5.0, 0.0], [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]])
    expected = [[3.0, 2.5, 2.5, 2.5, 2.5, 0.0], values[1].tolist()]
    np.testing.assert_allclose(ordering.falling(values), expected)


def test_the_widths_of_the_levels() -> None:
    assert ordering.level_widths(2.0) == [2.0]
    assert ordering.level_widths(2.25) == pytest.approx([2.0, 2.1, 2.2, 2.25])
    assert len(ordering.level_widths(8)) == 61 and ordering.level_widths(8)[-1] == 8


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 64, 65])
def test_a_plane_counts_as_the_words_that_it_is_stored_in(columns: int) -> None:
    layout = LayerLayout((3, columns), (NestedLayout.of([3] * 4, 0),))
    dtype, shape = layout.stored_tensors()["plane_2"]
    assert (dtype, shape) == (Dtype.U32, (3, ordering.plane_words(columns)))
