"""What is not a plain file of the model: pipes in the place of files, and links that lead elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import anybit
from anybit.artifact.files import is_artifact
from anybit.checkpoint.directory import Checkpoint, open_checkpoint
from anybit.checkpoint.files import INDEX, read_json, write_whole
from anybit.checkpoint.safetensors import read_safetensors_header
from anybit.errors import InputError
from anybit.loader import load_tokenizer
from tests import builders


@pytest.fixture
def model(model_dir: Callable[[str], Path], tmp_path: Path) -> Path:
    """A directory of a model that tests may change."""
    return Path(shutil.copytree(model_dir("llama"), tmp_path / "model"))


@pytest.fixture
def at_once() -> Iterator[None]:
    """Ends a test that waits."""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", read_json),
        ("model.safetensors", read_safetensors_header),
        ("model.gguf", open_checkpoint),
    ],
)
def test_a_pipe_is_refused_at_once(tmp_path: Path, name: str, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match=rf"{name} is not a regular file"):
        read(tmp_path / name)


@pytest.mark.usefixtures("at_once")
def test_a_pipe_as_config_json_makes_no_model(model: Path) -> None:
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    assert not is_artifact(model)
    with pytest.raises(InputError, match=r"config\.json is not a regular file"):
        open_checkpoint(model)


@pytest.mark.parametrize("name", ["1" * 300 + ".safetensors", "é" * 130 + ".safetensors"])
def test_shards_whose_names_no_file_can_have(model: Path, name: str) -> None:
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    (model / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    for enter in (open_checkpoint, anybit.load):
        with pytest.raises(InputError, match=r"name of a \.safetensors file"):
            enter(model)


def test_a_null_byte_is_in_no_name() -> None:
    assert not is_artifact(Path("a\0b"))
    with pytest.raises(InputError, match="cannot be read"):
        read_json(Path("a\0b"))


# ---- links


LINKS = {  # what is a link -> what it leads to
    "LICENSE": "LICENSE",
    "tokenizer.json": "tokenizer.json",
    "config.json": "config.json",
    "generation_config.json": "generation_config.json",
    "1_Pooling": "1_Pooling/config.json",
    "additional_chat_templates": "additional_chat_templates/default.jinja",
}


@pytest.mark.parametrize("name", LINKS)
def test_a_link_out_of_the_model_is_refused_before_any_work(model: Path, tmp_path: Path, name: str) -> None:
    secret, link = tmp_path / "elsewhere" / LINKS[name], model / LINKS[name]
    secret.parent.mkdir(parents=True)
    secret.write_bytes(
        link.read_bytes() if link.exists() else b"{}"
    )  # the same: it is refused as a link alone
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(tmp_path / "elsewhere" / name)
    with pytest.raises(InputError) as raised:
        anybit.quantize(model, tmp_path / "out", builders.options("rtn", 4, 32))
    assert f"{link} leads to {secret}, out of the model's directory" in str(raised.value)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["elsewhere", "model"]
    for enter in (open_checkpoint, anybit.load, load_tokenizer):
        with pytest.raises(InputError, match="out of the model's directory"):
            enter(model)


def test_a_link_that_comes_later_is_refused_too(model: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(model)
    (tmp_path / "secret").write_text("{}")
    (model / "LICENSE").unlink(missing_ok=True)
    (model / "LICENSE").symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match="out of the model's directory"):
        checkpoint.copy_assets(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_weights_may_lie_on_another_disk(model: Path, tmp_path: Path) -> None:
    expected = open_checkpoint(model).sha256()
    for file in model.glob("*.safetensors"):
        file.rename(tmp_path / file.name)
        file.symlink_to(tmp_path / file.name)
    assert open_checkpoint(model).sha256() == expected


def copied(checkpoint: Checkpoint, out: Path) -> bytes:
    assert "LICENSE" in checkpoint.copy_assets(out)
    return (out / "LICENSE").read_bytes()


def test_links_within_the_model_are_followed(model: Path, tmp_path: Path) -> None:
    (model / "legal").mkdir()
    (model / "legal" / "terms").write_text("within")
    (model / "LICENSE").unlink(missing_ok=True)
    (model / "LICENSE").symlink_to("legal/terms")
    (tmp_path / "other name").symlink_to(model)
    for folder in (model, tmp_path / "other name"):
        assert copied(open_checkpoint(folder), tmp_path / "out") == b"within"


def test_links_of_the_hubs_cache_are_followed(model: Path, tmp_path: Path) -> None:
    home = tmp_path / "hub" / "models--tiny--llama"
    snapshot = home / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (home / "blobs").mkdir()
    for file in model.iterdir():
        file.rename(home / "blobs" / f"hash of {file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/hash of {file.name}")
    (home / "blobs" / "terms").write_text("from the hub")
    (snapshot / "LICENSE").unlink(missing_ok=True)
    (snapshot / "LICENSE").symlink_to("../../blobs/terms")
    assert copied(open_checkpoint(snapshot), tmp_path / "out") == b"from the hub"
    (snapshot / "NOTICE").symlink_to("../../refs")
    (home / "refs").write_text("not a blob")
    with pytest.raises(InputError, match=r"NOTICE leads to .*refs"):
        open_checkpoint(snapshot).asset_files()


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is on the disk after the file: a power cut cannot take back the new name."""
    file, synced, fsync = tmp_path / "a.json", [], os.fsync

    def watched(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").resolve())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    write_whole(file, lambda path: path.write_text("whole"))
    assert synced == [tmp_path / "a.json.new", tmp_path]

    def half(path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_whole(file, half)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"] and file.read_text() == "whole"


def test_who_may_read_a_file_is_for_the_umask_to_say_or_for_the_caller(tmp_path: Path) -> None:
    """safetensors leaves files to their owner alone."""
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "a", lambda path: path.write_text("whole"))
        write_whole(tmp_path / "b", lambda path: path.write_text("whole"), mode=0o644)
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in "ab"] == [0o640, 0o644]
