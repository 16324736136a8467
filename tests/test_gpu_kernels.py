"""The GPU's kernels for stored tiles: on a GPU where there is one, else in Triton's interpreter."""

import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import anybit
from anybit import formats
from anybit.bench.kernels import layouts, random_weight
from anybit.errors import InputError
from anybit.formats import Float16Layout
from anybit.formats.bits import pack_planes
from anybit.formats.layout import LayerLayout
from anybit.formats.weight import PackedWeight, QuantizedWeight, pack, unpack
from anybit.kernels import cpu, gpu, reference
from anybit.kernels.dispatch import BoundWeight, info
from anybit.layers import PackedModule, set_bits
from tests import builders
from tests.interpreted import spread

if not gpu.available():
    pytest.skip(f"the GPU's kernels do not run: {gpu.why_not()}", allow_module_level=True)

from anybit.kernels.gpu import activations, codebook, integer, split
from anybit.kernels.gpu import layer as layers
from anybit.kernels.gpu.group_int import FUSED_TOKENS, GroupIntKernel
from anybit.kernels.gpu.layer import Layer
from anybit.kernels.gpu.words import pack_words, unpack_words

pytestmark = pytest.mark.gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def random_codes(r: int, c: int, bits: int) -> Tensor:
    return torch.randint(0, 2**bits, (r, c), dtype=torch.uint8, device=DEVICE)


def close(y: Tensor, want: Tensor, error: float) -> None:
    assert torch.isfinite(y).all()
    assert float((y.double() - want.double()).norm() / want.double().norm()) < error


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("lanes", [1, 8, 16])
def test_words_hold_every_code(bits: int, lanes: int) -> None:
    for columns in (1, 31, 513, 1100):
        codes = random_codes(3, columns, bits)
        words = pack_words(codes, bits, lanes)
        assert words.dtype == torch.int32 and words.shape[2:] == (bits, lanes)
        assert torch.equal(unpack_words(words, columns), codes)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_tiles_without_rows(bits: int) -> None:
    codes, scales = torch.zeros(0, 256, device=DEVICE).byte(), torch.zeros(0, 2, device=DEVICE).half()
    stored = codes, scales, torch.zeros(0, 2, device=DEVICE).byte(), None, bits, 128
    for tile in (GroupIntKernel(*stored), integer.IntegerTile(*stored)):
        assert tile.codes().shape == (0, 256)
    for m in (1, 3, 300):
        x = torch.ones(m, 256, device=DEVICE).half()
        GroupIntKernel(*stored).matmul(x, torch.zeros(m, 0, device=DEVICE).half())


def test_words_lie_as_described() -> None:
    codes = torch.zeros(1, 512, dtype=torch.uint8)
    codes[0, 6 * 32 + 2 * 3] = 0b101  # field 6 of lane 3, low halves
    codes[0, 15 * 32 + 2 * 2 + 1] = 0b110  # the field that lies across words, of lane 2, high halves
    words = pack_words(codes, 3, 16)[0, 0].long() & 0xFFFFFFFF
    assert words[:, 3].tolist() == [0, 0b101 << 3, 0]
    assert words[:, 2].tolist() == [0, 1 << 31, 1 << 31]
    codes[:] = 0
    codes[0, 13 * 32] = 0b100110  # the second field that lies across words: two bits of one, four of the next
    words = pack_words(codes, 6, 16)[0, 0]
    assert words[:, 0].tolist() == [0, 0b10 << 14, 0b1001 << 12, 0, 0, 0]


def group_int(bits: int, group_size: int, r: int, c: int, symmetric: bool) -> formats.GroupInt:
    groups = -(-c // group_size)
    zeros = None if symmetric else random_codes(r, groups, bits)
    scales = (torch.rand(r, groups, device=DEVICE) * 0.1).half()
    return formats.GroupInt(bits, group_size, random_codes(r, c, bits), scales, zeros)


GRIDS = [  # bits, group size, r, c, symmetric
    (1, 128, 5, 256, False),
    (2, 32, 16, 130, True),
    (3, 64, 17, 700, False),
    (4, 128, 33, 1024, False),
    (5, 96, 40, 576, False),
    (6, 1000, 9, 300, True),
    (7, 16, 20, 333, False),
    (8, 32, 9, 100, False),
    (8, 4096, 34, 2000, False),
]


@pytest.mark.parametrize("grid", GRIDS)
def test_group_int_multiplies_what_is_stored(grid: tuple[int, int, int, int, bool]) -> None:
    tile = group_int(*grid)
    made = GroupIntKernel(tile.codes, tile.scales, tile.zeros, None, tile.bits, tile.group_size)
    dense = tile.dequantize()
    assert torch.equal(made.codes(), tile.codes)
    assert torch.equal(made.dequantize(), dense)
    rounded = made.dequantize(torch.bfloat16)  # in the interpreter, zeros come out as 1e-38
    assert torch.allclose(rounded, dense.bfloat16(), rtol=0, atol=1e-30)
    ids = torch.tensor([3, 0, 3], device=DEVICE)
    assert torch.equal(made.dequantize_rows(ids), dense[ids])
    for tokens, dtype in spread((1, 2, 17), FLOATS):
        x = torch.randn(tokens, tile.codes.shape[1], device=DEVICE).to(dtype)
        y = poisoned(tokens, len(dense))
        made.matmul(x, y)
        close(y, x.double() @ dense.double().T, 2e-6)
        made.matmul(x, y, add=True)
        close(y, 2 * x.double() @ dense.double().T, 2e-6)


@pytest.mark.parametrize("bits, group_size, dtype", spread(range(1, 9), [16, 32, 48, 128, 1000], FLOATS[1:]))
def test_few_tokens_meet_every_width_and_group(bits: int, group_size: int, dtype: torch.dtype) -> None:
    c = 300 if group_size < 128 else 600
    tile = group_int(bits, group_size, 20, c, group_size == 32)
    made = GroupIntKernel(tile.codes, tile.scales, tile.zeros, None, bits, group_size)
    dense = tile.dequantize().double()
    for tokens in (1, 2, 8, 9, 17):
        x, y = torch.randn(tokens, c, device=DEVICE).to(dtype), poisoned(tokens, 20)
        made.matmul(x, y)
        close(y, x.double() @ dense.T, 2e-6)


@pytest.mark.parametrize("dtype", FLOATS[1:])
@pytest.mark.parametrize("bits", range(1, 9))
def test_every_code_less_every_zero_point_is_exact(bits: int, dtype: torch.dtype) -> None:
    """Products of one term each."""
    codes = torch.arange(2**bits, dtype=torch.uint8, device=DEVICE).repeat(2**bits, 1)
    scales = (torch.rand(2**bits, 1, device=DEVICE) * 0.1).half()
    tile = formats.GroupInt(bits, 256, codes, scales, codes.T[:, :1].contiguous())
    x, y = torch.eye(2**bits, device=DEVICE, dtype=dtype), poisoned(2**bits, 2**bits)
    kernel, want = GroupIntKernel(codes, scales, tile.zeros, None, bits, 256), tile.dequantize().T
    for some in (range(1), *torch.arange(2**bits).split(FUSED_TOKENS)):
        kernel.matmul(x[some], outputs := y[some])
        # In the interpreter, zeros come out as 1e-38.
        assert torch.allclose(outputs, want[some], rtol=0, atol=1e-30)


def test_outputs_go_where_the_rows_say_and_nowhere_else() -> None:
    tile, rows = group_int(4, 128, 37, 600, False), torch.randperm(80, device=DEVICE)[:37].sort().values.int()
    made = GroupIntKernel(tile.codes, tile.scales, tile.zeros, rows, 4, 128)
    others = torch.ones(80, dtype=torch.bool, device=DEVICE)
    others[rows.long()] = False
    for tokens in (1, 3, FUSED_TOKENS + 1):
        x, y = torch.randn(tokens, 600, device=DEVICE), poisoned(tokens, 80)
        made.matmul(x, y)
        assert y[:, others].isnan().all()
        close(y[:, rows.long()], x.double() @ tile.dequantize().double().T, 2e-6)


INTEGERS = [
    *GRIDS[1:6],
    (6, 64, 17, 200, False),
    (7, 128, 20, 256, False),
    (8, 128, 20, 256, True),
    (8, 4096, 9, 3000, True),
    (8, 128, 20, 300, False),
    (8, 96, 9, 200, False),
    (8, 4096, 9, 3000, False),
]


@pytest.mark.parametrize("grid", INTEGERS)
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_integer_products_are_exact_per_group(grid: tuple[int, int, int, int, bool], tokens: int) -> None:
    bits, group_size, r, c, symmetric = grid
    tile, clip = group_int(*grid), torch.full((-(-c // group_size),), 0.98).half().to(DEVICE)
    tile.codes[0] = 2**bits - 1
    if not symmetric:
        tile.zeros[0] = 0
    made = integer.IntegerTile(tile.codes, tile.scales, tile.zeros, None, bits, group_size)
    assert torch.equal(made.codes(), tile.codes)
    x, grid_of_x = torch.randn(tokens, c, device=DEVICE), activations.Grid(8, group_size, clip)
    x[0] = -1  # clipped to -128: with the first row's weights, the largest sums that there are
    inputs = activations.quantize_and_sum(
        x, grid_of_x, made.span if made.needs_sums else None, multiple=made.stride
    )
    codes, scales = inputs[0][:, :c], inputs[1]
    assert (codes[0] == -128).all()
    sums = reference.group_sums(
        codes.cpu(),
        replace(tile, codes=tile.codes.cpu(), zeros=tile.zeros if tile.zeros is None else tile.zeros.cpu()),
    ).to(DEVICE)
    want = (sums.double() * scales[:, None].double() * tile.scales.double()).sum(-1)
    y = poisoned(tokens, r)
    integer.matmul([(made, integer.Inputs(*inputs))], y)
    close(y, want, 5e-7)


@pytest.mark.parametrize("bits", range(1, 9))
def test_codebooks_are_looked_up(bits: int) -> None:
    r, c = 37, 700
    codes, table = random_codes(r, c, bits), torch.randn(r, 2**bits, device=DEVICE).half()
    stored = pack_planes(codes, bits).view(torch.uint32)
    planes = codebook.pack_planes(stored, c)
    assert torch.equal(codebook.unpack_planes(planes, c).view(torch.int32), stored.view(torch.int32))
    by_row = codebook.RowCodebook(planes, [p * planes[0].numel() for p in range(bits)], table, c)
    dense = table.float().gather(1, codes.long())
    assert torch.equal(by_row.dequantize(), dense)
    few = torch.randn(c, min(2**bits, r), device=DEVICE).half()
    codes = codes.clamp(max=few.shape[1] - 1)
    by_channel = codebook.ChannelCodebook(codes, few, bits)
    assert torch.equal(by_channel.codes(), codes)
    assert torch.equal(by_channel.dequantize(), few.float().gather(1, codes.T.long()).T)
    assert torch.equal(by_channel.dequantize(torch.float16), few.gather(1, codes.T.long()).T)
    for tile, weight in ((by_row, dense), (by_channel, by_channel.dequantize())):
        for tokens, dtype in spread((1, 3) if bits % 2 else (3, 1), FLOATS):
            x, y = torch.randn(tokens, c, device=DEVICE).to(dtype), poisoned(tokens, r)
            tile.matmul(x, y)
            of_dtype = weight if tokens == 1 else weight.to(dtype)  # several tokens meet the tensor cores
            rounds = tile is by_channel and tokens > 1 and dtype != torch.float32  # PyTorch's product
            close(y, x.double() @ of_dtype.double().T, torch.finfo(dtype).eps if rounds else 2e-6)


def test_a_narrower_width_is_the_first_planes() -> None:
    r, c = 20, 600
    codes, table = random_codes(r, c, 6), torch.randn(r, 8, device=DEVICE).half()
    planes = codebook.pack_planes(pack_planes(codes, 6).view(torch.uint32), c)
    narrow = codebook.RowCodebook(planes, [p * planes[0].numel() for p in range(3)], table, c)
    assert torch.equal(narrow.dequantize(), table.float().gather(1, (codes >> 3).long()))


def test_entries_to_permute_are_packed_by_bytes() -> None:
    table = torch.tensor([[0x1234, 0x5678, -0x7FFF, 3, 4, 5, 6, 7]], dtype=torch.int16).view(torch.float16)
    assert codebook.pack_entries(table).view(torch.uint8).tolist() == [
        [0x34, 0x78, 0x01, 3, 4, 5, 6, 7, 0x12, 0x56, 0x80, 0, 0, 0, 0, 0]
    ]
    assert codebook.pack_entries(table[:, :3]).shape == (1, 4)
    assert codebook.pack_entries(torch.zeros(5, 16).half()).shape == (5, 8)


SHAPES = [(96, 640), (40, 592), (33, 200)]


def weights() -> list[tuple[str, tuple[int, int]]]:
    """Every layout, at every shape that has it or, in the interpreter, at one of them."""
    every = {shape: layouts(*shape) for shape in SHAPES}
    names = [name for name in dict.fromkeys(itertools.chain(*every.values())) if not name.endswith(" A8")]
    cases = []
    for i, name in enumerate(names):
        shapes = [shape for shape in SHAPES if name in every[shape]]
        cases += [(name, shape) for shape in (shapes if DEVICE == "cuda" else [shapes[i % len(shapes)]])]
    return cases


def cmpq(out: int, columns: int) -> LayerLayout:
    """Channels of three widths, and weights added to them."""
    made, wide = layouts(out, columns), columns // 3
    (three,), (four,) = made["by channel 3"].tiles, made["by channel 4"].tiles
    tiles = replace(four, cols=wide), replace(three, cols=columns - wide - 20), Float16Layout(cols=20)
    return LayerLayout((out, columns), tiles, sparse=out)


KEPT_16 = "nested 2 to 5, kept 16"


def layout_of(name: str, shape: tuple[int, int]) -> LayerLayout:
    if name == "CMPQ":
        return cmpq(*shape)
    made = layouts(*shape)[name.removesuffix(", kept 16")]
    return replace(made, tiles=(replace(made.tiles[0], kept_bits=16),)) if name == KEPT_16 else made


def random_layer(name: str, shape: tuple[int, int]) -> PackedWeight:
    """Valid bytes, of random numbers where floats are."""
    weight = random_weight(layout_of(name, shape))
    tensors = {
        field: t
        if not t.is_floating_point() or field.endswith("act_clip")  # which tiles by rows share
        else torch.rand(t.shape).add(0.1).to(t.dtype)
        for field, t in weight.tensors.items()
    }
    valid = pack(unpack(PackedWeight(weight.layout, tensors)))  # padding bits are 0
    return PackedWeight(weight.layout, {field: t.to(DEVICE) for field, t in valid.tensors.items()})


def on_cpu(weight: PackedWeight) -> PackedWeight:
    return PackedWeight(weight.layout, {field: t.cpu() for field, t in weight.tensors.items()})


@pytest.mark.parametrize("name, shape", [*weights(), ("CMPQ", SHAPES[1]), (KEPT_16, SHAPES[0])])
def test_every_layout_multiplies_as_the_reference_does(name: str, shape: tuple[int, int]) -> None:
    weight = random_layer(name, shape)
    layer, readable = Layer(weight.layout, weight.tensors), unpack(on_cpu(weight))
    for tokens, dtype, error in ((1, torch.float32, 2e-5), (3, torch.float16, 2e-3)):
        x = torch.randn(tokens, shape[1], device=DEVICE).to(dtype)
        close(layer.matmul(x).cpu(), reference.int_matmul(x.cpu().float(), readable), error)
    restored = layer.unpack()
    assert restored.keys() == set(layer.repacked)
    for field, tensor in restored.items():
        assert tensor.dtype == weight.tensors[field].dtype
        assert torch.equal(tensor.contiguous().view(torch.uint8), weight.tensors[field].view(torch.uint8))


def test_a_level_is_a_layer_of_the_same_beginnings() -> None:
    """Nested tiles and codebooks of several widths, up and down; what is stored is whole at every level."""
    codes = torch.randint(0, 16, (40, 640), dtype=torch.uint8)
    wide = torch.randn(40, 16).sort(1).values.half()
    tables = (wide[:, ::2].contiguous(), wide)
    codebook = pack(
        QuantizedWeight((40, 640), (formats.Codebook(widths=(3, 4), codes=codes, tables=tables),))
    )
    nested = on_cpu(random_layer("nested 2 to 5", (48, 640)))
    (tile,) = nested.layout.tiles
    assert isinstance(tile, formats.NestedLayout)
    fewer = replace(nested.layout, tiles=(tile.with_counts((48, 40, 8)),))
    x = torch.randn(3, 640, device=DEVICE)
    for weight, levels in ((codebook, [codebook.layout.at_width(b) for b in (3, 4, 3)]), (nested, [fewer])):
        stored = {field: tensor.to(DEVICE) for field, tensor in weight.tensors.items()}
        at = Layer(weight.layout, stored)
        for level in [*levels, weight.layout.widest()]:
            at, part = at.at(level), PackedWeight(weight.layout, stored).prefix(level)
            alone = Layer(level, part.tensors)
            assert torch.equal(at.dequantize(), alone.dequantize()) and torch.equal(
                at.matmul(x), alone.matmul(x)
            )
            for field, tensor in at.unpack().items():
                assert torch.equal(tensor.cpu().view(torch.uint8), weight.tensors[field].view(torch.uint8))


def test_a_layer_refuses_levels_and_rows_that_it_does_not_have() -> None:
    nested, plain = random_layer("nested 2 to 5", (48, 640)), random_layer("W4", (48, 640))
    (tile,) = nested.layout.tiles
    assert isinstance(tile, formats.NestedLayout)
    more = replace(nested.layout, tiles=(tile.with_counts((*tile.counts, 49)),))
    of_counts = partial(formats.NestedLayout.of, tile.counts)
    for weight, level, match in (
        (nested, more, "counts of planes"),
        (
            nested,
            replace(nested.layout, tiles=(of_counts(tile.kept),)),
            r"gains of a level are \(\d+, 16, False\), expected",
        ),
        (
            nested,
            replace(nested.layout, tiles=(of_counts(tile.kept + 1, gains=True),)),
            "kept channels, their bits",
        ),
        (nested, plain.layout, "is nested, this one is"),
        (nested, replace(nested.layout, tiles=(tile, tile)), "several tiles"),
        (plain, plain.layout, "has one width"),
    ):
        with pytest.raises(ValueError, match=match):
            Layer(weight.layout, weight.tensors).at(level)
    scaled = Layer(
        replace(plain.layout, input_scale=True),
        {**plain.tensors, "input_scale": torch.ones(640, device=DEVICE).half()},
    )
    with pytest.raises(ValueError, match="single rows are those of"):
        scaled.rows(torch.tensor([0]))


def test_splits_fill_a_gpu_with_whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    for rows, steps, want in ((4096, 8, 8), (11008, 8, 4), (4096, 22, 11), (14336, 8, 4), (128256, 8, 1)):
        assert split.splits(rows // 32, 4, steps, device) == want
    assert split.splits(4, 4, 0, device) == split.splits(0, 4, 1, device) == 1
    monkeypatch.setattr(split, "ASSUMED", 1)
    split._multiprocessors.cache_clear()
    assert [split.splits(2, 4, steps, device) for steps in (7, 8, 9, 17)] == [7, 8, 5, 6]  # no part is empty
    split._multiprocessors.cache_clear()


def test_parts_are_added_in_order() -> None:
    for parts in (2, 3, 7):
        sums = torch.randn(parts, 3, 50, device=DEVICE)
        want = torch.zeros(3, 50, device=DEVICE)
        for one in sums:
            want = want + one
        for dtype in FLOATS:
            assert torch.equal(split.sum_parts(sums, dtype), want.to(dtype))


SPLIT = [
    "W3",
    "W4A8",
    "MixLLM p10",
    "Atom W4A4",
    "2/4/16",
    "codebook 4 + sparse",
    "by channel 3",
    "nested 2 to 5",
    KEPT_16,
]


@pytest.mark.parametrize("name, parts", spread([*SPLIT, "CMPQ"], [3, 7]))
def test_parts_of_the_columns_add_up(name: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more or fewer steps than parts, the last part with fewer steps than the others or with none."""
    shape = (33, 2496)
    weight = random_layer(name, shape)
    layer, readable = Layer(weight.layout, weight.tensors), unpack(on_cpu(weight))
    monkeypatch.setattr(split, "splits", lambda *_: parts)
    monkeypatch.setattr(torch, "empty", poisoned_empty)
    for tokens, dtype, error in ((1, torch.float32, 2e-5), (3, torch.float16, 2e-3)):
        x = torch.randn(tokens, shape[1], device=DEVICE).to(dtype)
        y = layer.matmul(x)
        assert y.dtype == dtype and torch.equal(layer.matmul(x), y)
        close(y.cpu(), reference.int_matmul(x.cpu().float(), readable), error)


def test_tiles_by_rows_write_as_many_parts_as_both_can(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randperm(40, device=DEVICE).int()
    monkeypatch.setattr(split, "splits", lambda warps, each, steps, device: steps)
    for second, parts in ((32, 2), (40, 1)):  # groups of 40 have no kernel
        tiles = [
            replace(group_int(bits, size, 20, 700, False), rows=some.sort().values)
            for bits, size, some in ((3, 32, rows[:20]), (8, second, rows[20:]))
        ]
        weight = packed((40, 700), *tiles)
        layer = Layer(weight.layout, weight.tensors)
        for tokens in (1, 3):
            x = torch.randn(tokens, 700, device=DEVICE).half()
            assert layer._counts(x) == [parts]
            close(layer.matmul(x).cpu(), reference.int_matmul(x.cpu().float(), unpack(on_cpu(weight))), 2e-3)


def poisoned_empty(*shape: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    made = torch.zeros(*shape, dtype=dtype, device=device)
    return made.fill_(torch.nan) if made.is_floating_point() else made


@pytest.mark.parametrize("name", ["codebook 4 + sparse", "CMPQ", "nested 2 to 5"])
def test_products_of_a_layer_do_not_wait_for_each_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_layer(name, (40, 640))
    layer, x = Layer(weight.layout, weight.tensors), torch.randn(2, 640, device=DEVICE).half()
    want, launched = layer.matmul(x), []

    def backwards(device: torch.device, *runs: Callable[[], None]) -> None:
        launched.append(len(runs))
        for run in reversed(runs):
            run()

    monkeypatch.setattr(layers, "concurrently", backwards)
    assert torch.equal(layer.matmul(x), want)
    assert max(launched) > 1


@pytest.mark.parametrize(
    "name",
    [
        "W4",
        "W3A8",
        "MixLLM p10",
        "Atom W4A4",
        "2/4/16",
        "codebook 4 + sparse",
        "by channel 3",
        "nested 2 to 5",
    ],
)
def test_prefill_and_other_types(name: str) -> None:
    weight = random_layer(name, (48, 640))
    bound, readable = BoundWeight(weight, on_gpu=True), unpack(on_cpu(weight))
    dense = reference.dequantize(on_cpu(weight))
    assert torch.equal(bound.dequantize().cpu(), dense)
    x = torch.randn(2, FUSED_TOKENS, 640, device=DEVICE)
    y = bound.matmul(x).cpu()
    assert y.shape == (2, FUSED_TOKENS, 48)
    close(y.view(-1, 48), reference.int_matmul(x.cpu().view(-1, 640), readable), 2e-5)
    some = (2, codebook.FUSED_LOADS + 1, FUSED_TOKENS + 1)  # decoded as they are met, and dense
    for tokens, dtype in spread(some, FLOATS[1:]):
        x = torch.randn(tokens, 640, device=DEVICE).to(dtype)
        y = bound.matmul(x)
        assert y.dtype == dtype
        close(y.cpu(), reference.int_matmul(x.float().cpu(), readable), 2e-2)
    assert bound.matmul(x[:0]).shape == (0, 48)


def test_eight_bits_with_zero_points_beside_others() -> None:
    def tile(bits: int, **of: Tensor) -> formats.GroupInt:
        made = group_int(bits, 32, 20, 100, False)
        return replace(made, act_bits=8, act_clip=torch.ones(4, device=DEVICE).half(), **of)

    of_rows, of_columns = torch.randperm(40, device=DEVICE).int(), torch.randperm(200, device=DEVICE).int()
    by_rows = [tile(4, rows=of_rows[:20].sort().values), tile(8, rows=of_rows[20:].sort().values)]
    by_columns = [tile(8, cols=of_columns[:100]), tile(5, cols=of_columns[100:])]
    for shape, tiles in (((40, 100), by_rows), ((20, 200), by_columns)):
        weight, x = packed(shape, *tiles), torch.randn(3, shape[1], device=DEVICE)
        close(
            Layer(weight.layout, weight.tensors).matmul(x).cpu(),
            reference.int_matmul(x.cpu(), unpack(on_cpu(weight))),
            2e-6,
        )


def test_group_sizes_without_a_kernel_are_still_right() -> None:
    for symmetric in (True, False):
        tile = group_int(4, 40, 12, 200, symmetric)
        rounds = replace(tile, act_bits=8, act_clip=torch.ones(5).half())
        plain, rounding = packed((12, 200), tile), packed((12, 200), rounds)
        for weight in (plain, rounding):
            x = torch.randn(3, 200, device=DEVICE)
            close(
                Layer(weight.layout, weight.tensors).matmul(x).cpu(),
                reference.int_matmul(x.cpu(), unpack(on_cpu(weight))),
                2e-6,
            )


def packed(shape: tuple[int, int], *tiles: formats.GroupInt) -> PackedWeight:
    def here(tile: formats.GroupInt) -> formats.GroupInt:
        held = {field.name: getattr(tile, field.name) for field in fields(tile)}
        return replace(tile, **{name: t.cpu() for name, t in held.items() if isinstance(t, Tensor)})

    weight = pack(QuantizedWeight(shape, tuple(map(here, tiles))))
    return PackedWeight(weight.layout, {field: t.to(DEVICE) for field, t in weight.tensors.items()})


@pytest.mark.parametrize("name", ["W4", "W4A8", "Atom W4A4", "2/4/16", "codebook 4", "nested 3"])
def test_no_other_copy_of_the_codes_is_kept(name: str) -> None:
    weight = random_layer(name, (256, 4096))  # little to pad
    before = storages()
    layer = Layer(weight.layout, weight.tensors)
    made = sum(size for key, size in storages().items() if key not in before)
    assert layer.repacked and made < 1.3 * weight.nbytes


def storages() -> dict[int, int]:
    """Bytes of all storages that tensors are alive of, by address."""
    gc.collect()
    kept = [t.untyped_storage() for t in gc.get_objects() if type(t) is Tensor]
    return {storage.data_ptr(): storage.nbytes() for storage in kept}


def test_inputs_of_another_device_or_width_are_refused() -> None:
    bound = BoundWeight(random_layer("W4", (33, 200)), on_gpu=True)
    with pytest.raises(InputError, match="this layer takes floats"):
        bound.matmul(torch.randn(1, 100, device=DEVICE))
    with pytest.raises(InputError, match="move one"):
        bound.matmul(torch.randn(1, 200, device="meta"))


def test_info_says_where_kernels_run() -> None:
    assert info()["gpu"]["available"] and info()["gpu"]["reason"] == gpu.where()


def force(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers choose the GPU's kernels wherever their tensors are."""
    before = BoundWeight.__init__
    monkeypatch.setattr(
        BoundWeight,
        "__init__",
        lambda self, weight, precision="fp16", isa=None: before(self, weight, precision, isa, True),
    )


@pytest.mark.parametrize("name", ["W4", "MixLLM p10", "codebook 3", "nested 2 to 5", "2/4/16"])
def test_modules_hold_bytes_once_and_give_them_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch)
    weight = random_layer(name, (48, 640))
    module = PackedModule(weight.layout).to(DEVICE)
    module.load_state_dict(weight.tensors)
    x = torch.randn(2, 640, device=DEVICE)
    want = module.matmul(x)
    assert all(module.get_buffer(field).numel() == 0 for field in module.bound().repacked)
    for field, tensor in module.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), weight.tensors[field].view(torch.uint8))
    assert torch.equal(module.matmul(x), want)


MODELS: dict[str, dict[str, object]] = {
    "gptq": {"group_size": 16, "embed_bits": 8},
    "mixllm": {"group_size": 32},
    "any-precision": {},
    "cmpq": {"bits": 3.5},
    "two-four-sixteen": {},
    "anybit": {},
}
CLUSTERED = ("any-precision", "cmpq", "anybit")  # by the native extension


@pytest.mark.parametrize("method", MODELS)
def test_a_model_computes_the_same_on_a_gpu(
    method: str,
    model_dir: Callable[[str], Path],
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Embeddings, tied heads and switched widths too."""
    if method in CLUSTERED and not cpu.available():
        pytest.skip(cpu.why_not() or "")
    # One block of two: it takes a while.
    one = {"samples": 2, "seq_len": 32, "exclude": ("model.layers.1.*",)}
    config = builders.options(method, **one, **MODELS[method])  # type: ignore[arg-type]
    anybit.quantize(model_dir("llama-tied"), tmp_path / "out", config, calibration=str(text_file))
    ids = torch.arange(20)[None]
    model = anybit.load(str(tmp_path / "out"))
    want = model(ids).logits
    force(monkeypatch)
    model = anybit.load(str(tmp_path / "out"), device=DEVICE)
    with torch.no_grad():
        # a rounding boundary of an input may turn a difference of sums into a step
        close(model(ids.to(DEVICE)).logits.cpu(), want, 2e-2 if method == "mixllm" else 1e-4)
        if method in ("any-precision", "anybit"):
            set_bits(model, 3)
            made = model(ids[:, :1].to(DEVICE)).logits.cpu()
            monkeypatch.undo()
            close(made, anybit.load(str(tmp_path / "out"), bits=3)(ids[:, :1]).logits, 1e-4)


COMPILE = """
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from anybit.kernels.gpu import activations, codebook, group_int, integer, sparse, split, two_four

def build(kernel, types, warps=4, aligned=(), **constants):
    given = {n: type for n, type in zip(kernel.arg_names, types.split()) if type != "None"}
    constants |= {n: None for n in kernel.arg_names if n not in given and n not in constants}
    sixteen = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(kernel, {n: given.get(n, "constexpr") for n in kernel.arg_names}, constants, sixteen)
    options = {"num_warps": warps, "num_stages": 1}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    left = r"tt.dot [^:]*: tensor<\\d+x(\\d+)x\\w+, #ttg.dot_op<{opIdx = 0, [^}]*kWidth = (\\d+)"
    for depth, each in re.findall(left, made.asm["ttgir"]):  # were it shorter than four threads, sums would be wrong
        assert int(depth) >= 4 * int(each), (kernel.fn.__name__, depth, each)
    print(kernel.fn.__name__)
    return made.asm["ptx"]

grid = dict(GROUP=128, RUN=4, BITS=3, LANES=16, SYMMETRIC=False)
tile, flags = "*bf16 *i32 *fp16 *u8 *i32 *bf16", dict(ROWS=True, ADD=True)
build(group_int._gemv, tile.replace("bf16", "fp32") + 5 * " i32", 1, **grid, **flags, BLOCK=32)
for symmetric in (False, True):  # what a thread loads, it multiplies; sums may be passed on at the end
    kind = grid | dict(TOKENS=8, STEP=1, BLOCK=16, SYMMETRIC=symmetric)
    ptx = build(group_int._gemm, tile + 6 * " i32", 1, ("x", "words", "y", "c"), **kind, **flags)
    assert "mma.sync.aligned.m16n8k16" in ptx and ptx.count("shfl") < 8 and "ldmatrix" not in ptx
for bits, dtype, lanes, tokens, warps in ((8, "bf16", 8, 16, 1), (4, "fp16", 8, 8, 1), (6, "fp16", 16, 32, 4)):
    kind = grid | dict(BITS=bits, LANES=lanes, TOKENS=tokens, STEP=warps, BLOCK=16 * warps)
    build(group_int._gemm, tile.replace("bf16", dtype) + 6 * " i32", warps, **kind, **flags)
build(group_int._dequantize, "*i32 *fp16 *u8 *i64 *bf16" + 4 * " i32", **grid, PICKED=True, BLOCK=16)
rest = " *fp16 *u8 *i32 *i8 *fp32 *i32 i32 i32 i32 "
kind = dict(GROUP=128, SPAN=128, ZERO=-1, OUTSIDE=False)
four, seven, eight = kind | dict(HALVES=2), kind | dict(HALVES=1), kind | dict(HALVES=1, OUTSIDE=True)
for tiles, a, b in ((1, four, seven), (2, four, eight), (3, four, seven)):
    types = "*u8" + rest + ("*i8" if b["OUTSIDE"] else "*u8") + rest + "*bf16 i32 i32"
    both = {f"{name}_{mark}": value for mark, one in (("A", a), ("B", b)) for name, value in one.items()}
    build(integer._matmul, types, **both, TILES=tiles, ROWS=tiles == 2, ADD=False, TOKENS=16, BLOCK=64)
tile = "*bf16 *i32 *i64 *fp16 *i32 *u8 *fp32 *i32 *bf16"
for bits in (3, 4, 5):
    kind = dict(BITS=bits, LANES=16, SHARED=True, PERMUTED=bits < 5)
    build(codebook._row_gemv, tile + 4 * " i32", 2, **kind, **flags, BLOCK=32)
build(codebook._row_gemm, tile + 5 * " i32", **kind, **flags, TOKENS=16, BLOCK=64)
build(codebook._row_dequantize, "*i32 *i64 *fp16 *i32 *u8 *fp32 *bf16 i32 i32 i32", **kind, BLOCK=16)
kind = dict(BITS=5, ENTRIES=32, CHUNKS=16, ADD=False, BLOCK=64)
build(codebook._channel_gemv, "*bf16 *i32 *fp32 *bf16" + 4 * " i32", **kind)
dense = dict(BITS=5, ENTRIES=32, CHANNELS=64, BLOCK=32)
build(codebook._channel_dequantize, "*i32 *fp32 *bf16 i32 i32", **dense)
for tokens in (1, 16):
    kind = dict(HALVES=1, ADD=False, TOKENS=tokens, WORDS=32, BLOCK=32)
    build(two_four._product, "*bf16 *i32 *u8 *fp16 *u8 *i32 *fp16 *u8 *bf16" + 6 * " i32", **kind)
types = "*bf16 None *i32 *fp16 *fp16 None *i8 *fp32 *i32" + 5 * " i32" + " fp32"
sizes = dict(SIZE=96, SPAN=32, TOP=127, ROWS=16, CHUNK=128, CHUNKS=1, BLOCK=2048, PAD=32)
build(activations._quantize, types, **sizes)
build(sparse._sparse, "*bf16 *fp16 *i32 *i32 *fp32 i32 i32 i32", 1, ADD=False, TOKENS=1, AT_ONCE=64)
build(split._sum, "*fp32 *bf16 i32 i32", 1, PARTS=8, BLOCK=128)
"""


def test_kernels_compile_for_a_gpu_that_is_not_here() -> None:
    """The interpreter takes more than the compiler does."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.split()) == 22
