"""Paged attention and the rounding of inputs on a GPU, beside PyTorch and a copy of its memory.

Correctness comes first: what differs from the reference has no figures, and it is said why; without timing it is an
error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from anybit.bench import graphs
from anybit.bench.graphs import LIMIT, Run, Save, Variant, nobody
from anybit.config import Json
from anybit.errors import InputError
from anybit.kernels.gpu.activations import Grid, Norm
from anybit.kernels.gpu.activations import quantize as quantize_inputs
from anybit.kernels.gpu.activations import reference as quantize_reference
from anybit.kernels.gpu.attention import MAX_SPLITS, PagedCache, Tile, paged_attention, reference, write

MODELS = {"Llama-7B": (32, 32, 128), "Llama-3-8B": (32, 8, 128)}  # heads, KV heads, d
WIDTHS = (4, 8, 16)
TILES = (Tile(32, 1, 5), Tile(32, 1, 4), Tile(64, 2, 5), Tile(64, 4, 4), Tile(128, 4, 4))
COLUMNS = (4096, 11008, 14336)
GROUP = 128
PAGE = 16
CLOSE = 4e-3  # of the largest entry: float16's rounding of weights


def attention(
    batches: Sequence[int] = (1, 16, 128),
    lengths: Sequence[int] = (1024, 4096),
    models: Sequence[str] = tuple(MODELS),
    rounds: int = 20,
    tune: bool = False,
    small: bool = False,
    save: Save = nobody,
) -> Json:
    """Microseconds of one step of attention with keys and values of 4, 8 and 16 bits.

    Args:
        models: keys of `MODELS`.
        tune: also try other tiles and numbers of parts; the fastest is reported, with all.
        small: compare a tiny case with the reference and time nothing; runs in Triton's interpreter too.
        save: gets the figures after every row.

    Returns:
        `{"checked": {width: largest error}, "failed": {what: why}, "rows": [{model, batch, length, copy_gb_per_s,
        "variants": {name: {us, gb_per_s (of the cache), of_copy, over_fp16, over_sdpa}}}], "left_out": [row]}`.

    Raises:
        InputError: without a CUDA device, unless small; a model that there is not; if small, a kernel that is wrong.
    """
    unknown = set(models) - set(MODELS)
    if unknown:
        raise InputError(f"model {', '.join(sorted(unknown))}: expected some of {', '.join(MODELS)}")
    failed: dict[str, str] = {}
    if small:
        checked = _check_attention((4, 2, 64), (1, 40), graphs.any_device(), failed)
        graphs.check_all(failed)
        return {"checked": checked, "rows": []}
    begun, device = time.monotonic(), graphs.cuda()
    found = _begun(device, failed) | {"page_size": PAGE}
    save(found)
    for name in models:
        found["checked"][name] = _check_attention(MODELS[name], (1, PAGE, 700), device, failed, f", {name}")
    for name in models:
        for length in lengths:
            for batch in batches:
                where = f"{name}, batch {batch}, length {length}"
                if graphs.late(begun):
                    found["left_out"].append(where)
                    continue
                with graphs.noted(failed, where):
                    timed = partial(graphs.times, rounds=rounds, failed=failed, where=f", {where}")
                    widths = tuple(found["checked"][name])
                    row = _attention_row(MODELS[name], (batch, length), widths, tune, device, timed)
                    found["rows"].append({"model": name, "batch": batch, "length": length} | row)
                torch.cuda.empty_cache()
                save(found)
    return found


def _begun(device: torch.device, failed: dict[str, str]) -> Json:
    name = torch.cuda.get_device_name(device)
    return {"device": name, "checked": {}, "failed": failed, "rows": [], "left_out": []}


def quantize(
    tokens: Sequence[int] = (1, 16, 128, 1024),
    columns: Sequence[int] = COLUMNS,
    rounds: int = 20,
    small: bool = False,
    save: Save = nobody,
) -> Json:
    """Microseconds of rounding inputs to 8 bits in groups of 128: alone, after a norm, and reordered too.

    Returns:
        `{"checked": {name: share of codes that differ}, "failed": {what: why}, "rows": [{tokens, columns,
        copy_gb_per_s, "variants": {name: {us, gb_per_s, of_copy, over_torch}}}], "left_out": [row]}`.

    Raises:
        InputError: without a CUDA device, unless small; if small, a kernel that is wrong.
    """
    failed: dict[str, str] = {}
    if small:
        checked = _check_quantize(3, 300, graphs.any_device(), failed)
        graphs.check_all(failed)
        return {"checked": checked, "rows": []}
    begun, device = time.monotonic(), graphs.cuda()
    found = _begun(device, failed)
    save(found)
    for c in columns:
        found["checked"][c] = _check_quantize(5, c, device, failed)
    for c in columns:
        for m in tokens:
            where = f"{c} columns, {m} token(s)"
            if graphs.late(begun):
                found["left_out"].append(where)
                continue
            with graphs.noted(failed, where):
                row = _quantize_row((m, c), tuple(found["checked"][c]), rounds, device, failed, where)
                found["rows"].append({"tokens": m, "columns": c} | row)
            save(found)
    return found


def _check_attention(
    shape: tuple[int, int, int],
    lengths: tuple[int, ...],
    device: torch.device,
    failed: dict[str, str],
    where: str = "",
) -> dict[str, float]:
    """Largest difference from the reference at each width, of the largest entry; written by the kernel."""
    heads, kv_heads, d = shape
    generator = torch.Generator().manual_seed(0)
    each = -(-max(lengths) // PAGE)
    tables = torch.randperm(len(lengths) * each, generator=generator).int().view(len(lengths), each)
    slots = torch.cat([(tables[i].long()[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
                       for i, length in enumerate(lengths)])  # fmt: skip
    keys, values = (torch.randn(len(slots), kv_heads, d, generator=generator).half() for _ in range(2))
    query = torch.randn(len(lengths), heads, d, generator=generator).half().to(device)
    long = torch.tensor(lengths, dtype=torch.int32, device=device)
    tables = tables.to(device)
    errors: dict[str, float] = {}
    for bits in WIDTHS:
        with graphs.noted(failed, _name(bits) + where):
            cache = PagedCache.empty(tables.numel(), kv_heads, d, bits, PAGE, device=device)
            write(cache, keys.to(device), values.to(device), slots.to(device))
            wanted = reference(query, cache, tables, long, d**-0.5).float()
            worst = 0.0
            for splits in (1, 4):
                made = paged_attention(query, cache, tables, long, d**-0.5, splits=splits).float()
                error = float((made - wanted).abs().max() / wanted.abs().max())
                if not error < CLOSE:
                    raise ValueError(f"{splits} part(s): {error:.2g} from the reference; do not use it")
                worst = max(worst, error)
            errors[_name(bits)] = worst
    return errors


def _check_quantize(m: int, c: int, device: torch.device, failed: dict[str, str]) -> dict[str, float]:
    errors = {}
    for name, fields in _fusions(c, device).items():
        with graphs.noted(failed, f"{name}, {c} columns"):
            x = torch.randn(m, c, device=device).half()
            grid = _grid(c, device)
            codes, scales = quantize_inputs(x, grid, multiple=64, **fields)
            wanted, wanted_scales = quantize_reference(x, grid, multiple=64, **fields)
            apart = (codes.int() - wanted.int()).abs()
            if apart.max() > 1 or not torch.allclose(scales, wanted_scales, rtol=2e-3):
                raise ValueError(f"codes up to {int(apart.max())} from the reference; do not use it")
            errors[name] = float((apart > 0).float().mean())
    return errors


def _name(bits: int) -> str:
    return "fp16" if bits == 16 else f"int{bits}"


def _attention_row(
    shape: tuple[int, int, int],
    sizes: tuple[int, int],  # batch, length
    widths: Sequence[str],
    tune: bool,
    device: torch.device,
    timed: Callable[[dict[str, Variant]], dict[str, float]],
) -> Json:
    heads, kv_heads, d = shape
    batch, length = sizes
    query = torch.randn(batch, heads, d, device=device).half()
    variants = {LIMIT: graphs.copy(device)}
    for bits in WIDTHS:
        if _name(bits) in widths:
            variants |= _paged(query, kv_heads, sizes, bits, tune)
    variants["sdpa"] = _sdpa(query, kv_heads, length)
    times = timed(variants)
    copy = graphs.copied(times)
    figures: Json = {}
    for name in sorted(times, key=times.__getitem__):  # the fastest of a width comes first
        figure = graphs.rates(times[name], variants[name].nbytes, copy)
        kind, _, tile = name.partition(" ")
        best = figures.setdefault(kind, figure | {"tile": tile})
        if tune and tile:
            best.setdefault("tiles", {})[tile] = figure["us"]
    for figure in figures.values():
        for peer in ("fp16", "sdpa"):  # each may fail where memory is short
            if peer in figures:
                figure[f"over_{peer}"] = figures[peer]["us"] / figure["us"]
    return graphs.of_row(copy, figures)


def _paged(query: Tensor, kv_heads: int, sizes: tuple[int, int], bits: int, tune: bool) -> dict[str, Variant]:
    """Calls with one tile or several, that share caches."""
    batch, length = sizes
    d, each = query.shape[2], -(-length // PAGE)
    nbytes = batch * each * PAGE * _row_bytes(bits, d) * kv_heads
    caches, tables = [], []
    for _ in range(graphs.copies(nbytes)):
        cache = PagedCache.empty(batch * each, kv_heads, d, bits, PAGE, device=query.device)
        for rows in (cache.keys, cache.values):
            rows.normal_() if bits == 16 else rows.random_(-(1 << 15), 1 << 15)
        for grid in (cache.key_grid, cache.value_grid):
            if grid is not None:
                grid.copy_(torch.tensor([0.1, -0.8]))
        caches.append(cache)
        tables.append(torch.randperm(batch * each, device=query.device).int().view(batch, each))
    lengths = torch.full((batch,), length, dtype=torch.int32, device=query.device)

    def variant(tile: Tile | None, splits: int | None) -> Variant:
        def run(cache: PagedCache, table: Tensor) -> Run:
            return lambda: paged_attention(query, cache, table, lengths, d**-0.5, splits=splits, tile=tile)

        return Variant(nbytes, [run(cache, table) for cache, table in zip(caches, tables)])

    made = {f"{_name(bits)} default": variant(None, None)}
    for tile in TILES if tune else ():
        most = min(MAX_SPLITS, -(-length // tile.tokens))
        for splits in (1, 2, 4, 8, 16, 32, 64, 128):
            programs = splits * batch * kv_heads
            if splits <= most and (splits == 1 or programs <= 1 << 13):
                name = f"{_name(bits)} {tile.tokens}x{tile.warps}x{tile.stages}/{splits}"
                made[name] = variant(tile, splits)
    return made


def _row_bytes(bits: int, d: int) -> int:
    """Of a head's key and value, with scales and minima."""
    return 4 * d if bits == 16 else 2 * (-(-d * bits // 16) * 2 + 4)


def _sdpa(query: Tensor, kv_heads: int, length: int) -> Variant:
    batch, heads, d = query.shape
    nbytes = batch * kv_heads * length * _row_bytes(16, d)
    states = [
        torch.randn(2, batch, kv_heads, length, d, device=query.device, dtype=query.dtype)
        for _ in range(graphs.copies(nbytes))
    ]

    def run(keys: Tensor, values: Tensor) -> Run:
        return lambda: scaled_dot_product_attention(
            query[:, :, None], keys, values, enable_gqa=heads != kv_heads
        )

    return Variant(nbytes, [run(keys, values) for keys, values in states])


def _grid(c: int, device: torch.device) -> Grid:
    return Grid(8, GROUP, clip=torch.full((-(-c // GROUP),), 0.9, device=device).half())


def _fusions(c: int, device: torch.device) -> dict[str, Json]:
    norm = Norm(torch.rand(c, device=device).half() + 0.5, 1e-5)
    cols = torch.randperm(c, device=device).int()
    return {"alone": {}, "norm": {"norm": norm}, "norm, reordered": {"norm": norm, "cols": cols}}


def _quantize_row(
    shape: tuple[int, int],
    fusions: Sequence[str],
    rounds: int,
    device: torch.device,
    failed: dict[str, str],
    where: str,
) -> Json:
    m, c = shape
    grid, nbytes = _grid(c, device), 3 * m * c + 4 * m * -(-c // GROUP)
    inputs = [torch.randn(m, c, device=device).half() for _ in range(graphs.copies(nbytes))]
    variants = {LIMIT: graphs.copy(device)}

    def run(function: Callable[..., object], x: Tensor, fields: Json) -> Run:
        return lambda: function(x, grid, **fields)

    for name, fields in _fusions(c, device).items():
        if name not in fusions:
            continue
        variants[name] = Variant(nbytes, [run(quantize_inputs, x, fields) for x in inputs])
        variants[f"torch {name}"] = Variant(nbytes, [run(quantize_reference, x, fields) for x in inputs])
    times = graphs.times(variants, rounds, failed, f", {where}")
    copy, figures = graphs.copied(times), {}
    for name in (name for name in times if not name.startswith("torch ")):
        figures[name] = graphs.rates(times[name], nbytes, copy)
        if (peer := times.get(f"torch {name}")) is not None:
            figures[name]["over_torch"] = peer / times[name]
    return graphs.of_row(copy, figures)
