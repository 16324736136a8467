"""The GGUF reader against Transformers' own loading, and against hostile files."""

import random
import re
import struct
from pathlib import Path

import gguf as gguf_package
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from anybit.checkpoint import gguf as reader
from anybit.checkpoint import gguf_header
from anybit.checkpoint.directory import open_checkpoint
from anybit.errors import InputError
from tests.checkpoint.models import write_gguf

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def llama(tied: bool = False, bias: bool = False) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=16, tie_word_embeddings=tied, attention_bias=bias))


def gemma3(head_dim: int = 32) -> PreTrainedModel:
    model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=head_dim, sliding_window=64))
    for name, weight in model.named_parameters():
        if "norm" in name:  # they start as zeros, which would hide a missing or doubled offset
            torch.nn.init.normal_(weight, std=0.1)
    return model


def qwen2() -> PreTrainedModel:
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight)
    return model


def qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES | {"num_attention_heads": 2}, head_dim=128))


MODELS = {
    "llama": (llama, "llama"),
    "llama-tied": (lambda: llama(tied=True), "llama"),
    "gemma3": (gemma3, "gemma3"),
    "qwen2": (qwen2, "qwen2"),
    "qwen3": (qwen3, "qwen3"),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid llama file for the tests that break it."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES | {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 8}, head_dim=8)
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", LlamaForCausalLM(config), "llama")


@pytest.mark.parametrize("family", MODELS)
def test_every_tensor_comes_back_as_it_was(tmp_path: Path, family: str) -> None:
    """F32 round trip: names, permutation and offsets are undone exactly, whatever Transformers does."""
    torch.manual_seed(1)
    build, architecture = MODELS[family]
    model = build()
    gguf = reader.open_gguf(write_gguf(tmp_path / "m.gguf", model, architecture))
    names = reader.hf_names(gguf)
    expected = model.state_dict()
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert set(names) == set(expected)
    # (w + 1) - 1 in fp32 loses the last bits of a norm; everything else is exact.
    tolerance = 2e-7 if architecture == "gemma3" else 0
    for name, own in names.items():
        torch.testing.assert_close(reader.read_tensor(gguf, own), expected[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1])
@pytest.mark.parametrize("family", MODELS)
def test_agrees_with_transformers(tmp_path: Path, family: str, kind: Kind) -> None:
    torch.manual_seed(2)
    build, architecture = MODELS[family]
    path = write_gguf(tmp_path / "m.gguf", build(), architecture, kind)
    oracle = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    ).state_dict()
    gguf = reader.open_gguf(path)
    for name, own in reader.hf_names(gguf).items():
        assert torch.equal(reader.read_tensor(gguf, own), oracle[name]), name
    assert reader.block_type(gguf) == (None if kind.name in ("F32", "F16", "BF16") else kind.name)


@pytest.mark.parametrize("family", MODELS)
def test_configuration_is_the_one_transformers_gives(tmp_path: Path, family: str) -> None:
    """Ours comes from a summary of the file, which must not lose anything."""
    build, architecture = MODELS[family]
    path = write_gguf(tmp_path / "m.gguf", build(), architecture, tokenizer__ggml__eos_token_id=3)
    oracle = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    config = open_checkpoint(path).config
    assert type(config) is type(oracle)
    assert config.to_dict() == oracle.to_dict()
    assert config.eos_token_id == 3


def test_mistral_comes_as_llama(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama(), "llama", name="mistral")
    assert open_checkpoint(path).config.model_type == "mistral"


def test_permuted_biases(tmp_path: Path) -> None:
    model = llama(bias=True)
    torch.nn.init.normal_(model.model.layers[0].self_attn.q_proj.bias)
    gguf = reader.open_gguf(write_gguf(tmp_path / "m.gguf", model, "llama"))
    bias = reader.read_tensor(gguf, "blk.0.attn_q.bias")
    assert torch.equal(bias, model.model.layers[0].self_attn.q_proj.bias)


@pytest.mark.parametrize("type_name", [*gguf_header.FLOATS, *gguf_header.BLOCKS])
def test_every_accepted_type_can_be_dequantized(tmp_path: Path, type_name: str) -> None:
    """In pieces as in one: 3 rows of 256 weights, of random bytes."""
    kind = Kind[type_name]
    block, block_bytes = gguf_package.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (3, 256 // block * block_bytes), dtype=np.uint8)
    (tmp_path / "raw").write_bytes(b"\0" * 32 + raw.tobytes())
    tensor = gguf_header.GgufTensor("t", (3, 256), kind, 32, raw.size)
    with np.errstate(all="ignore"):
        expected = gguf_package.quants.dequantize(raw, kind)
    found = reader._dequantized(tmp_path / "raw", tensor)
    assert found.dtype == torch.float32
    np.testing.assert_array_equal(found.numpy(), expected)


def test_chunks_join_seamlessly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = reader.open_gguf(write_gguf(tmp_path / "m.gguf", llama(), "llama", Kind.Q8_0))
    whole = reader.read_tensor(gguf, "token_embd.weight")
    monkeypatch.setattr(reader, "CHUNK_WEIGHTS", 5 * 64)  # 96 rows in pieces of 5: the last one is ragged
    assert torch.equal(reader.read_tensor(gguf, "token_embd.weight"), whole)


# ---- hostile files


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def entry(name: bytes, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    """A tensor's line in the header; `dims` in GGUF's order."""
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


ARCHITECTURE = string(b"general.architecture") + struct.pack("<I", 8) + string(b"llama")


def number(key: bytes, value: int) -> bytes:
    return string(key) + struct.pack("<II", 4, value)


NUMBERS = [
    number(b"llama." + key, 2)
    for key in (b"block_count", b"embedding_length", b"feed_forward_length", b"attention.head_count")
]
EMBEDDING, NORM = b"token_embd.weight", b"output_norm.weight"
GOOD = [entry(EMBEDDING, (8, 4)), entry(NORM, (8,), offset=128)]


def build(tensors: list[bytes], metadata: list[bytes] | None = None, **claims: int) -> bytes:
    """A file from its parts; `claims` overrides the version and the counts in its header."""
    metadata = [ARCHITECTURE, *NUMBERS] if metadata is None else metadata
    counts = claims.get("n_tensors", len(tensors)), claims.get("n_metadata", len(metadata))
    head = struct.pack("<4sIQQ", b"GGUF", claims.get("version", 3), *counts)
    head += b"".join(metadata) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32 + 160)


HUGE = 2**63 + 5
HOSTILE = {
    "empty file": (b"", "the magic number would reach byte 4"),
    "other magic": (b"GGML" + build(GOOD)[4:], "b'GGML' instead of b'GGUF'"),
    "version 1": (build(GOOD, version=1), "version 1"),
    "version 4": (build(GOOD, version=4), "version 4"),
    "big-endian": (build(GOOD, version=3 << 24), "a big-endian file"),
    "huge tensor count": (build(GOOD, n_tensors=HUGE), "do not fit"),
    "huge metadata count": (build(GOOD, n_metadata=HUGE), "do not fit"),
    "one tensor too many": (build(GOOD, n_tensors=3), "is not a valid GGUF file"),
    "huge key": (build(GOOD, [struct.pack("<Q", HUGE)]), "limit"),
    "key past the end": (build(GOOD, [struct.pack("<Q", 60_000)]), "the file ends at"),
    "huge string": (build(GOOD, [string(b"k") + struct.pack("<IQ", 8, HUGE)]), "limit"),
    "key that is not UTF-8": (build(GOOD, [string(b"\xff\xfe") + struct.pack("<II", 4, 1)]), "not UTF-8"),
    "unknown value type": (build(GOOD, [string(b"k") + struct.pack("<I", 13)]), "unknown type 13"),
    "huge array": (build(GOOD, [string(b"k") + struct.pack("<IIQ", 9, 4, HUGE)]), "do not fit"),
    "huge array of strings": (build(GOOD, [string(b"k") + struct.pack("<IIQ", 9, 8, 2**61)]), "do not fit"),
    "array of arrays": (build(GOOD, [string(b"k") + struct.pack("<IIQ", 9, 9, 1)]), "array of the type 9"),
    "duplicate key": (build(GOOD, [ARCHITECTURE, ARCHITECTURE]), "occurs twice"),
    "duplicate tensor": (build([GOOD[0], entry(EMBEDDING, (8,), offset=128)]), "occurs twice"),
    "no dimensions": (build([entry(EMBEDDING, ())]), "0 dimensions"),
    "five dimensions": (build([entry(EMBEDDING, (1,) * 5)]), "5 dimensions"),
    "2³² dimensions": (build([string(EMBEDDING) + struct.pack("<I", 2**32 - 1)]), "dimensions"),
    "shape that overflows": (build([entry(EMBEDDING, (2**33, 2**33))]), "impossible shape"),
    "shape that wraps to 0": (build([entry(EMBEDDING, (2**32, 2**32))]), "impossible shape"),
    "zero-sized shape": (build([entry(EMBEDDING, (0, 8))]), "impossible shape"),
    "large shape": (build([entry(EMBEDDING, (2**20, 2**20))]), "the file ends at"),
    "unknown tensor type": (build([entry(EMBEDDING, (8, 4), kind=99)]), "GGUF type 99"),
    "tensor of integers": (build([entry(EMBEDDING, (8, 4), kind=int(Kind.I32))]), "GGUF type 26"),
    "broken blocks": (build([entry(EMBEDDING, (8, 4), kind=int(Kind.Q8_0))]), "Q8_0 packs by 32"),
    "offset past the end": (build([entry(EMBEDDING, (8, 4), offset=64)]), "an interrupted download?"),
    "offset that overflows": (build([entry(EMBEDDING, (8, 4), offset=2**64 - 32)]), "the file ends at"),
    "unaligned offset": (build([entry(EMBEDDING, (8, 4), offset=16)]), "not a multiple of 32"),
    "overlap": (build([GOOD[0], entry(NORM, (8,), offset=96)]), "overlap"),
    "alignment 0": (build(GOOD, [ARCHITECTURE, number(b"general.alignment", 0)]), "power of two"),
    "alignment 48": (build(GOOD, [ARCHITECTURE, number(b"general.alignment", 48)]), "power of two"),
    "no architecture": (build(GOOD, []), "architecture None"),
    "unknown architecture": (
        build(GOOD, [ARCHITECTURE.replace(b"llama", b"mamba")]),
        "'mamba', but GGUF is read for llama, qwen2, qwen3, gemma3",
    ),
    "architecture is a number": (build(GOOD, [number(b"general.architecture", 1)]), "architecture 1"),
    "no sizes": (build(GOOD, [ARCHITECTURE]), "'llama.block_count' is None"),
    "endless blocks": (
        build(GOOD, [ARCHITECTURE, number(b"llama.block_count", 2**31 - 1), *NUMBERS[1:]]),
        "only 2",
    ),
    "part of a split file": (build(GOOD, [ARCHITECTURE, *NUMBERS, number(b"split.count", 3)]), "split"),
    "unknown tensor": (build([entry(b"blk.0.ffn_gate_exps.weight", (8, 4)), GOOD[1]]), "mixtures of experts"),
    "block out of range": (build([entry(b"blk.2.attn_q.weight", (8, 4)), GOOD[1]]), "not known"),
    "heads that do not divide": (build([entry(b"blk.0.attn_q.weight", (4, 6)), GOOD[1]]), "6 rows for 2"),
}


def test_the_parts_make_a_valid_file(tmp_path: Path) -> None:
    """Else the hostile files below would be refused for the wrong reason."""
    (tmp_path / "m.gguf").write_bytes(build(GOOD))
    assert list(reader.open_gguf(tmp_path / "m.gguf").tensors) == [EMBEDDING.decode(), NORM.decode()]
    (tmp_path / "m.gguf").write_bytes(build(GOOD, version=2))
    assert reader.open_gguf(tmp_path / "m.gguf").tensors["output_norm.weight"].shape == (8,)


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused(tmp_path: Path, case: str) -> None:
    content, message = HOSTILE[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        reader.open_gguf(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_header_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions of empty strings are no reason to read on for minutes."""
    monkeypatch.setattr(gguf_header, "HEADER_LIMIT", 4096)
    words = string(b"k") + struct.pack("<IIQ", 9, 8, 1000) + b"\0" * 8000
    (tmp_path / "m.gguf").write_bytes(build(GOOD, [ARCHITECTURE, *NUMBERS, words]))
    with pytest.raises(InputError, match="a header ends by 4096"):
        reader.open_gguf(tmp_path / "m.gguf")


def test_every_truncation_is_refused(tmp_path: Path, tiny: Path) -> None:
    whole, path = tiny.read_bytes(), tmp_path / "cut.gguf"
    header = min(tensor.offset for tensor in reader.open_gguf(tiny).tensors.values())
    for length in [*range(header), *range(header, len(whole), 997), len(whole) - 33]:
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match=re.escape(str(path))):
            reader.open_gguf(path)


def test_flipped_bytes_give_a_model_or_an_error(tmp_path: Path, tiny: Path) -> None:
    """Whatever the header says: an `InputError`, or tensors that can all be read."""
    whole, path, draw = tiny.read_bytes(), tmp_path / "flipped.gguf", random.Random(0)
    header = min(tensor.offset for tensor in reader.open_gguf(tiny).tensors.values())
    opened = 0
    for _ in range(1500):
        content = bytearray(whole)
        for _ in range(draw.choice((1, 1, 2, 8))):
            content[draw.randrange(header)] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        path.write_bytes(content)
        try:
            gguf = reader.open_gguf(path)
        except InputError:
            continue
        opened += 1
        for own in reader.hf_names(gguf).values():
            assert reader.read_tensor(gguf, own).shape == gguf.tensors[own].shape
    assert 0 < opened < 1500  # both ways are exercised


def test_flipped_bytes_through_the_configuration(tmp_path: Path, tiny: Path) -> None:
    """The same with Transformers' configuration classes behind."""
    whole, path, draw = tiny.read_bytes(), tmp_path / "flipped.gguf", random.Random(1)
    header = min(tensor.offset for tensor in reader.open_gguf(tiny).tensors.values())
    for _ in range(150):
        content = bytearray(whole)
        content[draw.randrange(header)] = draw.choice((0, 0x7F, 0xFF, draw.randrange(256)))
        path.write_bytes(content)
        try:
            assert open_checkpoint(path).config.num_hidden_layers >= 1
        except InputError:
            continue


def test_file_cut_after_opening(tmp_path: Path, tiny: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny.read_bytes())
    gguf = reader.open_gguf(path)
    path.write_bytes(tiny.read_bytes()[: gguf.tensors["output_norm.weight"].offset])
    with pytest.raises(InputError, match="became shorter"):
        reader.read_tensor(gguf, "output_norm.weight")
