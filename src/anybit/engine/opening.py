"""What an engine is made of, from whatever names a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anybit.artifact.files import is_artifact
from anybit.artifact.levels import Budget
from anybit.artifact.reader import refuse_unfinished
from anybit.checkpoint.hub import download
from anybit.checkpoint.tokenizer import read_tokenizer
from anybit.engine.source import Source
from anybit.engine.stored import StoredModel
from anybit.engine.text import check_tokenizer
from anybit.progress import Silent


def open_source(model: Any, tokenizer: Any, at: Budget, how: tuple[str, int], report: Silent) -> Source:
    """Open a model. PyTorch and Transformers are imported for what is no artifact, and for tokenizers of their rules.

    Args:
        model: an artifact, an HF directory or hub id, or what `anybit.load` made.
        tokenizer: in place of the one that belongs to the files.
        at: the budget of the widest level.
        how: precision of codebooks, and threads that load.
        report: where progress goes.

    Raises:
        InputError: see `anybit.load`.
        Unsupported: a model that only Transformers runs.
    """
    if not isinstance(model, str | Path):
        from anybit.engine.loaded import LoadedModel

        return LoadedModel(model, tokenizer, how[0])
    refuse_unfinished(Path(model))
    path = Path(model) if Path(model).exists() else download(str(model))
    if is_artifact(path):
        stored = StoredModel(path, at, how, report)
        stored.name, stored.tokenizer = str(model), tokenizer or stored.tokenizer
        if stored.tokenizer is None:
            stored.tokenizer = read_tokenizer(str(model), path)
        check_tokenizer(stored.tokenizer)
        return stored
    from anybit.engine.loaded import LoadedModel
    from anybit.loader import load, load_tokenizer

    tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
    check_tokenizer(tokenizer)
    return LoadedModel(load(model, codebook_precision=how[0], report=report, **at), tokenizer, how[0])
