"""The tables of docs/results/*.md and docs/security.md, made from bench/results; the standard library is all it needs.

python bench/tables.py            # rewrites every table that stands between its two markers
python bench/tables.py --check    # exits 1 and names the file and the table that is stale

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. NAME is a key of TABLES or, with a slash, a table
of bench/results/typed: figures that were taken over from the text, as no program had written them to a file.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import tables_engine as engine
import tables_gpu as gpu
import tables_quality as quality
import tables_security as security
import tables_serve as serve
import tables_speed as speed
from figures import typed

ROOT = Path(__file__).resolve().parent.parent
MARKED = re.compile(r"<!-- table: (?P<name>[^ ]+) -->\n(?P<body>.*?)<!-- end -->", re.DOTALL)

TABLES: dict[str, Callable[[], str]] = {
    "best-per-byte": quality.best_per_byte,
    "kernel-targets": speed.kernel_targets,
    "wikitext": quality.wikitext,
    "c4": quality.c4,
    "c4-models": quality.c4_models,
    "sizes": quality.sizes,
    "curve": quality.curve,
    "paired": quality.paired,
    "file-sizes": quality.file_sizes,
    "tuned": lambda: quality.on_texts("tuned.json"),
    "gains": lambda: quality.on_texts("gains.json"),
    "kept-bits": lambda: quality.on_texts("kept-bits.json"),
    "own-texts": lambda: quality.on_texts("own-texts.json"),
    "coded": lambda: quality.coded("coded.json"),
    "coded-files": lambda: quality.coded("coded-files.json"),
    "llama-cpp": lambda: quality.llama_cpp("llama-cpp.json"),
    "llama-cpp-qwen": lambda: quality.llama_cpp("llama-cpp-qwen.json"),
    "layers-qwen": quality.layers_alone,
    "peers": quality.peers,
    "efforts": quality.efforts,
    "attention": quality.attention,
    "methods": quality.methods,
    "all-methods": quality.all_methods,
    "read-rate": lambda: speed.read_rate("decode-b", 2, speed.LARGE),
    "read-rate-one-thread": lambda: speed.read_rate("decode-b", 1, speed.SHAPES),
    "read-rate-a": lambda: speed.read_rate("decode", 2, speed.LARGE),
    "over-torch": speed.over_torch,
    "all-kernels": speed.all_kernels,
    "computing": speed.computing,
    "narrow": speed.narrow,
    "tokens": lambda: speed.tokens("tokens-b"),
    "tokens-a": lambda: speed.tokens("tokens"),
    "narrow-prefill": speed.narrow_prefill,
    "same-speed": speed.same_speed,
    "same-speed-few": lambda: speed.same_speed_few("same-speed-few"),
    "same-speed-rows": lambda: speed.same_speed_few("same-speed-rows"),
    "same-speed-amx": lambda: speed.same_speed_few("same-speed-amx"),
    "same-speed-avx2": lambda: speed.same_speed_few("same-speed-avx2"),
    "call-overhead": speed.call_overhead,
    "engine/decode": engine.decode,
    "engine/depths": engine.depths,
    "engine/prefill": engine.prefill,
    "engine/quality": engine.quality,
    "engine/targets": engine.targets,
    "engine/vnni": engine.without_amx,
    "engine/avx2": engine.avx2,
    "engine/zen3": engine.zen3,
    "engine/avx2-deep": engine.avx2_deep,
    "engine/others": engine.disturbed,
    "engine/steps": engine.steps,
    "engine/formats": engine.formats,
    "gpu-one-token": gpu.one_token,
    "gpu-bounds": gpu.bounds,
    "gpu-tokens": gpu.tokens,
    "gpu-more-tokens": gpu.more_tokens,
    "gpu-decode": gpu.decode,
    "gpu-attention": gpu.attention,
    "gpu-activations": gpu.activations,
    "gpu-quantize": gpu.quantizing,
    "gpu-targets": gpu.targets,
    "serve-latency": serve.latency,
    "serve-trace": lambda: serve.saturated("serve-trace"),
    "serve-load": lambda: serve.timed("serve-load"),
    "serve-load-saturated": lambda: serve.saturated("serve-load"),
    "serve-code": lambda: serve.saturated("serve-code"),
    "serve-code-load": lambda: serve.timed("serve-code"),
    "serve-code-all-load": lambda: serve.timed("serve-code-all"),
    "serve-drafts": serve.drafts,
    "mutations": security.mutations,
    "kills": security.kills,
}


class TableError(Exception):
    """A marker without its end, or a name that no table has."""


def filled(text: str, where: str) -> tuple[str, list[str]]:
    """A page with its tables made anew, and the names of those that were stale."""
    stale = []

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        try:
            body = f"\n{TABLES[name]() if name in TABLES else typed(name)}\n"
        except (KeyError, FileNotFoundError) as error:
            raise TableError(f"{where}: no table {name!r}: {error}") from error
        if body != match["body"]:
            stale.append(name)
        return f"<!-- table: {name} -->\n{body}<!-- end -->"

    starts, ends = text.count("<!-- table:"), text.count("<!-- end -->")
    result, found = MARKED.subn(fill, text)
    if not starts == ends == found:
        raise TableError(
            f"{where}: {starts} beginnings and {ends} ends of tables, {found} pairs: expected as many"
        )
    return result, stale


def unused(pages: Iterable[str]) -> list[str]:
    """Names of tables that stand on no page."""
    named = {match["name"] for page in pages for match in MARKED.finditer(page)}
    return sorted(set(TABLES) - named)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="The tables of docs/results/*.md, made from bench/results.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a table is stale")
    check = parser.parse_args(arguments).check
    files = [*sorted((root / "docs/results").glob("*.md")), root / "docs/security.md"]
    pages = {file: file.read_text(encoding="utf-8") for file in files}
    wrong = [f"no page has the table {name!r}" for name in unused(pages.values())]
    try:
        made = {file: filled(text, str(file.relative_to(root))) for file, text in pages.items()}
    except TableError as error:
        made, wrong = {}, [*wrong, str(error)]
    for file, (text, stale) in made.items():
        if not check:
            file.write_text(text, encoding="utf-8")
        wrong += [f"{file.relative_to(root)}: table {name!r} is stale" for name in stale if check]
    if wrong:
        print(*wrong, "`python bench/tables.py` rewrites stale tables", sep="\n", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
