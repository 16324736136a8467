"""The thread that has an encoder: it embeds batches of texts, and tells each request when its texts are done."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anybit.engine.engine import Floats, Tokens
from anybit.errors import InputError
from anybit.serve.errors import Closing, EngineFault
from anybit.serve.run.model import Embeds
from anybit.serve.run.worker import Worker
from anybit.serve.schedule.batches import Asked, Batches, Row
from anybit.serve.settings import Settings

LOG = logging.getLogger(__name__)
BATCH_TOKENS = 2048  # of a batch with its padding: what bounds the memory that it takes
WAITING_BYTES = 256 << 20  # of the tokens and embeddings of requests that wait


@dataclass
class Counters:
    """What was done since the start."""

    texts: int = 0
    tokens: int = 0
    padding: int = 0  # tokens that were computed to make texts of a batch equally long
    batches: int = 0
    busy_seconds: float = 0.0


class Embedder(Worker):
    """Embeds texts with an encoder, which nobody else may use meanwhile.

    Args:
        encoder: the model.
        most_texts: of a batch.
        most_waiting: requests that wait.
        shared: whether several keys share these places.
    """

    def __init__(
        self,
        encoder: Embeds,
        most_texts: int = Settings.running,
        most_waiting: int = Settings.waiting,
        shared: bool = False,
    ) -> None:
        super().__init__()
        self.encoder, self.counters = encoder, Counters()
        self.batches = Batches(BATCH_TOKENS, most_texts, most_waiting, WAITING_BYTES, shared)
        self._batch: list[Row] = []  # that is computed now

    # ---- from any thread

    def submit(self, asked: Asked) -> None:
        """Take a request. Whoever cancels its `done` ends it after the batch that runs now.

        Raises:
            Busy: too many wait, or too large ones.
            Closing: the server has no time left.
        """
        with self._changed:
            self._refuse_late()
            self.batches.forget_ended()
            self.batches.add(asked)
            self._changed.notify()

    @property
    def running(self) -> int:
        return len(self._batch)

    @property
    def waiting(self) -> int:
        with self._changed:
            return self.batches.waiting

    # ---- in the encoder's thread

    def _round(self) -> bool:
        with self._changed:
            while not self.batches.waiting and not self._closed:
                self._changed.wait()
            self._end_late()
            self.batches.forget_ended()
            self._batch = self.batches.next()
            if not self._batch:
                return not self._closed
        self._embed(self._batch)
        self._batch = []
        return True

    def _end_late(self) -> None:
        """When the server stops, end what it has no more time for."""
        if time.perf_counter() >= self._deadline:
            for asked in self.batches:
                asked.fail(Closing("the server has stopped"))

    def _embed(self, batch: list[Row]) -> None:
        self.step_begun = begun = time.perf_counter()
        for row, made in zip(batch, self._computed([row.tokens for row in batch])):
            if isinstance(made, Exception):
                LOG.error("a text has failed", exc_info=made)
                row.asked.fail(EngineFault(str(made)) if isinstance(made, InputError) else made)
            elif not np.isfinite(made).all():
                name = self.encoder.name
                row.asked.fail(EngineFault(f"{name}: an embedding holds NaN or Inf: its weights are damaged"))
            else:
                row.asked.put(row.at, made)
        self._count(batch, time.perf_counter() - begun)
        self.step_ended, self.step_begun = time.perf_counter(), None

    def _computed(self, texts: Sequence[Tokens]) -> list[Floats | Exception]:
        """The embedding of each text; where they fail, of each alone, so that the one to blame is found."""
        try:
            return list(self.encoder.embed(texts))
        except Exception as error:
            if len(texts) == 1:
                return [error]
        return [alone for text in texts for alone in self._computed([text])]

    def _count(self, batch: Sequence[Row], seconds: float) -> None:
        tokens = sum(len(row.tokens) for row in batch)
        self.counters.texts += len(batch)
        self.counters.tokens += tokens
        self.counters.padding += len(batch) * len(batch[0].tokens) - tokens
        self.counters.batches += 1
        self.counters.busy_seconds += seconds

    def _abandon(self, error: Exception) -> None:
        with self._changed:
            for asked in (*self.batches, *(row.asked for row in self._batch)):
                asked.fail(error)
            self._batch = []
            self.batches.forget_ended()
