"""Enhancement layers read by several threads: who waits for which rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition

from anybit.errors import InputError
from anybit.methods.ordering import BITS, Counts


class Filled:
    """How many rows of every plane are there, for threads that each read an enhancement layer.

    Rows of a plane are said to be there only once those of all planes above it are: whoever adds some has waited for
    them. A layer waits for those before it only, so the first of them never waits.
    """

    def __init__(self, base: Counts) -> None:
        self._rows = {name: [*rows, *[0] * (BITS - len(rows))] for name, rows in base.items()}
        self._changed, self._failed = Condition(), False

    def wait(self, name: str, plane: int, rows: int) -> None:
        """Return when the first `rows` rows of a plane are there.

        Raises:
            InputError: another thread has failed, and says why.
        """
        if self._rows[name][plane - 1] >= rows:  # which they stay: no need of the lock
            return
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._rows[name][plane - 1] >= rows)
            if self._failed:
                raise InputError("another enhancement layer is damaged")

    def add(self, name: str, plane: int, first: int, last: int) -> None:
        """Say that rows are there, once those before them are."""
        self.wait(name, plane, first)
        with self._changed:
            self._rows[name][plane - 1] = last
            self._changed.notify_all()

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Let nobody wait for a thread that failed."""
        try:
            yield
        except BaseException:
            with self._changed:
                self._failed = True
                self._changed.notify_all()
            raise
