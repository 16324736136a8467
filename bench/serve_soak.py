"""A server under random requests for minutes: whether pages, connections, threads and memory come back.

    python bench/serve_soak.py MODEL [--minutes 10] [--clients 16] [--seed 0] [--output FILE]

Clients ask for texts of random lengths, widths, forms and counts, streamed or whole. One in four leaves at a random
moment, one in ten asks for nonsense. A fifth of the time in, and at the end, the clients pause until nothing runs:
then the server's memory, open files and threads are read. Pages that texts hold must be none at both. Files and threads
must be as many. Memory may have grown by 2 % and 8 MB. The last line is JSON. Exit code: 0 all of it holds, 1 not.

The library tokenizers keeps the tokens of ten thousand words. A tokenizer that takes a whole prompt for one word, such
as that of the tests, fills this with prompts for some minutes, so MODEL should be a real one.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

FORMS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"guided_regex": "[a-z ]{1,40}"},
    {"guided_json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
)
NONSENSE: tuple[dict[str, Any], ...] = (
    {"n": -1},
    {"bits": 99},
    {"guided_regex": "("},
    {"stop": ["x"] * 99},
    {"prompt": "word " * 100_000},
)


class Soak:
    """Clients of a server.

    Args:
        port: of the server.
        seed: of all chances.
    """

    def __init__(self, port: int, seed: int) -> None:
        self.port, self.random, self.lock = port, random.Random(seed), threading.Lock()
        self.go, self.over = threading.Event(), threading.Event()
        self.answers: Counter[str] = Counter()
        widths = [level["bits"] for level in self.get("/v1/models")["data"][0]["levels"]]
        self.context = self.get("/v1/models")["data"][0]["max_model_len"]
        self.widths: list[float | str] = [widths[0], widths[len(widths) // 2], widths[-1], "auto"]

    def get(self, path: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path)
        body = connection.getresponse().read().decode()
        connection.close()
        return json.loads(body) if body.startswith("{") else body

    def client(self) -> None:
        """Ask until it is over."""
        while not self.over.is_set():
            if not self.go.wait(0.1):
                continue
            with self.lock:
                body, leaves = self.request(), self.random.random() < 0.25
                moment = self.random.random() * 0.3
            self.ask(body, moment if leaves else None)

    def request(self) -> dict[str, Any]:
        chance = self.random
        beginning = f"All of these begin alike, {chance.randrange(4)}. " * chance.randrange(1, 4)
        body = {
            "prompt": beginning[: self.context // 3] + str(chance.random()),
            "max_tokens": chance.randrange(1, min(200, self.context // 3)),
            "bits": chance.choice(self.widths),
            "n": chance.choice((1, 1, 1, 3)),
            "stream": chance.random() < 0.5,
            "temperature": chance.choice((0, 1)),
            **chance.choice(FORMS),
        }
        return {**body, **chance.choice(NONSENSE)} if chance.random() < 0.1 else body

    def ask(self, body: dict[str, Any], leaves: float | None) -> None:
        """Ask, and leave after so many seconds."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body))
            if leaves is None:
                response = connection.getresponse()
                response.read()
                said = str(response.status)
            else:
                time.sleep(leaves)
                said = "left"
        except OSError as error:
            said = type(error).__name__
        finally:
            connection.close()
        with self.lock:
            self.answers[said] += 1

    def rest(self) -> None:
        """Pause until the server has nothing to do."""
        self.go.clear()
        deadline = time.monotonic() + 120
        while (health := self.get("/health"))["running"] or health["waiting"] or health["requests"] > 1:
            if time.monotonic() > deadline:
                raise SystemExit(f"the server does not come to rest: {health}")
            time.sleep(0.2)
        time.sleep(6)  # kept connections are closed after 5


def state(soak: Soak, pid: int) -> dict[str, float]:
    """What the server holds while nothing runs."""
    status = Path(f"/proc/{pid}/status").read_text()
    used = re.search(r"^anybit_cache_pages_used (\S+)", soak.get("/metrics"), re.M)
    counts = []
    for _ in range(10):  # the server may not have closed the last connection yet
        counts.append(len(list(Path(f"/proc/{pid}/fd").iterdir())))
        time.sleep(0.1)
    return {
        "pages": float(used[1]) if used else -1,
        "files": min(counts),
        "threads": int(re.search(r"Threads:\s+(\d+)", status)[1]),  # type: ignore[index]
        "resident_mb": int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024,  # type: ignore[index]
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    command = [sys.executable, "-m", "anybit", "serve", asked.model, "--port", "0", "--kv-memory", "64MB"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    found = next((m for line in server.stderr if (m := re.search(r"at http://[^:]+:(\d+),", line))), None)
    if found is None:
        raise SystemExit(f"the server ended with {server.wait()}")
    threading.Thread(target=server.stderr.read, daemon=True).start()
    soak = Soak(int(found[1]), asked.seed)
    clients = [threading.Thread(target=soak.client) for _ in range(asked.clients)]
    for client in clients:
        client.start()
    states = []
    for part in (0.2, 0.8):
        soak.go.set()
        time.sleep(asked.minutes * 60 * part)
        soak.rest()
        states.append(state(soak, server.pid))
        print(states[-1], dict(soak.answers), flush=True)
    soak.over.set()
    for client in clients:
        client.join()
    server.terminate()
    early, late = states
    holds = {
        "pages": early["pages"] == late["pages"] == 0,
        "files": early["files"] == late["files"],
        "threads": early["threads"] == late["threads"],
        "memory": late["resident_mb"] <= early["resident_mb"] * 1.02 + 8,
        "exit": server.wait(60) == 0,
        "answers": not set(soak.answers) - {"200", "400", "429", "left"},
    }
    figures = {
        "minutes": asked.minutes,
        "early": early,
        "late": late,
        "answers": soak.answers,
        "holds": holds,
    }
    print(json.dumps(figures))
    if asked.output is not None:
        asked.output.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
