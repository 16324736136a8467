"""`anybit quantize`, `plan` and `inspect`, and every mistake answered with one line and exit code 2."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from anybit import estimate, prepare
from anybit.config import parse_bytes
from anybit.errors import InputError
from tests.cli.commands import Run, recomputed_bits_per_weight, refused

RTN = ("--method", "rtn", "--group-size", "32")


@pytest.mark.parametrize(
    "options",
    [
        ("--method", "rtn", "--bits", "4"),
        ("--method", "rtn", "--bits", "3", "--symmetric", "--group-size", "-1"),
        ("--method", "gptq", "--bits", "2", "--group-size", "32", "--desc-act"),
        ("--method", "gptq", "--bits", "5", "--group-size", "40", "--one-shot", "--embed-bits", "8"),
    ],
    ids=" ".join,
)
def test_quantize_then_inspect(
    run: Run, llama: Path, text_file: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    out, json_file = tmp_path / "new" / "out", tmp_path / "made.json"
    text: tuple[object, ...] = ()
    if "gptq" in options:
        text = ("--samples", "4", "--seq-len", "32", "--calibration", text_file)
    ran = run("quantize", llama, "-o", out, *options, *text, "--json", json_file)
    assert ran.code == 0, ran.err
    assert "quantizes 14 linear layers" in ran.err and "% of all" in ran.err
    figures = json.loads(run("inspect", out, "--json", "-").out)
    assert figures["method"] == options[1]
    assert figures["bits"] == int(options[3])
    assert figures["bits_per_weight"] == pytest.approx(recomputed_bits_per_weight(out), rel=1e-12)
    files = [f for f in out.iterdir() if not f.name.startswith(("tokenizer", "chat_template"))]
    assert figures["size_bytes"] == sum(f.stat().st_size for f in files)
    assert len(figures["layers"]) == 14
    for layer in figures["layers"]:
        assert {"name", "shape", "bits", "bits_per_weight", "tiles"} <= layer.keys()
    if options[1] == "gptq":
        assert figures["calibration"]["source"] == "words.txt", "its name, not where it lies"
        assert figures["calibration"]["samples"] == 4 and len(figures["calibration"]["sha256"]) == 64
    else:
        assert figures["calibration"] is None
    result = json.loads(json_file.read_text())
    assert (result["bits_per_weight"], result["size_bytes"]) == (
        figures["bits_per_weight"],
        figures["size_bytes"],
    )
    shown = run("inspect", out, "--json", json_file)
    assert shown.code == 0 and f"{figures['bits_per_weight']:.3f}" in shown.out
    assert json.loads(json_file.read_text()) == figures
    refused(run("inspect", out, "--json", tmp_path), "cannot be written")
    verified = run("verify", out)
    assert verified.code == 0 and "hashes match" in verified.out


@pytest.mark.parametrize("embed_bits", ["16", "4"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_dry_run_predicts_and_writes_nothing(
    run: Run, model_dir: Callable[[str], Path], tmp_path: Path, family: str, embed_bits: str
) -> None:
    arguments = (
        "quantize",
        model_dir(family),
        "-o",
        tmp_path / "out",
        *RTN,
        "--bits",
        "3",
        "--embed-bits",
        embed_bits,
    )
    predicted_file = tmp_path / "p.json"
    ran = run(*arguments, "--dry-run", "--json", predicted_file)
    assert ran.code == 0 and [f.name for f in tmp_path.iterdir()] == ["p.json"]
    for word in ("bits per weight", "size", "free disk", "peak memory", "free memory", "time"):
        assert word in ran.out
    predicted = json.loads(predicted_file.read_text())
    assert run(*arguments).code == 0
    real = json.loads(run("inspect", tmp_path / "out", "--json", "-").out)
    assert predicted["bits_per_weight"] == real["bits_per_weight"]
    assert predicted["bits"] == real["bits"]
    off = abs(predicted["size_bytes"] - real["size_bytes"])
    assert off <= max(20_000, 0.02 * real["size_bytes"]), (predicted["size_bytes"], real["size_bytes"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dry_run_times_the_numbers_that_the_run_computes_in(
    run: Run, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    timed = []
    monkeypatch.setattr(prepare, "compute_dtype", lambda device: dtype)
    monkeypatch.setattr(estimate, "_matmul_speed", lambda asked: timed.append(asked) or (1e9, 1.0))
    ran = run("quantize", llama, "-o", tmp_path / "out", "--method", "gptq", "--dry-run")
    assert ran.code == 0 and "time              about" in ran.out
    assert set(timed) == {torch.float32, dtype}


def test_dry_run_on_a_gpu_predicts_no_time(
    run: Run, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("quantize", llama, "-o", tmp_path / "out", *RTN, "--dry-run", "--json", tmp_path / "p.json")
    refused(run(*asked, "--device", "tpu"), "expected cpu or cuda")
    monkeypatch.setattr(prepare, "_check_device", lambda device: None)
    monkeypatch.setattr(prepare, "compute_dtype", lambda device: torch.bfloat16)
    ran = run(*asked, "--device", "cuda")
    assert ran.code == 0 and "time              not predicted" in ran.out
    predicted = json.loads((tmp_path / "p.json").read_text())
    assert predicted["seconds"] is predicted["processor_share"] is None


@pytest.mark.slow
def test_fewer_samples_than_asked_are_said(run: Run, llama: Path, text_file: Path, tmp_path: Path) -> None:
    arguments = ("--calibration", text_file, "--samples", "500", "--seq-len", "128")
    ran = run("quantize", llama, "-o", tmp_path / "out", *arguments)
    assert ran.code == 0, ran.err
    assert "has 31 windows of 128 tokens, not 500" in ran.err
    calibration = json.loads(run("inspect", tmp_path / "out", "--json", "-").out)["calibration"]
    own = calibration["own_windows"]  # the text is used whole, and the model's own texts keep their share
    assert (calibration["samples"] - own, own, calibration["requested"]) == (31, 10, 500)


def test_windows_of_one_token_work(run: Run, llama: Path, text_file: Path, tmp_path: Path) -> None:
    arguments = ("--calibration", text_file, "--samples", "3", "--seq-len", "1")
    assert run("quantize", llama, "-o", tmp_path / "out", "--method", "gptq", *arguments).code == 0
    assert run("verify", tmp_path / "out").code == 0


def test_spec_of_plan_with_mixed_widths(run: Run, llama: Path, tmp_path: Path) -> None:
    spec = tmp_path / "map.json"
    ran = run("plan", llama, "-o", spec, "--group-size", "32", "--json", "-")
    assert ran.code == 0
    assert json.loads(ran.out)["best"]["bits"] == 8, "standard output is the JSON and nothing else"
    layers = json.loads(spec.read_text())["layers"]
    assert len(layers) == 14
    for i, name in enumerate(layers):
        layers[name]["bits"] = 2 + i % 7
    first = "model.layers.0.self_attn.q_proj"
    tiles = [{"bits": 8, "rows": list(range(8))}, {"bits": 3, "rows": list(range(8, 48))}]
    layers[first] = {"tiles": [{**tile, "group_size": 32} for tile in tiles]}
    spec.write_text(json.dumps({"layers": layers}))
    out = tmp_path / "out"
    ran = run("quantize", llama, "-o", out, "--method", "rtn", "--spec", spec)
    assert ran.code == 0, ran.err
    figures = json.loads(run("inspect", out, "--json", "-").out)
    for layer in figures["layers"]:
        if layer["name"] != first:
            assert layer["bits"] == layers[layer["name"]]["bits"]
        else:
            assert [(tile["bits"], tile["rows"]) for tile in layer["tiles"]] == [(8, 8), (3, 40)]
    assert figures["bits_per_weight"] == pytest.approx(recomputed_bits_per_weight(out))
    assert "--spec MAP.json" in (out / "README.md").read_text()


@pytest.mark.parametrize("memory", [None, "60kB"])
def test_plan_shows_what_fits(run: Run, llama: Path, memory: str | None) -> None:
    ran = run("plan", llama, "--group-size", "32", *(["--memory", memory] if memory else []))
    assert ran.code == 0, ran.err
    assert ("too large" in ran.out) == (memory is not None)
    assert ran.out.count("<- the best that fits") == 1


@pytest.mark.parametrize(
    ("option", "key", "limit"), [("--bpw", "bits_per_weight", 5.5), ("--size", "size_bytes", 89_000)]
)
def test_budget_takes_the_largest_width_within(
    run: Run, llama: Path, tmp_path: Path, option: str, key: str, limit: float
) -> None:
    assert run("quantize", llama, "-o", tmp_path / "out", *RTN, option, limit).code == 0
    figures = json.loads(run("inspect", tmp_path / "out", "--json", "-").out)
    wider = (*RTN, "--bits", int(figures["bits"]) + 1, "--dry-run", "--json", tmp_path / "wider.json")
    assert run("quantize", llama, "-o", tmp_path / "none", *wider).code == 0
    assert figures[key] <= limit < json.loads((tmp_path / "wider.json").read_text())[key]


# ---- what cannot work


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--method", "awesome"), ("awesome", "rtn", "gptq")),
        (("--method", "awesome", "--bits", "3.5"), ("unknown method 'awesome'",)),
        (("--bits", "9"), ("9-bit", "2 to 8")),
        (("--bits", "1"), ("1-bit", "2 to 8")),
        (("--method", "gptq", "--bits", "3.5"), ("3.5", "whole")),
        (("--method", "gptq", "--bits", "nan"), ("nan", "whole")),
        (("--method", "gptq", "--bits", "inf"), ("inf", "whole")),
        (("--bits", "4", "--bpw", "4.5"), ("exactly one",)),
        (("--bpw", "4.5", "--size", "1MB"), ("exactly one",)),
        (("--size", "1kB"), ("MB", "smallest width", "--embed-bits")),
        (("--size", "12parsec"), ("12parsec", "120MB")),
        (("--bpw", "1"), ("bits per weight", "smallest width")),
        (("--embed-bits", "5"), ("(--embed-bits) 5", "4, 8, 16")),
        (
            ("--method", "rtn", "--group-size", "0"),
            ("(--group-size) 0", "from 1 to 1048576, or -1 for the whole row"),
        ),
        (("--group-size", "64"), ("(--group-size) would be ignored", "anybit has no use for it")),
        (("--bits", "nan"), ("anybit", "nan", "any average")),
        (("--damp", "2"), ("damp",)),
        (("--samples", "0"), ("(--samples) 0", "from 1 up")),
        (("--threads", "100000"), ("(--threads) 100000", "give 1 to")),
        (("--method", "rtn", "--desc-act"), ("--desc-act", "rtn")),
        (("--method", "rtn", "--damp", "0.1"), ("(--damp) would be ignored", "rtn has no use for it")),
        (("--method", "rtn", "--no-group-reorder"), ("(--group-reorder) would be ignored", "rtn")),
        (("--method", "rtn", "--calibration", "a.txt"), ("--calibration would be ignored", "--clip")),
        (("--method", "rtn", "--samples", "4"), ("--samples would be ignored",)),
        (("--method", "rtn", "--seq-len", "4"), ("--seq-len would be ignored",)),
        (("--method", "rtn", "--one-shot"), ("--one-shot would be ignored",)),
        (("--method", "rtn", "--seed", "0"), ("--seed would be ignored",)),
        (("--include", "nothing.like.this"), ("--include",)),
        (("--json", "no/such/folder/r.json"), ("cannot be written",)),
        (("--spec", "no-such-file.json"), ("no-such-file.json",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_quantize_refuses(
    run: Run, llama: Path, tmp_path: Path, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    refused(run("quantize", llama, "-o", tmp_path / "out", *options), *words)
    assert list(tmp_path.iterdir()) == [], "nothing is written before the options are right"


def test_the_size_named_as_smallest_can_be_had(run: Run, llama: Path, tmp_path: Path) -> None:
    message = run("quantize", llama, "-o", tmp_path / "out", *RTN, "--size", "1kB").err
    smallest = float(message.partition("weight, ")[2].partition(" MB")[0]) * 1e6
    assert run("quantize", llama, "-o", tmp_path / "out", *RTN, "--size", f"{smallest + 100}B").code == 0


@pytest.mark.parametrize("option", ["--kv-cache=4", "--activations=8", "--prepass=awq", "--nonsense"])
def test_options_that_do_not_exist_are_errors(run: Run, llama: Path, tmp_path: Path, option: str) -> None:
    ran = run("quantize", llama, "-o", tmp_path / "out", option)
    assert ran.code == 2
    assert "No such option" in ran.err and option.partition("=")[0] in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5G", 5 * 10**9),
        ("5GB", 5 * 10**9),
        ("90m", 90 * 10**6),
        ("1.5GiB", 3 * 2**29),
        ("2 KiB", 2048),
        ("7", 7),
        ("7B", 7),
        ("1t", 10**12),
    ],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["1\n2MB", "", "MB", "1e400", "nan", "12 apples"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="expected a number and a unit"):
        parse_bytes(text)


@pytest.mark.parametrize("seed", ["-1", str(2**63)])
@pytest.mark.parametrize("command", [("quantize", "-o", "x"), ("generate", "-p", "x"), ("chat",)])
def test_seeds_out_of_range(run: Run, made: Path, command: tuple[str, ...], seed: str) -> None:
    ran = run(command[0], made, *command[1:], "--seed", seed)
    assert ran.code == 2 and "--seed" in ran.err and "Traceback" not in ran.err


def test_usage_errors(run: Run, llama: Path) -> None:
    assert run("quantize", llama).code == 2, "-o is missing"
    assert run("quantise").code == 2
    assert run("quantize", llama, "-o", "x", "--bits", "four").code == 2


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("not json", ("not a readable JSON",)),
        ("[1]", ("expected an object",)),
        ('{"layers": {"model.layers.9.mlp": {"bits": 4}}}', ("no linear layer",)),
        ('{"model.layers.0.mlp.up_proj": {"bits": 9}}', ("9",)),
        ('{"model.layers.0.mlp.up_proj": {"bit": 4}}', ("'bit'",)),
        ('{"model.layers.0.mlp.up_proj": {"tiles": [{"rows": [0, 1]}]}}', ("leave out",)),
    ],
)
def test_spec_is_checked(run: Run, llama: Path, tmp_path: Path, spec: str, words: tuple[str, ...]) -> None:
    (tmp_path / "map.json").write_text(spec)
    refused(run("quantize", llama, "-o", tmp_path / "out", *RTN, "--spec", tmp_path / "map.json"), *words)


def test_spec_and_a_budget_contradict(run: Run, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text('{"model.layers.0.mlp.up_proj": {"bits": 8}}')
    asked = ("quantize", llama, "-o", tmp_path / "o", *RTN, "--spec", tmp_path / "map.json")
    refused(run(*asked, "--bpw", "4"), "--spec", "--bpw")
    refused(run(*asked, "--size", "1MB", "--dry-run"), "--spec", "--size")


@pytest.mark.parametrize("given", ['"clip": true', '"act_bits": 8, "act_static": true', '"scaling": "awq"'])
def test_a_map_may_want_a_text_for_a_layer(run: Run, llama: Path, tmp_path: Path, given: str) -> None:
    """Windows are then as for a method that is calibrated: at most the model's 128 positions."""
    (tmp_path / "map.json").write_text(f'{{"model.layers.0.mlp.up_proj": {{{given}}}}}')
    spec = ("--spec", tmp_path / "map.json")
    asked = ("quantize", llama, "-o", tmp_path / "o", "--method", "rtn", *spec, "--dry-run")
    assert run(*asked).code == 0
    assert run(*asked, "--seq-len", "64", "--samples", "2").code == 0
    refused(run(*asked, "--seq-len", "129"), "--seq-len 129", "128 positions")
    (tmp_path / "map.json").write_text('{"model.layers.0.mlp.up_proj": {"bits": 8}}')
    refused(run(*asked, "--seq-len", "64"), "--seq-len would be ignored")


def test_text_shorter_than_a_window(run: Run, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    ran = run(
        "quantize", llama, "-o", tmp_path / "out", "--calibration", tmp_path / "short.txt", "--seq-len", "64"
    )
    refused(ran, "9 tokens", "64")
    refused(run("eval", llama, "--text", tmp_path / "short.txt", "--seq-len", "64"), "9 tokens", "64")
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry run"])
def test_calibration_that_cannot_be(
    run: Run, llama: Path, text_file: Path, tmp_path: Path, dry: tuple[str, ...]
) -> None:
    asked = ("quantize", llama, "-o", tmp_path / "out", "--method", "gptq", *dry)
    refused(run(*asked, "--calibration", text_file, "--seq-len", "129"), "129", "128")
    refused(run(*asked, "--calibration", "nothere.txt"), "'nothere.txt' does not exist", "use 'builtin'")
    refused(run(*asked, "--calibration", tmp_path), "is a directory")
    refused(run("eval", llama, "--text", "nothere.txt"), "does not exist", "use 'builtin-eval'")


def test_windows_are_as_long_as_the_model_reaches(run: Run, llama: Path, tmp_path: Path) -> None:
    asked = ("quantize", llama, "-o", tmp_path / "out", "--method", "gptq", "--samples", "2")
    assert run(*asked, "--dry-run").code == 0
    ran = run(*asked)
    assert ran.code == 0 and "calibrates on 2 x 128 tokens" in ran.err
    stored = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert stored["calibration"]["seq_len"] == 128
    assert json.loads(run("inspect", tmp_path / "out", "--json", "-").out)["calibration"]["seq_len"] == 128
    said = (tmp_path / "out/README.md").read_text()
    assert "--seq-len 128" in said and "2 x 128 tokens" in said


# ---- the output directory


def test_output_that_is_taken(run: Run, llama: Path, tmp_path: Path) -> None:
    taken, file = tmp_path / "taken", tmp_path / "file"
    taken.mkdir()
    (taken / "thesis.txt").write_text("years of work")
    file.write_text("x")
    refused(run("quantize", llama, "-o", taken, *RTN), "not empty")
    refused(run("quantize", llama, "-o", taken, *RTN, "--overwrite"), "not empty", "not an anybit artifact")
    refused(run("quantize", llama, "-o", file, *RTN, "--overwrite"), "is a file")
    assert (taken / "thesis.txt").read_text() == "years of work"
    assert sorted(f.name for f in tmp_path.iterdir()) == ["file", "taken"]


def test_overwrite_replaces_an_artifact_and_nothing_else(run: Run, llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    others = [tmp_path / "out.replaced", tmp_path / "out.old", tmp_path / "artifact"]
    for other in others:
        other.mkdir()
        (other / "thesis.txt").write_text("years of work")
    assert run("quantize", llama, "-o", out, *RTN, "--bits", "4").code == 0
    refused(run("quantize", llama, "-o", out, *RTN, "--bits", "3"), "--overwrite")
    assert json.loads(run("inspect", out, "--json", "-").out)["bits"] == 4
    assert run("quantize", llama, "-o", out, *RTN, "--bits", "3", "--overwrite").code == 0
    assert json.loads(run("inspect", out, "--json", "-").out)["bits"] == 3
    assert all((other / "thesis.txt").read_text() == "years of work" for other in others)
    assert sorted(tmp_path.iterdir()) == sorted([out, *others])


def test_partial_directory_of_somebody_else(run: Run, llama: Path, tmp_path: Path) -> None:
    for partial in (tmp_path / "a.partial", tmp_path / "b.partial"):
        out = tmp_path / partial.stem
        if partial.name.startswith("a"):
            partial.mkdir()
            (partial / "thesis.txt").write_text("years of work")
        else:
            partial.write_text("years of work")
        refused(run("quantize", llama, "-o", out, *RTN, "--overwrite"), "in the way")
    assert (tmp_path / "a.partial" / "thesis.txt").read_text() == "years of work"
    assert (tmp_path / "b.partial").read_text() == "years of work"


def test_empty_output_directory_and_missing_parents(run: Run, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for out in (tmp_path / "empty", tmp_path / "x" / "y" / "z", tmp_path / "link"):
        assert run("quantize", llama, "-o", out, *RTN).code == 0
        assert run("verify", out).code == 0
    assert (tmp_path / "link").is_symlink()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_output_directory_that_may_not_be_written(run: Run, llama: Path, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    refused(run("quantize", llama, "-o", locked / "out", *RTN), "Permission denied")


def test_output_below_a_file(run: Run, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    refused(run("quantize", llama, "-o", tmp_path / "file" / "out", *RTN), "file")


def test_unfinished_artifact_is_called_so(run: Run, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    for command in (("inspect",), ("verify",), ("eval",), ("generate", "-p", "x")):
        refused(run(command[0], tmp_path / "out", *command[1:]), "not finished", "repeat")


def test_what_all_other_methods_do_is_no_option_that_is_ignored(
    run: Run, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    asked = ("quantize", model_dir("llama"), "-o", tmp_path / "out", "--method", "rtn", "--dry-run")
    assert run(*asked, "--no-desc-act").code == 0
