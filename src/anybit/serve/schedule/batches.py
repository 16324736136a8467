"""Which texts are embedded together: no model, no clock, no thread."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice

from anybit.engine.engine import Floats, Tokens
from anybit.serve.errors import Busy

SHORTEST = 0.5  # of a batch's longest text: one that is shorter waits for a batch of its like
NUMBER = 4  # bytes of a token, and of a coordinate


@dataclass(eq=False)
class Asked:
    """The texts of one request."""

    texts: Sequence[Tokens]  # at least one token each
    dimensions: int  # of an embedding
    key: str = ""  # whose they are
    done: Future[list[Floats]] = field(
        default_factory=Future
    )  # [dimensions] of each text; who cancels it has left
    left: list[int] = field(init=False)  # texts that wait, the longest last
    made: dict[int, Floats] = field(default_factory=dict)
    bytes: int = field(init=False)  # that its tokens and embeddings take

    def __post_init__(self) -> None:
        self.bytes = NUMBER * (sum(map(len, self.texts)) + len(self.texts) * self.dimensions)
        self.left = sorted(range(len(self.texts)), key=self._length)

    def _length(self, at: int) -> int:
        return len(self.texts[at])

    @property
    def longest(self) -> int:
        """Tokens of the longest text that waits."""
        return self._length(self.left[-1])

    def fitting(self, longest: int) -> Iterator[Row]:
        """Texts that wait, from so many tokens down to `SHORTEST` of them, the longest first."""
        for i in reversed(range(self._end(longest))):
            row = Row(self, self.left[i])
            if len(row.tokens) < SHORTEST * longest:
                return
            yield row

    def take(self, count: int, longest: int) -> None:
        """The first so many of `fitting` wait no more."""
        end = self._end(longest)
        del self.left[end - count : end]

    def _end(self, longest: int) -> int:
        """Where in `left` longer texts begin."""
        return bisect_right(self.left, longest, key=self._length)

    def put(self, at: int, row: Floats) -> None:
        """A text is embedded; `done` has all when it was the last."""
        self.made[at] = row
        if len(self.made) == len(self.texts):
            with suppress(InvalidStateError):  # who asked has left
                self.done.set_result([self.made[i] for i in range(len(self.texts))])

    def fail(self, error: Exception) -> None:
        """No more of it is computed."""
        with suppress(InvalidStateError):
            self.done.set_exception(error)


@dataclass(frozen=True)
class Row:
    """A text of a batch."""

    asked: Asked
    at: int  # which of its texts

    @property
    def tokens(self) -> Tokens:
        return self.asked.texts[self.at]


class Batches:
    """The requests that wait, in turns: first by key, then by request.

    Args:
        most_tokens: of a batch, padding among them; a single longer text is a batch, too.
        most_texts: of a batch.
        most_waiting: requests that wait.
        most_bytes: that the tokens and embeddings of those take; a single larger request may wait, too.
        shared: whether several keys share these places. Then each may have as many as are free: some always are.
    """

    def __init__(
        self, most_tokens: int, most_texts: int, most_waiting: int, most_bytes: int, shared: bool = False
    ) -> None:
        self.most_tokens, self.most_texts = most_tokens, most_texts
        self.most_waiting, self.most_bytes, self.shared = most_waiting, most_bytes, shared
        self._queues: dict[str, deque[Asked]] = {}  # by key; the first key and its first request are next

    @property
    def waiting(self) -> int:
        """Texts that wait."""
        return sum(len(asked.left) for asked in self)

    def __iter__(self) -> Iterator[Asked]:
        for queue in self._queues.values():
            yield from queue

    def add(self, asked: Asked) -> None:
        """Take a request.

        Raises:
            Busy: too many wait already, or too large ones.
        """
        waiting = [one.bytes for one in self]
        if len(waiting) >= self.most_waiting:
            raise Busy(f"{len(waiting)} requests wait already, and {self.most_waiting} may")
        own, free = len(self._queues.get(asked.key, ())), self.most_waiting - len(waiting)
        if self.shared and own + 1 > free:
            raise Busy(f"{own} requests of this key wait already, and {free} places are free")
        if waiting and sum(waiting) + asked.bytes > self.most_bytes:
            raise Busy(
                f"requests that wait take {sum(waiting)} bytes and this one {asked.bytes}, more than the "
                f"{self.most_bytes} that may be taken"
            )
        self._queues.setdefault(asked.key, deque()).append(asked)

    def forget_ended(self) -> None:
        """Drop requests of which no text waits, that have an error, or whose client has left."""
        for key, queue in list(self._queues.items()):
            self._queues[key] = deque(asked for asked in queue if asked.left and not asked.done.done())
            if not self._queues[key]:
                del self._queues[key]

    def next(self) -> list[Row]:
        """The next batch, the longest text first: that of the request whose turn it is, and some nearly as long.

        Texts of all requests fill it up. Half of a batch at most is padding.
        """
        if not self._queues:
            return []
        first = self._take_turn()
        longest = first.longest
        room = min(self.most_texts, max(1, self.most_tokens // longest))
        requests = (first, *(other for other in self if other is not first))
        fitting = merge(*(one.fitting(longest) for one in requests), key=lambda row: -len(row.tokens))
        batch = list(islice(fitting, room))  # a request's texts are looked at only as far as they are taken
        for asked, count in Counter(row.asked for row in batch).items():
            asked.take(count, longest)
        self.forget_ended()
        return batch

    def _take_turn(self) -> Asked:
        """The request that is next; it and its key are the last from now on."""
        key = next(iter(self._queues))
        queue = self._queues.pop(key)
        queue.rotate(-1)
        self._queues[key] = queue
        return queue[-1]
