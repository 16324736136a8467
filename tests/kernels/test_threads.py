"""The threads of the native kernels: any number gives the same bits, and idle ones harm nobody."""

from __future__ import annotations

import multiprocessing
import os
import resource
import subprocess
import sys
import threading
import time

import pytest
import torch

from anybit.kernels import cpu
from tests.kernels.cases import PRODUCTS, Case, activations, make, product_of

if not cpu.available():
    pytest.skip(str(cpu.why_not()), allow_module_level=True)

pytestmark = [pytest.mark.native, pytest.mark.alone]


@pytest.mark.parametrize("isa", PRODUCTS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_any_number_of_threads_gives_the_same_bits(bits: int, isa: str) -> None:
    case = make(bits, 301, 1539, 128, isa=isa)
    x = activations(5, 1539)
    for threads in (2, 3, 7):
        assert torch.equal(product_of(case, x, threads), product_of(case, x, 1))
        assert torch.equal(case.layer.dequantize(threads=threads), case.layer.dequantize(threads=1))


def test_several_python_threads_at_once() -> None:
    case, x = make(4, 301, 1539, 128), activations(1, 1539)
    want, wrong = product_of(case, x), []

    def work() -> None:
        wrong.extend(1 for _ in range(50) if not torch.equal(product_of(case, x, 2), want))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not wrong


def test_a_call_on_many_threads_slows_no_later_one() -> None:
    """Only the workers that a call asks for are woken: the others would each leave the processor once a call."""
    case, x = make(4, 1001, 1539, 128), activations(1, 1539)
    want = product_of(case, x, 48)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    for _ in range(100):
        time.sleep(0.0005)  # all fall asleep
        assert torch.equal(product_of(case, x, 2), want)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before < 100 * 16


def test_idle_workers_leave_the_processor_alone() -> None:
    case, x = make(4, 301, 1539, 128), activations(1, 1539)
    product_of(case, x, 8)
    before = time.process_time()
    time.sleep(1)
    assert time.process_time() - before < 0.1


MASKS = """
import os, sys, threading, time
if "ANYBIT_BUILD" in os.environ:  # as in conftest.py: an editable install would bring another build
    sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable")]
    sys.path.insert(0, os.environ["ANYBIT_BUILD"])
import torch
from anybit.formats import Float16Layout
from anybit.formats.layout import LayerLayout
from anybit.kernels.cpu_layer import Layer

def masks():
    return {task: os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")}

torch.set_num_threads(1)
threading.Thread(target=int).start()  # with the first thread, ThreadSanitizer starts one of its own
layer = Layer(LayerLayout((501, 700), (Float16Layout(),)), {"values": torch.randn(501, 700).bfloat16()})
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


def run_script(text: str, **env: str) -> None:
    argv = [sys.executable, "-c", MASKS + text]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=os.environ | env)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


NO_MEMORY = """
import resource, threading
columns = torch.arange(2**18, dtype=torch.int32)[1:]
wide = Layer(
    LayerLayout((4, 2**18), (Float16Layout(cols=len(columns)),)),
    {"values": torch.randn(4, len(columns)).half(), "cols": columns},
)
x, y, want, refused = torch.randn(8, 2**18), torch.empty(8, 4), torch.empty(8, 4), []
asked, done = threading.Event(), threading.Event()

def small(threads):  # every thread that multiplies keeps something: that is there when memory is short
    layer.product(torch.ones(200, 700), torch.empty(200, 501), threads=threads)

def other():
    small(1), done.set(), asked.wait()
    try:
        wide.product(x, torch.empty(8, 4), threads=2)
    except MemoryError:
        refused.append(True)
    done.set()

threading.Thread(target=other).start()
for _ in range(30):
    small(2)
wide.product(x, want, threads=1)  # the worker has met no inputs as wide
done.wait(), done.clear()
held, size = [], 1 << 24
pages = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (pages, resource.RLIM_INFINITY))
while size >= 1 << 19:
    try:
        held.append(bytearray(size))
    except MemoryError:
        size //= 2
asked.set(), done.wait()
for _ in range(30):
    wide.product(x, y.zero_(), threads=2)
    assert torch.equal(y, want)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
del held
assert refused
wide.product(x, y.zero_(), threads=2)
assert torch.equal(y, want)
"""


@pytest.mark.slow
@on_linux
@pytest.mark.skipif("ANYBIT_BUILD" in os.environ, reason="sanitizers need the address space")
def test_a_thread_that_gets_no_memory_helps_nobody_and_harms_nobody() -> None:
    """A worker leaves the product to the others, and a caller raises MemoryError before anything is done."""
    run_script(NO_MEMORY, MALLOC_ARENA_MAX="1")  # or threads would have some set aside


@pytest.mark.slow
def test_more_threads_in_pytorch_than_kernels_take() -> None:
    script = "import torch; from anybit.kernels import cpu; torch.set_num_threads(2000); print(cpu.used_threads(None))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout == "1024\n"


def _in_child(case: Case, x: torch.Tensor, want: bytes, answer: multiprocessing.Queue[bool]) -> None:
    torch.set_num_threads(1)
    answer.put(product_of(case, x, 2).numpy().tobytes() == want)


def test_threads_after_a_fork() -> None:
    case, x = make(4, 301, 1539, 128), activations(1, 1539)
    want = (
        product_of(case, x, 2).numpy().tobytes()
    )  # the pool has its threads now; the child has none of them
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    child = context.Process(target=_in_child, args=(case, x, want, answer))
    child.start()
    try:
        assert answer.get(timeout=60)
    finally:
        child.kill()
        child.join()
