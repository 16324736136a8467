"""Quantized activations: the shared reference and native paths, MixLLM, Atom, AWQ and SmoothQuant, whole artifacts."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import anybit
from anybit.artifact.reader import inspect, verify
from anybit.bench import ggml, kernels
from anybit.calibration.stats import InputStats, LinearStats
from anybit.config import TileSpec
from anybit.errors import InputError
from anybit.formats import Float16, GroupInt
from anybit.formats.weight import PackedWeight, QuantizedWeight, pack, unpack, validate
from anybit.kernels import cpu, reference
from anybit.kernels.dispatch import Prepared
from anybit.layers import QuantLinear
from anybit.loader import load
from anybit.methods import activations, atom, gptq, mixllm, registry, rtn, scaling, squeezellm
from anybit.methods import sensitivity as salience
from anybit.methods.grid import split_groups
from anybit.plan import fit_budget, make_plan
from tests import builders
from tests.builders import MakeModel, opened, outlier_inputs, random, stats_of, token_rows
from tests.probes import isas

SMALL: dict[str, Any] = {"samples": 3, "seq_len": 24}


# ---- rounding of activations


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("m", "columns", "group"), [(1, 1, 1), (3, 100, 32), (2, 48, 48), (5, 37, 7), (4, 130, 128)]
)
def test_activation_codes_follow_the_grid(bits: int, m: int, columns: int, group: int) -> None:
    x = random(m, columns, seed=bits) * torch.logspace(-4, 4, m)[:, None]
    x[0] = 0
    groups = -(-columns // group)
    clip = torch.linspace(0.5, 1, groups).half()
    codes, scales = reference.quantize_activations(x, bits, group, clip, None)
    top = 2 ** (bits - 1) - 1
    for k in range(m):
        for g in range(groups):
            part = x[k, g * group : (g + 1) * group]
            expected = part.abs().max() * clip[g].float() / top
            torch.testing.assert_close(scales[k, g], expected, rtol=1e-6, atol=0)
            for j, value in enumerate(part.tolist()):
                q = round(value / float(scales[k, g])) if scales[k, g] else 0
                assert abs(int(codes[k, g * group + j]) - max(-top - 1, min(top, q))) <= (
                    abs(value / float(scales[k, g] or 1)) % 1 > 0.499
                )
    for isa in isas():
        again = cpu.quantize_activations(x, bits, group, clip, None, isa)
        assert torch.equal(again[0], codes) and torch.equal(again[1], scales), isa
    fixed = torch.rand(groups, generator=torch.Generator().manual_seed(1)).half() + 0.01
    expected_codes, _ = reference.quantize_activations(x, bits, group, None, fixed)
    for isa in isas():
        assert torch.equal(cpu.quantize_activations(x, bits, group, None, fixed, isa)[0], expected_codes), isa


def native_tile(tile: GroupInt, isa: str) -> cpu.GroupInt:
    return cpu.group_int(
        tile.tensors()["codes"],
        tile.scales,
        tile.zeros,
        tile.rows,
        bits=tile.bits,
        group_size=tile.group_size,
        columns=tile.codes.shape[1],
        isa=isa,
    )


def test_damaged_inputs_stay_damaged() -> None:
    for value in (torch.nan, torch.inf):
        x = random(1, 64)
        x[0, 5] = value
        one = torch.ones(1).half()
        for clip, fixed in ((one, None), (None, one)):
            for scale in (
                reference.quantize_activations(x, 8, 64, clip, fixed)[1],
                *(cpu.quantize_activations(x, 8, 64, clip, fixed, isa)[1] for isa in isas()),
            ):
                assert torch.isnan(scale).all()


# ---- integer products

SHAPES = [
    (5, 576, 128),
    (41, 200, 32),
    (301, 1539, 128),
    (7, 576, 64),
    (3, 100, 32),
    (9, 1000, 1000),
    (4, 37, 2),
    (1, 1, 4),
    (16, 130, 16),
    (3, 40, 96),
]


def group_tile(rows: int, columns: int, group: int, bits: int, symmetric: bool, seed: int) -> GroupInt:
    generator = torch.Generator().manual_seed(seed)
    groups = -(-columns // group)
    codes = torch.randint(0, 2**bits, (rows, columns), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 2**bits, (rows, groups), generator=generator, dtype=torch.uint8)
    scales = torch.rand(rows, groups, generator=generator).half() + 0.1
    clip = torch.ones(groups).half()
    return GroupInt(bits, group, codes, scales, None if symmetric else zeros, act_bits=8, act_clip=clip)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_group_sums_are_exact(shape: tuple[int, int, int], bits: int) -> None:
    rows, columns, group = shape
    tile = group_tile(rows, columns, group, bits, symmetric=False, seed=bits)
    x = torch.randint(-128, 128, (3, columns), generator=torch.Generator().manual_seed(9)).to(torch.int8)
    assert tile.zeros is not None
    of_column = torch.arange(columns) // group
    products = x.long()[:, None] * (tile.codes.long() - tile.zeros.long()[:, of_column])
    oracle = torch.zeros(3, rows, tile.scales.shape[1], dtype=torch.int64).index_add_(2, of_column, products)
    assert torch.equal(reference.group_sums(x, tile).long(), oracle)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("shape", SHAPES)
def test_native_products_match_the_reference(shape: tuple[int, int, int], bits: int) -> None:
    rows, columns, group = shape
    tile = group_tile(rows, columns, group, bits, symmetric=bits % 3 == 0, seed=7)
    made = QuantizedWeight((rows, columns), (tile,))
    for isa in isas():
        native = native_tile(tile, isa)
        assert native.takes_ints
        for m in (1, 3, 15):
            x = random(m, columns, seed=m)
            expected = reference.int_matmul(x, made)
            codes, scales = reference.quantize_activations(x, 8, group, tile.act_clip, None)
            y, threaded = torch.zeros(m, rows), torch.zeros(m, rows)
            native.int_matmul(codes, scales, y)
            torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
            native.int_matmul(codes, scales, threaded, threads=3)
            assert torch.equal(y, threaded)


def test_extreme_codes_do_not_overflow() -> None:
    """All products at their largest: pairs of 7 and 8 bits come near or beyond 16, a long group beyond 24."""
    columns = 65536
    x = torch.full((9, columns), -128, dtype=torch.int8)
    for bits in (4, 7, 8):
        codes = torch.full((2, columns), 2**bits - 1, dtype=torch.uint8)
        zeros = torch.zeros(2, 1, dtype=torch.uint8)
        tile = GroupInt(bits, columns, codes, torch.ones(2, 1).half(), zeros)
        for isa in isas():
            for m in (1, 9):
                y = torch.zeros(m, 2)
                native_tile(tile, isa).int_matmul(x[:m], torch.ones(m, 1), y)
                assert y.tolist() == [[-128.0 * (2**bits - 1) * columns] * 2] * m, (bits, isa, m)


@pytest.mark.parametrize("bits", range(1, 9))
def test_many_tokens_have_the_bits_of_one_by_one(bits: int) -> None:
    """Sums of many tokens come from other instructions, in other panels: groups of every fit, ends of every kind."""
    shapes = [(37, 416, 32), (140, 320, 64), (16, 609, 96), (64, 300, 128), (21, 350, 350), (7, 1000, 300)]
    for i, (rows, columns, group) in enumerate(shapes):
        generator = torch.Generator().manual_seed(bits)
        tile = group_tile(rows, columns, group, bits, symmetric=(i + bits) % 3 == 0, seed=i)
        tile.codes[:: 1 + bits % 2, columns // 2 :] = 2**bits - 1
        if tile.zeros is not None and bits % 2 == 0:  # beyond the codes, and beyond signed bytes
            tile.zeros[:] = torch.tensor([0, 127, 128, 255], dtype=torch.uint8)[torch.arange(rows) % 4, None]
        tokens = (9, 17, 31, 33, 47, 64, 65)[(i + bits) % 7]
        x = torch.randint(-128, 128, (tokens, columns), generator=generator).to(torch.int8)
        x[0], x[-1] = -128, 127
        scales = torch.rand(tokens, tile.scales.shape[1], generator=generator)
        for isa in isas():
            native = native_tile(tile, isa)
            many, single = torch.ones(tokens, rows), torch.ones(tokens, rows)
            native.int_matmul(x, scales, many, threads=1 + i % 3)
            for k in range(tokens):
                native.int_matmul(x[k : k + 1], scales[k : k + 1], single[k : k + 1], threads=1)
            assert torch.equal(many, single), (isa, rows, columns, group)


def test_more_tokens_than_one_batch_have_the_bits_of_fewer() -> None:
    for group in (32, 700):
        tile = group_tile(40, 700, group, 4, symmetric=False, seed=group)
        x = torch.randint(-128, 128, (513, 700), generator=torch.Generator().manual_seed(1)).to(torch.int8)
        scales = random(513, tile.scales.shape[1])
        for isa in isas():
            native = native_tile(tile, isa)
            all_at_once, parts = torch.zeros(513, 40), torch.zeros(513, 40)
            native.int_matmul(x, scales, all_at_once)
            for k in range(0, 513, 8):
                native.int_matmul(x[k : k + 8], scales[k : k + 8], parts[k : k + 8])
            assert torch.equal(all_at_once, parts), (isa, group)


@pytest.mark.parametrize("columns", [500, 4096, 20000])
def test_sums_of_one_sign_are_exact(columns: int) -> None:
    """The zero point cancels most of such a sum: nothing may be rounded before it does."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(100, 156, (6, columns), generator=generator, dtype=torch.uint8)
    x = torch.randint(60, 128, (3, columns), generator=generator).to(torch.int8)
    tile = GroupInt(8, columns, codes, torch.ones(6, 1).half())
    oracle = (x.long() @ (codes.long() - 128).T).float()
    for isa in isas():
        y = torch.zeros(3, 6)
        native_tile(tile, isa).int_matmul(x, torch.ones(3, 1), y)
        assert torch.equal(y, oracle), isa


def test_native_products_refuse_what_they_cannot_take() -> None:
    isas()
    long = 65537
    wrong = GroupInt(8, long, torch.zeros(2, long, dtype=torch.uint8), torch.ones(2, 1).half())
    tile = native_tile(wrong, "portable")
    assert not tile.takes_ints  # its sums could leave 32 bits
    with pytest.raises(ValueError, match="leave 32 bits"):
        tile.int_matmul(torch.zeros(1, long, dtype=torch.int8), torch.zeros(1, 1), torch.zeros(1, 2))
    good = Prepared(pack(QuantizedWeight((2, 8), (group_tile(2, 8, 4, 4, True, 0),)))).tiles[0]
    assert isinstance(good, cpu.GroupInt)
    for x, scales, y in (
        (torch.zeros(1, 8, dtype=torch.uint8), torch.zeros(1, 2), torch.zeros(1, 2)),
        (torch.zeros(1, 7, dtype=torch.int8), torch.zeros(1, 2), torch.zeros(1, 2)),
        (torch.zeros(1, 8, dtype=torch.int8), torch.zeros(1, 3), torch.zeros(1, 2)),
        (torch.zeros(1, 8, dtype=torch.int8), torch.zeros(1, 2), torch.zeros(1, 3)),
    ):
        with pytest.raises(ValueError, match="expected"):
            good.int_matmul(x, scales, y)


def layer(
    kind: str, shape: tuple[int, int] = (40, 72)
) -> tuple[Tensor, LinearStats, QuantizedWeight, builders.LayerSpec]:
    """A layer of each kind with quantized activations, the method's own function having made it."""
    weight, stats = random(*shape, seed=1), stats_of(outlier_inputs(256, shape[1]))
    size = 32
    if kind == "mixllm":
        plain = builders.layer_spec(tiles=(TileSpec(4, size),), clip=True, act_bits=8)
        spec = mixllm.with_rows(plain, range(3, shape[0], 7), shape[0])
    elif kind == "atom":
        spec = builders.layer_spec(
            tiles=(TileSpec(4, size, True),), act_bits=4, act_clip=0.9, outlier_channels=8, clip_ratio=0.85
        )
    elif kind == "atom searched":
        spec = builders.layer_spec(
            tiles=(TileSpec(3, size, True),), act_bits=3, act_search=True, outlier_channels=8, clip=True
        )
    elif kind == "smoothquant":
        spec = builders.layer_spec(tiles=(TileSpec(8, -1, True),), act_bits=8, scaling="smoothquant")
    elif kind == "static":
        spec = builders.layer_spec(tiles=(TileSpec(8, -1, True),), act_bits=8, act_static=True)
    else:
        spec = builders.layer_spec(tiles=(TileSpec(4, size),), clip=True, scaling="awq")
    method = kind.split(maxsplit=1)[0].replace("static", "rtn")
    return weight, stats, registry.quantize(method, weight, stats, spec), spec


KINDS = ("mixllm", "atom", "atom searched", "smoothquant", "static", "awq")


@pytest.mark.parametrize("kind", KINDS)
def test_layers_round_trip_and_multiply(kind: str) -> None:
    _, _, made, spec = layer(kind)
    packed = pack(made)
    validate("layer", packed)
    planned = registry.METHODS[kind.split(maxsplit=1)[0].replace("static", "rtn")].layout(spec, made.shape)
    assert packed.layout == planned
    again = pack(unpack(packed))
    for field, tensor in packed.tensors.items():
        assert torch.equal(again.tensors[field].view(torch.uint8), tensor.view(torch.uint8)), field
    prepared = Prepared(packed)
    for tokens in (1, 3, 40):
        x = outlier_inputs(tokens, made.shape[1], seed=tokens)
        expected = reference.int_matmul(x, made)
        size = float(expected.abs().max())
        torch.testing.assert_close(prepared.matmul(x), expected, rtol=1e-4, atol=1e-5 * size)
        torch.testing.assert_close(reference.matmul(x, packed), expected, rtol=1e-4, atol=1e-5 * size)


def test_layers_without_the_native_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, made, _ = layer("mixllm")
    x = random(2, made.shape[1])
    expected = Prepared(pack(made)).matmul(x)
    monkeypatch.setattr(cpu, "_native", None)
    torch.testing.assert_close(Prepared(pack(made)).matmul(x), expected, rtol=1e-4, atol=1e-3)


def test_the_stored_bytes_of_the_documentation() -> None:
    tile = GroupInt(
        bits=4,
        group_size=4,
        codes=torch.tensor([[1, 2, 3, 4, 5], [15, 0, 8, 7, 9]], dtype=torch.uint8),
        scales=torch.tensor([[1.0, 2.0], [3.0, 4.0]]).half(),
        zeros=torch.tensor([[8, 3], [0, 15]], dtype=torch.uint8),
        act_bits=8,
        act_clip=torch.tensor([0.75, 1.0]).half(),
    )
    scale = torch.tensor([1.0, 0.5, 2.0, 1.0, 4.0]).half()
    packed = pack(QuantizedWeight((2, 5), (tile,), input_scale=scale))
    assert packed.layout == {
        "shape": [2, 5],
        "tiles": [{"format": "group_int", "bits": 4, "group_size": 4, "symmetric": False, "act_bits": 8}],
        "input_scale": True,
    }
    stored = {
        field: bytes(t.view(torch.uint8).flatten().tolist()).hex() for field, t in packed.tensors.items()
    }
    assert stored["act_clip"] == "003a003c"
    assert stored["input_scale"] == "003c00380040003c0044"
    validate("layer", packed)
    # x times the input scale: 2 -1 0 1 | 0.5; the first group's grid reaches 1.5, so 2 is cut off
    x = torch.tensor([[2.0, -2.0, 0.0, 1.0, 0.125]])
    step, last = 1.5 / 127, 0.5 / 127
    codes = [127, round(-1 / step), 0, round(1 / step)]
    first = step * sum(q * (c - 8) for q, c in zip(codes, (1, 2, 3, 4)))
    expected = first * 1 + 127 * last * 2 * (5 - 3)
    torch.testing.assert_close(Prepared(packed).matmul(x)[0, 0], torch.tensor(expected), rtol=1e-5, atol=0)


# ---- methods on one matrix


def output_error(weight: Tensor, made: QuantizedWeight, x: Tensor) -> float:
    return float((reference.int_matmul(x, made) - x @ weight.T).square().sum())


def test_atom_keeps_outliers() -> None:
    weight, stats, made, spec = layer("atom")
    assert stats.inputs is not None
    body, outliers = made.tiles
    assert isinstance(body, GroupInt) and isinstance(outliers, GroupInt)
    assert (body.bits, body.act_bits, outliers.bits, outliers.act_bits) == (4, 4, 8, 8)
    energy = stats.inputs.energy
    assert body.cols is not None and outliers.cols is not None
    stored = torch.cat([body.cols, outliers.cols]).long()
    assert (energy[stored].diff() >= 0).all() and len(outliers.cols) == 8
    assert body.act_clip is not None and (body.act_clip == torch.tensor(0.9).half()).all()
    assert outliers.act_clip is not None and (outliers.act_clip == 1).all()
    x = outlier_inputs(128, weight.shape[1], seed=8)
    plain = replace(spec, tiles=(TileSpec(4, 32, True),))
    without = registry.quantize("rtn", weight, stats, replace(plain, outlier_channels=None))
    assert output_error(weight, made, x) < 0.2 * output_error(weight, without, x)


def test_atom_default_outliers() -> None:
    assert [atom.outlier_channels(n) for n in (32, 576, 1536, 4096, 11008)] == [16, 16, 48, 128, 128]
    with pytest.raises(InputError, match="leave none"):
        atom.split(builders.layer_spec(), torch.arange(16))


def test_searched_clips_are_the_best_of_the_grid() -> None:
    _weight, stats, made, _ = layer("atom searched")
    assert stats.inputs is not None
    x = stats.inputs.sample
    (tile, _), dense = made.tiles, made.dequantize()
    assert isinstance(tile, GroupInt) and tile.cols is not None and tile.act_clip is not None
    cols = tile.cols.long()
    for g in range(len(tile.act_clip)):
        at = slice(g * tile.group_size, (g + 1) * tile.group_size)
        part, columns = x[:, cols][:, at], dense[:, cols][:, at]

        def cost(ratio: float, part: Tensor = part, columns: Tensor = columns) -> float:
            clip = torch.tensor([ratio]).half()
            codes, scale = reference.quantize_activations(part, tile.act_bits, part.shape[1], clip, None)
            return float(((codes * scale - part) @ columns.T).square().sum())

        costs = [cost(ratio) for ratio in activations.RATIOS]
        assert cost(float(tile.act_clip[g])) <= 1.001 * min(costs)
    assert (tile.act_clip < 1).any()


def test_static_scales_come_from_the_calibration() -> None:
    weight, stats, made, _ = layer("static")
    (tile,) = made.tiles
    assert isinstance(tile, GroupInt) and tile.act_scales is not None and stats.inputs is not None
    torch.testing.assert_close(
        tile.act_scales.float(), stats.inputs.peaks.max()[None] / 127, rtol=1e-3, atol=0
    )
    with pytest.raises(InputError, match="calibrate"):
        rtn.quantize(weight, None, builders.layer_spec(tiles=(TileSpec(8, -1),), act_bits=8, act_static=True))


@pytest.mark.parametrize("kind", ["awq", "smoothquant"])
def test_scaling_is_worth_it(kind: str) -> None:
    """Scaled, the output error falls; and what is stored is the factor times the scaled matrix."""
    weight, stats, made, spec = layer(kind)
    plain = registry.quantize("rtn", weight, stats, replace(spec, scaling="none"))
    x = outlier_inputs(128, weight.shape[1], seed=8)
    assert made.input_scale is not None and made.input_scale.float().std() > 0
    assert output_error(weight, made, x) < 0.9 * output_error(weight, plain, x)


def test_scaling_is_judged_on_the_rows_widths() -> None:
    """Rows of 4 bits decide alpha, though the first tile is one of 8."""
    weight, stats, _, spec = layer("mixllm")
    assert stats.hessian is not None
    mixed = scaling.search(weight, stats, replace(spec, scaling="awq", act_bits=16))
    narrow = replace(spec, tiles=(TileSpec(4, 32),), scaling="awq", act_bits=16)
    wide = replace(spec, tiles=(TileSpec(8, 32, True),), scaling="awq", act_bits=16)
    assert torch.equal(mixed, scaling.search(weight, stats, narrow))
    assert not torch.equal(mixed, scaling.search(weight, stats, wide))


def test_scaling_looks_at_live_channels_only() -> None:
    weight, _, _, spec = layer("awq")
    x, loud, dead = outlier_inputs(300, weight.shape[1]), weight.clone(), [1, 17]
    x[:, dead], loud[:, dead] = 0, 100.0
    first, second = (registry.quantize("awq", w, stats_of(x), spec) for w in (weight, loud))
    assert first.input_scale is not None and second.input_scale is not None
    assert torch.equal(first.input_scale, second.input_scale)
    assert torch.equal(first.dequantize(), second.dequantize())


def test_outlier_channels_are_never_clipped() -> None:
    weight, stats, _, spec = layer("atom")
    for bits in (4, 8):
        for static in (False, True):
            made = registry.quantize("atom", weight, stats, replace(spec, act_bits=bits, act_static=static))
            body, outliers = made.tiles
            assert isinstance(body, GroupInt) and isinstance(outliers, GroupInt) and stats.inputs is not None
            if static:
                assert outliers.cols is not None and outliers.act_scales is not None
                reached = outliers.act_scales.float() * 127
                peaks = stats.inputs.peaks[outliers.cols.long()].amax()
                torch.testing.assert_close(reached, peaks[None], rtol=1e-3, atol=0)
            else:
                assert outliers.act_clip is not None and (outliers.act_clip == 1).all()
                assert body.act_clip is not None and (body.act_clip < 1).all()


def test_awq_scale_is_a_power_of_the_magnitudes() -> None:
    weight, stats, made, _ = layer("awq")
    assert made.input_scale is not None and stats.inputs is not None
    slope = torch.linalg.lstsq(
        torch.stack([stats.inputs.magnitudes.log(), torch.ones(weight.shape[1])], 1),
        made.input_scale.float().log()[:, None],
    )
    alpha = -float(slope.solution[0])
    assert 0 < alpha <= 1 and alpha * 20 == pytest.approx(round(alpha * 20), abs=0.02)
    assert float(slope.residuals.sum()) < 1e-3


@pytest.mark.parametrize("kind", ["awq", "smoothquant"])
def test_scaling_composes_with_gptq(kind: str) -> None:
    """The factor, then GPTQ of the scaled matrix on the scaled inputs: nothing else."""
    weight, stats, _, _ = layer("awq")
    spec = builders.layer_spec(tiles=(TileSpec(3, 32),), clip=True, scaling=kind)
    made = registry.quantize("gptq", weight, stats, spec)
    assert made.input_scale is not None
    factor = made.input_scale.float()
    inputs = InputStats.empty(72)
    by_hand = LinearStats.empty(72, hessian=True)
    by_hand.hessian = stats.hessian * factor * factor[:, None]  # type: ignore[operator]
    by_hand.inputs = inputs
    expected = gptq.quantize(weight / factor, by_hand, replace(spec, scaling="none"))
    assert torch.equal(replace(made, input_scale=None).dequantize(), expected.dequantize())


# ---- the search


def loss_changes(folder: Path, tokens: Tensor, name: str) -> Tensor:
    """What rounding each row alone really does to the mean loss, from the model's own forward pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weight = model.get_submodule(name).weight
    original = weight.detach().clone()
    rounded = rtn.quantize(original, None, builders.layer_spec(tiles=(TileSpec(4),))).dequantize()

    @torch.no_grad()
    def losses() -> Tensor:
        return torch.stack([model(input_ids=row[None], labels=row[None]).loss.double() for row in tokens])

    base, found = losses(), []
    for row in range(len(original)):
        with torch.no_grad():
            weight[row] = rounded[row]
            found.append((losses() - base).abs().mean())
            weight[row] = original[row]
    return torch.stack(found)


def test_salience_predicts_the_loss(model_dir: MakeModel) -> None:
    streamed, tokens = opened(model_dir("llama")), token_rows(4, 24)
    shapes = streamed.all_linears()
    scores = salience._scores(streamed, tokens, shapes, builders.options("mixllm"), None, lambda n: None)
    name = "model.layers.1.self_attn.v_proj"
    real = loss_changes(model_dir("llama"), tokens, name)
    order = torch.stack([scores[name].argsort().argsort(), real.argsort().argsort()]).float()
    assert torch.corrcoef(order)[0, 1] > 0.8


def test_rows_are_chosen_globally() -> None:
    shapes = {"a": (4, 10), "b": (3, 100)}
    scores = {"a": torch.tensor([5.0, 1.0, 4.0, 1.0]), "b": torch.tensor([4.0, 9.0, 0.0])}
    assert salience.choose(scores, shapes, 3 / 7, by_rows=True) == {"a": (0, 2), "b": (1,)}
    assert salience.choose(scores, shapes, 0.0, by_rows=True) == {"a": (), "b": ()}
    assert salience.choose(scores, shapes, 1.0, by_rows=False) == {"a": (0, 1, 2, 3), "b": (0, 1, 2)}
    assert salience.choose(scores, shapes, 120 / 340, by_rows=False) == {"a": (0, 2), "b": (1,)}
    tied = {"a": torch.zeros(4), "b": torch.zeros(3)}
    assert salience.choose(tied, shapes, 2 / 7, by_rows=True) == {"a": (0, 1), "b": ()}


def test_an_interrupted_search_goes_on(
    model_dir: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = token_rows(9, 12)
    config = builders.options("mixllm", wide_rows=0.2, search="progressive")
    streamed = opened(model_dir("llama"))
    shapes = streamed.all_linears()
    whole = salience.search(streamed, tokens, shapes, config)
    calls: list[int] = []
    real = salience.gradient_statistics

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(args[1]))
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(salience, "gradient_statistics", counted)
    with pytest.raises(KeyboardInterrupt):
        salience.search(opened(model_dir("llama")), tokens, shapes, config, tmp_path)
    done = len(calls) - 1
    assert salience.search(opened(model_dir("llama")), tokens, shapes, config, tmp_path) == whole
    assert len(calls) - done - 1 == 10 * 3 - done  # 10 passes of 4 + 4 + 1 samples
    rows = sum(len(r) for r in whole.values())
    assert rows == int(0.2 * sum(out for out, _ in shapes.values()) + 1e-6)


# ---- artifacts


@torch.no_grad()
def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens).logits


METHODS = [
    ("mixllm", {"wide_rows": 0.1}),
    ("mixllm", {"bits": 5.3, "salience": "diagonal"}),
    ("mixllm", {"bits": 4}),
    ("atom", {"outlier_channels": 8}),
    ("atom", {"outlier_channels": 8, "bits": 3, "clip": False, "act_search": False}),
    ("atom", {"outlier_channels": 8, "act_bits": 8}),
    ("awq", {}),
    ("smoothquant", {}),
    ("smoothquant", {"act_static": True}),
    ("gptq", {"scaling": "awq", "act_bits": 8}),
    ("rtn", {"bits": 8, "act_bits": 8, "group_size": -1}),
]


@pytest.mark.parametrize(("method", "options"), METHODS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_artifacts_compute_what_they_say(
    family: str, method: str, options: dict[str, Any], model_dir: MakeModel, tmp_path: Path
) -> None:
    config = builders.options(method, **{"group_size": 16, **options}, **SMALL)
    anybit.quantize(model_dir(family), tmp_path / "out", config)
    verify(tmp_path / "out")
    model = load(tmp_path / "out")
    tokens = token_rows(2, 7)
    by_tile = logits(model, tokens[:1, :5])  # 5 tokens: the decode path
    by_matrix = logits(model, tokens)  # 14 tokens: the dense path
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.forward = oracle_forward(unpack(module.packed), module.bias)
    expected = logits(model, tokens)
    # A sum in another order moves an activation to the next code now and then.
    size = float(expected.abs().max())
    assert float((by_tile - expected[:1, :5]).abs().max()) < 0.02 * size
    assert float((by_matrix - expected).abs().max()) < 0.02 * size
    figures = inspect(tmp_path / "out")
    assert figures["method"] == method
    if "bits" in options and method == "mixllm":
        assert figures["bits"] == pytest.approx(options["bits"], abs=0.1)


def oracle_forward(weight: QuantizedWeight, bias: Tensor | None) -> Any:
    def forward(x: Tensor) -> Tensor:
        y = reference.int_matmul(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1)
        return y if bias is None else y + bias

    return forward


def test_wide_rows_are_the_salient_ones(model_dir: MakeModel, tmp_path: Path) -> None:
    config = builders.options("mixllm", wide_rows=0.25, group_size=16, **SMALL)
    anybit.quantize(model_dir("llama"), tmp_path / "out", config)
    tiles = [t for line in inspect(tmp_path / "out")["layers"] for t in line["tiles"]]
    shapes = opened(model_dir("llama")).all_linears()
    wide = sum(
        t.get("rows", shapes[line["name"]][0])
        for line in inspect(tmp_path / "out")["layers"]
        for t in line["tiles"]
        if t["bits"] == 8
    )
    assert wide == int(0.25 * sum(out for out, _ in shapes.values()))
    assert all(t["act_bits"] == 8 and t["symmetric"] == (t["bits"] == 8) for t in tiles)


def test_atom_follows_its_activations(model_dir: MakeModel, tmp_path: Path) -> None:
    """Later blocks are calibrated on what quantized activations and weights of earlier ones hand them."""
    made = {}
    for act_bits in (16, 2):
        config = builders.options(
            "atom", outlier_channels=8, act_bits=act_bits, act_search=False, group_size=16, **SMALL
        )
        anybit.quantize(model_dir("llama"), tmp_path / str(act_bits), config)
        made[act_bits] = load(tmp_path / str(act_bits)).state_dict()
    first, second = (f"model.layers.{i}.self_attn.q_proj.0.codes" for i in (0, 1))
    assert torch.equal(made[16][first], made[2][first])
    assert not torch.equal(made[16][second], made[2][second])


def damage(packed: PackedWeight, field: str, value: Any) -> PackedWeight:
    return PackedWeight(packed.layout, {**packed.tensors, field: value(packed.tensors[field].clone())})


@pytest.mark.parametrize(
    ("kind", "field", "value", "word"),
    [
        ("atom", "0.act_clip", lambda t: t.fill_(1.5), "act_clip"),
        ("atom", "1.act_clip", lambda t: t.fill_(torch.nan), "act_clip"),
        ("mixllm", "0.act_clip", lambda t: t.fill_(0.5), "act_clip differs"),
        ("static", "act_scales", lambda t: t.fill_(0), "act_scales"),
        ("awq", "input_scale", lambda t: t.fill_(0), "input_scale"),
        ("awq", "input_scale", lambda t: t[:-1], "input_scale"),
        ("awq", "input_scale", lambda t: t.fill_(torch.inf), "input_scale"),
    ],
)
def test_damaged_grids_are_refused(kind: str, field: str, value: Any, word: str) -> None:
    packed = pack(layer(kind)[2])
    validate("layer", packed)
    with pytest.raises(InputError, match=f"layer.*{word}"):
        validate("layer", damage(packed, field, value))


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("mixllm", lambda layout: layout["tiles"][0].update(act_bits=4)),
        ("mixllm", lambda layout: layout["tiles"][0].pop("act_bits")),
        ("atom", lambda layout: layout["tiles"][0].update(act_bits=9)),
        ("atom", lambda layout: layout["tiles"][0].update(act_static=1)),
        ("awq", lambda layout: layout.update(input_scale=1)),
        ("awq", lambda layout: layout["tiles"][0].update(act_static=True)),
        ("float16", lambda layout: layout["tiles"][0].update(act_bits=8)),
        ("codebook", lambda layout: layout["tiles"][0].update(act_bits=8)),
    ],
)
def test_damaged_descriptions_are_refused(kind: str, change: Any) -> None:
    if kind == "float16":
        packed = pack(QuantizedWeight((2, 3), (Float16(torch.ones(2, 3).half()),)))
    elif kind == "codebook":
        packed = pack(squeezellm.quantize(random(4, 40), None, builders.layer_spec(tiles=(TileSpec(3),))))
    else:
        packed = pack(layer(kind)[2])
    layout = json.loads(json.dumps(packed.layout))
    change(layout)
    with pytest.raises(InputError, match="layer"):
        validate("layer", PackedWeight(layout, packed.tensors))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"method": "mixllm", "wide_rows": 1.5}, "from 0 to 1"),
        ({"method": "mixllm", "wide_rows": 0.5, "bits": 5}, "give one"),
        ({"method": "mixllm", "bits": 3}, "any average from 4 to 8"),
        ({"method": "mixllm", "salience": "best"}, "second-order"),
        ({"method": "mixllm", "search": "twice"}, "progressive"),
        ({"method": "atom", "act_bits": 9}, "--act-bits 9"),
        ({"method": "atom", "outlier_channels": 0}, "at least 1"),
        ({"method": "atom", "act_clip": 1.2}, "act_clip"),
        ({"method": "awq", "scaling": "smoothquant"}, "itself a scaling"),
        ({"method": "gptq", "act_static": True}, "act_bits"),
        ({"method": "gptq", "kv_bits": 5}, "--kv-bits 5"),
        ({"method": "gptq", "act_search": True}, "stay at 16 bits"),
        ({"method": "gptq", "act_clip": 0.9}, "stay at 16 bits"),
        ({"method": "atom", "act_search": True, "act_clip": 0.8}, "leave act_static and act_clip out"),
        ({"method": "gptq", "clip_ratio": 0.9}, "--no-clip"),
        ({"method": "gptq", "wide_rows": 0.2}, "wide_rows .--wide-rows. is for mixllm"),
        ({"method": "mixllm", "symmetric": True}, "symmetric"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        builders.options(**options)


def test_input_statistics_are_sums_and_a_sample() -> None:
    x = outlier_inputs(100, 12)
    stats = InputStats.empty(12)
    stats.add(x)
    torch.testing.assert_close(stats.magnitudes, x.abs().sum(0))
    torch.testing.assert_close(stats.peaks, x.abs().amax(0))
    torch.testing.assert_close(stats.energy, x.square().sum(0))
    assert all(any(torch.equal(row, other) for other in x) for row in stats.sample)
    half = stats.scaled(torch.full((12,), 0.5))
    torch.testing.assert_close(half.energy, x.square().sum(0) / 4)
    assert split_groups(half.sample, 4).shape == (16, 3, 4)


def test_options_survive_their_artifact() -> None:
    """What config.json says of a run makes the same run again."""
    for method in ("mixllm", "atom", "awq", "smoothquant", "gptq"):
        config = builders.options(method)
        assert builders.options(**config.as_dict()) == config


def test_another_width_decides_anew() -> None:
    config = builders.options("atom")
    assert (config.act_bits, config.with_bits(3).act_bits, config.with_bits(8).act_bits) == (4, 3, 8)
    assert (config.act_clip, config.with_bits(8).act_clip) == (0.9, 1.0)
    assert builders.options("atom", act_bits=6).with_bits(3).act_bits == 6
    assert builders.options("mixllm").with_bits(5.5).wide_rows is None


@pytest.mark.parametrize("bits", [4.04, 4.5, 6.0])
def test_a_plan_before_the_search_is_no_smaller_than_the_artifact(bits: float, model_dir: MakeModel) -> None:
    streamed = opened(model_dir("llama"))
    config = builders.options("mixllm", bits=bits, group_size=16, **SMALL)
    planned, shapes = make_plan(streamed, config), streamed.all_linears()
    for seed in range(4):
        scores = {name: random(out, seed=seed + i).abs() for i, (name, (out, _)) in enumerate(shapes.items())}
        rows = salience.choose(scores, shapes, salience.wide_share(config), by_rows=False)
        specs = {n: mixllm.with_rows(planned.specs[n], rows[n], shapes[n][0]) for n in rows}
        assert make_plan(streamed, config, specs).tensor_bytes <= 1.01 * planned.tensor_bytes


def test_a_spec_takes_layers_out_of_the_search(model_dir: MakeModel, tmp_path: Path) -> None:
    folder, config = model_dir("llama"), builders.options("mixllm", wide_rows=0.3, group_size=16, **SMALL)
    names = list(opened(folder).all_linears())
    one = {names[0]: builders.layer_spec(tiles=(TileSpec(4, 16),), act_bits=8)}
    anybit.quantize(folder, tmp_path / "one", config, spec_map=one)
    lines = {line["name"]: line["tiles"] for line in inspect(tmp_path / "one")["layers"]}
    assert [tile["bits"] for tile in lines[names[0]]] == [4]
    assert any(len(tiles) == 2 for tiles in lines.values())
    everything = dict.fromkeys(names, builders.layer_spec(tiles=(TileSpec(8, 16, True),), act_bits=8))
    anybit.quantize(folder, tmp_path / "all", config, spec_map=everything)
    assert inspect(tmp_path / "all")["bits"] == 8
    with pytest.raises(InputError, match="bits 4 or 8"):
        anybit.quantize(
            folder,
            tmp_path / "no",
            config,
            spec_map={names[0]: builders.layer_spec(tiles=(TileSpec(6, 16),))},
        )


@pytest.mark.parametrize("method", ["gptq", "rtn"])
@pytest.mark.parametrize("option", [{"scaling": "awq"}, {"act_bits": 8, "act_static": True}])
def test_a_spec_may_ask_for_inputs(
    method: str, option: dict[str, Any], model_dir: MakeModel, tmp_path: Path
) -> None:
    folder = model_dir("llama")
    name = list(opened(folder).all_linears())[-1]
    config = builders.options(method, group_size=16, **SMALL)
    anybit.quantize(
        folder, tmp_path / "out", config, spec_map={name: replace(builders.spec_of(config), **option)}
    )
    (line,) = [line for line in inspect(tmp_path / "out")["layers"] if line["name"] == name]
    fields = load(tmp_path / "out").get_submodule(name).packed.tensors
    assert "input_scale" in fields or "act_scales" in fields, line


def test_a_refused_run_keeps_its_search(
    model_dir: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stops a run after hours of search, the same command goes on from there."""
    config = builders.options("mixllm", wide_rows=0.2, group_size=16, samples=9, seq_len=16)
    real, calls = salience.gradient_statistics, []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise InputError("the disk is full")
        return real(*args, **kwargs)

    monkeypatch.setattr(salience, "gradient_statistics", failing)
    with pytest.raises(InputError, match="the disk is full"):
        anybit.quantize(model_dir("llama"), tmp_path / "out", config)
    with pytest.raises(InputError, match="--overwrite"):
        anybit.quantize(model_dir("llama"), tmp_path / "out", replace(config, salience="diagonal"))
    anybit.quantize(model_dir("llama"), tmp_path / "out", config)
    assert len(calls) == 4  # three parts of at most 4 samples; two were there
    anybit.quantize(model_dir("llama"), tmp_path / "again", config)
    assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "out" / "config.json").read_text()


# ---- the benchmark


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few copies of the matrices, and little to read."""
    isas()
    monkeypatch.setattr(kernels, "_cold", lambda: 1 << 20)
    monkeypatch.setattr(kernels, "READ", 1 << 20)


@pytest.mark.usefixtures("small_cache")
def test_the_benchmark_times_what_there_is() -> None:
    figures = kernels.kernels(shapes=("33x70",), tokens=(1, 3), threads=(1, 2), rounds=1)
    assert [(r["out"], r["in"], r["tokens"], r["threads"]) for r in figures["rows"]] == [
        (33, 70, m, n) for m in (1, 3) for n in (1, 2)
    ]
    assert {"torch bfloat16", "W4", "W4A8", "W8A8", "W4A4", "MixLLM p10", "Atom W4A4"} <= figures["rows"][0][
        "variants"
    ].keys()
    assert all(v["us"] > 0 for row in figures["rows"] for v in row["variants"].values())
    assert torch.get_num_threads() == 1
    for row in figures["rows"]:
        low, high = row["read_gb_per_s_range"]
        assert 0 < low <= row["read_gb_per_s"] <= high
    with pytest.raises(InputError, match="OUTxIN"):
        kernels.kernels(shapes=("33",))
    with pytest.raises(InputError, match="more than"):
        kernels.kernels(shapes=("99999999999x4096",))


def test_the_benchmark_takes_other_weights_each_time() -> None:
    used: list[int] = []

    def make() -> Callable[[], object]:
        number = made.pop()
        return lambda: used.append(number)

    made = list(range(5))
    run = kernels.rotating(kernels.Variant(1, make), 5)
    for _ in range(10):
        run()
    assert used == [4, 3, 2, 1, 0] * 2


def test_the_benchmark_reads_far_more_than_the_cache_holds_on_all_threads(
    monkeypatch: pytest.MonkeyPatch, small_cache: None
) -> None:
    monkeypatch.setattr(kernels, "_cold", lambda: 5 * kernels.READ)
    used: list[tuple[int, int]] = []
    parts = iter(range(9))

    def reader() -> Callable[[], object]:
        part = next(parts)
        return lambda: used.append((part, torch.get_num_threads()))

    assert kernels._reader().func.__self__.nbytes == kernels.READ  # type: ignore[attr-defined]
    monkeypatch.setattr(kernels, "_reader", reader)
    monkeypatch.setattr(kernels, "WARM", 0)
    kernels.kernels(shapes=("8x8",), threads=(1, 2), rounds=2, only=("W4",))
    # Three rounds of warming up, two that count, and before each another call.
    assert used == [(i % 5, 1 + (i >= 10)) for i in range(20)]


@pytest.mark.usefixtures("small_cache")
def test_the_rate_in_the_cache_is_without_the_cost_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def times(variants: dict[str, kernels.Variant], rounds: int, cached: bool) -> dict[str, list[float]]:
        assert cached
        return {name: [1e-3 + v.nbytes / 2e9] * rounds for name, v in variants.items()}

    monkeypatch.setattr(kernels, "_times", times)
    figures = kernels.kernels(shapes=("500x512",), rounds=1, cached=True)
    assert figures["cached_bytes"] == kernels.CACHED
    variants = figures["rows"][0]["variants"]
    for figure in variants.values():
        assert figure["gb_per_s"] == pytest.approx(2)
        assert figure["rows"] % kernels.ROWS == 0
    assert variants["torch float32"]["rows"] == 256 and variants["W2"]["rows"] == 448  # of 512 KiB; of all
    monkeypatch.setattr(kernels, "CACHED", 1)
    figures = kernels.kernels(shapes=("128x64",), rounds=1, cached=True, only=("W4",))
    assert figures["rows"][0]["variants"]["W4"]["rows"] == 128


@pytest.mark.parametrize("cached", [True, False])
def test_what_is_timed_is_warm_and_its_weights_are_only_where_they_shall_be(
    monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    monkeypatch.setattr(kernels, "_cold", lambda: 6)
    used: list[str] = []
    counts = {"a": 0, "b": 0}

    def make(name: str) -> Callable[[], object]:
        counts[name] += 1
        mark = f"{name}{counts[name]}"
        return lambda: used.append(mark)

    begun = time.perf_counter()
    variants = {name: kernels.Variant(1, lambda name=name: make(name)) for name in "ab"}
    times = kernels._times(variants, 2, cached)
    assert time.perf_counter() - begun >= 10 * kernels.WARM
    assert [len(seconds) for seconds in times.values()] == [2, 2]
    calls = [(mark, len(list(same))) for mark, same in itertools.groupby(used)]
    if cached:  # the very weights are used right before
        assert counts == {"a": 1, "b": 1} and [mark for mark, _ in calls] == ["a1", "b1"] * 5
        assert all(n > 1 for _, n in calls)
    else:  # three are timed in turn, six bytes apart, and are used for nothing else
        timed = [f"{name}{1 + i % 3}" for i in range(5) for name in "ab"]
        assert [mark for mark, _ in calls] == [m for mark in timed for m in (f"{mark[0]}4", mark)]
        assert all(n == 1 for mark, n in calls if not mark.endswith("4"))


def test_variants_are_chosen_by_name_or_beginning() -> None:
    there = ["W4 @avx2", "W4 @avx512", "W4A8 @avx2", "W8", "codebook 4", "codebook 4 + sparse"]
    assert kernels.chosen(["codebook 4", "W4"], there) == ["W4 @avx2", "W4 @avx512", "codebook 4"]
    assert kernels.chosen(["code", "W4A8 @avx2"], there) == ["W4A8 @avx2", *there[4:]]


def test_the_benchmark_has_every_width_and_draws_every_format() -> None:
    names = kernels.layouts(256, 256)
    for bits in range(2, 9):
        assert {f"W{bits}", f"W{bits}A8", f"by channel {bits}", f"nested {bits}"} <= names.keys()
        assert {f"codebook {bits}", f"codebook {bits} A8"} <= names.keys()
    assert all(name.startswith(tuple(kernels.FAMILIES)) for name in names)


@pytest.mark.usefixtures("small_cache")
def test_panels_without_points_are_drawn(tmp_path: Path) -> None:
    figures = kernels.kernels(shapes=("8x8", "9x8"), rounds=1, only=("own",))
    kernels.plot(figures, tmp_path / "speed.svg")
    assert "9 x 8" in (tmp_path / "speed.svg").read_text()


@pytest.mark.usefixtures("small_cache")
def test_the_benchmark_compares_instruction_sets_and_draws(tmp_path: Path) -> None:
    best = isas()[-1]
    figures = kernels.kernels(
        shapes=("32x256",), rounds=1, dtype="float32", isas=("portable", best), only=("W4A8", "codebook")
    )
    (row,) = figures["rows"]
    assert {f"W4A8 @{best}", "W4A8 @portable", "codebook 4 + sparse @portable"} <= row["variants"].keys()
    assert not any(name.startswith("W8") for name in row["variants"]) and row["read_gb_per_s"] > 0
    kernels.plot(figures, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 10_000
    wrongs: tuple[tuple[dict[str, Any], str], ...] = (
        ({"isas": ("avx9",)}, "avx9"),
        ({"only": ("W4", "V4")}, "begins with 'V4'"),
        ({"only": ("",)}, "begins with ''"),
        ({"dtype": "float16"}, "bfloat16 and float32"),
        ({"cached": True}, "128 or more"),
    )
    for wrong, match in wrongs:
        with pytest.raises(InputError, match=match):
            kernels.kernels(shapes=("32x256",), **wrong)


@pytest.mark.skipif(ggml.library() is None, reason="llama-cpp-python is not installed")
@pytest.mark.parametrize("kind", ggml.TYPES)
@pytest.mark.parametrize("tokens", [1, 3])
def test_the_peer_multiplies_the_same(kind: str, tokens: int) -> None:
    x = random(tokens, 512)
    threads = ggml.Threads(2)
    product = ggml.Product(kind, 128, x, threads)
    threads.wake()
    product()
    threads.rest()
    weight = torch.randn(ggml.ROWS, 512, generator=torch.Generator().manual_seed(0)).repeat(2, 1)
    expected, y = x @ weight.T, product.output()
    assert float((y - expected).norm() / expected.norm()) < 2.0 / 2 ** int(kind[1])


TINY = ((40, 64), (1, 1), (1, 64), (3, 2), (5, 4))


@pytest.mark.parametrize(
    ("shape", "name"), [(shape, name) for shape in TINY for name in kernels.layouts(*shape)]
)
def test_the_benchmark_multiplies_valid_weights(shape: tuple[int, int], name: str) -> None:
    packed = kernels.random_weight(kernels.layouts(*shape)[name])
    validate("layer", packed)
    x = random(2, shape[1])
    expected = reference.int_matmul(x, unpack(packed))
    torch.testing.assert_close(Prepared(packed).matmul(x), expected, rtol=1e-4, atol=1e-3)


# ---- LLM-MQ


def test_widths_by_layer_are_optimal() -> None:
    generator = torch.Generator().manual_seed(0)
    for seed in range(5):
        names = [f"l{i}" for i in range(5)]
        scores = {n: torch.rand(3, generator=generator).sort(descending=True).values for n in names}
        weights = {n: int(torch.randint(1, 9, (1,), generator=generator)) for n in names}
        average = 2.3 + 0.3 * seed
        found = salience.assign(scores, weights, (2, 3, 4), average)
        total = sum(weights.values())

        def cost(widths: tuple[int, ...], scores: dict[str, Tensor] = scores) -> float:
            return sum(float(s[b - 2]) for s, b in zip(scores.values(), widths))

        allowed = [
            widths
            for widths in product((2, 3, 4), repeat=5)
            if sum(b * w for b, w in zip(widths, weights.values())) <= average * total + 1e-9
        ]
        assert tuple(found.values()) in allowed
        assert cost(tuple(found.values())) == pytest.approx(min(map(cost, allowed)))
    with pytest.raises(InputError, match="no average of 1"):
        salience.assign(scores, weights, (2, 3, 4), 1.9)


def test_widths_that_cost_nothing_are_taken() -> None:
    scores = {
        "a": torch.tensor([3, 1, 1.2]),
        "b": torch.tensor([3.0, 2, 1]),
    }  # noise: no width is worse for real
    assert salience.assign(scores, {"a": 10, "b": 10}, (2, 3, 4), 4) == {"a": 4, "b": 4}
    assert salience.assign(scores, {"a": 10, "b": 10}, (2, 3, 4), 3.5) == {"a": 3, "b": 4}


def test_widths_fit_a_number_of_bytes() -> None:
    scores = {"a": torch.tensor([3, 2, 0.5]), "b": torch.tensor([3.0, 2, 1])}
    stored = {"a": [20, 30, 40], "b": [21, 39, 41]}
    found = salience.assign(scores, {"a": 10, "b": 10}, (2, 3, 4), 4, stored, 62)
    assert found == {"a": 4, "b": 2}
    with pytest.raises(InputError, match="in 40 bytes"):
        salience.assign(scores, {"a": 10, "b": 10}, (2, 3, 4), 4, stored, 40)


@pytest.mark.parametrize("bpw", [4.6, 5.0, 5.5])
def test_llm_mq_keeps_to_a_budget(model_dir: MakeModel, tmp_path: Path, bpw: float) -> None:
    config = builders.options("llm-mq", group_size=16, **SMALL)
    fitted = fit_budget(opened(model_dir("llama")), config, bpw, None)
    made = anybit.quantize(model_dir("llama"), tmp_path / "out", fitted)
    assert 0.8 * bpw < made.bits_per_weight <= bpw


def test_scores_of_widths_are_first_order_changes(model_dir: MakeModel) -> None:
    folder, tokens = model_dir("llama"), token_rows(3, 16)
    streamed = opened(folder)
    shapes = streamed.all_linears()
    room = {n: [1, 1, 1] for n in shapes}
    chosen = salience.layer_widths(
        streamed, tokens, shapes, builders.options("llm-mq", bits=2.7), room, len(room)
    )
    weights = {n: out * in_ for n, (out, in_) in shapes.items()}
    average = sum(weights[n] * b for n, b in chosen.items()) / sum(weights.values())
    assert 2.5 < average <= 2.7 and set(chosen.values()) <= {2, 3, 4}


def test_llm_mq_artifacts(model_dir: MakeModel, tmp_path: Path) -> None:
    config = builders.options("llm-mq", bits=2.7, group_size=16, **SMALL)
    anybit.quantize(model_dir("llama"), tmp_path / "out", config)
    figures = inspect(tmp_path / "out")
    assert 2.4 < figures["bits"] <= 2.7
    assert {tile["bits"] for line in figures["layers"] for tile in line["tiles"]} <= {2, 3, 4}
    assert all(len(line["tiles"]) == 1 for line in figures["layers"])
    assert torch.isfinite(logits(load(tmp_path / "out"), token_rows(1, 9))).all()
