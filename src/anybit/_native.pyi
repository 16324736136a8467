"""The native extension (csrc/module): kernels for the CPU, on contiguous tensors of it unless it says otherwise.

Tensors of a wrong dtype, shape, layout or address raise ValueError, and so do descriptions; arguments of another type
raise TypeError.
"""

from collections.abc import Sequence
from typing import Any

from numpy import float32, int32
from numpy.typing import NDArray
from torch import Tensor

from anybit.config import Json

Array = Tensor | NDArray[Any]  # what arguments may be
Arrays = dict[str, Tensor] | dict[str, NDArray[Any]]

class PlaneWriter:
    """Codes planes, given the planes above them, as one stream; see csrc/coding/plane_coder.h."""

    def __init__(self) -> None: ...
    def write(
        self, plane: int, above: Sequence[Array], shapes: Array, columns: int, words: Array
    ) -> None: ...
    def finish(self) -> bytes: ...

class PlaneReader:
    """Planes that a PlaneWriter has coded."""

    def __init__(self, coded: Array, fast: bool = True) -> None: ...
    def read(self, plane: int, above: Sequence[Array], shapes: Array, columns: int, words: Array) -> None: ...
    def finish(self) -> None: ...

class Tables:
    """The tables of nested tiles, as one instruction set's kernels look them up."""

    def __init__(self, tables: Array, isa: str | None = None, int8: bool = False) -> None: ...

class Layer:
    """A stored layer, checked and bound to kernels; see csrc/layer/layer.h."""

    def __init__(
        self,
        layout: Json,
        fields: Arrays,
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
    def takes_codes(self) -> bool: ...
    @property
    def rounds_inputs(self) -> bool: ...
    @property
    def has_rows(self) -> bool: ...
    def unpack(self, fields: Arrays, threads: int) -> None: ...
    def matmul(self, x: Tensor, threads: int) -> Tensor | None: ...
    def product(self, x: Array, scales: Array | None, y: Array, add: bool, threads: int) -> None: ...
    def dequantize(self, out: Array, threads: int) -> None: ...
    def rows(self, ids: Array, out: Array) -> None: ...

PAGE_TOKENS: int

class NotFiniteError(ArithmeticError):
    """A hidden state or a logit is NaN or Inf; the message names the layer."""

class KvCache:
    """Pages of PAGE_TOKENS tokens, of keys and values of 16, 8 or 4 bits."""

    def __init__(
        self,
        blocks: int,
        kv_heads: int,
        head_size: int,
        bits: int,
        pages: int,
        windowed: Sequence[bool] = [],
        window_pages: int = 0,
    ) -> None: ...
    @property
    def pages(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def window_pages(self) -> int: ...
    @property
    def window_page_bytes(self) -> int: ...

class Decoder:
    """A decoder-only transformer on stored layers; see csrc/engine/decoder.h."""

    def __init__(self, description: Json, int8_inputs: bool, isa: str | None = None) -> None: ...
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
        window_pages: NDArray[int32] | None = None,
        batch_invariant: bool = True,
    ) -> None: ...

MAX_THREADS: int
MOST_HEAD_SIZE: int

def cpu_features() -> dict[str, bool]: ...
def isa() -> str: ...
def matmul_isa() -> str: ...
def matmul_isas() -> list[str]: ...
def engine_isas() -> list[str]: ...
def matmul_needs() -> dict[str, list[str]]: ...
def few_tokens(bf16: bool, isa: str | None = None) -> int: ...
def quantize_activations(
    x: Array,
    clip: Array | None,
    fixed: Array | None,
    bits: int,
    group_size: int,
    codes: Array,
    scales: Array,
    isa: str | None = None,
) -> None: ...
def has_bfloat16_dot() -> bool: ...
def causal_attention(
    q: Array, k: Array, v: Array, scale: float, out: Array, log_sums: Array, threads: int
) -> None: ...
def moments(x: Array, h: Array, threads: int) -> None: ...
def gptq_block(
    weight: Array,
    hinv: Array,
    scales: Array,
    zeros: Array,
    maxq: Array,
    codes: Array,
    error: Array,
    threads: int,
    isa: str | None = None,
) -> None: ...
def kmeans(
    weight: Array,
    importance: Array | None,
    seed_bits: int,
    bits: int,
    codes: Array,
    centroids: Array,
    threads: int,
    isa: str | None = None,
) -> None: ...
def nested_codes(
    targets: Array,
    inverse: Array,
    tables: Array,
    shapes: Array,
    scales: Array,
    weights: Array,
    codes: Array,
    errors: Array,
    threads: int,
    isa: str | None = None,
) -> None: ...
def nested_descent(
    slopes: Array,
    hessian: Array,
    weight: Array,
    tables: Array,
    shapes: Array,
    scales: Array,
    weights: Array,
    codes: Array,
    errors: Array,
    losses: Array,
    threads: int,
    isa: str | None = None,
) -> None: ...
def nested_fit(
    weight: Array,
    importance: Array,
    tables: Array,
    shapes: Array,
    scales: Array,
    threads: int,
    isa: str | None = None,
) -> None: ...
