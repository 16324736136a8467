"""Pages of blocks with a sliding window: a text keeps those that its window reaches, and its first."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from anybit.serve.schedule.blocks import Blocks, Hash

GONE = -1  # in place of a page that the window has passed


class WindowPages:
    """The pages that such blocks have of their own. A text's first page stays, for it has the centres of its keys.

    There are enough that each text that runs can have those of its window and of a round's tokens, so none waits for
    them. Pages that nobody uses are kept for a prompt that begins alike, as `Blocks` does.

    Args:
        window: positions that a token attends to, its own among them, in the block where they are most.
        pages: how many there are.
        page_tokens: tokens of a page.
        most_running: texts that run together.

    Raises:
        ValueError: too few pages for so many texts.
    """

    def __init__(self, window: int, pages: int, page_tokens: int, most_running: int) -> None:
        self.blocks = Blocks(pages)
        self.window, self.page_tokens = window, page_tokens
        # Beside the first page and the one in which the window begins.
        self.most = (pages // most_running - 2) * page_tokens - window  # tokens of a text in a round
        if self.most < 1:
            raise ValueError(f"{pages} pages for {most_running} texts with a window of {window} tokens")

    def reached(self, position: int) -> int:
        """The first page that a token at a position reads, beside the very first."""
        return max(0, position + 1 - self.window) // self.page_tokens

    def matching(self, hashes: Sequence[Hash]) -> int:
        """How many of a text's first pages it may share: those that its next token reads are here."""
        best = there = 0
        for i, key in enumerate(hashes):
            there = there + 1 if self.blocks.known(key) else 0
            if i == 0 and not there:
                return 0
            if there > i - self.reached((i + 1) * self.page_tokens):
                best = i + 1
        return best

    def share(self, hashes: Sequence[Hash]) -> list[int]:
        """Pages of a text that shares so many with others, of which `matching` has said that they are here."""
        first = self.reached(len(hashes) * self.page_tokens)
        wanted = [i for i in range(len(hashes)) if i == 0 or i >= first]
        pages = [GONE] * len(hashes)
        for i, page in zip(wanted, self.blocks.share([hashes[i] for i in wanted])):
            pages[i] = page
        return pages

    def extend(self, pages: list[int], tokens: int) -> None:
        """Let a text have pages for its first `tokens` tokens."""
        missing = -(-tokens // self.page_tokens) - len(pages)
        pages += self.blocks.take(max(0, missing))

    def publish(self, pages: Sequence[int], i: int, key: Hash) -> None:
        """Let others share a text's page that is full."""
        if pages[i] != GONE:
            self.blocks.publish(pages[i], key)

    def pass_by(self, pages: list[int], done: int) -> None:
        """Give up what no token from position `done` on reads."""
        passed = [i for i in range(1, min(len(pages), self.reached(done))) if pages[i] != GONE]
        self.blocks.release(
            [pages[i] for i in reversed(passed)]
        )  # a window lacks its first pages before its last
        for i in passed:
            pages[i] = GONE

    def give_up(self, pages: list[int]) -> None:
        """Give up all pages of a text."""
        self.blocks.release([page for page in pages if page != GONE])
        pages.clear()


class NoWindows:
    """What the scheduler asks where no block has pages of its own: a text has all that its other pages hold."""

    most = sys.maxsize  # tokens of a text in a round

    def matching(self, hashes: Sequence[Hash]) -> int:
        return len(hashes)

    def share(self, hashes: Sequence[Hash]) -> list[int]:
        return []

    def extend(self, pages: list[int], tokens: int) -> None: ...

    def publish(self, pages: Sequence[int], i: int, key: Hash) -> None: ...

    def pass_by(self, pages: list[int], done: int) -> None: ...

    def give_up(self, pages: list[int]) -> None: ...
