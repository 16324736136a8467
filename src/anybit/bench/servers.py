"""Servers as processes of their own: started with their share of the memory, waited for, always ended."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from anybit.bench import llama_server, mistralrs_server
from anybit.bench.contenders import LLAMA_TYPES
from anybit.bench.sources import state_of
from anybit.bench.systems import System
from anybit.errors import InputError

PACKAGES = {"llama.cpp": "xllamacpp", "mistral.rs": "mistralrs"}
# A package's version, or else its file.
STATES = """
import importlib.metadata, importlib.util, sys
file = importlib.util.find_spec(sys.argv[1]).origin
names = importlib.metadata.packages_distributions().get(sys.argv[1])
print(f"version: {names[0]} {importlib.metadata.version(names[0])}" if names else file)
"""
# Figures of what runs and what waits.
QUEUES = {
    "anybit": ("anybit_running_texts", "anybit_waiting_texts"),
    "llama.cpp": ("llamacpp:requests_processing", "llamacpp:requests_deferred"),
    "mistral.rs": ("mistralrs_requests",),
}
START, STOP = 300, 20  # seconds that a server has
PAUSE = 0.1


@dataclass(frozen=True)
class Share:
    """What a server may take."""

    kv_bytes: int
    kv_tokens: int
    context: int
    running: int  # texts together, at most
    threads: int


@dataclass(frozen=True)
class Programs:
    """The peers'."""

    llama: Path | None = None  # llama-server, or a Python interpreter that has xllamacpp
    mistralrs: Path | None = None  # a Python interpreter that has mistralrs

    @property
    def given(self) -> dict[str, Path]:
        """By engine."""
        both = {"llama.cpp": self.llama, "mistral.rs": self.mistralrs}
        return {engine: program for engine, program in both.items() if program is not None}


def is_python(program: Path) -> bool:
    return program.name.startswith("python")


def version(engine: str, program: Path) -> str:
    """As a peer states it; else a digest of its file's name, size and time, so that another build is told from it.

    Raises:
        InputError: it does not start, or has no such package.
    """
    package = PACKAGES[engine]
    options = ["-c", STATES, package] if is_python(program) else ["--version"]
    try:
        ran = subprocess.run(
            [str(program), *options], capture_output=True, text=True, check=False, timeout=START
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"{program} does not start, so {engine} cannot be measured: {error}") from error
    said = ran.stdout + ran.stderr
    if stated := re.search(r"^version: (?!.*unknown)(.+)$", said, re.MULTILINE):
        return stated[1].strip()
    if is_python(program):
        if ran.returncode:
            raise InputError(f"{program}: expected a Python interpreter that has the package {package}")
        return state_of(Path(ran.stdout.strip()))
    return state_of(Path(shutil.which(program) or program))


def command(system: System, share: Share, programs: Programs, port: int) -> list[str]:
    """What starts a server."""
    if system.engine == "llama.cpp":
        assert programs.llama is not None
        kind = LLAMA_TYPES[system.kv_bits]
        start = [str(programs.llama)] + [llama_server.__file__] * is_python(programs.llama)
        return [
            *start, "-m", system.model, "--host", "127.0.0.1", "--port", str(port), "-c", str(share.kv_tokens),
            "-np", str(share.running), "-kvu", "-t", str(share.threads), "-ctk", kind, "-ctv", kind,
            "--no-cache-prompt", "--cache-ram", "0", "--fit", "off", "--no-ui", "--metrics",
        ]  # fmt: skip
    if system.engine == "mistral.rs":
        start = [str(programs.mistralrs), mistralrs_server.__file__]
        return [*start, system.model, str(port), str(share.running)]
    made = [
        sys.executable, "-m", "anybit", "serve", system.model, "--port", str(port), "--kv-memory",
        str(share.kv_bytes), "--context", str(share.context), "--kv-bits", str(system.kv_bits),
        "--max-running", str(share.running), "--max-waiting", "1000", "--threads", str(share.threads),
        "--drain-seconds", "1",
    ]  # fmt: skip
    made += ["--bits", f"{system.bits:g}"] if system.bits is not None else []
    return made + (["--auto-bits", f"{system.least:g}"] if system.least is not None else [])


class Server:
    """One that answers.

    Args:
        process: of it.
        port: where it listens.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self._process, self.port = process, port

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def get(self, path: str) -> str:
        """What it says at an address; nothing where it says no."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            return reply.read().decode() if reply.status == 200 else ""
        except (OSError, http.client.HTTPException):
            return ""
        finally:
            connection.close()

    def figures(self, *names: str) -> list[float | None]:
        """Of /metrics, at one time; None: it does not say."""
        page = self.get("/metrics")
        found = [re.search(rf"^{name} (\S+)", page, re.MULTILINE) for name in names]
        return [float(one[1]) if one else None for one in found]

    @property
    def processor_seconds(self) -> float:
        """That it has taken."""
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, IndexError, ValueError):
            return 0.0

    @property
    def peak_bytes(self) -> int | None:
        """The most memory that was resident; None: the system does not say."""
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text()
            return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]
        except (OSError, TypeError):
            return None


@contextmanager
def started(asked: Sequence[str], port: int, threads: int) -> Iterator[Server]:
    """A server, until the block ends.

    Raises:
        InputError: it does not start, with the last that it said.
    """
    settings = {"RAYON_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as said:
        try:
            process = subprocess.Popen(
                asked, stdout=said, stderr=said, env={**os.environ, **settings}, start_new_session=True
            )
        except OSError as error:
            raise InputError(f"{asked[0]} does not start: {error.strerror}") from error
        try:
            server = Server(process, port)
            deadline = time.monotonic() + START
            while server.alive and time.monotonic() < deadline and not server.get("/health"):
                time.sleep(PAUSE)
            if not server.alive or time.monotonic() >= deadline:
                said.seek(0)
                lines = said.read().decode(errors="replace").strip().splitlines() or ["nothing"]
                how = "did not start in time" if server.alive else f"ended with {process.returncode}"
                raise InputError(f"{' '.join(asked[:4])} {how}; it said: {lines[-1]}")
            yield server
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP)
            process.kill()
            process.wait()


def free_port() -> int:
    """One that nobody listens at now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
