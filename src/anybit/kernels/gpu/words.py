"""Codes as GPU kernels read them: a chunk of 32 * LANES columns of a row is `bits` times LANES words of 32 bits.

Lane l of a chunk has the codes of its columns l, LANES + l, 2 LANES + l, ...: 32 fields, numbered j. So what one field
of all lanes meets is LANES inputs side by side, and both weights and inputs are read in lines. Word p has the fields j
from p * F on, F = 32 // bits of them, at bits 0, b, 2 b, ... Where 32 is no multiple of the width, 32 - F b bits of
every word are left, and as many fields: bit p of the eth of them is bit F b + e of word p.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIELDS = 32  # codes of a lane
LANES = (
    16  # of a chunk: 64 bytes of a row at a time, and as many columns as the least product of tensor cores
)


def whole_fields(bits: int) -> int:
    """Fields that lie whole in a word."""
    return FIELDS // bits


def chunks_of(columns: int, lanes: int) -> int:
    return -(-columns // (FIELDS * lanes))


def pack_words(codes: Tensor, bits: int, lanes: int) -> Tensor:
    """Codes uint8 [r, c] below 2**bits -> int32 [r, chunks, bits, lanes]; padding codes are 0."""
    field = _fields(codes, lanes).long()
    whole = whole_fields(bits)
    words = torch.zeros(len(codes), field.shape[1], bits, lanes, dtype=torch.int64, device=codes.device)
    for j in range(whole * bits):
        words[:, :, j // whole] |= field[:, :, j] << bits * (j % whole)
    for j in range(whole * bits, FIELDS):
        for p in range(bits):
            words[:, :, p] |= (field[:, :, j] >> p & 1) << j
    return as_int32(words)


def unpack_words(words: Tensor, columns: int) -> Tensor:
    """Inverse of `pack_words`: uint8 [r, columns]."""
    bits, whole = words.shape[2], whole_fields(words.shape[2])
    wide = words.long() & 0xFFFFFFFF
    fields = [wide[:, :, j // whole] >> bits * (j % whole) & (1 << bits) - 1 for j in range(whole * bits)]
    for j in range(whole * bits, FIELDS):
        fields.append(sum((wide[:, :, p] >> j & 1) << p for p in range(bits)))  # type: ignore[arg-type]
    return torch.stack(fields, 2).flatten(1)[:, :columns].to(torch.uint8)


def pack_plane(bit: Tensor, lanes: int) -> Tensor:
    """One bit of each code, uint8 [r, c] -> int32 [r, chunks, lanes]: field j at bit j."""
    return pack_words(bit, 1, lanes)[:, :, 0]


def unpack_plane(words: Tensor, columns: int) -> Tensor:
    """Inverse of `pack_plane`."""
    return unpack_words(words[:, :, None], columns)


def _fields(codes: Tensor, lanes: int) -> Tensor:
    """[r, c] -> [r, chunks, 32, lanes]."""
    r, c = codes.shape
    padded = codes.new_zeros(r, chunks_of(c, lanes) * FIELDS * lanes)
    padded[:, :c] = codes
    return padded.view(r, -1, FIELDS, lanes)


def as_int32(words: Tensor) -> Tensor:
    """Words int64 below 2**32 as the bits of int32."""
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
