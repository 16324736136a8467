"""Traces of requests: when each came, and how many tokens its prompt and its answer had.

The form is that of Azure's traces of language models (https://github.com/Azure/AzurePublicDataset): a CSV file with the
columns TIMESTAMP, ContextTokens and GeneratedTokens. There are no texts in it.
"""

from __future__ import annotations

import csv
import hashlib
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from pathlib import Path

from anybit.errors import InputError

LEAST = 10  # requests of a load: fewer say little
COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class Request:
    """One request of a trace."""

    at: float  # seconds after the first
    prompt: int  # tokens, from 1 up
    answer: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.answer


@dataclass(frozen=True)
class Trace:
    """Requests by ascending times."""

    name: str
    state: str  # of the file, 12 digits
    requests: tuple[Request, ...]
    clipped: int = 0  # requests that were shortened

    @property
    def tokens(self) -> int:
        """Of all prompts and answers: the work that a trace is."""
        return sum(request.tokens for request in self.requests)

    @property
    def prompt(self) -> float:
        """Mean tokens of a prompt."""
        return sum(request.prompt for request in self.requests) / len(self.requests)

    @property
    def answer(self) -> float:
        """Mean tokens of an answer."""
        return sum(request.answer for request in self.requests) / len(self.requests)

    def within(self, context: int) -> Trace:
        """With requests of at most so many tokens: an answer has up to half of them, its prompt the rest."""
        made = []
        for request in self.requests:
            answer = min(request.answer, context // 2)
            made.append(replace(request, prompt=min(request.prompt, context - answer), answer=answer))
        clipped = sum(old != new for old, new in zip(self.requests, made))
        return replace(self, requests=tuple(made), clipped=clipped)

    def at_rate(self, tokens_per_second: float, seconds: float) -> Trace:
        """The longest beginning that asks for so many tokens in a second on average, and ends within `seconds`.

        Its times are stretched alike.

        Raises:
            InputError: that are fewer than `LEAST` requests, or all come at once.
        """
        totals = accumulate(request.tokens for request in self.requests)
        count = sum(total <= tokens_per_second * seconds for total in totals)
        if count < LEAST:
            raise InputError(
                f"{self.name}: at {tokens_per_second:.0f} tokens/s {count} requests fit within {seconds:g} seconds, "
                f"and fewer than {LEAST} say little: give more --seconds or a higher --load"
            )
        sent = self.requests[:count]
        if not (span := sent[-1].at):
            raise InputError(f"{self.name}: all requests come at once, so their times cannot be stretched")
        factor = sum(request.tokens for request in sent) / tokens_per_second / span
        return replace(self, requests=tuple(replace(r, at=r.at * factor) for r in sent))


def read_trace(path: Path, count: int) -> Trace:
    """The first requests of a file; blank lines are skipped.

    Raises:
        InputError: no such file, other columns, a row that is no request, times that go back, too few rows.
    """
    try:
        data = path.read_bytes()
        lines = [(n, line) for n, line in enumerate(data.decode("utf-8-sig").splitlines(), 1) if line.strip()]
        (_, head), *rows = [(n, next(csv.reader([line]))) for n, line in lines[: count + 1]] or [(1, [])]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no CSV file"
        raise InputError(f"{path} cannot be read: {reason}") from error
    if not set(COLUMNS) <= set(head):
        raise InputError(f"{path}: the first line is to name the columns {', '.join(COLUMNS)}")
    columns = [head.index(name) for name in COLUMNS]
    found = [(line, *_row(path, line, row, columns)) for line, row in rows]
    if len(found) < count:
        raise InputError(f"{path} has {len(found)} requests, and {count} were asked for: see --requests")
    for (before, earlier, *_), (line, at, *_) in pairwise(found):
        if at < earlier:
            raise InputError(f"{path}, line {line}: its time is before that of line {before}; sort the file")
    first = found[0][1]
    requests = (Request((at - first).total_seconds(), prompt, answer) for _, at, prompt, answer in found)
    return Trace(path.stem, hashlib.sha256(data).hexdigest()[:12], tuple(requests))


def _row(path: Path, line: int, row: list[str], columns: list[int]) -> tuple[datetime, int, int]:
    """A time, which is one of UTC where it names no zone, and the tokens of a prompt and of an answer."""
    try:
        time, prompt, answer = (row[column].strip() for column in columns)
        at, tokens = datetime.fromisoformat(time), (int(prompt), int(answer))
    except (ValueError, IndexError) as error:
        raise InputError(f"{path}, line {line}: expected a time and two numbers, not {row}") from error
    if min(tokens) < 1:
        raise InputError(f"{path}, line {line}: a request has at least one token each way, not {row}")
    return (at if at.tzinfo else at.replace(tzinfo=UTC)), *tokens
