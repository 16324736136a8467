"""anybit: compress large language models to any average bit-width and run them fast.

`import anybit` teaches Transformers to read anybit's artifacts (that, once Transformers itself is imported, is the
one thing done at import) and costs milliseconds: torch and Transformers are imported when they are first needed.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anybit import kernels
    from anybit.config import LayerSpec, QuantizeConfig, TileSpec
    from anybit.driver import quantize
    from anybit.evaluation.measure import evaluate
    from anybit.kv_cache import QuantizedCache
    from anybit.loader import load

__version__ = "0.1.0"
__all__ = [
    "LayerSpec",
    "QuantizeConfig",
    "QuantizedCache",
    "TileSpec",
    "evaluate",
    "kernels",
    "load",
    "quantize",
]

_API = {
    "quantize": "anybit.driver",
    "evaluate": "anybit.evaluation.measure",
    "load": "anybit.loader",
    "LayerSpec": "anybit.config",
    "QuantizeConfig": "anybit.config",
    "QuantizedCache": "anybit.kv_cache",
    "TileSpec": "anybit.config",
}


def __getattr__(name: str) -> Any:
    if name == "kernels":
        return importlib.import_module("anybit.kernels")
    if name not in _API:
        raise AttributeError(f"module 'anybit' has no attribute {name!r}")
    return getattr(importlib.import_module(_API[name]), name)


class _RegisterWithTransformers(importlib.abc.MetaPathFinder):
    """Registers the quantizer right after Transformers loads its own table of them, whichever import comes first."""

    TARGET = "transformers.quantizers.auto"

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self.TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load_module = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                load_module(module)
                _register()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _register() -> None:
    importlib.import_module("anybit.integrations.transformers")  # registers at its end


if _RegisterWithTransformers.TARGET in sys.modules:
    _register()
elif not any(isinstance(finder, _RegisterWithTransformers) for finder in sys.meta_path):
    sys.meta_path.insert(0, _RegisterWithTransformers())
