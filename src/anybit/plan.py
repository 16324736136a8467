"""What a run will make, known before any work: layouts and exact tensor bytes."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import ceil, floor, prod
from typing import Any

from anybit.artifact.contents import Plan
from anybit.artifact.predicted_size import overhead_bytes
from anybit.calibration.streaming import StreamedModel, selected
from anybit.checkpoint.architectures import usual_window
from anybit.config import EMBED_BITS, GROUP_SIZE, Json, LayerSpec, Options, SpecMap, parse_bytes, wants_text
from anybit.errors import InputError, require_extra
from anybit.formats import GroupIntLayout
from anybit.formats.dtypes import Dtype
from anybit.formats.layout import LayerLayout
from anybit.formats.unquantized import UnquantizedLayout
from anybit.kernels import cpu
from anybit.methods import METHODS, Method, ordering
from anybit.methods.anybit import BITS
from anybit.methods.rtn import RTN

WIDER = 1  # bits that embeddings are expected to have more than layers
BUDGET_STEPS = 100  # a budget finds the average width to a hundredth of a bit


def make_plan(streamed: StreamedModel, options: Options, spec_map: SpecMap | None = None) -> Plan:
    """Decide what is stored how.

    Args:
        streamed: the model.
        options: none of them open.
        spec_map: layers whose specs are given.

    Raises:
        InputError: a spec or a pattern that names no layer of the model; a spec that does not fit its matrix, or asks
            for a width that the method does not have; nothing left to quantize; options that an encoder has no use for;
            an extra or a native extension that the method needs, and that is not there.
    """
    if streamed.encoder:
        _check_for_encoder(streamed.model.config.model_type, options)
    shapes = streamed.all_linears()
    if not shapes:
        raise InputError(
            f"the blocks of {streamed.model.config.model_type} models have no nn.Linear or Conv1D, which "
            "are what anybit quantizes: this architecture is not supported yet"
        )
    _check_patterns(options, shapes)
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
    _check_native(streamed.device.type, options, method)
    specs = {
        name: spec_map.get(name, usual) for name in shapes if selected(name, options.include, options.exclude)
    }
    if not specs:
        raise InputError(
            "no linear layer is left to quantize: check --include and --exclude against its layers, which "
            "`anybit plan MODEL -o map.json` lists"
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


def _check_native(device: str, options: Options, method: Method) -> None:
    """Refuse what only the native extension can do, where it is not there: gradients may take hours before."""
    if cpu.available():
        return
    coded = method.ordered is not None and method.ordered(options).coded
    if coded or (method.native and device == "cpu"):
        what = f"the method {method.name}" if device == "cpu" else "coding planes (without: --expand)"
        raise InputError(f"{what} needs the native extension, which is not there: {cpu.why_not()}")


def _check_patterns(options: Options, names: Iterable[str]) -> None:
    """Refuse patterns of layers that match none of the model's: they are misspelt, or of another model."""
    names = list(names)
    for option in ("include", "exclude"):
        for pattern in getattr(options, option):
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                some = ", ".join(names[:: max(1, len(names) // 3)][:3])
                raise InputError(
                    f"--{option} {pattern!r} matches none of the model's linear layers: expected a pattern of whole "
                    f"names, such as {some}; `anybit plan MODEL -o map.json` lists all"
                )


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
    """The options, none left open, and the plan, within the options' budget and the model's positions.

    Where planes are in one order, what a size leaves for which of them is known when the order is: the width is an
    estimate, and the artifact is cut to the size.

    Raises:
        InputError: a budget beside a map, which would not be kept; a layer that its model does not call; see
            `fit_budget` and `make_plan`.
    """
    if spec_map and options.budget is not None:
        raise InputError(
            "a map of specs (--spec) sets the width of every layer that it names: give it without bpw and size "
            "(--bpw, --size)"
        )
    if options.seq_len is None and wants_text(options, spec_map):
        options = replace(options, seq_len=usual_window(streamed.model))
    fitted = fit_budget(streamed, options)
    plan = make_plan(streamed, fitted, spec_map)
    if lost := [name for name in streamed.uncalled if name in plan.layouts]:
        raise InputError(
            f"{lost[0]}: {streamed.model.config.model_type} models multiply with its weight without calling it, and a "
            "quantized layer has no such weight: this architecture is not supported yet"
        )
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
