"""What an artifact's config.json says of it: how it was made, and how every layer is stored.

Imports nothing heavy: it is read while Transformers itself is still being imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import anybit
from anybit.config import EMBED_BITS, KV_BITS, Options
from anybit.errors import InputError
from anybit.formats import GroupInt
from anybit.formats.layout import FORMAT_VERSION, QUANT_METHOD
from anybit.formats.validate import validate_layout

if TYPE_CHECKING:
    from anybit.artifact.contents import Plan
    from anybit.calibration.streaming import StreamedModel
    from anybit.checkpoint.directory import Checkpoint


def provenance(
    checkpoint: Checkpoint, base_hash: str, options: Options, calibration: Mapping[str, Any] | None
) -> dict[str, Any]:
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


def artifact_config(streamed: StreamedModel, plan: Plan, made: Mapping[str, Any]) -> dict[str, Any]:
    """The artifact's config.json; `made` is its `provenance`."""
    config = streamed.checkpoint.config.to_dict()
    config.pop("_name_or_path", None)  # where the base lies on this machine
    config["architectures"] = [type(streamed.model).__name__]
    config["dtype"] = str(config.get("dtype") or "float32").removeprefix("torch.")
    if any(layout.get("tied") for layout in plan.embeddings.values()):
        config["tie_word_embeddings"] = False  # the head reads the quantized embedding itself
    config["quantization_config"] = {
        "quant_method": QUANT_METHOD,
        "format_version": FORMAT_VERSION,
        "bits": plan.code_bits,
        "kv_bits": made["options"]["kv_bits"],
        **made,
        "embeddings": plan.embeddings,
        "layers": plan.layouts,
        "dense": {name: layout["shape"] for name, layout in plan.dense.items()},
    }
    return config


def dense_layout(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    """How a linear layer [out, in] is described whose weights are stored as they are."""
    name = str(dtype).removeprefix("torch.")
    return {"shape": list(shape), "tiles": [{"format": "dense", "dtype": name, "bits": 8 * dtype.itemsize}]}


def check_layers(place: str, quantization: dict[str, Any]) -> None:
    """Check `layers`, `embeddings` and `dense` of a `quantization_config`; what is absent becomes empty.

    Raises:
        InputError: a description that no writer makes.
    """
    for group in ("layers", "embeddings", "dense"):
        if not isinstance(quantization.setdefault(group, {}), dict):
            raise InputError(f"{place}: {group} must be an object of layer names to descriptions")
    if quantization.get("kv_bits", 16) not in KV_BITS:
        raise InputError(
            f"{place}: kv_bits {quantization['kv_bits']!r} is not one of {', '.join(map(str, KV_BITS))}"
        )
    for name, layout in {**quantization["layers"], **quantization["embeddings"]}.items():
        validate_layout(name, layout)
    for name, layout in quantization["embeddings"].items():
        _check_embedding(name, layout)
    for name, shape in quantization["dense"].items():
        if not (isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and n > 0 for n in shape)):
            raise InputError(f"{place}: dense layer {name!r} has the shape {shape!r}, expected [out, in]")


def _check_embedding(name: str, layout: Mapping[str, Any]) -> None:
    """Rows of an embedding are looked up one by one: each must hold all of its own data."""
    (tile, *others), widths = layout["tiles"], [bits for bits in EMBED_BITS if bits < 16]
    other = others or tile["format"] != GroupInt.NAME or {"sparse", "input_scale"} & layout.keys()
    if other or "act_bits" in tile or tile["bits"] not in widths or "rows" in tile or "cols" in tile:
        raise InputError(
            f"{name}: an embedding is stored as one tile of {' or '.join(map(str, widths))} bits without rows or "
            f"cols, not as {len(layout['tiles'])} like {tile!r}: the artifact is damaged"
        )
