"""Where figures come from: the machine, the versions, the state of the code."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

import torch
import transformers

import anybit
from anybit.config import Json
from anybit.fingerprint import processor


def machine() -> Json:
    """Processor, threads and versions."""
    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "anybit": anybit.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def source() -> str:
    """The state of the code: SHA-256 of this package's Python files and compiled module, 12 digits."""
    root = Path(anybit.__file__).parent
    files = [(str(path.relative_to(root)), path) for path in sorted(root.rglob("*.py"))]
    native = importlib.util.find_spec("anybit._native")
    if native is not None and native.origin is not None:
        files.append(("_native", Path(native.origin)))
    digest = hashlib.sha256()
    for name, path in files:
        digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:12]
