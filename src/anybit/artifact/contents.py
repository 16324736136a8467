"""What an artifact will hold, by name, and how large that is: known before any work."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from math import prod

from anybit.artifact.levels import Size, sizes_of_widths
from anybit.config import Options, SpecMap
from anybit.formats.dtypes import Dtype
from anybit.formats.layout import LayerLayout, code_bits
from anybit.methods import METHODS
from anybit.methods.method import Statistics


@dataclass(frozen=True)
class Plan:
    """Everything that will be stored, by name."""

    specs: SpecMap  # linear layers to quantize, in the model's order
    layouts: dict[str, LayerLayout]  # how they are stored
    embeddings: dict[str, LayerLayout]  # quantized embedding and head
    kept: dict[str, tuple[Dtype, tuple[int, ...]]]  # tensors stored as they are
    linear_weights: int  # weights of all linear layers inside the blocks
    model_weights: int  # all weights of the model
    unquantized: dict[str, LayerLayout]  # linear layers inside the blocks that are left as they are
    overhead_bytes: int = 0  # of everything beside the tensors, the tokenizer apart
    enhancement_bytes: int = 0  # about what the files of enhancement layers have besides planes
    most_bytes: int | None = None  # what is stored is cut so that it takes no more than these

    @property
    def bits_per_weight(self) -> float:
        """8 x bytes read / weights of all linear layers in the blocks, quantized or not; nested ones at the widest."""
        return self._bits_per_weight(layout.widest() for layout in self.layouts.values())

    @property
    def file_bits_per_weight(self) -> float:
        """The same of everything stored: of nested layers, all widths."""
        return self._bits_per_weight(self.layouts.values())

    def _bits_per_weight(self, layouts: Iterable[LayerLayout]) -> float:
        packed = sum(layout.nbytes for layout in layouts)
        kept = sum(layout.nbytes for layout in self.unquantized.values())
        return 8 * (packed + kept + self.enhancement_bytes) / self.linear_weights

    @property
    def statistics(self) -> Statistics:
        """What the method is to be told of the layers, all of their specs together."""
        wanted = (METHODS[spec.options.name].statistics(spec.options) for spec in self.specs.values())
        return reduce(operator.or_, wanted, Statistics())

    @property
    def code_bits(self) -> float:
        """Average width of the weights of all linear layers inside the blocks."""
        return code_bits([*self.layouts.values(), *self.unquantized.values()])

    def _kept_bytes(self, name: str) -> int:
        dtype, shape = self.kept[name]
        return dtype.itemsize * prod(shape)

    @property
    def tensor_bytes(self) -> int:
        packed = sum(layout.nbytes for layout in (*self.layouts.values(), *self.embeddings.values()))
        return packed + sum(self._kept_bytes(name) for name in self.kept)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files but the tokenizer: never less than they turn out to be, and a few kB more at most."""
        taken = self.tensor_bytes + self.overhead_bytes + self.enhancement_bytes
        return taken if self.most_bytes is None else min(taken, self.most_bytes)

    def with_layouts(self, layouts: Mapping[str, LayerLayout]) -> Plan:
        """The plan of a base layer: layers and embeddings with the planes that are there."""
        layers, embeddings = (
            {name: layouts[name] for name in group} for group in (self.layouts, self.embeddings)
        )
        return replace(self, layouts=layers, embeddings=embeddings, enhancement_bytes=0, most_bytes=None)

    @property
    def quantized_weights(self) -> int:
        return sum(layout.weights for layout in self.layouts.values())

    def sizes(self) -> tuple[Size, ...]:
        """The levels, where there are no enhancement layers."""
        others = sum(layout.nbytes for layout in self.unquantized.values())
        return sizes_of_widths(self.layouts, others, self.size_bytes)

    def warning(self, options: Options) -> str | None:
        """A sentence where the artifact stores more than bfloat16 would: tables outweigh narrow matrices."""
        if self.file_bits_per_weight <= 16:
            return None
        fewer = "fewer widths (--widths)" if hasattr(options, "widths") else "fewer bits (--bits)"
        smaller = " or smaller tables (--codebook-bits 8)" if hasattr(options, "codebook_bits") else ""
        return (
            f"warning: this artifact stores {self.file_bits_per_weight:.1f} bits per weight, more than bfloat16's 16: "
            f"tables of so many centroids outweigh matrices so narrow; store {fewer}{smaller}"
        )

    def coverage(self) -> str:
        """One sentence: what share of the weights is quantized."""
        quantized = self.quantized_weights
        head = sum(layout.weights for layout in self.embeddings.values())
        text = (
            f"quantizes {len(self.layouts)} linear layers: {quantized / 1e6:.1f} M of "
            f"{self.linear_weights / 1e6:.1f} M weights in the blocks, "
            f"{100 * (quantized + head) / self.model_weights:.1f} % of all {self.model_weights / 1e6:.1f} M"
        )
        return text + (f" (embedding and head: {head / 1e6:.1f} M)" if head else "")
