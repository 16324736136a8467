"""Which kernel runs: the one place that decides, by stored format, width, device and what this machine has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anybit.kernels import cpu, reference
from anybit.tensors import PackedWeight, place, stored_tensors, unpack_codes

DECODE_TOKENS = 8  # up to here the native kernels beat dequantizing the matrix for a GEMM, at every width


def info() -> dict[str, Any]:
    """Which kernels this machine runs, and why: `{"cpu": {"available", "isa", "reason"}}`."""
    native = cpu.available()
    return {
        "cpu": {
            "available": native,
            "isa": cpu.isa() if native else "torch",
            "reason": "native extension loaded" if native else cpu.why_not(),
        }
    }


class Prepared:
    """A packed weight made ready to multiply with: native objects per tile, bound once to the stored bytes.

    Nothing is copied but the zero points (unpacked to a byte each), so `weight` stays what is saved.
    """

    def __init__(self, weight: PackedWeight) -> None:
        self.weight = weight
        self.out_features, self.in_features = weight.layout["shape"]
        fields = stored_tensors(weight.layout)
        on_cpu = all(weight.tensors[field].device.type == "cpu" for field in fields)
        self.native = on_cpu and cpu.available()
        self.tiles = [self._bind(i) for i in range(len(weight.layout["tiles"]))] if self.native else []
        self.cols = [self._field(i, "cols") for i in range(len(weight.layout["tiles"]))]

    def _field(self, i: int, name: str) -> Tensor | None:
        prefix = f"{i}." if len(self.weight.layout["tiles"]) > 1 else ""
        return self.weight.tensors.get(prefix + name)

    def _bind(self, i: int) -> cpu.GroupInt:
        tile = self.weight.layout["tiles"][i]
        columns = tile.get("cols", self.in_features)
        codes, scales, zeros = self._field(i, "codes"), self._field(i, "scales"), self._field(i, "zeros")
        assert codes is not None and scales is not None
        if zeros is not None:
            zeros = unpack_codes(zeros, tile["bits"], scales.shape[1])
        return cpu.group_int(
            codes,
            scales,
            zeros,
            self._field(i, "rows"),
            bits=tile["bits"],
            group_size=tile["group_size"],
            columns=columns,
        )

    def matmul(self, x: Tensor) -> Tensor:
        """`x [..., in] @ W^T -> [..., out]` in the dtype of x."""
        tokens = x.numel() // self.in_features
        if not self.native or tokens > DECODE_TOKENS or x.device.type != "cpu":
            return torch.nn.functional.linear(x, self.dequantize(x.dtype).to(x.device))
        flat = x.reshape(tokens, self.in_features).float().contiguous()
        y = torch.zeros(tokens, self.out_features)
        for tile, cols in zip(self.tiles, self.cols):
            tile.matmul(flat if cols is None else flat[:, cols.long()].contiguous(), y)
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dense matrix [out, in]."""
        if not self.native:
            return reference.dequantize(self.weight).to(dtype)
        if len(self.tiles) == 1 and self.cols[0] is None and self._field(0, "rows") is None:
            return self.tiles[0].dequantize(dtype)
        dense = torch.empty(self.out_features, self.in_features, dtype=dtype)
        for i, tile in enumerate(self.tiles):
            place(dense, tile.dequantize(dtype), self._field(i, "rows"), self.cols[i])
        return dense


def gptq_block(
    weight: Tensor, inverse: Tensor, scale: Tensor, zero: Tensor, top: Tensor
) -> tuple[Tensor, Tensor]:
    """See `reference.gptq_block`; native on the CPU."""
    fast = cpu.available() and weight.device.type == "cpu"
    return (cpu if fast else reference).gptq_block(weight, inverse, scale, zero, top)


def add_moments(hessian: Tensor, x: Tensor) -> None:
    """`hessian [n, n] += x^T x` of activations x [tokens, n], summed in float32; native for bfloat16 on the CPU."""
    if x.dtype == torch.bfloat16 and x.device.type == "cpu" and cpu.has_moments():
        cpu.moments(x.contiguous(), hessian)
    else:
        x = x.float()
        hessian.addmm_(x.T, x)
