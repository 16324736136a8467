"""The sparse part of a matrix: single weights that are added to what its tiles hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from anybit.formats.base import MAX_UINT16, Fields, Refuse, check_finite, to_half
from anybit.formats.dtypes import Dtype
from anybit.lazy import Tensor, torch


@dataclass(frozen=True)
class Sparse:
    """Weights that are added to the tiles', compressed by rows (CSR)."""

    values: Tensor  # float16 [n]
    columns: Tensor  # int64 [n], ascending within a row
    row_ptr: Tensor  # int32 [out + 1]

    @staticmethod
    def of(dense: Tensor, mask: Tensor) -> Sparse:
        """The entries of dense [out, in] that a mask picks."""
        counts = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask.sum(1).cumsum(0)])
        return Sparse(to_half(dense[mask]), mask.nonzero()[:, 1], counts.to(torch.int32))

    @cached_property
    def rows(self) -> Tensor:
        """Output row of each value, int64 [n]."""
        counts = self.row_ptr.diff().long()
        return torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)

    def add_to(self, dense: Tensor) -> None:
        """`dense [out, in] += self`."""
        dense[self.rows, self.columns] += self.values.to(dense.dtype)

    def add_product(self, x: Tensor, y: Tensor) -> None:
        """`y [tokens, out] += x [tokens, in] @ self^T`."""
        y.index_add_(1, self.rows, x[:, self.columns] * self.values.float())

    def tensors(self, in_features: int) -> dict[str, Tensor]:
        index = self.columns.to(torch.int32)
        narrow = in_features <= MAX_UINT16  # PyTorch casts to int16 by dropping the high bits
        columns = index.to(torch.int16).view(torch.uint16) if narrow else index.view(torch.uint32)
        return {"values": self.values, "columns": columns, "row_ptr": self.row_ptr}

    @staticmethod
    def fields(n: int, shape: tuple[int, int]) -> Fields:
        index = Dtype.U16 if shape[1] <= MAX_UINT16 else Dtype.U32
        return {
            "values": (Dtype.F16, (n,)),
            "columns": (index, (n,)),
            "row_ptr": (Dtype.I32, (shape[0] + 1,)),
        }

    @staticmethod
    def read(tensors: Mapping[str, Tensor]) -> Sparse:
        columns = tensors["columns"]
        if columns.dtype == torch.uint16:
            columns = columns.view(torch.int16).long() & 0xFFFF
        else:
            columns = columns.view(torch.int32).long()
        return Sparse(tensors["values"], columns, tensors["row_ptr"])

    @staticmethod
    def check_tensors(tensors: Mapping[str, Tensor], shape: tuple[int, int], refuse: Refuse) -> None:
        check_finite("values", tensors, refuse)
        pointers = tensors["row_ptr"].long()
        if pointers[0] != 0 or pointers[-1] != len(tensors["values"]) or (pointers.diff() < 0).any():
            refuse("row_ptr does not ascend from 0 to the number of values")
        columns = Sparse.read(tensors).columns
        if len(columns) and not (int(columns.min()) >= 0 and int(columns.max()) < shape[1]):
            refuse(f"columns point outside 0..{shape[1] - 1}")
        first = torch.zeros(len(columns) + 1, dtype=torch.bool)
        first[pointers] = True
        if not ((columns.diff() > 0) | first[1:-1]).all():
            refuse("columns must ascend within each row")
