"""What a run will take: seconds, memory, and disk."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch

from anybit.artifact.contents import Plan
from anybit.calibration.gradients import LOGIT_CHUNK
from anybit.calibration.moments import ACTIVATION_BUDGET
from anybit.calibration.own_texts import TOGETHER
from anybit.calibration.stats import SAMPLED as INPUTS_SAMPLED
from anybit.calibration.streaming import StreamedModel
from anybit.config import Json, Options
from anybit.engine.pages import free_memory
from anybit.errors import InputError
from anybit.kernels.attention import multiplies_bfloat16
from anybit.kernels.dispatch import MOMENT_COLUMNS
from anybit.kv_cache import head_size, kv_numbers
from anybit.methods import METHODS, end_to_end, finetune, nested_codes, ordering
from anybit.methods.anybit import BITS, OWN_TEXT_TOKENS
from anybit.methods.scaling import ALPHAS as SCALING_CANDIDATES
from anybit.methods.sensitivity import SAMPLES_KEPT

SPEED_SECONDS = 0.2  # in which the speed of this machine is measured
REACHED = 0.6  # of the rate of one product that is repeated, by those of a model
ATTENTION = 0.7  # of float32 products' rate, by PyTorch's attention
SWEPT = 0.7  # of the rate of the model's products, by those of errors with a block of columns
ROUNDING_SECONDS = 2e-8  # of a thread, in which a weight is rounded, as one of many
WEIGHTS = 2e7  # that are read, packed and written in a second
IMPORT_BYTES = 450_000_000  # PyTorch, Transformers and a tokenizer before any tensor is read


def estimate(streamed: StreamedModel, plan: Plan, options: Options, out: Path) -> Json:
    """Predicted figures of a run: bytes, bits per weight, seconds and peak memory (the last two roughly).

    `seconds` are those of a machine that does nothing else. `processor_share` says how much of its threads' time this
    process got while it measured the machine's speed. Of a GPU nothing is measured: both are None.
    """
    free = shutil.disk_usage(next(p for p in [out, *out.absolute().parents] if p.exists())).free
    seconds, share = None, None
    if streamed.device.type == "cpu":
        speeds, share = _speeds(streamed)
        seconds = _seconds(streamed, plan, options, speeds)
    return {
        "bits": plan.code_bits,
        "bits_per_weight": plan.bits_per_weight,
        "file_bits_per_weight": plan.file_bits_per_weight,
        "size_bytes": plan.size_bytes,
        "seconds": seconds,
        "processor_share": share,
        "peak_memory_bytes": peak_memory(streamed, plan, options),
        "free_memory_bytes": free_memory(),
        "scratch_disk_bytes": scratch_bytes(streamed, plan, options),
        "free_disk_bytes": free,
    }


@dataclass(frozen=True)
class Speeds:
    """Floating-point operations per second that this machine reaches."""

    model: float  # by matrix products of the model, in the numbers that it computes in
    exact: float  # by those of float32


def _seconds(streamed: StreamedModel, plan: Plan, options: Options, speeds: Speeds) -> float:
    """Of blocks' forward and backward passes, moments and sweeps at this machine's speeds, and of what is clustered."""
    work, wanted, shapes = METHODS[options.name].work(options), plan.statistics, streamed.all_linears()
    blocks, threads = len(streamed.blocks), torch.get_num_threads()
    block_weights = plan.linear_weights / blocks
    tokens = options.windows * options.window if wanted else 0
    forwards = 0.0 if wanted.fisher else 1.0 if options.unquantized else 2.0
    forwards += 2 * work.passes  # as blocks are recomputed
    backwards = 2 * work.passes  # for inputs and weights, counted in forwards
    nested = ordering.nested_layers(plan.embeddings)
    moments = sweep = factors = training = 0.0
    if wanted.hessian:
        widths = {shape[1] for shape in shapes.values()}
        moments = 1.5 * tokens * sum(n * (n + MOMENT_COLUMNS) for n in widths)
        matrices = [*shapes.values(), *(plan.embeddings[name].shape for name in nested)]
        sweep = 2.0 * sum(work.sweeps * s[0] * s[1] ** 2 for s in matrices)
        factors = 2.0 * sum(s[1] ** 3 for s in matrices)
    if work.epochs:
        forwards += 1 + work.epochs
        backwards += 2 * work.epochs
        steps = work.epochs * options.windows / finetune.batch_size(options.windows, options.window)
        training = finetune.STEP_SECONDS * steps * plan.quantized_weights / threads
    through, headed, decoded = end_to_end.work(METHODS[options.name].tuning(options), options.window)
    tuning = 2 * (through * plan.linear_weights + headed * _head_weights(streamed))
    training += decoded * end_to_end.WRITE_SECONDS * plan.model_weights / threads
    multiplied = (forwards + backwards) * 2 * block_weights * tokens + moments
    attention = 2.0 * tokens * options.window * _heads_width(streamed) * blocks
    bfloat16 = streamed.dtype == torch.bfloat16
    of_torch = ATTENTION * speeds.exact
    attended = attention * (
        forwards / (speeds.model if bfloat16 and multiplies_bfloat16() else of_torch) + backwards / of_torch
    )
    head = 4 * work.passes * tokens * _head_weights(streamed)  # logits once, and their gradient
    weights = plan.quantized_weights + sum(plan.embeddings[name].weights for name in nested)
    clustering = (work.clustering / threads + work.serial) * weights
    of_model = (blocks * multiplied + head + tuning) / speeds.model
    swept = sweep / (SWEPT * speeds.model if bfloat16 and work.rounded_sweeps else speeds.exact)
    others = (factors + 200 * plan.linear_weights) / speeds.exact + plan.model_weights / WEIGHTS
    scaling = _scaling_seconds(plan, options, speeds) if work.scaled else 0.0
    return of_model + attended + swept + clustering + scaling + training + others


def _scaling_seconds(plan: Plan, options: Any, speeds: Speeds) -> float:
    """Of the search for factors of input channels: with every candidate, weights are rounded and their errors judged.

    The judge is a sample of inputs where these are rounded, too, and else a matrix of second moments.
    """
    sample = INPUTS_SAMPLED * options.windows if options.act_bits < 16 else 0
    shapes = [layout.shape for layout in plan.layouts.values()]
    judged = sum(2.0 * out * columns * (sample or columns) for out, columns in shapes) / speeds.exact
    rounded = ROUNDING_SECONDS * plan.quantized_weights / torch.get_num_threads()
    return len(SCALING_CANDIDATES) * (judged + rounded)


def _heads_width(streamed: StreamedModel) -> int:
    """Of the queries of all heads of a block together."""
    text = streamed.model.config.get_text_config()
    heads = getattr(text, "num_attention_heads", 0)
    return head_size(text) * int(heads) if heads else 0


def _head_weights(streamed: StreamedModel) -> int:
    """Of the matrix that makes logits."""
    text = streamed.model.config.get_text_config()
    return 0 if streamed.encoder else int(text.vocab_size * text.hidden_size)


def _written_bytes(tokens: int, config: Any, size: int) -> int:
    """Of what the model has while it writes texts of so many tokens in all, in numbers of `size` bytes.

    That is keys and values, and for each text logits, their softmax in float32, and its sums in float64.
    """
    if not tokens:
        return 0
    keys = kv_numbers(config) if getattr(config, "num_attention_heads", 0) else 0
    together = min(tokens, TOGETHER * OWN_TEXT_TOKENS)
    return together * keys * size + ceil(together / OWN_TEXT_TOKENS) * config.vocab_size * (size + 4 + 8)


def peak_memory(streamed: StreamedModel, plan: Plan, options: Options) -> int:
    """Of the process: what is imported, a block and what is computed of it, hidden states."""
    work, wanted, shapes = METHODS[options.name].work(options), plan.statistics, streamed.all_linears()
    size, text = streamed.dtype.itemsize, streamed.model.config.get_text_config()
    block_weights = plan.linear_weights / len(streamed.blocks)
    activations = min(_hidden_bytes(streamed, plan, options), ACTIVATION_BUDGET)
    embedding = max(prod(streamed.checkpoint.shape(n)) for n in streamed.names.values()) * 4
    working = block_weights * size + max(prod(shape) for shape in shapes.values()) * 4 * 5
    if wanted.hessian:
        working += max(shape[1] for shape in shapes.values()) ** 2 * 4 * 5
    if METHODS[options.name].ordered is not None:
        # Moments by gradient and plain ones of a block; errors of all widths.
        working += 2 * 4 * sum(shape[1] ** 2 for shape in shapes.values()) / len(streamed.blocks)
        working += 2 * 4 * min(nested_codes.CHUNK, BITS * max(prod(shape) for shape in shapes.values()))
    if wanted.fisher:  # in files that are mapped
        working += 4 * plan.quantized_weights
    if work.passes:
        logits = 3 * 4 * min(options.window, LOGIT_CHUNK) * text.vocab_size  # float32 softmax, and gradients
        working += plan.model_weights * size + max(logits, _written_bytes(work.written, text, size))
    if METHODS[options.name].tuning(options):  # all weights, their codes, the unquantized head
        chunk = 6 * 4 * min(options.window, LOGIT_CHUNK) * text.vocab_size
        codes = end_to_end.BYTES_PER_WEIGHT * plan.model_weights
        working = max(working, plan.model_weights * size + codes + _head_weights(streamed) * size + chunk)
        activations = max(activations, min(_taught_bytes(streamed, options), ACTIVATION_BUDGET))
    if work.epochs:
        working += block_weights * finetune.BYTES_PER_WEIGHT
        activations *= 2
    return int(IMPORT_BYTES + max(2 * embedding, working) + activations)


def _taught_bytes(streamed: StreamedModel, options: Options) -> int:
    """Of the unquantized model's last hidden states in the windows that scales are trained on."""
    steps = METHODS[options.name].tuning(options)
    windows = steps * end_to_end.WINDOWS + 2 * end_to_end.JUDGED if steps else 0
    tokens = windows * min(options.window, end_to_end.TUNING_TOKENS)
    return int(tokens * streamed.model.config.get_text_config().hidden_size * streamed.dtype.itemsize)


def _hidden_bytes(streamed: StreamedModel, plan: Plan, options: Options) -> int:
    """Of the hidden states of all windows between two blocks."""
    tokens = options.windows * options.window if plan.statistics else 0
    return int(tokens * streamed.model.config.get_text_config().hidden_size * streamed.dtype.itemsize)


def scratch_bytes(streamed: StreamedModel, plan: Plan, options: Options) -> int:
    """What a run keeps on disk beside the artifact until its end.

    That is float32 Fisher information, or hidden states that memory is not to hold; and, where planes are in one order,
    all of them before they are split, and what was found over the whole model.
    """
    if plan.statistics.fisher:
        return 4 * plan.quantized_weights
    hidden = _hidden_bytes(streamed, plan, options)
    spilled = 0 if hidden <= ACTIVATION_BUDGET else hidden * (2 if options.epochs else 1)
    if (taught := _taught_bytes(streamed, options)) > ACTIVATION_BUDGET:
        spilled = max(spilled, taught)
    if METHODS[options.name].ordered is None:
        return spilled
    both = {**plan.layouts, **plan.embeddings}
    kept = plan.tensor_bytes - sum(layout.nbytes for layout in both.values())
    whole = sum(layout.nbytes for layout in ordering.with_all_planes(both).values())
    losses = 4 * BITS * sum(both[name].shape[0] for name in ordering.nested_layers(both))
    return spilled + kept + whole + losses + _searched_bytes(streamed, plan, options)


def _searched_bytes(streamed: StreamedModel, plan: Plan, options: Options) -> int:
    """About what a search keeps of its samples: slopes of all layers' tokens, what the head reads and puts out."""
    text = streamed.model.config.get_text_config()
    samples = ceil(METHODS[options.name].work(options).passes * options.windows)
    of_head = text.hidden_size**2 + 4 * text.vocab_size
    return 4 * (samples * options.window * len(plan.layouts) + ceil(samples / SAMPLES_KEPT) * of_head)


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


def _speeds(streamed: StreamedModel) -> tuple[Speeds, float]:
    """This machine's, and the share of its threads' time that this process got."""
    exact, share = _matmul_speed(torch.float32)
    model = exact if streamed.dtype == torch.float32 else _matmul_speed(streamed.dtype)[0]
    return Speeds(model, exact), share


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
