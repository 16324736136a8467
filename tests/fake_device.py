"""A second device without hardware: CPU tensors that say they are elsewhere, and refuse to meet those that are not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

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
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    away = [t for t in tensors if isinstance(t, Away)]
    if away and func._schema.name not in COPIES:
        here = [t for t in tensors if not isinstance(t, Away) and t.ndim]
        assert not here, (
            f"{func} of tensors on two devices: {[(list(t.shape), str(t.device)) for t in tensors]}"
        )
    device = kwargs.get("device")
    is_away = bool(away) if device is None else torch.device(device).type == NAME
    if func._schema.name == "aten::copy_":
        is_away = isinstance(args[0], Away)
    if device is not None and is_away:
        kwargs = {**kwargs, "device": "cpu"}
    out = func(*tree_map(held, args), **tree_map(held, kwargs))
    known = {id(t.held): t for t in away}  # in-place operations return their argument

    def taken(t: Any) -> Any:
        return known[id(t)] if id(t) in known else Away(t) if is_away and isinstance(t, Tensor) else t

    return tree_map(taken, out)
