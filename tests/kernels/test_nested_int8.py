"""Nested tiles with inputs and tables of 8 bits: native against double precision with the same rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import anybit
from anybit.formats import Nested, NestedLayout
from anybit.formats import tables as shapes
from anybit.formats.layout import LayerLayout
from anybit.formats.weight import PackedWeight, QuantizedWeight, pack
from anybit.kernels import cpu, cpu_layer
from anybit.kernels.cpu_layer import Layer
from anybit.kernels.dispatch import BoundWeight
from tests.formats.test_nested import random_tile
from tests.probes import isas

if not cpu.available():
    pytest.skip(str(cpu.why_not()), allow_module_level=True)

from anybit import _native

pytestmark = pytest.mark.native
GROUP = 32  # inputs that share a scale
FEW = ("portable", "avx512")  # where only up to 32 tokens have the bits of one


def rounded_table(bits: int) -> Tensor:
    """The entries as whole steps: 127 to the largest of a shape, 255 * 127 + 127 from 7 bits on."""
    table = shapes.table(bits)
    step = table.abs().amax(1, keepdim=True) / (127 if bits <= 6 else 32512)
    return (table / step).round() * step


def weight_of(tile: Nested) -> Tensor:
    """The matrix with such tables, float64 [r, c]."""
    dense = tile.dequantize().double()
    coded = Nested.coded(dense.shape[1], tile.kept)
    for bits, first, last in Nested.spans(tile.counts):
        scales = Nested.scales_at(tile.scales, tile.gains, bits)
        for i in range(first, last):
            entries = rounded_table(bits)[tile.shapes[i].long()][tile.codes[i].long()]
            dense[tile.order[i], coded] = entries.double() * float(scales[i])
    return dense


def multiples_of(scales: Tensor) -> Tensor:
    """Scales float32 [m, groups] of 32 inputs each, rounded up to whole multiples, up to 255, of a power of two."""
    largest = scales.amax(1, keepdim=True).double()
    unit = torch.exp2(torch.floor(torch.log2(largest.clamp_min(1e-30))) - 7)
    unit = torch.where(torch.ceil(largest / unit) > 255, 2 * unit, unit)
    return (torch.ceil(scales.double() / unit) * unit).float()


def inputs_of(tile: Nested, x: Tensor) -> Tensor:
    """Inputs as they are multiplied: those that meet codes rounded, 32 together, float64 [m, c]."""
    coded = Nested.coded(x.shape[1], tile.kept)
    groups = torch.nn.functional.pad(x[:, coded], (0, -len(coded) % GROUP)).unflatten(1, (-1, GROUP))
    scales = multiples_of(groups.abs().amax(2) / 127)[..., None]
    made = x.double()
    rounded = (groups / scales.where(scales > 0, 1)).round().double() * scales.double()
    made[:, coded] = rounded.flatten(1)[:, : len(coded)]
    return made


def case(
    rows: int, columns: int, kept: int, planes: list[int], seed: int, kept_bits: int = 8
) -> tuple[Nested, PackedWeight]:
    counts = tuple(sorted((max(1, round(rows * share / 8)) for share in planes), reverse=True))
    tile = random_tile(rows, columns, min(kept, columns - 1), (rows, *counts), seed, kept_bits)
    return tile, pack(QuantizedWeight((rows, columns), (tile,)))


@settings(deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 700),
    kept=st.integers(0, 40),
    planes=st.lists(st.integers(1, 8), max_size=7),
    tokens=st.sampled_from([1, 2, 3, 4, 8, 9, 16, 21]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_products_of_any_shape_and_widths(
    rows: int, columns: int, kept: int, planes: list[int], tokens: int, threads: int, seed: int
) -> None:
    """Sums of rounded inputs are exact: kept channels alone, which meet inputs as they are, are sums of floats."""
    tile, packed = case(rows, columns, kept, planes, seed, 8 if seed % 2 else 16)
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed))
    x[:, tile.kept] *= 50
    expected = inputs_of(tile, x) @ weight_of(tile).T
    size = inputs_of(tile, x).abs() @ weight_of(tile).abs().T
    for isa in isas():
        layer = Layer(packed.layout, packed.tensors, "int8", threads, isa)
        found = layer.matmul(x, threads).double()
        assert ((found - expected).abs() <= 2e-6 * size + 1e-12).all(), isa
        torch.testing.assert_close(layer.dequantize().double(), weight_of(tile), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_and_many_tokens_multiply_the_same_numbers(dtype: torch.dtype, isa: str) -> None:
    tile, packed = case(48, 200, 3, [8, 8, 6, 4, 3, 2, 1], 0)
    x = torch.randn(70, 200, generator=torch.Generator().manual_seed(1)).to(dtype)
    layer = Layer(packed.layout, packed.tensors, "int8", isa=isa)
    expected = inputs_of(tile, x.float()) @ weight_of(tile).T
    for part in (x[:1], x[:3], x[:8], x):
        error = (layer.matmul(part).double() - expected[: len(part)]).norm() / expected[: len(part)].norm()
        assert error < (1e-5 if dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("columns", [4096, 4096 + 8, 4096 + 192, 8 * 4096 + 100])
def test_the_largest_sums_fit(columns: int, isa: str) -> None:
    """Entries, codes of inputs and their factors as large as they get, all of one sign, in rows of any length."""
    tile, _ = case(16, columns, 0, [8, 7, 6, 5, 4, 3, 2], 0)
    for bits, first, last in Nested.spans(tile.counts):
        tile.codes[first:last] = 2**bits - 1  # or all of them 0, whose entries are the least
        tile.codes[first:last:2] = 0
    packed = pack(QuantizedWeight((16, columns), (tile,)))
    x = torch.full((20, columns), 127 * 255 / 128)
    x[1::2] *= -1
    layer = Layer(packed.layout, packed.tensors, "int8", isa=isa)
    expected = x.double() @ weight_of(tile).T
    for count in (1, 2, 3, 4, 8, 9, 20):
        torch.testing.assert_close(layer.matmul(x[:count]).double(), expected[:count], rtol=2e-6, atol=0)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kept", [0, 20])
@pytest.mark.parametrize("columns", [30, 130, 300, 500, 512, 576, 1100, 2200, 4800])
def test_a_token_has_the_same_bits_alone_and_among_others(columns: int, kept: int, isa: str) -> None:
    """Whatever kernel multiplies so many tokens, up to as many as the layer says; the signs of zeros, too."""
    tile, packed = case(83, columns, kept, [8, 8, 7, 6, 5, 4, 2], 5)
    packed.tensors["scales"][::3] *= -1
    x = torch.randn(150, columns, generator=torch.Generator().manual_seed(3))
    x[:, ::7] *= 30
    x[:, tile.kept] *= 100
    x[4], x[5, 3], x[6] = 0, torch.nan, 1e-40
    layer = Layer(packed.layout, packed.tensors, "int8", isa=isa)
    few = 32 if isa in FEW else 150
    for inputs in (x, x.bfloat16()):
        whole = torch.int32 if inputs.dtype == torch.float32 else torch.int16
        alone = torch.cat([layer.matmul(row) for row in inputs.split(1)])
        assert alone[5].isnan().all() and alone[[i for i in range(150) if i != 5]].isfinite().all()
        for count in (2, 3, 4, 5, 8, 13, 16, 17, 32, 33, 64, 150):
            if count <= few:
                together = layer.matmul(inputs[:count])
                assert torch.equal(together.view(whole), alone[:count].view(whole)), count
    added = torch.ones(21, 83)
    layer.product(x[:21].contiguous(), added, add=True)
    assert torch.equal(added.nan_to_num(), (1 + layer.matmul(x[:21])).nan_to_num())


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("columns", [30, 128, 129, 256, 257, 384, 385, 4672, 8320])
def test_rows_that_end_anywhere_in_a_block(columns: int, isa: str) -> None:
    """Of every width, an odd number of each; also where columns take turns in parts, for few tokens and for many."""
    each = 17 if columns < 1000 else 3
    tile = random_tile(8 * each, columns, 0, tuple(each * (8 - i) for i in range(8)), 4)
    packed = pack(QuantizedWeight((8 * each, columns), (tile,)))
    layer = Layer(packed.layout, packed.tensors, "int8", isa=isa)
    x = torch.randn(18, columns, generator=torch.Generator().manual_seed(9))
    expected = inputs_of(tile, x) @ weight_of(tile).T
    size = inputs_of(tile, x).abs() @ weight_of(tile).abs().T
    for tokens in (1, 2, 18):
        found = layer.matmul(x[:tokens]).double()
        assert ((found - expected[:tokens]).abs() <= 2e-6 * size[:tokens]).all(), tokens


@pytest.mark.parametrize("isa", [isa for isa in isas() if isa not in FEW])
# Entries of a byte, in one chunk of columns and in more; of two bytes.
@pytest.mark.parametrize(
    ("columns", "planes"), [(96, [8, 8, 8, 2]), (1100, [8, 8, 8, 3]), (1100, [8, 8, 8, 8, 8, 8, 3])]
)
def test_more_outputs_than_a_cache_holds(columns: int, planes: list[int], isa: str) -> None:
    """They are written in runs of rows, which end where those of a width or a thread do."""
    _, packed = case(1071, columns, 4, planes, 6)
    x = torch.randn(509, columns, generator=torch.Generator().manual_seed(7))
    layer = Layer(packed.layout, packed.tensors, "int8", isa=isa)
    for inputs in (x, x.bfloat16()):
        few = torch.cat([layer.matmul(part) for part in inputs.split(3)])
        for threads in (1, 2):
            assert torch.equal(layer.matmul(inputs, threads), few)
    added = torch.ones(509, 1071)
    layer.product(x, added, add=True)
    assert torch.equal(added, 1 + layer.matmul(x))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("columns", [99, 579, 700])
def test_tables_that_are_not_mirrored(columns: int, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of two bytes have other kernels then. The tables of this package are mirrored, a caller's may not be."""
    raised = shapes.entries().copy()
    raised[:, [2**8 - 3, 2**9 - 3]] *= 1.5  # the last entries of 7 and 8 bits
    raised = raised.astype(np.float16).astype(np.float32)
    monkeypatch.setattr(shapes, "tables", lambda: torch.from_numpy(raised))
    monkeypatch.setattr(cpu_layer, "_tables", lambda isa, int8: _native.Tables(raised, isa, int8))
    tile, packed = case(40, columns, 3, [8, 8, 8, 8, 8, 7, 3], 2)
    layer = Layer(packed.layout, packed.tensors, "int8", isa=isa)
    x = torch.randn(20, columns, generator=torch.Generator().manual_seed(1))
    expected, size = (
        inputs_of(tile, x) @ weight_of(tile).T,
        inputs_of(tile, x).abs() @ weight_of(tile).abs().T,
    )
    for tokens in (1, 2, 3, 20):
        found = layer.matmul(x[:tokens]).double()
        assert ((found - expected[:tokens]).abs() <= 2e-6 * size[:tokens]).all(), tokens


def test_levels_and_other_precision() -> None:
    """Fewer planes of the same layer, and a layer that is exact again."""
    _, packed = case(40, 130, 2, [8, 8, 8, 4, 2], 3)
    x = torch.randn(2, 130, generator=torch.Generator().manual_seed(2))
    fewer = NestedLayout.of((40, 40, 30, 10), 2, gains=True, kept_bits=8)
    fast = BoundWeight(packed, "int8")
    level = fast.at(LayerLayout((40, 130), (fewer,)))
    alone = BoundWeight(packed.prefix(LayerLayout((40, 130), (fewer,))), "int8")
    assert fast.codebook_precision == "int8"
    assert torch.equal(level.matmul(x), alone.matmul(x))
    exact = BoundWeight(packed).matmul(x)
    error = float((fast.matmul(x) - exact).norm() / exact.norm())
    assert 0 < error < 0.01


def test_tables_are_of_the_layers_kind() -> None:
    _, packed = case(8, 64, 1, [8], 0)
    for int8 in (False, True):
        with pytest.raises(ValueError, match="tables rounded for them, and others need exact ones"):
            _native.Layer(
                packed.layout.to_json(),
                dict(packed.tensors),
                int8,
                _native.Tables(shapes.tables(), None, not int8),
            )


def test_rounded_inputs_of_the_caller_need_all_channels_coded() -> None:
    """Kept channels want inputs as they are, which a caller that has rounded them does not give."""
    for kept, group in ((0, GROUP), (2, 0)):
        _, packed = case(8, 64, kept, [8], 0)
        assert Layer(packed.layout, packed.tensors, "int8").native.int8_group_size == group


def test_a_model_runs_fast_or_exactly(anybit_artifact: Path) -> None:
    ids = torch.arange(3, 9)[None]
    model = anybit.load(anybit_artifact).requires_grad_(False)
    for bits in (2.5, 4, 8):
        model.set_bits(bits)
        exact = model(ids).logits
        model.set_codebook_precision("int8")
        fast = model(ids).logits
        assert 0 < float((fast - exact).norm() / exact.norm()) < 0.05
        assert torch.equal(
            anybit.load(anybit_artifact, bits=bits, codebook_precision="int8")(ids).logits, fast
        )
        model.set_codebook_precision("fp16")
        assert torch.equal(model(ids).logits, exact)
