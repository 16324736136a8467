"""The journal: what a kill or a damaged disk leaves of it, and its lock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from anybit.artifact.journal import Journal, entry_of

HEAD = {"fingerprint": "f", "shards": 3}


@pytest.fixture
def entries(tmp_path: Path) -> list[dict[str, object]]:
    for shard in range(3):
        save_file({f"t{shard}": torch.zeros(shard + 1)}, tmp_path / f"{shard}.safetensors")
    return [entry_of(shard, tmp_path / f"{shard}.safetensors", "0" * 64) for shard in range(3)]


@pytest.fixture
def journal(tmp_path: Path, entries: list[dict[str, object]]) -> Path:
    """A journal with a head and three entries."""
    opened = Journal(tmp_path)
    opened.begin(HEAD)
    for entry in entries:
        opened.note(entry)
    opened.close()
    return opened.path


def read(file: Path) -> list[dict[str, object]]:
    opened = Journal(file.parent)
    found = opened.read()
    opened.close()
    return found


def test_an_entry_says_what_the_file_holds(entries: list[dict[str, object]], tmp_path: Path) -> None:
    size = (tmp_path / "1.safetensors").stat().st_size
    assert entries[1] == {"shard": 1, "bytes": size, "sha256": "0" * 64, "tensors": ["t1"]}


def test_what_is_noted_is_read(journal: Path, entries: list[dict[str, object]]) -> None:
    assert read(journal) == [HEAD, *entries]


@pytest.mark.parametrize("cut", [1, 2, 60, 121])
def test_a_line_cut_short_counts_for_nothing(
    journal: Path, entries: list[dict[str, object]], cut: int
) -> None:
    data = journal.read_bytes()
    lines = data.splitlines(keepends=True)
    last = b"".join(lines[:-1])
    assert cut < len(lines[-1])
    journal.write_bytes(data[:-cut])
    assert read(journal) == [HEAD, *entries[:-1]]
    assert journal.read_bytes() == last, "what follows must not be appended to half a line"


@pytest.mark.parametrize("line", [b"{\n", b"\x80\n", b"[]\n", b'{"shard": 1}\n', b"[" * 100_000 + b"\n"])
def test_nothing_behind_a_damaged_line_counts(
    journal: Path, entries: list[dict[str, object]], line: bytes
) -> None:
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[2] = line
    journal.write_bytes(b"".join(lines))
    assert read(journal) == [HEAD, entries[0]]


@pytest.mark.parametrize(
    ("field", "value"), [("shard", "1"), ("bytes", 1.0), ("sha256", None), ("tensors", "t1")]
)
def test_entries_of_other_types_are_damaged(
    journal: Path, entries: list[dict[str, object]], field: str, value: object
) -> None:
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[1] = json.dumps({**entries[0], field: value}).encode() + b"\n"
    journal.write_bytes(b"".join(lines))
    assert read(journal) == [HEAD]


def test_another_run_begins_anew(journal: Path) -> None:
    opened = Journal(journal.parent)
    opened.begin({"fingerprint": "g", "shards": 1})
    assert opened.read() == [{"fingerprint": "g", "shards": 1}]
    opened.close()


def test_one_process_at_a_time(journal: Path) -> None:
    first = Journal(journal.parent)
    with pytest.raises(BlockingIOError):
        Journal(journal.parent)
    first.close()
    Journal(journal.parent).close()
