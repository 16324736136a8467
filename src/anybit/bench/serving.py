"""`anybit bench serve`: servers under the load of a trace, over HTTP, each with the same memory.

A cell is a system with a trace, in one life of its server:

1. Prompts of the trace's mean length, one at a time: what a token of a prompt costs.
2. As many requests together as may run, in the trace's order: the rate at saturation, in tokens of prompts and answers.
3. The trace's requests at its own times, stretched alike for all systems so that they ask for a share of what the first
   system, the reference, does at saturation: as many of the first ones as then fit within the time.

Requests have the trace's lengths and random tokens, other ones in each part, so that no prefix is found in a cache.
Answers go on to their length whatever is drawn. Tokens are counted as the server says: llama.cpp with every event,
others at an answer's end, where its events have equal shares. In an answer that does not end each event counts as a
token, as it is at anybit.

A cell has a key: its trace, its system, the reference and every setting. A file keeps cells of several plans, one of
each key. A cell that it has already, by the same machine, code and rate, is not measured again.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from anybit.bench.contenders import MistralRs
from anybit.bench.load import Answer, Asked, Client
from anybit.bench.others import Used, used
from anybit.bench.prediction import Work
from anybit.bench.reading import Buffer
from anybit.bench.servers import PAUSE, QUEUES, Programs, Server, Share, command, free_port, started, version
from anybit.bench.serving_figures import Bounds, figures, offered, steady_rate
from anybit.bench.systems import AUTO, Peer, System, common_context, kv_memory
from anybit.bench.traces import LEAST, Trace
from anybit.compare.machine import machine, source
from anybit.config import Json
from anybit.engine.threads import default_threads
from anybit.errors import InputError
from anybit.kernels import cpu
from anybit.progress import SILENT, Silent

COSTS = 3  # prompts whose fastest counts
SPARE = 256  # ids at the end of a vocabulary, where special tokens may be
BEGIN = 16  # and at its beginning
ALONE = 600  # seconds that a server has for one request
REST = 300  # and to drop what was cut off, which may be prompts that it has begun
PREEMPTIONS = "anybit_preemptions_total"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured.

    Raises:
        InputError: on use, what of it cannot be; see `check`.
    """

    systems: Sequence[System]  # the first is the reference
    traces: Sequence[Trace]  # of different names
    memory: int  # bytes of weights and of keys and values, for every system
    load: float = 0.8  # of the reference's rate at saturation
    seconds: float = 300  # within which requests are sent
    saturation: float = 60
    drain: float = 30
    running: int = 32
    slots: int | None = None  # of llama.cpp; None: as many longest texts as its cache holds
    threads: int = 0  # 0: what the engine takes by default
    bounds: Bounds = field(default_factory=Bounds)
    programs: Programs = field(default_factory=Programs)

    @property
    def count(self) -> int:
        """Threads."""
        return self.threads or default_threads()

    @cached_property
    def context(self) -> int:
        """Tokens of the longest text that every system can hold."""
        from anybit import _native

        return common_context(self.systems, self.memory, _native.PAGE_TOKENS)

    @cached_property
    def versions(self) -> dict[str, str]:
        """Of the peers' programs, by engine."""
        return {engine: version(engine, program) for engine, program in self.programs.given.items()}

    def key(self, system: System, trace: Trace) -> Json:
        """What a cell's figures depend on, but for the machine and the code."""
        return {
            "trace": {"name": trace.name, "state": trace.state}, "requests": len(trace.requests),
            "system": self._key_of(system), "reference": self._key_of(self.systems[0]), "memory": self.memory,
            "context": self.context, "running": self.running, "slots": self.slots, "threads": self.count,
            "load": self.load, "seconds": self.seconds, "saturation": self.saturation, "drain": self.drain,
            "bounds": asdict(self.bounds),
        }  # fmt: skip

    def _key_of(self, system: System) -> Json:
        return {**system.key, "program": self.versions.get(system.engine)}

    def share(self, system: System, trace: Trace) -> Share:
        """What of the memory is for keys and values."""
        kv_bytes = kv_memory(system, self.memory)
        tokens, running = int(kv_bytes / system.kv_token), self.running
        if system.engine == "llama.cpp":  # a text that finds no room there fails
            longest = max(request.tokens for request in trace.requests)
            running = self.slots or max(1, min(running, tokens // longest))
        return Share(kv_bytes, tokens, self.context, running, self.count)

    def check(self) -> None:
        """Refuse before any work what cannot be measured.

        Raises:
            InputError: no system; a model, a width, a file or a program that is none; too little memory; too few
                requests; twice the same name.
        """
        if not cpu.available():
            raise InputError(f"the native extension is not there: {cpu.why_not()}")
        if not self.systems:
            raise InputError("there is no system: give one or more, of which the first is the reference")
        for what, names in (
            ("system", [system.name for system in self.systems]),
            ("trace", [trace.name for trace in self.traces]),
        ):
            if twice := {name for name in names if names.count(name) > 1}:
                raise InputError(f"{', '.join(sorted(twice))}: give every {what} a name of its own")
        vocabularies = {system.config.vocab_size for system in self.systems}
        if len(vocabularies) > 1:
            raise InputError(f"the systems have {len(vocabularies)} vocabularies: compare sizes of one model")
        if self.context < 2:
            raise InputError("--memory leaves no page for keys and values: give more")
        for trace in self.traces:
            if len(trace.requests) < LEAST:
                raise InputError(f"{trace.name}: a load has {LEAST} requests or more: give more --requests")
        if not 0 < self.load <= 2:
            raise InputError(f"--load {self.load:g}: expected a share of saturation above 0, up to 2")
        peers = {system.engine for system in self.systems if isinstance(system, Peer)}
        if wrong := peers ^ self.programs.given.keys():
            raise InputError(f"{wrong.pop()} needs its program and a --gguf: give both or neither")
        if self.programs.mistralrs is not None:
            MistralRs.check(self.programs.mistralrs)
        assert self.versions.keys() == peers  # or a refusal


def serve(plan: Plan, out: Path | None = None, report: Silent = SILENT) -> Json:
    """Cells of what a plan names, in its order; `out` is read first, and written after every cell that is measured.

    Raises:
        InputError: see `Plan.check`; a file that is none of this benchmark; a server that does not start.
    """
    plan.check()
    file, cells = read(out) or {"bench": "serve", "cells": []}, []
    advance = report.task("serve", len(plan.traces) * len(plan.systems))
    for whole in plan.traces:
        trace, rate = whole.within(plan.context), None
        for system in plan.systems:
            head: Json = {
                "trace": trace.name,
                "system": system.name,
                "reference": rate is None,
                "key": plan.key(system, trace),
                "made_by": _made_by(rate),
            }
            cell = next((cell for cell in file["cells"] if head.items() <= cell.items()), None)
            if cell is None:
                cell = head | _measure(plan, system, trace, rate)
                file["cells"] = [c for c in file["cells"] if c["key"] != cell["key"]] + [cell]
                write(file, out)
            cells.append(cell)
            rate = rate or plan.load * cell["saturation"]["tokens_per_second"]
            advance(1)
    return {**file, "cells": cells}


def _made_by(rate: float | None) -> Json:
    """What has to be the same for a cell of the same key to be the same; the reference's own cell has no rate."""
    about = {key: value for key, value in machine().items() if key != "threads"}
    return {**about, "source": source(), "rate": rate}


def _measure(plan: Plan, system: System, trace: Trace, rate: float | None) -> Json:
    """A system with a trace; without a rate it is the reference."""
    share, port = plan.share(system, trace), free_port()
    read_rate = Buffer(system.step_bytes, plan.count).rate(system.step_bytes)
    with started(command(system, share, plan.programs, port), port, plan.count) as server:
        asker = Asker(system, trace, server)
        token = asker.prompt_token()
        answers, spent = asker.spent(lambda client: client.together(
            asker.asked(trace, "saturation"), plan.running, plan.saturation))  # fmt: skip
        ran_out = len(answers) == len(trace.requests)
        saturated = figures(answers, plan.bounds)
        saturated |= {"tokens_per_second": steady_rate(answers, plan.saturation, ran_out), **spent}
        _check(system, server, answers, saturated["tokens_per_second"])
        asker.rest()
        rate = rate or plan.load * saturated["tokens_per_second"]
        timed = asker.asked(trace.at_rate(rate, plan.seconds), "load")
        (before,) = server.figures(PREEMPTIONS)
        answers, spent = asker.spent(lambda client: client.at_times(timed, plan.seconds + plan.drain))
        loaded = {
            **figures(answers, plan.bounds),
            **offered(answers),
            **spent,
            "tokens_per_second_asked": rate,
        }
        (after,) = server.figures(PREEMPTIONS)
        loaded["preemptions"] = None if before is None or after is None else after - before
        if not server.alive:
            raise InputError(f"{system.name} ended under the load: see its memory")
        peak = server.peak_bytes
    work = Work(
        trace.prompt, trace.answer, share.running, share.kv_tokens, system.step_bytes, system.kv_token,
        read_rate, token,
    )  # fmt: skip
    return {
        "engine": system.engine, "requests": len(trace.requests), "clipped": trace.clipped,
        "context": share.context, "weight_bytes": system.weight_bytes, "kv_bytes": share.kv_bytes,
        "kv_bits": system.kv_bits, "kv_tokens": share.kv_tokens, "running": share.running, "peak_bytes": peak,
        "saturation": saturated, "load": loaded,
        "predicted": {**asdict(work), "together": work.together, "tokens_per_second": work.tokens_per_second},
    }  # fmt: skip


def _check(system: System, server: Server, answers: Sequence[Answer], rate: float) -> None:
    """Refuse figures of a server that answers nothing, or has ended."""
    if not server.alive:
        raise InputError(f"{system.name} ended when it was saturated: see its memory")
    if not any(answer.times for answer in answers):
        said = next((answer.error for answer in answers if answer.error), "nothing came in time")
        raise InputError(f"{system.name} answered no request: {said}")
    if not rate:
        raise InputError(f"{system.name}: no token came in the time that counts; give a longer --saturation")


class Asker:
    """Makes requests for a server, and counts what they cost."""

    def __init__(self, system: System, trace: Trace, server: Server) -> None:
        self._system, self._trace, self._server = system, trace, server
        self._ids = range(BEGIN, max(BEGIN + 1, system.config.vocab_size - SPARE))

    def asked(self, trace: Trace, part: str) -> list[Asked]:
        """Requests whose tokens depend on the part and on their place alone: all systems get the same."""
        made = []
        for place, request in enumerate(trace.requests):
            tokens = random.Random(f"{part} {place}").choices(self._ids, k=request.prompt)
            body = self._body(tokens, request.answer)
            made.append(Asked(request.at, request.prompt, request.answer, body))
        return made

    def _body(self, tokens: list[int], answer: int, bits: float | str | None = None) -> bytes:
        """As the servers understand it; no text ends early, none has drafts."""
        body: Json = {"prompt": tokens, "max_tokens": answer, "temperature": 0, "stream": True}
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        if self._system.engine == "anybit":
            body["speculate"] = False
            if self._system.least is not None:
                body["bits"] = AUTO if bits is None else bits
        else:
            body |= {"cache_prompt": False, "timings_per_token": True}
        return json.dumps(body).encode()

    def prompt_token(self) -> float:
        """Seconds that a token of a prompt of mean length takes alone; of "auto" at its narrowest."""
        count, took = max(1, round(self._trace.prompt)), []
        for i in range(COSTS):
            tokens = random.Random(f"cost {i}").choices(self._ids, k=count)
            one = Asked(0, count, 1, self._body(tokens, 1, self._system.least))
            (answer,) = Client(self._server.port).at_times([one], ALONE)
            if not answer.times:
                raise InputError(
                    f"{self._system.name} does not answer a request: {answer.error or 'it is silent'}"
                )
            took.append(answer.times[0] - answer.asked)
        return min(took) / count

    def spent(self, load: object) -> tuple[list[Answer], Json]:
        """What came of a load, and the processors that client, server and others took, on average."""
        before, served, wall = used(), self._server.processor_seconds, time.perf_counter()
        own = time.process_time()
        answers = load(Client(self._server.port))  # type: ignore[operator]
        wall = time.perf_counter() - wall
        client, server = time.process_time() - own, self._server.processor_seconds - served
        return answers, {
            "client": client / wall,
            "server": server / wall,
            "others": _others(before, server, client),
        }

    def rest(self) -> None:
        """Wait until the server has dropped what was cut off: it says twice that nothing runs and nothing waits.

        Raises:
            InputError: it has ended, or does not say so in time.
        """
        name, deadline, idle = self._system.name, time.monotonic() + REST, 0
        while idle < 2:
            if not self._server.alive:
                raise InputError(f"{name} ended when its requests were cut off: see its memory")
            if time.monotonic() > deadline:
                raise InputError(
                    f"{name} does not say within {REST} seconds that it has dropped what was cut off"
                )
            time.sleep(PAUSE)
            queues = self._server.figures(*QUEUES[self._system.engine])
            idle = 0 if any(figure != 0 for figure in queues) else idle + 1


def _others(before: Used, server: float, client: float) -> float | None:
    """Processors that nobody here took."""
    after = used()
    if before.all is None or after.all is None:
        return None
    return max(0.0, after.all - before.all - server - client) / (after.wall - before.wall)


def ratios(cells: Sequence[Json]) -> list[Json]:
    """Of every cell of a plan its rate at saturation over the reference's, predicted and measured.

    Raises:
        InputError: a trace without a reference, or with several: cells of several plans.
    """
    first, found = {}, []
    for trace in {cell["trace"] for cell in cells}:
        references = [cell for cell in cells if cell["trace"] == trace and cell["reference"]]
        if len(references) != 1:
            raise InputError(f"{trace} has {len(references)} references: expected the cells of one plan")
        first[trace] = references[0]
    for cell in cells:
        row = {"trace": cell["trace"], "system": cell["system"]}
        for name, part in (("predicted", "predicted"), ("measured", "saturation")):
            of = first[cell["trace"]][part]["tokens_per_second"]
            row[name] = cell[part]["tokens_per_second"] / of if of else None
        found.append(row)
    return found


def read(out: Path | None) -> Json | None:
    """The figures that a file has.

    Raises:
        InputError: a file of something else.
    """
    if out is None or not out.exists():
        return None
    try:
        made = json.loads(out.read_text(encoding="utf-8"))
        if made["bench"] == "serve" and all("key" in cell for cell in made["cells"]):
            return dict(made)
    except (ValueError, KeyError, TypeError, OSError):
        pass
    raise InputError(f"{out} is no file of `anybit bench serve`: name another, or remove it")


def write(made: Json, out: Path | None) -> None:
    """Whole or not at all: a run may be stopped at any time."""
    if out is not None:
        part = out.with_name(out.name + ".part")
        part.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
        part.replace(out)
