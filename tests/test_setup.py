"""What setting up needs: said at once where it is missing, before anything is downloaded."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = [
    "sh",
    "make",
    "mktemp",
    "head",
    "cut",
    "df",
    "awk",
    "dirname",
    "rm",
    "find",
    "sort",
    "cksum",
    "uname",
]
# `-m venv` is what comes after the checks: here it ends `make` instead of setting anything up.
PYTHON = f"""#!/bin/sh
case "$*" in "-m venv"*) echo "all is there"; exit 9;; esac
exec {sys.executable} "$@"
"""


def python_where(lack: str) -> str:
    """A Python that runs `lack` first."""
    return f"""#!/bin/sh
[ "$1" = -c ] && set -- -c "{lack}
$2"
exec {sys.executable} "$@"
"""


OLD = python_where("import sys; sys.version_info = (3, 10, 4)")
# Debian without python3-venv has the module venv, but not ensurepip.
WITHOUT_VENV = python_where("import sys; sys.modules['ensurepip'] = None")
WITHOUT_HEADERS = python_where("import sysconfig; sysconfig.get_path = lambda name: '/nowhere'")
C_COMPILER_ONLY = """#!/bin/sh
echo "error: invalid value 'c++17' in '-std=c++17'" >&2
exit 1
"""

pytestmark = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in [*TOOLS, "c++"]), reason="needs make and a C++ compiler"
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A folder of programs that has all that setting up needs, and nothing else."""
    folder = tmp_path / "path"
    folder.mkdir()
    for tool in TOOLS:
        (folder / tool).symlink_to(shutil.which(tool) or "")
    program(folder / "c++", f'#!/bin/sh\nPATH={os.environ["PATH"]} exec {shutil.which("c++")} "$@"\n')
    program(folder / "python3", PYTHON)
    return folder


def program(file: Path, text: str) -> None:
    file.unlink(missing_ok=True)
    file.write_text(text)
    file.chmod(0o755)


def make(path: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and standard error of `make` on a machine where nothing is set up; it takes less than 5 seconds."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS")) and k != "CXX"}
    command = [path / "make", "-C", ROOT, f"VENV={path.parent / 'venv'}", "DISK_MB=1", "TMP_MB=1", *arguments]
    begun = time.perf_counter()
    ran = subprocess.run(
        command, env={**clean, "PATH": str(path)}, capture_output=True, text=True, check=False
    )
    assert time.perf_counter() - begun < 5
    assert not (path.parent / "venv").exists()
    return ran.returncode, ran.stderr


@pytest.mark.parametrize("target", ["demo", "test", "check"])
def test_where_all_is_there_setting_up_begins(path: Path, target: str) -> None:
    code, said = make(path, target)
    assert code and "missing" not in said and "Error 9" in said


@pytest.mark.parametrize("target", ["demo", "test", "check"])
@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("c++", None, ["C++17 compiler (", "apt install g++", "CXX="]),
        ("c++", C_COMPILER_ONLY, ["C++17 compiler (error: invalid value 'c++17'"]),
        ("python3", None, ["Python 3.11 or later", "python3: not found", "PYTHON="]),
        ("python3", OLD, ["Python 3.11 or later", "is 3.10)"]),
        ("python3", WITHOUT_VENV, ["ensurepip", "apt install python3-venv"]),
        ("python3", WITHOUT_HEADERS, ["(/nowhere/Python.h is not there)", "python3-dev"]),
        ("python3", "#!/bin/sh\nexit 1\n", ["(python3 does not run)"]),
    ],
)
def test_a_missing_program_is_named(
    path: Path, target: str, name: str, text: str | None, words: list[str]
) -> None:
    if text is None:
        (path / name).unlink()
    else:
        program(path / name, text)
    code, said = make(path, target)
    assert code and said.count("missing:") == 1
    for word in words:
        assert word in said


def test_a_full_disk_is_named_with_what_is_needed(path: Path) -> None:
    code, said = make(path, "demo", "DISK_MB=999999999")
    assert code and f"disk space: 999999999 MB in {path.parent}, where " in said and "VENV=" in said
    code, said = make(path, "demo", "TMP_MB=999999999")
    assert code and "disk space: 999999999 MB" in said and "TMPDIR=" in said


def test_all_that_is_missing_is_named_at_once(path: Path) -> None:
    (path / "c++").unlink()
    (path / "python3").unlink()
    code, said = make(path, "test", "DISK_MB=999999999")
    assert code and said.count("missing:") == 3


def test_another_compiler_and_python_can_be_named(path: Path) -> None:
    (path / "c++").rename(path / "mine++")
    (path / "python3").rename(path / "python")
    code, said = make(path, "demo", "CXX=mine++", "PYTHON=python")
    assert code and "missing" not in said and "Error 9" in said


def test_the_image_has_what_the_build_needs_and_the_same_pytorch() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all((ROOT / name).exists() for name in kept)
    assert {"CMakeLists.txt", "LICENSE", "README.md", "csrc", "pyproject.toml", "src"} <= set(kept)
    (ours,) = re.findall(r"^TORCH +\?= (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert f'ARG TORCH="{ours}"' in (ROOT / "Dockerfile").read_text()
