"""Fewer cases of the GPU's kernels where there is no GPU: Triton's interpreter takes seconds for each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch


def spread(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases of these axes: on a GPU every combination, else every value once or more, beside changing others."""
    if torch.cuda.is_available():
        return list(product(*axes))
    return [tuple(axis[i % len(axis)] for axis in axes) for i in range(max(map(len, axes)))]
