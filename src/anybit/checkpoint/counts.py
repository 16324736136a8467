"""Numbers of a config.json, held against the files before any configuration class sees them.

Configuration classes make lists and dictionaries as long as such numbers say, and model classes as many modules: a
large one would take minutes and gigabytes before anything else is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import repeat
from math import prod
from typing import Any

from anybit.checkpoint.safetensors import StoredTensor
from anybit.config import Json
from anybit.errors import InputError

LABELS = 10_000  # classes of a classifier
FEW = 256  # modules of a kind that cost nothing, whatever the files hold
SMALL = 2**16  # a size that costs nothing: of a window, of a default that the model does not use
WINDOW = 2**24  # tokens of a window: as many positions are tables and masks of some models
SEQUENCE = 2**20  # the same where a table has a row for each head, too
MOST = 2**31 - 1  # of anything else

_BLOCKS = re.compile(r"num_hidden_layers|num_layers|n_layers?")
_LAYERS = re.compile(r"(num_)?(encoder|decoder)_layers")
_MODULES = re.compile(r"\w*(experts|layers|blocks|codebooks|stages)|attention_types")
_SIZES = re.compile(r"\w*(_size|_dim|_heads?|_rank|_channels|_features|_states)|n_(embd|inner|head)|d_\w+")
_LIMITS = (  # whatever the files hold
    (re.compile(r"num_labels"), (0, LABELS)),
    (re.compile(r"max_seq_len"), (-MOST, SEQUENCE)),
    (
        re.compile(r"\w*(positions|position_embeddings|seq_len|seq_length|_ctx|context_length)"),
        (-MOST, WINDOW),
    ),
)
_NO_COUNTS = re.compile(
    r"\w*(theta|base|seed)\w*"
)  # frequencies and the like: some are written without a point


@dataclass(frozen=True)
class _Held:
    """What the files hold."""

    tensors: int
    bytes: int

    def range_of(self, key: str) -> tuple[int, int, str]:
        """The least and the largest number that can belong to a key, and why no more."""
        if _BLOCKS.fullmatch(key):
            return 1, self.tensors, f"the files hold only {self.tensors} tensors"
        if _LAYERS.fullmatch(key):
            return 0, self.tensors, f"the files hold only {self.tensors} tensors"
        if _MODULES.fullmatch(key):
            return -MOST, max(self.tensors, FEW), f"the files hold only {self.tensors} tensors"
        if _SIZES.fullmatch(key):
            return -MOST, max(self.bytes, SMALL), f"the files hold only {self.bytes} bytes"
        least, most = next((limits for known, limits in _LIMITS if known.fullmatch(key)), (-MOST, MOST))
        return least, most, f"{most} is the limit"


OTHER_CONFIG = "use the config.json that belongs to them."


def check_counts(
    place: str, config: Json, tensors: Collection[StoredTensor], remedy: str = OTHER_CONFIG
) -> None:
    """Refuse numbers that no model of these tensors has. What `quantization_config` says is checked by its reader.

    Args:
        place: config.json, or what stands for it, to be named in errors.
        config: what it holds.
        tensors: all tensors of the weight files.
        remedy: what to do.

    Raises:
        InputError: the number, and what the files hold.
    """
    held = _Held(len(tensors), sum(t.dtype.itemsize * prod(t.shape) for t in tensors))
    for key, value in leaves({k: v for k, v in config.items() if k != "quantization_config"}):
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        least, most, why = held.range_of(key)
        if _NO_COUNTS.fullmatch(key) or least <= value <= most:
            continue
        if value < least:
            raise InputError(f"{place}: {key} is {value}, but at least {least} is expected; {remedy}")
        raise InputError(f"{place}: {key} is {value}, but {why}; {remedy}")
    for key in ("id2label", "label2id"):
        names = config.get(key)
        if isinstance(names, dict | list) and len(names) > LABELS:
            raise InputError(f"{place}: {key} names {len(names)} labels, but {LABELS} is the limit; {remedy}")


def leaves(config: Json) -> Iterator[tuple[str, Any]]:
    """All numbers, texts and so on, at any depth, each with the nearest key above it."""
    rest: list[Iterator[tuple[str, Any]]] = [iter(config.items())]
    while rest:  # no recursion: a file may be nested as deeply as the parser goes
        for key, value in rest[-1]:
            if isinstance(value, dict):
                rest.append(iter(value.items()))
            elif isinstance(value, list):
                rest.append(zip(repeat(key), value))
            else:
                yield key, value
                continue
            break
        else:
            rest.pop()
