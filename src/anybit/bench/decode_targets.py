"""What decoding is to reach, beside what `anybit bench decode` measured and what the memory's rate would allow.

A row that the cells are not enough for is not measured, which is no miss. Where a peer's file is to be beaten at no
more bytes, the widest of this engine's levels that reads no more for a token stands for the best quality at these
bytes. That it is no worse than the file counts where a text was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from anybit.bench.agreement import agrees
from anybit.bench.quality import QUALITY
from anybit.config import Json
from anybit.formats.levels import CLOSE_BITS

Cell = Json
Target = Json  # "row", "target", "must", "measured", "bound" (None: not measured; no bound), "met" (None: not measured)

LARGE = 0.45e9  # weights of a model "of 0.5 B" and more
SHARES = {3.0: 0.75, 2.5: 0.65}  # from a width on: share of the memory's rate
SMALL = "SmolLM2-135M"
SMALL_FILES, SMALL_MUST, SMALL_SHARE = ("Q4_0", "Q2_K"), 1.3, 0.85
CODER, CODER_FILE, CODER_MUST = "Qwen2.5-Coder-0.5B", "Q4_K_M", 1.3
DEEP = ("Qwen3-0.6B", "Qwen3-1.7B")
DEEP_PEERS, PROMPT_PEERS = ("llama.cpp", "mistral.rs"), ("llama.cpp",)
DEEP_BITS, DEEP_FILES, DEEP_MUST = 4.0, "Q4_", {2048: 1.0, 8192: 1.1}
PROMPTS, PROMPT_MUST = (512, 2048), 1.0
KV_LOSS = {8: 0.002, 4: 0.03}  # of the perplexity at 16 bits
AGREEMENT, MOST_APART = "agreement", 1e-3
QUIET = 0.1  # processors that others may take, on average, while a cell is measured


def targets(cells: Sequence[Cell]) -> list[Target]:
    """Rows 1 to 5, 7 and 10, in this order; a row may have several parts. Only cells that are quiet count."""
    quiet = list(filter(is_quiet, cells))
    return [target for row in ROWS for target in row(quiet)]


def is_quiet(cell: Cell) -> bool:
    """Whether others left the processors alone while a cell was measured, as far as the system says."""
    return max((c["others"] or 0.0 for c in cell["contenders"].values()), default=0.0) <= QUIET


def _target(
    row: int, what: str, must: float, measured: float | None = None, bound: float | None = None, **more: Any
) -> Target:
    """At least `must`; where `met` is among `more`, that is what counts."""
    met = None if measured is None else bool(measured >= must)
    return {"row": row, "target": what, "must": must, "measured": measured, "bound": bound, "met": met} | more


def _of(cells: Sequence[Cell], test: str, shape: str, tokens: int | None = None) -> list[Cell]:
    """The cells of a test of a shape; where there are cells of a real model, these."""
    found = [c for c in cells if (c["test"], c["shape"]) == (test, shape) and tokens in (None, c["tokens"])]
    real = [cell for cell in found if not cell["random"]]
    return real or found


def _ours(cell: Cell, precision: str = "int8", kv_bits: int = 16) -> list[Json]:
    """What this engine reached, by ascending widths."""
    found = [c for c in cell["contenders"].values() if c["engine"] == "anybit"]
    fits = [c for c in found if (c["precision"], c["kv_bits"]) == (precision, kv_bits)]
    return sorted(fits, key=lambda c: float(c["bits"]))


def _peers(cell: Cell, *files: str, engines: Sequence[str] = ("llama.cpp",)) -> list[Json]:
    """What peers reached, with files whose names have one of these parts."""
    found = [c for c in cell["contenders"].values() if c["engine"] in engines]
    return [c for c in found if any(part.lower() in c["file"].lower() for part in files)]


def _fastest(of: Sequence[Json]) -> Json:
    return max(of, key=lambda c: float(c["tokens_per_second"]))


def _bound(ours: Json, ratio: float) -> float | None:
    """The ratio that reading at the memory's rate would give."""
    return ratio / ours["of_limit"] if "of_limit" in ours else None


def _shares(cells: Sequence[Cell]) -> Iterator[Target]:
    for least, must in SHARES.items():
        top = min((width for width in SHARES if width > least), default=17.0)
        shares = [
            c["of_limit"]
            for cell in cells
            if cell["test"] == "decode" and cell["parameters"] >= LARGE
            for c in _ours(cell)
            if least - CLOSE_BITS <= c["bits"] < top - CLOSE_BITS
        ]
        what = f"share of the memory's rate, 0.5 B and more, from {least:g} bits on"
        yield _target(1, what, must, min(shares, default=None), 1.0)


def _at_no_more_bytes(cell: Cell, peer: Json) -> Json | None:
    """The widest of our levels that reads no more bytes for a token."""
    fits = [c for c in _ours(cell) if c["bytes_per_token"] <= peer["bytes_per_token"]]
    return fits[-1] if fits else None


def _small(cells: Sequence[Cell]) -> Iterator[Target]:
    what = f"{SMALL} over the fastest of {' and '.join(SMALL_FILES)}, at no more bytes"
    found = [(cell, _peers(cell, *SMALL_FILES)) for cell in _of(cells, "decode", SMALL)]
    made = [_over(2, what, SMALL_MUST, cell, peers) for cell, peers in found if peers]
    for target in made:
        share = target["share"]
        target["target"] += f", or {100 * SMALL_SHARE:.0f}% of the bound"
        target["met"] = target["met"] or (None if share is None else share >= SMALL_SHARE)
        yield _no_worse(target, cells, SMALL, "perplexity")
    if not made:
        yield _target(2, what, SMALL_MUST)


def _coder(cells: Sequence[Cell]) -> Iterator[Target]:
    what = f"{CODER} over {CODER_FILE}, at no more bytes"
    found = [(cell, _peers(cell, CODER_FILE)) for cell in _of(cells, "decode", CODER)]
    made = [_over(3, what, CODER_MUST, cell, peers) for cell, peers in found if peers]
    for target in made:
        yield _no_worse(target, cells, CODER, "kld")
    if not made:
        yield _target(3, what, CODER_MUST)


def _no_worse(target: Target, cells: Sequence[Cell], shape: str, figure: str) -> Target:
    """Met only where the level's figure on a text is at most the file's; not known where that was not measured."""
    model, bits, file = (target.pop(key) for key in ("model", "bits", "file"))
    target.pop("share")
    if bits is None:
        return target
    for cell in _of(cells, QUALITY, shape):
        ours = [c[figure] for c in _ours(cell) if c["bits"] == bits and cell["model"] == model]
        theirs = [c[figure] for c in cell["contenders"].values() if c.get("file") == file]
        if ours and theirs and ours[0] is not None and theirs[0] is not None:
            target["target"] += f"; {figure} {ours[0]:.4g} against {theirs[0]:.4g}"
            target["met"] = target["met"] and ours[0] <= theirs[0]
            return target
    target["target"] += f"; {figure} not measured"
    target["met"] = None if target["met"] else target["met"]
    return target


def _over(row: int, what: str, must: float, cell: Cell, peers: Sequence[Json]) -> Target:
    """Over the fastest of some files, by the level of no more bytes."""
    peer = _fastest(peers)
    ours = _at_no_more_bytes(cell, peer)
    what += f", {cell['tokens']} tokens before"
    if ours is None:
        return _target(
            row, f"{what}: no level is as small", must, share=None, bits=None, file=None, model=None
        )
    ratio = ours["tokens_per_second"] / peer["tokens_per_second"]
    what += f": {ours['bits']:.2f} bits over {peer['file']}"
    about = {"share": ours["of_limit"], "bits": ours["bits"], "file": peer["file"], "model": cell["model"]}
    return _target(row, what, must, ratio, _bound(ours, ratio), **about)


def _deep(cells: Sequence[Cell]) -> Iterator[Target]:
    for shape in DEEP:
        for depth, must in DEEP_MUST.items():
            for kv_bits in (16, 8):
                what = f"{shape}, {DEEP_BITS:g} bits, {depth} tokens before, KV {kv_bits} bits"
                found = _of(cells, "decode", shape, depth)
                yield _against_all(4, what, must, found, DEEP_PEERS, kv_bits)


def _prompts(cells: Sequence[Cell]) -> Iterator[Target]:
    for shape in DEEP:
        for tokens in PROMPTS:
            what = f"{shape}, {DEEP_BITS:g} bits, a prompt of {tokens} tokens"
            found = _of(cells, "prefill", shape, tokens)
            yield _against_all(5, what, PROMPT_MUST, found, PROMPT_PEERS, 16)


def _against_all(
    row: int, what: str, must: float, cells: Sequence[Cell], engines: Sequence[str], kv_bits: int
) -> Target:
    """Over whatever of some peers is the fastest, of those that ran."""
    for cell in cells:
        ours = [c for c in _ours(cell, kv_bits=kv_bits) if abs(c["bits"] - DEEP_BITS) <= 0.1]
        if ours and (peers := _peers(cell, DEEP_FILES, engines=engines)):
            peer = _fastest(peers)
            ratio = ours[-1]["tokens_per_second"] / peer["tokens_per_second"]
            return _target(row, f"{what}, over {peer['engine']}", must, ratio, _bound(ours[-1], ratio))
    return _target(row, f"{what}, over {' and '.join(engines)}", must)


def _rounded_cache(cells: Sequence[Cell]) -> Iterator[Target]:
    """What keys and values of few bits cost at the worst of the widths, inputs exact."""
    for kv_bits, most in KV_LOSS.items():
        losses = [
            rounded["perplexity"] / exact["perplexity"] - 1
            for cell in _of(cells, QUALITY, SMALL)
            for exact in _ours(cell, "fp16")
            for rounded in _ours(cell, "fp16", kv_bits)
            if exact["bits"] == rounded["bits"]
        ]
        worst = max(losses, default=None)
        what = f"{SMALL}, perplexity lost by KV of {kv_bits} bits, at most"
        yield _target(7, what, most, worst, met=None if worst is None else worst <= most)


def _agreement(cells: Sequence[Cell]) -> Iterator[Target]:
    what = "logits from Transformers', exact inputs, of their spread, at most; greedy texts part where two are equal"
    found = [c for cell in cells if cell["test"] == AGREEMENT for c in cell["contenders"].values()]
    worst = max((c["difference"] for c in found), default=None)
    met = all(agrees(c, MOST_APART) for c in found) if found else None
    yield _target(10, what, MOST_APART, worst, met=met)


ROWS: tuple[Callable[[Sequence[Cell]], Iterator[Target]], ...] = (
    _shares,
    _small,
    _coder,
    _deep,
    _prompts,
    _rounded_cache,
    _agreement,
)
