"""/v1/embeddings of OpenAI's API: what of a request is served, and its answer."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from anybit.checkpoint.tokenizer import check_ids
from anybit.engine.engine import Floats, Tokens
from anybit.errors import InputError
from anybit.formats.levels import largest
from anybit.serve.api.openai import INERT, asked_bits
from anybit.serve.errors import BadField
from anybit.serve.fields import Fields
from anybit.serve.served import ServedEncoder

MOST_INPUTS = 2048  # texts of one request, as OpenAI has it
PIECE = 1 << 14  # numbers of a piece of an answer: what is made in one go while others wait
EXPECTED = "a string, a list of strings, a list of token ids, or a list of those"


@dataclass(frozen=True)
class Wanted:
    """A request, checked."""

    texts: list[Tokens]
    dimensions: int
    base64: bool = False
    key: str = ""


def embeddings(served: ServedEncoder, body: dict[str, Any], key: str) -> Wanted:
    """A body of /v1/embeddings.

    Raises:
        InputError: what of it cannot be.
        Refused: another model.
    """
    fields = Fields(body)
    inputs, several = _inputs(fields.any("input"))
    bits = asked_bits(served, fields)
    if isinstance(bits, float):
        largest(served.encoder.widths, bits, "the model has")
    form = fields.text("encoding_format", "float")
    if form not in ("float", "base64"):
        raise fields.bad("encoding_format", form, '"float" or "base64"')
    hidden = served.encoder.dimensions
    dimensions = fields.whole("dimensions", hidden, 1, hidden) or hidden
    fields.accept(*INERT)
    fields.finish()
    texts = [_tokens(served, one, f"input[{i}]" if several else "input") for i, one in enumerate(inputs)]
    return Wanted(texts, dimensions, form == "base64", key)


def _inputs(found: Any) -> tuple[list[str | list[int]], bool]:
    """The texts, each a string or token ids, and whether they are a list of some."""
    several = isinstance(found, list) and bool(found) and type(found[0]) is not int
    inputs = found if several else [found]
    if len(inputs) > MOST_INPUTS:
        raise BadField("input", f"input has {len(inputs)} texts, expected at most {MOST_INPUTS}")
    for one in inputs:
        ids = isinstance(one, list) and all(type(token) is int for token in one)
        if not ids and not isinstance(one, str):
            raise BadField("input", f"input is expected to be {EXPECTED}")
    return inputs, several


def _tokens(served: ServedEncoder, text: str | list[int], name: str) -> Tokens:
    """Token ids of a text. Those that are given are taken as they are, without special ones around them."""
    if not text:
        raise BadField("input", f"{name} is empty: give some text to embed")
    try:
        tokens = served.encode(text) if isinstance(text, str) else text
        check_ids(tokens, served.vocabulary)
    except InputError as error:
        raise BadField("input", f"{name}: {error}") from None
    if not tokens:
        raise BadField("input", f"{name} has no tokens: give some text to embed")
    if len(tokens) > served.context:
        raise BadField(
            "input", f"{name} has {len(tokens)} tokens; the model takes up to {served.context}: shorten it"
        )
    return np.array(tokens, np.int32)


def answer(served: ServedEncoder, wanted: Wanted, rows: Sequence[Floats]) -> Iterator[bytes]:
    """The body of an answer, as JSON in pieces, none of which can fail.

    Whatever writes JSON holds up all other threads until its call ends, so each embedding is a call of its own.

    Args:
        served: the model.
        wanted: the request.
        rows: float32 [dimensions] of each text, finite and of unit length.
    """
    parts = _parts(served, wanted, rows)
    while piece := "".join(islice(parts, 2 + PIECE // wanted.dimensions)):
        yield piece.encode()


def _parts(served: ServedEncoder, wanted: Wanted, rows: Sequence[Floats]) -> Iterator[str]:
    yield '{"object":"list","data":['
    for i, row in enumerate(rows):
        written = _written(_cut(row, wanted.dimensions), wanted.base64)
        yield "," * (i > 0) + _json({"object": "embedding", "index": i, "embedding": written})
    tokens = sum(map(len, wanted.texts))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    yield f'],"model":{_json(served.name)},"usage":{_json(usage)}}}'


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _cut(row: Floats, dimensions: int) -> Floats:
    """The first of an embedding's coordinates, at unit length again: Matryoshka embeddings mean something so."""
    if dimensions == len(row):
        return row
    first = row[:dimensions]
    made: Floats = first / np.maximum(np.linalg.norm(first), np.float32(1e-12))
    return made


def _written(row: Floats, as_base64: bool) -> list[float] | str:
    """Numbers, or their bytes as little-endian float32."""
    if as_base64:
        return base64.b64encode(row.astype("<f4").tobytes()).decode()
    numbers: list[float] = row.tolist()
    return numbers
