"""Any-Precision LLM (arXiv:2402.10517): this project's versions of its tables 1 to 5.

    python bench/papers/any_precision.py MODEL --calibration wiki.valid.tokens --text wiki=test.raw --text c4=c4.jsonl

Table 1: bytes of width sets; 2: GPTQ with incremental upscaling; 3: upscaled against independent codebooks;
4: zero-shot accuracy; 5: time.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from lab import Lab, arguments
from torch import Tensor

from anybit.config import LayerSpec, TileSpec
from anybit.formats import CodebookLayout
from anybit.formats.weight import QuantizedWeight, pack, unpack
from anybit.methods import any_precision
from anybit.methods.any_precision import AnyPrecision
from anybit.methods.compensation import inverse_factor

NESTED_WIDTHS = AnyPrecision().widths
WIDTH_SETS = ((3, 6), (4, 8), (3, 4, 6), (3, 4, 8), (3, 4, 6, 8), NESTED_WIDTHS)
LLAMA_7B = {(4096, 4096): 4 * 32, (11008, 4096): 2 * 32, (4096, 11008): 32}  # shape [out, in] -> how many


def spec(widths: tuple[int, ...], codebook_bits: int = 16) -> LayerSpec[AnyPrecision]:
    options = AnyPrecision(widths=widths, codebook_bits=codebook_bits).resolve()
    return LayerSpec(options, (TileSpec(widths[-1]),))


def of_width(parent: QuantizedWeight, bits: int) -> QuantizedWeight:
    """A nested matrix read at one width."""
    return unpack(pack(parent).at_width(bits))


def table_1(lab: Lab) -> None:
    """Bytes of one nested file's tensors against those of a file per width; the parents are really made and packed."""
    generator = torch.Generator().manual_seed(0)

    def random(shape: tuple[int, int]) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.02

    models: dict[str, dict[tuple[int, int], int]] = {"Llama-2-7B shapes": LLAMA_7B, "this model": {}}
    for shape in lab.shapes.values():
        models["this model"][shape] = models["this model"].get(shape, 0) + 1
    for title, shapes in models.items():
        print(f"\n{title}\n\n| widths | one file, MB | separate files, MB | saving |\n|---|---|---|---|")
        parents = {
            shape: pack(any_precision.quantize(random(shape), None, spec(NESTED_WIDTHS))) for shape in shapes
        }
        for widths in WIDTH_SETS:
            sets = {
                shape: replace(p.layout, tiles=(CodebookLayout.of(widths, False, table_bits=16),))
                for shape, p in parents.items()
            }
            one = sum(n * sets[shape].nbytes for shape, n in shapes.items())
            many = sum(n * parents[s].layout.at_width(b).nbytes for s, n in shapes.items() for b in widths)
            lab.keep({"key": f"table 1: {title} {widths}", "one": one, "separate": many})
            print(f"| {widths} | {one / 1e6:.0f} | {many / 1e6:.0f} | {many / one:.2f}x |")
        real = sum(n * parents[shape].nbytes for shape, n in shapes.items())
        weights = sum(n * s[0] * s[1] for s, n in shapes.items())
        formula = sum(
            n * s[0] * s[1] * (8 + 16 * sum(2**b for b in NESTED_WIDTHS) / s[1]) for s, n in shapes.items()
        )
        print(
            f"\nparent of {NESTED_WIDTHS}: {8 * real / weights:.3f} bpw, by the formula {formula / weights:.3f}"
        )


def table_2(lab: Lab) -> None:
    """GPTQ on a uniform grid per row, independently at each width and upscaled from 3 bits."""
    stats: dict[str, Any] = {}
    codes: dict[str, Tensor] = {}

    def make(bits: int, inherit: bool) -> Callable[[], dict[str, Tensor]]:
        def run() -> dict[str, Tensor]:
            if not stats:
                stats.update(lab.inputs(lab.tokens(), hessian=True))
            made = {}
            for name in lab.shapes:
                parents = codes[name] if inherit else None
                q, made[name] = uniform_gptq(lab.weight(name), stats[name].hessian, bits, parents)
                if inherit or bits == 3:
                    codes[name] = q
            return made

        return run

    for bits in NESTED_WIDTHS:
        lab.measure(f"table 2: GPTQ {bits}", make(bits, False), bits_per_weight=float(bits))
    codes.clear()
    upscaled = [f"table 2: GPTQ+IU {bits}" for bits in NESTED_WIDTHS[1:]]
    if any(key not in lab.rows for key in upscaled):  # each width inherits from the one before: all or none
        make(3, False)()
        lab.rows = {key: row for key, row in lab.rows.items() if key not in upscaled}
    for bits, key in zip(NESTED_WIDTHS[1:], upscaled):
        lab.measure(key, make(bits, True), bits_per_weight=float(bits))
    lab.table(
        {
            f"{name} {bits}-bit": f"table 2: {name} {bits}"
            for bits in NESTED_WIDTHS
            for name in ("GPTQ", "GPTQ+IU")
        }
    )


def uniform_gptq(weight: Tensor, hessian: Tensor, bits: int, parents: Tensor | None) -> tuple[Tensor, Tensor]:
    """GPTQ with equal bins over each row's range, represented by their middles; codes and dense matrix.

    With `parents`, codes one bit narrower, a code is clamped to the two children of its parent (appendix E.1).
    """
    low, high = weight.amin(1), weight.amax(1)
    step = (high - low).clamp(min=1e-12) / 2**bits
    work, dense = weight.clone(), torch.empty_like(weight)
    codes = torch.empty(weight.shape, dtype=torch.int32)
    factor = inverse_factor(hessian, torch.arange(weight.shape[1]), 0.01)
    for a in range(0, weight.shape[1], 128):
        b = min(a + 128, weight.shape[1])
        errors = torch.empty(weight.shape[0], b - a)
        for j in range(a, b):
            q = ((work[:, j] - low) / step).floor().clamp(0, 2**bits - 1)
            if parents is not None:
                first = 2.0 * parents[:, j]
                q = torch.maximum(torch.minimum(q, first + 1), first)
            codes[:, j] = q.int()
            dense[:, j] = low + (q + 0.5) * step
            errors[:, j - a] = (work[:, j] - dense[:, j]) / factor[j, j]
            work[:, j:b] -= errors[:, j - a, None] * factor[j, j:b]
        work[:, b:] -= errors @ factor[a:b, b:]
    return codes, dense


@functools.cache
def parents_of(lab: Lab) -> dict[str, QuantizedWeight]:
    fisher = lab.fisher(lab.tokens())
    return {
        name: any_precision.quantize(lab.weight(name), fisher[name], spec(NESTED_WIDTHS))
        for name in lab.shapes
    }


def table_3(lab: Lab) -> None:
    """Incremental upscaling (one parent) against independent clustering at each width."""
    lab.measure("base", lambda: None)

    def upscaled(bits: int) -> Callable[[], dict[str, QuantizedWeight]]:
        def run() -> dict[str, QuantizedWeight]:
            return {name: of_width(parent, bits) for name, parent in parents_of(lab).items()}

        return run

    def independent(bits: int) -> Callable[[], dict[str, QuantizedWeight]]:
        def run() -> dict[str, QuantizedWeight]:
            fisher = lab.fisher(lab.tokens())
            alone = spec((bits,))
            return {
                name: any_precision.quantize(lab.weight(name), fisher[name], alone) for name in lab.shapes
            }

        return run

    for bits in NESTED_WIDTHS:
        lab.measure(f"table 3: IU {bits}", upscaled(bits))
        if bits > 3:
            lab.measure(f"table 3: independent {bits}", independent(bits))
            print(
                "   upscaled above independent:",
                lab.interval(f"table 3: IU {bits}", f"table 3: independent {bits}"),
            )
    rows = {f"{b}-bit {n}": f"table 3: {n} {b}" for b in NESTED_WIDTHS for n in ("independent", "IU")}
    lab.table({"unquantized": "base", **rows})


def table_4(lab: Lab) -> None:
    """Zero-shot accuracy of the parent's widths."""

    def at(bits: int) -> Callable[[], dict[str, QuantizedWeight]]:
        return lambda: {name: of_width(parent, bits) for name, parent in parents_of(lab).items()}

    lab.zero_shot({f"{bits} bits": at(bits) for bits in (3, 4, 6, 8)} | {"unquantized": lambda: None})


def table_5(lab: Lab) -> None:
    """Seconds of the seed and of the upscaling, from statistics to packed tensors."""
    fisher = lab.fisher(lab.tokens())
    seconds = {}
    for label, widths in (("seed", (3,)), ("whole", NESTED_WIDTHS)):
        total = 0.0
        for name in lab.shapes:
            weight = lab.weight(name)
            begun = time.perf_counter()
            pack(any_precision.quantize(weight, fisher[name], spec(widths)))
            total += time.perf_counter() - begun
        seconds[label] = total
    lab.keep({"key": "table 5", **seconds})
    print(
        f"seed {seconds['seed']:.1f} s, whole {seconds['whole']:.1f} s, upscaling "
        f"{seconds['whole'] - seconds['seed']:.1f} s on {torch.get_num_threads()} threads"
    )


EXPERIMENTS = {f.__name__: f for f in (table_1, table_2, table_3, table_4, table_5)}


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    args = parser.parse_args()
    lab = Lab(args, "any_precision")
    for name in args.only or EXPERIMENTS:
        print(f"\n# {name}", flush=True)
        EXPERIMENTS[name](lab)


if __name__ == "__main__":
    main()
