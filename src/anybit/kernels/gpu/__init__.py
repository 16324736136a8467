"""Triton kernels for the stored formats on a GPU; what they compute: kernels/reference.py.

Nothing here imports Triton before it is asked for. Without a GPU the kernels run in Triton's interpreter
(`TRITON_INTERPRET=1` before the first import of triton), on tensors of the CPU.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from anybit.formats.weight import PackedWeight
    from anybit.kernels.gpu.layer import Layer


def why_not() -> str | None:
    """Why the kernels cannot be used; None where they can."""
    if find_spec("triton") is None:
        return "Triton is not there: `pip install triton`, or a CUDA build of PyTorch, which brings it"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return (
            None if major >= 8 else f"this GPU has compute capability {major}.{minor}, expected 8.0 or above"
        )
    import triton

    if triton.knobs.runtime.interpret:
        return None
    return "PyTorch finds no GPU here"


def available() -> bool:
    """Whether the kernels run here, on a GPU or in the interpreter."""
    return why_not() is None


def where() -> str:
    """What the kernels run on."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "Triton's interpreter"


def bind(weight: PackedWeight) -> Layer:
    """A packed weight bound to the kernels of its device."""
    from anybit.kernels.gpu.layer import Layer

    return Layer(weight.layout, weight.tensors)
