"""Block-by-block forwards against the whole Transformers model, and checkpoints that cannot work refused."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3Config,
    GPTNeoXConfig,
    MistralConfig,
    MixtralConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from anybit.calibration.streaming import StreamedModel, earlier_objects_frozen, run_block, selected
from anybit.errors import InputError
from anybit.plan import plan_within
from tests import builders
from tests.builders import MakeModel, opened, save_random, token_rows

VOCABULARY = 97
VISION = {
    "num_attention_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "image_size": 28,
    "patch_size": 14,
}
SIZES = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4}
COMMON = {"vocab_size": VOCABULARY, "initializer_range": 0.2, "max_position_embeddings": 64, **SIZES}


def more_configs() -> dict[str, PreTrainedConfig]:
    """Families that the suite's shared fixture does not have."""
    qwen2 = Qwen2Config(**COMMON, num_key_value_heads=2, tie_word_embeddings=False)
    sliding = {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    return {
        "qwen2": qwen2,
        "qwen2-sliding": Qwen2Config(**COMMON, num_key_value_heads=2, use_sliding_window=True, **sliding),
        "mistral": MistralConfig(**COMMON, num_key_value_heads=2, sliding_window=8),
        "phi": PhiConfig(**COMMON, partial_rotary_factor=0.5),
        "gpt-neox": GPTNeoXConfig(**COMMON, rotary_pct=0.5),
        "gemma2": Gemma2Config(
            **COMMON, num_key_value_heads=2, head_dim=8, sliding_window=8, query_pre_attn_scalar=8
        ),
    }


@torch.no_grad()
def streamed_logits(streamed: StreamedModel, tokens: Tensor) -> Tensor:
    """Logits [samples, length, vocabulary], one block in memory at a time, the head on top."""
    hidden: dict[int, Tensor] = {}
    calls = streamed.first_inputs(tokens, hidden.__setitem__)
    for i, call in enumerate(calls):
        with streamed.block(i) as block:
            for sample, state in hidden.items():
                hidden[sample] = run_block(block, state, call)
    for name, module in streamed.outside_modules().items():
        streamed.materialise(module, name)
    streamed.model.tie_weights()
    return torch.cat([_finish(streamed, tokens[sample], state) for sample, state in hidden.items()])


def _finish(streamed: StreamedModel, tokens: Tensor, state: Tensor) -> Tensor:
    """What the model makes of the last block's output: its blocks replaced by that."""
    for block in streamed.blocks:
        block.forward = lambda *args, **kwargs: state
    logits = streamed.model(input_ids=tokens[None], use_cache=False).logits
    for block in streamed.blocks:
        del block.forward
    return logits


def check_logits(folder: Path, length: int) -> None:
    tokens = token_rows(2, length)
    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        expected = whole(input_ids=tokens).logits
    made = streamed_logits(opened(folder), tokens)
    assert expected.std() > 0.01
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)


# ---- block by block is the whole


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3", "gemma3", "gpt2", "opt"])
def test_block_by_block_gives_the_logits_of_the_whole_model(model_dir: MakeModel, family: str) -> None:
    for length in (1, 40):  # gemma3's window is 16
        check_logits(model_dir(family), length)


def test_the_text_of_a_model_that_sees_images_too(tmp_path: Path) -> None:
    """Its vision tower has as many blocks as its text, and a buffer that only that tower fills."""
    text = {**COMMON, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8}
    vision = {**VISION, "num_hidden_layers": COMMON["num_hidden_layers"]}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    check_logits(save_random(config, tmp_path), 24)
    streamed = opened(tmp_path)
    assert "language_model" in streamed.block_prefix and streamed.uncalled == []


@pytest.mark.parametrize("family", more_configs())
def test_other_families_too(tmp_path: Path, family: str) -> None:
    check_logits(save_random(more_configs()[family], tmp_path), 24)


def test_gemma3_has_sliding_and_full_layers(tmp_path: Path) -> None:
    from transformers import Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        **COMMON, num_key_value_heads=1, head_dim=8, sliding_window=8, layer_types=kinds
    )
    folder = save_random(config, tmp_path)
    check_logits(folder, 30)
    calls = opened(folder).first_inputs(token_rows(1, 30), lambda i, hidden: None)
    assert len({id(c.kwargs["attention_mask"]) for c in calls}) == 2


def test_a_head_of_its_own_and_a_tied_one(model_dir: MakeModel) -> None:
    assert "lm_head.weight" in opened(model_dir("llama")).names
    assert "lm_head.weight" not in opened(model_dir("llama-tied")).names


def test_names_without_the_base_models_prefix_are_found(model_copy: MakeModel) -> None:
    """As in the original GPT-2 checkpoint."""
    folder = model_copy("gpt2")
    rewrite(folder, lambda tensors: {n.removeprefix("transformer."): t for n, t in tensors.items()})
    check_logits(folder, 9)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def test_weights_are_out_by_in_whichever_way_they_are_stored(model_dir: MakeModel) -> None:
    for family in ("llama", "gpt2"):
        streamed = opened(model_dir(family))
        whole = AutoModelForCausalLM.from_pretrained(model_dir(family), dtype=torch.float32)
        for name, shape in streamed.all_linears().items():
            weight, module = streamed.weight(name), whole.get_submodule(name)
            assert weight.dtype == torch.float32 and tuple(weight.shape) == shape and weight.is_contiguous()
            x = torch.randn(2, shape[1], generator=torch.Generator().manual_seed(0))
            bias = 0 if module.bias is None else module.bias
            torch.testing.assert_close(x @ weight.T + bias, module(x))
    layer = "transformer.h.0.mlp.c_fc"
    assert opened(model_dir("gpt2")).all_linears()[layer] == (192, 48)


def test_a_half_precision_checkpoint_computes_in_the_dtype_asked_for(model_copy: MakeModel) -> None:
    folder = model_copy("llama")
    rewrite(folder, lambda tensors: {n: t.bfloat16() for n, t in tensors.items()})
    streamed = opened(folder)
    assert streamed.weight("model.layers.0.mlp.up_proj").dtype == torch.float32
    with streamed.block(0) as block:
        assert {p.dtype for p in block.parameters()} == {torch.float32}
    states: list[Tensor] = []
    opened(folder, torch.bfloat16).first_inputs(token_rows(1, 4), lambda i, hidden: states.append(hidden))
    assert states[0].dtype == torch.bfloat16 and states[0].shape == (1, 4, 48)


# ---- memory


def devices(module: torch.nn.Module) -> set[str]:
    return {t.device.type for t in [*module.parameters(), *module.buffers()]}


@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "gemma3"])
def test_only_what_is_worked_on_is_in_memory(model_dir: MakeModel, family: str) -> None:
    streamed = opened(model_dir(family))
    assert devices(streamed.model) == {"meta"}
    with streamed.block(1) as block:
        assert devices(block) == {"cpu"}
        rest = [
            m for m in streamed.model.modules() if m not in set(block.modules()) and not list(m.children())
        ]
        assert set().union(*map(devices, rest)) == {"meta"}
    assert devices(streamed.model) == {"meta"}

    def keep(i: int, hidden: Tensor) -> None:
        assert set().union(*map(devices, streamed.blocks)) == {"meta"}

    streamed.first_inputs(token_rows(2, 5), keep)
    assert devices(streamed.model) == {"meta"}


def test_a_block_leaves_memory_after_an_error_too(model_dir: MakeModel) -> None:
    streamed = opened(model_dir("llama"))
    with pytest.raises(ZeroDivisionError), streamed.block(0):
        raise ZeroDivisionError
    assert devices(streamed.model) == {"meta"}


@pytest.mark.parametrize("family", ["gemma3", "opt"])
def test_the_global_random_numbers_are_left_alone(model_dir: MakeModel, family: str) -> None:
    before = torch.get_rng_state()
    streamed = opened(model_dir(family))
    streamed.first_inputs(token_rows(1, 5), lambda i, hidden: None)
    with streamed.block(0):
        pass
    assert torch.equal(torch.get_rng_state(), before)


# ---- names


def test_tensor_names_are_split_by_block(model_dir: MakeModel) -> None:
    streamed = opened(model_dir("llama"))
    parts = [streamed.tensor_names(None), *(streamed.tensor_names(i) for i in range(len(streamed.blocks)))]
    assert sorted(name for part in parts for name in part) == sorted(streamed.names)
    assert parts[0] == ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    assert all(name.startswith("model.layers.1.") for name in parts[2])
    assert list(streamed.linears(1)) == [n.removesuffix(".weight") for n in parts[2] if "proj" in n]


def test_a_block_of_ten_is_not_block_one(tmp_path: Path) -> None:
    streamed = opened(save_random(Qwen2Config(**{**COMMON, "num_hidden_layers": 11}), tmp_path))
    assert all(name.startswith("model.layers.1.") for name in streamed.tensor_names(1))
    assert len(streamed.tensor_names(1)) == len(streamed.tensor_names(10))


def test_include_and_exclude_patterns() -> None:
    name = "model.layers.3.mlp.down_proj"
    assert selected(name, (), ())
    assert selected(name, ("*.mlp.*",), ()) and not selected(name, ("*.self_attn.*",), ())
    assert not selected(name, (), ("*down_proj",)) and selected(name, ("*",), ("*.layers.1.*",))
    assert not selected(name, ("*.mlp.*",), ("model.layers.3.*",))


# ---- what cannot work


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(InputError) as error:
        opened(folder)
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_nan_in_a_weight_is_refused_with_its_name(model_copy: MakeModel) -> None:
    folder, name = model_copy("llama"), "model.layers.1.mlp.up_proj.weight"

    def damage(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[name][3, 4] = torch.nan
        tensors[name][0, 0] = -torch.inf
        return tensors

    rewrite(folder, damage)
    streamed = opened(folder)
    for use in (lambda: streamed.weight(name.removesuffix(".weight")), lambda: streamed.block(1).__enter__()):
        with pytest.raises(InputError, match=f"{name} holds 2 NaN"):
            use()


def test_a_missing_tensor_is_named(model_copy: MakeModel) -> None:
    folder, name = model_copy("llama"), "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: {n: t for n, t in tensors.items() if n != name})
    refused(folder, name, "incomplete")


def test_a_shape_that_the_config_does_not_say_is_refused(model_copy: MakeModel) -> None:
    folder, name = model_copy("llama"), "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: {**tensors, name: tensors[name][:-1].clone()})
    refused(folder, name, "[79, 48]", "[80, 48]")


def test_integers_in_place_of_weights_are_refused(model_copy: MakeModel) -> None:
    folder, name = model_copy("llama"), "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: {**tensors, name: tensors[name].to(torch.int8)})
    refused(folder, name, "int8", "floating-point")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_weights_are_refused(model_copy: MakeModel, dtype: torch.dtype) -> None:
    folder, name = model_copy("llama"), "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: {**tensors, name: tensors[name].to(dtype)})
    refused(folder, name, "float8", "start from the 16-bit model")


@pytest.mark.parametrize(
    "change", [{"hidden_size": -4}, {"vocab_size": -1}, {"hidden_act": "nonsense"}], ids=str
)
def test_a_config_that_describes_no_model_is_refused(model_copy: MakeModel, change: dict[str, Any]) -> None:
    folder = model_copy("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    refused(folder, "configuration", "that can be built")


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe"])
def test_fused_experts_are_refused(tmp_path: Path, family: str) -> None:
    config = (
        MixtralConfig(**COMMON, num_key_value_heads=2, num_local_experts=4)
        if family == "mixtral"
        else Qwen2MoeConfig(
            **COMMON, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16
        )
    )
    refused(save_random(config, tmp_path), "experts", "not supported")


@pytest.mark.slow
def test_no_causal_language_model(tmp_path: Path) -> None:
    config = T5Config(vocab_size=99, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    refused(tmp_path, "t5", "causal language model")


def test_a_quantized_checkpoint_is_refused(model_copy: MakeModel) -> None:
    folder = model_copy("llama")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "already quantized", "gptq")


def with_decoder(streamed: StreamedModel, forward: Callable[[Tensor], Any]) -> None:
    streamed.model.model.forward = lambda input_ids, use_cache: forward(input_ids)


@pytest.mark.parametrize(
    "extra", [lambda ids: ids, lambda ids: int(ids.sum()), lambda ids: {"a": [str(ids)]}]
)
def test_blocks_that_see_the_tokens_are_refused(model_dir: MakeModel, extra: Callable[[Tensor], Any]) -> None:
    streamed = opened(model_dir("llama"))

    def forward(ids: Tensor) -> None:
        hidden = streamed.model.model.embed_tokens(ids)
        for block in streamed.blocks:
            hidden = block(hidden, extra(ids))

    with_decoder(streamed, forward)
    with pytest.raises(InputError, match="depend on the tokens"):
        streamed.first_inputs(token_rows(2, 5), lambda i, hidden: None)
    with pytest.raises(InputError, match="depend on the tokens"):
        streamed.check_structure()


def test_layers_that_are_not_called_are_found_without_weights(model_dir: MakeModel) -> None:
    assert opened(model_dir("llama")).uncalled == []
    streamed = opened(model_dir("llama"))
    mlp = streamed.blocks[1].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.up_proj(x) * (x @ mlp.gate_proj.weight.T))
    assert streamed.uncalled == ["model.layers.1.mlp.gate_proj"]
    with pytest.raises(
        InputError, match="gate_proj: llama models multiply with its weight without calling it"
    ):
        plan_within(streamed, builders.options("rtn"))
    fine, _ = plan_within(streamed, builders.options("rtn", exclude=("*.gate_proj",)))
    assert fine.exclude


def test_a_model_that_does_not_run_without_numbers_is_not_refused(model_dir: MakeModel) -> None:
    streamed = opened(model_dir("llama"))
    mlp = streamed.blocks[0].mlp
    mlp.forward = lambda x: x * float(x.sum())
    assert streamed.uncalled == []


def test_blocks_that_are_skipped_or_change_width_are_refused(model_dir: MakeModel) -> None:
    streamed = opened(model_dir("llama"))
    with_decoder(streamed, lambda ids: streamed.blocks[0](streamed.model.model.embed_tokens(ids)))
    with pytest.raises(InputError, match="one after another"):
        streamed.first_inputs(token_rows(1, 5), lambda i, hidden: None)

    def widening(ids: Tensor) -> None:
        hidden = streamed.model.model.embed_tokens(ids)
        for block in streamed.blocks:
            hidden = torch.cat([block(hidden)] * 2, -1)

    with_decoder(streamed, widening)
    with pytest.raises(InputError, match="one after another"):
        streamed.first_inputs(token_rows(1, 5), lambda i, hidden: None)


def test_tensors_outside_the_blocks_that_nobody_fills_are_refused(model_dir: MakeModel) -> None:
    streamed = opened(model_dir("llama"))
    streamed.check_structure()
    streamed.model.model.register_buffer("position_ids", torch.empty(4, device="meta"), persistent=False)
    with pytest.raises(InputError, match=r"keep model\.position_ids outside"):
        streamed.check_structure()


def test_tensors_that_the_model_has_no_place_for(model_copy: MakeModel) -> None:
    """A shorter model than the files hold would be another one, without a word."""
    folder = model_copy("llama")
    assert opened(folder).left_out() == []
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(InputError, match=r"holds model\.layers\.1\.input_layernorm\.weight and 8 more"):
        opened(folder)


def added(folder: Path, **tensors: Tensor) -> Path:
    """The model with more tensors in its file."""
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})
    return folder


def test_tensors_that_no_model_needs_are_left_out(model_copy: MakeModel) -> None:
    names = ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.embeddings.position_ids", "mtp.fc.weight"]
    folder = added(model_copy("llama"), **{name: torch.ones(3) for name in names})
    assert sorted(opened(folder).left_out()) == sorted(names)
    added(folder, **{"model.layers.0.self_attn.q_proj.bias": torch.ones(48)})
    with pytest.raises(InputError, match=r"q_proj\.bias, which a llama of its config\.json has no place for"):
        opened(folder)


def test_a_tied_head_must_be_the_embedding(model_copy: MakeModel) -> None:
    folder = model_copy("llama-tied")
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    added(folder, **{"lm_head.weight": embedding.clone()})
    opened(folder).check_weights(lambda steps: None)
    added(folder, **{"lm_head.weight": embedding + 1})
    with pytest.raises(
        InputError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight, to which"
    ):
        opened(folder).check_weights(lambda steps: None)


def test_what_a_process_has_frozen_stays_frozen() -> None:
    """And else nothing stays so. The test session itself has objects frozen."""
    session = gc.get_freeze_count()
    with earlier_objects_frozen():
        assert gc.get_freeze_count() == session > 0
    assert gc.get_freeze_count() == session
    gc.unfreeze()
    try:
        with earlier_objects_frozen():
            assert gc.get_freeze_count() > 0
            with earlier_objects_frozen():
                pass
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()
