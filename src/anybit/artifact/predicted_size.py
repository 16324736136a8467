"""Bytes of an artifact besides its tensors, before it exists: the same texts are rendered, with stand-ins for hashes.

A few kB too much at most, never too little: `--size` is a promise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from anybit.artifact import coded_planes
from anybit.artifact.config_json import artifact_config, provenance
from anybit.artifact.files import is_tokenizer_file, shard_file
from anybit.artifact.levels import Size
from anybit.artifact.model_card import model_card
from anybit.artifact.writer import described_files, hash_list
from anybit.config import Json, Options
from anybit.formats.dtypes import Dtype
from anybit.methods import METHODS, ordering

if TYPE_CHECKING:
    from anybit.artifact.contents import Plan
    from anybit.calibration.streaming import StreamedModel

Stored = Mapping[str, tuple[Dtype, tuple[int, ...]]]  # tensor name -> dtype and shape
HASH = "0" * 64
GENERATION_BYTES = 512  # generation_config.json rebuilt from GGUF metadata: a few token ids


def overhead_bytes(streamed: StreamedModel, plan: Plan, options: Options) -> int:
    """Upper bound of the bytes of shard headers, JSON files, model card and copied files but the tokenizer."""
    levels = plan.sizes()
    if (ordered := METHODS[options.name].ordered) is not None:  # a layer of the base layer may have any plane
        most, asked = 10 * plan.tensor_bytes, ordered(options)
        highest = ordering.most_bits(asked.bits, plan.layouts, plan.embeddings)
        levels = (Size(8.0, most, most, 9999.0, True),) * len(ordering.level_widths(highest))
        layouts = ordering.with_all_planes({**plan.layouts, **plan.embeddings})
        plan = plan.with_layouts(coded_planes.as_long_as_any(layouts) if asked.coded else layouts)
    shards = [_shard(streamed, plan, i) for i in (None, *range(len(streamed.blocks)))]
    headers = [_header_bytes(shard) for shard in shards]
    sizes = [header + _data_bytes(shard) for header, shard in zip(headers, shards)]
    names = [shard_file(i, len(shards)) for i in range(len(shards))]
    weight_map = {tensor: name for name, shard in zip(names, shards) for tensor in shard}
    made = provenance(streamed.checkpoint, HASH, options, _widest_calibration(plan, options))
    total = sum(_data_bytes(shard) for shard in shards)
    described = described_files(weight_map, total, artifact_config(streamed, plan, made))
    stored = dict(zip(names, sizes)) | dict.fromkeys(streamed.checkpoint.asset_names(), max(sizes))
    hashes = hash_list({name: {"bytes": n, "sha256": HASH} for name, n in stored.items()}, described)
    card = model_card(streamed.checkpoint, plan, options, made, levels)
    texts = sum(len(text.encode()) for text in (*described.values(), hashes, card))
    return sum(headers) + texts + _asset_bytes(streamed)


def _shard(streamed: StreamedModel, plan: Plan, i: int | None) -> Stored:
    """Tensors of block i's shard, or of the one with everything outside the blocks."""
    layouts = {**plan.layouts, **plan.embeddings}
    stored: dict[str, tuple[Dtype, tuple[int, ...]]] = {}
    for name in streamed.tensor_names(i):
        layer = name.removesuffix(".weight")
        if layer in layouts:
            stored |= {f"{layer}.{f}": entry for f, entry in layouts[layer].stored_tensors().items()}
        else:
            stored[name] = plan.kept[name]
    return stored


def _data_bytes(shard: Stored) -> int:
    return sum(dtype.itemsize * prod(shape) for dtype, shape in shard.values())


def _header_bytes(shard: Stored) -> int:
    """Bytes of a safetensors header; every offset is taken to be as long as the largest."""
    end = _data_bytes(shard)
    header: Json = {
        # BF16: values beyond float16 make it so
        name: {
            "dtype": (Dtype.BF16 if dtype is Dtype.F16 else dtype).name,
            "shape": shape,
            "data_offsets": [end, end],
        }
        for name, (dtype, shape) in shard.items()
    }
    header["__metadata__"] = {"format": "pt"}
    length = len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    return 8 + (length + 7) // 8 * 8


def _widest_calibration(plan: Plan, options: Options) -> Json | None:
    """A description at least as long as that of any text: a plan does not know which one it will be."""
    if not plan.statistics:
        return None
    counts = {"samples": options.windows, "seq_len": options.window, "seed": options.seed}
    counts |= {"requested": options.windows, "own_windows": options.windows}
    return {"source": "'" * 255, "sha256": HASH, **counts}


def _asset_bytes(streamed: StreamedModel) -> int:
    """Licence, generation config and what else is copied beside the weights, the tokenizer apart."""
    files = [file for file in streamed.checkpoint.asset_files() if not is_tokenizer_file(file.name)]
    return sum(file.stat().st_size for file in files) + (GENERATION_BYTES if streamed.checkpoint.gguf else 0)
