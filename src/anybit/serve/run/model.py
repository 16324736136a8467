"""What the server asks of whoever computes: `anybit.Engine` or `one_text.OneText`; of an encoder `anybit.encoder`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from anybit.config import Json
from anybit.engine.engine import Batch, Floats, Tokens
from anybit.engine.sampling import Sampling


class Model(Protocol):
    """A model that computes tokens of texts; `Engine` says what each of this is."""

    name: str
    tokenizer: Any
    vocabulary: int
    context: int
    kv_bits: int
    codebook_precision: str
    threads: int
    generation: Json  # of generation_config.json

    @property
    def together(self) -> bool:
        """Whether it has several texts at a time, at widths of their own."""

    @property
    def widths(self) -> list[float]: ...

    @property
    def ends(self) -> set[int]: ...

    @property
    def page_tokens(self) -> int: ...

    @property
    def page_bytes(self) -> int: ...

    @property
    def window(self) -> int: ...

    @property
    def window_page_bytes(self) -> int: ...

    @property
    def level_bytes(self) -> list[int]: ...

    def default_sampling(self, **changes: Any) -> Sampling: ...

    def give_pages(self, count: int, window_pages: int = 0) -> None: ...

    def step(self, batch: Batch, level: int) -> Floats: ...


@runtime_checkable
class Embeds(Protocol):
    """A model that embeds texts; `Encoder` says what each of this is."""

    name: str
    tokenizer: Any
    vocabulary: int
    context: int
    threads: int
    dimensions: int
    pooling: str
    pooled_by: str
    widths: list[float]

    def embed(self, texts: Sequence[Tokens]) -> Floats: ...
