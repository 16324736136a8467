"""The steps of the Dockerfile, tried without a container: each image is a directory that debootstrap makes.

sudo python bench/container.py /tmp/images --model out [--torch "torch==2.13.0"]

RUN steps run in a chroot, COPY steps copy what .dockerignore leaves, and the entry point then serves MODEL until
/health and one completion have answered. What this machine needs to reach its package index (pip's and apt's settings,
certificates, the environment) is lent to the chroots. Layers, the user and the file system of a real image are not
tried. It needs root, debootstrap and about 15 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

ROOT = Path(__file__).parents[1]
LENT = (
    "/etc/resolv.conf",
    "/etc/pip.conf",
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/apt/apt.conf.d/proxy.conf",
)
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
PATIENCE = 120.0  # seconds until the server answers, at most


def instructions(path: Path) -> list[tuple[str, str]]:
    """(keyword, what follows) of every step, continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line]


class Image:
    """A stage of the build."""

    def __init__(self, root: Path, suite: str, arguments: dict[str, str]) -> None:
        self.root, self.arguments = root, arguments
        if root.exists():
            raise SystemExit(
                f"{root} is there already: give a new folder, as each step begins with what the last left"
            )
        run(["debootstrap", "--variant=minbase", suite, str(root)])

    def enter(self, *command: str) -> list[str]:
        """A command inside, as `subprocess` takes it."""
        return ["chroot", str(self.root), *command]

    def run(self, step: str) -> None:
        for name in filter(os.path.isfile, LENT):  # again each time: packages bring their own
            (self.root / name[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, self.root / name[1:])
        environment = os.environ | self.arguments | {"PATH": PATH, "HOME": "/root"}
        subprocess.run(self.enter("sh", "-ec", step), check=True, env=environment)

    def copy(self, words: list[str], stages: dict[str, Image]) -> None:
        source, target = words[-2:]
        to = self.root / target[1:]
        shutil.rmtree(to, ignore_errors=True)
        if words[0].startswith("--from="):
            stage = stages[words[0].removeprefix("--from=")]
            shutil.copytree(stage.root / source[1:], to, symlinks=True)
            return
        for kept in (
            line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
        ):
            to.mkdir(parents=True, exist_ok=True)
            if (ROOT / kept).is_dir():
                shutil.copytree(ROOT / kept, to / kept, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            else:
                shutil.copy(ROOT / kept, to / kept)


def run(command: list[str]) -> None:
    print("+", shlex.join(command), flush=True)
    subprocess.run(command, check=True)


def build(root: Path, torch: str | None) -> tuple[Image, list[str]]:
    """The last image, and its entry point with what it is given."""
    stages: dict[str, Image] = {}
    image, last = None, {}
    given = {} if torch is None else {"TORCH": torch}
    for keyword, rest in instructions(ROOT / "Dockerfile"):
        print(f"{keyword} {rest}", flush=True)
        begun = time.monotonic()
        if keyword == "FROM":
            base, *name = rest.split(" AS ")
            suite = base.split(":")[1].removesuffix("-slim")
            image = Image(root / (name[0] if name else "last"), suite, {})
            stages[name[0] if name else ""] = image
            continue
        assert image is not None
        if keyword == "ARG":
            key, default = rest.split("=", 1)
            image.arguments[key] = given.get(key, default.strip('"'))
        elif keyword == "RUN":
            image.run(rest)
        elif keyword == "COPY":
            image.copy(rest.split(), stages)
        else:
            last[keyword] = rest
        print(f"  {time.monotonic() - begun:.0f} s", flush=True)
    assert image is not None
    return image, json.loads(last["ENTRYPOINT"]) + json.loads(last["CMD"])


def serve(image: Image, command: list[str], model: Path) -> None:
    """Serve a model from inside, and ask it."""
    shutil.copytree(model, image.root / "model", dirs_exist_ok=True)
    (image.root / "proc").mkdir(exist_ok=True)
    with mounted(image.root / "proc"):
        answered(image, command)


@contextmanager
def mounted(proc: Path) -> Iterator[None]:
    """What the kernel says of processes, in a folder."""
    run(["mount", "-t", "proc", "proc", str(proc)])
    try:
        yield
    finally:
        run(["umount", str(proc)])


def answered(image: Image, command: list[str]) -> None:
    """Start a server, ask it and end it."""
    server = subprocess.Popen(
        ["chroot", "--userspec=anybit", str(image.root), *command], env={"HOME": "/home/anybit", "PATH": PATH}
    )
    try:
        begun = time.monotonic()
        while True:
            try:
                urlopen("http://localhost:8000/health", timeout=PATIENCE).read()
                break
            except (URLError, ConnectionError):
                if time.monotonic() - begun > PATIENCE or server.poll() is not None:
                    raise
                time.sleep(0.2)
        print(f"answers after {time.monotonic() - begun:.1f} s", flush=True)
        body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
        asked = Request("http://localhost:8000/v1/completions", json.dumps(body).encode())
        print(json.load(urlopen(asked, timeout=PATIENCE))["choices"][0]["text"], flush=True)
    finally:
        server.terminate()
        print("exit code", server.wait(60), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images", type=Path, help="a folder for the images")
    parser.add_argument("--model", type=Path, required=True, help="an artifact to serve")
    parser.add_argument("--torch", help="what the argument TORCH is")
    options = parser.parse_args()
    last, entry = build(options.images, options.torch)
    serve(last, entry, options.model)
