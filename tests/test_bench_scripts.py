"""Scripts in `bench/` import one another by name, and many need packages that are not here: their sources are read."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"
SCRIPTS = sorted(p for folder in (BENCH, BENCH / "peers", BENCH / "papers") for p in folder.glob("*.py"))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def top_level(path: Path) -> set[str]:
    """What a script binds where others can import it."""
    names: set[str] = set()
    for node in parsed(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        else:
            names |= {
                n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            }
    return names


def missing(script: Path) -> list[str]:
    """Names that a script imports from one beside it, or from `bench/`, which has no such name."""
    beside = {path.stem: path for folder in (BENCH, script.parent) for path in folder.glob("*.py")}
    return [
        f"{node.module}.{alias.name}"
        for node in ast.walk(parsed(script))
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module in beside
        for alias in node.names
        if alias.name not in top_level(beside[node.module])
    ]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(BENCH)))
def test_what_scripts_import_from_one_another_exists(script: Path) -> None:
    assert not missing(script)


def test_a_name_that_is_gone_is_found(tmp_path: Path) -> None:
    (tmp_path / "ppl.py").write_text("def measure(): ...\n")
    (tmp_path / "run.py").write_text("import torch\nfrom ppl import measure, perplexity\n")
    assert missing(tmp_path / "run.py") == ["ppl.perplexity"]
