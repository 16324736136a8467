"""Keys and values of attention as codes: asymmetric, a scale per head and token (Atom, arXiv:2310.19102, 4.4)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from anybit.formats.bits import FP16_MAX, PACKED_WIDTHS, pack_codes, unpack_codes

# Odd factors of a head size, and the field whose squares make a matrix of 4 times as many rows.
PALEY = {3: 5, 5: 9}


def rotated(states: Tensor) -> Tensor:
    """States [..., d] times a Hadamard matrix, which is its own inverse: outliers are spread over a head.

    It has d rows where d is a power of 2, or one times 12 or 20, such as 80 or 96. Else it has as many as the greatest
    power of 2 in d, and turns each run of so many numbers.
    """
    n = _hadamard_rows(states.shape[-1])
    runs = states.float().reshape(*states.shape[:-1], states.shape[-1] // n, n)
    return (runs @ _hadamard(n).to(runs.device)).reshape(states.shape).to(states.dtype)


def _hadamard_rows(d: int) -> int:
    power = d & -d
    return d if power >= 4 and d // power in PALEY else power


@cache
def _hadamard(n: int) -> Tensor:
    """A symmetric Hadamard matrix of n rows, orthonormal: Sylvester's of 2^k rows times one of 1, 12 or 20."""
    odd = n // (n & -n)
    made = torch.ones(1, 1) if odd == 1 else _paley(PALEY[odd])
    while len(made) < n:
        made = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), made)
    return made / n**0.5


def _paley(q: int) -> Tensor:
    """Paley's second construction: a symmetric Hadamard matrix of 2 (q + 1) rows, from squares in the field of q."""
    conference = torch.zeros(q + 1, q + 1)
    conference[0, 1:] = conference[1:, 0] = 1.0
    for x, y in itertools.permutations(range(q), 2):
        conference[x + 1, y + 1] = 1.0 if _differ_by_a_square(x, y, q) else -1.0
    turn, own = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
    return torch.kron(conference, turn) + torch.kron(torch.eye(q + 1), own)


def _differ_by_a_square(x: int, y: int, q: int) -> bool:
    """In the field of 5 elements, with squares 1 and 4, or of 9: a + 3 b is a + b i, with squares 1, -1, i, -i."""
    return (x - y) ** 2 % 5 == 1 if q == 5 else x % 3 == y % 3 or x // 3 == y // 3


@dataclass(frozen=True)
class QuantizedStates:
    """Keys or values [batch, heads, tokens, d] as codes of `bits` bits: `minimum + scale * code`."""

    bits: int
    d: int
    dtype: torch.dtype  # of what was quantized
    codes: Tensor  # uint8 [batch, heads, tokens, bytes]
    scale: Tensor  # float16 [batch, heads, tokens]
    minimum: Tensor  # float16 [batch, heads, tokens]

    @staticmethod
    def of(states: Tensor, bits: int) -> QuantizedStates:
        """Round states [batch, heads, tokens, d] to nearest, each head of each token by its own range.

        Scale and minimum are rounded to float16 first, the scale never down: the range stays covered, up to what
        float16 reaches; states beyond are cut off there.
        """
        values = states.float().clamp(-FP16_MAX, FP16_MAX)
        minimum = values.amin(-1).half()
        spread = (values.amax(-1) - minimum.float()).clamp(min=0)
        scale = (spread / (2**bits - 1)).half()  # at most 2 * FP16_MAX / 3
        short = scale.float() * (2**bits - 1) < spread
        scale = torch.where(short, torch.nextafter(scale, torch.full_like(scale, torch.inf)), scale)
        safe = torch.where(scale == 0, 1.0, scale.float())
        codes = ((values - minimum.float()[..., None]) / safe[..., None]).round().clamp(0, 2**bits - 1)
        packed = _pack(codes.to(torch.uint8), bits)
        return QuantizedStates(bits, states.shape[-1], states.dtype, packed, scale, minimum)

    def dequantize(self) -> Tensor:
        """[batch, heads, tokens, d] in the dtype of what was quantized."""
        codes = _unpack(self.codes, self.bits, self.d)
        return (self.minimum.float()[..., None] + self.scale.float()[..., None] * codes).to(self.dtype)

    def map(self, change: Callable[[Tensor], Tensor]) -> QuantizedStates:
        """The same change of batch or tokens to all three tensors."""
        parts = [change(part) for part in (self.codes, self.scale, self.minimum)]
        return QuantizedStates(self.bits, self.d, self.dtype, *parts)

    def then(self, later: QuantizedStates) -> QuantizedStates:
        """These tokens and later ones."""
        pairs = zip((self.codes, self.scale, self.minimum), (later.codes, later.scale, later.minimum))
        return QuantizedStates(self.bits, self.d, self.dtype, *(torch.cat(pair, dim=2) for pair in pairs))

    @property
    def tokens(self) -> int:
        return self.scale.shape[2]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scale, self.minimum))


def _pack(codes: Tensor, bits: int) -> Tensor:
    """[..., d] -> uint8 [..., bytes]; 3-bit codes as planes, side by side."""
    flat = codes.reshape(-1, codes.shape[-1])
    packed = pack_codes(flat, bits, 1)
    if bits not in PACKED_WIDTHS:
        packed = packed.transpose(0, 1).flatten(1)
    return packed.reshape(*codes.shape[:-1], packed.shape[-1])


def _unpack(packed: Tensor, bits: int, d: int) -> Tensor:
    flat = packed.reshape(-1, packed.shape[-1])
    if bits not in PACKED_WIDTHS:
        flat = flat.view(len(flat), bits, -1).transpose(0, 1)
    return unpack_codes(flat, bits, d).view(*packed.shape[:-1], d)
