"""The native kernels of integer groups against plain numpy, over shapes that fit nothing."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch

from anybit.formats import GroupInt
from anybit.formats.bits import code_align, pack_codes
from anybit.formats.weight import QuantizedWeight
from anybit.formats.weight import pack as pack_weight
from anybit.kernels import cpu, info
from anybit.kernels.cpu_layer import Layer
from tests.kernels.cases import (
    ISAS,
    PRODUCTS,
    Case,
    activations,
    at_odd_address,
    group_int,
    make,
    pack,
    product_of,
)

if not cpu.available():
    pytest.skip(str(cpu.why_not()), allow_module_level=True)

from anybit import _native

pytestmark = pytest.mark.native

BF16 = [isa for isa in PRODUCTS if isa.endswith("_bf16")]


def check_product(case: Case, x: torch.Tensor, y: torch.Tensor, bits: int) -> None:
    exact = np.zeros((x.shape[0], case.out))
    exact[:, case.rows] = x.numpy().astype(np.float64) @ case.weight.astype(np.float64).T
    size = np.abs(x.numpy()) @ np.abs(case.weight).T + np.abs(x.numpy()).sum(-1, keepdims=True) * 2**bits
    bound = np.full((x.shape[0], case.out), 1e-30)
    bound[:, case.rows] = 1e-6 * size + 1e-6
    assert (np.abs(y.numpy() - exact) <= bound).all()


GROUPS = (16, 32, 64, 128, 100_000)
SHAPES = [
    (11, 1539, 128),
    (9, 4200, 100_000),
    (5, 2085, 30),
    *(
        (r, c, g)
        for r, c in itertools.product((1, 3, 41, 64), (1, 15, 16, 17, 127, 576))
        for g in GROUPS
        if g <= c or g == 100_000
    ),
]


@pytest.mark.parametrize("isa", PRODUCTS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_dequantize_is_exact(bits: int, isa: str) -> None:
    for i, (r, c, group) in enumerate(SHAPES):
        case = make(bits, r, c, group, symmetric=i % 3 == 0, padding=(16, 1, 4)[i % 3], isa=isa)
        got = case.layer.dequantize(torch.float32, 1)
        assert np.array_equal(got.numpy().view(np.uint32), case.weight.view(np.uint32)), (r, c, group)
        half = case.layer.dequantize(torch.bfloat16, 1)
        assert torch.equal(half, torch.from_numpy(case.weight).bfloat16()), (r, c, group)
        ids = torch.randint(0, r, (5,))
        assert torch.equal(case.layer.rows(ids), got[ids])


@pytest.mark.parametrize("isa", PRODUCTS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_what_is_stored_comes_back(bits: int, isa: str) -> None:
    rng = np.random.default_rng(bits)
    for i, (r, c, group) in enumerate(SHAPES):
        groups = -(-c // group)
        codes = rng.integers(0, 2**bits, (r, c), dtype=np.uint8)
        stored = torch.from_numpy(pack(codes, bits, code_align(bits), None))
        scales = torch.from_numpy(rng.uniform(-1, 1, (r, groups)).astype(np.float16))
        zeros = torch.from_numpy(rng.integers(0, 2**bits, (r, groups), dtype=np.uint8)) if i % 2 else None
        layer = group_int(stored, scales, zeros, None, bits, group, (r, c), threads=1 + i % 3, isa=isa)
        expected = {"codes": stored, "scales": scales}
        expected |= {} if zeros is None else {"zeros": pack_codes(zeros, bits, 1)}
        made = layer.unpack(1 + i % 2)
        assert made.keys() == expected.keys() == set(layer.repacked)
        for field, given in expected.items():
            assert torch.equal(made[field], given), (r, c, group, field)


@pytest.mark.parametrize("isa", PRODUCTS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_matmul_agrees_with_numpy(bits: int, isa: str) -> None:
    for i, (r, c, group) in enumerate(SHAPES):
        case = make(
            bits, r, c, group, symmetric=i % 3 == 0, indexed=i % 2 == 0, padding=(16, 1)[i % 2], isa=isa
        )
        x = activations(1 + i % 21, c)
        check_product(case, x, product_of(case, x), bits)


@pytest.mark.parametrize("isa", PRODUCTS)
@pytest.mark.parametrize(("bits", "group"), [(2, 64), (4, 32), (4, 16), (8, 128), (3, 128)])
def test_a_batch_equals_its_tokens(bits: int, group: int, isa: str) -> None:
    case = make(bits, 19, 1539, group, isa=isa)
    x = activations(19, 1539)
    single, many = torch.cat([product_of(case, x[k : k + 1]) for k in range(19)]), product_of(case, x)
    for m in range(1, 20):  # more than 16 are summed in an order of their own
        assert torch.equal(product_of(case, x[:m]), (single if m <= 16 else many)[:m]), m


@pytest.mark.parametrize("isa", PRODUCTS)
@pytest.mark.parametrize(
    ("bits", "group", "columns"),
    [(4, 64, 576), (4, 128, 900), (8, 32, 640), (3, 128, 1100), (5, 1000, 1000), (4, 64, 4864)],
)
def test_rounded_inputs_give_the_same_bits_in_any_number(
    bits: int, group: int, columns: int, isa: str
) -> None:
    """The engine relies on it: it multiplies as many tokens together as come."""
    rows, groups, generator = 83, -(-columns // group), torch.Generator().manual_seed(bits)
    codes, zeros = (
        torch.randint(0, 2**bits, (rows, n), generator=generator, dtype=torch.uint8)
        for n in (columns, groups)
    )
    scales = torch.rand(rows, groups, generator=generator).half()
    tile = GroupInt(bits=bits, group_size=group, codes=codes, scales=scales, zeros=zeros)
    packed = pack_weight(QuantizedWeight((rows, columns), (tile,)))
    layer = Layer(packed.layout, packed.tensors, isa=isa)
    x = torch.randint(-127, 128, (70, columns), generator=generator, dtype=torch.int16).to(torch.int8)
    x_scales, alone = torch.rand(70, groups, generator=generator), torch.empty(70, rows)
    for k in range(70):
        layer.product(x[k : k + 1], alone[k : k + 1], x_scales[k : k + 1])
    for count in (2, 4, 5, 8, 9, 16, 17, 33, 70):
        together = torch.empty(count, rows)
        layer.product(x[:count], together, x_scales[:count])
        assert torch.equal(together, alone[:count]), count


@pytest.mark.parametrize("isa", BF16)
@pytest.mark.parametrize("bits", range(1, 9))
def test_products_in_bfloat16_are_exact(bits: int, isa: str) -> None:
    for i, (r, c, group) in enumerate(SHAPES):
        case = make(bits, r, c, group, symmetric=i % 3 == 0, indexed=i % 2 == 0, isa=isa)
        x = activations(1 + i % cpu.few_tokens(torch.bfloat16, isa), c).bfloat16()
        y = product_of(case, x, threads=1 + i % 2)
        check_product(case, x.float(), y, bits=12)  # codes of 8 bits carry 17 * 128 through the sum
        for k in range(len(x)):
            assert torch.equal(product_of(case, x[k : k + 1]), y[k : k + 1])


@pytest.mark.parametrize("isa", BF16)
@pytest.mark.parametrize("bits", range(1, 9))
def test_many_tokens_in_bfloat16_meet_rounded_weights(bits: int, isa: str) -> None:
    for r, c, group in SHAPES[::3]:
        case = make(bits, r, c, group, indexed=True, isa=isa)
        weight = torch.from_numpy(case.weight)
        for tokens in (cpu.few_tokens(torch.bfloat16, isa) + 1, 29):
            x = activations(tokens, c).bfloat16()
            y = product_of(case, x, threads=2)[:, case.rows]
            expected = x.double() @ weight.bfloat16().double().T
            size = x.double().abs() @ weight.double().abs().T
            assert bool(((y - expected).abs() <= 2e-6 * size).all())


def test_info_says_what_runs_and_why_nothing_better(monkeypatch: pytest.MonkeyPatch) -> None:
    said, features = info()["cpu"], cpu.cpu_features()
    assert said["matmul_isa"] == said["matmul_isas"][-1] == cpu.matmul_isa()
    needs = cpu.matmul_needs()
    assert said["matmul_isas"] == [isa for isa in needs if all(features[need] for need in needs[isa])]
    assert needs["portable"] == [] and all(set(needs[isa]) <= features.keys() for isa in needs)
    poorer = {name: there and "avx512" not in name for name, there in features.items()}
    monkeypatch.setattr(cpu, "cpu_features", lambda: poorer)
    monkeypatch.setattr(cpu, "matmul_isas", lambda: ("portable", "avx2"))
    said = info()["cpu"]
    assert said["missing"]["avx512"] == ["avx512f", "avx512bw", "avx512vl", "avx512dq"]
    assert "avx512_bf16 needs avx512f" in said["reason"] and "avx2" not in said["missing"]
    monkeypatch.setattr(cpu, "cpu_features", lambda: dict.fromkeys(features, False))
    monkeypatch.setattr(cpu, "matmul_isas", lambda: ("portable",))
    assert info()["cpu"]["missing"] == {}  # another kind of processor


def test_bfloat16_where_kernels_have_none_is_multiplied_in_float32() -> None:
    case = make(4, 3, 64, 32, isa="portable")
    x = activations(1, 64).bfloat16()
    assert torch.equal(product_of(case, x), product_of(case, x.float()))


def test_matmul_accumulates_in_the_rows_of_the_tile_only() -> None:
    case = make(4, 3, 64, 32, indexed=True)
    x, y = activations(2, 64), torch.full((2, case.out), 7.0)
    case.layer.product(x, y, add=True)
    others = np.setdiff1d(np.arange(case.out), case.rows)
    assert (y[:, others] == 7.0).all()
    assert torch.allclose(y[:, case.rows] - 7.0, x @ torch.from_numpy(case.weight).T, rtol=1e-4, atol=1e-3)


def test_rows_of_x_may_lie_apart() -> None:
    case, wide = make(4, 8, 64, 32), activations(5, 100)
    assert torch.equal(product_of(case, wide[:, :64]), product_of(case, wide[:, :64].contiguous()))


def parts() -> dict[str, Any]:
    """A good tile: what its description says, its stored arrays, and how it is bound."""
    return {
        "codes": torch.zeros(4, 32, dtype=torch.uint8),
        "scales": torch.ones(4, 2, dtype=torch.float16),
        "zeros": torch.zeros(4, 1, dtype=torch.uint8),
        "rows": torch.tensor([0, 2, 3, 7], dtype=torch.int32),
        "bits": 4,
        "group_size": 32,
        "symmetric": False,
        "shape": [8, 64],
        "threads": 1,
    }


def bind(**given: Any) -> _native.Layer:
    """Those parts, of which some are others; arrays that are None are left out."""
    made = parts() | given
    fields = {name: made[name] for name in ("codes", "scales", "zeros", "rows") if made[name] is not None}
    tile = {name: made[name] for name in ("bits", "group_size", "symmetric")} | {"format": "group_int"}
    tile |= {} if made["rows"] is None else {"rows": made.get("row_count", 4)}
    layout = {"shape": made["shape"], "tiles": [tile | made.get("tile", {})]}
    return _native.Layer(layout, fields, threads=made["threads"], isa=made.get("isa"))


FAULTS: list[tuple[str, Any, str]] = [
    ("codes", torch.zeros(4, 32), "codes is float32 [4, 32]"),
    ("codes", torch.zeros(4, 31, dtype=torch.uint8), "codes have 31 bytes a row"),
    ("codes", torch.zeros(4, 1, 32, dtype=torch.uint8), "codes is uint8 [4, 1, 32], expected uint8 [4, 32]"),
    ("codes", torch.zeros(4, 64, dtype=torch.uint8)[:, ::2], "codes is uint8 [4, 32] with strides [64, 2]"),
    ("codes", torch.zeros(32, dtype=torch.uint8), "codes is uint8 [32]"),
    ("codes", torch.zeros(0, 32, dtype=torch.uint8), "codes is uint8 [0, 32]"),
    ("codes", None, "field codes is missing"),
    ("scales", torch.ones(4, 2), "scales is float32 [4, 2]"),
    ("scales", torch.ones(4, 3, dtype=torch.float16), "scales is float16 [4, 3]"),
    ("scales", torch.ones(2, 4, dtype=torch.float16).T, "scales is float16 [4, 2] with strides [1, 4]"),
    ("zeros", torch.zeros(4, 2, dtype=torch.uint8), "zeros is uint8 [4, 2]"),
    ("zeros", torch.zeros(4, 1, dtype=torch.int8), "zeros is int8 [4, 1]"),
    ("rows", torch.tensor([0, 2, 2, 7], dtype=torch.int32), "rows hold 2 twice"),
    ("rows", torch.tensor([-1, 2, 3, 7], dtype=torch.int32), "rows hold -1"),
    ("rows", torch.tensor([0, 2, 3, 8], dtype=torch.int32), "rows hold 8"),
    ("rows", torch.tensor([0, 2, 3], dtype=torch.int32), "rows is int32 [3]"),
    ("rows", torch.tensor([0, 2, 3, 7]), "rows is int64 [4]"),
    ("bits", 3, "expected uint8 [3, 4, 32]"),
    ("bits", 0, "bits is 0"),
    ("bits", 9, "bits is 9"),
    ("bits", 8, "64 columns need 64"),
    ("bits", 2.5, "bits is no number"),
    ("bits", True, "bits is no number"),
    ("group_size", 0, "group_size is 0"),
    ("group_size", 2**62, "group_size is no number"),
    ("group_size", 2**31 - 1, "expected float16 or uint16 [4, 1]"),
    ("symmetric", 1, "symmetric is neither true nor false"),
    ("shape", [8, 0], "a layer of 8 x 0"),
    ("shape", [8, 65], "65 columns need 33"),
    ("shape", [8, 2**62], "shape is no number"),
    ("shape", [8], "shape is not [out, in]"),
    ("shape", "8x64", "shape is no list"),
    ("row_count", 9, "rows is 9, expected 1 to 8"),
    ("row_count", 0, "rows is 0, expected 1 to 8"),
    ("row_count", -1, "rows is no number"),
    ("tile", {"format": "ternary"}, "no kernel for tiles in the format ternary"),
    ("tile", {"format": 4}, "format is no text"),
    ("tile", {"format": "\ud800"}, "format is no text"),
    ("tile", {"act_bits": 9}, "act_bits is 9, expected 2 to 8"),
    ("tile", {"act_bits": 8}, "field act_clip is missing"),
    ("tile", {"cols": 64}, "field cols is missing"),
    ("threads", 0, "threads is 0"),
    ("isa", "avx1024", "isa 'avx1024' is unknown"),
]


@pytest.mark.parametrize("name", ["scales", "rows"])
def test_numbers_at_odd_addresses_are_refused(name: str) -> None:
    """The kernels' vector loads may be let loose on them, the compiler's code may not."""
    odd = at_odd_address(parts()[name])
    with pytest.raises(ValueError, match=f"{name} is .* at an address that is no multiple of its size"):
        bind(**{name: odd})
    bind(**{name: odd.clone()})


def test_inputs_at_odd_addresses_are_refused() -> None:
    layer, x = bind(), at_odd_address(torch.zeros(1, 64))
    for multiply in (
        lambda: layer.matmul(x, 1),
        lambda: layer.product(x, None, torch.zeros(1, 8), False, 1),
        lambda: layer.product(torch.zeros(1, 64), None, at_odd_address(torch.zeros(1, 8)), False, 1),
    ):
        with pytest.raises(ValueError, match="at an address that is no multiple of its size"):
            multiply()


def test_the_parts_that_the_faults_break_are_good() -> None:
    bind()


@pytest.mark.parametrize(("name", "value", "message"), FAULTS)
def test_a_bad_part_is_refused_by_name(name: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        bind(**{name: value})


@pytest.mark.parametrize(
    ("x", "y", "threads"),
    [
        (torch.zeros(1, 63), torch.zeros(1, 8), 1),
        (torch.zeros(1, 64).double(), torch.zeros(1, 8), 1),
        (torch.zeros(64), torch.zeros(1, 8), 1),
        (torch.zeros(1, 128)[:, ::2], torch.zeros(1, 8), 1),
        (torch.zeros(2, 64), torch.zeros(1, 8), 1),
        (torch.zeros(1, 64), torch.zeros(1, 7), 1),  # row 7 would be written past the end
        (torch.zeros(2, 64), torch.zeros(8, 2).T, 1),
        (torch.zeros(1, 64).half(), torch.zeros(1, 8), 1),
        (torch.zeros(1, 64).to(torch.int8), torch.zeros(1, 8), 1),
        (torch.zeros(1, 64), torch.zeros(1, 8).half(), 1),
        (torch.zeros(1, 64), torch.zeros(1, 8), 0),
        (torch.zeros(1, 64), torch.zeros(1, 8), 10**12),
    ],
)
def test_matmul_refuses_what_does_not_fit(x: torch.Tensor, y: torch.Tensor, threads: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        bind().product(x, None, y, False, threads)


def test_no_threads_is_an_error_not_the_default() -> None:
    case = make(4, 8, 64, 32)
    for threads in (0, -1, 2000):
        with pytest.raises(ValueError, match="threads is"):
            case.layer.product(torch.zeros(1, 64), torch.zeros(1, 8), threads=threads)
        if threads < 1:
            with pytest.raises(ValueError, match="threads is"):
                case.layer.matmul(torch.zeros(1, 64), threads)


def test_ids_beyond_32_bits_are_no_rows() -> None:
    layer = make(4, 8, 64, 32).layer
    for ids in ([2**32], [-1], [8], [0, 2**31]):
        with pytest.raises(ValueError, match="of a layer of 8 rows"):
            layer.rows(torch.tensor(ids))
    with pytest.raises(ValueError, match="single rows are those of"):
        make(4, 8, 64, 32, indexed=True).layer.rows(torch.tensor([0]))


def test_rows_changed_after_binding_change_nothing() -> None:
    rows = parts()["rows"]  # codes of 0 on a symmetric grid: every weight is -8
    layer, y = bind(zeros=None, symmetric=True, rows=rows), torch.zeros(1, 8)
    rows.fill_(10**6)
    layer.product(torch.ones(1, 64), None, y, False, 1)
    assert y.tolist() == [[-512, 0, -512, -512, 0, 0, 0, -512]]


@pytest.mark.parametrize(
    "out", [torch.zeros(8, 63), torch.zeros(8, 64).half(), torch.zeros(64, 8).T, torch.zeros(512)]
)
def test_dequantize_refuses_what_does_not_fit(out: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="expected"):
        bind().dequantize(out, 1)


def test_an_unknown_isa_is_refused_and_the_best_is_named() -> None:
    assert cpu.isa() == ISAS[-1] and cpu.matmul_isa() == PRODUCTS[-1]
    with pytest.raises(ValueError, match="sse9"):
        make(4, 1, 16, 16, isa="sse9")


def test_what_is_no_array_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="codes is no array"):
        bind(codes="text")


def test_no_tokens_have_no_product() -> None:
    none = torch.zeros(0, 8)
    bind().product(torch.zeros(0, 64), None, none, False, 1)
    assert bind().matmul(torch.zeros(0, 64), 1).shape == none.shape == (0, 8)


def test_outputs_are_set_added_to_or_rounded() -> None:
    for isa in PRODUCTS:
        case, x = make(4, 19, 200, 32, indexed=True, isa=isa), activations(23, 200)
        for inputs in (x[:1], x[:5], x):
            for given in (inputs, inputs.bfloat16()):
                want, y = product_of(case, given), torch.full((len(given), case.out + 3), 2.0)
                case.layer.product(given, y[:, : case.out], add=True, threads=2)
                torch.testing.assert_close(y[:, : case.out], want + 2, rtol=1e-5, atol=1e-3)
                assert (y[:, case.out :] == 2).all()
                half = torch.ones(len(given), case.out + 3, dtype=torch.bfloat16)
                case.layer.product(given, half[:, : case.out], threads=2)
                assert torch.equal(half[:, : case.out], want.bfloat16()) and (half[:, case.out :] == 1).all()


def test_what_matmul_does_not_take_as_it_is_comes_back_as_none() -> None:
    layer = bind()
    for x in (
        torch.zeros(1, 63),
        torch.zeros(1, 64).double(),
        torch.zeros(1, 64).half(),
        torch.zeros(64, 2).T,
        torch.zeros(1, 64, device="meta"),
        torch.tensor(1.0),
        np.zeros((1, 64), np.float32),
    ):
        assert layer.matmul(x, 1) is None
    y = layer.matmul(torch.ones(2, 3, 64), 1)
    assert y.shape == (2, 3, 8) and y.dtype == torch.float32
