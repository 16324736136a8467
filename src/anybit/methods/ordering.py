"""One file, any size: all bitplanes of a nested model in one order, and the artifact that is split along it.

A step gives some rows of a layer one plane more. Steps are ranked by how much loss a byte of them saves, over the whole
model (the global view of MixLLM, arXiv:2412.14590, on the nested widths of Any-Precision, arXiv:2402.10517); the model
at any average width is then a prefix of the list. The artifact is a base layer, an ordinary HF
directory, and enhancement layers of `STEP` bits each, beside it in files of their own: the base layer and any first
ones of them are a valid model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from anybit.formats import NestedLayout
from anybit.formats.layout import LayerLayout
from anybit.lazy import Tensor
from anybit.methods.anybit import BASE_BITS, BITS

STEP = 0.1  # bits from one enhancement layer to the next
ROWS = 8  # that get a plane together
SHARES = {2: 0.8, 3: 0.95, 4: 0.98}  # about what of a plane's bytes is left where it is coded
Counts = Mapping[str, Sequence[int]]  # layer -> rows of every plane


@dataclass(frozen=True)
class Steps:
    """All steps after the first plane of every row, in order."""

    layers: Mapping[str, int]  # name -> rows
    layer: np.ndarray  # int64 [steps]: number of the layer whose plane a step extends
    plane: np.ndarray  # int64 [steps], 2 to 8
    rows: np.ndarray  # int64 [steps] that it adds
    code_bits: np.ndarray  # int64 [steps] that it adds
    counted: np.ndarray  # bool [steps]: whether its layer counts for the average width; embeddings do not
    gain: np.ndarray  # float64 [steps]: loss that it takes away
    whole: np.ndarray  # bool [steps]: whether a prefix may end with it
    loss: float  # before the first
    weights: int  # that have codes, of layers that count
    all_weights: int

    def upto(self, bits: float) -> int:
        """How many steps an average width has room for."""
        return self._fitting(self.code_bits * self.counted, (bits - 1) * self.weights)

    def upto_all(self, bits: float) -> int:
        """The same of the average over all matrices, embeddings too."""
        return self._fitting(self.code_bits, (bits - 1) * self.all_weights)

    def _fitting(self, takes: np.ndarray, room: float) -> int:
        return self.ending(int(np.searchsorted(takes.cumsum(), room * (1 + 1e-12), "right")))

    def ending(self, most: int) -> int:
        """The longest prefix of at most so many steps that there may be."""
        ends = np.flatnonzero(self.whole[:most])
        return int(ends[-1]) + 1 if len(ends) else 0

    def bits(self, steps: int) -> float:
        """The average width after so many."""
        return 1 + float((self.code_bits * self.counted)[:steps].sum()) / self.weights

    def all_bits(self, steps: int) -> float:
        """The same of all matrices."""
        return 1 + float(self.code_bits[:steps].sum()) / self.all_weights

    def loss_after(self, steps: int) -> float:
        return self.loss - float(self.gain[:steps].sum())

    def counts(self, steps: int) -> dict[str, tuple[int, ...]]:
        """Rows of every plane of every layer after so many, the planes of no rows left out."""
        at = self.layer[:steps] * BITS + self.plane[:steps] - 1
        rows = np.bincount(at, weights=self.rows[:steps], minlength=len(self.layers) * BITS).astype(np.int64)
        rows = rows.reshape(-1, BITS)
        rows[:, 0] = list(self.layers.values())
        return {name: tuple(n for n in of.tolist() if n) for name, of in zip(self.layers, rows)}


def order(
    losses: Mapping[str, Tensor],
    columns: Mapping[str, int],
    whole: bool = False,
    beside: Collection[str] = (),
) -> Steps:
    """All steps by falling gain per byte.

    Gains are made to fall along a layer's rows and from plane to plane first (neighbours that do not are pooled, which
    is the convex hull of the loss), so that every prefix gives each plane of a layer its first rows, and no plane more
    of them than the one before. Ties keep the order of layers, planes and rows.

    Args:
        losses: of every layer, float [r, 8]: what every stored row costs at widths 1 to 8.
        columns: how many input channels of every layer have codes.
        whole: planes are given to all rows at once of all layers that engines join, for kernels of one width.
        beside: those of them that do not count for the average width: embedding and head.
    """
    numbers = {name: i for i, name in enumerate(losses)}
    gains = {name: -np.diff(loss.double().numpy(), axis=1) for name, loss in losses.items()}
    if whole:
        from anybit.checkpoint.architectures import joined_layers

        units = joined_layers(losses)
        parts = [_whole_steps(unit, numbers, gains, columns) for unit in units]
    else:
        parts = [_row_steps(numbers[name], of, columns[name]) for name, of in gains.items()]
    layer, plane, rows, bits, gain, density, ends = np.concatenate(parts, axis=1)
    first = np.argsort(-density, kind="stable")
    sizes = {name: len(loss) * columns[name] for name, loss in losses.items()}
    counts = np.array([name not in beside for name in losses], dtype=bool)
    layer = layer[first].astype(np.int64)
    return Steps(
        layers={name: len(loss) for name, loss in losses.items()},
        layer=layer,
        plane=plane[first].astype(np.int64),
        rows=rows[first].astype(np.int64),
        code_bits=bits[first].astype(np.int64),
        counted=counts[layer],
        gain=gain[first],
        whole=ends[first].astype(bool),
        loss=float(sum(loss[:, 0].double().sum() for loss in losses.values())),
        weights=sum(size for name, size in sizes.items() if name not in beside),
        all_weights=sum(sizes.values()),
    )


def _row_steps(number: int, gains: np.ndarray, columns: int) -> np.ndarray:
    """A layer's steps of `ROWS` rows: layer, plane, rows, code bits, gain, gain per word, whether it may end."""
    starts = np.arange(0, len(gains), ROWS)
    rows = np.diff(np.append(starts, len(gains)))
    mean = falling(np.add.reduceat(gains, starts, axis=0) / rows[:, None])
    mean = np.minimum.accumulate(falling(mean.T, rows).T, axis=1).clip(
        min=0
    )  # [groups of rows, planes 2 to 8]
    plane = np.broadcast_to(np.arange(2, BITS + 1), mean.shape)
    size = np.broadcast_to(rows[:, None], mean.shape)
    return np.stack([
        np.full(mean.size, number), plane.T.ravel(), size.T.ravel(), (size * columns).T.ravel(),
        (mean * size).T.ravel(), mean.T.ravel() / plane_words(columns), np.ones(mean.size),
    ])  # fmt: skip


def _whole_steps(
    unit: Sequence[str],
    numbers: Mapping[str, int],
    gains: Mapping[str, np.ndarray],
    columns: Mapping[str, int],
) -> np.ndarray:
    """The same of layers that step together, all rows at once."""
    words = {name: len(gains[name]) * plane_words(columns[name]) for name in unit}
    size, steps = sum(words.values()), []
    gain = falling(np.sum([gains[name].sum(0) for name in unit], axis=0)[None])[0].clip(min=0)
    for plane, of in enumerate(gain, 2):
        for name in unit:
            rows, share = len(gains[name]), of * words[name] / size
            bits = rows * columns[name]
            steps.append((numbers[name], plane, rows, bits, share, of / size, name == unit[-1]))
    return np.array(steps).T


def plane_words(columns: int) -> int:
    """Words of 32 bits that a plane of a row takes."""
    return -(-columns // 32)


def at_average(
    layouts: Mapping[str, LayerLayout], losses: Mapping[str, Tensor], bits: float, whole: bool
) -> dict[str, LayerLayout]:
    """The layouts of nested layers at an average width of all of them, by their `losses` (see `order`)."""
    steps = order(losses, coded_columns(layouts), whole)
    return {name: with_counts(layouts[name], n) for name, n in steps.counts(steps.upto(bits)).items()}


def coded_columns(layouts: Mapping[str, LayerLayout]) -> dict[str, int]:
    """How many input channels of the nested layers have codes."""
    return {name: tile.coded(layouts[name].shape[1]) for name, tile in nested_layers(layouts).items()}


def falling(values: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """The rows of numbers [n, k] that do not rise and are closest: neighbours that rise share their mean.

    `weights` [k] are those of the columns; alike by default.
    """
    made = values.copy()
    counts = np.ones(values.shape[1]) if weights is None else weights.astype(np.float64)
    for i in np.flatnonzero((np.diff(values, axis=1) > 0).any(1)):
        pools: list[tuple[float, float, int]] = []  # mean, weight, columns
        for value, weight in zip(values[i], counts):
            pools.append((float(value), float(weight), 1))
            while len(pools) > 1 and pools[-1][0] > pools[-2][0]:
                (a, m, j), (b, n, k) = pools.pop(), pools.pop()
                pools.append(((a * m + b * n) / (m + n), m + n, j + k))
        made[i] = np.repeat([mean for mean, *_ in pools], [size for *_, size in pools])
    return made


def level_widths(bits: float) -> list[float]:
    """Average widths, over all matrices, of the base layer and the enhancement layers of an artifact up to `bits`."""
    count = math.ceil(round((bits - BASE_BITS) / STEP, 6))
    return [min(bits, BASE_BITS + STEP * i) for i in range(max(0, count) + 1)]


def overhead_bytes(bits: float, layouts: Mapping[str, LayerLayout]) -> int:
    """At most what an artifact of up to `bits` takes beyond the planes of `layouts`, where all layers have that width.

    The files of enhancement layers have headers, steps and entries of the index; and a layer whose rows are padded to
    words more than others' may get more of the width.
    """
    columns = coded_columns(layouts)
    files = file_bytes(bits, len(columns))
    if bits >= BITS:  # every row has every plane
        return files
    weights = {name: layouts[name].shape[0] * n for name, n in columns.items()}
    padded = {name: 32 * plane_words(n) / n for name, n in columns.items()}
    usual = sum(weights[name] * padded[name] for name in columns)
    left, most = (bits - 1) * sum(weights.values()), usual  # one plane of every row, then those padded most
    for name in sorted(columns, key=lambda name: -padded[name]):
        taken = min(left, (BITS - 1) * weights[name])
        left, most = left - taken, most + taken * padded[name]
    return files + math.ceil((most - bits * usual) / 8)


def most_bits(
    bits: float, layouts: Mapping[str, LayerLayout], embeddings: Mapping[str, LayerLayout]
) -> float:
    """The largest average width over all nested matrices where that of the layers is `bits`."""
    of_layers, others = (
        sum(group[name].shape[0] * n for name, n in coded_columns(group).items())
        for group in (layouts, embeddings)
    )
    return (bits * of_layers + BITS * others) / (of_layers + others)


def file_bytes(bits: float, layers: int) -> int:
    """At most what files of enhancement layers up to `bits` have besides planes, of so many matrices."""
    return (len(level_widths(bits)) - 1) * (700 + 12 * 3 * layers)


def plane_bytes(layouts: Mapping[str, LayerLayout]) -> int:
    """Of all planes of nested layers."""
    columns, tiles = coded_columns(layouts), nested_layers(layouts)
    return sum(4 * plane_words(n) * sum(tiles[name].counts) for name, n in columns.items())


def expected_saving(layouts: Mapping[str, LayerLayout]) -> int:
    """About what coding the planes of nested layers takes off their bytes; rather too little."""
    columns, tiles = coded_columns(layouts), nested_layers(layouts)
    saved = (
        4 * plane_words(n) * rows * (1 - SHARES.get(plane, 1))
        for name, n in columns.items()
        for plane, rows in enumerate(tiles[name].counts, 1)
    )
    return int(sum(saved))


def with_all_planes(layouts: Mapping[str, LayerLayout]) -> dict[str, LayerLayout]:
    """Nested layouts with every plane of every row."""
    nested = nested_layers(layouts)
    return {
        name: with_counts(layout, [layout.shape[0]] * BITS) if name in nested else layout
        for name, layout in layouts.items()
    }


def with_counts(layout: LayerLayout, counts: Sequence[int]) -> LayerLayout:
    """The layout of a nested layer with so many rows of every plane."""
    (tile,) = layout.tiles
    assert isinstance(tile, NestedLayout)
    return replace(layout, tiles=(tile.with_counts(counts),))


def plane_rows(steps: Counts, before: Counts) -> Iterator[tuple[str, int, int, int]]:
    """(layer, plane, first, last) of the rows that planes gain between two prefixes, layer by layer."""
    for name, counts in steps.items():
        had = [*before[name], *[0] * BITS]
        for plane, last in enumerate(counts, 1):
            if last > had[plane - 1]:
                yield name, plane, had[plane - 1], last


def nested_layers(layouts: Mapping[str, LayerLayout]) -> dict[str, NestedLayout]:
    """The nested layers by name, in the order in which files of enhancement layers number them."""
    tiles = {name: layouts[name].tiles[0] for name in sorted(layouts)}
    return {name: tile for name, tile in tiles.items() if isinstance(tile, NestedLayout)}
