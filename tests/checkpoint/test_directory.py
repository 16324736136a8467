"""Checkpoints: what is read equals what Transformers reads; what is broken is refused with one sentence."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from anybit.checkpoint import tokenizer as tokenizer_module
from anybit.checkpoint.directory import open_checkpoint
from anybit.checkpoint.safetensors import read_safetensors_header
from anybit.errors import InputError
from anybit.formats.dtypes import Dtype
from tests.checkpoint.models import INDEX, TEMPLATE

# ---- what works


@pytest.mark.parametrize("name", ["single", "sharded", "tied"])
def test_every_tensor_is_the_one_of_transformers(originals: Path, name: str) -> None:
    checkpoint = open_checkpoint(originals / name)
    model = AutoModelForCausalLM.from_pretrained(originals / name)
    expected = model.state_dict()
    if name == "tied":
        del expected["lm_head.weight"]
    assert set(checkpoint.names()) == set(expected)
    for key, tensor in expected.items():
        assert key in checkpoint
        found = checkpoint.read(key)
        assert (checkpoint.shape(key), checkpoint.dtype(key).torch) == (tuple(tensor.shape), tensor.dtype)
        assert found.dtype == tensor.dtype and torch.equal(found, tensor)
    assert checkpoint.config.to_dict() == model.config.to_dict() | {
        "transformers_version": checkpoint.config.to_dict()["transformers_version"]
    }
    assert checkpoint.source == str(originals / name)
    assert checkpoint.path == originals / name
    assert checkpoint.quantized_before() is None and checkpoint.notes() == []


def test_shards_are_really_several(originals: Path) -> None:
    files = sorted((originals / "sharded").glob("*.safetensors"))
    checkpoint = open_checkpoint(str(originals / "sharded"))
    assert len(files) > 2 and checkpoint.files == tuple(files)
    assert checkpoint.weight_bytes() == sum(file.stat().st_size for file in files)
    order = [key for file in files for key in read_safetensors_header(file)]
    assert checkpoint.names() == order


def test_every_dtype_and_odd_shapes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    kinds = {kind.name: kind.torch for kind in Dtype if kind is not Dtype.BOOL}
    tensors = {name: (torch.randn(3, 5) * 100).to(dtype) for name, dtype in kinds.items()} | {
        "BOOL": torch.rand(7) > 0.5,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }
    save_file(tensors, tmp_path / "t.safetensors")
    stored, oracle = (
        read_safetensors_header(tmp_path / "t.safetensors"),
        load_file(tmp_path / "t.safetensors"),
    )
    assert set(stored) == set(oracle)
    for name, tensor in oracle.items():
        found = stored[name].load()
        assert found.dtype == tensor.dtype == stored[name].dtype.torch
        assert found.shape == tensor.shape == stored[name].shape
        assert found.contiguous().view(-1).view(torch.uint8).equal(tensor.view(-1).view(torch.uint8))


def test_read_gives_memory_of_its_own(copy: Callable[[str], Path]) -> None:
    """No mapping: the tensor outlives its file, and writing to it changes nothing else."""
    folder = copy("single")
    checkpoint = open_checkpoint(folder)
    first = checkpoint.read("model.norm.weight")
    first.add_(1)
    assert not torch.equal(first, checkpoint.read("model.norm.weight"))
    (folder / "model.safetensors").write_bytes(b"")
    assert torch.equal(first, torch.full((32,), 2.0, dtype=torch.bfloat16))
    with pytest.raises(InputError, match="became shorter"):
        checkpoint.read("model.norm.weight")


def test_unknown_name(originals: Path) -> None:
    checkpoint = open_checkpoint(originals / "tied")
    assert "lm_head.weight" not in checkpoint
    with pytest.raises(InputError, match=r"no tensor 'lm_head\.weight'"):
        checkpoint.read("lm_head.weight")


def test_sha256_is_that_of_the_files(originals: Path) -> None:
    folder, seen = originals / "sharded", []
    files = [*sorted(folder.glob("*.safetensors")), folder / "config.json"]
    content = b"".join(file.read_bytes() for file in files)
    assert open_checkpoint(folder).sha256(seen.append) == hashlib.sha256(content).hexdigest()
    assert sum(seen) == len(content)


@pytest.fixture
def strict_umask() -> Iterator[None]:
    """New files are private unless somebody opens them to others."""
    before = os.umask(0o077)
    yield
    os.umask(before)


def test_assets(originals: Path, tmp_path: Path, strict_umask: None) -> None:
    checkpoint = open_checkpoint(originals / "single")
    names = checkpoint.copy_assets(tmp_path / "out")
    assert {
        "tokenizer.json",
        "tokenizer_config.json",
        "LICENSE",
        "NOTICE.txt",
        "generation_config.json",
    } <= set(names)
    assert {file.name for file in (tmp_path / "out").iterdir()} == set(names)
    assert not {"config.json", "model.safetensors", "modeling_custom.py"} & set(names)
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (originals / "single" / name).read_bytes()
        assert (tmp_path / "out" / name).stat().st_mode & 0o777 == 0o644
    assert checkpoint.tokenizer()("hello world")["input_ids"] == [3, 4]
    assert checkpoint.tokenizer().chat_template == TEMPLATE


def test_quantized_before(copy: Callable[[str], Path]) -> None:
    folder = copy("single")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(folder).quantized_before() == "fp8"


# ---- GGUF


def write_gguf(path: Path, scales: torch.Tensor | None = None, window: int = 64) -> Path:
    """A llama file of one block with a tokenizer, a turn's end and frequencies for long contexts."""
    writer = GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_context_length, window),
        (writer.add_block_count, 1),
        (writer.add_embedding_length, 32),
        (writer.add_feed_forward_length, 32),
        (writer.add_head_count, 2),
        (writer.add_head_count_kv, 2),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_bos_token_id, 0),
        (writer.add_eos_token_id, 1),
        (writer.add_eot_token_id, 2),
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_tokenizer_pre, "default"),
        (writer.add_token_list, ["<s>", "</s>", "<turn>", "a", "b", "ab"]),
        (writer.add_token_types, [3, 3, 3, 1, 1, 1]),
        (writer.add_token_merges, ["a b"]),
        (writer.add_chat_template, TEMPLATE),
    ):
        add(value)
    writer.add_tensor("token_embd.weight", torch.randn(6, 32).numpy())
    writer.add_tensor("output_norm.weight", torch.ones(32).numpy())
    if scales is not None:
        writer.add_tensor("rope_freqs.weight", scales.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_window_of_a_gguf_file_that_no_artifact_may_have_is_refused(tmp_path: Path) -> None:
    """Before any work: OUT would not be read again."""
    for window in (2**24 + 1, 2**32 - 1):
        path = write_gguf(tmp_path / "m.gguf", window=window)
        with pytest.raises(InputError, match=rf"m\.gguf.*{window}.*16777216 is the limit.*header is damaged"):
            open_checkpoint(path)


def test_gguf_file_and_its_directory(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    for model in (path, tmp_path):
        checkpoint = open_checkpoint(model)
        assert (checkpoint.path, checkpoint.source) == (path, str(model))
        assert checkpoint.names() == ["model.embed_tokens.weight", "model.norm.weight"]
        assert checkpoint.dtype("model.norm.weight") is Dtype.F32
        assert checkpoint.config.model_type == "llama" and checkpoint.config.tie_word_embeddings
        assert checkpoint.config.vocab_size == 6  # nowhere stated but in the vocabulary's length
        assert checkpoint.sha256() == hashlib.sha256(path.read_bytes()).hexdigest()
        assert checkpoint.weight_bytes() == path.stat().st_size


def test_gguf_assets(tmp_path: Path, strict_umask: None) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    (tmp_path / "LICENSE.md").write_text("free")
    alone = open_checkpoint(path).copy_assets(tmp_path / "alone")
    assert "LICENSE.md" not in alone  # the neighbour of a bare file may belong to anything
    names = open_checkpoint(tmp_path).copy_assets(tmp_path / "out")
    assert {"LICENSE.md", "tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= set(names)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (0, [1, 2])
    assert all((tmp_path / "out" / name).stat().st_mode & 0o777 == 0o644 for name in names)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer("ab")["input_ids"] == open_checkpoint(path).tokenizer()("ab")["input_ids"]


def test_a_tokenizer_of_a_gguf_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each caller has its own, and a file that changed is read again."""
    path, read = write_gguf(tmp_path / "m.gguf"), []
    loaded = tokenizer_module._loaded
    monkeypatch.setattr(tokenizer_module, "_loaded", lambda *of, **how: read.append(of) or loaded(*of, **how))
    first, second = (open_checkpoint(path).tokenizer() for _ in range(2))
    first.add_tokens(["abab"])
    assert len(first) == len(second) + 1 and len(open_checkpoint(tmp_path).tokenizer()) == len(second)
    assert len(read) == 1
    write_gguf(path, scales=torch.ones(16))
    assert open_checkpoint(path).tokenizer()("ab")["input_ids"] == second("ab")["input_ids"]
    assert len(read) == 2


def test_gguf_scaled_frequencies_are_mentioned(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", torch.ones(8)))
    assert "rope_freqs.weight" in checkpoint.notes()[0]
    assert len(checkpoint.names()) == 2


def test_two_gguf_files_need_a_choice(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf"), write_gguf(tmp_path / "b.gguf")
    with pytest.raises(InputError, match=r"holds 2 \.gguf files; name one of them"):
        open_checkpoint(tmp_path)


# ---- directories that are not right


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def remap(folder: Path, file: object) -> None:
    """Let the index place one tensor somewhere else."""
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = file
    (folder / INDEX).write_text(json.dumps(index))


def shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


BROKEN = {
    "no config": ("single", lambda d: (d / "config.json").unlink(), "has no config.json"),
    "config is no JSON": ("single", lambda d: (d / "config.json").write_text("{"), "not valid JSON"),
    "config is a list": ("single", lambda d: (d / "config.json").write_text("[]"), "not a JSON object"),
    "config nested deeply": (
        "single",
        lambda d: (d / "config.json").write_text("[" * 10**6),
        "not valid JSON",
    ),
    "unknown model": (
        "single",
        lambda d: edit_json(d / "config.json", model_type="novel"),
        "the model type 'novel', which the installed Transformers does not know",
    ),
    "remote code": (
        "single",
        lambda d: edit_json(
            d / "config.json", model_type="novel", auto_map={"AutoConfig": "modeling_custom.C"}
        ),
        "needs code that comes with the model",
    ),
    "model type is a list": (
        "single",
        lambda d: edit_json(d / "config.json", model_type=[1]),
        "model type [1]",
    ),
    "config refused": (
        "single",
        lambda d: edit_json(d / "config.json", hidden_size="wide"),
        "a configuration that Transformers refuses",
    ),
    "endless layers": (
        "single",
        lambda d: edit_json(d / "config.json", num_hidden_layers=10**12),
        "num_hidden_layers is 1000000000000, but the files hold only 21 tensors",
    ),
    "no weights": ("single", lambda d: (d / "model.safetensors").unlink(), "holds no weights"),
    "only pickles": (
        "single",
        lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
        "only pickled weights (pytorch_model.bin)",
    ),
    "an adapter": (
        "single",
        lambda d: (d / "model.safetensors").rename(d / "adapter_model.safetensors"),
        "only adapter_model.safetensors",
    ),
    "LFS pointer": (
        "single",
        lambda d: (d / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
        ),
        "git lfs pull",
    ),
    "missing shard": ("sharded", lambda d: shard(d).unlink(), "the first is model-00002-of-"),
    "truncated shard": (
        "sharded",
        lambda d: shard(d).write_bytes(shard(d).read_bytes()[:-100]),
        "an interrupted download?",
    ),
    "shard without its tensor": (
        "sharded",
        lambda d: remap(d, shard(d).name),
        "lacks the tensor 'model.norm.weight' that the index places there",
    ),
    "path out of the directory": (
        "sharded",
        lambda d: remap(d, "../x.safetensors"),
        "points to '../x.safetensors'",
    ),
    "absolute path": ("sharded", lambda d: remap(d, "/x.safetensors"), "points to '/x.safetensors'"),
    "hidden file": ("sharded", lambda d: remap(d, "..safetensors"), "points to '..safetensors'"),
    "index points to a pickle": ("sharded", lambda d: remap(d, "x.bin"), "points to 'x.bin'"),
    "index points to a number": ("sharded", lambda d: remap(d, 5), "points to 5"),
    "index without map": ("sharded", lambda d: (d / INDEX).write_text("{}"), "has no weight_map"),
    "index is no JSON": ("sharded", lambda d: (d / INDEX).write_bytes(b"\xff"), "not valid JSON"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_directory_is_refused(copy: Callable[[str], Path], case: str) -> None:
    name, damage, message = BROKEN[case]
    folder = copy(name)
    damage(folder)
    with pytest.raises(InputError) as caught:
        open_checkpoint(folder)
    assert message in str(caught.value) and str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere/at/all", "does not exist"),
        ("./nowhere", "does not exist"),
        ("missing.gguf", "does not exist"),
        ("pytorch_model.bin", "only pickled weights"),
        ("model.safetensors", "name the directory that holds it"),
        ("notes.txt", "a model directory, a .gguf file or a hub id is expected"),
    ],
)
def test_paths_that_are_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("pytorch_model.bin", "model.safetensors", "notes.txt"):
        (tmp_path / file).write_bytes(b"x")
    with pytest.raises(InputError, match=message):
        open_checkpoint(name)


def test_broken_tokenizer(copy: Callable[[str], Path]) -> None:
    folder = copy("single")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="no usable tokenizer"):
        open_checkpoint(folder).tokenizer()
