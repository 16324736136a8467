"""What mypy is told of the native extension is what there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import anybit
from anybit.kernels import cpu

if not cpu.available():
    pytest.skip(str(cpu.why_not()), allow_module_level=True)

from anybit import _native

pytestmark = pytest.mark.native

STUB = ast.parse((Path(anybit.__file__).parent / "_native.pyi").read_text(encoding="utf-8"))


def told(body: list[Any]) -> dict[str, list[str]]:
    """Names of functions, and of their parameters but for `self`."""
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    return {f.name: [a.arg for a in f.args.args if a.arg != "self"] for f in functions}


def there(holder: Any) -> dict[str, list[str]]:
    """The same of a module or class, as nanobind documents it."""
    found = {}
    for name, item in vars(holder).items():
        if isinstance(item, property):
            found[name] = []
        elif callable(item) and not isinstance(item, type) and (name == "__init__" or name[0] != "_"):
            (signature,) = re.findall(rf"^{name}\((.*)\) -> ", str(item.__doc__), flags=re.M)
            parameters = re.sub(r"\[[^\[\]]*\]", "", re.sub(r"\[[^\[\]]*\]", "", signature)).split(", ")
            found[name] = [p.split(":")[0].split(" =")[0] for p in parameters if p not in ("self", "")]
    return found


def test_functions_and_classes_are_those_of_the_stub() -> None:
    classes = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
    assert there(_native) == told(STUB.body)
    assert {name for name, item in vars(_native).items() if isinstance(item, type)} == classes.keys()
    for name, node in classes.items():
        assert there(getattr(_native, name)) == told(node.body), name
