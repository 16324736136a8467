"""The pages: tables that are made from bench/results, links and paths that lead somewhere, the README's own tables."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from anybit.methods import METHODS
from anybit.methods.method import Method

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The pages, the figures and the script of a checkout of their own."""
    shutil.copytree(ROOT / "docs/results", tmp_path / "docs/results")
    shutil.copy(ROOT / "docs/security.md", tmp_path / "docs")
    (tmp_path / "bench").mkdir()
    for script in (ROOT / "bench").glob("*.py"):
        shutil.copy(script, tmp_path / "bench")
    shutil.copytree(
        ROOT / "bench/results", tmp_path / "bench/results", ignore=shutil.ignore_patterns("cells", "*.html")
    )
    return tmp_path


def tables(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Without site-packages: the standard library is all that the script has."""
    command = [sys.executable, "-S", "-E", str(root / "bench/tables.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count(old) == 1
    file.write_text(text.replace(old, new), encoding="utf-8")


def test_the_committed_tables_are_not_stale() -> None:
    done = tables(ROOT, "--check")
    assert (done.returncode, done.stderr) == (0, "")


def test_an_edited_number_is_noticed_and_mended(copy: Path) -> None:
    page = copy / "docs/results/quality.md"
    before = page.read_text(encoding="utf-8")
    row = next(
        line for line in before.partition("table: sizes")[2].splitlines() if line.startswith("| 2.3 |")
    )
    edit(page, row, row.replace("| 2.3 | 2.", "| 2.3 | 3.", 1))
    done = tables(copy, "--check")
    assert done.returncode == 1
    assert "docs/results/quality.md: table 'sizes' is stale" in done.stderr.splitlines()
    assert tables(copy).returncode == 0
    assert page.read_text(encoding="utf-8") == before


def test_a_new_figure_makes_its_table_stale(copy: Path) -> None:
    edit(copy / "bench/results/typed/decode.json", "62.8", "62.80")
    done = tables(copy, "--check")
    assert done.returncode == 1
    assert "docs/results/cpu.md: table 'decode/transformers' is stale" in done.stderr


def test_a_run_that_ended_in_other_bytes_is_not_counted_as_one_that_did_not(copy: Path) -> None:
    file = copy / "bench/results/security.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    whole = found["kills"]["runs_by_method"]["cmpq"]
    faults = [
        {"method": "cmpq", "fault": "ended with 2"},
        {"method": "cmpq", "fault": "other bytes: config.json"},
    ]
    found["kills"]["faults"] = faults
    file.write_text(json.dumps(found), encoding="utf-8")
    assert tables(copy).returncode == 0
    lines = (copy / "docs/security.md").read_text(encoding="utf-8").splitlines()
    row = next(line for line in lines if line.startswith("| cmpq |"))
    assert [cell.strip() for cell in row.split("|")][3:5] == [str(whole), str(whole - 2)]
    runs, kills = found["kills"]["runs"], found["kills"]["kills"]
    assert f"| all | {kills} | {runs} | {runs - 2} |" in "\n".join(lines)
    assert any(
        line.startswith("Faults: cmpq: ended with 2; cmpq: other bytes: config.json.") for line in lines
    )


def test_a_target_that_is_missed_says_so(copy: Path) -> None:
    file = copy / "bench/results/c4.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    (smallest,) = (cell for cell in found["cells"] if (cell["name"], cell["bits"]) == ("anybit", 2.3))
    smallest["perplexity"] = 200.5
    file.write_text(json.dumps(found), encoding="utf-8")
    assert tables(copy).returncode == 0
    line = next(
        line
        for line in (copy / "docs/results/summary.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| perplexity on the C4 sample |")
    )
    assert "met: 3, 3.5, 4, 5; **missed**: 2.5" in line


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("<!-- table: c4 -->\n", "", "quality.md: {one fewer} beginnings and {all} ends of tables"),
        ("<!-- table: c4 -->", "<!-- table: c5 -->", "quality.md: no table 'c5'"),
        ("<!-- table: encoders/minilm -->", "<!-- table: encoders/bert -->", "no table 'encoders/bert'"),
    ],
)
def test_a_missing_marker_or_table_is_an_error(copy: Path, old: str, new: str, said: str) -> None:
    page = copy / "docs/results/quality.md"
    tables_there = page.read_text(encoding="utf-8").count("<!-- end -->")
    said = said.format(**{"one fewer": tables_there - 1, "all": tables_there})
    edit(page, old, new)
    before = page.read_text(encoding="utf-8")
    for options in ((), ("--check",)):
        done = tables(copy, *options)
        assert done.returncode == 1 and said in done.stderr
        assert page.read_text(encoding="utf-8") == before


def test_a_table_that_no_page_has_is_an_error(copy: Path) -> None:
    page = copy / "docs/results/quality.md"
    page.write_text(
        re.sub(r"<!-- table: c4 -->.*?<!-- end -->\n", "", page.read_text(encoding="utf-8"), flags=re.S)
    )
    done = tables(copy, "--check")
    assert done.returncode == 1 and "no page has the table 'c4'" in done.stderr


NAMES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "csrc/README.md",
    "bench/README.md",
    "bench/peers/README.md",
)
LINKED = [*PAGES, *(ROOT / name for name in NAMES)]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    for link in links:
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in headings(target), link


def headings(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    lines = (line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    return {re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in lines}


@cache
def tracked() -> list[str]:
    """Every file of the checkout that is no build output."""
    skipped = {
        ".git",
        ".venv",
        "build",
        "__pycache__",
        ".pytest_cache",
        ".mypy_cache",
        ".ruff_cache",
        ".hypothesis",
    }
    files = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in skipped]
        files += [(Path(folder) / name).relative_to(ROOT).as_posix() for name in names]
    return files


NAMED = re.compile(r"`([\w.\-/]+(?:\.(?:py|pyi|h|cpp|md|toml|sh)|/))`")  # a file of the tree, or a folder


def stale_paths(text: str, files: list[str]) -> list[str]:
    """The paths in backticks that are no end of any file's path, nor a folder of the tree."""
    folders = {f"/{'/'.join(f.split('/')[:i])}/" for f in files for i in range(1, f.count("/") + 1)}
    stale = []
    for name in NAMED.findall(text):
        ends = (
            any(folder.endswith(f"/{name}") for folder in folders)
            if name.endswith("/")
            else any(f"/{file}".endswith(f"/{name}") for file in files)
        )
        if not ends and not re.search(r"\b[A-Z]{2,}\b", name.removesuffix(".md")):  # NAME, OUT: of a user's
            stale.append(name)
    return stale


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_paths_are_those_of_the_tree(page: Path) -> None:
    assert stale_paths(page.read_text(encoding="utf-8"), tracked()) == []


def test_the_page_of_the_scripts_names_them_all() -> None:
    page = (ROOT / "bench/README.md").read_text(encoding="utf-8")
    scripts = {*(ROOT / "bench").glob("*.py"), *(ROOT / "bench/papers").glob("*.py")}
    names = {path.name for path in scripts if not path.name.startswith("tables_")}
    assert {name for name in names if f"`{name}`" not in page} == set()
    assert len(page.splitlines()) <= 60


def test_a_stale_path_is_noticed() -> None:
    text = "`spec.py`, `methods/gptq.py`, `src/anybit/config.py`, `nowhere/`, `methods/`, `methods/NAME.py`, `out.txt`"
    assert stale_paths(text, tracked()) == ["spec.py", "nowhere/"]


# ---- the README's own tables


README = (ROOT / "README.md").read_text(encoding="utf-8")


def rows_below(heading: str) -> list[list[str]]:
    """The cells of the first table whose heading begins with these words."""
    lines = README.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(heading))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_every_place_is_where_the_readme_says() -> None:
    rows = rows_below("| where is |")
    assert len(rows) > 10
    for what, places, words in rows:
        found = [(ROOT / path).read_text(encoding="utf-8") for path in re.findall(r"`([^`]+)`", places)]
        assert found, what
        assert all(words.strip("`") in text for text in found), what


def test_the_tree_of_the_readme_is_the_tree() -> None:
    _, _, block = README.partition("src/anybit/\n")
    block = block.partition("```")[0]
    shown = set(re.findall(r"\b([a-z_]+\.py|[a-z_]+/)(?=[ ;:,]|$)", block, re.M))
    package = ROOT / "src/anybit"
    there = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()}
    there |= {path.name for path in package.glob("*.py")}
    obvious = {"__init__.py", "__main__.py", "errors.py", "progress.py", "cost.py"}
    top = {name for name in shown if (package / name).exists()}
    assert there - obvious == top
    assert {name for name in shown - top if not (ROOT / name).exists()} <= {"gpu/"}


def row_of(method: Method) -> list[str]:
    """What the README says of a method, by what the method says of itself."""
    options = method.options().resolve()
    gradients = method.statistics(options).fisher or method.work(options).passes
    needs = "gradients" if gradients else "text" if options.calibrated else "nothing"
    kind, _, number = method.paper.partition(":")
    links = {"arXiv": f"[{number}](https://arxiv.org/abs/{number})", "": "ours" if not method.title else ""}
    paper = links.get(kind, f"[doi](https://doi.org/{kind})" if kind.startswith("10.") else method.paper)
    extra = f", `.[{method.extra}]`" if method.extra else ""
    return [f"`{method.name}`", paper, method.summary, str(method.options.widths_of), needs + extra]


def test_the_table_of_methods_is_what_they_say_of_themselves() -> None:
    expected = [row_of(method) for method in METHODS.values()]
    table = "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in expected)
    assert rows_below("| method | paper |") == expected, f"put this into README.md:\n{table}"


# ---- plain words


def sentences(text: str) -> list[str]:
    """The sentences of a page's prose: no tables, code or headings; code in backticks and links are one word each."""
    text = re.sub(r"<!-- table: .*?<!-- end -->|^ *```.*?^ *```|^ *[|#<].*?$", "", text, flags=re.S | re.M)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "CODE", text))
    found = []
    for paragraph in re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.) ", text, flags=re.M):
        plain = " ".join(paragraph.replace("**", "").split())
        found += re.split(r'(?<=[.?!])\s+(?=[A-Z0-9"(])|(?<=:)\s+(?=[A-Z"(])', plain)
    return [sentence for sentence in found if sentence]


PROSE = [
    *PAGES,
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/README.md")),
]


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_nine_sentences_of_ten_have_at_most_25_words(page: Path) -> None:
    found = sentences(page.read_text(encoding="utf-8"))
    long = [sentence for sentence in found if len(sentence.split()) > 25]
    assert len(long) <= len(found) / 10, "\n".join(long)


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_prose_is_wrapped_at_120(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    assert not [line for line in text.splitlines() if len(line) > 120 and not line.lstrip().startswith("|")]


def test_long_sentences_are_found() -> None:
    words = " ".join(["word"] * 26)
    text = f"# {words}\n\n| {words} |\n\nOne `{words}` here.\n- Two {words}.\n- Three: no.\n\n```\n{words}\n```\n"
    assert [len(sentence.split()) for sentence in sentences(text)] == [3, 27, 2]


def test_the_summary_is_a_screen() -> None:
    text = (ROOT / "docs/results/summary.md").read_text(encoding="utf-8")
    shown, heading, _ = text.partition("\n## ")
    assert heading and len(shown.splitlines()) <= 60
    assert "### " not in shown and shown.count("<!-- table: ") == 3
    for header in re.findall(r"<!-- table: .*? -->\n\n(.*)", text):
        assert header.startswith("| claim | target | measured | target met? |")
