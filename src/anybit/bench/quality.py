"""What the contenders of `anybit bench decode` make of a text: rates of the same files count for little without it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from anybit.bench.contenders import Native
from anybit.bench.sources import Gguf, Source
from anybit.calibration import texts
from anybit.config import Json
from anybit.evaluation.native import NativeModel
from anybit.evaluation.perplexity import perplexity, recalled
from anybit.loader import load, load_tokenizer

QUALITY = "quality"  # the test's name
WINDOW, WINDOWS = 1024, 8  # tokens of a window, and how many there are


def quality(
    found: Source,
    engines: dict[str, tuple[Json, Native, float]],
    files: Sequence[Gguf],
    text: Path,
    base: str | None,
) -> Json:
    """Perplexity of the engine at its widths and of files of peers, and with a base the mean KL divergence from it.

    Files are dequantized and run in float32: what a peer loses by rounding inputs is not counted against it.

    Args:
        found: whose tokenizer reads the text.
        engines: by names: about whom, the engine, and the width.
        files: of peers.
        text: what is read.
        base: the model that all of them are made of.
    """
    tokenizer = load_tokenizer(found.name)
    tokens = texts.token_ids(tokenizer, texts.read_text(str(text)))
    reference = None if base is None else load(base, dtype="float32")

    def measured(model: Any) -> Json:
        result = perplexity(
            model,
            tokens,
            seq_len=WINDOW,
            max_tokens=WINDOWS * WINDOW,
            bos=texts.default_bos(tokenizer),
            base=reference,
        )
        return {"perplexity": result.perplexity, "kld": result.kld_mean, "others": None}

    made, threads = {}, torch.get_num_threads()
    torch.set_num_threads(max(native.engine.threads for _, native, _ in engines.values()))
    try:
        with TemporaryDirectory() as folder, recalled(reference, None if base is None else Path(folder)):
            for name, (about, native, bits) in engines.items():
                made[name] = about | measured(NativeModel(native.engine, found.config, bits))
            for file in files:
                about = {"engine": "file", "file": file.path.name, "state": file.state}
                made[file.path.name] = about | measured(load(file.path, dtype="float32"))
    finally:
        torch.set_num_threads(threads)
    return made
