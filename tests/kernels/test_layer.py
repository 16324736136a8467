"""Whole layers in one call - mixed tiles, rounded inputs, sparse weights - against double precision."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from anybit.bench.kernels import layouts, random_weight
from anybit.formats import Float16Layout, GroupIntLayout, Sparse
from anybit.formats.layout import LayerLayout
from anybit.formats.weight import PackedWeight
from anybit.kernels import cpu, reference
from anybit.kernels.cpu_layer import Layer
from anybit.kernels.dispatch import BoundWeight
from tests.kernels.cases import at_odd_address

if not cpu.available():
    pytest.skip(str(cpu.why_not()), allow_module_level=True)

pytestmark = pytest.mark.native

# Every way to store a matrix that the benchmark knows, and columns of float16 beside codes.
NAMES = [*(name for name in layouts(261, 128) if not name.endswith(" A8")), "float16 columns", "float16 rows"]
LOWEST = torch.finfo(torch.bfloat16).eps / 2  # relative error of one rounding


def layout_of(name: str, out: int, columns: int) -> LayerLayout:
    if not name.startswith("float16"):
        return layouts(out, columns)[name]
    field, size = ("cols", columns) if name.endswith("columns") else ("rows", out)
    few = max(1, size // 8)
    rest: dict[str, Any] = {field: size - few}
    codes = GroupIntLayout(bits=3, group_size=32, symmetric=False, **rest)
    return LayerLayout((out, columns), (codes, Float16Layout(**{field: few})))


def sparse_weight(out: int, columns: int, generator: torch.Generator) -> Sparse:
    mask = torch.rand(out, columns, generator=generator) < 0.05
    return Sparse.of(torch.randn(out, columns, generator=generator), mask)


def packed(name: str, shape: tuple[int, int], sparse: bool, scaled: bool, seed: int) -> PackedWeight:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    made = random_weight(layout_of(name, *shape))
    layout, tensors = made.layout, dict(made.tensors)
    for field, tensor in tensors.items():
        if tensor.dtype == torch.float16:
            tensors[field] = torch.randn(tensor.shape, generator=generator).half().clamp(-2, 2)
        if field.endswith("act_clip"):
            tensors[field] = torch.full_like(tensor, 0.9)
    if sparse:
        part = sparse_weight(*shape, generator)
        layout = replace(layout, sparse=len(part.values))
        tensors |= {f"sparse.{field}": tensor for field, tensor in part.tensors(shape[1]).items()}
    if scaled:
        layout = replace(layout, input_scale=True)
        tensors["input_scale"] = torch.rand(shape[1], generator=generator).half() + 0.5
    return PackedWeight(layout, tensors)


def oracle(weight: PackedWeight, x: Tensor) -> tuple[Tensor, Tensor]:
    """The product with the dense matrix, and the norm of what is summed, in double precision."""
    inputs, dense = reference.round_inputs(x.float(), weight).double(), reference.dequantize(weight).double()
    return inputs @ dense.T, (inputs.square() @ dense.square().T).sqrt()


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    shape=st.tuples(st.integers(16, 70) | st.just(261), st.sampled_from([256, 257, 320, 431, 576])),
    isa=st.sampled_from(cpu.matmul_isas()),
    tokens=st.sampled_from([1, 2, 3, 5, 6, 7, 16, 17, 40]),
    sparse=st.booleans(),
    scaled=st.booleans(),
    half=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**20),
)
def test_a_layer_is_the_product_with_its_dense_matrix(  # noqa: PLR0913
    name: str,
    shape: tuple[int, int],
    isa: str,
    tokens: int,
    sparse: bool,
    scaled: bool,
    half: bool,
    threads: int,
    seed: int,
) -> None:
    assume(
        name.startswith("float16") or name in layouts(*shape)
    )  # of some, the bench has whole blocks and tables only
    rounded = layout_of(name, *shape).rounds_inputs
    weight = packed(name, shape, sparse and not rounded, scaled, seed)  # no method has both
    x = torch.randn(tokens, shape[1], generator=torch.Generator().manual_seed(seed))
    x = x.bfloat16() if half else x
    bound = BoundWeight(weight, isa=isa)
    assert bound.layer is not None
    y = bound.layer.matmul(x, threads=threads)
    assert y.dtype == x.dtype
    expected, size = oracle(weight, x)
    # What is rounded to bfloat16: the result; centroids; inputs once more where they are scaled. Roundings are random,
    # so they add up as `size` does: a single weight left out is several times that.
    most = 2e-5 * size.amax() + (2 * LOWEST * expected.abs() + 8 * LOWEST * size if half else 0)
    assert bool(((y.double() - expected).abs() <= most).all())
    assert torch.equal(bound.layer.matmul(x, threads=1), y)
    few = cpu.few_tokens(x.dtype, isa)
    for k in range(tokens if tokens <= few else 0):  # more are summed in another order
        assert torch.equal(bound.layer.matmul(x[k : k + 1].contiguous(), threads=threads)[0], y[k])
    assert torch.equal(bound.matmul(x), y)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_at_odd_addresses_are_refused_or_copied(name: str) -> None:
    """In every format and every field of it: the compiler's code takes addresses for multiples of a number's size."""
    weight = packed(name, (261, 256), not layout_of(name, 261, 256).rounds_inputs, scaled=True, seed=2)
    x = torch.randn(3, 256)
    expected = BoundWeight(weight).matmul(x)
    for field, tensor in weight.tensors.items():
        if tensor.itemsize == 1 or not tensor.numel():
            continue
        moved = PackedWeight(weight.layout, {**weight.tensors, field: at_odd_address(tensor)})
        try:
            assert torch.equal(BoundWeight(moved).matmul(x), expected), field
        except ValueError as error:
            assert "at an address that is no multiple of its size" in str(error), field
    with pytest.raises(ValueError, match="no multiple of its size"):
        layer = BoundWeight(weight).layer
        assert layer is not None
        layer.matmul(at_odd_address(x))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "W3",
        "W8A8",
        "MixLLM p10",
        "2/4/16",
        "codebook 4",
        "codebook 7",
        "nested 2 to 5",
        "by channel 5",
        NAMES[-1],
    ],
)
def test_tokens_beyond_one_turn(name: str, half: bool) -> None:
    """A prompt is multiplied in turns: each token's sums are those it has among a few."""
    weight = packed(name, (300, 1216), sparse=name == "codebook 4", scaled=name == "W3", seed=1)
    x = torch.randn(1030, 1216, generator=torch.Generator().manual_seed(1))
    bound = BoundWeight(weight)
    y = bound.matmul(x.bfloat16() if half else x)
    for begin, end in ((0, 17), (300, 400), (500, 530), (1000, 1030)):
        part = x[begin:end].bfloat16() if half else x[begin:end]
        assert torch.equal(bound.matmul(part), y[begin:end])
    expected, size = oracle(weight, x.bfloat16() if half else x)
    most = 2e-5 * size.amax() + (2 * LOWEST * expected.abs() + 8 * LOWEST * size if half else 0)
    assert bool(((y.double() - expected).abs() <= most).all())


@pytest.mark.skipif(os.getenv("ANYBIT_BUILD") is not None, reason="sanitizers need more of a stack")
def test_a_thread_of_half_a_megabyte_has_stack_enough() -> None:
    done, before = [], threading.stack_size(512 << 10)

    def multiply() -> None:
        for name in ("W4", "W4A8", "codebook 4", "nested 4"):
            bound = BoundWeight(packed(name, (130, 520), sparse=False, scaled=False, seed=1))
            x = torch.randn(520, 520)
            done.append(torch.stack([bound.matmul(x), bound.matmul(x.bfloat16())]))

    try:
        thread = threading.Thread(target=multiply)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert len(done) == 4 and all(bool(y.isfinite().all()) for y in done)


@pytest.mark.parametrize("isa", cpu.matmul_isas())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (7, 4), (16, 17), (70, 33), (40, 64), (40, 65), (33, 1100)])
def test_float16_tiles_of_any_shape(shape: tuple[int, int], dtype: torch.dtype, isa: str) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator).to(dtype)
    rows = torch.randperm(2 * shape[0], generator=generator)[: shape[0]].sort().values.int()
    layout = LayerLayout((2 * shape[0], shape[1]), (Float16Layout(rows=shape[0]),))
    layer = Layer(layout, {"values": values, "rows": rows}, isa=isa)
    for tokens in (1, 16, 17, 25, 530):
        x, y = torch.randn(tokens, shape[1], generator=generator), torch.ones(tokens, 2 * shape[0])
        expected = y.double().index_add(1, rows.long(), x.double() @ values.double().T)
        alone, own = torch.ones_like(y), torch.ones_like(y[:1])
        layer.product(x, y, add=True, threads=2)
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)
        layer.product(x, alone, add=True, threads=1)
        assert torch.equal(alone, y)
        layer.product(x[-1:], own, add=True)
        assert tokens > cpu.few_tokens(x.dtype, isa) or torch.equal(own[0], y[-1])


def test_sparse_columns_beyond_16_bits() -> None:
    torch.manual_seed(0)
    part = sparse_weight(3, 70_000, torch.Generator().manual_seed(1))
    tensors = part.tensors(70_000)
    assert tensors["columns"].dtype == torch.uint32
    layout = LayerLayout((3, 70_000), (Float16Layout(),), sparse=len(part.values))
    fields = {"values": torch.zeros(3, 70_000).half()} | {f"sparse.{name}": t for name, t in tensors.items()}
    layer, x = Layer(layout, fields), torch.randn(2, 70_000)
    dense = torch.zeros(3, 70_000)
    part.add_to(dense)
    torch.testing.assert_close(layer.matmul(x), x @ dense.T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "name", ["W4", "W4A8", "MixLLM p10", "2/4/16", "codebook 4", "nested 2 to 5", *NAMES[-2:]]
)
def test_a_product_may_be_added(name: str) -> None:
    """Sparse weights, scaled inputs and rows in any order beside, of few tokens and of many."""
    rounded = layout_of(name, 70, 320).rounds_inputs
    weight = packed(name, (70, 320), sparse=not rounded, scaled=True, seed=3)
    for isa in cpu.matmul_isas():
        layer = Layer(weight.layout, weight.tensors, isa=isa)
        for tokens in (1, 6, 40, 520):
            x = torch.randn(tokens, 320, generator=torch.Generator().manual_seed(tokens))
            for inputs in (x, x.bfloat16()):
                y, before = torch.empty(tokens, 70), torch.full((tokens, 70), 3.0)
                layer.product(inputs, y, threads=2)
                layer.product(inputs, before, add=True, threads=2)
                size = float(y.abs().max())
                torch.testing.assert_close(before, y + 3, rtol=0, atol=1e-6 * size + 1e-5)
                if inputs.dtype == torch.bfloat16:
                    assert torch.equal(layer.matmul(inputs), y.bfloat16())


def float16_layer(shape: tuple[int, int], in_features: int = 64, **changes: Any) -> Layer:
    """Of ones, with one thing that does not fit."""
    out = changes.pop("out", 4)
    fields = {"values": torch.ones(shape).half(), **changes.pop("fields", {})}
    layer = changes.pop("layer", {})
    return Layer(LayerLayout((out, in_features), (Float16Layout(**changes),), **layer), fields)


def codes_layer(**changes: Any) -> Layer:
    """W8A8 in groups of 40, with one thing that does not fit."""
    layout = GroupIntLayout(**({"bits": 8, "group_size": 40, "symmetric": True, "act_bits": 8} | changes))
    fields = {
        "codes": torch.zeros(4, 64).byte(),
        "scales": torch.ones(4, 2).half(),
        "act_clip": torch.ones(1).half(),
    }
    return Layer(LayerLayout((4, 64), (layout,)), fields)


def test_a_layer_refuses_what_does_not_fit() -> None:
    layer = float16_layer((4, 64))
    columns = torch.arange(57, 65, dtype=torch.int32)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: float16_layer((4, 8)), "expected float16 or bfloat16 or uint16 .4, 64."),
        (lambda: float16_layer((4, 8), cols=8), "field cols is missing"),
        (lambda: float16_layer((4, 8), cols=8, fields={"cols": columns}), "cols hold 64"),
        (lambda: float16_layer((4, 8), cols=8, fields={"cols": columns[1:]}), "cols is int32 .7."),
        (lambda: float16_layer((4, 2), cols=2, fields={"cols": columns[[3, 3]] - 3}), "cols hold 57 twice"),
        (lambda: float16_layer((5, 64)), "values is float16 .5, 64."),
        (lambda: float16_layer((0, 64), rows=0, fields={"rows": columns[:0]}), "rows is 0, expected 1 to 4"),
        (lambda: float16_layer((4, 0), in_features=0), "a layer of 4 x 0"),
        (lambda: codes_layer(act_bits=9), "act_bits is 9"),
        (codes_layer, "act_clip is float16 .1., expected float16 or uint16 .2."),
        (lambda: codes_layer(act_static=True), "field act_scales is missing"),
        (lambda: float16_layer((4, 64), layer={"input_scale": True}), "field input_scale is missing"),
        (
            lambda: float16_layer(
                (4, 64), layer={"input_scale": True}, fields={"input_scale": torch.ones(63).half()}
            ),
            "input_scale is float16 .63.",
        ),
        (lambda: layer.matmul(torch.ones(1, 63)), "x is torch.float32"),
        (lambda: layer.matmul(torch.ones(1, 64).half()), "x is torch.float16"),
        (lambda: layer.matmul(torch.ones(1, 64), threads=-1), "threads is -1"),
        (lambda: layer.at(layer._layout), "has one width"),
    ]
    for run, match in cases:
        with pytest.raises(ValueError, match=match):
            run()


@pytest.mark.parametrize(
    ("columns", "row_ptr", "match"),
    [
        ([0, 64], [0, 1, 1, 1, 2], "columns hold 64"),
        ([0, 1], [0, 2, 1, 2, 2], "does not ascend"),
        ([0, 1], [0, 1, 1, 1, 3], "does not ascend"),
        ([0, 1], [0, 1, 2], "row_ptr is int32"),
    ],
)
def test_damaged_sparse_weights_are_refused(columns: list[int], row_ptr: list[int], match: str) -> None:
    def layer(columns: list[int], row_ptr: list[int]) -> Layer:
        sparse = {
            "sparse.values": torch.ones(2).half(),
            "sparse.columns": torch.tensor(columns, dtype=torch.int16).view(torch.uint16),
            "sparse.row_ptr": torch.tensor(row_ptr, dtype=torch.int32),
        }
        zeros = {"values": torch.zeros(4, 64).half()}
        return float16_layer((4, 64), layer={"sparse": 2}, fields=zeros | sparse)

    assert layer([0, 63], [0, 1, 1, 1, 2]).matmul(torch.arange(64.0)[None]).tolist() == [[0, 0, 0, 63]]
    with pytest.raises(ValueError, match=match):
        layer(columns, row_ptr)


@pytest.mark.alone
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer keeps what is freed")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_memory_between_steps_is_kept_within_bounds() -> None:
    def resident() -> int:
        ctypes.CDLL(None).malloc_trim(0)  # what the allocator merely has not given back does not count
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") // 2**20

    def run(rows: int) -> None:
        fields = {"values": torch.ones(rows, 8).half(), "rows": torch.randperm(rows).int()}
        layer = Layer(LayerLayout((rows, 8), (Float16Layout(rows=rows),)), fields)
        y = layer.matmul(torch.ones(512, 8), threads=1)
        assert torch.equal(y, torch.full((512, rows), 8.0))

    run(100)
    before = resident()
    run(40000)  # 82 MB
    assert resident() - before < 60
    for rows in range(3000, 6000, 200):  # 6 to 12 MB, 15 of them
        run(rows)
    assert resident() - before < 60
