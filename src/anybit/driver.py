"""The driver: checkpoint in, artifact out.

`allocate` over the whole model, where a method does; then for each block `collect`, `quantize`, `tune`, `write`. What a
method does at each of these is in its file (`methods`): nothing here knows one by name.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from anybit.artifact import split
from anybit.artifact.config_json import artifact_config, provenance
from anybit.artifact.contents import Plan
from anybit.artifact.files import resolved
from anybit.artifact.model_card import model_card
from anybit.artifact.sizes import inspect
from anybit.artifact.writer import ArtifactWriter, check_output, finished_bytes
from anybit.calibration.gradients import gradient_statistics, spilled_statistics
from anybit.calibration.moments import Activations, Collector
from anybit.calibration.stats import GradientStats, LinearStats
from anybit.calibration.streaming import BlockCall, StreamedModel, run_block
from anybit.calibration.texts import CalibrationSet, calibration_set
from anybit.checkpoint.architectures import max_positions
from anybit.checkpoint.directory import open_checkpoint
from anybit.config import Options, SpecMap
from anybit.cost import Cost
from anybit.errors import InputError, about_layer
from anybit.fingerprint import base_hash, fingerprint, statistics_key
from anybit.formats.layout import LayerLayout
from anybit.formats.weight import PackedWeight, QuantizedWeight, pack, unpack
from anybit.kernels.dispatch import check_device
from anybit.kernels.reference import round_inputs
from anybit.methods import DEFAULT, METHODS, Method
from anybit.methods.finetune import Task, passes
from anybit.methods.method import Allocation, Search, Start
from anybit.methods.ordering import with_all_planes
from anybit.methods.rounding import quantize_rows
from anybit.plan import check_disk, fit_budget, make_plan, scratch_bytes
from anybit.progress import SILENT, Advance, Silent, ignore


@dataclass(frozen=True)
class QuantizeResult:
    """What a run made."""

    path: Path
    bits: float  # average code width
    bits_per_weight: float  # stored bits per weight of the linear layers
    size_bytes: int  # all files but the tokenizer
    seconds: float  # wall time of this call
    resumed_shards: int  # shards found finished
    statistics: Cost | None = None  # of gathering shared statistics, in whichever runs
    taken_over: Cost | None = None  # of that, in earlier runs


class Settings(TypedDict, total=False):
    """What `quantize` takes besides model, place and options."""

    calibration: str  # "builtin", a `.txt` or `.jsonl` file, or a hub dataset; "builtin" by default
    spec_map: SpecMap  # {layer name: LayerSpec}, which overrides the options layer by layer
    overwrite: bool  # replace an artifact at `out`
    statistics: Path  # folder where gradients of the unquantized model stay for other runs on the same model and text,
    # one run at a time; without it every run gathers its own
    device: (
        str  # "cpu" or "cuda": where calibration runs, its statistics are summed and matrices are quantized.
    )
    # Devices round and sum differently, so the bytes are not the same (docs/architecture.md has by how much)
    report: Silent  # where progress goes


def quantize(
    model: str | Path, out: str | Path, options: Options | None = None, **settings: Unpack[Settings]
) -> QuantizeResult:
    """Compress a model into an artifact directory.

    A killed or interrupted call leaves `OUT.partial`; the same call again resumes it and ends in the same bytes.

    Args:
        model: HF directory, hub id or `.gguf` file.
        out: directory to make.
        options: a method with its options, such as `anybit.GPTQ(bits=4)`; `anybit.AnyBit()` by default.
        settings: see `Settings`.

    Raises:
        InputError: anything about the input that cannot work, before work that would be lost.
    """
    start = time.perf_counter()
    out, overwrite = resolved(Path(out)), settings.get("overwrite", False)
    check_output(out, overwrite)
    ready = _prepare(model, out, options or DEFAULT.options(), settings)
    folder, shards = ready.shared_statistics(settings.get("statistics")), len(ready.streamed.blocks) + 1
    with _in_memory(), ArtifactWriter(out, ready.fingerprint, shards, overwrite, folder) as writer:
        resumed, earlier = len(writer.finished), writer.cost()
        if resumed:
            ready.report.say(f"resumes: {resumed} of {shards} shards are finished")
        run = _Run(**vars(ready), writer=writer, allocation=Allocation()).allocate()
        run.outside()
        run.all_blocks()
        cost = run.finish()
    figures = inspect(out)
    sizes = {name: figures[name] for name in ("bits", "bits_per_weight", "size_bytes")}
    seconds = time.perf_counter() - start
    return QuantizeResult(
        out, **sizes, seconds=seconds, resumed_shards=resumed, statistics=cost, taken_over=earlier
    )


def _prepare(model: str | Path, out: Path, options: Options, settings: Settings) -> _Ready:
    """Everything that is known before any work, checked."""
    report, device = settings.get("report", SILENT), settings.get("device", "cpu")
    _check_device(device)
    streamed = StreamedModel(open_checkpoint(model), compute_dtype(device), device)
    options = fit_budget(streamed, options)
    plan = make_plan(streamed, options, settings.get("spec_map"))
    check_disk(plan, out, finished_bytes(out), scratch_bytes(plan, options))
    for note in (
        *streamed.checkpoint.notes(),
        plan.coverage(),
        plan.warning(options),
        streamed.note_of_left_out(),
    ):
        if note:
            report.say(note)
    text = None
    if plan.statistics:
        streamed.check_structure()
        text = _calibration(streamed, options, settings.get("calibration", "builtin"), report)
    streamed.check_weights(report.task("checking the weights", len(streamed.names)))
    base = base_hash(streamed.checkpoint, report)
    mark = fingerprint(base, options, plan, text, streamed)
    given = settings.get("spec_map") or {}
    return _Ready(streamed, METHODS[options.name], options, plan, text, base, mark, report, given)


@dataclass(frozen=True)
class _Ready:
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

    def shared_statistics(self, folder: Path | None) -> Path | None:
        """Where gradients lie that other runs may use too."""
        if folder is None or self.text is None or not self.method.effort(self.options).passes:
            return None
        layers = self._decided_on() if self.method.allocate else self.plan.layouts
        return folder / statistics_key(self.base, self.options, self.plan, layers, self.text, self.streamed)

    def _decided_on(self) -> list[str]:
        """The layers that the method may decide on: those that no spec is given for."""
        return [name for name in self.plan.layouts if name not in self.given or self.method.ordered]


@dataclass(frozen=True)
class _Run(_Ready):
    """A run that writes."""

    writer: ArtifactWriter
    allocation: Allocation

    def allocate(self) -> _Run:
        """With what the method finds out over the whole model: once, then kept with the unfinished artifact."""
        layers = self._decided_on()
        if self.method.allocate is None or self.text is None or not layers:
            return self
        shapes = {name: self.plan.layouts[name].shape for name in layers}
        specs = {name: self.plan.specs[name] for name in layers}
        planned = {name: self.plan.layouts[name] for name in layers}
        found = self.method.allocate(
            Search(
                self.streamed,
                self.text.tokens,
                shapes,
                self.options,
                specs,
                planned,
                self.writer.search(),
                self.report,
            )
        )
        self.streamed.model.to("meta")
        if not found.specs:
            return replace(self, allocation=found)
        plan = make_plan(self.streamed, self.options, {**found.specs, **self.given})
        out = self.writer.out
        check_disk(plan, out, finished_bytes(out), scratch_bytes(plan, self.options))
        return replace(self, plan=plan, allocation=found)

    def outside(self) -> None:
        """Shard 0: everything outside the blocks."""
        if 0 in self.writer.finished:
            return
        tensors: dict[str, Tensor] = {}
        for name in self.streamed.tensor_names(None):
            layer = name.removesuffix(".weight")
            if layer in self.plan.embeddings:
                bits = int(self.plan.embeddings[layer].tiles[0].bits)
                packed = pack(quantize_rows(self.streamed.read(name), bits))
                tensors |= {f"{layer}.{field}": t for field, t in packed.tensors.items()}
            else:
                tensors[name] = self._kept(name)
        self.writer.write_shard(0, tensors)

    def all_blocks(self) -> None:
        """Shards 1 to n: statistics, quantization, and the way to the next block."""
        blocks = len(self.streamed.blocks)
        if len(self.writer.finished) == self.writer.shards:
            return
        if self.plan.statistics.fisher:
            self._all_from_gradients()
            return
        samples = 0 if self.text is None else len(self.text.tokens)
        steps = samples * (blocks if self.options.unquantized else 2 * blocks - 1)
        if self.options.epochs:
            steps += blocks * (samples + passes(samples, self.options.epochs))
        advance = self.report.task(f"{self.method.name} {blocks} blocks", steps + len(self.plan.layouts))
        hidden, targets, calls = None, None, []
        if self.text is not None:
            hidden = Activations(samples, self.writer.folder, device=self.streamed.device)
            calls = self.streamed.first_inputs(self.text.tokens, hidden.put)
        if hidden is not None and self.options.epochs:
            targets = Activations(samples, self.writer.folder, device=self.streamed.device)
            for sample in range(samples):
                targets.put(sample, hidden.get(sample))
        for i in range(blocks):
            self._block(i, hidden, targets, calls[i] if calls else None, advance)

    def _all_from_gradients(self) -> None:
        """Statistics of the whole model first, then block after block."""
        stats = self._gradients()
        blocks = range(len(self.streamed.blocks))
        advance = self.report.task(f"{self.method.name} {len(blocks)} blocks", len(self.plan.layouts))
        for i in blocks:
            linears = self._linears(i)
            if i + 1 in self.writer.finished:
                advance(len(linears))
            else:
                self._quantize_block(i, linears, {name: stats[name] for name in linears}, advance)

    def _gradients(self) -> Mapping[str, GradientStats]:
        """The Fisher information of all layers, gathered or found."""
        assert self.text is not None
        folder = self.writer.statistics()
        shapes = {name: layout.shape for name, layout in self.plan.layouts.items()}
        found = spilled_statistics(shapes, folder) if self.writer.has_statistics() else None
        if found is not None:
            self.report.say("resumes: the gradients are there")
            return found
        begun = Cost.clock()
        folder.mkdir(parents=True, exist_ok=True)
        tokens = self.text.tokens
        advance = self.report.task("gradients", len(tokens))
        made = gradient_statistics(self.streamed, tokens, shapes, fisher=True, spill=folder, advance=advance)
        self.streamed.model.to("meta")
        self.writer.keep_statistics(Cost.since(begun))
        return made

    def _block(
        self,
        i: int,
        hidden: Activations | None,
        targets: Activations | None,
        call: BlockCall | None,
        advance: Advance,
    ) -> None:
        """Collect, quantize, tune and write block i, then send the hidden states through it."""
        finished = i + 1 in self.writer.finished
        linears = self._linears(i)
        if hidden is None or call is None:
            if not finished:
                self._quantize_block(i, linears, {}, ignore)
            advance(len(linears))
            return
        with self.streamed.block(i) as block, torch.no_grad():
            if targets is not None:
                self._forward(block, targets, call, True, advance)
            if not finished:
                with self._collector(linears) as collector:
                    self._forward(block, hidden, call, self.options.unquantized, advance, collector)
                task = None if targets is None else Task(block, call, hidden, targets)
                tensors = self._quantize_block(i, linears, collector.collected(), advance, task)
            else:
                tensors = self.writer.read_shard(i + 1)
                advance(len(linears) + (0 if self.options.unquantized else len(hidden)))
                if self.options.unquantized:
                    self._forward(block, hidden, call, True, advance)
                if targets is not None:
                    advance(passes(len(hidden), self.options.epochs))
            if not self.options.unquantized and i + 1 < len(self.streamed.blocks):
                with self._running_quantized(linears, tensors):
                    del tensors
                    self._forward(block, hidden, call, True, advance)

    @contextmanager
    def _running_quantized(
        self, linears: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]
    ) -> Iterator[None]:
        """A block with the weights that its linears are stored as, its inputs rounded as they will be."""
        hooks = []
        for name, layout in self._layouts_after(linears, tensors).items():
            packed = _stored(name, layout, tensors, self.streamed.device)
            _overwrite_weight(linears[name], unpack(packed).dequantize())
            if packed.layout.rounds_inputs:
                hooks.append(linears[name].register_forward_pre_hook(_rounding_hook(packed)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _layouts_after(
        self, linears: Iterable[str], tensors: Mapping[str, Tensor]
    ) -> Mapping[str, LayerLayout]:
        """How a block's layers are read for the sake of the blocks after it."""
        layouts = {name: self.plan.layouts[name] for name in linears}
        if self.method.running is None or not layouts:
            return layouts
        losses = {name: tensors[f"{name}.{split.LOSSES}"] for name in layouts}
        return self.method.running(self.options, layouts, losses)

    def _linears(self, i: int) -> dict[str, nn.Module]:
        """The layers of block i that are to be quantized."""
        return {n: m for n, m in self.streamed.linears(i).items() if n in self.plan.layouts}

    def _collector(self, linears: Mapping[str, nn.Module]) -> Collector:
        wanted = self.plan.statistics
        attention = wanted.hessian and wanted.attention
        return Collector(linears, wanted.hessian, attention, wanted.inputs, self.allocation.tokens)

    def _forward(
        self,
        block: nn.Module,
        hidden: Activations,
        call: BlockCall,
        keep: bool,  # let the outputs replace the inputs
        advance: Advance,
        collector: Collector | None = None,
    ) -> None:
        for sample in range(len(hidden)):
            output = run_block(block, hidden.get(sample), call)
            if collector is not None:
                collector.finish_forward()
            if keep:
                hidden.put(sample, output)
            advance(1)

    def _quantize_block(
        self,
        i: int,
        linears: Mapping[str, nn.Module],
        stats: Mapping[str, LinearStats] | Mapping[str, GradientStats],
        advance: Advance,
        task: Task | None = None,
    ) -> dict[str, Tensor]:
        """Quantize block i's linears, train them if there is a task, write the shard and return its tensors."""
        self._check_statistics(linears, stats)
        tensors: dict[str, Tensor] = {}
        made = (
            self._quantized(linears, stats) if task is None else self._tuned(i, linears, stats, advance, task)
        )
        for name, weight in made:
            packed = pack(weight)
            self._check_made(name, weight, packed)
            tensors |= {f"{name}.{field}": t.cpu() for field, t in packed.tensors.items()}
            if weight.losses is not None:
                tensors[f"{name}.{split.LOSSES}"] = weight.losses.cpu()
            advance(1)
        quantized = {f"{name}.weight" for name in linears}
        tensors |= {n: self._kept(n) for n in self.streamed.tensor_names(i) if n not in quantized}
        self.writer.write_shard(i + 1, tensors)
        return tensors

    def _check_statistics(self, linears: Iterable[str], stats: Mapping[str, Any]) -> None:
        """Refuse statistics that are missing, or hold NaN or Inf."""
        for name in linears:
            if name in stats:
                stats[name].check(name)
            elif self.plan.statistics:
                raise InputError(
                    f"{name} is not called as a layer by its block, so it has no statistics: "
                    f"{self.streamed.model.config.model_type} models cannot be calibrated yet; choose --method rtn, "
                    "or leave the layer out with --exclude"
                )

    def _check_made(self, name: str, weight: QuantizedWeight, packed: PackedWeight) -> None:
        """What a method said it would store is what it made; of nested weights all planes are there until the end."""
        planned = {name: self.plan.layouts[name]}
        planned = planned if weight.losses is None else with_all_planes(planned)
        assert packed.layout == planned[name], f"{name}: made another layout than planned"

    def _quantized(
        self, linears: Iterable[str], stats: Mapping[str, Any]
    ) -> Iterator[tuple[str, QuantizedWeight]]:
        """The linears by name, one at a time."""
        for name in linears:
            start = self._start(name, stats.get(name))
            with about_layer(name):
                made = self.method.quantize(start.weight(), start.stats, start.spec)
            yield name, made

    def _tuned(
        self, i: int, linears: Iterable[str], stats: Mapping[str, Any], advance: Advance, task: Task
    ) -> Iterator[tuple[str, QuantizedWeight]]:
        """Block i's linears by name, quantized and then trained together."""
        assert self.method.tune is not None
        prefix = self.streamed.block_name(i) + "."
        starts = {name.removeprefix(prefix): self._start(name, stats[name]) for name in linears}
        made, errors = self.method.tune(task, starts, self.options, advance)
        if errors:
            self.report.say(
                f"block {i}: finetuning takes the error on held-out windows from {errors[0]:.4g} to {min(errors):.4g} "
                f"({len(errors) - 1} epochs)"
            )
        return ((prefix + name, weight) for name, weight in made.items())

    def _start(self, name: str, stats: Any) -> Start:
        """What the method gets of a layer."""
        if name in self.allocation.outputs:
            stats = replace(stats, outputs=self.allocation.outputs[name])
        return Start(name, partial(self.streamed.weight, name), stats, self.plan.specs[name])

    def _kept(self, name: str) -> Tensor:
        """A tensor that is stored without quantization."""
        tensor, (dtype, _) = self.streamed.read(name), self.plan.kept[name]
        if dtype == torch.float16 and tensor.dtype != torch.float16 and tensor.abs().max() > 65504:
            dtype = torch.bfloat16
        return tensor.to(dtype)

    def finish(self) -> Cost | None:
        """Write what describes the artifact, and give it its name; what shared statistics took."""
        writer, checkpoint, plan = self.writer, self.streamed.checkpoint, self.plan
        made = provenance(checkpoint, self.base, self.options, self.text.describe() if self.text else None)
        cut: split.Cut | None = None
        if self.method.ordered is not None:
            self.report.say("orders the planes and writes base layer and enhancement layers")
            cut = split.cut(writer, plan.layouts, *self.method.ordered(self.options))
            plan = replace(plan, layouts=cut.layouts, enhancement_bytes=0)
        sizes = plan.sizes() if cut is None else cut.sizes(plan.sizes()[0])
        texts = {"README.md": model_card(checkpoint, plan, self.options, made, sizes)}
        checkpoint.copy_assets(writer.work)
        cost = writer.cost()
        described = artifact_config(self.streamed, plan, made)
        if cut is None:
            writer.finish(described, texts)
        else:
            described["quantization_config"] |= {"bits": cut.bits, **cut.stated}
            writer.finish(described, texts, cut.files, cut.section)
        return cost


def compute_dtype(device: str = "cpu") -> torch.dtype:
    """What calibration forwards compute in: bfloat16 where the device multiplies it, else float32."""
    if device != "cpu":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return torch.bfloat16
    return torch.float32


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


@contextmanager
def _in_memory() -> Iterator[None]:
    """Say what to do where a GPU's memory is too small."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"the GPU's memory is full ({str(error).partition('. ')[0]}): use --device cpu, or fewer or shorter "
            "windows (--samples, --seq-len)"
        ) from error


def _overwrite_weight(module: nn.Module, weight: Tensor) -> None:
    target = module.weight
    assert isinstance(target, Tensor)
    target.copy_(weight.T if isinstance(module, Conv1D) else weight)


def _stored(
    name: str, layout: LayerLayout, tensors: Mapping[str, Tensor], device: torch.device
) -> PackedWeight:
    """A layer's stored tensors among a shard's, as far as its layout reads them, on a device."""
    fields = layout.stored_tensors().items()
    return PackedWeight(
        layout, {f: tensors[f"{name}.{f}"][: shape[0]].to(device) for f, (_, shape) in fields}
    )


def _rounding_hook(packed: PackedWeight) -> Any:
    """A forward pre-hook that rounds a layer's inputs as the artifact will; keeps none of its codes."""
    small = {
        f: t
        for f, t in packed.tensors.items()
        if f.endswith(("act_clip", "act_scales", "cols", "input_scale"))
    }
    grids = PackedWeight(packed.layout, small)
    return lambda module, args: (round_inputs(args[0], grids), *args[1:])


def _calibration(streamed: StreamedModel, options: Options, source: str, report: Silent) -> CalibrationSet:
    """The windows that the run is calibrated on.

    Raises:
        InputError: windows longer than the model reaches, a tokenizer of another model, too little text.
    """
    checkpoint, limit = streamed.checkpoint, max_positions(streamed.model)
    if limit is not None and options.seq_len > limit:
        raise InputError(
            f"--seq-len {options.seq_len} is beyond the model's {limit} positions: choose at most {limit}"
        )
    report.say(f"tokenizing {source}")
    text = calibration_set(checkpoint.tokenizer(), source, options.windows, options.seq_len, options.seed)
    samples = len(text.tokens)
    if samples < options.windows:
        report.say(
            f"calibration text {source} has {samples} windows of {options.seq_len} tokens, not {options.windows}"
        )
    if int(text.tokens.max()) >= checkpoint.config.get_text_config().vocab_size:
        raise InputError(
            "the tokenizer has more tokens than the model's vocabulary: they do not belong together"
        )
    if options.epochs and samples < 2:
        raise InputError(
            f"calibration text {source} has one window of {options.seq_len} tokens, and finetuning needs another to "
            "stop by: give more text, or shorter windows (--seq-len)"
        )
    report.say(f"calibrates on {samples} x {options.seq_len} tokens of {source}")
    return text
