"""What an engine is made of: a model's configuration, its small tensors, and its matrices as native layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from anybit.config import Json
from anybit.engine.description import MATRICES, Unsupported, describe
from anybit.errors import InputError
from anybit.formats.dtypes import Dtype
from anybit.formats.layout import LayerLayout
from anybit.kernels import cpu

if TYPE_CHECKING:
    from anybit import _native

Layouts = Mapping[str, LayerLayout]
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


class Source(ABC):
    """A model of one of the engine's families, as it is stored or loaded."""

    name: str  # as errors say it
    config: Json  # as Transformers writes it
    generation: Mapping[str, Any]  # what generation_config.json says
    tokenizer: Any  # None: there is none
    kv_bits: int  # of the KV-cache that the model asks for
    levels: Sequence[tuple[float, Layouts]]  # average width and layouts of each, ascending
    head: str  # name of the head's matrix: that of the embedding where both are one

    @abstractmethod
    def tensor(self, name: str) -> np.ndarray | None:
        """A norm or a bias, float32; None: there is none of this name."""

    @abstractmethod
    def layer(self, name: str, layouts: Layouts) -> _native.Layer:
        """A matrix as a level's layouts say.

        Raises:
            Unsupported: one without a native kernel.
        """

    def release(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Let go of what the layers hold themselves."""

    def restore(self) -> None:  # noqa: B027 - and nothing that was changed
        """Be as before: the engine could not be made."""

    @cached_property
    def description(self) -> Json:
        """See `describe`; its tensors are read once.

        Raises:
            Unsupported: the engine does not run the model.
        """
        return describe(self.config, self.tensor)

    def names(self) -> list[list[str]]:
        """Names of the seven matrices of each block."""
        blocks = range(self.config["num_hidden_layers"])
        return [[f"model.layers.{i}.{matrix}" for matrix in MATRICES] for i in blocks]

    def matrices(self, layouts: Layouts) -> tuple[_native.Layer, _native.Layer, list[list[_native.Layer]]]:
        """Embedding, head and the seven matrices of each block, as `_native.Decoder.add_level` takes them."""
        blocks = [[self.layer(name, layouts) for name in names] for names in self.names()]
        return self.layer(EMBEDDING, layouts), self.layer(self.head, layouts), blocks


def plain_layer(name: str, values: np.ndarray, dtype: Dtype) -> _native.Layer:
    """A matrix that is not quantized, of numbers of 16 bits; wider ones must be such numbers.

    Args:
        name: of the matrix.
        values: as `Dtype.numpy` has them.
        dtype: F16, BF16 or F32.

    Raises:
        InputError: it holds NaN or Inf.
        Unsupported: numbers of more than 16 bits.
    """
    if not finite(values, dtype):
        raise InputError(f"{name} holds NaN or Inf: its file is damaged; copy it again")
    halves = _as_half(values, dtype)
    if halves is None:
        raise Unsupported(f"{name} holds numbers of more than 16 bits")
    layout = {"shape": list(values.shape), "tiles": [{"format": "float16"}]}
    return cpu._native.Layer(layout, {"values": halves})


def _as_half(values: np.ndarray, dtype: Dtype) -> np.ndarray | None:
    """The same numbers in 16 bits: bfloat16 as uint16, or float16; None where they do not fit."""
    if dtype in (Dtype.F16, Dtype.BF16):
        return values
    if dtype is not Dtype.F32:
        return None
    bits = values.view(np.uint32)
    if not (bits & 0xFFFF).any():
        return (bits >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    return halves if np.array_equal(halves.astype(np.float32), values) else None


def finite(values: np.ndarray, dtype: Dtype) -> bool:
    """Whether numbers, as `Dtype.numpy` has them, hold neither NaN nor Inf; whole numbers do not."""
    if dtype is Dtype.BF16:
        return not ((values & 0x7F80) == 0x7F80).any()
    return bool(np.isfinite(values).all())


def floats(values: np.ndarray, dtype: Dtype) -> np.ndarray:
    """Numbers as float32."""
    if dtype is Dtype.BF16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


@contextmanager
def as_unsupported() -> Iterator[None]:
    """Say what the native code refuses.

    Raises:
        Unsupported: in place of its ValueError.
    """
    try:
        yield
    except InputError:
        raise
    except ValueError as error:
        raise Unsupported(f"its layers do not fit the engine: {error}") from error
