"""What drafts give: code that is rewritten and prose that is continued, with drafts and without, in turns.

python bench/serve_drafts.py out --text wiki.test.raw [--bits 4] [--json figures.json]

Functions of Python's standard library are to be rewritten with a variable renamed; prose are articles of the text.
Greedy, or with --temperature by a seed. Every text must be the same with drafts and without. Rates are of one text
alone, from its first token to its last. Without drafts each runs twice, which says what the machine itself does.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import itertools
import json
import queue
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from anybit import Engine, Sampling
from anybit.checkpoint.chat_template import render
from anybit.checkpoint.tokenizer import encode
from anybit.progress import Terminal
from anybit.serve.run.job import Job, Progress, jobs_of
from anybit.serve.run.request import Request
from anybit.serve.run.runner import Limits, Runner

MODULES = (
    "textwrap",
    "heapq",
    "bisect",
    "difflib",
    "calendar",
    "shlex",
    "statistics",
    "fractions",
    "string",
    "csv",
)
LINES = range(8, 40)  # of a function
CODE = "Rewrite this function. Rename `{name}` to `renamed`, and change nothing else.\n```python\n{code}```"
PROSE_TOKENS = 100  # of an article before its continuation
MOST, LEAST = 128, 8  # tokens drawn; so few have no rate


def functions() -> Iterator[tuple[str, str]]:
    """Functions of the standard library, and a variable of each."""
    for name in MODULES:
        source = inspect.getsource(importlib.import_module(name))
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef) or not node.args.args:
                continue
            code = textwrap.dedent(ast.get_source_segment(source, node, padded=True) or "")
            if code.count("\n") + 1 in LINES:
                yield code, node.args.args[-1].arg


def prompts_of_code(engine: Engine, count: int) -> list[list[int]]:
    made = []
    for code, name in itertools.islice(functions(), count):
        message = {"role": "user", "content": CODE.format(name=name, code=f"{code}\n")}
        made.append(encode(engine.tokenizer, render(engine.name, engine.tokenizer, [message]), special=False))
    return made


def prompts_of_prose(engine: Engine, text: Path, count: int) -> list[list[int]]:
    paragraphs = [line for line in text.read_text(encoding="utf-8").splitlines() if len(line) > 600]
    step = max(1, len(paragraphs) // count)
    return [engine.encode(line)[:PROSE_TOKENS] for line in paragraphs[::step][:count]]


def ran(runner: Runner, tokens: list[int], sampling: Sampling, speculates: bool) -> tuple[Job, list[int]]:
    said: queue.SimpleQueue[Progress] = queue.SimpleQueue()
    asked = Request(tokens, MOST, sampling=sampling, speculates=speculates)
    (job,) = jobs_of(runner.engine, runner.engine.context, asked, lambda _, progress: said.put(progress))
    runner.submit([job])
    drawn: list[int] = []
    while (progress := said.get()).finish is None:
        drawn += [progress.drawn.token] if progress.drawn else []
    if progress.error is not None:
        raise progress.error
    return job, drawn


RUNS = {"drafts": True, "none": False, "none again": False}


def measured(runner: Runner, prompts: list[list[int]], sampling: Sampling, kind: str) -> dict[str, Any]:
    rates: dict[str, list[float]] = {run: [] for run in RUNS}
    tokens = drafted = narrow = accepted = same = 0
    terminal = Terminal()
    advance = terminal.task(kind, len(prompts))
    for i, prompt in enumerate(prompts):
        texts = {}
        first = i % len(RUNS)
        for run in [*RUNS, *RUNS][first : first + len(RUNS)]:
            job, texts[run] = ran(runner, prompt, sampling, RUNS[run])
            if job.drawn > LEAST:
                rates[run].append((job.drawn - 1) / (job.times.last - job.times.first))
            drafted, accepted = drafted + job.drafted, accepted + job.accepted
            narrow += job.narrow.drafted
            tokens += job.drawn if RUNS[run] else 0
        same += texts["drafts"] == texts["none"] == texts["none again"]
        advance(1)
    terminal.close()
    ratios = sorted(a / b for a, b in zip(rates["drafts"], rates["none"], strict=True))
    twice = sorted(a / b for a, b in zip(rates["none again"], rates["none"], strict=True))
    return {
        "kind": kind, "prompts": len(prompts), "same_text": same, "tokens": tokens, "draft_tokens": drafted,
        "narrow_tokens": narrow, "accepted_tokens": accepted, "tokens_per_second": median(rates["drafts"]),
        "without_drafts": median(rates["none"]), "ratio": median(ratios), "least_ratio": ratios[0],
        "tenth_ratio": ratios[len(ratios) // 10], "least_ratio_of_none": twice[0],
        "tenth_ratio_of_none": twice[len(twice) // 10],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True, help="prose")
    parser.add_argument("--bits", type=float, default=4.0)
    parser.add_argument("--prompts", type=int, default=100, help="of each kind")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", type=Path, help="a list of runs, to which this one is added")
    given = parser.parse_args()
    engine = Engine(given.model, bits=given.bits)
    sampling = Sampling(temperature=given.temperature, seed=1)
    runner = Runner(engine, Limits(256))
    runner.start()
    try:
        kinds = {
            "code that is rewritten": prompts_of_code(engine, given.prompts),
            "prose": prompts_of_prose(engine, given.text, given.prompts),
        }
        figures = {
            "model": Path(given.model).name,
            "bits": engine.widths[-1],
            "threads": engine.threads,
            "temperature": given.temperature,
            "kinds": [measured(runner, prompts, sampling, kind) for kind, prompts in kinds.items()],
        }
    finally:
        runner.close(0)
    print(json.dumps(figures, indent=1))
    if given.json:
        runs = json.loads(given.json.read_text(encoding="utf-8")) if given.json.exists() else []
        given.json.write_text(json.dumps([*runs, figures], indent=1) + "\n", encoding="utf-8")
    if any(found["same_text"] != found["prompts"] for found in figures["kinds"]):
        sys.exit("a text differs with drafts")


if __name__ == "__main__":
    main()
