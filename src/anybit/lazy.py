"""PyTorch, imported when something of it is first asked for: what `lazy import torch` is to be (PEP 810).

It takes seconds to import, and hundreds of megabytes. What runs a stored model natively passes through modules that
also quantize and pack, and asks for nothing of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any


class Lazy:
    """A module that is not imported yet."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        self.__dict__[name] = found = getattr(
            import_module(self._name), name
        )  # the next time is a plain attribute
        return found


if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import functional
else:
    torch, functional = Lazy("torch"), Lazy("torch.nn.functional")
    Tensor = "torch.Tensor"  # for annotations only

__all__ = ["Tensor", "functional", "torch"]
