"""mistral.rs behind HTTP: its Python package has no server of its own, so this one streams what the package draws.

python mistralrs_server.py FILE PORT RUNNING

It runs in an interpreter that has the package `mistralrs`, and needs nothing else of it. Prompts are lists of token
ids, of which only the length counts: the package takes texts alone, so a text of as many tokens stands for them.
"""

from __future__ import annotations

import json
import sys
import threading
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def main() -> None:
    path, port, running = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    from mistralrs import Runner, Which
    from mistralrs_rate import text  # it lies beside this file

    which = Which.GGUF(quantized_model_id=str(path.parent), quantized_filename=path.name)
    Handler.runner = Runner(which=which, max_seqs=running, prefix_cache_n=0, token_source="none")
    Handler.text = staticmethod(lru_cache(maxsize=None)(lambda tokens: text(Handler.runner, tokens)))
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    server.serve_forever()


class Handler(BaseHTTPRequestHandler):
    """One request."""

    runner: Any
    text: Any
    making, counting = threading.Lock(), threading.Lock()
    requests = 0  # that run or wait

    def do_GET(self) -> None:
        pages = {"/health": "ready", "/metrics": f"mistralrs_requests {self.requests}\n"}
        self.send_response(200 if self.path in pages else 404)
        self.end_headers()
        self.wfile.write(pages.get(self.path, "").encode())

    def do_POST(self) -> None:
        self.count(1)
        try:
            self.answer()
        finally:
            self.count(-1)

    @classmethod
    def count(cls, more: int) -> None:
        with cls.counting:
            cls.requests += more

    def answer(self) -> None:
        from mistralrs import ChatCompletionRequest

        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            with self.making:  # the package refuses calls of two threads at once
                request = ChatCompletionRequest(
                    messages=self.text(len(asked["prompt"])), model="default", max_tokens=asked["max_tokens"],
                    temperature=0.0, stream=True, ignore_eos=True,
                )  # fmt: skip
                pieces = self.runner.send_chat_completion_request(request)
            for piece in pieces:
                self.event(piece)
        except OSError:
            return  # the client is gone
        except Exception as error:
            self.say({"error": {"message": str(error)}})

    def event(self, piece: Any) -> None:
        choice = piece.choices[0]
        made: dict[str, Any] = {
            "choices": [{"text": choice.delta.content or "", "finish_reason": choice.finish_reason}]
        }
        if piece.usage is not None:
            made["usage"] = {"completion_tokens": piece.usage.completion_tokens}
        self.say(made)

    def say(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        pass


if __name__ == "__main__":
    main()
