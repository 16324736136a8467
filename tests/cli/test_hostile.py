"""What the command says of models that came with more than weights: one line, exit code 2, at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import anybit
from tests import builders
from tests.builders import MakeModel
from tests.cli.commands import Run, refused


def edit(file: Path, change: Callable[[Any], object]) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copied"))


def test_a_prompt_that_is_no_utf8(run: Run, made: Path) -> None:
    prompt = b"ab\xff".decode("utf-8", "surrogateescape")  # what Python makes of such an argument
    refused(run("generate", made, "-p", prompt), "not valid UTF-8")


def test_tokens_beyond_the_vocabulary(run: Run, copied: Path) -> None:
    edit(copied / "tokenizer.json", lambda t: t["model"]["vocab"].update(a=9999))
    refused(run("generate", copied, "-p", "abc"), "9999", "vocabulary")
    refused(run("chat", copied, stdin="abc\n"), "9999", "vocabulary")
    refused(run("eval", copied), "9999", "vocabulary")


def test_a_pattern_that_never_ends(run: Run, copied: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    edit(copied / "tokenizer.json", lambda t: t.update(pre_tokenizer=split))
    refused(run("generate", copied, "-p", "x" * 60), "tokenizer", "retry-limit")


def test_a_template_out_of_its_sandbox(run: Run, copied: Path) -> None:
    (copied / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    refused(run("chat", copied, stdin="hello\n"), "chat template", "SecurityError")


@pytest.mark.parametrize("template", ["", "{{ messages[7] }}"])
def test_a_template_that_gives_no_text(run: Run, copied: Path, template: str) -> None:
    (copied / "chat_template.jinja").write_text(template)
    refused(run("chat", copied, stdin="hello\n"), "chat template")


@pytest.mark.parametrize(
    "asked",
    [{"num_beams": 4}, {"num_return_sequences": 10**9}, {"output_hidden_states": 0.5}, {"do_sample": "x"}],
)
def test_what_a_generation_config_asks_for_beyond_one_sequence(
    run: Run, copied: Path, made: Path, asked: dict[str, Any]
) -> None:
    prompt = ["-p", "abc", "--max-new-tokens", "3"]
    expected = run("generate", made, *prompt)
    edit(copied / "generation_config.json", lambda c: c.update(asked))
    ran = run("generate", copied, *prompt)
    if ran.code:  # Transformers itself refuses some
        refused(ran, "generation_config.json")
    else:
        assert ran.out == expected.out


def test_code_of_the_hub_is_never_run(run: Run, copied: Path, model_copy: MakeModel, tmp_path: Path) -> None:
    model = model_copy("llama")
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        for folder in (copied, model):
            edit(folder / "config.json", lambda c, key=key: c.update({key: "someone/kernel"}))
            refused(run("generate", folder, "-p", "a"), "code of the hub", "someone/kernel")
            edit(folder / "config.json", lambda c, key=key: c.pop(key))


@pytest.mark.parametrize("change", [{"dtype": "65536"}, {"dtype": True}, {"name": "\ud800"}])
def test_what_could_not_be_read_back_is_refused_before_any_work(
    run: Run, model_copy: MakeModel, tmp_path: Path, change: dict[str, Any]
) -> None:
    model = model_copy("gpt2")
    edit(model / "config.json", lambda c: c.update(change))
    ran = run("quantize", model, "-o", tmp_path / "out", "--method", "rtn", "--bits", "4")
    refused(ran, "config")
    assert [path.name for path in tmp_path.iterdir() if path != model] == []


def test_a_model_of_whole_numbers(run: Run, model_copy: MakeModel, tmp_path: Path) -> None:
    model = model_copy("llama")
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].int()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    for command in (
        ["eval", model, "--max-tokens", "64"],
        ["quantize", model, "-o", tmp_path / "out", "--dry-run"],
    ):
        refused(run(*command), "model.norm.weight is stored as int32")


def test_results_by_place_are_as_good_as_by_name(run: Run, copied: Path, made: Path) -> None:
    """`return_dict` says how outputs come, not what they are."""
    edit(copied / "config.json", lambda c: c.update(return_dict=False, output_hidden_states=0.5))
    (copied / "anybit.index.json").unlink()
    short = ["--seq-len", "32", "--max-tokens", "64"]
    ran, whole = run("eval", copied, *short), run("eval", made, *short)
    assert ran.code == whole.code == 0
    assert ran.out.replace("copied", "made") == whole.out.replace(
        str(made), str(copied).replace("copied", "made")
    )


def test_results_by_place_of_a_model_to_compress(run: Run, model_copy: MakeModel, tmp_path: Path) -> None:
    model = model_copy("gpt2")
    edit(model / "config.json", lambda c: c.update(return_dict=False, output_attentions=True))
    assert run("eval", model, "--seq-len", "32", "--max-tokens", "64").code == 0
    few = ["--samples", "2", "--seq-len", "16"]
    assert run("quantize", model, "-o", tmp_path / "out", *few).code == 0


def test_a_place_by_way_of_a_folder_that_is_missing(
    run: Run, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = run("quantize", llama, "-o", "./missing/../x", "--method", "rtn", "--bits", "4")
    assert ran.code == 0, ran.err
    assert run("verify", tmp_path / "x").code == 0


def test_a_place_that_leads_in_a_circle(run: Run, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    refused(
        run("quantize", llama, "-o", tmp_path / "circle" / "x", "--method", "rtn", "--bits", "4"), "circle"
    )


@pytest.mark.parametrize("size", ["0", "-2", "1048577", "2147483648", "99999999999999999999"])
@pytest.mark.parametrize("method", ["rtn", "gptq", "smoothquant", "two-four-sixteen"])
def test_group_sizes_beyond_any_row(run: Run, llama: Path, tmp_path: Path, method: str, size: str) -> None:
    ran = run("quantize", llama, "-o", tmp_path / "out", "--method", method, "--group-size", size)
    assert ran.code == 2 and "Traceback" not in ran.err
    assert list(tmp_path.iterdir()) == []


def test_groups_of_more_than_all_columns_take_no_memory(run: Run, llama: Path, tmp_path: Path) -> None:
    """Padded in full, a matrix of 264 rows would take 1.1 GB for its codes alone."""
    for method in ("rtn", "gptq"):
        out = tmp_path / method
        quantize = ["quantize", llama, "-o", out, "--method", method, "--bits", "4", "--clip"]
        assert run(*quantize, "--group-size", 2**20, "--samples", "2", "--seq-len", "16").code == 0
        assert run("generate", out, "-p", "a", "--max-new-tokens", "1").code == 0


def test_columns_that_point_outside(run: Run, llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    anybit.quantize(llama, out, builders.options("atom", samples=2, seq_len=16, outlier_channels=8))
    shard = out / "model-00002-of-00003.safetensors"
    tensors = load_file(shard)
    name = next(n for n in tensors if n.endswith("0.cols"))
    for channel in (-1, 80, 2**31 - 1):
        tensors[name][0] = channel
        save_file(tensors, shard, metadata={"format": "pt"})
        refused(run("inspect", out), "cols points outside 0..")


@pytest.mark.parametrize(("family", "key"), [("gptj", "n_positions"), ("mpt", "max_seq_len")])
def test_windows_without_end(run: Run, tmp_path: Path, family: str, key: str) -> None:
    """GPT-J computes a table of all its positions, and MPT one for each head."""
    model = builders.save_random(builders.config_with_tables(family), tmp_path / "model")
    builders.byte_tokenizer().save_pretrained(model)
    out = tmp_path / "out"
    short = ["--seq-len", "32", "--max-tokens", "64"]
    quantize = ["quantize", model, "-o", out, "--bits", "3", "--samples", "2", "--seq-len", "16"]
    assert run("eval", model, *short).code == run(*quantize, "--method", "gptq").code == 0
    assert run("eval", out, *short).code == 0
    for folder in (model, out):
        edit(folder / "config.json", lambda c: c.update({key: 2**31 - 1}))
    (out / "anybit.index.json").unlink()
    for command in (
        ["eval", model, *short],
        ["eval", out, *short],
        ["verify", out],
        [*quantize, "--dry-run"],
    ):
        refused(run(*command), f"{key} is 2147483647")


def test_tables_that_outgrow_the_files(run: Run, tmp_path: Path) -> None:
    model = builders.save_random(builders.config_with_tables("gptj"), tmp_path / "model")
    builders.byte_tokenizer().save_pretrained(model)
    edit(model / "config.json", lambda c: c.update(n_positions=2**24, rotary_dim=2**16))
    for command in (["eval", model], ["quantize", model, "-o", tmp_path / "out", "--dry-run"]):
        refused(run(*command), "tables of 4398046511104 bytes, such as transformer.")


def test_windows_beyond_what_a_model_has_places_for(run: Run, tmp_path: Path) -> None:
    """MPT says how many by another name than most."""
    model = builders.save_random(builders.config_with_tables("mpt"), tmp_path / "model")
    builders.byte_tokenizer().save_pretrained(model)
    long = ["quantize", model, "-o", tmp_path / "out", "--method", "gptq", "--seq-len", "2048"]
    refused(run(*long), "--seq-len 2048 is beyond the model's 128 positions")
    refused(run("generate", model, "-p", "x" * 200), "the model's context holds 128: shorten it")


def test_a_matrix_that_outgrows_the_files(run: Run, model_copy: MakeModel) -> None:
    """Each of its sizes may be that of a vector in the files."""
    model = model_copy("llama")
    edit(model / "config.json", lambda c: c.update(hidden_size=48_000))
    for command in (
        ["eval", model],
        ["generate", model, "-p", "x"],
        ["quantize", model, "-o", "out", "--dry-run"],
    ):
        refused(run(*command), "weights, but the files hold only")


def test_a_model_that_does_not_run(run: Run, tmp_path: Path) -> None:
    """What its code raises is no defect of ours."""
    model = builders.save_random(builders.config_with_tables("gptj"), tmp_path / "model")
    builders.byte_tokenizer().save_pretrained(model)
    edit(model / "config.json", lambda c: c.update(rotary_dim=64))
    refused(
        run("generate", model, "-p", "x", "--max-new-tokens", "2"), "the model does not run (RuntimeError: "
    )


def test_a_decoder_that_says_it_has_an_encoder(run: Run, model_copy: MakeModel) -> None:
    model = model_copy("llama")
    edit(model / "config.json", lambda c: c.update(is_encoder_decoder=True))
    refused(run("generate", model, "-p", "x"), "is_encoder_decoder")


OWNED = "\x1b]0;owned\x07"  # would name the terminal's window


def test_what_an_artifact_says_steers_no_terminal(run: Run, copied: Path) -> None:
    stated = {"source": OWNED, "samples": 1, "seq_len": "\x9b2J"}
    edit(copied / "config.json", lambda c: c["quantization_config"].update(method=OWNED, calibration=stated))
    ran = run("inspect", copied)
    assert ran.code == 0 and ran.out.count(r"\x1b]0;owned\x07") == 2 and r"\x9b2J" in ran.out
    assert all(line.isprintable() for line in ran.out.splitlines())


def test_names_of_tensors_steer_no_terminal(
    run: Run, model_copy: MakeModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a tensor without a place Transformers would log the name as it is, and a run says it."""
    model = model_copy("llama")
    tensors = load_file(model / "model.safetensors")
    save_file(
        tensors | {OWNED: tensors["model.norm.weight"].clone()}, model / "model.safetensors", {"format": "pt"}
    )
    ran = run("eval", model, "--seq-len", "32", "--max-tokens", "64")
    refused(ran, r"\x1b]0;owned")
    assert "\x1b]0;" not in ran.err and not [r for r in caplog.records if OWNED in r.getMessage()]
    tensors = {
        f"mtp.{OWNED}" if name == OWNED else name: t
        for name, t in load_file(model / "model.safetensors").items()
    }
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    ran = run("quantize", model, "-o", tmp_path / "out", "--method", "rtn", "--bits", "4")
    assert ran.code == 0 and r"mtp.\x1b]0;owned" in ran.err and "\x1b]0;" not in ran.err + ran.out


def test_a_prompt_that_does_not_fit_is_not_echoed(run: Run, copied: Path) -> None:
    ran = run("generate", copied, "-p", "x" * 200)
    refused(ran, "the prompt has 200 tokens, the model's context holds 128")
    assert ran.out == ""


def test_a_shorter_model_than_the_files_hold(run: Run, model_copy: MakeModel, tmp_path: Path) -> None:
    model = model_copy("llama")
    for layers, words in ((1, "model.layers.1."), (-1, "num_hidden_layers is -1")):
        edit(model / "config.json", lambda c, layers=layers: c.update(num_hidden_layers=layers))
        refused(run("eval", model), words)
        refused(run("quantize", model, "-o", tmp_path / "out", "--dry-run"), words)
