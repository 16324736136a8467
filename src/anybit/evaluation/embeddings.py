"""Sentence embeddings of an encoder, and how far quantization moved them.

`anybit.encoder` says what an embedding is. Two models are compared by the cosine between their embeddings of the same
sentences; a model and human judgement by Spearman's rank correlation between the cosines of sentence pairs and their
scores, as on the STS benchmarks.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anybit.calibration.texts import read_utf8, text_field
from anybit.checkpoint.architectures import max_positions
from anybit.checkpoint.tokenizer import check_ids, encode_batch
from anybit.encoder import SURELY, pooled
from anybit.errors import InputError
from anybit.progress import Advance, ignore

BATCH = 32  # sentences embedded at a time
SENTENCES = 500  # of a text, evenly spaced
SENTENCE_WORDS = 5  # fewer make no sentence
COLUMNS = ("sentence1", "sentence2", "score")


class Tsv(csv.excel_tab):
    """Quotes mean nothing, as in the STS benchmark's files."""

    quoting = csv.QUOTE_NONE


DIALECTS: dict[str, type[csv.Dialect]] = {".tsv": Tsv, ".csv": csv.excel}
Embeddings = Mapping[str, Tensor]  # sentence -> [hidden], of unit length


@dataclass(frozen=True)
class Pairs:
    """Sentence pairs and how similar people, or another model, find them."""

    first: list[str]
    second: list[str]
    scores: list[float]


def read_pairs(path: Path) -> Pairs:
    """Pairs from a `.jsonl`, `.tsv` or `.csv` file with the columns sentence1, sentence2 and score.

    Raises:
        InputError: a file that cannot be read, with the line that is wrong; scores without any order.
    """
    if path.suffix not in (".jsonl", *DIALECTS):
        raise InputError(f"pairs file {path}: expected a .jsonl, .tsv or .csv file")
    if not path.is_file():
        raise InputError(f"pairs file {path} does not exist: check the path")
    rows = _json_rows(path) if path.suffix == ".jsonl" else _table_rows(path)
    found = [_pair(f"{path}, line {number}", row) for number, row in rows]
    scores = [score for _, _, score in found]
    if len(set(scores)) < 2:
        raise InputError(
            f"{path} has {len(found)} pairs with {len(set(scores))} different scores: a rank correlation needs at "
            "least two"
        )
    return Pairs([first for first, _, _ in found], [second for _, second, _ in found], scores)


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(read_utf8(path).split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError):
                raise InputError(
                    f"{path}, line {number} is not valid JSON; each line should be one object"
                ) from None


def _table_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Rows below a header, numbered by the line they end on."""
    text = io.StringIO(read_utf8(path).removeprefix("\ufeff"), newline="")
    reader = csv.DictReader(text, dialect=DIALECTS[path.suffix], strict=True)
    try:
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise InputError(
                f"{path}, line 1 names no column {missing[0]!r}: expected a header with {', '.join(COLUMNS)}"
            )
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.reader.line_num} is no row of a table ({error})") from None


def _pair(where: str, row: Any) -> tuple[str, str, float]:
    if not isinstance(row, Mapping):
        raise InputError(f"{where} is a {type(row).__name__}; expected an object with {', '.join(COLUMNS)}")
    first, second = (text_field(where, row, name) for name in COLUMNS[:2])
    if not (first.strip() and second.strip()):
        raise InputError(f"{where} has an empty sentence; expected two sentences and a score")
    score = row.get("score")
    try:
        value = float(str(score))  # a table's cell, or a number of JSON; "True" is none
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{where}: score is {score!r}; expected a number")
    return first, second, value


def split_sentences(text: str) -> list[str]:
    """The different sentences of a text, in its order; a line end or a full stop ends one."""
    found = [s for line in text.splitlines() for s in re.split(r"(?<=[.!?])\s+", line.strip())]
    return list(dict.fromkeys(s for s in found if len(s.split()) >= SENTENCE_WORDS))


def sentences_of(text: str) -> list[str]:
    """At most `SENTENCES` sentences, evenly spaced over a text."""
    found = split_sentences(text)
    step = max(1.0, len(found) / SENTENCES)
    return [found[int(i * step)] for i in range(min(len(found), SENTENCES))]


@torch.no_grad()
def embed(
    model: Any,
    tokenizer: Any,
    sentences: Sequence[str],
    *,
    pooling: str = "mean",
    seq_len: int | None = None,
    advance: Advance = ignore,
) -> Tensor:
    """Embeddings of unit length, float64 [n, hidden].

    Args:
        model: an encoder of Transformers.
        tokenizer: its tokenizer; it pads a batch and cuts sentences.
        sentences: n strings.
        pooling: "mean" or "cls".
        seq_len: most tokens of a sentence; by default what model and tokenizer reach.
        advance: called with the number of sentences of each batch.

    Raises:
        InputError: a length beyond the model's positions, a tokenizer that cannot pad or belongs to another model,
            embeddings that are NaN or infinite.
    """
    length = _length(model, tokenizer, seq_len)
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))  # batches of alike lengths
    made: dict[int, Tensor] = {}
    for a in range(0, len(order), BATCH):
        batch = order[a : a + BATCH]
        ids, mask = encode_batch(tokenizer, [sentences[i] for i in batch], length)
        check_ids([int(ids.min()), int(ids.max())], model.get_input_embeddings().num_embeddings)
        given = {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
        states = model(**given, return_dict=True).last_hidden_state
        made |= zip(batch, pooled(states.double().cpu(), mask, pooling))
        advance(len(batch))
    embeddings = torch.stack([made[i] for i in range(len(sentences))])
    if not embeddings.isfinite().all():
        raise InputError("the embeddings are NaN or infinite: load the model in float32 or check its weights")
    return embeddings


def _length(model: Any, tokenizer: Any, seq_len: int | None) -> int:
    """Most tokens that a sentence is cut to."""
    if tokenizer.pad_token_id is None:
        raise InputError(
            "the tokenizer has no padding token, which batches of sentences need: name one in its files"
        )
    limit = max_positions(model)
    if seq_len is not None and limit is not None and seq_len > limit:
        raise InputError(
            f"seq_len {seq_len} is longer than the {limit} positions of the model; use --seq-len {limit}"
        )
    special = tokenizer.num_special_tokens_to_add()
    if seq_len is not None and seq_len <= special:
        raise InputError(
            f"seq_len {seq_len} leaves no room for words beside {special} special tokens; use --seq-len 128"
        )
    if seq_len is not None:
        return seq_len
    own = tokenizer.model_max_length  # whatever its files say
    if not isinstance(own, int | float) or not own > special:
        raise InputError(
            f"the tokenizer's model_max_length is {own!r}, but a number above its {special} special tokens is "
            "expected: mend it in tokenizer_config.json, or give --seq-len 128"
        )
    return int(min(own, SURELY if limit is None else limit))


def compare(own: Embeddings, base: Embeddings) -> dict[str, float]:
    """Mean and least cosine between two models' embeddings of the same sentences.

    Raises:
        InputError: embeddings of different widths.
    """
    widths = [len(next(iter(made.values()))) for made in (own, base)]
    if widths[0] != widths[1]:
        raise InputError(
            f"the embeddings have {widths[0]} and {widths[1]} dimensions: compare with the model that was quantized"
        )
    found = torch.stack([own[sentence] @ base[sentence] for sentence in own])
    return {"cosine_mean": float(found.mean()), "cosine_min": float(found.min())}


def rank_correlation(made: Embeddings, pairs: Pairs) -> float | None:
    """Spearman's correlation of the pairs' cosines with their scores; None where all cosines are the same."""
    found = torch.stack([made[a] @ made[b] for a, b in zip(pairs.first, pairs.second)])
    if (found == found[0]).all():
        return None
    return float(np.corrcoef(_ranks(found.numpy()), _ranks(np.array(pairs.scores)))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """The place of each value among all; equal values share the mean of theirs."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]
