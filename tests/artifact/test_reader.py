"""Artifacts on disk: readers against damaged and hostile directories."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import anybit
from anybit.artifact.files import is_artifact
from anybit.artifact.reader import open_artifact, read_config
from anybit.artifact.sizes import inspect
from anybit.artifact.verify import verify
from anybit.checkpoint.files import INDEX_LIMIT, JSON_LIMIT
from anybit.errors import InputError
from anybit.loader import load_tokenizer
from tests import builders
from tests.builders import MakeModel

SHARD = "model-00002-of-00003.safetensors"
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def original(model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("artifact") / "original"
    anybit.quantize(model_dir("llama"), out, builders.options("rtn", group_size=32, embed_bits=8))
    return out


@pytest.fixture
def copied(original: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(original, tmp_path / "copied"))


def edit_json(file: Path, edit: Callable[[Any], Any]) -> None:
    data = json.loads(file.read_text())
    edit(data)
    file.write_text(json.dumps(data))


def quantization(edit: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda path: edit_json(path / "config.json", lambda config: edit(config["quantization_config"]))


def refuses(reader: Callable[[Path], Any], path: Path, words: str) -> None:
    """An InputError of one line that says `words`."""
    with pytest.raises(InputError, match=words) as refusal:
        reader(path)
    assert "\n" not in str(refusal.value)


# ---- what is whole


def test_whole_artifact_verifies(original: Path) -> None:
    told: list[tuple[int, int]] = []
    found = verify(original, lambda done, total: told.append((done, total)))
    files = [file for file in original.rglob("*") if file.is_file() and file.name != "anybit.index.json"]
    files = [file for file in files if file.name != "README.md"]  # the model card, which its users edit
    assert found == {"files": len(files), "layers": 16, "hashes_checked": True}
    assert told == [(i + 1, len(told)) for i in range(len(told))]


def test_index_and_hashes_name_every_file(original: Path) -> None:
    index = json.loads((original / "model.safetensors.index.json").read_text())
    tensors = {f.name: load_file(f) for f in original.glob("*.safetensors")}
    assert {name: file for file, held in tensors.items() for name in held} == index["weight_map"]
    assert (
        sum(t.nbytes for held in tensors.values() for t in held.values()) == index["metadata"]["total_size"]
    )
    hashed = json.loads((original / "anybit.index.json").read_text())["files"]
    assert hashed.keys() == {f.name for f in original.iterdir()} - {"anybit.index.json", "README.md"}
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} < hashed.keys()
    for name, entry in hashed.items():
        assert (original / name).stat().st_size == entry["bytes"]


def test_nothing_of_this_machine_is_recorded(original: Path) -> None:
    for file in original.iterdir():
        assert str(original.parent.parent).encode() not in file.read_bytes(), file.name


def test_licence_and_template_are_carried(model_copy: Callable[[str], Path], tmp_path: Path) -> None:
    model = model_copy("llama")
    (model / "LICENSE").write_text("do what you like")
    anybit.quantize(model, tmp_path / "out", builders.options("rtn"))
    for name in ("LICENSE", "chat_template.jinja", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()


# ---- what is damaged


def test_verify_finds_any_flipped_byte(copied: Path) -> None:
    shard = copied / SHARD
    data = bytearray(shard.read_bytes())
    header = 8 + struct.unpack("<Q", data[:8])[0]
    for position in (header, header + 1000, len(data) - 1):
        flipped = bytearray(data)
        flipped[position] ^= 1
        shard.write_bytes(flipped)
        refuses(verify, copied, "SHA-256")
    shard.write_bytes(data)
    verify(copied)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: os.truncate(p / SHARD, 5000), "interrupted|SHA-256"),
        (lambda p: (p / SHARD).unlink(), "missing"),
        (lambda p: (p / SHARD).write_bytes(b""), "header of 0 bytes"),
        (quantization(lambda q: q.update(bits=3)), "config.json does not have the bytes"),
        (
            lambda p: edit_json(p / "config.json", lambda c: c.update(rms_norm_eps=1e-3)),
            "config.json does not",
        ),
        (lambda p: (p / "model.safetensors.index.json").write_text("{}"), "no weight_map"),
        (lambda p: (p / "anybit.index.json").write_text("[]"), "not a valid list of hashes"),
        (lambda p: (p / "anybit.index.json").write_text("[" * 100_000), "not a valid list of hashes"),
        (
            lambda p: edit_json(
                p / "anybit.index.json", lambda d: d["files"].update({"../x": {"sha256": ""}})
            ),
            "not a file of this directory",
        ),
        (
            lambda p: edit_json(p / "anybit.index.json", lambda d: d.update(format_version=3)),
            "upgrade anybit",
        ),
    ],
)
def test_verify_finds_damage(copied: Path, change: Callable[[Path], Any], words: str) -> None:
    change(copied)
    refuses(verify, copied, words)


TEMPLATE = "additional_chat_templates/default.jinja"  # which Transformers prefers to chat_template.jinja


def test_a_further_chat_template_put_into_an_artifact_is_noticed(copied: Path) -> None:
    (copied / TEMPLATE).parent.mkdir()
    (copied / TEMPLATE).write_text("{{ 'owned' }}")
    refuses(verify, copied, f"does not list {TEMPLATE}")


def test_further_chat_templates_go_with_the_model(model_copy: MakeModel, tmp_path: Path) -> None:
    model, out = model_copy("llama"), tmp_path / "out"
    (model / TEMPLATE).parent.mkdir()
    (model / TEMPLATE).write_text("{{ 'the maker says so' }}")
    anybit.quantize(model, out, builders.options("rtn"))
    assert (out / TEMPLATE).read_bytes() == (model / TEMPLATE).read_bytes()
    assert verify(out)["hashes_checked"]
    assert load_tokenizer(out).chat_template == load_tokenizer(model).chat_template
    (out / TEMPLATE).write_text("{{ 'owned' }}")
    refuses(verify, out, r"default\.jinja does not have the bytes")
    index = json.loads((out / "anybit.index.json").read_text())
    for name in (
        "additional_chat_templates/../x.jinja",
        "additional_chat_templates/a/b.jinja",
        "../x",
        "x" * 256,
        "\0",
    ):
        (out / "anybit.index.json").write_text(
            json.dumps({**index, "files": {**index["files"], name: {"bytes": 1, "sha256": "0"}}})
        )
        refuses(verify, out, "not a file of this directory")


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "generation_config.json"])
def test_verify_covers_what_turns_text_into_tokens_and_back(copied: Path, name: str) -> None:
    (copied / name).write_bytes((copied / name).read_bytes() + b" ")
    refuses(verify, copied, f"{name} does not have the bytes")
    (copied / name).unlink()
    refuses(verify, copied, f"{name} is missing")


def test_verify_finds_a_tokenizer_file_that_was_added(copied: Path) -> None:
    (copied / "added_tokens.json").write_text("{}")
    refuses(verify, copied, "does not list added_tokens.json")


def test_artifacts_that_list_no_tokenizer_verify(copied: Path) -> None:
    """As earlier versions made them."""

    def forget(data: Any) -> None:
        kept = ("config.json", "model.safetensors.index.json")
        data["files"] = {n: e for n, e in data["files"].items() if n in kept or n.endswith(".safetensors")}

    edit_json(copied / "anybit.index.json", forget)
    assert verify(copied)["hashes_checked"]


def test_verify_without_hashes_still_looks_inside(copied: Path) -> None:
    """As after `save_pretrained`, which drops them."""
    (copied / "anybit.index.json").unlink()
    assert verify(copied)["hashes_checked"] is False
    tensors = load_file(copied / SHARD)
    for name, what in ((f"{Q}.scales", "NaN"), ("model.layers.0.input_layernorm.weight", "NaN")):
        broken = {**tensors, name: torch.full_like(tensors[name], torch.nan)}
        save_file(broken, copied / SHARD, metadata={"format": "pt"})
        refuses(verify, copied, what)


# ---- what is hostile


def header(entries: dict[str, Any], length: int | None = None, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def shard(data: bytes) -> Callable[[Path], Any]:
    return lambda path: (path / SHARD).write_bytes(data)


def traversal(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        index = path / "model.safetensors.index.json"
        edit_json(index, lambda data: data["weight_map"].update({f"{Q}.codes": name}))

    return change


NO_CONFIG = "not an anybit artifact|not valid JSON|not a JSON object"  # `load` also takes base models
ENTRY = {"dtype": "F16", "shape": [48, 2], "data_offsets": [0, 192]}
HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "newer version": (quantization(lambda q: q.update(format_version=3)), "upgrade anybit"),
    "no version": (quantization(lambda q: q.pop("format_version")), "format_version"),
    "layers not an object": (quantization(lambda q: q.update(layers=[])), "object of layer names"),
    "calibration not an object": (quantization(lambda q: q.update(calibration="x")), "calibration"),
    "tile count": (quantization(lambda q: q["layers"][Q].update(tiles=[{}] * 10**5)), "tiles"),
    "huge shape": (quantization(lambda q: q["layers"][Q].update(shape=[2**31 - 1] * 2)), "asks for"),
    "overflowing shape": (quantization(lambda q: q["layers"][Q].update(shape=[2**63, 48])), "positive sizes"),
    "boolean shape": (quantization(lambda q: q["layers"][Q].update(shape=[True, True])), "positive sizes"),
    "float width": (quantization(lambda q: q["layers"][Q]["tiles"][0].update(bits=4.0)), "1..8"),
    "other width": (quantization(lambda q: q["layers"][Q]["tiles"][0].update(bits=8)), "asks for"),
    "unknown layer": (
        quantization(lambda q: q["layers"].update(x=q["layers"][Q])),
        "lacks the tensor x.codes",
    ),
    "config a list": (lambda p: (p / "config.json").write_text("[]"), NO_CONFIG),
    "config nested": (lambda p: (p / "config.json").write_text("[" * 100_000), NO_CONFIG),
    "config no UTF-8": (lambda p: (p / "config.json").write_bytes(b"\xff"), NO_CONFIG),
    "layer count": (
        lambda p: edit_json(p / "config.json", lambda c: c.update(num_hidden_layers=10**9)),
        "tensors",
    ),
    "traversal": (traversal("../../etc/passwd.safetensors"), "same directory"),
    "absolute path": (traversal("/etc/passwd"), "same directory"),
    "no file name": (traversal(""), "same directory"),
    "index a list": (lambda p: (p / "model.safetensors.index.json").write_text("[]"), "not a JSON object"),
    "header beyond the file": (shard(header({}, length=10**15)), "header of"),
    "header of 100 MB": (shard(header({}, length=99_999_999)), "header of"),
    "header no JSON": (shard(struct.pack("<Q", 4) + b"\x80\x04N."), "not valid JSON"),
    "overlap": (shard(header({f"{Q}.scales": ENTRY, "b": ENTRY}, data=b"\0" * 192)), "begins at"),
    "beyond the end": (shard(header({f"{Q}.scales": ENTRY})), "ends? at"),
    "negative offset": (
        shard(header({f"{Q}.scales": {**ENTRY, "data_offsets": [-192, 0]}})),
        "impossible",
    ),
    "overflowing tensor": (
        shard(header({f"{Q}.scales": {**ENTRY, "shape": [2**40, 2**40]}}, data=b"\0" * 192)),
        "needs",
    ),
    "a pickle": (
        lambda p: [f.rename(f.with_suffix(".bin")) for f in p.glob("*.safetensors")],
        "shards|pickle",
    ),
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_artifacts_are_refused(copied: Path, attack: str) -> None:
    change, words = HOSTILE[attack]
    (copied / "anybit.index.json").unlink()  # an attacker would
    change(copied)
    for reader in (inspect, verify, open_artifact, anybit.load):
        refuses(reader, copied, words)


def test_pickled_weights_are_named_so(copied: Path) -> None:
    for file in copied.glob("*.safetensors*"):
        file.unlink()
    (copied / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    refuses(anybit.load, copied, "pickle")


@pytest.mark.parametrize(("name", "limit"), [("config.json", JSON_LIMIT), ("anybit.index.json", INDEX_LIMIT)])
def test_json_beyond_the_limit_is_not_read(copied: Path, name: str, limit: int) -> None:
    os.truncate(copied / name, limit + 1)  # a hole: nothing is written
    assert is_artifact(copied) == (name != "config.json")
    refuses(verify, copied, "not an anybit artifact" if name == "config.json" else "list of hashes")


@pytest.mark.parametrize(
    "tiles",
    [
        [{"format": "group_int", "bits": 3, "group_size": 128, "symmetric": False}],
        [{"format": "group_int", "bits": 8, "group_size": 128, "symmetric": False, "cols": 48}],
        [{"format": "group_int", "bits": 8, "group_size": 128, "symmetric": False, "rows": 264}],
        [{"format": "group_int", "bits": 8, "group_size": 24, "symmetric": False, "cols": 24}] * 2,
    ],
    ids=["width", "columns", "rows", "two"],
)
def test_embeddings_are_one_tile(copied: Path, tiles: list[dict[str, Any]]) -> None:
    """Their rows are looked up one by one."""
    quantization(lambda q: q["embeddings"]["model.embed_tokens"].update(tiles=tiles))(copied)
    for reader in (inspect, AutoModelForCausalLM.from_pretrained):
        refuses(reader, copied, "an embedding is stored as one tile of 4 or 8 bits")


def test_names_that_are_no_artifact(original: Path, tmp_path: Path) -> None:
    assert is_artifact(original)
    assert not is_artifact(tmp_path) and not is_artifact(tmp_path / "x") and not is_artifact(Path("/"))
    refuses(read_config, tmp_path / "x", "does not exist")
    refuses(read_config, Path("/"), "not an anybit artifact")


def test_one_file_is_preferred_to_an_index_as_in_transformers(copied: Path) -> None:
    """Otherwise `inspect` would describe other weights than the ones that run."""
    tensors = {n: t for f in copied.glob("*.safetensors") for n, t in load_file(f).items()}
    tensors[f"{Q}.codes"] = torch.zeros_like(tensors[f"{Q}.codes"])
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_artifact(copied).checkpoint
    assert not checkpoint.read(f"{Q}.codes").any()
    assert not anybit.load(copied).get_submodule(Q).codes.any()
