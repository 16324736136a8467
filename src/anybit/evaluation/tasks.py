"""Zero-shot multiple-choice tasks through lm-eval (extra `eval`), offline on local JSON-lines files.

A folder of tasks holds `<task>.jsonl` in one of two schemas, told apart by their keys:
`query`, `choices`, `gold` (PIQA, ARC and their like) or `ctx`, `endings`, `label` (HellaSwag's own).
The prompts are those of lm-eval's own piqa, arc_easy and hellaswag, so that the figures compare.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from anybit.config import Json
from anybit.errors import InputError

METRICS = ("acc", "acc_norm")  # acc_norm: log-likelihood divided by the bytes of the choice


@dataclass(frozen=True)
class Question:
    """One multiple-choice question as lm-eval is given it."""

    query: str  # the prompt, complete
    choices: tuple[str, ...]
    gold: int  # index of the right choice


@dataclass(frozen=True)
class Prepared:
    """Tasks that are known to work: what is left needs a model."""

    library: SimpleNamespace
    loaded: Json  # lm-eval's task objects with their data
    limit: int | None


def prepare(tasks: Sequence[str], *, tasks_dir: Path | None = None, limit: int | None = None) -> Prepared:
    """Import lm-eval and read the questions, so that a mistake shows before hours of work.

    With `tasks_dir` the questions come from its files and no network is touched; without it the tasks are
    lm-eval's own, whose data it fetches, with whatever metrics they define. `limit`: the first questions of
    each task only. Raises InputError for a missing package, an unknown task or a faulty file.
    """
    if not tasks:
        raise InputError("no task was named; give at least one, for example piqa.")
    if limit is not None and limit < 1:
        raise InputError(f"limit {limit}: must be at least 1.")
    names = list(dict.fromkeys(tasks))
    with _environment_kept():
        library = _import_lm_eval()
        specs: list[Any] = list(names)
        if tasks_dir is None:
            manager = _own_tasks(library, names)
        else:
            questions = {name: read_questions(path) for name, path in _files(names, tasks_dir).items()}
            specs = [_spec(library, name, rows) for name, rows in questions.items()]
            manager = library.TaskManager(include_defaults=False)
        return Prepared(library, _load(manager, specs, names), limit)


def run_prepared(model: Any, tokenizer: Any, prepared: Prepared, *, batch_size: int = 1) -> dict[str, Json]:
    """Zero-shot scores per task: `acc`, `acc_stderr`, `acc_norm`, `acc_norm_stderr` and the questions `n`.

    Model and tokenizer come out as they went in.
    """
    if batch_size < 1:
        raise InputError(f"batch size {batch_size}: must be at least 1.")
    with _environment_kept(), _known_tokens():
        results = _evaluate(prepared.library, model, tokenizer, prepared.loaded, prepared.limit, batch_size)
    return {name: _figures(results, name) for name in results["results"]}


def read_questions(path: Path) -> list[Question]:
    """The questions of a `.jsonl` file in either schema; InputError names the line that is wrong."""
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"task file {path} cannot be read as UTF-8 text ({error}).") from None
    questions = [_question(f"{path}, line {n}", line) for n, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise InputError(f"task file {path} holds no question; expected one JSON object per line.")
    return questions


def _question(where: str, line: str) -> Question:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise InputError(f"{where} is not valid JSON; each line should be one object.") from None
    if isinstance(row, dict) and {"query", "choices", "gold"} <= row.keys():
        question, choices, gold = _plain_prompt(str(row["query"])), row["choices"], row["gold"]
    elif isinstance(row, dict) and {"ctx", "endings", "label"} <= row.keys():
        question, choices, gold = _hellaswag_prompt(row), row["endings"], row["label"]
        choices = [_without_markup(str(each)) for each in choices] if isinstance(choices, list) else choices
    else:
        raise InputError(f"{where} has neither query, choices, gold nor ctx, endings, label.")
    if not (isinstance(choices, list) and len(choices) > 1 and all(isinstance(c, str) for c in choices)):
        raise InputError(f"{where}: the choices should be a list of at least two strings.")
    if not (isinstance(gold, int | str) and str(gold).isdecimal() and int(gold) < len(choices)):
        raise InputError(f"{where}: the answer is {gold!r}; expected an index from 0 to {len(choices) - 1}.")
    return Question(question, tuple(choices), int(gold))


def _plain_prompt(query: str) -> str:
    """lm-eval's prompt of piqa and arc_easy; some copies of PIQA carry a part of it in the query already."""
    return f"Question: {query.strip().removeprefix('Question: ')}\nAnswer:"


def _hellaswag_prompt(row: Json) -> str:
    """lm-eval's prompt of hellaswag: activity, context, and the begun sentence with a capital letter."""
    parts = (row.get("ctx_a"), row.get("ctx_b"))
    context = f"{parts[0]} {str(parts[1]).capitalize()}" if None not in parts else str(row["ctx"])
    label = row.get("activity_label")
    return _without_markup(context if label is None else f"{label}: {context}")


def _without_markup(text: str) -> str:
    """Drop the marks left over from WikiHow: "[title]" becomes a full stop, other brackets vanish."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _files(names: Sequence[str], tasks_dir: Path) -> dict[str, Path]:
    known = {path.stem: path for path in sorted(Path(tasks_dir).glob("*.jsonl"))}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(
            f"unknown task {', '.join(unknown)}; {tasks_dir} holds {', '.join(known) or 'no .jsonl file'}."
        )
    return {name: known[name] for name in names}


def _own_tasks(library: SimpleNamespace, names: Sequence[str]) -> Any:
    manager = library.TaskManager()
    unknown = sorted(set(names) - set(manager.all_tasks))
    if unknown:
        raise InputError(
            f"lm-eval has no task {', '.join(unknown)}; 'lm-eval ls tasks' lists its tasks, or give "
            f"--tasks-dir with <task>.jsonl files."
        )
    return manager


def _import_lm_eval() -> SimpleNamespace:
    """The few names of lm-eval that are used; importing it takes seconds, hence not at the top."""
    try:
        from datasets import Dataset
        from lm_eval import evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise InputError(
            f"tasks need lm-eval, datasets and accelerate ({error}); install anybit[eval]."
        ) from None
    return SimpleNamespace(Dataset=Dataset, HFLM=HFLM, TaskManager=TaskManager, evaluate=evaluate)


def _spec(library: SimpleNamespace, name: str, questions: Sequence[Question]) -> Json:
    """lm-eval's description of a task whose questions are in memory: no files, no cache, no network."""
    rows = [asdict(question) | {"choices": list(question.choices)} for question in questions]

    def custom_dataset(**_: Any) -> Json:
        return {"validation": library.Dataset.from_list(rows)}

    return {
        "task": name,
        "custom_dataset": custom_dataset,
        "output_type": "multiple_choice",
        "validation_split": "validation",
        "doc_to_text": "{{query}}",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in METRICS],
    }


def _load(manager: Any, specs: Sequence[Any], names: Sequence[str]) -> Json:
    """lm-eval's task objects with their data, set to no examples in the prompt."""
    try:
        loaded = manager.load(list(specs))
    except OSError as error:
        raise InputError(
            f"lm-eval could not get the data of {', '.join(names)} ({str(error)[:200]}); check the network, "
            f"or give --tasks-dir with <task>.jsonl files."
        ) from error
    for task in loaded["tasks"].values():
        task.set_config(key="num_fewshot", value=0)
    return loaded


def _evaluate(
    library: SimpleNamespace,
    model: Any,
    tokenizer: Any,
    loaded: Json,
    limit: int | None,
    batch_size: int,
) -> Json:
    training = model.training
    questions = [len(task.eval_docs) for task in loaded["tasks"].values()]
    one = min([limit or 2, *questions]) == 1  # one question has no standard error: lm-eval divides by n - 1
    try:
        # lm-eval gives the tokenizer a padding token: work on a copy
        lm = library.HFLM(pretrained=model, tokenizer=copy.deepcopy(tokenizer), batch_size=batch_size)
        # not `simple_evaluate`: that seeds the process's generators and runs git and pip for a description
        return library.evaluate(
            lm=lm,
            task_dict=loaded,
            limit=limit,
            log_samples=False,
            bootstrap_iters=0 if one else 100_000,
        )
    finally:
        model.train(training)


def _figures(results: Json, name: str) -> Json:
    """lm-eval's "acc,none" as "acc", numbers only, and the number of questions."""
    figures: Json = {}
    for key, value in results["results"][name].items():
        if isinstance(value, int | float) and "," in key:
            figures[key.removesuffix(",none")] = value if math.isfinite(value) else None
    samples = results.get("n-samples", {}).get(name)
    return figures if samples is None else figures | {"n": samples["effective"]}


@contextmanager
def _known_tokens() -> Iterator[None]:
    """Say what a token means that the model's embedding does not have."""
    try:
        yield
    except IndexError as error:
        raise InputError(
            f"the questions have tokens beyond the model's vocabulary ({error}): use the tokenizer that belongs to it"
        ) from error


@contextmanager
def _environment_kept() -> Iterator[None]:
    """Undo what lm-eval sets in the environment when it is imported (HF_*), and keep its advice to itself.

    Its warnings are about options of its own command line; its errors still show.
    """
    before = dict(os.environ)
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        for key in os.environ.keys() - before.keys():
            del os.environ[key]
        os.environ.update(before)
