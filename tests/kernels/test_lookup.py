"""Codebooks by row with byte centroids and quantized activations: native against double precision."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import anybit
from anybit.errors import InputError
from anybit.formats import Codebook, GroupInt
from anybit.formats.weight import QuantizedWeight, pack
from anybit.kernels import cpu
from anybit.kernels.cpu_layer import Layer
from anybit.kernels.dispatch import BoundWeight
from anybit.kv_cache import CACHE
from tests import builders
from tests.kernels.cases import layer_of
from tests.probes import isas

if not cpu.available():
    pytest.skip(str(cpu.why_not()), allow_module_level=True)

pytestmark = pytest.mark.native


BY_ROW = {
    "bits": st.integers(1, 8),
    "rows": st.integers(1, 40),
    "columns": st.integers(1, 1300),
    "tokens": st.sampled_from([1, 2, 3, 5, 8, 16, 17, 27]),
    "threads": st.integers(1, 3),
}


GROUP = 32  # inputs that share a scale


def make(
    rows: int, columns: int, bits: int, seed: int, wide: bool = False, entries: int | None = None
) -> Codebook:
    """Random codes and ascending tables; `wide`: of 8-bit entries, which stand for numbers that float16 has not.

    entries: codes stay below; what fills the table up to 2**bits stands for nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, entries or 2**bits, (rows, columns), generator=generator, dtype=torch.uint8)
    if not wide:
        table = torch.randn(rows, 2**bits, generator=generator).sort(1).values.half()
        return Codebook(widths=(bits,), codes=codes, tables=(table,))
    table = torch.randint(0, 256, (rows, 2**bits), generator=generator).sort(1).values.byte()
    grid = {
        "table_scale": torch.rand(rows, generator=generator).half(),
        "table_min": torch.randn(rows, generator=generator).half(),
    }
    return Codebook(widths=(bits,), codes=codes, tables=(table,), table_bits=8, **grid)


def by_channel(tile: Codebook) -> Codebook:
    """The same tables as those of input channels, as long as the format stores them."""
    table = tile.tables[0][:, : min(2**tile.bits, tile.codes.shape[1])]
    return replace(tile, by_channel=True, tables=(table.contiguous(),))


def inputs(tokens: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-128, 128, (tokens, columns), generator=generator, dtype=torch.int16).to(torch.int8)
    return x, torch.randint(1, 256, (tokens, -(-columns // GROUP)), generator=generator) / 256


def oracle(codes: Tensor, table: Tensor, x: Tensor, scales: Tensor) -> Tensor:
    """In double precision: inputs by their groups' scales, and whole steps of each row's scale."""
    scale = table.float().abs().amax(1, keepdim=True) / 127
    steps = torch.round(table.float() / scale.where(scale > 0, torch.ones(()))).long()
    scaled = x.double() * scales.double().repeat_interleave(GROUP, 1)[:, : x.shape[1]]
    return (scaled @ steps.gather(1, codes.long()).double().T * scale.double().T).float()


@settings(max_examples=60, deadline=None)
@given(
    **BY_ROW,
    seed=st.integers(0, 2**20),
)
def test_products_at_every_width_shape_and_instruction_set(
    bits: int, rows: int, columns: int, tokens: int, threads: int, seed: int
) -> None:
    tile = make(rows, columns, bits, seed)
    x, scales = inputs(tokens, columns, seed)
    expected = oracle(tile.codes, tile.tables[0], x, scales)
    size = x.double().abs().sum(1, keepdim=True) * tile.tables[0].double().abs().amax(1)  # of what is summed
    for isa in isas():
        layer = layer_of(tile, (rows, columns), isa=isa)
        y, one = torch.zeros(tokens, rows), torch.zeros(tokens, rows)
        layer.product(x, y, scales, threads=threads)
        assert bool(((y - expected).abs() <= 2e-6 * size + 1e-30).all()), isa
        layer.product(x, one, scales, threads=1)
        assert torch.equal(y, one)


@settings(max_examples=60, deadline=None)
@given(
    **BY_ROW,
    wide=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_exact_products_at_every_width_shape_and_instruction_set(
    bits: int, rows: int, columns: int, tokens: int, threads: int, wide: bool, seed: int
) -> None:
    tile = replace(make(rows, columns, bits, seed, wide), rows=torch.arange(rows, dtype=torch.int32) * 2)
    entries = tile.values(bits)
    given = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed))
    for isa in isas():
        layer = layer_of(tile, (2 * rows, columns), isa=isa)
        for dtype in (torch.float32, torch.bfloat16):
            met = (
                dtype if isa.endswith("_bf16") else torch.float32
            )  # what centroids are rounded to, at every width
            if dtype == torch.bfloat16 and met == torch.float32:
                continue
            x, weight = given.to(dtype), entries.to(met).double().gather(1, tile.codes.long())
            expected, size = x.double() @ weight.T, x.double().abs() @ weight.abs().T
            y = torch.ones(tokens, 2 * rows)
            layer.product(x, y, threads=threads)
            few = cpu.few_tokens(dtype, isa)
            assert bool(((y[:, ::2] - expected).abs() <= 1e-6 * size + 1e-30).all()), (isa, dtype)
            assert not y[:, 1::2].any()
            for k in range(
                tokens if tokens <= few else 0
            ):  # a small batch is its tokens, whatever the threads
                single = torch.zeros(1, 2 * rows)
                layer.product(x[k : k + 1].contiguous(), single, threads=1)
                assert torch.equal(single[0], y[k]), (isa, dtype)


@settings(max_examples=60, deadline=None)
@given(
    bits=st.integers(1, 8),
    channels=st.integers(1, 90),
    rows=st.integers(1, 200),
    tokens=st.sampled_from([1, 2, 3, 5, 8, 16, 17, 27]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**20),
)
def test_tables_by_channel(bits: int, channels: int, rows: int, tokens: int, threads: int, seed: int) -> None:
    tile = by_channel(make(channels, rows, bits, seed, entries=min(2**bits, rows)))
    weight = tile.dequantize()  # [rows, channels]
    x = torch.randn(tokens, channels, generator=torch.Generator().manual_seed(seed))
    expected, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    for isa in isas():
        layer = layer_of(tile, (rows, channels), threads=threads, isa=isa)
        assert torch.equal(layer.dequantize(threads=threads), weight)
        assert torch.equal(
            layer.unpack(threads)["planes"].view(torch.int32), tile.tensors()["planes"].view(torch.int32)
        )
        y = torch.zeros(tokens, rows)
        layer.product(x, y, threads=threads)
        assert bool(((y - expected).abs() <= 1e-6 * size + 1e-30).all()), isa
        for k in range(tokens if tokens <= 16 else 0):  # a small batch is its tokens, whatever the threads
            single = torch.zeros(1, rows)
            layer.product(x[k : k + 1].contiguous(), single, threads=1)
            assert torch.equal(single[0], y[k]), isa


@pytest.mark.parametrize("rows", [31, 32, 33, 72, 200])
@pytest.mark.parametrize("bits", [4, 5, 6])
def test_tables_by_channel_of_many_rows_at_once(bits: int, rows: int) -> None:
    """Channels beyond one stretch of tables; entries that float16 has, and others: AVX2 looks them up otherwise."""
    channels = 1200
    x = torch.randn(16, channels, generator=torch.Generator().manual_seed(bits))
    for wide in (False, True):
        made = make(channels, rows, bits, rows, wide, entries=min(2**bits, 24))
        tile, first_rows = by_channel(made), by_channel(replace(made, codes=made.codes[:, :24].contiguous()))
        weight = tile.dequantize()
        expected, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
        for isa in isas():
            layer = layer_of(tile, (rows, channels), isa=isa)
            few = layer_of(first_rows, (24, channels), isa=isa)
            for tokens in (1, 2, 3, 7, 16):
                y, first = torch.zeros(tokens, rows), torch.zeros(tokens, 24)
                layer.product(x[:tokens], y, threads=2)
                few.product(x[:tokens], first, threads=1)
                assert bool(((y - expected[:tokens]).abs() <= 1e-6 * size[:tokens] + 1e-30).all()), isa
                assert torch.equal(first, y[:, :24]), isa  # a row's sum is its own


@settings(max_examples=60, deadline=None)
@given(
    bits=st.integers(7, 8),
    channels=st.one_of(st.integers(1, 90), st.just(520)),
    rows=st.integers(1, 200),
    tokens=st.sampled_from([1, 3, 16, 17, 27, 520]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**20),
)
def test_tables_by_channel_as_they_are_stored(
    bits: int, channels: int, rows: int, tokens: int, threads: int, seed: int
) -> None:
    """Those that fit no registers and are no float16 numbers have no order of the kernels' own."""
    tile = by_channel(make(channels, rows, bits, seed, wide=True, entries=min(2**bits, rows)))
    weight = tile.dequantize()  # [rows, channels]
    x = torch.randn(tokens, channels, generator=torch.Generator().manual_seed(seed))
    expected, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    for isa in isas():
        layer = layer_of(tile, (rows, channels), isa=isa)
        assert not layer.repacked and torch.equal(layer.dequantize(threads=threads), weight)
        y = torch.zeros(tokens, rows)
        layer.product(x, y, threads=threads)
        assert bool(((y - expected).abs() <= 3e-6 * size + 1e-30).all()), isa


@pytest.mark.parametrize("tokens", [1, 18])
@pytest.mark.parametrize("bits", range(1, 9))
def test_sums_at_the_ends_of_the_bytes(bits: int, tokens: int) -> None:
    """The largest centroid times the smallest activation, everywhere: nothing saturates on the way."""
    columns = 65536
    table = torch.zeros(2, 2**bits)
    table[:, -1] = torch.tensor([2.0, -2.0])
    codes = torch.full((2, columns), 2**bits - 1, dtype=torch.uint8)
    tile = Codebook(widths=(bits,), codes=codes, tables=(table.half(),))
    x = torch.full((tokens, columns), -128, dtype=torch.int8)
    scales = torch.full((tokens, columns // GROUP), 255 / 128)  # the largest multiple
    for isa in isas():
        y = torch.zeros(tokens, 2)
        layer_of(tile, (2, columns), isa=isa).product(x, y, scales)
        assert y.tolist() == [[-510.0 * columns, 510.0 * columns]] * tokens, isa


@pytest.mark.parametrize("tokens", [9, 18])
@pytest.mark.parametrize("columns", [65_760, 66_048])
def test_sums_of_long_rows_of_many_tokens(columns: int, tokens: int) -> None:
    """AMX sums rows in 32 bits, as far as they reach; the largest digit is -128, of -128 times 129.

    With VNNI groups join in 32 bits.
    """
    table = torch.tensor([[-1.0, 1.0], [1.0, -1.0]]).half()
    tile = Codebook(widths=(1,), codes=torch.ones(2, columns, dtype=torch.uint8), tables=(table,))
    x = torch.full((tokens, columns), -128, dtype=torch.int8)
    scales = torch.full((tokens, columns // GROUP), 129 / 256)
    for isa in isas():
        y = torch.zeros(tokens, 2)
        layer_of(tile, (2, columns), isa=isa).product(x, y, scales)
        assert y.tolist() == [[-64.5 * columns, 64.5 * columns]] * tokens, isa


@pytest.mark.parametrize("codebook_first", [False, True])
def test_a_layer_with_a_codebook_wants_multiples_whatever_stands_before_it(codebook_first: bool) -> None:
    codes = torch.randint(0, 16, (4, 64), dtype=torch.uint8)
    grid = GroupInt(
        bits=4, group_size=GROUP, codes=codes, scales=torch.ones(4, 2).half(), rows=torch.arange(4).int()
    )
    tiles = grid, replace(make(4, 64, 3, 5), rows=torch.arange(4, 8).int())
    packed = pack(QuantizedWeight((8, 64), tiles[::-1] if codebook_first else tiles))
    layer = Layer(packed.layout, packed.tensors, "int8")
    x, scales = inputs(2, 64, 1)
    assert layer.native.int8_group_size == GROUP
    layer.product(x, torch.zeros(2, 8), scales)
    with pytest.raises(ValueError, match="up to 255, of a power of two"):
        layer.product(x, torch.zeros(2, 8), torch.tensor([[1.0, 0.3], [0.77, 0.0011]]))


def test_output_rows_of_rounded_inputs() -> None:
    rows = torch.tensor([0, 2, 5], dtype=torch.int32)
    tile = replace(make(3, 100, 3, 5), rows=rows)
    x, scales = inputs(2, 100, 5)
    y = torch.ones(2, 6)
    layer_of(tile, (6, 100)).product(x, y, scales, add=True)
    size = x.double().abs().sum(1, keepdim=True) * tile.tables[0].double().abs().amax(1)
    error = y[:, rows.long()] - 1 - oracle(tile.codes, tile.tables[0], x, scales)
    assert bool((error.abs() <= 2e-6 * size).all())
    assert (y[:, [1, 3, 4]] == 1).all()


def test_a_row_of_zeros_and_damaged_inputs() -> None:
    tile = make(2, 40, 2, 1)
    tile.tables[0][0] = 0
    layer = layer_of(tile, (2, 40))
    x, _ = inputs(1, 40, 1)
    y = torch.zeros(1, 2)
    layer.product(x, y, torch.ones(1, 2))
    assert y[0, 0] == 0 and y[0, 1] != 0
    layer.product(x, y, torch.tensor([[1.0, torch.nan]]))
    assert y.isnan().all()


@pytest.mark.parametrize("damage", [torch.nan, torch.inf, -torch.inf])
def test_damaged_tables_do_not_look_like_others(damage: float) -> None:
    """A row whose table has an entry that is no number gives none, of few tokens and of many, rounded or not."""
    tile = make(3, 64, 2, 1)
    tile.tables[0][1, 3] = damage
    tile = replace(tile, codes=torch.full((3, 64), 3, dtype=torch.uint8))
    for isa in isas():
        for precision, tokens in itertools.product(("fp16", "int8"), (1, 20)):
            layer = layer_of(tile, (3, 64), precision, isa=isa)
            x, scales = inputs(tokens, 64, 1)
            y, exact = torch.zeros(tokens, 3), torch.zeros(tokens, 3)
            layer.product(x, y, scales)
            layer.product(x.float(), exact)
            assert y[:, [0, 2]].isfinite().all() and not y[:, 1].isfinite().any()
            assert exact[:, [0, 2]].isfinite().all() and not exact[:, 1].isfinite().any()


@pytest.mark.parametrize("isa", cpu.matmul_isas() if cpu.available() else ())
@pytest.mark.parametrize("wide", [False, True])
def test_codes_beyond_a_table_by_channel_stand_for_nothing(wide: bool, isa: str) -> None:
    """Readers refuse them; who binds a tile past the readers reads no memory of others."""
    channels, rows = 200, 128
    tile = by_channel(make(channels, rows, 8, 1, wide))
    assert tile.tables[0].shape[1] == rows
    packed = pack(QuantizedWeight((rows, channels), (replace(tile, codes=torch.full_like(tile.codes, 255)),)))
    layer = Layer(packed.layout, packed.tensors, isa=isa)
    for tokens in (1, 20):
        assert not layer.matmul(torch.ones(tokens, channels)).any()


def test_what_has_no_integer_kernel_is_refused() -> None:
    tile = make(40, 64, 3, 2)
    x, scales = inputs(1, 64, 2)
    with pytest.raises(ValueError, match="no kernel for rounded ones"):
        layer_of(by_channel(tile), (64, 40)).product(x[:, :40], torch.zeros(1, 64), scales)
    layer = layer_of(tile, (40, 64))
    for bad, match in (
        ((x[:, :63], torch.zeros(1, 40), scales), "x is int8"),
        ((x, torch.zeros(1, 40), torch.ones(1, 1)), "scales is float32"),
        ((x, torch.zeros(1, 40), torch.tensor([[1.0, 0.3]])), "up to 255, of a power of two"),
        ((x, torch.zeros(1, 40), torch.tensor([[1.0, -1.0]])), "up to 255, of a power of two"),
        ((x, torch.zeros(1, 39), scales), "y is float32"),
        ((x.float(), torch.zeros(1, 40), scales), "x is float32"),
    ):
        with pytest.raises(ValueError, match=match):
            layer.product(*bad)


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_a_layer_that_need_not_be_exact(tokens: int) -> None:
    """Inputs and centroids of 8 bits: close to the exact product, but not it; the same at any number of tokens."""
    packed = pack(QuantizedWeight((48, 200), (make(48, 200, 4, 7),)))
    x = torch.randn(tokens, 200, generator=torch.Generator().manual_seed(1))
    exact, fast = BoundWeight(packed).matmul(x), BoundWeight(packed, "int8").matmul(x)
    error = float((fast - exact).norm() / exact.norm())
    assert 0 < error < 0.02
    many = x.repeat(9, 1)
    torch.testing.assert_close(
        BoundWeight(packed, "int8").matmul(many), fast.repeat(9, 1), rtol=1e-4, atol=1e-4
    )


def test_a_model_runs_fast_or_exactly(
    model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path
) -> None:
    config = builders.options("squeezellm", 4, samples=2, seq_len=32, sensitive_outliers=0.002)
    anybit.quantize(model_dir("llama"), tmp_path / "out", config, calibration=str(text_file))
    model, ids = anybit.load(tmp_path / "out").requires_grad_(False), torch.arange(6)[None]
    exact = model(ids).logits
    model.set_codebook_precision("int8")
    fast = model(ids).logits
    assert 0 < float((fast - exact).norm() / exact.norm()) < 0.05
    other = anybit.load(tmp_path / "out", codebook_precision="int8").requires_grad_(False)
    assert torch.equal(other(ids).logits, fast)
    many = torch.arange(60)[None] % 7  # as prefill: the same numbers, from the dense matrix
    again = model(many).logits[:, -1]
    steps = model(many[:, :-4], use_cache=True)
    last = model(many[:, -4:], **{CACHE: steps[CACHE]}).logits[:, -1]
    torch.testing.assert_close(again, last, rtol=1e-3, atol=1e-3 * float(last.abs().max()))
    for bad in (
        lambda: model.set_codebook_precision("fast"),
        lambda: anybit.load(tmp_path / "out", codebook_precision="bf16"),
    ):
        with pytest.raises(InputError, match="expected fp16 or int8"):
            bad()
    model.set_codebook_precision("fp16")
    assert torch.equal(model(ids).logits, exact)
