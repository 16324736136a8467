"""What a run will make, known before any work: layouts, exact tensor bytes, and estimates of time and memory."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from math import ceil, floor, prod
from pathlib import Path
from typing import Any

import torch

from anybit.artifact.config_json import dense_layout
from anybit.artifact.contents import Plan
from anybit.artifact.predicted_size import overhead_bytes
from anybit.calibration.gradients import LOGIT_CHUNK
from anybit.calibration.streaming import StreamedModel, selected
from anybit.config import (
    CODEBOOK_METHODS,
    EMBED_GROUP_SIZE,
    ENCODER_METHODS,
    METHOD_WIDTHS,
    USED_BY,
    LayerSpec,
    QuantizeConfig,
    SpecMap,
)
from anybit.errors import InputError
from anybit.methods import finetune, ordering, sensitivity, two_four_sixteen
from anybit.methods.registry import METHODS

CLUSTERING = 6e-8  # seconds per weight and thread, at 3 bits
NESTED_CODES = 5e-7  # the same of nested codes
BUDGET_STEPS = 100  # a budget finds the average width to a hundredth of a bit
IMPORT_BYTES = 450_000_000  # PyTorch, Transformers and a tokenizer before any tensor is read


def make_plan(streamed: StreamedModel, config: QuantizeConfig, spec_map: SpecMap | None = None) -> Plan:
    """Decide what is stored how.

    Raises:
        InputError: a spec that names no layer of the model, does not fit its matrix, or asks for a width that
            the method does not have; nothing left to quantize; options that an encoder has no use for.
    """
    if streamed.encoder:
        _check_for_encoder(streamed.model.config.model_type, config)
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
    specs = {
        name: spec_map.get(name, config.layer_spec())
        for name in shapes
        if selected(name, config.include, config.exclude)
    }
    if not specs:
        raise InputError(
            "no linear layer is left to quantize: check --include and --exclude against `anybit plan MODEL`"
        )
    for name in spec_map.keys() & specs.keys() if config.progressive else ():
        if specs[name].tiles != config.layer_spec().tiles:
            raise InputError(
                f"spec of {name}: anybit chooses the widths of all rows together, in one order over the whole model: "
                "leave bits and tiles out (--bits is the largest average, --exclude leaves a layer alone)"
            )
    for name in spec_map.keys() & specs.keys() if config.method == "mixllm" else ():
        if any(tile.bits not in (4, 8) for tile in specs[name].tiles):
            raise InputError(
                f"spec of {name}: mixllm's search leaves out the layers that the spec names: give them bits 4 or 8, or "
                "tiles"
            )
    layouts = {name: spec_layout(name, spec, shapes[name], config.method) for name, spec in specs.items()}
    nested = {spec.widths for spec in specs.values() if spec.widths}
    if len(nested) > 1:
        raise InputError(
            f"the spec gives layers different widths, {' and '.join(str(list(w)) for w in sorted(nested)[:2])}: an "
            "any-precision model runs all of its layers at one width"
        )
    embeddings = _embedding_layouts(streamed, config.embed_bits or 16)
    quantized = {f"{name}.weight" for name in [*layouts, *embeddings]}
    kept = {
        name: (stored_dtype(streamed.checkpoint.dtype(source), streamed.checkpoint.shape(source)), shape)
        for name, source in streamed.names.items()
        if name not in quantized
        for shape in [tuple(streamed.checkpoint.shape(source))]
    }
    total = sum(prod(streamed.checkpoint.shape(source)) for source in streamed.names.values())
    dense = {n: dense_layout(s, kept[f"{n}.weight"][0]) for n, s in shapes.items() if n not in specs}
    linear = sum(prod(shape) for shape in shapes.values())
    plan = Plan(specs, layouts, embeddings, kept, linear, total, dense)
    if config.progressive:
        plan = replace(plan, refinement_bytes=ordering.overhead_bytes(config.bits or 8, layouts))
    return replace(plan, overhead_bytes=overhead_bytes(streamed, plan, config))


def _check_for_encoder(kind: str, config: QuantizeConfig) -> None:
    """Refuse what needs next tokens.

    Raises:
        InputError: a method on gradients of a language model's loss, or a KV-cache.
    """
    if config.method not in ENCODER_METHODS:
        raise InputError(
            f"{config.method} needs the loss of a language model, and {kind} is an encoder: choose "
            f"{', '.join(ENCODER_METHODS[:-1])} or {ENCODER_METHODS[-1]}"
        )
    if config.kv_bits != 16:
        raise InputError(
            f"--kv-bits {config.kv_bits}: {kind} is an encoder and has no KV-cache; leave it out"
        )


def fit_budget(
    streamed: StreamedModel, config: QuantizeConfig, bpw: float | None, size: int | None
) -> QuantizeConfig:
    """The config with the largest width within a budget of bits per weight or bytes.

    Raises:
        InputError: the smallest width is too large, or a method whose size is not a matter of width.
    """
    widths = METHOD_WIDTHS[config.method]
    if config.nested:
        raise InputError(
            "any-precision's size follows from its widths: choose them (--widths 3,4,6); --dry-run tells the size"
        )
    plans: dict[float, Plan] = {}

    def fits(bits: float) -> bool:
        plans[bits] = make_plan(streamed, config.with_bits(bits))
        made = plans[bits]
        return (bpw is None or made.bits_per_weight <= bpw) and (size is None or made.size_bytes <= size)

    whole = next((bits for bits in reversed(widths.whole()) if fits(bits)), None)
    if whole is None and not (widths.fractional and fits(widths.low)):
        asked = f"{bpw:g} bits per weight" if bpw is not None else f"{(size or 0) / 1e6:g} MB"
        least = plans[min(plans)]
        raise InputError(
            f"{asked} is not to be had: {config.method} at its smallest width takes {least.bits_per_weight:.3f} bits "
            f"per weight, {least.size_bytes / 1e6:.1f} MB (the embedding at {config.embed_bits} bits included; see "
            "--embed-bits)"
        )
    best = float(widths.low if whole is None else whole)
    if widths.fractional and best < widths.high:
        low, high = 0, ceil((floor(best) + 1 - best) * BUDGET_STEPS)  # of the way to the next whole width
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(best + middle / BUDGET_STEPS) else (low, middle)
        best += low / BUDGET_STEPS
    aligned = two_four_sixteen.ALIGNED_BITS  # may fit where narrower widths do not
    if config.method == "two-four-sixteen" and best < aligned and fits(aligned):
        best = aligned
    return config.with_bits(best)


def spec_layout(name: str, spec: LayerSpec, shape: tuple[int, int], method: str) -> dict[str, Any]:
    """The stored layout that a spec leads to, the spec checked against the matrix [out, in]."""
    widths = METHOD_WIDTHS[method]
    for bits in (*(tile.bits for tile in spec.tiles), *spec.widths):
        if bits not in widths:
            raise InputError(f"spec of {name}: {method} has no {bits}-bit width: choose {widths} bits")
    for option, methods in USED_BY.items():
        default = getattr(LayerSpec(), option, None)
        if method not in methods and getattr(spec, option, default) != default:
            raise InputError(
                f"spec of {name}: {option} is for {', '.join(methods)}; {method} has no use for it"
            )
    if spec.widths and spec.tiles[0].bits != spec.widths[-1]:
        raise InputError(
            f"spec of {name}: bits would be ignored, widths {list(spec.widths)} say what is stored"
        )
    try:
        return METHODS[method].layout(spec, shape)
    except InputError as error:
        raise InputError(f"spec of {name}: {error}") from error


def stored_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.dtype:
    """Dtype of a tensor that is not quantized: matrices take 16 bits, norms and biases stay as they are."""
    if dtype in (torch.float32, torch.float64) and len(shape) >= 2:
        return torch.float16
    return dtype


def estimate(streamed: StreamedModel, plan: Plan, config: QuantizeConfig, out: Path) -> dict[str, Any]:
    """Predicted figures of a run: bytes, bits per weight, seconds and peak memory (the last two roughly)."""
    shapes = streamed.all_linears()
    blocks = len(streamed.blocks)
    block_weights = plan.linear_weights / blocks
    largest = max(prod(shape) for shape in shapes.values())
    widest = max(shape[1] for shape in shapes.values())
    tokens = config.samples * config.seq_len if config.calibrated else 0
    hidden = streamed.model.config.get_text_config().hidden_size
    activations = min(tokens * hidden * streamed.dtype.itemsize, 2 << 30)
    embedding = max(prod(streamed.checkpoint.shape(n)) for n in streamed.names.values()) * 4
    working = block_weights * streamed.dtype.itemsize + largest * 4 * 5
    forwards: float = 1 if config.unquantized_inputs else 2
    moments = sweep = clustering = training = 0.0
    if config.hessians and not config.gradients:
        working += widest**2 * 4 * 5
        moments = 2 * tokens * sum(n**2 for n in {shape[1] for shape in shapes.values()}) * 1.5
        if config.method != "rtn":
            sweep = 2.0 * sum(s[0] * s[1] ** 2 + s[1] ** 3 for s in shapes.values()) / blocks
    if config.progressive:
        clustering = NESTED_CODES * plan.quantized_weights / torch.get_num_threads()
        sweep *= ordering.BITS
    if config.method in CODEBOOK_METHODS:
        seed = min(config.widths) if config.nested else config.bits or 4
        clustering = CLUSTERING * 2 ** max(0.0, seed - 3) * plan.quantized_weights / torch.get_num_threads()
        if (
            config.method == "cmpq" and config.compensate
        ):  # channel after channel on one thread, and all before that
            clustering *= 1 + torch.get_num_threads()
    if config.gradients or sensitivity.passes(config):
        passes = 4 * sensitivity.passes(
            config
        )  # forward twice, as blocks are recomputed, and backward for inputs and weights
        forwards = passes if config.gradients else forwards + passes
        vocabulary = streamed.model.config.get_text_config().vocab_size
        logits = 3 * 4 * min(config.seq_len, LOGIT_CHUNK) * vocabulary  # their float32 softmax, and gradients
        working += plan.model_weights * streamed.dtype.itemsize + logits
    if config.finetune:
        forwards += 1 + 3 * config.finetune_epochs
        steps = config.finetune_epochs * config.samples / finetune.batch_size(config.samples, config.seq_len)
        training = finetune.STEP_SECONDS * steps * plan.quantized_weights / torch.get_num_threads()
        working += block_weights * finetune.BYTES_PER_WEIGHT
        activations *= 2
    flops = forwards * 2 * block_weights * tokens + moments + sweep + 200 * block_weights
    seconds = blocks * flops / _matmul_speed() + clustering + training + plan.model_weights / 2e8
    free = shutil.disk_usage(next(p for p in [out, *out.absolute().parents] if p.exists())).free
    return {
        "bits": plan.code_bits,
        "bits_per_weight": plan.bits_per_weight,
        "file_bits_per_weight": plan.file_bits_per_weight,
        "size_bytes": plan.size_bytes,
        "seconds": seconds,
        "peak_memory_bytes": int(IMPORT_BYTES + max(2 * embedding, working) + activations),
        "scratch_disk_bytes": scratch_bytes(plan, config),
        "free_disk_bytes": free,
    }


def scratch_bytes(plan: Plan, config: QuantizeConfig) -> int:
    """What a run keeps on disk until its end: the float32 Fisher information, or all planes before they are cut."""
    if config.progressive:
        return 2 * plan.quantized_weights + plan.tensor_bytes
    return 4 * plan.quantized_weights if config.gradients else 0


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


def _embedding_layouts(streamed: StreamedModel, bits: int) -> dict[str, dict[str, Any]]:
    """Layouts of embedding and head at `--embed-bits`; a head that the checkpoint leaves out is tied."""
    if bits == 16:
        return {}
    model = streamed.model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(m): n for n, m in model.named_modules()}
    layouts = {}
    for module in (embedding, head):
        name = names.get(id(module))
        if name is None or f"{name}.weight" not in streamed.names:
            continue
        shape = list(streamed.checkpoint.shape(streamed.names[f"{name}.weight"]))
        tile = {"format": "group_int", "bits": bits, "group_size": EMBED_GROUP_SIZE, "symmetric": False}
        layouts[name] = {"shape": shape, "tiles": [tile]}
    if names[id(embedding)] in layouts and head is not None and names[id(head)] not in layouts:
        layouts[names[id(embedding)]]["tied"] = True
    return layouts


def _matmul_speed() -> float:
    """Floating-point operations per second of this machine's float32 GEMM, from a tenth of a second's work."""
    a = torch.ones(768, 768)
    (a @ a).sum()
    start, rounds = time.perf_counter(), 0
    while time.perf_counter() - start < 0.1:
        a @ a
        rounds += 1
    return 2 * 768**3 * rounds / (time.perf_counter() - start)


def widths_for_memory(
    streamed: StreamedModel, memory: int | None, base: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Size of the artifact at each width, and whether it fits into `memory` bytes: the table of `anybit plan`."""
    rows = []
    for bits in range(2, 9):
        for embed_bits in (16, 8, 4):
            config = QuantizeConfig(**{**base, "method": "rtn", "bits": bits, "embed_bits": embed_bits})
            plan = make_plan(streamed, config)
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
