"""The driver: checkpoint in, artifact out, one block at a time."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import anybit
from anybit import kernels
from anybit.artifact import split
from anybit.artifact.config_json import artifact_config, provenance
from anybit.artifact.contents import Plan
from anybit.artifact.model_card import Beside, model_card
from anybit.artifact.sizes import inspect
from anybit.artifact.writer import ArtifactWriter, check_output, finished_bytes
from anybit.calibration.gradients import gradient_statistics, spilled_statistics
from anybit.calibration.moments import Activations, Collector
from anybit.calibration.stats import GradientStats, LinearStats
from anybit.calibration.streaming import BlockCall, StreamedModel, run_block
from anybit.calibration.texts import CalibrationSet, calibration_set
from anybit.checkpoint.architectures import max_positions
from anybit.checkpoint.directory import Checkpoint, open_checkpoint
from anybit.config import LayerSpec, QuantizeConfig, SpecMap, TileSpec
from anybit.cost import Cost
from anybit.errors import InputError
from anybit.formats import GroupInt
from anybit.formats.layout import stored_bytes, stored_tensors
from anybit.formats.weight import PackedWeight, QuantizedWeight, pack, unpack
from anybit.kernels.dispatch import check_device
from anybit.kernels.reference import round_inputs, rounds_inputs
from anybit.methods import anybit as nested
from anybit.methods import finetune, llm_mq, mixllm, ordering, registry, rtn, sensitivity, two_four_sixteen
from anybit.plan import check_disk, make_plan, scratch_bytes
from anybit.progress import SILENT, Advance, Silent, ignore

EMBED_ROWS = 4096  # rows of an embedding that are quantized at a time


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


def quantize(  # noqa: PLR0913, PLR0915 - mirrors the command's options
    model: str | Path,
    out: str | Path,
    config: QuantizeConfig | None = None,
    *,
    calibration: str = "builtin",
    spec_map: SpecMap | None = None,
    overwrite: bool = False,
    statistics: Path | None = None,
    device: str = "cpu",
    report: Silent = SILENT,
) -> QuantizeResult:
    """Compress a model into an artifact directory.

    A killed or interrupted call leaves `OUT.partial`; the same call again resumes it and ends in the same bytes.

    Args:
        model: HF directory, hub id or `.gguf` file.
        out: directory to make.
        config: method and options; `QuantizeConfig()` by default.
        calibration: "builtin", a `.txt` or `.jsonl` file, or a hub dataset.
        spec_map: `{layer name: LayerSpec}` that overrides `config` layer by layer.
        overwrite: replace an artifact at `out`.
        statistics: folder where gradients of the unquantized model stay for other runs on the same model and text, one
            run at a time. Without it every run gathers its own.
        device: "cpu" or "cuda": where calibration runs, its statistics are summed and matrices are quantized. Devices
            round and sum differently, so the bytes are not the same (docs/architecture.md has by how much).
        report: where progress goes.

    Raises:
        InputError: anything about the input that cannot work, before work that would be lost.
    """
    start = time.perf_counter()
    config, out = config or QuantizeConfig(), Path(out)
    check_output(out, overwrite)
    _check_device(device)
    checkpoint = open_checkpoint(model)
    streamed = StreamedModel(checkpoint, compute_dtype(device), device)
    plan = make_plan(streamed, config, spec_map)
    check_disk(plan, out, finished_bytes(out), scratch_bytes(plan, config))
    for note in checkpoint.notes():
        report.say(note)
    report.say(plan.coverage())
    if warning := plan.warning(config.method):
        report.say(f"warning: {warning}")
    if left_out := streamed.left_out():
        report.say(
            f"{len(left_out)} tensors of the checkpoint have no place in this model and are left out, "
            f"such as {left_out[0]}"
        )
    calibrated = config.calibrated or plan.input_stats
    if calibrated:
        streamed.check_structure()
    text = _calibration(streamed, config, calibration, report) if calibrated else None
    streamed.check_weights(report.task("checking the weights", len(streamed.names)))
    base_hash = _hash(checkpoint, report)
    fingerprint = _fingerprint(base_hash, config, plan, text, _arithmetic(streamed))
    shared = None
    if statistics is not None and (config.gradients or sensitivity.passes(config)):
        assert text is not None
        searched = plan.layouts.keys() - (spec_map or {}).keys() if config.searches else plan.layouts
        layers = [name for name in plan.layouts if name in searched]
        shared = statistics / _statistics_key(base_hash, config, plan, layers, text, _arithmetic(streamed))
    blocks = len(streamed.blocks)
    with _in_memory(), ArtifactWriter(out, fingerprint, blocks + 1, overwrite, shared) as writer:
        resumed, earlier = len(writer.finished), writer.cost()
        if resumed:
            report.say(f"resumes: {resumed} of {writer.shards} shards are finished")
        if config.searches and text is not None:
            plan = _search(streamed, plan, config, spec_map or {}, text, writer, report)
            check_disk(plan, out, finished_bytes(out), scratch_bytes(plan, config))
        unfinished = len(writer.finished) < writer.shards
        searches = config.progressive and unfinished and text is not None
        worth = sensitivity.Worth({}, {})
        if searches and text is not None:
            worth = _find_worth(streamed, plan, config, text, writer, report)
        run = _Run(streamed, plan, config, writer, report, worth)
        run.outside()
        run.all_blocks(text)
        made = provenance(checkpoint, base_hash, config, text.describe() if text else None)
        refined: split.Cut | None = None
        if config.progressive:
            report.say("orders the planes and writes core and refinements")
            refined = split.cut(
                writer, plan.layouts, float(config.bits or ordering.BITS), config.whole_layers
            )
            plan = replace(plan, layouts=refined.layouts, refinement_bytes=0)
        beside = Beside(refined.bits, refined.file_bytes) if refined and refined.files else None
        texts = {"README.md": model_card(checkpoint, plan, made, beside)}
        checkpoint.copy_assets(writer.work)
        cost = writer.cost()
        described = artifact_config(streamed, plan, made)
        if refined is None:
            writer.finish(described, texts)
        else:
            described["quantization_config"] |= {"bits": refined.bits, **refined.core}
            writer.finish(described, texts, refined.files, refined.section)
    figures = inspect(out)
    seconds = time.perf_counter() - start
    return QuantizeResult(
        path=out,
        bits=figures["bits"],
        bits_per_weight=figures["bits_per_weight"],
        size_bytes=figures["size_bytes"],
        seconds=seconds,
        resumed_shards=resumed,
        statistics=cost,
        taken_over=earlier,
    )


def _search(
    streamed: StreamedModel,
    plan: Plan,
    config: QuantizeConfig,
    spec_map: SpecMap,
    text: CalibrationSet,
    writer: ArtifactWriter,
    report: Silent,
) -> Plan:
    """The plan with the widths that a search chooses: once, then kept with the unfinished artifact. Specs go first."""
    shapes = {n: tuple(x["shape"]) for n, x in plan.layouts.items() if n not in spec_map}
    if not shapes:
        return plan
    if config.method == "llm-mq":
        stored = {n: llm_mq.stored_sizes(plan.specs[n], (shape[0], shape[1])) for n, shape in shapes.items()}
        limit = sum(stored_bytes(plan.layouts[n]) for n in shapes)
        widths = sensitivity.layer_widths(
            streamed, text.tokens, shapes, config, stored, limit, writer.search(), report
        )
        found = {n: llm_mq.with_width(plan.specs[n], bits) for n, bits in widths.items()}
    else:
        rows = sensitivity.search(streamed, text.tokens, shapes, config, writer.search(), report)
        found = {n: mixllm.with_rows(plan.specs[n], rows[n], shapes[n][0]) for n in rows}
    streamed.model.to("meta")
    return make_plan(streamed, config, {**found, **spec_map})


def _find_worth(
    streamed: StreamedModel,
    plan: Plan,
    config: QuantizeConfig,
    text: CalibrationSet,
    writer: ArtifactWriter,
    report: Silent,
) -> sensitivity.Worth:
    """What the gradients say of every layer: once, then kept with the unfinished artifact."""
    shapes = {name: (x["shape"][0], x["shape"][1]) for name, x in plan.layouts.items()}
    if config.salience in (None, "output"):
        found = sensitivity.output_moments(streamed, text.tokens, shapes, writer.search(), report)
    else:
        found = sensitivity.width_scores(
            streamed, text.tokens, shapes, config.salience, writer.search(), report
        )
    streamed.model.to("meta")
    return found


@dataclass(frozen=True)
class _Run:
    """The pieces that every step of one run needs."""

    streamed: StreamedModel
    plan: Plan
    config: QuantizeConfig
    writer: ArtifactWriter
    report: Silent
    worth: sensitivity.Worth

    def outside(self) -> None:
        """Shard 0: everything outside the blocks."""
        if 0 in self.writer.finished:
            return
        tensors: dict[str, Tensor] = {}
        for name in self.streamed.tensor_names(None):
            layer = name.removesuffix(".weight")
            if layer in self.plan.embeddings:
                packed = pack(
                    quantize_rows(self.streamed.read(name), self.plan.embeddings[layer]["tiles"][0]["bits"])
                )
                tensors |= {f"{layer}.{field}": t for field, t in packed.tensors.items()}
            else:
                tensors[name] = self._kept(name)
        self.writer.write_shard(0, tensors)

    def all_blocks(self, text: CalibrationSet | None) -> None:
        """Shards 1..n: statistics, quantization and the way to the next block."""
        blocks = len(self.streamed.blocks)
        if len(self.writer.finished) == self.writer.shards:
            return
        if self.config.gradients:
            assert text is not None
            self._all_from_gradients(text)
            return
        samples = 0 if text is None else len(text.tokens)
        passes = samples * (blocks if self.config.unquantized_inputs else 2 * blocks - 1)
        if self.config.finetune:
            passes += blocks * (samples + finetune.passes(samples, self.config.finetune_epochs))
        advance = self.report.task(f"{self.config.method} {blocks} blocks", passes + len(self.plan.layouts))
        hidden, targets, calls = None, None, []
        if text is not None:
            hidden = Activations(samples, self.writer.folder, device=self.streamed.device)
            calls = self.streamed.first_inputs(text.tokens, hidden.put)
        if hidden is not None and self.config.finetune:
            targets = Activations(samples, self.writer.folder, device=self.streamed.device)
            for sample in range(samples):
                targets.put(sample, hidden.get(sample))
        for i in range(blocks):
            self._block(i, hidden, targets, calls[i] if calls else None, advance)

    def _all_from_gradients(self, text: CalibrationSet) -> None:
        """Statistics of the whole model first, then block after block."""
        folder = self.writer.statistics()
        shapes = {
            name: (layout["shape"][0], layout["shape"][1]) for name, layout in self.plan.layouts.items()
        }
        found = spilled_statistics(shapes, folder) if self.writer.has_statistics() else None
        if found is not None:
            self.report.say("resumes: the gradients are there")
            stats = found
        else:
            begun = Cost.clock()
            folder.mkdir(parents=True, exist_ok=True)
            advance = self.report.task("gradients", len(text.tokens))
            stats = gradient_statistics(
                self.streamed, text.tokens, shapes, fisher=True, spill=folder, advance=advance
            )
            self.streamed.model.to("meta")
            self.writer.keep_statistics(Cost.since(begun))
        advance = self.report.task(
            f"{self.config.method} {len(self.streamed.blocks)} blocks", len(self.plan.layouts)
        )
        for i in range(len(self.streamed.blocks)):
            linears = self._linears(i)
            if i + 1 in self.writer.finished:
                advance(len(linears))
            else:
                self._quantize_block(i, linears, stats, advance)

    def _block(
        self,
        i: int,
        hidden: Activations | None,  # of the model as quantized so far
        targets: Activations | None,  # of the unquantized model, where finetuning needs them
        call: BlockCall | None,
        advance: Advance,
    ) -> None:
        """Quantize block i (or read it back if it is finished) and move the hidden states past it."""
        finished = i + 1 in self.writer.finished
        last = i + 1 == len(self.streamed.blocks)
        linears = self._linears(i)
        if hidden is None or call is None:
            if not finished:
                self._quantize_block(i, linears, {}, None)
            advance(len(linears))
            return
        with self.streamed.block(i) as block, torch.no_grad():
            if targets is not None:
                self._forward(block, targets, call, True, advance)
            if not finished:
                with self._collector(linears) as collector:
                    self._forward(block, hidden, call, self.config.unquantized_inputs, advance, collector)
                task = None if targets is None else finetune.Task(block, call, hidden, targets)
                tensors = self._quantize_block(i, linears, collector.stats, advance, task)
            else:
                tensors = self.writer.read_shard(i + 1)
                advance(len(linears) + (0 if self.config.unquantized_inputs else len(hidden)))
                if self.config.unquantized_inputs:
                    self._forward(block, hidden, call, True, advance)
                if targets is not None:
                    advance(finetune.passes(len(hidden), self.config.finetune_epochs))
            if not self.config.unquantized_inputs and not last:
                hooks, packed = [], None
                for name, layout in self._layouts_after(linears, tensors).items():
                    module, packed = linears[name], _stored(name, layout, tensors, self.streamed.device)
                    _overwrite_weight(module, unpack(packed).dequantize())
                    if rounds_inputs(packed.layout):
                        hooks.append(module.register_forward_pre_hook(_rounding_hook(packed)))
                del tensors, packed
                self._forward(block, hidden, call, True, advance)
                for hook in hooks:
                    hook.remove()

    def _layouts_after(
        self, linears: Iterable[str], tensors: Mapping[str, Tensor]
    ) -> Mapping[str, dict[str, Any]]:
        """How a block's layers are read for the sake of the blocks after it: nested ones at the tuned width."""
        layouts = {name: self.plan.layouts[name] for name in linears}
        if not self.config.progressive or not layouts:
            return layouts
        losses = {name: tensors[f"{name}.{split.LOSSES}"] for name in linears}
        bits = min(self.config.tune_for, self.config.bits or ordering.BITS)
        return ordering.at_average(layouts, losses, bits, self.config.whole_layers)

    def _linears(self, i: int) -> dict[str, nn.Module]:
        """The layers of block i that are to be quantized."""
        return {n: m for n, m in self.streamed.linears(i).items() if n in self.plan.layouts}

    def _collector(self, linears: Mapping[str, nn.Module]) -> Collector:
        hessian = self.config.hessians or any(spec.compensate for spec in self.plan.specs.values())
        attention = hessian and self.config.attention_weights
        inputs = self.config.input_stats or self.plan.input_stats
        return Collector(linears, hessian, attention, inputs, self.worth.tokens)

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
        advance: Advance | None,
        task: finetune.Task | None = None,
    ) -> dict[str, Tensor]:
        """Quantize block i's linears, finetune them if there is a task, write the shard and return its tensors."""
        for name in linears:
            if name in stats:
                stats[name].check(name)
            elif self.config.calibrated:
                raise InputError(
                    f"{name} is not called as a layer by its block, so it has no statistics: "
                    f"{self.streamed.model.config.model_type} models cannot be calibrated yet; choose --method rtn, "
                    "or leave the layer out with --exclude"
                )
        tensors: dict[str, Tensor] = {}
        made: Iterable[tuple[str, QuantizedWeight]] = (
            (name, self._quantized(name, stats.get(name), tensors)) for name in linears
        )  # one at a time
        if task is not None:
            made = self._finetuned(i, linears, stats, task, advance)
        for name, weight in made:
            packed = pack(weight)
            assert self.config.progressive or packed.layout == self.plan.layouts[name], (
                f"{name}: made another layout than planned"
            )
            tensors |= {f"{name}.{field}": t.cpu() for field, t in packed.tensors.items()}
            if advance is not None:
                advance(1)
        quantized = {f"{name}.weight" for name in linears}
        for name in self.streamed.tensor_names(i):
            if name not in quantized:
                tensors[name] = self._kept(name)
        self.writer.write_shard(i + 1, tensors)
        return tensors

    def _quantized(
        self, name: str, stats: LinearStats | GradientStats | None, beside: dict[str, Tensor]
    ) -> QuantizedWeight:
        """A layer's weight; what is to be stored beside it until the end is put into `beside`."""
        with _named(name):
            if self.config.progressive:
                weight, spec = self.streamed.weight(name), self.plan.specs[name]
                assert isinstance(stats, LinearStats)
                made = nested.compress(weight, stats, spec, self.worth.outputs[name])
                beside[f"{name}.{split.LOSSES}"] = made.losses.cpu()
                return QuantizedWeight((weight.shape[0], weight.shape[1]), (made.tile,))
            return registry.quantize(
                self.config.method, self.streamed.weight(name), stats, self.plan.specs[name]
            )

    def _finetuned(
        self,
        i: int,
        linears: Iterable[str],
        stats: Mapping[str, Any],
        task: finetune.Task,
        advance: Advance | None,
    ) -> Iterator[tuple[str, QuantizedWeight]]:
        """Block i's linears by name, quantized and then trained together."""
        prefix, trainable = self.streamed.block_name(i) + ".", {}
        for name in linears:
            with _named(name):
                start = two_four_sixteen.compensate(
                    self.streamed.weight(name), stats[name], self.plan.specs[name]
                )
            trainable[name.removeprefix(prefix)] = finetune.Trainable(*start)
        made, errors = finetune.finetune(
            task, trainable, self.config.finetune_epochs, self.config.seed, advance or ignore
        )
        if errors:
            self.report.say(
                f"block {i}: finetuning takes the error on held-out windows from {errors[0]:.4g} to {min(errors):.4g} "
                f"({len(errors) - 1} epochs)"
            )
        return ((prefix + name, weight) for name, weight in made.items())

    def _kept(self, name: str) -> Tensor:
        """A tensor that is stored without quantization."""
        tensor, (dtype, _) = self.streamed.read(name), self.plan.kept[name]
        if dtype == torch.float16 and tensor.dtype != torch.float16 and tensor.abs().max() > 65504:
            dtype = torch.bfloat16
        return tensor.to(dtype)


def quantize_rows(weight: Tensor, bits: int) -> QuantizedWeight:
    """Round an embedding [vocabulary, hidden] to nearest, some rows at a time so that memory stays bounded."""
    spec = LayerSpec(tiles=(TileSpec(bits),))
    parts = [rtn.quantize(rows.float(), None, spec).tiles[0] for rows in weight.split(EMBED_ROWS)]
    tiles = [part for part in parts if isinstance(part, GroupInt)]
    tile = GroupInt(
        bits=bits,
        group_size=tiles[0].group_size,
        codes=torch.cat([t.codes for t in tiles]),
        scales=torch.cat([t.scales for t in tiles]),
        zeros=torch.cat([t.zeros for t in tiles if t.zeros is not None]),
    )
    return QuantizedWeight((weight.shape[0], weight.shape[1]), (tile,))


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
        InputError: see `model.check_device`; no Triton, or sums of moments that would be rounded to TF32.
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


@contextmanager
def _named(layer: str) -> Iterator[None]:
    """Say of which layer an error speaks."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{layer}: {error}") from error


def _overwrite_weight(module: nn.Module, weight: Tensor) -> None:
    target = module.weight
    assert isinstance(target, Tensor)
    target.copy_(weight.T if isinstance(module, Conv1D) else weight)


def _stored(
    name: str, layout: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device
) -> PackedWeight:
    """A layer's stored tensors among a shard's, as far as its layout reads them, on a device."""
    fields = stored_tensors(layout).items()
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


def _calibration(
    streamed: StreamedModel, config: QuantizeConfig, source: str, report: Silent
) -> CalibrationSet:
    checkpoint = streamed.checkpoint
    limit = max_positions(streamed.model)
    if limit is not None and config.seq_len > limit:
        raise InputError(
            f"--seq-len {config.seq_len} is beyond the model's {limit} positions: choose at most {limit}"
        )
    report.say(f"tokenizing {source}")
    text = calibration_set(checkpoint.tokenizer(), source, config.samples, config.seq_len, config.seed)
    samples = len(text.tokens)
    if samples < config.samples:
        report.say(
            f"calibration text {source} has {samples} windows of {config.seq_len} tokens, not {config.samples}"
        )
    if int(text.tokens.max()) >= checkpoint.config.get_text_config().vocab_size:
        raise InputError(
            "the tokenizer has more tokens than the model's vocabulary: they do not belong together"
        )
    if config.finetune and samples < 2:
        raise InputError(
            f"calibration text {source} has one window of {config.seq_len} tokens, and finetuning needs another to "
            "stop by: give more text, or shorter windows (--seq-len)"
        )
    report.say(f"calibrates on {samples} x {config.seq_len} tokens of {source}")
    return text


def _hash(checkpoint: Checkpoint, report: Silent) -> str:
    config = 0 if checkpoint.gguf else (checkpoint.path / "config.json").stat().st_size
    return checkpoint.sha256(report.task("hashing the checkpoint", checkpoint.weight_bytes() + config))


def _statistics_key(
    base_hash: str,
    config: QuantizeConfig,
    plan: Plan,
    layers: Iterable[str],
    text: CalibrationSet,
    arithmetic: list[str],
) -> str:
    """A name for everything that gradient statistics depend on, but for the width that they are to choose."""
    search: tuple[str, ...] = ("salience", "search", "group_size") if config.searches else ()
    search = ("salience",) if config.progressive else search
    by_rows = config.searches and config.wide_rows is not None
    parts = {
        "base": base_hash,
        "tokens": hashlib.sha256(text.tokens.numpy().tobytes()).hexdigest(),
        "shapes": {name: plan.layouts[name]["shape"] for name in layers},
        "search": [config.method, by_rows, *(getattr(config, name) for name in search)] if search else [],
        "made by": [anybit.__version__, torch.__version__, *arithmetic, torch.get_num_threads()],
    }
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _arithmetic(streamed: StreamedModel) -> list[str]:
    """What computes, and in what: another device sums in another order."""
    if streamed.device.type == "cpu":
        return [str(streamed.dtype), kernels.info()["cpu"]["isa"]]
    return [str(streamed.dtype), str(streamed.device), torch.cuda.get_device_name(streamed.device)]


def _fingerprint(
    base_hash: str, config: QuantizeConfig, plan: Plan, text: CalibrationSet | None, arithmetic: list[str]
) -> str:
    """SHA-256 of everything that the artifact's bytes depend on."""
    parts = {
        "anybit": anybit.__version__,
        "base": base_hash,
        "config": config.as_dict(),
        "specs": {name: repr(spec) for name, spec in plan.specs.items()},
        "text": text.describe() if text else None,
        "tokens": hashlib.sha256(text.tokens.numpy().tobytes()).hexdigest() if text else None,
        "libraries": [torch.__version__, transformers.__version__],
        "compute": arithmetic,
        "threads": torch.get_num_threads(),  # the order of float sums, hence the bytes, depends on it
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
