"""The ways in: the command, `anybit.load`, plain Transformers. Each ends in an error in words or in a right result."""

from __future__ import annotations

import contextlib
import io
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from anybit.cli import main as cli
from anybit.errors import InputError
from anybit.formats.weight import PackedWeight
from anybit.kernels import reference
from anybit.layers import PackedModule
from tests.fuzz.bases import logits_of
from tests.fuzz.limits import Finding, is_memory

LONGEST = 3000  # characters of an error


def command(*arguments: object, stdin: str = "", usage: bool = False) -> str:
    """Run `anybit`; "right" where it ends with 0, "error" with 2 and a line of words.

    Args:
        usage: whether errors may be about the command line itself, which come in a box.

    Raises:
        Finding: anything else.
    """
    out, err = io.StringIO(), io.StringIO()
    sys.argv, sys.stdin = ["anybit", *map(str, arguments)], io.StringIO(stdin)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
            code: Any = 0
        except SystemExit as end:
            code = end.code or 0
    print(f"{arguments} -> {code}\n{out.getvalue()[-2000:]}\n{err.getvalue()[-3000:]}")
    lines = [line for line in err.getvalue().splitlines() if line.strip()]
    if "Traceback" in err.getvalue():
        raise Finding(f"traceback of {arguments}: {err.getvalue()[-2000:]}")
    if code == 0:
        return "right"
    if code != 2 or not lines:
        raise Finding(f"{arguments} ended with {code}: {err.getvalue()[-1000:]}")
    said = [line for line in lines if line.startswith("anybit: ")]
    if not said and not usage:
        raise Finding(f"{arguments} ended without a sentence: {err.getvalue()[-1000:]}")
    if said:
        in_words("\n".join(lines[lines.index(said[0]) :]))
    return "error"


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
        return AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    except InputError as error:
        in_words(str(error))
    except (SafetensorError, OSError) as error:
        print(f"{type(error).__name__}: {error}")
    except Exception as error:
        frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        if is_memory(error) or "/anybit/" in frames[-1]:
            raise
        print(f"{type(error).__name__}: {error}")
    return None


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
            flat = x.flatten(0, -2)
            same_product(name, weight, flat, module.matmul(flat))
    return logits


def same_product(name: str, weight: PackedWeight, x: Tensor, y: Tensor) -> None:
    """Hold y [tokens, out] against x [tokens, in] times the dense matrix.

    Raises:
        Finding: it differs by more than rounding.
    """
    inputs = reference.round_inputs(x.float(), weight).double()
    dense = reference.dequantize(weight).double()
    expected, size = inputs @ dense.T, (inputs.square() @ dense.square().T).sqrt()
    finite = expected.isfinite() & (size < 1e30)
    wrong = ((y.double() - expected).abs() > 2e-5 * size.amax() + 1e-5) & finite
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        raise Finding(f"{name} computes {float(y[at])}, its dense matrix {float(expected[at])}, at {at}")
