"""Reading a progressive artifact: the core, and any first ones of the refinements that its index lists.

What they are and who writes them: `progressive`; the bytes: docs/formats.md.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from anybit.artifact.files import SECTION, link, list_hash
from anybit.checkpoint.files import HASHES, INDEX, check_sha256, read_json
from anybit.checkpoint.safetensors import read_safetensors_header
from anybit.errors import InputError
from anybit.formats.layout import stored_tensors
from anybit.formats.validate import check_version
from anybit.methods.ordering import BITS, STEP, Counts, coded_columns, nested_names, plane_rows, with_counts

SUFFIX = ".safetensors"
MOST_HEADER = 1 << 24  # bytes of a refinement's header that are looked at


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
        if size > self.bytes or (size < self.bytes and _is_another(file, before)):
            raise InputError(
                f"{file} is not what anybit.index.json lists under this name: refinements were exchanged; copy it again"
            )
        return size == self.bytes


def _is_another(file: Path, before: str) -> bool:
    """Whether a file is whole, or says that it follows another running hash than `before`; False where its header is
    not there yet."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(min(length, MOST_HEADER))
    try:
        header = json.loads(text)
        after = header.pop("__metadata__")["after"]
        end = max(int(entry["data_offsets"][1]) for entry in header.values())
    except (AttributeError, IndexError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return False
    return after != before or file.stat().st_size == 8 + length + end


@dataclass(frozen=True)
class Progressive:
    """The refinements of an artifact: those that its index lists, of which the first `present` are there."""

    path: Path
    layouts: Mapping[str, dict[str, Any]]  # of all layers as the core has them
    core: Mapping[str, str]  # the hashes of its shards and of what says which tensor is where
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
            weight_map = str(files[INDEX]["sha256"])
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
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
        return Progressive(path, layouts, {**core, INDEX: weight_map}, tuple(rungs), present)

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
        widths = [rung.bits for rung in self.rungs]
        last = _last_upto(widths, bits, f"{self.path} has")
        if bits > widths[self.present - 1] + STEP / 2:
            raise InputError(f"{self.note()}; {bits:g} bits need more")
        return min(last, self.present - 1)

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
        coded = coded_columns({name: self.layouts[name] for name in names})
        columns = np.array([coded[name] for name in names])

        def is_as_stated(rung: int) -> bool:
            return abs(now.sum(1) @ columns / (now[:, 0] @ columns) - self.rungs[rung].bits) <= 1e-6

        if not is_as_stated(0):
            raise InputError(
                f"{self.path}: anybit.index.json states another width of the core: copy it again"
            )
        for rung in range(1, upto + 1):
            if check:
                check_sha256(self.path / self.rungs[rung].file, self.rungs[rung].sha256)
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
            if not is_as_stated(rung):
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
        """Hold the bytes of the core's shards and of their index against their hashes.

        Raises:
            InputError: they differ, or one is missing.
        """
        for file, sha256 in self.core.items():
            check_sha256(self.path / file, sha256)

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
        at = _last_upto(self.bits, bits, "this model was loaded with")
        for name, counts in self.counts[at].items():
            module = model.get_submodule(name)
            module.run_as(with_counts(module.layout, counts))  # type: ignore[operator, arg-type]
        return self.bits[at]


def _last_upto(widths: Sequence[float], bits: float, whose: str) -> int:
    """The last of ascending average widths that is at most `bits`, the first at least.

    Raises:
        InputError: fewer bits than the first, or more than the last.
    """
    if not round(widths[0], 2) - 0.005 <= bits <= widths[-1] + STEP / 2:
        raise InputError(
            f"{whose} average widths from {widths[0]:.2f} to {widths[-1]:.2f} bits, not {bits:g}"
        )
    return max(i for i, width in enumerate(widths) if i == 0 or width <= bits + 1e-6)


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
    file = path / HASHES
    index = read_json(file) if file.is_file() else {}
    if not isinstance(index.get(SECTION), list):
        raise InputError(
            f"{path} is a core, and anybit.index.json, which lists its refinements, is missing: copy it, too"
        )
    check_version(index.get("format_version"))
    found = Progressive.open(path, quantization["layers"], index)
    if core != {"refinements": len(found.rungs) - 1, "list": list_hash(index[SECTION])}:
        raise InputError(
            f"{path}: config.json and anybit.index.json belong to different artifacts, or were edited: copy all files "
            "of one again"
        )
    return found


def _named_counts(names: Sequence[str], counts: np.ndarray) -> dict[str, tuple[int, ...]]:
    return {name: tuple(n for n in of if n) for name, of in zip(names, counts.tolist())}
