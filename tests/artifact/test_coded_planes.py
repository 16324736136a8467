"""Planes as files hold them coded: against a decoder written from docs/formats.md, and damaged."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from anybit.artifact.coded_planes import PlaneReader, PlaneRows, PlaneWriter, code, expand
from anybit.errors import InputError
from anybit.formats import NestedLayout
from anybit.formats.bits import pack_bits, unpack_bits
from anybit.formats.layout import LayerLayout
from anybit.formats.weight import PackedWeight
from anybit.kernels import cpu

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu.available(), reason=f"no native extension: {cpu.why_not()}"),
]


class Stream:
    """Bytes of the stream by docs/formats.md, one at a time, in whole numbers of Python."""

    def __init__(self, data: bytes) -> None:
        self.state, self.rest = int.from_bytes(data[:4], "big"), data[4:]

    @staticmethod
    def frequencies(q: int) -> dict[int, int]:
        """Of all bytes, in their order."""
        order = sorted(range(256), key=lambda byte: (byte.bit_count(), byte))
        made = {b: max(1, q ** b.bit_count() * (256 - q) ** (8 - b.bit_count()) // 2**48) for b in order}
        made[0 if q < 128 else 255] += 2**16 - sum(made.values())
        return made

    def byte(self, q: int) -> int:
        slot, start = self.state % 2**16, 0
        for byte, f in self.frequencies(q).items():
            if slot < start + f:
                self.state = f * (self.state // 2**16) + slot - start
                while self.state < 2**23:
                    self.state, self.rest = 256 * self.state + self.rest[0], self.rest[1:]
                return byte
            start += f
        raise AssertionError("frequencies do not add up")


def decoded(data: bytes, codes: Tensor, kinds: Tensor, planes: int) -> Tensor:
    """The first bits of codes [r, n], of which only the first plane is looked at."""
    stream, classes, made = Stream(data), dict[tuple[int, ...], list[int]](), codes >> (planes - 1)
    ones: dict[tuple[int, ...], int] = {}
    for p in range(2, planes + 1):
        below = torch.zeros_like(made)
        sign, half = made >> (p - 2), 2 ** (p - 2) - 1
        cells = torch.where(sign == 1, ~made, made) & half
        order = sorted(
            ((i, j) for i in range(len(made)) for j in range(made.shape[1])),
            key=lambda at: (at[0], at[1] // 32, int(cells[at]), at[1]),
        )
        for i, j in order:
            which = p, int(kinds[i]), int(cells[i, j])
            if which not in ones:
                ones[which] = stream.byte(128)
            if not classes.setdefault(which, []):
                byte = stream.byte(ones[which])
                classes[which] = [byte >> k & 1 for k in range(8)]
            below[i, j] = classes[which].pop(0) ^ int(sign[i, j])
        made = made << 1 | below
    assert stream.state == 2**23
    assert not stream.rest
    return made


def planes_of(codes: Tensor, bits: int) -> list[np.ndarray]:
    return [pack_bits(codes >> (bits - p) & 1, 1, 4).numpy().view(np.uint32) for p in range(1, bits + 1)]


def matrix(r: int, n: int, bits: int, spread: float, seed: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 [r, n] of a Gaussian's values on even steps, and shapes uint8 [r]."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(r, n, generator=generator) * spread
    codes = ((values + 1) * 2 ** (bits - 1)).clamp(0, 2**bits - 1).to(torch.uint8)
    return codes, torch.randint(0, 16, (r,), generator=generator, dtype=torch.uint8)


def stream_of(codes: Tensor, kinds: Tensor, bits: int) -> np.ndarray:
    writer, planes = PlaneWriter(), planes_of(codes, bits)
    for p in range(2, bits + 1):
        writer.write(PlaneRows(p, planes[: p - 1], kinds.numpy(), codes.shape[1]), planes[p - 1])
    return writer.finish()


def read(stream: np.ndarray, codes: Tensor, kinds: Tensor, bits: int) -> Iterator[np.ndarray]:
    reader, planes = PlaneReader(stream, "here"), planes_of(codes, bits)
    for p in range(2, bits + 1):
        words = np.empty_like(planes[p - 1])
        reader.read(PlaneRows(p, planes[: p - 1], kinds.numpy(), codes.shape[1]), words)
        yield words
    reader.finish()


@given(
    st.integers(1, 12),
    st.integers(1, 70),
    st.integers(2, 4),
    st.sampled_from([0.01, 0.3, 0.6, 3.0]),
    st.integers(0, 99),
)
def test_planes_come_back_and_mean_what_the_format_says(
    r: int, n: int, bits: int, spread: float, seed: int
) -> None:
    codes, kinds = matrix(r, n, bits, spread, seed)
    stream = stream_of(codes, kinds, bits)
    for found, planes in zip(read(stream, codes, kinds, bits), planes_of(codes, bits)[1:], strict=True):
        assert np.array_equal(found, planes)
    assert torch.equal(decoded(stream.tobytes(), codes, kinds, bits), codes)


def test_processors_without_fast_instructions_read_the_same() -> None:
    codes, kinds = matrix(9, 70, 4, 0.3, 0)
    planes, shapes = planes_of(codes, 4), kinds.numpy()
    reader = cpu._native.PlaneReader(stream_of(codes, kinds, 4), fast=False)
    for p in (2, 3, 4):
        words = np.empty_like(planes[p - 1])
        reader.read(p, planes[: p - 1], shapes, codes.shape[1], words)
        assert np.array_equal(words, planes[p - 1])
    reader.finish()


@pytest.mark.parametrize("share", [0.004, 0.1, 0.3, 0.5, 0.9, 0.996])
def test_a_stream_takes_what_its_entropy_is(share: float) -> None:
    """Plane 2 of one class: a thousandth more than the entropy, and what `q` in steps of 256 costs."""
    n = 1 << 19
    bits = torch.rand(1, n, generator=torch.Generator().manual_seed(0)) < share
    codes = bits.to(torch.uint8)  # plane 1 is all zeros
    ones = float(bits.float().mean())
    q = min(max(round(256 * ones), 1), 255) / 256
    taken = -ones * math.log2(q) - (1 - ones) * math.log2(1 - q)
    size = 8 * len(stream_of(codes, torch.zeros(1, dtype=torch.uint8), 2)) / n
    assert taken <= size + 1e-4
    assert size <= 1.006 * taken + 0.001


def test_the_worked_example() -> None:
    layout = LayerLayout((2, 4), (NestedLayout.of((2, 2, 1), 1),))
    words = {p: torch.tensor(of, dtype=torch.int32)[:, None].view(torch.uint32) for p, of in
             {1: [6, 1], 2: [2, 5], 3: [2]}.items()}  # fmt: skip
    tensors = {
        "order": torch.tensor([1, 0], dtype=torch.uint16),
        "scales": torch.tensor([2, 1], dtype=torch.float16),
        "shapes": torch.tensor([0x5B], dtype=torch.uint8),
        "kept": torch.tensor([1], dtype=torch.uint16),
        "kept_values": torch.tensor([[0.5], [-1]], dtype=torch.float16),
        **{f"plane_{p}": of for p, of in words.items()},
    }
    coded = code(PackedWeight(layout, tensors))
    assert coded.layout.tiles[0].to_json()["coded_bytes"] == 9
    assert coded.tensors["coded"].numpy().tobytes().hex(" ") == "05 63 71 14 e1 19 90 c2 3b"
    assert coded.tensors.keys() == coded.layout.stored_tensors().keys()
    made = expand("layer", coded)
    assert made.layout == layout
    assert all(
        torch.equal(made.tensors[f].view(torch.uint8), t.view(torch.uint8)) for f, t in tensors.items()
    )


def test_a_matrix_of_one_plane_stays_as_it_is() -> None:
    packed = PackedWeight(LayerLayout((1, 8), (NestedLayout.of((1,), 0),)), {
        "order": torch.zeros(1, dtype=torch.uint16), "scales": torch.ones(1).half(),
        "shapes": torch.zeros(1, dtype=torch.uint8), "plane_1": torch.zeros(1, 1, dtype=torch.uint32),
    })  # fmt: skip
    assert code(packed) is packed
    assert expand("layer", packed) is packed


def test_a_byte_more_or_less_is_found() -> None:
    codes, kinds = matrix(9, 50, 4, 0.4, 0)
    stream = stream_of(codes, kinds, 4)
    damaged = [stream[:n] for n in range(len(stream))]
    damaged.append(np.append(stream, np.uint8(0)))
    for other in damaged:
        with pytest.raises(InputError, match=r"here: the coded planes are damaged.*copy the artifact again"):
            list(read(other, codes, kinds, 4))


def test_flipped_bits_never_lead_astray() -> None:
    """Most are found; others give other planes, which is for hashes to find."""
    codes, kinds = matrix(9, 50, 4, 0.4, 0)
    stream, found = stream_of(codes, kinds, 4), 0
    for i in range(8 * len(stream)):
        flipped = stream.copy()
        flipped[i // 8] ^= 1 << i % 8
        try:
            assert len(list(read(flipped, codes, kinds, 4))) == 3
        except InputError:
            found += 1
    assert found > 6 * len(stream)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"plane": 1}, "plane is 1, expected 2 to 4"),
        ({"plane": 5}, "plane is 5, expected 2 to 4"),
        ({"above": []}, "0 planes above plane 2"),
        ({"above": [torch.zeros(2, 3, dtype=torch.int32)]}, "above is"),
        ({"shapes": torch.tensor([0, 16], dtype=torch.uint8)}, r"shapes\[1\] is not below 16"),
        ({"shapes": torch.zeros(3, dtype=torch.uint8)}, "shapes is"),
        ({"columns": 0}, "columns is 0"),
        ({"columns": 65}, "words is"),
        ({"words": torch.zeros(2, 2, dtype=torch.int64)}, "words is"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], words: str) -> None:
    from anybit import _native

    given = {
        "plane": 2, "above": [torch.zeros(2, 2, dtype=torch.int32)], "shapes": torch.zeros(2, dtype=torch.uint8),
        "columns": 64, "words": torch.zeros(2, 2, dtype=torch.int32),
    }  # fmt: skip
    asked = given | change
    for coder in (_native.PlaneWriter().write, _native.PlaneReader(torch.zeros(9, dtype=torch.uint8)).read):
        with pytest.raises(ValueError, match=words):
            coder(**asked)  # type: ignore[arg-type]


def test_unpacked_bits_are_those_of_the_columns() -> None:
    """What lies behind the last column is not coded, and comes back as zeros."""
    codes, kinds = matrix(3, 33, 2, 0.5, 1)
    stream, planes = stream_of(codes, kinds, 2), planes_of(codes, 2)
    dirty = planes[1].copy()
    dirty[:, 1] |= 1 << 20
    writer = PlaneWriter()
    writer.write(PlaneRows(2, planes[:1], kinds.numpy(), 33), dirty)
    assert np.array_equal(writer.finish(), stream)
    (found,) = read(stream, codes, kinds, 2)
    assert torch.equal(
        unpack_bits(torch.from_numpy(found).view(torch.uint8), 1, 64)[:, 33:],
        torch.zeros(3, 31, dtype=torch.uint8),
    )
