"""The tables that the command prints."""

from __future__ import annotations

import io
import re
import sys

import pytest

from anybit.cli import tables

NAME = "model.layers.10.block_sparse_moe." + "experts." * 20 + "[bold]w1"
LAYER = {
    "shape": [576, 1536],
    "bits": 3.5,
    "bits_per_weight": 3.75,
    "tiles": [{"rows": 8, "bits": 8, "act_bits": 8}],
}
INSPECTION = {
    **{
        "method": "cmpq",
        "bits": 3.5,
        "bits_eq10": None,
        "bits_per_weight": 3.75,
        "file_bits_per_weight": 3.5,
        "weights": 10**8,
        "levels": [],
    },
    **{"kv_bits": 16, "size_bytes": 10**8, "calibration": None, "embeddings": []},
    "layers": [{"name": NAME, **LAYER}, {"name": "w2", **LAYER, "shape": [8, 8], "channel_bits": [3, 4, 4]}],
}
BEST = {"bits": 10, "embed_bits": 16, "bits_per_weight": 10.5, "size_bytes": 10**9, "fits": True}
PLAN = {"widths": [{**BEST, "bits": 2, "bits_per_weight": 2.5, "size_bytes": 10**7}, BEST], "best": BEST}


def test_lines_stay_whole_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    tables.print_inspection(INSPECTION)
    head, first, second = (line.rstrip() for line in capsys.readouterr().out.splitlines()[-3:])
    assert head.split() == ["layer", "shape", "bits", "bits", "per", "weight", "parts"]
    assert first.split(maxsplit=4) == [NAME, "576x1536", "3.50", "3.750", "inputs 8 bits, 8 rows at 8"]
    assert second.split(maxsplit=4)[4] == "inputs 8 bits, 1 channels at 3, 2 channels at 4, 8 rows at 8"
    assert first.index("576x1536") + len("576x1536") == second.index("8x8") + len("8x8")


def test_lines_fold_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "70")
    tables.print_inspection(INSPECTION)
    lines = [re.sub(r"\x1b\[\d*m", "", line) for line in screen.getvalue().splitlines()]
    assert max(map(len, lines)) <= 70
    begin, end = (next(i for i, line in enumerate(lines) if line.startswith(n)) for n in ("model.", "w2"))
    width = lines[begin].index(" ")
    assert "".join(line[:width].strip() for line in lines[begin:end]) == NAME  # no letter is lost


def test_numbers_stand_to_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    tables.print_plan(PLAN)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "bits  embed bits  bits per weight       size",
        "   2          16            2.500    10.0 MB",
        "  10          16           10.500  1000.0 MB  <- the best that fits",
    ]
