"""Hostile safetensors files are refused."""

import json
import random
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from anybit.checkpoint import safetensors as reader
from anybit.checkpoint.safetensors import read_safetensors_header
from anybit.errors import InputError


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
