"""What progress looks like, at a terminal and elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from anybit import progress
from anybit.progress import Terminal


def test_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = Terminal()
    report.say("[1] what it says is no markup")
    advance = report.task("work", 20)
    for _ in range(20):
        advance(1)
    monkeypatch.setattr(progress, "SHORT", 0.0)
    advance = report.task("longer", 20)
    for _ in range(20):
        advance(1)
    report.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    said, *lines = captured.err.splitlines()
    assert said == "[1] what it says is no markup"
    assert lines == [f"longer: {share} %, 0 s, ETA 0 s" for share in range(10, 101, 10)]


def test_bars_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    report = Terminal()
    report.task("first", 3)(2)
    report.task("second", 5)(5)
    report.close()
    report.close()  # ends nothing twice
    shown = screen.getvalue()
    for part in ("first", "2/3", "second", "5/5", "ETA"):
        assert part in shown
    report.task("third", 7)(1)  # begins again
    report.close()
    assert "1/7" in screen.getvalue()
