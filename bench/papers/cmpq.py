"""CMPQ: this project's versions of its tables 2 to 5, 7, 8, 10, 11 and figures 3 and 5.

    python bench/papers/cmpq.py MODEL --calibration wiki.valid.tokens --text wiki=wiki.test.raw --text c4=c4.jsonl \\
        [--other-calibration c4.jsonl] [--plot docs/cmpq.png]
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import torch
from lab import Lab, Weights, arguments, run
from torch import Tensor

from anybit.calibration.stats import LinearStats
from anybit.config import LayerSpec, TileSpec
from anybit.formats import Float16, Tile
from anybit.formats.weight import QuantizedWeight
from anybit.methods import channel_codebooks, cmpq, gptq, rtn

Stats = dict[str, LinearStats]
SWEEP = [round(2 + 0.2 * i, 1) for i in range(11)]
RATIOS = (0.0005, 0.001, 0.002, 0.003, 0.0045)
SAMPLES = (1, 2, 5, 10)


def spec(bits: float, **options: object) -> LayerSpec[cmpq.CMPQ]:
    return LayerSpec(cmpq.CMPQ(**options).resolve(), (TileSpec(bits),))  # type: ignore[arg-type]


class Experiments:
    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._stats: dict[tuple[str | None, int], Stats] = {}
        self._hessians: Stats = {}

    def hessians(self) -> Stats:
        """Whole second moments, for methods that compensate errors."""
        if not self._hessians:
            self._hessians = self.lab.inputs(self.lab.tokens(), hessian=True)
        return self._hessians

    def stats(self, calibration: str | None = None, samples: int | None = None) -> Stats:
        """Activation norms of the unquantized model (the second moments of `hessians` have them too)."""
        if self._hessians and (calibration, samples) == (None, None):
            return self._hessians
        key = (calibration, samples or self.lab.args.samples)
        if key not in self._stats:
            self._stats[key] = self.lab.inputs(self.lab.tokens(*key))
        return self._stats[key]

    def cmpq(
        self, bits: float, calibration: str | None = None, samples: int | None = None, **options: object
    ) -> Callable[[], Weights]:
        def run() -> Weights:
            made = spec(bits, **{"compensate": False, **options})
            stats = self.hessians() if made.compensate else self.stats(calibration, samples)
            return {n: cmpq.quantize(self.lab.weight(n), stats[n], made) for n in self.lab.shapes}

        return run

    def main_row(self, bits: float) -> str:
        """CMPQ at a width with all defaults, which several experiments show."""
        key = f"cmpq {bits:g}"
        self.lab.measure(key, self.cmpq(bits))
        return key

    def table_2(self) -> None:
        """CMPQ beside RTN and GPTQ (g128, asymmetric; GPTQ one-shot on the same windows, clip search on).

        The last row of a width goes beyond the paper: errors compensated from channel to channel.
        """

        def uniform(method: str, bits: int) -> Callable[[], Weights]:
            def run() -> Weights:
                stats = self.hessians() if method == "gptq" else {}
                quantize = rtn.quantize if method == "rtn" else gptq.quantize
                made = (rtn.RTN() if method == "rtn" else gptq.GPTQ()).with_bits(bits).resolve().layer_spec()
                return {n: quantize(self.lab.weight(n), stats.get(n), made) for n in self.lab.shapes}

            return run

        rows = {}
        for bits in (2, 3, 4):
            for method in ("rtn", "gptq"):
                rows[f"{method.upper()} {bits}"] = f"table 2: {method} {bits}"
                self.lab.measure(f"table 2: {method} {bits}", uniform(method, bits))
            rows[f"CMPQ {bits}"] = self.main_row(bits)
            rows[f"CMPQ {bits}, compensated"] = f"compensated {bits}"
            self.lab.measure(f"compensated {bits}", self.cmpq(bits, compensate=True))
        self.lab.table(rows)

    @staticmethod
    def without_extremes(make: Callable[[], Weights]) -> Callable[[], Weights]:
        """All channels at one width."""

        def run() -> Weights:
            with patch.object(channel_codebooks, "EXTREMES", 0.0):
                return make()

        return run

    def table_3(self) -> None:
        """What each part adds at 3 bits."""
        steps = {
            "RTN": self.uniform_rows(0.0),
            "+ O_act": self.uniform_rows(0.0045),
            "+ non-uniform": self.without_extremes(self.cmpq(3, error_outliers=0.0)),
            "+ mixed precision": self.cmpq(3, error_outliers=0.0),
        }
        for label, make in steps.items():
            self.lab.measure(f"table 3: {label}", make)
        rows = {label: f"table 3: {label}" for label in steps} | {"+ O_q (CMPQ)": self.main_row(3)}
        self.lab.table(rows)
        keys = list(rows.values())
        for before, after in pairwise(keys):
            print(f"{after} against {before}: {self.lab.interval(after, before)}")

    def uniform_rows(self, outliers: float) -> Callable[[], Weights]:
        """RTN g128 at 3 bits with the channels of the largest norms left as they are."""

        def run() -> Weights:
            stats = self.stats()
            made: dict[str, QuantizedWeight] = {}
            for name, shape in self.lab.shapes.items():
                weight = self.lab.weight(name)
                count = max(1, round(outliers * shape[1])) if outliers else 0
                order = torch.argsort(stats[name].squares, stable=True)
                cols, kept = order[: shape[1] - count].sort().values, order[shape[1] - count :].sort().values
                (tile,) = rtn.quantize(weight[:, cols].contiguous(), None, spec(3)).tiles
                tiles: list[Tile] = [replace(tile, cols=cols.to(torch.int32))] if count else [tile]
                if count:
                    tiles.append(Float16(weight[:, kept].half(), cols=kept.to(torch.int32)))
                made[name] = QuantizedWeight(shape, tuple(tiles))
            return made

        return run

    def table_4(self) -> None:
        """Another calibration text."""
        other = self.lab.args.other_calibration
        if other is None:
            print("table 4 needs --other-calibration")
            return
        rows = {}
        for bits in (2, 3):
            rows[f"{bits} bits, calibrated on {Path(self.lab.args.calibration).name}"] = self.main_row(bits)
            key = f"table 4: cmpq {bits} on {Path(other).name}"
            self.lab.measure(key, self.cmpq(bits, other))
            rows[f"{bits} bits, calibrated on {Path(other).name}"] = key
        self.lab.table(rows)

    def table_5(self) -> None:
        """Without one or both kinds of outliers, the other then 0.5 % of the weights."""
        rows = {}
        for bits in (3, 4):
            cases = {
                "w/o outliers": {"channel_outliers": 0.0, "error_outliers": 0.0},
                "w/o O_q": {"channel_outliers": 0.005, "error_outliers": 0.0},
                "w/o O_act": {"channel_outliers": 0.0, "error_outliers": 0.005},
            }
            for label, options in cases.items():
                key = f"table 5: {bits} {label}"
                self.lab.measure(key, self.cmpq(bits, **options))
                rows[f"{bits} bits {label}"] = key
            rows[f"{bits} bits CMPQ"] = self.main_row(bits)
        self.lab.table(rows)

    def table_7(self) -> None:
        """Tables of 4 bits instead of 16."""
        rows = {"16-bit tables": self.main_row(3)}
        for bits in (8, 4):
            key = f"table 7: {bits}-bit tables"
            self.lab.measure(key, self.cmpq(3, codebook_bits=bits))
            rows[f"{bits}-bit tables"] = key
        self.lab.table(rows)

    def table_8(self) -> None:
        """Seconds of both stages, and the process's peak memory (the whole model in float32 included)."""
        begun = time.perf_counter()
        stats = self.lab.inputs(self.lab.tokens())
        collected = time.perf_counter() - begun
        clustered = 0.0
        for name in self.lab.shapes:
            weight = self.lab.weight(name)
            begun = time.perf_counter()
            cmpq.quantize(weight, stats[name], spec(3, compensate=False))
            clustered += time.perf_counter() - begun
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self.lab.keep({"key": "table 8", "activations": collected, "kmeans": clustered, "peak_mb": peak})
        print(f"activations {collected:.1f} s, k-means {clustered:.1f} s, peak {peak:.0f} MB")

    def table_10(self) -> None:
        """A uniform grid (g128 along the outputs) in place of the codebooks."""
        rows = {}
        for bits in (2, 3, 4):
            key = f"table 10: uniform {bits}"
            self.lab.measure(key, self.uniform_channels(bits), bits_per_weight=self.uniform_bits(bits))
            rows |= {f"uniform {bits}": key, f"codebooks {bits}": self.main_row(bits)}
        self.lab.table(rows)

    def uniform_channels(self, bits: int) -> Callable[[], Weights]:
        """CMPQ's channels and widths, 0.5 % of channels float16, rounded to nearest in groups of 128 outputs."""

        def run() -> Weights:
            stats = self.stats()
            made: dict[str, Tensor] = {}
            for name, (_, in_features) in self.lab.shapes.items():
                weight = self.lab.weight(name)
                counts, kept = channel_codebooks.allocation(spec(bits, channel_outliers=0.005), in_features)
                order = torch.argsort(stats[name].squares, stable=True)
                made[name] = weight.half().float()
                for width, chosen in zip(counts, order[: in_features - kept].split(list(counts.values()))):
                    columns = weight[:, chosen].T.contiguous()
                    made[name][:, chosen] = rtn.quantize(columns, None, spec(width)).dequantize().T
            return made

        return run

    def uniform_bits(self, bits: int) -> float:
        """Bits per weight that `uniform_channels` would store: a float16 scale and a zero point per 128 outputs."""
        total = weights = 0.0
        for out, in_features in self.lab.shapes.values():
            counts, kept = channel_codebooks.allocation(spec(bits, channel_outliers=0.005), in_features)
            groups = -(-out // 128)
            total += 16 * out * kept + sum(
                n * (width * out + (16 + width) * groups) for width, n in counts.items()
            )
            weights += out * in_features
        return total / weights

    def table_11(self) -> None:
        """Fewer calibration samples."""
        rows = {}
        for samples in SAMPLES:
            key = f"table 11: {samples} samples"
            self.lab.measure(key, self.cmpq(3, samples=samples))
            rows[f"{samples} samples"] = key
        rows[f"{self.lab.args.samples} samples"] = self.main_row(3)
        self.lab.table(rows)

    def figure_3(self) -> None:
        """Every fifth of a bit from 2 to 4."""
        rows = {f"{bits:g} bits": self.main_row(bits) for bits in SWEEP}
        self.lab.table(rows)
        if self.lab.args.plot:
            self.plot(list(rows.values()))

    def plot(self, keys: list[str]) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.5, 4), layout="constrained")
        axes = figure.subplots()
        for name in self.lab.texts:
            axes.plot(SWEEP, [self.lab.rows[key][name]["perplexity"] for key in keys], "o-", label=name)
        axes.set(xlabel="average width, bits", ylabel="perplexity", yscale="log", title="CMPQ")
        axes.grid(alpha=0.3, which="both")
        axes.legend()
        figure.savefig(self.lab.args.plot, dpi=120)

    def figure_5(self) -> None:
        """Shares of float16 channels at 3 bits; a channel is the least."""
        rows = {}
        for ratio in RATIOS:
            key = f"figure 5: {ratio}"
            self.lab.measure(key, self.cmpq(3, channel_outliers=ratio))
            rows[f"{100 * ratio:g} % of channels"] = key
        self.lab.table(rows)


NAMES = (
    *("table_2", "figure_3", "table_3", "table_4", "table_5", "table_7", "table_8", "table_10", "table_11"),
    "figure_5",
)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--other-calibration")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    run(args, Experiments(Lab(args, "cmpq")), NAMES)


if __name__ == "__main__":
    main()
