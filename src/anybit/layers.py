"""The modules that stand where a model had `nn.Linear`, `Conv1D` and `nn.Embedding`."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anybit.errors import InputError
from anybit.formats.layout import LayerLayout, code_bits
from anybit.formats.levels import Level, largest
from anybit.formats.weight import PackedWeight
from anybit.kernels import operators
from anybit.kernels.dispatch import Prepared

CODEBOOK_PRECISIONS = ("fp16", "int8")  # that codebooks by row are multiplied in
_PREPARING = threading.Lock()  # of any module: the first call may come from several threads at once


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
        self._exact = True
        for field, (dtype, shape) in layout.stored_tensors().items():
            if "." in field and field.partition(".")[0] not in self._modules:
                self.add_module(field.partition(".")[0], nn.Module())
            self._set(field, torch.zeros(shape, dtype=dtype))  # never what lay in memory before
        self._prepared: Prepared | None = None
        self.register_state_dict_post_hook(_stored_bytes)
        self._name = operators.register(self)
        self._describe()

    def _describe(self) -> None:
        """Note what a traced program is told of the layer (made beforehand: tracing is no time for it)."""
        self._described = operators.describe(self.layout, self._running, self._exact)

    def matmul(self, x: Tensor) -> Tensor:
        """`x [..., in] @ W^T -> [..., out]` in the dtype of x; see `kernels.dispatch.Prepared.matmul`.

        A gradient passes through the stored matrix, straight through the rounding of inputs.
        """
        if torch.compiler.is_compiling():
            return torch.ops.anybit.matmul(x, *self._operands(), self.layout.shape[0])
        if x.requires_grad and torch.is_grad_enabled():
            return operators.Product.apply(x, self.prepared())
        return self.prepared().matmul(x)

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
        with _PREPARING:
            return PackedWeight(self.layout, {f: self.get_buffer(f) for f in fields} | self._restored())

    def _restored(self) -> dict[str, Tensor]:
        """The stored tensors whose buffers are empty: all that the kernels took, but of a nested layer nothing."""
        return {} if self._prepared is None or self.layout.widths else self._prepared.restore()

    def prepared(self) -> Prepared:
        """The weight bound to its kernels: at the first call, and anew after the buffers moved or the width changed."""
        found = self._prepared
        if found is not None:
            return found
        packed = self.packed
        with _PREPARING:
            if self._prepared is None:
                made = Prepared(packed.prefix(self._running), self._exact)
                for field in () if self.layout.widths else made.taken:
                    self._set(field, torch.empty(0, dtype=packed.tensors[field].dtype))
                self._prepared = made
            return self._prepared

    def _give_back(self, running: LayerLayout | None = None) -> None:
        """Let the buffers hold everything again, and run as another layout from now on where one is given."""
        with _PREPARING:
            for field, tensor in self._restored().items():
                self._set(field, tensor)
            self._prepared = None
            self._running = running or self._running
        self._describe()

    @property
    def bits(self) -> float:
        """The average width of the codes that the layer runs with."""
        return code_bits([self._running])

    def set_level(self, layout: LayerLayout) -> None:
        """Run with the first rows of the stored tensors that a layout names, from the next call on; copies no plane."""
        if layout != self._running:
            self._give_back(layout)

    def extend(self, layout: LayerLayout, fill: Callable[[str, Tensor], None]) -> None:
        """Become `layout`, whose tensors begin with the stored ones; `fill(field, tensor)` gets all that got longer."""
        self._give_back()
        for field, (dtype, shape) in layout.stored_tensors().items():
            try:
                old: Tensor | None = self.get_buffer(field)
            except AttributeError:
                old = None
            if old is None or tuple(old.shape) != shape:
                new = torch.zeros(shape, dtype=dtype, device=next(self.buffers()).device)
                if old is not None:
                    new[: len(old)] = old
                fill(field, new)
                self._set(field, new)
        self.layout = self._running = layout
        self._describe()

    @property
    def exact(self) -> bool:
        """Whether the layer multiplies what is stored, or what `kernels.dispatch.Prepared` rounds it to."""
        return self._exact

    @exact.setter
    def exact(self, exact: bool) -> None:
        if exact != self._exact:
            self._exact = exact
            self._give_back()

    def _apply(self, fn: Any, recurse: bool = True) -> PackedModule:
        """Move devices, but keep every stored dtype: scales are float16 whatever the model computes in."""
        self._give_back()
        stored = {id(buffer) for buffer in self.buffers()}

        def move(tensor: Tensor) -> Tensor:
            if id(tensor) not in stored or not tensor.is_floating_point():
                return fn(tensor)
            return fn(tensor.view(torch.uint8)).view(tensor.dtype)  # bytes: no cast can touch them

        return super()._apply(move, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._give_back()
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """All stored tensors and no native object, made anew in a copy; other threads may run this one meanwhile."""
        with _PREPARING:
            state = self.__dict__ | {"_prepared": None, "_buffers": dict(self._buffers)}
            state["_modules"] = {name: copy.copy(module) for name, module in self._modules.items()}
            for module in state["_modules"].values():
                module.__dict__["_buffers"] = dict(module._buffers)
            for field, tensor in self._restored().items():
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
            nn.Parameter(torch.empty(self.out_features, dtype=dtype), requires_grad=False) if bias else None
        )

    def forward(self, x: Tensor) -> Tensor:
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
            values = self.prepared().rows(flat)
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


def check_precision(precision: str) -> None:
    """Refuse a precision that codebooks do not run in.

    Raises:
        InputError: with those that there are.
    """
    if precision not in CODEBOOK_PRECISIONS:
        raise InputError(f"codebook precision {precision!r}: expected {' or '.join(CODEBOOK_PRECISIONS)}")


def set_codebook_precision(model: nn.Module, precision: str) -> None:
    """From the next call on, run codebooks by row as stored ("fp16"), or inputs and centroids of 8 bits ("int8").

    Raises:
        InputError: another precision.
    """
    check_precision(precision)
    for module in model.modules():
        if isinstance(module, PackedModule):
            module.exact = precision == "fp16"
