"""An artifact written again: its planes coded, or expanded, and of the newest format version. Nothing is lost."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from anybit.artifact.coded_planes import Planes, code, enhancement, expand
from anybit.artifact.enhancements import Enhancements
from anybit.artifact.entry import Entry
from anybit.artifact.files import EMBEDDING, PLANES, SECTION, enhancement_file, link, list_hash
from anybit.artifact.levels import Levels
from anybit.artifact.model_card import with_sizes
from anybit.artifact.reader import Artifact, open_artifact
from anybit.artifact.split import memory_bytes
from anybit.artifact.writer import ArtifactWriter
from anybit.checkpoint.files import read_json
from anybit.config import Json
from anybit.errors import InputError
from anybit.formats.layout import FORMAT_VERSION, LayerLayout
from anybit.formats.weight import PackedWeight
from anybit.methods.ordering import coded_columns, plane_rows, with_counts
from anybit.progress import SILENT, Advance, Silent

CARD = "README.md"


def convert(
    path: str | Path, out: str | Path, *, coded: bool = True, overwrite: bool = False, report: Silent = SILENT
) -> Path:
    """Write an artifact of the method anybit again. It runs as before, bit for bit.

    All planes that are there are held in memory. An interrupted call, repeated, goes on with the shards of its base
    layer that were finished, and ends in the same bytes.

    Args:
        path: the artifact, of any format version; enhancement layers that are missing are left out.
        out: directory to make.
        coded: whether files hold planes entropy-coded, or as they are in memory, for whoever maps them.
        overwrite: replace an artifact that is there.
        report: where progress goes.

    Raises:
        InputError: an artifact that has no planes to code, or is damaged; an output that is taken; a full disk.
    """
    artifact = open_artifact(Path(path))
    found = artifact.enhancements
    if found is None:
        method = artifact.quantization.get("method")
        raise InputError(
            f"{path} was made by {method} and has no enhancement layers: there is nothing to convert, this version "
            "reads it as it is"
        )
    if note := found.note():
        report.say(f"{note}; so does what is written")
    files = sorted(artifact.checkpoint.files)
    fingerprint = hashlib.sha256(f"{found.entries[-1].chain} {found.present} {coded}".encode()).hexdigest()
    with ArtifactWriter(Path(out), fingerprint, len(files), overwrite) as writer:
        advance = report.task("converts", len(files) + found.present - 1)
        planes, layouts = _write_base(writer, artifact, files, coded, advance)
        section, sizes = _write_enhancements(writer, found, planes, coded, advance)
        config = _config(artifact, layouts, section, coded)
        artifact.checkpoint.copy_assets(writer.work)
        card, texts = Path(path) / CARD, {}
        if card.is_file():
            texts[CARD] = _card(card.read_text(encoding="utf-8"), artifact, writer, files, sizes)
        writer.finish(config, texts, sizes, {SECTION: section})
    return Path(out)


class _Held(Planes):
    """All planes of an artifact, in memory."""

    def __init__(self, found: Enhancements) -> None:
        self.columns = coded_columns(found.layouts)
        self.tensors: dict[str, Mapping[str, Tensor]] = {}

    def rows(self, name: str, plane: int, first: int, last: int) -> Tensor:
        return self.tensors[name][f"plane_{plane}"][first:last]

    def shapes(self, name: str) -> Tensor:
        return self.tensors[name]["shapes"]


def _write_base(
    writer: ArtifactWriter, artifact: Artifact, files: Sequence[Path], coded: bool, advance: Advance
) -> tuple[_Held, dict[str, LayerLayout]]:
    """The base layer's shards; returns its planes, with room for all that are there, and its layouts."""
    found = artifact.enhancements
    assert found is not None
    found.check_base()
    planes, layouts = _Held(found), dict(artifact.stored.packed)
    counts = found.counts(found.present - 1)[-1]
    for shard, file in enumerate(files):
        tensors = load_file(file)
        for name in [name for name in planes.columns if f"{name}.scales" in tensors]:
            layout = artifact.stored.packed[name]
            held = {field: tensors.pop(f"{name}.{field}") for field in layout.stored_tensors()}
            packed = expand(name, PackedWeight(layout, held))
            planes.tensors[name] = packed.grown(with_counts(packed.layout, counts[name])).tensors
            packed = code(packed) if coded else packed
            tensors |= {f"{name}.{field}": tensor for field, tensor in packed.tensors.items()}
            layouts[name] = packed.layout
        if shard not in writer.finished:
            writer.write_shard(shard, tensors)
        advance(1)
    return planes, layouts


def _write_enhancements(
    writer: ArtifactWriter, found: Enhancements, planes: _Held, coded: bool, advance: Advance
) -> tuple[list[Json], dict[str, Json]]:
    """The enhancement layers that are there; returns their list, and the sizes and hashes of their files."""
    counts = found.counts(found.present - 1, check=False)
    chain = reduce(link, (writer.finished[shard]["sha256"] for shard in range(writer.shards)), "")
    section: list[Json] = [{"file": "", **_stated(found.entries[0]), "chain": chain}]
    sizes: dict[str, Json] = {}
    arrays = {name: {f: t.numpy() for f, t in held.items()} for name, held in planes.tensors.items()}
    for level in range(1, found.present):
        found.read_into(level, counts[level], counts[level - 1], arrays)
        added = list(plane_rows(counts[level], counts[level - 1]))
        file = enhancement_file(level, found.present - 1)
        sizes[file] = writer.write_split(file, enhancement(planes, added, coded), {"after": chain})
        chain = link(chain, sizes[file]["sha256"])
        stated = _stated(found.entries[level]) | {PLANES: memory_bytes(added, planes.columns)}
        if found.beside:
            stated[EMBEDDING] = found.entries[level].embedding_bytes
        section.append({"file": file, **stated, "chain": chain})
        advance(1)
    return section, sizes


def _card(
    text: str, artifact: Artifact, writer: ArtifactWriter, files: Sequence[Path], sizes: Mapping[str, Json]
) -> str:
    """The model card with the sizes of the new files; JSON files are taken to be as long as before."""
    levels, found = Levels(artifact), artifact.enhancements
    assert found is not None
    old = sum(file.stat().st_size for file in files)
    new = sum((writer.work / writer.file(shard)).stat().st_size for shard in range(writer.shards))
    upto = [0, *itertools.accumulate(size["bytes"] for size in sizes.values())]
    made = [
        replace(size, size_bytes=size.size_bytes - old - found.bytes_upto(i) + new + more)
        for i, (size, more) in enumerate(zip(levels.sizes, upto))
    ]
    return with_sizes(text, made, levels.weights)


def _stated(entry: Entry) -> Json:
    return {"bits": entry.bits, "loss": entry.loss}


def _config(
    artifact: Artifact, layouts: Mapping[str, LayerLayout], section: Sequence[Json], coded: bool
) -> Json:
    """config.json as it was, but for how matrices are stored."""
    config = read_json(artifact.path / "config.json")
    quantization = config["quantization_config"]
    for group in ("layers", "embeddings"):
        quantization[group] = {name: layouts[name].to_json() for name in quantization.get(group, {})}
    quantization["format_version"] = FORMAT_VERSION
    if isinstance(quantization.get("options"), dict):
        quantization["options"]["coded"] = coded
    quantization["bits"] = section[-1]["bits"]
    quantization[SECTION] = {"refinements": len(section) - 1, "list": list_hash(section)}
    return config
