"""What is not a plain file of the model: pipes in the place of files, and links that lead elsewhere."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import anybit
from anybit.artifact.files import is_artifact
from anybit.checkpoint.directory import Checkpoint, open_checkpoint
from anybit.checkpoint.files import read_json
from anybit.checkpoint.safetensors import read_safetensors_header
from anybit.errors import InputError
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


# ---- links


@pytest.mark.parametrize("name", ["LICENSE", "tokenizer.json", "1_Pooling"])
def test_a_link_out_of_the_model_is_refused_before_any_work(model: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    secret = tmp_path / "elsewhere" / "config.json"
    secret.write_text("{}")
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(secret.parent if name == "1_Pooling" else secret)
    link = model / name / "config.json" if name == "1_Pooling" else model / name
    with pytest.raises(InputError) as raised:
        anybit.quantize(model, tmp_path / "out", builders.options("rtn", 4, 32))
    assert f"{link} leads to {secret}, out of the model's directory" in str(raised.value)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["elsewhere", "model"]
    with pytest.raises(InputError, match="out of the model's directory"):
        open_checkpoint(model).copy_assets(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


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
