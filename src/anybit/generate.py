"""Text out of a model: continue a prompt, or hold a conversation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, Unpack, cast

from anybit.artifact.files import is_artifact
from anybit.artifact.levels import Budget
from anybit.artifact.reader import refuse_unfinished
from anybit.checkpoint.generation import read_generation
from anybit.checkpoint.hub import download
from anybit.checkpoint.tokenizer import check_ids, encode
from anybit.config import Json, check_kv_bits
from anybit.engine.description import Unsupported, check_computes
from anybit.engine.engine import Engine
from anybit.engine.opening import native_or_inside, open_plain
from anybit.engine.sampling import Sampling
from anybit.errors import InputError
from anybit.progress import SILENT, Silent

if TYPE_CHECKING:
    from anybit.in_transformers import InTransformers

Say = Callable[[str], None]  # gets a piece of text


def nothing(piece: str) -> None:
    """Says nothing."""


class Running(Budget, total=False):
    """The budget of the level to run at, and what runs it."""

    engine: str  # "auto", "native" or "transformers"; "auto" is the native one where it runs the model
    threads: int | None  # None: what each finds


class Drawing(TypedDict, total=False):
    """How tokens are drawn, beside what generation_config.json says; see `anybit.Sampling`."""

    temperature: float  # 0: always the likeliest token
    seed: int
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float  # this and what follows: the native engine alone has it
    frequency_penalty: float
    stop: list[str]  # strings that end a text


NATIVE_ONLY = ("presence_penalty", "frequency_penalty", "stop")


class Runner(Protocol):
    """A loaded model that continues texts, natively or inside Transformers."""

    tokenizer: Any
    vocabulary: int | None  # None: its configuration does not say
    context: int | None  # tokens that a text may have; None: its configuration does not say
    kv_bits: int

    def tokens(self, ids: list[int], room: int, drawing: Drawing, say: Say) -> list[int]:
        """At most so many new tokens after a prompt; their text is said as it is made."""


class Natively:
    """A model that the native engine runs."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.tokenizer = engine, engine.tokenizer
        self.vocabulary: int | None = engine.vocabulary
        self.context: int | None = engine.context
        self.kv_bits = engine.kv_bits

    def sampling(self, drawing: Drawing) -> Sampling:
        """What tokens are drawn by.

        Raises:
            InputError: a value without a meaning; drawing that the model's makers want and the engine lacks.
        """
        return _sampling(drawing, self.engine.default_sampling)

    def tokens(self, ids: list[int], room: int, drawing: Drawing, say: Say) -> list[int]:
        made = []
        for piece in self.engine.stream(ids, room, self.sampling(drawing), drawing.get("stop", ())):
            if piece.drawn is not None:
                made.append(piece.drawn.token)
            if piece.text:
                say(piece.text)
        return made


class Echo:
    """Prints an answer while it is made, and keeps it."""

    def __init__(self) -> None:
        self.text = ""

    def __call__(self, piece: str) -> None:
        self.text += piece
        print(piece, end="", flush=True)

    def end(self) -> None:
        print(flush=True)


def _sampling(drawing: Drawing, default: Any) -> Sampling:
    temperature = drawing.get("temperature", 0.0)
    asked: Json = {"do_sample": temperature != 0, "temperature": temperature}
    given: Json = {name: value for name, value in drawing.items() if name not in ("temperature", "stop")}
    return replace(default(**asked), **given)


class Generator:
    """A model and its tokenizer, ready to continue texts.

    Args:
        model: an artifact, an HF directory, a hub id or a `.gguf` file.
        kv_bits: of the KV-cache; default: what the artifact asks for.
        codebook_precision: default: "int8" in the native engine, else "fp16".
        dtype: this and `device`: see `anybit.load`; the native engine computes in float32 on the CPU.
        report: where progress goes, and which engine runs the model.
        at: the budget of the level, and what runs it.

    Raises:
        InputError: see `anybit.load`; an encoder; an engine that does not run the model and was asked for.
    """

    def __init__(
        self,
        model: str,
        *,
        kv_bits: int | None = None,
        codebook_precision: str | None = None,
        dtype: str = "float32",
        device: str = "cpu",
        report: Silent = SILENT,
        **at: Unpack[Running],
    ) -> None:
        self.name = model
        check_kv_bits(kv_bits)
        asked, threads = at.pop("engine", "auto"), at.pop("threads", None)
        self._how: Json = {"kv_bits": kv_bits, "threads": threads, "report": report}
        self._at = cast(Budget, at)

        @cache
        def inside() -> InTransformers:
            from anybit.in_transformers import InTransformers

            return InTransformers(model, codebook_precision or "fp16", dtype, device, **self._how, **self._at)

        def natively() -> Natively:
            check_computes(dtype, device)
            return self._natively(inside, codebook_precision or "int8")

        try:
            self.runner: Runner = native_or_inside(asked, natively, inside, report)
        finally:
            report.close()
        self.tokenizer, self.kv_bits = self.runner.tokenizer, self.runner.kv_bits

    def _natively(self, inside: Callable[[], InTransformers], precision: str) -> Natively:
        """The model in the native engine, which reads what it can by itself, and takes the rest from Transformers."""
        refuse_unfinished(Path(self.name))
        path = Path(self.name) if Path(self.name).exists() else download(self.name)
        if is_artifact(path):
            return self._on_engine(self.name, read_generation(path), precision, **self._at)
        with suppress(Unsupported):  # Transformers may load it, or says what is wrong
            return self._from_checkpoint(precision)
        loaded = inside()
        return self._on_engine(loaded.model, loaded.generation, precision, tokenizer=loaded.tokenizer)

    def _from_checkpoint(self, precision: str) -> Natively:
        """A checkpoint in the native engine, without Transformers; what was read is let go where that cannot be."""
        plain = open_plain(self.name, None, self._at)
        return self._on_engine(plain, plain.generation, precision)

    def _on_engine(self, model: Any, stored: Mapping[str, Any], precision: str, **given: Any) -> Natively:
        """A model in the native engine.

        Args:
            model: as `Engine` takes it.
            stored: what its generation_config.json says.
            precision: of codebooks.
            given: what else `Engine` takes.

        Raises:
            Unsupported: it does not run there.
        """
        try:  # the model's makers may want tokens drawn in a way that the engine lacks
            Sampling.from_generation_config({**stored, "do_sample": True})
        except InputError as error:
            raise Unsupported(str(error)) from error
        made = Engine(model, codebook_precision=precision, **self._how, **given)
        self._how["report"].say(made.how())
        return Natively(made)

    @property
    def native(self) -> bool:
        return isinstance(self.runner, Natively)

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a prompt.

        Raises:
            InputError: a prompt of no tokens, or no Unicode; one that leaves no room in the model's context; a
                tokenizer of another model.
        """
        ids = encode(self.tokenizer, prompt)
        if not ids:
            raise InputError("the prompt is empty: give some text to continue with -p")
        return self._known(ids)

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the model's answer.

        Raises:
            InputError: a model without a chat template, or one that cannot be used; see also `encode`.
        """
        if not self.tokenizer.chat_template:
            raise InputError(
                f"{self.name} has no chat template: it is not a chat model; use `anybit generate`"
            )
        from anybit.checkpoint.chat_template import render  # Jinja, which nothing else needs

        text = render(self.name, self.tokenizer, messages)
        ids = encode(self.tokenizer, text, special=False)  # the template has them
        if not ids:
            raise InputError(
                f"the chat template of {self.name} makes an empty text of the conversation: use `anybit generate`"
            )
        return self._known(ids)

    def _known(self, ids: list[int]) -> list[int]:
        """Token ids that the model has, and has room for."""
        check_ids(ids, self.runner.vocabulary)
        self._room(ids, 1)
        return ids

    def _room(self, ids: list[int], wanted: int) -> int:
        """How many more tokens the model's context holds, at most those that are wanted.

        Raises:
            InputError: none.
        """
        limit = self.runner.context
        if limit is None:
            return wanted
        if len(ids) >= limit:
            raise InputError(
                f"the prompt has {len(ids)} tokens, the model's context holds {limit}: shorten it"
            )
        return min(wanted, limit - len(ids))

    def check(self, drawing: Drawing) -> None:
        """Refuse, before a prompt is printed, a way to draw tokens that cannot be.

        Raises:
            InputError: a value without a meaning, or one that only the native engine has.
        """
        if isinstance(self.runner, Natively):
            self.runner.sampling(drawing)
        else:
            _sampling(drawing, lambda **asked: Sampling.from_generation_config(asked))
        if "" in drawing.get("stop", ()):
            raise InputError("--stop is empty: give at least one character")
        for name in () if self.native else NATIVE_ONLY:
            if drawing.get(name):
                raise InputError(
                    f"--{name.replace('_', '-')} needs the native engine, and this model runs inside Transformers"
                )

    def generate(
        self, ids: list[int], max_new_tokens: int, say: Say = nothing, **drawing: Unpack[Drawing]
    ) -> list[int]:
        """New token ids after a prompt; greedy at temperature 0, which is the default.

        Args:
            ids: of the prompt.
            max_new_tokens: at most so many, and what the context holds.
            say: gets the text as it is made.
            drawing: how tokens are drawn.

        Raises:
            InputError: a prompt that leaves no room in the model's context, or in memory; see also `check`.
        """
        self.check(drawing)
        return self.runner.tokens(ids, self._room(ids, max_new_tokens), drawing, say)

    def stream(self, ids: list[int], max_new_tokens: int, **drawing: Unpack[Drawing]) -> str:
        """Print the continuation of a prompt as it is made, and return it."""
        echo = Echo()
        self.generate(ids, max_new_tokens, echo, **drawing)
        echo.end()
        return echo.text

    def answer(self, messages: list[dict[str, str]], max_new_tokens: int, **drawing: Unpack[Drawing]) -> str:
        """Print the answer to a conversation as it is made, and return it; Ctrl-C ends the answer only.

        Raises:
            InputError: see `encode_chat` and `generate`.
        """
        ids, echo = self.encode_chat(messages), Echo()
        with suppress(KeyboardInterrupt):
            self.generate(ids, max_new_tokens, echo, **drawing)
        echo.end()
        return echo.text


def converse(generator: Generator, max_new_tokens: int, **drawing: Unpack[Drawing]) -> None:
    """Read lines from standard input and answer them until an empty line or the end.

    A line that no longer fits the model's context is left out, with a word on standard error.
    """
    messages: list[dict[str, str]] = []
    generator.check(drawing)
    generator.encode_chat([{"role": "user", "content": "hi"}])  # refuse a model without a template at once
    while True:
        sys.stdout.write("> " if sys.stdin.isatty() else "")
        sys.stdout.flush()
        try:
            line = sys.stdin.readline().strip()
        except UnicodeDecodeError as error:
            raise InputError("standard input is not valid UTF-8: write it in UTF-8") from error
        if line in ("", "/exit"):
            return
        if line == "/new":
            messages = []
            continue
        asked = [*messages, {"role": "user", "content": line}]
        try:
            answer = generator.answer(asked, max_new_tokens, **drawing)
        except InputError as error:
            print(f"anybit: {error}, or start over with /new", file=sys.stderr)
            continue
        messages = [*asked, {"role": "assistant", "content": answer}]
