"""OUT/work: artifacts while they are measured, statistics that cells share, and which of both stay."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from anybit.artifact.files import dump_json, partial_folder
from anybit.config import Json

KEPT = "kept.json"  # names of what stays


@dataclass(frozen=True)
class Workspace:
    """The folder, and what in it is no run's to delete."""

    folder: Path

    @property
    def statistics(self) -> Path:
        """What cells share: gradients, and what the unquantized model computes of the text."""
        return self.folder / "statistics"

    def open(self) -> None:
        """Make the folder; what is there without a record of what stays, stays."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not isinstance(read_json(self.folder / KEPT), dict):
            self.keep_all()

    def keep_all(self) -> None:
        """All that is finished now stays, whatever later runs do."""
        names = sorted(str(path.relative_to(self.folder)) for path in self._finished())
        (self.folder / KEPT).write_text(dump_json({"kept": names}), encoding="utf-8")

    def remove(self, artifact: Path) -> None:
        """Delete an artifact and what lies beside it, unless it stays."""
        if not self._stays(artifact):
            for folder in (artifact, partial_folder(artifact)):
                shutil.rmtree(folder, ignore_errors=True)
            record_of(artifact).unlink(missing_ok=True)

    def remove_statistics(self) -> None:
        """Delete the statistics that do not stay, and folders in which nothing is left."""
        for folder in self.statistics.glob("*"):
            if not self._stays(folder):
                shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # not empty, or never made
            self.statistics.rmdir()
        if [path.name for path in self.folder.iterdir()] == [KEPT]:
            shutil.rmtree(self.folder)

    def _stays(self, path: Path) -> bool:
        found = read_json(self.folder / KEPT)
        return found is None or str(path.relative_to(self.folder)) in found["kept"]

    def _finished(self) -> Iterator[Path]:
        for path in (*self.folder.iterdir(), *self.statistics.glob("*")):
            if path.is_dir() and path != self.statistics and path.suffix != ".partial":
                yield path


def by_key(folder: Path, name: str, tail: str) -> Path:
    """What in `folder` ends in `tail`, which holds a key, under whatever name it was made; else a path for `name`."""
    made = sorted(path.name for path in folder.glob(f"*{tail}*"))
    slug = re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")[:60]
    return folder / f"{made[0].partition(tail)[0] if made else slug}{tail}"


def record_of(artifact: Path) -> Path:
    """Where it stands what making an artifact took."""
    return artifact.with_name(artifact.name + ".json")


def read_json(file: Path) -> Json | None:
    """A JSON object that was written before; None where there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
