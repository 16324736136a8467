"""What the papers' experiments share: a model whose weights are replaced, statistics, perplexities, a results file.

Weights are quantized by the package's own methods and evaluated as their dense matrices; bits per weight come from the
layouts that would be stored. Results are kept line by line, so an interrupted run goes on where it was.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from anybit.calibration import texts
from anybit.calibration.gradients import gradient_statistics, spilled_statistics
from anybit.calibration.moments import Collector
from anybit.calibration.stats import GradientStats, LinearStats
from anybit.calibration.streaming import StreamedModel
from anybit.checkpoint.directory import open_checkpoint
from anybit.evaluation import perplexity as evaluation
from anybit.formats.weight import PackedWeight, QuantizedWeight, layout_of, pack
from anybit.kernels.dispatch import compute_dtype
from anybit.kernels.reference import round_inputs
from anybit.kv_cache import quantized_attention
from anybit.loader import load
from anybit.progress import Terminal

Weights = Mapping[str, QuantizedWeight | Tensor]
Rounding = Callable[[str, Tensor], Tensor]  # layer name, inputs -> rounded inputs


def own_rounding(weight: QuantizedWeight) -> Callable[[Tensor], Tensor] | None:
    """How a layer rounds its inputs, if it does; holds none of its codes."""
    packed = pack(weight)
    kept = ("act_clip", "act_scales", "cols", "input_scale")
    grids = PackedWeight(packed.layout, {f: t for f, t in packed.tensors.items() if f.endswith(kept)})
    return functools.partial(round_inputs, weight=grids) if packed.layout.rounds_inputs else None


def _rounded(round_: Callable[[Tensor], Tensor], module: Any, args: tuple[Tensor, ...]) -> Any:
    return (round_(args[0]), *args[1:])


def arguments(description: str) -> argparse.ArgumentParser:
    """The options of every experiment."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", help="HF directory or .gguf file")
    parser.add_argument("--calibration", default="builtin", help="text to calibrate on")
    parser.add_argument(
        "--text", action="append", default=[], help="NAME=FILE to evaluate on; repeat for more"
    )
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=16384)
    parser.add_argument("--work", type=Path, default=Path("build/papers"), help="statistics and results")
    parser.add_argument("--tasks-dir", type=Path, help="folder of zero-shot tasks' JSON files")
    parser.add_argument("--tasks", nargs="+", default=["piqa", "arc_easy"])
    parser.add_argument("--limit", type=int, default=100, help="questions per task")
    parser.add_argument("--only", nargs="+", default=[], help="names of experiments; all by default")
    return parser


def run(args: argparse.Namespace, experiments: Any, names: Sequence[str]) -> None:
    """The experiments that `--only` names, methods of `experiments`; all of them by default."""
    for name in args.only or names:
        print(f"\n# {name}", flush=True)
        getattr(experiments, name)()


class Lab:
    """A model, its original weights, texts and a file of results."""

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        self.args = args
        what = [args.model, args.calibration, sorted(args.text), args.samples, args.seq_len, args.max_tokens]
        self.folder = (
            args.work / hashlib.sha256(json.dumps(what).encode()).hexdigest()[:12]
        )  # of these settings alone
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file = self.folder / f"{name}.jsonl"
        lines = self.file.read_text().splitlines(keepends=True) if self.file.exists() else []
        whole = [
            json.loads(line) for line in lines if line.endswith("\n")
        ]  # a kill may have cut the last one
        self.rows: dict[str, dict[str, Any]] = {row["key"]: row for row in whole}
        self.report = Terminal()
        self.checkpoint = open_checkpoint(args.model)
        self.source = StreamedModel(self.checkpoint, torch.float32)
        self.shapes = self.source.all_linears()
        self.tokenizer = self.checkpoint.tokenizer()
        named = dict(entry.split("=", 1) for entry in args.text) or {"builtin": "builtin-eval"}
        self.texts = {n: texts.token_ids(self.tokenizer, texts.read_text(file)) for n, file in named.items()}
        self._model: Any = None
        self._hooks: list[Any] = []

    @property
    def model(self) -> Any:
        if self._model is None:
            self._model = load(self.args.model)
        return self._model

    def weight(self, name: str) -> Tensor:
        return self.source.weight(name)

    def tokens(self, calibration: str | None = None, samples: int | None = None) -> Tensor:
        """Calibration windows [samples, seq_len]."""
        text = calibration or self.args.calibration
        made = texts.calibration_set(self.tokenizer, text, samples or self.args.samples, self.args.seq_len, 0)
        return made.tokens

    def inputs(
        self, tokens: Tensor, hessian: bool = False, attention: bool = False, details: bool = False
    ) -> dict[str, LinearStats]:
        """Input moments of every linear in the unquantized model; `details` as `Collector`'s `inputs`."""
        self.restore()
        linears = {name: self.model.get_submodule(name) for name in self.shapes}
        with Collector(linears, hessian, attention, details) as collector, torch.no_grad():
            for row in tokens:
                self.model(input_ids=row[None], use_cache=False, logits_to_keep=1)
                collector.finish_forward()
        return collector.stats

    def fisher(self, tokens: Tensor) -> dict[str, GradientStats]:
        """Diagonal Fisher information, kept in the work folder."""
        folder = self.folder / f"fisher-{len(tokens)}x{tokens.shape[1]}"
        found = spilled_statistics(self.shapes, folder) if (folder / "complete").exists() else None
        if found is not None:
            return found
        folder.mkdir(exist_ok=True)
        streamed = StreamedModel(self.checkpoint, compute_dtype())
        advance = self.report.task("gradients", len(tokens))
        begun = time.perf_counter()
        stats = gradient_statistics(streamed, tokens, self.shapes, fisher=folder, advance=advance)
        (folder / "complete").write_text(f"{time.perf_counter() - begun:.1f} s")
        return stats

    def restore(self) -> None:
        """The original weights."""
        self.put({name: self.weight(name) for name in self.shapes})

    def put(self, weights: Weights, inputs: Rounding | None = None) -> float:
        """Replace weights of the model; returns their bits per weight (16 for plain matrices).

        Inputs are rounded as the weights say, or by `inputs(name, x)` where that is given.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        stored = 0.0
        with torch.no_grad():
            for name, weight in weights.items():
                dense = weight if isinstance(weight, Tensor) else weight.dequantize()
                bits = 16 * dense.numel() if isinstance(weight, Tensor) else 8 * layout_of(weight).nbytes
                stored += bits
                module = self.model.get_submodule(name)
                module.weight.copy_(dense.T if isinstance(module, Conv1D) else dense)
                round_ = None if inputs is None else functools.partial(inputs, name)
                if round_ is None and isinstance(weight, QuantizedWeight):
                    round_ = own_rounding(weight)
                if round_ is not None:
                    hook = functools.partial(_rounded, round_)
                    self._hooks.append(module.register_forward_pre_hook(hook))
        return stored / sum(self.shapes[n][0] * self.shapes[n][1] for n in weights)

    def perplexities(self) -> dict[str, Any]:
        """Of the model as it is, on every text."""
        found: dict[str, Any] = {}
        for name, tokens in self.texts.items():
            figures = evaluation.perplexity(
                self.model,
                tokens,
                seq_len=self.args.seq_len,
                max_tokens=self.args.max_tokens,
                bos=texts.default_bos(self.tokenizer),
            ).as_dict()
            found[name] = {key: figures[key] for key in ("perplexity", "tokens", "window_nll")}
        return found

    def measure(
        self,
        key: str,
        make: Callable[[], Weights | None],
        inputs: Rounding | None = None,
        kv_bits: int = 16,
        **more: Any,
    ) -> dict[str, Any]:
        """The row `key`: as it was measured before, or made now (None: the original weights); see `put`."""
        if key not in self.rows:
            begun = time.perf_counter()
            weights = make()
            seconds = time.perf_counter() - begun
            if weights is None:
                self.restore()
                bpw = 16.0
            else:
                bpw = self.put(weights, inputs)
            bpw = more.pop("bits_per_weight", bpw)
            with quantized_attention(self.model, kv_bits):
                figures = self.perplexities()
            self.keep({"key": key, "bits_per_weight": bpw, "seconds": seconds, **figures, **more})
        row = self.rows[key]
        shown = ", ".join(f"{n} {row[n]['perplexity']:.3f}" for n in self.texts if n in row)
        print(f"{key:40} {row['bits_per_weight']:7.3f} bpw  {shown}", flush=True)
        return row

    def keep(self, row: dict[str, Any]) -> None:
        """Add a row to the results file."""
        self.rows[row["key"]] = row
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def zero_shot(self, rows: Mapping[str, Callable[[], Weights | None]]) -> None:
        """Accuracies of `--tasks` for every row {label: its weights}, as a Markdown table."""
        from anybit.evaluation import tasks as lm_eval

        folder, names, limit = self.args.tasks_dir, tuple(self.args.tasks), self.args.limit
        if folder is None:
            print("zero-shot tasks need --tasks-dir")
            return
        print(f"\n| | {' | '.join(names)} |\n|{'---|' * (1 + len(names))}")
        for label, make in rows.items():
            key = f"zero-shot: {label}, {limit} of {names}"
            if key not in self.rows:
                weights = make()
                self.restore() if weights is None else self.put(weights)
                prepared = lm_eval.prepare(names, tasks_dir=folder, limit=limit)
                scores = lm_eval.run_prepared(self.model, self.tokenizer, prepared, batch_size=8)
                self.keep({"key": key, "tasks": scores})
            scores = self.rows[key]["tasks"]
            cells = [f"{100 * scores[n].get('acc_norm', scores[n]['acc']):.1f}" for n in names]
            print(f"| {label} | " + " | ".join(cells) + " |", flush=True)

    def table(self, keys: Mapping[str, str]) -> None:
        """Rows {label: key} as a Markdown table; keys that were not measured are left out."""
        names = list(self.texts)
        print("\n| | bpw | " + " | ".join(names) + " |\n|" + "---|" * (2 + len(names)))
        for label, key in keys.items():
            if key in self.rows:
                row = self.rows[key]
                cells = [f"{row[n]['perplexity']:.2f}" for n in names if n in row]
                print(f"| {label} | {row['bits_per_weight']:.3f} | " + " | ".join(cells) + " |")
        print(flush=True)

    def interval(self, key: str, other: str) -> str:
        """95 % interval of how much higher a row's perplexity is than another's, per text, by paired bootstrap."""
        found = []
        for name in self.texts:
            a, b = self.rows[key][name], self.rows[other][name]
            per_window = a["tokens"] / len(a["window_nll"])
            low, high = evaluation.paired_bootstrap(a["window_nll"], b["window_nll"], int(per_window))
            found.append(f"{name} {100 * low:+.2f} to {100 * high:+.2f} %")
        return ", ".join(found)
