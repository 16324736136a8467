"""What is known of a run before any work, all of it checked."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch

from anybit.artifact.contents import Plan
from anybit.artifact.writer import finished_bytes
from anybit.calibration.streaming import StreamedModel
from anybit.calibration.texts import CALIBRATION, CalibrationSet, calibration_set, check_source
from anybit.checkpoint.architectures import max_positions
from anybit.checkpoint.directory import open_checkpoint
from anybit.config import Options, SpecMap
from anybit.engine.pages import free_memory
from anybit.errors import InputError
from anybit.estimate import check_disk, peak_memory, scratch_bytes
from anybit.fingerprint import base_hash, fingerprint, statistics_key
from anybit.kernels.dispatch import check_device, compute_dtype
from anybit.methods import METHODS, Method
from anybit.plan import plan_within
from anybit.progress import SILENT, Silent


class Settings(TypedDict, total=False):
    """What `quantize` takes besides model, place and options."""

    calibration: str  # "builtin", a `.txt` or `.jsonl` file, or a hub dataset; "builtin" by default
    spec_map: SpecMap  # {layer name: LayerSpec}, which overrides the options layer by layer
    overwrite: bool  # replace an artifact at `out`
    statistics: (
        str | Path
    )  # folder where gradients of the unquantized model stay for other runs on the same model and text,
    # one run at a time; without it every run gathers its own
    device: str  # "cpu" or "cuda": where calibration and methods run, which round and sum differently
    report: Silent  # where progress goes


@dataclass(frozen=True)
class Ready:
    """A run that can begin."""

    streamed: StreamedModel
    method: Method
    options: Options
    plan: Plan
    text: CalibrationSet | None
    base: str  # hash of the base model
    fingerprint: str
    report: Silent
    given: SpecMap

    def shared_statistics(self, folder: str | Path | None) -> Path | None:
        """Where gradients lie that other runs may use too."""
        if folder is None or self.text is None or not (self.plan.statistics.fisher or self.method.allocate):
            return None
        layers = self.decided_on() if self.method.allocate else self.plan.layouts
        return Path(folder) / statistics_key(
            self.base, self.options, self.plan, layers, self.text, self.streamed
        )

    def decided_on(self) -> list[str]:
        """The layers that the method may decide on: those that no spec is given for."""
        return [name for name in self.plan.layouts if name not in self.given or self.method.ordered]


def prepare(model: str | Path, out: Path, options: Options, settings: Settings) -> Ready:
    """Everything that is known before any work, checked."""
    report = settings.get("report", SILENT)
    streamed = open_streamed(model, settings.get("device", "cpu"))
    options, plan = plan_within(streamed, options, settings.get("spec_map"))
    check_disk(plan, out, finished_bytes(out), scratch_bytes(streamed, plan, options))
    for note in (
        _note_of_memory(streamed, plan, options),
        *streamed.checkpoint.notes(),
        plan.coverage(),
        plan.warning(options),
        streamed.note_of_left_out(),
    ):
        if note:
            report.say(note)
    text = None
    if plan.statistics:
        text = _calibration(streamed, options, settings.get("calibration", "builtin"), report)
    streamed.check_weights(report.task("checking the weights", len(streamed.names)))
    base = base_hash(streamed.checkpoint, report)
    mark = fingerprint(base, options, plan, text, streamed)
    given = settings.get("spec_map") or {}
    return Ready(streamed, METHODS[options.name], options, plan, text, base, mark, report, given)


def _note_of_memory(streamed: StreamedModel, plan: Plan, options: Options) -> str | None:
    """A sentence where a run on the CPU will take more memory than there is: the system may end it without a word."""
    needed, free = peak_memory(streamed, plan, options), free_memory()
    if streamed.device.type != "cpu" or needed <= free:
        return None
    whole = METHODS[options.name].work(options).passes > 0
    instead = ", or a method that needs no gradients, such as --method gptq" if whole else ""
    return (
        f"warning: this run will take about {needed / 1e6:.0f} MB of memory, and {free / 1e6:.0f} MB are free: close "
        f"what else runs, or use fewer or shorter windows (--samples, --seq-len){instead}"
    )


def open_streamed(model: str | Path, device: str = "cpu") -> StreamedModel:
    """The model as a run has it: on its device, in the numbers that calibration computes in there.

    Raises:
        InputError: see `_check_device`, `open_checkpoint` and `StreamedModel`.
    """
    _check_device(device)
    return StreamedModel(open_checkpoint(model), compute_dtype(device), device)


def _check_device(device: str) -> None:
    """Refuse a device that calibration cannot run on here.

    Raises:
        InputError: see `dispatch.check_device`; no Triton, or sums of moments that would be rounded to TF32.
    """
    check_device(device)
    if device == "cpu":
        return
    if importlib.util.find_spec("triton") is None:
        raise InputError(f"device {device!r} needs the package triton: install it, or use cpu")
    if torch.backends.cuda.matmul.allow_tf32:
        raise InputError(
            "TF32 is on, which leaves second moments 10 bits: call torch.set_float32_matmul_precision('highest')"
        )


def check_calibration(streamed: StreamedModel, options: Options, source: str) -> None:
    """Refuse, before any work, a calibration that cannot be.

    Raises:
        InputError: windows longer than the model reaches, a text that is not there.
    """
    streamed.check_structure()
    limit = max_positions(streamed.model)
    if limit is not None and options.window > limit:
        raise InputError(
            f"--seq-len {options.window} is beyond the model's {limit} positions: choose at most {limit}"
        )
    check_source(source, CALIBRATION)


def _calibration(streamed: StreamedModel, options: Options, source: str, report: Silent) -> CalibrationSet:
    """The windows that the run is calibrated on.

    Raises:
        InputError: see `check_calibration`; a tokenizer of another model, too little text.
    """
    check_calibration(streamed, options, source)
    checkpoint = streamed.checkpoint
    report.say(f"tokenizing {source}")
    text = calibration_set(checkpoint.tokenizer(), source, options.windows, options.window, options.seed)
    samples = len(text.tokens)
    if samples < options.windows:
        report.say(
            f"calibration text {source} has {samples} windows of {options.window} tokens, not {options.windows}"
        )
    if int(text.tokens.max()) >= checkpoint.config.get_text_config().vocab_size:
        raise InputError(
            "the tokenizer has more tokens than the model's vocabulary: they do not belong together"
        )
    if options.epochs and samples < 2:
        raise InputError(
            f"calibration text {source} has one window of {options.window} tokens, and finetuning needs another to "
            "stop by: give more text, or shorter windows (--seq-len)"
        )
    report.say(f"calibrates on {samples} x {options.window} tokens of {source}")
    return text
