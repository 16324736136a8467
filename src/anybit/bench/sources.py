"""What `anybit bench decode` times: models and files, looked at before any work."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anybit.artifact.files import is_artifact
from anybit.artifact.levels import Levels
from anybit.artifact.reader import open_artifact
from anybit.bench.random_model import PREFIX, SHAPES, random_config, random_model
from anybit.checkpoint.directory import open_checkpoint
from anybit.checkpoint.gguf_header import read_header
from anybit.engine.description import FAMILIES
from anybit.errors import InputError
from anybit.formats.levels import largest
from anybit.loader import DTYPES, load
from anybit.progress import SILENT, Silent

PLAIN = 16.0  # bits of a model that is not quantized
MOST_BITS = 8
# Hidden size and blocks of the models that targets name.
KNOWN = {
    "SmolLM2-135M": (576, 30),
    "Qwen2.5-Coder-0.5B": (896, 24),
    "Qwen3-0.6B": (1024, 28),
    "Qwen3-1.7B": (2048, 28),
    "Llama-3.1-8B": (4096, 32),
}


@dataclass(frozen=True)
class Source:
    """A model to time."""

    name: str  # as it was given
    state: str  # of its files
    config: Any
    widths: tuple[float, ...]  # average, ascending; what is timed

    @property
    def sizes(self) -> tuple[int, int]:
        """Hidden size and number of blocks."""
        return self.config.hidden_size, self.config.num_hidden_layers

    @property
    def shape(self) -> str | None:
        """The model that has these sizes, of those that targets name."""
        return next((name for name, sizes in KNOWN.items() if sizes == self.sizes), None)

    @property
    def random(self) -> bool:
        return self.name.startswith(PREFIX)

    def open(self, dtype: str, report: Silent = SILENT) -> Any:
        """The model, with the widths that are timed at most."""
        if self.random:
            made = random_model(self.config, self.widths).to(DTYPES[dtype])
            made.name_or_path = self.name
            return made
        most = None if self.widths == (PLAIN,) else self.widths[-1]
        return load(self.name, dtype=dtype, report=report, bits=most)


def open_source(name: str, bits: Sequence[float]) -> Source:
    """A model, an artifact at its levels of some average widths or a shape of random weights.

    Raises:
        InputError: no such model or shape, widths that it does not have, a family that the engine does not run.
    """
    if name.startswith(PREFIX):
        shape = name.removeprefix(PREFIX)
        if shape not in SHAPES:
            raise InputError(f"{name}: there is no such shape; expected one of {', '.join(SHAPES)}")
        for width in bits:
            if not 1 <= width <= MOST_BITS:
                raise InputError(f"--bits {width:g}: random weights have widths from 1 to {MOST_BITS}")
        return Source(name, "random", random_config(shape), tuple(sorted(set(bits))))
    path = Path(name)
    if is_artifact(path):
        levels = Levels(open_artifact(path))
        there = [size.bits for size in levels.sizes[: levels.last + 1]]
        found = {there[largest(there, width, f"{name} has")] for width in bits}
        source = Source(name, state_of(path), levels.artifact.checkpoint.config, tuple(sorted(found)))
    else:
        checkpoint = open_checkpoint(name)
        source = Source(name, state_of(checkpoint.path), checkpoint.config, (PLAIN,))
    if source.config.model_type not in FAMILIES:
        raise InputError(
            f"{name} is of the family {source.config.model_type!r}; the engine runs {', '.join(FAMILIES)}"
        )
    return source


def state_of(path: Path) -> str:
    """Names, sizes and times of a model's files, as 12 digits."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Gguf:
    """A file for llama.cpp and mistral.rs."""

    path: Path
    state: str
    sizes: tuple[int, int]  # hidden size and number of blocks
    nbytes: int  # of the matrices that one token reads


def open_gguf(path: Path) -> Gguf:
    """A file's header.

    Raises:
        InputError: no GGUF file of a language model.
    """
    metadata, tensors = read_header(path)
    family = metadata.get("general.architecture")
    hidden, blocks = metadata.get(f"{family}.embedding_length"), metadata.get(f"{family}.block_count")
    if not isinstance(hidden, int) or not isinstance(blocks, int) or "token_embd.weight" not in tensors:
        raise InputError(f"{path} describes no language model: give a .gguf file that llama.cpp runs")
    untied = tensors["token_embd.weight"].n_bytes if "output.weight" in tensors else 0
    nbytes = sum(tensor.n_bytes for tensor in tensors.values()) - untied
    return Gguf(path, state_of(path), (hidden, blocks), nbytes)
