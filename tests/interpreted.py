"""Triton's interpreter, which runs the GPU's kernels where there is no GPU: fewer cases, and less time for each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch


def spread(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases of these axes: on a GPU every combination, else every value once or more, beside changing others."""
    if torch.cuda.is_available():
        return list(product(*axes))
    return [tuple(axis[i % len(axis)] for axis in axes) for i in range(max(map(len, axes)))]


def spare_the_interpreter() -> None:
    """Leave out what Triton's interpreter computes for nothing, over half of its time; results are the same."""
    if torch.cuda.is_available() or "triton" not in sys.modules:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    patch, numpy_type = interpreter._patch_lang, cache(interpreter._get_np_dtype)

    def patch_once(fn: Any) -> Any:
        """It patches Triton's language before each call of a function by a kernel: once a kernel is enough."""
        languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        patched = languages and not any(tl.core.is_builtin(language.load) for language in languages)
        return interpreter._LangPatchScope() if patched else patch(fn)

    def known_type(kind: Any) -> Any:
        """It makes a table of all types to look up one."""
        return np.dtype(np.uint64) if isinstance(kind.scalar, tl.pointer_type) else numpy_type(kind.scalar)

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, known_type
    # It computes sums again in 64 bits, for an assertion that only its option `debug` makes.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
