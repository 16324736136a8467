"""What a run will make, known before any work: layouts, exact tensor bytes, and estimates of time and memory."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, floor, prod
from pathlib import Path
from typing import Any

import torch

from anybit.artifact.contents import Plan
from anybit.artifact.predicted_size import overhead_bytes
from anybit.calibration.gradients import LOGIT_CHUNK
from anybit.calibration.moments import ACTIVATION_BUDGET
from anybit.calibration.own_texts import TOGETHER
from anybit.calibration.streaming import StreamedModel, selected
from anybit.config import EMBED_BITS, GROUP_SIZE, Json, LayerSpec, Options, SpecMap, parse_bytes
from anybit.errors import InputError, require_extra
from anybit.formats import GroupIntLayout
from anybit.formats.dtypes import Dtype
from anybit.formats.layout import LayerLayout
from anybit.formats.unquantized import UnquantizedLayout
from anybit.kernels.attention import multiplies_bfloat16
from anybit.kernels.dispatch import MOMENT_COLUMNS
from anybit.kv_cache import head_size, kv_numbers
from anybit.methods import METHODS, Method, end_to_end, finetune, nested_codes, ordering
from anybit.methods.anybit import BITS, OWN_TEXT_TOKENS
from anybit.methods.rtn import RTN

WIDER = 1  # bits that embeddings are expected to have more than layers
SPEED_SECONDS = 0.2  # in which the speed of this machine is measured
REACHED = 0.6  # of the rate of one product that is repeated, by those of a model
ATTENTION = 0.7  # of float32 products' rate, by PyTorch's attention
SWEPT = 0.7  # of the rate of the model's products, by those of errors with a block of columns
WEIGHTS = 2e7  # that are read, packed and written in a second
BUDGET_STEPS = 100  # a budget finds the average width to a hundredth of a bit
IMPORT_BYTES = 450_000_000  # PyTorch, Transformers and a tokenizer before any tensor is read


def make_plan(streamed: StreamedModel, options: Options, spec_map: SpecMap | None = None) -> Plan:
    """Decide what is stored how.

    Args:
        streamed: the model.
        options: none of them open.
        spec_map: layers whose specs are given.

    Raises:
        InputError: a spec that names no layer of the model, does not fit its matrix, or asks for a width that
            the method does not have; nothing left to quantize; options that an encoder has no use for.
    """
    if streamed.encoder:
        _check_for_encoder(streamed.model.config.model_type, options)
    shapes = streamed.all_linears()
    if not shapes:
        raise InputError(
            f"the blocks of {streamed.model.config.model_type} models have no nn.Linear or Conv1D, which "
            "are what anybit quantizes: this architecture is not supported yet"
        )
    spec_map = spec_map or {}
    for name in spec_map.keys() - shapes.keys():
        raise InputError(
            f"the spec names {name!r}, which is no linear layer of this model; e.g. {next(iter(shapes))!r} is"
        )
    for name, spec in spec_map.items():
        if type(spec.options) is not type(options):
            raise InputError(
                f"spec of {name}: its options are of {spec.options.name}, and the method is {options.name}: begin with "
                "the layer_spec() of the options that you give"
            )
    usual, method = options.layer_spec(), METHODS[options.name]
    if method.extra:
        require_extra(method.extra, f"the method {method.name}")
    specs = {
        name: spec_map.get(name, usual) for name in shapes if selected(name, options.include, options.exclude)
    }
    if not specs:
        raise InputError(
            "no linear layer is left to quantize: check --include and --exclude against `anybit plan MODEL`"
        )
    for name in spec_map.keys() & specs.keys():
        method.check_given(name, specs[name], usual)
    layouts = {name: spec_layout(name, spec, shapes[name], method) for name, spec in specs.items()}
    embeddings = _embedding_layouts(streamed, options, method)
    quantized = {f"{name}.weight" for name in [*layouts, *embeddings]}
    kept = {
        name: (stored_dtype(streamed.checkpoint.dtype(source), streamed.checkpoint.shape(source)), shape)
        for name, source in streamed.names.items()
        if name not in quantized
        for shape in [tuple(streamed.checkpoint.shape(source))]
    }
    total = sum(prod(streamed.checkpoint.shape(source)) for source in streamed.names.values())
    unquantized = {
        name: LayerLayout(shape, (UnquantizedLayout.of(kept[f"{name}.weight"][0]),))
        for name, shape in shapes.items()
        if name not in specs
    }
    linear = sum(prod(shape) for shape in shapes.values())
    plan = Plan(specs, layouts, embeddings, kept, linear, total, unquantized)
    if method.ordered is not None:
        most = ordering.most_bits(method.ordered(options).bits, layouts, embeddings)
        plan = replace(plan, enhancement_bytes=ordering.overhead_bytes(most, {**layouts, **embeddings}))
    return replace(plan, overhead_bytes=overhead_bytes(streamed, plan, options))


def _check_for_encoder(kind: str, options: Options) -> None:
    """Refuse what needs next tokens.

    Raises:
        InputError: a method on gradients of a language model's loss, or a KV-cache.
    """
    if not options.for_encoders:
        others = [name for name, method in METHODS.items() if method.options.for_encoders]
        raise InputError(
            f"{options.name} needs the loss of a language model, and {kind} is an encoder: choose "
            f"{', '.join(others[:-1])} or {others[-1]}"
        )
    if options.kv_bits != 16:
        raise InputError(
            f"--kv-bits {options.kv_bits}: {kind} is an encoder and has no KV-cache; leave it out"
        )


def fit_budget(streamed: StreamedModel, options: Options) -> Options:
    """The options, none left open, at the largest width within their budget of bits per weight or bytes, if any.

    Raises:
        InputError: the smallest width is too large.
    """
    if options.budget is None:
        return options.resolve()
    widths, bpw, size = options.widths_of, options.bpw, _most_bytes(options)
    plans: dict[float, Plan] = {}

    def fits(bits: float) -> bool:
        made = make_plan(streamed, options.with_bits(bits).resolve())
        made = plans[bits] = replace(made, embeddings=_expected(made.embeddings, bits))
        return (bpw is None or made.bits_per_weight <= bpw) and (
            size is None or _file_bytes(made, options) <= size
        )

    whole = next((bits for bits in reversed(widths.whole()) if fits(bits)), None)
    if whole is None and not (widths.fractional and fits(widths.low)):
        asked = f"{bpw:g} bits per weight" if bpw is not None else f"{(size or 0) / 1e6:g} MB"
        least = plans[min(plans)]
        raise InputError(
            f"{asked} is not to be had: {options.name} at its smallest width takes {least.bits_per_weight:.3f} bits "
            f"per weight, {_file_bytes(least, options) / 1e6:.1f} MB with the embedding{_said(options.embed_bits)} "
            "(see --embed-bits)"
        )
    best = float(widths.low if whole is None else whole)
    if widths.fractional and best < widths.high:
        low, high = 0, ceil((floor(best) + 1 - best) * BUDGET_STEPS)  # of the way to the next whole width
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(best + middle / BUDGET_STEPS) else (low, middle)
        best += low / BUDGET_STEPS
    best = max([best, *(bits for bits in widths.compact if bits > best and fits(bits))])
    return options.with_bits(best).resolve()


def plan_within(
    streamed: StreamedModel, options: Options, spec_map: SpecMap | None = None
) -> tuple[Options, Plan]:
    """The options, none left open, and the plan, within the options' budget.

    Where planes are in one order, what a size leaves for which of them is known when the order is: the width is an
    estimate, and the artifact is cut to the size.

    Raises:
        InputError: see `fit_budget` and `make_plan`.
    """
    fitted = fit_budget(streamed, options)
    plan = make_plan(streamed, fitted, spec_map)
    if METHODS[options.name].ordered is not None:
        plan = replace(plan, most_bytes=_most_bytes(options))
    return fitted, plan


def _file_bytes(plan: Plan, options: Options) -> int:
    """What a plan takes in files: at most, or where planes are coded, about."""
    ordered = METHODS[options.name].ordered
    if ordered is None or not ordered(options.resolve()).coded:
        return plan.size_bytes
    return plan.size_bytes - ordering.expected_saving({**plan.layouts, **plan.embeddings})


def plane_room(plan: Plan) -> int:
    """How many bytes of planes, of all nested matrices together, a plan of so many bytes has room for."""
    assert plan.most_bytes is not None
    both = {**plan.layouts, **plan.embeddings}
    nested = {name: both[name] for name in ordering.nested_layers(both)}
    fixed = plan.tensor_bytes - ordering.plane_bytes(nested) + plan.overhead_bytes
    weights = sum(layout.weights for layout in nested.values())
    highest = min(float(BITS), 8 * plan.most_bytes / weights)
    return plan.most_bytes - fixed - ordering.file_bytes(highest, len(nested))


def _most_bytes(options: Options) -> int | None:
    return parse_bytes(options.size) if isinstance(options.size, str) else options.size


def _expected(embeddings: Mapping[str, LayerLayout], bits: float) -> dict[str, LayerLayout]:
    """Embeddings as they are expected to be where layers have `bits` on average: a little wider."""
    made = dict(embeddings)
    for name in ordering.nested_layers(embeddings):
        whole = min(BITS, floor(bits) + WIDER)
        made[name] = ordering.with_counts(made[name], [made[name].shape[0]] * whole)
    return made


def _said(embed_bits: int | None) -> str:
    return "" if embed_bits is None else f" at {embed_bits} bits"


def spec_layout(name: str, spec: LayerSpec[Any], shape: tuple[int, int], method: Method) -> LayerLayout:
    """The stored layout that a spec leads to, the spec checked against the matrix [out, in]."""
    widths = method.options.widths_of
    for tile in spec.tiles:
        if tile.bits not in widths:
            raise InputError(
                f"spec of {name}: {method.name} has no {tile.bits}-bit width: choose {widths} bits"
            )
    try:
        return method.layout(spec, shape)
    except InputError as error:
        raise InputError(f"spec of {name}: {error}") from error


def stored_dtype(dtype: Dtype, shape: tuple[int, ...]) -> Dtype:
    """Dtype of a tensor that is not quantized: matrices take 16 bits, norms and biases stay as they are."""
    if dtype in (Dtype.F32, Dtype.F64) and len(shape) >= 2:
        return Dtype.F16
    return dtype


def estimate(streamed: StreamedModel, plan: Plan, options: Options, out: Path) -> Json:
    """Predicted figures of a run: bytes, bits per weight, seconds and peak memory (the last two roughly).

    `seconds` are those of a machine that does nothing else; `processor_share` says how much of its threads' time this
    process got while it measured the machine's speed.
    """
    free = shutil.disk_usage(next(p for p in [out, *out.absolute().parents] if p.exists())).free
    speeds, share = _speeds(streamed)
    return {
        "bits": plan.code_bits,
        "bits_per_weight": plan.bits_per_weight,
        "file_bits_per_weight": plan.file_bits_per_weight,
        "size_bytes": plan.size_bytes,
        "seconds": _seconds(streamed, plan, options, speeds),
        "processor_share": share,
        "peak_memory_bytes": _peak_memory(streamed, plan, options),
        "scratch_disk_bytes": scratch_bytes(plan, options),
        "free_disk_bytes": free,
    }


@dataclass(frozen=True)
class Speeds:
    """Floating-point operations per second that this machine reaches."""

    model: float  # by matrix products of the model, in the numbers that it computes in
    exact: float  # by those of float32


def _seconds(streamed: StreamedModel, plan: Plan, options: Options, speeds: Speeds) -> float:
    """Of blocks' forward and backward passes, moments and sweeps at this machine's speeds, and of what is clustered."""
    effort, wanted, shapes = METHODS[options.name].effort(options), plan.statistics, streamed.all_linears()
    blocks, threads = len(streamed.blocks), torch.get_num_threads()
    block_weights = plan.linear_weights / blocks
    tokens = options.windows * options.seq_len if wanted else 0
    forwards = 0.0 if wanted.fisher else 1.0 if options.unquantized else 2.0
    forwards += 2 * effort.passes  # as blocks are recomputed
    backwards = 2 * effort.passes  # for inputs and weights, counted in forwards
    nested = ordering.nested_layers(plan.embeddings)
    moments = sweep = factors = training = 0.0
    if wanted.hessian:
        widths = {shape[1] for shape in shapes.values()}
        moments = 1.5 * tokens * sum(n * (n + MOMENT_COLUMNS) for n in widths)
        matrices = [*shapes.values(), *(plan.embeddings[name].shape for name in nested)]
        sweep = 2.0 * sum(effort.sweeps * s[0] * s[1] ** 2 for s in matrices)
        factors = 2.0 * sum(s[1] ** 3 for s in matrices)
    if effort.epochs:
        forwards += 1 + effort.epochs
        backwards += 2 * effort.epochs
        steps = effort.epochs * options.windows / finetune.batch_size(options.windows, options.seq_len)
        training = finetune.STEP_SECONDS * steps * plan.quantized_weights / threads
    through, headed, decoded = end_to_end.work(METHODS[options.name].tuning(options), options.seq_len)
    tuning = 2 * (through * plan.linear_weights + headed * _head_weights(streamed))
    training += decoded * end_to_end.WRITE_SECONDS * plan.model_weights / threads
    multiplied = (forwards + backwards) * 2 * block_weights * tokens + moments
    attention = 2.0 * tokens * options.seq_len * _heads_width(streamed) * blocks
    bfloat16 = streamed.device.type == "cpu" and streamed.dtype == torch.bfloat16
    of_torch = ATTENTION * speeds.exact
    attended = attention * (
        forwards / (speeds.model if bfloat16 and multiplies_bfloat16() else of_torch) + backwards / of_torch
    )
    head = 4 * effort.passes * tokens * _head_weights(streamed)  # logits once, and their gradient
    weights = plan.quantized_weights + sum(plan.embeddings[name].weights for name in nested)
    clustering = (effort.clustering / threads + effort.serial) * weights
    of_model = (blocks * multiplied + head + tuning) / speeds.model
    swept = sweep / (SWEPT * speeds.model if bfloat16 and effort.rounded_sweeps else speeds.exact)
    others = (factors + 200 * plan.linear_weights) / speeds.exact + plan.model_weights / WEIGHTS
    return of_model + attended + swept + clustering + training + others


def _heads_width(streamed: StreamedModel) -> int:
    """Of the queries of all heads of a block together."""
    text = streamed.model.config.get_text_config()
    return head_size(text) * int(text.num_attention_heads)


def _head_weights(streamed: StreamedModel) -> int:
    """Of the matrix that makes logits."""
    text = streamed.model.config.get_text_config()
    return 0 if streamed.encoder else int(text.vocab_size * text.hidden_size)


def _written_bytes(tokens: int, config: Any, size: int) -> int:
    """Of keys and values while the model writes texts of so many tokens in all, in numbers of `size` bytes."""
    if not tokens:
        return 0
    return min(tokens, TOGETHER * OWN_TEXT_TOKENS) * kv_numbers(config) * size


def _peak_memory(streamed: StreamedModel, plan: Plan, options: Options) -> int:
    """Of the process: what is imported, a block and what is computed of it, hidden states."""
    effort, wanted, shapes = METHODS[options.name].effort(options), plan.statistics, streamed.all_linears()
    size, text = streamed.dtype.itemsize, streamed.model.config.get_text_config()
    block_weights = plan.linear_weights / len(streamed.blocks)
    tokens = options.windows * options.seq_len if wanted else 0
    activations = min(tokens * text.hidden_size * size, ACTIVATION_BUDGET)
    embedding = max(prod(streamed.checkpoint.shape(n)) for n in streamed.names.values()) * 4
    working = block_weights * size + max(prod(shape) for shape in shapes.values()) * 4 * 5
    if wanted.hessian:
        working += max(shape[1] for shape in shapes.values()) ** 2 * 4 * 5
    if (
        METHODS[options.name].ordered is not None
    ):  # moments by gradient and plain ones of a block; errors of all widths
        working += 2 * 4 * sum(shape[1] ** 2 for shape in shapes.values()) / len(streamed.blocks)
        working += 2 * 4 * min(nested_codes.CHUNK, BITS * max(prod(shape) for shape in shapes.values()))
    if effort.passes:
        logits = 3 * 4 * min(options.seq_len, LOGIT_CHUNK) * text.vocab_size  # float32 softmax, and gradients
        working += plan.model_weights * size + max(logits, _written_bytes(effort.written, text, size))
    if METHODS[options.name].tuning(options):  # all weights, their codes, the unquantized head
        chunk = 6 * 4 * min(options.seq_len, LOGIT_CHUNK) * text.vocab_size
        codes = end_to_end.BYTES_PER_WEIGHT * plan.model_weights
        working = max(working, plan.model_weights * size + codes + _head_weights(streamed) * size + chunk)
    if effort.epochs:
        working += block_weights * finetune.BYTES_PER_WEIGHT
        activations *= 2
    return int(IMPORT_BYTES + max(2 * embedding, working) + activations)


def scratch_bytes(plan: Plan, options: Options) -> int:
    """What a run keeps on disk until its end: float32 Fisher information, or all planes before they are split."""
    if METHODS[options.name].ordered is not None:
        return 2 * plan.quantized_weights + plan.tensor_bytes
    return 4 * plan.quantized_weights if plan.statistics.fisher else 0


def check_disk(plan: Plan, out: Path, done_bytes: int = 0, scratch_bytes: int = 0) -> None:
    """Refuse to begin what cannot be stored: the artifact, and what the run keeps on disk until its end.

    Raises:
        InputError: needed and free bytes.
    """
    place = next(p for p in [out, *out.absolute().parents] if p.exists())
    free, needed = shutil.disk_usage(place).free, plan.size_bytes - done_bytes
    needed += scratch_bytes
    if needed > free:
        raise InputError(
            f"{place} has {free / 1e6:.0f} MB free, the run needs {needed / 1e6:.0f} MB: make room"
        )


def _embedding_layouts(streamed: StreamedModel, options: Options, method: Method) -> dict[str, LayerLayout]:
    """Layouts of embedding and head: at `--embed-bits`, or as the method says where that is left open.

    A head that the checkpoint leaves out is tied.
    """
    bits = options.embed_bits
    layout_of = method.embedding_layout if bits is None else _rounded
    if bits == 16 or layout_of is None:
        return {}
    model = streamed.model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(m): n for n, m in model.named_modules()}
    layouts = {}
    for module in (embedding, head):
        name = names.get(id(module))
        if name is None or f"{name}.weight" not in streamed.names:
            continue
        out, columns = streamed.checkpoint.shape(streamed.names[f"{name}.weight"])
        layouts[name] = layout_of(options, (out, columns))
    first = names[id(embedding)]
    if first in layouts and head is not None and names[id(head)] not in layouts:
        layouts[first] = replace(layouts[first], tied=True)
    return layouts


def _rounded(options: Options, shape: tuple[int, int]) -> LayerLayout:
    """An embedding or a head at `--embed-bits`."""
    assert options.embed_bits is not None
    tile = GroupIntLayout(bits=options.embed_bits, group_size=GROUP_SIZE, symmetric=False)
    return LayerLayout(shape, (tile,))


def _speeds(streamed: StreamedModel) -> tuple[Speeds, float]:
    """This machine's, and the share of its threads' time that this process got."""
    exact, share = _matmul_speed(torch.float32)
    own = streamed.device.type == "cpu" and streamed.dtype != torch.float32
    return Speeds(_matmul_speed(streamed.dtype)[0] if own else exact, exact), share


def _matmul_speed(dtype: torch.dtype) -> tuple[float, float]:
    """This machine's GEMM from a few tenths of a second's work: floating-point operations per second that it would do
    if it did nothing else, by the quickest product, and the share of its threads' time that this process got.
    """
    a = torch.ones(768, 768, dtype=dtype)
    (a @ a).sum()
    seconds: list[float] = []
    start, begun = time.perf_counter(), time.process_time()
    while sum(seconds) < SPEED_SECONDS:
        before = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - before)
    got = (time.process_time() - begun) / torch.get_num_threads()
    return REACHED * 2 * 768**3 / min(seconds), min(1.0, got / (time.perf_counter() - start))


def widths_for_memory(
    streamed: StreamedModel, memory: int | None, group_size: int, symmetric: bool
) -> list[Json]:
    """Size of the artifact at each width, and whether it fits into `memory` bytes: the table of `anybit plan`."""
    rows = []
    for bits in range(2, 9):
        for embed_bits in EMBED_BITS[::-1]:
            options = RTN(bits=bits, embed_bits=embed_bits, group_size=group_size, symmetric=symmetric)
            plan = make_plan(streamed, options.resolve())
            rows.append(
                {
                    "bits": bits,
                    "embed_bits": embed_bits,
                    "bits_per_weight": plan.bits_per_weight,
                    "size_bytes": plan.size_bytes,
                    "fits": memory is None or plan.size_bytes <= memory,
                }
            )
    return rows
