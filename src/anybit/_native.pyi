"""The native extension (csrc/module): kernels for the CPU, on contiguous tensors of it unless it says otherwise.

Tensors of a wrong dtype, shape, layout or address raise ValueError, and so do descriptions; arguments of another type
raise TypeError.
"""

from collections.abc import Sequence

from numpy import float32, int32
from numpy.typing import NDArray
from torch import Tensor

from anybit.config import Json

class PlaneWriter:
    """Codes planes, given the planes above them, as one stream; see csrc/coding/plane_coder.h."""

    def __init__(self) -> None: ...
    def write(
        self, plane: int, above: Sequence[Tensor], shapes: Tensor, columns: int, words: Tensor
    ) -> None: ...
    def finish(self) -> bytes: ...

class PlaneReader:
    """Planes that a PlaneWriter has coded."""

    def __init__(self, coded: Tensor) -> None: ...
    def read(
        self, plane: int, above: Sequence[Tensor], shapes: Tensor, columns: int, words: Tensor
    ) -> None: ...
    def finish(self) -> None: ...

class Tables:
    """The tables of nested tiles, as one instruction set's kernels look them up."""

    def __init__(self, tables: Tensor, isa: str | None = None, int8: bool = False) -> None: ...

class Layer:
    """A stored layer, checked and bound to kernels; see csrc/layer/layer.h."""

    def __init__(
        self,
        layout: Json,
        fields: dict[str, Tensor],
        int8_codebooks: bool = False,
        tables: Tables | None = None,
        threads: int = 1,
        isa: str | None = None,
    ) -> None: ...
    def at(self, layout: Json) -> Layer: ...
    @property
    def repacked(self) -> list[str]: ...
    @property
    def int8_group_size(self) -> int: ...
    @property
    def has_rows(self) -> bool: ...
    def unpack(self, fields: dict[str, Tensor], threads: int) -> None: ...
    def matmul(self, x: Tensor, threads: int) -> Tensor | None: ...
    def product(self, x: Tensor, scales: Tensor | None, y: Tensor, add: bool, threads: int) -> None: ...
    def dequantize(self, out: Tensor, threads: int) -> None: ...
    def rows(self, ids: Tensor, out: Tensor) -> None: ...

PAGE_TOKENS: int

class NotFiniteError(ArithmeticError):
    """A hidden state or a logit is NaN or Inf; the message names the layer."""

class KvCache:
    """Pages of PAGE_TOKENS tokens, of keys and values of 16, 8 or 4 bits."""

    def __init__(self, blocks: int, kv_heads: int, head_size: int, bits: int, pages: int) -> None: ...
    @property
    def pages(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...

class Decoder:
    """A decoder-only transformer on stored layers; see csrc/engine/decoder.h."""

    def __init__(self, description: Json, rounds: bool) -> None: ...
    def add_level(self, embedding: Layer, head: Layer, blocks: Sequence[Sequence[Layer]]) -> int: ...
    def step(
        self,
        tokens: NDArray[int32],
        positions: NDArray[int32],
        sequences: NDArray[int32],
        pages: NDArray[int32],
        wanted: NDArray[int32],
        logits: NDArray[float32],
        level: int,
        cache: KvCache,
        threads: int,
    ) -> None: ...

MAX_THREADS: int

def cpu_features() -> dict[str, bool]: ...
def isa() -> str: ...
def matmul_isa() -> str: ...
def matmul_isas() -> list[str]: ...
def matmul_needs() -> dict[str, list[str]]: ...
def few_tokens(bf16: bool, isa: str | None = None) -> int: ...
def quantize_activations(
    x: Tensor,
    clip: Tensor | None,
    fixed: Tensor | None,
    bits: int,
    group_size: int,
    codes: Tensor,
    scales: Tensor,
    isa: str | None = None,
) -> None: ...
def has_moments() -> bool: ...
def moments(x: Tensor, h: Tensor, threads: int) -> None: ...
def gptq_block(
    weight: Tensor,
    hinv: Tensor,
    scales: Tensor,
    zeros: Tensor,
    maxq: Tensor,
    codes: Tensor,
    error: Tensor,
    threads: int,
    isa: str | None = None,
) -> None: ...
def kmeans(
    weight: Tensor,
    importance: Tensor | None,
    seed_bits: int,
    bits: int,
    codes: Tensor,
    centroids: Tensor,
    threads: int,
    isa: str | None = None,
) -> None: ...
def nested_codes(
    targets: Tensor,
    inverse: Tensor,
    tables: Tensor,
    shapes: Tensor,
    scales: Tensor,
    weights: Tensor,
    low: int,
    codes: Tensor,
    errors: Tensor,
    threads: int,
    isa: str | None = None,
) -> None: ...
def nested_descent(
    slopes: Tensor,
    hessian: Tensor,
    weight: Tensor,
    tables: Tensor,
    shapes: Tensor,
    scales: Tensor,
    weights: Tensor,
    codes: Tensor,
    errors: Tensor,
    losses: Tensor,
    threads: int,
    isa: str | None = None,
) -> None: ...
def nested_fit(
    weight: Tensor,
    importance: Tensor,
    tables: Tensor,
    shapes: Tensor,
    scales: Tensor,
    threads: int,
    isa: str | None = None,
) -> None: ...
