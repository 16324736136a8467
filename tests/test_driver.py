"""The driver: stored bytes against oracles."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from anybit import driver, estimate, methods, plan, prepare
from anybit.artifact.sizes import inspect
from anybit.artifact.verify import verify
from anybit.calibration.moments import Activations, Collector
from anybit.calibration.texts import CalibrationSet
from anybit.config import TileSpec
from anybit.errors import InputError
from anybit.evaluation.measure import evaluate
from anybit.fingerprint import fingerprint, statistics_key
from anybit.formats.weight import pack
from anybit.methods import gptq, rtn
from tests import builders
from tests.probes import Recorder, digests, stop_at, stored

GPTQ = builders.options("gptq", bits=3, group_size=32, samples=5, seq_len=40)
RTN = builders.options("rtn", bits=4, group_size=32)


@pytest.mark.parametrize("options", ["gptq", {"bits": 4}, {}, methods.METHODS["gptq"].options])
def test_options_that_are_none(tmp_path: Path, options: Any) -> None:
    with pytest.raises(InputError, match=r"expected options such as anybit\.GPTQ\(bits=4\)"):
        driver.quantize("nowhere", tmp_path / "out", options)


# ---- what is stored


def test_rtn_stores_the_packed_rounding_of_every_matrix(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    driver.quantize(model_dir("llama"), tmp_path / "out", RTN)
    found, base = stored(tmp_path / "out"), load_file(model_dir("llama") / "model.safetensors")
    for name, weight in base.items():
        if ".layers." in name and weight.ndim == 2:
            layer = name.removesuffix(".weight")
            for field, tensor in pack(rtn.quantize(weight, None, builders.spec_of(RTN))).tensors.items():
                assert torch.equal(found.pop(f"{layer}.{field}"), tensor), layer
        else:
            kept = found.pop(name)
            assert kept.dtype == (torch.float16 if weight.ndim == 2 else weight.dtype), name
            assert torch.equal(kept, weight.to(kept.dtype)), name
    assert not found, "nothing else is stored"


def test_conv1d_is_stored_as_out_by_in(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    driver.quantize(model_dir("gpt2"), tmp_path / "out", RTN)
    found, base = stored(tmp_path / "out"), load_file(model_dir("gpt2") / "model.safetensors")
    name = "transformer.h.1.mlp.c_fc"
    weight = base[f"{name}.weight"]  # [in, out] in GPT-2
    assert weight.shape == (48, 192)
    for field, tensor in pack(
        rtn.quantize(weight.T.contiguous(), None, builders.spec_of(RTN))
    ).tensors.items():
        assert torch.equal(found[f"{name}.{field}"], tensor)
    assert torch.equal(found[f"{name}.bias"], base[f"{name}.bias"])


@pytest.mark.slow
@pytest.mark.parametrize("one_shot", [False, True])
def test_gptq_sees_the_inputs_it_should(
    model_dir: Callable[[str], Path],
    text_file: Path,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    one_shot: bool,
) -> None:
    """Statistics against the whole model in Transformers: as it was, or with all earlier blocks quantized."""
    monkeypatch.setattr(prepare, "compute_dtype", lambda device: torch.float32)
    config = builders.options("gptq", bits=3, group_size=32, samples=5, seq_len=40, one_shot=one_shot)
    driver.quantize(model_dir("llama"), tmp_path / "out", config, calibration=str(text_file))
    found = stored(tmp_path / "out")
    tokens = prepare.calibration_set(tokenizer, str(text_file), 5, 40, 0).tokens
    model = AutoModelForCausalLM.from_pretrained(model_dir("llama"), dtype=torch.float32)
    # the artifact keeps the embedding in float16, calibration reads the checkpoint
    for block in model.model.layers:
        prefix = f"model.layers.{block.self_attn.layer_idx}."
        linears = {prefix + n: m for n, m in block.named_modules() if isinstance(m, torch.nn.Linear)}
        with torch.no_grad(), Collector(linears, True, config.attention_weights) as collector:
            for row in tokens:
                model(row[None])
                collector.finish_forward()
        for name, module in linears.items():
            weight = gptq.quantize(
                module.weight.detach().clone(), collector.stats[name], builders.spec_of(config)
            )
            codes = pack(weight).tensors["codes"]
            agreement = (found[f"{name}.codes"] == codes).float().mean()
            assert agreement > 0.99, (name, agreement)
            if not one_shot:
                module.weight.data = weight.dequantize()
    other = builders.changed(config, one_shot=not one_shot)  # another result: this test can tell them apart
    driver.quantize(model_dir("llama"), tmp_path / "other", other, calibration=str(text_file))
    made, names = stored(tmp_path / "other"), [f"{name}.codes" for name in linears]
    assert min((made[n] == found[n]).float().mean() for n in names) < 0.99


def test_same_input_same_bytes_wherever_it_lies(
    model_dir: Callable[[str], Path], model_copy: Callable[[str], Path], text_file: Path, tmp_path: Path
) -> None:
    moved = model_copy("llama")
    moved = moved.rename(tmp_path / "llama")
    (tmp_path / "words.txt").write_bytes(text_file.read_bytes())
    driver.quantize(model_dir("llama"), tmp_path / "a", GPTQ, calibration=str(text_file))
    driver.quantize(moved, tmp_path / "b", GPTQ, calibration=str(tmp_path / "words.txt"))
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_base_dtype_is_kept(model_copy: Callable[[str], Path], tmp_path: Path) -> None:
    """Calibration may compute in bfloat16; the artifact says what the base says."""
    model = model_copy("llama")
    driver.quantize(model, tmp_path / "out", RTN)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.float32
    AutoModelForCausalLM.from_pretrained(model).to(torch.bfloat16).save_pretrained(model)
    driver.quantize(model, tmp_path / "half", RTN)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16
    assert stored(tmp_path / "half")["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_values_beyond_float16_are_kept_in_bfloat16(
    model_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    model = model_copy("llama")
    loaded = AutoModelForCausalLM.from_pretrained(model)
    loaded.model.embed_tokens.weight.data[3, 4] = 1e5
    loaded.save_pretrained(model)
    driver.quantize(model, tmp_path / "out", RTN)
    kept = stored(tmp_path / "out")["model.embed_tokens.weight"]
    assert kept.dtype == torch.bfloat16 and float(kept[3, 4]) == pytest.approx(1e5, rel=0.01)
    verify(tmp_path / "out")


def test_include_and_exclude(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    config = builders.options("rtn", include=("*.mlp.*",), exclude=("*layers.1*", "*down_proj"))
    driver.quantize(model_dir("llama"), tmp_path / "out", config)
    names = {layer["name"] for layer in inspect(tmp_path / "out")["layers"] if layer["bits"] == 4}
    assert names == {"model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"}
    assert stored(tmp_path / "out")["model.layers.1.mlp.up_proj.weight"].dtype == torch.float16


def test_blocks_without_layers_to_quantize(
    model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path
) -> None:
    config = builders.changed(GPTQ, include=("*layers.1.mlp*",))
    driver.quantize(model_dir("llama"), tmp_path / "out", config, calibration=str(text_file))
    assert {layer["name"] for layer in inspect(tmp_path / "out")["layers"] if layer["bits"] == 3} == {
        f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")
    }


def test_spec_map_overrides_the_config(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj"
    spec_map = {name: replace(builders.spec_of(RTN), tiles=(TileSpec(8, 20),))}
    driver.quantize(model_dir("llama"), tmp_path / "out", RTN, spec_map=spec_map)
    bits = {layer["name"]: layer["bits"] for layer in inspect(tmp_path / "out")["layers"]}
    assert bits.pop(name) == 8 and set(bits.values()) == {4}


def test_specs_of_another_method_are_refused(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    spec_map = {"model.layers.1.mlp.down_proj": builders.spec_of(GPTQ)}
    with pytest.raises(InputError, match=r"down_proj: its options are of gptq, and the method is rtn"):
        driver.quantize(model_dir("llama"), tmp_path / "out", RTN, spec_map=spec_map)


@pytest.mark.parametrize("budget", [{"size": "1MB"}, {"bpw": 5.0}])
def test_a_map_and_a_budget_contradict(
    model_dir: Callable[[str], Path], tmp_path: Path, budget: dict[str, Any]
) -> None:
    """The width that fits is found without the map: with it, the artifact would be larger."""
    specs = {"model.layers.0.mlp.up_proj": builders.layer_spec(8, 32)}
    with pytest.raises(InputError, match="give it without bpw and size"):
        driver.quantize(
            model_dir("llama"), tmp_path / "out", methods.options("rtn", **budget), spec_map=specs
        )


@pytest.mark.parametrize(("value", "words"), [(torch.nan, "NaN"), (-torch.inf, "Inf"), (1e6, "float16")])
@pytest.mark.parametrize("config", [RTN, GPTQ])
def test_unusable_weights_are_named_before_any_work(
    model_copy: Callable[[str], Path],
    tmp_path: Path,
    text_file: Path,
    config: builders.Options,
    value: float,
    words: str,
) -> None:
    model = model_copy("llama")
    loaded = AutoModelForCausalLM.from_pretrained(model)
    loaded.model.layers[1].mlp.up_proj.weight.data[0, 0] = value
    loaded.save_pretrained(model)
    with pytest.raises(InputError, match=rf"layers\.1\.mlp\.up_proj.*{words}"):
        driver.quantize(model, tmp_path / "out", config, calibration=str(text_file))
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


@pytest.mark.slow
def test_clip_is_recorded_as_it_was_resolved(
    model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path
) -> None:
    for clip, given in ((None, ""), (True, ""), (False, "--no-clip")):
        out, config = tmp_path / str(clip), builders.changed(GPTQ, clip=clip)
        driver.quantize(model_dir("llama"), out, config, calibration=str(text_file))
        assert inspect(out)["options"]["clip"] is (clip is not False)
        card = (out / "README.md").read_text()
        assert ("clip" in card) == bool(given) and given in card and "--spec" not in card
    assert digests(tmp_path / "None") == digests(tmp_path / "True")
    driver.quantize(model_dir("llama"), tmp_path / "rtn", RTN)
    assert inspect(tmp_path / "rtn")["options"]["clip"] is False
    assert "clip" not in (tmp_path / "rtn" / "README.md").read_text()


def test_hidden_states_spill_beside_the_artifact(
    model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the artifact's own folder, a file system that keeps their name would publish them."""
    folders = []

    class Watched(Activations):
        def __init__(self, samples: int, directory: Path, device: torch.device) -> None:
            folders.append(directory)
            super().__init__(samples, directory, budget=0, device=device)

    monkeypatch.setattr(driver, "Activations", Watched)
    driver.quantize(model_dir("llama"), tmp_path / "out", GPTQ, calibration=str(text_file))
    assert folders == [tmp_path / "out.partial"]
    assert not folders[0].exists()


@pytest.mark.slow
def test_other_tokens_or_libraries_are_another_run(
    model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same text can become other tokens: another tokenizer beside the same weights."""

    def run(tokens: int) -> None:
        original = prepare.calibration_set

        def shifted(*arguments: Any) -> Any:
            text = original(*arguments)
            return replace(text, tokens=(text.tokens + tokens) % 200)

        monkeypatch.setattr(prepare, "calibration_set", shifted)
        driver.quantize(model_dir("llama"), tmp_path / "out", GPTQ, calibration=str(text_file))

    stop_at(monkeypatch, 3)
    with pytest.raises(InputError, match="disk is full"):
        run(0)
    monkeypatch.undo()
    with pytest.raises(InputError, match="unfinished run with another model, text"):
        run(1)
    monkeypatch.undo()
    monkeypatch.setattr("anybit.fingerprint.transformers.__version__", "0")
    with pytest.raises(InputError, match="unfinished run with another model, text"):
        run(0)
    monkeypatch.undo()
    run(0)
    assert (tmp_path / "out").exists()


def test_statistics_are_of_windows_as_they_are_cut(model_dir: Callable[[str], Path]) -> None:
    """The same tokens in windows of another length are no windows to take gradients over from."""
    streamed, options = builders.opened(model_dir("llama")), builders.options("squeezellm")
    planned = plan.make_plan(streamed, options)
    keys = {
        statistics_key(
            "base", options, planned, planned.layouts, CalibrationSet(tokens, "", "", 4, 0), streamed
        )
        for tokens in (torch.arange(48).reshape(2, 24), torch.arange(48).reshape(4, 12))
    }
    assert len(keys) == 2


def test_another_processor_is_another_run(
    model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that run the same kernels may still multiply and sum differently."""
    streamed, options = builders.opened(model_dir("llama")), builders.options("rtn")

    def mark() -> str:
        return fingerprint("base", options, plan.make_plan(streamed, options), None, streamed)

    here = mark()
    assert mark() == here
    for name, value in (
        ("fingerprint.processor", lambda: "another"),
        ("fingerprint.torch.backends.cpu.get_cpu_capability", lambda: "another"),
        ("kernels.cpu.cpu_features", lambda: {"another": True}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"anybit.{name}", value)
            assert mark() != here


def test_statistics_that_are_gathered_again_are_not_called_whole(
    model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = builders.options("squeezellm", samples=2, seq_len=12, include=("*.0.self_attn.k_proj",))

    def run(name: str) -> None:
        shared = {"calibration": str(text_file), "statistics": tmp_path / "shared"}
        driver.quantize(model_dir("llama"), tmp_path / name, options, **shared)

    def stopped(*arguments: Any, **more: Any) -> None:
        raise InputError("stopped")

    run("first")
    ((file, whole),) = [(f, f.with_name("complete")) for f in tmp_path.rglob("fisher-0.bin")]
    assert whole.exists()
    file.write_bytes(b"short")
    monkeypatch.setattr(driver, "gradient_statistics", stopped)
    with pytest.raises(InputError, match="stopped"):
        run("second")
    assert not whole.exists()
    monkeypatch.undo()
    run("second")
    assert whole.exists() and digests(tmp_path / "first") == digests(tmp_path / "second")


def test_all_zero_channels_work(model_copy: Callable[[str], Path], text_file: Path, tmp_path: Path) -> None:
    model = model_copy("llama")
    loaded = AutoModelForCausalLM.from_pretrained(model)
    loaded.model.layers[0].input_layernorm.weight.data[:7] = 0  # dead inputs
    loaded.model.layers[0].mlp.up_proj.weight.data[3] = 0  # dead row
    loaded.save_pretrained(model)
    driver.quantize(model, tmp_path / "out", GPTQ, calibration=str(text_file))
    result = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.isfinite(result(torch.tensor([[5, 6, 7]])).logits).all()


# ---- progress


@pytest.mark.slow
@pytest.mark.parametrize("config", [GPTQ, builders.changed(GPTQ, one_shot=True), RTN])
@pytest.mark.parametrize("resumed", [False, True])
def test_bars_end_at_their_end(
    model_dir: Callable[[str], Path],
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: builders.Options,
    resumed: bool,
) -> None:
    out = tmp_path / "out"
    if resumed:
        stop_at(monkeypatch, 3)
        with pytest.raises(InputError, match="disk is full"):
            driver.quantize(model_dir("llama"), out, config, calibration=str(text_file))
        monkeypatch.undo()
    report = Recorder()
    result = driver.quantize(model_dir("llama"), out, config, calibration=str(text_file), report=report)
    assert result.resumed_shards == (2 if resumed else 0)
    assert any("resumes: 2 of 3" in text for text in report.said) == resumed
    assert any("quantizes 14 linear layers" in text for text in report.said)
    for description, (done, total) in report.done.items():
        assert done == total, description


# ---- a full disk


def test_too_small_a_disk_is_refused_before_work(
    model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=50_000)
    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda path: free)
    with pytest.raises(InputError, match=r"0 MB free.*make room"):
        driver.quantize(model_dir("llama"), tmp_path / "out", RTN)
    assert list(tmp_path.iterdir()) == []


def test_finished_shards_need_no_room_again(
    model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(monkeypatch, 3)
    with pytest.raises(InputError, match="2 of 3 shards are kept"):
        driver.quantize(model_dir("llama"), tmp_path / "out", RTN)
    monkeypatch.undo()
    free = shutil.disk_usage(tmp_path)._replace(free=40_000)  # for the last shard, not for all three
    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda path: free)
    with pytest.raises(InputError, match="make room"):
        driver.quantize(model_dir("llama"), tmp_path / "elsewhere", RTN)
    assert driver.quantize(model_dir("llama"), tmp_path / "out", RTN).resumed_shards == 2


def test_settings_that_there_are_not_are_refused(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    for call in (
        lambda: driver.quantize(model_dir("llama"), tmp_path / "out", RTN, overwite=True),  # type: ignore[call-arg]
        lambda: evaluate(model_dir("llama"), txt="my.txt"),  # type: ignore[call-arg]
    ):
        with pytest.raises(
            TypeError, match=r"unexpected keyword argument '(overwite|txt)': expected some of"
        ):
            call()
    assert not list(tmp_path.iterdir())


METHODS = {
    "rtn": ["--method", "rtn", "--embed-bits", "8"],
    "gptq": ["--method", "gptq"],
    "gptq one-shot": ["--method", "gptq", "--one-shot", "--desc-act"],
    "any-precision": ["--method", "any-precision", "--widths", "3,5"],
    "cmpq": ["--method", "cmpq", "--bits", "2.5"],
    "mixllm": ["--method", "mixllm", "--wide-rows", "0.2"],
    "atom": ["--method", "atom", "--scaling", "smoothquant", "--outlier-channels", "8", "--act-search"],
}


@pytest.fixture(scope="module")
def arguments(model_dir: Callable[[str], Path], text_file: Path) -> Callable[[Path, str], list[str]]:
    def make(out: Path, method: str) -> list[str]:
        text = ["--samples", "6", "--seq-len", "64", "--calibration", str(text_file)]
        group = ["--group-size", "32"] if method.startswith(("rtn", "gptq", "mixllm", "atom")) else []
        options = ["--threads", "1", *group, *([] if method == "rtn" else text)]
        return [str(model_dir("llama")), "-o", str(out), *METHODS[method], *options]

    return make
