"""Run options, and the `{layer: spec}` map."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anybit import GPTQ, AnyBit, methods
from anybit.config import LayerSpec, TileSpec, parse_layer_spec, read_spec_map
from anybit.errors import InputError
from anybit.kernels import cpu
from tests import builders


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"method": "mixllm", "wide_rows": 1.5}, "from 0 to 1"),
        ({"method": "mixllm", "wide_rows": 0.5, "bits": 5}, "give one"),
        ({"method": "mixllm", "bits": 3}, "any average from 4 to 8"),
        ({"method": "mixllm", "salience": "best"}, "second-order"),
        ({"method": "mixllm", "search": "twice"}, "progressive"),
        ({"method": "atom", "act_bits": 9}, "act_bits .--act-bits. 9: expected one of"),
        ({"method": "atom", "outlier_channels": 0}, "from 1 up"),
        ({"method": "atom", "act_clip": 1.2}, "act_clip"),
        ({"method": "awq", "scaling": "smoothquant"}, "itself a scaling"),
        ({"method": "gptq", "act_static": True}, "act_bits"),
        ({"method": "gptq", "kv_bits": 5}, "kv_bits .--kv-bits. 5: expected one of 2, 3, 4, 8, 16"),
        ({"method": "gptq", "act_search": True}, "stay at 16 bits"),
        ({"method": "gptq", "act_clip": 0.9}, "stay at 16 bits"),
        ({"method": "atom", "act_search": True, "act_clip": 0.8}, "leave act_static and act_clip out"),
        ({"method": "gptq", "clip_ratio": 0.9}, "--no-clip"),
        ({"method": "gptq", "wide_rows": 0.2}, "wide_rows .--wide-rows. would be ignored: it is for mixllm"),
        ({"method": "mixllm", "symmetric": True}, "symmetric"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        builders.options(**options)


def test_options_survive_their_artifact() -> None:
    """What config.json says of a run makes the same run again."""
    for method in ("mixllm", "atom", "awq", "smoothquant", "gptq"):
        config = builders.options(method)
        stored = {name: value for name, value in config.stored().items() if value is not None}
        if method == "mixllm":
            del stored["bits"]  # its share of wide rows says it
        assert builders.options(**stored) == config


def test_a_budget_that_eight_bits_fit_leaves_the_ratio_out() -> None:
    for method in ("rtn", "smoothquant"):  # at 4 and at 8 bits by default
        asked = methods.options(method, bpw=9.0, clip_ratio=0.85)
        assert [asked.with_bits(bits).resolve().clip_ratio for bits in (4, 8)] == [0.85, 1]
    assert builders.options("atom", 8, clip=False).clip_ratio == 1
    with pytest.raises(InputError, match=r"clip_ratio 0.5 would be ignored: 8 bits"):
        builders.options("rtn", 8, clip_ratio=0.5).layer_spec()


def test_another_width_decides_anew() -> None:
    made = {bits: methods.options("atom").with_bits(bits).resolve() for bits in (3, 4, 8)}
    assert {bits: (o.act_bits, o.act_clip) for bits, o in made.items()} == {
        3: (3, 0.9),
        4: (4, 0.9),
        8: (8, 1.0),
    }
    assert methods.options("atom", act_bits=6).with_bits(3).resolve().act_bits == 6
    assert methods.options("mixllm").with_bits(5.5).resolve().wide_rows is None


pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"no native extension: {cpu.why_not()}")


def test_options_are_checked() -> None:
    with pytest.raises(
        InputError, match=r"tune_for \(--tune-for\) 9.0: expected an average width from 2 to 8"
    ):
        builders.options("anybit", tune_for=9.0)
    with pytest.raises(InputError, match="group_size"):
        builders.options("anybit", group_size=64)
    with pytest.raises(InputError, match=r"no 1\.5-bit width"):
        builders.options("anybit", bits=1.5)
    with pytest.raises(InputError, match="tune_for"):
        builders.options("gptq", tune_for=4.0)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"bits": 2.3}, "two-four-sixteen has no 2.3-bit width"),
        ({"wide_groups": 0.5, "bits": 3}, "--wide-groups"),
        ({"wide_groups": -0.1}, "from 0 to 1"),
        ({"exclusive_outliers": 0.2}, "exclusive_outliers"),
    ],
)
def test_impossible_options_of_two_four_sixteen_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        builders.options("two-four-sixteen", **options)


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("gptq", {"finetune": True}, r"finetune \(--finetune\) would be ignored: it is for two-four-sixteen"),
        ("two-four-sixteen", {"finetune_epochs": 3}, "add finetune"),
        ("two-four-sixteen", {"finetune": True, "finetune_epochs": 0}, "from 1 to 1000"),
        ("two-four-sixteen", {"finetune": True, "one_shot": True}, "one_shot"),
        ("two-four-sixteen", {"finetune": True, "samples": 1}, "2 or more"),
    ],
)
def test_options_that_do_not_go_together(method: str, options: dict[str, int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        builders.options(method, **options)  # type: ignore[arg-type]


DEFAULT = builders.layer_spec(3, 64, clip=True)


# ---- options of a run


def test_the_defaults_are_the_documented_ones() -> None:
    made = builders.options()
    assert (made.name, made.bits, made.embed_bits, made.tune_for, made.kept_channels) == (
        "anybit",
        8,
        None,  # in the order of the layers' planes
        3,
        1 / 128,
    )
    config = GPTQ()
    assert (config.bits, config.group_size, config.symmetric) == (None, 128, False)
    config = config.resolve()
    assert (config.bits, config.clip, config.act_bits, config.clip_ratio) == (4, True, 16, 1)
    assert (config.damp, config.group_reorder, config.desc_act, config.one_shot) == (0.01, True, False, False)
    assert (config.samples, config.seq_len, config.seed, config.embed_bits) == (128, 2048, 0, 16)
    assert config.layer_spec() == LayerSpec(config, (TileSpec(4, 128, False),))
    assert config.resolve() == config
    assert json.loads(json.dumps(config.stored()))["method"] == "gptq"


@pytest.mark.parametrize(
    ("given", "windows", "gradients", "passes"),
    [
        ({}, 32, 8, 2),
        ({"effort": "quick"}, 8, 4, 1),
        ({"effort": "best"}, 64, 16, 4),
        ({"seq_len": 1024}, 64, 16, 2),
        ({"seq_len": 10**6}, 1, 1, 2),
        ({"samples": 16, "seq_len": 1024, "effort": "best"}, 16, 16, 4),
        ({"samples": 500, "descent": 0}, 500, 8, 0),
        ({"effort": "quick", "gradient_samples": 1}, 8, 1, 1),
    ],
)
def test_effort_says_what_is_left_open(
    given: dict[str, Any], windows: int, gradients: int, passes: int
) -> None:
    made = AnyBit(**given).resolve()
    assert (made.samples, made.gradient_samples, made.descent) == (windows, gradients, passes)
    stored = made.stored()
    assert (stored["samples"], stored["effort"]) == (windows, given.get("effort", "normal"))


def test_every_option_of_a_layer_reaches_its_spec() -> None:
    config = builders.options("gptq", 3, 32, symmetric=True, desc_act=True, group_reorder=False, damp=0.1)
    spec = config.layer_spec()
    assert spec.tiles == (TileSpec(3, 32, True),)
    assert (spec.options.desc_act, spec.options.group_reorder, spec.options.damp) == (True, False, 0.1)


def test_which_methods_look_at_activations() -> None:
    wanted = {
        name: bool(method.statistics(method.options().resolve())) for name, method in methods.METHODS.items()
    }
    assert [name for name, statistics in wanted.items() if not statistics] == ["rtn"]
    assert not methods.options("rtn").calibrated
    assert methods.options("rtn", clip=True).calibrated and methods.options("gptq").calibrated


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "hqq"}, ["'hqq'", "rtn", "gptq"]),
        ({"bits": 1}, ["1-bit", "2 to 8"]),
        ({"bits": 9}, ["9-bit", "2 to 8"]),
        ({"method": "rtn", "bits": 16}, ["rtn", "16-bit"]),
        ({"embed_bits": 5}, ["5", "4, 8, 16"]),
        ({"group_size": 0}, ["group_size (--group-size) 0", "-1"]),
        ({"group_size": -2}, ["group_size (--group-size) -2"]),
        ({"damp": 0}, ["damp (--damp) 0"]),
        ({"damp": 1.0}, ["damp (--damp) 1.0"]),
        ({"damp": float("nan")}, ["damp (--damp) nan"]),
        ({"samples": 0}, ["samples (--samples) 0"]),
        ({"seq_len": -5}, ["seq_len (--seq-len) -5"]),
        ({"include": "*.mlp.*"}, ["include", "'*.mlp.*'", "a tuple of glob patterns"]),
        ({"exclude": ["*.mlp.*"]}, ["exclude", "a tuple"]),
        ({"include": (1,)}, ["include", "a tuple"]),
        ({"bits": "4"}, ["bits", "float", "'4'"]),
        ({"bits": 4.5}, ["gptq", "4.5-bit"]),
        ({"method": "cmpq", "bits": 1.9}, ["cmpq", "1.9-bit", "any average"]),
        ({"method": "any-precision", "bits": 4}, ["any-precision", "--widths"]),
        ({"method": "any-precision", "widths": (4, 3)}, ["widths", "ascending"]),
        ({"method": "any-precision", "widths": (3, 9)}, ["widths", "2 to 8"]),
        ({"method": "any-precision", "widths": ()}, ["widths", "2 to 8"]),
        ({"method": "cmpq", "codebook_bits": 5}, ["5", "16, 8, 4"]),
        ({"method": "cmpq", "error_outliers": 0.5}, ["error_outliers", "0.1"]),
        ({"bits": True}, ["bits", "float", "True"]),
        ({"group_size": "64"}, ["group_size", "int", "'64'"]),
        ({"seed": None}, ["seed", "int", "None"]),
        ({"method": "anybit", "effort": "much"}, ["effort (--effort) much", "quick, normal, best"]),
        ({"method": "anybit", "samples": 4, "gradient_samples": 5}, ["gradient_samples (5)", "4 samples"]),
        ({"method": "anybit", "plain_share": 0.1, "salience": "full"}, ["plain_share (0.1)", "'full'"]),
        ({"method": "anybit", "descent": -1}, ["descent (--descent) -1", "0 to 100"]),
        ({"damp": "1"}, ["damp", "float", "'1'"]),
        ({"clip": 1}, ["clip", "bool", "1"]),
        ({"symmetric": "no"}, ["symmetric", "bool", "'no'"]),
        ({"seed": -1}, ["seed (--seed) -1"]),
        ({"seed": 2**63}, ["seed (--seed) 9223372036854775808"]),
        ({"method": "hqq", "bits": 3.5}, ["unknown method 'hqq'"]),
        ({"method": 4}, ["unknown method 4"]),
        ({"method": "rtn", "desc_act": True}, ["--desc-act", "rtn"]),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as error:
        given = {"method": "gptq", **options}
        methods.options(given.pop("method"), **given)
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
    expected = DEFAULT.but(clip=False, desc_act=True, group_reorder=False, damp=0.5)
    assert parse_layer_spec("a", entry, DEFAULT) == replace(expected, tiles=(TileSpec(3, -1, True),))


def test_tiles_by_rows_and_columns() -> None:
    entry = {
        "tiles": [{"bits": 8, "symmetric": True, "rows": [0, 2]}, {"rows": [1], "cols": None}],
        "clip": False,
    }
    tiles = (TileSpec(8, 64, True, rows=(0, 2)), TileSpec(3, 64, rows=(1,)))
    expected = replace(DEFAULT.but(clip=False), tiles=tiles)
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
    with pytest.raises(InputError, match=f"--spec {path}: |^spec of a: expected an object"):
        read_spec_map(path, DEFAULT)


def test_what_has_no_end_is_no_map(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "long").open("wb") as file:
        file.truncate(10**12)
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path / "long"):
        with pytest.raises(InputError, match=f"--spec {path}: (no such file|more than)"):
            read_spec_map(path, DEFAULT)


def test_a_map_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(InputError, match=str(path)):
            read_spec_map(path, DEFAULT)
