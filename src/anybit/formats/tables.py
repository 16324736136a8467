"""Shapes: nested tables of values that rows of weights share, each row with a scale of its own.

A shape is a generalized Gaussian distribution of variance 1, density `exp(-|x / s|^e)`, from heavy tails (e = 0.5) to
nearly uniform (e = 6). Its cells at 8 bits hold equal shares of the cube root of the density, which is what the best
scalar quantizer of many levels does (Panter and Dite 1951); those of a smaller width are unions of neighbours, so every
width is nested in the next. An entry is the mean of its cell.

The tables are part of the stored format "nested" (docs/formats.md): an artifact names a row's shape by its number. So
they are stored, in data/shapes.npy: what `derived` computes depends on a machine's own exponentials, by a last bit.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

import numpy as np

from anybit.lazy import Tensor, torch

EXPONENTS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.4, 1.6, 1.8, 2.0, 2.4, 3.0, 4.0, 6.0)
BITS = 8
POINTS = 100_001  # at which a density is integrated
TAIL = 60.0  # densities are cut where they fall below exp(-TAIL)


@cache
def entries() -> np.ndarray:
    """All entries, float32 [shapes, 2 + 4 + ... + 256], each a float16 number; width b begins at 2**b - 2."""
    with resources.files("anybit.formats").joinpath("data/shapes.npy").open("rb") as file:
        made: np.ndarray = np.load(file, allow_pickle=False).astype(np.float32)
    return made


def derived() -> np.ndarray:
    """The same from their definition."""
    return np.stack([np.concatenate(_shape(exponent)) for exponent in EXPONENTS])


@cache
def tables() -> Tensor:
    """The same as a tensor."""
    return torch.from_numpy(entries())


def table(bits: int) -> Tensor:
    """Entries of one width, float32 [shapes, 2**bits], ascending."""
    return tables()[:, 2**bits - 2 : 2 ** (bits + 1) - 2]


def _shape(exponent: float) -> list[np.ndarray]:
    """Entries by width, from 1 to 8 bits."""
    x = np.linspace(0, 1, POINTS) ** 3 * TAIL ** (1 / exponent)
    density = np.exp(-(x**exponent))
    widths = np.diff(x)

    def integral(values: np.ndarray) -> np.ndarray:
        return np.concatenate([[0.0], np.cumsum((values[1:] + values[:-1]) / 2 * widths)])

    x = x / np.sqrt(integral(density * x**2)[-1] / integral(density)[-1])
    widths = np.diff(x)
    mass, moment, levels = integral(density), integral(density * x), integral(np.cbrt(density))
    half = 2 ** (BITS - 1)
    edges = np.interp(np.arange(half + 1) / half * levels[-1], levels, x)
    mass, moment = np.interp(edges, x, mass), np.interp(edges, x, moment)
    made = []
    for bits in range(1, BITS + 1):
        step = half >> (bits - 1)
        means = np.diff(moment[::step]) / np.diff(mass[::step])
        halves = np.concatenate([-means[::-1], means]).astype(np.float32).astype(np.float16)
        made.append(halves.astype(np.float32))
    return made
