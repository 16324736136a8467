"""Whether the model that all figures are measured against is itself of full precision."""

from __future__ import annotations

import re

from anybit.checkpoint.directory import Checkpoint

BLOCK = 32  # weights that share a grid in GGUF's formats
ROWS, LAYERS = 64, 4  # that are looked at
VALUES = 16  # of a grid of 4 bits


def quantized_before(checkpoint: Checkpoint) -> str | None:
    """How the weights were quantized already, as their file says or as they look; None for full precision."""
    said = checkpoint.quantized_before()
    if said is not None or checkpoint.gguf is not None:
        return said
    inside = [name for name in checkpoint.names() if re.search(r"\.\d+\.", name)]
    matrices = [n for n in inside if len(checkpoint.shape(n)) == 2 and checkpoint.shape(n)[1] % BLOCK == 0]
    counts = [_values(checkpoint, name) for name in matrices[:LAYERS]]
    if not counts or not 2 < max(counts) <= VALUES:
        return None
    return f"at most {max(counts)} values in {BLOCK} neighbouring weights, a grid of 4 bits"


def _values(checkpoint: Checkpoint, name: str) -> int:
    """The most different values that a block of the first rows has."""
    rows, columns = checkpoint.shape(name)
    weight = checkpoint.read_beginning(name, (min(rows, ROWS), columns))
    ordered = weight.float().reshape(-1, BLOCK).sort(dim=1).values
    return 1 + int((ordered[:, 1:] != ordered[:, :-1]).sum(dim=1).max())
