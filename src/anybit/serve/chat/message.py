"""A message of the assistant in OpenAI's form, whole or as the deltas of a stream."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from anybit.config import Json
from anybit.serve.chat.speech import ARGUMENTS, CALL, CONTENT, REASONING, Kind, Part, Speech, Splitter


class Message:
    """Thoughts are `reasoning_content`, texts `content`, calls `tool_calls`.

    Args:
        speech: how to read the text.
    """

    def __init__(self, speech: Speech) -> None:
        self._splitter = Splitter(speech)
        self._calls = 0  # that deltas have told of

    def whole(self, text: str) -> Json:
        """The message of a whole text."""
        delta = self._delta([*self._splitter.push(text), *self._splitter.finish()])
        calls = delta.get("tool_calls", [])
        for call in calls:
            del call["index"]
        return {"role": "assistant", "content": None if calls else "", "refusal": None, **delta}

    def delta(self, text: str, last: bool) -> Json:
        """What some more text adds; the last may add what was held back."""
        parts = self._splitter.push(text)
        return self._delta([*parts, *self._splitter.finish()] if last else parts)

    def finish(self, reason: str | None) -> str | None:
        """Why the message has ended, once all of it was read."""
        return self._splitter.reason(reason)

    def _delta(self, parts: Sequence[Part]) -> Json:
        made: Json = {}
        for name, kind in (("reasoning_content", REASONING), ("content", CONTENT)):
            if text := _joined(parts, kind):
                made[name] = text
        if calls := self._calls_of(parts):
            made["tool_calls"] = calls
        return made

    def _calls_of(self, parts: Sequence[Part]) -> list[Json]:
        calls: list[Json] = []
        for part in parts:
            if part.kind == CALL:
                function = {"name": part.text, "arguments": ""}
                name = {"id": call_id(), "type": "function"}
                calls.append({"index": self._calls, **name, "function": function})
                self._calls += 1
            elif part.kind == ARGUMENTS:
                if not calls:
                    calls.append({"index": self._calls - 1, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += part.text
        return calls


def call_id() -> str:
    """A name for a call: nine letters and digits, as templates of Mistral's ask for."""
    return uuid.uuid4().hex[:9]


def _joined(parts: Sequence[Part], kind: Kind) -> str:
    return "".join(part.text for part in parts if part.kind == kind)
