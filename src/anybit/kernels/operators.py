"""A quantized weight's products as operators of PyTorch, for whoever traces a model or differentiates through it.

An operator gets the weight in one of two ways. In a running model it has a name in this process, and `stored` is empty.
In a program of `torch.export` it is the stored tensors and their description: they belong to the program, which then
runs in any process that has imported anybit.layers.
"""

from __future__ import annotations

import itertools
import json
import threading
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.weak import WeakIdKeyDictionary

from anybit.errors import InputError
from anybit.formats.layout import LayerLayout
from anybit.formats.validate import validate
from anybit.formats.weight import PackedWeight
from anybit.kernels.cpu_layer import check_precision
from anybit.kernels.dispatch import BoundWeight


class Owner(Protocol):
    """Who has a weight bound to its kernels."""

    def bound(self) -> BoundWeight: ...


_LIBRARY = torch.library.Library("anybit", "FRAGMENT")
_LIBRARY.define("matmul(Tensor x, Tensor[] stored, str weight, int out_features) -> Tensor")
_LIBRARY.define("matmul_backward(Tensor grad, Tensor[] stored, str weight, int in_features) -> Tensor")
_LIBRARY.define("rows(Tensor ids, Tensor[] stored, str weight, int in_features) -> Tensor")

_NUMBERS = itertools.count()
_OWNERS: weakref.WeakValueDictionary[str, Owner] = weakref.WeakValueDictionary()
# Of exported programs: first stored tensor -> (description, all tensors and their versions, BoundWeight).
_EXPORTED = WeakIdKeyDictionary()
_BINDING = threading.Lock()


def register(owner: Owner) -> str:
    """The name by which operators of this process find `owner`, which is not kept alive."""
    name = f"layer {next(_NUMBERS)}"
    _OWNERS[name] = owner
    return name


def describe(layout: LayerLayout, running: LayerLayout, codebook_precision: str) -> str:
    """What operators need to know of stored tensors: their layout, the level to run at, and how precisely."""
    described = {"layout": layout.to_json(), "running": running.to_json()}
    return json.dumps(described | {"codebook_precision": codebook_precision})


def _bound(stored: list[Tensor], weight: str) -> BoundWeight:
    if not stored:
        if (owner := _OWNERS.get(weight)) is None:
            raise InputError(
                f"a traced program asks for {weight}, which is gone: what torch.compile made runs only while its model "
                "lives, in its process; torch.export makes programs that hold their weights"
            )
        return owner.bound()
    with _BINDING:
        found = _EXPORTED.get(stored[0])
        if found is None or found[0] != weight or not _unchanged(found[1], stored):
            versions = [(weakref.ref(tensor), _version(tensor)) for tensor in stored]
            found = _EXPORTED[stored[0]] = weight, versions, _bind(stored, weight)
        return found[2]


def _version(tensor: Tensor) -> int:
    """How often it was changed in place, where PyTorch counts that."""
    return 0 if tensor.is_inference() else tensor._version


def _unchanged(before: list[tuple[weakref.ref[Tensor], int]], stored: list[Tensor]) -> bool:
    return len(before) == len(stored) and all(
        ref() is tensor and version == _version(tensor) for (ref, version), tensor in zip(before, stored)
    )


def _bind(stored: list[Tensor], weight: str) -> BoundWeight:
    """The weight that an exported program brings, checked as an artifact is.

    Beside the program's tensors, which nobody may take away, the kernels have the bytes in their own order.
    """
    try:
        given = json.loads(weight)
        layout, running = (
            LayerLayout.from_json("an exported layer", given[key]) for key in ("layout", "running")
        )
        # Copies: the kernels keep some, and may not keep alive the key under which they are found.
        tensors = {field: t.clone() for field, t in zip(layout.stored_tensors(), stored, strict=True)}
        packed = PackedWeight(layout, tensors)
        validate("an exported layer", packed)
        validate("an exported layer", packed.prefix(running))
        return BoundWeight(packed, check_precision(given["codebook_precision"])).at(running)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"the exported program is damaged: {error}; export the model again") from error


def is_plain(x: Tensor) -> bool:
    """Whether kernels may read the memory of x as its numbers, and nobody records what is called.

    Neither are fake tensors, subclasses, tensors that a transform has wrapped or that are read with another sign; nor
    is any tensor under a mode or while torch.jit traces.
    """
    if torch._C._len_torch_dispatch_stack() or torch.jit.is_tracing():
        return False
    if type(x) not in (Tensor, torch.nn.Parameter) or x.is_neg():
        return False
    try:
        return x.data_ptr() != 0 or x.numel() == 0
    except RuntimeError:  # it has no memory
        return False


def refuse_tangent(x: Tensor) -> None:
    """Products are differentiated backwards only.

    Raises:
        InputError: x carries a tangent of forward-mode differentiation.
    """
    if forward_ad.unpack_dual(x).tangent is not None:
        raise InputError(
            "inputs carry a tangent of forward-mode differentiation, which quantized layers do not have: use "
            "reverse mode, such as torch.autograd.grad"
        )


class Product(torch.autograd.Function):
    """`x [..., in] @ W^T` of a weight bound to its kernels; the gradient of x is that of the weight that ran."""

    @staticmethod
    def forward(x: Tensor, bound: BoundWeight) -> Tensor:
        return bound.matmul(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, BoundWeight], output: Tensor) -> None:
        ctx.bound = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _times_stored(grad, ctx.bound), None


def _times_stored(grad: Tensor, bound: BoundWeight) -> Tensor:
    return grad @ bound.dequantize(grad.dtype).to(grad.device)


@torch.library.impl(_LIBRARY, "matmul", "CompositeExplicitAutograd")
def _matmul(x: Tensor, stored: list[Tensor], weight: str, out_features: int) -> Tensor:
    bound = _bound(stored, weight)
    if out_features != bound.out_features:
        raise InputError(f"{bound.out_features} output features, not {out_features}")
    return bound.matmul(x)


@torch.library.register_fake("anybit::matmul", lib=_LIBRARY)
def _(x: Tensor, stored: list[Tensor], weight: str, out_features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


@torch.library.impl(_LIBRARY, "matmul_backward", "CompositeExplicitAutograd")
def _matmul_backward(grad: Tensor, stored: list[Tensor], weight: str, in_features: int) -> Tensor:
    return _times_stored(grad, _bound(stored, weight))


@torch.library.register_fake("anybit::matmul_backward", lib=_LIBRARY)
def _(grad: Tensor, stored: list[Tensor], weight: str, in_features: int) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], in_features)


@torch.library.impl(_LIBRARY, "rows", "CompositeExplicitAutograd")
def _rows(ids: Tensor, stored: list[Tensor], weight: str, in_features: int) -> Tensor:
    return _bound(stored, weight).rows(ids)


@torch.library.register_fake("anybit::rows", lib=_LIBRARY)
def _(ids: Tensor, stored: list[Tensor], weight: str, in_features: int) -> Tensor:
    return ids.new_empty(ids.shape[0], in_features, dtype=torch.float32)


def _mapped(
    _: Any, in_dims: tuple[Any, ...], x: Tensor, stored: list[Tensor], weight: str, out_features: int
) -> tuple[Tensor, int]:
    """Of torch.vmap: all tokens are one batch."""
    if in_dims[0] is None:
        raise InputError("torch.vmap maps the inputs of a quantized layer, not its weight")
    return torch.ops.anybit.matmul(x.movedim(in_dims[0], 0), stored, weight, out_features), 0


torch.library.register_vmap("anybit::matmul", _mapped, lib=_LIBRARY)


def _keep(ctx: Any, inputs: tuple[Tensor, list[Tensor], str, int], output: Tensor) -> None:
    x, stored, ctx.weight, _ = inputs
    ctx.width = x.shape[-1]
    ctx.save_for_backward(*stored)


def _through(operator: Any, ctx: Any, grad: Tensor) -> tuple[Tensor, list[None], None, None]:
    stored = list(ctx.saved_tensors)
    return operator(grad, stored, ctx.weight, ctx.width), [None for _ in stored], None, None


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, list[None], None, None]:
    return _through(torch.ops.anybit.matmul_backward, ctx, grad)


def _backward_of_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, list[None], None, None]:
    return _through(torch.ops.anybit.matmul, ctx, grad)


torch.library.register_autograd("anybit::matmul", _backward, setup_context=_keep, lib=_LIBRARY)
torch.library.register_autograd(
    "anybit::matmul_backward", _backward_of_backward, setup_context=_keep, lib=_LIBRARY
)
