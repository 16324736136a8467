"""Damage by chance: to bytes, JSON, safetensors files and folders; and hashes made anew, as an attacker would."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from anybit.artifact.files import SECTION, link, list_hash
from anybit.checkpoint.files import HASHES

WHOLE = [-1, 0, 1, 2, 3, 7, 255, 65536, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63, 2**64, 10**30, -(2**63)]
BROKEN = [0.5, -0.0, 1e-30, 1e308, float("inf"), float("nan")]
TEXTS = [
    "",
    "x",
    "../x",
    "/etc/passwd",
    "\0",
    "\ud800",
    "\u202e",
    "é" * 300,
    "{{ x }}",
    "%s",
    "\x1b]0;x\x07",
    "a" * 70_000,
]
OTHERS: list[Any] = [None, True, False, [], {}, [1], {"x": 1}, [[]], "F16", "I32", "gptq", "float16", "cuda"]
DEEP = (50, 2_000, 200_000)  # levels of nesting
KINDS = {
    **{"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4},
    **{"F16": 2, "BF16": 2, "I16": 2, "U16": 2, "U8": 1, "I8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1},
}
EXTRA: dict[str, Any] = {  # keys that a configuration class, `generate` or a tokenizer minds
    **{"num_labels": 30_000_000, "transformers_weights": "model.safetensors", "return_dict": False},
    **{"auto_map": {"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.T", None]}, "torch_dtype": "int8"},
    **{"attn_implementation": "evil/kernel", "_attn_implementation": "flash_attention_2", "use_cache": False},
    **{"dtype": 65536, "output_hidden_states": True, "output_attentions": True, "is_decoder": True},
    **{
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
        "pad_token_id": 9999,
        "architectures": ["Evil"],
    },
    **{"rope_scaling": {"rope_type": "yarn", "factor": 1e9}, "rope_parameters": {"rope_type": "longrope"}},
    **{"quantization_config": {"quant_method": "gptq", "bits": 4}, "layer_types": ["sliding_attention"] * 3},
    **{"sliding_window": 0, "max_position_embeddings": 2**31 - 1, "n_positions": 2**31 - 1, "rope_theta": 0},
    **{"max_seq_len": 2**31 - 1, "n_ctx": 2**23, "model_input_names": ["x"], "padding_side": "left"},
    **{
        "truncation_side": "x",
        "modules": [{"type": "Dense"}],
        "pooling_mode_max_tokens": True,
        "pad_token": None,
    },
    **{"num_beams": 100_000, "num_return_sequences": 100_000, "max_length": -5, "min_length": 10**9},
    **{"cache_implementation": "static", "prompt_lookup_num_tokens": 3, "guidance_scale": 2.0, "top_k": -1},
    **{
        "stop_strings": ["a"],
        "forced_eos_token_id": 10**6,
        "suppress_tokens": [10**9],
        "watermarking_config": {},
    },
    **{"eos_token_id": [10**12], "bos_token_id": "x", "no_repeat_ngram_size": 2**31, "penalty_alpha": 0.5},
    **{
        "tokenizer_class": "LlamaTokenizer",
        "model_max_length": -1,
        "chat_template": "{% for i in range(10**9) %}{% endfor %}",
    },
    **{
        "adapter": "x",
        "name_or_path": "/etc",
        "_commit_hash": "x",
        "use_kernels": True,
        "decoder_sparse_step": 0,
    },
}
SECRET = "the secret that no artifact may publish"

Tensors = dict[str, tuple[str, list[int], bytes]]  # name -> dtype, shape, data


# ---- bytes


def damaged_bytes(rng: Random, data: bytes, upto: int | None = None) -> bytes:
    """Data with a few edits in its first `upto` bytes (default: all)."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        limit = max(1, min(len(made), upto or len(made)))
        at, size = rng.randrange(limit), rng.choice((1, 2, 4, 8, 100))
        match rng.randrange(8):
            case 0 | 1:
                made[at : at + 1] = bytes([rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))])
            case 2:
                made[at : at + size] = rng.randbytes(size)
            case 3:
                made[at : at + 8] = (rng.choice(WHOLE) % 2**64).to_bytes(8, "little")
            case 4:
                made[at:at] = rng.randbytes(size)
            case 5:
                del made[at : at + size]
            case 6:
                made[at : at + size] = made[(other := rng.randrange(limit)) : other + size]
            case 7:
                del made[at:]
    return bytes(made)


# ---- JSON


def value(rng: Random) -> Any:
    """What stands where something else is expected."""
    return copy.deepcopy(rng.choice(rng.choice((WHOLE, WHOLE, BROKEN, TEXTS, OTHERS))))


def places(data: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    found, rest = [], [data]
    while rest:
        holder = rest.pop()
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        found += [(holder, key) for key in keys]
        rest += [holder[key] for key in keys if isinstance(holder[key], dict | list)]
    return found


def edit(rng: Random, data: Any) -> None:
    """One edit, in place, of a JSON object."""
    found = places(data)
    if isinstance(data, dict) and rng.random() < 0.15:
        key = rng.choice(list(EXTRA))
        data[key] = copy.deepcopy(EXTRA[key])
        return
    if not found:
        data[rng.choice(TEXTS)] = value(rng)
        return
    holder, key = rng.choice(found)
    other_holder, other_key = rng.choice(found)
    match rng.randrange(9):
        case 0 | 1 | 2 | 3:
            holder[key] = value(rng)
        case 4:
            del holder[key]
        case 5:
            holder[key] = copy.deepcopy(other_holder[other_key])
        case 6 if isinstance(holder, dict):
            holder[rng.choice((str(key) + "x", str(other_key), rng.choice(TEXTS)))] = holder.pop(key)
        case 7 if isinstance(holder, list):
            holder[key:key] = [copy.deepcopy(holder[key])] * rng.choice((1, 3, 300))
        case 8 if isinstance(holder[key], int | float):
            holder[key] = holder[key] * rng.choice((-1, 2, 1000)) + rng.choice((-1, 0, 1))
        case _:
            holder[key] = [holder[key]]


def damaged_json(rng: Random, data: Any) -> bytes:
    """A JSON object with one to three edits, as text; now and then text that no writer makes."""
    made = copy.deepcopy(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        edit(rng, made)
    text = json.dumps(made, indent=rng.choice((None, 2)))
    match rng.randrange(25):
        case 0:
            n = rng.choice(DEEP)
            text = text.replace("{", '{"deep": ' + "[" * n + "]" * n + ", ", 1)
        case 1:
            text = text.replace("{", '{"model_type": "gpt2", "model_type": 1, ', 1)
        case 2:
            text = text.replace("1", "1" * rng.choice((400, 5000)), 1)
        case 3:
            return damaged_bytes(rng, text.encode())
        case 4:
            return text.encode("utf-16")
    return text.encode()


# ---- safetensors


def read_shard(path: Path) -> tuple[Tensors, dict[str, str] | None]:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    metadata = header.pop("__metadata__", None)
    spans = {name: slice(*(end + n for n in entry["data_offsets"])) for name, entry in header.items()}
    return {
        name: (entry["dtype"], entry["shape"], data[spans[name]]) for name, entry in header.items()
    }, metadata


def header_of(tensors: Tensors, metadata: dict[str, str] | None) -> dict[str, Any]:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    return header


def write_shard(path: Path, tensors: Tensors, header: bytes, length: int | None = None) -> None:
    size = len(header) if length is None else length
    data = b"".join(data for _, _, data in tensors.values())
    path.write_bytes((size % 2**64).to_bytes(8, "little") + header + data)


def damage_shard(rng: Random, path: Path) -> str:
    """Damage a safetensors file; returns how."""
    tensors, metadata = read_shard(path)
    how = rng.choice((_header, _header, _values, _values, _values, _tensor, _tensor, _bytes))
    return how(rng, path, tensors, metadata)


def _bytes(rng: Random, path: Path, tensors: Tensors, metadata: Any) -> str:
    data = path.read_bytes()
    upto = rng.choice((8, 8 + int.from_bytes(data[:8], "little"), None))
    path.write_bytes(damaged_bytes(rng, data, upto))
    return f"{path.name}: bytes"


def _header(rng: Random, path: Path, tensors: Tensors, metadata: Any) -> str:
    length = rng.choice((None, None, None, None, rng.choice(WHOLE)))
    write_shard(path, tensors, damaged_json(rng, header_of(tensors, metadata)), length)
    return f"{path.name}: header" + ("" if length is None else f" of the length {length}")


def _values(rng: Random, path: Path, tensors: Tensors, metadata: Any) -> str:
    """Other numbers in one tensor, of which the header is right."""
    name = rng.choice(list(tensors))
    dtype, shape, data = tensors[name]
    width = KINDS[dtype]
    made = bytearray(data)
    kind = rng.choice(("byte", "few", "all", "zero", "ones", "shuffle", "special"))
    if kind == "byte" and made:
        made[rng.randrange(len(made))] ^= 1 << rng.randrange(8)
    elif kind == "few":
        for _ in range(min(3, len(made))):
            made[rng.randrange(len(made))] = rng.randrange(256)
    elif kind in ("all", "zero", "ones"):
        made[:] = {"all": rng.randbytes(len(made)), "zero": bytes(len(made)), "ones": b"\xff" * len(made)}[
            kind
        ]
    elif kind == "shuffle":
        cells = [data[i : i + width] for i in range(0, len(data), width)]
        rng.shuffle(cells)
        made[:] = b"".join(cells)
    elif made:  # the largest number, Inf and NaN of either float, the least and largest integers
        special = (b"\xff\x7b", b"\x00\x7c", b"\x01\x7e", b"\x80\x7f", b"\xc0\x7f", b"\xff\xff", b"\x00\x80")
        cell = rng.choice(special)[-width:].rjust(width, rng.choice((b"\0", b"\xff")))
        at = rng.randrange(len(made) // width) * width
        made[at : at + width] = cell
    tensors[name] = dtype, shape, bytes(made)
    write_shard(path, tensors, json.dumps(header_of(tensors, metadata)).encode())
    return f"{path.name}: {kind} in {name}"


def _tensor(rng: Random, path: Path, tensors: Tensors, metadata: Any) -> str:
    """A tensor that is missing, another's, of another name, type or shape; the header agrees with the data."""
    name, other = rng.choice(list(tensors)), rng.choice(list(tensors))
    dtype, shape, data = tensors[name]
    kind = rng.choice(("lost", "exchanged", "renamed", "doubled", "type", "shape", "rows"))
    if kind == "lost":
        del tensors[name]
    elif kind == "exchanged":
        tensors[name], tensors[other] = tensors[other], tensors[name]
    elif kind == "renamed":
        tensors[rng.choice((name + "x", name.rpartition(".")[0], rng.choice(TEXTS)))] = tensors.pop(name)
    elif kind == "doubled":
        tensors[rng.choice((name + ".1", "x", "0." + name, "lm_head.weight"))] = tensors[name]
    elif kind == "type":
        tensors[name] = rng.choice([k for k, width in KINDS.items() if width == KINDS[dtype]]), shape, data
    elif kind == "shape":
        count = len(data) // KINDS[dtype]
        tensors[name] = dtype, rng.choice(([count], [1, *shape], shape[::-1], [count, 1], [*shape, 1])), data
    elif len(data) >= KINDS[dtype]:
        tensors[name] = dtype, [1], data[: KINDS[dtype]]
    write_shard(path, tensors, json.dumps(header_of(tensors, metadata)).encode())
    return f"{path.name}: {kind} {name}"


# ---- folders


def damage_file(rng: Random, file: Path) -> str:
    """Something else in a file's place."""
    folder, name = file.parent, file.name
    others = [path for path in folder.iterdir() if path.is_file() and path != file]
    kind = rng.choice(("gone", "empty", "folder", "pipe", "out", "circle", "other", "cut", "long"))
    data = file.read_bytes()
    file.unlink()
    if kind == "empty":
        file.write_bytes(b"")
    elif kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "out":
        secret = next(place for place in file.parents if place.name == "given") / "secret"
        secret.write_text(SECRET)
        file.symlink_to(secret)
    elif kind == "circle":
        file.symlink_to(name)
    elif kind == "other" and others:
        shutil.copy(rng.choice(others), file)
    elif kind == "cut":
        file.write_bytes(data[: rng.randrange(len(data) + 1)])
    elif kind == "long":
        file.write_bytes(data + rng.randbytes(100))
    return f"{name}: {kind}"


def damage_part(rng: Random, file: Path, key: str) -> str:
    """One entry of a JSON file."""
    data = json.loads(file.read_bytes())
    for _ in range(rng.choice((1, 1, 2, 3))):
        edit(rng, data[key])
    file.write_text(json.dumps(data))
    return f"{file.name}: {key}"


def damage_text(rng: Random, file: Path) -> str:
    """A JSON file's values, or a text's bytes."""
    try:
        data = json.loads(file.read_bytes())
    except ValueError:
        data = None
    if isinstance(data, dict | list) and rng.random() < 0.95:
        file.write_bytes(damaged_json(rng, data))
    else:
        file.write_bytes(damaged_bytes(rng, file.read_bytes()))
    return f"{file.name}: text"


def harmless(rng: Random, folder: Path) -> str:
    """What a reader must not mind: another order, spaces, remarks, files of no use."""
    shards = sorted(folder.glob("*.safetensors"))
    kinds: list[Callable[[], object]] = [
        lambda: _rewrite(rng, rng.choice(shards)),
        lambda: _respace(rng, folder / "config.json"),
        lambda: (folder / "notes.md").write_text("remarks"),
        lambda: (folder / "pytorch_model.bin").write_bytes(b"\x80\x04."),
        lambda: (folder / "modeling_custom.py").write_text("raise SystemExit(9)"),
        lambda: (folder / "config.json").chmod(0o444),
    ]
    number = rng.randrange(len(kinds))
    kinds[number]()
    return f"harmless {number}"


def _rewrite(rng: Random, shard: Path) -> None:
    tensors, metadata = read_shard(shard)
    names = list(tensors)
    rng.shuffle(names)
    tensors = {name: tensors[name] for name in names}
    header = json.dumps(header_of(tensors, {**(metadata or {}), "remark": "é"}), indent=rng.choice((None, 1)))
    write_shard(shard, tensors, header.encode() + b" " * rng.randrange(9))


def _respace(rng: Random, file: Path) -> None:
    data = json.loads(file.read_text())
    keys = list(data)
    rng.shuffle(keys)
    file.write_text(json.dumps({key: data[key] for key in keys}, indent=rng.choice((None, 4))) + "\n\n")


def rehash(folder: Path) -> None:
    """All hashes of an artifact, made anew from its files as far as they are there."""
    if not all((folder / name).is_file() for name in (HASHES, "config.json")):
        return  # a pipe would be waited for
    try:
        index, config = (json.loads((folder / name).read_text()) for name in (HASHES, "config.json"))
        files = index["files"]
        _hash_files(folder, files)
        if SECTION in index:
            steps = index[SECTION]
            own = {step["file"] for step in steps}
            shards = sorted(name for name in files if name.endswith(".safetensors") and name not in own)
            chain = functools.reduce(link, (files[name]["sha256"] for name in shards), "")
            for step in steps:
                chain = link(chain, files[step["file"]]["sha256"]) if step["file"] else chain
                step["chain"] = chain
            config["quantization_config"][SECTION] = {"refinements": len(steps) - 1, "list": list_hash(steps)}
            (folder / "config.json").write_text(json.dumps(config))
            _hash_files(folder, files)
        (folder / HASHES).write_text(json.dumps(index))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return  # what was damaged does not say what to hash


def _hash_files(folder: Path, files: dict[str, Any]) -> None:
    for name, entry in files.items():
        file = folder / name
        if file.is_file():
            data = file.read_bytes()
            entry["bytes"], entry["sha256"] = len(data), hashlib.sha256(data).hexdigest()
