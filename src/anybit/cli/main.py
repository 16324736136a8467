"""The `anybit` command: a skin over the Python API. Heavy imports happen inside the commands."""

from __future__ import annotations

import errno
import json
import os
import sys
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Annotated, Any

import typer

import anybit
from anybit.cli import tables
from anybit.config import (
    DESCRIPTIONS,
    MAX_SEED,
    USED_BY,
    QuantizeConfig,
    bits_eq10,
    check_method,
    parse_bytes,
    read_spec_map,
)
from anybit.errors import InputError

DEFAULTS = QuantizeConfig()
COMPARED = [
    "anybit",
    "rtn",
    "gptq",
    "two-four-sixteen",
    "atom: bits=4",
    "mixllm: bits=[4.4, 5]",
    "any-precision",
    "cmpq",
]
GROUP_SIZE = 128  # that `plan` takes
LEAST_16, LEAST_8 = (
    ceil(100 * bits_eq10(0, size)) / 100 for size in (16, 8)
)  # of two-four-sixteen, by group size
THREADS_PER_PROCESSOR = 4  # more than this only costs memory, and far more ends the process

app = typer.Typer(
    name="anybit",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="""Compress large language models to any average bit-width and run them fast.

    A first run:

        anybit quantize MODEL -o out

        anybit eval out --bits 3.5 --text my.txt --base MODEL

        anybit generate out --bits 3.5 -p "The capital of France is"

    MODEL is an HF directory, a hub id, a .gguf file, or an artifact that anybit made.
    """,
)

# Click's base class of usage errors, which typer may or may not bring along under its own name.
_USAGE_ERROR: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="HF directory, hub id, .gguf file or anybit artifact.")
]
Source = Annotated[str, typer.Argument(metavar="MODEL", help="HF directory, hub id or .gguf file.")]
Artifact = Annotated[Path, typer.Argument(metavar="OUT", help="A directory that `anybit quantize` made.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads. Default: PyTorch's.", min=1)]
Seed = Annotated[int, typer.Option(help="For temperatures above 0.", min=0, max=MAX_SEED)]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="What the model computes in: float32, bfloat16 or float16.")]
Width = Annotated[
    float | None,
    typer.Option(
        "--bits",
        help="Width at which an artifact of several is read: any average of the method anybit, or one of any-precision.",
    ),
]
StoredBits = Annotated[
    float | None, typer.Option("--bpw", help="The same by most stored bits per weight (method anybit).")
]
Size = Annotated[
    str | None, typer.Option("--size", help="The same by most bytes, e.g. 120MB (method anybit).")
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact/--fast", help="Codebooks by row: as stored, or with inputs and centroids rounded to 8 bits."
    ),
]
KVBits = Annotated[
    int | None,
    typer.Option(help="KV-cache: 16, 8, 4, 3 or 2 bits. [default: what the artifact asks for, else 16]"),
]
EvalTokens = Annotated[
    int | None, typer.Option("--max-tokens", help="Use only this many tokens of the text.", min=1)
]
Tasks = Annotated[
    str | None, typer.Option("--tasks", help="Zero-shot tasks, e.g. piqa,arc_easy (needs anybit[eval]).")
]
TasksDir = Annotated[
    Path | None, typer.Option("--tasks-dir", help="Folder of the tasks' JSON files: no network needed.")
]
Limit = Annotated[int | None, typer.Option("--limit", help="Questions per task.", min=1)]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"anybit {anybit.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of all commands."""


@app.command()
def quantize(  # noqa: PLR0913 - the command's options are the documentation
    model: Source,
    out: Annotated[Path, typer.Option("-o", "--out", help="Directory to make.")],
    method: Annotated[
        str,
        typer.Option(help="; ".join(f"{name} ({what})" for name, what in DESCRIPTIONS.items()) + "."),
    ] = DEFAULTS.method,
    bits: Annotated[
        float | None,
        typer.Option(
            help="Average code width, 2 to 8; for anybit (the largest that the artifact has), cmpq, mixllm (4 to 8), llm-mq "
            f"(2 to 4) and two-four-sixteen ({LEAST_16:.2f} to 4; {LEAST_8:.2f} to 4 at --group-size 8) also fractions. [default: 4; anybit, "
            "smoothquant: 8; mixllm: see --wide-rows; two-four-sixteen: see --wide-groups]"
        ),
    ] = None,
    bpw: Annotated[
        float | None, typer.Option(help="Most stored bits per weight of the linear layers.")
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="Most bytes of all files but the tokenizer, e.g. 120MB.")
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            help=f"Input channels that share a scale; -1: the whole row. [default: {DEFAULTS.group_size}; smoothquant: "
            "-1; two-four-sixteen: 16, or 8]"
        ),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric",
            help="Without or with zero points. [default: asymmetric but for atom, smoothquant]",
        ),
    ] = None,
    act_bits: Annotated[
        int | None,
        typer.Option(
            help="Round a layer's inputs to so many bits, token by token: 2 to 8, or 16 for not at all. "
            "[default: 8 for mixllm and smoothquant, --bits for atom, else 16]"
        ),
    ] = None,
    act_clip: Annotated[
        float | None,
        typer.Option(
            help="Share of the largest input that the grid reaches. [default: 1; atom below 8 bits: 0.9]"
        ),
    ] = None,
    act_search: Annotated[
        bool | None,
        typer.Option(
            "--act-search/--no-act-search",
            help="Search that share per group. [default: no-act-search]",
        ),
    ] = None,
    act_static: Annotated[
        bool | None,
        typer.Option("--act-static", help="Scales of inputs from calibration instead of each token."),
    ] = None,
    kv_bits: Annotated[
        int, typer.Option(help="KV-cache when the artifact runs: 16, 8, 4, 3 or 2 bits.")
    ] = DEFAULTS.kv_bits,
    scaling: Annotated[
        str | None, typer.Option(help="Scale input channels first: awq or smoothquant. [default: none]")
    ] = None,
    wide_rows: Annotated[
        float | None,
        typer.Option(help="mixllm: share of output rows at 8 bits, instead of --bits. [default: 0.1]"),
    ] = None,
    wide_groups: Annotated[
        float | None,
        typer.Option(help="two-four-sixteen: share of groups at 4 bits, instead of --bits. [default: 0.25]"),
    ] = None,
    exclusive_outliers: Annotated[
        float | None,
        typer.Option(
            help="two-four-sixteen: share of weights kept in 16 bits, the largest at 2 bits. "
            f"[default: {DEFAULTS.exclusive_outliers}]"
        ),
    ] = None,
    finetune: Annotated[
        bool | None,
        typer.Option(
            "--finetune", help="two-four-sixteen: train each block after quantizing it. Several times slower."
        ),
    ] = None,
    finetune_epochs: Annotated[
        int | None,
        typer.Option(
            help=f"Most passes over the calibration windows per block. [default: {DEFAULTS.finetune_epochs}]"
        ),
    ] = None,
    salience: Annotated[
        str | None,
        typer.Option(
            help="What ranks rows. anybit: output (what errors at outputs cost), full or diagonal. mixllm: full (its "
            "eq. 4), diagonal or second-order. [default: output; mixllm: full]"
        ),
    ] = None,
    search: Annotated[
        str | None, typer.Option(help="mixllm: one-pass or progressive. [default: one-pass]")
    ] = None,
    outlier_channels: Annotated[
        int | None,
        typer.Option(help="atom: input channels at 8 bits. [default: 16 at 576 channels to 128 from 4096]"),
    ] = None,
    tune_for: Annotated[
        float | None,
        typer.Option(
            help="anybit: average width at which errors are compensated best, 2 to 8. "
            f"[default: {DEFAULTS.tune_for:g}]"
        ),
    ] = None,
    kept_channels: Annotated[
        float | None,
        typer.Option(
            help=f"anybit: share of input channels kept in 16 bits. [default: {DEFAULTS.kept_channels:g}]"
        ),
    ] = None,
    whole_layers: Annotated[
        bool | None,
        typer.Option(
            "--whole-layers/--rows",
            help="anybit: one width for a whole layer, the same for q, k and v and for gate and up, instead of one per "
            "output row. [default: rows]",
        ),
    ] = None,
    widths: Annotated[
        str | None,
        typer.Option(help="any-precision: the widths to store, e.g. 3,4,6. [default: 3,4,5,6,7,8]"),
    ] = None,
    codebook_bits: Annotated[
        int | None, typer.Option(help="Codebook entries: 16, 8 or 4 bits. [default: 16]")
    ] = None,
    sensitive_outliers: Annotated[
        float | None,
        typer.Option(help="squeezellm: share of weights kept in 16 bits for their sensitivity. [default: 0]"),
    ] = None,
    magnitude_outliers: Annotated[
        float | None, typer.Option(help="squeezellm: and for their size. [default: 0]")
    ] = None,
    channel_outliers: Annotated[
        float | None,
        typer.Option(
            help=f"cmpq: share of input channels kept in 16 bits. [default: {DEFAULTS.channel_outliers}]"
        ),
    ] = None,
    error_outliers: Annotated[
        float | None,
        typer.Option(
            help="cmpq: share of weights kept in 16 bits, those clustering misses most. "
            f"[default: {DEFAULTS.error_outliers}]"
        ),
    ] = None,
    compensate: Annotated[
        bool | None,
        typer.Option(
            "--compensate/--no-compensate",
            help="cmpq: make up for a channel's error in later ones. [default: compensate]",
        ),
    ] = None,
    embed_bits: Annotated[
        int | None,
        typer.Option(help="Embedding and head: 16, 8 or 4 bits. [default: 8 for anybit, else 16]"),
    ] = None,
    clip: Annotated[
        bool | None,
        typer.Option(
            "--clip/--no-clip",
            help="Search clipping ratios per group. [default: for gptq, awq, mixllm, atom]",
        ),
    ] = None,
    clip_ratio: Annotated[
        float | None, typer.Option(help="Clipping ratio where none is searched. [default: 1; atom: 0.85]")
    ] = None,
    desc_act: Annotated[
        bool | None,
        typer.Option(
            "--desc-act/--no-desc-act", help="GPTQ: store columns by energy. [default: no-desc-act]"
        ),
    ] = None,
    group_reorder: Annotated[
        bool | None,
        typer.Option(
            "--group-reorder/--no-group-reorder",
            help="gptq, mixllm, atom: important groups first. [default: group-reorder]",
        ),
    ] = None,
    damp: Annotated[
        float | None,
        typer.Option(
            help="Methods that compensate errors: share of the mean Hessian diagonal added to it. "
            f" [default: {DEFAULTS.damp}]"
        ),
    ] = None,
    attention_weights: Annotated[
        bool | None,
        typer.Option(
            "--attention-weights/--no-attention-weights",
            help="Count value tokens by received attention. [default: attention-weights]",
        ),
    ] = None,
    one_shot: Annotated[
        bool | None, typer.Option("--one-shot", help="Statistics of the unquantized model.")
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(help="builtin, a .txt or .jsonl file, or a hub dataset. [default: builtin]"),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help=f"Calibration windows. [default: {DEFAULTS.samples}]")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help=f"Tokens per calibration window. [default: {DEFAULTS.seq_len}]")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help=f"Picks the calibration windows. [default: {DEFAULTS.seed}]",
            min=0,
            max=MAX_SEED,
            show_default=False,
        ),
    ] = None,
    include: Annotated[
        list[str], typer.Option(help="Only layers that match this pattern, e.g. `'*.mlp.*'`. Repeatable.")
    ] = [],  # noqa: B006
    exclude: Annotated[
        list[str], typer.Option(help="Not layers that match this pattern, e.g. `'*.down_proj'`. Repeatable.")
    ] = [],  # noqa: B006
    spec: Annotated[
        Path | None, typer.Option(help="Widths per layer: the map that `anybit plan -o` writes.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu or cuda: where calibration, clustering and error compensation run.")
    ] = "cpu",
    threads: Threads = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Predict size, bpw, and the CPU's time and memory; write nothing."),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an artifact at OUT.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Compress MODEL into the directory OUT.

    Exactly one of --bits, --bpw and --size sets how small. Killed or interrupted, the same command resumes and ends
    in the same bytes.

    Examples:

        anybit quantize ./SmolLM2 -o out

        anybit quantize ./SmolLM2 -o out --method gptq --bits 4 --group-size 128

        anybit quantize model.gguf -o out --method rtn --size 90MB --embed-bits 8 --dry-run

        anybit quantize ./SmolLM2 -o out --include '*.mlp.*'
    """
    _set_threads(threads)
    _check_writable(json_file)
    if bpw is not None and not 0 < bpw < 100:  # nor is NaN
        raise InputError(f"--bpw {bpw:g}: expected bits per weight, such as 4.5")
    if sum(value is not None for value in (bits, bpw, size)) > 1:
        raise InputError("--bits, --bpw and --size set the same thing: give exactly one of them")
    if (wide_rows, wide_groups) != (None, None) and (bpw is not None or size is not None):
        raise InputError(
            "--wide-rows and --wide-groups set the same thing as --bpw and --size: give one of them"
        )
    check_method(method)
    of_method = _given(
        group_size=group_size,
        symmetric=symmetric,
        clip=clip,
        desc_act=desc_act,
        damp=damp,
        group_reorder=group_reorder,
        attention_weights=attention_weights,
        one_shot=one_shot,
        widths=None if widths is None else _whole_numbers("widths", widths),
        codebook_bits=codebook_bits,
        sensitive_outliers=sensitive_outliers,
        magnitude_outliers=magnitude_outliers,
        channel_outliers=channel_outliers,
        error_outliers=error_outliers,
        compensate=compensate,
        clip_ratio=clip_ratio,
        act_bits=act_bits,
        act_clip=act_clip,
        act_search=act_search,
        act_static=act_static,
        scaling=scaling,
        wide_rows=wide_rows,
        wide_groups=wide_groups,
        exclusive_outliers=exclusive_outliers,
        finetune=finetune,
        finetune_epochs=finetune_epochs,
        salience=salience,
        search=search,
        outlier_channels=outlier_channels,
        tune_for=tune_for,
        kept_channels=kept_channels,
        whole_layers=whole_layers,
    )
    unused = {
        name: value
        for name, value in of_method.items()
        if method not in USED_BY[name] and not (name == "desc_act" and value is False)
    }
    _refuse_ignored(unused, f"{method} has no use for it")
    for_calibration = _given(samples=samples, seq_len=seq_len, seed=seed)
    config = QuantizeConfig(
        method=method,
        bits=bits,
        kv_bits=kv_bits,
        include=tuple(include),
        exclude=tuple(exclude),
        **of_method,
        **for_calibration,
        **_given(embed_bits=embed_bits),
    )
    if not config.calibrated:
        unused = _given(attention_weights=attention_weights, one_shot=one_shot, calibration=calibration)
        _refuse_ignored(for_calibration | unused, f"{method} without --clip is not calibrated")
    if bpw is not None or size is not None:
        if spec is not None:
            raise InputError(
                "--spec sets the width of every layer it names: give it without --bpw and --size"
            )
        from anybit.plan import fit_budget

        config = fit_budget(_streamed(model), config, bpw, None if size is None else parse_bytes(size))
    spec_map = read_spec_map(spec, config.layer_spec()) if spec else None
    if dry_run:
        _emit(_predict(model, config, spec_map, out), json_file, tables.print_prediction)
        return
    report = _report()
    try:
        result = anybit.quantize(
            model,
            out,
            config,
            spec_map=spec_map,
            **_given(calibration=calibration),
            overwrite=overwrite,
            device=device,
            report=report,
        )
    finally:
        report.close()
    figures = asdict(result)
    _emit(figures | {"path": str(out)}, json_file, lambda f: typer.echo(
        f"{out}: {f['bits']:.2f} bits, {f['bits_per_weight']:.3f} bits per weight stored, "
        f"{f['size_bytes'] / 1e6:.1f} MB, {f['seconds']:.0f} s"
    ))  # fmt: skip


@app.command(name="eval")
def evaluate(  # noqa: PLR0913
    model: Model,
    text: Annotated[
        str | None, typer.Option(help="A .txt or .jsonl file. [default: the built-in text's other half]")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="A hub dataset, e.g. wikitext2, instead of --text.")
    ] = None,
    pairs: Annotated[
        Path | None,
        typer.Option(
            help="Encoders: .jsonl, .tsv or .csv with sentence1, sentence2 and score, for Spearman."
        ),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens per window; of an encoder, per sentence. [default: 2048, or what the model reaches]",
            min=1,
        ),
    ] = None,
    max_tokens: EvalTokens = None,
    base: Annotated[
        str | None, typer.Option(help="Full-precision model to measure the divergence from.")
    ] = None,
    tasks: Tasks = None,
    tasks_dir: TasksDir = None,
    limit: Limit = None,
    bits: Width = None,
    bpw: StoredBits = None,
    size: Size = None,
    exact: Exact = True,
    kv_bits: KVBits = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: Threads = None,
    json_file: JsonFile = None,
) -> None:
    """Measure MODEL: perplexity, divergence from a base model, zero-shot tasks; of an encoder its embeddings.

    Perplexity is taken over non-overlapping windows of the text as it is; a BOS token is put before each window if and
    only if the tokenizer does so.

    Of an encoder: the cosine between its embeddings and those of --base over the sentences of --pairs or of the
    built-in text, and Spearman's correlation of the pairs' cosines with their scores.

    Example: `anybit eval out --text my.txt --base MODEL --json figures.json`
    """
    _set_threads(threads)
    _check_writable(json_file)
    if text and dataset:
        raise InputError("--text and --dataset name the same thing: give one of them")
    report = _report()
    try:
        figures = anybit.evaluate(
            model,
            text=text or dataset,
            pairs=pairs,
            seq_len=seq_len,
            max_tokens=max_tokens,
            base=base,
            tasks=_names(tasks),
            tasks_dir=tasks_dir,
            limit=limit,
            **_size_asked(bits, bpw, size),
            exact=exact,
            kv_bits=kv_bits,
            dtype=dtype,
            device=device,
            report=report,
        )
    finally:
        report.close()
    _emit(figures, json_file, tables.print_evaluation if "perplexity" in figures else tables.print_embeddings)


@app.command()
def generate(  # noqa: PLR0913
    model: Model,
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to add.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.", min=0)] = 0.0,
    seed: Seed = 0,
    bits: Width = None,
    bpw: StoredBits = None,
    size: Size = None,
    exact: Exact = True,
    kv_bits: KVBits = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """Continue a text.

    Example: `anybit generate out -p "The capital of France is" --max-new-tokens 20`
    """
    from anybit.generate import Generator

    _set_threads(threads)
    at = _size_asked(bits, bpw, size)
    generator = Generator(model, dtype, device, _report(), **at, exact=exact, kv_bits=kv_bits)
    typer.echo(prompt, nl=False)
    generator.stream(generator.encode(prompt), max_new_tokens, temperature, seed)


@app.command()
def chat(  # noqa: PLR0913
    model: Model,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens per answer.", min=1)] = 512,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.", min=0)] = 0.0,
    seed: Seed = 0,
    bits: Width = None,
    bpw: StoredBits = None,
    size: Size = None,
    exact: Exact = True,
    kv_bits: KVBits = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """Talk with MODEL, which must have a chat template.

    An empty line, Ctrl-D or /exit ends it; /new starts over; Ctrl-C stops an answer, or ends the chat between two.
    """
    from anybit.generate import Generator, converse

    _set_threads(threads)
    at = _size_asked(bits, bpw, size)
    converse(
        Generator(model, dtype, device, _report(), **at, exact=exact, kv_bits=kv_bits),
        max_new_tokens,
        temperature,
        seed,
    )


@app.command()
def inspect(
    out: Artifact,
    bits: Width = None,
    bpw: StoredBits = None,
    size: Size = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as one JSON object.")] = False,
) -> None:
    """Show what the artifact OUT is made of, measured from its files.

    Example: `anybit inspect out --json`
    """
    from anybit.artifact.sizes import inspect as inspect_artifact

    figures = inspect_artifact(out, **_size_asked(bits, bpw, size))
    _emit(
        figures, None, (lambda f: typer.echo(json.dumps(f, indent=2))) if as_json else tables.print_inspection
    )


@app.command()
def verify(out: Artifact) -> None:
    """Check weights and config of the artifact OUT byte by byte: hashes, headers, shapes, indices, scales."""
    from anybit.artifact.verify import verify as verify_artifact

    report = _report()
    advance: Any = None

    def progress(done: int, total: int) -> None:
        nonlocal advance
        advance = advance or report.task("verifying", total)
        advance(1)

    try:
        found = verify_artifact(out, progress)
    finally:
        report.close()
    hashes = "hashes match" if found["hashes_checked"] else "no hashes stored (save_pretrained drops them)"
    typer.echo(f"{out}: {found['layers']} layers in {found['shards']} files are whole; {hashes}")


@app.command()
def plan(
    model: Model,
    memory: Annotated[str | None, typer.Option(help="What the weights may take, e.g. 6GB.")] = None,
    group_size: Annotated[int, typer.Option(help="Input channels that share a scale.")] = GROUP_SIZE,
    symmetric: Annotated[bool, typer.Option("--symmetric/--asymmetric")] = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Write the editable map that --spec reads.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The table as JSON.")] = False,
) -> None:
    """Show how large MODEL becomes at each width, and which widths fit a memory budget.

    Of an artifact of the method anybit: its curve, the size and the expected increase of the loss at each width.

    Examples:

        anybit plan MODEL --memory 6GB -o map.json

        anybit plan out --memory 120MB
    """
    from anybit.artifact.files import is_artifact
    from anybit.artifact.sizes import curve
    from anybit.plan import widths_for_memory

    if is_artifact(Path(model)):
        if out is not None or group_size != GROUP_SIZE or symmetric:
            raise InputError(
                f"{model} is made: --out, --group-size and --symmetric are for a model that is not quantized yet"
            )
        rungs = curve(Path(model))
        most = None if memory is None else parse_bytes(memory)
        fitting = [r for r in rungs if r["present"] and (most is None or r["size_bytes"] <= most)]
        if not fitting:
            raise InputError(f"nothing fits {memory}: the core takes {rungs[0]['size_bytes'] / 1e6:.1f} MB")
        show = (lambda f: typer.echo(json.dumps(f, indent=2))) if as_json else tables.print_curve
        _emit({"curve": rungs, "best": fitting[-1]}, None, show)
        return

    if out is not None and out.exists():
        raise InputError(f"{out} exists, perhaps with your edits: choose another -o, or remove it")
    _check_writable(out)
    budget = None if memory is None else parse_bytes(memory)
    streamed = _streamed(model)
    rows = widths_for_memory(streamed, budget, {"group_size": group_size, "symmetric": symmetric})
    fitting = [row for row in rows if row["fits"]]
    if not fitting:
        least = min(row["size_bytes"] for row in rows)
        raise InputError(
            f"nothing fits {memory}: the smallest, 2 bits with a 4-bit embedding, takes {least / 1e6:.1f} MB"
        )
    best = max(fitting, key=lambda row: (row["bits"], row["embed_bits"]))
    _emit(
        {"widths": rows, "best": best},
        None,
        (lambda f: typer.echo(json.dumps(f, indent=2))) if as_json else tables.print_plan,
    )
    if out is not None:
        entry = {"bits": best["bits"], "group_size": group_size, "symmetric": symmetric}
        layers = {name: entry for name in streamed.all_linears()}
        out.write_text(json.dumps({"layers": layers}, indent=2) + "\n", encoding="utf-8")
        command = (
            f"anybit quantize {model} -o OUT --method gptq --spec {out} --embed-bits {best['embed_bits']}"
        )
        typer.echo(f"wrote {out}: edit it, then `{command}`", err=True)


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option("-o", "--out", help="Directory for the model, the artifacts and the report.")
    ] = Path("demo"),
    threads: Threads = None,
) -> None:
    """The whole way on a real model: fetch SmolLM2-135M, compress it three ways, measure, generate, report."""
    from anybit.demo import run

    _set_threads(threads)
    report = _report()
    try:
        run(out, report)
    finally:
        report.close()


@app.command()
def compare(  # noqa: PLR0913
    model: Source,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for cells, pictures and report.html.")],
    method: Annotated[
        list[str],
        typer.Option(
            "-m",
            "--method",
            help="A method, with options after a colon: `'gptq: clip=false, group_size=64'`. Repeatable. "
            "`bits=[4.4, 5]` gives it widths of its own. [default: anybit, the five systems, rtn and gptq]",
        ),
    ] = [],  # noqa: B006
    bits: Annotated[
        str, typer.Option(help="Widths; a method is left out at those it does not have.")
    ] = "3,4",
    calibration: Annotated[
        str, typer.Option(help="builtin, a .txt or .jsonl file, or a hub dataset.")
    ] = "builtin",
    samples: Annotated[int, typer.Option(help="Calibration windows.", min=1)] = DEFAULTS.samples,
    seq_len: Annotated[
        int, typer.Option(help="Tokens per window, of calibration and evaluation.", min=2)
    ] = DEFAULTS.seq_len,
    seed: Annotated[
        int, typer.Option(help="Picks the calibration windows.", min=0, max=MAX_SEED)
    ] = DEFAULTS.seed,
    text: Annotated[str, typer.Option(help="Text to measure on.")] = "builtin-eval",
    max_tokens: EvalTokens = None,
    tasks: Tasks = None,
    tasks_dir: TasksDir = None,
    limit: Limit = None,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="Keep artifacts and statistics in OUT/work: other texts and more cells then start from them.",
        ),
    ] = False,
    threads: Threads = None,
) -> None:
    """Compress MODEL by several methods at several widths, measure each, and write OUT/report.html.

    What is done lies in OUT/cells: the same command goes on where it was killed, and one with more methods or widths
    makes only the new ones. The report shows all cells there that were made of the same model and calibration and
    measured in the same way: those of this command first, then those of earlier ones.

    Example: `anybit compare MODEL -o compared -m rtn -m 'gptq: group_size=64' --bits 2,3,4 --max-tokens 16384`
    """
    from anybit import compare as comparing

    _set_threads(threads)
    names = method or COMPARED
    settings = comparing.Settings(
        calibration, samples, seq_len, seed, text, max_tokens, _names(tasks), tasks_dir, limit
    )
    report = _report()
    try:
        results = comparing.compare(
            model,
            out,
            [comparing.parse_entry(name) for name in names],
            _numbers("bits", bits),
            settings,
            keep=keep,
            report=report,
        )
    finally:
        report.close()
    _emit(results, None, tables.print_comparison)
    typer.echo(f"report: {out / 'report.html'}")
    if any(row["failed"] for row in results["left_out"]):
        raise typer.Exit(1)


bench = typer.Typer(
    no_args_is_help=True, help="Measure this machine: speed beside a peer or a limit, in one run."
)
app.add_typer(bench, name="bench")


@bench.command(name="quantize")
def bench_quantize(
    rounds: Annotated[int, typer.Option(help="Rounds whose median counts.", min=1)] = 3,
    json_file: JsonFile = None,
) -> None:
    """Clustering weights: weights per second of one core, beside flash1dkmeans where that is installed."""
    from anybit.bench import clustering

    _check_writable(json_file)
    _emit(clustering.quantize(rounds), json_file, tables.print_bench_quantize)


@bench.command(name="kernels")
def bench_kernels(  # noqa: PLR0913 - one parameter per option
    shapes: Annotated[
        str | None,
        typer.Option(help="OUTxIN, comma-separated. [default: LLM shapes, SmolLM2-135M's, Gemma 3 270M's]"),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Numbers of tokens multiplied at once, comma-separated. [default: 1; with cuda the part's]"
        ),
    ] = None,
    threads: Annotated[
        str | None, typer.Option(help="Numbers of threads, comma-separated. [default: 1 and all]")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="Rounds whose median counts. [default: 20; with cuda the part's]", min=1),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="What the model computes in: bfloat16 or float32; with cuda float16 or bfloat16. [default: the first]"
        ),
    ] = None,
    isa: Annotated[
        str | None, typer.Option(help="Instruction sets to compare, comma-separated. [default: the best]")
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(help="Variants, or how their names begin, comma-separated, e.g. W4A8,codebook."),
    ] = None,
    cached: Annotated[
        bool,
        typer.Option(
            "--cached", help="Rates of parts of the matrices that stay in the cache: what bounds a kernel."
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Also draw time against bits, with the memory's limit, or a part: a .png, .svg or .pdf."
        ),
    ] = None,
    device: Device = "cpu",
    part: Annotated[
        str | None,
        typer.Option(
            help="With cuda: gemv, gemm, decode, attention, activations or quantize. [default: gemv]"
        ),
    ] = None,
    small: Annotated[
        bool,
        typer.Option(
            "--small",
            help="With cuda: compare kernels with the reference and time nothing; TRITON_INTERPRET=1 does so without a GPU.",
        ),
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Matrix products of every stored format, beside PyTorch, ggml (where llama-cpp-python is installed), a product that
    only reads bfloat16, and the memory's bandwidth; with --device cuda the GPU's kernels, beside cuBLAS and a copy.

    The default shapes take some 8 GB of memory and 10 minutes: each variant is there several times, so that weights
    are not in the cache."""
    from anybit.bench import gpu, kernels

    for file in (json_file, plot):
        _check_writable(file)
    if plot is not None and plot.suffix not in kernels.PICTURES:
        raise InputError(f"--plot {plot}: expected a name that ends in {' or '.join(kernels.PICTURES)}")
    if device not in ("cpu", "cuda"):
        raise InputError(f"--device {device}: expected cpu or cuda")
    if device == "cuda":
        _refuse_ignored(_given(threads=threads, isa=isa, cached=cached or None), "it is for --device cpu")
        gpu.check_plot(plot, small)
        figures = gpu.run(
            part or "gemv",
            rounds,
            small,
            json_file,
            shapes=_named("shapes", shapes),
            tokens=tokens and _whole_numbers("tokens", tokens),
            dtype=dtype,
            only=_named("only", only),
        )
        _emit(figures, json_file, lambda f: typer.echo("\n".join(gpu.lines(f))))
        if plot is not None:
            gpu.plot(figures, plot)
        return
    _refuse_ignored(_given(part=part, small=small or None), "it is for --device cuda")
    if cached:
        _refuse_ignored(_given(plot=plot), "with --cached there are rates, not times of whole matrices")
    counts = _whole_numbers("threads", threads) if threads else tuple(sorted({1, os.cpu_count() or 1}))
    for count in counts:
        _set_threads(count)
    report = _report()
    try:
        figures = kernels.kernels(
            shapes=_named("shapes", shapes) or kernels.SHAPES,
            tokens=_whole_numbers("tokens", tokens or "1"),
            threads=counts,
            rounds=rounds or 20,
            dtype=dtype or "bfloat16",
            isas=_named("isa", isa),
            only=_named("only", only),
            cached=cached,
            report=report,
        )
    finally:
        report.close()
    _emit(figures, json_file, tables.print_bench_kernels)
    if plot is not None:
        kernels.plot(figures, plot)


def main() -> None:
    """Entry point: bad input is one line and exit code 2, Ctrl-C is 130, a defect keeps its traceback (1)."""
    try:
        code = typer.main.get_command(app).main(prog_name="anybit", standalone_mode=False)
        if code == 130:  # what typer makes of Ctrl-C, without a word
            raise KeyboardInterrupt
    except InputError as error:
        code = _complain(str(error), 2)
    except _USAGE_ERROR as error:
        error.show()
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        resumes = "; the same command resumes" if sys.argv[1:2] in (["quantize"], ["compare"]) else ""
        code = _complain(f"interrupted{resumes}", 130)
    except OSError as error:
        if error.errno is None:
            raise
        remedy = ": make room and run the same command again" if error.errno == errno.ENOSPC else ""
        code = _complain(": ".join(filter(None, [error.filename, error.strerror])) + remedy, 2)
    sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str, code: int) -> int:
    typer.echo(f"anybit: {message}", err=True)
    return code


def _check_writable(file: Path | None) -> None:
    """Refuse a file that could not be written when the work is done."""
    if file is not None and (file.is_dir() or not os.access(file.absolute().parent, os.W_OK)):
        raise InputError(
            f"{file} cannot be written: name a file in an existing directory that you may write to"
        )


def _set_threads(threads: int | None) -> None:
    if threads is None:
        return
    processors = os.cpu_count() or 1
    most = THREADS_PER_PROCESSOR * processors
    if threads > most:
        raise InputError(
            f"--threads {threads}: this machine has {processors} processors; give at most {most}"
        )
    import torch

    torch.set_num_threads(threads)


def _given(**options: Any) -> dict[str, Any]:
    """The options that were given; the others keep the API's defaults."""
    return {name: value for name, value in options.items() if value is not None}


def _refuse_ignored(given: dict[str, Any], reason: str) -> None:
    """Refuse options that would have no effect."""
    for name in given:
        raise InputError(f"--{name.replace('_', '-')} would be ignored: {reason}; leave it out")


def _report() -> Any:
    from anybit.progress import Terminal

    return Terminal()


def _names(text: str | None) -> tuple[str, ...]:
    """ "piqa,arc_easy" -> ("piqa", "arc_easy")."""
    return tuple(name.strip() for name in text.split(",")) if text else ()


def _named(option: str, text: str | None) -> tuple[str, ...]:
    """`_names` of an option that, where it is given, names something."""
    names = _names(text)
    if text is not None and not all(names or [""]):
        raise InputError(f"--{option} {text!r}: expected names, separated by commas")
    return names


def _numbers(option: str, text: str) -> tuple[float, ...]:
    """ "2,2.5" -> (2.0, 2.5)."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(f"--{option} {text!r}: expected numbers, such as 2,2.5,3") from error


def _whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """ "3,4,6" -> (3, 4, 6)."""
    numbers = [part.strip() for part in text.split(",")]
    if not all(number.isdecimal() and int(number) for number in numbers):
        raise InputError(f"--{option} {text!r}: expected whole numbers from 1 up, such as 3,4,6")
    return tuple(map(int, numbers))


def _size_asked(bits: float | None, bpw: float | None, size: str | None) -> dict[str, Any]:
    """--bits, --bpw and --size as `anybit.load` takes them."""
    return {"bits": bits, "bpw": bpw, "size": None if size is None else parse_bytes(size)}


def _streamed(model: str) -> Any:
    import torch

    from anybit.calibration.streaming import StreamedModel
    from anybit.checkpoint.directory import open_checkpoint

    return StreamedModel(open_checkpoint(model), torch.bfloat16)


def _predict(model: str, config: QuantizeConfig, spec_map: Any, out: Path) -> dict[str, Any]:
    from anybit.artifact.writer import check_output
    from anybit.plan import estimate, make_plan

    check_output(out, overwrite=True)
    streamed = _streamed(model)
    made = make_plan(streamed, config, spec_map)
    if config.calibrated:
        streamed.check_structure()
    return {
        "coverage": made.coverage(),
        "warning": made.warning(config.method),
        "estimated": config.progressive or (config.wide_rows is not None and 0 < config.wide_rows < 1),
        **estimate(streamed, made, config, out),
    }


def _emit(figures: dict[str, Any], file: Path | None, show: Any) -> None:
    """Print figures, and write them where asked."""
    show(figures)
    if file is not None:
        file.write_text(json.dumps(figures, indent=2, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
