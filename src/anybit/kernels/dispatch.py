"""Which kernel runs: the one place that decides, by stored format, width, device and what this machine has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anybit.errors import InputError
from anybit.formats import (
    CodebookLayout,
    Float16Layout,
    GroupIntLayout,
    NestedLayout,
    Sparse,
    TileLayout,
    TwoFourLayout,
)
from anybit.formats.bits import pack_codes, unpack_codes
from anybit.formats.codebook import decode_table
from anybit.formats.layout import PlacedTile
from anybit.formats.weight import PackedWeight, place
from anybit.kernels import cpu, gpu, reference

BOUND = (
    GroupIntLayout,
    CodebookLayout,
    Float16Layout,
    TwoFourLayout,
    NestedLayout,
)  # formats with native kernels
TAKEN: dict[
    type[TileLayout], set[str]
] = {  # fields whose bytes the native object of a tile holds, in another order
    GroupIntLayout: {"codes", "scales", "zeros"},
    TwoFourLayout: {"codes", "rest", "grids", "narrow_codes", "zeros", "scale_codes", "wide_codes"},
}


# What each way to multiply asks of an x86 processor, the best last, as csrc/common/dispatch.cpp chooses.
_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
NEEDS = {
    "avx2": _AVX2,
    "avx_vnni": (*_AVX2, "avx_vnni"),
    "avx512": _AVX512,
    "avx512_vnni": (*_AVX512, "avx512_vnni"),
    "avx512_vbmi": (*_AVX512, "avx512_vnni", "avx512_vbmi"),
    "avx512_bf16": (*_AVX512, "avx512_vnni", "avx512_vbmi", "avx512_bf16"),
    "amx_bf16": (*_AVX512, "avx512_vnni", "avx512_vbmi", "avx512_bf16", "amx_bf16", "amx_int8"),
}


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
    features, isas, order = cpu.cpu_features(), cpu.matmul_isas(), list(NEEDS)
    better = order[order.index(isas[-1]) + 1 if isas[-1] in order else 0 :] if any(features.values()) else []
    missing = {isa: [need for need in NEEDS[isa] if not features.get(need)] for isa in better}
    lacking = [f"{isa} needs {', '.join(needs)}" for isa, needs in missing.items()]
    return {
        "available": True,
        "isa": cpu.isa(),
        "matmul_isa": cpu.matmul_isa(),
        "matmul_isas": list(isas),
        "reason": "; ".join(["native extension loaded, the best that the processor has", *lacking]),
        "missing": missing,
    }


class Prepared:
    """A packed weight made ready to multiply with: a native object per tile, and one for the layer; on a GPU one layer.

    Some formats (`TAKEN`) are put into an order of the kernels, which then hold the bytes: whoever holds the stored
    tensors of the fields `taken` may drop them, and `restore` makes them again. All others stay referenced. A nested
    weight is run at the widest of its layout's widths.

    Args:
        weight: the stored bytes.
        exact: False has codebooks by row multiply inputs of 8 bits (a scale per token and 32 of them) with centroids of
            8 bits (127 steps to the largest of a row), which is faster. Without native kernels everything is exact.
        isa: one of `cpu.matmul_isas()` instead of the best, for tests and comparisons.
        on_gpu: whether to use the GPU's kernels; default: where the tensors are on one. True for tensors on the CPU
            needs Triton's interpreter.
    """

    def __init__(
        self, weight: PackedWeight, exact: bool = True, isa: str | None = None, on_gpu: bool | None = None
    ) -> None:
        self.out_features, self.in_features = weight.layout.shape
        self.placed = tuple(weight.layout.placed())
        kinds = {tensor.device.type for tensor in weight.tensors.values()}
        self.on_gpu = (kinds == {"cuda"} if on_gpu is None else on_gpu) and gpu.available()
        known = all(isinstance(tile.layout, BOUND) for tile in self.placed)
        self.native = known and kinds == {"cpu"} and not self.on_gpu and cpu.available()
        fields = [weight.of_tile(tile) for tile in self.placed]
        by_row = all(isinstance(t.layout, CodebookLayout) and not t.layout.by_channel for t in self.placed)
        self.exact = exact or not (self.native and by_row)
        self.tiles = [self._bind(*pair, isa) for pair in zip(self.placed, fields)] if self.native else []
        self.taken = tuple(
            f"{tile.prefix}{field}"
            for tile, stored in zip(self.placed if self.native else (), fields)
            for field in stored
            if field in TAKEN.get(type(tile.layout), ()) or (field == "planes" and _by_lanes(tile.layout))
        )
        self.gpu_layer = gpu.bind(weight) if self.on_gpu else None
        if self.gpu_layer is not None:
            self.taken = self.gpu_layer.taken
        kept = {field: tensor for field, tensor in weight.tensors.items() if field not in self.taken}
        self.weight = PackedWeight(weight.layout, kept)
        self.fields = [self.weight.of_tile(tile) for tile in self.placed]
        scale = weight.tensors.get("input_scale")
        self.input_scale = None if scale is None else scale.float()
        self.layer = self._layer(isa) if self.native else None

    def _layer(self, isa: str | None) -> cpu.Layer:
        layer = cpu.Layer(self.out_features, self.in_features, isa)
        for tile, placed, fields in zip(self.tiles, self.placed, self.fields):
            cols, layout = fields.get("cols"), placed.layout
            if isinstance(tile, cpu.Codebook) and not self.exact:
                layer.add(tile, cols, *_lookup_grid(tile.columns))
            elif isinstance(layout, GroupIntLayout) and layout.rounds_inputs:
                grid = layout.act_bits, layout.group_size
                layer.add(tile, cols, *grid, fields.get("act_clip"), fields.get("act_scales"))
            else:
                layer.add(tile, cols)
        if self.weight.layout.sparse is not None:
            layer.add_sparse(**self.weight.of_sparse)
        if self.input_scale is not None:
            layer.scale_inputs(self.input_scale)
        return layer

    def _bind(self, tile: PlacedTile, fields: Mapping[str, Tensor], isa: str | None) -> cpu.Tile:
        layout, columns, rows = tile.layout, tile.columns, fields.get("rows")
        if isinstance(layout, Float16Layout):
            return cpu.Float16(fields["values"], rows, isa)
        if isinstance(layout, TwoFourLayout):
            return cpu.TwoFour(layout.read(fields, self.out_features, columns), isa=isa)
        if isinstance(layout, CodebookLayout):
            _, m = layout.tables(tile.rows, columns)
            table = layout.read_table(fields, layout.widths[-1], m)
            table = decode_table(table, fields.get("codebook_scale"), fields.get("codebook_min"))
            if _by_lanes(layout):
                return cpu.Channels(fields["planes"], table, m, isa=isa)
            if not self.exact:
                table = reference.byte_table(table)
            by_channel = layout.by_channel
            return cpu.codebook(fields["planes"], table, rows, columns=m, by_channel=by_channel, isa=isa)
        if isinstance(layout, NestedLayout):
            small = layout.read_grid(fields, self.out_features)
            planes = [fields[f"plane_{p}"] for p in range(1, len(layout.counts) + 1)]
            return cpu.Nested(planes, *small, fields.get("kept_values"), columns, isa)
        assert isinstance(layout, GroupIntLayout), f"no kernel for tiles in the format {layout.NAME}"
        zeros, bits = fields.get("zeros"), int(layout.bits)
        return cpu.group_int(
            fields["codes"],
            fields["scales"],
            None if zeros is None else unpack_codes(zeros, bits, fields["scales"].shape[1]),
            rows,
            bits=bits,
            group_size=layout.group_size,
            columns=columns,
            isa=isa,
        )

    def restore(self) -> dict[str, Tensor]:
        """The stored tensors of the fields `taken`."""
        if self.gpu_layer is not None:
            return self.gpu_layer.restore()
        made: dict[str, Tensor] = {}
        for tile, placed in zip(self.tiles, self.placed):
            prefix = placed.prefix
            if isinstance(tile, cpu.GroupInt):
                made[f"{prefix}codes"], made[f"{prefix}scales"], zeros = tile.restore()
                if zeros is not None:
                    made[f"{prefix}zeros"] = pack_codes(zeros, int(placed.layout.bits), 1)
            elif isinstance(tile, cpu.Channels):
                made[f"{prefix}planes"] = tile.restore()
            elif isinstance(tile, cpu.TwoFour):
                made |= {f"{prefix}{field}": tensor for field, tensor in tile.restore().tensors().items()}
        return {field: made[field] for field in self.taken}

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` [n] of the matrix, float32 [n, in]; of a weight of one tile "group int" that holds all rows.

        Raises:
            InputError: ids that are no integers.
        """
        if ids.is_floating_point():
            raise InputError(f"ids of {ids.dtype}: expected integers")
        if self.native:
            (tile,) = self.tiles
            assert isinstance(tile, cpu.GroupInt)
            return tile.dequantize_rows(ids)
        if self.gpu_layer is not None:
            return self.gpu_layer.rows(ids)
        layout = replace(self.weight.layout, shape=(len(ids), self.in_features))
        return reference.dequantize(PackedWeight(layout, {f: t[ids] for f, t in self.weight.tensors.items()}))

    def matmul(self, x: Tensor) -> Tensor:
        """`x [..., in] @ W^T -> [..., out]` in the dtype of x, computed in float32 or, of bfloat16, in that.

        Raises:
            InputError: inputs of another width, or none of floats.
        """
        if x.shape[-1:] != (self.in_features,) or not x.is_floating_point():
            raise InputError(
                f"inputs {list(x.shape)} of {x.dtype}: this layer takes floats [..., {self.in_features}]"
            )
        flat = x.reshape(-1, self.in_features)
        if self.gpu_layer is not None:
            if x.device != self.gpu_layer.device:
                raise InputError(
                    f"inputs are on {x.device}, this layer is on {self.gpu_layer.device}: move one"
                )
            return self.gpu_layer.matmul(flat.contiguous()).view(*x.shape[:-1], self.out_features)
        if self.layer is None or x.device.type != "cpu":
            return self._matmul_dense(x)
        flat = (flat if flat.dtype == torch.bfloat16 else flat.float()).contiguous()
        return self.layer.matmul(flat).to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _matmul_dense(self, x: Tensor) -> Tensor:
        """The same through the dense matrix, exactly: on other devices and without native kernels."""
        dense = self.dequantize(x.dtype).to(x.device)
        return torch.nn.functional.linear(reference.round_inputs(x, self.weight), dense)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dense matrix [out, in]."""
        if not self.native and self.gpu_layer is None:
            return reference.dequantize(self.weight).to(dtype)
        whole = len(self.tiles) == 1 and not {"rows", "cols"} & self.fields[0].keys()
        sparse = None if self.weight.layout.sparse is None else Sparse.read(self.weight.of_sparse)
        plain = sparse is None and self.input_scale is None
        exact = dtype if plain else torch.float32
        if self.gpu_layer is not None:
            dense = self.gpu_layer.dequantize(exact)
        elif whole and plain:
            return self.tiles[0].dequantize(dtype)
        else:
            dense = torch.empty(self.out_features, self.in_features, dtype=exact)
            for tile, fields in zip(self.tiles, self.fields):
                place(dense, tile.dequantize(exact), fields.get("rows"), fields.get("cols"))
        if sparse is not None:
            sparse.add_to(dense)
        if self.input_scale is not None:
            dense *= self.input_scale
        return dense.to(dtype)


def _by_lanes(layout: TileLayout) -> bool:
    """Whether a tile is a codebook by channel that has a kernel in which lanes are rows."""
    if not isinstance(layout, CodebookLayout) or not layout.by_channel:
        return False
    return layout.bits <= cpu.Channels.FLOAT_BITS or layout.table_bits == 16


def _lookup_grid(columns: int) -> tuple[int, int, Tensor]:
    """How inputs [m, columns] are rounded for codebooks of bytes: 8 bits, groups of 32, nothing clipped."""
    return 8, cpu.LOOKUP_GROUP, torch.ones(-(-columns // cpu.LOOKUP_GROUP), dtype=torch.float16)


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
    """`hessian [n, n] += x^T x` of activations x [tokens, n], summed in float32; native for bfloat16 on the CPU."""
    if x.dtype == torch.bfloat16 and x.device.type == "cpu" and cpu.has_moments():
        cpu.moments(x.contiguous(), hessian)
    else:
        x = x.float()
        hessian.addmm_(x.T, x)
