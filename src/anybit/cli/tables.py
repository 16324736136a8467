"""Figures as the command prints them; `--json` has the same ones unrounded."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import typer


def print_prediction(f: dict[str, Any]) -> None:
    """What `quantize --dry-run` foresees."""
    typer.echo(f["coverage"])
    if f["warning"]:
        typer.echo(f"warning: {f['warning']}")
    about = "about " if f["estimated"] else ""  # which rows of all layers are wide is not known yet
    typer.echo(f"bits per weight   {about}{f['bits_per_weight']:.3f} (codes alone {f['bits']:.3f})")
    if f["file_bits_per_weight"] != f["bits_per_weight"]:
        typer.echo(f"  all widths      {f['file_bits_per_weight']:.3f} in the file")
    typer.echo(f"size              {about}{f['size_bytes'] / 1e6:.1f} MB without the tokenizer")
    if f["scratch_disk_bytes"]:
        typer.echo(f"scratch disk      {f['scratch_disk_bytes'] / 1e6:.0f} MB until the run ends")
    typer.echo(f"free disk         {f['free_disk_bytes'] / 1e6:.0f} MB")
    typer.echo(f"peak memory       about {f['peak_memory_bytes'] / 1e6:.0f} MB")
    typer.echo(f"time              about {f['seconds']:.0f} s on this machine")


def print_evaluation(f: dict[str, Any]) -> None:
    """Perplexity, divergence and tasks."""
    shown = "none (nothing to score)" if f["perplexity"] is None else f"{f['perplexity']:.4f}"
    typer.echo(f"perplexity        {shown} over {f['tokens']} tokens in windows of {f['seq_len']}")
    typer.echo(f"tail left out     {f['tail_tokens']} tokens")
    _print_stored(f)
    if f["kv_bits"] != 16:
        typer.echo(f"KV-cache          {f['kv_bits']} bits")
    if f.get("kld_mean") is not None:
        typer.echo(f"base perplexity   {f['base_perplexity']:.4f} (base in {f['base_dtype']})")
        typer.echo(
            f"KL divergence     mean {f['kld_mean']:.5f}, 99th percentile {f['kld_p99']:.4f} nats per token"
        )
        typer.echo(f"top-1 agreement   {100 * f['top1_agreement']:.2f} %")
    for name, scores in f.get("tasks", {}).items():
        typer.echo(
            f"{name:17} "
            + ", ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in scores.items())
        )


def print_embeddings(f: dict[str, Any]) -> None:
    """An encoder beside its base and the scores of sentence pairs."""
    typer.echo(f"embeddings        of {f['sentences']} sentences, pooling {f['pooling']}")
    _print_stored(f)
    if "cosine_mean" in f:
        typer.echo(f"cosine with base  mean {f['cosine_mean']:.5f}, least {f['cosine_min']:.5f}")
    for key, label in (("spearman", "Spearman"), ("base_spearman", "base Spearman")):
        if key in f:
            shown = "none (all pairs are equally similar)" if f[key] is None else f"{f[key]:.4f}"
            typer.echo(f"{label:17} {shown} over {f['pairs']} pairs")


def _print_stored(f: dict[str, Any]) -> None:
    """What an artifact stores; nothing for another model."""
    if f["bits_per_weight"] is not None:
        more = f["file_bits_per_weight"] - f["bits_per_weight"]
        stored = f" (all widths {f['file_bits_per_weight']:.3f})" if more else ""
        typer.echo(f"bits per weight   {f['bits_per_weight']:.3f}{stored}, {f['size_bytes'] / 1e6:.1f} MB")


def print_inspection(f: dict[str, Any]) -> None:
    """An artifact as a whole, then layer by layer."""
    typer.echo(f"method            {f['method']}")
    typer.echo(f"bits              {f['bits']:.3f} (average code width)")
    if f["bits_eq10"] is not None:
        typer.echo(f"bits by eq. 10    {f['bits_eq10']:.3f} (2/4/16: scales and zero points counted)")
    typer.echo(f"bits per weight   {f['bits_per_weight']:.3f} over {f['weights'] / 1e6:.1f} M weights")
    for row in f["widths"]:
        typer.echo(f"  read at {row['bits']} bits  {row['bits_per_weight']:.3f}")
    if f["widths"]:
        typer.echo(f"  all widths      {f['file_bits_per_weight']:.3f} in the file")
    if f["kv_bits"] != 16:
        typer.echo(f"KV-cache          {f['kv_bits']} bits")
    typer.echo(f"size              {f['size_bytes'] / 1e6:.1f} MB without the tokenizer")
    calibration = f["calibration"] or {}
    if calibration:
        typer.echo(
            f"calibration       {calibration['samples']} x {calibration['seq_len']} tokens of {calibration['source']}"
        )
    width = max((len(layer["name"]) for layer in f["layers"] + f["embeddings"]), default=0)
    for layer in f["embeddings"] + f["layers"]:
        shape = "x".join(map(str, layer["shape"]))
        channels = Counter(layer.get("channel_bits", []))
        parts = [f"{n} channels at {bits}" for bits, n in sorted(channels.items())]
        parts += [f"{tile['rows']} rows at {tile['bits']}" for tile in layer["tiles"] if "rows" in tile]
        mixed = ", ".join(parts)
        line = f"{layer['name']:{width}}  {shape:>12}  {layer['bits']:.2f} bits  {layer['bits_per_weight']:.3f} bpw"
        inputs = sorted({tile.get("act_bits", 16) for tile in layer["tiles"]})
        line += f"  inputs {'+'.join(map(str, inputs))} bits" if inputs != [16] else ""
        typer.echo(f"{line}  {mixed}".rstrip())


def print_comparison(f: dict[str, Any]) -> None:
    """The cells of `compare`; the report has more."""
    width = max(len(cell["name"]) for cell in f["cells"])
    typer.echo(f"{'method':{width}}   bits     bpw  perplexity  KLD mean  quantized in")
    for cell in f["cells"]:
        quality = f"{cell['perplexity']:10.2f}" if cell["perplexity"] is not None else "      none"
        kld = "    none" if cell.get("kld_mean") is None else f"{cell['kld_mean']:8.4f}"
        line = f"{cell['name']:{width}}  {cell['bits']:5g}"
        if "bits_per_weight" in cell:
            line += f"  {cell['bits_per_weight']:6.3f}  {quality}  {kld}  {cell['seconds']:10.0f} s"
        else:
            line += f"  {'':6}  {quality}"
        typer.echo(line)
    for row in f["left_out"]:
        typer.echo(
            f"{'failed' if row['failed'] else 'left out'}: {row['name']} at {row['bits']:g} bits: {row['reason']}"
        )


def print_plan(f: dict[str, Any]) -> None:
    """Every width, with what fits the budget."""
    typer.echo("bits  embed bits  bits per weight      size")
    for row in f["widths"]:
        mark = "  <- the best that fits" if row == f["best"] else ("" if row["fits"] else "  too large")
        size = f"{row['size_bytes'] / 1e6:.1f} MB"
        typer.echo(
            f"{row['bits']:4d}  {row['embed_bits']:10d}  {row['bits_per_weight']:15.3f}  {size:>8}{mark}"
        )


def print_curve(f: dict[str, Any]) -> None:
    """What an artifact of many sizes is at each of them."""
    typer.echo("bits  bits per weight      size  expected increase of the loss (nats per token)")
    for row in f["curve"]:
        mark = "  not here" if not row["present"] else "  <- the best that fits" if row == f["best"] else ""
        size = f"{row['size_bytes'] / 1e6:.1f} MB"
        typer.echo(f"{row['bits']:4.2f}  {row['bits_per_weight']:15.3f}  {size:>8}  {row['loss']:.4f}{mark}")


def print_bench_quantize(f: dict[str, Any]) -> None:
    """Clustering rates, then the figures as one line of JSON."""
    typer.echo("million weights per second of one core; loss over the peer's")
    typer.echo(f"rows x columns  bits    anybit  {f['peer'] or 'no peer':>15}   ratio    loss")
    for row in f["rows"]:
        ours, peer = row["anybit_weights_per_second"], row.get("peer_weights_per_second")
        beside = ""
        if peer:
            beside = f"{peer / 1e6:15.2f}  {ours / peer:5.1f}x  {row['anybit_loss'] / row['peer_loss']:6.4f}"
        typer.echo(
            f"{row['rows']:4d} x {row['columns']:5d}  {row['bits']:6d}  {ours / 1e6:8.2f}  {beside}".rstrip()
        )
    typer.echo(f"nested 3 to 8 bits      {f['nested']['weights_per_second'] / 1e6:8.2f}")
    typer.echo(json.dumps(f))


def print_bench_kernels(f: dict[str, Any]) -> None:
    """Times and ratios, then the figures as one line of JSON."""
    typer.echo(f"inputs {f['dtype']}; {', '.join(f['isas'])}; {f['peer'] or 'ggml is not installed'}")
    cached = f["cached_bytes"]
    if cached:
        typer.echo(
            f"in the cache: GB/s of the rows beyond the first 64, of as many as take {cached >> 10} KiB"
        )
    for row in f["rows"]:
        low, high = row["read_gb_per_s_range"]
        names = [
            name for name in ("torch float32", "torch bfloat16", "own bfloat16") if name in row["variants"]
        ]
        over = "  ".join(f"{'x ' + name.removeprefix('torch '):>14}" for name in names)
        typer.echo(
            f"\n{row['out']} x {row['in']}, {row['tokens']} token(s), {row['threads']} thread(s); "
            f"memory read at {row['read_gb_per_s']:.1f} GB/s ({low:.1f} to {high:.1f})\n"
            f"{'':24}       us      GB/s  of limit  {'     rows' if cached else over}"
        )
        base = [row["variants"][name]["us"] for name in names]
        for name, v in row["variants"].items():
            last = f"{v['rows']:9d}" if cached else "  ".join(f"{us / v['us']:14.2f}" for us in base)
            typer.echo(f"{name:24}{v['us']:9.1f} {v['gb_per_s']:9.1f} {100 * v['of_limit']:8.0f}% {last}")
    typer.echo(json.dumps(f))
