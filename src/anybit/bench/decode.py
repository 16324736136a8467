"""`anybit bench decode`: tokens per second of this engine and of peers, beside the memory's rate.

A cell is a model with one test: decoding behind some tokens, or a prompt. Its contenders take turns in every round, and
with each the reading of as many bytes as it reads for a token. So ratios within a cell are of one time and one machine.
A cell that a file has already is not measured again, if its contenders, settings, machine and code are the same and
others left the processors alone: peers whose threads wait for each other in loops lose most where they do not.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

from anybit.bench.agreement import TOKENS, agreement, compared, prompt_of
from anybit.bench.contenders import (
    InTransformers,
    LlamaBench,
    MistralRs,
    Native,
    Runner,
    kv_bytes,
)
from anybit.bench.decode_targets import AGREEMENT, is_quiet, targets
from anybit.bench.others import Used, others, used
from anybit.bench.quality import QUALITY, WINDOW, WINDOWS, Text, quality
from anybit.bench.reading import Buffer
from anybit.bench.sources import PLAIN, Gguf, Source, open_gguf, open_source
from anybit.bench.variants import chosen
from anybit.compare.machine import machine, source
from anybit.config import Json
from anybit.engine.engine import KV_BITS
from anybit.engine.threads import default_threads
from anybit.errors import InputError
from anybit.kernels import cpu
from anybit.kernels.cpu_layer import CODEBOOK_PRECISIONS
from anybit.kv_cache import head_size, kv_heads
from anybit.progress import SILENT, Silent

DTYPES = ("bfloat16", "float32")  # of Transformers
LEAST_TOKENS = 32
SLACK = 16  # tokens of a context beyond those that are timed
LLAMA_NUMBERS = {16: 16.0, 8: 8.5, 4: 4.5}  # bits of a number in llama.cpp's cache, scales included


@dataclass(frozen=True)
class Contender:
    """A runner at one of its widths."""

    name: str
    about: Json
    key: str  # contenders of one key share a runner
    open: Callable[[], Runner]
    bits: float
    kv: float  # bits of a number of keys and values


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is timed.

    Raises:
        InputError: on use, what of it cannot be; see `check`.
    """

    models: Sequence[str]  # as `sources.open_source` takes them
    bits: Sequence[float] = (2.5, 3, 4, 8)
    depths: Sequence[int] = (128,)  # tokens before those that are decoded
    prompts: Sequence[int] = (512,)  # tokens of prompts; none: prompts are not timed
    kv_bits: Sequence[int] = (16,)
    tokens: int = LEAST_TOKENS  # decoded in a round
    rounds: int = 5
    threads: int = 0  # 0: what the engine takes by default
    llama_bench: Path | None = None
    mistralrs: Path | None = None  # a Python interpreter that has this package
    ggufs: Sequence[Path] = ()
    only: Sequence[str] = ()  # contenders of these names, or that begin so; all by default
    text: Path | None = None  # what perplexities are measured on; none: they are not
    base: str | None = None  # the model that models and files are made of, for divergences from it

    @cached_property
    def sources(self) -> list[Source]:
        return [open_source(name, self.bits) for name in self.models]

    @cached_property
    def files(self) -> list[Gguf]:
        return [open_gguf(path) for path in self.ggufs]

    @property
    def count(self) -> int:
        """Threads."""
        return self.threads or default_threads()

    @property
    def context(self) -> int:
        read = WINDOW + 1 if self.text is not None else 0
        return max(*(depth + self.tokens for depth in self.depths), *self.prompts, TOKENS, read) + SLACK

    def check(self) -> None:
        """Refuse before any work what cannot be timed.

        Raises:
            InputError: a model, a file, a width, a depth or a name of a contender that is none.
        """
        if not cpu.available():
            raise InputError(f"the native extension is not there: {cpu.why_not()}")
        if self.tokens < LEAST_TOKENS:
            raise InputError(f"--tokens {self.tokens}: give {LEAST_TOKENS} or more, fewer say little")
        for bits in self.kv_bits:
            if bits not in KV_BITS:
                raise InputError(f"--kv-bits {bits}: the engine has {', '.join(map(str, KV_BITS))}")
        if bool(self.ggufs) != (self.llama_bench is not None or self.mistralrs is not None):
            raise InputError("--gguf belongs with --llama-bench or --mistralrs: give a file and who runs it")
        if self.llama_bench is not None and not os.access(self.llama_bench, os.X_OK):
            raise InputError(f"--llama-bench {self.llama_bench}: expected llama.cpp's program of this name")
        if self.mistralrs is not None:
            MistralRs.check(self.mistralrs)
        self._check_text()
        for found in self.sources:
            reached = found.config.max_position_embeddings
            if self.context > reached:
                raise InputError(
                    f"{found.name} reaches {reached} tokens, and {self.context} are needed: give smaller --depths or "
                    "--prompts" + (f", or no --text, whose windows have {WINDOW}" if self.text else "")
                )
        for file in self.files:
            if all(file.sizes != found.sizes for found in self.sources):
                raise InputError(
                    f"{file.path} has {file.sizes[1]} blocks of width {file.sizes[0]}, as no model here: leave it out"
                )
        everyone = {c.name: c for found in self.sources for c in self._all_contenders(found)}
        chosen(self.only, everyone)

    def _check_text(self) -> None:
        if self.read is not None:
            self.read.check([found for found in self.sources if not found.random])
        elif self.base is not None:
            raise InputError("--base is for divergences on a text: give one with --text")

    @property
    def read(self) -> Text | None:
        """What qualities are measured on."""
        return None if self.text is None else Text(self.text, self.base)

    def contenders(self, found: Source) -> list[Contender]:
        """Who runs a model."""
        everyone = {c.name: c for c in self._all_contenders(found)}
        if not self.only:
            return list(everyone.values())
        kept = chosen([o for o in self.only if any(name.startswith(o) for name in everyone)], everyone)
        return [everyone[name] for name in kept]

    def _all_contenders(self, found: Source) -> list[Contender]:
        files = [file for file in self.files if file.sizes == found.sizes]
        return [*self._native(found), *self._transformers(found), *self._llama(files), *self._mistral(files)]

    def _native(self, found: Source) -> list[Contender]:
        made, size = [], head_size(found.config)
        for kv in self.kv_bits:
            for precision in CODEBOOK_PRECISIONS:
                if found.widths == (PLAIN,) and precision == "int8":
                    continue  # there are no codebooks
                key = f"anybit {precision} kv{kv}"
                start = partial(Native, found, precision, kv, self.count, self.context)
                numbers = kv if kv == 16 else kv + 32 / size
                for bits in found.widths:
                    about = {"engine": "anybit", "bits": bits, "precision": precision, "kv_bits": kv}
                    name = f"anybit {bits:.2f} {precision}" + (f" kv{kv}" if kv != 16 else "")
                    made.append(Contender(name, about, key, start, bits, numbers))
        return made

    def _transformers(self, found: Source) -> list[Contender]:
        made = []
        for dtype in DTYPES:
            start = partial(InTransformers, found, dtype, self.count)
            for bits in found.widths:
                about = {"engine": "Transformers", "bits": bits, "dtype": dtype, "kv_bits": 16}
                numbers = 16 if dtype == "bfloat16" else 32
                name, key = f"Transformers {bits:.2f} {dtype}", f"Transformers {dtype}"
                made.append(Contender(name, about, key, start, bits, numbers))
        return made

    def _llama(self, files: Sequence[Gguf]) -> list[Contender]:
        made: list[Contender] = []
        if self.llama_bench is None:
            return made
        for file in files:
            for kv in self.kv_bits:
                for flash in (False, True) if kv == 16 else (True,):  # rounded values need flash attention
                    name = f"llama.cpp {file.path.name}" + (" flash" if flash else "")
                    name += f" kv{kv}" if kv != 16 else ""
                    start = partial(LlamaBench, self.llama_bench, file, flash, kv, self.count)
                    about: Json = {"engine": "llama.cpp", "file": file.path.name, "state": file.state}
                    about |= {"flash": flash, "kv_bits": kv}
                    made.append(Contender(name, about, name, start, 0.0, LLAMA_NUMBERS[kv]))
        return made

    def _mistral(self, files: Sequence[Gguf]) -> list[Contender]:
        if self.mistralrs is None or 16 not in self.kv_bits:  # it rounds no keys and values on a CPU
            return []
        made = []
        for file in files:
            name, start = f"mistral.rs {file.path.name}", partial(MistralRs, self.mistralrs, file, self.count)
            about: Json = {"engine": "mistral.rs", "file": file.path.name, "state": file.state, "kv_bits": 16}
            made.append(Contender(name, about, name, start, 0.0, 16))
        return made


def decode(plan: Plan, out: Path | None = None, report: Silent = SILENT) -> Json:
    """Tokens per second of what a plan names; written to `out` after every cell, which is read first.

    Raises:
        InputError: see `Plan.check`; a file that is none of this benchmark.
    """
    plan.check()
    figures = read(out) or {"bench": "decode", "cells": []}
    tests = [("decode", depth) for depth in plan.depths] + [("prefill", prompt) for prompt in plan.prompts]
    tests += [(AGREEMENT, TOKENS), (QUALITY, WINDOW * WINDOWS)]
    advance = report.task("decode", len(plan.sources) * len(tests) * plan.rounds)
    for found in plan.sources:
        kept, runners = plan.contenders(found), _Runners()
        for test, tokens in tests if kept else ():
            if not _applies(test, plan, found, kept):
                advance(plan.rounds)
                continue
            made_by = _made_by(plan, found, kept, test)
            same = {"model": found.name, "test": test, "tokens": tokens}
            old = [c for c in figures["cells"] if same.items() <= c.items()]
            if any(cell["made_by"] == made_by and is_quiet(cell) for cell in old):
                advance(plan.rounds)
                continue
            cell = {
                **same,
                "shape": found.shape,
                "random": found.random,
                "parameters": parameters(found.config),
            }
            cell |= {"made_by": made_by, "load_at_start": os.getloadavg()[0], "processors": os.cpu_count()}
            if test == AGREEMENT:
                cell["contenders"] = _agreement(found, kept, runners)
                advance(plan.rounds)
            elif test == QUALITY:
                cell["contenders"] = _quality(plan, found, kept, runners)
                advance(plan.rounds)
            else:
                cell["contenders"] = _measure(plan, found, kept, runners, (test, tokens), advance)
            figures["cells"] = [c for c in figures["cells"] if c not in old] + [cell]
            _write(figures, out)
        runners.clear()
    here = _here(plan)
    count = [c for c in figures["cells"] if here.items() <= c["made_by"].items()]
    figures |= {"targets": targets(count), "disturbed": sum(not is_quiet(cell) for cell in count)}
    _write(figures, out)
    return figures


def _applies(test: str, plan: Plan, found: Source, kept: list[Contender]) -> bool:
    if test == AGREEMENT:
        return not found.random and bool(compared(kept))  # random weights have no best token
    return test != QUALITY or (plan.read is not None and not found.random)


class _Runners(dict[str, Runner]):
    """What is loaded of a model, by the contenders' keys."""

    def of(self, contender: Contender) -> Runner:
        if contender.key not in self:
            self[contender.key] = contender.open()
        return self[contender.key]


def _here(plan: Plan) -> Json:
    """Machine, versions and threads; cells that differ in them cannot be compared."""
    about = {key: value for key, value in machine().items() if key != "threads"}
    return {**about, "source": source(), "threads": plan.count}


def _made_by(plan: Plan, found: Source, kept: list[Contender], test: str) -> Json:
    """What has to be the same for a cell to be the same."""
    asked: Json = {"rounds": plan.rounds, "decoded": plan.tokens}
    if test == QUALITY and plan.read is not None:
        asked = plan.read.state
    about = json.loads(json.dumps({contender.name: contender.about for contender in kept}))
    return {**_here(plan), **asked, "state": found.state, "contenders": about}


def _measure(
    plan: Plan,
    found: Source,
    kept: list[Contender],
    runners: _Runners,
    test: tuple[str, int],
    advance: Callable[[int], None],
) -> Json:
    """Rates of every contender, in rounds."""
    kind, tokens = test
    loaded = {contender.name: runners.of(contender) for contender in kept}
    nbytes = {
        c.name: loaded[c.name].weight_bytes(c.bits) + kv_bytes(found.config, tokens, c.kv) for c in kept
    }
    buffer = Buffer(max(nbytes.values()), plan.count) if kind == "decode" else None
    rates: dict[str, list[float]] = {contender.name: [] for contender in kept}
    reading: dict[str, list[float]] = {contender.name: [] for contender in kept}
    spans: dict[str, list[tuple[Used, Used]]] = {contender.name: [] for contender in kept}
    for _ in range(plan.rounds):
        for contender in kept:
            runner, name, before = loaded[contender.name], contender.name, used()
            if buffer is None:
                rates[name].append(runner.prefill(contender.bits, tokens))
            else:
                rates[name].append(runner.decode(contender.bits, tokens, plan.tokens))
                reading[name].append(buffer.rate(nbytes[name]))
            spans[name].append((before, used()))
        advance(1)
    made = {}
    for contender in kept:
        name = contender.name
        made[name] = {**contender.about, **_rate(rates[name]), "others": others(spans[name])}
        if reading[name]:
            made[name] |= _share(nbytes[name], rates[name], reading[name])
    return made


def _agreement(found: Source, kept: list[Contender], runners: _Runners) -> Json:
    """The engine beside Transformers, at each width."""
    made, prompt = {}, prompt_of(found.name, found.config.vocab_size)
    for bits, (ours, theirs) in compared(kept).items():
        engine, beside = runners.of(ours), runners.of(theirs)
        assert isinstance(engine, Native) and isinstance(beside, InTransformers)
        made[ours.name] = {**ours.about, **agreement(engine, beside, bits, prompt), "others": None}
    return made


def _quality(plan: Plan, found: Source, kept: list[Contender], runners: _Runners) -> Json:
    """The engine at its widths, and peers' files."""
    ours = {c.name: c for c in kept if c.about["engine"] == "anybit"}
    engines = {name: (cast(Native, runners.of(c)), c.bits) for name, c in ours.items()}
    raced = {contender.about.get("file") for contender in kept}
    files = [file for file in plan.files if file.sizes == found.sizes and file.path.name in raced]
    made = quality(found, engines, files, cast(Text, plan.read), plan.count)
    return {name: (ours[name].about if name in ours else {}) | figures for name, figures in made.items()}


def _rate(rates: list[float]) -> Json:
    return {
        "tokens_per_second": statistics.median(rates),
        "range": [min(rates), max(rates)],
        "rounds": rates,
    }


def _share(nbytes: int, rates: list[float], reading: list[float]) -> Json:
    """What a token reads, and the median over the rounds of the rate over that of plain reading."""
    shares = [nbytes * rate / read_rate for rate, read_rate in zip(rates, reading)]
    read_rate = statistics.median(reading) / 1e9
    return {"bytes_per_token": nbytes, "read_gb_per_s": read_rate, "of_limit": statistics.median(shares)}


def parameters(config: Any) -> int:
    """Weights of a model's matrices, embedding and head counted once where they are tied."""
    hidden, size = config.hidden_size, head_size(config)
    heads, shared = config.num_attention_heads, kv_heads(config)
    block = hidden * (2 * heads * size + 2 * shared * size + 3 * config.intermediate_size)
    tables = 1 if config.tie_word_embeddings else 2
    return int(config.num_hidden_layers * block + tables * config.vocab_size * hidden)


def read(out: Path | None) -> Json | None:
    """The figures that a file has.

    Raises:
        InputError: a file of something else.
    """
    if out is None or not out.exists():
        return None
    try:
        figures = json.loads(out.read_text(encoding="utf-8"))
        if figures["bench"] == "decode" and isinstance(figures["cells"], list):
            return dict(figures)
    except (ValueError, KeyError, TypeError, OSError):
        pass
    raise InputError(f"{out} is no file of `anybit bench decode`: name another, or remove it")


def _write(figures: Json, out: Path | None) -> None:
    """Whole or not at all: a run may be stopped at any time."""
    if out is not None:
        part = out.with_name(out.name + ".part")
        part.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        part.replace(out)
