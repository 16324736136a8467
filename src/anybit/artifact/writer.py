"""Artifacts written shard by shard, so that a killed run resumes, and on the CPU ends in the same bytes.

A run works in `OUT.partial`: `artifact/` gets the name OUT by one rename when everything is in it, and the journal
notes which shards are whole. A shard is fsynced and renamed into place before it is noted, so neither half a shard nor
half an artifact ever looks whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from anybit.artifact.files import dump_json, is_artifact, partial_folder, resolved, shard_file
from anybit.artifact.journal import JOURNAL, Journal, entry_of
from anybit.checkpoint.files import HASHES, INDEX, file_sha256, sync, unwritable, write_whole
from anybit.checkpoint.safetensors import read_safetensors_header
from anybit.config import Json
from anybit.cost import Cost
from anybit.errors import InputError
from anybit.formats.layout import FORMAT_VERSION

STATISTICS = "statistics"  # folder beside the artifact under way
SEARCH = "search"
SPLIT = "split"  # the artifact once its planes are in order, as it will be published
TUNING = "tuning"
COMPLETE = "complete"  # file in it that says that it is whole


def read_cost(file: Path) -> Cost:
    """The cost noted in a JSON file, or in the metadata of a safetensors file; none where it is damaged."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as part:
                found = part.metadata() or {}
        else:
            found = json.loads(file.read_text(encoding="utf-8"))
        processor = found.get("processor_seconds")
        return Cost(
            float(found["seconds"]),
            int(found["peak_memory_bytes"]),
            None if processor is None else float(processor),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        return Cost(0.0, 0)


class ArtifactWriter:
    """One run's output directory. Use as a context manager: the directory is locked while it is open.

    Args:
        out: the artifact's final path.
        fingerprint: of model, configuration and calibration; a journal with another one is not resumed.
        shards: how many shards the artifact will have.
        overwrite: replace what an earlier `quantize` left at OUT or OUT.partial.
        statistics: folder for statistics of the whole model that outlives the run; OUT.partial by default.

    Raises:
        InputError: OUT or OUT.partial is taken, or another process writes to it.
    """

    def __init__(
        self, out: Path, fingerprint: str, shards: int, overwrite: bool, statistics: Path | None = None
    ) -> None:
        check_output(out, overwrite)
        self.out, self.shards = resolved(out), shards
        self.folder = partial_folder(out)
        self._shared = statistics
        self.work = self.folder / "artifact"  # what becomes OUT
        self.finished: dict[int, Json] = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._journal = Journal(self.folder)
        except BlockingIOError as error:
            raise InputError(
                f"another process is writing {self.out}: wait for it, or choose another -o"
            ) from error
        try:
            self.work.mkdir(exist_ok=True)
            self._resume(fingerprint, overwrite)
        except BaseException:
            self._journal.close()  # and with it the lock
            raise

    def __enter__(self) -> ArtifactWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._journal.close()
        if kind is not None and issubclass(kind, InputError) and not self.finished and not self._kept_here():
            shutil.rmtree(
                self.folder, ignore_errors=True
            )  # refused before anything was made: nothing to resume

    def _resume(self, fingerprint: str, overwrite: bool) -> None:
        """Take over the shards that the journal vouches for, and clear away everything else."""
        lines = self._journal.read()
        head = {"fingerprint": fingerprint, "shards": self.shards, "format_version": FORMAT_VERSION}
        if lines[:1] != [head]:
            begun = (len(lines) > 1 and any(self.work.iterdir())) or (lines and self._kept_here())
            if begun and not overwrite:
                raise InputError(
                    f"{self.folder} holds an unfinished run with another model, text, machine or options: "
                    "repeat that command to resume it, or add --overwrite to drop it"
                )
            lines = []
            self._drop_statistics()
            self._journal.begin(head)
        for entry in lines[1:]:
            path = self.work / self.file(entry["shard"])
            whole = path.is_file() and file_sha256(path) == entry["sha256"]
            if whole and entry == entry_of(entry["shard"], path, entry["sha256"]):
                self.finished[entry["shard"]] = entry
        for path in self.work.iterdir():
            if path.name not in {self.file(shard) for shard in self.finished}:
                _remove(path)
        _remove(self.folder / SPLIT)

    def file(self, shard: int) -> str:
        return shard_file(shard, self.shards)

    def write_shard(self, shard: int, tensors: Mapping[str, Tensor]) -> None:
        """Write one shard whole or not at all.

        Raises:
            InputError: the disk is full or refuses the file; what was finished stays and a rerun resumes.
        """
        path = self.work / self.file(shard)
        self._save(path, tensors, {"format": "pt"})
        entry = entry_of(shard, path, file_sha256(path))
        self._journal.note(entry)
        self.finished[shard] = entry

    def _save(self, path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
        dense = {name: tensor.contiguous() for name, tensor in tensors.items()}
        try:
            write_whole(path, lambda file: save_file(dense, file, metadata=metadata), mode=0o644)
        except (SafetensorError, OSError) as error:
            raise unwritable(path, error, f"{len(self.finished)} of {self.shards} shards are kept") from error

    def read_shard(self, shard: int) -> dict[str, Tensor]:
        return load_file(self.work / self.file(shard))

    def statistics(self) -> Path:
        """Where statistics of the whole model lie, at least while the run lasts."""
        return (self._shared or self.folder) / STATISTICS

    def search(self) -> Path:
        """Where a search over the whole model keeps what it has found, at least while the run lasts."""
        return (self._shared or self.folder) / SEARCH

    def tuning(self) -> Path:
        """Where a training of all that was made keeps its state while the run lasts."""
        return self.folder / TUNING

    def has_statistics(self) -> bool:
        return (self.statistics() / COMPLETE).is_file()

    def begin_statistics(self) -> Path:
        """The folder for statistics that are to be gathered, which from now on does not say that they are whole."""
        folder = self.statistics()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / COMPLETE).unlink(missing_ok=True)
        sync(folder)
        return folder

    def keep_statistics(self, cost: Cost) -> None:
        """Say that the statistics are whole, and what they took: a resumed run uses them."""
        folder = self.statistics()
        for path in folder.iterdir():
            sync(path)
        write_whole(
            folder / COMPLETE, lambda file: file.write_text(json.dumps(asdict(cost)), encoding="utf-8")
        )

    def cost(self) -> Cost | None:
        """What the shared statistics that are there took, in whichever runs; None without any."""
        if self._shared is None:
            return None
        costs = [read_cost(part) for part in self.search().rglob("*.safetensors")]
        if self.has_statistics():
            costs.append(read_cost(self.statistics() / COMPLETE))
        return Cost.sum(costs) if costs else None

    def _kept_here(self) -> bool:
        """Whether OUT.partial holds statistics that took work."""
        return self._shared is None and (self.has_statistics() or self.search().exists())

    def _drop_statistics(self) -> None:
        if self.tuning().exists():
            _remove(self.tuning())
        if self._shared is not None:  # others may want them
            return
        for folder in (self.statistics(), self.search()):
            if folder.exists():
                _remove(folder)

    def begin_split(self) -> None:
        """From now on, write the shards anew, and files beside them: the artifact will be made of those alone."""
        self.work = self.folder / SPLIT
        _remove(self.work)
        self.work.mkdir()

    def read_whole(self, shard: int) -> dict[str, Tensor]:
        """A shard as the run wrote it, before and after `begin_split`."""
        return load_file(self._whole(shard))

    def open_whole(self, shard: int) -> Any:
        """Such a shard, opened: a context manager."""
        return safe_open(self._whole(shard), framework="pt")

    def _whole(self, shard: int) -> Path:
        return self.folder / "artifact" / self.file(shard)

    def write_split(
        self, file: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
    ) -> Json:
        """Write a file of the artifact that is split; returns its `bytes` and `sha256`."""
        path = self.work / file
        self._save(
            path, tensors, dict(metadata or {"format": "pt"})
        )  # one key: of several, the order is by chance
        return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}

    def finish(
        self,
        config: Json,
        texts: Mapping[str, str],
        beside: Mapping[str, Json] | None = None,
        sections: Json | None = None,
    ) -> None:
        """Write index, hashes, config and other text files, then give the directory its name.

        Args:
            config: config.json.
            texts: other files by name.
            beside: `bytes` and `sha256` of files that are no shards.
            sections: what else the list of hashes says.
        """
        files = [self.file(i) for i in range(self.shards)]
        entries = {file: entry_of(i, self.work / file, "") for i, file in enumerate(files)}
        hashed = {i: entry["sha256"] for i, entry in self.finished.items()}
        split = self.work != self.folder / "artifact"
        weight_map = {tensor: file for file, entry in entries.items() for tensor in entry["tensors"]}
        total = sum(_data_bytes(self.work / file) for file in files)
        described = described_files(weight_map, total, config)
        listed = {
            file: {
                "bytes": entries[file]["bytes"],
                "sha256": file_sha256(self.work / file) if split else hashed[i],
            }
            for i, file in enumerate(files)
        }
        copied = {
            str(file.relative_to(self.work)): {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
            for file in sorted(self.work.rglob("*"))
            if file.is_file() and file.suffix != ".safetensors"
        }  # the tokenizer, templates, licence: nothing else is there yet
        hashes = hash_list({**listed, **(beside or {}), **copied}, described, sections)
        for name, text in {**described, HASHES: hashes, **texts}.items():
            (self.work / name).write_text(text, encoding="utf-8")
        for path in [*self.work.rglob("*"), self.work]:
            sync(path)
        self._publish()

    def _publish(self) -> None:
        """Rename the finished directory to OUT; a rerun completes what a kill in between leaves."""
        replaced = self.folder / "replaced"
        if self.out.exists() and any(self.out.iterdir()):
            _remove(replaced)
            self.out.rename(replaced)
        self.work.rename(self.out)
        sync(self.out.parent)
        self._drop_statistics()  # a rerun needs them until OUT is there
        _remove(replaced)
        self._journal.close()  # some network file systems keep the name of an open file
        if self.work.name != "artifact":  # what was split
            _remove(self.folder / "artifact")
        _remove(self.folder / JOURNAL)
        with contextlib.suppress(OSError):  # OUT is complete, whatever else lies in the folder
            self.folder.rmdir()


def check_output(out: Path, overwrite: bool) -> None:
    """Refuse an output that cannot become an artifact, unless it is an artifact that may be replaced.

    Raises:
        InputError: what is there and what to do.
    """
    partial = partial_folder(out)
    ours = partial.is_dir() and ((partial / JOURNAL).is_file() or not any(partial.iterdir()))
    if partial.exists() and not ours:
        raise InputError(
            f"{partial} is in the way and was not written by anybit: move it, or choose another -o"
        )
    if not out.exists():
        return
    if not out.is_dir():
        raise InputError(f"output {out} is a file: choose a directory with -o")
    if os.path.ismount(out):
        raise InputError(f"output {out} is a mount point, which cannot be renamed to: name a directory in it")
    if not any(out.iterdir()):
        return
    if not is_artifact(out):
        raise InputError(
            f"output {out} is not empty and not an anybit artifact: choose an empty or new directory"
        )
    if not overwrite:
        raise InputError(
            f"output {out} already holds an artifact: add --overwrite to replace it, or choose another -o"
        )


def finished_bytes(out: Path) -> int:
    """Bytes that an unfinished run has written already, which its repetition need not find room for."""
    folder = partial_folder(out)
    shards = sum(path.stat().st_size for path in folder.glob("artifact/*"))
    kept = (path for part in (STATISTICS, SEARCH, SPLIT) for path in folder.glob(f"{part}/**/*"))
    return shards + sum(512 * path.stat().st_blocks for path in kept if path.is_file())


def described_files(weight_map: Mapping[str, str], total: int, config: Json) -> dict[str, str]:
    """The index and config.json as they are written, by file name; `total`: bytes of all tensors."""
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return {INDEX: dump_json(index), "config.json": dump_json(config)}


def hash_list(
    shards: Mapping[str, Json],
    described: Mapping[str, str],
    sections: Json | None = None,
) -> str:
    """anybit.index.json: size and SHA-256 of shards and other files (given), and of the texts beside them (by name)."""
    files = dict(shards)
    for name, text in described.items():
        data = text.encode()
        files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return dump_json({"format_version": FORMAT_VERSION, "files": files, **(sections or {})})


def _data_bytes(path: Path) -> int:
    return sum(t.dtype.itemsize * prod(t.shape) for t in read_safetensors_header(path).values())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
