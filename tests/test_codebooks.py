"""Codebook methods end to end: SqueezeLLM, Any-Precision, CMPQ on tiny models, and their artifacts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import anybit
from anybit.artifact.reader import inspect, verify
from anybit.calibration.moments import gradient_statistics, spilled_statistics
from anybit.calibration.stats import GradientStats, LinearStats
from anybit.checkpoint import safetensors as checkpoint_module
from anybit.config import LayerSpec, QuantizeConfig, TileSpec
from anybit.errors import InputError
from anybit.formats import Codebook, Float16
from anybit.formats.weight import pack, unpack, validate
from anybit.kernels.dispatch import Prepared
from anybit.layers import PackedModule
from anybit.loader import load
from anybit.methods import cmpq, squeezellm

MakeModel = Callable[[str], Path]
SMALL: dict[str, Any] = {"samples": 2, "seq_len": 16}


def fisher_of(weight: torch.Tensor, seed: int = 1) -> GradientStats:
    values = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)).exp()
    return GradientStats(1, 1, values)


def norms_of(weight: torch.Tensor, seed: int = 2) -> LinearStats:
    """Moments of inputs whose channels correlate and differ in size."""
    n, generator = weight.shape[1], torch.Generator().manual_seed(seed)
    x = torch.randn(8 * n, n, generator=generator) @ torch.randn(n, n, generator=generator) / n**0.5
    x = x + torch.randn(8 * n, n, generator=generator) * (0.1 + torch.rand(n, generator=generator))
    return LinearStats(len(x), x.square().sum(0), x.T @ x)


def matrix(out: int, in_: int) -> torch.Tensor:
    return torch.randn(out, in_, generator=torch.Generator().manual_seed(out * 1000 + in_))


def spec(bits: float = 3, **options: Any) -> LayerSpec:
    return LayerSpec(tiles=(TileSpec(bits),), **options)


# ---- methods on one matrix


@pytest.mark.parametrize("shape", [(20, 48), (7, 33), (1, 5), (16, 1)])
@pytest.mark.parametrize(
    "options",
    [
        {"bits": 2},
        {"bits": 5, "codebook_bits": 8},
        {"bits": 3, "sensitive_outliers": 0.02, "magnitude_outliers": 0.03},
        {"bits": 6, "widths": (3, 4, 6)},
        {"bits": 8, "widths": (2, 8), "codebook_bits": 4},
    ],
)
def test_rows_round_trip_and_multiply(shape: tuple[int, int], options: dict[str, Any]) -> None:
    weight = matrix(*shape)
    made = spec(**options)
    quantized = squeezellm.quantize(weight, fisher_of(weight), made)
    check_whole_way(quantized, squeezellm.layout(made, shape))


@pytest.mark.parametrize("shape", [(20, 48), (7, 33), (40, 250), (3, 5), (1, 7), (9, 1)])
@pytest.mark.parametrize(
    "options",
    [
        {"bits": 2.0},
        {"bits": 2.3, "error_outliers": 0.02},
        {"bits": 3.0},
        {"bits": 4.0, "codebook_bits": 4},
        {"bits": 7.5, "channel_outliers": 0.0, "error_outliers": 0.0},
        {"bits": 5.0, "channel_outliers": 0.0, "error_outliers": 0.0},
        {"bits": 2.3, "error_outliers": 0.02, "compensate": False},
        {"bits": 3.0, "codebook_bits": 4, "compensate": False},
    ],
)
def test_channels_round_trip_and_multiply(shape: tuple[int, int], options: dict[str, Any]) -> None:
    weight = matrix(*shape)
    made = spec(**options)
    quantized = cmpq.quantize(weight, norms_of(weight), made)
    check_whole_way(quantized, cmpq.layout(made, shape))


def check_whole_way(quantized: Any, planned: dict[str, Any]) -> None:
    """Stored as planned, valid, read back equal, and multiplied by the native kernels as by the reference."""
    packed = pack(quantized)
    assert packed.layout == planned
    validate("layer", packed)
    again = pack(unpack(packed))
    assert again.layout == packed.layout
    for field, tensor in packed.tensors.items():
        assert torch.equal(again.tensors[field].view(torch.uint8), tensor.view(torch.uint8)), field
    dense = quantized.dequantize()
    prepared = Prepared(packed)
    assert torch.equal(prepared.dequantize(), dense)
    for tokens in (1, 3, 20):
        x = torch.randn(tokens, dense.shape[1], generator=torch.Generator().manual_seed(tokens))
        torch.testing.assert_close(prepared.matmul(x), x @ dense.T, rtol=1e-4, atol=1e-4)


def test_outliers_are_kept() -> None:
    weight = matrix(30, 64)
    weight[3, 5] = 40.0
    stats = fisher_of(weight)
    assert stats.fisher is not None
    stats.fisher[7, 9] = 1e6
    made = squeezellm.quantize(weight, stats, spec(2, sensitive_outliers=0.001, magnitude_outliers=0.001))
    assert made.sparse is not None
    assert len(made.sparse.values) == 2 * round(0.001 * weight.numel())
    dense = made.dequantize()
    torch.testing.assert_close(dense[3, 5], weight[3, 5], rtol=1e-3, atol=0)
    torch.testing.assert_close(dense[7, 9], weight[7, 9], rtol=1e-3, atol=1e-3)


def test_dead_weights_are_no_outliers() -> None:
    """Large weights of channels whose inputs are always 0: no gradient, no norm, no error at the output."""
    weight, dead = matrix(30, 64), [5, 40]
    weight[:, dead] = 40.0 * matrix(30, 2)
    fisher = fisher_of(weight)
    assert fisher.fisher is not None
    fisher.fisher[:, dead] = 0
    mask = squeezellm.outliers(weight, fisher.fisher, spec(sensitive_outliers=0.01, magnitude_outliers=0.01))
    assert mask is not None and mask.any() and not mask[:, dead].any()

    stats = norms_of(weight)
    assert stats.hessian is not None
    for channel in dead:
        stats.squares[channel] = stats.hessian[channel] = stats.hessian[:, channel] = 0
    for compensate in (False, True):
        made = cmpq.quantize(weight, stats, spec(2.5, error_outliers=0.01, compensate=compensate))
        assert made.sparse is not None and not set(made.sparse.columns.tolist()) & set(dead)


def test_sensitive_weights_are_nearer() -> None:
    weight, stats = matrix(16, 200), fisher_of(matrix(16, 200))
    weighted = squeezellm.quantize(weight, stats, spec(3)).dequantize() - weight
    plain = squeezellm.quantize(weight, None, spec(3)).dequantize() - weight
    assert (stats.fisher * weighted.square()).sum() < 0.95 * (stats.fisher * plain.square()).sum()  # type: ignore[operator]
    assert plain.square().sum() < weighted.square().sum()


def test_channel_widths_follow_algorithm_1() -> None:
    weight = matrix(40, 400)
    stats = norms_of(weight)
    rank = stats.squares.argsort().argsort()
    none = {"channel_outliers": 0.0, "error_outliers": 0.0, "compensate": False}
    for bits, narrow in ((2.25, 300), (2.5, 200), (3.75, 100), (6.1, 360)):
        made = cmpq.quantize(weight, stats, spec(bits, **none))
        low, high = made.tiles
        assert (low.bits, high.bits) == (int(bits), int(bits) + 1)
        assert set(rank[low.cols.long()].tolist()) == set(range(narrow))  # type: ignore[union-attr]
        assert set(rank[high.cols.long()].tolist()) == set(range(narrow, 400))  # type: ignore[union-attr]
    at_3 = cmpq.quantize(weight, stats, spec(3, **none)).tiles
    assert [(t.bits, len(t.cols)) for t in at_3] == [(2, 4), (3, 392), (4, 4)]  # type: ignore[arg-type]
    kept = cmpq.quantize(weight, stats, spec(3, compensate=False)).tiles[-1]
    assert isinstance(kept, Float16)
    assert set(rank[kept.cols.long()].tolist()) == {398, 399}  # type: ignore[union-attr]
    assert torch.equal(kept.values, weight[:, kept.cols.long()].half())  # type: ignore[union-attr]


@pytest.mark.parametrize("options", [{"bits": 2.4}, {"bits": 3, "error_outliers": 0.01}])
def test_compensation_lowers_the_output_error(options: dict[str, Any]) -> None:
    weight = matrix(60, 120)
    stats = norms_of(weight)
    assert stats.hessian is not None

    def error(compensate: bool) -> float:
        made = cmpq.quantize(weight, stats, spec(**options, compensate=compensate))
        delta = made.dequantize() - weight
        return float((delta @ stats.hessian * delta).sum())  # type: ignore[operator]

    assert error(True) < 0.8 * error(False)


def test_compensation_needs_a_hessian() -> None:
    weight = matrix(4, 40)
    norms = LinearStats(1, norms_of(weight).squares, None)
    cmpq.quantize(weight, norms, spec(3, compensate=False))
    with pytest.raises(InputError, match="Hessian"):
        cmpq.quantize(weight, norms, spec(3))


def test_channels_with_fewer_weights_than_centroids_store_fewer() -> None:
    weight = matrix(5, 12)
    made = cmpq.quantize(
        weight, norms_of(weight), spec(4, channel_outliers=0.0, error_outliers=0.0, compensate=False)
    )
    (tile,) = made.tiles
    assert isinstance(tile, Codebook)
    assert tile.tables[0].shape == (12, 5)
    torch.testing.assert_close(made.dequantize(), weight, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 1e6])
def test_weights_that_have_no_codebook_are_refused(value: float) -> None:
    weight = matrix(4, 40)
    weight[2, 3] = value
    with pytest.raises(InputError, match=r"cannot be clustered|beyond float16"):
        squeezellm.quantize(weight, None, spec(3))
    with pytest.raises(InputError, match=r"cannot be clustered|beyond float16"):
        cmpq.quantize(weight, norms_of(weight), spec(3))


# ---- the statistics


def test_spilled_gradients_are_the_same(model_dir: MakeModel, tmp_path: Path) -> None:
    from test_calibrate import opened, token_rows

    streamed, tokens = opened(model_dir("llama")), token_rows(3, 12)
    shapes = streamed.all_linears()
    in_memory = gradient_statistics(streamed, tokens, shapes, fisher=True)
    ticks: list[int] = []
    gradient_statistics(
        opened(model_dir("llama")), tokens, shapes, fisher=True, spill=tmp_path, advance=ticks.append
    )
    again = spilled_statistics(shapes, tmp_path)
    assert ticks == [1, 1, 1]
    for name in shapes:
        assert torch.equal(in_memory[name].fisher, again[name].fisher)  # type: ignore[arg-type]


# ---- artifacts


@pytest.fixture(scope="module")
def parent(model_dir: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("parent") / "out"
    anybit.quantize(model_dir("llama"), out, QuantizeConfig(method="any-precision", **SMALL))
    return out


TOKENS = torch.arange(3, 27).view(2, 12)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=TOKENS).logits


@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "opt", "gemma3"])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("squeezellm", {"bits": 3, "magnitude_outliers": 0.004, "embed_bits": 8}),
        ("any-precision", {"widths": (3, 5)}),
        ("cmpq", {"bits": 3.4, "embed_bits": 8}),
    ],
)
def test_every_method_on_every_family(
    family: str, method: str, options: dict[str, Any], model_dir: MakeModel, tmp_path: Path
) -> None:
    config = QuantizeConfig(method=method, **options, **SMALL)
    anybit.quantize(model_dir(family), tmp_path / "out", config)
    verify(tmp_path / "out")
    loaded = load(tmp_path / "out")
    got = logits(loaded)
    assert torch.isfinite(got).all()
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), got)
    assert not (tmp_path / "out.partial").exists()


def test_one_file_serves_every_width(parent: Path) -> None:
    model = load(parent)
    buffers = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    seen = {}
    for bits in (3, 8, 4, 5, 6, 7, 3):
        model.set_bits(bits)
        seen[bits] = logits(model)
        torch.testing.assert_close(seen[bits], logits(load(parent, bits=bits)), rtol=1e-5, atol=1e-5)
    assert {name: buffer.data_ptr() for name, buffer in model.named_buffers()} == buffers
    distances = [float((seen[b] - seen[8]).square().mean()) for b in (3, 4, 5, 6, 7)]
    assert distances == sorted(distances, reverse=True)


def test_only_the_planes_of_the_width_are_read(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = checkpoint_module._read_span

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = original(*args, **kwargs)
        read.append(tensor.numel() * tensor.element_size())
        return tensor

    monkeypatch.setattr(checkpoint_module, "_read_span", counted)
    sizes = {}
    for bits in (3, 8):
        read.clear()
        model = load(parent, bits=bits)
        sizes[bits] = sum(read)
        packed = [m for m in model.modules() if isinstance(m, PackedModule)]
        assert packed
        assert all(m.planes.shape[0] == bits for m in packed)
        assert not any(
            hasattr(m, f"codebook_{other}") for m in packed for other in range(3, 9) if other != bits
        )
    figures = {bits: inspect(parent, bits) for bits in (3, 8)}
    difference = (figures[8]["bits_per_weight"] - figures[3]["bits_per_weight"]) * figures[8]["weights"] / 8
    assert sizes[8] - sizes[3] == pytest.approx(difference)


def test_what_inspect_tells_of_widths(parent: Path) -> None:
    figures = inspect(parent)
    assert figures["bits"] == 8
    assert [row["bits"] for row in figures["widths"]] == [3, 4, 5, 6, 7, 8]
    assert figures["widths"][-1]["bits_per_weight"] == figures["bits_per_weight"]
    assert figures["file_bits_per_weight"] > figures["bits_per_weight"]
    assert inspect(parent, 4)["bits"] == 4
    stored = sum(
        tensor.numel() * tensor.element_size()
        for file in parent.glob("*.safetensors")
        for name, tensor in load_file(file).items()
        if ".layers." in name and "norm" not in name and "bias" not in name
    )
    assert figures["file_bits_per_weight"] == pytest.approx(8 * stored / figures["weights"])
    with pytest.raises(InputError, match="3, 4, 5, 6, 7, 8"):
        inspect(parent, 2)


def test_widths_that_are_not_there(parent: Path, model_dir: MakeModel, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="3, 4, 5, 6, 7, 8, not 2"):
        load(parent, bits=2)
    model = load(parent)
    with pytest.raises(InputError, match="not 9"):
        model.set_bits(9)
    with pytest.raises(InputError, match="no artifact of several widths"):
        load(model_dir("llama"), bits=4)
    anybit.quantize(model_dir("llama"), tmp_path / "rtn", QuantizeConfig(method="rtn"))
    with pytest.raises(InputError, match="one width"):
        load(tmp_path / "rtn", bits=4)
    with pytest.raises(InputError, match="one width"):
        load(tmp_path / "rtn").set_bits(4)


def test_a_width_loaded_alone_can_be_saved(parent: Path, tmp_path: Path) -> None:
    model = load(parent, bits=4)
    model.save_pretrained(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(again), logits(model))
    assert inspect(tmp_path / "out")["bits"] == 4


def test_eval_and_generate_take_a_width(parent: Path) -> None:
    figures = anybit.evaluate(parent, bits=3, seq_len=16, max_tokens=64)
    assert figures["bits"] == 3
    assert figures["bits_per_weight"] == inspect(parent, 3)["bits_per_weight"]


def test_channel_widths_are_shown(model_dir: MakeModel, tmp_path: Path) -> None:
    anybit.quantize(model_dir("llama"), tmp_path / "out", QuantizeConfig(method="cmpq", bits=2.5, **SMALL))
    figures = inspect(tmp_path / "out")
    assert json.dumps(figures)
    for layer in figures["layers"]:
        assert len(layer["channel_bits"]) == layer["shape"][1]
        assert set(layer["channel_bits"]) == {2, 3, 16}
    assert figures["bits"] == pytest.approx(2.5, abs=0.03)


def test_a_size_finds_an_average_width(model_dir: MakeModel) -> None:
    from test_calibrate import opened

    from anybit.plan import fit_budget, make_plan

    streamed = opened(model_dir("llama"))
    config = QuantizeConfig(method="cmpq", **SMALL)
    sizes = {
        b: make_plan(streamed, QuantizeConfig(method="cmpq", bits=b, **SMALL)).size_bytes for b in (3, 4)
    }
    size = (sizes[3] + sizes[4]) // 2
    found = fit_budget(streamed, config, None, size)
    assert found.bits is not None
    assert 3 < found.bits < 4
    assert make_plan(streamed, found).size_bytes <= size
    with pytest.raises(InputError, match="follows from its widths"):
        fit_budget(streamed, QuantizeConfig(method="any-precision"), None, size)


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda t: t.__setitem__("planes", t["planes"][:, :, :-1].contiguous()), "planes"),
        (lambda t: t.__setitem__("planes", t["planes"][:-1].contiguous()), "planes"),
        (lambda t: t.__setitem__("codebook_4", t["codebook_4"][:, :-1].contiguous()), "codebook_4"),
        (lambda t: t.pop("codebook_5"), "codebook_5"),
        (lambda t: t["codebook_3"].view(torch.uint8)[0].copy_(torch.arange(16)), "codebook_3"),
        (lambda t: t["codebook_6"].fill_(torch.nan), "codebook_6"),
    ],
)
def test_damaged_tensors_are_named(
    parent: Path, tmp_path: Path, damage: Callable[[dict[str, torch.Tensor]], Any], word: str
) -> None:
    import shutil

    shutil.copytree(parent, tmp_path / "out")
    file = sorted((tmp_path / "out").glob("model-*.safetensors"))[1]
    tensors = load_file(file)
    name = "model.layers.0.self_attn.q_proj"
    layer = {
        key.removeprefix(f"{name}."): tensors.pop(key) for key in list(tensors) if key.startswith(f"{name}.")
    }
    if word == "codebook_3":
        layer["codebook_3"] = layer["codebook_3"].flip(1).contiguous()
    else:
        damage(layer)
    save_file(tensors | {f"{name}.{f}": t for f, t in layer.items()}, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=f"{name}.{word}"):
        load(tmp_path / "out")


def test_flipped_bytes_are_found(parent: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(parent, tmp_path / "out")
    file = sorted((tmp_path / "out").glob("model-*.safetensors"))[1]
    data = bytearray(file.read_bytes())
    data[-100] ^= 16
    file.write_bytes(data)
    with pytest.raises(InputError, match=file.name):
        verify(tmp_path / "out")


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        ({"bits": 4, "widths": [3, 4]}, "different widths"),
        ({"bits": 4}, "bits would be ignored"),
        ({"widths": [4, 3]}, "ascending"),
        ({"widths": None}, "list of widths"),
        ({"codebook_bits": 7}, "16, 8, 4"),
        ({"group_size": 32, "damp": 0.5}, "damp is for anybit"),
        ({"error_outliers": 0.01}, "error_outliers is for cmpq"),
        ({"sensitive_outliers": -1}, "sensitive_outliers -1"),
    ],
)
def test_specs_that_cannot_be(entry: dict[str, Any], word: str, model_dir: MakeModel, tmp_path: Path) -> None:
    from test_calibrate import opened

    from anybit.config import read_spec_map
    from anybit.plan import make_plan

    config = QuantizeConfig(method="any-precision", **SMALL)
    (tmp_path / "map.json").write_text(json.dumps({"model.layers.0.self_attn.q_proj": entry}))
    with pytest.raises(InputError, match=f"spec.*{word}"):
        spec_map = read_spec_map(tmp_path / "map.json", config.layer_spec())
        make_plan(opened(model_dir("llama")), config, spec_map)


def test_damaged_statistics_are_not_used(tmp_path: Path) -> None:
    shapes = {"a": (4, 8), "b": (2, 3)}
    for i, size in enumerate((4 * 32, 4 * 6)):
        (tmp_path / f"fisher-{i}.bin").write_bytes(bytes(size))
    assert spilled_statistics(shapes, tmp_path) is not None
    (tmp_path / "fisher-1.bin").write_bytes(bytes(23))
    assert spilled_statistics(shapes, tmp_path) is None
    assert spilled_statistics({**shapes, "c": (1, 1)}, tmp_path) is None


def test_outliers_beyond_float16_are_refused() -> None:
    weight = matrix(8, 60)
    weight[1, 1] = 1e5
    with pytest.raises(InputError, match="beyond float16"):
        squeezellm.quantize(weight, None, spec(3, magnitude_outliers=0.01))


@pytest.mark.parametrize("bits", [4, 6])
def test_hostile_codes_of_small_tables_are_refused(bits: int) -> None:
    weight = matrix(5, 12)
    options = {"channel_outliers": 0.0, "error_outliers": 0.0, "codebook_bits": 8}
    packed = pack(cmpq.quantize(weight, norms_of(weight), spec(bits, **options)))
    planes = packed.tensors["planes"]
    planes.view(torch.uint8).fill_(255)
    with pytest.raises(InputError, match="planes hold the code"):
        validate("layer", packed)


def test_one_width_may_be_named(model_dir: MakeModel, tmp_path: Path) -> None:
    anybit.quantize(
        model_dir("llama"), tmp_path / "out", QuantizeConfig(method="squeezellm", bits=3, **SMALL)
    )
    assert torch.equal(logits(load(tmp_path / "out", bits=3)), logits(load(tmp_path / "out")))
    with pytest.raises(InputError, match="one width"):
        load(tmp_path / "out", bits=4)
