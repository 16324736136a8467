"""The command line: every command at work, and every mistake answered with one line and exit code 2."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import anybit
from anybit.bench import ggml, kernels
from anybit.cli import main as cli
from anybit.config import parse_bytes
from anybit.errors import InputError
from anybit.generate import Echo, Generator
from anybit.kernels import cpu
from anybit.methods.registry import METHODS
from tests import builders

COMMANDS = ("quantize", "eval", "generate", "chat", "inspect", "verify", "plan", "compare", "demo", "bench")
RTN = ("--method", "rtn", "--group-size", "32")


@dataclass
class Ran:
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("inspect", out)`: the command in this process, as the installed script calls it."""

    def call(*arguments: object, stdin: str = "") -> Ran:
        monkeypatch.setattr(sys, "argv", ["anybit", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return Ran(int(exit_.value.code or 0), captured.out, captured.err)

    return call


def refused(ran: Ran, *words: str) -> None:
    """Exit code 2 and one line on standard error that says `words`."""
    assert ran.code == 2, ran
    assert "Traceback" not in ran.err
    last = ran.err.strip().splitlines()[-1]
    assert last.startswith("anybit: "), ran.err
    for word in words:
        assert word in last, last


@pytest.fixture
def llama(model_dir: Callable[[str], Path]) -> Path:
    return model_dir("llama")


@pytest.fixture
def gptq(text_file: Path) -> tuple[str, ...]:
    """Options of a calibrated run that takes a moment."""
    return (
        *("--method", "gptq", "--samples", "4", "--seq-len", "32"),
        *("--calibration", str(text_file), "--group-size", "32"),
    )


@pytest.fixture(scope="module")
def made(model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An RTN artifact at 4 bits; never change it."""
    out = tmp_path_factory.mktemp("cli") / "made"
    anybit.quantize(model_dir("llama"), out, builders.options("rtn", group_size=32))
    return out


# ---- help and version


def test_version(run: Run) -> None:
    assert run("--version").out.strip() == f"anybit {anybit.__version__}"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(run: Run, command: str) -> None:
    ran = run(command, "--help")
    assert ran.code == 0
    assert command in ran.out and "--help" in ran.out


def test_help_names_the_least_width_that_there_is(run: Run) -> None:
    for size, least in ((16, "2.46"), (8, "2.91")):
        assert f"{least} to 4" in " ".join(run("quantize", "--help").out.replace("│", " ").split())
        assert builders.options("two-four-sixteen", float(least), size).bits == float(least)
        with pytest.raises(InputError, match=r"at least|no 2\.45-bit width"):
            layout = METHODS["two-four-sixteen"].layout
            layout(
                builders.spec_of(builders.options("two-four-sixteen", float(least) - 0.01, size)), (64, 64)
            )


def test_commands_are_all_listed(run: Run) -> None:
    assert set(typer.main.get_command(cli.app).commands) == set(COMMANDS)  # type: ignore[attr-defined]
    assert all(command in run("--help").out for command in COMMANDS)


def test_help_imports_nothing_heavy() -> None:
    code = f"""
import sys
from anybit.cli.main import main
for command in {["", *COMMANDS]!r}:
    sys.argv = ["anybit", *command.split(), "--help"]
    try:
        main()
    except SystemExit as exit_:
        assert not exit_.code
heavy = {{"torch", "transformers", "numpy", "safetensors", "matplotlib"}} & set(sys.modules)
sys.exit(str(heavy) if heavy else 0)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_module_is_the_command() -> None:
    command = [sys.executable, "-m", "anybit", "--version"]
    assert subprocess.run(command, capture_output=True, check=True).stdout.startswith(b"anybit ")


# ---- quantize and what reads it


def recomputed_bits_per_weight(out: Path) -> float:
    """8 x bytes of the linear layers' tensors in the files / their weights."""
    tensors = {name: t for file in out.glob("*.safetensors") for name, t in load_file(file).items()}
    layers = json.loads((out / "config.json").read_text())["quantization_config"]["layers"]
    size, weights = 0, 0
    for name, layout in layers.items():
        weights += layout["shape"][0] * layout["shape"][1]
        size += sum(t.nbytes for key, t in tensors.items() if key.startswith(f"{name}."))
    return 8 * size / weights


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
    figures = json.loads(run("inspect", out, "--json").out)
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
    shown = run("inspect", out)
    assert shown.code == 0 and f"{figures['bits_per_weight']:.3f}" in shown.out
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
    for word in ("bits per weight", "size", "free disk", "peak memory", "time"):
        assert word in ran.out
    predicted = json.loads(predicted_file.read_text())
    assert run(*arguments).code == 0
    real = json.loads(run("inspect", tmp_path / "out", "--json").out)
    assert predicted["bits_per_weight"] == real["bits_per_weight"]
    assert predicted["bits"] == real["bits"]
    off = abs(predicted["size_bytes"] - real["size_bytes"])
    assert off <= max(20_000, 0.02 * real["size_bytes"]), (predicted["size_bytes"], real["size_bytes"])


def test_fewer_samples_than_asked_are_said(run: Run, llama: Path, text_file: Path, tmp_path: Path) -> None:
    arguments = ("--calibration", text_file, "--samples", "500", "--seq-len", "128")
    ran = run("quantize", llama, "-o", tmp_path / "out", *arguments)
    assert ran.code == 0, ran.err
    assert "has 31 windows of 128 tokens, not 500" in ran.err
    calibration = json.loads(run("inspect", tmp_path / "out", "--json").out)["calibration"]
    assert (calibration["samples"], calibration["requested"]) == (31, 500)


def test_windows_of_one_token_work(run: Run, llama: Path, text_file: Path, tmp_path: Path) -> None:
    arguments = ("--calibration", text_file, "--samples", "3", "--seq-len", "1")
    assert run("quantize", llama, "-o", tmp_path / "out", "--method", "gptq", *arguments).code == 0
    assert run("verify", tmp_path / "out").code == 0


def test_spec_of_plan_with_mixed_widths(run: Run, llama: Path, tmp_path: Path) -> None:
    spec = tmp_path / "map.json"
    ran = run("plan", llama, "-o", spec, "--group-size", "32", "--json")
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
    figures = json.loads(run("inspect", out, "--json").out)
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
    figures = json.loads(run("inspect", tmp_path / "out", "--json").out)
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
        (("--embed-bits", "5"), ("--embed-bits 5", "4, 8, 16")),
        (("--method", "rtn", "--group-size", "0"), ("group size 0",)),
        (("--group-size", "64"), ("--group-size would be ignored", "anybit")),
        (("--bits", "nan"), ("anybit", "nan", "any average")),
        (("--damp", "2"), ("damp",)),
        (("--samples", "0"), ("at least 1",)),
        (("--threads", "100000"), ("--threads 100000", "at most")),
        (("--method", "rtn", "--desc-act"), ("--desc-act", "rtn")),
        (("--method", "rtn", "--damp", "0.1"), ("--damp would be ignored", "rtn")),
        (("--method", "rtn", "--no-group-reorder"), ("--group-reorder would be ignored",)),
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
    (tmp_path / "map.json").write_text("{}")
    refused(
        run("quantize", llama, "-o", tmp_path / "o", "--spec", tmp_path / "map.json", "--bpw", "4"), "--spec"
    )


def test_text_shorter_than_a_window(run: Run, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    ran = run(
        "quantize", llama, "-o", tmp_path / "out", "--calibration", tmp_path / "short.txt", "--seq-len", "64"
    )
    refused(ran, "9 tokens", "64")
    refused(run("eval", llama, "--text", tmp_path / "short.txt", "--seq-len", "64"), "9 tokens", "64")
    assert not (tmp_path / "out.partial").exists()


def test_seq_len_beyond_the_model(run: Run, llama: Path, text_file: Path, tmp_path: Path) -> None:
    text = ("--calibration", text_file, "--seq-len", "129")
    refused(run("quantize", llama, "-o", tmp_path / "out", *text), "129", "128")


def test_models_that_are_none(run: Run, made: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out"
    refused(run("quantize", tmp_path / "nowhere", "-o", out), "does not exist")
    refused(run("quantize", tmp_path / "empty", "-o", out), "config.json")
    refused(run("quantize", made, "-o", out), "already quantized")
    refused(run("inspect", tmp_path / "nowhere"), "does not exist")
    refused(run("inspect", tmp_path / "empty"), "not an anybit artifact")
    refused(run("verify", tmp_path / "empty"), "not an anybit artifact")
    refused(run("plan", tmp_path / "empty"), "config.json")
    refused(run("generate", tmp_path / "empty", "-p", "hi"), "config.json")


def test_current_directory_as_a_model(
    run: Run, llama: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    assert run("inspect", ".").code == 0
    assert run("generate", ".", "-p", "abc", "--max-new-tokens", "2").code == 0
    monkeypatch.chdir(llama)
    assert run("generate", ".", "-p", "abc", "--max-new-tokens", "2").code == 0
    assert run("quantize", ".", "-o", tmp_path / "out", *RTN).code == 0
    figures = json.loads(run("inspect", tmp_path / "out", "--json").out)
    assert figures["base"]["name"] == "llama"


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
    assert json.loads(run("inspect", out, "--json").out)["bits"] == 4
    assert run("quantize", llama, "-o", out, *RTN, "--bits", "3", "--overwrite").code == 0
    assert json.loads(run("inspect", out, "--json").out)["bits"] == 3
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


# ---- interruption


CTRL_C = """
import os, signal, sys
from anybit.cli import main as cli

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits it ignored
calls, fsync = [], os.fsync
def interrupted(descriptor):
    calls.append(descriptor)
    if len(calls) == 6:  # in the middle: the second shard is written, but not yet noted
        os.kill(os.getpid(), signal.SIGINT)
    fsync(descriptor)
os.fsync = interrupted
cli.main()
"""


def test_ctrl_c_ends_with_130_and_can_be_resumed(
    run: Run, llama: Path, gptq: tuple[str, ...], tmp_path: Path
) -> None:
    options = (*gptq, "--threads", "1")
    assert run("quantize", llama, "-o", tmp_path / "whole", *options).code == 0
    command = [sys.executable, "-c", CTRL_C, "quantize", str(llama), "-o", str(tmp_path / "out"), *options]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 130, process.stderr
    assert process.stderr.endswith("\nanybit: interrupted; the same command resumes\n")
    assert "Traceback" not in process.stderr
    assert not (tmp_path / "out").exists()
    ran = run("quantize", llama, "-o", tmp_path / "out", *options)
    assert ran.code == 0 and "resumes: 1 of 3 shards" in ran.err
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name
    assert not (tmp_path / "out.partial").exists()


def test_interrupts_and_system_errors_are_no_tracebacks(
    run: Run, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(error: BaseException) -> Callable[..., None]:
        def call(*arguments: object, **options: object) -> None:
            raise error

        return call

    monkeypatch.setattr("anybit.artifact.reader.inspect", raises(KeyboardInterrupt()))
    ran = run("inspect", made)
    assert (ran.code, ran.err.strip()) == (130, "anybit: interrupted")
    monkeypatch.setattr(
        "anybit.artifact.reader.inspect", raises(OSError(28, "No space left on device", "/x"))
    )
    refused(run("inspect", made), "/x: No space left on device", "make room")
    monkeypatch.setattr("anybit.artifact.reader.inspect", raises(InputError("so it is")))
    refused(run("inspect", made), "so it is")


def test_reader_that_goes_away() -> None:
    reader, pipe = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "anybit", "--help"]
    ran = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    os.close(pipe)
    assert (ran.returncode, ran.stderr) == (1, "")


# ---- eval, generate, chat


def test_eval_writes_its_figures(run: Run, llama: Path, made: Path, text_file: Path, tmp_path: Path) -> None:
    text = ("--text", text_file, "--seq-len", "64", "--max-tokens", "1000")
    ran = run("eval", made, *text, "--base", llama, "--json", tmp_path / "r.json")
    assert ran.code == 0, ran.err
    figures = json.loads((tmp_path / "r.json").read_text())
    assert (figures["seq_len"], figures["tokens"], figures["tail_tokens"]) == (64, 15 * 63, 40)
    assert figures["bits_per_weight"] == pytest.approx(recomputed_bits_per_weight(made))
    assert figures["kld_p99"] >= figures["kld_mean"] > 0
    assert 0 <= figures["top1_agreement"] <= 1
    alone = tmp_path / "alone.json"
    assert run("eval", llama, *text, "--json", alone).code == 0
    base = json.loads(alone.read_text())
    assert base["bits_per_weight"] is None and "kld_mean" not in base
    assert base["perplexity"] == pytest.approx(figures["base_perplexity"])
    assert base["perplexity"] != pytest.approx(figures["perplexity"], rel=1e-4)
    for shown in (f"{figures['perplexity']:.4f}", "top-1 agreement", "bits per weight", "40 tokens"):
        assert shown in ran.out
    itself = run("eval", llama, *text, "--base", llama, "--json", alone)
    assert itself.code == 0
    assert json.loads(alone.read_text())["kld_mean"] == pytest.approx(0, abs=1e-6)


def test_eval_refuses(run: Run, made: Path, model_copy: Callable[[str], Path], tmp_path: Path) -> None:
    refused(run("eval", made, "--text", "a.txt", "--dataset", "wikitext2"), "--dataset")
    refused(run("eval", made, "--text", tmp_path / "nowhere.txt"), "nowhere.txt")
    refused(run("eval", made, "--dtype", "float8"), "float8", "bfloat16")
    refused(run("eval", made, "--tasks-dir", tmp_path), "tasks_dir", "--tasks")
    refused(run("eval", made, "--limit", "3"), "limit", "--tasks")
    for command in (("eval", made), ("generate", made, "-p", "x"), ("chat", made)):
        refused(run(*command, "--device", "tpu"), "tpu", "expected cpu or cuda")
    refused(run("eval", made, "--json", tmp_path / "no" / "r.json"), "cannot be written")
    untokenized = model_copy("llama")
    (untokenized / "tokenizer.json").unlink()
    refused(run("eval", untokenized), "tokenizer")


def test_generate_continues_the_prompt(run: Run, made: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    ran = run("generate", made, "-p", "abc", "--max-new-tokens", "6")
    assert ran.code == 0 and ran.out.startswith("abc")
    assert run("generate", made, "-p", "abc", "--max-new-tokens", "6").out == ran.out, "greedy"
    model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    ids = tokenizer("abc", return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=1)
    assert ran.out.rstrip("\n") == tokenizer.decode(expected[0], skip_special_tokens=True).rstrip("\n")
    sampled = [run("generate", made, "-p", "abc", "--temperature", "2", "--seed", s).out for s in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    refused(run("generate", made, "-p", ""), "empty")
    refused(run("generate", made, "-p", "x" * 200), "200 tokens", "128")


def test_chat_answers_line_by_line(run: Run, made: Path) -> None:
    once = run("chat", made, "--max-new-tokens", "4", stdin="hello\n")
    assert once.code == 0 and once.out.count("\n") >= 1
    again = run("chat", made, "--max-new-tokens", "4", stdin="hello\n/new\nhello\n\nnever read\n")
    assert again.out == once.out * 2, "/new forgets, an empty line ends"
    longer = run("chat", made, "--max-new-tokens", "4", stdin="hello\nhello\n/exit\n")
    assert longer.out.startswith(once.out)
    assert run("chat", made, stdin="").code == 0


def test_chat_goes_on_when_its_context_is_full(run: Run, made: Path) -> None:
    first = run("chat", made, "--max-new-tokens", "4", stdin="hello\n")
    stdin = "hello\n" + "x" * 200 + "\n/new\nhello\n"
    ran = run("chat", made, "--max-new-tokens", "4", stdin=stdin)
    assert ran.code == 0 and ran.out == first.out * 2
    assert ran.err.count("anybit:") == 1 and "128" in ran.err and "/new" in ran.err


def test_ctrl_c_stops_an_answer_or_the_chat(run: Run, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def interrupted(self: Generator, ids: torch.Tensor, *options: object, streamer: Echo) -> None:
        asked.append(self.tokenizer.decode(ids[0]))
        streamer.put(ids)
        streamer.put(self.tokenizer("of course", return_tensors="pt").input_ids[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(Generator, "generate", interrupted)
    ran = run("chat", made, stdin="one\ntwo\n")
    assert (ran.code, ran.out) == (0, "of course\n" * 2)
    assert asked[1].endswith("[user]one[assistant]of course[user]two[assistant]"), "what was said counts"
    assert run("generate", made, "-p", "x").code == 130

    class Prompt(io.StringIO):
        def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
            raise KeyboardInterrupt

    monkeypatch.setattr(io, "StringIO", Prompt)
    assert run("chat", made).code == 130


def test_chat_needs_a_template(run: Run, model_copy: Callable[[str], Path]) -> None:
    model = model_copy("llama")
    (model / "chat_template.jinja").unlink()
    refused(run("chat", model, stdin="hello\n"), "no chat template", "anybit generate")


# ---- bench kernels


@pytest.fixture
def bench(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("bench", "kernels", ...)`, one round of a small shape on one thread with little to read."""
    if not cpu.available():
        pytest.skip("the native extension is not built")
    monkeypatch.setattr(kernels, "_cold", lambda: 1 << 20)
    monkeypatch.setattr(kernels, "READ", 1 << 20)
    few = ("--shapes", "128x256", "--rounds", "1", "--threads", "1")
    return lambda *arguments, **more: run("bench", "kernels", *few, *arguments, **more)


def test_bench_kernels_draws_when_its_figures_are_out(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures, picture = tmp_path / "speed.json", tmp_path / "speed.png"
    ran = bench("--only", "nested, W7", "--plot", picture, "--json", figures)
    assert ran.code == 0 and picture.stat().st_size > 10_000
    assert json.loads(ran.out.splitlines()[-1]) == json.loads(figures.read_text())
    figures.unlink()
    drawn: list[str] = []
    monkeypatch.setattr(kernels, "plot", lambda *_: drawn.append(figures.read_text()))
    assert bench("--only", "W7", "--plot", picture, "--json", figures).code == 0
    assert "W7" in drawn[0]


def test_bench_kernels_in_the_cache(bench: Run) -> None:
    ran = bench("--only", "W4", "--cached")
    assert ran.code == 0 and "in the cache" in ran.out and "x bfloat16" not in ran.out
    assert json.loads(ran.out.splitlines()[-1])["rows"][0]["variants"]["W4"]["rows"] == 128


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--threads", "0"), ("--threads", "from 1 up")),
        (("--threads=-1",), ("--threads", "from 1 up")),
        (("--tokens", "2,0"), ("--tokens", "from 1 up")),
        (("--tokens=-3",), ("--tokens", "from 1 up")),
        (("--dtype", "int8"), ("int8", "bfloat16 and float32")),
        (("--dtype", "float16"), ("float16", "bfloat16 and float32")),
        (("--shapes", "3x2", "--only", "Atom"), ("'Atom'", "MixLLM")),
        (("--shapes", ""), ("--shapes ''", "separated by commas")),
        (("--only", "W4,"), ("--only 'W4,'", "separated by commas")),
        (("--only", "W9"), ("'W9'", "W8A8")),
        (("--isa", "avx9"), ("avx9", "portable")),
        (("--shapes", "127x64", "--cached"), ("127x64", "128 or more")),
        (("--plot", "speed.png", "--cached"), ("--plot would be ignored",)),
        (("--plot", "speed.bmp"), ("speed.bmp", ".png")),
        (("--plot", "speed"), ("speed", ".png")),
        (("--plot", "no/such/speed.png"), ("cannot be written",)),
        (("--json", "no/such/speed.json"), ("cannot be written",)),
    ],
)
def test_bench_kernels_refuses_before_it_measures(
    bench: Run, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], words: tuple[str, ...]
) -> None:
    monkeypatch.delattr(kernels, "_measure")
    refused(bench(*given), *words)


def test_bench_kernels_says_why_there_is_no_ggml(bench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml, "library", lambda: None)
    refused(bench("--only", "W4,ggml q4_0"), "'ggml q4_0'", "llama-cpp-python", "codebook 2")
