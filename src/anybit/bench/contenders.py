"""Who decodes in `anybit bench decode`: this engine, Transformers with the same artifact, llama.cpp, mistral.rs.

Each is asked for tokens per second, of decoding behind some tokens or of a prompt. The rate is tokens over the time of
all of them, as llama-bench has it. Nothing is sampled.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from anybit.bench import mistralrs_rate
from anybit.bench.reading import settle
from anybit.bench.sources import Gguf, Source
from anybit.engine.description import MATRICES
from anybit.engine.engine import Engine
from anybit.engine.loaded import levels
from anybit.engine.timing import prompt_seconds, step_seconds
from anybit.errors import InputError
from anybit.kv_cache import CACHE, head_size, kv_heads
from anybit.layers import PackedModule, TiedHead

Floats = npt.NDArray[np.float32]
WARM_UP = 4  # steps before those that are timed
LLAMA_TYPES = {16: "f16", 8: "q8_0", 4: "q4_0"}  # of llama.cpp's keys and values, by their bits


class Runner(Protocol):
    """Something loaded that runs a model."""

    def decode(self, bits: float, depth: int, tokens: int) -> float:
        """Tokens per second of some tokens, one after another, behind `depth` others."""

    def prefill(self, bits: float, tokens: int) -> float:
        """Tokens per second of a prompt."""

    def weight_bytes(self, bits: float) -> int:
        """Bytes of weights that one token reads: the blocks' matrices and the head."""


class Native:
    """This engine."""

    def __init__(self, source: Source, precision: str, kv_bits: int, threads: int, context: int) -> None:
        loaded = source.open("float32")
        self._weights = {bits: touched(loaded, bits, 2) for bits, _ in levels(loaded)}
        self.engine = Engine(
            loaded, kv_bits=kv_bits, codebook_precision=precision, threads=threads, context=context
        )

    def decode(self, bits: float, depth: int, tokens: int) -> float:
        return tokens / sum(step_seconds(self.engine, depth, WARM_UP + tokens, bits)[WARM_UP:])

    def prefill(self, bits: float, tokens: int) -> float:
        prompt_seconds(self.engine, WARM_UP, bits)
        return tokens / prompt_seconds(self.engine, tokens, bits)

    def weight_bytes(self, bits: float) -> int:
        return self._weights[bits]


class InTransformers:
    """The same weights inside Transformers."""

    def __init__(self, source: Source, dtype: str, threads: int) -> None:
        self.model, self._threads = source.open(dtype), threads
        self._itemsize = self.model.dtype.itemsize

    def decode(self, bits: float, depth: int, tokens: int) -> float:
        with self._running(bits):
            cache = self._filled(depth)
            for _ in range(WARM_UP):
                self._run(1, cache)
            begun = time.perf_counter()
            for _ in range(tokens):
                self._run(1, cache)
            return tokens / (time.perf_counter() - begun)

    def prefill(self, bits: float, tokens: int) -> float:
        with self._running(bits):
            self._run(WARM_UP, self._filled(0))
            cache = self._filled(0)
            begun = time.perf_counter()
            self._run(tokens, cache)
            return tokens / (time.perf_counter() - begun)

    def weight_bytes(self, bits: float) -> int:
        return touched(self.model, bits, self._itemsize)

    def greedy(self, bits: float, ids: list[int], count: int) -> tuple[list[int], Floats]:
        """A text and its greedy continuation, and the logits [tokens, vocabulary] of all of it."""
        text = list(ids)
        with self._running(bits):
            cache, new = self._filled(0), list(ids)
            for _ in range(count):
                logits = self.model(
                    torch.tensor([new]), use_cache=True, logits_to_keep=1, **{CACHE: cache}
                ).logits
                new = [int(logits[0, -1].argmax())]
                text += new
            return text, self.model(torch.tensor([text]), use_cache=False).logits[0].float().numpy()

    @contextmanager
    def _running(self, bits: float) -> Iterator[None]:
        """At a width, with threads of PyTorch's, which rest afterwards: the engine's need the cores."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        if getattr(self.model, "levels", ()):
            self.model.set_bits(bits)
        try:
            with torch.inference_mode():
                yield
        finally:
            torch.set_num_threads(before)
            settle()

    def _run(self, tokens: int, cache: Any) -> Any:
        ids = torch.arange(tokens)[None] % self.model.config.vocab_size
        return self.model(ids, use_cache=True, logits_to_keep=1, **{CACHE: cache})

    def _filled(self, depth: int) -> Any:
        """A cache of random keys and values."""
        from transformers import DynamicCache

        config, cache = self.model.config, DynamicCache(config=self.model.config)
        for i, block in enumerate(self.model.model.layers if depth else ()):
            shape = 1, kv_heads(config), depth, block.self_attn.head_dim
            cache.update(*(torch.randn(shape, dtype=self.model.dtype) for _ in "kv"), i)
        return cache


class LlamaBench:
    """llama.cpp's own benchmark, in a process of its own for each figure."""

    def __init__(self, program: Path, file: Gguf, flash: bool, kv_bits: int, threads: int) -> None:
        self._file, kind = file, LLAMA_TYPES[kv_bits]
        self._command = [
            str(program), "-m", str(file.path), "-o", "json", "-r", "1", "-t", str(threads),
            "-fa", str(int(flash)), "-ctk", kind, "-ctv", kind,
        ]  # fmt: skip

    def decode(self, bits: float, depth: int, tokens: int) -> float:
        return self._rate("-p", 0, "-n", tokens, "-d", depth)

    def prefill(self, bits: float, tokens: int) -> float:
        return self._rate("-p", tokens, "-n", 0, "-d", 0)

    def weight_bytes(self, bits: float) -> int:
        return self._file.nbytes

    def _rate(self, *asked: str | int) -> float:
        command = [*self._command, *map(str, asked)]
        ran = _run(command)
        try:
            (found,) = json.loads(ran.stdout)
            return float(found["avg_ts"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(_no_rate(command, ran)) from error


class MistralRs:
    """mistral.rs by its Python package, in a process of its own for each figure. Keys and values have 16 bits."""

    def __init__(self, python: Path, file: Gguf, threads: int) -> None:
        self._file, self._command = file, [str(python), mistralrs_rate.__file__, str(file.path)]
        self._settings = {"RAYON_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}

    @staticmethod
    def check(python: Path) -> None:
        """Refuse an interpreter that is none, or has no such package.

        Raises:
            InputError: it does not import mistralrs.
        """
        expected = "expected a Python interpreter that has the package mistralrs"
        try:
            ran = _run([str(python), "-c", "import mistralrs"])
        except InputError as error:
            raise InputError(f"--mistralrs: {error}; {expected}") from error
        if ran.returncode:
            raise InputError(f"--mistralrs {python}: {expected}; it said: {_said(ran)}")

    def decode(self, bits: float, depth: int, tokens: int) -> float:
        return self._rate(depth, tokens)

    def prefill(self, bits: float, tokens: int) -> float:
        return self._rate(tokens, 0)

    def weight_bytes(self, bits: float) -> int:
        return self._file.nbytes

    def _rate(self, before: int, tokens: int) -> float:
        command = [*self._command, str(before), str(tokens), str(WARM_UP)]
        ran = _run(command, self._settings)
        try:
            return float(json.loads(ran.stdout.splitlines()[-1])["tokens_per_second"])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise InputError(_no_rate(command, ran)) from error


Ran = subprocess.CompletedProcess[str]


def _run(command: list[str], settings: dict[str, str] | None = None) -> Ran:
    """A program that ended, with some more variables in its environment."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, **(settings or {})}
        )
    except OSError as error:
        raise InputError(f"{command[0]} does not start: {error.strerror}") from error


def _no_rate(command: list[str], ran: Ran) -> str:
    return f"{' '.join(command)} gave no rate (exit code {ran.returncode}): {_said(ran)}"


def _said(ran: Ran) -> str:
    """The last line of its complaints."""
    return (ran.stderr.strip().splitlines() or ["nothing"])[-1]


def touched(model: Any, bits: float, itemsize: int) -> int:
    """Bytes of a model's matrices that one token reads at a width; weights that are not quantized have `itemsize`."""
    layouts = next(found for width, found in levels(model) if width == bits)
    names = {module: name for name, module in model.named_modules()}
    head = model.get_output_embeddings()
    head = model.get_input_embeddings() if isinstance(head, TiedHead) else head
    read = [f"model.layers.{i}.{matrix}" for i in range(len(model.model.layers)) for matrix in MATRICES]
    total = 0
    for name in (*read, names[head]):
        module = model.get_submodule(name)
        if isinstance(module, PackedModule):
            total += (layouts[name] if name in layouts else module.layout.widest()).nbytes
        else:
            total += module.weight.numel() * itemsize
    return total


def kv_bytes(config: Any, depth: int, bits: float) -> int:
    """Bytes of keys and values that one token behind `depth` others reads, at so many bits a number with scales."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    everywhere = config.model_type == "mistral"
    read = sum(
        min(depth, window) if window and (everywhere or kind == "sliding_attention") else depth
        for kind in kinds
    )
    return int(read * kv_heads(config) * 2 * head_size(config) * bits / 8)
