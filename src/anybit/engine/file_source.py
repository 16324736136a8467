"""What an artifact and a plain checkpoint have in common: tensors of safetensors files, each read when it is wanted."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from anybit.checkpoint.generation import read_generation
from anybit.checkpoint.safetensors import SafeTensor
from anybit.checkpoint.stored_tokenizer import StoredTokenizer
from anybit.config import Json
from anybit.engine.description import Unsupported
from anybit.engine.source import EMBEDDING, HEAD, Layouts, Source, finite, floats, plain_layer
from anybit.errors import InputError
from anybit.formats.dtypes import Dtype

if TYPE_CHECKING:
    from anybit import _native


class FileSource(Source):
    """A model whose tensors lie in files, their headers checked. Neither PyTorch nor Transformers is imported."""

    def __init__(self, path: Path, config: Json, tensors: Mapping[str, SafeTensor]) -> None:
        """Read what is small.

        Args:
            path: its folder.
            config: as Transformers writes it.
            tensors: of its files, by name.

        Raises:
            InputError: a tokenizer or a generation config that cannot be read.
        """
        self.name, self.config = str(path), config
        self._tensors = tensors
        self._used: set[str] = set()  # names of small tensors
        self._plain: dict[str, _native.Layer] = {}
        found = (path / "generation_config.json").exists()
        self.generation = read_generation(path) if found else {"eos_token_id": config.get("eos_token_id")}
        self.tokenizer = StoredTokenizer.read(path)
        self.head = self._find_head()

    def _find_head(self) -> str:
        there = f"{HEAD}.weight" in self._tensors
        return HEAD if there or not self.config.get("tie_word_embeddings") else EMBEDDING

    def _matrices(self) -> set[str]:
        """Names of all matrices."""
        return {EMBEDDING, self.head, *itertools.chain.from_iterable(self.names())}

    def _refuse_unused(self, used: set[str]) -> None:
        """Leave tensors that the engine has no use for to Transformers, which knows what may be left out."""
        if unused := sorted(self._tensors.keys() - used - self._used):
            raise Unsupported(f"it has the tensor {unused[0]}, which the engine does not read")

    def tensor(self, name: str) -> np.ndarray | None:
        found = self._tensors.get(name)
        if found is None:
            return None
        check_dtype(name, found)
        if len(found.shape) != 1 or not found.shape[0]:  # an empty one would be none
            raise Unsupported(f"{name} is of {list(found.shape)}, expected a row of numbers")
        self._used.add(name)
        values: np.ndarray = found.array()
        if not finite(values, found.dtype):
            raise InputError(f"{self.name}: {name} holds NaN or Inf: its file is damaged; copy it again")
        return floats(values, found.dtype)

    def layer(self, name: str, layouts: Layouts) -> _native.Layer:
        if name not in self._plain:
            found = self._tensors.get(f"{name}.weight")
            if found is None:
                raise Unsupported(f"it has no {name}")
            self._plain[name] = plain_layer(f"{name}.weight", found.array(), found.dtype)
        return self._plain[name]


def check_dtype(name: str, found: SafeTensor) -> None:
    """Refuse numbers that the engine does not compute with.

    Raises:
        Unsupported: neither float32 nor one of the types of 16 bits.
    """
    if found.dtype not in (Dtype.F32, Dtype.F16, Dtype.BF16):
        raise Unsupported(f"{name} is stored as {found.dtype}")
