"""The memory that native tiles hold and give back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from anybit.kernels import cpu

if not cpu.available():
    pytest.skip(str(cpu.why_not()), allow_module_level=True)

pytestmark = [pytest.mark.native, pytest.mark.alone]


MEMORY = """
import mmap
import resource
from pathlib import Path
import torch
from anybit.formats import GroupIntLayout
from anybit.formats.layout import LayerLayout
from anybit.kernels.cpu_layer import Layer

def tile(rows=256):
    codes = torch.frombuffer(mmap.mmap(-1, rows * 4096), dtype=torch.uint8).view(rows, 4096).fill_(129)
    scales = torch.ones(rows, 32).half()  # and codes go back to the system: what a tile keeps is all that counts
    layout = LayerLayout((rows, 4096), (GroupIntLayout(bits=8, group_size=128, symmetric=True),))
    return Layer(layout, {"codes": codes, "scales": scales})

def product_of(tile):
    return set(tile.matmul(torch.ones(1, 4096), 1).ravel().tolist())

def resident(index=1):
    return int(Path("/proc/self/statm").read_text().split()[index]) * resource.getpagesize()

assert product_of(tile()) == {4096.0}
"""
IN_OWN_MEMORY = pytest.mark.skipif(
    not Path("/proc/self/statm").exists() or "ANYBIT_BUILD" in os.environ,
    reason="no /proc, or one that sanitizers fill",
)


@pytest.mark.slow
@IN_OWN_MEMORY
def test_tiles_share_memory_and_give_it_back() -> None:
    program = """
before = resident()
tiles = [tile() for _ in range(128)]  # of 1 MB: more than share one region
assert 128e6 < resident() - before < 160e6
del tiles[::2]
tiles += [tile() for _ in range(8)]
assert all(product_of(each) == {4096.0} for each in tiles)
del tiles
assert resident() - before < 16e6
"""
    subprocess.run([sys.executable, "-c", MEMORY + program], check=True, timeout=300)


@pytest.mark.slow
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
assert all(product_of(each) == {4096.0} for each in tiles)
"""
    subprocess.run([sys.executable, "-c", MEMORY + program], check=True, timeout=300)
