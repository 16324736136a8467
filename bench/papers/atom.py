"""Atom (arXiv:2310.19102): this project's versions of its tables 1 to 4, and what a quantized KV-cache costs.

    python bench/papers/atom.py MODEL --calibration wiki.valid.tokens --text wiki=wiki.test.raw --text c4=c4.jsonl \\
        [--tasks-dir zeroshot]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from lab import Lab, Weights, arguments, run
from torch import Tensor
from transformers import DynamicCache

from anybit.calibration.stats import LinearStats
from anybit.config import LayerSpec, TileSpec
from anybit.formats import Float16
from anybit.formats.base import to_half
from anybit.formats.states import QuantizedStates
from anybit.formats.weight import QuantizedWeight
from anybit.kv_cache import CACHE, QuantizedCache
from anybit.methods import METHODS, atom, rtn

KV_WIDTHS = (8, 4, 3, 2)


def spec(bits: int, group_size: int = 128, **options: object) -> LayerSpec[atom.Atom]:
    plain = {"act_bits": bits, "clip": False, "clip_ratio": 1.0, "act_clip": 1.0}
    made = atom.Atom(**{**plain, **options}).resolve()  # type: ignore[arg-type]
    return LayerSpec(made, (TileSpec(bits, group_size, True),))


FIXED = {"clip_ratio": 0.85, "act_clip": 0.9}
OWN = {"clip": True, "act_clip": 0.9}  # the command's defaults below 8 bits


class Experiments:
    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._stats: dict[str, LinearStats] = {}

    def stats(self) -> dict[str, LinearStats]:
        if not self._stats:
            self._stats = self.lab.inputs(self.lab.tokens(), hessian=True, attention=True, details=True)
        return self._stats

    def made(self, method: str, layer: LayerSpec[atom.Atom]) -> Callable[[], Weights]:
        def run() -> Weights:
            return {
                n: METHODS[method].quantize(self.lab.weight(n), self.stats()[n], layer)
                for n in self.lab.shapes
            }

        return run

    def rounded(self, layer: LayerSpec[atom.Atom], full_precision: bool = False) -> Callable[[], Weights]:
        """Plain rounding of Atom's two tiles; outlier channels optionally in 16 bits."""

        def run() -> Weights:
            weights: dict[str, QuantizedWeight] = {}
            for name in self.lab.shapes:
                weight, stats = self.lab.weight(name), self.stats()[name]
                assert stats.inputs is not None
                tiles = atom.split(layer, stats.inputs.energy.argsort(stable=True).tolist())
                quantized = rtn.quantize(weight, None, tiles)
                if full_precision:
                    body, outliers = quantized.tiles
                    assert outliers.cols is not None
                    kept = Float16(to_half(weight[:, outliers.cols.long()]), cols=outliers.cols)
                    quantized = replace(quantized, tiles=(body, kept))
                weights[name] = quantized
            return weights

        return run

    def table_4(self) -> None:
        """What each part of W4A4 adds."""
        row, group = spec(4, -1), spec(4)
        steps: dict[str, Callable[[], Weights]] = {
            "W4A4 RTN per channel and token": self.made("rtn", row),
            "+ outliers in 16 bits": self.rounded(row, full_precision=True),
            "+ outliers in 8 bits": self.rounded(row),
            "+ groups of 128": self.rounded(group),
            "+ clipping": self.rounded(group.but(**FIXED)),
            "+ GPTQ": self.made("atom", group.but(group_reorder=False, **FIXED)),
            "+ group reorder, searched clipping of weights (ours)": self.made("atom", group.but(**OWN)),
        }
        self.lab.measure("unquantized", lambda: None)
        keys = {"unquantized": "unquantized"} | {label: f"table 4: {label}" for label in steps}
        for label, make in steps.items():
            self.lab.measure(keys[label], make)
        keys["+ KV-cache of 4 bits"] = "table 4: kv 4"
        self.lab.measure(
            "table 4: kv 4", steps["+ group reorder, searched clipping of weights (ours)"], kv_bits=4
        )
        self.lab.table(keys)
        for before, after in pairwise(keys.values()):
            print(f"{after.partition(': ')[2]}: {self.lab.interval(after, before)}")

    def table_1(self) -> None:
        """W4A4 and W3A3 beside SmoothQuant (per channel and token); Atom's default outliers and 128."""
        cases: dict[str, Callable[[], Weights]] = {}
        for bits in (4, 3):
            smooth = spec(bits, -1, scaling="smoothquant")
            cases |= {
                f"SmoothQuant W{bits}A{bits}": self.made("smoothquant", smooth),
                f"Atom W{bits}A{bits}": self.made("atom", spec(bits, **OWN)),
                f"Atom W{bits}A{bits}, 128 outliers": self.made(
                    "atom", spec(bits, outlier_channels=128, **OWN)
                ),
            }
        cases["Atom W4A8"] = self.made("atom", spec(4, act_bits=8, clip=True))
        cases["Atom W4A16"] = self.made("atom", spec(4, act_bits=16, clip=True))
        for label, make in cases.items():
            self.lab.measure(f"table 1: {label}", make)
        self.lab.table({"unquantized": "unquantized"} | {label: f"table 1: {label}" for label in cases})

    def table_2(self) -> None:
        """Zero-shot accuracy."""
        self.lab.zero_shot(
            {
                "unquantized": lambda: None,
                "SmoothQuant W4A4": self.made("smoothquant", spec(4, -1, scaling="smoothquant")),
                "Atom W4A4": self.made("atom", spec(4, **OWN)),
                "Atom W3A3": self.made("atom", spec(3, **OWN)),
            }
        )

    def kv_cache(self) -> None:
        """A quantized KV-cache alone, under the unquantized model; then where its error is."""
        self.lab.measure("unquantized", lambda: None)
        keys = {"16 bits": "unquantized"}
        for bits in KV_WIDTHS:
            keys[f"{bits} bits"] = f"kv {bits}"
            self.lab.measure(f"kv {bits}", lambda: None, kv_bits=bits)
        self.lab.table(keys)
        self.lab.restore()
        for bits in (16, *KV_WIDTHS):
            cache = (
                DynamicCache(config=self.lab.model.config)
                if bits == 16
                else QuantizedCache(self.lab.model.config, bits)
            )
            with torch.no_grad():
                self.lab.model(input_ids=self.lab.tokens()[:1], use_cache=True, **{CACHE: cache})
            print(
                f"{bits:2d} bits: {cache_bytes(cache) / 1e6:.2f} MB for {self.lab.tokens().shape[1]} tokens"
            )
        print("relative error of states at 4 bits, |rounded - x| / |x|, over heads: mean (largest)")
        with torch.no_grad():
            kept: list[tuple[Tensor, Tensor]] = []
            handle = QuantizedCacheSpy(self.lab.model.config, kept)
            self.lab.model(input_ids=self.lab.tokens()[:1], use_cache=True, **{CACHE: handle})
        for name, states in (("K", [k for k, _ in kept]), ("V", [v for _, v in kept])):
            errors = torch.stack([head_errors(s) for s in states])
            print(
                f"  {name}: {float(errors.mean()):.4f} ({float(errors.max()):.4f}); by block, head after head:"
            )
            for i, heads in enumerate(errors.tolist()):
                print(f"    {i:3d}  " + " ".join(f"{error:.3f}" for error in heads))


class QuantizedCacheSpy(QuantizedCache):
    """A KV-cache that also remembers what it was given."""

    def __init__(self, config: object, kept: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__(config, 8)  # type: ignore[arg-type]
        self.kept = kept

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.kept.append((key_states, value_states))
        return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[arg-type]


def cache_bytes(cache: DynamicCache | QuantizedCache) -> float:
    """Bytes that a cache holds, as if what is not quantized were float16."""
    if isinstance(cache, QuantizedCache):
        return cache.nbytes
    return sum(2 * t.numel() for layer in cache.layers for t in (layer.keys, layer.values))


def head_errors(states: Tensor) -> Tensor:
    """Relative error of every head at 4 bits, float32 [heads]."""
    rounded = QuantizedStates.of(states, 4).dequantize()
    error, size = ((t.square().sum((0, 2, 3))) for t in (rounded - states, states))
    return (error / size).sqrt()


NAMES = ("table_4", "table_1", "kv_cache", "table_2")


def main() -> None:
    args = arguments(__doc__.splitlines()[0]).parse_args()
    run(args, Experiments(Lab(args, "atom")), NAMES)


if __name__ == "__main__":
    main()
