"""What the server costs and gives: streams together and beside a long prompt, a chat's second turn, what HTTP takes.

python bench/serve_latency.py out --bits 4 [--rounds 5] [--json figures.json]

Starts `anybit serve` and asks it over HTTP, in turns with the engine in process: one stream as `Engine.stream` gives
it, and one, four and eight by the server's own scheduler and drawing, without HTTP. The client of HTTP runs on the same
cores. One stream runs twice in a round, in all three ways, and the faster counts. Who begins changes from round to
round. Tokens are counted by the server. Greedy, and no text of the server ends early.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

import anybit
from anybit.serve.run.job import Progress, jobs_of
from anybit.serve.run.request import Request
from anybit.serve.run.runner import Limits, Runner

TOKENS = 128  # drawn by each stream
DEPTH = 32  # tokens of its prompt
RUNS = {1: 2, 4: 1, 8: 1}  # streams together, and how often they run in a round
LONG, BESIDE, ENOUGH = (
    4096,
    4,
    500,
)  # tokens of a prompt, streams beside it, and tokens that each of these draws
TURN, ANSWER, MORE = 2048, 64, 16  # tokens of the first turn, of its answer, and of the second turn
STRIDE = 7919  # between tokens of prompts


def prompt(count: int, first: int, vocabulary: int) -> list[int]:
    return [(first + i) * STRIDE % (vocabulary - 100) for i in range(count)]


class Server:
    """A server of its own process."""

    def __init__(self, model: str, bits: float, kv_bits: int) -> None:
        asked = [sys.executable, "-m", "anybit", "serve", model, "--port", "0", "--bits", str(bits)]
        asked += ["--kv-bits", str(kv_bits)]
        self.process = subprocess.Popen(asked, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found[1])
                break
        else:
            raise SystemExit("the server did not start")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()

    def ask(
        self, tokens: list[int], most: int, heard: Callable[[float], object] = lambda at: None
    ) -> tuple[list[float], str, int]:
        """When each token of a stream came, which `heard` is told at once, the text, and tokens found in the cache."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        body = {
            "prompt": tokens,
            "max_tokens": most,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "speculate": False,
        }
        body["stream_options"] = {"include_usage": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise SystemExit(reply.read().decode())
        times, cached, text = [], 0, ""
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            piece = json.loads(line[6:])
            if piece["choices"]:
                times.append(time.perf_counter())
                heard(times[-1])
                text += piece["choices"][0]["text"]
            if piece.get("usage"):
                cached = piece["usage"]["prompt_tokens_details"]["cached_tokens"]
                drawn = piece["usage"]["completion_tokens"]
        connection.close()
        assert drawn == most, f"{drawn} tokens instead of {most}"
        return times, text, cached


def rate_of_streams(server: Server, streams: int, vocabulary: int, salt: int) -> float:
    """Tokens per second of some streams together, from the moment when all have their first token until one ends."""
    made: list[list[float]] = [[] for _ in range(streams)]

    def one(i: int) -> None:
        made[i] = server.ask(prompt(DEPTH, 1000 * (salt * 64 + i), vocabulary), TOKENS)[0]

    threads = [threading.Thread(target=one, args=(i,)) for i in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rate_while_all_run(made)


def rate_while_all_run(made: list[list[float]]) -> float:
    """Tokens per second of streams whose tokens came at these times."""
    begin, end = max(times[0] for times in made), min(times[-1] for times in made)
    return sum(begin < at <= end for times in made for at in times) / (end - begin)


def gaps_beside_a_prompt(server: Server, vocabulary: int, salt: int) -> list[float]:
    """Seconds from token to token of some streams, from when a long prompt is sent until its first token comes."""
    made: list[list[float]] = [[] for _ in range(BESIDE)]
    started = threading.Semaphore(0)

    def one(i: int) -> None:
        def heard(at: float) -> None:
            made[i].append(at)
            if len(made[i]) == 1:
                started.release()

        server.ask(prompt(DEPTH, 1000 * (salt * 64 + i) + 500, vocabulary), ENOUGH, heard)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(BESIDE)]
    for thread in threads:
        thread.start()
    for _ in threads:
        started.acquire()
    sent = time.perf_counter()
    came = server.ask(prompt(LONG, 3000 * salt + 11, vocabulary), 1)[0][0]
    for thread in threads:
        thread.join()
    return [b - a for times in made for a, b in itertools.pairwise(times) if sent < b and a < came]


def rate_of_runner(engine: anybit.Engine, streams: int, salt: int) -> float:
    """Tokens per second of some streams together, as the server computes them, without HTTP."""
    pages = streams * -(-(DEPTH + TOKENS) // engine.page_tokens) + 1
    runner = Runner(engine, Limits(pages))
    made: list[list[float]] = [[] for _ in range(streams)]
    ended = threading.Semaphore(0)

    def hear(i: int, progress: Progress) -> None:
        if progress.drawn is not None:
            made[i].append(time.perf_counter())
        if progress.finish is not None:
            ended.release()

    jobs = []
    for i in range(streams):
        asked = prompt(DEPTH, 1000 * (salt * 64 + i), engine.vocabulary)
        request = Request(asked, TOKENS, ignores_ends=True, speculates=False)
        jobs += jobs_of(engine, engine.context, request, lambda _, progress, i=i: hear(i, progress))
    runner.start()
    runner.submit(jobs)
    for _ in jobs:
        ended.acquire()
    runner.close(0)
    return rate_while_all_run(made)


def rate_in_process(engine: anybit.Engine, salt: int) -> float:
    times = []
    asked = prompt(DEPTH, 1000 * salt, engine.vocabulary)
    for piece in engine.stream(asked, TOKENS, anybit.Sampling(), speculate=False):
        if piece.drawn is not None:
            times.append(time.perf_counter())
    assert len(times) > TOKENS // 2, f"the text ended behind {len(times)} tokens"
    return (len(times) - 1) / (times[-1] - times[0])


def turns(server: Server, vocabulary: int, salt: int) -> tuple[float, float, int]:
    """Seconds to the first token of a chat's first and second turn, and tokens of the second found in the cache."""
    first = prompt(TURN, 5000 * salt + 7, vocabulary)
    begun = time.perf_counter()
    times, text, _ = server.ask(first, ANSWER)
    seconds = times[0] - begun
    answer = tokens_of(server, text)
    begun = time.perf_counter()
    times, _, cached = server.ask(first + answer + prompt(MORE, 77 + salt, vocabulary), 1)
    return seconds, times[0] - begun, cached


def tokens_of(server: Server, text: str) -> list[int]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/tokenize", json.dumps({"prompt": text}))
    found = json.loads(connection.getresponse().read())
    connection.close()
    return list(found["tokens"])


class Figures:
    """What a model's rounds gave.

    Args:
        model: its directory.
        bits, kv_bits: of the weights at most, and of keys and values.
    """

    def __init__(self, model: str, bits: float, kv_bits: int) -> None:
        self.model, self.bits, self.kv_bits = model, bits, kv_bits
        self.alone: list[float] = []  # one stream in process, by `Engine.stream`
        self.inside: dict[int, list[float]] = {streams: [] for streams in RUNS}  # by the scheduler
        self.outside: dict[int, list[float]] = {streams: [] for streams in RUNS}  # over HTTP
        self.client: dict[int, list[float]] = {streams: [] for streams in RUNS}
        self.chats: list[tuple[float, float, int]] = []
        self.gaps: list[float] = []
        engine = anybit.Engine(model, bits=bits, kv_bits=kv_bits)
        self.vocabulary, self.context, self.width = engine.vocabulary, engine.context, engine.widths[-1]

    def in_process(self, k: int) -> None:
        """Round k of the engine in this process."""
        engine = anybit.Engine(self.model, bits=self.bits, kv_bits=self.kv_bits)
        engine.generation["eos_token_id"] = []  # the server is asked to ignore what ends a text, too
        rate_in_process(engine, 0)
        self.alone.append(max(rate_in_process(engine, 1 + 2 * k + i) for i in range(RUNS[1])))
        for streams, runs in RUNS.items():
            self.inside[streams].append(
                max(rate_of_runner(engine, streams, salt) for salt in salts(k, streams, runs))
            )

    def over_http(self, k: int) -> None:
        """Round k of a server."""
        server = Server(self.model, self.bits, self.kv_bits)
        try:
            rate_of_streams(server, 1, self.vocabulary, 0)
            for streams, runs in RUNS.items():
                begun, used = time.perf_counter(), time.process_time()
                self.outside[streams].append(
                    max(
                        rate_of_streams(server, streams, self.vocabulary, salt)
                        for salt in salts(k, streams, runs)
                    )
                )
                self.client[streams].append((time.process_time() - used) / (time.perf_counter() - begun))
            self.chats.append(turns(server, self.vocabulary, k))
            if self.context > LONG:
                self.gaps += gaps_beside_a_prompt(server, self.vocabulary, k)
        finally:
            server.close()

    def summary(self) -> dict[str, Any]:
        chats = self.chats
        return {
            "model": self.model, "bits": self.width, "kv_bits": self.kv_bits, "rounds": len(self.alone),
            "cores": len(os.sched_getaffinity(0)), "in_process": median(self.alone),
            "one_by_the_scheduler": median(self.inside[1]), "one_stream": median(self.outside[1]),
            "slower_than_in_process": slower(self.outside[1], self.alone),
            "eight_in_process": median(self.inside[8]), "eight_streams": median(self.outside[8]),
            "eight_slower_than_in_process": slower(self.outside[8], self.inside[8]),
            "four_over_one": over_one(self.outside, 4), "eight_over_one": over_one(self.outside, 8),
            "four_over_one_in_process": over_one(self.inside, 4),
            "eight_over_one_in_process": over_one(self.inside, 8),
            "first_turn_seconds": median(chat[0] for chat in chats),
            "second_over_first_turn": median(chat[1] / chat[0] for chat in chats),
            "cached_tokens": median(chat[2] for chat in chats),
            "client_processors": {streams: median(shares) for streams, shares in self.client.items()},
            "gap_beside_a_prompt_p99": quantiles(self.gaps, n=100)[-1] if self.gaps else None,
            "gaps": len(self.gaps),
        }  # fmt: skip


def salts(k: int, streams: int, runs: int) -> list[int]:
    """Of prompts that no other run has."""
    return [8 * (2 * k + i) + streams for i in range(runs)]


def slower(rates: list[float], than: list[float]) -> float:
    return 1 - median(a / b for a, b in zip(rates, than))


def over_one(rates: dict[int, list[float]], streams: int) -> float:
    """How many times one stream's tokens per second some give together, the median of the rounds."""
    return median(together / one for together, one in zip(rates[streams], rates[1]))


def measured(model: str, bits: float, kv_bits: int, rounds: int) -> dict[str, Any]:
    figures = Figures(model, bits, kv_bits)
    for k in range(rounds):
        for measure in (figures.in_process, figures.over_http)[:: 1 if k % 2 == 0 else -1]:
            measure(k)
    return figures.summary()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--bits", type=float, default=4.0)
    parser.add_argument("--kv-bits", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    given = parser.parse_args()
    figures = [measured(model, given.bits, given.kv_bits, given.rounds) for model in given.models]
    print(json.dumps(figures, indent=1))
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
