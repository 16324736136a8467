"""Codebooks by row with byte centroids and quantized activations: native against double precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import anybit
from anybit.formats import Codebook
from anybit.formats.bits import pack_planes
from anybit.formats.weight import QuantizedWeight, pack
from anybit.kernels import cpu
from anybit.kernels.dispatch import Prepared
from anybit.kv_cache import CACHE
from tests import builders
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


def stored(codes: Tensor, bits: int) -> Tensor:
    """Bitplanes as the format has them: whole words, most significant plane first."""
    return pack_planes(codes, bits, 4).view(torch.int32)


def make(
    rows: int, columns: int, bits: int, seed: int, entries: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [rows, columns], their planes, and an ascending table float16 [rows, entries]."""
    generator = torch.Generator().manual_seed(seed)
    entries = entries or 2**bits
    codes = torch.randint(0, entries, (rows, columns), generator=generator, dtype=torch.uint8)
    table = torch.randn(rows, entries, generator=generator).sort(1).values.half()
    return codes, stored(codes, bits), table


def inputs(tokens: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-128, 128, (tokens, columns), generator=generator, dtype=torch.int16).to(torch.int8)
    return x, torch.rand(tokens, -(-columns // cpu.LOOKUP_GROUP), generator=generator)


def oracle(codes: Tensor, table: Tensor, x: Tensor, scales: Tensor) -> Tensor:
    """In double precision: inputs by their groups' scales, and whole steps of each row's scale."""
    scale = table.float().abs().amax(1, keepdim=True) / 127
    steps = torch.round(table.float() / scale.where(scale > 0, torch.ones(()))).long()
    scaled = x.double() * scales.double().repeat_interleave(cpu.LOOKUP_GROUP, 1)[:, : x.shape[1]]
    return (scaled @ steps.gather(1, codes.long()).double().T * scale.double().T).float()


@settings(max_examples=60, deadline=None)
@given(
    **BY_ROW,
    seed=st.integers(0, 2**20),
)
def test_products_at_every_width_shape_and_instruction_set(
    bits: int, rows: int, columns: int, tokens: int, threads: int, seed: int
) -> None:
    codes, planes, table = make(rows, columns, bits, seed)
    x, scales = inputs(tokens, columns, seed)
    expected = oracle(codes, table, x, scales)
    size = x.double().abs().sum(1, keepdim=True) * table.double().abs().amax(1)  # of what is summed
    for isa in isas():
        tile = cpu.codebook(planes, table, None, columns=columns, by_channel=False, isa=isa)
        y, one = torch.zeros(tokens, rows), torch.zeros(tokens, rows)
        tile.int_matmul(x, scales, y, threads=threads)
        assert bool(((y - expected).abs() <= 2e-6 * size + 1e-30).all()), isa
        tile.int_matmul(x, scales, one, threads=1)
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
    codes, planes, table = make(rows, columns, bits, seed, entries=max(1, 2**bits - seed % 2))
    entries = table.float() * 1.0001 if wide else table
    out_rows = torch.arange(rows, dtype=torch.int32) * 2
    given = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed))
    for isa in isas():
        tile = cpu.codebook(planes, entries, out_rows, columns=columns, by_channel=False, isa=isa)
        narrow = tile.takes_bf16 and (tokens <= 16 or isa.endswith("_bf16"))
        for dtype in (torch.float32, torch.bfloat16)[: 1 + narrow]:
            x, weight = given.to(dtype), entries.to(dtype).double().gather(1, codes.long())
            expected, size = x.double() @ weight.T, x.double().abs() @ weight.abs().T
            y = torch.zeros(tokens, 2 * rows)
            tile.matmul(x, y, threads=threads)
            few = cpu.few_tokens(dtype, isa)
            assert bool(((y[:, ::2] - expected).abs() <= 1e-6 * size + 1e-30).all()), (isa, dtype)
            assert not y[:, 1::2].any()
            for k in range(
                tokens if tokens <= few else 0
            ):  # a small batch is its tokens, whatever the threads
                single = torch.zeros(1, 2 * rows)
                tile.matmul(x[k : k + 1].contiguous(), single, threads=1)
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
    codes, planes, table = make(channels, rows, bits, seed, entries=max(1, 2**bits - seed % 2))
    weight = table.float().gather(1, codes.long()).T  # [rows, channels]
    x = torch.randn(tokens, channels, generator=torch.Generator().manual_seed(seed))
    expected, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    for isa in isas():
        tile = cpu.Channels(planes, table, rows, threads=threads, isa=isa)
        assert torch.equal(tile.dequantize(threads=threads), weight)
        assert torch.equal(tile.restore(threads).view(torch.int32), planes)
        y = torch.zeros(tokens, rows)
        tile.matmul(x, y, threads=threads)
        assert bool(((y - expected).abs() <= 1e-6 * size + 1e-30).all()), isa
        for k in range(tokens if tokens <= 16 else 0):  # a small batch is its tokens, whatever the threads
            single = torch.zeros(1, rows)
            tile.matmul(x[k : k + 1].contiguous(), single, threads=1)
            assert torch.equal(single[0], y[k]), isa


@pytest.mark.parametrize("rows", [31, 32, 33, 72, 200])
@pytest.mark.parametrize("bits", [4, 5, 6])
def test_tables_by_channel_of_many_rows_at_once(bits: int, rows: int) -> None:
    """Channels beyond one stretch of tables; entries that float16 has, and others: AVX2 looks them up otherwise."""
    channels = 1200
    codes, planes, table = make(channels, rows, bits, seed=rows)
    x = torch.randn(16, channels, generator=torch.Generator().manual_seed(bits))
    for entries in (table.float(), table.float() * 1.001):
        weight = entries.gather(1, codes.long()).T
        expected, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
        for isa in isas():
            tile = cpu.Channels(planes, entries, rows, isa=isa)
            few = cpu.Channels(stored(codes[:, :24], bits), entries, 24, isa=isa)
            for tokens in (1, 2, 3, 7, 16):
                y, first = torch.zeros(tokens, rows), torch.zeros(tokens, 24)
                tile.matmul(x[:tokens], y, threads=2)
                few.matmul(x[:tokens], first, threads=1)
                assert bool(((y - expected[:tokens]).abs() <= 1e-6 * size[:tokens] + 1e-30).all()), isa
                assert torch.equal(first, y[:, :24]), isa  # a row's sum is its own


@settings(max_examples=60, deadline=None)
@given(
    bits=st.integers(1, 8),
    channels=st.one_of(st.integers(1, 90), st.just(520)),
    rows=st.integers(1, 200),
    tokens=st.sampled_from([1, 3, 16, 17, 27, 520]),
    wide=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**20),
)
def test_tables_by_channel_as_they_are_stored(
    bits: int, channels: int, rows: int, tokens: int, wide: bool, threads: int, seed: int
) -> None:
    codes, planes, table = make(channels, rows, bits, seed, entries=max(1, 2**bits - seed % 2))
    table = table.float() if wide else table
    weight = table.float().gather(1, codes.long()).T  # [rows, channels]
    x = torch.randn(tokens, channels, generator=torch.Generator().manual_seed(seed))
    expected, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    for isa in isas():
        tile = cpu.codebook(planes, table, None, columns=rows, by_channel=True, isa=isa)
        y = torch.zeros(tokens, rows)
        tile.matmul(x, y, threads=threads)
        assert bool(((y - expected).abs() <= 3e-6 * size + 1e-30).all()), isa


@pytest.mark.parametrize("bits", range(1, 9))
def test_sums_at_the_ends_of_the_bytes(bits: int) -> None:
    """The largest centroid times the smallest activation, everywhere: nothing saturates on the way."""
    columns = 65536
    planes = stored(torch.full((2, columns), 2**bits - 1, dtype=torch.uint8), bits)
    table = torch.zeros(2, 2**bits)
    table[:, -1] = torch.tensor([2.0, -2.0])
    x = torch.full((1, columns), -128, dtype=torch.int8)
    for isa in isas():
        tile = cpu.codebook(planes, table, None, columns=columns, by_channel=False, isa=isa)
        y = torch.zeros(1, 2)
        tile.int_matmul(x, torch.ones(1, columns // cpu.LOOKUP_GROUP), y)
        assert y.tolist() == [[-256.0 * columns, 256.0 * columns]]


def test_output_rows_and_tables_with_fewer_entries() -> None:
    codes, planes, table = make(3, 100, 3, 5, entries=6)
    rows = torch.tensor([0, 2, 5], dtype=torch.int32)
    tile = cpu.codebook(planes, table, rows, columns=100, by_channel=False)
    x, scales = inputs(2, 100, 5)
    y = torch.ones(2, 6)
    tile.int_matmul(x, scales, y)
    torch.testing.assert_close(y[:, rows.long()], 1 + oracle(codes, table, x, scales))
    assert (y[:, [1, 3, 4]] == 1).all()


def test_a_row_of_zeros_and_damaged_inputs() -> None:
    _, planes, table = make(2, 40, 2, 1)
    table[0] = 0
    tile = cpu.codebook(planes, table, None, columns=40, by_channel=False)
    x, _ = inputs(1, 40, 1)
    y = torch.zeros(1, 2)
    tile.int_matmul(x, torch.ones(1, 2), y)
    assert y[0, 0] == 0 and y[0, 1] != 0
    tile.int_matmul(x, torch.tensor([[1.0, torch.nan]]), y)
    assert y.isnan().all()


@pytest.mark.parametrize("damage", [torch.nan, torch.inf, -torch.inf])
def test_damaged_tables_do_not_look_like_others(damage: float) -> None:
    """A row whose table has an entry that is no number gives none, of few tokens and of many, rounded or not."""
    _, _, table = make(3, 64, 2, 1)
    table[1, 3] = damage
    codes = torch.full((3, 64), 3, dtype=torch.uint8)
    for isa in isas():
        tile = cpu.codebook(stored(codes, 2), table, None, columns=64, by_channel=False, isa=isa)
        for tokens in (1, 20):
            x, scales = inputs(tokens, 64, 1)
            y, exact = torch.zeros(tokens, 3), torch.zeros(tokens, 3)
            tile.int_matmul(x, scales, y)
            tile.matmul(x.float(), exact)
            assert y[:, [0, 2]].isfinite().all() and not y[:, 1].isfinite().any()
            assert exact[:, [0, 2]].isfinite().all() and not exact[:, 1].isfinite().any()


@pytest.mark.parametrize("isa", cpu.matmul_isas() if cpu.available() else ())
@pytest.mark.parametrize("wide", [False, True])
def test_codes_beyond_a_table_by_channel_stand_for_nothing(wide: bool, isa: str) -> None:
    """Readers refuse them; who binds a tile past the readers reads no memory of others."""
    channels, rows = 200, 128
    planes = stored(torch.full((channels, rows), 255, dtype=torch.uint8), 8)
    table = torch.ones(channels, 1) if wide else torch.ones(channels, 1).half()
    tile = cpu.codebook(planes, table, None, columns=rows, by_channel=True, isa=isa)
    for tokens in (1, 20):
        y = torch.zeros(tokens, rows)
        tile.matmul(torch.ones(tokens, channels), y)
        assert not y.any()


def test_what_has_no_integer_kernel_is_refused() -> None:
    _, planes, table = make(40, 64, 3, 2)
    by_channel = cpu.codebook(planes, table, None, columns=64, by_channel=True)
    assert not by_channel.takes_ints
    x, scales = inputs(1, 64, 2)
    with pytest.raises(ValueError, match="no integer kernel"):
        by_channel.int_matmul(x, scales, torch.zeros(1, 64))
    tile = cpu.codebook(planes, table, None, columns=64, by_channel=False)
    for bad, match in (
        ((x[:, :63], scales, torch.zeros(1, 40)), "x is int8"),
        ((x, torch.ones(1, 1), torch.zeros(1, 40)), "scales is float32"),
        ((x, scales, torch.zeros(1, 39)), "y is float32"),
        ((x.float(), scales, torch.zeros(1, 40)), "x is float32"),
    ):
        with pytest.raises(ValueError, match=match):
            tile.int_matmul(*bad)


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_a_layer_that_need_not_be_exact(tokens: int) -> None:
    """Inputs and centroids of 8 bits: close to the exact product, but not it; the same at any number of tokens."""
    codes, _, table = make(48, 200, 4, 7)
    tile = Codebook(widths=(4,), codes=codes, tables=(table,))
    packed = pack(QuantizedWeight((48, 200), (tile,)))
    x = torch.randn(tokens, 200, generator=torch.Generator().manual_seed(1))
    exact, fast = Prepared(packed).matmul(x), Prepared(packed, exact=False).matmul(x)
    error = float((fast - exact).norm() / exact.norm())
    assert 0 < error < 0.02
    many = x.repeat(9, 1)
    torch.testing.assert_close(
        Prepared(packed, exact=False).matmul(many), fast.repeat(9, 1), rtol=1e-4, atol=1e-4
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
    model.set_codebook_precision("fp16")
    assert torch.equal(model(ids).logits, exact)
