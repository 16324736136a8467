"""What an engine is made of, from whatever names a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from anybit.artifact.files import is_artifact
from anybit.artifact.levels import Budget
from anybit.artifact.reader import refuse_unfinished
from anybit.checkpoint.hub import download
from anybit.checkpoint.tokenizer import read_tokenizer
from anybit.engine.description import Unsupported
from anybit.engine.file_source import FileSource
from anybit.engine.plain import PlainModel
from anybit.engine.source import Source
from anybit.engine.stored import StoredModel
from anybit.engine.text import check_tokenizer
from anybit.errors import InputError
from anybit.progress import Silent

ENGINES = ("auto", "native", "transformers")  # what may run a model; "auto": the native one where that can

Native = TypeVar("Native")
Inside = TypeVar("Inside")


def check_engine(asked: str) -> None:
    """Refuse, with InputError, an engine that there is not."""
    if asked not in ENGINES:
        raise InputError(f"engine {asked!r}: expected one of {', '.join(ENGINES)}")


def native_or_inside(
    asked: str, natively: Callable[[], Native], inside: Callable[[], Inside], report: Silent
) -> Native | Inside:
    """A model on the native engine where it may and can run there, else inside Transformers, with a word why.

    Args:
        asked: one of `ENGINES`.
        natively: opens it on the engine, or raises `Unsupported`.
        inside: opens it inside Transformers.
        report: gets the word.

    Raises:
        InputError: an engine that there is not, or the native one, asked for by name, does not run the model.
    """
    check_engine(asked)
    if asked == "transformers":
        return inside()
    try:
        return natively()
    except Unsupported as error:
        if asked == "native":
            raise refusal(error) from error
        report.say(f"runs inside Transformers: {error}")
    return inside()


def refusal(why: Unsupported) -> InputError:
    """What those are told who asked for the native engine by name."""
    return InputError(f"the native engine does not run this: {why}; leave engine (--engine) out")


def open_source(model: Any, tokenizer: Any, at: Budget, how: tuple[str, int], report: Silent) -> Source:
    """Open a model. PyTorch and Transformers are imported for what the engine cannot read itself.

    Args:
        model: an artifact, an HF directory or hub id, what `anybit.load` made, or what `open_plain` opened.
        tokenizer: in place of the one that belongs to the files.
        at: the budget of the widest level; of files alone.
        how: precision of codebooks, and threads that load.
        report: where progress goes.

    Raises:
        InputError: see `anybit.load`.
        Unsupported: a model that only Transformers runs.
    """
    if not isinstance(model, str | Path):
        if given := [name for name, value in at.items() if value is not None]:
            raise InputError(f"{', '.join(given)}: the model is loaded already; give this to anybit.load")
        if isinstance(model, Source):
            model.tokenizer = tokenizer or model.tokenizer
            return model
        from anybit.engine.loaded import LoadedModel

        return LoadedModel(model, tokenizer, how[0])
    refuse_unfinished(Path(model))
    path = Path(model) if Path(model).exists() else download(str(model))
    if is_artifact(path):
        return _named(StoredModel(path, at, how, report), model, path, tokenizer)
    with suppress(Unsupported):
        return open_plain(model, tokenizer, at)
    from anybit.engine.loaded import LoadedModel
    from anybit.loader import load, load_tokenizer

    tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
    check_tokenizer(tokenizer)
    return LoadedModel(load(model, codebook_precision=how[0], report=report, **at), tokenizer, how[0])


def open_plain(model: str | Path, tokenizer: Any, at: Budget) -> PlainModel:
    """Open a checkpoint that is not quantized, without Transformers but for a tokenizer of its rules.

    Args:
        model: an HF directory or hub id.
        tokenizer: in place of the one that belongs to the files.
        at: a budget, which only artifacts have.

    Raises:
        InputError: a hub id that cannot be fetched.
        Unsupported: anything else that Transformers has to load, or to find the right words for.
    """
    refuse_unfinished(Path(model))
    path = Path(model) if Path(model).exists() else download(str(model))
    if any(value is not None for value in at.values()):
        raise Unsupported("it is no artifact of several widths")
    if not path.is_dir():
        raise Unsupported("it is a file")
    try:
        return _named(PlainModel(path), model, path, tokenizer)
    except InputError as error:
        raise Unsupported(str(error)) from error


FileModel = TypeVar("FileModel", bound=FileSource)


def _named(source: FileModel, model: str | Path, path: Path, tokenizer: Any) -> FileModel:
    """A model with the name that its user gave it, and a tokenizer."""
    source.name, source.tokenizer = str(model), tokenizer or source.tokenizer
    if source.tokenizer is None:
        source.tokenizer = read_tokenizer(str(model), path)
    check_tokenizer(source.tokenizer)
    return source
