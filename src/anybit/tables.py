"""Figures as the command prints them; `--json` has the same ones unrounded."""

from __future__ import annotations

from typing import Any

import typer


def print_prediction(f: dict[str, Any]) -> None:
    """What `quantize --dry-run` foresees."""
    typer.echo(f["coverage"])
    typer.echo(f"bits per weight   {f['bits_per_weight']:.3f} (codes alone {f['bits']:.3f})")
    typer.echo(f"size              {f['size_bytes'] / 1e6:.1f} MB without the tokenizer")
    typer.echo(f"free disk         {f['free_disk_bytes'] / 1e6:.0f} MB")
    typer.echo(f"peak memory       about {f['peak_memory_bytes'] / 1e6:.0f} MB")
    typer.echo(f"time              about {f['seconds']:.0f} s on this machine")


def print_evaluation(f: dict[str, Any]) -> None:
    """Perplexity, divergence and tasks."""
    shown = "none (nothing to score)" if f["perplexity"] is None else f"{f['perplexity']:.4f}"
    typer.echo(f"perplexity        {shown} over {f['tokens']} tokens in windows of {f['seq_len']}")
    typer.echo(f"tail left out     {f['tail_tokens']} tokens")
    if f["bits_per_weight"] is not None:
        typer.echo(f"bits per weight   {f['bits_per_weight']:.3f}, {f['size_bytes'] / 1e6:.1f} MB")
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


def print_inspection(f: dict[str, Any]) -> None:
    """An artifact as a whole, then layer by layer."""
    typer.echo(f"method            {f['method']}")
    typer.echo(f"bits              {f['bits']:.3f} (average code width)")
    typer.echo(f"bits per weight   {f['bits_per_weight']:.3f} over {f['weights'] / 1e6:.1f} M weights")
    typer.echo(f"size              {f['size_bytes'] / 1e6:.1f} MB without the tokenizer")
    calibration = f["calibration"] or {}
    if calibration:
        typer.echo(
            f"calibration       {calibration['samples']} x {calibration['seq_len']} tokens of {calibration['source']}"
        )
    width = max((len(layer["name"]) for layer in f["layers"] + f["embeddings"]), default=0)
    for layer in f["embeddings"] + f["layers"]:
        shape = "x".join(map(str, layer["shape"]))
        typer.echo(
            f"{layer['name']:{width}}  {shape:>12}  {layer['bits']:.2f} bits  {layer['bits_per_weight']:.3f} bpw"
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
