"""The native kernels against plain numpy, over shapes that fit nothing."""

from __future__ import annotations

import multiprocessing
import os
import resource
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from anybit.kernels import cpu, info
from anybit.kernels.dispatch import NEEDS

if not cpu.available():
    pytest.skip(str(cpu.why_not()), allow_module_level=True)

from anybit import _native


def isas() -> list[str]:
    features = cpu.cpu_features()
    names = ["portable"]
    names += ["avx2"] if all(features[f] for f in ("avx2", "fma", "f16c")) else []
    wide = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
    return names + (["avx512"] if "avx2" in names and all(features[f] for f in wide) else [])


ISAS = isas()
PRODUCTS = cpu.matmul_isas()
BF16 = [isa for isa in PRODUCTS if isa.endswith("_bf16")]


def pack(codes: np.ndarray, bits: int, padding: int, noise: np.random.Generator | None) -> np.ndarray:
    """Codes [r, c] as stored, one bit at a time; what pads a row holds garbage (or 0)."""
    r, c = codes.shape
    width = bits if bits in (2, 4, 8) else 1
    planes = [codes] if width == bits else [codes >> p & 1 for p in reversed(range(bits))]
    row_bytes = -(-c * width // (8 * padding)) * padding
    packed = np.zeros((len(planes), r, row_bytes * 8), np.uint8)
    if noise is not None:
        packed = noise.integers(0, 2, packed.shape, np.uint8)
    for p, plane in enumerate(planes):
        for j in range(c):
            for t in range(width):
                packed[p, :, j * width + t] = plane[:, j] >> t & 1
    stored = np.packbits(packed, axis=-1, bitorder="little")
    return stored[0] if bits in (2, 4, 8) else stored


@dataclass
class Case:
    """A random tile, its stored form bound to the kernels, and its weights as numpy has them."""

    tile: cpu.GroupInt
    weight: np.ndarray  # float32 [r, c]
    rows: np.ndarray  # output rows
    out: int


def make(  # noqa: PLR0913
    bits: int,
    r: int,
    c: int,
    group: int,
    symmetric: bool = False,
    indexed: bool = False,
    padding: int = 16,
    isa: str | None = None,
) -> Case:
    rng = np.random.default_rng([bits, r, c, group])
    groups = -(-c // group)
    codes = rng.integers(0, 2**bits, (r, c), dtype=np.uint8)
    scales = rng.uniform(-1, 1, (r, groups)).astype(np.float16)
    scales.flat[0] = np.float16(6e-8)  # subnormal
    zeros = None if symmetric else rng.integers(0, 2**bits, (r, groups), dtype=np.uint8)
    out = r + 5 if indexed else r
    rows = np.sort(rng.permutation(out)[:r]).astype(np.int32)
    column_group = np.arange(c) // group
    zero = 2 ** (bits - 1) if zeros is None else zeros[:, column_group].astype(np.float32)
    weight = (codes.astype(np.float32) - zero) * scales.astype(np.float32)[:, column_group]
    tile = cpu.group_int(
        torch.from_numpy(pack(codes, bits, padding, rng)),
        torch.from_numpy(scales),
        None if zeros is None else torch.from_numpy(zeros),
        torch.from_numpy(rows) if indexed else None,
        bits=bits,
        group_size=group,
        columns=c,
        isa=isa,
    )
    return Case(tile, weight.astype(np.float32), rows, out)


def activations(m: int, c: int) -> torch.Tensor:
    x = torch.randn(m, c, generator=torch.Generator().manual_seed(m * c))
    x[:, 0] *= 100  # a massive activation, and none of zero mean
    return x + 0.5


def product(case: Case, x: torch.Tensor, threads: int = 1) -> torch.Tensor:
    y = torch.zeros(x.shape[0], case.out)
    case.tile.matmul(x, y, threads)
    return y


def check_product(case: Case, x: torch.Tensor, y: torch.Tensor, bits: int) -> None:
    exact = np.zeros((x.shape[0], case.out))
    exact[:, case.rows] = x.numpy().astype(np.float64) @ case.weight.astype(np.float64).T
    size = np.abs(x.numpy()) @ np.abs(case.weight).T + np.abs(x.numpy()).sum(-1, keepdims=True) * 2**bits
    bound = np.full((x.shape[0], case.out), 1e-30)
    bound[:, case.rows] = 1e-6 * size + 1e-6
    assert (np.abs(y.numpy() - exact) <= bound).all()


GROUPS = (16, 32, 64, 128, 100_000)
SHAPES = [
    (r, c, g)
    for r in (1, 3, 41, 64)
    for c in (1, 15, 16, 17, 127, 576)
    for g in GROUPS
    if g <= c or g == 100_000
]
SHAPES += [(11, 1539, 128), (9, 4200, 100_000), (5, 2085, 30)]


@pytest.mark.parametrize("isa", PRODUCTS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_dequantize_is_exact(bits: int, isa: str) -> None:
    for i, (r, c, group) in enumerate(SHAPES):
        case = make(bits, r, c, group, symmetric=i % 3 == 0, padding=(16, 1, 4)[i % 3], isa=isa)
        got = case.tile.dequantize(torch.float32, 1)
        assert np.array_equal(got.numpy().view(np.uint32), case.weight.view(np.uint32)), (r, c, group)
        half = case.tile.dequantize(torch.bfloat16, 1)
        assert torch.equal(half, torch.from_numpy(case.weight).bfloat16()), (r, c, group)
        ids = torch.randint(0, r, (5,))
        assert torch.equal(case.tile.dequantize_rows(ids), got[ids])


@pytest.mark.parametrize("isa", PRODUCTS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_what_is_stored_comes_back(bits: int, isa: str) -> None:
    rng = np.random.default_rng(bits)
    for i, (r, c, group) in enumerate(SHAPES):
        groups = -(-c // group)
        codes = rng.integers(0, 2**bits, (r, c), dtype=np.uint8)
        stored = torch.from_numpy(pack(codes, bits, 16, None))
        scales = torch.from_numpy(rng.uniform(-1, 1, (r, groups)).astype(np.float16))
        zeros = torch.from_numpy(rng.integers(0, 2**bits, (r, groups), dtype=np.uint8)) if i % 2 else None
        tile = cpu.group_int(
            stored, scales, zeros, None, bits=bits, group_size=group, columns=c, threads=1 + i % 3, isa=isa
        )
        for made, given in zip(tile.restore(), (stored, scales, zeros)):
            assert (made is None) if given is None else torch.equal(made, given), (r, c, group)


@pytest.mark.parametrize("isa", PRODUCTS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_matmul_agrees_with_numpy(bits: int, isa: str) -> None:
    for i, (r, c, group) in enumerate(SHAPES):
        case = make(
            bits, r, c, group, symmetric=i % 3 == 0, indexed=i % 2 == 0, padding=(16, 1)[i % 2], isa=isa
        )
        x = activations(1 + i % 21, c)
        check_product(case, x, product(case, x), bits)


@pytest.mark.parametrize("isa", PRODUCTS)
@pytest.mark.parametrize(("bits", "group"), [(2, 64), (4, 32), (4, 16), (8, 128), (3, 128)])
def test_a_batch_equals_its_tokens(bits: int, group: int, isa: str) -> None:
    case = make(bits, 19, 1539, group, isa=isa)
    x = activations(19, 1539)
    single, many = torch.cat([product(case, x[k : k + 1]) for k in range(19)]), product(case, x)
    for m in range(1, 20):  # more than 16 are summed in an order of their own
        assert torch.equal(product(case, x[:m]), (single if m <= 16 else many)[:m]), m


@pytest.mark.parametrize("isa", BF16)
@pytest.mark.parametrize("bits", range(1, 9))
def test_products_in_bfloat16_are_exact(bits: int, isa: str) -> None:
    for i, (r, c, group) in enumerate(SHAPES):
        case = make(bits, r, c, group, symmetric=i % 3 == 0, indexed=i % 2 == 0, isa=isa)
        x = activations(1 + i % cpu.few_tokens(torch.bfloat16, isa), c).bfloat16()
        y = product(case, x, threads=1 + i % 2)
        check_product(case, x.float(), y, bits=12)  # codes of 8 bits carry 17 * 128 through the sum
        for k in range(len(x)):
            assert torch.equal(product(case, x[k : k + 1]), y[k : k + 1])


@pytest.mark.parametrize("isa", BF16)
@pytest.mark.parametrize("bits", range(1, 9))
def test_many_tokens_in_bfloat16_meet_rounded_weights(bits: int, isa: str) -> None:
    for r, c, group in SHAPES[::3]:
        case = make(bits, r, c, group, indexed=True, isa=isa)
        weight = torch.from_numpy(case.weight)
        for tokens in (cpu.few_tokens(torch.bfloat16, isa) + 1, 29):
            x = activations(tokens, c).bfloat16()
            y = product(case, x, threads=2)[:, case.rows]
            expected = x.double() @ weight.bfloat16().double().T
            size = x.double().abs() @ weight.double().abs().T
            assert bool(((y - expected).abs() <= 2e-6 * size).all())


def test_info_says_what_runs_and_why_nothing_better(monkeypatch: pytest.MonkeyPatch) -> None:
    said, features = info()["cpu"], cpu.cpu_features()
    assert said["matmul_isa"] == said["matmul_isas"][-1] == cpu.matmul_isa()
    assert all(features[need] for isa in said["matmul_isas"][1:] for need in NEEDS[isa])
    poorer = {name: there and "avx512" not in name for name, there in features.items()}
    monkeypatch.setattr(cpu, "cpu_features", lambda: poorer)
    monkeypatch.setattr(cpu, "matmul_isas", lambda: ("portable", "avx2"))
    said = info()["cpu"]
    assert said["missing"]["avx512"] == ["avx512f", "avx512bw", "avx512vl", "avx512dq"]
    assert "avx512_bf16 needs avx512f" in said["reason"] and "avx2" not in said["missing"]
    monkeypatch.setattr(cpu, "cpu_features", lambda: dict.fromkeys(features, False))
    monkeypatch.setattr(cpu, "matmul_isas", lambda: ("portable",))
    assert info()["cpu"]["missing"] == {}  # another kind of processor


def test_bfloat16_is_refused_where_the_kernels_have_none() -> None:
    case = make(4, 3, 64, 32, isa="portable")
    assert not case.tile.takes_bf16
    with pytest.raises(ValueError, match="x is uint16"):
        product(case, activations(1, 64).bfloat16())


def test_matmul_accumulates_in_the_rows_of_the_tile_only() -> None:
    case = make(4, 3, 64, 32, indexed=True)
    x, y = activations(2, 64), torch.full((2, case.out), 7.0)
    case.tile.matmul(x, y)
    others = np.setdiff1d(np.arange(case.out), case.rows)
    assert (y[:, others] == 7.0).all()
    assert torch.allclose(y[:, case.rows] - 7.0, x @ torch.from_numpy(case.weight).T, rtol=1e-4, atol=1e-3)


def test_rows_of_x_may_lie_apart() -> None:
    case, wide = make(4, 8, 64, 32), activations(5, 100)
    assert torch.equal(product(case, wide[:, :64]), product(case, wide[:, :64].contiguous()))


@pytest.mark.parametrize("isa", PRODUCTS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_any_number_of_threads_gives_the_same_bits(bits: int, isa: str) -> None:
    case = make(bits, 301, 1539, 128, isa=isa)
    x = activations(5, 1539)
    for threads in (2, 3, 7):
        assert torch.equal(product(case, x, threads), product(case, x, 1))
        assert torch.equal(case.tile.dequantize(threads=threads), case.tile.dequantize(threads=1))


def test_several_python_threads_at_once() -> None:
    case, x = make(4, 301, 1539, 128), activations(1, 1539)
    want, wrong = product(case, x), []

    def work() -> None:
        wrong.extend(1 for _ in range(50) if not torch.equal(product(case, x, 2), want))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not wrong


def test_a_call_on_many_threads_slows_no_later_one() -> None:
    """Only the workers that a call asks for are woken: the others would each leave the processor once a call."""
    case, x = make(4, 1001, 1539, 128), activations(1, 1539)
    want = product(case, x, 48)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    for _ in range(100):
        time.sleep(0.0005)  # all fall asleep
        assert torch.equal(product(case, x, 2), want)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before < 100 * 16


def test_idle_workers_leave_the_processor_alone() -> None:
    case, x = make(4, 301, 1539, 128), activations(1, 1539)
    product(case, x, 8)
    before = time.process_time()
    time.sleep(1)
    assert time.process_time() - before < 0.1


MASKS = """
import os, sys, time, torch
from anybit.kernels import cpu

def masks():
    return {task: os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")}

torch.set_num_threads(1)
layer = cpu.Layer(501, 700)
layer.add(cpu.Float16(torch.randn(501, 700).bfloat16(), None))
x = torch.randn(1, 700)
want, others = layer.matmul(x, threads=1), masks()

def multiply(threads):
    assert torch.equal(layer.matmul(x, threads=threads), want)

def workers():
    return [mask for task, mask in masks().items() if task not in others]

def wait_for(done):
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end, workers()
        time.sleep(0.01)

allowed = os.sched_getaffinity(0)
multiply(8)
assert len(workers()) == 7
"""
on_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="workers go elsewhere on Linux only"
)


def run_script(text: str) -> None:
    done = subprocess.run([sys.executable, "-c", MASKS + text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@on_linux
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="there is no other processor")
def test_sleeping_workers_are_kept_from_their_wakers_processor_until_they_wake() -> None:
    run_script("""
seen = 0
for _ in range(500):
    time.sleep(0.001)
    multiply(8)
    seen += any(len(mask) == len(allowed) - 1 and mask < allowed for mask in workers())
    multiply(2)
    if seen > 2: break
assert seen > 2
wait_for(lambda: all(mask == allowed for mask in workers()))
""")


@on_linux
def test_workers_run_where_somebody_says_while_they_sleep() -> None:
    run_script("""
one = {min(allowed)}
for threads in (8, 2, 4, 8):
    multiply(8), multiply(2)
    time.sleep(0.05)
    for task in masks():
        if task not in others: os.sched_setaffinity(int(task), one)
    for _ in range(3):
        multiply(threads)
        time.sleep(0.01)
    assert all(mask == one for mask in workers()), workers()
""")


@on_linux
def test_one_processor_for_several_threads() -> None:
    run_script("""
one = {min(allowed)}
for task in masks(): os.sched_setaffinity(int(task), one)
for _ in range(5):
    time.sleep(0.002)
    multiply(8)
assert all(mask == one for mask in masks().values())
""")


def test_more_threads_in_pytorch_than_kernels_take() -> None:
    script = (
        "import torch; from anybit.kernels import cpu; torch.set_num_threads(2000); print(cpu._threads(None))"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout == "1024\n"


def _in_child(case: Case, x: torch.Tensor, want: bytes, answer: multiprocessing.Queue[bool]) -> None:
    torch.set_num_threads(1)
    answer.put(product(case, x, 2).numpy().tobytes() == want)


def test_threads_after_a_fork() -> None:
    case, x = make(4, 301, 1539, 128), activations(1, 1539)
    want = product(case, x, 2).numpy().tobytes()  # the pool has its threads now; the child has none of them
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    child = context.Process(target=_in_child, args=(case, x, want, answer))
    child.start()
    try:
        assert answer.get(timeout=60)
    finally:
        child.kill()
        child.join()


def gptq_oracle(w, hinv, scale, zero, maxq):  # type: ignore[no-untyped-def]
    """The inner loop of GPTQ as its text says it, in float32."""
    w = w.copy()
    codes, error = np.zeros(w.shape, np.uint8), np.zeros_like(w)
    for i in range(w.shape[1]):
        s, z = scale[:, i], zero[:, i]
        ratio = np.divide(w[:, i], s, out=np.zeros_like(s), where=s != 0)
        q = np.clip(np.rint(ratio) + z, 0, maxq)
        error[:, i] = (w[:, i] - s * (q - z)) / hinv[i, i]
        w[:, i + 1 :] -= error[:, i, None] * hinv[i, None, i + 1 :]
        codes[:, i] = q
    return w, codes, error


def gptq_problem(rows: int, n: int):  # type: ignore[no-untyped-def]
    rng = np.random.default_rng([rows, n])
    w = rng.standard_normal((rows, n)).astype(np.float32)
    hinv = np.triu(rng.uniform(-0.3, 0.3, (n, n)) + 2 * np.eye(n)).astype(np.float32)
    maxq = rng.choice([3.0, 15.0, 255.0], rows).astype(np.float32)
    scale = rng.uniform(0.01, 0.6, (rows, n)).astype(np.float32)
    scale[0, ::3] = 0
    w[-1, 0] = 1e9  # far outside the grid
    zero = np.floor(rng.uniform(0, 1, (rows, n)) * (maxq[:, None] + 1)).astype(np.float32)
    return w, hinv, scale, zero, maxq


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (3, 17), (16, 128), (37, 40), (130, 128)])
def test_gptq_block_is_the_oracle_to_the_bit(rows: int, n: int, isa: str) -> None:
    w, hinv, scale, zero, maxq = gptq_problem(rows, n)
    want = gptq_oracle(w, hinv, scale, zero, maxq)
    for threads in (1, 2, 3):
        block = torch.from_numpy(w.copy())
        given = [torch.from_numpy(a) for a in (hinv, scale, zero, maxq)]
        codes, error = cpu.gptq_block(block, *given, threads=threads, isa=isa)
        assert np.array_equal(codes.numpy(), want[1])
        assert np.array_equal(block.numpy(), want[0])
        assert np.array_equal(error.numpy(), want[2])


def test_gptq_block_takes_one_scale_per_row_and_a_slice_of_a_matrix() -> None:
    w, hinv, scale, zero, maxq = gptq_problem(20, 24)
    scale, zero = scale[:, :1].repeat(24, 1), zero[:, :1].repeat(24, 1)
    want = gptq_oracle(w, hinv, scale, zero, maxq)
    matrix = torch.full((20, 40), 3.0)
    matrix[:, 8:32] = torch.from_numpy(w)
    given = [torch.from_numpy(a) for a in (hinv, scale[:, 0], zero[:, 0], maxq)]
    codes, _ = cpu.gptq_block(matrix[:, 8:32], *given)
    assert np.array_equal(matrix[:, 8:32].numpy(), want[0]) and np.array_equal(codes.numpy(), want[1])
    assert (matrix[:, :8] == 3.0).all() and (matrix[:, 32:] == 3.0).all()


def test_gptq_block_survives_nan() -> None:
    w, hinv, scale, zero, maxq = gptq_problem(3, 8)
    w[1, 2], zero[2, 1] = np.nan, np.nan
    given = [torch.from_numpy(a) for a in (w, hinv, scale, zero, maxq)]
    codes, _ = cpu.gptq_block(*given)
    assert (codes.numpy() <= maxq[:, None]).all()


def parts() -> dict[str, object]:
    return {
        "codes": torch.zeros(4, 32, dtype=torch.uint8),
        "scales": torch.ones(4, 2, dtype=torch.float16),
        "zeros": torch.zeros(4, 2, dtype=torch.uint8),
        "rows": torch.tensor([0, 2, 3, 7], dtype=torch.int32),
        "bits": 4,
        "group_size": 32,
        "columns": 64,
        "threads": 1,
    }


FAULTS = [
    ("codes", torch.zeros(4, 32)),
    ("codes", torch.zeros(4, 31, dtype=torch.uint8)),
    ("codes", torch.zeros(4, 1, 32, dtype=torch.uint8)),
    ("codes", torch.zeros(4, 64, dtype=torch.uint8)[:, ::2]),
    ("codes", torch.zeros(32, dtype=torch.uint8)),
    ("codes", torch.zeros(0, 32, dtype=torch.uint8)),
    ("scales", torch.ones(4, 2)),
    ("scales", torch.ones(4, 3, dtype=torch.float16)),
    ("scales", torch.ones(2, 4, dtype=torch.float16).T),
    ("zeros", torch.zeros(4, 1, dtype=torch.uint8)),
    ("zeros", torch.zeros(4, 2, dtype=torch.int8)),
    ("rows", torch.tensor([0, 2, 2, 7], dtype=torch.int32)),
    ("rows", torch.tensor([-1, 2, 3, 7], dtype=torch.int32)),
    ("rows", torch.tensor([0, 2, 3], dtype=torch.int32)),
    ("rows", torch.tensor([0, 2, 3, 7])),
    ("bits", 3),
    ("bits", 0),
    ("bits", 9),
    ("bits", 8),
    ("group_size", 0),
    ("group_size", 2**62),
    ("columns", 0),
    ("columns", 65),
    ("columns", 2**62),
    ("threads", 0),
    ("isa", "avx1024"),
]


def test_the_parts_that_the_faults_break_are_good() -> None:
    _native.GroupInt(**parts())


@pytest.mark.parametrize(("name", "value"), FAULTS)
def test_a_bad_part_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"expected|need|unknown"):
        _native.GroupInt(**(parts() | {name: value}))


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
        (torch.zeros(1, 64), torch.zeros(1, 8).half(), 1),
        (torch.zeros(1, 64), torch.zeros(1, 8), 0),
        (torch.zeros(1, 64), torch.zeros(1, 8), 10**12),
    ],
)
def test_matmul_refuses_what_does_not_fit(x: torch.Tensor, y: torch.Tensor, threads: int) -> None:
    for tile in (
        _native.GroupInt(**parts()),
        _native.GroupInt(**(parts() | {"rows": None})),
    ):  # all: out is 4
        with pytest.raises(ValueError, match=r"expected|up to"):
            tile.matmul(x, y, threads)


def test_no_threads_is_an_error_not_the_default() -> None:
    case = make(4, 8, 64, 32)
    for threads in (0, -1, 2000):
        with pytest.raises(ValueError, match="threads is"):
            case.tile.matmul(torch.zeros(1, 64), torch.zeros(1, 8), threads)


def test_ids_beyond_32_bits_are_no_rows() -> None:
    tile = make(4, 8, 64, 32).tile
    for ids in ([2**32], [-1], [8], [0, 2**31]):
        with pytest.raises(ValueError, match="of a tile of 8 rows"):
            tile.dequantize_rows(torch.tensor(ids))


def test_rows_changed_after_binding_change_nothing() -> None:
    given = parts()
    tile = _native.GroupInt(**given)
    given["rows"].fill_(10**6)  # type: ignore[attr-defined]
    tile.matmul(torch.ones(1, 64), torch.zeros(1, 8), 1)


MEMORY = """
import resource
from pathlib import Path
import torch
from anybit.kernels import cpu

def tile(rows=256):
    codes, scales = torch.full((rows, 4096), 129, dtype=torch.uint8), torch.ones(rows, 32).half()
    return cpu.group_int(codes, scales, None, None, bits=8, group_size=128, columns=4096)

def product(tile):
    y = torch.zeros(1, tile.rows)
    tile.matmul(torch.ones(1, 4096), y, 1)
    return set(y.ravel().tolist())

def resident(index=1):
    return int(Path("/proc/self/statm").read_text().split()[index]) * resource.getpagesize()

assert product(tile()) == {4096.0}
"""
IN_OWN_MEMORY = pytest.mark.skipif(
    not Path("/proc/self/statm").exists() or "ANYBIT_BUILD" in os.environ,
    reason="no /proc, or one that sanitizers fill",
)


@IN_OWN_MEMORY
def test_tiles_share_memory_and_give_it_back() -> None:
    program = """
before = resident()
tiles = [tile() for _ in range(128)]  # of 1 MB: more than share one region
assert 128e6 < resident() - before < 160e6
del tiles[::2]
tiles += [tile() for _ in range(8)]
assert all(product(each) == {4096.0} for each in tiles)
del tiles
assert resident() - before < 16e6
"""
    subprocess.run([sys.executable, "-c", MEMORY + program], check=True, timeout=300)


@IN_OWN_MEMORY
def test_a_tile_that_finds_no_memory_harms_no_other() -> None:
    program = """
first = tile()
resource.setrlimit(resource.RLIMIT_AS, (resident(0) + 200 * 2**20, resource.RLIM_INFINITY))
tiles = [first]
try:
    while True:
        tiles.append(tile(16384))  # 64 MB
except (MemoryError, RuntimeError):  # PyTorch's arrays, or the tile's
    pass
tiles += [tile() for _ in range(8)]
assert all(product(each) == {4096.0} for each in tiles)
"""
    subprocess.run([sys.executable, "-c", MEMORY + program], check=True, timeout=300)


@pytest.mark.parametrize(
    "out", [torch.zeros(4, 63), torch.zeros(4, 64).half(), torch.zeros(64, 4).T, torch.zeros(256)]
)
def test_dequantize_refuses_what_does_not_fit(out: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="expected"):
        _native.GroupInt(**parts()).dequantize(out, 1)


@pytest.mark.parametrize("at", range(7))
def test_gptq_block_refuses_what_does_not_fit(at: int) -> None:
    def given() -> list[torch.Tensor]:
        square, row = torch.eye(8), torch.ones(8)
        return [
            torch.zeros(8, 8),
            square,
            square + 1,
            square,
            row,
            torch.zeros(8, 8, dtype=torch.uint8),
            square + 0,
        ]

    _native.gptq_block(*given(), 1)
    for bad in (torch.zeros(8, 9), torch.zeros(8, 8).double(), torch.zeros(()), torch.zeros(2, 8, 8)):
        arguments = given()
        arguments[at] = bad
        with pytest.raises(ValueError, match="expected"):
            _native.gptq_block(*arguments, 1)


def test_gptq_block_refuses_a_broken_factor_and_codes_beyond_a_byte() -> None:
    w, hinv, scale, zero, maxq = (torch.from_numpy(a) for a in gptq_problem(4, 8))
    for broken in (0.0, -1.0, float("nan"), float("inf")):
        bad = hinv.clone()
        bad[5, 5] = broken
        with pytest.raises(ValueError, match=r"hinv\[5, 5\]"):
            cpu.gptq_block(w, bad, scale, zero, maxq)
    with pytest.raises(ValueError, match="maxq"):
        cpu.gptq_block(w, hinv, scale, zero, maxq + 256)


def test_an_unknown_isa_is_refused_and_the_best_is_named() -> None:
    assert cpu.isa() == ISAS[-1] and cpu.matmul_isa() == PRODUCTS[-1]
    with pytest.raises(ValueError, match="sse9"):
        make(4, 1, 16, 16, isa="sse9")


def test_a_tile_without_rows_or_tokens_does_nothing() -> None:
    empty = {
        "codes": torch.zeros(0, 32, dtype=torch.uint8),
        "scales": torch.ones(0, 2, dtype=torch.float16),
        "zeros": None,
        "rows": torch.zeros(0, dtype=torch.int32),
    }
    _native.GroupInt(**(parts() | empty)).matmul(torch.zeros(1, 64), torch.zeros(1, 8), 1)
    _native.GroupInt(**parts()).matmul(torch.zeros(0, 64), torch.zeros(0, 8), 1)


@pytest.mark.parametrize(("tokens", "n"), [(1, 1), (3, 5), (7, 47), (64, 48), (65, 49), (300, 577)])
def test_moments_add_the_exact_products(tokens: int, n: int) -> None:
    if not cpu.has_moments():
        pytest.skip("no AVX512-BF16 on this machine")
    generator = torch.Generator().manual_seed(tokens * n)
    wide = torch.randn(tokens, n + 3, generator=generator).bfloat16()
    x, start = wide[:, 1 : n + 1], torch.randn(n, n, generator=generator)
    start = start + start.T
    results = []
    for threads in (1, 2, 3):
        hessian = start.clone()
        cpu.moments(x, hessian, threads)
        results.append(hessian)
    exact = start.double() + x.double().T @ x.double()
    torch.testing.assert_close(results[0].double(), exact, rtol=1e-5, atol=1e-5 * tokens**0.5)
    assert torch.equal(results[0], results[0].T)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_moments_refuse_what_does_not_fit() -> None:
    if not cpu.has_moments():
        pytest.skip("no AVX512-BF16 on this machine")
    x = torch.ones(4, 6).bfloat16()
    for bad_x, bad_h in (
        (x.float(), torch.zeros(6, 6)),
        (x, torch.zeros(5, 5)),
        (x, torch.zeros(6, 6).double()),
        (x.T, torch.zeros(4, 4)),
        (x, torch.zeros(6, 12)[:, ::2]),
    ):
        with pytest.raises(ValueError, match="expected"):
            cpu.moments(bad_x, bad_h)
