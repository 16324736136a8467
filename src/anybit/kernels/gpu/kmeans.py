"""Nested weighted k-means of the values of each row on a GPU: what csrc/quantize/kmeans.cpp computes, all rows at once.

Clusters are intervals of the sorted values. With prefix sums of importance (mass) and importance times value (moment)
any interval's part of the squared error that clusters take away is `moment^2 / mass`, so everything but the sort and
the sums is a search: the seed clusters by dynamic programming over some hundred boundaries ("knots"), whose edges
then move to better places near by, the nested ones by cutting each cluster at its best place.

Per weight: a sort (about 1 ns), some thirty passes over 8 bytes and 20 bytes read per width (0.15 ns at 3 TB/s); all
else is small. With launches that is 1.5 to 3 ns, 10 to 20 s for 6.5 billion weights of 3 to 8 bits: an estimate, which
`bench/gpu_quantize.py` measures.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

KNOTS_PER_CLUSTER, MORE_KNOTS = 12, 64  # as csrc/quantize/kmeans.cpp has them
PASSES = 100  # over the edges, at most, per step
PLACES = 8  # around an edge
LEAST_SHARE = 2.0**-24  # of importance, where a row's mean is 1
CHUNK = 1 << 24  # weights at a time, some 80 bytes each
CHUNK_STARTS = 1 << 27  # entries of the table of dynamic programming at a time, 2 bytes each
ENDS = 16  # knots whose best starts are searched together
UNREACHABLE = tl.constexpr(-1e300)


@triton.jit
def _add_cluster(
    mass,  # float64 [rows, knots + 1], prefix sums at the knots
    moment,
    before,  # float64 [rows, knots + 1], best total of some clusters that end at each knot
    now,  # the same of one cluster more: written
    starts,  # int16 [rows, knots + 1], where that one begins: written
    knots,
    COARSE: tl.constexpr,  # only every ENDS-th end; else all ends, between the starts of the coarse ones around them
    ENDS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * (knots + 1)
    end = tl.program_id(1) * ENDS + tl.arange(0, ENDS)
    low = 0
    if COARSE:
        high = tl.minimum((tl.program_id(1) + 1) * ENDS * ENDS, knots)
        end = end * ENDS
    else:
        high = tl.minimum((tl.program_id(1) + 1) * ENDS, knots)
        low = tl.load(starts + row + tl.program_id(1) * ENDS).to(tl.int32)
        if high < knots:
            high = tl.load(starts + row + high).to(tl.int32)
    there = end <= knots
    mass_end = tl.load(mass + row + end, there, 0.0)
    moment_end = tl.load(moment + row + end, there, 0.0)
    best = tl.full((ENDS,), UNREACHABLE, tl.float64)
    where = tl.zeros((ENDS,), tl.int32)
    for first in range(low, high + 1, TILE):
        start = first + tl.arange(0, TILE)
        known = start <= high
        share = mass_end[:, None] - tl.load(mass + row + start, known, 0.0)[None, :]
        part = moment_end[:, None] - tl.load(moment + row + start, known, 0.0)[None, :]
        total = tl.load(before + row + start, known, 0.0)[None, :]
        some = share > 0.0  # an empty cluster takes nothing away
        total += tl.where(some, part * part / tl.where(some, share, 1.0), 0.0)
        total = tl.where(known[None, :] & (start[None, :] <= end[:, None]), total, UNREACHABLE)
        most = tl.max(total, 1)
        at = tl.min(tl.where(total == most[:, None], start[None, :], knots + 1), 1)
        where = tl.where(most > best, at, where)
        best = tl.maximum(most, best)
    if COARSE:
        tl.store(starts + row + end, where.to(tl.int16), there)
    else:
        tl.store(now + row + end, best, there)
        keep = there & (tl.arange(0, ENDS) > 0)  # others read the coarse ones meanwhile
        tl.store(starts + row + end, where.to(tl.int16), keep)


@triton.jit
def _move_edges(
    mass,  # float64 [rows, n + 1]
    moment,
    down,  # int32 [rows, n + 1], the next boundary at or below each that is not between equal values
    up,  # and at or above
    edges,  # int64 [rows, clusters + 1]
    made,  # the same: written, but for the first and the last
    places,  # int32 [rows, clusters, PLACES]: scratch
    starts,  # int8 [rows, clusters, PLACES], which place of the edge before: scratch
    n,
    clusters,
    stride,
    below,
    PLACES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    mass, moment, down, up = (
        mass + row * (n + 1),
        moment + row * (n + 1),
        down + row * (n + 1),
        up + row * (n + 1),
    )
    edges, made = edges + row * (clusters + 1), made + row * (clusters + 1)
    places, starts = places + row * clusters * PLACES, starts + row * clusters * PLACES
    lane = tl.arange(0, PLACES)
    total = tl.zeros((PLACES,), tl.float64)  # best of the clusters up to each place
    mass_before = tl.zeros((PLACES,), tl.float64)
    moment_before = tl.zeros((PLACES,), tl.float64)
    for c in range(1, clusters):
        place = tl.load(edges + c).to(tl.int32) + (lane - below) * stride
        place = tl.minimum(tl.maximum(place, 0), n)
        place = tl.where(lane > below, tl.load(up + place), tl.load(down + place))
        mass_here, moment_here = tl.load(mass + place), tl.load(moment + place)
        share = mass_here[None, :] - mass_before[:, None]
        part = moment_here[None, :] - moment_before[:, None]
        sums = total[:, None] + tl.where(share > 0.0, part * part / tl.where(share > 0.0, share, 1.0), 0.0)
        sums = tl.where(share >= 0.0, sums, UNREACHABLE)
        total = tl.max(sums, 0)
        start = tl.min(tl.where(sums == total[None, :], lane[:, None], PLACES - 1), 0)
        tl.store(places + c * PLACES + lane, place)
        tl.store(starts + c * PLACES + lane, start.to(tl.int8))
        mass_before, moment_before = mass_here, moment_here
    share, part = tl.load(mass + n) - mass_before, tl.load(moment + n) - moment_before
    total += tl.where(share > 0.0, part * part / tl.where(share > 0.0, share, 1.0), 0.0)
    best = tl.max(total, 0)
    stays = tl.max(tl.where(lane == below, total, UNREACHABLE), 0) == best
    at = tl.where(stays, below, tl.min(tl.where(total == best, lane, PLACES - 1), 0))
    tl.debug_barrier()  # other lanes wrote what is read now
    for step in range(1, clusters):
        c = clusters - step
        tl.store(made + c, tl.load(places + c * PLACES + at).to(tl.int64))
        at = tl.load(starts + c * PLACES + at).to(tl.int32)


@triton.jit
def _best_cut(
    value,  # float32 [rows, n], ascending
    mass,  # float64 [rows, n + 1]
    moment,
    edges,  # int64 [rows, clusters + 1]
    cuts,  # int64 [rows, clusters]: written
    n,
    clusters,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cluster = tl.program_id(1)
    first = tl.load(edges + row * (clusters + 1) + cluster).to(tl.int32)
    last = tl.load(edges + row * (clusters + 1) + cluster + 1).to(tl.int32)
    value, mass, moment = value + row * n, mass + row * (n + 1), moment + row * (n + 1)
    mass_first, moment_first = tl.load(mass + first), tl.load(moment + first)
    whole = tl.load(mass + last) - mass_first
    mean = (tl.load(moment + last) - moment_first) / tl.where(whole > 0.0, whole, 1.0)
    best = tl.full((TILE,), -1.0, tl.float64)
    where = tl.zeros((TILE,), tl.int32) + last  # what cannot be cut leaves its second half empty
    for begin in range(first + 1, last, TILE):
        at = begin + tl.arange(0, TILE)
        inside = at < last
        left = tl.load(mass + at, inside, 0.0) - mass_first
        part = tl.load(moment + at, inside, 0.0) - moment_first - mean * left
        differ = tl.load(value + at, inside, 0.0) != tl.load(value + at - 1, inside, 0.0)
        both = left * (whole - left)
        possible = inside & differ & (both > 0.0)
        score = tl.where(possible, part * part / tl.where(possible, both, 1.0), -1.0)
        where = tl.where(score > best, at, where)
        best = tl.maximum(score, best)
    most = tl.max(best, 0)
    tl.store(cuts + row * clusters + cluster, tl.min(tl.where(best == most, where, last), 0).to(tl.int64))


def kmeans(
    weight: Tensor,  # float32 [rows, n], n below 2^31
    importance: Tensor | None,  # float32 [rows, n] or [n], not below 0; None: all alike
    seed_bits: int,
    bits: int,
) -> tuple[Tensor, Tensor]:
    """Nested weighted k-means of every row: see `methods.kmeans.cluster`, and `kernels.cpu.kmeans` for the native one.

    Returns:
        codes uint8 [rows, n] at `bits`, centroids float32 [rows, 2**seed_bits + ... + 2**bits].

    Raises:
        ValueError: NaN or Inf; a negative importance; widths that do not ascend within 1 to 8.
    """
    if not 1 <= seed_bits <= bits <= 8:
        raise ValueError(f"widths from {seed_bits} to {bits} bits: expected 1 to 8, ascending")
    given = [weight] if importance is None else [weight, importance]
    if not all(torch.isfinite(t).all() for t in given) or (
        given[-1] is importance and (importance < 0).any()
    ):
        raise ValueError("weights or importances are NaN or Inf, or an importance is negative")
    rows, n = weight.shape
    clusters = 2**seed_bits
    at_once = max(1, min(CHUNK // n, CHUNK_STARTS // (clusters * (_knots(clusters) + 1))))
    made = []
    for a in range(0, rows, at_once):
        part = importance[a : a + at_once] if importance is not None and importance.ndim == 2 else importance
        made.append(_Rows(weight[a : a + at_once], part).cluster(seed_bits, bits))
    codes, centroids = zip(*made)
    return torch.cat(codes), torch.cat(centroids)


def _knots(clusters: int) -> int:
    return -(-(KNOTS_PER_CLUSTER * clusters + MORE_KNOTS) // ENDS) * ENDS


class _Rows:
    """Some rows in order. Boundaries are 0..n; sorted weight p lies between boundaries p and p + 1."""

    def __init__(self, weight: Tensor, importance: Tensor | None) -> None:
        self.value, self.order = weight.sort(dim=1)
        rows, self.n = weight.shape
        share = self.value.new_ones((), dtype=torch.float64).expand(rows, self.n)
        if importance is not None:
            share = importance.expand(rows, self.n).gather(1, self.order).double()
            mean = share.mean(1, keepdim=True)
            share = torch.where(mean > 0, share / mean, 1.0).clamp(min=LEAST_SHARE)
        self.origin = weight.double().mean(1, keepdim=True)  # so that moments lose no digits
        self.mass = _prefix_sums(share)  # float64 [rows, n + 1]
        self.moment = _prefix_sums(share * (self.value - self.origin))
        place = torch.arange(self.n + 1, dtype=torch.int32, device=weight.device)
        differ = torch.nn.functional.pad(self.value.diff(dim=1) != 0, (1, 1), value=True)
        self.down = torch.where(differ, place, 0).cummax(1).values
        self.up = torch.where(differ, place, self.n).flip(1).cummin(1).values.flip(1)

    def cluster(self, seed_bits: int, bits: int) -> tuple[Tensor, Tensor]:
        """Codes and centroids of these rows: see `kmeans`."""
        edges = self.improved(self.seed(2**seed_bits))
        made = [self.centroids(edges)]
        for _ in range(seed_bits, bits):
            edges = self.halved(edges)
            made.append(self.centroids(edges))
        place = torch.arange(self.n, device=edges.device).expand(len(edges), self.n).contiguous()
        codes = torch.searchsorted(edges[:, 1:-1].contiguous(), place, right=True).to(torch.uint8)
        return torch.empty_like(codes).scatter_(1, self.order, codes), torch.cat(made, 1)

    def seed(self, clusters: int) -> Tensor:
        """The best edges among the knots, int64 [rows, clusters + 1]; clusters may be empty.

        Starts ascend with ends (the cost is concave): those of every 16th end are searched first, those of the others
        between them.
        """
        knots = self.knots(_knots(clusters))
        rows, count = len(knots), knots.shape[1] - 1
        mass, moment = self.mass.gather(1, knots), self.moment.gather(1, knots)
        before = torch.where(mass > 0, moment.square() / mass, 0.0)
        now = torch.empty_like(before)
        starts = torch.zeros(clusters, rows, count + 1, dtype=torch.int16, device=knots.device)
        tiles = count // ENDS + 1
        for c in range(1, clusters):
            arguments = (mass, moment, before, now, starts[c], count)
            _add_cluster[(rows, triton.cdiv(tiles, ENDS))](*arguments, COARSE=True, ENDS=ENDS, TILE=64)
            _add_cluster[(rows, tiles)](*arguments, COARSE=False, ENDS=ENDS, TILE=16)
            before, now = now, before
        at = torch.full((rows, 1), count, device=knots.device)
        chosen = [at]
        for c in range(clusters - 1, 0, -1):
            at = starts[c].gather(1, at).long()
            chosen.append(at)
        chosen.append(torch.zeros_like(at))
        return knots.gather(1, torch.cat(chosen[::-1], 1))

    def knots(self, wanted: int) -> Tensor:
        """Boundaries, int64 [rows, wanted + 1], spread evenly over the number of weights, importance and the range of
        values: each alone would leave the bulk, the weights that count or the tails without. All where there are no
        more; never one between equal values.
        """
        rows = len(self.value)
        if self.n <= wanted:
            at = torch.arange(wanted + 1, device=self.value.device).clamp(max=self.n).expand(rows, -1)
        else:
            way = self.mass[:, :-1] / self.mass[:, -1:]
            way += torch.arange(self.n, device=way.device) / self.n
            low, high = self.value[:, :1].double(), self.value[:, -1:].double()
            way += (self.value - low) / torch.where(high > low, high - low, 1.0)
            targets = torch.arange(wanted + 1, device=way.device) * (3.0 / wanted)
            at = torch.searchsorted(way, targets.double().expand(rows, -1).contiguous())
        made = self.down.gather(1, at).long()
        made[:, -1] = self.n
        return made

    def improved(self, edges: Tensor) -> Tensor:
        """All edges move together, each to one of 8 places around it, until none does; in steps that shrink from the
        distance between knots to one weight.
        """
        stride = 1
        while stride * _knots(edges.shape[1] - 1) < self.n:
            stride *= 2
        while stride:
            for _ in range(PASSES):
                moved = self.moved(self.moved(edges, stride, 4), stride, 3)
                if torch.equal(moved, edges):
                    break
                edges = moved
            stride //= 2
        return edges

    def moved(self, edges: Tensor, stride: int, below: int) -> Tensor:
        """The best edges among 8 places each, `stride` apart, `below` of them below where it is."""
        rows, clusters = len(edges), edges.shape[1] - 1
        made = edges.clone()
        places = torch.empty(rows, clusters, PLACES, dtype=torch.int32, device=edges.device)
        starts = torch.empty_like(places, dtype=torch.int8)
        arguments = (self.mass, self.moment, self.down, self.up, edges, made, places, starts)
        _move_edges[(rows,)](*arguments, self.n, clusters, stride, below, PLACES=PLACES, num_warps=1)
        return made

    def means(self, edges: Tensor) -> Tensor:
        """Weighted means of clusters, less the origin, float64 [rows, clusters]; an empty one has that before it."""
        mass, moment = self.mass.gather(1, edges).diff(dim=1), self.moment.gather(1, edges).diff(dim=1)
        mean = torch.where(mass > 0, moment / mass, -torch.inf).cummax(1).values
        return torch.maximum(mean, self.value[:, :1] - self.origin)

    def centroids(self, edges: Tensor) -> Tensor:
        """Means of clusters as they are stored, float32 [rows, clusters], ascending."""
        return (self.means(edges) + self.origin).float().clamp(self.value[:, :1], self.value[:, -1:])

    def halved(self, edges: Tensor) -> Tensor:
        """Every cluster cut in two at its best place."""
        rows, clusters = len(edges), edges.shape[1] - 1
        cuts = torch.empty_like(edges[:, 1:])
        arguments = (self.value, self.mass, self.moment, edges, cuts, self.n, clusters)
        _best_cut[(rows, clusters)](*arguments, TILE=64 if self.n > 64 * clusters else 32, num_warps=1)
        return torch.cat([edges[:, :1], torch.stack([cuts, edges[:, 1:]], 2).flatten(1)], 1)


def _prefix_sums(values: Tensor) -> Tensor:
    """float64 [rows, n] -> [rows, n + 1], beginning with 0."""
    return torch.nn.functional.pad(values.cumsum(1), (1, 0))
