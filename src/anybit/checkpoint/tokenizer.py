"""Tokenizers. Their files come with a model: whatever their rules do is an answer or a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anybit.checkpoint.files import cause, check_files
from anybit.errors import InputError
from anybit.lazy import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_tokenizer(source: str, folder: Path | str, **extra: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a model.

    Args:
        source: the model, as errors name it.
        folder: where its files are.
        extra: what else `from_pretrained` wants.

    Raises:
        InputError: there is none that can be used.
    """
    if Path(folder).is_dir():
        check_files(Path(folder))
    with _in_words(f"{source} has no usable tokenizer", "put its tokenizer files beside the weights"):
        if "gguf_file" not in extra:
            return _loaded(folder, **extra)
        folder = Path(folder).resolve()
        status = (folder / extra["gguf_file"]).stat()
        return deepcopy(_of_gguf(folder, status.st_size, status.st_mtime_ns, **extra))


def _loaded(folder: Path | str, **extra: Any) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer  # which takes seconds

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True, **extra)


@lru_cache(maxsize=1)
def _of_gguf(folder: Path, size: int, changed: int, **extra: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a GGUF file of this size and time of change: it takes seconds, and a run wants it twice."""
    return _loaded(folder, **extra)


def encode(tokenizer: Any, text: str, special: bool = True) -> list[int]:
    """Token ids of a text, with the special tokens that go around it or without.

    Raises:
        InputError: a text that is no Unicode; rules that fail on it, such as a pattern without end.
    """
    check_unicode(text)
    with _in_words("the tokenizer fails on this text", "use the tokenizer that belongs to the model"):
        # verbose=False: a text longer than model_max_length is expected here, it is cut into windows afterwards
        return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def encode_batch(tokenizer: Any, texts: list[str], length: int) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, both int64 [texts, tokens], of texts that are cut and padded to one length.

    Args:
        tokenizer: has a padding token.
        texts: some; special tokens go around each.
        length: most tokens of a text, special tokens included.

    Raises:
        InputError: see `encode`; a text of no tokens.
    """
    for text in texts:
        check_unicode(text)
    with _in_words("the tokenizer fails on these texts", "use the tokenizer that belongs to the model"):
        # the mask is asked for: `model_input_names` of its files may leave it out
        encoded = tokenizer(
            texts, padding=True, truncation=True, max_length=length, return_attention_mask=True,
            return_tensors="pt",
        )  # fmt: skip
        ids, mask = encoded["input_ids"], encoded["attention_mask"]
    if not mask.any(1).all():
        raise InputError(
            "the tokenizer makes no token of one of the texts: use the tokenizer that belongs to the model"
        )
    return ids, mask


def check_unicode(text: str) -> None:
    """Refuse bytes that were no UTF-8, which Python hands on as half surrogate pairs.

    Raises:
        InputError: where the first of them is.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text is not valid UTF-8 (character {error.start}): write it in UTF-8"
        ) from None


def check_ids(ids: list[int], vocabulary: int | None) -> None:
    """Refuse token ids that a model's embedding does not have.

    Raises:
        InputError: the tokenizer belongs to another model.
    """
    low, high = min(ids, default=0), max(ids, default=0)
    if low < 0 or (vocabulary is not None and high >= vocabulary):
        raise InputError(
            f"token ids run from {low} to {high}, but the model's vocabulary has {vocabulary}: use the tokenizer that "
            "belongs to the model"
        )


@contextmanager
def _in_words(what: str, remedy: str) -> Iterator[None]:
    """Say what a tokenizer raised: exceptions of any class, or a panic of its library, which is no `Exception`."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(f"{what} ({cause(error)}): {remedy}") from error
