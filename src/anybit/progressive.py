"""One file, any size: all refinements of a nested model in one order, and the artifact that is cut along it.

A step gives some rows of a layer one plane more. Steps are ranked by how much loss a byte of them saves, over the whole
model (the global view of MixLLM, arXiv:2412.14590, on the nested widths of Any-Precision, arXiv:2402.10517); the model
at any average width is then a prefix of the list. The artifact is a core, an ordinary HF directory, and refinements of
`STEP` bits each, beside it in files of their own: the core and any first ones of them are a valid model.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from anybit.architectures import joined_layers
from anybit.checkpoint import file_sha256, read_json, read_safetensors_header
from anybit.errors import InputError
from anybit.formats import Nested
from anybit.tensors import check_version, stored_tensors

if TYPE_CHECKING:
    from anybit.writer import ArtifactWriter

BITS = 8  # planes of a row, at most
CORE_BITS = 2.0  # average width of the core
STEP = 0.1  # bits from one refinement to the next
ROWS = 8  # that get a plane together
SECTION = "progressive"  # of anybit.index.json
SUFFIX = ".safetensors"
MOST_HEADER = 1 << 24  # bytes of a refinement's header that are looked at
LOSSES = "losses"  # field beside a layer's tensors while the order is not known yet
Counts = Mapping[str, Sequence[int]]  # layer -> rows of every plane


@dataclass(frozen=True)
class Steps:
    """All steps after the first plane of every row, in order."""

    layers: Mapping[str, int]  # name -> rows
    layer: np.ndarray  # int64 [steps]: number of the layer whose plane a step extends
    plane: np.ndarray  # int64 [steps], 2 to 8
    rows: np.ndarray  # int64 [steps] that it adds
    code_bits: np.ndarray  # int64 [steps] that it adds
    gain: np.ndarray  # float64 [steps]: loss that it takes away
    whole: np.ndarray  # bool [steps]: whether a prefix may end with it
    loss: float  # before the first
    weights: int  # that have codes

    def upto(self, bits: float) -> int:
        """How many steps an average width has room for."""
        room = (bits - 1) * self.weights * (1 + 1e-12)
        fitting = np.searchsorted(self.code_bits.cumsum(), room, "right")
        ends = np.flatnonzero(self.whole[:fitting])
        return int(ends[-1]) + 1 if len(ends) else 0

    def bits(self, steps: int) -> float:
        """The average width after so many."""
        return 1 + float(self.code_bits[:steps].sum()) / self.weights

    def loss_after(self, steps: int) -> float:
        return self.loss - float(self.gain[:steps].sum())

    def counts(self, steps: int) -> dict[str, tuple[int, ...]]:
        """Rows of every plane of every layer after so many, the planes of no rows left out."""
        at = self.layer[:steps] * BITS + self.plane[:steps] - 1
        rows = np.bincount(at, weights=self.rows[:steps], minlength=len(self.layers) * BITS).astype(np.int64)
        rows = rows.reshape(-1, BITS)
        rows[:, 0] = list(self.layers.values())
        return {name: tuple(n for n in of.tolist() if n) for name, of in zip(self.layers, rows)}


def order(losses: Mapping[str, Tensor], columns: Mapping[str, int], whole: bool = False) -> Steps:
    """All steps by falling gain per byte.

    Gains are made to fall along a layer's rows and from plane to plane first (neighbours that do not are pooled, which
    is the convex hull of the loss), so that every prefix gives each plane of a layer its first rows, and no plane more
    of them than the one before. Ties keep the order of layers, planes and rows.

    Args:
        losses: of every layer, float [r, 8]: what every stored row costs at widths 1 to 8.
        columns: how many input channels of every layer have codes.
        whole: planes are given to all rows at once of all layers that engines join, for kernels of one width.
    """
    numbers = {name: i for i, name in enumerate(losses)}
    gains = {name: -np.diff(loss.double().numpy(), axis=1) for name, loss in losses.items()}
    if whole:
        units = joined_layers(losses)
        parts = [_whole_steps(unit, numbers, gains, columns) for unit in units]
    else:
        parts = [_row_steps(numbers[name], of, columns[name]) for name, of in gains.items()]
    layer, plane, rows, bits, gain, density, ends = np.concatenate(parts, axis=1)
    first = np.argsort(-density, kind="stable")
    return Steps(
        layers={name: len(loss) for name, loss in losses.items()},
        layer=layer[first].astype(np.int64),
        plane=plane[first].astype(np.int64),
        rows=rows[first].astype(np.int64),
        code_bits=bits[first].astype(np.int64),
        gain=gain[first],
        whole=ends[first].astype(bool),
        loss=float(sum(loss[:, 0].double().sum() for loss in losses.values())),
        weights=sum(len(loss) * columns[name] for name, loss in losses.items()),
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
    layouts: Mapping[str, dict[str, Any]], losses: Mapping[str, Tensor], bits: float, whole: bool
) -> dict[str, dict[str, Any]]:
    """The layouts of nested layers at an average width of all of them, by their `losses` (see `order`)."""
    steps = order(losses, _coded_columns(layouts), whole)
    return {name: with_counts(layouts[name], n) for name, n in steps.counts(steps.upto(bits)).items()}


def _coded_columns(layouts: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """How many input channels of nested layers have codes."""
    return {name: x["shape"][1] - x["tiles"][0]["kept"] for name, x in layouts.items()}


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


def ladder(bits: float) -> list[float]:
    """Average widths of the core and the refinements of an artifact that goes up to `bits`."""
    count = math.ceil(round((bits - CORE_BITS) / STEP, 6))
    return [min(bits, CORE_BITS + STEP * i) for i in range(max(0, count) + 1)]


def overhead_bytes(bits: float, layouts: Mapping[str, Mapping[str, Any]]) -> int:
    """At most what an artifact of up to `bits` takes beyond the planes of `layouts`, where all layers have that width.

    The files of refinements have headers, steps and entries of the index; and a layer whose rows are padded to words
    more than others' may get more of the width.
    """
    files = (len(ladder(bits)) - 1) * (600 + 12 * 3 * len(layouts))
    if bits >= BITS:  # every row has every plane
        return files
    columns = _coded_columns(layouts)
    weights = {name: layouts[name]["shape"][0] * columns[name] for name in layouts}
    padded = {name: 32 * plane_words(columns[name]) / columns[name] for name in layouts}
    usual = sum(weights[name] * padded[name] for name in layouts)
    return files + math.ceil(bits * (sum(weights.values()) * max(padded.values()) - usual) / 8)


def with_all_planes(layouts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Nested layouts with every plane of every row."""
    return {
        name: with_counts(x, [x["shape"][0]] * BITS) if is_nested(x) else dict(x)
        for name, x in layouts.items()
    }


def refinement_file(number: int, count: int) -> str:
    """Name of a refinement's file, counted from 1."""
    return f"refine-{number:05d}-of-{count:05d}.safetensors"


def with_counts(layout: Mapping[str, Any], counts: Sequence[int]) -> dict[str, Any]:
    """The layout of a nested layer with so many rows of every plane."""
    tile = Nested.description(counts, layout["tiles"][0]["kept"])
    return {**layout, "tiles": [tile]}


def is_nested(layout: Mapping[str, Any]) -> bool:
    return layout["tiles"][0]["format"] == Nested.NAME


def plane_rows(steps: Counts, before: Counts) -> Iterator[tuple[str, int, int, int]]:
    """(layer, plane, first, last) of the rows that planes gain between two prefixes, layer by layer."""
    for name, counts in steps.items():
        had = [*before[name], *[0] * BITS]
        for plane, last in enumerate(counts, 1):
            if last > had[plane - 1]:
                yield name, plane, had[plane - 1], last


def link(chain: str, sha256: str) -> str:
    """The running hash after a file: it vouches for all files before, in their order."""
    return hashlib.sha256((chain + sha256).encode()).hexdigest()


# ---- reading --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rung:
    """The core, or a refinement: what the model is once it is there."""

    file: str  # "" for the core
    bytes: int
    sha256: str
    bits: float  # average width
    loss: float  # expected increase of the loss in nats per token
    chain: str

    def is_there(self, path: Path, before: str) -> bool:
        """Whether the file is in `path`; one that is shorter than it should be is still under way.

        Args:
            path: folder.
            before: the running hash of the rung before, which the file names.

        Raises:
            InputError: another file under this name.
        """
        file = path / self.file
        if not file.is_file():
            return False
        size = file.stat().st_size
        if size > self.bytes or (size < self.bytes and _says_after(file) not in (None, before)):
            raise InputError(
                f"{file} is not what anybit.index.json lists under this name: refinements were exchanged; copy it again"
            )
        return size == self.bytes


def _says_after(file: Path) -> str | None:
    """The running hash that a refinement's file says it follows; None where that part is not there yet."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = stream.read(min(length, MOST_HEADER))
    try:
        return json.loads(header)["__metadata__"]["after"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


@dataclass(frozen=True)
class Progressive:
    """The refinements of an artifact: those that its index lists, of which the first `present` are there."""

    path: Path
    layouts: Mapping[str, dict[str, Any]]  # of all layers as the core has them
    core: Mapping[str, str]  # its shards' hashes
    rungs: tuple[Rung, ...]  # the core first
    present: int  # how many rungs can be read: the core counts

    @staticmethod
    def open(path: Path, layouts: Mapping[str, dict[str, Any]], index: Mapping[str, Any]) -> Progressive:
        """The refinements that anybit.index.json lists.

        Raises:
            InputError: entries of another kind, or whose running hashes do not follow from one another: the list was
                edited or reordered.
        """
        stated = f"{path}: the list of refinements in anybit.index.json is damaged"
        try:
            files = index["files"]
            rungs = [
                Rung(
                    str(entry["file"]),
                    int(files[entry["file"]]["bytes"]) if entry["file"] else 0,
                    str(files[entry["file"]]["sha256"]) if entry["file"] else "",
                    float(entry["bits"]),
                    float(entry["loss"]),
                    str(entry["chain"]),
                )
                for entry in index[SECTION]
            ]
            names = {rung.file for rung in rungs}
            shards = sorted(name for name in files if name.endswith(SUFFIX) and name not in names)
            core = {name: str(files[name]["sha256"]) for name in shards}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(stated) from error
        finite = all(0 < r.bits <= BITS + 1e-9 and math.isfinite(r.loss) and r.bytes >= 0 for r in rungs)
        if not rungs or not finite or rungs[0].file or not all(r.file for r in rungs[1:]):
            raise InputError(stated)
        if functools.reduce(link, core.values(), "") != rungs[0].chain:
            raise InputError(
                f"{path}: anybit.index.json lists other shards than the core was made of: copy it again"
            )
        for before, rung in pairwise(rungs):
            if rung.bits < before.bits:
                raise InputError(stated)
            if Path(rung.file).name != rung.file or rung.chain != link(before.chain, rung.sha256):
                raise InputError(
                    f"{path}: anybit.index.json lists {rung.file!r} where it does not belong (the running hash "
                    "differs): refinements were reordered or the list was edited; copy the artifact again"
                )
        present = 1
        while present < len(rungs) and rungs[present].is_there(path, rungs[present - 1].chain):
            present += 1
        return Progressive(path, layouts, core, tuple(rungs), present)

    def note(self) -> str | None:
        """A sentence where refinements are missing."""
        if self.present == len(self.rungs):
            return None
        return (
            f"{self.path} has {self.present - 1} of {len(self.rungs) - 1} refinements ({self.rungs[self.present].file} "
            f"is missing or not complete): it runs at up to {self.rungs[self.present - 1].bits:.2f} bits"
        )

    def upto_bits(self, bits: float) -> int:
        """The last rung of at most so many bits, from 0.

        Raises:
            InputError: fewer bits than the core has, or more than there are.
        """
        low, high = self.rungs[0].bits, self.rungs[self.present - 1].bits
        if not round(low, 2) - 0.005 <= bits <= self.rungs[-1].bits + STEP / 2:
            raise InputError(
                f"{self.path} has average widths from {low:.2f} to {self.rungs[-1].bits:.2f} bits, not {bits:g}"
            )
        if bits > high + STEP / 2:
            raise InputError(f"{self.note()}; {bits:g} bits need more")
        return max(i for i, r in enumerate(self.rungs[: self.present]) if i == 0 or r.bits <= bits + 1e-6)

    def upto_bytes(self, least: int, budget: float, asked: str, needs: str) -> int:
        """The last rung whose files fit a budget of bytes, `least` being what the core takes (in words: `needs`).

        Raises:
            InputError: a budget that the core does not fit.
        """
        if not budget >= least:  # nor is NaN
            raise InputError(
                f"{asked} is not to be had: the core of {self.path}, {self.rungs[0].bits:.2f} bits, takes {needs}"
            )
        taken, found = least, 0
        for i, rung in enumerate(self.rungs[1 : self.present], 1):
            taken += rung.bytes
            if taken > budget:
                break
            found = i
        return found

    def bytes_upto(self, rung: int) -> int:
        """Bytes of the refinements up to a rung."""
        return sum(r.bytes for r in self.rungs[1 : rung + 1])

    def counts(self, upto: int, check: bool = True) -> list[dict[str, tuple[int, ...]]]:
        """Rows of every plane of every layer at rungs 0 to `upto`; the files' bytes are held against their hashes.

        Args:
            upto: the last rung.
            check: False leaves the hashes out, which would read all of the files.

        Raises:
            InputError: a file that is damaged or does not fit the layers.
        """
        names = nested_names(self.layouts)
        widths = [stored_tensors(self.layouts[name])["plane_1"][1][1] for name in names]
        now = np.zeros((len(names), BITS), np.int64)
        for i, name in enumerate(names):
            counts = self.layouts[name]["tiles"][0]["counts"]
            now[i, : len(counts)] = counts
        made = [_named_counts(names, now)]
        coded = _coded_columns({name: self.layouts[name] for name in names})
        columns = np.array([coded[name] for name in names])
        if abs(now.sum(1) @ columns / (now[:, 0] @ columns) - self.rungs[0].bits) > 1e-6:
            raise InputError(
                f"{self.path}: anybit.index.json states another width of the core: copy it again"
            )
        for rung in range(1, upto + 1):
            if check:
                self.check_file(rung)
            found, words, before = self._read(rung), 0, (-1, 0)
            for layer, plane, rows in found["steps"].tolist():
                if not (0 <= layer < len(names) and 2 <= plane <= BITS and rows > 0):
                    raise self._damaged(rung, "names a layer or plane that there is not")
                if (layer, plane) <= before:
                    raise self._damaged(rung, "has steps out of order")
                before = (layer, plane)
                now[layer, plane - 1] += rows
                words += rows * widths[layer]
            if (np.diff(now, axis=1) > 0).any():
                raise self._damaged(rung, "makes planes longer than those before them")
            if words != len(found["words"]):
                raise self._damaged(rung, f"holds {len(found['words'])} words, its steps need {words}")
            if abs(now.sum(1) @ columns / (now[:, 0] @ columns) - self.rungs[rung].bits) > 1e-6:
                raise self._damaged(rung, "leads to another width than anybit.index.json states")
            made.append(_named_counts(names, now))
        return made

    def planes(self, rung: int, counts: Counts, before: Counts) -> Iterator[tuple[str, int, int, Tensor]]:
        """(layer, plane, first row, words uint32 [rows, words]) of a refinement that `counts` has read."""
        words, at = self._read(rung)["words"], 0
        for name, plane, first, last in plane_rows(counts, before):
            width = stored_tensors(self.layouts[name])["plane_1"][1][1]
            size = (last - first) * width
            yield name, plane, first, words[at : at + size].view(last - first, width)
            at += size

    def check_core(self) -> None:
        """Hold the bytes of the core's shards against their hashes.

        Raises:
            InputError: they differ, or one is missing.
        """
        for file, sha256 in self.core.items():
            if not (self.path / file).is_file() or file_sha256(self.path / file) != sha256:
                raise InputError(
                    f"{self.path / file} does not have the bytes that were written (SHA-256 differs): copy it again"
                )

    def check_file(self, rung: int) -> None:
        """Hold a refinement's bytes against its hash.

        Raises:
            InputError: they differ.
        """
        if file_sha256(self.path / self.rungs[rung].file) != self.rungs[rung].sha256:
            raise self._damaged(rung, "does not have the bytes that were written (SHA-256 differs)")

    def _read(self, rung: int) -> dict[str, Tensor]:
        """`steps` int32 [n, 3] (number of the layer, plane, rows) and `words`, mapped from the file."""
        path = self.path / self.rungs[rung].file
        header = read_safetensors_header(path)
        kinds = {"steps": (torch.int32, 2), "words": (torch.uint32, 1)}
        for name, (dtype, dims) in kinds.items():
            found = header.get(name)
            if found is None or found.dtype != dtype or len(found.shape) != dims:
                raise self._damaged(rung, f"has no {name} of the type {dtype}")
        if header["steps"].shape[1] != 3:
            raise self._damaged(rung, "has steps of another kind")
        return load_file(path)

    def _damaged(self, rung: int, what: str) -> InputError:
        return InputError(f"{self.path / self.rungs[rung].file} {what}: copy it again")


@dataclass(frozen=True)
class Ladder:
    """The average widths that a loaded model can run at, and the planes of each."""

    bits: tuple[float, ...]
    counts: tuple[Counts, ...]

    def set_bits(self, model: nn.Module, bits: float) -> float:
        """Run at the largest width of at most so many bits; returns it.

        Raises:
            InputError: fewer bits than the least, or more than were loaded.
        """
        if not round(self.bits[0], 2) - 0.005 <= bits <= self.bits[-1] + STEP / 2:
            raise InputError(
                f"this model was loaded with average widths from {self.bits[0]:.2f} to {self.bits[-1]:.2f} bits, "
                f"not {bits:g}"
            )
        at = max(i for i, b in enumerate(self.bits) if i == 0 or b <= bits + 1e-6)
        for name, counts in self.counts[at].items():
            module = model.get_submodule(name)
            module.run_as(with_counts(module.layout, counts))  # type: ignore[operator, arg-type]
        return self.bits[at]


def refine(model: nn.Module, found: Progressive, upto: int) -> Ladder:
    """Give the layers of a loaded core the planes of the refinements up to a rung.

    Raises:
        InputError: a file that is damaged or does not fit the layers.
    """
    found.check_core()
    counts = found.counts(upto)
    grown: dict[tuple[str, int], Tensor] = {}
    for name in counts[0]:

        def keep(field: str, tensor: Tensor, name: str = name) -> None:
            grown[name, int(field.removeprefix("plane_"))] = tensor

        layout = with_counts(found.layouts[name], counts[upto][name])
        model.get_submodule(name).grow(layout, keep)  # type: ignore[operator]
    for rung in range(1, upto + 1):
        for name, plane, first, words in found.planes(rung, counts[rung], counts[rung - 1]):
            grown[name, plane][first : first + len(words)] = words.to(grown[name, plane].device)
    return Ladder(tuple(r.bits for r in found.rungs[: upto + 1]), tuple(counts))


def read_progressive(path: Path, quantization: Mapping[str, Any]) -> Progressive | None:
    """The refinements of an artifact, whose `quantization_config` it is; None for one that is not a core.

    Raises:
        InputError: see `Progressive.open`; a core without its list, or with that of another artifact.
    """
    core = quantization.get(SECTION)
    if core is None:
        return None
    file = path / "anybit.index.json"
    index = read_json(file) if file.is_file() else {}
    if not isinstance(index.get(SECTION), list):
        raise InputError(
            f"{path} is a core, and anybit.index.json, which lists its refinements, is missing: copy it, too"
        )
    check_version(index.get("format_version"))
    found = Progressive.open(path, quantization["layers"], index)
    if core != {"refinements": len(found.rungs) - 1, "chain": found.rungs[0].chain}:
        raise InputError(
            f"{path}: config.json and anybit.index.json belong to different artifacts: copy all files of one again"
        )
    return found


def nested_names(layouts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The layers that refinements number, by name."""
    return sorted(name for name, layout in layouts.items() if is_nested(layout))


def _named_counts(names: Sequence[str], counts: np.ndarray) -> dict[str, tuple[int, ...]]:
    return {name: tuple(n for n in of if n) for name, of in zip(names, counts.tolist())}


# ---- writing --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """An artifact that was cut into core and refinements."""

    layouts: dict[str, dict[str, Any]]  # of all layers as the core has them
    files: dict[str, dict[str, Any]]  # `bytes` and `sha256` of every refinement's file
    section: dict[str, Any]  # of anybit.index.json
    core: dict[str, Any]  # what config.json says of it
    bits: float  # average width with all refinements

    @property
    def file_bytes(self) -> int:
        """Of all refinements."""
        return sum(entry["bytes"] for entry in self.files.values())


def cut(writer: ArtifactWriter, layouts: Mapping[str, dict[str, Any]], bits: float, whole: bool) -> Cut:
    """Write what a run has made, all planes of all rows, again as a core and refinements up to `bits` on average.

    Args:
        writer: all of whose shards are finished, with the losses of every nested layer.
        layouts: of all layers; of nested ones only the kept channels matter.
        bits: average width, at least `CORE_BITS`.
        whole: see `order`.
    """
    names = nested_names(layouts)
    shard_of, losses = {}, {}
    for shard in range(writer.shards):
        for name, tensor in writer.read_field(shard, LOSSES).items():
            shard_of[name], losses[name] = shard, tensor
    steps = order(
        {name: losses[name] for name in names}, _coded_columns({n: layouts[n] for n in names}), whole
    )
    ends = list(dict.fromkeys(steps.upto(rung) for rung in ladder(bits)))  # whole layers may skip some
    counts = [steps.counts(end) for end in ends]
    core = {n: with_counts(x, counts[0][n]) if n in counts[0] else x for n, x in layouts.items()}
    writer.begin_cut()
    chain = ""
    for shard in range(writer.shards):
        tensors = writer.read_whole(shard)
        for name in (name for name in names if shard_of[name] == shard):
            tensors = _core_tensors(name, core[name], tensors)
        chain = link(chain, writer.write_cut(writer.file(shard), tensors)["sha256"])
    section = [{"file": "", "bits": steps.bits(ends[0]), "loss": steps.loss_after(ends[0]), "chain": chain}]
    files: dict[str, dict[str, Any]] = {}
    for i in range(1, len(ends)):
        file = refinement_file(i, len(ends) - 1)
        tensors = _refinement(writer, names, shard_of, list(plane_rows(counts[i], counts[i - 1])))
        files[file] = writer.write_cut(file, tensors, {"after": chain})
        chain = link(chain, files[file]["sha256"])
        rung = {"bits": steps.bits(ends[i]), "loss": steps.loss_after(ends[i])}
        section.append({"file": file, **rung, "chain": chain})
    stated = {SECTION: {"refinements": len(files), "chain": section[0]["chain"]}}
    return Cut(core, files, {SECTION: section}, stated, steps.bits(ends[-1]))


def _core_tensors(name: str, layout: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a shard with those of a layer cut to its layout in the core."""
    own = {f"{name}.{LOSSES}", *(f"{name}.plane_{p}" for p in range(1, BITS + 1))}
    made = {field: tensor for field, tensor in tensors.items() if field not in own}
    for field, (_, shape) in stored_tensors(layout).items():
        made[f"{name}.{field}"] = tensors[f"{name}.{field}"][: shape[0]]
    return made


def _refinement(
    writer: ArtifactWriter,
    names: Sequence[str],
    shard_of: Mapping[str, int],
    added: Sequence[tuple[str, int, int, int]],  # layer, plane, first and last row
) -> dict[str, Tensor]:
    """The tensors of a refinement's file: `steps` int32 [n, 3] (number of the layer, plane, rows), `words` uint32."""
    words: dict[tuple[str, int], Tensor] = {}
    for shard in sorted({shard_of[name] for name, *_ in added}):
        here = {(n, p): (first, last) for n, p, first, last in added if shard_of[n] == shard}
        found = writer.read_rows(shard, {f"{n}.plane_{p}": rows for (n, p), rows in here.items()})
        words |= {(n, p): found[f"{n}.plane_{p}"].view(torch.int32).flatten() for n, p in here}
    numbers = {name: i for i, name in enumerate(names)}
    steps = [(numbers[name], plane, last - first) for name, plane, first, last in added]
    joined = torch.cat([words[n, p] for n, p, *_ in added]) if added else torch.zeros(0, dtype=torch.int32)
    return {"steps": torch.tensor(steps, dtype=torch.int32).view(-1, 3), "words": joined.view(torch.uint32)}
