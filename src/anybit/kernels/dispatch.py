"""Which kernel runs: the one place that decides, by stored format, width, device and what this machine has."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anybit.errors import InputError
from anybit.formats import (
    CodebookLayout,
    Float16Layout,
    GroupIntLayout,
    NestedLayout,
    TileLayout,
    TwoFourLayout,
)
from anybit.formats.layout import LayerLayout
from anybit.formats.weight import PackedWeight
from anybit.kernels import cpu, cpu_layer, gpu, reference

if TYPE_CHECKING:
    from anybit.kernels.gpu.layer import Layer

# Formats with native kernels.
BOUND = (GroupIntLayout, CodebookLayout, Float16Layout, TwoFourLayout, NestedLayout)
MOMENT_COLUMNS = 256  # of second moments that are multiplied together; those below mirror those beside


def info() -> dict[str, Any]:
    """Which kernels this machine runs, and why.

    Returns:
        `{"cpu": {...}}` with `available` (the native extension), `isa` (of everything but products), `matmul_isa` (of
        products: the best of `matmul_isas`), `reason` (why so) and `missing` ({better way to multiply: what the
        processor lacks for it}; empty where it is no x86), and `"gpu"` with `available` and `reason`.
    """
    return {
        "cpu": _cpu_info(),
        "gpu": {"available": gpu.available(), "reason": gpu.why_not() or gpu.where()},
    }


def check_device(device: str) -> None:
    """Refuse a device that a model cannot be put on here.

    Raises:
        InputError: neither cpu nor cuda, or cuda where PyTorch finds none.
    """
    if device not in ("cpu", "cuda"):
        raise InputError(f"device {device!r}: expected cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device 'cuda': PyTorch finds no CUDA here; use cpu")


def _looked_up_by_row(tile: TileLayout) -> bool:
    """Whether a tile's codes are looked up in tables, row by row."""
    return isinstance(tile, NestedLayout) or (isinstance(tile, CodebookLayout) and not tile.by_channel)


def _cpu_info() -> dict[str, Any]:
    if not cpu.available():
        how: dict[str, Any] = {
            "isa": "torch",
            "matmul_isa": "torch",
            "matmul_isas": [],
            "reason": cpu.why_not(),
            "missing": {},
        }
        return {"available": False, **how}
    features, isas, needs = cpu.cpu_features(), cpu.matmul_isas(), cpu.matmul_needs()
    order = list(needs)
    better = order[order.index(isas[-1]) + 1 :] if any(features.values()) else []
    missing = {isa: [need for need in needs[isa] if not features.get(need)] for isa in better}
    lacking = [f"{isa} needs {', '.join(needs)}" for isa, needs in missing.items()]
    return {
        "available": True,
        "isa": cpu.isa(),
        "matmul_isa": cpu.matmul_isa(),
        "matmul_isas": list(isas),
        "reason": "; ".join(["native extension loaded, the best that the processor has", *lacking]),
        "missing": missing,
    }


class BoundWeight:
    """A packed weight and the kernels that multiply with it: native ones, a GPU's, or none, where the reference runs.

    Formats with kernels of their own order are put into it, and the kernels then hold the bytes: whoever holds the
    stored tensors of the fields `repacked` may drop them, and `unpack` makes them again. All others stay referenced.

    Args:
        weight: the stored bytes.
        codebook_precision: "fp16", or "int8", which has codebooks by row multiply inputs of 8 bits (a scale per token
            and 32 of them) with centroids of 8 bits (127 steps to the largest of a row). That is faster. Native kernels
            have it; without them, and where other tiles are beside, everything is as it is stored.
        isa: one of `cpu.matmul_isas()` instead of the best, for tests and comparisons.
        on_gpu: whether to use the GPU's kernels; default: where the tensors are on one. True for tensors on the CPU
            needs Triton's interpreter.
    """

    def __init__(
        self,
        weight: PackedWeight,
        codebook_precision: str = "fp16",
        isa: str | None = None,
        on_gpu: bool | None = None,
    ) -> None:
        self.out_features, self.in_features = weight.layout.shape
        kinds = {tensor.device.type for tensor in weight.tensors.values()}
        self.on_gpu = (kinds == {"cuda"} if on_gpu is None else on_gpu) and gpu.available()
        known = all(isinstance(tile, BOUND) for tile in weight.layout.tiles)
        self.layer: cpu_layer.Layer | Layer | None = None
        if self.on_gpu:
            self.layer = gpu.bind(weight)
        elif known and kinds == {"cpu"} and cpu.available():
            self.layer = cpu_layer.Layer(weight.layout, weight.tensors, codebook_precision, isa=isa)
        by_row = all(_looked_up_by_row(tile) for tile in weight.layout.tiles)
        self.codebook_precision = (
            codebook_precision if by_row and isinstance(self.layer, cpu_layer.Layer) else "fp16"
        )
        self.repacked = () if self.layer is None else self.layer.repacked
        kept = {field: tensor for field, tensor in weight.tensors.items() if field not in self.repacked}
        self._stored = self.weight = PackedWeight(weight.layout, kept)
        self._multiply = self.layer.native.matmul if isinstance(self.layer, cpu_layer.Layer) else None

    def at(self, layout: LayerLayout) -> BoundWeight:
        """The same weight at one of its levels, `layout`; copies nothing. Both go on working."""
        if layout == self.weight.layout:
            return self
        made = copy.copy(self)
        wanted, kept = layout.stored_tensors(), self._stored.tensors
        made.weight = PackedWeight(layout, {f: kept[f][: wanted[f][1][0]] for f in wanted if f in kept})
        if self.layer is not None:
            made.layer = self.layer.at(layout)
            made._multiply = made.layer.native.matmul if isinstance(made.layer, cpu_layer.Layer) else None
        return made

    @property
    def native(self) -> bool:
        """Whether the native kernels run it."""
        return self._multiply is not None

    def unpack(self) -> dict[str, Tensor]:
        """The stored tensors of the fields `repacked`, of all levels."""
        return {} if self.layer is None else self.layer.unpack()

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` [n] of the matrix, float32 [n, in]; of a weight of one tile that holds all of it.

        Raises:
            InputError: ids that are no integers.
            ValueError: an id that is no row.
        """
        if ids.is_floating_point():
            raise InputError(f"ids of {ids.dtype}: expected integers")
        if self.layer is not None:
            return self.layer.rows(ids)
        layout = replace(self.weight.layout, shape=(len(ids), self.in_features))
        return reference.dequantize(PackedWeight(layout, {f: t[ids] for f, t in self.weight.tensors.items()}))

    def native_matmul(self, x: Tensor) -> Tensor | None:
        """What `matmul` gives, where native kernels take x as it comes; else None. Nothing else stands between a module
        and the kernels."""
        return None if self._multiply is None else self._multiply(x, torch.get_num_threads())

    def matmul(self, x: Tensor) -> Tensor:
        """`x [..., in] @ W^T -> [..., out]` in the dtype of x, computed in float32 or, of bfloat16, in that.

        Raises:
            InputError: inputs of another width, or none of floats.
            ValueError: inputs that carry a tangent, or have no memory.
        """
        y = self.native_matmul(x)
        return self._matmul(x) if y is None else y

    def _matmul(self, x: Tensor) -> Tensor:
        """The same for whatever the native kernels do not take as it comes."""
        if x.shape[-1:] != (self.in_features,) or not x.is_floating_point():
            raise InputError(
                f"inputs {list(x.shape)} of {x.dtype}: this layer takes floats [..., {self.in_features}]"
            )
        if isinstance(self.layer, cpu_layer.Layer) and x.device.type == "cpu":
            taken = x if x.dtype == torch.bfloat16 else x.float()
            return self.layer.matmul(taken).to(x.dtype)
        if self.layer is None or isinstance(self.layer, cpu_layer.Layer):
            return self._matmul_dense(x)
        if x.device != self.layer.device:
            raise InputError(f"inputs are on {x.device}, this layer is on {self.layer.device}: move one")
        flat = x.reshape(-1, self.in_features)
        return self.layer.matmul(flat.contiguous()).view(*x.shape[:-1], self.out_features)

    def _matmul_dense(self, x: Tensor) -> Tensor:
        """The same through the dense matrix, exactly: on other devices and without native kernels."""
        dense = self.dequantize(x.dtype).to(x.device)
        return torch.nn.functional.linear(reference.round_inputs(x, self.weight), dense)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dense matrix [out, in]."""
        return (
            reference.dequantize(self.weight).to(dtype)
            if self.layer is None
            else self.layer.dequantize(dtype)
        )


def compute_dtype(device: str = "cpu") -> torch.dtype:
    """What calibration computes in: bfloat16 where the device multiplies it, else float32."""
    if device != "cpu":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return torch.bfloat16
    return torch.float32


def gptq_block(
    weight: Tensor, inverse: Tensor, scale: Tensor, zero: Tensor, top: Tensor
) -> tuple[Tensor, Tensor]:
    """See `reference.gptq_block`; native on the CPU, in Triton on CUDA, the same bits everywhere."""
    if weight.is_cuda:
        from anybit.kernels.gpu import gptq

        return gptq.gptq_block(weight, inverse, scale, zero, top)
    return (cpu if _native(weight) else reference).gptq_block(weight, inverse, scale, zero, top)


def kmeans(weight: Tensor, importance: Tensor | None, seed_bits: int, bits: int) -> tuple[Tensor, Tensor]:
    """See `cpu.kmeans`; on CUDA `gpu.kmeans`, whose losses are near those of the native kernel."""
    if weight.device.type == "cpu":
        return cpu.kmeans(weight, importance, seed_bits, bits)
    from anybit.kernels.gpu import kmeans

    return kmeans.kmeans(weight, importance, seed_bits, bits)


def nested_codes(
    targets: Tensor, inverse: Tensor, tables: Tensor, kinds: Tensor, scales: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """See `cpu.nested_codes`; elsewhere than on the CPU in plain PyTorch, the same bits up to fused operations."""
    kernels = cpu if _native(targets) else reference
    return kernels.nested_codes(targets, inverse, tables, kinds, scales, weights)


def nested_descent(  # noqa: PLR0913 - what the algorithm reads and changes
    slopes: Tensor,
    hessian: Tensor,
    weight: Tensor,
    tables: Tensor,
    kinds: Tensor,
    scales: Tensor,
    weights: Tensor,
    codes: Tensor,
    errors: Tensor,
    losses: Tensor,
) -> None:
    """See `cpu.nested_descent`; elsewhere than on the CPU in plain PyTorch, the same bits up to fused operations."""
    kernels = cpu if _native(slopes) else reference
    kernels.nested_descent(slopes, hessian, weight, tables, kinds, scales, weights, codes, errors, losses)


def nested_fit(weight: Tensor, importance: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
    """See `cpu.nested_fit`; elsewhere than on the CPU in plain PyTorch, whose sums are of another order."""
    return (cpu if _native(weight) else reference).nested_fit(weight, importance, tables)


def _native(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and cpu.available()


def add_moments(hessian: Tensor, x: Tensor) -> None:
    """`hessian [n, n] += x^T x` of activations x [tokens, n], summed in float32; native for bfloat16 on the CPU.

    It is symmetric before and after.
    """
    if x.dtype == torch.bfloat16 and x.device.type == "cpu" and cpu.has_bfloat16_dot():
        cpu.moments(x.contiguous(), hessian)
    else:
        x = x.float()
        for a in range(0, len(hessian), MOMENT_COLUMNS):
            b = a + MOMENT_COLUMNS
            hessian[a:b, a:].addmm_(x[:, a:b].T, x[:, a:])
            hessian[b:, a:b] = hessian[a:b, b:].T
