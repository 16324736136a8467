"""Random layouts of random matrices, multiplied with every instruction set of the machine, against the dense matrix."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from anybit.bench.kernels import random_weight
from anybit.formats import (
    CodebookLayout,
    Float16Layout,
    GroupIntLayout,
    NestedLayout,
    TileLayout,
    TwoFourLayout,
)
from anybit.formats.layout import LayerLayout
from anybit.formats.validate import validate
from anybit.formats.weight import PackedWeight, pack, unpack
from anybit.kernels import cpu, reference
from anybit.kernels.cpu_layer import Layer
from anybit.kernels.dispatch import BoundWeight
from tests.fuzz.bases import Bases
from tests.fuzz.doors import same_product
from tests.fuzz.limits import Finding

SIZES = (
    1,
    2,
    3,
    7,
    8,
    15,
    16,
    17,
    31,
    32,
    33,
    63,
    64,
    65,
    127,
    128,
    129,
    200,
    255,
    256,
    257,
    300,
    431,
    512,
    576,
)
TOKENS = (1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 40, 70)


def case(rng: Random, bases: Bases, folder: Path) -> str:
    layout = random_layout(rng)
    print(json.dumps(layout.to_json()))
    torch.manual_seed(rng.randrange(2**31))
    if layout != LayerLayout.from_json("layer", json.loads(json.dumps(layout.to_json()))):
        raise Finding("config.json does not give the layout back")
    weight = filled(rng, layout)
    validate("layer", weight)
    again = pack(unpack(weight))
    x = torch.randn(rng.choice(TOKENS), layout.shape[1])
    x = x * rng.choice((1e-3, 1, 1, 100))
    x, threads = x.bfloat16() if rng.random() < 0.4 else x, rng.choice((1, 2, 3))
    print(f"{list(x.shape)} of {x.dtype}, {threads} threads")
    for isa in cpu.matmul_isas():
        bound = BoundWeight(weight, isa=isa)
        multiplied(isa, bound, weight, x, threads)
        for width in layout.widths:  # with less of the same bytes
            level = layout.at_width(width)
            multiplied(f"{isa} at {width} bits", bound.at(level), weight.prefix(level), x, threads)
        asked_for(isa, bound, weight, x, threads)
        if not torch.equal(bound.dequantize(), BoundWeight(again, isa=isa).dequantize()):
            raise Finding(f"{isa}: packed again, it is another matrix")
        for field, tensor in bound.unpack().items():
            if layout.sparse is None and not same_bytes(field, tensor, weight):
                raise Finding(f"{isa}: {field} is not given back as it was stored")
    return "right"


def multiplied(name: str, bound: BoundWeight, weight: PackedWeight, x: torch.Tensor, threads: int) -> None:
    """As modules do it, with any number of threads: the dense product, and the same bits each time."""
    assert isinstance(bound.layer, Layer)
    y = bound.matmul(x)
    if y.dtype != x.dtype:
        raise Finding(f"{name} gives {y.dtype} for {x.dtype}")
    same_product(name, weight, x, y)
    if not torch.equal(bound.layer.matmul(x, threads), y):
        raise Finding(f"{name}: another product with {threads} threads")


def asked_for(isa: str, bound: BoundWeight, weight: PackedWeight, x: torch.Tensor, threads: int) -> None:
    """As engines do it: written or added, of inputs that may be rounded already."""
    layer, shape = bound.layer, (len(x), weight.layout.shape[0])
    assert isinstance(layer, Layer)
    plain = torch.full(shape, torch.nan)
    layer.product(x, plain, threads=threads)
    if not torch.equal(plain.to(x.dtype), layer.matmul(x)):
        raise Finding(f"{isa}: written for an engine, it is another product")
    added = plain.clone()
    layer.product(x, added, add=True, threads=threads)
    same_product(f"{isa}, added to itself", weight, x, added / 2)
    size = layer.native.int8_group_size
    if size == 0:
        return
    codes, scales = reference.quantize_activations(
        x.float(), 8, size, torch.ones(-(-x.shape[1] // size)), None
    )
    integers = all(isinstance(tile, GroupIntLayout) for tile in weight.layout.tiles)
    if not integers:  # codebooks want whole multiples, up to 255, of a power of two
        unit = torch.exp2(torch.floor(torch.log2(scales.amax(1, keepdim=True).clamp(min=1e-30))) - 6)
        scales = torch.ceil(scales / unit) * unit
    one, several = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    layer.product(codes, one, scales)
    layer.product(codes, several, scales, threads=threads)
    if not torch.equal(one, several):
        raise Finding(f"{isa}: of rounded inputs, another product with {threads} threads")
    if integers:  # of codebooks, centroids are rounded
        rounded = codes.float() * scales[:, torch.arange(x.shape[1]) // size]
        given = replace(weight.layout, tiles=tuple(replace(t, act_bits=16) for t in weight.layout.tiles))
        same_product(f"{isa}, of rounded inputs", PackedWeight(given, weight.tensors), rounded, one)


def same_bytes(field: str, tensor: torch.Tensor, weight: PackedWeight) -> bool:
    """Whether a field came back; what pads rows may have become zeros, so it is compared unpacked."""
    other = PackedWeight(weight.layout, {**weight.tensors, field: tensor})
    return torch.equal(unpack(other).dequantize(), unpack(weight).dequantize())


def random_layout(rng: Random) -> LayerLayout:
    """Tiles by rows or columns, or one of all; sparse weights and scaled inputs now and then."""
    out, columns = rng.choice(SIZES), rng.choice(SIZES)
    kind = rng.choice(("one", "one", "rows", "cols", "nested", "two_four"))
    act = rng.choice((16, 16, 16, *range(2, 9)))
    tiles: list[TileLayout]
    if kind == "nested":
        counts = sorted((rng.randint(1, out) for _ in range(rng.randrange(8))), reverse=True)
        kept, options = rng.choice((0, rng.randrange(columns))), (rng.random() < 0.5, rng.choice((8, 16)))
        tiles = [NestedLayout.of([out, *counts], kept, gains=options[0], kept_bits=options[1])]
    elif kind == "two_four":
        blocks = -(-columns // 16)
        columns, size = blocks * 16, rng.choice((8, 16))
        narrow = columns - 16 * len(
            [i for i in range(blocks) if i % 8 in (3, 7)]
        )  # as `random_weight` places them
        tiles = [TwoFourLayout.of(narrow, columns, size)]
    elif kind == "one" or (out if kind == "rows" else columns) < 4:
        tiles = [random_tile(rng, columns, act, {})]
    else:
        total, parts = (out if kind == "rows" else columns), rng.randint(2, 4)
        cuts = sorted(rng.sample(range(1, total), parts - 1))
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, total])]
        group, static = random_group(rng, columns), rng.random() < 0.3
        shared = (
            {"group_size": group, "act_static": static and act < 16} if kind == "rows" and act < 16 else {}
        )
        tiles = [random_tile(rng, columns, act, {kind: size, **shared}) for size in sizes]
    rounded = any(tile.rounds_inputs for tile in tiles)
    sparse = rng.randint(0, out * columns) if not rounded and rng.random() < 0.3 else None
    return LayerLayout((out, columns), tuple(tiles), sparse, rng.random() < 0.25)


def random_group(rng: Random, columns: int) -> int:
    return rng.choice((1, 2, 8, 16, 24, 32, 64, 100, 128, columns, 2**20))


def random_tile(rng: Random, columns: int, act: int, place: dict[str, Any]) -> TileLayout:
    """One that may stand where `place` says; rounded inputs only of integers."""
    bits, size = rng.randint(1, 8), place.pop("group_size", None) or random_group(rng, columns)
    static = place.pop("act_static", act < 16 and rng.random() < 0.3)
    kind = rng.choice(("int", "int", "codebook", "float16")) if act == 16 else "int"
    if kind == "int":
        return GroupIntLayout(
            bits=bits, group_size=size, symmetric=rng.random() < 0.4, act_bits=act, act_static=static, **place
        )
    if kind == "float16":
        return Float16Layout(**place)
    by_channel = "rows" not in place and rng.random() < 0.4
    widths = (bits,) if by_channel else tuple(sorted({bits, *rng.sample(range(1, bits + 1), 1)}))
    return CodebookLayout(
        bits=bits, widths=widths, by_channel=by_channel, table_bits=rng.choice((16, 8, 4)), **place
    )


def filled(rng: Random, layout: LayerLayout) -> PackedWeight:
    """Valid bytes: random codes, scales, tables and clips."""
    made = random_weight(layout)
    tensors = dict(made.tensors)
    for tile in layout.placed():
        for field in tile.layout.fields(tile.rows, tile.columns):
            name = tile.prefix + field
            tensor = tensors[name]
            if field.startswith("codebook_") and field[-1].isdigit():
                tensors[name] = ascending(tile.layout, field, tensor, tile.rows, tile.columns)
            elif field == "planes":
                tensors[name] = within(tile.layout, tensor, tile.rows, tile.columns)
            elif field in ("act_clip", "act_scales"):
                tensors[name] = torch.full_like(tensor, rng.choice((0.1, 0.5, 1.0)))
            elif tensor.dtype == torch.float16:
                free = torch.randn(tensor.shape).clamp(-2, 2).half()
                tensors[name] = free.abs() if field in ("scales", "codebook_scale", "kept_scales") else free
    if layout.tiles[0].rows is not None:  # tiles by rows round the same inputs alike
        for field in ("act_clip", "act_scales"):
            tensors |= {n: tensors[f"0.{field}"] for n in tensors if n.endswith(f".{field}")}
    if layout.input_scale:
        tensors["input_scale"] = torch.rand(layout.shape[1]).half() + 0.5
    return PackedWeight(layout, tensors)


def ascending(layout: TileLayout, field: str, tensor: torch.Tensor, r: int, c: int) -> torch.Tensor:
    """A table of a codebook as it may be stored."""
    assert isinstance(layout, CodebookLayout)
    if layout.table_bits == 16:
        return torch.randn(tensor.shape).half().sort(-1).values
    from anybit.formats.bits import pack_bits

    n, m = layout.tables(r, c)
    entries = layout.entries(int(field.rpartition("_")[2]), m)
    codes = torch.randint(0, 2**layout.table_bits, (n, entries), dtype=torch.uint8).sort(-1).values
    return pack_bits(codes, layout.table_bits, 1)


def within(layout: TileLayout, planes: torch.Tensor, r: int, c: int) -> torch.Tensor:
    """Codes that name entries of their tables."""
    assert isinstance(layout, CodebookLayout)
    from anybit.formats.bits import pack_planes

    n, m = layout.tables(r, c)
    entries = layout.entries(int(layout.bits), m)
    codes = torch.randint(0, entries, (n, m), dtype=torch.uint8)
    return pack_planes(codes, int(layout.bits)).view(torch.uint32)
