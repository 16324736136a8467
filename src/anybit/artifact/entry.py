"""An entry of the list of enhancement layers in anybit.index.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from anybit.errors import InputError

MOST_HEADER = 1 << 24  # bytes of a file's header that are looked at


@dataclass(frozen=True)
class Entry:
    """The base layer, or an enhancement layer: what the model is once it is there."""

    file: str  # "" for the base layer
    bytes: int
    sha256: str
    bits: float  # average width
    loss: float  # expected increase of the loss in nats per token
    chain: str  # running hash
    plane_bytes: int  # of its planes in memory
    embedding_bytes: int  # of those, planes of embeddings

    def is_there(self, path: Path, before: str) -> bool:
        """Whether the file is in `path`; one that is shorter than it should be is still under way.

        Args:
            path: folder.
            before: the running hash of the entry before, which the file names.

        Raises:
            InputError: another file under this name.
        """
        file = path / self.file
        if not file.is_file():
            return False
        size = file.stat().st_size
        if size > self.bytes or (size < self.bytes and _is_another(file, before)):
            raise InputError(
                f"{file} is not what anybit.index.json lists under this name: enhancement layers were exchanged; copy "
                "it again"
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
