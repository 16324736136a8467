"""The sizes that an artifact can be read at: what each takes, and the largest within a budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any, TypedDict

from anybit.artifact.files import is_tokenizer_file
from anybit.artifact.reader import Artifact
from anybit.config import Json, parse_bytes
from anybit.errors import InputError
from anybit.formats.layout import LayerLayout
from anybit.formats.levels import CLOSE_BITS, largest, levels_of
from anybit.formats.unquantized import UnquantizedLayout


class Budget(TypedDict, total=False):
    """How large a level may be: at most one of these, none for all that is there."""

    bits: float | None  # average code width
    bpw: float | None  # bits per weight of the linear layers, in memory
    size: int | str | None  # bytes of all files but the tokenizer, or text such as "110MB"


@dataclass(frozen=True)
class Size:
    """What an artifact takes at one of its levels."""

    bits: float  # average code width
    layer_bytes: int  # of all linear layers of the blocks, as they run
    size_bytes: int  # of all files but the tokenizer, as far as they are read
    loss: float | None  # expected increase of the loss in nats per token; None: not known
    present: bool  # whether its files are there


@dataclass(frozen=True)
class Levels:
    """The levels of an opened artifact, the smallest first."""

    artifact: Artifact

    @cached_property
    def unquantized(self) -> dict[str, LayerLayout]:
        """The linear layers of the blocks that are stored as they were."""
        tensors, shapes = self.artifact.tensors, self.artifact.stored.unquantized
        return {
            name: LayerLayout(shape, (UnquantizedLayout.of(tensors[f"{name}.weight"].dtype),))
            for name, shape in shapes.items()
        }

    @cached_property
    def weights(self) -> int:
        """Of all linear layers of the blocks."""
        return sum(layout.weights for layout in (*self._layers.values(), *self.unquantized.values()))

    @cached_property
    def _layers(self) -> Mapping[str, LayerLayout]:
        return _expanded(self.artifact.stored.layers)

    @cached_property
    def _embeddings(self) -> Mapping[str, LayerLayout]:
        return _expanded(self.artifact.stored.embeddings)

    @cached_property
    def sizes(self) -> tuple[Size, ...]:
        files, found = self.artifact.path.rglob("*"), self.artifact.enhancements
        later = {entry.file for entry in found.entries[1:]} if found else set()
        taken = sum(
            file.stat().st_size
            for file in files
            if file.is_file()
            and not is_tokenizer_file(file.name)
            and file.name not in later
            and not any(
                part.startswith(".") for part in file.relative_to(self.artifact.path).parts
            )  # a clone's
        )
        others = _nbytes(self.unquantized.values())
        if found is None:
            return sizes_of_widths(self._layers, others, taken)
        base = _nbytes(self._layers.values()) + others
        return tuple(
            Size(
                entry.bits,
                base + found.plane_bytes_upto(i) - found.embedding_bytes_upto(i),
                taken + found.bytes_upto(i),
                entry.loss,
                i < found.present,
            )
            for i, entry in enumerate(found.entries)
        )

    @property
    def last(self) -> int:
        """The largest level that is there."""
        return sum(size.present for size in self.sizes) - 1

    def bits_per_weight(self, level: int) -> float:
        """Bits per weight of all linear layers of the blocks in memory, as they run at a level."""
        return 8 * self.sizes[level].layer_bytes / self.weights if self.weights else 0.0

    def embedding_bits_per_weight(self, level: int) -> float | None:
        """The same of embedding and head; None where they are not quantized."""
        stored, found = self._embeddings.values(), self.artifact.enhancements
        if not stored:
            return None
        taken = _nbytes(stored) + (0 if found is None else found.embedding_bytes_upto(level))
        return 8 * taken / sum(layout.weights for layout in stored)

    def file_bits_per_weight(self, level: int) -> float:
        """What files have of the linear layers of the blocks, in bits per weight, as far as they are read at a level.

        It is more than in memory where widths have tables of their own, less where planes are coded. A file of an
        enhancement layer that has planes of embeddings too counts by the share that the layers' take in memory.
        """
        stored = _nbytes([*self.artifact.stored.layers.values(), *self.unquantized.values()])
        found = self.artifact.enhancements
        more = 0.0 if found is None else found.layer_file_bytes_upto(level)
        return 8 * (stored + more) / self.weights if self.weights else 0.0

    def memory_bytes(self, level: int) -> int:
        """What the weights take in memory as they run at a level: the files' bytes, their coded planes expanded."""
        size, found = self.sizes[level], self.artifact.enhancements
        if found is None:
            return size.size_bytes
        stored = self.artifact.stored
        in_files = _nbytes([*stored.layers.values(), *stored.embeddings.values(), *self.unquantized.values()])
        embeddings = _nbytes(self._embeddings.values()) + found.embedding_bytes_upto(level)
        return size.size_bytes - in_files - found.bytes_upto(level) + size.layer_bytes + embeddings

    def layouts(self, level: int) -> tuple[dict[str, LayerLayout], dict[str, LayerLayout]]:
        """The quantized layers, and the quantized embedding and head, as they run at a level.

        Raises:
            InputError: a file of an enhancement layer that does not fit the layers.
        """
        found, embeddings = self.artifact.enhancements, self._embeddings
        if found is None:
            return dict(levels_of(self._layers)[level].layouts), dict(embeddings)
        read = found.layouts_at(found.counts(level, check=False)[level])
        return {name: read[name] for name in self._layers}, {name: read[name] for name in embeddings}

    def choose(
        self, bits: float | None = None, bpw: float | None = None, size: int | str | None = None
    ) -> int | None:
        """The largest level within a `Budget`; None without one.

        Raises:
            InputError: a budget too small, more bits than are there, or several of the three.
        """
        for name, value in (("bits", bits), ("bpw", bpw)):
            if value is not None and not _is_number(value):
                raise InputError(f"{name} {value!r}: expected a number")
        if sum(value is not None for value in (bits, bpw, size)) > 1:
            raise InputError(
                "bits, bpw and size (--bits, --bpw, --size) set the same thing: give one of them"
            )
        if bits is not None:
            return self._of_bits(bits)
        least = self.sizes[0]
        if bpw is not None:
            needs = f"{self.bits_per_weight(0):.3f} bits per weight"
            takes = [found.layer_bytes for found in self.sizes]
            return self._within(takes, bpw * self.weights / 8, f"{bpw:g} bits per weight", needs)
        if size is not None:
            most = parse_bytes(size) if isinstance(size, str) else size
            if not _is_number(most):
                raise InputError(f"size {size!r}: expected a number of bytes, or text such as '110MB'")
            needs = f"{least.size_bytes / 1e6:.1f} MB"
            return self._within([found.size_bytes for found in self.sizes], most, f"{most / 1e6:g} MB", needs)
        return None

    def _of_bits(self, bits: float) -> int:
        widths = [size.bits for size in self.sizes]
        level = largest(widths, bits, f"{self.artifact.path} has")
        if bits > widths[self.last] + 0.05:
            raise InputError(f"{self.note()}; {bits:g} bits need more")
        return min(level, self.last)

    def _within(self, takes: list[int], most: float, asked: str, needs: str) -> int:
        """The last level that takes at most so many bytes."""
        if not most >= takes[0]:  # nor is NaN
            path, bits = self.artifact.path, self.sizes[0].bits
            raise InputError(
                f"{asked} is not to be had: {path} at its smallest, {bits:.2f} bits, takes {needs}"
            )
        return max(i for i in range(self.last + 1) if takes[i] <= most)

    def note(self) -> str | None:
        """A sentence where enhancement layers are missing."""
        return self.artifact.enhancements.note() if self.artifact.enhancements else None

    def notes(self, bits: float | None, level: int | None) -> list[str]:
        """What to say of a model at a level, where `bits` were asked for: it is less than that, or than all."""
        served = bits is not None and level is not None and bits - self.sizes[level].bits <= CLOSE_BITS
        if served:
            return []
        missing = self.note() if level in (None, self.last) else None
        less = None
        if bits is not None and level is not None:
            less = f"runs at {self.sizes[level].bits:.2f} bits, the largest width up to {bits:g}"
        return [note for note in (missing, less) if note]

    def table(self) -> list[Json]:
        """Of every level: `bits` (average width), `bits_per_weight` (in memory), `embedding_bits_per_weight` (None: not
        quantized), `file_bits_per_weight`, `size_bytes` (of files), `memory_bytes`, `loss`, `present`. JSON-able.
        """
        return [
            {
                "bits": size.bits,
                "bits_per_weight": self.bits_per_weight(i),
                "embedding_bits_per_weight": self.embedding_bits_per_weight(i),
                "file_bits_per_weight": self.file_bits_per_weight(i),
                "size_bytes": size.size_bytes,
                "memory_bytes": self.memory_bytes(i),
                "loss": size.loss,
                "present": size.present,
            }
            for i, size in enumerate(self.sizes)
        ]


def sizes_of_widths(layers: Mapping[str, LayerLayout], others: int, taken: int) -> tuple[Size, ...]:
    """The levels of an artifact all of whose widths lie in one file of each tensor.

    Args:
        layers: the quantized layers, with all of their widths.
        others: bytes of the linear layers that are not quantized.
        taken: bytes of all files but the tokenizer.
    """
    whole = _nbytes(layers.values())
    return tuple(
        Size(
            level.bits,
            level.bytes + others,
            taken - whole + _nbytes(layout.upto(level.bits) for layout in layers.values()),
            level.loss,
            True,
        )
        for level in levels_of(_expanded(layers))
    )


def _expanded(layouts: Mapping[str, LayerLayout]) -> dict[str, LayerLayout]:
    return {name: layout.expanded() for name, layout in layouts.items()}


def _nbytes(layouts: Iterable[LayerLayout]) -> int:
    return sum(layout.nbytes for layout in layouts)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
