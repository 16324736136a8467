"""Global precision search: which output rows of the whole model deserve more bits (MixLLM, arXiv:2412.14590, 3.2).

A row's salience is the change of the model's loss when that row alone is rounded, estimated to first and second order
from one backward pass per sample; rows of all layers are sorted in one list.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from math import ceil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from anybit.calibrate import gradient_statistics, load_whole
from anybit.formats import is_int
from anybit.methods import mixllm, rtn
from anybit.progress import SILENT, Advance, Silent
from anybit.spec import LayerSpec, QuantizeConfig, TileSpec
from anybit.stats import GradientStats
from anybit.streaming import StreamedModel

STEP = 0.02  # share of the rows that a progressive search widens at a time
SAMPLES_KEPT = 4  # samples between two savings

Shapes = Mapping[str, tuple[int, int]]


def search(
    streamed: StreamedModel,
    tokens: Tensor,  # int64 [samples, seq_len]
    shapes: Shapes,
    config: QuantizeConfig,
    folder: Path | None = None,
    report: Silent = SILENT,
) -> dict[str, tuple[int, ...]]:
    """The output rows of every layer that get 8 bits, ascending.

    Args:
        streamed: the model; materialised by this call, unquantized afterwards only if the search has one pass.
        tokens: one backward pass per row and pass.
        shapes: layers that take part: name -> (out, in).
        config: `wide_rows` or `bits` (how many), `salience`, `search`, `group_size`.
        folder: where finished parts are kept; a search that was interrupted goes on from there.
        report: where progress goes.

    Raises:
        InputError: see `calibrate.gradient_statistics`.
    """
    share = wide_share(config)
    if share in (0, 1):
        return {name: tuple(range(out)) if share else () for name, (out, _) in shapes.items()}
    steps = [STEP * (k + 1) for k in range(passes(config) - 1)] + [share]
    advance = report.task(
        f"salience of {sum(out for out, _ in shapes.values())} rows", len(tokens) * len(steps)
    )
    wide: dict[str, tuple[int, ...]] = {name: () for name in shapes}
    for i, upto in enumerate(steps):
        if i:
            _widen(streamed, wide, config)
        scores = _scores(
            streamed, tokens, shapes, config, None if folder is None else folder / f"pass-{i}", advance
        )
        for name, rows in wide.items():
            scores[name][list(rows)] = torch.inf  # chosen once, chosen for good
        wide = choose(scores, shapes, upto, by_rows=config.wide_rows is not None)
    return wide


def wide_share(config: QuantizeConfig) -> float:
    """The share of rows, or where `bits` sets it of weights, that get 8 bits."""
    if config.wide_rows is not None:
        return config.wide_rows
    return ((config.bits or mixllm.NARROW) - mixllm.NARROW) / (mixllm.WIDE - mixllm.NARROW)


def passes(config: QuantizeConfig) -> int:
    """How often the search goes through the calibration tokens."""
    share = wide_share(config)
    if config.method != "mixllm" or share in (0, 1):
        return int(config.method != "mixllm")
    return ceil(share / STEP - 1e-9) if config.search == "progressive" else 1


def choose(
    scores: Mapping[str, Tensor], shapes: Shapes, share: float, by_rows: bool
) -> dict[str, tuple[int, ...]]:
    """The rows of the highest scores, up to a share of all rows, or (not `by_rows`) of all weights.

    Ties go to the earlier layer and row.
    """
    names = list(shapes)
    layer = torch.cat([torch.full((shapes[n][0],), i) for i, n in enumerate(names)])
    row = torch.cat([torch.arange(shapes[n][0]) for n in names])
    cost = torch.ones(len(row)) if by_rows else torch.tensor([shapes[n][1] for n in names])[layer].float()
    order = torch.argsort(torch.cat([scores[n] for n in names]), descending=True, stable=True)
    spent = cost.double()[order].cumsum(0)
    chosen = order[: int((spent <= share * float(cost.double().sum()) + 1e-6).sum())]
    found: dict[str, list[int]] = {name: [] for name in names}
    for index in chosen.sort().values.tolist():
        found[names[int(layer[index])]].append(int(row[index]))
    return {name: tuple(rows) for name, rows in found.items()}


def score(stats: GradientStats, kind: str) -> Tensor:
    """Sum over samples of each row's estimated change of loss, float32 [out].

    "full" is eq. 4, `|p + p^2 / 2|` with p the gradient times the rounding error of the whole row; "second-order"
    leaves the first term out; "diagonal" also takes the row's weights one by one, as a diagonal Fisher matrix would.
    """
    assert stats.products is not None and stats.diagonal is not None
    if kind == "diagonal":
        return stats.diagonal / 2
    second = stats.products.square() / 2
    return ((stats.products + second).abs() if kind == "full" else second).sum(0)


def _scores(
    streamed: StreamedModel,
    tokens: Tensor,
    shapes: Shapes,
    config: QuantizeConfig,
    folder: Path | None,
    advance: Advance,
) -> dict[str, Tensor]:
    """Salience of every row: the mean of `score` over samples, gathered part by part."""
    total = {name: torch.zeros(out) for name, (out, _) in shapes.items()}
    for a in range(0, len(tokens), SAMPLES_KEPT):
        part = tokens[a : a + SAMPLES_KEPT]
        file = None if folder is None else folder / f"samples-{a}.safetensors"
        found = None if file is None else _read_part(file, total)
        if found is not None:
            advance(len(part))
        else:
            stats = gradient_statistics(
                streamed, part, shapes, deltas=_rounding(streamed, config), advance=advance
            )
            found = {name: score(s, config.salience) for name, s in stats.items()}
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                unfinished = file.with_suffix(".new")
                save_file(found, unfinished)
                with unfinished.open("rb") as stream:
                    os.fsync(stream.fileno())
                unfinished.rename(file)
        for name in total:
            total[name] += found[name]
    return {name: t / len(tokens) for name, t in total.items()}


def _read_part(file: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """A part that was finished before; None where it is missing or damaged."""
    try:
        found = load_file(file)
    except (OSError, SafetensorError):
        return None
    return found if {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in like.items()} else None


def _rounding(streamed: StreamedModel, config: QuantizeConfig) -> Callable[[str, int, int], Tensor]:
    """The error of rounding rows of a layer to 4 bits, asymmetric, without clipping; made anew at each call."""
    spec = LayerSpec(tiles=(TileSpec(mixllm.NARROW, config.group_size or 128),))

    def delta(name: str, first: int, last: int) -> Tensor:
        rows = _rows(streamed, name)[first:last].float()
        return rtn.quantize(rows, None, spec).dequantize().sub_(rows)

    return delta


def _rows(streamed: StreamedModel, name: str) -> Tensor:
    module = streamed.model.get_submodule(name)
    return module.weight.T if isinstance(module, Conv1D) else module.weight


@torch.no_grad()
def _widen(streamed: StreamedModel, wide: Mapping[str, tuple[int, ...]], config: QuantizeConfig) -> None:
    """Round the rows chosen so far to 8 bits: the next pass's gradients are those of that model."""
    load_whole(streamed)
    spec = LayerSpec(tiles=(TileSpec(mixllm.WIDE, config.group_size or 128, symmetric=True),))
    for name, rows in wide.items():
        if rows:
            weight, index = _rows(streamed, name), torch.tensor(rows)
            weight[index] = rtn.quantize(weight[index].float(), None, spec).dequantize().to(weight.dtype)


def read_rows(file: Path, shapes: Shapes) -> dict[str, tuple[int, ...]] | None:
    """What `write_rows` wrote; None where there is nothing of these layers, or it is damaged."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or found.keys() != shapes.keys():
        return None
    for name, rows in found.items():
        whole = isinstance(rows, list) and all(is_int(row, 0, shapes[name][0] - 1) for row in rows)
        if not whole or rows != sorted(set(rows)):
            return None
    return {name: tuple(rows) for name, rows in found.items()}


def write_rows(file: Path, rows: Mapping[str, tuple[int, ...]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".new")
    unfinished.write_text(json.dumps(rows))
    unfinished.rename(file)
