"""What coding planes costs: entropy beside stream, and seconds to write and to read 100 million weights.

python bench/coded_planes.py [--columns 4096] [--million 16]
"""

from __future__ import annotations

import argparse
import json
import math
import time

import numpy as np
import torch
from torch import Tensor

from anybit.artifact.coded_planes import PlaneReader, PlaneRows, PlaneWriter
from anybit.formats import tables
from anybit.formats.bits import pack_bits
from anybit.formats.nested import CODED_PLANES

BITS = CODED_PLANES[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--million", type=float, default=16)
    given = parser.parse_args()
    rows = round(given.million * 1e6 / given.columns)
    kinds = torch.randint(0, len(tables.EXPONENTS), (rows,), dtype=torch.uint8)
    codes = torch.stack([drawn(int(kind), given.columns) for kind in kinds])
    planes = [pack_bits(codes >> (BITS - p) & 1, 1, 4).numpy().view(np.uint32) for p in range(1, BITS + 1)]
    parts = [
        (PlaneRows(p, planes[: p - 1], kinds.numpy(), given.columns), planes[p - 1]) for p in CODED_PLANES
    ]
    begun = time.perf_counter()
    writer = PlaneWriter()
    for part, words in parts:
        writer.write(part, words)
    stream = writer.finish()
    written = time.perf_counter()
    reader = PlaneReader(stream, "the stream")
    for part, words in parts:
        reader.read(part, np.empty_like(words))
    reader.finish()
    read = time.perf_counter()
    weights = codes.numel() / 1e8
    print(json.dumps({
        "planes": list(CODED_PLANES),
        "bits_per_weight": 8 * len(stream) / codes.numel(),
        "entropy": entropy(codes, kinds),
        "write_seconds": (written - begun) / weights,
        "read_seconds": (read - written) / weights,
    }, indent=1))  # fmt: skip


def drawn(kind: int, columns: int) -> Tensor:
    """Codes of weights that are distributed as a shape says, uint8 [columns]."""
    exponent = tables.EXPONENTS[kind]
    size = torch.distributions.Gamma(1 / exponent, 1.0).sample((columns,)) ** (1 / exponent)
    scale = math.sqrt(math.gamma(1 / exponent) / math.gamma(3 / exponent))
    values = size * scale * torch.where(torch.rand(columns) < 0.5, -1, 1)
    entries = tables.table(BITS)[kind]
    return torch.bucketize(values, (entries[1:] + entries[:-1]) / 2).to(torch.uint8)


def entropy(codes: Tensor, kinds: Tensor) -> float:
    """Of a code given its sign, in bits, over the rows of each shape."""
    total = 0.0
    for kind in kinds.unique():
        share = codes[kinds == kind].flatten().bincount(minlength=2**BITS).double()
        both = share + share.flip(0)  # signs are coded as they are
        p = both[both > 0] / both.sum()
        total += float(share.sum()) * (-float((p * p.log2()).sum()) - 1)
    return total / codes.numel()


if __name__ == "__main__":
    main()
