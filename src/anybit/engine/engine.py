"""The native engine: a model, its KV-cache, and text out of it, one request at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from anybit.artifact.levels import Budget
from anybit.checkpoint.generation import for_one_sequence
from anybit.checkpoint.tokenizer import check_ids, encode
from anybit.config import Json
from anybit.engine.description import Unsupported, reach
from anybit.engine.drafts import HOPE, Drafts, NarrowDrafts, StepTimes, narrow_level
from anybit.engine.opening import open_source
from anybit.engine.pages import CHUNK, Cache, Held
from anybit.engine.sampling import Drawn, Sampler, Sampling
from anybit.engine.source import Source, as_unsupported
from anybit.engine.text import TextStream, check_tokenizer
from anybit.engine.threads import check_threads, default_threads, rest_pytorch
from anybit.errors import InputError, refuse_unknown
from anybit.formats.levels import largest
from anybit.kernels import cpu
from anybit.kernels.cpu_layer import check_precision
from anybit.progress import SILENT, Silent

Tokens = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

KV_BITS = (16, 8, 4)  # widths of keys and values that the engine has
NO_CONTEXT = 4096  # tokens where a config does not say how many a model reaches


@dataclass(frozen=True, eq=False)
class Batch:
    """Tokens of some texts that a step computes: rows, those of a text together and at ascending positions."""

    tokens: Tokens  # int32 [rows]
    positions: Tokens  # int32 [rows], in their texts
    texts: Tokens  # int32 [rows]: which row of `pages` is a token's
    pages: Tokens  # int32 [texts, n]: of each text, in order
    wanted: Tokens  # int32: rows whose logits are wanted
    # int32 like `pages`, of blocks with a sliding window where these have pages of their own. In place of what the
    # window has passed any page may stand; a text's first page has to stay.
    window_pages: Tokens | None = None


@dataclass(frozen=True)
class Piece:
    """What one token adds to a text."""

    text: str  # may be empty: the characters are not whole yet, or could begin a stop string
    drawn: Drawn | None  # None: the text that was held back, at the end
    finish: str | None = (
        None  # of the last piece: "stop", or "length" where no more tokens were wanted or fit
    )


@dataclass
class Generation:
    """A text and how it came to be."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    drawn: list[Drawn] = field(default_factory=list)
    finish: str = "length"
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of those, that the text before had computed
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


class Engine:
    """A model that runs natively, without PyTorch, at every width that its artifact has.

    Inputs of layers are float32, or with `codebook_precision` "int8" rounded to 8 bits where layers have kernels for
    that. Tokens have the same logits, bit for bit, whatever else is computed with them: in chunks of a prompt of any
    size, alone or beside others.

    Args:
        model: an artifact, an HF directory or hub id with weights of 16 bits; or what `anybit.load` made of one in
            float32, which loses its weights to the engine.
        tokenizer: that of a loaded model; default: the one that belongs to the files.
        kv_bits: keys and values in 16, 8 or 4 bits; default: what the artifact asks for.
        codebook_precision: "int8", or "fp16": weights as they are stored, inputs exact.
        threads: default: physical cores, within the process' affinity and its cgroups' quota.
        context: tokens that one text may have; default: what the model reaches, and memory holds.
        report: where progress goes.
        at: the budget of the widest level to load; see `anybit.load`.

    Raises:
        Unsupported: a model that only Transformers runs; the message says why.
        InputError: see `anybit.load`.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        kv_bits: int | None = None,
        codebook_precision: str = "int8",
        threads: int | None = None,
        context: int | None = None,
        report: Silent = SILENT,
        **at: Unpack[Budget],
    ) -> None:
        check_precision(codebook_precision)
        refuse_unknown(at, Budget)
        check_threads(threads)
        if not cpu.available():
            raise Unsupported(cpu.why_not() or "there is no native extension")
        self.threads = default_threads() if threads is None else threads
        self.codebook_precision, self._process = codebook_precision, os.getpid()
        if kv_bits is not None:  # before a model is read
            _check_kv_bits(kv_bits)
        source = open_source(model, tokenizer, at, (codebook_precision, self.threads), report)
        self.name, self.tokenizer = source.name, source.tokenizer
        self.kv_bits = source.kv_bits if kv_bits is None else kv_bits
        try:
            _check_kv_bits(self.kv_bits)
            with as_unsupported():
                self._take(source, context)
        except BaseException:
            source.restore()
            raise
        rest_pytorch(self)

    def _take(self, source: Source, context: int | None) -> None:
        """Make the decoder and its cache of a model, which keeps its weights until nothing can refuse it."""
        description = source.description
        self.vocabulary: int = description["vocabulary"]
        self._decoder = cpu._native.Decoder(description, self.codebook_precision == "int8")
        self._source = source
        self._bound: dict[int, int] = {}  # levels that the decoder has, by number
        # Whether inputs are rounded, of each of the blocks' matrices at the widest level.
        self._rounded: list[bool] = []
        self._level(len(source.levels) - 1)
        self.generation = for_one_sequence(self.name, source.generation, self.vocabulary)
        self._drawing = {name: source.generation.get(name) for name in ("do_sample", "temperature")}
        reached = reach(source.config) or NO_CONTEXT
        self._cache = Cache(description, self.kv_bits, reached, context)
        self.context = self._cache.context
        self._times: dict[int, StepTimes] = {}  # of each level
        self._acceptance: dict[int, float] = {}  # of each level: of drafts at the narrow one, by texts before
        self._shared = 0  # tokens that the text begun last found in the cache
        source.release()

    # ---- levels

    @property
    def widths(self) -> list[float]:
        """The average widths that the model can run at, ascending."""
        return [bits for bits, _ in self._source.levels]

    def _level(self, index: int) -> int:
        """The decoder's number of a level, which it gets when it is first asked for: nothing is copied."""
        if index not in self._bound:
            embedding, head, blocks = self._source.matrices(self._source.levels[index][1])
            self._bound[index] = self._decoder.add_level(embedding, head, blocks)
            codes = self.codebook_precision == "int8"
            self._rounded = self._rounded or [
                layer.rounds_inputs or (codes and layer.takes_codes) for block in blocks for layer in block
            ]
        return self._bound[index]

    def _level_of(self, bits: float | None) -> int:
        """The place among `widths` of the widest level, or of that for so many bits."""
        widths = self.widths
        return len(widths) - 1 if bits is None else largest(widths, bits, f"{self.name} has")

    # ---- tokens in, logits out

    def _run(
        self,
        text: Held,
        tokens: Sequence[int],
        level: int,
        every: bool = False,
        batch_invariant: bool = True,
    ) -> Floats:
        """Append tokens to a text at a level; logits [1, vocabulary] after the last one, or of all of them."""
        pages, window_pages = self._cache.tables(text)
        made = np.empty((len(tokens) if every else 1, self.vocabulary), np.float32)
        for first in range(0, len(tokens), CHUNK):
            chunk = np.array(tokens[first : first + CHUNK], np.int32)
            n, last = len(chunk), first + len(chunk) == len(tokens)
            wanted = np.arange(0 if every else n - last, n, dtype=np.int32)
            logits = made[first : first + n] if every else made[: len(wanted)]
            positions = np.arange(text.done, text.done + n, dtype=np.int32)
            text.write(n)
            batch = Batch(chunk, positions, np.zeros(n, np.int32), pages, wanted, window_pages)
            self._step(batch, logits, level, batch_invariant)
            text.tokens += chunk.tolist()
        return made

    def _step(self, batch: Batch, logits: Floats, level: int, batch_invariant: bool = True) -> None:
        """`Decoder.step` with the engine's cache and threads, at a place among `widths`.

        Raises:
            InputError: NaN or Inf; a forked process.
        """
        if os.getpid() != self._process:
            raise InputError("an engine does not work in a forked process: make one there")
        try:
            self._decoder.step(
                batch.tokens, batch.positions, batch.texts, batch.pages, batch.wanted, logits,
                self._level(level), self._cache.native, self.threads, batch.window_pages, batch_invariant,
            )  # fmt: skip
        except cpu._native.NotFiniteError as error:
            raise InputError(f"{self.name}: {error}: its weights are damaged, or overflow 16 bits") from None

    def logits(
        self, tokens: Sequence[int], bits: float | None = None, batch_invariant: bool = True
    ) -> Floats:
        """Logits float32 [tokens, vocabulary] of a text.

        Args:
            tokens: of the text.
            bits: the largest of the model's levels up to this average width; default: the widest.
            batch_invariant: each token has the bits that it has alone. With exact inputs that takes longer.

        Raises:
            InputError: tokens that the model does not have, or more than its context holds.
        """
        level = self._level_of(bits)
        check_ids(list(tokens), self.vocabulary)
        if not 1 <= len(tokens) <= self.context:
            raise InputError(f"the text has {len(tokens)} tokens, expected 1 to {self.context}, the context")
        with self._cache.hold(len(tokens)) as text:
            return self._run(text, tokens, level, every=True, batch_invariant=batch_invariant)

    # ---- several texts at once, for whoever gives out the pages

    @property
    def together(self) -> bool:
        """Whether it computes several texts at a time: an engine does."""
        return True

    @property
    def page_tokens(self) -> int:
        """Tokens of a page of the KV-cache."""
        return cpu._native.PAGE_TOKENS

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of the KV-cache."""
        return self._cache.page_bytes

    @property
    def window(self) -> int:
        """Positions that a token attends to in blocks with a sliding window, where they are most; 0: there are none."""
        return max(self._cache.windows)

    @property
    def window_page_bytes(self) -> int:
        """Bytes of a page of those blocks, part of `page_bytes`."""
        return self.page_bytes // len(self._cache.windows) * sum(w > 0 for w in self._cache.windows)

    @property
    def level_bytes(self) -> list[int]:
        """Bytes of the quantized matrices at each of `widths`; a token reads all of them, and what is not quantized."""
        return [sum(layout.nbytes for layout in layouts.values()) for _, layouts in self._source.levels]

    def give_pages(self, count: int, window_pages: int = 0) -> None:
        """Let the KV-cache have so many pages, empty ones; memory is taken as they are written.

        Args:
            count: of all blocks, or of those without a sliding window where the others have their own.
            window_pages: of the others; 0: they have none of their own, or there are no others.
        """
        self._cache.share(count, window_pages)

    def step(self, batch: Batch, level: int) -> Floats:
        """Compute some tokens of some texts together.

        Args:
            batch: the tokens.
            level: place among `widths`.

        Returns:
            Logits float32 [wanted, vocabulary].

        Raises:
            InputError: NaN or Inf; a forked process.
        """
        logits = np.empty((len(batch.wanted), self.vocabulary), np.float32)
        self._step(batch, logits, level)
        return logits

    # ---- text in, text out

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt.

        Raises:
            InputError: none, or others than the model has; more than leave room in the context.
        """
        ids = encode(self.tokenizer, prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise InputError("the prompt is empty: give some text to continue")
        check_ids(ids, self.vocabulary)
        if len(ids) >= self.context:
            raise InputError(
                f"the prompt has {len(ids)} tokens, the context holds {self.context}: shorten it"
            )
        return ids

    def stream(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        bits: float | None = None,
        speculate: bool = True,
    ) -> Iterator[Piece]:
        """A text's continuation, token by token; ends at the model's end of text.

        A prompt that begins like the text before, such as that of a conversation, is computed from there on.

        Args:
            prompt: text, or token ids.
            max_new_tokens: at most so many.
            sampling: how tokens are drawn; default: what generation_config.json says.
            stop: strings that end the text and are not part of it.
            bits: the largest of the model's levels up to this average width; default: the widest.
            speculate: compute drafts where that is faster: from what stood in the text before, or at a narrower width.
                The text is the same.

        Raises:
            InputError: before the first piece, what of this cannot be.
        """
        ids, level = self.encode(prompt), self._level_of(bits)
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {max_new_tokens}, expected 1 or more")
        sampling = self.default_sampling() if sampling is None else sampling
        sampler = Sampler(sampling, self.vocabulary, ids)
        text = TextStream(check_tokenizer(self.tokenizer), stop, ids)
        most = min(max_new_tokens, self.context - len(ids))
        behind = self._logits_behind(ids, most, level, sampler if speculate else None)
        return self._pieces(behind, most, sampler, text)

    def _pieces(
        self, behind: Generator[Floats, int], most: int, sampler: Sampler, stream: TextStream
    ) -> Iterator[Piece]:
        ends = self.ends
        with closing(behind):
            logits = next(behind)
            for count in range(1, most + 1):
                drawn = sampler.draw(logits)
                if drawn.token in ends:
                    yield Piece(stream.finish(), drawn, "stop")
                    return
                piece = stream.push(drawn.token)
                if stream.stopped is not None:
                    yield Piece(piece, drawn, "stop")
                    return
                yield Piece(piece, drawn)
                if count < most:
                    logits = behind.send(drawn.token)
            yield Piece(stream.finish(), None, "length")

    def _logits_behind(
        self, ids: list[int], most: int, level: int, speculates: Sampler | None
    ) -> Generator[Floats, int]:
        """Logits float32 [vocabulary] behind a prompt, then behind each token that is sent, `most` of them in all.

        Behind a token that a draft had right they are there already.

        Args:
            ids: of the prompt.
            most: tokens that are drawn.
            level: place among `widths`.
            speculates: what draws the tokens; None: nothing is drafted.
        """
        before = self._acceptance.get(level, HOPE)
        times, drafts, narrow = self._times_of(level), Drafts(ids), NarrowDrafts(before)
        with self._cache.going_on(ids, most, level) as text:
            self._shared = text.done
            token, known = (yield self._run(text, ids[text.done :], level)[0]), len(ids)
            while True:
                drafts.push(token)
                left = len(ids) + most - known - 2  # logits that are wanted behind those of this token
                draft: list[int] = []
                if speculates is not None:
                    draft = self._draft(text, (drafts, narrow), left, level, speculates)
                begun = time.perf_counter()
                try:
                    made = self._run(text, [token, *draft], level, every=True)
                except InputError:
                    if not draft:
                        raise
                    made, draft = self._run(text, [token], level), []  # NaN of a token that is not drawn
                times.measure(1 + len(draft), time.perf_counter() - begun)
                drawn: list[int] = []
                for logits, expected in zip(made, [*draft, None]):
                    drawn.append((yield logits))
                    if drawn[-1] != expected:
                        break
                    drafts.push(drawn[-1])
                narrow.compare(drawn)
                self._acceptance[level] = narrow.taught(before)
                token, known = drawn[-1], known + len(drawn)
                del text.tokens[known:]  # what was computed of wrong ones is written over

    def _draft(
        self, text: Held, kinds: tuple[Drafts, NarrowDrafts], most: int, level: int, sampler: Sampler
    ) -> list[int]:
        """What may follow a text's last token, which is not computed yet: the draft that promises most, if any does."""
        (drafts, narrow), times = kinds, self._times_of(level)
        found = drafts.worth(1, times.seconds, times.steps)
        guessed = narrow.worth(1, times.seconds, self._narrow_seconds(level))
        if guessed <= found:
            return drafts.draft(min(found.length, most))
        narrow.draft = self._drawn_narrowly(text, drafts.last, min(guessed.length, most), sampler)
        if most > 0 and not narrow.draft:
            narrow.fail()
        return narrow.draft

    def _narrow_seconds(self, level: int) -> float | None:
        """What a token of a draft at the narrow level takes; None: this level is no wider, or no time is known."""
        low, own = narrow_level(self.widths), self._times_of(level).seconds(1)
        if low >= level or own is None:
            return None
        measured = self._times_of(low).seconds(1)
        return own * self.widths[low] / self.widths[level] if measured is None else measured

    def _drawn_narrowly(self, text: Held, token: int, count: int, sampler: Sampler) -> list[int]:
        """Up to so many tokens behind one, drawn at the narrow level; text and sampler are left as they are."""
        level, known = narrow_level(self.widths), text.done
        times, draft, cold = self._times_of(level), list[int](), level not in self._bound
        begun = time.perf_counter()
        try:
            sampler = sampler.ahead()
            while len(draft) < count and token not in self.ends:
                token = sampler.token(self._run(text, [token], level)[0])
                draft.append(token)
                now = time.perf_counter()
                if not cold:  # the first step of all reads what no step has read
                    times.measure(1, now - begun)
                begun, cold = now, False
        except InputError:  # NaN of this width: the text's own decides
            pass
        finally:
            del text.tokens[known:]
        return draft

    def _times_of(self, level: int) -> StepTimes:
        return self._times.setdefault(level, StepTimes())

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        bits: float | None = None,
        speculate: bool = True,
    ) -> Generation:
        """A text's continuation, whole; see `stream`."""
        ids = self.encode(prompt)
        made, begun, first = Generation(prompt_tokens=len(ids)), time.perf_counter(), 0.0
        for piece in self.stream(ids, max_new_tokens, sampling, stop, bits, speculate):
            if not first:
                first, made.cached_tokens = time.perf_counter(), self._shared
            made.text += piece.text
            if piece.drawn is not None:
                made.tokens.append(piece.drawn.token)
                made.drawn.append(piece.drawn)
            made.finish = piece.finish or made.finish
        made.prefill_seconds, made.decode_seconds = first - begun, time.perf_counter() - first
        return made

    def default_sampling(self, **changes: Any) -> Sampling:
        """What generation_config.json asks for."""
        return Sampling.from_generation_config(self.generation | self._drawing | changes)

    def how(self) -> str:
        """How it computes, in a line."""
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        cache = f"a KV-cache of {self.kv_bits} bits for {self.context} tokens"
        return f"native engine: {threads}, {self._inputs()}, {cache}"

    def _inputs(self) -> str:
        """What becomes of the inputs of the blocks' matrices, in words."""
        layers = len(self._rounded)
        asked = sum(layout.rounds_inputs for layout in self._source.levels[-1][1].values())
        kinds = [(asked, "as the artifact asks"), (sum(self._rounded) - asked, "to 8 bits")]
        said = [
            f"inputs{'' if n == layers else f' of {n} of {layers} layers'} rounded {how}"
            for n, how in kinds
            if n
        ]
        return " and ".join(said) or "exact inputs"

    @property
    def ends(self) -> set[int]:
        """Tokens that end a text."""
        return ends_of(self.generation, self.tokenizer)


def ends_of(generation: Json, tokenizer: Any) -> set[int]:
    """Tokens that end a text, by generation_config.json or by the tokenizer."""
    ends = generation.get("eos_token_id")
    if ends is None:
        ends = tokenizer.eos_token_id
    return set(ends) if isinstance(ends, list) else set() if ends is None else {ends}


def _check_kv_bits(bits: int) -> None:
    if type(bits) is not int or bits not in KV_BITS:
        raise Unsupported(f"a KV-cache of {bits!r} bits; the engine has {', '.join(map(str, KV_BITS))}")
