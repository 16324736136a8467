"""What the bytes of a run depend on, as hashes: runs resume, and share statistics, only where all is the same."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers

import anybit
from anybit import kernels
from anybit.artifact.contents import Plan
from anybit.calibration.streaming import StreamedModel
from anybit.calibration.texts import CalibrationSet
from anybit.checkpoint.directory import Checkpoint
from anybit.config import Options
from anybit.kernels import cpu
from anybit.methods import METHODS
from anybit.progress import Silent


def base_hash(checkpoint: Checkpoint, report: Silent) -> str:
    """SHA-256 of the base model's files."""
    config = 0 if checkpoint.gguf else (checkpoint.path / "config.json").stat().st_size
    return checkpoint.sha256(report.task("hashing the checkpoint", checkpoint.weight_bytes() + config))


def fingerprint(
    base: str, options: Options, plan: Plan, text: CalibrationSet | None, streamed: StreamedModel
) -> str:
    """SHA-256 of everything that the artifact's bytes depend on."""
    parts = {
        "anybit": anybit.__version__,
        "base": base,
        "options": options.stored(),
        "specs": {name: repr(spec) for name, spec in plan.specs.items()},
        "text": text.describe() if text else None,
        "tokens": _tokens(text) if text else None,
        "libraries": [torch.__version__, transformers.__version__],
        "compute": _arithmetic(streamed),
        "threads": torch.get_num_threads(),  # the order of float sums, hence the bytes, depends on it
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def statistics_key(
    base: str,
    options: Options,
    plan: Plan,
    layers: Iterable[str],
    text: CalibrationSet,
    streamed: StreamedModel,
) -> str:
    """A name for everything that gradient statistics depend on, but for the width that they are to choose."""
    method = METHODS[options.name]
    parts = {
        "base": base,
        "tokens": _tokens(text),
        "shapes": {name: list(plan.layouts[name].shape) for name in layers},
        "search": [method.name, *method.searched(options)] if method.allocate else [],
        "made by": [
            anybit.__version__,
            torch.__version__,
            transformers.__version__,
            *_arithmetic(streamed),
            torch.get_num_threads(),
        ],
    }
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _tokens(text: CalibrationSet) -> str:
    """Of the windows: the same tokens cut at other places are other windows."""
    shape = f"{tuple(text.tokens.shape)} ".encode()
    return hashlib.sha256(shape + text.tokens.numpy().tobytes()).hexdigest()


def processor() -> str:
    """What the processor calls itself."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def _arithmetic(streamed: StreamedModel) -> list[str]:
    """What computes, and in what: another device, or a processor of other instructions, sums in another order."""
    if streamed.device.type == "cpu":
        has = [name for name, there in cpu.cpu_features().items() if there] if cpu.available() else []
        of_torch = torch.backends.cpu.get_cpu_capability()
        return [str(streamed.dtype), kernels.info()["cpu"]["isa"], of_torch, processor(), *has]
    return [str(streamed.dtype), str(streamed.device), torch.cuda.get_device_name(streamed.device)]
