"""Run options, the `{layer: spec}` map, and what a run is predicted to store."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from anybit import plan as plan_module
from anybit.calibration.stats import LinearStats
from anybit.calibration.streaming import StreamedModel
from anybit.config import LayerSpec, QuantizeConfig, TileSpec, parse_layer_spec, read_spec_map
from anybit.errors import InputError
from anybit.formats.weight import pack, stored_bytes, stored_tensors, validate_layout
from anybit.methods import gptq, rtn
from anybit.plan import Plan, check_disk, estimate, make_plan, spec_layout, stored_dtype, widths_for_memory
from tests.builders import MakeModel, opened

DEFAULT = LayerSpec.uniform(3, 64, clip=True)


# ---- options of a run


def test_the_defaults_are_the_documented_ones() -> None:
    made = QuantizeConfig()
    assert (made.method, made.bits, made.embed_bits, made.tune_for, made.kept_channels) == (
        "anybit",
        8,
        8,
        3,
        1 / 128,
    )
    config = QuantizeConfig("gptq")
    assert (config.bits, config.group_size, config.symmetric) == (4, 128, False)
    assert (config.damp, config.group_reorder, config.desc_act, config.one_shot) == (0.01, True, False, False)
    assert (config.samples, config.seq_len, config.seed, config.embed_bits) == (128, 2048, 0, 16)
    expected = LayerSpec((TileSpec(4, 128, False),), clip=True, group_reorder=True, damp=0.01)
    assert config.layer_spec() == expected
    assert not QuantizeConfig("rtn").clips and not QuantizeConfig("gptq", clip=False).clips
    assert json.loads(json.dumps(config.as_dict()))["method"] == "gptq"


def test_every_option_of_a_layer_reaches_its_spec() -> None:
    config = QuantizeConfig("gptq", 3, 32, True, clip=True, desc_act=True, group_reorder=False, damp=0.1)
    expected = LayerSpec((TileSpec(3, 32, True),), clip=True, desc_act=True, group_reorder=False, damp=0.1)
    assert config.layer_spec() == expected


def test_which_methods_look_at_activations() -> None:
    assert not QuantizeConfig("rtn").calibrated
    assert QuantizeConfig("rtn", clip=True).calibrated and QuantizeConfig("gptq").calibrated


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "hqq"}, ["'hqq'", "rtn", "gptq"]),
        ({"bits": 1}, ["1-bit", "2 to 8"]),
        ({"bits": 9}, ["9-bit", "2 to 8"]),
        ({"method": "rtn", "bits": 16}, ["rtn", "16-bit"]),
        ({"embed_bits": 5}, ["5", "4, 8, 16"]),
        ({"group_size": 0}, ["group size 0", "-1"]),
        ({"group_size": -2}, ["group size -2"]),
        ({"damp": 0}, ["damp 0"]),
        ({"damp": 1.0}, ["damp 1.0"]),
        ({"damp": float("nan")}, ["damp nan"]),
        ({"samples": 0}, ["samples (0)"]),
        ({"seq_len": -5}, ["seq_len (-5)"]),
        ({"include": "*.mlp.*"}, ["include", "'*.mlp.*'", "pass a tuple"]),
        ({"exclude": ["*.mlp.*"]}, ["exclude", "pass a tuple"]),
        ({"include": (1,)}, ["include", "pass a tuple"]),
        ({"bits": "4"}, ["bits", "float", "'4'"]),
        ({"bits": 4.5}, ["gptq", "4.5-bit"]),
        ({"method": "cmpq", "bits": 1.9}, ["cmpq", "1.9-bit", "any average"]),
        ({"method": "any-precision", "bits": 4}, ["any-precision", "--widths"]),
        ({"widths": (4, 3)}, ["widths", "ascending"]),
        ({"widths": (3, 9)}, ["widths", "2 to 8"]),
        ({"codebook_bits": 5}, ["5", "16, 8, 4"]),
        ({"error_outliers": 0.5}, ["error_outliers", "0.1"]),
        ({"bits": True}, ["bits", "float", "True"]),
        ({"group_size": "64"}, ["group_size", "int", "'64'"]),
        ({"samples": None}, ["samples", "int", "None"]),
        ({"damp": "1"}, ["damp", "float", "'1'"]),
        ({"clip": 1}, ["clip", "bool | None", "1"]),
        ({"symmetric": "no"}, ["symmetric", "bool", "'no'"]),
        ({"seed": -1}, ["seed -1", "2**63 - 1"]),
        ({"seed": 2**63}, ["seed 9223372036854775808"]),
        ({"method": "hqq", "bits": 3.5}, ["unknown method 'hqq'"]),
        ({"method": 4}, ["unknown method 4"]),
        ({"method": "rtn", "desc_act": True}, ["--desc-act", "rtn"]),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as error:
        QuantizeConfig(**{"method": "gptq", **options})
    assert all(word in str(error.value) for word in words), error.value


# ---- the map


def test_what_a_layers_entry_leaves_out_comes_from_the_default() -> None:
    assert parse_layer_spec("a", {}, DEFAULT) == DEFAULT
    assert parse_layer_spec("a", {"bits": 8}, DEFAULT) == replace(DEFAULT, tiles=(TileSpec(8, 64),))
    entry = {
        "symmetric": True,
        "group_size": -1,
        "desc_act": True,
        "damp": 0.5,
        "clip": False,
        "group_reorder": False,
    }
    assert parse_layer_spec("a", entry, DEFAULT) == LayerSpec(
        (TileSpec(3, -1, True),), clip=False, desc_act=True, group_reorder=False, damp=0.5
    )


def test_tiles_by_rows_and_columns() -> None:
    entry = {
        "tiles": [{"bits": 8, "symmetric": True, "rows": [0, 2]}, {"rows": [1], "cols": None}],
        "clip": False,
    }
    expected = LayerSpec((TileSpec(8, 64, True, rows=(0, 2)), TileSpec(3, 64, rows=(1,))))
    assert parse_layer_spec("a", entry, DEFAULT) == expected
    made = parse_layer_spec("a", {"tiles": [{"cols": [2, 0]}, {"cols": [1]}]}, DEFAULT)
    assert [t.cols for t in made.tiles] == [(2, 0), (1,)]


@pytest.mark.parametrize(
    ("entry", "word"),
    [(entry, "object") for entry in (None, 4, "4", [4], True)]
    + [({"bits": bits}, "bits") for bits in (0, 9, -4, "4", True, None, [4], 10**30)]
    + [({"group_size": size}, "group_size") for size in (0, -2, 1.5, "128", None, False)]
    + [({"symmetric": value}, "symmetric") for value in (0, 1, "true", None)]
    + [({"clip": 1}, "clip"), ({"desc_act": "yes"}, "desc_act"), ({"group_reorder": None}, "group_reorder")]
    + [({"damp": value}, "damp") for value in ("0.01", True, None, 0, 1, -0.5, float("nan"), float("inf"))]
    + [({"rows": rows}, "rows") for rows in ([], 3, "all", [0, "1"], [-1], [0.0], [True], {"0": 1})]
    + [({"cols": []}, "cols"), ({"cols": [[0]]}, "cols")]
    + [({"tiles": tiles}, "tile") for tiles in ([], {}, None, "all", [4], [None], [[]])]
    + [({"tiles": [{"bits": 4, "clip": True}]}, "tile"), ({"tiles": [{"width": 4}]}, "tile")]
    + [
        ({"bits": 8, "tiles": [{"bits": 4}]}, "tiles"),
        ({"width": 4}, "'width'"),
        ({"widths": 4}, "widths"),
        ({"": 4}, "''"),
    ],
)
def test_entries_that_cannot_be_are_refused_with_the_layers_name(entry: Any, word: str) -> None:
    with pytest.raises(InputError) as error:
        parse_layer_spec("model.q_proj", entry, DEFAULT)
    assert "model.q_proj" in str(error.value) and word in str(error.value), error.value


def test_a_map_is_read_with_or_without_a_heading(tmp_path: Path) -> None:
    layers = {"a": {"bits": 8}, "b": {}}
    path = tmp_path / "map.json"
    for data in (layers, {"layers": layers}):
        path.write_text(json.dumps(data))
        assert read_spec_map(path, DEFAULT) == {"a": replace(DEFAULT, tiles=(TileSpec(8, 64),)), "b": DEFAULT}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '"a"', "null", '{"layers": []}', '{"a": 4}', "\xff", "[" * 10**5]
)
def test_files_that_are_no_map_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "map.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError):
        read_spec_map(path, DEFAULT)


def test_a_map_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(InputError, match=str(path)):
            read_spec_map(path, DEFAULT)


# ---- the plan


TILINGS = {
    "plain": LayerSpec.uniform(4, 16),
    "planes": LayerSpec.uniform(3, 128, True),
    "whole rows": LayerSpec.uniform(5, -1),
    "desc_act": LayerSpec.uniform(4, 16, desc_act=True),
    "rows": LayerSpec((TileSpec(8, 16, True, rows=(1, 4)), TileSpec(4, 16, rows=(0, 2, 3)))),
    "rows, desc_act": LayerSpec(
        (TileSpec(8, 16, rows=(1, 4)), TileSpec(4, 16, rows=(0, 2, 3))), desc_act=True
    ),
    "columns": LayerSpec(
        (TileSpec(2, 8, cols=tuple(range(5, 41))), TileSpec(4, -1, True, cols=tuple(range(5))))
    ),
}


@pytest.mark.parametrize("name", TILINGS)
def test_the_layout_is_known_before_the_bytes(name: str) -> None:
    spec, weight = TILINGS[name], torch.randn(5, 41, generator=torch.Generator().manual_seed(0))
    stats = LinearStats.empty(41, hessian=True)
    stats.add(torch.randn(99, 41, generator=torch.Generator().manual_seed(1)))
    planned = spec_layout("layer", spec, (5, 41), "gptq")
    validate_layout("layer", planned)
    packed = pack(gptq.quantize(weight, stats, spec))
    assert packed.layout == planned
    assert packed.nbytes == stored_bytes(planned)
    if not spec.desc_act:
        assert spec_layout("layer", spec, (5, 41), "rtn") == pack(rtn.quantize(weight, None, spec)).layout


@pytest.mark.parametrize(
    ("spec", "method", "word"),
    [
        (LayerSpec.uniform(1), "gptq", "1-bit"),
        (LayerSpec((TileSpec(4, rows=(0,)), TileSpec(9, rows=(1, 2, 3, 4)))), "rtn", "9-bit"),
        (LayerSpec.uniform(4, desc_act=True), "rtn", "desc_act"),
        (LayerSpec((TileSpec(rows=(0, 1)),)), "gptq", "leave out 3"),
    ],
)
def test_specs_that_do_not_fit_are_refused_with_the_layers_name(
    spec: LayerSpec, method: str, word: str
) -> None:
    with pytest.raises(InputError, match=rf"model\.q_proj.*{word}"):
        spec_layout("model.q_proj", spec, (5, 41), method)


def check_complete(streamed: StreamedModel, made: Plan) -> None:
    """Every tensor of the model is stored exactly once, quantized or as it is."""
    quantized = {f"{name}.weight" for name in [*made.layouts, *made.embeddings]}
    assert quantized.isdisjoint(made.kept) and quantized | made.kept.keys() == streamed.names.keys()
    assert made.specs.keys() == made.layouts.keys()


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt2", "opt", "gemma3"])
@pytest.mark.parametrize("embed_bits", [16, 8, 4])
def test_a_plan_accounts_for_every_tensor(model_dir: MakeModel, family: str, embed_bits: int) -> None:
    streamed = opened(model_dir(family))
    made = make_plan(streamed, QuantizeConfig("gptq", group_size=16, embed_bits=embed_bits))
    check_complete(streamed, made)
    stored = load_file(model_dir(family) / "model.safetensors")
    assert made.model_weights == sum(t.numel() for t in stored.values())
    shapes = streamed.all_linears()
    assert made.linear_weights == sum(a * b for a, b in shapes.values())
    assert {n: tuple(layout["shape"]) for n, layout in made.layouts.items()} == shapes
    layouts = [*made.layouts.values(), *made.embeddings.values()]
    tensors = [field for layout in layouts for field in stored_tensors(layout).values()] + list(
        made.kept.values()
    )
    assert made.tensor_bytes == sum(torch.empty(shape, dtype=dtype).nbytes for dtype, shape in tensors)
    assert made.size_bytes > made.tensor_bytes
    assert made.code_bits == 4 and 4 < made.bits_per_weight < 8


def test_embedding_and_head_are_stored_once(model_dir: MakeModel) -> None:
    both = make_plan(opened(model_dir("llama")), QuantizeConfig("gptq", embed_bits=8)).embeddings
    assert set(both) == {"model.embed_tokens", "lm_head"} and not any(e.get("tied") for e in both.values())
    tied = make_plan(opened(model_dir("llama-tied")), QuantizeConfig("gptq", embed_bits=4)).embeddings
    assert set(tied) == {"model.embed_tokens"} and tied["model.embed_tokens"]["tied"]
    (tile,) = tied["model.embed_tokens"]["tiles"]
    assert tile == {"format": "group_int", "bits": 4, "group_size": 128, "symmetric": False}
    assert make_plan(opened(model_dir("llama")), QuantizeConfig("gptq")).embeddings == {}


def test_matrices_take_sixteen_bits_and_vectors_stay() -> None:
    assert stored_dtype(torch.float32, (4, 4)) == stored_dtype(torch.float64, (4, 4)) == torch.float16
    assert stored_dtype(torch.bfloat16, (4, 4)) == torch.bfloat16
    assert stored_dtype(torch.float32, (4,)) == torch.float32
    assert stored_dtype(torch.int64, (4, 4)) == torch.int64


def test_a_map_changes_the_layers_it_names(model_dir: MakeModel) -> None:
    streamed, name = opened(model_dir("llama")), "model.layers.1.mlp.up_proj"
    made = make_plan(streamed, QuantizeConfig("gptq", group_size=16), {name: LayerSpec.uniform(8, 48, True)})
    widths = {n: layout["tiles"][0]["bits"] for n, layout in made.layouts.items()}
    assert widths == {n: 8 if n == name else 4 for n in streamed.all_linears()}
    sizes = {n: a * b for n, (a, b) in streamed.all_linears().items()}
    assert made.code_bits == pytest.approx(4 + 4 * sizes[name] / sum(sizes.values()))


def test_include_and_exclude_leave_layers_as_they_are(model_dir: MakeModel) -> None:
    streamed = opened(model_dir("llama"))
    config = QuantizeConfig("gptq", include=("*.mlp.*",), exclude=("*.0.mlp.down_proj",))
    made = make_plan(streamed, config)
    check_complete(streamed, made)
    assert len(made.layouts) == 5 and "model.layers.0.mlp.down_proj.weight" in made.kept
    whole = make_plan(streamed, QuantizeConfig("gptq"))
    assert "quantizes 14 linear layers" in whole.coverage()
    share = 100 * whole.linear_weights / whole.model_weights
    assert f"{share:.1f} % of all" in whole.coverage() and "quantizes 5 linear layers" in made.coverage()
    assert "embedding and head" in make_plan(streamed, QuantizeConfig("gptq", embed_bits=8)).coverage()


@pytest.mark.parametrize(
    ("config", "spec_map", "words"),
    [
        (
            QuantizeConfig("gptq"),
            {"model.layers.9.mlp.up_proj": DEFAULT},
            ["layers.9", "model.layers.0.self_attn.q_proj"],
        ),
        (QuantizeConfig("gptq"), {"lm_head": DEFAULT}, ["'lm_head'"]),
        (QuantizeConfig("gptq", exclude=("*",)), {}, ["--exclude"]),
        (QuantizeConfig("gptq", include=("nothing",)), {}, ["--include"]),
        (
            QuantizeConfig("rtn"),
            {"model.layers.0.mlp.up_proj": LayerSpec.uniform(4, desc_act=True)},
            ["layers.0.mlp.up_proj", "desc_act", "rtn"],
        ),
        (
            QuantizeConfig("gptq"),
            {"model.layers.0.mlp.up_proj": LayerSpec.uniform(1)},
            ["layers.0.mlp.up_proj", "1-bit"],
        ),
    ],
)
def test_plans_that_cannot_be_are_refused(
    model_dir: MakeModel, config: QuantizeConfig, spec_map: dict[str, LayerSpec], words: list[str]
) -> None:
    with pytest.raises(InputError) as error:
        make_plan(opened(model_dir("llama")), config, spec_map)
    assert all(word in str(error.value) for word in words), error.value


def test_an_estimate_grows_with_the_work(model_dir: MakeModel, tmp_path: Path) -> None:
    streamed = opened(model_dir("llama"))
    small, large = QuantizeConfig("rtn"), QuantizeConfig("gptq", samples=10**6)
    few, many = (estimate(streamed, make_plan(streamed, c), c, tmp_path / "a" / "b") for c in (small, large))
    for figures, config in ((few, small), (many, large)):
        assert figures["size_bytes"] == make_plan(streamed, config).size_bytes
    assert 0 < few["seconds"] < many["seconds"] and 0 < few["peak_memory_bytes"] < many["peak_memory_bytes"]
    assert few["free_disk_bytes"] > 0 and few["bits"] == 4 and few["bits_per_weight"] > 4
    json.dumps(few)


def test_a_disk_too_small_is_refused(
    model_dir: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_plan(opened(model_dir("llama")), QuantizeConfig("gptq"))
    monkeypatch.setattr(
        plan_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=made.size_bytes - 1)
    )
    with pytest.raises(InputError, match="MB free"):
        check_disk(made, tmp_path / "not" / "there" / "yet")
    check_disk(made, tmp_path, done_bytes=1)


def test_what_fits_a_memory_budget(model_dir: MakeModel) -> None:
    streamed = opened(model_dir("llama"))
    base = {"group_size": 16}
    rows = widths_for_memory(streamed, None, base)
    assert len(rows) == 7 * 3 and all(row["fits"] for row in rows)
    sizes = {(row["bits"], row["embed_bits"]): row["size_bytes"] for row in rows}
    assert sizes[2, 4] == min(sizes.values()) and sizes[8, 4] < sizes[8, 8] < sizes[8, 16]
    limit = sizes[4, 8]
    limited = widths_for_memory(streamed, limit, base)
    assert [row["fits"] for row in limited] == [row["size_bytes"] <= limit for row in rows]
