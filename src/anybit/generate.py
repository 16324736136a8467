"""Text out of a model: continue a prompt, or hold a conversation."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypedDict, Unpack, cast

import torch
from torch import Tensor
from transformers import TextStreamer

from anybit.artifact.levels import Budget
from anybit.checkpoint.architectures import is_encoder, max_positions
from anybit.checkpoint.chat_template import render
from anybit.checkpoint.generation import for_one_sequence
from anybit.checkpoint.tokenizer import check_ids, check_unicode, encode
from anybit.config import Json
from anybit.engine.description import check_tokenizer
from anybit.engine.engine import Engine
from anybit.engine.sampling import Sampling
from anybit.errors import InputError, enough_memory
from anybit.kernels.gpu import cuda_graph
from anybit.kv_cache import CACHE, QuantizedCache, check_kv_bits
from anybit.loader import config_of, load, load_tokenizer
from anybit.progress import SILENT, Silent

ENGINES = ("auto", "native", "transformers")


class Running(Budget, total=False):
    """The budget of the level to run at, and what runs it."""

    engine: str  # one of ENGINES; "auto" is the native one where it runs the model
    threads: int | None  # of the native engine; None: what it finds


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


def _native(asked: str, model: Any, tokenizer: Any, how: Json, report: Silent) -> Engine | None:
    """The native engine, where it runs the model; else nothing, with a word why.

    Raises:
        InputError: it does not, and was asked for.
    """
    try:
        asked_for = getattr(model, "generation_config", None)
        Sampling.from_generation_config({**(asked_for.to_dict() if asked_for else {}), "do_sample": True})
        check_tokenizer(tokenizer)
        made = Engine(model, tokenizer=tokenizer, **how)
    except InputError as error:
        _refuse(asked, str(error), report)
        return None
    report.say(made.how())
    return made


def _refuse(asked: str, why: str, report: Silent) -> None:
    """Say why Transformers runs a model.

    Raises:
        InputError: the native engine was asked for.
    """
    if asked == "native":
        raise InputError(f"the native engine does not run this model: {why}; leave --engine native out")
    report.say(f"runs inside Transformers: {why}")


class Echo(TextStreamer):
    """Prints an answer while it is made, and keeps what it printed."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        super().on_finalized_text(text, stream_end)


class Generator:
    """A loaded model and its tokenizer."""

    def __init__(
        self,
        model: str,
        *,
        kv_bits: int | None = None,  # None: what the artifact asks for
        codebook_precision: str | None = None,  # None: "int8" in the native engine, else "fp16"
        dtype: str = "float32",  # this and what follows: see `load`
        device: str = "cpu",
        report: Silent = SILENT,
        **at: Unpack[Running],
    ) -> None:
        self.name = model
        check_kv_bits(kv_bits)
        engine, threads = at.pop("engine", "auto"), at.pop("threads", None)
        budget = cast(Budget, at)
        if engine not in ENGINES:
            raise InputError(f"engine {engine!r}: expected one of {', '.join(ENGINES)}")
        config = config_of(model)
        if is_encoder(config):
            raise InputError(
                f"{model} is an encoder and cannot generate text; `anybit eval` measures its embeddings"
            )
        if getattr(config, "is_encoder_decoder", False):
            raise InputError(
                f"{model} has an encoder, too, by its config.json (is_encoder_decoder), which anybit cannot run: "
                "use the config.json that belongs to its weights"
            )
        self.tokenizer = load_tokenizer(model)
        try:
            self.model = load(
                model,
                codebook_precision=codebook_precision or "fp16",
                dtype=dtype,
                device=device,
                report=report,
                **budget,
            )
            self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
            self.engine: Engine | None = None
            if device != "cpu" or dtype != "float32":
                _refuse(
                    engine,
                    f"the native engine computes in float32 on the CPU, not {dtype} on {device}",
                    report,
                )
            elif engine != "transformers":
                how: Json = {
                    "kv_bits": kv_bits,
                    "codebook_precision": codebook_precision or "int8",
                    "threads": threads,
                }
                self.engine = _native(engine, self.model, self.tokenizer, how, report)
        finally:
            report.close()
        self.vocabulary = getattr(self.model.config.get_text_config(), "vocab_size", None)
        stored = getattr(self.model, "generation_config", None)
        self.model.generation_config = for_one_sequence(model, stored, self.vocabulary)
        self.kv_bits = getattr(self.model, "kv_bits", 16) if kv_bits is None else kv_bits

    def encode(self, prompt: str) -> Tensor:
        """Token ids [1, T] of a prompt.

        Raises:
            InputError: a prompt of no tokens, or no Unicode; one that leaves no room in the model's context; a
                tokenizer of another model.
        """
        ids = encode(self.tokenizer, prompt)
        if not ids:
            raise InputError("the prompt is empty: give some text to continue with -p")
        return self._known(ids)

    def encode_chat(self, messages: list[dict[str, str]]) -> Tensor:
        """Token ids [1, T] of a conversation, ready for the model's answer.

        Raises:
            InputError: a model without a chat template, or one that cannot be used; see also `encode`.
        """
        if not self.tokenizer.chat_template:
            raise InputError(
                f"{self.name} has no chat template: it is not a chat model; use `anybit generate`"
            )
        for message in messages:
            check_unicode(message["content"])
        text = render(self.name, self.tokenizer, messages)
        ids = encode(self.tokenizer, text, special=False)  # the template has them
        if not ids:
            raise InputError(
                f"the chat template of {self.name} makes an empty text of the conversation: use `anybit generate`"
            )
        return self._known(ids)

    def _known(self, ids: list[int]) -> Tensor:
        """Token ids [1, T] that the model has, and has room for."""
        check_ids(ids, self.vocabulary)
        self._room(len(ids))
        return torch.tensor([ids], dtype=torch.int64)

    def _room(self, tokens: int) -> int | None:
        """How many more tokens the model's context holds; None where its config does not say.

        Raises:
            InputError: none.
        """
        limit = max_positions(self.model) if self.engine is None else self.engine.context
        if limit is not None and tokens >= limit:
            raise InputError(f"the prompt has {tokens} tokens, the model's context holds {limit}: shorten it")
        return None if limit is None else limit - tokens

    def check(self, drawing: Drawing) -> None:
        """Refuse, before a prompt is printed, a way to draw tokens that cannot be.

        Raises:
            InputError: a value without a meaning, or one that only the native engine has.
        """
        self._sampling(drawing)
        if "" in drawing.get("stop", ()):
            raise InputError("--stop is empty: give at least one character")
        for name in NATIVE_ONLY if self.engine is None else ():
            if drawing.get(name):
                raise InputError(
                    f"--{name.replace('_', '-')} needs the native engine, and this model runs inside Transformers"
                )

    def _sampling(self, drawing: Drawing) -> Sampling:
        """What the native engine draws by, and what gives bad values their words."""
        temperature = drawing.get("temperature", 0.0)
        asked: Json = {"do_sample": temperature != 0, "temperature": temperature}
        given: Json = {name: value for name, value in drawing.items() if name not in ("temperature", "stop")}
        if self.engine is None:
            return replace(Sampling.from_generation_config(asked), **given)
        return replace(self.engine.default_sampling(**asked), **given)

    def stream(self, ids: Tensor, max_new_tokens: int, **drawing: Unpack[Drawing]) -> str:
        """Print the continuation of ids [1, T] as it is made, and return it."""
        echo = Echo(self.tokenizer)
        self.generate(ids, max_new_tokens, streamer=echo, **drawing)
        return echo.text

    def answer(self, messages: list[dict[str, str]], max_new_tokens: int, **drawing: Unpack[Drawing]) -> str:
        """Print the answer to a conversation as it is made, and return it; Ctrl-C ends the answer only.

        Raises:
            InputError: see `encode_chat` and `generate`.
        """
        ids, echo = self.encode_chat(messages), Echo(self.tokenizer)
        try:
            self.generate(ids, max_new_tokens, streamer=echo, **drawing)
        except KeyboardInterrupt:
            echo.end()
        return echo.text

    def generate(
        self, ids: Tensor, max_new_tokens: int, streamer: Any = None, **drawing: Unpack[Drawing]
    ) -> Tensor:
        """New token ids [n] after ids [1, T]; greedy at temperature 0, which is the default.

        Raises:
            InputError: a prompt that leaves no room in the model's context, or in memory; see also `check`.
        """
        self.check(drawing)
        left = self._room(ids.shape[1])
        room = max_new_tokens if left is None else min(max_new_tokens, left)
        if self.engine is not None:
            return self._generate_natively(ids, room, drawing, streamer)
        sampling: Json = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if drawing.get("temperature", 0.0) > 0:
            names = ("temperature", "top_k", "top_p", "min_p")
            sampling = {"do_sample": True} | {name: value for name, value in drawing.items() if name in names}
        if "repetition_penalty" in drawing:
            sampling["repetition_penalty"] = drawing["repetition_penalty"]
        pad = (
            self.tokenizer.pad_token_id
            if self.tokenizer.pad_token_id is not None
            else self.tokenizer.eos_token_id
        )
        ids = ids.to(self.model.device)
        on_gpu = self.model.device.type == "cuda"
        with ExitStack() as stack:
            stack.enter_context(enough_memory("shorten the prompt, or ask for fewer tokens"))
            stack.enter_context(torch.random.fork_rng())
            stack.enter_context(torch.no_grad())
            torch.manual_seed(drawing.get("seed", 0))
            if self.kv_bits != 16:
                sampling[CACHE] = QuantizedCache(self.model.config, self.kv_bits)
            elif on_gpu and cuda_graph.fits(self.model.config):
                make_cache = stack.enter_context(cuda_graph.graphed(self.model))
                sampling |= {CACHE: make_cache(ids.shape[1] + room), "disable_compile": True}
            output = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=room,
                pad_token_id=pad,
                streamer=streamer,
                **sampling,
            )
        return output[0, ids.shape[1] :]

    def _generate_natively(self, ids: Tensor, room: int, drawing: Drawing, streamer: Any) -> Tensor:
        assert self.engine is not None
        tokens = []
        for piece in self.engine.stream(
            ids[0].tolist(), room, self._sampling(drawing), stop=drawing.get("stop", ())
        ):
            if piece.drawn is not None:
                tokens.append(piece.drawn.token)
            if streamer is not None and piece.text:
                streamer.on_finalized_text(piece.text)
        if streamer is not None:
            streamer.end()
        return torch.tensor(tokens, dtype=torch.int64)


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
