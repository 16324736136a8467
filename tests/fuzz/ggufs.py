"""GGUF files, damaged in their headers and blocks."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from random import Random

from anybit.checkpoint.gguf import open_gguf
from tests.fuzz import mutate
from tests.fuzz.bases import Bases
from tests.fuzz.checkpoints import enter
from tests.fuzz.limits import Finding

WORDS = (
    *(b"block_count", b"_length", b"head_count", b"vocab_size", b"dimension_count", b"token_id", b"_epsilon"),
    *(
        b".weight",
        b"tokens",
        b"general.",
        b"llama",
        b"merges",
        b"token_type",
        b"gpt2",
        b"attn_q",
        b"freq_base",
    ),
)
DOORS = ("dry run", "dry run", "dry run", "rtn", "rtn", "eval", "generate", "gptq")


def case(rng: Random, bases: Bases, folder: Path) -> str:
    original = bases.ggufs[rng.choice(list(bases.ggufs))]
    path = folder / "given" / original.name
    path.parent.mkdir()
    header = min(tensor.offset for tensor in open_gguf(original).tensors.values())
    how, data = damage(rng, original.read_bytes(), header)
    path.write_bytes(data)
    door = rng.choice(DOORS)
    print(f"{original.name}, {how}, {door}")
    outcome = enter(door, path, folder, bases, "llama")
    if outcome != "right" and (how == "name" or (how == "values" and original.name == "float.gguf")):
        raise Finding(f"other {how}, which are as good, are refused")
    return outcome


def damage(rng: Random, data: bytes, header: int) -> tuple[str, bytes]:
    """A file's bytes, damaged, and how; `header` of them are its header."""
    ways: dict[str, tuple[int, Callable[[], bytes]]] = {  # how often, and what it makes
        "header": (2, lambda: mutate.damaged_bytes(rng, data, header)),
        "start": (1, lambda: mutate.damaged_bytes(rng, data, 64)),
        "number": (2, lambda: after_a_key(rng, data, header)),
        "word": (1, lambda: in_a_key(rng, data, header)),
        "data": (1, lambda: data[:header] + mutate.damaged_bytes(rng, data[header:])),
        "values": (2, lambda: other_values(rng, data, header)),
        "name": (1, lambda: data.replace(b"tiny", rng.choice((b"TINY", b"    ", b"\0\0\0\0", b"../x")), 1)),
        "cut": (1, lambda: data[: rng.randrange(len(data))]),
        "long": (1, lambda: data + rng.randbytes(rng.choice((1, 32, 1000)))),
    }
    how = rng.choices(list(ways), [share for share, _ in ways.values()])[0]
    return how, ways[how][1]()


def a_key(rng: Random, data: bytes, header: int) -> tuple[int, int]:
    """Where a word of the header stands, and how long it is."""
    word = rng.choice(WORDS)
    return rng.choice([at for at in range(header) if data.startswith(word, at)] or [24]), len(word)


def in_a_key(rng: Random, data: bytes, header: int) -> bytes:
    at, length = a_key(rng, data, header)
    return (
        data[:at] + bytes(rng.choice((rng.randrange(256), 0x78)) for _ in range(length)) + data[at + length :]
    )


def after_a_key(rng: Random, data: bytes, header: int) -> bytes:
    """Another type, length or number."""
    at, length = a_key(rng, data, header)
    after, size = at + length + rng.choice((0, 4, 4, 4, 8, 12, -8 - length)), rng.choice((4, 8))
    whole = struct.pack("<Q", rng.choice(mutate.WHOLE) % 2**64)
    value = rng.choice((whole, struct.pack("<d", rng.choice(mutate.BROKEN))))[:size]
    return data[:after] + value + data[after + size :]


def other_values(rng: Random, data: bytes, header: int) -> bytes:
    """Other low bits of some floats, which are as good; in blocks, other bits."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 10, 1000))):
        made[header + rng.randrange((len(data) - header) // 4) * 4] ^= 1 << rng.randrange(8)
    return bytes(made)
