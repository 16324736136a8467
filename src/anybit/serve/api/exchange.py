"""One HTTP request while it is served: its texts' progress, and their end when nobody listens any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from anybit.engine.sampling import Drawn
from anybit.serve.api.openai import Wanted
from anybit.serve.run.job import Job, Progress, jobs_of
from anybit.serve.served import Served

SILENT_SECONDS = 10.0  # that a stream says nothing, after which it says that it is alive


@dataclass
class Written:
    """What a text has said so far."""

    text: str = ""
    drawn: list[Drawn] = field(default_factory=list)
    prompt: list[Drawn] = field(default_factory=list)  # its tokens from the second on, where they are wanted
    finish: str | None = None

    def add(self, new: Progress) -> None:
        self.text += new.text
        self.drawn += [] if new.drawn is None else [new.drawn]
        self.prompt += new.prompt
        self.finish = new.finish


class Exchange:
    """The jobs of a request.

    Args:
        served: the model.
        wanted: the request.

    Raises:
        InputError: see `jobs_of`.
    """

    def __init__(self, served: Served, wanted: Wanted) -> None:
        self.served, self.wanted = served, wanted
        self._heard: asyncio.Queue[tuple[int, Progress]] = asyncio.Queue()
        self.jobs: list[Job] = []  # texts of the first prompt, then those of the second
        for i, request in enumerate(wanted.requests):
            hear = partial(self._hear, i * wanted.n)
            self.jobs += jobs_of(served.engine, served.context, request, hear)
        self._open = len(self.jobs)

    def submit(self, asked: float) -> None:
        """Let the jobs run; see `Runner.submit`.

        Args:
            asked: when the request came, by `time.perf_counter`: what its user waits for begins there.
        """
        for job in self.jobs:
            job.times.asked = asked
        self.served.runner.submit(self.jobs)

    def _hear(self, first: int, number: int, progress: Progress) -> None:
        self._heard.put_nowait((first + number, progress))

    async def progress(self) -> AsyncIterator[list[tuple[int, Progress]]]:
        """What texts have said since last time, each with its number, until all have ended.

        Nothing, each time that `SILENT_SECONDS` have passed without a word.

        Raises:
            Exception: what ended one of them.
        """
        while self._open:
            heard = []
            with suppress(TimeoutError):
                async with asyncio.timeout(SILENT_SECONDS):
                    heard.append(await self._heard.get())
            while not self._heard.empty():
                heard.append(self._heard.get_nowait())
            for _, progress in heard:
                self._open -= progress.finish is not None
                if progress.error is not None:
                    raise progress.error
            yield heard

    async def whole(self) -> list[Written]:
        """Each text when all have ended.

        Raises:
            Exception: what ended one of them.
        """
        made = [Written() for _ in self.jobs]
        async for heard in self.progress():
            for at, new in heard:
                made[at].add(new)
        return made

    def close(self) -> None:
        """End what still runs: nobody listens."""
        for job in self.jobs:
            if job.finished is None:
                self.served.runner.cancel(job)
