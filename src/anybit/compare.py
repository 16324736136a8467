"""`anybit compare`: methods x widths on one model, under one harness, one bit accounting and one seed.

Every cell is quantized in a process of its own, so that its peak memory is its own, and measured in this one. A cell
that is done lies in `OUT/cells` and is never made again; a run that was killed goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import platform
import re
import shutil
import threading
import time
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import transformers

import anybit
from anybit import texts
from anybit.artifact import dump_json, inspect, is_artifact, partial_folder
from anybit.checkpoint import open_checkpoint
from anybit.compare_report import write_report
from anybit.convert import compute_dtype, quantize
from anybit.errors import InputError
from anybit.model import evaluate
from anybit.plan import make_plan
from anybit.progress import SILENT, Silent, Terminal
from anybit.spec import METHOD_WIDTHS, QuantizeConfig, check_method
from anybit.streaming import StreamedModel
from anybit.writer import peak_memory_bytes

CELLS, WORK = "cells", "work"
BASE = "unquantized"
OPTIONS = {f.name for f in fields(QuantizeConfig)} - {"bits", "samples", "seq_len", "seed"}
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


@dataclass(frozen=True)
class Entry:
    """A method with its options: a line of the table."""

    name: str
    options: Mapping[str, Any]  # of QuantizeConfig, `method` among them


@dataclass(frozen=True)
class Settings:
    """What all cells have in common: how they are calibrated and what they are measured on."""

    calibration: str = "builtin"
    samples: int = 128
    seq_len: int = 2048  # of calibration and of evaluation
    seed: int = 0
    text: str = "builtin-eval"
    max_tokens: int | None = None
    tasks: tuple[str, ...] = ()
    tasks_dir: Path | None = None
    limit: int | None = None


@dataclass(frozen=True)
class Cell:
    """One entry at one width."""

    entry: Entry
    bits: float
    config: QuantizeConfig

    @property
    def nested(self) -> bool:
        return self.config.nested


def parse_entry(text: str) -> Entry:
    """ "gptq", or "gptq: clip=false, group_size=64, name='GPTQ, plain'": a method and options of `QuantizeConfig`.

    The options are TOML, as in an inline table; `name` is what the report calls the entry.

    Raises:
        InputError: no such method, or what TOML cannot read.
    """
    method, _, given = (part.strip() for part in text.partition(":"))
    check_method(method)
    try:
        options = tomllib.loads(f"options = {{{given}}}")["options"]
    except tomllib.TOMLDecodeError as error:
        raise InputError(
            f"method {text!r}: expected METHOD or METHOD: OPTION=VALUE, ..., such as "
            f"gptq: clip=false, group_size=64, scaling='awq' ({error})"
        ) from error
    name = str(options.pop("name", f"{method} ({given})" if given else method))
    lists = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    return Entry(name, {"method": method, **lists})


def compare(
    model: str | Path,
    out: Path,
    entries: Sequence[Entry],
    bits: Sequence[float],
    settings: Settings | None = None,
    *,
    keep: bool = False,
    report: Silent = SILENT,
) -> dict[str, Any]:
    """Quantize and measure a model by several methods at several widths, and write `OUT/report.html`.

    Args:
        model: HF directory, hub id or `.gguf` file.
        out: folder of `cells/*.json` (one file per cell), `results.json`, `report.html` and its plots.
        entries: methods with their options; `parse_entry` makes them.
        bits: widths; a method is left out at those that it does not have.
        settings: calibration and evaluation.
        keep: keep the artifacts, in `OUT/work`.
        report: where progress goes.

    Returns:
        JSON-able: `model`, `settings`, `machine`, `cells` (in order, the unquantized model first) and `left_out`
        (what has no figures, and why).

    Raises:
        InputError: options, texts or tasks that cannot work, before any work.
    """
    settings = settings or Settings()
    checkpoint = open_checkpoint(model)
    cells, left_out = plan_cells(checkpoint, entries, bits, settings)
    if is_artifact(out):
        raise InputError(f"{out} is an artifact: name another folder with -o")
    for folder in (out / CELLS, out / WORK):
        folder.mkdir(parents=True, exist_ok=True)
    common = _common(checkpoint, settings, report)
    runner = _Runner(str(model), out, settings, common, report)
    rows, pace = [runner.base()], _Pace(sum(not runner.file(cell).exists() for cell in cells))
    for i, cell in enumerate(cells):
        if not runner.file(cell).exists():
            report.say(f"{pace.next()}: {cell.entry.name}, {cell.bits:g} bits")
        try:
            rows.append(runner.cell(cell))
        except InputError as error:
            report.say(f"{cell.entry.name} at {cell.bits:g} bits failed: {error}")
            left_out.append(_missing(cell.entry, cell.bits, str(error), failed=True))
        report.close()  # the next cell's process has the terminal for itself
        last = i + 1 == len(cells) or runner.artifact(cells[i + 1]) != runner.artifact(cell)
        if last and not keep:
            runner.remove(cell)
    if not keep and not any(row["failed"] for row in left_out):
        shutil.rmtree(out / WORK)
    results = {
        "model": Path(model).name,
        "settings": _shown(settings),
        "machine": machine(),
        "cells": rows,
        "left_out": left_out,
    }
    short = [{key: v for key, v in row.items() if key not in ("layers", "window_nll")} for row in rows]
    (out / "results.json").write_text(dump_json({**results, "cells": short}), encoding="utf-8")
    write_report(out, results)
    return results


def plan_cells(
    checkpoint: Any, entries: Sequence[Entry], bits: Sequence[float], settings: Settings
) -> tuple[list[Cell], list[dict[str, Any]]]:
    """The cells there will be, each checked against the model, and those that a method does not have.

    Raises:
        InputError: options that do not exist or that this model cannot take; entries of the same name.
    """
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        raise InputError(f"methods {names}: two have the same name; give one another with name='...'")
    if not entries or not bits:
        raise InputError("nothing to compare: name methods (-m) and widths (--bits)")
    streamed = StreamedModel(checkpoint, compute_dtype())
    cells: list[Cell] = []
    left_out: list[dict[str, Any]] = []
    for entry in entries:
        unknown = entry.options.keys() - OPTIONS
        if unknown:
            expected = ", ".join(sorted(OPTIONS - {"method"}))
            raise InputError(
                f"{entry.name}: {sorted(unknown)[0]!r} is no option of a method; there are {expected}"
            )
        for width in bits:
            config = _config(entry, width, settings)
            if config is None:
                reason = f"{entry.options['method']} has {METHOD_WIDTHS[entry.options['method']]} bits"
                left_out.append(_missing(entry, width, reason, failed=False))
            else:
                make_plan(streamed, config)
                cells.append(Cell(entry, width, config))
    if not cells:
        raise InputError(f"no method has any of the widths {', '.join(f'{b:g}' for b in bits)}")
    return cells, left_out


def _missing(entry: Entry, bits: float, reason: str, failed: bool) -> dict[str, Any]:
    return {"name": entry.name, "bits": bits, "reason": reason, "failed": failed}


def _config(entry: Entry, bits: float, settings: Settings) -> QuantizeConfig | None:
    """The configuration of a cell; None where the method does not have this width."""
    method = entry.options["method"]
    shared = {"samples": settings.samples, "seq_len": settings.seq_len, "seed": settings.seed}
    options = {**entry.options, **shared}
    if method == "any-precision":
        config = QuantizeConfig(**options)
        return config if bits in config.widths else None
    return QuantizeConfig(**options, bits=bits) if bits in METHOD_WIDTHS[method] else None


class _Pace:
    """Counts the cells that are made, and foresees how long the rest takes."""

    def __init__(self, cells: int) -> None:
        self.cells, self.begun, self.started = cells, 0, time.monotonic()

    def next(self) -> str:
        """ "cell 3 of 18, ETA 42 min"."""
        elapsed, done = time.monotonic() - self.started, self.begun
        self.begun += 1
        left = f", ETA {elapsed / done * (self.cells - done) / 60:.0f} min" if done else ""
        return f"cell {self.begun} of {self.cells}{left}"


@dataclass(frozen=True)
class _Runner:
    """Makes cells, or finds them made."""

    model: str
    out: Path
    settings: Settings
    common: Mapping[str, Any]  # what every figure depends on, hashes of model and texts among them
    report: Silent

    def base(self) -> dict[str, Any]:
        """The unquantized model's cell."""
        file = self._file(BASE, 16, {})
        return _read(file) or self._keep(file, {"name": BASE, "bits": 16.0, **self._measure(self.model)})

    def cell(self, cell: Cell) -> dict[str, Any]:
        """A cell, from its file or made now."""
        file = self.file(cell)
        if found := _read(file):
            return found
        artifact = self.artifact(cell)
        made = self._made(cell, artifact)
        width = int(cell.bits) if cell.nested else None
        figures = self._measure(str(artifact), width)
        stored = inspect(artifact, width)
        keys = ("bits_per_weight", "file_bits_per_weight", "size_bytes")
        layers = [
            {key: layer[key] for key in ("name", "bits", "bits_per_weight")} for layer in stored["layers"]
        ]
        head = {
            "name": cell.entry.name,
            "bits": float(cell.bits),
            "act_bits": cell.config.act_bits,
            "options": dict(cell.entry.options),
        }
        sizes = {key: stored[key] for key in keys}
        return self._keep(
            file, {**head, **sizes, **made, **figures, "code_bits": stored["bits"], "layers": layers}
        )

    def file(self, cell: Cell) -> Path:
        return self._file(cell.entry.name, cell.bits, cell.config.as_dict())

    def artifact(self, cell: Cell) -> Path:
        """Where a cell's artifact lies while it is measured; widths of a nested one share it."""
        name = _slug(cell.entry.name) + ("" if cell.nested else f"-{cell.bits:g}")
        return self.out / WORK / f"{name}-{self._key(cell.config.as_dict())}"

    def remove(self, cell: Cell) -> None:
        artifact = self.artifact(cell)
        for folder in (artifact, partial_folder(artifact)):
            shutil.rmtree(folder, ignore_errors=True)
        _beside(artifact).unlink(missing_ok=True)

    def _made(self, cell: Cell, artifact: Path) -> dict[str, Any]:
        """What quantizing took; the artifact is there afterwards."""
        beside = _beside(artifact)
        found = _read(beside) if artifact.exists() else None
        if found:
            return found
        resumed = partial_folder(artifact).exists()
        job = _Job(
            self.model, artifact, cell.config, self.settings.calibration, self.out / WORK / "statistics",
            torch.get_num_threads(), isinstance(self.report, Terminal),
        )  # fmt: skip
        made = _in_own_process(job) | {"resumed": resumed}
        beside.write_text(dump_json(made), encoding="utf-8")
        return made

    def _measure(self, model: str, bits: int | None = None) -> dict[str, Any]:
        begun = time.perf_counter()
        s = self.settings
        figures = evaluate(
            model,
            text=s.text,
            seq_len=s.seq_len,
            max_tokens=s.max_tokens,
            base=None if model == self.model else self.model,
            tasks=s.tasks,
            tasks_dir=s.tasks_dir,
            limit=s.limit,
            bits=bits,
            report=self.report,
        )
        kept = {key: figures[key] for key in FIGURES if key in figures}
        return kept | {"tasks": figures.get("tasks", {}), "evaluation_seconds": time.perf_counter() - begun}

    def _key(self, config: Mapping[str, Any]) -> str:
        """`config`'s fields at their defaults do not count, so that a new field makes no cell anew."""
        default = {f.name: f.default for f in fields(QuantizeConfig)}
        given = {name: value for name, value in config.items() if value != default[name]}
        parts = {"common": self.common, "config": given}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:10]

    def _file(self, name: str, bits: float, config: Mapping[str, Any]) -> Path:
        return self.out / CELLS / f"{_slug(name)}-{bits:g}-{self._key(config)}.json"

    def _keep(self, file: Path, cell: dict[str, Any]) -> dict[str, Any]:
        """Write a cell's file whole or not at all."""
        cell = {**cell, "machine": machine()}
        unfinished = file.with_suffix(".new")
        unfinished.write_text(json.dumps(cell) + "\n", encoding="utf-8")
        unfinished.rename(file)
        return json.loads(file.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class _Job:
    """What a process that quantizes needs to know."""

    model: str
    artifact: Path
    config: QuantizeConfig
    calibration: str
    statistics: Path
    threads: int
    shows_progress: bool


def _in_own_process(job: _Job) -> dict[str, Any]:
    """Seconds and peak memory of quantizing, statistics that were taken over included.

    Raises:
        InputError: what `quantize` raises, or that the process was killed.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        try:
            return pool.submit(_quantize_for, os.getpid(), job).result()
        except BrokenProcessPool as error:
            raise InputError(
                "the process that quantizes it was killed, perhaps for want of memory: see `anybit quantize --dry-run`"
            ) from error


def _quantize_for(parent: int, job: _Job) -> dict[str, Any]:
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(job.threads)
    return _quantize(job)


def _quantize(job: _Job) -> dict[str, Any]:
    report = Terminal() if job.shows_progress else SILENT
    try:
        made = quantize(
            job.model,
            job.artifact,
            job.config,
            calibration=job.calibration,
            overwrite=True,
            statistics=job.statistics,
            report=report,
        )
    finally:
        report.close()
    shared = made.statistics
    return {
        "seconds": made.seconds + (shared.seconds if shared else 0),
        "shared_seconds": shared.seconds
        if shared
        else 0.0,  # of them, for statistics that other cells use too
        "peak_memory_bytes": max(peak_memory_bytes(), shared.peak_memory_bytes if shared else 0),
    }


def _end_with(parent: int) -> None:
    """End this process when the one that started it is gone: what it makes nobody would measure."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _common(checkpoint: Any, settings: Settings, report: Silent) -> dict[str, Any]:
    """What the figures of every cell depend on.

    Raises:
        InputError: a text or a task that cannot be read.
    """
    advance = report.task("hashing the checkpoint", checkpoint.weight_bytes())
    tokenizer = checkpoint.tokenizer()
    made = texts.calibration_set(
        tokenizer, settings.calibration, settings.samples, settings.seq_len, settings.seed
    )
    shown = _shown(settings)
    if settings.tasks:
        from anybit.integrations import lm_eval

        lm_eval.prepare(settings.tasks, tasks_dir=settings.tasks_dir, limit=settings.limit)
    files = [] if settings.tasks_dir is None else [settings.tasks_dir / f"{t}.jsonl" for t in settings.tasks]
    return {
        "anybit": anybit.__version__,
        "libraries": [torch.__version__, transformers.__version__],
        "model": checkpoint.sha256(advance),
        "settings": {key: value for key, value in shown.items() if key not in ("calibration", "text")},
        "calibration": made.sha256,
        "text": hashlib.sha256(texts.read_text(settings.text).encode()).hexdigest(),
        "questions": [hashlib.sha256(file.read_bytes()).hexdigest() for file in files],
    }


def _shown(settings: Settings) -> dict[str, Any]:
    """The settings as JSON; of files only their names."""
    named = replace(
        settings, calibration=_file_name(settings.calibration), text=_file_name(settings.text), tasks_dir=None
    )
    return {key: value for key, value in asdict(named).items() if key != "tasks_dir"}


def _file_name(source: str) -> str:
    return Path(source).name if os.path.isfile(os.path.expanduser(source)) else source


def machine() -> dict[str, Any]:
    """Where figures come from."""
    return {
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "anybit": anybit.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def _beside(artifact: Path) -> Path:
    return artifact.with_name(artifact.name + ".json")


def _read(file: Path) -> dict[str, Any] | None:
    """A JSON object that was written before; None where there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
