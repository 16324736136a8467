"""What mypy is told of the native extension is what there is."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

import anybit
from anybit.kernels import cpu

if not cpu.available():
    pytest.skip(str(cpu.why_not()), allow_module_level=True)

from anybit import _native

pytestmark = pytest.mark.native

STUB = ast.parse((Path(anybit.__file__).parent / "_native.pyi").read_text(encoding="utf-8"))


# What nanobind calls a parameter's type, and what the stub may say of it.
TYPES = {
    "object": {"Array", "Tensor", "Layer", "NDArray[int32]", "NDArray[float32]"},
    "collections.abc.Sequence[bool]": {"Sequence[bool]"},
    "collections.abc.Sequence[object]": {"Sequence[Array]"},
    "collections.abc.Sequence[collections.abc.Sequence[object]]": {"Sequence[Sequence[Layer]]"},
    "dict": {"Json", "Arrays"},
    "anybit._native.Tables": {"Tables"},
    "anybit._native.KvCache": {"KvCache"},
}


@dataclass(frozen=True)
class Parameter:
    name: str
    type: str  # but for None
    may_be_none: bool
    default: str | None  # None: there is none


def type_of(text: str) -> tuple[str, bool]:
    """A type without `| None`, and whether it had that."""
    types = [part.strip() for part in text.split("|")]
    return " | ".join(part for part in types if part != "None"), "None" in types


def parameters_of(function: ast.FunctionDef) -> list[Parameter]:
    """All but `self`."""
    given, defaults = function.args.args, function.args.defaults
    made = []
    for arg, default in zip(given, [None] * (len(given) - len(defaults)) + list(defaults)):
        if arg.arg != "self":
            assert arg.annotation is not None
            said = None if default is None else ast.unparse(default)
            made.append(Parameter(arg.arg, *type_of(ast.unparse(arg.annotation)), said))
    return made


def told(body: list[Any]) -> dict[str, list[Parameter]]:
    """Functions, and their parameters."""
    return {f.name: parameters_of(f) for f in body if isinstance(f, ast.FunctionDef)}


def there(holder: Any) -> dict[str, list[Parameter]]:
    """The same of a module or class, as nanobind documents it."""
    found = {}
    for name, item in vars(holder).items():
        if isinstance(item, property):
            found[name] = []
        elif callable(item) and not isinstance(item, type) and (name == "__init__" or name[0] != "_"):
            (signature,) = re.findall(rf"^{name}\((.*)\) -> ", str(item.__doc__), flags=re.M)
            plain = re.sub(
                r"ndarray\[(?:[^\[\]]|\[[^\[\]]*\])*\]", "object", signature
            )  # dtype, order, device
            (function,) = ast.parse(f"def f({plain}): ...").body
            assert isinstance(function, ast.FunctionDef)
            untyped = [arg for arg in function.args.args if arg.annotation is None]
            assert [arg.arg for arg in untyped] in ([], ["self"])
            found[name] = parameters_of(function)
    return found


def same(there: dict[str, list[Parameter]], told: dict[str, list[Parameter]]) -> None:
    assert there.keys() == told.keys()
    for name, parameters in there.items():
        for own, said in zip(parameters, told[name], strict=True):
            assert said.type in TYPES.get(own.type, {own.type}), (name, own, said)
            assert replace(own, type="") == replace(said, type=""), name


def test_functions_and_classes_are_those_of_the_stub() -> None:
    """Their names, and their parameters' names, types, defaults, and whether they may be None."""
    classes = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
    same(there(_native), told(STUB.body))
    assert {name for name, item in vars(_native).items() if isinstance(item, type)} == classes.keys()
    for name, node in classes.items():
        same(there(getattr(_native, name)), told(node.body))


def test_what_the_stub_says_is_raised() -> None:
    layer = _native.Layer(
        {"shape": [4, 32], "tiles": [{"format": "float16"}]}, {"values": torch.ones(4, 32).half()}
    )
    fields = MappingProxyType({"values": torch.ones(4, 32).half()})
    wrong: list[Any] = [
        lambda: _native.Layer({"shape": [4, 32], "tiles": [{"format": "float16"}]}, fields),  # no dict
        lambda: _native.Layer({"shape": [4, 32], "tiles": [{"format": "float16"}]}, {"values": "text"}),
        lambda: layer.dequantize("text", 1),
        lambda: layer.product(None, None, torch.ones(1, 4), False, 1),
        lambda: _native.Tables("text"),
    ]
    for run in wrong:
        with pytest.raises(TypeError):
            run()
    with pytest.raises(ValueError, match="out is int32"):
        layer.dequantize(torch.ones(4, 32, dtype=torch.int32), 1)
    with pytest.raises(ValueError, match="tiles is no list"):
        layer.at({"shape": [4, 32], "tiles": 3})
