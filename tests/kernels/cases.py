"""Products of the native kernels against plain numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from anybit.formats import GroupIntLayout, Tile
from anybit.formats.bits import pack_codes
from anybit.formats.layout import LayerLayout
from anybit.formats.weight import QuantizedWeight
from anybit.formats.weight import pack as pack_weight
from anybit.kernels import cpu
from anybit.kernels.cpu_layer import Layer


def isas() -> list[str]:
    features = cpu.cpu_features()
    names = ["portable"]
    names += ["avx2"] if all(features[f] for f in ("avx2", "fma", "f16c")) else []
    wide = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
    return names + (["avx512"] if "avx2" in names and all(features[f] for f in wide) else [])


ISAS = isas()
PRODUCTS = cpu.matmul_isas()


def pack(codes: np.ndarray, bits: int, padding: int, noise: np.random.Generator | None) -> np.ndarray:
    """Codes [r, c] as stored, one bit at a time; what pads a row holds garbage (or 0)."""
    r, c = codes.shape
    width = bits if bits in (2, 4, 8) else 1
    planes = [codes] if width == bits else [codes >> p & 1 for p in reversed(range(bits))]
    row_bytes = -(-c * width // (8 * padding)) * padding
    packed = np.zeros((len(planes), r, row_bytes * 8), np.uint8)
    if noise is not None:
        packed = noise.integers(0, 2, packed.shape, np.uint8)
    for p, plane in enumerate(planes):
        for j in range(c):
            for t in range(width):
                packed[p, :, j * width + t] = plane[:, j] >> t & 1
    stored = np.packbits(packed, axis=-1, bitorder="little")
    return stored[0] if bits in (2, 4, 8) else stored


@dataclass
class Case:
    """A random tile, its stored form bound to the kernels, and its weights as numpy has them."""

    layer: Layer
    weight: np.ndarray  # float32 [r, c]
    rows: np.ndarray  # output rows
    out: int


def make(  # noqa: PLR0913
    bits: int,
    r: int,
    c: int,
    group: int,
    symmetric: bool = False,
    indexed: bool = False,
    padding: int = 16,
    isa: str | None = None,
) -> Case:
    rng = np.random.default_rng([bits, r, c, group])
    groups = -(-c // group)
    codes = rng.integers(0, 2**bits, (r, c), dtype=np.uint8)
    scales = rng.uniform(-1, 1, (r, groups)).astype(np.float16)
    scales.flat[0] = np.float16(6e-8)  # subnormal
    zeros = None if symmetric else rng.integers(0, 2**bits, (r, groups), dtype=np.uint8)
    out = r + 5 if indexed else r
    rows = np.sort(rng.permutation(out)[:r]).astype(np.int32)
    column_group = np.arange(c) // group
    zero = 2 ** (bits - 1) if zeros is None else zeros[:, column_group].astype(np.float32)
    weight = (codes.astype(np.float32) - zero) * scales.astype(np.float32)[:, column_group]
    given = pack(codes, bits, padding, rng), scales, zeros, rows if indexed else None
    layer = group_int(
        *(None if array is None else torch.from_numpy(array) for array in given),
        bits,
        group,
        (out, c),
        isa=isa,
    )
    return Case(layer, weight.astype(np.float32), rows, out)


def group_int(  # noqa: PLR0913
    codes: torch.Tensor,  # as they are stored
    scales: torch.Tensor,  # float16 [r, groups]
    zeros: torch.Tensor | None,  # uint8 [r, groups], a byte each; None: symmetric
    rows: torch.Tensor | None,  # int32 [r]; None: all
    bits: int,
    group_size: int,
    shape: tuple[int, int],  # of the matrix that the rows are of
    threads: int = 1,
    isa: str | None = None,
) -> Layer:
    """A layer of one tile "group int"."""
    place = {} if rows is None else {"rows": len(rows)}
    layout = GroupIntLayout(bits=bits, group_size=group_size, symmetric=zeros is None, **place)
    fields = {"codes": codes, "scales": scales}
    fields |= {} if zeros is None else {"zeros": pack_codes(zeros, bits, 1)}
    fields |= {} if rows is None else {"rows": rows}
    return Layer(LayerLayout(shape, (layout,)), fields, threads=threads, isa=isa)


def layer_of(
    tile: Tile, shape: tuple[int, int], precision: str = "fp16", threads: int = 1, isa: str | None = None
) -> Layer:
    """A layer of one tile, packed as a method's is."""
    packed = pack_weight(QuantizedWeight(shape, (tile,)))
    return Layer(packed.layout, packed.tensors, precision, threads, isa)


def activations(m: int, c: int) -> torch.Tensor:
    x = torch.randn(m, c, generator=torch.Generator().manual_seed(m * c))
    x[:, 0] *= 100  # a massive activation, and none of zero mean
    return x + 0.5


def product_of(case: Case, x: torch.Tensor, threads: int = 1) -> torch.Tensor:
    """Float32, of inputs in either dtype."""
    y = torch.zeros(x.shape[0], case.out)
    case.layer.product(x, y, threads=threads)
    return y


def at_odd_address(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers one byte further than such numbers may lie."""
    raw = bytearray(tensor.nbytes + 17)
    start = 1 + -torch.frombuffer(raw, dtype=torch.uint8).data_ptr() % 16
    moved = torch.frombuffer(raw, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)
    return moved.copy_(tensor)
