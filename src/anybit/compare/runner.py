"""Methods x widths on one model, under one harness, one bit accounting and one seed.

Every cell is quantized in a process of its own, so that its peak memory is its own, and measured in this one. A cell
that is done lies in `OUT/cells` and is never made again; a run that was killed goes on where it was. The results hold
all cells there that were made of the same model and text and measured in the same way, whichever run made them.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

import anybit
from anybit.artifact.files import dump_json, partial_folder
from anybit.artifact.sizes import inspect
from anybit.calibration import texts
from anybit.checkpoint.directory import Checkpoint, open_checkpoint
from anybit.checkpoint.files import write_whole
from anybit.compare import job
from anybit.compare.base import quantized_before
from anybit.compare.cells import (
    BASE,
    Cell,
    Entry,
    Settings,
    cell_of,
    default_name,
    entry_of,
    left_out_row,
    plan_cells,
    with_window,
)
from anybit.compare.eta import Eta
from anybit.compare.machine import machine, source
from anybit.compare.report import write_report
from anybit.compare.workspace import Workspace, by_key, read_json, record_of
from anybit.config import SEQ_LEN, Json, Options
from anybit.errors import InputError, require_extra
from anybit.evaluation.measure import evaluate
from anybit.methods import METHODS, changed
from anybit.progress import SILENT, Silent, Terminal, no_other_bars

CELLS, WORK, LOCK = "cells", "work", "compare.lock"
FIGURES = (
    "perplexity",
    "tokens",
    "window_nll",
    "kld_mean",
    "kld_median",
    "kld_p99",
    "top1_agreement",
    "kv_bits",
)


def compare(
    model: str | Path,
    out: Path,
    entries: Sequence[Entry],
    bits: Sequence[float],
    settings: Settings | None = None,
    *,
    keep: bool = False,
    report: Silent = SILENT,
) -> Json:
    """Quantize and measure a model by several methods at several widths, and write `OUT/report.html`.

    Args:
        model: HF directory, hub id or `.gguf` file of a causal language model.
        out: folder of `cells/*.json` (one file per cell), `results.json`, `report.html` and its plots.
        entries: methods with their options; `parse_entry` makes them.
        bits: widths of entries that have none of their own; a method is left out at those that it does not have.
        settings: calibration and evaluation.
        keep: keep artifacts and statistics in `OUT/work`, for other texts and for more cells.
        report: where progress goes.

    Returns:
        JSON-able: `model`, `quantized_before` (how the model itself had been, or None), `settings`, `machine`, `cells`
        (the unquantized model, then entries in order, then those of earlier runs that compare) and `left_out` (what
        has no figures, and why).

    Raises:
        InputError: options, texts or tasks that cannot work; a folder that is not `compare`'s; no matplotlib.
    """
    require_extra("plots", "the report of `anybit compare`")
    checkpoint = open_checkpoint(model)
    settings = with_window(checkpoint, settings or Settings())
    cells, left_out = plan_cells(checkpoint, entries, bits, settings)
    inputs = _inputs(checkpoint, settings, report)
    with _locked(out):
        work = Workspace(out / WORK)
        work.open()
        runner = _Runner(str(model), out, work, settings, inputs, source(), report)
        (base, *rows), failed = _run(runner, cells, keep)
        rows = _in_order(entries, rows, runner.others(rows))
        rows.insert(0, base)
        results = {
            "model": Path(model).name,
            "quantized_before": quantized_before(checkpoint),
            "settings": _shown(settings),
            "machine": machine(),
            "cells": rows,
            "left_out": left_out + failed,
        }
        short = [{k: v for k, v in row.items() if k not in ("layers", "window_nll")} for row in rows]
        (out / "results.json").write_text(dump_json({**results, "cells": short}), encoding="utf-8")
        write_report(out, results)
    return results


def _run(runner: _Runner, cells: Sequence[Cell], keep: bool) -> tuple[list[Json], list[Json]]:
    """The rows of all cells, the unquantized model's first, and what failed."""
    missing = [cell for cell in cells if not runner.file(cell).exists()]
    rows, eta = [runner.base()], Eta(missing)
    failed: dict[Path, str] = {}  # artifact -> reason
    for i, cell in enumerate(cells):
        artifact = runner.artifact(cell)
        if cell in missing:
            runner.report.say(f"{eta.begin()}: {cell.entry.name}, {cell.bits:g} bits")
        try:
            if artifact in failed:
                raise InputError(failed[artifact])
            rows.append(runner.cell(cell))
            if cell in missing:
                eta.end()
        except InputError as error:
            failed[artifact] = str(error)
            runner.report.say(f"{cell.entry.name} at {cell.bits:g} bits failed: {error}")
        runner.report.close()  # the next cell's process has the terminal for itself
        last = i + 1 == len(cells) or runner.artifact(cells[i + 1]) != artifact
        if keep:
            runner.work.keep_all()
        elif last and cell in missing and artifact not in failed:
            runner.work.remove(artifact)
    if not keep and not failed:
        runner.work.remove_statistics()
    wrong = [cell for cell in cells if runner.artifact(cell) in failed and not runner.file(cell).exists()]
    return rows, [left_out_row(c.entry, c.bits, failed[runner.artifact(c)], failed=True) for c in wrong]


def _in_order(entries: Sequence[Entry], rows: Sequence[Json], others: Sequence[Json]) -> list[Json]:
    """Rows by entry and width, this run's entries first; those of earlier runs go by the names of this one's."""
    names = {entry.identity: entry.name for entry in reversed(entries)}
    order = [entry.name for entry in entries]
    renamed = []
    for row in sorted(others, key=lambda row: (list(METHODS).index(row["method"]), row["name"])):
        entry = entry_of(row)
        taken = entry.name in order and entry.identity not in names
        name = names.setdefault(
            entry.identity, default_name(row["method"], row["options"]) if taken else entry.name
        )
        order.append(name)
        renamed.append({**row, "name": name})
    return sorted([*rows, *renamed], key=lambda row: (order.index(row["name"]), row["bits"]))


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """OUT as a folder of this command, which no other run writes to.

    Raises:
        InputError: a file, a folder with something else in it, or another run.
    """
    if out.exists() and not (out.is_dir() and ((out / LOCK).exists() or not any(out.iterdir()))):
        raise InputError(
            f"{out} holds something else: name a new or empty folder with -o, or one of `compare`"
        )
    (out / CELLS).mkdir(parents=True, exist_ok=True)
    with (out / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(
                f"another `anybit compare` writes to {out}: wait for it, or choose another -o"
            ) from error
        yield


@dataclass(frozen=True)
class _Inputs:
    """What the cells' figures depend on besides their options; JSON types, hashes of model and texts among them."""

    model: list[Any]  # and the software
    calibration: str
    measured: Json  # on what, and how

    @property
    def of_base(self) -> list[Any]:
        return [self.model, self.measured]

    @property
    def of_artifact(self) -> list[Any]:
        return [self.model, self.calibration]

    @property
    def of_cell(self) -> list[Any]:
        return [*self.of_artifact, self.measured]


@dataclass(frozen=True)
class _Runner:
    """Makes cells, or finds them made."""

    model: str
    out: Path
    work: Workspace
    settings: Settings
    inputs: _Inputs
    source: str  # state of the code
    report: Silent

    def base(self) -> Json:
        """The unquantized model's cell."""
        file = self._file(BASE, 16, _key(self.inputs.of_base))
        return read_json(file) or self._keep(file, {"name": BASE, "bits": 16.0, **self._measure(self.model)})

    def cell(self, cell: Cell) -> Json:
        """A cell, from its file or made now."""
        file = self.file(cell)
        if found := read_json(file):
            return {**found, "name": cell.entry.name, "options": json.loads(cell.entry.identity[1])}
        artifact = self.artifact(cell)
        made = self._made(cell, artifact)
        width = cell.bits if cell.options.several else None
        figures = self._measure(str(artifact), width)
        stored = inspect(artifact, bits=width)
        head = {
            "name": cell.entry.name,
            "bits": cell.bits,
            "act_bits": getattr(cell.options, "act_bits", 16),
            "method": cell.entry.method,
            "options": dict(cell.entry.options),
        }
        sizes = {key: stored[key] for key in ("bits_per_weight", "file_bits_per_weight", "size_bytes")}
        layers = [
            {key: layer[key] for key in ("name", "bits", "bits_per_weight")} for layer in stored["layers"]
        ]
        return self._keep(
            file, {**head, **sizes, **made, **figures, "code_bits": stored["bits"], "layers": layers}
        )

    def others(self, rows: Sequence[Json]) -> list[Json]:
        """Cells of earlier runs, not among `rows`, whose figures compare with theirs: the inputs are the same."""
        seen = {self.file(cell_of(row, self.settings)) for row in rows}
        found = []
        for file in sorted((self.out / CELLS).glob("*.json")):
            row = read_json(file) or {}
            try:
                same = self.file(cell_of(row, self.settings)) == file
            except (InputError, KeyError, TypeError):  # no cell of an entry, or options of another version
                continue
            if same and file not in seen:
                found.append(row)
        return found

    def file(self, cell: Cell) -> Path:
        return self._file(cell.entry.name, cell.bits, _key(self.inputs.of_cell, cell.options))

    def artifact(self, cell: Cell) -> Path:
        """Where a cell's artifact lies while it is measured; widths of a nested one share it."""
        name = cell.entry.name + ("" if cell.options.several else f" {cell.bits:g}")
        key = _key(self.inputs.of_artifact, cell.options)
        return by_key(self.work.folder, name, f"-{key}")

    def _made(self, cell: Cell, artifact: Path) -> Json:
        """What quantizing took; the artifact is there afterwards."""
        found = read_json(record_of(artifact)) if artifact.exists() else None
        if found:
            return found
        asked = job.Job(
            model=self.model,
            artifact=str(artifact),
            method=cell.entry.method,
            options=dict(cell.arguments),
            calibration=self.settings.calibration,
            statistics=str(self.work.statistics),
            threads=torch.get_num_threads(),
            shows_progress=isinstance(self.report, Terminal),
            parent=os.getpid(),
        )
        resumed = partial_folder(artifact).exists()
        made = job.run_apart(asked, artifact.with_name(artifact.name + ".job"))
        made["resumed"] = resumed
        record_of(artifact).write_text(dump_json(made), encoding="utf-8")
        return made

    def _measure(self, model: str, bits: float | None = None) -> Json:
        begun = time.perf_counter()
        s = self.settings
        with no_other_bars():
            figures = evaluate(
                model,
                text=s.text,
                seq_len=s.seq_len,
                max_tokens=s.max_tokens,
                base=None if model == self.model else self.model,
                base_cache=self.work.statistics / f"base-{_key(self.inputs.of_base)}",
                tasks=s.tasks,
                tasks_dir=s.tasks_dir,
                limit=s.limit,
                bits=bits,
                engine="transformers",  # all cells in the same arithmetic, whatever runs natively
                report=self.report,
            )
        kept = {"text": _file_name(s.text)} | {key: figures[key] for key in FIGURES if key in figures}
        return kept | {"tasks": figures.get("tasks", {}), "evaluation_seconds": time.perf_counter() - begun}

    def _file(self, name: str, bits: float, key: str) -> Path:
        return by_key(self.out / CELLS, name, f"-{bits:g}-{key}.json")

    def _keep(self, file: Path, cell: Json) -> Json:
        """Write a cell's file whole or not at all."""
        cell = {**cell, "machine": machine(), "source": self.source}
        write_whole(file, lambda unfinished: unfinished.write_text(json.dumps(cell) + "\n", encoding="utf-8"))
        return json.loads(file.read_text(encoding="utf-8"))


def _inputs(checkpoint: Checkpoint, settings: Settings, report: Silent) -> _Inputs:
    """What is given to every cell.

    Raises:
        InputError: a text or a task that cannot be read, or a task whose score is no accuracy.
    """
    tokenizer = checkpoint.tokenizer()
    calibration = texts.calibration_set(
        tokenizer, settings.calibration, settings.samples, settings.seq_len or SEQ_LEN, settings.seed
    )
    tokens = texts.token_ids(tokenizer, texts.read_text(settings.text))
    weights = checkpoint.sha256(report.task("hashing the checkpoint", checkpoint.weight_bytes()))
    measured = {key: getattr(settings, key) for key in ("seq_len", "max_tokens", "tasks", "limit")}
    return _Inputs(
        model=[weights, anybit.__version__, torch.__version__, transformers.__version__],
        calibration=_sha256(calibration.tokens),
        measured={
            **measured,
            "text": [_sha256(tokens), texts.default_bos(tokenizer)],
            "questions": _check_tasks(settings) if settings.tasks else [],
        },
    )


def _sha256(tokens: torch.Tensor) -> str:
    return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()


def _key(inputs: list[Any], options: Options | None = None) -> str:
    """Options at their defaults do not count, so that a new one makes no cell anew."""
    given = {} if options is None else {"method": options.name, "bits": options.bits, **changed(options)}
    return hashlib.sha256(json.dumps([inputs, given], sort_keys=True).encode()).hexdigest()[:10]


def _check_tasks(settings: Settings) -> list[str]:
    """What the scores of tasks depend on; see `lm_eval.prepare` for what is refused."""
    from anybit.evaluation import tasks as lm_eval

    lm_eval.prepare(settings.tasks, tasks_dir=settings.tasks_dir, limit=settings.limit)
    files = [] if settings.tasks_dir is None else [settings.tasks_dir / f"{t}.jsonl" for t in settings.tasks]
    hashes = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    return [importlib.metadata.version("lm_eval"), *hashes]


def _shown(settings: Settings) -> Json:
    """The settings as JSON; of files and folders only their names."""
    named = replace(settings, calibration=_file_name(settings.calibration), text=_file_name(settings.text))
    folder = settings.tasks_dir
    return {**asdict(named), "tasks_dir": None if folder is None else folder.resolve().name}


def _file_name(source: str) -> str:
    return Path(source).name if os.path.isfile(os.path.expanduser(source)) else source
