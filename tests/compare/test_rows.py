"""Entries of `anybit compare`: what is asked for, and mistakes before any work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anybit.compare import Settings, compare, parse_entry
from anybit.compare.rows import resolved
from anybit.errors import InputError
from tests.compare.runs import run


def test_entries() -> None:
    entry = parse_entry("any-precision: widths=[3, 4], codebook_bits=8")
    assert entry.method == "any-precision" and entry.options == {"widths": (3, 4), "codebook_bits": 8}
    assert parse_entry("mixllm: bits=[4.4, 5]").bits == (4.4, 5.0) and parse_entry("cmpq: bits=3").bits == (
        3.0,
    )
    assert entry.name == "any-precision (widths=[3, 4], codebook_bits=8)"
    assert parse_entry("gptq: name='plain: GPTQ', clip=false").name == "plain: GPTQ"
    for text, match in (
        ("gptqq", "unknown method"),
        ("gptq: clip", "expected METHOD"),
        ("gptq: clip=false, clip=true", "expected METHOD"),
        ("gptq: clap=true", "'clap' is no option"),
        ("gptq: method='rtn'", "'method' is no option"),
        ("gptq: bits='3'", "bits must be"),
        ("gptq: name='unquantized'", "name of the model itself"),
    ):
        with pytest.raises(InputError, match=match):
            parse_entry(text)


@pytest.mark.usefixtures("in_process")
def test_mistakes_show_before_any_work(
    model_dir: Callable[[str], Path], settings: Settings, tmp_path: Path
) -> None:
    model, out = model_dir("llama"), tmp_path / "out"
    for entries, match in (
        (("rtn: damp=0.1",), "no use for it"),
        (("gptq: group_size=0",), "group_size .*0: expected a whole number from 1"),
        (("gptq", "gptq"), "same name"),
        ((), "nothing to compare"),
    ):
        with pytest.raises(InputError, match=match):
            run(model, out, settings, entries)
    with pytest.raises(InputError, match="rtn: it has whole widths"):
        compare(model, out, [parse_entry("rtn")], (2.5,), settings)
    with pytest.raises(InputError, match="none"):
        run(model, out, Settings(**{**vars(settings), "text": str(tmp_path / "none.txt")}))
    assert not out.exists()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "work").mkdir()
    for taken in (tmp_path / "thesis", model_dir("llama") / "config.json"):
        with pytest.raises(InputError, match="holds something else"):
            run(model, taken, settings, ("rtn",))
    assert (tmp_path / "thesis" / "work").exists()


def test_resolved_options() -> None:
    def of(method: str, bits: float, **options: Any) -> dict[str, Any]:
        return resolved({"name": "", "method": method, "bits": bits, "options": options})

    assert of("rtn", 3) == {"group_size": 128}
    assert of("gptq", 3, clip=False, embed_bits=8) == {"group_size": 128, "embed_bits": 8, "clip": False}
    assert of("gptq", 3, clip=True, embed_bits=16) == {"group_size": 128}
    assert of("atom", 8) == {"group_size": 128, "outlier_channels": None}
    assert of("two-four-sixteen", 2.6) == {"group_size": 16, "exclusive_outliers": 0.002}
    assert of("anybit", 2.5, kept_channels=0.0) == {"kept_channels": 0.0}
    assert of("any-precision", 2, widths=[2, 3]) == {"widths": (2, 3)}
    assert of("squeezellm", 3, sensitive_outliers=0.01) == {
        "sensitive_outliers": 0.01,
        "magnitude_outliers": 0.0,
    }
