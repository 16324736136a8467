"""Figures as the command prints them; `--json` has the same ones unrounded."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import typer

from anybit.config import Json
from anybit.errors import printable


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table of texts; `<` before a heading: its column is not numbers and stands to the left.

    Rows fold at a terminal's edge; in a file or a pipe they stay whole.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for head in heads:
        side: Any = "left" if head.startswith("<") else "right"
        table.add_column(head.removeprefix("<"), justify=side, overflow="fold")
    for row in rows:
        table.add_row(*map(printable, row))
    edge = None if sys.stdout.isatty() else 10_000
    Console(width=edge, markup=False, emoji=False, highlight=False).print(table)


def _say(line: str) -> None:
    """A line, which may quote an artifact."""
    typer.echo(printable(line))


BUSY = 0.8  # share of the processors' time below which other work is what a run will wait for


def print_prediction(f: Json) -> None:
    """What `quantize --dry-run` foresees."""
    _say(f["coverage"])
    if f["warning"]:
        _say(f["warning"])
    about = "about " if f["estimated"] else ""  # which rows of all layers are wide is not known yet
    _say(f"bits per weight   {about}{f['bits_per_weight']:.3f} (codes alone {f['bits']:.3f})")
    if f["file_bits_per_weight"] != f["bits_per_weight"]:
        _say(f"  in the files    {f['file_bits_per_weight']:.3f}")
    size = "at most " if f["size_is_bound"] else about
    _say(f"size              {size}{f['size_bytes'] / 1e6:.1f} MB without the tokenizer")
    if f["scratch_disk_bytes"]:
        _say(f"scratch disk      {f['scratch_disk_bytes'] / 1e6:.0f} MB until the run ends")
    _say(f"free disk         {f['free_disk_bytes'] / 1e6:.0f} MB")
    _say(f"peak memory       about {f['peak_memory_bytes'] / 1e6:.0f} MB")
    _say(f"free memory       {f['free_memory_bytes'] / 1e6:.0f} MB")
    if f["seconds"] is None:
        _say("time              not predicted: only a CPU's speed is measured")
        return
    _say(f"time              about {f['seconds']:.0f} s on this machine, if it does nothing else")
    if (share := f["processor_share"]) < BUSY:
        _say(
            f"  the machine is busy: a run got {100 * share:.0f} % of the processors just now; if that stays so, about "
            f"{f['seconds'] / max(share, 0.01):.0f} s"
        )


def print_evaluation(f: Json) -> None:
    """Perplexity, divergence and tasks."""
    shown = "none (nothing to score)" if f["perplexity"] is None else f"{f['perplexity']:.4f}"
    _say(f"perplexity        {shown} over {f['tokens']} tokens in windows of {f['seq_len']}")
    _say(f"tail left out     {f['tail_tokens']} tokens")
    _say(f"computed by       {f['engine']}")
    _print_stored(f)
    if f["kv_bits"] != 16:
        _say(f"KV-cache          {f['kv_bits']} bits")
    if f.get("kld_mean") is not None:
        _say(f"base perplexity   {f['base_perplexity']:.4f} (base in {f['base_dtype']})")
        _say(f"KL divergence     mean {f['kld_mean']:.5f}, 99th percentile {f['kld_p99']:.4f} nats per token")
        _say(f"top-1 agreement   {100 * f['top1_agreement']:.2f} %")
    for name, scores in f.get("tasks", {}).items():
        _say(
            f"{name:17} "
            + ", ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in scores.items())
        )


def print_embeddings(f: Json) -> None:
    """An encoder beside its base and the scores of sentence pairs."""
    _say(f"embeddings        of {f['sentences']} sentences, pooling {f['pooling']}")
    _print_stored(f)
    if "cosine_mean" in f:
        _say(f"cosine with base  mean {f['cosine_mean']:.5f}, least {f['cosine_min']:.5f}")
    for key, label in (("spearman", "Spearman"), ("base_spearman", "base Spearman")):
        if key in f:
            shown = "none (all pairs are equally similar)" if f[key] is None else f"{f[key]:.4f}"
            _say(f"{label:17} {shown} over {f['pairs']} pairs")


def _print_stored(f: Json) -> None:
    """What an artifact stores; nothing for another model."""
    if f["bits_per_weight"] is not None:
        other = f["file_bits_per_weight"] != f["bits_per_weight"]
        stored = f" (in the files {f['file_bits_per_weight']:.3f})" if other else ""
        _say(f"bits per weight   {f['bits_per_weight']:.3f}{stored}, {f['size_bytes'] / 1e6:.1f} MB")


def print_inspection(f: Json) -> None:
    """An artifact as a whole, then layer by layer."""
    _say(f"method            {f['method']}")
    _say(f"bits              {f['bits']:.3f} (average code width)")
    if f["bits_eq10"] is not None:
        _say(f"bits by eq. 10    {f['bits_eq10']:.3f} (2/4/16: scales and zero points counted)")
    _say(f"bits per weight   {f['bits_per_weight']:.3f} over {f['weights'] / 1e6:.1f} M weights")
    if f["file_bits_per_weight"] != f["bits_per_weight"]:
        _say(f"  in the files    {f['file_bits_per_weight']:.3f}")
    if len(f["levels"]) > 1:
        there = [level["bits"] for level in f["levels"] if level["present"]]
        _say(
            f"levels            {len(there)}, {there[0]:.2f} to {there[-1]:.2f} bits (`anybit plan` lists them)"
        )
    if f["kv_bits"] != 16:
        _say(f"KV-cache          {f['kv_bits']} bits")
    _say(f"size              {f['size_bytes'] / 1e6:.1f} MB without the tokenizer")
    calibration = f["calibration"] or {}
    if calibration:
        from anybit.artifact.config_json import own_windows_note

        _say(
            f"calibration       {calibration['samples']} x {calibration['seq_len']} tokens of "
            f"{calibration['source']}{own_windows_note(calibration)}"
        )
    layers = [_layer_row(layer) for layer in f["embeddings"] + f["layers"]]
    print_table(("<layer", "shape", "bits", "bits per weight", "<parts"), layers)


def _layer_row(layer: Json) -> tuple[str, ...]:
    channels: Counter[float] = Counter(layer.get("channel_bits", []))
    parts = [f"{n} channels at {bits}" for bits, n in sorted(channels.items())]
    parts += [f"{tile['rows']} rows at {tile['bits']}" for tile in layer["tiles"] if "rows" in tile]
    inputs = sorted({tile.get("act_bits", 16) for tile in layer["tiles"]})
    if inputs != [16]:
        parts.insert(0, f"inputs {'+'.join(map(str, inputs))} bits")
    shape = "x".join(map(str, layer["shape"]))
    return layer["name"], shape, f"{layer['bits']:.2f}", f"{layer['bits_per_weight']:.3f}", ", ".join(parts)


def print_comparison(f: Json) -> None:
    """The cells of `compare`; the report has more."""
    print_table(
        ("<method", "bits", "bits per weight", "in the files", "perplexity", "KLD mean", "quantized in"),
        [_cell_row(cell) for cell in f["cells"]],
    )
    for row in f["left_out"]:
        kind = "failed" if row["failed"] else "left out"
        _say(f"{kind}: {row['name']} at {row['bits']:g} bits: {row['reason']}")


def _cell_row(cell: Json) -> tuple[str, ...]:
    """A cell of `compare`; of the unquantized model only what it has."""
    quality = "none" if cell["perplexity"] is None else f"{cell['perplexity']:.2f}"
    head = cell["name"], f"{cell['bits']:g}"
    if "bits_per_weight" not in cell:
        return *head, "", "", quality, "", ""
    in_files = cell.get("file_bits_per_weight")  # of a cell that was made before it was recorded: none
    stored = "" if in_files is None else f"{in_files:.3f}"
    kld = "none" if cell.get("kld_mean") is None else f"{cell['kld_mean']:.4f}"
    return *head, f"{cell['bits_per_weight']:.3f}", stored, quality, kld, f"{cell['seconds']:.0f} s"


BEST = "<- the best that fits"
LOSS = "expected increase of the loss, nats per token"


def print_plan(f: Json) -> None:
    """Every width, with what fits the budget."""
    rows = []
    for row in f["widths"]:
        mark = BEST if row == f["best"] else "" if row["fits"] else "too large"
        widths = str(row["bits"]), str(row["embed_bits"])
        rows.append((*widths, f"{row['bits_per_weight']:.3f}", f"{row['size_bytes'] / 1e6:.1f} MB", mark))
    print_table(("bits", "embed bits", "bits per weight", "size", "<"), rows)


def print_levels(f: Json) -> None:
    """What an artifact is at each of its levels."""
    rows = []
    for row in f["levels"]:
        mark = "not here" if not row["present"] else BEST if row == f["best"] else ""
        embedding = row["embedding_bits_per_weight"]
        rates = f"{row['bits']:.2f}", f"{row['bits_per_weight']:.3f}", f"{embedding or 16:.3f}"
        loss = "not known" if row["loss"] is None else f"{row['loss']:.4f}"
        memory, size = f"{row['memory_bytes'] / 1e6:.1f} MB", f"{row['size_bytes'] / 1e6:.1f} MB"
        in_files = f"{row['file_bits_per_weight']:.3f}"
        rows.append((*rates, memory, in_files, size, loss, mark))
    heads = "bits", "bits per weight", "of the embedding", "memory", "in the files", "size", LOSS, "<"
    print_table(heads, rows)


def print_bench_quantize(f: Json) -> None:
    """Clustering rates, then the figures as one line of JSON."""
    typer.echo("million weights per second of one core; loss over the peer's")
    rows = []
    for row in f["rows"]:
        ours, peer = row["anybit_weights_per_second"], row.get("peer_weights_per_second")
        beside = ("", "", "")
        if peer:
            loss = row["anybit_loss"] / row["peer_loss"]
            beside = f"{peer / 1e6:.2f}", f"{ours / peer:.1f}x", f"{loss:.4f}"
        rows.append((f"{row['rows']} x {row['columns']}", str(row["bits"]), f"{ours / 1e6:.2f}", *beside))
    rows.append(("nested", "3 to 8", f"{f['nested']['weights_per_second'] / 1e6:.2f}", "", "", ""))
    for name, title in (("first", "method anybit, first pass"), ("descent", "one of descent")):
        rate = f["codes"][f"{name}_weights_per_second"]
        rows.append((title, "1 to 8", f"{rate / 1e6:.2f}", "", "", ""))
    print_table(("<rows x columns", "bits", "anybit", f["peer"] or "no peer", "ratio", "loss"), rows)
    timed = []
    for row in f["attention"]:
        heads = f"{row['heads']} for {row['key_heads']} of keys, {row['head_size']}"
        ours, peer = row["anybit_ms"], row["torch_ms"]
        timed.append((heads, str(row["tokens"]), f"{ours:.2f}", f"{peer:.2f}", f"{peer / ours:.1f}x"))
    if timed:
        typer.echo("\ncausal attention in bfloat16 on all threads, milliseconds")
        print_table(("<heads, numbers of each", "tokens", "anybit", "PyTorch", "ratio"), timed)
    typer.echo(json.dumps(f))


def print_bench_kernels(f: Json) -> None:
    """Times and ratios, then the figures as one line of JSON."""
    typer.echo(f"inputs {f['dtype']}; {', '.join(f['isas'])}; {f['peer'] or 'ggml is not installed'}")
    cached = f["cached_bytes"]
    if cached:
        typer.echo(
            f"in the cache: GB/s of the rows beyond the first 64, of as many as take {cached >> 10} KiB"
        )
    for row in f["rows"]:
        low, high = row["read_gb_per_s_range"]
        typer.echo(
            f"\n{row['out']} x {row['in']}, {row['tokens']} token(s), {row['threads']} thread(s); "
            f"memory read at {row['read_gb_per_s']:.1f} GB/s ({low:.1f} to {high:.1f})"
        )
        _print_variants(row["variants"], cached)
    typer.echo(json.dumps(f))


def _print_variants(variants: dict[str, Json], cached: bool) -> None:
    """Times of one shape, over those of the dense products where these are there."""
    bases = [name for name in ("torch float32", "torch bfloat16", "own bfloat16") if name in variants]
    over = ["rows"] if cached else ["x " + name.removeprefix("torch ") for name in bases]
    rows = []
    for name, v in variants.items():
        last = [str(v["rows"])] if cached else [f"{variants[base]['us'] / v['us']:.2f}" for base in bases]
        rates = f"{v['us']:.1f}", f"{v['gb_per_s']:.1f}", f"{100 * v['of_limit']:.0f}%"
        rows.append((name, *rates, *last))
    print_table(("<", "us", "GB/s", "of limit", *over), rows)


def print_bench_decode(f: Json) -> None:
    """Rates and shares of the memory's rate, a table for each cell."""
    for cell in f["cells"]:
        if cell["test"] == "agreement":
            _print_agreement(cell)
            continue
        if cell["test"] == "quality":
            _print_quality(cell)
            continue
        decoding = cell["test"] == "decode"
        what = (
            f"decoding, {cell['tokens']} tokens before"
            if decoding
            else f"a prompt of {cell['tokens']} tokens"
        )
        contenders = cell["contenders"].values()
        others = max((c["others"] or 0.0 for c in contenders), default=0.0)
        _say("")
        _say(
            f"{cell['model']}: {what}; {cell['made_by']['threads']} thread(s), "
            f"others took up to {others:.2f} of {cell['processors']} processors"
        )
        rows = []
        for name, c in cell["contenders"].items():
            low, high = c["range"]
            shares = ("", "", "")
            if "of_limit" in c:
                shares = (
                    f"{c['bytes_per_token'] / 1e6:.1f}",
                    f"{c['read_gb_per_s']:.1f}",
                    f"{100 * c['of_limit']:.0f}%",
                )
            rows.append((name, f"{c['tokens_per_second']:.1f}", f"{low:.1f} to {high:.1f}", *shares))
        print_table(("<", "tokens/s", "range", "MB a token", "read GB/s", "of limit"), rows)


def _print_agreement(cell: Json) -> None:
    """Logits beside those of Transformers."""
    _say("")
    _say(f"{cell['model']}: logits beside Transformers' in float32, {cell['tokens']} tokens")
    rows = []
    for name, c in cell["contenders"].items():
        gap = "" if c["gap"] is None else f"{c['gap']:.1e}"
        rows.append((name, f"{c['difference']:.1e}", str(c["equal"]), gap))
    print_table(("<", "of the spread", "equal greedy tokens", "best two apart"), rows)


def _print_quality(cell: Json) -> None:
    """What the engine at its widths and peers' files make of a text."""
    _say("")
    _say(f"{cell['model']}: {cell['tokens']} tokens of a text; files dequantized, in float32")
    rows = [
        (name, f"{c['perplexity']:.3f}", "" if c["kld"] is None else f"{c['kld']:.4f}")
        for name, c in cell["contenders"].items()
    ]
    print_table(("<", "perplexity", "divergence"), rows)


def print_decode_targets(f: Json) -> None:
    """What is to be reached, what was, and what the memory's rate would give."""

    def number(value: float | None, none: str) -> str:
        return none if value is None else f"{value:.2f}" if value >= 0.01 else f"{value:.1e}"

    words = {None: "", True: "met", False: "MISSED"}
    _say("")
    print_table(
        ("row", "<target", "must", "measured", "bound", "<"),
        [
            (
                str(t["row"]),
                t["target"],
                number(t["must"], ""),
                number(t["measured"], "not measured"),
                number(t["bound"], ""),
                words[t["met"]],
            )
            for t in f["targets"]
        ],
    )
    if disturbed := f.get("disturbed"):
        _say(
            f"{disturbed} cell(s) do not count, as others took processors: the same command measures them again"
        )
