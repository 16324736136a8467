"""Answers of OpenAI's API: whole, or as the chunks of a stream."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from anybit.config import Json
from anybit.engine.sampling import Drawn
from anybit.serve.api.exchange import Exchange, Written
from anybit.serve.chat.message import Message
from anybit.serve.errors import Refused, refused
from anybit.serve.run.job import Job, Progress
from anybit.serve.run.request import Request

LOG = logging.getLogger(__name__)
DONE = "data: [DONE]\n\n"
SILENCE = (
    ": waiting\n\n"  # what a stream says while nothing comes: a comment, which no client takes for an event
)
ITEMS = 64  # of a list that are written in one go: whatever writes JSON holds up all other threads until its call ends
PIECE = 1 << 16  # characters of a piece of an answer
SOON = 256  # log-probabilities that a stream writes without a thread for them

Apart = Callable[..., Awaitable[Any]]  # calls a function with arguments where that holds nobody up


class Replies:
    """What is answered to one request.

    Args:
        exchange: of the request.
        apart: calls what takes its time.
    """

    def __init__(self, exchange: Exchange, apart: Apart) -> None:
        self._exchange, self._served, self._wanted = exchange, exchange.served, exchange.wanted
        self._apart = apart
        chat = self._wanted.chat
        self._head: Json = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": self._served.name,
        }
        self._offsets = [0] * len(
            exchange.jobs
        )  # characters of each text that log-probabilities have told of
        self._messages = [Message(self._wanted.speech) for _ in exchange.jobs]  # of a chat
        self._begun: set[int] = set()  # texts of which a stream has sent something
        self._open = len(exchange.jobs)  # texts whose end a stream has not sent

    async def whole(self) -> Iterator[bytes]:
        """The answer when all texts have ended, in pieces; each is made when it is asked for."""
        return self._answer(await self._exchange.whole())

    def _answer(self, written: Sequence[Written]) -> Iterator[bytes]:
        choices = [self._choice(at, self._with_prompt(at, one)) for at, one in enumerate(written)]
        answer = {**self._head, "choices": choices, "usage": self.usage(), "timings": self.timings()}
        piece, size = list[str](), 0
        for part in parts(answer):
            piece.append(part)
            size += len(part)
            if size >= PIECE:
                yield "".join(piece).encode()
                piece, size = [], 0
        yield "".join(piece).encode()

    async def events(self) -> AsyncIterator[str]:
        """The answer as server-sent events; an error that comes late is the last of them."""
        try:
            async for heard in self._exchange.progress():
                if not heard:
                    yield SILENCE
                for first in range(0, len(heard), ITEMS):  # many rounds have come where a client reads slowly
                    now = heard[first : first + ITEMS]
                    yield await self._apart(self._chunks, now) if self._takes_long(now) else self._chunks(now)
            if self._wanted.usage:
                yield self._event([], usage=self.usage())
            yield DONE
        except Exception as error:
            yield f"data: {_dumps(late(error).body())}\n\n"

    def _takes_long(self, heard: Sequence[tuple[int, Progress]]) -> bool:
        """Whether writing log-probabilities would hold up others."""
        if not self._wanted.logprobs:
            return False
        tokens = [drawn for _, said in heard for drawn in (said.drawn, *said.prompt) if drawn is not None]
        return sum(1 + len(drawn.top) for drawn in tokens) > SOON

    def _chunks(self, heard: Sequence[tuple[int, Progress]]) -> str:
        """The events of what texts have said."""
        events = []
        for at, progress in heard:
            new = Written()
            new.add(progress)
            if at not in self._begun and (new.drawn or new.finish):
                self._begun.add(at)
                if self._wanted.chat:  # not before: clients time the first event
                    events.append(self._event([self._piece(at, delta={"role": "assistant", "content": ""})]))
                new = self._with_prompt(at, new)
            if new.text or new.drawn or new.prompt or new.finish:
                self._open -= new.finish is not None
                events.append(self._chunk(at, new))
        return "".join(events)

    # ---- parts

    def _with_prompt(self, at: int, written: Written) -> Written:
        """A text behind its prompt, where that is wanted."""
        if self._wanted.echo:
            written.text = self._served.decode(self._request(at).tokens) + written.text
        return written

    def _request(self, at: int) -> Request:
        return self._wanted.requests[at // self._wanted.n]

    def _choice(self, at: int, written: Written) -> Json:
        message = self._messages[at]
        body: Json = {"message": message.whole(written.text)} if self._wanted.chat else {"text": written.text}
        logprobs = self._logprobs(at, written) if self._wanted.logprobs else None
        return {
            "index": at,
            **body,
            **self._token_ids(written),
            "logprobs": logprobs,
            "finish_reason": message.finish(written.finish),
        }

    def _chunk(self, at: int, new: Written) -> str:
        logprobs = self._logprobs(at, new) if self._wanted.logprobs and (new.drawn or new.prompt) else None
        message, chat = self._messages[at], self._wanted.chat
        body: Json = (
            {"delta": message.delta(new.text, new.finish is not None)} if chat else {"text": new.text}
        )
        choice = self._piece(at, **body)
        choice |= {**self._token_ids(new), "logprobs": logprobs, "finish_reason": message.finish(new.finish)}
        last = new.finish is not None and self._open == 0
        return self._event([choice], **({"timings": self.timings()} if last else {}))

    def _token_ids(self, written: Written) -> Json:
        """What was drawn, where that is wanted."""
        return {"token_ids": (drawn.token for drawn in written.drawn)} if self._wanted.token_ids else {}

    def _piece(self, at: int, **body: Any) -> Json:
        return {"index": at, **body, "logprobs": None, "finish_reason": None}

    def _event(self, choices: list[Json], **more: Any) -> str:
        head = self._head | ({"object": "chat.completion.chunk"} if self._wanted.chat else {})
        usage = {"usage": None} if self._wanted.usage else {}
        event = {**head, "choices": choices, **usage, **more}
        return f"data: {''.join(parts(event)) if self._wanted.logprobs else _dumps(event)}\n\n"

    def _logprobs(self, at: int, written: Written) -> Json:
        """As `parts` takes them: what is likely beside each token is made when it is written."""
        prompt = written.prompt
        if self._wanted.chat:
            return {"content": map(self._entry, written.drawn), "refusal": None}
        begins = self._wanted.echo and self._offsets[at] == 0
        first = [Drawn(self._request(at).tokens[0])] if begins else []
        drawn = [*first, *prompt, *written.drawn]
        words = [self._served.word(one.token) for one in drawn]
        offsets = []
        for word in words:
            offsets.append(self._offsets[at])
            self._offsets[at] += len(word)
        return {
            "tokens": iter(words),
            "token_logprobs": (one.logprob for one in drawn),
            "top_logprobs": map(self._top, drawn),
            "text_offset": iter(offsets),
        }

    def _top(self, drawn: Drawn) -> dict[str, float] | None:
        """Likely tokens and the one drawn; of those that look the same, the likeliest."""
        if drawn.logprob is None:
            return None
        made: dict[str, float] = {}
        for token, logprob in (*drawn.top, (drawn.token, drawn.logprob)):
            made.setdefault(self._served.word(token), logprob)
        return made

    def _entry(self, drawn: Drawn) -> Json:
        top = [self._likely(token, logprob) for token, logprob in drawn.top]
        return {**self._likely(drawn.token, drawn.logprob), "top_logprobs": top}

    def _likely(self, token: int, logprob: float | None) -> Json:
        word, raw = self._served.word(token), self._served.bytes_of(token)
        return {"token": word, "logprob": logprob, "bytes": raw}

    # ---- figures

    def usage(self) -> Json:
        """Tokens; a prompt of several texts counts once."""
        jobs, n = self._exchange.jobs, self._wanted.n
        prompt, drawn = sum(job.text.prompt for job in jobs[::n]), sum(job.drawn for job in jobs)
        cached = sum(job.text.cached or 0 for job in jobs[::n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": drawn,
            "total_tokens": prompt + drawn,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def timings(self) -> Json:
        return timings(self._exchange.jobs, self._served.engine.widths)


def late(error: Exception) -> Refused:
    """What the end of a stream says of an error; what is the server's own fault, the log says too."""
    found = refused(error)
    if found.status == 500:
        LOG.error("a stream has failed", exc_info=error)
    return found


def timings(jobs: Sequence[Job], widths: Sequence[float]) -> Json:
    """When the texts of a request came, and at which widths.

    Args:
        jobs: all of them, ended.
        widths: average bits of each level.

    Returns:
        `queue_seconds` (from the request's coming to its first step), `prefill_seconds`, `prefill_tokens_per_second`,
        `decode_seconds` (from the first token to the last), `decode_tokens_per_second`, `bits`: least, mean and most of
        the tokens drawn; None: none was. And `draft_tokens`, that were computed on suspicion, and those of them that
        were drawn, `accepted_tokens`.
    """
    asked, started = min(job.times.asked for job in jobs), min(job.times.started for job in jobs)
    first = min((job.times.first for job in jobs if job.times.first), default=started)
    last = max(first, *(job.times.last for job in jobs))
    computed = sum(job.text.prompt - (job.text.cached or 0) for job in jobs)
    followed = sum(max(0, job.drawn - 1) for job in jobs)
    counts: dict[float, int] = {}
    for job in jobs:
        for level, count in job.levels.items():
            counts[widths[level]] = counts.get(widths[level], 0) + count
    total = sum(counts.values())
    mean = sum(bits * count for bits, count in counts.items()) / total if total else None
    return {
        "queue_seconds": started - asked,
        "prefill_seconds": first - started,
        "prefill_tokens_per_second": computed / (first - started) if first > started else None,
        "decode_seconds": last - first,
        "decode_tokens_per_second": followed / (last - first) if last > first else None,
        "bits": {"min": min(counts), "mean": mean, "max": max(counts)} if counts else None,
        "draft_tokens": sum(job.drafted for job in jobs),
        "accepted_tokens": sum(job.accepted for job in jobs),
    }


def parts(value: Any) -> Iterator[str]:
    """JSON of a value, bit by bit.

    Args:
        value: objects and lists of a few items, and iterators, which are lists of many.
    """
    if isinstance(value, dict):
        lead = "{"
        for name, inner in value.items():
            yield f"{lead}{_dumps(name)}:"
            yield from parts(inner)
            lead = ","
        yield "}" if value else "{}"
    elif isinstance(value, list):
        lead = "["
        for inner in value:
            yield lead
            yield from parts(inner)
            lead = ","
        yield "]" if value else "[]"
    elif isinstance(value, Iterator):
        lead = "["
        while items := list(islice(value, ITEMS)):
            yield lead + _dumps(items)[1:-1]
            lead = ","
        yield "]" if lead == "," else "[]"
    else:
        yield _dumps(value)


_dumps = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), default=list
).encode  # iterators as lists
