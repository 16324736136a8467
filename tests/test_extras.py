"""Packages that not every install has: work that needs one is refused before it begins."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from anybit import demo
from anybit.compare import compare
from anybit.compare.cells import parse_entry
from anybit.errors import EXTRAS, InputError, require_extra
from anybit.evaluation.embeddings import Pairs, rank_correlation
from anybit.progress import SILENT

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_brings_its_package_and_dev_brings_every_extra(extra: str) -> None:
    named = [line.partition(">")[0] for line in PROJECT["optional-dependencies"][extra]]
    found = packages_distributions()
    assert named == [name for package in EXTRAS[extra] for name in found[package]]
    everything = next(line for line in PROJECT["optional-dependencies"]["dev"] if line.startswith("anybit["))
    assert extra in everything.removeprefix("anybit[").rstrip("]").split(",")


def test_everything_can_be_imported_without_the_extras() -> None:
    code = f"""
import pkgutil, sys
for name in {[*chain(*EXTRAS.values())]!r}:
    sys.modules[name] = None  # makes its import fail
import anybit
for module in pkgutil.walk_packages(anybit.__path__, "anybit."):
    if module.name.split(".")[-1] != "__main__" and not {{"gpu", "serve"}} & {{*module.name.split(".")[:-1]}}:
        __import__(module.name)
print(anybit.evaluation.embeddings._ranks, anybit.compare.page, anybit.demo)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("extra", "package"), [(extra, package) for extra, packages in EXTRAS.items() for package in packages]
)
def test_a_missing_package_is_named_with_the_command(
    monkeypatch: pytest.MonkeyPatch, extra: str, package: str
) -> None:
    require_extra(extra, "this")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=rf"^this needs {package}.*: pip install 'anybit\[{extra}\]'$"):
        require_extra(extra, "this")


def test_compare_and_demo_refuse_before_they_make_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"compare.*matplotlib"):
        compare("no/model", tmp_path / "out", [parse_entry("rtn")], [4])
    with pytest.raises(InputError, match=r"demo.*matplotlib"):
        demo.run(tmp_path / "out", SILENT)
    assert not (tmp_path / "out").exists()


@given(st.lists(st.tuples(st.sampled_from([-1.0, -0.5, 0.0, 0.25, 1.0]), st.integers(0, 4)), min_size=2))
def test_rank_correlation_is_scipys(cosines_and_scores: list[tuple[float, int]]) -> None:
    cosines, scores = map(list, zip(*cosines_and_scores))
    assume(len(set(scores)) > 1)  # `read_pairs` refuses others
    names = [str(i) for i in range(len(cosines))]
    made = {name: torch.tensor([cosine], dtype=torch.float64) for name, cosine in zip(names, cosines)}
    made["one"] = torch.ones(1, dtype=torch.float64)
    found = rank_correlation(made, Pairs(names, ["one"] * len(names), [float(score) for score in scores]))
    if len(set(cosines)) == 1:
        assert found is None
    else:
        assert found == pytest.approx(spearmanr(cosines, scores).statistic, abs=1e-12)
