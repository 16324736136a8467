"""The ways in: the command, `anybit.load`, plain Transformers. Each ends in an error in words or in a right result."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn

import anybit
from anybit.cli import main as cli
from anybit.errors import InputError
from anybit.formats.weight import PackedWeight
from anybit.kernels import reference
from anybit.layers import PackedModule
from tests.fuzz.bases import logits_of, whole
from tests.fuzz.limits import Finding, is_memory

SPEAKING = ("generate", "chat")  # which no encoder can; what a model says goes out as it is
LONGEST = 3000  # characters of an error
LOWEST = torch.finfo(torch.bfloat16).eps / 2  # relative error of one rounding
OURS, THEIRS = (str(Path(package.__file__ or "").parent) for package in (anybit, transformers))


def command(*arguments: object, stdin: str = "", usage: bool = False) -> str:
    """Run `anybit`; "right" where it ends with 0, "error" with 2 and a line of words.

    Args:
        usage: whether errors may be about the command line itself, which come in a box.

    Raises:
        Finding: anything else.
    """
    sys.argv, sys.stdin = ["anybit", *map(str, arguments)], io.StringIO(stdin)
    with _captured(1) as out, _captured(2) as err:
        try:
            cli.main()
            code: Any = 0
        except SystemExit as end:
            code = end.code or 0
    (shown,), (said,) = out, err
    print(f"{arguments} -> {code}\n{shown[-2000:]}\n{said[-3000:]}")
    given = set(map(str, arguments))
    steering = {c for c in shown if not c.isprintable()} - {"\n", *"".join(given)}
    if steering and not given.intersection(SPEAKING):
        raise Finding(f"{arguments} steers a terminal by {sorted(steering)}")
    lines = [line for line in said.splitlines() if line.strip()]
    if "Traceback" in said:
        raise Finding(f"traceback of {arguments}: {said[-2000:]}")
    if code == 0:
        return "right"
    if code != 2 or not lines:
        raise Finding(f"{arguments} ended with {code}: {said[-1000:]}")
    if lines[-1].startswith("anybit: "):
        in_words(lines[-1])
    elif not usage:
        raise Finding(f"{arguments} ended without a sentence: {said[-1000:]}")
    return "error"


@contextlib.contextmanager
def _captured(descriptor: int) -> Iterator[list[str]]:
    """All that goes to standard output or error, of libraries as well as of Python: one text, once it is over."""
    name, how = {1: ("stdout", "strict"), 2: ("stderr", "backslashreplace")}[descriptor]  # as Python has them
    earlier, before, found = getattr(sys, name), os.dup(descriptor), list[str]()
    earlier.flush()
    with (
        tempfile.TemporaryFile() as file,
        open(descriptor, "w", encoding="utf-8", errors=how, closefd=False, buffering=1) as stream,
    ):
        os.dup2(file.fileno(), descriptor)
        setattr(sys, name, stream)
        try:
            yield found
        finally:
            stream.flush()
            setattr(sys, name, earlier)
            os.dup2(before, descriptor)
            os.close(before)
            file.seek(0)
            found.append(file.read().decode(errors="replace"))


def in_words(message: str) -> None:
    """Hold an error against what errors are: one line of words, which does not say that memory ran out.

    Raises:
        Finding: it is not.
    """
    if is_memory(ValueError(message)) and "chat template" not in message:  # which is limited on purpose
        raise Finding(f"memory ran out: {message[:500]}")
    if not message.strip() or len(message.splitlines()) != 1 or len(message) > LONGEST:
        raise Finding(f"an error of {len(message)} characters, not a line: {message[:500]!r}")


@contextlib.contextmanager
def refusals() -> Iterator[list[str]]:
    """Turn an `InputError` into an entry of the list."""
    found: list[str] = []
    try:
        yield found
    except InputError as error:
        if is_memory(error):
            raise
        in_words(str(error))
        print(f"InputError: {error}")
        found.append(str(error))


def plain_transformers(path: Path) -> nn.Module | None:
    """`from_pretrained`; None where it refuses: in anybit's words, or in others' before anybit is asked.

    Raises:
        Exception: whatever anybit's own code raised that is no `InputError`.
    """
    try:
        model = whole(path)
        if hasattr(model, "levels"):
            return model
        print("config.json names another way to quantize: Transformers warns, and anybit is not asked")
    except InputError as error:
        in_words(str(error))
    except (SafetensorError, OSError) as error:
        print(f"{type(error).__name__}: {error}")
    except Exception as error:
        if is_memory(error) or raised_by_anybit(error):
            raise
        print(f"{type(error).__name__}: {error}")
    return None


def raised_by_anybit(error: Exception) -> bool:
    """Whether anybit's code, or what it called, raised it: any of its frames stands behind Transformers' last."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    theirs = [i for i, file in enumerate(frames) if file.startswith(THEIRS)]
    return any(file.startswith(OURS) for file in frames[theirs[-1] if theirs else 0 :])


def check_run(model: nn.Module) -> Tensor:
    """Logits of a loaded model, every layer's product held against its dense matrix in double precision.

    Raises:
        Finding: a layer that computes something else.
    """
    seen: list[tuple[str, PackedModule, Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda m, args, y, name=name: seen.append((name, m, args[0])))
        for name, module in model.named_modules()
        if isinstance(module, PackedModule)
    ]
    logits = logits_of(model)
    for hook in hooks:
        hook.remove()
    for name, module, x in seen:
        weight = module.packed.prefix(module._running)
        if x.is_floating_point():
            flat = x.detach().flatten(0, -2)
            same_product(name, weight, flat, module.matmul(flat))
    return logits


def _squares(weight: PackedWeight, dense: Tensor) -> Tensor:
    """Squares of a dense matrix; where sparse weights are added to tiles, which are rounded apart, of both."""
    if weight.layout.sparse is None:
        return dense.square()
    own = {field: tensor for field, tensor in weight.tensors.items() if not field.startswith("sparse.")}
    tiles = reference.dequantize(PackedWeight(replace(weight.layout, sparse=None), own)).double()
    return tiles.square() + (dense - tiles).square()


def same_product(name: str, weight: PackedWeight, x: Tensor, y: Tensor) -> None:
    """Hold y [tokens, out] of float32 or bfloat16, as x is, against x [tokens, in] times the dense matrix.

    Each number by the norms of its own token and its own row: a large or a broken one elsewhere hides nothing. Only
    numbers that are not finite in the dense product, or beyond float32, are left out.

    Raises:
        Finding: it differs by more than rounding.
    """
    inputs = reference.round_inputs(x.float(), weight).double()
    dense = reference.dequantize(weight).double()
    squares = _squares(weight, dense)
    expected, size = inputs @ dense.T, (inputs.square() @ squares.T).sqrt()
    token, row = inputs.norm(dim=1, keepdim=True), squares.sum(1).sqrt()
    most = token * (2e-5 * row + 1e-6)
    if x.dtype == torch.bfloat16:  # of the result, of centroids, of inputs that are scaled
        most = most + 2 * LOWEST * expected.abs() + 8 * LOWEST * size
    within = (
        expected.isfinite() & (size < 1e30) & (token < 1e30)
    )  # kernels multiply codes, which scales make small
    wrong = ~((y.double() - expected).abs() <= most) & within
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        raise Finding(f"{name} computes {float(y[at])}, its dense matrix {float(expected[at])}, at {at}")
