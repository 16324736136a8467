"""How near anybit's weighted k-means comes to the optimum: its loss over that of an exact dynamic program.

    pip install ckwrap
    python bench/optimum.py MODEL [--layers '*.0.self_attn.q_proj' '*.0.mlp.down_proj'] [--rows 200]

`ckwrap` (Ckmeans.1d.dp) solves every row exactly. Importances are all alike, then log-normal over orders of magnitude,
as Fisher information is.
"""

from __future__ import annotations

import argparse
import fnmatch

import ckwrap
import numpy as np
import torch
from torch import Tensor

from anybit.calibration.streaming import StreamedModel
from anybit.checkpoint.directory import open_checkpoint
from anybit.methods import kmeans


def exact_losses(weight: Tensor, importance: Tensor, k: int) -> Tensor:
    """The least weighted squared error of every row, float64 [rows]."""
    found = []
    for row, mass in zip(weight.double().numpy(), importance.double().numpy()):
        labels = np.asarray(ckwrap.ckmeans(row, k, weights=mass).labels)
        total = np.bincount(labels, mass, k)
        mean = np.bincount(labels, mass * row, k) / np.maximum(total, 1e-300)
        found.append(float((mass * (row - mean[labels]) ** 2).sum()))
    return torch.tensor(found, dtype=torch.float64)


def our_losses(weight: Tensor, importance: Tensor, bits: int) -> Tensor:
    codes, centroids = kmeans.cluster(weight, importance, bits, bits)
    error = centroids[bits].double().gather(1, codes.long()) - weight.double()
    return (importance.double() * error.square()).sum(1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--layers", nargs="+", default=["*.0.self_attn.q_proj", "*.0.mlp.down_proj"])
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--bits", type=int, nargs="+", default=[3, 4])
    args = parser.parse_args()
    streamed = StreamedModel(open_checkpoint(args.model), torch.float32)
    names = [n for n in streamed.all_linears() if any(fnmatch.fnmatchcase(n, p) for p in args.layers)]
    print("layer, importances, bits: summed loss over the optimum's, worst row, rows within 0.1 %")
    for name in names:
        weight = streamed.weight(name)[: args.rows].contiguous()
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
        for label, importance in (("alike", torch.ones_like(weight)), ("log-normal", (1.5 * noise).exp())):
            for bits in args.bits:
                best = exact_losses(weight, importance, 2**bits)
                ours = our_losses(weight, importance, bits)
                ratio = ours / best
                print(
                    f"{name} {label} {bits}: {float(ours.sum() / best.sum()):.6f} {float(ratio.max()):.5f} "
                    f"{100 * float((ratio <= 1.001).double().mean()):.1f} %",
                    flush=True,
                )


if __name__ == "__main__":
    main()
