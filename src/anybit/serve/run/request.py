"""What one request wants of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from anybit.engine.sampling import Sampling
from anybit.serve.chat.constraint import Constraint

AUTO = "auto"


@dataclass(frozen=True)
class Request:
    """A prompt and how it is to be continued."""

    tokens: list[int]
    most: int | None = None  # tokens that may be drawn; None: what the context holds
    n: int = 1  # texts
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    bits: float | str | None = None  # average width, or "auto"; None: the widest
    target: float | None = None  # seconds from token to token
    every: bool = False  # log-probabilities of the prompt are wanted
    ignores_ends: bool = False  # goes on behind the model's end of text
    constraint: Constraint | None = None
    speculates: bool = True  # what follows may be drafted, which changes no text
    key: str = ""
    shown: frozenset[int] = frozenset()  # tokens that come out with a mark, see `TextStream`
