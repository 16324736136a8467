"""The writer's promises: finished shards are kept, two runs never mix, a full disk loses nothing."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import anybit
from anybit.artifact import writer
from anybit.artifact.writer import ArtifactWriter, check_output, finished_bytes
from anybit.checkpoint.files import file_sha256
from anybit.errors import InputError
from tests import builders

SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture(scope="module")
def original(model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("artifact") / "original"
    anybit.quantize(model_dir("llama"), out, builders.options("rtn", group_size=32, embed_bits=8))
    return out


def shard(data: bytes) -> Callable[[Path], Any]:
    return lambda path: (path / SHARD).write_bytes(data)


def tensors_of(shard: int) -> dict[str, torch.Tensor]:
    return {f"t{shard}": torch.full((10,), float(shard)), f"u{shard}": torch.arange(6).view(2, 3).T}


def write_all(out: Path, fingerprint: str = "a", overwrite: bool = False, until: int = 3) -> list[int]:
    """Write what is not there yet, up to shard `until`; returns the shards found finished."""
    with ArtifactWriter(out, fingerprint, 3, overwrite) as opened:
        found = sorted(opened.finished)
        for i in range(until):
            if i not in opened.finished:
                opened.write_shard(i, tensors_of(i))
        if until == 3:
            opened.finish({"quantization_config": {"quant_method": "anybit"}}, {"README.md": "hello"})
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_writer_makes_what_it_was_given(tmp_path: Path) -> None:
    assert write_all(tmp_path / "out") == []
    assert [f.name for f in tmp_path.iterdir()] == ["out"]
    for i in range(3):
        found = load_file(tmp_path / "out" / f"model-0000{i + 1}-of-00003.safetensors")
        assert found.keys() == tensors_of(i).keys()
        assert all(torch.equal(found[name], t) for name, t in tensors_of(i).items())


def test_writer_resumes_finished_shards_and_redoes_damaged_ones(tmp_path: Path) -> None:
    write_all(tmp_path / "whole")
    write_all(tmp_path / "out", until=2)
    assert not (tmp_path / "out").exists()
    work = tmp_path / "out.partial" / "artifact"
    shards = sum(f.stat().st_size for f in work.iterdir())
    assert finished_bytes(tmp_path / "out") == shards > 0
    for part in ("split", "search/parts"):  # which a run that goes on deletes, or need not make again
        (work.parent / part).mkdir(parents=True)
        (work.parent / part / "some").write_bytes(bytes(1 << 16))
    assert finished_bytes(tmp_path / "out") >= shards + (2 << 16)
    damaged = work / "model-00001-of-00003.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    (work / "model-00003-of-00003.safetensors.new").write_bytes(b"half a shard")
    assert write_all(tmp_path / "out") == [1]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert finished_bytes(tmp_path / "out") == 0


@pytest.mark.parametrize("cut", [1, 20, 10**6])
def test_writer_drops_a_journal_line_cut_short(tmp_path: Path, cut: int) -> None:
    write_all(tmp_path / "out", until=2)
    journal = tmp_path / "out.partial" / "journal.jsonl"
    data = journal.read_bytes()
    end = data.rstrip(b"\n").rfind(b"\n") + 1 if cut < 10**6 else 0
    journal.write_bytes(data[: min(len(data) - 1, max(end, 0) + cut) if cut < 10**6 else 3])
    assert write_all(tmp_path / "out", until=2) == ([0] if cut < 10**6 else [])
    assert write_all(tmp_path / "out") == [0, 1]


@pytest.mark.parametrize(
    "line",
    [
        b"\x00\x00\xff\n",
        b"[1]\n",
        b"{}\n",
        b"[" * 100_000 + b"\n",
        b'{"shard": "1", "bytes": 1, "sha256": "", "tensors": []}\n',
        b'{"shard": 1, "bytes": 1, "sha256": null, "tensors": []}\n',
    ],
    ids=["no text", "list", "empty", "deep", "shard", "sha256"],
)
@pytest.mark.parametrize("damaged", [1, 2])
def test_writer_resumes_before_a_damaged_journal_line(tmp_path: Path, line: bytes, damaged: int) -> None:
    write_all(tmp_path / "whole")
    write_all(tmp_path / "out", until=2)
    journal = tmp_path / "out.partial" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[damaged] = line
    journal.write_bytes(b"".join(lines))
    assert write_all(tmp_path / "out") == list(range(damaged - 1))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_writer_redoes_a_shard_whose_journal_line_lies(tmp_path: Path) -> None:
    """Its tensors' names go into the index."""
    write_all(tmp_path / "whole")
    write_all(tmp_path / "out", until=2)
    journal = tmp_path / "out.partial" / "journal.jsonl"
    journal.write_text(journal.read_text().replace('"t1"', '"t9"'))
    assert write_all(tmp_path / "out") == [0]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_folder_that_will_not_go_does_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rmdir(path: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rmdir", rmdir)
        write_all(tmp_path / "out")
    assert len(contents(tmp_path / "out")) == 7
    assert write_all(tmp_path / "out", overwrite=True) == []
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


def test_the_journal_is_closed_before_its_name_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS keeps an open file under another name, and the folder with it."""
    closed: list[bool] = []
    original = writer._remove
    with ArtifactWriter(tmp_path / "out", "a", 1, False) as opened:

        def remove(path: Path) -> None:
            if path.name == writer.JOURNAL:
                closed.append(opened._journal._file.closed)
            original(path)

        monkeypatch.setattr(writer, "_remove", remove)
        opened.write_shard(0, tensors_of(0))
        opened.finish({}, {})
    assert closed == [True]


def test_writer_refuses_another_run(tmp_path: Path) -> None:
    write_all(tmp_path / "out", until=1)
    before = contents(tmp_path / "out.partial" / "artifact")
    with pytest.raises(InputError, match="unfinished run with another model, text") as refusal:
        ArtifactWriter(tmp_path / "out", "b", 3, False)
    assert "--overwrite" in str(refusal.value)
    assert contents(tmp_path / "out.partial" / "artifact") == before
    assert write_all(tmp_path / "out", "a", until=1) == [0], "the refusal released its lock and lost nothing"
    assert write_all(tmp_path / "out", "b", overwrite=True) == []


def test_writer_needs_no_overwrite_where_nothing_is_lost(tmp_path: Path) -> None:
    write_all(tmp_path / "out", until=0)
    assert write_all(tmp_path / "out", "b") == []


def test_two_writers_are_refused(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "out", "a", 3, False) as first:
        first.write_shard(0, tensors_of(0))
        for fingerprint, overwrite in (("a", False), ("b", True)):
            with pytest.raises(InputError, match="another process is writing"):
                ArtifactWriter(tmp_path / "out", fingerprint, 3, overwrite)
        first.write_shard(1, tensors_of(1))
    assert write_all(tmp_path / "out") == [0, 1]


def test_full_disk_in_the_middle_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def save(tensors: Any, path: Path, **options: Any) -> None:
        calls.append(path)
        if len(calls) == 3:
            path.write_bytes(b"half a shard")
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save_file(tensors, path, **options)

    monkeypatch.setattr(writer, "save_file", save)
    with pytest.raises(InputError, match=r"disk is full.* make room .* 2 of 3 shards are kept"):
        write_all(tmp_path / "out")
    assert not list(tmp_path.rglob("*.new")), "the half shard gives its room back"
    assert write_all(tmp_path / "out") == [0, 1]


def test_other_write_errors_are_not_called_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(writer, "save_file", save)
    with pytest.raises(InputError, match=r"cannot be written.*Input/output error"):
        write_all(tmp_path / "out")


def test_mount_points_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory cannot be renamed onto one, which a run would learn at its end."""
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    with pytest.raises(InputError, match="mount point"):
        check_output(tmp_path / "volume", overwrite=True)


def test_hash_is_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_sha256(tmp_path / "file") == digest
