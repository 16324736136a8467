"""Conversations and answers of blocks, one after another: Anthropic's messages and OpenAI's responses have both."""

from __future__ import annotations

import json
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from anybit.config import Json
from anybit.serve.api import exchange
from anybit.serve.api.exchange import Exchange
from anybit.serve.api.replies import late, timings
from anybit.serve.chat.message import call_id
from anybit.serve.chat.speech import ARGUMENTS, CALL, Kind, Part, Splitter
from anybit.serve.errors import BadField, Refused
from anybit.serve.fields import Fields
from anybit.serve.run.job import Progress

BETWEEN = "\n\n"  # texts that become one
# What goes on to /v1/chat/completions as it is: sampling, and what only this server has.
PASSED = (
    "model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "seed", "bits", "latency_target_ms", "speculate", "ignore_eos", "chat_template_kwargs",
)  # fmt: skip

# ---- conversations


def passed(fields: Fields) -> Json:
    """The fields that both APIs share with OpenAI's chats."""
    return {name: fields.any(name) for name in PASSED if name in fields}


def joined(messages: Sequence[Json]) -> list[Json]:
    """Messages of one role in a row become one: chat templates want roles that take turns, and systems first.

    What a system says behind others becomes the user's.
    """
    made: list[Json] = []
    for message in messages:
        if message["role"] == "system" and made and made[-1]["role"] != "system":
            message = {**message, "role": "user"}  # noqa: PLW2901
        if not made or message["role"] != made[-1]["role"] or message["role"] == "tool":
            made.append({**message})
            continue
        for name, value in message.items():
            if name != "role":
                made[-1][name] = _both(made[-1].get(name), value)
    return made


def _both(first: Any, second: Any) -> Any:
    """Two texts, or two lists of calls."""
    if not first or not second:
        return first or second
    return first + second if isinstance(first, list) else f"{first}{BETWEEN}{second}"


def text_of(found: Any, param: str, kinds: Sequence[str]) -> str:
    """A content that is text alone.

    Args:
        found: a string, or a list of blocks.
        param: its name.
        kinds: types of blocks that are text.

    Raises:
        BadField: it is something else.
    """
    if isinstance(found, str):
        return found
    if not isinstance(found, list):
        raise BadField(param, f"{param} is expected to be a string, or a list of blocks of text")
    return BETWEEN.join(block_text(Fields(block, f"{param}[{i}]."), kinds) for i, block in enumerate(found))


def needed(own: Fields, name: str) -> str:
    """A text that has to be there.

    Raises:
        BadField: it is not.
    """
    found = own.text(name)
    if found is None:
        raise own.bad(name, None, "a string")
    return found


def block_text(block: Fields, kinds: Sequence[str]) -> str:
    """The text of a block, which has nothing else that counts."""
    kind = block.text("type")
    if kind not in kinds:
        raise block.bad("type", kind, " or ".join(f'"{one}"' for one in kinds))
    text = needed(block, "text")
    block.accept("cache_control", "citations", "annotations", "logprobs")
    block.finish()
    return text


@contextmanager
def as_here(names: Mapping[str, str]) -> Iterator[None]:
    """Has errors about a chat, into which a body was translated, come in the words of its own API.

    Args:
        names: what fields, or parts of their names, are called here; the first ones are put first.

    Raises:
        BadField: such an error.
    """
    try:
        yield
    except BadField as error:
        param, message = error.param, str(error)
        for theirs, own in names.items():
            whole = [r"\b" if end.isalnum() else "" for end in (theirs[0], theirs[-1])]
            param = re.sub(re.escape(theirs).join(whole), own, param)
        if message.startswith(error.param):
            message = param + message.removeprefix(error.param)
        raise BadField(param, message) from None


# ---- answers


@dataclass
class Block:
    """A part of an answer.

    Attributes:
        kind: a thought, a text, or a call.
        id: of a call, as its result names it.
        name: of the function that is called.
        text: so far; of a call, its arguments.
    """

    kind: Kind
    id: str
    name: str = ""
    text: str = ""


Event = tuple[str, Json]  # its type, and what it says


class Turn(ABC):
    """What is answered to one request for one text.

    Args:
        exchange: of the request.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange, self.wanted = exchange, exchange.wanted
        (self.job,) = exchange.jobs
        self.id = uuid.uuid4().hex
        self.blocks: list[Block] = []
        self.finish: str | None = None  # why the text has ended, in the words of OpenAI's chats
        self.thought_tokens = 0  # that were drawn until the thought ended
        self.begun = False  # whether `begin` was said
        self._splitter = Splitter(self.wanted.speech)

    async def whole(self) -> Iterator[bytes]:
        """The answer when its text has ended; it is made when it is asked for."""
        async for heard in self.exchange.progress():
            for _, progress in heard:
                for _ in self._heard(progress):
                    pass
        return self._written()

    def _written(self) -> Iterator[bytes]:
        yield _dumps(self.answer()).encode()

    async def events(self) -> AsyncIterator[str]:
        """The answer as server-sent events; an error that comes late is the last of them."""
        spoken = time.monotonic()
        try:
            async for heard in self.exchange.progress():
                events = [event for _, progress in heard for event in self._heard(progress)]
                if not events and time.monotonic() - spoken >= exchange.SILENT_SECONDS:
                    events = [*self.wait()]  # also where tokens come that are not shown
                if events:
                    spoken = time.monotonic()
                    yield "".join(map(self._sent, events))
        except Exception as error:
            yield self._sent(self.fail(late(error)))

    def _sent(self, event: Event) -> str:
        kind, said = event
        return f"event: {kind}\ndata: {_dumps({'type': kind, **self.numbered(), **said})}\n\n"

    def numbered(self) -> Json:
        """What each event has besides."""
        return {}

    def _heard(self, new: Progress) -> Iterator[Event]:
        if not self.begun and (new.drawn or new.finish):  # not before: clients time the first event
            self.begun = True
            yield from self.begin()
        parts = self._splitter.push(new.text)
        self.thought_tokens += new.drawn is not None and self._splitter.thinks
        if new.finish:
            parts += self._splitter.finish()
        for part in parts:
            yield from self._part(part)
        if new.finish:
            self.finish = self._splitter.reason(new.finish)
            yield from self._close()
            yield from self.end()

    def _part(self, part: Part) -> Iterator[Event]:
        kind = CALL if part.kind == ARGUMENTS else part.kind
        if part.kind == CALL or not self.blocks or self.blocks[-1].kind != kind:
            yield from self._close()
            self.blocks.append(Block(kind, call_id(), part.text if kind == CALL else ""))
            yield from self.opened(len(self.blocks) - 1, self.blocks[-1])
        if part.kind != CALL:
            self.blocks[-1].text += part.text
            yield from self.added(len(self.blocks) - 1, self.blocks[-1], part.text)

    def _close(self) -> Iterator[Event]:
        if self.blocks:
            yield from self.closed(len(self.blocks) - 1, self.blocks[-1])

    def figures(self) -> Json:
        """As `timings` of OpenAI's chats."""
        return timings(self.exchange.jobs, self.exchange.served.engine.widths)

    # ---- what an API has of its own

    @abstractmethod
    def answer(self) -> Json:
        """The whole, when the text has ended."""

    @abstractmethod
    def begin(self) -> Iterator[Event]:
        """Before all blocks."""

    @abstractmethod
    def wait(self) -> Iterator[Event]:
        """While nothing comes, so that nobody takes the stream for dead."""

    @abstractmethod
    def opened(self, at: int, block: Block) -> Iterator[Event]:
        """A block begins."""

    @abstractmethod
    def added(self, at: int, block: Block, text: str) -> Iterator[Event]:
        """A block goes on."""

    @abstractmethod
    def closed(self, at: int, block: Block) -> Iterator[Event]:
        """A block has ended."""

    @abstractmethod
    def end(self) -> Iterator[Event]:
        """Behind all blocks."""

    @abstractmethod
    def fail(self, found: Refused) -> Event:
        """There will be no end."""


_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
