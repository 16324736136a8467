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
    from anybit.config import LayerSpec, TileSpec
    from anybit.driver import quantize
    from anybit.engine.engine import Engine
    from anybit.engine.sampling import Sampling
    from anybit.evaluation.measure import evaluate
    from anybit.kv_cache import QuantizedCache
    from anybit.layers import set_bits
    from anybit.loader import load
    from anybit.methods import options
    from anybit.methods.any_precision import AnyPrecision
    from anybit.methods.anybit import AnyBit
    from anybit.methods.atom import Atom
    from anybit.methods.awq import AWQ
    from anybit.methods.cmpq import CMPQ
    from anybit.methods.gptq import GPTQ
    from anybit.methods.llm_mq import LLMMQ
    from anybit.methods.mixllm import MixLLM
    from anybit.methods.rtn import RTN
    from anybit.methods.smoothquant import SmoothQuant
    from anybit.methods.squeezellm import SqueezeLLM
    from anybit.methods.two_four_sixteen import TwoFourSixteen

__version__ = "0.1.0"
__all__ = [
    "AWQ",
    "CMPQ",
    "GPTQ",
    "LLMMQ",
    "RTN",
    "AnyBit",
    "AnyPrecision",
    "Atom",
    "Engine",
    "LayerSpec",
    "MixLLM",
    "QuantizedCache",
    "Sampling",
    "SmoothQuant",
    "SqueezeLLM",
    "TileSpec",
    "TwoFourSixteen",
    "evaluate",
    "kernels",
    "load",
    "options",
    "quantize",
    "set_bits",
]

_API = {
    "quantize": "anybit.driver",
    "evaluate": "anybit.evaluation.measure",
    "load": "anybit.loader",
    "options": "anybit.methods",
    "set_bits": "anybit.layers",
    "Engine": "anybit.engine.engine",
    "LayerSpec": "anybit.config",
    "QuantizedCache": "anybit.kv_cache",
    "Sampling": "anybit.engine.sampling",
    "TileSpec": "anybit.config",
}


def __getattr__(name: str) -> Any:
    if name == "kernels":
        return importlib.import_module("anybit.kernels")
    if name not in _API and name in __all__:  # the options of a method
        methods = importlib.import_module("anybit.methods").METHODS.values()
        return next(m.options for m in methods if m.options.__name__ == name)
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
