"""MixLLM (arXiv:2412.14590): this project's versions of its tables 1, 3, 4 and 5, figures 2 and 6, and section 4.5.3.

    python bench/papers/mixllm.py MODEL --calibration wiki.valid.tokens --text wiki=wiki.test.raw --text c4=c4.jsonl \\
        [--tasks-dir zeroshot] [--plot docs/mixllm.png]
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from lab import Lab, Rounding, Weights, arguments, run
from torch import Tensor

from anybit.calibration.stats import LinearStats
from anybit.calibration.streaming import StreamedModel
from anybit.config import LayerSpec, TileSpec
from anybit.formats.weight import QuantizedWeight
from anybit.kernels.dispatch import compute_dtype
from anybit.kernels.reference import quantize_activations
from anybit.methods import METHODS, mixllm, sensitivity
from anybit.methods.gptq import GPTQ
from anybit.methods.method import Search
from anybit.methods.mixllm import MixLLM

Rows = dict[str, tuple[int, ...]]
SHARES = (0.0, 0.1, 0.2, 0.5, 1.0)
KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PAPER = (3.93, 12.36, 71.22, 18.70, 0.73, 1.46, 53.82)  # table 4, Llama 3.1 8B


def spec(bits: int, group_size: int = 128, symmetric: bool = False, **options: object) -> LayerSpec[GPTQ]:
    made = GPTQ(**{"clip": False, **options}).resolve()  # type: ignore[arg-type]
    return LayerSpec(made, (TileSpec(bits, group_size, symmetric),))


def per_token(bits: int) -> Rounding:
    """Inputs rounded to one symmetric grid per token."""

    def round_(name: str, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).float()
        codes, scales = quantize_activations(flat, bits, flat.shape[1], torch.ones(1).half(), None)
        return (codes.float() * scales).to(x.dtype).view(x.shape)

    return round_


class Experiments:
    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._stats: dict[bool, dict[str, LinearStats]] = {}

    def stats(self, attention: bool = True) -> dict[str, LinearStats]:
        """Second moments of the unquantized model, with value tokens weighted by attention as by default, or plain."""
        if attention not in self._stats:
            self._stats[attention] = self.lab.inputs(self.lab.tokens(), True, attention, details=True)
        return self._stats[attention]

    def rows(self, share: float, kind: str = "full", search: str = "one-pass") -> Rows:
        """The wide rows; finished searches lie in the work folder."""
        config = MixLLM(wide_rows=share, salience=kind, search=search).resolve()
        folder = self.lab.folder / f"salience-{kind}-{search}"
        streamed = StreamedModel(self.lab.checkpoint, compute_dtype())
        return sensitivity.salient_rows(
            Search(
                streamed, self.lab.tokens(), self.lab.shapes, config, folder=folder, report=self.lab.report
            )
        )

    def quantize(
        self, method: str, made: LayerSpec[GPTQ], rows: Rows | None = None, attention: bool = True
    ) -> Weights:
        stats = self.stats(attention) if method != "rtn" or made.options.clip else {}
        weights: dict[str, QuantizedWeight] = {}
        for name, (out, _) in self.lab.shapes.items():
            own = made if rows is None else mixllm.with_rows(made, rows[name], out)
            weights[name] = METHODS[method].quantize(self.lab.weight(name), stats.get(name), own)
        return weights

    def mixllm(self, share: float, search: str = "one-pass") -> Callable[[], Weights]:
        made = spec(4, clip=True, act_bits=8)
        return lambda: self.quantize("mixllm", made, self.rows(share, search=search))

    def table_1(self) -> None:
        """Beside the baselines, all calibrated on the same tokens of the unquantized model."""
        smooth = spec(8, -1, True, act_bits=8, scaling="smoothquant")
        cases: dict[str, Callable[[], Weights | None]] = {
            "unquantized": lambda: None,
            "RTN W4A16": lambda: self.quantize("rtn", spec(4)),
            "RTN W5A16": lambda: self.quantize("rtn", spec(5)),
            "GPTQ W4A16": lambda: self.quantize("gptq", spec(4, clip=True)),
            "AWQ W4A16": lambda: self.quantize("awq", spec(4, clip=True, scaling="awq")),
            "SmoothQuant W8A8": lambda: self.quantize("smoothquant", smooth),
        }
        cases |= {f"MixLLM p{100 * share:g}": self.mixllm(share) for share in SHARES}
        for label, make in cases.items():
            self.lab.measure(f"table 1: {label}", make)
        self.lab.table({label: f"table 1: {label}" for label in cases})
        for other in ("RTN W5A16", "GPTQ W4A16"):
            print(f"p10 against {other}: {self.lab.interval('table 1: MixLLM p10', f'table 1: {other}')}")

    def figure_6(self) -> None:
        """What each part adds; then what is this project's own, value tokens weighted by attention."""
        row_sym, row, group = spec(4, -1, True), spec(4, -1), spec(4)
        a8, gptq = group.but(act_bits=8), group.but(act_bits=8, group_reorder=False)
        reorder = gptq.but(group_reorder=True)
        clip = reorder.but(clip=True)
        steps: dict[str, tuple[Callable[[], Weights], Rounding | None]] = {
            "W4A4 RTN per channel and token, symmetric": (
                lambda: self.quantize("rtn", row_sym),
                per_token(4),
            ),
            "+ activations 8-bit": (lambda: self.quantize("rtn", row_sym), per_token(8)),
            "+ weights asymmetric": (lambda: self.quantize("rtn", row), per_token(8)),
            "+ weights g128": (lambda: self.quantize("rtn", group), per_token(8)),
            "+ activations g128": (lambda: self.quantize("rtn", a8), None),
            "+ 10 % 8-bit, diagonal Fisher": (
                lambda: self.quantize("rtn", a8, self.rows(0.1, "diagonal")),
                None,
            ),
            "+ block Fisher and first order": (lambda: self.quantize("rtn", a8, self.rows(0.1)), None),
            "+ GPTQ without reorder": (lambda: self.quantize("gptq", gptq, self.rows(0.1), False), None),
            "+ group reorder": (lambda: self.quantize("gptq", reorder, self.rows(0.1), False), None),
            "+ clip": (lambda: self.quantize("gptq", clip, self.rows(0.1), False), None),
            "+ attention weights (ours)": (self.mixllm(0.1), None),
        }
        keys = {label: f"figure 6: {label}" for label in steps}
        for label, (make, inputs) in steps.items():
            self.lab.measure(keys[label], make, inputs)
        self.lab.table(keys)
        for before, after in pairwise(keys.values()):
            print(f"{after.partition(': ')[2]}: {self.lab.interval(after, before)}")

    def figure_2(self) -> None:
        """Where the 8-bit rows are, by kind of layer and by block."""
        rows = self.rows(0.1)
        shares = {name: len(rows[name]) / out for name, (out, _) in self.lab.shapes.items()}
        print("\n| | " + " | ".join(KINDS) + " |\n|" + "---|" * (1 + len(KINDS)))
        means = []
        for kind in KINDS:
            own = [share for name, share in shares.items() if name.endswith(kind)]
            means.append(100 * sum(own) / max(1, len(own)))
        print("| 8-bit rows, % | " + " | ".join(f"{mean:.1f}" for mean in means) + " |")
        print("| Llama 3.1 8B in the paper, % | " + " | ".join(f"{mean:.1f}" for mean in PAPER) + " |")
        self.lab.keep({"key": "figure 2", "shares": shares})
        if self.lab.args.plot:
            self.plot(shares)

    def plot(self, shares: dict[str, float]) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 3.5), layout="constrained")
        axes = figure.subplots()
        for kind in KINDS:
            own = [100 * share for name, share in shares.items() if name.endswith(kind)]
            axes.plot(range(len(own)), own, ".-", label=kind)
        axes.set(
            xlabel="decoder block", ylabel="rows at 8 bits, %", title="MixLLM: where the top 10 % of rows are"
        )
        axes.grid(alpha=0.3)
        axes.legend(ncols=4, fontsize="small")
        figure.savefig(self.lab.args.plot, dpi=120)

    def progressive(self) -> None:
        """Section 4.5.3: the search in steps of 2 % against one pass."""
        one, steps = self.rows(0.1), self.rows(0.1, search="progressive")
        both = sum(len(set(one[name]) & set(steps[name])) for name in one)
        print(f"rows in common: {both} of {sum(map(len, one.values()))}")
        self.lab.measure("table 1: MixLLM p10", self.mixllm(0.1))
        self.lab.measure("progressive", self.mixllm(0.1, "progressive"))
        self.lab.table({"one pass": "table 1: MixLLM p10", "steps of 2 %": "progressive"})
        print(self.lab.interval("progressive", "table 1: MixLLM p10"))

    def table_3(self) -> None:
        """Zero-shot accuracy."""
        self.lab.zero_shot(
            {
                "unquantized": lambda: None,
                "RTN W4A16": lambda: self.quantize("rtn", spec(4)),
                "GPTQ W4A16": lambda: self.quantize("gptq", spec(4, clip=True)),
                "MixLLM p10 W4.5A8": self.mixllm(0.1),
            }
        )

    def table_5(self) -> None:
        """Seconds of the search, one pass over the calibration tokens."""
        folder = self.lab.folder / "timing.json"
        if not folder.exists():
            config = MixLLM(wide_rows=0.1).resolve()
            streamed = StreamedModel(self.lab.checkpoint, compute_dtype())
            begun = time.perf_counter()
            sensitivity.salient_rows(
                Search(streamed, self.lab.tokens(), self.lab.shapes, config, report=self.lab.report)
            )
            folder.write_text(
                json.dumps({"seconds": time.perf_counter() - begun, "threads": torch.get_num_threads()})
            )
        print(folder.read_text())


NAMES = ("figure_2", "table_1", "figure_6", "progressive", "table_3", "table_5")


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    run(args, Experiments(Lab(args, "mixllm")), NAMES)


if __name__ == "__main__":
    main()
