"""Matrix kernels for the stored formats: fast ones where the machine has them, plain PyTorch everywhere."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anybit.kernels.dispatch import info

__all__ = ["info"]


def __getattr__(name: str) -> Any:
    if name == "info":  # its module imports PyTorch, and `kernels.cpu` does not
        return import_module("anybit.kernels.dispatch").info
    raise AttributeError(f"module 'anybit.kernels' has no attribute {name!r}")
