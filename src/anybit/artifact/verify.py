"""Check an artifact byte by byte."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from anybit.artifact.coded_planes import expand
from anybit.artifact.enhancements import Enhancements
from anybit.artifact.reader import open_artifact
from anybit.checkpoint.directory import Checkpoint
from anybit.checkpoint.files import HASHES, INDEX, INDEX_LIMIT, check_sha256, is_name_of_file, read_json
from anybit.config import Json
from anybit.errors import InputError
from anybit.formats.layout import LayerLayout
from anybit.formats.validate import check_version, validate
from anybit.formats.weight import PackedWeight
from anybit.methods.ordering import coded_columns, with_counts


def verify(path: Path, progress: Any = None) -> Json:
    """Check an artifact byte by byte: headers, hashes, shapes, bounds, indices, scales.

    Hashes cover the weights, config.json, the tokenizer, chat templates, the generation config and the licence. They
    are integrity, not authenticity: they find damage, but lie beside the files, and whoever changes one can make its
    hash anew.

    Args:
        progress: called with (checks done, checks in all).

    Returns:
        `{"files", "layers", "hashes_checked"}`; without hashes, the files are those of the weights.

    Raises:
        InputError: the first thing that is wrong.
    """
    hashes = _read_hashes(path)
    artifact = open_artifact(path)
    checkpoint, found = artifact.checkpoint, artifact.enhancements
    if found is not None and (note := found.note()):
        raise InputError(f"{note}; copy it and what follows to have all of it")
    layouts = artifact.stored.packed
    fields = {name: [f"{name}.{field}" for field in layouts[name].stored_tensors()] for name in layouts}
    kept = set(checkpoint.names()).difference(*fields.values())
    checks: list[Callable[[], None]]
    checks = [functools.partial(check_sha256, path / file, hashes[file]) for file in hashes]
    checks += [functools.partial(_check_layer, name, layouts[name], checkpoint) for name in layouts]
    checks += [functools.partial(_check_kept, name, checkpoint) for name in sorted(kept)]
    if found is not None:
        checks.append(functools.partial(_check_enhancements, found, layouts, checkpoint))
    copied = [str(file.relative_to(path)) for file in checkpoint.asset_files()]
    listed = [*(file.name for file in checkpoint.files), INDEX, "config.json"]
    listed += copied if hashes.keys() & copied else ()  # earlier versions left all of them out
    for name in listed if (path / HASHES).exists() else ():
        if name not in hashes:
            raise InputError(
                f"{path / HASHES} does not list {name}: it was edited, or `save_pretrained` has written into the "
                "folder of another artifact; copy the artifact again"
            )
    for i, check in enumerate(checks):
        check()
        if progress is not None:
            progress(i + 1, len(checks))
    return {
        "files": len(hashes) or len(checkpoint.files),
        "layers": len(layouts),
        "hashes_checked": bool(hashes),
    }


def _check_enhancements(
    found: Enhancements, layouts: Mapping[str, LayerLayout], checkpoint: Checkpoint
) -> None:
    """The steps and planes of all enhancement layers; their bytes were held against their hashes before."""
    counts, arrays = found.counts(found.present - 1, check=False), {}
    for name in coded_columns(found.layouts):
        packed = expand(name, _stored(name, layouts[name], checkpoint))
        grown = packed.grown(with_counts(packed.layout, counts[-1][name]))
        arrays[name] = {field: tensor.numpy() for field, tensor in grown.tensors.items()}
    for level in range(1, found.present):
        found.read_into(level, counts[level], counts[level - 1], arrays)


def _check_layer(name: str, layout: LayerLayout, checkpoint: Checkpoint) -> None:
    packed = _stored(name, layout, checkpoint)
    validate(name, packed)
    expand(name, packed)


def _stored(name: str, layout: LayerLayout, checkpoint: Checkpoint) -> PackedWeight:
    """A layer as its files have it."""
    return PackedWeight(
        layout, {field: checkpoint.read(f"{name}.{field}") for field in layout.stored_tensors()}
    )


def _check_kept(name: str, checkpoint: Checkpoint) -> None:
    tensor = checkpoint.read(name)
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise InputError(f"{checkpoint.source}: {name} holds NaN or Inf: the artifact is damaged")


def _read_hashes(path: Path) -> dict[str, str]:
    """File name -> SHA-256; empty where `save_pretrained` rewrote the shards."""
    file = path / HASHES
    if not file.exists():
        return {}
    try:
        data = read_json(file, INDEX_LIMIT)
        version, files = data["format_version"], data["files"]
        hashes = {name: str(entry["sha256"]) for name, entry in files.items()}
    except (InputError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"{file} is not a valid list of hashes: the artifact is damaged") from error
    check_version(version)
    for name in hashes:
        if not is_name_of_file(name):
            raise InputError(f"{file} names {name!r}, which is not a file of this directory: refused")
    return hashes
