"""Checkpoints: what is read equals what Transformers reads; what is broken is refused with one sentence."""

import hashlib
import http.server
import json
import os
import random
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from anybit.checkpoint import safetensors as reader
from anybit.checkpoint.directory import open_checkpoint
from anybit.checkpoint.safetensors import read_safetensors_header
from anybit.errors import InputError

INDEX = "model.safetensors.index.json"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def build_model(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def build_tokenizer() -> PreTrainedTokenizerFast:
    words = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", "hello", "world"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`single`, `sharded` and `tied`: complete directories, never changed."""
    root = tmp_path_factory.mktemp("models")
    build_model().save_pretrained(root / "single")
    build_model().save_pretrained(root / "sharded", max_shard_size="12KB")
    build_model(tied=True).save_pretrained(root / "tied")
    for folder in root.iterdir():
        build_tokenizer().save_pretrained(folder)
    (root / "single" / "LICENSE").write_text("do what you like")
    (root / "single" / "NOTICE.txt").write_text("made by me")
    (root / "single" / "modeling_custom.py").write_text("raise SystemExit")
    (root / "single" / "LICENSE").chmod(0o600)
    return root


@pytest.fixture
def copy(originals: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy to break."""

    def make(name: str) -> Path:
        (tmp_path / name).mkdir()
        for file in (originals / name).iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
        return tmp_path / name

    return make


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
        assert (checkpoint.shape(key), checkpoint.dtype(key)) == (tuple(tensor.shape), tensor.dtype)
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
    tensors = {
        name: (torch.randn(3, 5) * 100).to(dtype) for name, dtype in reader.DTYPES.items() if name != "BOOL"
    } | {"BOOL": torch.rand(7) > 0.5, "scalar": torch.tensor(2.5), "empty": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "t.safetensors")
    stored, oracle = (
        read_safetensors_header(tmp_path / "t.safetensors"),
        load_file(tmp_path / "t.safetensors"),
    )
    assert set(stored) == set(oracle)
    for name, tensor in oracle.items():
        found = stored[name].load()
        assert found.dtype == tensor.dtype == stored[name].dtype
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


def write_gguf(path: Path, scales: torch.Tensor | None = None) -> Path:
    """A llama file of one block with a tokenizer, a turn's end and frequencies for long contexts."""
    writer = GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_context_length, 64),
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


def test_gguf_file_and_its_directory(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    for model in (path, tmp_path):
        checkpoint = open_checkpoint(model)
        assert (checkpoint.path, checkpoint.source) == (path, str(model))
        assert checkpoint.names() == ["model.embed_tokens.weight", "model.norm.weight"]
        assert checkpoint.dtype("model.norm.weight") == torch.float32
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


# ---- hostile safetensors


def entry(
    shape: object = (2, 2), begin: object = 0, end: object = 16, dtype: object = "F32"
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def file_of(header: object, data: int = 16, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + b"\0" * data


HUGE = 2**63 + 5
HOSTILE = {
    "empty": (b"", "a header of 0 bytes is claimed in a file of 0"),
    "header longer than the file": (file_of({"a": entry()}, length=10_000), "in a file of"),
    "huge header": (file_of({"a": entry()}, length=2**64 - 1), "in a file of"),
    "header is no JSON": (file_of(b"{nonsense"), "not valid JSON"),
    "header is not UTF-8": (file_of(b'{"\xff": 1}'), "not valid JSON"),
    "header is a list": (file_of([]), "not a JSON object"),
    "deep nesting": (file_of(b'{"a":' * 10**5), "not valid JSON"),
    "number of a million digits": (file_of(b'{"a": 1' + b"0" * 10**6 + b"}"), "not valid JSON"),
    "duplicate name": (
        file_of(b'{"a": %b, "a": %b}' % (json.dumps(entry()).encode(), json.dumps(entry()).encode())),
        "a key occurs twice",
    ),
    "entry is a number": (file_of({"a": 1}), "has not just the fields"),
    "field missing": (file_of({"a": {"dtype": "F32", "shape": [2, 2]}}), "has not just the fields"),
    "unknown dtype": (file_of({"a": entry(dtype="F12")}), "the dtype 'F12', but F64"),
    "dtype is a list": (file_of({"a": entry(dtype=["F32"])}), "the dtype ['F32']"),
    "negative size": (file_of({"a": entry(shape=[-2, -2])}), "impossible shape"),
    "size is a float": (file_of({"a": entry(shape=[4.0])}), "impossible shape"),
    "size is a bool": (file_of({"a": entry(shape=[True, 4])}), "impossible shape"),
    "shape that wraps to 4": (file_of({"a": entry(shape=[2**62 + 1, 4])}), "impossible shape"),
    "shape that overflows": (file_of({"a": entry(shape=[2**40, 2**40])}), "bytes, but has the data_offsets"),
    "many dimensions": (file_of({"a": entry(shape=[1] * 9, end=4)}, 4), "impossible shape"),
    "huge beside zero": (file_of({"a": entry(shape=[0, HUGE], end=0)}, 0), "impossible shape"),
    "offsets out of bounds": (file_of({"a": entry(shape=[2**30], end=2**32)}), "an interrupted download?"),
    "offset that overflows": (file_of({"a": entry(begin=HUGE, end=HUGE + 16)}), "impossible shape"),
    "reversed offsets": (file_of({"a": entry(begin=16, end=0)}), "needs 16 bytes"),
    "three offsets": (file_of({"a": entry() | {"data_offsets": [0, 16, 16]}}), "impossible shape"),
    "size and offsets differ": (file_of({"a": entry(shape=[3])}), "needs 12 bytes"),
    "overlap": (file_of({"a": entry(), "b": entry(begin=8, end=24)}, 24), "the one before it ends at 16"),
    "gap": (file_of({"a": entry(), "b": entry(begin=20, end=36)}, 36), "the one before it ends at 16"),
    "bytes left over": (file_of({"a": entry()}, 17), "its tensors end at byte"),
    "metadata is no object": (file_of({"__metadata__": 3, "a": entry()}), "__metadata__"),
    "metadata of numbers": (file_of({"__metadata__": {"a": 3}, "a": entry()}), "__metadata__"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_safetensors_is_refused(tmp_path: Path, case: str) -> None:
    content, message = HOSTILE[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_safetensors_header(path)
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_the_parts_make_a_valid_file(tmp_path: Path) -> None:
    """Else the files above would be refused for the wrong reason."""
    parts = {"__metadata__": {"format": "pt"}, "b": entry(begin=16, end=32), "a": entry()}
    (tmp_path / "m.safetensors").write_bytes(file_of(parts, 32))
    assert list(read_safetensors_header(tmp_path / "m.safetensors")) == ["a", "b"]


def test_header_limit(tmp_path: Path) -> None:
    """Above 100 MB the header is not even read: the file is sparse, and the answer comes at once."""
    with (tmp_path / "m.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", reader.HEADER_LIMIT + 1))
        file.truncate(2 * reader.HEADER_LIMIT)
    with pytest.raises(InputError, match="a header of 100000001 bytes"):
        read_safetensors_header(tmp_path / "m.safetensors")


def test_flipped_bytes_give_tensors_or_an_error(tmp_path: Path) -> None:
    draw, path = random.Random(0), tmp_path / "m.safetensors"
    save_file({"a": torch.ones(4, 3), "b": torch.ones(2, dtype=torch.int64), "c": torch.ones(8) > 0}, path)
    whole = path.read_bytes()
    header, opened = 8 + struct.unpack_from("<Q", whole)[0], 0
    for _ in range(3000):
        content = bytearray(whole)
        for _ in range(draw.choice((1, 1, 2, 8))):
            content[draw.randrange(header)] = draw.choice(
                (0, 0x22, 0x31, 0x39, 0x7F, 0xFF, draw.randrange(256))
            )
        path.write_bytes(content)
        try:
            tensors = read_safetensors_header(path)
        except InputError:
            continue
        opened += 1
        for stored in tensors.values():
            assert stored.load().shape == stored.shape
    assert 0 < opened < 3000


# ---- the hub, played by a server on this machine

REVISION = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub's protocol as `snapshot_download` needs; `folder` is the one model, tiny/llama."""

    folder: Path
    fetched: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/models/tiny/gated"):
            self._answer(b"{}", 403, {"X-Error-Code": "GatedRepo"})
        elif path == "/api/models/tiny/llama/revision/main":
            self._answer(
                json.dumps({"id": "tiny/llama", "sha": REVISION, "siblings": self._siblings()}).encode()
            )
        elif path.startswith(f"/api/models/tiny/llama/tree/{REVISION}"):
            self._answer(json.dumps(self._tree()).encode())
        elif path.startswith(f"/tiny/llama/resolve/{REVISION}/"):
            self._send_file(path.removeprefix(f"/tiny/llama/resolve/{REVISION}/"))
        else:
            self._answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"})

    def _siblings(self) -> list[dict[str, str]]:
        return [{"rfilename": name} for name in self._names()]

    def _names(self) -> list[str]:
        return [str(f.relative_to(self.folder)) for f in self.folder.rglob("*") if f.is_file()]

    def _tree(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": name, "size": file.stat().st_size, "oid": self._etag(file)}
            for name in self._names()
            for file in [self.folder / name]
        ]

    @staticmethod
    def _etag(file: Path) -> str:
        return hashlib.sha1(file.read_bytes()).hexdigest()

    def _send_file(self, name: str) -> None:
        file = self.folder / name
        if self.command == "GET":
            self.fetched.append(name)
        self._answer(file.read_bytes(), 200, {"ETag": f'"{self._etag(file)}"', "X-Repo-Commit": REVISION})

    def _answer(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(copy: Callable[[str], Path]) -> Iterator[tuple[str, type[Hub]]]:
    """`(address, handler class with what was fetched)`."""
    folder = copy("sharded")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "modeling_custom.py").write_bytes(b"raise SystemExit")
    (folder / "consolidated.safetensors").write_bytes(b"the same again")
    (folder / "LICENSE").write_bytes(b"free")
    for name in ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"{}")
    handler = type("TinyHub", (Hub,), {"folder": folder, "fetched": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()
    thread.join()


OPEN = """
import sys
from anybit.checkpoint.directory import open_checkpoint
from anybit.errors import InputError
for model in sys.argv[1:]:
    try:
        checkpoint = open_checkpoint(model)
        print(len(checkpoint.names()), checkpoint.source, checkpoint.path.name, checkpoint.sha256())
    except InputError as error:
        print("refused:", error)
"""


def open_elsewhere(models: list[str], endpoint: str, cache: Path, **more: str) -> list[str]:
    """Open hub ids in a process of its own: huggingface_hub reads its address when it is imported."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    env |= {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "*",
    } | more
    done = subprocess.run(
        [sys.executable, "-c", OPEN, *models],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.strip().splitlines()


def test_hub_id(hub: tuple[str, type[Hub]], tmp_path: Path) -> None:
    address, handler = hub
    local = open_checkpoint(handler.folder)
    expected = f"{len(local.names())} tiny/llama {REVISION} {local.sha256()}"
    assert open_elsewhere(["tiny/llama"], address, tmp_path / "cache") == [expected]
    fetched = set(handler.fetched)
    assert {
        "config.json",
        INDEX,
        "tokenizer.json",
        "LICENSE",
        "1_Pooling/config.json",
        *(file.name for file in local.files),
    } <= fetched
    assert not fetched & {"pytorch_model.bin", "modeling_custom.py", "consolidated.safetensors"}
    assert not any(name.startswith("2_Dense") for name in fetched)
    # A second time, without a network: from the cache.
    assert open_elsewhere(["tiny/llama"], address, tmp_path / "cache", HF_HUB_OFFLINE="1") == [expected]


def test_hub_refusals(hub: tuple[str, type[Hub]], tmp_path: Path) -> None:
    address, _ = hub
    for names, endpoint, more, messages in (
        (
            ["tiny/unknown", "tiny/gated"],
            address,
            {},
            ["nor a model on the hub", "is gated: accept its terms"],
        ),
        (["tiny/llama"], "http://127.0.0.1:9", {}, ["could not be fetched from the hub"]),
        (["tiny/llama"], address, {"HF_HUB_OFFLINE": "1"}, ["could not be fetched from the hub"]),
    ):
        answers = open_elsewhere(names, endpoint, tmp_path / "empty", **more)
        assert len(answers) == len(names)
        for model, answer, message in zip(names, answers, messages):
            assert answer.startswith(f"refused: {model}") and message in answer, answer
