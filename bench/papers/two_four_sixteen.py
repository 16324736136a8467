"""2/4/16 (10.1145/3676536.3676796): this project's versions of its table 1 (without finetuning) and table 4.

    python bench/papers/two_four_sixteen.py MODEL --calibration wiki.valid.tokens --text wiki=wiki.test.raw

Averages ("bits") are eq. 10's, which counts scales and zero points; bpw is what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest.mock import patch

from lab import Lab, Weights, arguments, run

from anybit.calibration.stats import LinearStats
from anybit.config import LayerSpec, TileSpec
from anybit.evaluation.perplexity import perplexity
from anybit.formats import TwoFour
from anybit.formats.weight import QuantizedWeight
from anybit.methods import gptq, rtn, two_four_sixteen
from anybit.methods.gptq import GPTQ
from anybit.methods.rtn import RTN
from anybit.methods.two_four_sixteen import TwoFourSixteen, bits_eq10

SHARES = (0.25, 0.1)  # 2.84 and 2.61 bits
OUTLIERS = (0.0, 0.002, 0.005)
WINDOWS = 4  # of calibration text, by which decoder blocks are chosen


def spec(
    wide: float, outliers: float = 0.0, clip: bool = True, group_size: int = 16
) -> LayerSpec[TwoFourSixteen]:
    tile = TileSpec(bits_eq10(wide, group_size), group_size)
    options = TwoFourSixteen(exclusive_outliers=outliers, clip=clip).resolve()
    return LayerSpec(options, (tile,))


class Experiments:
    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._stats: dict[str, LinearStats] = {}
        self._losses: list[float] = []  # of each decoder block alone at 4 bits

    def stats(self) -> dict[str, LinearStats]:
        if not self._stats:
            self._stats = self.lab.inputs(self.lab.tokens(), hessian=True)
        return self._stats

    def whole(self, layer: LayerSpec[TwoFourSixteen]) -> Callable[[], Weights]:
        return lambda: {n: self.quantize(n, layer) for n in self.lab.shapes}

    def quantize(self, name: str, layer: LayerSpec[TwoFourSixteen]) -> QuantizedWeight:
        return two_four_sixteen.quantize(self.lab.weight(name), self.stats()[name], layer)

    def table_1(self) -> None:
        """Beside 3-bit RTN and GPTQ in groups of 128."""

        def uniform(method: str) -> Callable[[], Weights]:
            layer = (RTN(bits=3) if method == "rtn" else GPTQ(bits=3)).resolve().layer_spec()
            make = rtn.quantize if method == "rtn" else gptq.quantize
            return lambda: {n: make(self.lab.weight(n), self.stats()[n], layer) for n in self.lab.shapes}

        self.lab.measure("unquantized", lambda: None)
        keys = {"unquantized": "unquantized"}
        for method in ("rtn", "gptq"):
            keys[f"{method.upper()} W3 g128"] = f"table 1: {method}"
            self.lab.measure(f"table 1: {method}", uniform(method))
        for share in SHARES:
            for outliers in OUTLIERS:
                label = f"{bits_eq10(share, 16):.2f} bits, {100 * outliers:g} % outliers"
                keys[label] = f"table 1: {label}"
                self.lab.measure(keys[label], self.whole(spec(share, outliers)))
        for share, outliers in ((0.25, 0.0), (0.25, 0.002), (0.1, 0.0)):
            kept = f", {100 * outliers:g} % outliers" if outliers else ""
            label = f"{bits_eq10(share, 16):.2f} bits{kept}, no clip search"
            keys[label] = f"table 1: {label}"
            self.lab.measure(keys[label], self.whole(spec(share, outliers, clip=False)))
        for clip, name in ((True, ""), (False, ", no clip search")):
            label = f"{bits_eq10(0.25, 16):.2f} bits{name}, scales not clipped to 3 bits"
            keys[label] = f"table 1: {label}"
            with patch.object(TwoFour, "is_aligned", staticmethod(lambda *of: False)):
                self.lab.measure(keys[label], self.whole(spec(0.25, clip=clip)))
        self.lab.table(keys)
        first, second = (f"table 1: {bits_eq10(0.25, 16):.2f} bits, {p} % outliers" for p in ("0", "0.2"))
        print(f"0.2 % outliers against none: {self.lab.interval(second, first)}")

    def table_4(self) -> None:
        """Blocks of channels in every matrix at 4 bits, against whole decoder blocks at 4 bits."""
        keys: dict[str, str] = {}
        for share in SHARES:
            bits = f"{bits_eq10(share, 16):.2f}"
            keys[f"{bits} within matrices"] = f"table 1: {bits} bits, 0 % outliers"
            self.lab.measure(f"table 1: {bits} bits, 0 % outliers", self.whole(spec(share)))
            for choice in ("first", "best"):
                keys[f"{bits} by decoder block, {choice}"] = f"table 4: {bits} {choice}"
                self.lab.measure(f"table 4: {bits} {choice}", self.by_block(share, choice))
        self.lab.table(keys)

    def by_block(self, share: float, choice: str) -> Callable[[], Weights]:
        """Whole decoder blocks at 4 bits: the first ones, or those that alone gain most on calibration text."""

        def run() -> Weights:
            low = {n: self.quantize(n, spec(0.0)) for n in self.lab.shapes}
            high = {n: self.quantize(n, spec(1.0)) for n in self.lab.shapes}
            blocks = [self.lab.source.linears(i) for i in range(len(self.lab.source.blocks))]
            order = list(range(len(blocks)))
            if choice == "best":
                self._losses = self._losses or self.losses(
                    low, [{n: high[n] for n in names} for names in blocks]
                )
                order.sort(key=self._losses.__getitem__)
            wide = {n for i in order[: round(share * len(blocks))] for n in blocks[i]}
            return {n: high[n] if n in wide else low[n] for n in self.lab.shapes}

        return run

    def losses(self, low: Weights, changes: Sequence[Weights]) -> list[float]:
        """Loss on calibration windows with all weights `low` but for one of the changes."""
        found = []
        tokens = self.lab.tokens()[:WINDOWS].flatten()
        self.lab.put(low)
        for change in changes:
            self.lab.put(change)
            found.append(sum(perplexity(self.lab.model, tokens, seq_len=self.lab.args.seq_len).window_nll))
            self.lab.put({n: low[n] for n in change})
        return found


NAMES = ("table_1", "table_4")


def main() -> None:
    args = arguments(__doc__.splitlines()[0]).parse_args()
    run(args, Experiments(Lab(args, "two_four_sixteen")), NAMES)


if __name__ == "__main__":
    main()
