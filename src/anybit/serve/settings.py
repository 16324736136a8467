"""How a model is served: what the command's options are by default."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """What a server is told at its start."""

    name: str  # of the model, as requests name it
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free
    keys: tuple[str, ...] = ()  # each as `is_key` has it; any of them is asked for; none: nobody is asked
    hosts: tuple[str, ...] = ()  # names of the server, besides addresses, localhost and this machine's name
    origins: tuple[str, ...] = ()  # of pages elsewhere whose scripts may ask
    kv_bytes: int | None = None  # of keys and values; None: a quarter of the memory that is free
    running: int = 32  # texts that run together
    waiting: int = 256  # texts that wait
    auto_bits: float = 3.0  # the least that load and latencies choose
    most_bytes: int = 2 << 20  # of a request's body
    most_requests: int = 512  # at a time
    patience: float = 30.0  # seconds that texts have to end when the server does


def is_key(text: str) -> bool:
    """Whether a header can send a text as a key: printable ASCII, and no whitespace, which stands between keys."""
    return bool(text) and all("!" <= character <= "~" for character in text)
