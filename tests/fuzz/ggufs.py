"""GGUF files, damaged in their headers and blocks."""

from __future__ import annotations

import struct
from pathlib import Path
from random import Random

from anybit.checkpoint.gguf import open_gguf
from tests.fuzz import mutate
from tests.fuzz.bases import Bases
from tests.fuzz.checkpoints import enter

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
    return enter(door, path, folder, bases.text)


def damage(rng: Random, data: bytes, header: int) -> tuple[str, bytes]:
    kind = rng.choice(("header", "header", "start", "number", "number", "word", "data", "cut", "long"))
    if kind == "header":
        return kind, mutate.damaged_bytes(rng, data, header)
    if kind == "start":
        return kind, mutate.damaged_bytes(rng, data, 64)
    if kind == "data":
        return kind, data[:header] + mutate.damaged_bytes(rng, data[header:])
    if kind == "cut":
        return kind, data[: rng.randrange(len(data))]
    if kind == "long":
        return kind, data + rng.randbytes(rng.choice((1, 32, 1000)))
    keys = [
        b"block_count",
        b"_length",
        b"head_count",
        b"vocab_size",
        b"dimension_count",
        b"token_id",
        b"_epsilon",
    ]
    keys += [
        b".weight",
        b"tokens",
        b"general.",
        b"llama",
        b"merges",
        b"token_type",
        b"gpt2",
        b"attn_q",
        b"freq_base",
    ]
    key = rng.choice(keys)
    at = rng.choice([at for at in range(header) if data.startswith(key, at)] or [24])
    made = bytearray(data)
    if kind == "word":
        made[at : at + len(key)] = bytes(rng.choice((rng.randrange(256), 0x78)) for _ in key)
    else:  # what follows the key: a type, a length, a number
        after = at + len(key) + rng.choice((0, 4, 4, 4, 8, 12, -8 - len(key)))
        size = rng.choice((4, 8))
        wide = struct.pack("<Q", rng.choice(mutate.WHOLE) % 2**64)
        made[after : after + size] = rng.choice((wide, struct.pack("<d", rng.choice(mutate.BROKEN))))[:size]
    return f"{kind} at {key.decode()}", bytes(made)
