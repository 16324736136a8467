"""The time that `anybit compare` foresees."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from anybit.checkpoint.directory import open_checkpoint
from anybit.compare import Settings, parse_entry
from anybit.compare import eta as compare_eta
from anybit.compare.cells import plan_cells
from anybit.compare.eta import Eta
from anybit.progress import no_other_bars


def test_the_eta_is_foreseen_from_cells_that_are_alike(
    model_dir: Callable[[str], Path], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(compare_eta.time, "monotonic", lambda: now)
    entries = [parse_entry(e) for e in ("rtn", "gptq: group_size=16", "any-precision")]
    eta = Eta(plan_cells(open_checkpoint(model_dir("llama")), entries, (3, 4), settings)[0])
    said = []
    for seconds in (6, 6, 300, 330, 600, 30):
        said.append(eta.begin())
        now += seconds
        eta.end()
    assert said == [
        *("cell 1 of 6", "cell 2 of 6", "cell 3 of 6"),  # the others are calibrated, rtn is not
        "cell 4 of 6",  # a second width of an artifact is unlike the first
        "cell 5 of 6",
        "cell 6 of 6",
    ]
    eta = Eta(plan_cells(open_checkpoint(model_dir("llama")), entries[:2], (3, 4), settings)[0])
    said = []
    for seconds in (6, 6, 300, 330):
        said.append(eta.begin())
        now += seconds
        eta.end()
    assert said == ["cell 1 of 4", "cell 2 of 4", "cell 3 of 4", "cell 4 of 4, ETA 5 min"]


def test_other_bars_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    bar = importlib.import_module("tqdm.auto").tqdm
    with no_other_bars():
        assert list(bar(range(3), desc="theirs")) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    list(bar(range(3), desc="theirs"))
    assert "theirs" in capsys.readouterr().err
