"""A thread that alone has a model, and its life: it starts, works round by round, and ends when nothing is left."""

from __future__ import annotations

import logging
import math
import threading
import time

from anybit.serve.errors import Closing

LOG = logging.getLogger(__name__)  # unlike printing, it survives a full disk
STUCK = 30.0  # seconds after which a step is called stuck
LATE = 5.0  # seconds that a step has to end when the server does
STOPPING = "the server is stopping"


class Worker:
    """What the threads of all kinds of models have in common; a kind has `_round` and `_abandon`."""

    def __init__(self) -> None:
        self.step_begun: float | None = None  # when the step that runs now began
        self.step_size = 1.0  # how many times as long as `STUCK` it may take
        self.step_ended = time.perf_counter()
        self.broken: str | None = None  # why nothing is served any more
        self.closing = False  # no new requests are let in; those that were may still come here
        self._closed = False  # nothing more is taken, and the thread ends when nothing is left
        self._deadline = math.inf  # for what is there
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- from any thread

    def start(self) -> None:
        self._thread.start()

    def drain(self, patience: float) -> None:
        """Say that no new requests are let in. End what those before have begun after so many seconds with an error.

        Waits for nothing and takes no lock, as a signal may come while this thread holds it.
        """
        self.closing, self._deadline = True, time.perf_counter() + patience

    def close(self, patience: float) -> None:
        """`drain`, take nothing more, and wait until nothing runs, or a step hangs."""
        with self._changed:
            self.drain(patience)
            self._closed = True
            self._changed.notify()
        self._thread.join(patience + LATE)

    @property
    def running(self) -> int:
        """Texts that run."""
        raise NotImplementedError

    @property
    def waiting(self) -> int:
        """Texts that wait."""
        raise NotImplementedError

    @property
    def step_seconds(self) -> float:
        """How long the step has run that runs now, what is done with its results included; 0: none does."""
        begun = self.step_begun
        return 0.0 if begun is None else time.perf_counter() - begun

    @property
    def seconds_since_step(self) -> float:
        """How long ago the last step ended."""
        return time.perf_counter() - self.step_ended

    @property
    def stuck(self) -> bool:
        return self.step_seconds > STUCK * self.step_size

    def _refuse_late(self) -> None:
        """With the lock held.

        Raises:
            Closing: the server has no time left, or has failed.
        """
        if self._closed or self.broken or time.perf_counter() >= self._deadline:
            raise Closing(self.broken or STOPPING)

    # ---- in the thread

    def _run(self) -> None:
        try:
            while self._round():
                pass
        except BaseException as error:  # a defect: whoever waits is told, and /health
            LOG.critical("the engine's thread has ended", exc_info=error)
            with self._changed:
                self.broken = f"the engine's thread has ended: {type(error).__name__}: {error}"
            self._abandon(RuntimeError(self.broken))

    def _round(self) -> bool:
        """Wait for work and do some of it; False: there will be no more."""
        raise NotImplementedError

    def _abandon(self, error: Exception) -> None:
        """Tell all that wait of an error."""
        raise NotImplementedError
