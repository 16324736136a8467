"""Codes as GPU kernels read them: a chunk of 32 * LANES columns of a row is `bits` times LANES words of 32 bits.

Both halves of a word are packed alike, so shifts and masks work on two codes at a time. Field q of 16 of all lanes is
2 * LANES columns side by side: lane l has the columns 2 l and 2 l + 1 of them, one in the low half of a word and one in
the high half. Word p has the fields from p * F on, F = 16 // bits of them, at bits 0, b, 2 b, ... of its halves. Where
16 is no multiple of the width, 16 - F b bits of every half are left: those of one word after the other's are a string
that has the last fields one after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALF = 16  # bits of half a word, and fields of a lane
LANES = 16  # of a chunk: 64 bytes of a row at a time
FEW_LANES = (
    8  # where 16 columns may be a group: half as many, as many columns as the least product of tensor cores
)


def chunks_of(columns: int, lanes: int) -> int:
    return -(-columns // (2 * HALF * lanes))


def pack_words(codes: Tensor, bits: int, lanes: int) -> Tensor:
    """Codes uint8 [r, c] below 2**bits -> int32 [r, chunks, bits, lanes]; padding codes are 0."""
    r, c = codes.shape
    padded = codes.new_zeros(r, chunks_of(c, lanes) * 2 * HALF * lanes)
    padded[:, :c] = codes
    low, high = padded.view(r, chunks_of(c, lanes), HALF, lanes, 2).long().unbind(4)
    pairs, whole, left = low | high << HALF, HALF // bits, HALF % bits
    words = torch.zeros(r, pairs.shape[1], bits, lanes, dtype=torch.int64, device=codes.device)
    for q in range(whole * bits):
        words[:, :, q // whole] |= pairs[:, :, q] << bits * (q % whole)
    for at in range(left * bits):
        bit = pairs[:, :, whole * bits + at // bits] >> at % bits & 0x10001
        words[:, :, at // left] |= bit << whole * bits + at % left
    return as_int32(words)


def unpack_words(words: Tensor, columns: int) -> Tensor:
    """Inverse of `pack_words`: uint8 [r, columns]."""
    bits = words.shape[2]
    wide, whole, left = words.long() & 0xFFFFFFFF, HALF // bits, HALF % bits
    mask = (2**bits - 1) * 0x10001
    pairs = [wide[:, :, q // whole] >> bits * (q % whole) & mask for q in range(whole * bits)]
    for first in range(0, left * bits, bits):
        field = torch.zeros_like(wide[:, :, 0])
        for at in range(first, first + bits):
            field |= (wide[:, :, at // left] >> whole * bits + at % left & 0x10001) << at - first
        pairs.append(field)
    pair = torch.stack(pairs, 2)
    return torch.stack([pair & 0xFFFF, pair >> HALF], 4).flatten(1)[:, :columns].to(torch.uint8)


def as_int32(words: Tensor) -> Tensor:
    """Words int64 below 2**32 as the bits of int32."""
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
