"""A second device without hardware: CPU tensors that say they are elsewhere, and refuse to meet those that are not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "lazy"  # a device type that PyTorch knows, and that nothing implements here
COPIES = ("aten::copy_", "aten::_to_copy")  # what may take tensors from one device to another


class Away(Tensor):
    """A tensor on the fake device; `held` is its data."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Away:
        strides, offset = held.stride(), held.storage_offset()
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=strides, storage_offset=offset, dtype=held.dtype, device=NAME
        )
        made.held = held
        return made

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class FakeDevice(TorchDispatchMode):
    """While it is entered, `device="lazy"` works.

    Raises:
        AssertionError: an operation on tensors of both devices; single numbers may be on the CPU, as for CUDA.
    """

    def __enter__(self) -> FakeDevice:
        self._tensor = torch.tensor
        torch.tensor = self._made  # type: ignore[assignment] - a mode does not see it
        torch.lazy = torch.cpu  # type: ignore[attr-defined] - where torch.utils.checkpoint looks
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.tensor = self._tensor  # type: ignore[assignment]
        del torch.lazy  # type: ignore[attr-defined]

    def _made(self, data: Any, *, device: Any = None, **options: Any) -> Tensor:
        made = self._tensor(data, **options)
        return made if device is None else made.to(device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def held(tensor: Any) -> Any:
    """A tensor's data; anything else as it is."""
    return tensor.held if isinstance(tensor, Away) else tensor


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    away: list[Away] = []
    here: list[Tensor] = []
    taken, options = _taken(args, away, here), _taken(kwargs, away, here)
    name = func._schema.name
    if away and name not in COPIES and any(t.ndim for t in here):
        tensors = [(list(t.shape), str(t.device)) for t in (*away, *here)]
        raise AssertionError(f"{func} of tensors on two devices: {tensors}")
    device = kwargs.get("device")
    is_away = bool(away) if device is None else torch.device(device).type == NAME
    if name == "aten::copy_":
        is_away = isinstance(args[0], Away)
    if device is not None and is_away:
        options["device"] = "cpu"
    out = func(*taken, **options)
    if not is_away:
        return out
    return _given(out, {id(t.held): t for t in away})


def _taken(value: Any, away: list[Away], here: list[Tensor]) -> Any:
    """A value with the data of tensors instead of these, which are noted; much faster than PyTorch's tree_map."""
    if isinstance(value, Away):
        away.append(value)
        return value.held
    if isinstance(value, Tensor):
        here.append(value)
    elif isinstance(value, list | tuple):
        return type(value)([_taken(inner, away, here) for inner in value])
    elif isinstance(value, dict):
        return {name: _taken(inner, away, here) for name, inner in value.items()}
    return value


def _given(value: Any, known: dict[int, Away]) -> Any:
    """A value with its tensors on the fake device; in-place operations return their argument."""
    if isinstance(value, Tensor):
        return known[id(value)] if id(value) in known else Away(value)
    if isinstance(value, list | tuple):
        return type(value)([_given(inner, known) for inner in value])
    return value
