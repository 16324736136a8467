"""Checkpoints of one tiny model in every way that it can be stored."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.models import build_model, build_tokenizer


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`single`, `sharded` and `tied`: complete directories, never changed."""
    root = tmp_path_factory.mktemp("models")
    build_model().save_pretrained(root / "single")
    build_model().save_pretrained(root / "sharded", max_shard_size="12KB")
    build_model(tied=True).save_pretrained(root / "tied")
    for folder in root.iterdir():
        build_tokenizer().save_pretrained(folder)
    (root / "single" / "LICENSE").write_text("do what you like")
    (root / "single" / "NOTICE.txt").write_text("made by me")
    (root / "single" / "modeling_custom.py").write_text("raise SystemExit")
    (root / "single" / "LICENSE").chmod(0o600)
    return root


@pytest.fixture
def copy(originals: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy to break."""

    def make(name: str) -> Path:
        (tmp_path / name).mkdir()
        for file in (originals / name).iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
        return tmp_path / name

    return make
