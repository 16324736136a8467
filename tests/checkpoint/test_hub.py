"""The hub, played by a server on this machine."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anybit.checkpoint.directory import open_checkpoint
from tests.checkpoint.models import INDEX

REVISION = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub's protocol as `snapshot_download` needs; `folder` is the one model, tiny/llama."""

    folder: Path
    fetched: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/models/tiny/gated"):
            self._answer(b"{}", 403, {"X-Error-Code": "GatedRepo"})
        elif path == "/api/models/tiny/llama/revision/main":
            self._answer(
                json.dumps({"id": "tiny/llama", "sha": REVISION, "siblings": self._siblings()}).encode()
            )
        elif path.startswith(f"/api/models/tiny/llama/tree/{REVISION}"):
            self._answer(json.dumps(self._tree()).encode())
        elif path.startswith(f"/tiny/llama/resolve/{REVISION}/"):
            self._send_file(path.removeprefix(f"/tiny/llama/resolve/{REVISION}/"))
        else:
            self._answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"})

    def _siblings(self) -> list[dict[str, str]]:
        return [{"rfilename": name} for name in self._names()]

    def _names(self) -> list[str]:
        return [str(f.relative_to(self.folder)) for f in self.folder.rglob("*") if f.is_file()]

    def _tree(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": name, "size": file.stat().st_size, "oid": self._etag(file)}
            for name in self._names()
            for file in [self.folder / name]
        ]

    @staticmethod
    def _etag(file: Path) -> str:
        return hashlib.sha1(file.read_bytes()).hexdigest()

    def _send_file(self, name: str) -> None:
        file = self.folder / name
        if self.command == "GET":
            self.fetched.append(name)
        self._answer(file.read_bytes(), 200, {"ETag": f'"{self._etag(file)}"', "X-Repo-Commit": REVISION})

    def _answer(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(copy: Callable[[str], Path]) -> Iterator[tuple[str, type[Hub]]]:
    """`(address, handler class with what was fetched)`."""
    folder = copy("sharded")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "modeling_custom.py").write_bytes(b"raise SystemExit")
    (folder / "consolidated.safetensors").write_bytes(b"the same again")
    (folder / "LICENSE").write_bytes(b"free")
    for name in ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors",
                 "additional_chat_templates/tools.jinja", "adapter/adapter.safetensors"):  # fmt: skip
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f'{{"": "{name}"}}')  # equal files would be fetched once
    handler = type("TinyHub", (Hub,), {"folder": folder, "fetched": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()
    thread.join()


OPEN = """
import sys
from anybit.checkpoint.directory import open_checkpoint
from anybit.errors import InputError
for model in sys.argv[1:]:
    try:
        checkpoint = open_checkpoint(model)
        print(len(checkpoint.names()), checkpoint.source, checkpoint.path.name, checkpoint.sha256())
    except InputError as error:
        print("refused:", error)
"""


def open_elsewhere(models: list[str], endpoint: str, cache: Path, **more: str) -> list[str]:
    """Open hub ids in a process of its own: huggingface_hub reads its address when it is imported."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    env |= {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "*",
    } | more
    done = subprocess.run(
        [sys.executable, "-c", OPEN, *models],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.strip().splitlines()


@pytest.mark.e2e
def test_hub_id(hub: tuple[str, type[Hub]], tmp_path: Path) -> None:
    address, handler = hub
    local = open_checkpoint(handler.folder)
    expected = f"{len(local.names())} tiny/llama {REVISION} {local.sha256()}"
    assert open_elsewhere(["tiny/llama"], address, tmp_path / "cache") == [expected]
    fetched = set(handler.fetched)
    assert {
        "config.json",
        INDEX,
        "tokenizer.json",
        "LICENSE",
        "1_Pooling/config.json",
        "additional_chat_templates/tools.jinja",
        *(file.name for file in local.files),
    } <= fetched
    assert not fetched & {"pytorch_model.bin", "modeling_custom.py", "consolidated.safetensors"}
    assert not any(name.startswith(("2_Dense", "adapter")) for name in fetched)
    # A second time, without a network: from the cache.
    assert open_elsewhere(["tiny/llama"], address, tmp_path / "cache", HF_HUB_OFFLINE="1") == [expected]


@pytest.mark.e2e
def test_hub_refusals(hub: tuple[str, type[Hub]], tmp_path: Path) -> None:
    address, _ = hub
    for names, endpoint, more, messages in (
        (
            ["tiny/unknown", "tiny/gated"],
            address,
            {},
            ["nor a model on the hub", "is gated: accept its terms"],
        ),
        (["tiny/llama"], "http://127.0.0.1:9", {}, ["could not be fetched from the hub"]),
        (["tiny/llama"], address, {"HF_HUB_OFFLINE": "1"}, ["could not be fetched from the hub"]),
    ):
        answers = open_elsewhere(names, endpoint, tmp_path / "empty", **more)
        assert len(answers) == len(names)
        for model, answer, message in zip(names, answers, messages):
            assert answer.startswith(f"refused: {model}") and message in answer, answer
