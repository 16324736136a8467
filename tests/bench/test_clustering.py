"""`anybit bench quantize` on small shapes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from anybit.bench import clustering
from anybit.cli.main import app
from anybit.kernels import cpu


@pytest.mark.skipif(not cpu.available(), reason=f"no native extension: {cpu.why_not()}")
def test_rates_are_printed_and_the_last_line_has_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clustering, "SHAPES", ((4, 64),))
    monkeypatch.setattr(clustering, "ATTENTION", ((4, 2, 50, 16),))
    ran = CliRunner().invoke(app, ["bench", "quantize", "--rounds", "1"])
    assert ran.exit_code == 0
    *shown, figures = ran.stdout.splitlines()
    found = json.loads(figures)
    assert [(row["rows"], row["columns"], row["bits"]) for row in found["rows"]] == [(4, 64, 3), (4, 64, 4)]
    assert all(row["anybit_weights_per_second"] > 0 for row in found["rows"])
    for name, rate in found["codes"].items():
        assert any(line.endswith(f"{rate / 1e6:.2f}") for line in map(str.rstrip, shown)), name
    for row in found["attention"]:  # none where there is no kernel of its own
        assert any(f"{row['torch_ms'] / row['anybit_ms']:.1f}x" in line for line in shown)
    assert len(found["attention"]) == cpu.has_bfloat16_dot()
