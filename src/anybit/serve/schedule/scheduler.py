"""What runs next: continuous batching without a model, a clock or a thread.

Each round decodes one token of every text that can, then spends a budget of tokens on prompts. Texts that share the
first pages of a prompt share them in the cache, and one waits while another computes them. Where pages run out the text
that came last gives up its own and is computed again later. Keys take turns at being admitted.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from anybit.errors import InputError
from anybit.serve.errors import Busy
from anybit.serve.schedule.blocks import Blocks, Hash, chain
from anybit.serve.schedule.windows import NoWindows, WindowPages


@dataclass(eq=False)
class Text:
    """The tokens of one text, and how far they are computed."""

    tokens: list[int]  # of the prompt, and those drawn behind it
    most: int  # tokens that may be drawn
    level: int  # which of the model's widths computes it
    key: str = ""  # whose it is
    every: bool = False  # logits are wanted behind every token of the prompt, so none comes from the cache
    draft: list[int] = field(default_factory=list)  # tokens that may follow, for the next round
    # What follows is the scheduler's.
    prompt: int = field(init=False)  # tokens of the prompt
    arrival: int = field(default=-1, init=False)
    pages: list[int] = field(default_factory=list, init=False)
    window_pages: list[int] = field(default_factory=list, init=False)  # where windows have pages of their own
    done: int = field(default=0, init=False)  # tokens whose keys and values are in the pages
    cached: int | None = field(
        default=None, init=False
    )  # of the prompt, found in the cache when first admitted
    mixed: bool = field(default=False, init=False)  # computed at several widths: its pages are nobody else's
    hashes: list[Hash] = field(default_factory=list, init=False)  # of full pages at this level
    awaits: Hash | None = field(default=None, init=False)  # the next page that it needs, when last looked for

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def missing(self) -> int:
        """Tokens that are known and not computed."""
        return len(self.tokens) - self.done

    @property
    def left(self) -> int:
        """Tokens that may still be drawn."""
        return self.prompt + self.most - len(self.tokens)


@dataclass(frozen=True)
class Rows:
    """Successive tokens of one text that a step computes."""

    text: Text
    first: int  # position of the first
    count: int
    draft: Sequence[int] = ()  # computed behind them, in case that it is drawn

    @property
    def last(self) -> bool:
        """Whether they are the last that is known: a token can be drawn behind them."""
        return self.first + self.count == len(self.text.tokens)

    @property
    def tokens(self) -> list[int]:
        """All that are computed."""
        return [*self.text.tokens[self.first : self.first + self.count], *self.draft]


@dataclass(frozen=True)
class Step:
    """Rows that are computed together, all at one level."""

    level: int
    rows: list[Rows]


class Scheduler:
    """The texts that wait and run.

    Args:
        pages: of the KV-cache.
        page_tokens: tokens of a page.
        most_running: texts that run together.
        most_waiting: texts that may wait to run for the first time.
        shared: whether several keys share these places. Then each may have as many as are free: some always are.
        seed: names the model and the cache's bits; a page is shared by texts of one seed and level.
        windows: pages of blocks with a sliding window, where these have their own.
    """

    def __init__(
        self,
        pages: int,
        page_tokens: int,
        *,
        most_running: int,
        most_waiting: int,
        shared: bool = False,
        seed: bytes = b"",
        windows: WindowPages | None = None,
    ) -> None:
        self.blocks = Blocks(pages)
        self.page_tokens, self.most_running, self.most_waiting = page_tokens, most_running, most_waiting
        self.shared = shared
        self.running: list[Text] = []  # by arrival
        self.windows: WindowPages | NoWindows = NoWindows() if windows is None else windows
        self.preemptions = 0
        self._queues: OrderedDict[str, deque[Text]] = (
            OrderedDict()
        )  # of each key, that whose turn it is first
        self._coming: dict[Hash, Text] = {}  # pages that a running text will publish
        self._seed, self._arrivals = seed, 0

    # ---- requests

    @property
    def capacity(self) -> int:
        """Tokens that the cache holds."""
        return self.blocks.pages * self.page_tokens

    @property
    def waiting_count(self) -> int:
        return sum(map(len, list(self._queues.values())))

    def add(self, texts: Sequence[Text]) -> None:
        """Take texts, all of them or none.

        Raises:
            InputError: one that the cache could never hold.
            Busy: too many wait already, of all or of their key.
        """
        for text in texts:
            if not text.tokens:
                raise InputError("the prompt has no tokens: give some text to continue")
            if text.prompt + text.most > self.capacity:
                raise InputError(
                    f"a prompt of {text.prompt} tokens and {text.most} more are {text.prompt + text.most}, "
                    f"and the KV-cache holds {self.capacity}: shorten it, or ask for fewer"
                )
        if len(texts) > self.most_waiting:
            raise InputError(
                f"{len(texts)} texts at once: at most {self.most_waiting} may wait; ask for fewer"
            )
        waiting = self.waiting_count
        if waiting + len(texts) > self.most_waiting:
            raise Busy(f"{waiting} texts wait already, and {self.most_waiting} may")
        own = sum(len(self._queues.get(key, ())) for key in {text.key for text in texts})
        if self.shared and own + len(texts) > self.most_waiting - waiting:
            raise Busy(
                f"{own} texts of this key wait already, and {self.most_waiting - waiting} places are free"
            )
        for text in texts:
            text.arrival, self._arrivals = self._arrivals, self._arrivals + 1
            self._queues.setdefault(text.key, deque()).append(text)

    def end(self, text: Text) -> None:
        """Forget a text, whether it waits, runs or has ended already. Between a step and its `done`, what the step
        computed of it is lost.
        """
        if text in self.running:
            self.running.remove(text)
            self._give_up(text)
        elif text in self._queues.get(text.key, ()):
            self._queues[text.key].remove(text)
            self._forget_if_empty(text.key)

    def set_level(self, text: Text, level: int) -> None:
        """Compute what follows of a text at another level."""
        if level == text.level:
            return
        self._unclaim(text)
        text.level, text.hashes, text.awaits = level, [], None
        text.mixed = text.done > 0

    # ---- rounds

    def schedule(self, budget: int) -> list[Step]:
        """The steps of one round, each of another level; run all of them in order, `done` after each.

        Args:
            budget: tokens of prompts, at least 1.
        """
        budget = min(budget, self.windows.most)
        decoding = [
            text
            for text in list(self.running)
            if text.missing == 1 and text in self.running and self._extend(text)
        ]
        # Drafts take pages that are left.
        planned = [Rows(text, text.done, 1, self._draft(text)) for text in decoding]
        self._admit()
        planned += self._prompts(budget, {rows.text for rows in planned})
        steps: dict[int, list[Rows]] = {}
        for rows in planned:
            self.windows.extend(rows.text.window_pages, rows.first + len(rows.tokens))
            steps.setdefault(rows.text.level, []).append(rows)
        return [Step(level, rows) for level, rows in steps.items()]

    def done(self, step: Step, drawn: Mapping[Text, Sequence[int]]) -> None:
        """Take what a step has computed; a text ends when no more of it is wanted.

        Args:
            step: one of the last round's.
            drawn: tokens behind the rows that are the last of their texts: the draft as far as it was right, and one
                more. A text that was ended is left out.
        """
        for rows in step.rows:
            text = rows.text
            if text not in self.running:
                continue
            new = drawn.get(text, ())
            text.tokens += new
            text.done += rows.count + max(0, len(new) - 1)
            self._publish(text, rows.first)
            self.windows.pass_by(text.window_pages, text.done)
            if text.left <= 0 and text.done >= text.prompt:
                self.end(text)

    # ---- who runs

    def _extend(self, text: Text) -> bool:
        """Give a text the pages of its known tokens; those that came later give up theirs, at last itself."""
        needed = self._pages_of(len(text.tokens)) - len(text.pages)
        while needed > self.blocks.available:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is text:
                return False
        text.pages += self.blocks.take(needed)
        return True

    def _draft(self, text: Text) -> Sequence[int]:
        """A text's draft, with pages for it; none if these are not free."""
        draft = text.draft[: max(0, min(text.left, self.windows.most) - 1)]
        needed = self._pages_of(len(text.tokens) + len(draft)) - len(text.pages)
        if needed > self.blocks.available:
            return ()
        text.pages += self.blocks.take(needed)
        return draft

    def _preempt(self, text: Text) -> None:
        """Let a text wait, first of all; its tokens are computed again."""
        self.running.remove(text)
        self._give_up(text)
        self._queues.setdefault(text.key, deque()).appendleft(text)
        self._queues.move_to_end(text.key, last=False)
        self.preemptions += 1

    def _admit(self) -> None:
        """Let texts run, key by key, until one does not fit: none passes it, so that it will."""
        blocked: set[str] = set()
        while len(self.running) < self.most_running:
            key = next((key for key in self._queues if key not in blocked), None)
            if key is None:
                return
            text = next((text for text in self._queues[key] if not self._waits(text)), None)
            if text is None:
                blocked.add(key)
                continue
            if not self._start(text):
                return
            self._queues[key].remove(text)
            self._queues.move_to_end(key)
            self._forget_if_empty(key)

    def _start(self, text: Text) -> bool:
        """Let a text run, unless too few pages are left for it and one more for each that runs."""
        prefix = self._prefix(text)
        shared = self.blocks.share(prefix[: self._matching(prefix)])
        needed = self._pages_of(len(text.tokens) + (text.left > 0)) - len(shared)
        if needed + len(self.running) > self.blocks.available:
            self.blocks.release(shared)
            return False
        text.window_pages = self.windows.share(prefix[: len(shared)])
        text.done = len(shared) * self.page_tokens
        text.pages = shared + self.blocks.take(self._pages_of(len(text.tokens)) - len(shared))
        if text.cached is None:
            text.cached = text.done
        for key in self._hashes(text)[len(shared) :]:
            self._coming.setdefault(key, text)
        self.running.append(text)
        self.running.sort(key=lambda other: other.arrival)
        return True

    def _waits(self, text: Text) -> bool:
        """Whether the next page that a text would compute is being computed."""
        if text.awaits not in self._coming:
            prefix = self._prefix(text)
            found = self._matching(prefix)
            text.awaits = prefix[found] if found < len(prefix) else None
        return text.awaits in self._coming

    def _prompts(self, budget: int, decoding: set[Text]) -> list[Rows]:
        """Rows of prompts: half the budget for the oldest, the rest for the shortest, so that none waits for long."""
        texts = [text for text in self.running if text not in decoding]
        if not texts:
            return []
        oldest, *others = texts
        counts = {oldest: min(oldest.missing, budget - budget // 2 if others else budget)}
        for text in sorted(others, key=lambda other: (other.missing, other.arrival)):
            counts[text] = min(text.missing, budget - sum(counts.values()))
        counts[oldest] = min(oldest.missing, counts[oldest] + budget - sum(counts.values()))
        return [Rows(text, text.done, count) for text, count in counts.items() if count]

    # ---- pages

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def _hashes(self, text: Text) -> list[Hash]:
        seed = self._seed + text.level.to_bytes(4, "little")
        text.hashes = chain(seed, text.tokens, self.page_tokens, text.hashes)
        return text.hashes

    def _prefix(self, text: Text) -> list[Hash]:
        """Hashes of the pages that a text may share: its last token is computed, and no shared page is written."""
        return [] if text.every else self._hashes(text)[: (len(text.tokens) - 1) // self.page_tokens]

    def _matching(self, prefix: Sequence[Hash]) -> int:
        """How many of a text's first pages it can share now."""
        return self.windows.matching(prefix[: self.blocks.matching(prefix)])

    def _publish(self, text: Text, first: int) -> None:
        """Let others share the pages that have become full with the tokens from `first` on."""
        if text.mixed:
            return
        hashes = self._hashes(text)
        for i in range(first // self.page_tokens, text.done // self.page_tokens):
            self.blocks.publish(text.pages[i], hashes[i])
            self.windows.publish(text.window_pages, i, hashes[i])
            if self._coming.get(hashes[i]) is text:
                del self._coming[hashes[i]]

    def _give_up(self, text: Text) -> None:
        self._unclaim(text)
        self.blocks.release(text.pages)
        self.windows.give_up(text.window_pages)
        text.done, text.mixed = 0, False

    def _unclaim(self, text: Text) -> None:
        for key in text.hashes:
            if self._coming.get(key) is text:
                del self._coming[key]

    def _forget_if_empty(self, key: str) -> None:
        if not self._queues[key]:
            del self._queues[key]
