"""The native extension, called as nobody calls it: layouts and arrays that do not belong together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from anybit import _native
from anybit.formats.weight import PackedWeight
from anybit.kernels import cpu
from anybit.kernels.cpu_layer import _tables
from tests.fuzz import layouts, mutate
from tests.fuzz.bases import Bases
from tests.kernels.cases import at_odd_address

REFUSALS = (ValueError, TypeError)  # in words, before a pointer is used
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int64)
THREADS = (1, 1, 2, 3, 0, -1, 1025, 2**40)
MOST = 2**22  # entries of an array that a mutated layout asks for


@contextmanager
def refused(counts: list[str]) -> Iterator[None]:
    """Note what is refused; anything else that is raised is a finding."""
    try:
        yield
    except REFUSALS as error:
        counts.append(f"{type(error).__name__}: {error}")


def case(rng: Random, bases: Bases, folder: Path) -> str:
    weight = layouts.filled(rng, layouts.random_layout(rng))
    torch.manual_seed(rng.randrange(2**31))
    layout, fields = weight.layout.to_json(), dict(weight.tensors)
    said: list[str] = []
    if rng.random() < 0.4:
        mutate.edit(rng, layout)
    if rng.random() < 0.4:
        edit_fields(rng, fields)
    isa = rng.choice([*cpu.matmul_isas(), "sse", ""]) if rng.random() < 0.9 else None
    kinds = {
        name: (getattr(held, "dtype", held), getattr(held, "shape", ())) for name, held in fields.items()
    }
    print(f"{layout!r}\n{kinds}\n{isa}"[:5000])
    layer: Any = None
    with refused(said):
        int8 = rng.random() < 0.3
        tables = _tables(rng.choice((isa, isa, None)), int8 if rng.random() < 0.9 else not int8)
        layer = _native.Layer(layout, fields, int8, tables, rng.choice(THREADS), isa)
    if layer is not None:
        called(rng, layer, layout, weight, said)
    print("\n".join(said)[:5000])
    return "error" if layer is None else "right"  # bound, and every call refused or done


def called(rng: Random, layer: _native.Layer, layout: Any, weight: PackedWeight, said: list[str]) -> None:
    """Everything that a layer does, of arrays that fit and of others."""
    out, columns = (int(n) for n in layout["shape"])
    if out * columns > MOST:
        return
    tokens, group = rng.choice(layouts.TOKENS), max(1, layer.int8_group_size)
    groups, stored = -(-columns // group), weight.layout.stored_tensors()
    repacked = {
        name: torch.empty(stored[name][1], dtype=stored[name][0].torch)
        for name in layer.repacked
        if name in stored
    }
    if rng.random() < 0.5:
        edit_fields(rng, repacked)
    level = copy.deepcopy(layout)
    mutate.edit(rng, level)

    def some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        made = torch.randn(shape).to(dtype)
        return made if rng.random() < 0.6 else other(rng, made)

    half = rng.choice((torch.float32, torch.bfloat16))
    calls: list[Callable[[], object]] = [
        lambda: layer.matmul(some(tokens, columns, dtype=half), rng.choice(THREADS)),
        lambda: layer.product(
            some(tokens, columns), None, some(tokens, out), rng.random() < 0.5, rng.choice(THREADS)
        ),
        lambda: layer.product(
            some(tokens, columns, dtype=torch.int8),
            some(tokens, groups),
            some(tokens, out),
            False,
            rng.choice(THREADS),
        ),
        lambda: layer.dequantize(some(out, columns, dtype=half), rng.choice(THREADS)),
        lambda: layer.rows(
            torch.tensor([rng.choice((0, out - 1, out, -1, 2**62)) for _ in range(3)]), some(3, columns)
        ),
        lambda: layer.unpack(repacked, rng.choice(THREADS)),
        lambda: layer.at(level).matmul(some(tokens, columns), 1),
    ]
    for call in rng.sample(calls, len(calls)):
        with refused(said):
            call()


def edit_fields(rng: Random, fields: dict[str, Any]) -> None:
    """One or two fields that are missing, of another name, dtype, shape or layout, or hold something else."""
    for _ in range(rng.choice((1, 1, 2))):
        if not fields:
            return
        name = rng.choice(list(fields))
        match rng.randrange(6):
            case 0:
                del fields[name]
            case 1:
                fields[rng.choice((name + "x", "0." + name, ""))] = fields.pop(name)
            case 2:
                fields[name] = fields[rng.choice(list(fields))]
            case 3 if isinstance(fields[name], Tensor):
                fields[name] = random_bytes(rng, fields[name])
            case 4:
                fields[name] = rng.choice((None, 1, [1, 2], b"bytes", torch.empty(3, device="meta")))
            case _ if isinstance(fields[name], Tensor):
                fields[name] = other(rng, fields[name])


def random_bytes(rng: Random, tensor: Tensor) -> Tensor:
    """The same dtype and shape, with other bits."""
    made = tensor.clone().contiguous()
    raw = made.view(-1).view(torch.uint8)
    raw[:] = (
        torch.randint(0, 256, raw.shape, dtype=torch.uint8) if rng.random() < 0.7 else rng.choice((0, 255))
    )
    return made


def other(rng: Random, tensor: Tensor) -> Tensor:
    """Another dtype, shape, layout or address."""
    size = tensor.shape[-1] if tensor.ndim else 0
    changes: list[Callable[[], Tensor]] = [
        lambda: tensor.to(rng.choice(DTYPES)),
        lambda: tensor[..., : max(0, size - 1)],
        lambda: tensor[:0],
        lambda: tensor[None],
        tensor.flatten,
        lambda: torch.cat([tensor, tensor]) if tensor.ndim else tensor[None],
        lambda: tensor.mT if tensor.ndim > 1 else tensor[::2],
        lambda: torch.stack([tensor, tensor], -1)[..., 0],
        lambda: tensor.expand(3, *tensor.shape),
        lambda: at_odd_address(tensor.contiguous()),
        lambda: tensor.to("meta"),
    ]
    return rng.choice(changes)()
