"""Fixtures of comparisons."""

from __future__ import annotations

from pathlib import Path

import pytest

from anybit.compare import Settings
from anybit.compare import job as compare_job


@pytest.fixture
def settings(text_file: Path) -> Settings:
    return Settings(str(text_file), 3, 32, 0, str(text_file), 256)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantize here: a process of its own takes seconds to begin."""
    monkeypatch.setattr(compare_job, "run_apart", lambda job, file: compare_job.run(job))
