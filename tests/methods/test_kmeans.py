"""One-dimensional weighted k-means against exact dynamic programming and other implementations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anybit.errors import InputError
from anybit.kernels import cpu
from anybit.methods.kmeans import cluster, codebook

pytestmark = pytest.mark.native

ISAS = [isa for isa in ("portable", "avx2", "avx512") if cpu.isa() >= isa or isa == "portable"]


def exact(values: np.ndarray, weights: np.ndarray, k: int) -> float:
    """Least weighted squared error of k clusters, by dynamic programming over all intervals."""
    order = np.argsort(values, kind="stable")
    x, w = values[order].astype(np.float64), weights[order].astype(np.float64)
    mass, moment, square = (np.concatenate([[0], np.cumsum(w * x**p)]) for p in range(3))

    def cost(i: np.ndarray, j: int) -> np.ndarray:
        m = np.maximum(mass[j] - mass[i], 1e-300)
        return square[j] - square[i] - (moment[j] - moment[i]) ** 2 / m

    n = len(x)
    best = np.array([0.0, *(cost(np.array([0]), j)[0] for j in range(1, n + 1))])
    for _ in range(k - 1):
        best = np.array([0.0, *((best[:j] + cost(np.arange(j), j)).min() for j in range(1, n + 1))])
    return max(best[n], 0.0)


def losses(weight: Tensor, importance: Tensor | None, bits: int, seed_bits: int | None = None) -> np.ndarray:
    """Weighted squared error of every row after clustering."""
    codes, centroids = cluster(weight, importance, seed_bits or bits, bits)
    delta = centroids[bits].gather(1, codes.long()).double() - weight.double()
    return ((1 if importance is None else importance.double()) * delta.square()).sum(1).numpy()


def heavy_rows(rows: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows with tails as weights have, and importances over several orders of magnitude as Fisher's are."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, n, generator=generator) * torch.rand(rows, n, generator=generator).add(0.1)
    return weight, torch.randn(rows, n, generator=generator).mul(2).exp()


@pytest.mark.slow
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("weighted", [False, True])
def test_near_the_optimum(bits: int, weighted: bool) -> None:
    weight, importance = heavy_rows(40, 200)
    found = losses(weight, importance if weighted else None, bits)
    w = importance.numpy() if weighted else np.ones_like(weight)
    best = np.array([exact(x, y, 2**bits) for x, y in zip(weight.numpy(), w)])
    assert (found >= best * (1 - 1e-4)).all()
    assert (found <= best * 1.01 + 1e-9).all(), (found / best).max()
    assert found.sum() <= best.sum() * 1.001


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-6, 6), st.integers(0, 5)), min_size=1, max_size=24),
    st.integers(1, 4),
)
def test_small_rows_with_ties_and_zero_weights(points: list[tuple[int, int]], bits: int) -> None:
    values = torch.tensor([[float(x) for x, _ in points]])
    weights = torch.tensor([[float(w) for _, w in points]])
    found = losses(values, weights, bits)[0]
    best = exact(values[0].numpy(), weights[0].numpy(), 2**bits)
    assert found <= 1.35 * best + 1e-4  # a local optimum of few points may be that far away, not farther
    if len(set(values[0].tolist())) <= 2**bits:
        assert found < 1e-4


def test_each_cut_of_nested_codes_is_the_best_one() -> None:
    weight, importance = heavy_rows(6, 150)
    codes, centroids = cluster(weight, importance, 2, 4)
    for width in (2, 3):
        parents = codes >> (4 - width)
        children = codes >> (3 - width)
        for row in range(6):
            for parent in range(2**width):
                mine = parents[row] == parent
                x, w = weight[row, mine].numpy(), importance[row, mine].numpy()
                table = centroids[width + 1][row].double()
                delta = table[children[row, mine].long()] - weight[row, mine].double()
                loss = float((importance[row, mine].double() * delta.square()).sum())
                assert loss <= exact(x, w, 2) * (1 + 1e-4) + 1e-9
    assert torch.equal(codes >> 2, cluster(weight, importance, 2, 2)[0])


def test_centroids_ascend_and_are_means_of_their_codes() -> None:
    weight, importance = heavy_rows(5, 300)
    codes, centroids = cluster(weight, importance, 3, 8)
    for bits, table in centroids.items():
        assert table.shape == (5, 2**bits)
        assert (table.diff(dim=1) >= 0).all()
        code = (codes >> (8 - bits)).long()
        mass = torch.zeros(5, 2**bits).scatter_add_(1, code, importance)
        mean = torch.zeros(5, 2**bits).scatter_add_(1, code, importance * weight) / mass
        used = mass > 0
        torch.testing.assert_close(table[used], mean[used], rtol=1e-4, atol=1e-5)


def test_fewer_distinct_values_than_centroids() -> None:
    weight = torch.tensor([[3.0, -1.0, 3.0, -1.0, 0.5], [0.0, -0.0, 0.0, 0.0, 0.0]])
    codes, centroids = cluster(weight, None, 3, 5)
    for bits, table in centroids.items():
        assert torch.equal(table.gather(1, (codes >> (5 - bits)).long()), weight)
        assert (table.diff(dim=1) >= 0).all()


def test_a_row_without_any_importance_counts_all_alike() -> None:
    weight, _ = heavy_rows(3, 90)
    none, zeros = cluster(weight, None, 3, 3), cluster(weight, torch.zeros(3, 90), 3, 3)
    assert torch.equal(none[0], zeros[0])
    assert torch.equal(none[1][3], zeros[1][3])


def test_one_importance_for_all_rows() -> None:
    weight, importance = heavy_rows(4, 80)
    shared, repeated = (
        cluster(weight, importance[0], 3, 4),
        cluster(weight, importance[:1].repeat(4, 1), 3, 4),
    )
    assert torch.equal(shared[0], repeated[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 3])
def test_the_same_bits_everywhere(isa: str, threads: int) -> None:
    weight, importance = heavy_rows(37, 577)
    expected = cpu.kmeans(weight, importance, 3, 8, threads=2)
    got = cpu.kmeans(weight, importance, 3, 8, threads=threads, isa=isa)
    assert all(torch.equal(a, b) for a, b in zip(expected, got))


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_infinite_weights_are_refused(bad: float) -> None:
    weight = torch.zeros(2, 4)
    weight[1, 2] = bad
    with pytest.raises(InputError, match=r"weight\[1, 2\]"):
        cluster(weight, None, 3, 3)
    with pytest.raises(InputError, match=r"importance\[1, 2\]"):
        cluster(torch.ones(2, 4), weight, 3, 3)


def test_negative_importance_is_refused() -> None:
    with pytest.raises(InputError, match="not below 0"):
        cluster(torch.ones(1, 2), torch.tensor([[1.0, -1.0]]), 3, 3)


@pytest.mark.parametrize("n", [1, 2, 31, 32, 33])
def test_rows_of_any_length(n: int) -> None:
    weight, importance = heavy_rows(3, n)
    codes, centroids = cluster(weight, importance, 8, 8)
    torch.testing.assert_close(centroids[8].gather(1, codes.long()), weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("table_bits", [8, 4])
def test_tables_of_few_bits_stay_near_their_centroids(table_bits: int) -> None:
    weight, _ = heavy_rows(4, 200)
    codes, centroids = cluster(weight, None, 3, 4)
    tile = codebook(codes, centroids, (3, 4), table_bits=table_bits)
    for bits in (3, 4):
        spread = centroids[4].amax(1, keepdim=True) - centroids[4].amin(1, keepdim=True)
        assert (
            (tile.values(bits) - centroids[bits]).abs() <= 0.52 * spread / (2**table_bits - 1) + 1e-3
        ).all()
        assert (tile.values(bits).diff(dim=1) >= 0).all()


def test_no_worse_than_another_implementation() -> None:
    other = pytest.importorskip("kmeans1d", reason="kmeans1d is not installed")
    weight, _ = heavy_rows(20, 300)
    ours = losses(weight, None, 3)
    theirs = []
    for row in weight:
        clusters, centroids = other.cluster(row.tolist(), 8)
        theirs.append(float((torch.tensor(centroids)[clusters] - row).square().sum()))
    assert ours.sum() <= 1.001 * sum(theirs)


@pytest.mark.parametrize("n", [576, 1536, 11008, 28672])
@pytest.mark.parametrize("kind", ["half of none", "nearly all of none", "heavy", "few values"])
def test_unequal_importance_gives_tables_within_the_row(n: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(n)
    weight = torch.randn(3, n, generator=generator) * 0.02 + 5
    importance = torch.rand(3, n, generator=generator)
    if kind == "half of none":
        importance[:, ::2] = 0
    elif kind == "nearly all of none":
        importance[:, 5:] = 0
    elif kind == "heavy":
        importance = torch.randn(3, n, generator=generator).mul(9).exp()
    else:
        weight = (weight * 20).round()
        importance = torch.where(weight > 101, 0.0, importance)
    for seed in (3, 6):
        codes, centroids = cluster(weight, importance, seed, 8)
        for bits, table in centroids.items():
            assert torch.isfinite(table).all()
            assert (table.diff(dim=1) >= 0).all()
            assert (table >= weight.amin(1, keepdim=True)).all()
            assert (table <= weight.amax(1, keepdim=True)).all()
            assert int((codes >> (8 - bits)).max()) < 2**bits


def test_a_matrix_without_rows() -> None:
    codes, centroids = cluster(torch.empty(0, 8), None, 2, 3)
    assert codes.shape == (0, 8)
    assert centroids[3].shape == (0, 8)
