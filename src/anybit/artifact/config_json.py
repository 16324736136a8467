"""What an artifact's config.json says of it: how it was made, and how every layer is stored.

Imports nothing heavy: it is read while Transformers itself is still being imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anybit
from anybit.config import EMBED_BITS, KV_BITS, Json, Options
from anybit.errors import InputError
from anybit.formats import GroupIntLayout, NestedLayout
from anybit.formats.base import is_int
from anybit.formats.layout import FORMAT_VERSION, QUANT_METHOD, LayerLayout

if TYPE_CHECKING:
    from anybit.artifact.contents import Plan
    from anybit.calibration.streaming import StreamedModel
    from anybit.checkpoint.directory import Checkpoint


def provenance(checkpoint: Checkpoint, base_hash: str, options: Options, calibration: Json | None) -> Json:
    """What the artifact says of its making; no times and no machine, so that equal runs give equal bytes."""
    path = Path(checkpoint.source).resolve()
    return {
        "method": options.name,
        "base": {
            "name": path.name if path.exists() else checkpoint.source,
            "sha256": base_hash,
            "quantized_before": checkpoint.quantized_before(),
        },
        "calibration": calibration,
        "options": options.stored(),
        "anybit_version": anybit.__version__,
    }


def own_windows_note(calibration: Json) -> str:
    """Words behind a calibration text, about the windows that the model wrote by itself."""
    own = calibration.get("own_windows", 0)  # artifacts of earlier versions do not say
    return f", {own} of these windows by the model itself" if own else ""


def artifact_config(streamed: StreamedModel, plan: Plan, made: Json) -> Json:
    """The artifact's config.json; `made` is its `provenance`."""
    config = streamed.checkpoint.config.to_dict()
    config.pop("_name_or_path", None)  # where the base lies on this machine
    config["architectures"] = [type(streamed.model).__name__]
    config["dtype"] = str(config.get("dtype") or "float32").removeprefix("torch.")
    if any(layout.tied for layout in plan.embeddings.values()):
        config["tie_word_embeddings"] = False  # the head reads the quantized embedding itself
    config["quantization_config"] = {
        "quant_method": QUANT_METHOD,
        "format_version": FORMAT_VERSION,
        "bits": plan.code_bits,
        "kv_bits": made["options"]["kv_bits"],
        **made,
        "embeddings": {name: layout.to_json() for name, layout in plan.embeddings.items()},
        "layers": {name: layout.to_json() for name, layout in plan.layouts.items()},
        "dense": {name: list(layout.shape) for name, layout in plan.unquantized.items()},
    }
    return config


@dataclass(frozen=True)
class StoredLayers:
    """How the matrices of an artifact are stored, by name."""

    layers: Mapping[str, LayerLayout]  # quantized linear layers
    embeddings: Mapping[str, LayerLayout]  # quantized embedding and head
    unquantized: Mapping[str, tuple[int, int]]  # (out, in) of linear layers that stay as they were

    @property
    def packed(self) -> dict[str, LayerLayout]:
        """Layers, embedding and head."""
        return {**self.layers, **self.embeddings}

    @staticmethod
    def from_json(place: str, quantization: Json) -> StoredLayers:
        """From `layers`, `embeddings` and `dense` of a `quantization_config`, any of which may be absent.

        Raises:
            InputError: a description that no writer makes.
        """
        groups = {group: quantization.get(group, {}) for group in ("layers", "embeddings", "dense")}
        for group, found in groups.items():
            if not isinstance(found, dict):
                raise InputError(f"{place}: {group} must be an object of layer names to descriptions")
        if quantization.get("kv_bits", 16) not in KV_BITS:
            raise InputError(
                f"{place}: kv_bits {quantization['kv_bits']!r} is not one of {', '.join(map(str, KV_BITS))}"
            )
        layers, embeddings = (
            {name: LayerLayout.from_json(name, layout) for name, layout in groups[group].items()}
            for group in ("layers", "embeddings")
        )
        for name, layout in embeddings.items():
            _check_embedding(name, layout)
        for name, shape in groups["dense"].items():
            if not (
                isinstance(shape, list) and len(shape) == 2 and all(is_int(n, 1, 2**31 - 1) for n in shape)
            ):
                raise InputError(f"{place}: dense layer {name!r} has the shape {shape!r}, expected [out, in]")
        return StoredLayers(layers, embeddings, {name: (n, k) for name, (n, k) in groups["dense"].items()})


def _check_embedding(name: str, layout: LayerLayout) -> None:
    """Rows of an embedding are looked up one by one: each must hold all of its own data."""
    tile, widths = layout.tiles[0], [bits for bits in EMBED_BITS if bits < 16]
    uniform = isinstance(tile, GroupIntLayout) and not tile.rounds_inputs and tile.bits in widths
    plain = uniform or isinstance(tile, NestedLayout)
    whole = len(layout.tiles) == 1 and tile.rows is None and tile.cols is None
    if not (plain and whole) or layout.sparse is not None or layout.input_scale:
        raise InputError(
            f"{name}: an embedding is stored as one tile of {' or '.join(map(str, widths))} bits, or a nested one, "
            f"without rows or cols, not as {len(layout.tiles)} like {tile.to_json()!r}: the artifact is damaged"
        )
