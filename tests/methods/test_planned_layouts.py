"""What a method says that it will store is what it stores, for any shape: plans and budgets rest on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil, floor
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anybit.calibration.stats import GradientStats, LinearStats
from anybit.formats import NestedLayout
from anybit.formats.validate import validate
from anybit.formats.weight import pack
from anybit.kernels import cpu
from anybit.methods import METHODS, llm_mq, mixllm
from tests import builders
from tests.builders import correlated_inputs, random, stats_of

Shape = tuple[int, int]
Draw = Callable[..., Any]
CLUSTERING = ("squeezellm", "any-precision", "cmpq", "anybit")  # in C++ only
needs_native = pytest.mark.skipif(not cpu.available(), reason=f"no native extension: {cpu.why_not()}")
SHAPES = st.tuples(st.integers(1, 40), st.integers(2, 90))  # [out, in]: multiples of nothing
SHARES = st.sampled_from([0.0, 0.001, 0.02, 0.1])


def uniform(draw: Draw, method: str, **options: Any) -> builders.LayerSpec:
    """Any options of the methods with integers in groups."""
    if method in ("rtn", "gptq", "awq", "smoothquant", "atom", "llm-mq"):
        options["symmetric"] = draw(st.booleans())
    if method == "gptq":
        options["desc_act"] = draw(st.booleans())
    if draw(st.booleans()):
        options |= {"act_bits": draw(st.sampled_from([4, 8])), "act_static": draw(st.booleans())}
    options |= {"clip": draw(st.booleans()), "clip_ratio": 1.0, "act_clip": 1.0}
    group_size = draw(st.sampled_from([-1, 1, 8, 30, 128]))
    return builders.spec_of(builders.options(method, group_size=group_size, **options))


def of_one_width(draw: Draw, method: str, shape: Shape) -> builders.LayerSpec:
    return uniform(draw, method, bits=draw(st.integers(2, 8)))


def of_mixllm(draw: Draw, method: str, shape: Shape) -> builders.LayerSpec:
    return mixllm.with_rows(uniform(draw, method), draw(st.sets(st.integers(0, shape[0] - 1))), shape[0])


def of_llm_mq(draw: Draw, method: str, shape: Shape) -> builders.LayerSpec:
    return llm_mq.with_width(uniform(draw, method), draw(st.integers(2, 4)))


def of_atom(draw: Draw, method: str, shape: Shape) -> builders.LayerSpec:
    outliers = draw(st.integers(1, shape[1] - 1))
    return uniform(draw, method, bits=draw(st.integers(2, 8)), outlier_channels=outliers)


def of_two_four_sixteen(draw: Draw, method: str, shape: Shape) -> builders.LayerSpec:
    group_size, outliers = draw(st.sampled_from([8, 16])), draw(SHARES)
    return builders.two_four_spec(draw(st.floats(0, 1)), group_size, outliers, clip=draw(st.booleans()))


def of_squeezellm(draw: Draw, method: str, shape: Shape) -> builders.LayerSpec:
    options = {"sensitive_outliers": draw(SHARES), "magnitude_outliers": draw(SHARES)}
    return builders.spec_of(builders.options(method, draw(st.integers(2, 8)), **options))


def of_any_precision(draw: Draw, method: str, shape: Shape) -> builders.LayerSpec:
    widths = tuple(sorted(draw(st.sets(st.integers(2, 8), min_size=1))))
    table_bits = draw(st.sampled_from([16, 8, 4]))
    return builders.spec_of(builders.options(method, widths=widths, codebook_bits=table_bits))


def of_cmpq(draw: Draw, method: str, shape: Shape) -> builders.LayerSpec:
    options = {"channel_outliers": draw(SHARES), "error_outliers": draw(SHARES)}
    options["compensate"] = draw(st.booleans())
    return builders.spec_of(builders.options(method, draw(st.floats(2, 8)), **options))


def of_anybit(draw: Draw, method: str, shape: Shape) -> builders.LayerSpec:
    return builders.spec_of(builders.options(method, kept_channels=draw(SHARES)))


SPECS: dict[
    str, Callable[[Draw, str, Shape], builders.LayerSpec]
] = {  # as the driver hands them to the method
    "anybit": of_anybit,
    "rtn": of_one_width,
    "gptq": of_one_width,
    "awq": of_one_width,
    "smoothquant": of_one_width,
    "mixllm": of_mixllm,
    "atom": of_atom,
    "llm-mq": of_llm_mq,
    "two-four-sixteen": of_two_four_sixteen,
    "squeezellm": of_squeezellm,
    "any-precision": of_any_precision,
    "cmpq": of_cmpq,
}


def stats_for(method: str, weight: torch.Tensor) -> LinearStats | GradientStats:
    if method in ("squeezellm", "any-precision"):
        return GradientStats(1, 1, random(*weight.shape, seed=2).exp())
    return stats_of(correlated_inputs(40, weight.shape[1]))


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=needs_native) if m in CLUSTERING else m for m in METHODS]
)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_is_planned_is_what_is_stored(method: str, data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    spec, weight = SPECS[method](data.draw, method, shape), random(*shape)
    planned = METHODS[method].layout(spec, shape)
    packed = pack(METHODS[method].quantize(weight, stats_for(method, weight), spec))
    assert packed.layout == planned
    assert packed.nbytes == planned.nbytes
    validate("layer", packed)


@needs_native
@settings(max_examples=25, deadline=None)
@given(SHAPES, st.floats(2, 8), SHARES)
def test_a_plan_of_anybit_at_an_average_is_a_beginning_of_what_is_stored(
    shape: Shape, bits: float, kept: float
) -> None:
    """A layer's own width is known after all are quantized; the plan takes the average for each."""
    spec = builders.spec_of(builders.options("anybit", kept_channels=kept))
    weight = random(*shape)
    whole = pack(METHODS["anybit"].quantize(weight, stats_for("anybit", weight), spec))
    average = replace(spec, tiles=(replace(spec.tiles[0], bits=bits),))
    planned = METHODS["anybit"].layout(average, shape)
    part = whole.prefix(planned)
    validate("layer", part)
    assert part.nbytes == planned.nbytes
    (tile,), (stored,) = planned.tiles, whole.layout.tiles
    assert isinstance(tile, NestedLayout) and isinstance(stored, NestedLayout)
    assert abs(sum(tile.counts) - bits * shape[0]) <= 0.5
    assert tile == stored.with_counts(tile.counts)
    assert stored.gains and stored.kept_bits == (8 if stored.kept else 16)


@settings(max_examples=25, deadline=None)
@given(SHAPES, st.floats(4, 8))
@example((30, 2), 5.2)
def test_a_plan_of_mixllm_at_an_average_has_as_many_wide_rows(shape: Shape, bits: float) -> None:
    """Which rows they are is for the search; how many, in a layer of average worth, is the plan's."""
    spec = builders.spec_of(builders.options("mixllm", bits, 16))
    planned = METHODS["mixllm"].layout(spec, shape)
    wide = sum(tile.rows for tile in planned.placed() if tile.layout.bits == 8)
    assert -1e-9 <= wide - (bits - 4) / 4 * shape[0] < 1  # 5.2 bits of 30 rows are 9 rows and 2e-15
    last = mixllm.with_rows(spec, range(shape[0] - wide, shape[0]), shape[0])
    packed = pack(METHODS["mixllm"].quantize(weight := random(*shape), stats_for("mixllm", weight), last))
    assert packed.layout == planned


@settings(max_examples=25, deadline=None)
@given(SHAPES, st.floats(2, 4))
def test_a_plan_of_llm_mq_at_an_average_lies_between_its_widths(shape: Shape, bits: float) -> None:
    """Layers get whole widths; until these are chosen, a layer counts as rows of the two nearest."""
    spec = builders.spec_of(builders.options("llm-mq", bits, 16))
    planned = METHODS["llm-mq"].layout(spec, shape).nbytes
    sizes = llm_mq.stored_sizes(spec, shape)
    nearest = sizes[floor(bits) - 2 : ceil(bits) - 1]  # of a few columns, padding makes 3 bits the smaller
    row_numbers = 4 * shape[0] if len(nearest) == 2 else 0  # int32, of the rows in two tiles
    assert min(nearest) <= planned <= max(nearest) + row_numbers
