"""Reading enhancement layers: the base layer, and any first ones of the files that its index lists.

Who decides on them: `methods.ordering`; who writes them: `split`; the bytes: docs/formats.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from anybit.artifact.coded_planes import PlaneReader, PlaneRows, unpack_shapes
from anybit.artifact.config_json import StoredLayers
from anybit.artifact.entry import Entry
from anybit.artifact.files import EMBEDDING, PLANES, SECTION, link, list_hash
from anybit.artifact.filled import Filled
from anybit.checkpoint.files import HASHES, INDEX, INDEX_LIMIT, check_sha256, is_name_of_file, read_json
from anybit.checkpoint.safetensors import SafeTensor, read_safetensors_header
from anybit.config import Json
from anybit.errors import InputError
from anybit.formats.dtypes import Dtype
from anybit.formats.layout import LayerLayout
from anybit.formats.levels import Level
from anybit.formats.nested import CODED_PLANES
from anybit.formats.validate import check_version
from anybit.methods.ordering import (
    BITS,
    Counts,
    coded_columns,
    nested_layers,
    plane_rows,
    plane_words,
    with_counts,
)
from anybit.progress import Advance, ignore

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Enhancements:
    """The enhancement layers of an artifact: those that its index lists, of which the first `present` are there."""

    path: Path
    layouts: Mapping[str, LayerLayout]  # of all layers, and of embeddings, as the base layer has them
    beside: Collection[str]  # those of them that do not count for the average width: embeddings
    base: Mapping[str, str]  # the hashes of its shards and of what says which tensor is where
    entries: tuple[Entry, ...]  # the base layer first
    present: int  # how many entries can be read: the base layer counts

    @staticmethod
    def open(path: Path, stored: StoredLayers, index: Json) -> Enhancements:
        """The enhancement layers that anybit.index.json lists.

        Raises:
            InputError: entries of another kind, or whose running hashes do not follow from one another: the list was
                edited or reordered.
        """
        stated = f"{path}: the list of enhancement layers in anybit.index.json is damaged"
        try:
            files = index["files"]
            entries = [
                Entry(
                    str(entry["file"]),
                    int(files[entry["file"]]["bytes"]) if entry["file"] else 0,
                    str(files[entry["file"]]["sha256"]) if entry["file"] else "",
                    float(entry["bits"]),
                    float(entry["loss"]),
                    str(entry["chain"]),
                    int(entry.get(PLANES, files[entry["file"]]["bytes"] if entry["file"] else 0)),
                    int(entry.get(EMBEDDING, 0)),
                )
                for entry in index[SECTION]
            ]
            names = {entry.file for entry in entries}
            shards = sorted(name for name in files if name.endswith(SUFFIX) and name not in names)
            base = {name: str(files[name]["sha256"]) for name in shards}
            weight_map = str(files[INDEX]["sha256"])
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(stated) from error
        finite = all(
            0 < r.bits <= BITS + 1e-9
            and math.isfinite(r.loss)
            and min(r.bytes, r.plane_bytes, r.embedding_bytes) >= 0
            for r in entries
        )
        if not entries or not finite or entries[0].file or not all(r.file for r in entries[1:]):
            raise InputError(stated)
        if functools.reduce(link, base.values(), "") != entries[0].chain:
            raise InputError(
                f"{path}: anybit.index.json lists other shards than the base layer was made of: copy it again"
            )
        for before, entry in pairwise(entries):
            if entry.bits < before.bits:
                raise InputError(stated)
            own = is_name_of_file(entry.file) and "/" not in entry.file
            if not own or entry.chain != link(before.chain, entry.sha256):
                raise InputError(
                    f"{path}: anybit.index.json lists {entry.file!r} where it does not belong (the running hash "
                    "differs): enhancement layers were reordered or the list was edited; copy the artifact again"
                )
        present = 1
        while present < len(entries) and entries[present].is_there(path, entries[present - 1].chain):
            present += 1
        hashes = {**base, INDEX: weight_map}
        layouts = {name: layout.expanded() for name, layout in stored.packed.items()}
        return Enhancements(path, layouts, stored.embeddings.keys(), hashes, tuple(entries), present)

    def note(self) -> str | None:
        """A sentence where enhancement layers are missing."""
        if self.present == len(self.entries):
            return None
        missing, last = self.entries[self.present].file, self.entries[self.present - 1]
        return (
            f"{self.path} has {self.present - 1} of {len(self.entries) - 1} enhancement layers ({missing} is missing "
            f"or not complete): it runs at up to {last.bits:.2f} bits"
        )

    def bytes_upto(self, level: int) -> int:
        """Bytes of the files up to a level."""
        return sum(entry.bytes for entry in self.entries[1 : level + 1])

    def plane_bytes_upto(self, level: int) -> int:
        """Bytes that their planes take in memory."""
        return sum(entry.plane_bytes for entry in self.entries[1 : level + 1])

    def embedding_bytes_upto(self, level: int) -> int:
        """Those of them that are planes of embeddings."""
        return sum(entry.embedding_bytes for entry in self.entries[1 : level + 1])

    def layer_file_bytes_upto(self, level: int) -> float:
        """Bytes of the files up to a level, but for the share that planes of embeddings have of them."""
        shares = (
            (e.bytes, 1 - e.embedding_bytes / e.plane_bytes if e.plane_bytes else 1.0) for e in self.entries
        )
        return sum(taken * share for taken, share in list(shares)[1 : level + 1])

    def counts(self, upto: int, check: bool = True, threads: int = 1) -> list[dict[str, tuple[int, ...]]]:
        """Rows of every plane of every layer at levels 0 to `upto`; the files' bytes are held against their hashes.

        Args:
            upto: the last level.
            check: False leaves the hashes out, which would read all of the files.
            threads: that hold files against them.

        Raises:
            InputError: a file that is damaged or does not fit the layers.
        """
        tiles = nested_layers(self.layouts)
        names, widths = list(tiles), [self._words(name) for name in tiles]
        now = np.zeros((len(names), BITS), np.int64)
        for i, tile in enumerate(tiles.values()):
            now[i, : len(tile.counts)] = tile.counts
        made = [_named_counts(names, now)]
        beside = np.array([name in self.beside for name in names], dtype=bool)
        columns = np.array(list(coded_columns(self.layouts).values())) * ~beside
        embedding = 4 * np.array(widths) * beside

        def is_as_stated(level: int, words: int, added: int) -> bool:
            entry, average = self.entries[level], now.sum(1) @ columns / max(1, now[:, 0] @ columns)
            sized = entry.plane_bytes in (4 * words, entry.bytes)  # the latter where the list does not say
            return abs(average - entry.bits) <= 1e-6 and added == entry.embedding_bytes and sized

        if not is_as_stated(0, words=0, added=0):
            raise InputError(
                f"{self.path}: anybit.index.json states another width of the base layer: copy it again"
            )
        if check:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(self._check_hash, range(1, upto + 1)))
        for level in range(1, upto + 1):
            found, words, plain, added, before = self._read(level), 0, 0, 0, (-1, 0)
            for layer, plane, rows in found["steps"].array().tolist():
                if not (0 <= layer < len(names) and 2 <= plane <= BITS and rows > 0):
                    raise self._damaged(level, "names a layer or plane that there is not")
                if (layer, plane) <= before:
                    raise self._damaged(level, "has steps out of order")
                before = (layer, plane)
                now[layer, plane - 1] += rows
                words += rows * widths[layer]
                plain += 0 if "coded" in found and plane in CODED_PLANES else rows * widths[layer]
                added += int(rows * embedding[layer])
            if (np.diff(now, axis=1) > 0).any():
                raise self._damaged(level, "makes planes longer than those before them")
            if (held := found["words"].shape[0]) != plain:
                raise self._damaged(level, f"holds {held} words, its steps need {plain}")
            if not is_as_stated(level, words, added):
                raise self._damaged(level, "leads to another width than anybit.index.json states")
            made.append(_named_counts(names, now))
        return made

    def read_all(
        self,
        counts: Sequence[Counts],
        arrays: Mapping[str, Mapping[str, np.ndarray]],
        threads: int,
        advance: Advance = ignore,
    ) -> None:
        """Fill what all enhancement layers add that `counts` has read, several of them at a time.

        Args:
            counts: rows of every plane at level 0 and those that follow.
            arrays: by layer, the stored arrays at the last of these levels; the planes of the base layer are there.
            threads: how many.
            advance: is told of every layer.

        Raises:
            InputError: see `read_into`.
        """
        filled, shapes = Filled(counts[0]), _Shapes(arrays)

        def read(level: int) -> None:
            with filled.failing():
                self._read_into(level, plane_rows(counts[level], counts[level - 1]), arrays, shapes, filled)

        with ThreadPoolExecutor(max(1, threads)) as pool:
            made = [pool.submit(read, level) for level in range(1, len(counts))]
            for one in made:  # the first that failed says why
                one.result()
                advance(1)

    def read_into(
        self,
        level: int,
        counts: Counts,
        before: Counts,
        arrays: Mapping[str, Mapping[str, np.ndarray]],
    ) -> None:
        """Fill the rows that an enhancement layer adds, which `counts` has read; those before it are there.

        Args:
            level: its number.
            counts: rows of every plane with it.
            before: without it.
            arrays: by layer, the stored arrays of at least these rows.

        Raises:
            InputError: coded planes that are damaged.
        """
        self._read_into(level, plane_rows(counts, before), arrays, _Shapes(arrays))

    def _read_into(
        self,
        level: int,
        steps: Iterable[tuple[str, int, int, int]],
        arrays: Mapping[str, Mapping[str, np.ndarray]],
        shapes: Mapping[str, np.ndarray],
        filled: Filled | None = None,
    ) -> None:
        """`read_into`; `filled` says which rows of other enhancement layers are there, while these are read."""
        found, at = {name: tensor.array() for name, tensor in self._read(level).items()}, 0
        reader = (
            PlaneReader(found["coded"], str(self.path / self.entries[level].file))
            if "coded" in found
            else None
        )
        for name, plane, first, last in steps:
            if filled is not None and plane in CODED_PLANES:  # coded in this file or not: see `Filled`
                filled.wait(name, plane - 1, last)
            of, rows = arrays[name], slice(first, last)
            to = of[f"plane_{plane}"][rows]
            if reader is not None and plane in CODED_PLANES:
                above = [of[f"plane_{p}"][rows] for p in range(1, plane)]
                reader.read(PlaneRows(plane, above, shapes[name][rows], self._columns(name)), to)
            else:
                to[:] = found["words"][at : at + to.size].reshape(to.shape)
                at += to.size
            if filled is not None and plane + 1 in CODED_PLANES:  # which are read by the rows above them
                filled.add(name, plane, first, last)
        if reader is not None:
            reader.finish()

    def layouts_at(self, counts: Counts) -> dict[str, LayerLayout]:
        """All layers with so many rows of every plane."""
        refined = {name: with_counts(self.layouts[name], rows) for name, rows in counts.items()}
        return {**self.layouts, **refined}

    def check_base(self) -> None:
        """Hold the bytes of the base layer's shards and of their index against their hashes.

        Raises:
            InputError: they differ, or one is missing.
        """
        for file, sha256 in self.base.items():
            check_sha256(self.path / file, sha256)

    def _check_hash(self, level: int) -> None:
        check_sha256(self.path / self.entries[level].file, self.entries[level].sha256)

    def _words(self, name: str) -> int:
        """32-bit words of a row of a layer's plane."""
        return plane_words(self._columns(name))

    def _columns(self, name: str) -> int:
        """Input channels of a layer that have codes."""
        layout = self.layouts[name]
        return layout.tiles[0].coded(layout.shape[1])

    def _read(self, level: int) -> dict[str, SafeTensor]:
        """`steps` int32 [n, 3] (number of the layer, plane, rows), `words` and, where planes are coded, `coded`."""
        path = self.path / self.entries[level].file
        header = read_safetensors_header(path)
        kinds = {"steps": (Dtype.I32, 2), "words": (Dtype.U32, 1)}
        kinds |= {"coded": (Dtype.U8, 1)} if "coded" in header else {}
        for name, (dtype, dims) in kinds.items():
            found = header.get(name)
            if found is None or found.dtype != dtype or len(found.shape) != dims:
                raise self._damaged(level, f"has no {name} of the type {dtype}")
        if header["steps"].shape[1] != 3:
            raise self._damaged(level, "has steps of another kind")
        return {name: header[name] for name in kinds}

    def _damaged(self, level: int, what: str) -> InputError:
        return InputError(f"{self.path / self.entries[level].file} {what}: copy it again")


class _Shapes(dict[str, np.ndarray]):
    """The shapes of all rows of each matrix, which several threads may ask for."""

    def __init__(self, arrays: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        super().__init__()
        self._arrays = arrays

    def __missing__(self, name: str) -> np.ndarray:
        made = self[name] = unpack_shapes(self._arrays[name]["shapes"])
        return made


def levels_upto(found: Enhancements, counts: Sequence[Counts]) -> tuple[Level, ...]:
    """The levels of a base layer with as many enhancement layers as `counts` has read, and itself."""
    base = sum(layout.nbytes for layout in found.layouts.values())
    return tuple(
        Level(entry.bits, base + found.plane_bytes_upto(i), entry.loss, found.layouts_at(rows))
        for i, (entry, rows) in enumerate(zip(found.entries, counts))
    )


def read_enhancements(path: Path, stated: Json | None, stored: StoredLayers) -> Enhancements | None:
    """The enhancement layers of an artifact; None for one that has none.

    Args:
        path: its folder.
        stated: what its config.json says of them.
        stored: its layers.

    Raises:
        InputError: see `Enhancements.open`; a base layer without its list, or with that of another artifact.
    """
    if stated is None:
        return None
    file = path / HASHES
    index = read_json(file, INDEX_LIMIT) if file.is_file() else {}
    if not isinstance(index.get(SECTION), list):
        raise InputError(
            f"{path} is a base layer, and anybit.index.json, which lists its enhancement layers, is missing: copy it, "
            "too"
        )
    check_version(index.get("format_version"))
    found = Enhancements.open(path, stored, index)
    if stated != {"refinements": len(found.entries) - 1, "list": list_hash(index[SECTION])}:
        raise InputError(
            f"{path}: config.json and anybit.index.json belong to different artifacts, or were edited: copy all files "
            "of one again"
        )
    return found


def _named_counts(names: Sequence[str], counts: np.ndarray) -> dict[str, tuple[int, ...]]:
    return {name: tuple(n for n in of if n) for name, of in zip(names, counts.tolist())}
