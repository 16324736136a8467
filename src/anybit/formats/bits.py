"""Codes of 1 to 8 bits as bytes: packed fields or bitplanes, low bits first, rows padded; exact both ways. And the
groups of input channels that share a scale."""

from __future__ import annotations

from anybit.lazy import Tensor, functional, torch

PACKED_WIDTHS = (2, 4, 8)  # packed along `in`; every other width is stored as bitplanes
ROW_ALIGN = 16  # bytes: rows of packed codes start where a vector load likes them
FP16_MAX = 65504.0  # the largest float16
PLANE_ALIGN = 4  # bytes: a bitplane row is a whole number of 32-bit words


def groups_of(columns: int, group_size: int) -> int:
    """Number of groups along `columns` input channels; a ragged last group is a group."""
    return -(-columns // group_size)


def split_groups(matrix: Tensor, group_size: int) -> Tensor:
    """[r, c] -> [r, groups, group_size], the ragged last group padded with zeros; a group has at most all columns."""
    r, c = matrix.shape
    group_size = min(group_size, c)
    groups = groups_of(c, group_size)
    return functional.pad(matrix, (0, groups * group_size - c)).view(r, groups, group_size)


def safe(scale: Tensor) -> Tensor:
    """A divisor: 1 where the scale is 0 (an all-zero group, whose weights then get the zero point)."""
    return torch.where(scale == 0, 1.0, scale)


def row_bytes(columns: int, bits: int, align: int) -> int:
    """Bytes of one row of codes (one plane's, for a width stored as planes), padded to `align` bytes."""
    stored = bits if bits in PACKED_WIDTHS else 1
    return -(-columns * stored // (8 * align)) * align


def code_align(bits: int) -> int:
    return ROW_ALIGN if bits in PACKED_WIDTHS else PLANE_ALIGN


def pack_codes(codes: Tensor, bits: int, align: int) -> Tensor:
    """Pack codes [r, c] below 2**bits: uint8 [r, bytes] at 2, 4 and 8 bits, else planes uint8 [bits, r, bytes].

    Low bits come first: weight j of a packed row is at bit `j * bits`, of a plane row at bit j. Planes are
    stored most significant first.
    """
    return pack_bits(codes, bits, align) if bits in PACKED_WIDTHS else pack_planes(codes, bits, align)


def pack_planes(codes: Tensor, bits: int, align: int = PLANE_ALIGN) -> Tensor:
    """Bitplanes uint8 [bits, r, bytes] of codes [r, c] below 2**bits, most significant first."""
    return torch.stack([pack_bits(codes >> p & 1, 1, align) for p in range(bits - 1, -1, -1)])


def pack_bits(codes: Tensor, width: int, align: int) -> Tensor:
    """Pack codes [r, c] of a width that divides 8 into uint8 [r, bytes]."""
    per_byte = 8 // width
    r, c = codes.shape
    padded = torch.zeros(r, row_bytes(c, width, align) * per_byte, dtype=torch.uint8, device=codes.device)
    padded[:, :c] = codes
    fields = padded.view(r, -1, per_byte)
    packed = fields[..., 0].clone()
    for k in range(1, per_byte):
        packed |= fields[..., k] << (k * width)
    return packed


def unpack_codes(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Inverse of `pack_codes`: uint8 [r, columns]."""
    return unpack_bits(packed, bits, columns) if bits in PACKED_WIDTHS else unpack_planes(packed, columns)


def unpack_planes(planes: Tensor, columns: int) -> Tensor:
    """Inverse of `pack_planes`, or of its first planes only: the leading bits of the codes, uint8 [r, columns]."""
    codes = torch.zeros(planes.shape[1], columns, dtype=torch.uint8, device=planes.device)
    for plane in planes:
        codes = codes << 1 | unpack_bits(plane, 1, columns)
    return codes


def unpack_bits(packed: Tensor, width: int, columns: int) -> Tensor:
    """Inverse of `pack_bits`: uint8 [r, columns]."""
    per_byte = 8 // width
    fields = torch.stack([packed >> (k * width) & (2**width - 1) for k in range(per_byte)], dim=-1)
    return fields.flatten(1)[:, :columns].contiguous()


def packed_shape(r: int, c: int, bits: int, align: int) -> tuple[int, ...]:
    """Shape of what `pack_codes` makes of codes [r, c]."""
    width = row_bytes(c, bits, align)
    return (r, width) if bits in PACKED_WIDTHS else (bits, r, width)
