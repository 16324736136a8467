"""CONTRIBUTING's recipe for a method, done: its file, registered as it says, does everything that it promises."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import anybit
from anybit.artifact.verify import verify
from anybit.cli.quantize import MethodOptions, Run, _options, _refuse_without_text
from anybit.errors import InputError
from anybit.formats.weight import pack
from anybit.methods import METHODS, options
from tests.builders import random

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
(CODE,) = re.findall(r'```python\n("""Sigma.*?)```', TEXT, re.S)


@pytest.fixture
def sigma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The file as CONTRIBUTING has it, among the methods for the length of a test."""
    file = tmp_path / "sigma.py"
    file.write_text(CODE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("sigma", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "sigma", module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(METHODS, "sigma", module.METHOD)
    return module


def oracle(weight: np.ndarray, bits: int, sigmas: float) -> np.ndarray:
    """Weight by weight, from the words of the recipe alone."""
    out = np.zeros_like(weight)
    most = 2 ** (bits - 1) - 1
    for i, row in enumerate(weight):
        scale = float(np.float16(sigmas * np.sqrt(np.mean((row - row.mean()) ** 2)) / most))
        for j, value in enumerate(row):
            steps = round(value / scale) if scale else 0
            out[i, j] = scale * min(max(steps, -most - 1), most)
    return out


def test_it_quantizes_as_it_says(sigma: ModuleType, model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    made = anybit.quantize(model_dir("llama"), tmp_path / "out", sigma.Sigma(bits=4, sigmas=2.5))
    verify(made.path)
    before = AutoModelForCausalLM.from_pretrained(model_dir("llama")).state_dict()
    layers = {n: m for n, m in anybit.load(made.path).named_modules() if hasattr(m, "layout")}
    assert len(layers) == 14
    for name, layer in layers.items():
        stored = layer(torch.eye(layer.in_features)).detach().numpy().T
        np.testing.assert_allclose(
            stored, oracle(before[f"{name}.weight"].float().numpy(), 4, 2.5), rtol=1e-5, atol=1e-6
        )
    assert "--method sigma --bits 4 --sigmas 2.5" in (made.path / "README.md").read_text()


def test_what_is_planned_is_what_is_stored(sigma: ModuleType) -> None:
    for shape in ((1, 2), (5, 33), (40, 7)):
        spec = sigma.Sigma(bits=3).resolve().layer_spec()
        packed = pack(sigma.METHOD.quantize(random(*shape), None, spec))
        assert packed.layout == sigma.METHOD.layout(spec, shape)
        assert packed.nbytes == packed.layout.nbytes


def test_its_options_are_checked(sigma: ModuleType) -> None:
    assert options("sigma", sigmas=2).sigmas == 2
    with pytest.raises(InputError, match=r"sigmas \(--sigmas\) 0: expected a number from 1 to 10"):
        sigma.Sigma(sigmas=0)
    with pytest.raises(InputError, match="rtn has no use for it"):
        options("rtn", sigmas=2)
    plain = _options("sigma", MethodOptions())
    with pytest.raises(InputError, match="--calibration would be ignored: sigma is not calibrated"):
        _refuse_without_text(plain, {}, MethodOptions(), Run(calibration="a.txt"))


@pytest.mark.e2e
def test_the_command_has_it(sigma: ModuleType, model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    start = (
        "import anybit.methods, sigma; anybit.methods.METHODS['sigma'] = sigma.METHOD; "
        "from anybit.cli.main import main; main()"
    )

    def run(*arguments: str) -> str:
        command = [sys.executable, "-c", start, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout

    shown = run("methods", "sigma")
    assert "--sigmas" in shown and "Standard deviations that the grid reaches" in shown
    run("quantize", str(model_dir("llama")), "-o", "out", "--method", "sigma", "--sigmas", "2.5")
    verify(tmp_path / "out")
    again = subprocess.run(
        [sys.executable, "-m", "anybit", "inspect", "out"], check=True, capture_output=True, cwd=tmp_path
    )
    assert b"sigma" in again.stdout, "whoever loads the artifact needs no such file"
