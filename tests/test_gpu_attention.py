"""Paged attention against PyTorch's in float64, what is written against `QuantizedStates`: on a GPU or interpreted."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from anybit.errors import InputError
from anybit.formats.states import QuantizedStates

pytest.importorskip("triton", reason="Triton is not installed")

from anybit.bench import gpu_attention
from anybit.kernels.gpu.attention import PagedCache, Tile, paged_attention, reference, write
from tests.interpreted import spread

pytestmark = pytest.mark.gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 16
LENGTHS = (1, PAGE - 1, PAGE, 70, 33)
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # an interpreted kernel cuts bfloat16 off


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(cache: PagedCache) -> PagedCache:
    """With NaN and the largest codes in every page."""
    for part in (cache.keys, cache.values, cache.key_grid, cache.value_grid):
        if part is not None:
            part.fill_(math.nan if part.is_floating_point() else -1)
    return cache


def place(lengths: tuple[int, ...], pages: int, page: int = PAGE) -> tuple[Tensor, Tensor]:
    """Block tables int32 [batch, max_pages] of pages in a random order, -1 beyond, and the slot of every token."""
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).tolist()
    most = -(-max(lengths) // page) + 1
    tables = torch.full((len(lengths), most), -1, dtype=torch.int32)
    slots = []
    for i, length in enumerate(lengths):
        for t in range(length):
            if t % page == 0:
                tables[i, t // page] = order.pop()
            slots.append(int(tables[i, t // page]) * page + t % page)
    return tables, torch.tensor(slots)


def put(rows: Tensor, grid: Tensor | None, states: Tensor, slots: Tensor, bits: int) -> Tensor:
    """Put states [tokens, heads, d] into pages, without a kernel; returns what attention sees of them."""
    page, place = slots // rows.shape[2], slots % rows.shape[2]
    if grid is None:
        rows[page, :, place] = states
        return states
    made = QuantizedStates.of(states.transpose(0, 1)[None], bits)
    target = rows.view(torch.uint8)
    codes = made.codes[0].transpose(0, 1)
    target[page, :, place, : codes.shape[-1]] = codes
    grid[page, :, place] = torch.stack([made.scale[0].T, made.minimum[0].T], -1)
    return (made.minimum.float()[..., None] + made.scale.float()[..., None] * _codes(made))[0].transpose(0, 1)


def _codes(states: QuantizedStates) -> Tensor:
    bits = torch.arange(0, 8, states.bits)
    fields = states.codes[..., None] >> bits & (2**states.bits - 1)
    return fields.flatten(-2)[..., : states.d].float()


def expected(
    query: Tensor, keys: Tensor, values: Tensor, lengths: tuple[int, ...], window: int | None = None
) -> Tensor:
    """Attention in float64, sequence by sequence, of tokens side by side."""
    made, at, ratio = [], 0, query.shape[1] // keys.shape[1]
    for i, length in enumerate(lengths):
        first = at + max(0, length - (window or length))
        k, v = (
            x[first : at + length].double().transpose(0, 1).repeat_interleave(ratio, 0)
            for x in (keys, values)
        )
        made.append(scaled_dot_product_attention(query[i].double()[:, None], k, v)[:, 0])
        at += length
    return torch.stack(made)


def case(
    bits: int,
    ratio: int,
    d: int,
    dtype: torch.dtype,
    lengths: tuple[int, ...] = LENGTHS,
    page: int = PAGE,
    scale: float = 1.0,
) -> tuple[PagedCache, Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    pages = 2 + sum(-(-length // page) for length in lengths)
    tables, slots = place(lengths, pages, page)
    cache = filled(PagedCache.empty(pages, 2, d, bits, page, dtype, "cpu"))
    keys = (random(len(slots), 2, d) * 2 + 1).to(dtype)
    values = ((random(len(slots), 2, d, seed=1) - 0.5) * scale).to(dtype)
    seen = (
        put(cache.keys, cache.key_grid, keys, slots, bits),
        put(cache.values, cache.value_grid, values, slots, bits),
    )
    query = random(len(lengths), 2 * ratio, d, seed=2).to(dtype)
    parts = (cache.keys, cache.values, cache.key_grid, cache.value_grid)
    moved = PagedCache(bits, d, *(None if part is None else part.to(DEVICE) for part in parts))
    return (
        moved,
        query.to(DEVICE),
        tables.to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        seen,
    )


def close(made: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert made.dtype == dtype
    torch.testing.assert_close(made.cpu().double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] / 2)


HEADS = [(1, 64), (3, 80), (4, 128), (7, 64)]  # query heads to a head of the cache, dimensions


CACHES = list(itertools.product([4, 8, 16], [torch.float16, torch.bfloat16]))  # bits, type of queries


@pytest.mark.parametrize("kind, heads", spread(CACHES, HEADS))
def test_attention_is_that_of_the_dequantized_cache(
    kind: tuple[int, torch.dtype], heads: tuple[int, int]
) -> None:
    (bits, dtype), (ratio, d) = kind, heads
    cache, query, tables, lengths, (keys, values) = case(bits, ratio, d, dtype)
    wanted = expected(query.cpu(), keys, values, LENGTHS)
    for splits in (1, 4):  # with and without a merge; four are more than short sequences have blocks
        close(paged_attention(query, cache, tables, lengths, d**-0.5, splits=splits), wanted, dtype)
    close(reference(query, cache, tables, lengths, d**-0.5), wanted, dtype)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("d", [7, 12, 256])
def test_odd_dimensions_and_pages(bits: int, d: int) -> None:
    lengths = (5, 9)
    cache, query, tables, long, (keys, values) = case(bits, 2, d, torch.float16, lengths, page=4)
    wanted = expected(query.cpu(), keys, values, lengths)
    close(paged_attention(query, cache, tables, long, d**-0.5), wanted, torch.float16)


@pytest.mark.parametrize("scale", [1e-5, 3e3])
def test_small_and_large_values_keep_their_precision(scale: float) -> None:
    cache, query, tables, lengths, (keys, values) = case(4, 2, 64, torch.float16, scale=scale)
    made = paged_attention(query, cache, tables, lengths, 64**-0.5).cpu().double()
    wanted = expected(query.cpu(), keys, values, LENGTHS)
    assert ((made - wanted).norm() / wanted.norm()) < 5e-3  # 1e-5 is subnormal in float16


def test_a_large_bfloat16_query_does_not_overflow() -> None:
    cache, query, tables, lengths, (keys, values) = case(4, 1, 64, torch.bfloat16)
    query *= 1e6
    wanted = expected(query.cpu() / 1e6, keys, values, LENGTHS)
    close(paged_attention(query, cache, tables, lengths, 64**-0.5 / 1e6), wanted, torch.bfloat16)


@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("window", [1, 20, 1000])
def test_a_window_hides_earlier_tokens(bits: int, window: int) -> None:
    cache, query, tables, lengths, (keys, values) = case(bits, 2, 64, torch.float16)
    wanted = expected(query.cpu(), keys, values, LENGTHS, window)
    close(paged_attention(query, cache, tables, lengths, 0.125, window, splits=2), wanted, torch.float16)
    close(reference(query, cache, tables, lengths, 0.125, window), wanted, torch.float16)


def test_tiles_and_repeats_agree() -> None:
    cache, query, tables, lengths, _ = case(4, 3, 64, torch.float16)
    first = paged_attention(query, cache, tables, lengths, 0.125, splits=2)
    assert torch.equal(first, paged_attention(query, cache, tables, lengths, 0.125, splits=2))
    other = paged_attention(query, cache, tables, lengths, 0.125, tile=Tile(64, 2, 4))
    torch.testing.assert_close(first, other, rtol=2e-3, atol=1e-3)


def test_a_sequence_of_no_tokens_gives_zeros() -> None:
    cache, query, tables, lengths, _ = case(4, 1, 64, torch.float16)
    lengths[1] = 0
    for splits in (1, 2):
        out = paged_attention(query, cache, tables, lengths, 0.125, splits=splits)
        assert not out[1].any() and out[0].any() and out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits, d", [(4, 64), (4, 7), (8, 80), (16, 12)])
def test_written_states_are_those_of_quantized_states(bits: int, d: int, dtype: torch.dtype) -> None:
    if bits == 16 and dtype == torch.float32:
        pytest.skip("a cache of 16 bits takes its own dtype")
    slots = torch.tensor([5, -1, 2, 11, 8])
    keys = (random(5, 3, d) * torch.logspace(-6, 4, 5)[:, None, None]).to(dtype)
    values = random(5, 3, d, seed=1).to(dtype)
    keys[0, 0], keys[2, 1, :3] = 1.5, math.inf  # a range of 0, and one beyond float16
    cache = filled(PagedCache.empty(3, 3, d, bits, 4, dtype, DEVICE))
    write(cache, keys.to(DEVICE), values.to(DEVICE), slots.to(DEVICE))
    kept = slots >= 0
    page, place = slots[kept] // 4, slots[kept] % 4
    for rows, grid, states in (
        (cache.keys, cache.key_grid, keys),
        (cache.values, cache.value_grid, values),
    ):
        got, put_in = rows.cpu()[page, :, place], states[kept]
        if grid is None:
            assert torch.equal(got, put_in)
            assert rows.isnan().sum() == rows.numel() - got.numel()  # nothing else was touched
            continue
        made = QuantizedStates.of(put_in.transpose(0, 1)[None], bits)
        codes = got.contiguous().view(torch.uint8)
        assert torch.equal(codes[..., : made.codes.shape[-1]], made.codes[0].transpose(0, 1))
        assert not codes[..., made.codes.shape[-1] :].any()
        assert torch.equal(grid.cpu()[page, :, place], torch.stack([made.scale[0].T, made.minimum[0].T], -1))
        assert grid.isnan().sum() == grid.numel() - 2 * 3 * 4


def test_a_nan_spoils_its_own_sequence_only() -> None:
    cache, query, tables, lengths, _ = case(4, 1, 64, torch.float16)
    keys = random(1, 2, 64).half().to(DEVICE)
    keys[0, 0, 3] = math.nan
    slot = tables[1, :1] * PAGE
    write(cache, keys, keys, slot)
    out = paged_attention(query, cache, tables, lengths, 0.125)
    assert out[1, 0].isnan().all() and out[1, 1].isfinite().all() and out[[0, 2, 3, 4]].isfinite().all()


def test_what_cannot_be_is_refused() -> None:
    for options, words in (
        ({"bits": 3}, "3 bits"),
        ({"d": 300}, "300 dimensions"),
        ({"page_size": 12}, "12 tokens"),
        ({"bits": 16, "dtype": torch.float32}, "float32"),
    ):
        sizes = {"pages": 2, "kv_heads": 2, "d": 64, "bits": 4, "device": DEVICE}
        with pytest.raises(InputError, match=words):
            PagedCache.empty(**sizes | options)
    cache, query, tables, lengths, _ = case(4, 3, 64, torch.float16)
    for changed, words in (
        ({"query": query[0]}, "batch, heads"),
        ({"query": query[:, :5]}, "multiple of 2"),
        ({"query": query.float()}, "query of float32: expected float16 or bfloat16"),
        ({"query": query[..., :32]}, r"32\]: expected \[5, 6, 64\]"),
        ({"block_tables": tables.long()}, "block_tables of int64"),
        ({"block_tables": tables[0]}, "max_pages"),
        ({"lengths": lengths[:2]}, r"lengths \[2\]: expected \[5\]"),
        ({"scale": -1.0}, "scale -1"),
        ({"window": 0}, "window 0"),
        ({"splits": 1000}, "splits 1000"),
    ):
        arguments = {"query": query, "block_tables": tables, "lengths": lengths, "scale": 0.125}
        with pytest.raises(InputError, match=words):
            paged_attention(cache=cache, **arguments | changed)
    states, slots = random(3, 2, 64).half().to(DEVICE), torch.arange(3, device=DEVICE)
    for keys, values, at, words in (
        (states[:2], states, slots, "keys"),
        (states, states.float(), slots, "expected the same"),
        (states, states, slots.float(), "slots of float32"),
        (states[..., :9], states, slots, r"9\]: expected \[3, 2, 64\]"),
    ):
        with pytest.raises(InputError, match=words):
            write(cache, keys, values, at)


def test_the_benchmark_compares_before_it_times() -> None:
    figures = gpu_attention.attention(small=True), gpu_attention.quantize(small=True)
    assert [set(f["checked"]) for f in figures] == [
        {"int4", "int8", "fp16"},
        {"alone", "norm", "norm, reordered"},
    ]
    with pytest.raises(InputError, match="expected some of Llama-7B"):
        gpu_attention.attention(models=["GPT-5"])
    if DEVICE == "cpu":
        with pytest.raises(InputError, match="no CUDA device"):
            gpu_attention.attention()
        with pytest.raises(InputError, match="no CUDA device"):
            gpu_attention.quantize()
