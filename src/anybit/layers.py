"""The modules that stand where a model had `nn.Linear`, `Conv1D` and `nn.Embedding`."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anybit.errors import InputError
from anybit.formats.layout import LayerLayout, code_bits
from anybit.formats.levels import Level, largest
from anybit.formats.weight import PackedWeight
from anybit.kernels import operators
from anybit.kernels.cpu_layer import check_precision
from anybit.kernels.dispatch import BoundWeight

_BINDING = threading.Lock()  # of any module: the first call may come from several threads at once


class PackedModule(nn.Module):
    """Holds a layer's stored tensors as buffers, so that `state_dict` is what the artifact stores.

    Once the layer has run, the bytes that its kernels read in an order of their own are held in that order only: their
    buffers are empty, and filled again for whatever moves the layer (`.to`, a copy); `state_dict` and `packed` have all
    bytes, `buffers()` has not.
    """

    def __init__(self, layout: LayerLayout) -> None:
        super().__init__()
        self.layout = layout
        self._running = layout.widest()  # what it runs as
        self._precision = "fp16"
        for field, (dtype, shape) in layout.stored_tensors().items():
            if "." in field and field.partition(".")[0] not in self._modules:
                self.add_module(field.partition(".")[0], nn.Module())
            self._set(field, torch.zeros(shape, dtype=dtype.torch))  # never what lay in memory before
        self._bound: BoundWeight | None = None
        self.register_state_dict_post_hook(_stored_bytes)
        self._name = operators.register(self)
        self._describe()

    def _describe(self) -> None:
        """Note what a traced program is told of the layer (made beforehand: tracing is no time for it)."""
        self._described = operators.describe(self.layout, self._running, self._precision)

    def matmul(self, x: Tensor) -> Tensor:
        """`x [..., in] @ W^T -> [..., out]` in the dtype of x; see `kernels.dispatch.BoundWeight.matmul`.

        A gradient passes through the stored matrix, straight through the rounding of inputs.
        """
        if torch.compiler.is_compiling():
            return torch.ops.anybit.matmul(x, *self._operands(), self.layout.shape[0])
        bound, differentiated = self._bound, x.requires_grad and torch.is_grad_enabled()
        if bound is not None and not differentiated and (y := bound.native_matmul(x)) is not None:
            return y
        operators.refuse_tangent(x)
        if not operators.is_plain(x):  # PyTorch knows what to do with it: an operator sees plain ones
            return torch.ops.anybit.matmul(x, [], self._name, self.layout.shape[0])
        return operators.Product.apply(x, self.bound()) if differentiated else self.bound().matmul(x)

    def _operands(self) -> tuple[list[Tensor], str]:
        """How operators get the weight: by name, or in a program of `torch.export` as what is stored."""
        if not torch.compiler.is_exporting():
            return [], self._name
        fields = self.layout.stored_tensors()
        stored = [self.get_buffer(field) for field in fields]
        if any(tensor.shape != shape for tensor, (_, shape) in zip(stored, fields.values())):
            raise InputError(
                "this layer's bytes are with its kernels since it ran: call `model.cpu()` before torch.export, which "
                "puts them back"
            )
        return stored, self._described

    def _set(self, field: str, tensor: Tensor) -> None:
        holder, _, name = field.rpartition(".")
        self.get_submodule(holder).register_buffer(name, tensor)

    @property
    def packed(self) -> PackedWeight:
        """The stored bytes, as they are now on this module."""
        fields = self.layout.stored_tensors()
        with _BINDING:
            return PackedWeight(self.layout, {f: self.get_buffer(f) for f in fields} | self._unpacked())

    def _unpacked(self) -> dict[str, Tensor]:
        """The stored tensors whose buffers are empty: those that the kernels hold in an order of their own."""
        return {} if self._bound is None else self._bound.unpack()

    def bound(self) -> BoundWeight:
        """The weight bound to its kernels at the level that it runs at: at the first call, and anew after `release`."""
        found = self._bound
        if found is not None:
            return found
        packed = self.packed
        with _BINDING:
            if self._bound is None:
                made = BoundWeight(packed, self._precision)
                for field in made.repacked:
                    self._set(field, torch.empty(0, dtype=packed.tensors[field].dtype))
                self._bound = made.at(self._running)
            return self._bound

    def release(self) -> None:
        """Let the buffers hold all stored tensors again; the next call binds them anew."""
        with _BINDING:
            for field, tensor in self._unpacked().items():
                self._set(field, tensor)
            self._bound = None

    @property
    def bits(self) -> float:
        """The average width of the codes that the layer runs with."""
        return code_bits([self._running])

    def set_level(self, layout: LayerLayout) -> None:
        """Run at a level, `layout`, from the next call on; copies nothing."""
        if layout == self._running:
            return
        with _BINDING:
            self._running = layout
            self._bound = None if self._bound is None else self._bound.at(layout)
        self._describe()

    def grow(self, layout: LayerLayout) -> None:
        """Become `layout`, whose tensors begin with the stored ones; what is new of them is zeros."""
        self.hold(self.packed.grown(layout))

    def hold(self, packed: PackedWeight) -> None:
        """Become another description of the same matrix, its tensors with it."""
        self.release()
        for field in self.layout.stored_tensors().keys() - packed.tensors.keys():
            holder, _, name = field.rpartition(".")
            del self.get_submodule(holder)._buffers[name]
        for field, tensor in packed.tensors.items():
            self._set(field, tensor)
        self.layout = packed.layout
        self._running = packed.layout.widest()
        self._describe()

    @property
    def codebook_precision(self) -> str:
        """What codebooks by row and the inputs that they meet are rounded to; see `kernels.dispatch.BoundWeight`."""
        return self._precision

    @codebook_precision.setter
    def codebook_precision(self, precision: str) -> None:
        if check_precision(precision) != self._precision:
            self._precision = precision
            self.release()
            self._describe()

    def _apply(self, fn: Any, recurse: bool = True) -> PackedModule:
        """Move devices, but keep every stored dtype: scales are float16 whatever the model computes in."""
        self.release()
        stored = {id(buffer) for buffer in self.buffers()}

        def move(tensor: Tensor) -> Tensor:
            if id(tensor) not in stored or not tensor.is_floating_point():
                return fn(tensor)
            return fn(tensor.view(torch.uint8)).view(tensor.dtype)  # bytes: no cast can touch them

        return super()._apply(move, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.release()
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """All stored tensors and no native object, made anew in a copy; other threads may run this one meanwhile."""
        with _BINDING:
            state = self.__dict__ | {"_bound": None, "_buffers": dict(self._buffers)}
            state["_modules"] = {name: copy.copy(module) for name, module in self._modules.items()}
            for module in state["_modules"].values():
                module.__dict__["_buffers"] = dict(module._buffers)
            for field, tensor in self._unpacked().items():
                holder, _, name = field.rpartition(".")
                part = state["_modules"][holder].__dict__ if holder else state
                part["_buffers"][name] = tensor
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._name = operators.register(self)

    def extra_repr(self) -> str:
        out_features, in_features = self.layout.shape
        widths = "+".join(str(tile.bits) for tile in self.layout.tiles)
        widths += f" of {self.layout.widths}" if self.layout.widths else ""
        return f"in_features={in_features}, out_features={out_features}, bits={widths}"


def _stored_bytes(module: PackedModule, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Put into a state dict what the buffers would hold, whatever the kernels hold of it."""
    state |= {prefix + field: tensor for field, tensor in module.packed.tensors.items()}


class QuantLinear(PackedModule):
    """`y = x W^T + b` with W quantized."""

    def __init__(self, layout: LayerLayout, bias: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(layout)
        self.out_features, self.in_features = layout.shape
        self.bias = (
            nn.Parameter(torch.zeros(self.out_features, dtype=dtype), requires_grad=False) if bias else None
        )

    def forward(self, x: Tensor) -> Tensor:
        # A narrow layer's product takes microseconds, as much as two calls more of Python's.
        bound, y = self._bound, None  # once: another thread may release it
        if bound is not None and not x.requires_grad and not torch.compiler.is_compiling():
            y = bound.native_matmul(x)
        if y is None:
            y = self.matmul(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class QuantEmbedding(PackedModule):
    """A quantized embedding table [vocabulary, hidden]; only the rows looked up are dequantized."""

    def __init__(self, layout: LayerLayout, scale: float, dtype: torch.dtype) -> None:
        super().__init__(layout)
        self.scale = scale  # Gemma multiplies its embeddings by sqrt(hidden)
        self.dtype = dtype
        self.num_embeddings, self.embedding_dim = layout.shape

    def _apply(self, fn: Any, recurse: bool = True) -> PackedModule:
        """`.to(dtype)` changes what comes out, as of an embedding of floats."""
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return super()._apply(fn, recurse)

    def forward(self, ids: Tensor) -> Tensor:
        flat = ids.reshape(-1)
        if torch.compiler.is_compiling():
            values = torch.ops.anybit.rows(flat, *self._operands(), self.embedding_dim)
        else:
            values = self.bound().rows(flat)
        return (values.to(self.dtype) * self.scale).view(*ids.shape, self.embedding_dim)


class TiedHead(nn.Module):
    """A language-model head that multiplies with the quantized embedding, which is stored once."""

    def __init__(self, embedding: QuantEmbedding) -> None:
        super().__init__()
        object.__setattr__(
            self, "embedding", embedding
        )  # not a submodule: its buffers belong to the embedding

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding.matmul(x)  # type: ignore[operator]


def set_bits(model: nn.Module, bits: float) -> float:
    """Run a model at the largest of its levels up to `bits`, from the next call on; copies no plane.

    `save_pretrained` saves what was loaded, whatever runs.

    Args:
        model: that anybit loaded.
        bits: average width.

    Returns:
        the average width that the model now runs at.

    Raises:
        InputError: a model that is not quantized, or a width beyond its levels; then nothing changes.
    """
    levels: Sequence[Level] = getattr(model, "levels", ())
    if not levels:
        raise InputError(
            "this model has no levels: load an artifact, such as `anybit quantize MODEL -o out` makes"
        )
    level = levels[largest([level.bits for level in levels], bits, "this model was loaded with")]
    for name, layout in level.layouts.items():
        module = model.get_submodule(name)
        assert isinstance(module, PackedModule)
        module.set_level(layout)
    return level.bits


def set_codebook_precision(model: nn.Module, precision: str) -> None:
    """From the next call on, run codebooks by row as they are stored ("fp16"), or with centroids and inputs of 8 bits.

    Raises:
        InputError: neither "fp16" nor "int8"; then nothing changes.
    """
    check_precision(precision)
    for module in model.modules():
        if isinstance(module, PackedModule):
            module.codebook_precision = precision
