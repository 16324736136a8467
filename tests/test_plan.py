"""What a run is predicted to store, and plans that cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from anybit import estimate as estimate_module
from anybit import prepare as prepare_module
from anybit.artifact.contents import Plan
from anybit.calibration.gradients import LOGIT_CHUNK
from anybit.calibration.streaming import StreamedModel
from anybit.checkpoint.directory import open_checkpoint
from anybit.config import LayerSpec, TileSpec
from anybit.errors import InputError
from anybit.estimate import check_disk, estimate
from anybit.formats.dtypes import Dtype
from anybit.kernels import cpu
from anybit.kernels.dispatch import compute_dtype
from anybit.plan import make_plan, stored_dtype, widths_for_memory
from tests import builders
from tests.builders import MakeModel, opened
from tests.probes import Recorder

DEFAULT = builders.layer_spec(3, 64, clip=True)


def check_complete(streamed: StreamedModel, made: Plan) -> None:
    """Every tensor of the model is stored exactly once, quantized or as it is."""
    quantized = {f"{name}.weight" for name in [*made.layouts, *made.embeddings]}
    assert quantized.isdisjoint(made.kept) and quantized | made.kept.keys() == streamed.names.keys()
    assert made.specs.keys() == made.layouts.keys()


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt2", "opt", "gemma3"])
@pytest.mark.parametrize("embed_bits", [16, 8, 4])
def test_a_plan_accounts_for_every_tensor(model_dir: MakeModel, family: str, embed_bits: int) -> None:
    streamed = opened(model_dir(family))
    made = make_plan(streamed, builders.options("gptq", group_size=16, embed_bits=embed_bits))
    check_complete(streamed, made)
    stored = load_file(model_dir(family) / "model.safetensors")
    assert made.model_weights == sum(t.numel() for t in stored.values())
    shapes = streamed.all_linears()
    assert made.linear_weights == sum(a * b for a, b in shapes.values())
    assert {n: layout.shape for n, layout in made.layouts.items()} == shapes
    layouts = [*made.layouts.values(), *made.embeddings.values()]
    tensors = [field for layout in layouts for field in layout.stored_tensors().values()] + list(
        made.kept.values()
    )
    assert made.tensor_bytes == sum(torch.empty(shape, dtype=dtype.torch).nbytes for dtype, shape in tensors)
    assert made.size_bytes > made.tensor_bytes
    assert made.code_bits == 4 and 4 < made.bits_per_weight < 8


def test_embedding_and_head_are_stored_once(model_dir: MakeModel) -> None:
    both = make_plan(opened(model_dir("llama")), builders.options("gptq", embed_bits=8)).embeddings
    assert set(both) == {"model.embed_tokens", "lm_head"} and not any(e.tied for e in both.values())
    tied = make_plan(opened(model_dir("llama-tied")), builders.options("gptq", embed_bits=4)).embeddings
    assert set(tied) == {"model.embed_tokens"} and tied["model.embed_tokens"].tied
    (tile,) = tied["model.embed_tokens"].tiles
    assert tile.to_json() == {"format": "group_int", "bits": 4, "group_size": 128, "symmetric": False}
    assert make_plan(opened(model_dir("llama")), builders.options("gptq")).embeddings == {}


def test_matrices_take_sixteen_bits_and_vectors_stay() -> None:
    assert stored_dtype(Dtype.F32, (4, 4)) is stored_dtype(Dtype.F64, (4, 4)) is Dtype.F16
    assert stored_dtype(Dtype.BF16, (4, 4)) is Dtype.BF16
    assert stored_dtype(Dtype.F32, (4,)) is Dtype.F32
    assert stored_dtype(Dtype.I64, (4, 4)) is Dtype.I64


def test_a_map_changes_the_layers_it_names(model_dir: MakeModel) -> None:
    streamed, name = opened(model_dir("llama")), "model.layers.1.mlp.up_proj"
    made = make_plan(
        streamed, builders.options("gptq", group_size=16), {name: builders.layer_spec(8, 48, symmetric=True)}
    )
    widths = {n: layout.tiles[0].bits for n, layout in made.layouts.items()}
    assert widths == {n: 8 if n == name else 4 for n in streamed.all_linears()}
    sizes = {n: a * b for n, (a, b) in streamed.all_linears().items()}
    assert made.code_bits == pytest.approx(4 + 4 * sizes[name] / sum(sizes.values()))


def test_include_and_exclude_leave_layers_as_they_are(model_dir: MakeModel) -> None:
    streamed = opened(model_dir("llama"))
    config = builders.options("gptq", include=("*.mlp.*",), exclude=("*.0.mlp.down_proj",))
    made = make_plan(streamed, config)
    check_complete(streamed, made)
    assert len(made.layouts) == 5 and "model.layers.0.mlp.down_proj.weight" in made.kept
    whole = make_plan(streamed, builders.options("gptq"))
    assert "quantizes 14 linear layers" in whole.coverage()
    share = 100 * whole.linear_weights / whole.model_weights
    assert f"{share:.1f} % of all" in whole.coverage() and "quantizes 5 linear layers" in made.coverage()
    assert "embedding and head" in make_plan(streamed, builders.options("gptq", embed_bits=8)).coverage()


@pytest.mark.parametrize(
    ("config", "spec_map", "words"),
    [
        (
            builders.options("gptq"),
            {"model.layers.9.mlp.up_proj": DEFAULT},
            ["layers.9", "model.layers.0.self_attn.q_proj"],
        ),
        (builders.options("gptq"), {"lm_head": DEFAULT}, ["'lm_head'"]),
        (builders.options("gptq", exclude=("*",)), {}, ["--exclude", "`anybit plan MODEL -o map"]),
        (
            builders.options("gptq", include=("*.mlp.*", "nothing")),
            {},
            ["--include 'nothing'", "model.layers.0.self_attn.q_proj"],
        ),
        (builders.options("rtn", exclude=("*.9.*",)), {}, ["--exclude '*.9.*'", "layers.1.", "-o map"]),
        (
            builders.options("gptq"),
            {"model.layers.0.mlp.up_proj": builders.layer_spec(1)},
            ["layers.0.mlp.up_proj", "1-bit"],
        ),
        (
            builders.options("rtn"),
            {
                "model.layers.0.mlp.up_proj": LayerSpec(
                    builders.options("rtn", clip_ratio=0.5), (TileSpec(8),)
                )
            },
            ["layers.0.mlp.up_proj", "clip_ratio 0.5 would be ignored"],
        ),
    ],
)
def test_plans_that_cannot_be_are_refused(
    model_dir: MakeModel, config: builders.Options, spec_map: dict[str, builders.LayerSpec], words: list[str]
) -> None:
    with pytest.raises(InputError) as error:
        make_plan(opened(model_dir("llama")), config, spec_map)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("method", ["anybit", "squeezellm", "any-precision", "cmpq"])
def test_a_missing_native_extension_is_said_before_any_work(
    model_dir: MakeModel, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(cpu, "_native", None)
    streamed = opened(model_dir("llama"))
    with pytest.raises(InputError, match=f"{method} needs the native extension"):
        make_plan(streamed, builders.options(method))
    make_plan(streamed, builders.options("gptq"))
    streamed.device = torch.device("cuda")
    if method == "anybit":
        with pytest.raises(InputError, match="coding planes"):
            make_plan(streamed, builders.options(method))
        make_plan(streamed, builders.options(method, coded=False))
    else:
        make_plan(streamed, builders.options(method))


def test_an_estimate_grows_with_the_work(model_dir: MakeModel, tmp_path: Path) -> None:
    streamed = opened(model_dir("llama"))
    small, large = builders.options("rtn"), builders.options("gptq", samples=10**6)
    few, many = (estimate(streamed, make_plan(streamed, c), c, tmp_path / "a" / "b") for c in (small, large))
    for figures, config in ((few, small), (many, large)):
        assert figures["size_bytes"] == make_plan(streamed, config).size_bytes
    assert 0 < few["seconds"] < many["seconds"] and 0 < few["peak_memory_bytes"] < many["peak_memory_bytes"]
    assert few["free_disk_bytes"] > 0 and few["bits"] == 4 and few["bits_per_weight"] > 4
    json.dumps(few)


def test_an_estimate_follows_the_effort(model_dir: MakeModel, tmp_path: Path) -> None:
    streamed, seconds = opened(model_dir("llama")), []
    for effort in ("quick", "normal", "best"):
        config = builders.options("anybit", effort=effort)
        made = make_plan(streamed, config)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(estimate_module, "_matmul_speed", lambda dtype: (1e9, 1.0))
            idle = estimate(streamed, made, config, tmp_path)
            patch.setattr(estimate_module, "_matmul_speed", lambda dtype: (1e9, 0.25))
            busy = estimate(streamed, made, config, tmp_path)
        assert busy["seconds"] == idle["seconds"] and busy["processor_share"] == 0.25
        seconds.append(idle["seconds"])
    assert seconds[0] < 0.7 * seconds[1] < 0.7 * 0.7 * seconds[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_the_model_are_timed_in_its_own_numbers(
    model_dir: MakeModel, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    rates = {torch.float32: 1e9, torch.bfloat16: 4e9}
    monkeypatch.setattr(estimate_module, "_matmul_speed", lambda dtype: (rates[dtype], 0.5))
    streamed = StreamedModel(open_checkpoint(model_dir("llama")), dtype)
    assert estimate_module._speeds(streamed) == (estimate_module.Speeds(rates[dtype], 1e9), 0.5)


def test_speed_is_that_of_the_time_that_a_process_gets() -> None:
    speed, share = estimate_module._matmul_speed(torch.float32)
    assert 1e8 < speed < 1e14 and 0 < share <= 1


def test_a_disk_too_small_is_refused(
    model_dir: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_plan(opened(model_dir("llama")), builders.options("gptq"))
    monkeypatch.setattr(
        estimate_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=made.size_bytes - 1)
    )
    with pytest.raises(InputError, match="MB free"):
        check_disk(made, tmp_path / "not" / "there" / "yet")
    check_disk(made, tmp_path, done_bytes=1)


def test_texts_of_the_models_own_take_time_and_memory(
    model_dir: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys, values and logits of 96 texts of 256 tokens, written side by side, beside what is there without."""
    monkeypatch.setattr(estimate_module, "_matmul_speed", lambda dtype: (1e9, 1.0))
    streamed = opened(model_dir("llama"))
    without, some = (
        estimate(streamed, make_plan(streamed, c), c, tmp_path)
        for c in (
            builders.options("anybit", samples=64, seq_len=1024, own_texts=share) for share in (0, 0.25)
        )
    )
    config = streamed.model.config
    head_dim = config.hidden_size // config.num_attention_heads
    of_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * streamed.dtype.itemsize
    logits = 3 * 4 * LOGIT_CHUNK * config.vocab_size
    more = some["peak_memory_bytes"] - without["peak_memory_bytes"]
    drawn = 96 * config.vocab_size * (streamed.dtype.itemsize + 4 + 8)
    assert more == 96 * 256 * of_token + drawn - logits > 0
    assert some["seconds"] > without["seconds"]


@pytest.mark.parametrize("method", ["rtn", "awq", "smoothquant", "gptq", "atom", "llm-mq", "mixllm"])
def test_the_search_for_scales_takes_time(
    model_dir: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """21 candidates, each multiplied with the second moments: 42 out in^2 operations, unless a sample judges."""
    monkeypatch.setattr(estimate_module, "_matmul_speed", lambda dtype: (1e6, 1.0))
    streamed = opened(model_dir("llama"))
    of_itself = method in ("awq", "smoothquant")
    plain = builders.options("rtn" if of_itself else method, samples=2, seq_len=24)
    scaled = builders.options(method, samples=2, seq_len=24, **({} if of_itself else {"scaling": "awq"}))
    seconds = [
        estimate_module._seconds(streamed, make_plan(streamed, c), c, estimate_module.Speeds(1e6, 1e6))
        for c in (plain, scaled)
    ]
    judged = sum(a * b * (b if scaled.act_bits == 16 else 2 * 16) for a, b in streamed.all_linears().values())
    assert seconds[1] - seconds[0] > 42 * judged / 1e6


def test_fisher_information_is_counted_in_memory_and_on_disk(model_dir: MakeModel, tmp_path: Path) -> None:
    streamed, fisher = opened(model_dir("llama")), builders.options("squeezellm", samples=4, seq_len=24)
    made = make_plan(streamed, fisher)
    figures = estimate(streamed, made, fisher, tmp_path)
    assert figures["scratch_disk_bytes"] == 4 * made.quantized_weights
    without = replace(made, specs=make_plan(streamed, builders.options("rtn")).specs)
    mapped = figures["peak_memory_bytes"] - estimate_module.peak_memory(streamed, without, fisher)
    assert mapped >= 4 * made.quantized_weights


@pytest.mark.parametrize("finetune", [False, True])
def test_hidden_states_beyond_memory_are_counted_on_disk(
    model_dir: MakeModel, monkeypatch: pytest.MonkeyPatch, finetune: bool
) -> None:
    streamed = opened(model_dir("llama"))
    config = builders.options("two-four-sixteen", samples=6, seq_len=24, finetune=finetune)
    made, hidden = make_plan(streamed, config), 6 * 24 * 48 * 4
    assert estimate_module.scratch_bytes(streamed, made, config) == 0
    monkeypatch.setattr(estimate_module, "ACTIVATION_BUDGET", hidden - 1)
    assert estimate_module.scratch_bytes(streamed, made, config) == hidden * (2 if finetune else 1)


def test_what_fits_a_memory_budget(model_dir: MakeModel) -> None:
    streamed = opened(model_dir("llama"))
    rows = widths_for_memory(streamed, None, 16, False)
    assert len(rows) == 7 * 3 and all(row["fits"] for row in rows)
    sizes = {(row["bits"], row["embed_bits"]): row["size_bytes"] for row in rows}
    assert sizes[2, 4] == min(sizes.values()) and sizes[8, 4] < sizes[8, 8] < sizes[8, 16]
    limit = sizes[4, 8]
    limited = widths_for_memory(streamed, limit, 16, False)
    assert [row["fits"] for row in limited] == [row["size_bytes"] <= limit for row in rows]


@pytest.mark.parametrize(("method", "instead"), [("anybit", True), ("gptq", False)])
def test_too_little_memory_is_said_before_any_work(
    model_dir: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, instead: bool
) -> None:
    config, report = builders.options(method, samples=2, seq_len=24), Recorder()
    streamed = opened(model_dir("llama"), compute_dtype())
    needed = estimate_module.peak_memory(streamed, *reversed(prepare_module.plan_within(streamed, config)))
    for free, warned in ((needed, False), (needed - 1, True)):
        monkeypatch.setattr(prepare_module, "free_memory", lambda free=free: free)
        prepare_module.prepare(model_dir("llama"), tmp_path / "out", config, {"report": report})
        found = [text for text in report.said if text.startswith("warning: this run will take about")]
        assert bool(found) == warned
    assert ("--method gptq" in found[0]) == instead
