"""The driver: checkpoint in, artifact out.

`allocate` over the whole model, where a method does; then for each block `collect`, `quantize`, `tune`, `write`. What a
method does at each of these is in its file (`methods`): nothing here knows one by name.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from anybit.artifact.config_json import artifact_config, provenance
from anybit.artifact.files import resolved
from anybit.artifact.model_card import model_card
from anybit.artifact.sizes import inspect
from anybit.artifact.split import LOSSES, Cut, Split, split, written_planes
from anybit.artifact.writer import ArtifactWriter, check_output, finished_bytes
from anybit.calibration.as_stored import as_stored
from anybit.calibration.gradients import gradient_statistics, spilled_statistics
from anybit.calibration.moments import Activations, Collected, Collector
from anybit.calibration.stats import GradientStats, LinearStats
from anybit.calibration.streaming import BlockCall, earlier_objects_frozen, run_block
from anybit.calibration.texts import calibration_set
from anybit.config import MAX_SEED, Options
from anybit.cost import Cost
from anybit.errors import InputError, about_layer, enough_memory, refuse_unknown
from anybit.estimate import check_disk, scratch_bytes
from anybit.formats import Nested
from anybit.formats.dtypes import Dtype
from anybit.formats.layout import LayerLayout
from anybit.formats.weight import PackedWeight, QuantizedWeight, pack, unpack
from anybit.kernels.attention import QuickAttention
from anybit.methods import DEFAULT
from anybit.methods.end_to_end import JUDGED, OTHER_TEXT, TUNING_TOKENS, WINDOWS, Training, name_of, parted
from anybit.methods.finetune import Task, passes
from anybit.methods.method import Allocation, Search, Start
from anybit.methods.ordering import nested_layers, with_all_planes
from anybit.methods.rounding import quantize_rows
from anybit.plan import make_plan, plane_room
from anybit.prepare import Ready, Settings, prepare
from anybit.progress import Advance, ignore

# What to do where memory is full.
FULL = "use fewer or shorter windows (--samples, --seq-len), or another --device"


@dataclass(frozen=True)
class QuantizeResult:
    """What a run made."""

    path: Path
    bits: float  # average code width
    bits_per_weight: float  # bits per weight of the linear layers, in memory
    size_bytes: int  # all files but the tokenizer
    seconds: float  # wall time of this call
    resumed_shards: int  # shards found finished
    statistics: Cost | None = None  # of gathering shared statistics, in whichever runs
    taken_over: Cost | None = None  # of that, in earlier runs


def quantize(
    model: str | Path, out: str | Path, options: Options | None = None, **settings: Unpack[Settings]
) -> QuantizeResult:
    """Compress a model into an artifact directory.

    A killed or interrupted call leaves `OUT.partial`, and the same call again resumes it. On the CPU it ends in the
    same bytes. On a GPU it may not, where sums have no fixed order.

    Args:
        model: HF directory, hub id or `.gguf` file.
        out: directory to make.
        options: a method with its options, such as `anybit.GPTQ(bits=4)`; `anybit.AnyBit()` by default.
        settings: see `prepare.Settings`.

    Raises:
        InputError: anything about the input that cannot work, before work that would be lost.
        TypeError: a setting that there is not.
    """
    refuse_unknown(settings, Settings)
    if options is not None and not isinstance(options, Options):
        raise InputError(f"options are {options!r:.60}: expected options such as anybit.GPTQ(bits=4)")
    start = time.perf_counter()
    out, overwrite = resolved(Path(out)), settings.get("overwrite", False)
    check_output(out, overwrite)
    with enough_memory(FULL):
        ready = prepare(model, out, DEFAULT.options() if options is None else options, settings)
    folder, shards = ready.shared_statistics(settings.get("statistics")), len(ready.streamed.blocks) + 1
    with enough_memory(FULL), ArtifactWriter(out, ready.fingerprint, shards, overwrite, folder) as writer:
        resumed, earlier = len(writer.finished), writer.cost()
        if resumed:
            ready.report.say(f"resumes: {resumed} of {shards} shards are finished")
        run = _Run(**vars(ready), writer=writer, allocation=Allocation()).allocate()
        with earlier_objects_frozen(), QuickAttention():
            run.outside()
            run.all_blocks()
        cost = run.finish()
    figures = inspect(out)
    sizes = {name: figures[name] for name in ("bits", "bits_per_weight", "size_bytes")}
    seconds = time.perf_counter() - start
    return QuantizeResult(
        out, **sizes, seconds=seconds, resumed_shards=resumed, statistics=cost, taken_over=earlier
    )


@dataclass(frozen=True)
class _Run(Ready):
    """A run that writes."""

    writer: ArtifactWriter
    allocation: Allocation

    def allocate(self) -> _Run:
        """With what the method finds out over the whole model: once, then kept with the unfinished artifact."""
        layers = self.decided_on()
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
                specs=specs,
                layouts=planned,
                folder=self.writer.search(),
                vocabulary=bool(nested_layers(self.plan.embeddings)),
                report=self.report,
            )
        )
        self.streamed.model.to("meta")
        text = self.text
        if found.mixed is not None:
            text = replace(text, tokens=found.mixed.tokens, own_windows=found.mixed.own_windows)
        run = replace(self, allocation=found, text=text)
        if not found.specs:
            return run
        plan = make_plan(self.streamed, self.options, {**found.specs, **self.given})
        out = self.writer.out
        check_disk(plan, out, finished_bytes(out), scratch_bytes(self.streamed, plan, self.options))
        return replace(run, plan=plan)

    def outside(self) -> None:
        """Shard 0: everything outside the blocks."""
        if 0 in self.writer.finished:
            return
        tensors: dict[str, Tensor] = {}
        for name in self.streamed.tensor_names(None):
            layer = name.removesuffix(".weight")
            if layer in self.plan.embeddings:
                tensors |= self._embedded(layer, name)
            else:
                tensors[name] = self._kept(name)
        self.writer.write_shard(0, tensors)

    def _embedded(self, layer: str, name: str) -> dict[str, Tensor]:
        """What is stored of the embedding or the head `layer`, of whose weight the model's files say `name`."""
        layout, costs = self.plan.embeddings[layer], self.allocation.vocabulary
        weight = self.streamed.read(name)
        if self.options.embed_bits is not None:
            made = quantize_rows(weight, int(layout.tiles[0].bits))
        else:
            assert self.method.embed is not None
            assert costs is not None
            head = self.streamed.model.get_submodule(layer) is self.streamed.model.get_output_embeddings()
            mixed = self.allocation.mixed
            expected = None if mixed is None else mixed.expected
            cost = costs.cost(read=not head, multiplied=head or layout.tied, own=expected)
            with about_layer(layer):
                made = self.method.embed(weight.float().to(self.streamed.device), cost, self.options)
        packed = pack(made)
        tensors = {f"{layer}.{field}": t.cpu() for field, t in packed.tensors.items()}
        if made.losses is not None:
            tensors[f"{layer}.{LOSSES}"] = made.losses.cpu()
        return tensors

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
        tokens = self.text.tokens
        advance = self.report.task("gradients", len(tokens))
        folder = self.writer.begin_statistics()
        made = gradient_statistics(self.streamed, tokens, shapes, fisher=folder, advance=advance)
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
                layouts = self._layouts_after(linears, tensors)
                with as_stored(linears, layouts, tensors, self.streamed.device):
                    del tensors
                    self._forward(block, hidden, call, True, advance)

    def _layouts_after(
        self, linears: Iterable[str], tensors: Mapping[str, Tensor]
    ) -> Mapping[str, LayerLayout]:
        """How a block's layers are read for the sake of the blocks after it."""
        layouts = {name: self.plan.layouts[name] for name in linears}
        if self.method.running is None or not layouts:
            return layouts
        losses = {name: tensors[f"{name}.{LOSSES}"] for name in layouts}
        return self.method.running(self.options, layouts, losses)

    def _linears(self, i: int) -> dict[str, nn.Module]:
        """The layers of block i that are to be quantized."""
        return {n: m for n, m in self.streamed.linears(i).items() if n in self.plan.layouts}

    def _collector(self, linears: Mapping[str, nn.Module]) -> Collector:
        wanted = self.plan.statistics
        attention = wanted.hessian and wanted.attention
        found, whole = self.allocation, self.options.unquantized
        share = found.plain_share
        return Collector(linears, wanted.hessian, attention, wanted.inputs, found.tokens, whole, share)

    def _forward(
        self,
        block: nn.Module,
        hidden: Activations,
        call: BlockCall,
        keep: bool,  # let the outputs replace the inputs
        advance: Advance,
        collector: Collector | None = None,
    ) -> None:
        assert collector is None or collector.whole == keep
        for sample in range(len(hidden)):
            with suppress(Collected):
                output = run_block(block, hidden.get(sample), call)
                if keep:
                    hidden.put(sample, output)
            if collector is not None:
                collector.finish_forward()
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
                tensors[f"{name}.{LOSSES}"] = weight.losses.cpu()
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
        if dtype is Dtype.F16 and tensor.dtype != torch.float16 and tensor.abs().max() > 65504:
            dtype = Dtype.BF16
        return tensor.to(dtype.torch)

    def _cut(self) -> Cut:
        """How far the order of planes goes."""
        assert self.method.ordered is not None
        asked, beside = self.method.ordered(self.options), nested_layers(self.plan.embeddings).keys()
        if self.plan.most_bytes is None:
            return Cut(asked.bits, asked.whole, asked.coded, beside)
        return Cut(self.options.widths_of.high, asked.whole, asked.coded, beside, plane_room(self.plan))

    def _end_to_end(self) -> dict[str, Tensor]:
        """What training over the whole model makes of tensors, by name."""
        count, train = self.method.tuning(self.options), self.method.end_to_end
        if not count or train is None:
            return {}
        layouts, model = {**self.plan.layouts, **self.plan.embeddings}, self.streamed.model
        head = str(name_of(model, model.get_output_embeddings()))
        matrices = {name: (name, head) if layouts[name].tied else (name,) for name in nested_layers(layouts)}
        windows, held_out = self._tuning_windows(count)
        assert self.options.bits is not None
        with written_planes(self.writer, layouts) as planes:

            def tile(name: str) -> Nested:
                (made,) = unpack(planes.whole(name)).tiles
                assert isinstance(made, Nested)
                return made

            made = train(
                Training(
                    streamed=self.streamed,
                    tile=tile,
                    matrices=matrices,
                    steps=self._cut().order(planes),
                    highest=self.options.bits,
                    tokens=windows,
                    held_out=held_out,
                    count=count,
                    seed=self.options.seed,
                    folder=self.writer.tuning(),
                    report=self.report,
                )
            )
        model.to("meta")
        return {name: tensor.cpu() for name, tensor in made.items()}

    def _tuning_windows(self, count: int) -> tuple[Tensor, Tensor]:
        """Windows for so many steps of training, and windows to judge it by: of the same text, and of another."""
        assert self.text is not None
        tokenizer, length = self.streamed.checkpoint.tokenizer(), min(self.options.window, TUNING_TOKENS)
        wanted = count * WINDOWS
        seed = (self.options.seed + 1) % (MAX_SEED + 1)  # not those windows again that moments are made of
        own = calibration_set(tokenizer, self.text.source, wanted + JUDGED, length, seed).tokens
        training, held_out = (own[picked] for picked in parted(len(own), JUDGED))
        if self.text.source == OTHER_TEXT:
            return training, held_out
        other = calibration_set(tokenizer, OTHER_TEXT, JUDGED, length, seed).tokens
        return training, torch.cat([held_out, other])

    def finish(self) -> Cost | None:
        """Write what describes the artifact, and give it its name; what shared statistics took."""
        writer, checkpoint, plan, options = self.writer, self.streamed.checkpoint, self.plan, self.options
        parts: Split | None = None
        if self.method.ordered is not None:
            tuned = self._end_to_end()
            self.report.say("orders the planes and writes base layer and enhancement layers")
            parts = split(writer, {**plan.layouts, **plan.embeddings}, self._cut(), tuned)
            plan = plan.with_layouts(parts.layouts)
            if self.plan.most_bytes is not None:  # the width followed from them
                options = options.with_bits(max(parts.bits, options.widths_of.low))
        made = provenance(checkpoint, self.base, options, self.text.describe() if self.text else None)
        sizes = plan.sizes() if parts is None else parts.sizes(plan.sizes()[0])
        texts = {"README.md": model_card(checkpoint, plan, options, made, sizes)}
        checkpoint.copy_assets(writer.work)
        cost = writer.cost()
        described = artifact_config(self.streamed, plan, made)
        if parts is None:
            writer.finish(described, texts)
        else:
            described["quantization_config"] |= {"bits": parts.bits, **parts.stated}
            writer.finish(described, texts, parts.files, parts.section)
        return cost
