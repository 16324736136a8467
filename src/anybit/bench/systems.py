"""Who serves in `anybit bench serve`: models as this server or a peer runs them, and what of a budget is whose.

A budget of memory holds weights and keys and values. Weights count as the bytes of all tensors that are held, as they
are stored: embedding and head included, of an artifact those of the level that is loaded. What else a process takes is
not in the budget; its peak is measured.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from anybit.artifact.files import is_artifact
from anybit.artifact.levels import Levels
from anybit.artifact.reader import open_artifact
from anybit.bench.decode import LLAMA_NUMBERS
from anybit.bench.sources import Gguf, open_gguf, state_of
from anybit.checkpoint.directory import open_checkpoint
from anybit.checkpoint.gguf_header import read_header
from anybit.config import Json
from anybit.engine.description import FAMILIES
from anybit.engine.engine import KV_BITS
from anybit.engine.source import EMBEDDING, HEAD
from anybit.errors import InputError
from anybit.formats.levels import largest
from anybit.kv_cache import head_size, kv_numbers

AUTO = "auto"
FORM = re.compile(
    r"(?P<name>[^=@+]+)=(?P<model>.+?)(?:@(?P<bits>auto|[\d.]+(?:-[\d.]+)?))?(?:\+kv(?P<kv>\d+))?"
)
LEAST_AUTO = 3.0  # bits, as the server has it


@dataclass(frozen=True)
class System:
    """A model that anybit serves."""

    name: str
    model: str
    bits: float | None = None  # the widest level that is loaded; None: all there is
    least: float | None = None  # bits that "auto" goes down to; None: a width that stays
    asked_kv: int | None = None  # bits of keys and values; None: what the artifact asks for
    engine: str = "anybit"

    @cached_property
    def config(self) -> Any:
        """Of the model.

        Raises:
            InputError: no such model; one that the engine does not run.
        """
        path = Path(self.model)
        opened = open_artifact(path).checkpoint if is_artifact(path) else open_checkpoint(self.model)
        if opened.config.model_type not in FAMILIES:
            raise InputError(
                f"{self.name} is of the family {opened.config.model_type!r}; the engine runs {', '.join(FAMILIES)}"
            )
        return opened.config

    @cached_property
    def kv_bits(self) -> int:
        if self.asked_kv is not None:
            return self.asked_kv
        path = Path(self.model)
        return int(open_artifact(path).quantization.get("kv_bits", 16)) if is_artifact(path) else 16

    @property
    def kv_number(self) -> float:
        """Bits of a number of keys and values, with its share of a scale and a zero point."""
        return self.kv_bits if self.kv_bits == 16 else self.kv_bits + 32 / head_size(self.config)

    @property
    def kv_token(self) -> float:
        """Bytes of a token's keys and values."""
        return kv_numbers(self.config) * self.kv_number / 8

    @property
    def key(self) -> Json:
        """What tells it from others."""
        return {
            "name": self.name, "engine": self.engine, "state": self.state, "bits": self.bits, "least": self.least,
            "kv_bits": self.kv_bits,
        }  # fmt: skip

    @cached_property
    def weight_bytes(self) -> int:
        """That are held."""
        return self._bytes_at(self.bits).total()

    @cached_property
    def step_bytes(self) -> int:
        """That a step reads when the load is high: of "auto" those of its narrowest level.

        An embedding beside a head of its own is not among them: a few rows of it are looked up.
        """
        found = self._bytes_at(self.bits if self.least is None else self.least)
        return found.total() - (found[EMBEDDING] if HEAD in found else 0)

    def _bytes_at(self, bits: float | None) -> Counter[str]:
        """By the names of modules."""
        path, found = Path(self.model), Counter[str]()
        if not is_artifact(path):
            checkpoint = open_checkpoint(self.model)
            for name in checkpoint.names():
                found[module_of(name)] += prod(checkpoint.shape(name)) * checkpoint.dtype(name).itemsize
            return found
        levels = Levels(open_artifact(path))
        there = [size.bits for size in levels.sizes[: levels.last + 1]]
        level = levels.last if bits is None else largest(there, bits, f"{self.name} has")
        layers, embeddings = levels.layouts(level)
        quantized = {name: layout.nbytes for name, layout in (layers | embeddings).items()}
        for name, tensor in levels.artifact.tensors.items():
            if module_of(name) not in quantized:
                found[module_of(name)] += prod(tensor.shape) * tensor.dtype.itemsize
        return found + Counter(quantized)

    @property
    def state(self) -> str:
        """Of the files."""
        path = Path(self.model)
        return state_of(path if is_artifact(path) else open_checkpoint(self.model).path)


@dataclass(frozen=True)
class Peer(System):
    """A file that llama.cpp or mistral.rs serves, of the shape of a model that anybit serves."""

    like: System | None = None

    @cached_property
    def file(self) -> Gguf:
        return open_gguf(Path(self.model))

    @cached_property
    def config(self) -> Any:
        assert self.like is not None
        config = self.like.config
        if (config.hidden_size, config.num_hidden_layers) != self.file.sizes:
            hidden, blocks = self.file.sizes
            raise InputError(f"{self.model} has {blocks} blocks of width {hidden}, unlike {self.like.name}")
        return config

    @property
    def kv_number(self) -> float:
        return LLAMA_NUMBERS[self.kv_bits]

    @cached_property
    def weight_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in read_header(Path(self.model))[1].values())

    @property
    def step_bytes(self) -> int:
        return self.file.nbytes

    @property
    def state(self) -> str:
        return self.file.state


def module_of(tensor: str) -> str:
    """ "lm_head.weight" -> "lm_head"."""
    return tensor.rpartition(".")[0]


def parsed(text: str) -> System:
    """ "four=out@4", "all=out@auto", "some=out@3-4.5+kv8" -> systems.

    Raises:
        InputError: another form, or bits of keys and values that the engine does not have.
    """
    if (found := FORM.fullmatch(text)) is None:
        raise InputError(
            f"{text!r}: expected NAME=MODEL, behind it @BITS, @auto or @LEAST-MOST, and +kv8 or +kv4; for example "
            "anybit-3.3=out@3.3"
        )
    bits, kv = found["bits"], int(found["kv"]) if found["kv"] else None
    if kv is not None and kv not in KV_BITS:
        raise InputError(f"{text!r}: keys and values have {', '.join(map(str, KV_BITS))} bits")
    try:
        least, most = _widths(bits)
    except ValueError as error:
        raise InputError(f"{text!r}: {bits!r} is no width: give @4, @auto or @3-4.5") from error
    return System(found["name"].strip(), found["model"], most, least, kv)


def _widths(bits: str | None) -> tuple[float | None, float | None]:
    """The least width of "auto", and the most."""
    if bits == AUTO:
        return LEAST_AUTO, None
    least, dash, most = (bits or "").partition("-")
    if dash:
        return float(least), float(most)
    return None, float(bits) if bits else None


def kv_memory(system: System, memory: int) -> int:
    """What of a budget is left for keys and values.

    Raises:
        InputError: nothing is.
    """
    if (left := memory - system.weight_bytes) < system.kv_token:
        raise InputError(
            f"{system.name}: its weights take {system.weight_bytes / 1e6:.0f} MB of --memory {memory / 1e6:.0f}MB: "
            "give more"
        )
    return left


def common_context(systems: Sequence[System], memory: int, page: int) -> int:
    """Tokens of the longest text that every system can hold, in whole pages."""
    longest = [int(kv_memory(system, memory) / system.kv_token) // page * page for system in systems]
    return min(*longest, *(int(system.config.max_position_embeddings) for system in systems))
