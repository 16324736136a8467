"""Clients of a server: requests that come at set times, or as many together as are allowed, streamed over HTTP.

All of them are one event loop in one thread, with a reader of HTTP of its own: the client has the same processors as
the server, so what it takes is to be little.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from anybit.config import Json

PATH, LARGEST = "/v1/completions", 1 << 22  # bytes of a chunk or line
REFUSED = (429, 503)  # statuses of a server that has too much to do


@dataclass
class Answer:
    """What came of one request. Times are seconds after the beginning of the load."""

    prompt: int  # tokens that were asked for
    answer: int
    asked: float
    times: list[float] = field(default_factory=list)  # of each event with tokens
    ended: float | None = None  # None: it did not end
    status: str = "unfinished"  # or: ok, refused, failed
    tokens: int | None = None  # that came, as the server counts them; None: it has not said
    told: list[int] = field(default_factory=list)  # such tokens up to each event, where the server says so
    bits: Json | None = None  # min, mean and max, as anybit says
    error: str = ""

    @property
    def drawn(self) -> int:
        """Tokens that came; each event counts as one where the server does not say."""
        return len(self.times) if self.tokens is None else self.tokens

    @property
    def counts(self) -> list[float]:
        """Tokens of each event: as the server said then, else equal shares of those that came."""
        if len(self.told) == len(self.times):
            return [after - before for before, after in zip([0, *self.told], self.told)]
        return [self.drawn / len(self.times)] * len(self.times)


@dataclass(frozen=True)
class Asked:
    """A request as it is sent."""

    at: float
    prompt: int
    answer: int
    body: bytes


class Client:
    """Asks a server at an address of this machine."""

    def __init__(self, port: int) -> None:
        self._port, self._begun = port, time.perf_counter()
        self.answers: list[Answer] = []

    def now(self) -> float:
        return time.perf_counter() - self._begun

    def at_times(self, asked: Sequence[Asked], seconds: float) -> list[Answer]:
        """Ask at set times, and wait until all have ended or `seconds` have passed."""
        asyncio.run(self._at_times(asked, seconds))
        return self.answers

    def together(self, asked: Sequence[Asked], many: int, seconds: float) -> list[Answer]:
        """Ask so many at a time, each as one before it ends, for some seconds."""
        asyncio.run(self._together(asked, many, seconds))
        return self.answers

    async def _at_times(self, asked: Sequence[Asked], deadline: float) -> None:
        self._begun = time.perf_counter()
        tasks = []
        for one in asked:
            await asyncio.sleep(max(0.0, one.at - self.now()))
            tasks.append(asyncio.create_task(self._ask(one)))
        await self._finish(tasks, deadline)

    async def _together(self, asked: Sequence[Asked], many: int, seconds: float) -> None:
        self._begun, left = time.perf_counter(), iter(asked)

        async def one_by_one() -> None:
            for one in left:
                await self._ask(one)

        tasks = [asyncio.create_task(one_by_one()) for _ in range(many)]
        await self._finish(tasks, seconds)

    async def _finish(self, tasks: Sequence[asyncio.Task[None]], deadline: float) -> None:
        if not tasks:
            return
        done, late = await asyncio.wait(tasks, timeout=max(0.0, deadline - self.now()))
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        for task in done:
            task.result()

    async def _ask(self, one: Asked) -> None:
        answer = Answer(one.prompt, one.answer, self.now())
        self.answers.append(answer)
        writer = None
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=LARGEST)
            writer.write(head(len(one.body)) + one.body)
            await self._read(reader, answer)
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            answer.status, answer.error = "failed", f"{type(error).__name__}: {error}"
        finally:
            if writer is not None:
                with suppress(OSError):
                    writer.close()

    async def _read(self, reader: asyncio.StreamReader, answer: Answer) -> None:
        status, chunked = await _head(reader)
        if status != 200:
            answer.status = "refused" if status in REFUSED else "failed"
            answer.error = (
                f"{status}: " + (b"".join([part async for part in _parts(reader, chunked)])).decode()[:200]
            )
            return
        rest = b""
        async for part in _parts(reader, chunked):
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    _hear(answer, json.loads(line[6:]), self.now())
        answer.ended = self.now()
        short = answer.drawn < answer.answer
        if short and not answer.error:
            answer.error = f"{answer.drawn} tokens came, {answer.answer} were asked for"
        answer.status = "failed" if answer.error else "ok"


def head(length: int) -> bytes:
    """Of a request with a body of so many bytes."""
    lines = f"POST {PATH} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"
    return "\r\n".join((*lines, f"Content-Length: {length}", "Connection: close", "", "")).encode()


async def _head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """The status of an answer, and whether its body comes in chunks."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
    return int(first.split()[1]), "transfer-encoding: chunked" in lines


async def _parts(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """The body as it comes."""
    if not chunked:
        while part := await reader.read(1 << 16):
            yield part
        return
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


def _hear(answer: Answer, event: Json, now: float) -> None:
    """Note what an event says."""
    if event.get("error"):
        answer.error = str(event["error"])[:200]
    usage, timings = event.get("usage") or {}, event.get("timings") or {}
    told = usage.get("completion_tokens", timings.get("predicted_n"))
    for choice in event.get("choices") or ():
        if _has_tokens(answer, choice, told):
            answer.times.append(now)
            answer.told += [] if told is None else [told]
    answer.tokens = answer.tokens if told is None else told
    answer.bits = timings.get("bits") or answer.bits


def _has_tokens(answer: Answer, choice: Json, told: int | None) -> bool:
    """Whether an event has tokens: their text may be empty where they are parts of a character."""
    if told is not None and len(answer.told) == len(answer.times):  # it has been told with every event
        return told > (answer.told or [0])[-1]
    return bool(choice.get("text")) or choice.get("finish_reason") is None
