"""A case in a process of its own, forked from this one: limited in time and memory, its writes watched."""

from __future__ import annotations

import faulthandler
import io
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CPU_SECONDS = 20  # of one core
WALL_SECONDS = 120  # the machine may be busy
MEMORY = 1 << 30  # bytes of address space beyond what this process has
GOOD = ("error", "right")
SLOWER = 10 if "asan" in os.environ.get("LD_PRELOAD", "") else 1  # a sanitizer, which also reserves terabytes
OPENED_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {  # audit events that change files -> how many of their arguments are paths
    **{"os.mkdir": 1, "os.rmdir": 1, "os.remove": 1, "os.chmod": 1, "os.truncate": 1, "os.utime": 1},
    **{"os.rename": 2, "os.link": 2, "os.symlink": 2, "os.chown": 1, "os.setxattr": 1},
}
FORBIDDEN = (
    *("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pickle.find_class"),
    *("socket.connect", "socket.getaddrinfo"),
)
ELSEWHERE = ("/dev/null", "/dev/tty", "/proc/self/", "/dev/shm/")
OUT_OF_MEMORY = (
    "does not fit into memory",
    "MemoryError",
    "allocate memory",
    "bad_alloc",
    "Unable to allocate",
)

Run = Callable[[Path], str]  # does the case in a folder; returns one of `GOOD`, or raises `Finding`


class Finding(Exception):
    """What must not happen, as a case itself sees it."""


@dataclass(frozen=True)
class Verdict:
    outcome: str  # one of `GOOD`, or: wrong, traceback, crash, hang, memory, outside
    said: str  # what came of it, in a line or a traceback
    seconds: float  # of a processor


@dataclass
class Child:
    """A case under way."""

    pid: int
    folder: Path
    looked: float = field(default_factory=time.monotonic)
    waited: float = 0.0  # seconds, while this process ran: a machine that sleeps is no hang

    def verdict(self) -> Verdict | None:
        """None while it runs; ends it where it runs too long."""
        pid, status, used = os.wait4(self.pid, os.WNOHANG)
        if pid == 0:
            now = time.monotonic()
            self.waited, self.looked = self.waited + min(now - self.looked, 1.0), now
            if self.waited < WALL_SECONDS * SLOWER:
                return None
            os.kill(self.pid, signal.SIGABRT)  # faulthandler says where it is
            time.sleep(1)
            os.kill(self.pid, signal.SIGKILL)
            os.wait4(self.pid, 0)
            return Verdict("hang", f"more than {WALL_SECONDS * SLOWER} s\n{self._log()[-3000:]}", 0.0)
        seconds, log = used.ru_utime + used.ru_stime, self._log()
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            kind = "hang" if number == signal.SIGXCPU else "crash"
            return Verdict(kind, f"{signal.Signals(number).name}\n{log[-3000:]}", seconds)
        if "Sanitizer" in log or "runtime error: " in log:
            return Verdict("crash", log[-5000:], seconds)
        try:
            return Verdict(*json.loads((self.folder / "verdict").read_text()), seconds)
        except (OSError, ValueError):
            return Verdict("crash", f"ended with {os.waitstatus_to_exitcode(status)}\n{log[-3000:]}", seconds)

    def _log(self) -> str:
        return (self.folder / "log").read_text(errors="replace") if (self.folder / "log").exists() else ""


def start(run: Run, folder: Path) -> Child:
    """Fork a process that does a case in a new folder."""
    folder.mkdir()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            _child(run, folder)
        finally:
            os._exit(3)
    return Child(pid, folder)


def finish(run: Run, folder: Path) -> Verdict:
    """Do a case and wait for it."""
    child = start(run, folder)
    while (verdict := child.verdict()) is None:
        time.sleep(0.002)
    return verdict


def _child(run: Run, folder: Path) -> None:
    _redirect(folder)
    outside: list[str] = []
    watching = [True]
    (folder / "tmp").mkdir()
    tempfile.tempdir = str(folder / "tmp")
    os.environ |= {"TMPDIR": tempfile.tempdir, "HOME": str(folder)}
    os.chdir(folder)
    sys.dont_write_bytecode = True
    _limit()
    sys.addaudithook(lambda event, args: watching[0] and _watch(folder, outside, event, args))
    try:
        outcome, said = run(folder), ""
    except Finding as finding:
        outcome, said = "wrong", str(finding)
    except BaseException as error:
        outcome, said = "memory" if is_memory(error) else "traceback", traceback.format_exc()
    watching[0] = False
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    outside += [f"left in TMPDIR: {path.name}" for path in (folder / "tmp").iterdir()]
    if outside and outcome in (*GOOD, "traceback"):
        outcome, said = "outside", "\n".join(outside[:5])
    sys.stdout.flush()
    sys.stderr.flush()
    (folder / "verdict").write_text(json.dumps([outcome, said]))
    os._exit(0)


def _redirect(folder: Path) -> None:
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, target)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, "r", closefd=False))
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(descriptor, "w", closefd=False), errors="replace", line_buffering=True)
        for descriptor in (1, 2)
    )
    faulthandler.enable()


def _limit() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGXCPU, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS * SLOWER, CPU_SECONDS * SLOWER + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    statistics = Path("/proc/self/statm")
    if SLOWER == 1 and statistics.exists():
        limit = int(statistics.read_text().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def is_memory(error: BaseException | None) -> bool:
    """Whether memory was what an exception, or one behind it, was about."""
    while error is not None:
        if isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


def _watch(folder: Path, outside: list[str], event: str, args: tuple[Any, ...]) -> None:
    """Note writes outside of the folder, programs and connections."""
    paths: list[Any] = []
    if event == "open" and isinstance(args[2], int) and args[2] & OPENED_TO_WRITE:
        paths = [args[0]]
    elif event in CHANGES:
        paths = list(args[: CHANGES[event]])
    elif event in FORBIDDEN:
        outside.append(f"{event} {args!r}"[:300])
        raise PermissionError(outside[-1])  # it must not even begin
    for path in paths:
        if isinstance(path, str | bytes | os.PathLike):
            place = os.path.realpath(os.fsdecode(path))
            if not place.startswith((f"{folder}/", *ELSEWHERE)) and place != str(folder):
                outside.append(f"{event} {place}")
