"""What importing costs and needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

# What a bare GPU machine lacks: the library must load and run without it.
ABSENT = ("gguf", "typer", "rich", "matplotlib", "datasets", "lm_eval", "anybit._native")

BARE = f"""
import sys
for name in {ABSENT!r}:
    sys.modules[name] = None  # makes its import fail
import anybit, anybit.driver, anybit.kernels, anybit.layers, anybit.loader, anybit.integrations.transformers
assert not anybit.kernels.info()["cpu"]["available"]
print("fine")
"""


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.e2e
def test_the_library_imports_with_few_packages() -> None:
    assert run(BARE) == "fine\n"


@pytest.mark.e2e
def test_the_api_is_there_after_import_anybit() -> None:
    code = (
        "import anybit; print(all(getattr(anybit, n) for n in anybit.__all__), bool(anybit.kernels.info()))"
    )
    assert run(code) == "True True\n"


def test_import_anybit_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'numpy'} & set(sys.modules)"
    assert run(f"import sys, anybit; print({heavy})") == "set()\n"
