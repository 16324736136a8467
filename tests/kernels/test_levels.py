"""A layer at its levels: what a layer bound to the beginnings of the same bytes computes, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anybit.formats import Codebook, CodebookLayout, NestedLayout
from anybit.formats.layout import LayerLayout
from anybit.formats.weight import PackedWeight, QuantizedWeight, pack, unpack
from anybit.kernels import cpu
from anybit.kernels.cpu_layer import Layer
from anybit.methods.ordering import with_counts
from tests.formats.test_nested import random_tile

if not cpu.available():
    pytest.skip(str(cpu.why_not()), allow_module_level=True)

pytestmark = pytest.mark.native

COUNTS = (70, 70, 66, 50, 31, 8)
LEVELS = ((70,), (70, 70, 12), (70, 66, 66, 50), (70, 70, 66, 50, 31, 8))


def nested(kept: int = 0, kept_bits: int = 8) -> PackedWeight:
    return pack(QuantizedWeight((70, 300), (random_tile(70, 300, kept, COUNTS, 0, kept_bits),)))


def codebook(table_bits: int) -> PackedWeight:
    """Of 3, 4 and 6 bits; entries of the wider tables are children of the narrower."""
    generator = torch.Generator().manual_seed(table_bits)
    codes = torch.randint(0, 64, (70, 300), generator=generator, dtype=torch.uint8)
    wide = torch.randint(0, 2**8 if table_bits == 8 else 999, (70, 64), generator=generator).sort(1).values
    tables = [wide[:, :: 2 ** (6 - b)] for b in (3, 4, 6)]
    if table_bits == 16:
        tile = Codebook(widths=(3, 4, 6), codes=codes, tables=tuple((t / 256 - 2).half() for t in tables))
    else:
        grid = {name: torch.rand(70, generator=generator).half() for name in ("table_scale", "table_min")}
        bytes_ = tuple(table.byte().contiguous() for table in tables)
        tile = Codebook(widths=(3, 4, 6), codes=codes, tables=bytes_, table_bits=8, **grid)
    return pack(QuantizedWeight((70, 300), (tile,)))


def levels_of(weight: PackedWeight) -> list[LayerLayout]:
    (tile,) = weight.layout.tiles
    if isinstance(tile, NestedLayout):
        return [with_counts(weight.layout, counts) for counts in LEVELS]
    return [weight.layout.at_width(width) for width in weight.layout.widths]


@pytest.mark.parametrize("isa", cpu.matmul_isas())
@pytest.mark.parametrize("kind", ["nested", "nested, kept", "nested, kept 16", "codebook 16", "codebook 8"])
def test_a_level_is_a_layer_of_the_same_beginnings(kind: str, isa: str) -> None:
    if kind.startswith("nested"):
        weight = nested(5 if "kept" in kind else 0, 16 if "16" in kind else 8)
    else:
        weight = codebook(int(kind[9:]))
    layer = Layer(weight.layout, weight.tensors, isa=isa)
    x = torch.randn(20, 300, generator=torch.Generator().manual_seed(1))
    at = layer
    for layout in [*levels_of(weight), weight.layout]:  # each from the one before, up and down
        part = weight.prefix(layout)
        at, alone = at.at(layout), Layer(layout, part.tensors, isa=isa)
        assert torch.equal(at.dequantize(), unpack(part).dequantize())
        for tokens in (1, 3, 20):
            for inputs in (x[:tokens], x[:tokens].bfloat16()):
                assert torch.equal(at.matmul(inputs), alone.matmul(inputs)), (layout, tokens)
        ids = torch.tensor([0, 69, 33, 33])
        assert torch.equal(at.rows(ids), at.dequantize()[ids])
        assert at.repacked == layer.repacked and not at.unpack()
    assert torch.equal(layer.matmul(x), at.matmul(x))  # the first is what it was


@pytest.mark.parametrize(
    "counts", [(71, 70), (70, 71), (69, 69), (70, 66, 70), (70, 70, 67), (70,) * 7, (70, 70, 0)]
)
def test_levels_beyond_what_is_stored_are_refused(counts: tuple[int, ...]) -> None:
    weight = nested()
    layer = Layer(weight.layout, weight.tensors)
    tile = NestedLayout(bits=1, counts=counts, kept=0, gains=True)
    with pytest.raises(ValueError, match="counts of planes"):
        layer.at(LayerLayout((70, 300), (tile,)))


def test_widths_that_are_not_stored_are_refused() -> None:
    weight = codebook(16)
    layer = Layer(weight.layout, weight.tensors)
    with pytest.raises(ValueError, match="no such width"):
        layer.at(LayerLayout((70, 300), (CodebookLayout.of((5,), False, 16),)))
    with pytest.raises(ValueError, match="no such width"):
        layer.at(LayerLayout((70, 300), (CodebookLayout.of((2, 4), False, 16),)))
    with pytest.raises(ValueError, match="several tiles"):
        layer.at(LayerLayout((70, 300), weight.layout.tiles * 2))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"shape": [1, 300]}, "another number of outputs than its layer: 1, expected 70"),
        ({"shape": [70, 1]}, "another number of inputs"),
        ({"sparse": 5}, "another number of sparse weights"),
        ({"input_scale": True}, "another input_scale"),
        ({"tile": {"by_channel": True}}, "another by_channel"),
        ({"tile": {"rows": 3}}, "another number of rows"),
        ({"tile": {"cols": 3}}, "another number of cols"),
        ({"tile": {"table_bits": 8}}, "another table_bits than its layer: 8, expected 16"),
        ({"tile": {"bits": 4}}, "no such width"),
        ({"tile": {"format": "float16"}}, "in the format float16 of a layer in the format codebook"),
    ],
)
def test_a_level_is_the_layers_own_layout_but_for_its_width(change: dict[str, Any], match: str) -> None:
    weight = codebook(16)
    layer = Layer(weight.layout, weight.tensors)
    level = weight.layout.at_width(3).to_json()
    layer.native.at(level)
    tile = level["tiles"][0] | change.pop("tile", {})
    with pytest.raises(ValueError, match=match):
        layer.native.at(level | {"tiles": [tile]} | change)


def test_a_level_keeps_as_many_channels_as_its_layer() -> None:
    weight = nested(5)
    with pytest.raises(ValueError, match="another number of kept channels than its layer: 4, expected 5"):
        Layer(weight.layout, weight.tensors).at(
            LayerLayout((70, 300), (NestedLayout.of((70,), 4, gains=True),))
        )
    with pytest.raises(ValueError, match="another gains than its layer: 0, expected 1"):
        Layer(weight.layout, weight.tensors).at(
            LayerLayout((70, 300), (NestedLayout.of((70,), 5, kept_bits=8),))
        )
    with pytest.raises(ValueError, match="another width of kept channels than its layer: 16, expected 8"):
        Layer(weight.layout, weight.tensors).at(
            LayerLayout((70, 300), (NestedLayout.of((70,), 5, gains=True),))
        )
