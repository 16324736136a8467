"""The journal of a run, `OUT.partial/journal.jsonl`: what it is a run of, and which of its shards are whole.

The head holds everything that the bytes depend on, so a journal with another head is no run to resume. A shard gets its
line after its file is in place and on the disk; a line that a kill cut short counts for nothing. The open file is also
the lock of the run's folder.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from anybit.checkpoint.safetensors import read_safetensors_header
from anybit.config import Json

JOURNAL = "journal.jsonl"


class Journal:
    """The journal in a folder, open and locked until `close`.

    Raises:
        BlockingIOError: another process has it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL
        self._file = open(self.path, "a+b")  # noqa: SIM115 - closed in `close`
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close the file, and with it give the lock away."""
        self._file.close()

    def read(self) -> list[Json]:
        """The head and the entries, up to the first line that is cut short or damaged; that and what follows goes."""
        self._file.seek(0)
        found: list[Json] = []
        end = 0
        for line in self._file.readlines():
            entry = _parse(line)
            if entry is None or (found and not _is_entry(entry)):
                break
            found.append(entry)
            end += len(line)
        self._file.truncate(end)
        return found

    def begin(self, head: Json) -> None:
        """Empty it, for another run."""
        self._file.truncate(0)
        self.note(head)

    def note(self, entry: Json) -> None:
        """Add a line; it is on the disk when this returns."""
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def entry_of(shard: int, path: Path, sha256: str) -> Json:
    """What the journal says of a finished shard."""
    tensors = sorted(read_safetensors_header(path))
    return {"shard": shard, "bytes": path.stat().st_size, "sha256": sha256, "tensors": tensors}


def _is_entry(entry: Json) -> bool:
    """Whether a line has the fields of `entry_of`, each of its type."""
    types = {"shard": int, "bytes": int, "sha256": str, "tensors": list}
    return entry.keys() == types.keys() and all(type(entry[key]) is kind for key, kind in types.items())


def _parse(line: bytes) -> Json | None:
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
