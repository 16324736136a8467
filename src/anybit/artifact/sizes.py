"""How large an artifact is, as a whole and at each of its sizes, measured from its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from anybit.artifact.config_json import dense_layout
from anybit.artifact.files import is_tokenizer_file
from anybit.artifact.levels import Progressive, read_progressive
from anybit.artifact.reader import open_artifact
from anybit.checkpoint.directory import Checkpoint
from anybit.config import parse_bytes
from anybit.errors import InputError
from anybit.formats import TwoFour
from anybit.formats.layout import at_width, code_bits, stored_bytes, stored_widths, widest
from anybit.methods.ordering import with_counts
from anybit.methods.two_four_sixteen import bits_eq10


def choose_rung(
    path: Path,
    quantization: Mapping[str, Any],
    checkpoint: Checkpoint,
    bits: float | None,
    bpw: float | None,
    size: int | str | None,
) -> tuple[Progressive | None, int | None]:
    """The refinements of a progressive artifact, None for another one, and the last of them that a budget allows.

    Args:
        path: the artifact, opened as `quantization` and `checkpoint`.
        bits: average code width, or
        bpw: most stored bits per weight, or
        size: most bytes of all files but the tokenizer, a number or text such as "110MB". None of them: no last one is
            chosen.

    Raises:
        InputError: a budget too small, more bits than are there, several of the three, or an artifact that has no
            refinements.
    """
    found = read_progressive(path, quantization)
    for name, value in (("bits", bits), ("bpw", bpw)):
        if value is not None and not _is_number(value):
            raise InputError(f"{name} {value!r}: expected a number")
    given = sum(value is not None for value in (bits, bpw, size))
    if given > 1:
        raise InputError("bits, bpw and size (--bits, --bpw, --size) set the same thing: give one of them")
    if found is None:
        if bpw is not None or size is not None:
            raise InputError(
                f"{path} has no refinements: bpw and size (--bpw, --size) are for artifacts of the method anybit"
            )
        return None, None
    if bits is not None:
        return found, found.upto_bits(bits)
    sizes = _Sizes.of(path, quantization, checkpoint, found)
    if bpw is not None:
        least = sizes.layer_bytes(sizes.layouts)
        needs = f"{sizes.bits_per_weight(sizes.layouts):.3f} bits per weight"
        return found, found.upto_bytes(least, bpw * sizes.weights / 8, f"{bpw:g} bits per weight", needs)
    if size is not None:
        size = parse_bytes(size) if isinstance(size, str) else size
        if not _is_number(size):
            raise InputError(f"size {size!r}: expected a number of bytes, or text such as '110MB'")
        least = sizes.file_bytes()
        return found, found.upto_bytes(least, size, f"{size / 1e6:g} MB", f"{least / 1e6:.1f} MB")
    return found, None


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True)
class _Sizes:
    """What an opened artifact takes: its linear layers, and its files; of a progressive one up to some rung."""

    path: Path
    layouts: Mapping[str, dict[str, Any]]  # of all linear layers of the blocks, quantized or not
    checkpoint: Checkpoint
    found: Progressive | None

    @staticmethod
    def of(
        path: Path, quantization: Mapping[str, Any], checkpoint: Checkpoint, found: Progressive | None
    ) -> _Sizes:
        dense = {
            name: dense_layout(tuple(shape), checkpoint.dtype(f"{name}.weight"))
            for name, shape in quantization["dense"].items()
        }
        return _Sizes(path, {**quantization["layers"], **dense}, checkpoint, found)

    @property
    def weights(self) -> int:
        return sum(prod(layout["shape"]) for layout in self.layouts.values())

    def layer_bytes(self, layouts: Mapping[str, Mapping[str, Any]]) -> int:
        return sum(_layer_bytes(name, layout, self.checkpoint) for name, layout in layouts.items())

    def bits_per_weight(self, layouts: Mapping[str, Mapping[str, Any]], rung: int = 0) -> float:
        """Of all linear layers, read as `layouts`, and the refinements up to a rung."""
        refined = self.found.bytes_upto(rung) if self.found else 0
        return 8 * (self.layer_bytes(layouts) + refined) / self.weights if self.weights else 0.0

    def file_bytes(self, rung: int = 0) -> int:
        """Of all files but the tokenizer, and but the refinements after a rung."""
        rungs = self.found.rungs if self.found else ()
        later = {r.file for r in rungs[rung + 1 :]}
        files = [f for f in self.path.rglob("*") if f.is_file() and not is_tokenizer_file(f.name)]
        return sum(f.stat().st_size for f in files if f.name not in later)


def curve(path: Path) -> list[dict[str, Any]]:
    """What a progressive artifact is at each of its sizes.

    Returns:
        of the core and every refinement: `bits` (average width), `bits_per_weight`, `size_bytes` (all files but the
        tokenizer), `loss` (expected increase in nats per token) and `present`.

    Raises:
        InputError: see `open_artifact`; an artifact that has no refinements.
    """
    quantization, checkpoint = open_artifact(path)
    found = read_progressive(path, quantization)
    if found is None:
        raise InputError(
            f"{path} has one size: only what `anybit quantize --method anybit` made has a curve, and what "
            "`save_pretrained` makes of it has not"
        )
    sizes = _Sizes.of(path, quantization, checkpoint, found)
    core = sizes.file_bytes()
    return [
        {
            "bits": rung.bits,
            "bits_per_weight": sizes.bits_per_weight(sizes.layouts, i),
            "size_bytes": core + found.bytes_upto(i),
            "loss": rung.loss,
            "present": i < found.present,
        }
        for i, rung in enumerate(found.rungs)
    ]


def inspect(
    path: Path, bits: float | None = None, bpw: float | None = None, size: int | str | None = None
) -> dict[str, Any]:
    """What an artifact is made of, its sizes taken from its files.

    Args:
        path: the artifact.
        bits: the width at which a nested artifact is read; its widest by default. See `choose_rung` for it and
        bpw, size: what an artifact of the method anybit may take, instead.

    Returns:
        `method`, `bits` (average width), `bits_eq10` (2/4/16: the same with its scales), `bits_per_weight` (8 x bytes
        read of all linear layers in the blocks / their weights, whether they are quantized or not),
        `file_bits_per_weight` (the same of all bytes stored: more for a nested artifact, whose `widths` are listed with
        the bits per weight read at each), `kv_bits`, `size_bytes` (all files but the tokenizer), `calibration`,
        `layers` and what else the artifact says of its making. JSON-able.

    Raises:
        InputError: see `open_artifact`.
    """
    quantization, checkpoint = open_artifact(path)
    found, rung = choose_rung(path, quantization, checkpoint, bits, bpw, size)
    sizes = _Sizes.of(path, quantization, checkpoint, found)
    if found is None:
        chosen, figures = _read_at_width(sizes, bits)
    else:
        chosen, figures = _read_at_rung(sizes, found, found.present - 1 if rung is None else rung)
    return {
        "method": quantization.get("method"),
        "bits": code_bits(chosen),
        "bits_eq10": _bits_eq10(quantization["layers"]),
        **figures,
        "kv_bits": quantization.get("kv_bits", 16),
        "weights": sizes.weights,
        "calibration": quantization.get("calibration"),
        "base": quantization.get("base"),
        "options": quantization.get("options"),
        "embeddings": [_describe(name, x, checkpoint) for name, x in quantization["embeddings"].items()],
        "layers": [_describe(name, x, checkpoint) for name, x in chosen.items()],
    }


def _read_at_width(sizes: _Sizes, bits: float | None) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """An artifact without refinements at one of its widths: the layouts that are read, and its sizes."""
    widths = check_width(sizes.path, sizes.layouts, bits)

    def read_at(width: float | None) -> dict[str, dict[str, Any]]:
        return {name: at_width(x, width) if width else widest(x) for name, x in sizes.layouts.items()}

    nested = [{"bits": b, "bits_per_weight": sizes.bits_per_weight(read_at(b))} for b in widths]
    return read_at(bits), {
        "bits_per_weight": sizes.bits_per_weight(read_at(bits)),
        "file_bits_per_weight": sizes.bits_per_weight(sizes.layouts),
        "widths": nested if len(widths) > 1 else [],
        "refinements": None,
        "size_bytes": sizes.file_bytes(),
    }


def _read_at_rung(
    sizes: _Sizes, found: Progressive, rung: int
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The same of a core and its refinements up to a rung."""
    counts = found.counts(rung, check=False)[rung]
    refined = {name: with_counts(sizes.layouts[name], rows) for name, rows in counts.items()}
    return {**sizes.layouts, **refined}, {
        "bits_per_weight": sizes.bits_per_weight(sizes.layouts, rung),
        "file_bits_per_weight": sizes.bits_per_weight(sizes.layouts, found.present - 1),
        "widths": [],
        "refinements": {"read": rung, "present": found.present - 1, "all": len(found.rungs) - 1},
        "size_bytes": sizes.file_bytes(rung),
    }


def _bits_eq10(layouts: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Average width as 2/4/16 counts it, over the layers stored so; None where there are none."""
    weights, bits = 0, 0.0
    for layout in layouts.values():
        (out, in_), tile = layout["shape"], layout["tiles"][0]
        if tile["format"] == TwoFour.NAME:
            weights += out * in_
            bits += out * in_ * bits_eq10(1 - tile["narrow"] / in_, tile["group_size"])
    return bits / weights if weights else None


def check_width(path: Path, layouts: Mapping[str, Mapping[str, Any]], bits: float | None) -> list[int]:
    """The widths that an artifact's layers store, ascending; several for a nested one.

    Raises:
        InputError: `bits` is none of them.
    """
    widths = sorted({b for layout in layouts.values() for b in stored_widths(layout)})
    if bits is not None and bits not in widths:
        if len(widths) > 1:
            raise InputError(f"{path} has the widths {', '.join(map(str, widths))}, not {bits:g}")
        raise InputError(f"{path} has one width: leave bits (--bits) out")
    return widths


def _layer_bytes(name: str, layout: Mapping[str, Any], checkpoint: Checkpoint) -> int:
    """Bytes that a layer of this layout reads from the files, bias apart."""
    if layout["tiles"][0]["format"] == "dense":
        return checkpoint.dtype(f"{name}.weight").itemsize * prod(layout["shape"])
    return stored_bytes(layout)  # `open_artifact` held it against the files


def _describe(name: str, layout: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """One layer's line of `inspect`."""
    stored = _layer_bytes(name, layout, checkpoint)
    line = {
        "name": name,
        "shape": list(layout["shape"]),
        "bits": code_bits({name: layout}),
        "bits_per_weight": 8 * stored / prod(layout["shape"]),
        "bytes": stored,
        "tiles": [dict(tile) for tile in layout["tiles"]],
    }
    channels = _channel_bits(name, layout, checkpoint)
    return line | {"channel_bits": channels} if channels else line


def _channel_bits(name: str, layout: Mapping[str, Any], checkpoint: Checkpoint) -> list[int]:
    """The width of every input channel, where a layer's channels differ in width."""
    tiles = layout["tiles"]
    if len(tiles) < 2 or any("rows" in tile or "cols" not in tile for tile in tiles):
        return []
    bits = torch.zeros(layout["shape"][1], dtype=torch.int64)
    for i, tile in enumerate(tiles):
        channels = checkpoint.read(f"{name}.{i}.cols").long()
        if int(channels.min()) < 0 or int(channels.max()) >= len(bits):
            raise InputError(
                f"{name}.{i}.cols points outside 0..{len(bits) - 1}: the artifact is damaged; copy it again"
            )
        bits[channels] = tile["bits"]
    return bits.tolist()
