"""One artifact of `anybit compare`, quantized in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from anybit.compare.cells import as_options
from anybit.config import Json
from anybit.cost import Cost
from anybit.driver import quantize
from anybit.errors import InputError
from anybit.methods import options
from anybit.progress import SILENT, Terminal

START = "import sys, pathlib, anybit.compare.job; anybit.compare.job.main(pathlib.Path(sys.argv[1]))"


@dataclass(frozen=True)
class Job:
    """What a process that quantizes needs to know; plain JSON types."""

    model: str
    artifact: str
    method: str
    options: Json
    calibration: str
    statistics: str  # folder of gradients that artifacts share
    threads: int
    shows_progress: bool
    parent: int  # process that this one ends with


def run_apart(job: Job, file: Path) -> Json:
    """What `run` gives, from a process of its own; `file` carries the job there and the result back.

    Raises:
        InputError: what `run` says of its failure, or that the process was killed.
    """
    file.write_text(json.dumps(asdict(job)), encoding="utf-8")
    try:
        code = subprocess.run([sys.executable, "-c", START, str(file)], check=False).returncode
        found = json.loads(file.read_text(encoding="utf-8"))
    finally:
        file.unlink(missing_ok=True)
    if "error" in found:
        raise InputError(found["error"])
    if "seconds" not in found:
        killed = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        raise InputError(
            f"the process that quantizes was {killed}, perhaps for want of memory: see `anybit quantize --dry-run`"
        )
    return found


def run(job: Job) -> Json:
    """Quantize; returns wall and processor seconds and peak memory, what shared statistics took included.

    Processor seconds are None where those of statistics that an earlier version gathered are not known.

    Raises:
        InputError: see `driver.quantize`.
    """
    report = Terminal() if job.shows_progress else SILENT
    begun = Cost.clock()
    try:
        made = quantize(
            job.model,
            job.artifact,
            options(job.method, **as_options(job.options)),
            calibration=job.calibration,
            overwrite=True,
            statistics=Path(job.statistics),
            report=report,
        )
    finally:
        report.close()
    took = Cost.sum([Cost.since(begun), *([made.taken_over] if made.taken_over else [])])
    shared = made.statistics or Cost(0.0, 0, 0.0)
    return {
        "seconds": took.seconds,
        "processor_seconds": took.processor_seconds,
        "shared_seconds": shared.seconds,  # of them, for statistics that other cells use too
        "shared_processor_seconds": shared.processor_seconds,
        "peak_memory_bytes": max(took.peak_memory_bytes, shared.peak_memory_bytes),
    }


def main(file: Path) -> None:
    job = Job(**json.loads(file.read_text(encoding="utf-8")))
    threading.Thread(target=_end_with, args=(job.parent,), daemon=True).start()
    torch.set_num_threads(job.threads)
    try:
        found = run(job)
    except InputError as error:
        found = {"error": str(error)}
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:  # one cell's failure, whatever it is, must not cost the others
        found = {"error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}
    file.write_text(json.dumps(found), encoding="utf-8")


def _end_with(parent: int) -> None:
    """End this process when the one that started it is gone: what it makes nobody would measure."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
