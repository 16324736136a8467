"""Plain checkpoints that run without PyTorch: what is read from files is what Transformers loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

import anybit
from anybit import Engine
from anybit.config import Json
from anybit.engine.description import Unsupported
from anybit.engine.loaded import LoadedModel
from anybit.engine.opening import open_plain
from anybit.engine.plain import PlainModel
from anybit.errors import InputError
from anybit.generate import Generator
from anybit.kernels import cpu
from tests.builders import Said
from tests.engine.models import FAMILIES, saved
from tests.engine.test_stored import edited

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu.available(), reason="the native extension is not built"),
]
TOKENS = list(range(3, 60))
Q = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    """A checkpoint of one's own to break."""
    return saved(tmp_path / "model", tokenizer)


def agree(folder: Path, tokenizer: PreTrainedTokenizerFast) -> PlainModel:
    """Hold an engine of the files to one of what Transformers has loaded."""
    plain = Engine(folder, codebook_precision="fp16", threads=1)
    loaded = Engine(anybit.load(folder), tokenizer=tokenizer, codebook_precision="fp16", threads=1)
    assert np.array_equal(plain.logits(TOKENS), loaded.logits(TOKENS))
    assert (plain.context, plain.ends, plain.widths) == (loaded.context, loaded.ends, loaded.widths)
    assert isinstance(loaded._source, LoadedModel) and isinstance(plain._source, PlainModel)
    return plain._source


def rewritten(folder: Path, change: Callable[[Tensors], Any]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(
    family: str, dtype: torch.dtype, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    agree(saved(tmp_path / "model", tokenizer, family, dtype), tokenizer)


def test_shards(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", tokenizer, max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    agree(folder, tokenizer)
    max(folder.glob("*.safetensors")).unlink()
    with pytest.raises(Unsupported, match="lacks 1 of"):
        open_plain(folder, None, {})


def test_nothing_but_small_tensors_is_read_before_the_engine_wants_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_plain(folder, None, {})
    assert not source._plain
    monkeypatch.setattr(PlainModel, "layer", lambda *_: pytest.fail("a matrix was read"))
    with pytest.raises(Unsupported, match="KV-cache of 3 bits"):
        Engine(source, kv_bits=3)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "of its own"])
def test_a_head_beside_an_embedding_that_is_tied(
    tied: bool, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Transformers ties the two where they are equal only."""
    folder = saved(tmp_path / "model", tokenizer, "smollm2")
    assert agree(folder, tokenizer).head == "model.embed_tokens"

    def add(tensors: Tensors) -> None:
        embedding = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = embedding.clone() if tied else embedding.flip(0).contiguous()

    agree(rewritten(folder, add), tokenizer)


def test_texts_end_by_config_json_where_there_is_no_generation_config(
    folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    for stated, ends in (([3, 4], {3, 4}), (5, {5})):
        edited(folder, lambda config, stated=stated: config.update(eos_token_id=stated))
        (folder / "generation_config.json").unlink(missing_ok=True)
        agree(folder, tokenizer)
        assert Engine(folder).ends == ends
    edited(folder, lambda config: config.pop("eos_token_id"))
    agree(folder, tokenizer)


# ---- what is left to Transformers, which may load it or says what is wrong


def refused(folder: Path, why: str, loads: str | None) -> None:
    """Not read from files for this reason; Transformers loads it, or refuses it with these words."""
    with pytest.raises(Unsupported, match=why):
        open_plain(folder, None, {})
    if loads is None:
        assert isinstance(Engine(folder)._source, LoadedModel)
        assert Generator(str(folder)).native
        return
    for run in (Engine, Generator):
        with pytest.raises(InputError, match=loads):
            run(str(folder))


def test_a_tensor_that_is_missing(folder: Path) -> None:
    refused(rewritten(folder, lambda t: t.pop(Q)), "q_proj.weight should be of", f"lacks {Q}")


def test_a_norm_that_is_missing(folder: Path) -> None:
    refused(rewritten(folder, lambda t: t.pop(NORM)), "it has no model.layers.1.input", f"lacks {NORM}")


def test_a_tensor_without_a_use(folder: Path) -> None:
    def add(name: str) -> Path:
        return rewritten(folder, lambda t: t.update({name: torch.zeros(3)}))

    inert = add("model.layers.0.self_attn.rotary_emb.inv_freq")
    refused(inert, "it has the tensor model.layers.0.self_attn.rotary_emb.inv_freq", None)
    refused(add("model.extra.weight"), "it has the tensor model.extra.weight", "holds model.extra.weight")


@pytest.mark.parametrize("name", [Q, "lm_head.weight", "model.embed_tokens.weight"])
def test_a_matrix_of_another_shape(folder: Path, name: str) -> None:
    def cut(tensors: Tensors) -> None:
        tensors[name] = tensors[name][:-2].contiguous()

    refused(rewritten(folder, cut), f"{name} should be of .* and it has one of", f"lacks {name}")


@pytest.mark.parametrize("name", [NORM, "model.norm.weight"])
@pytest.mark.parametrize(
    "change", [lambda t: t[:-2], lambda t: t[None], lambda t: t[:0]], ids=["cut", "row", "none"]
)
def test_a_norm_of_another_shape(folder: Path, name: str, change: Callable[..., torch.Tensor]) -> None:
    rewritten(folder, lambda t: t.update({name: change(t[name]).contiguous()}))
    with pytest.raises(InputError):
        Engine(folder)
    with pytest.raises(InputError, match=f"lacks {name}"):
        Generator(str(folder))


def test_a_file_that_is_cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(folder, "an interrupted download", "an interrupted download")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", [Q, NORM])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_numbers_that_are_none(folder: Path, name: str, value: float, dtype: torch.dtype) -> None:
    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name].to(dtype)
        tensors[name].view(-1)[3] = value

    rewritten(folder, change)
    for run in (Engine, Generator):
        with pytest.raises(InputError, match=f"{name} holds NaN or Inf: its file is damaged"):
            run(str(folder))


@pytest.mark.parametrize("name", [Q, NORM])
def test_whole_numbers(folder: Path, name: str) -> None:
    rewritten(folder, lambda t: t.update({name: t[name].to(torch.int32)}))
    refused(folder, f"{name} is stored as int32", f"{name} is stored as int32")


def test_numbers_of_more_than_16_bits(folder: Path) -> None:
    rewritten(folder, lambda t: t.update({Q: t[Q].float() * 1.001}))
    with pytest.raises(Unsupported, match=r"q_proj\.weight holds numbers of more than 16 bits"):
        Engine(folder)
    report = Said()
    assert not Generator(str(folder), report=report).native
    assert report.lines == [
        "runs inside Transformers: model.layers.1.self_attn.q_proj.weight holds numbers of more than 16 bits"
    ]
    with pytest.raises(
        InputError, match=r"does not run this: model\.layers\.1\.self_attn\.q_proj\.weight holds"
    ):
        Generator(str(folder), engine="native")


@pytest.mark.parametrize(
    ("change", "why", "loads"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized by another tool", ""),
        ({"auto_map": {"AutoConfig": "configuration.Own"}}, "auto_map = ", ""),
        ({"model_type": "gpt2"}, "its family is 'gpt2'", ""),
        ({"model_type": "nobody"}, "its family is 'nobody'", "does not know"),
        ({"transformers_weights": "other.safetensors"}, "names other weights", "names other weights"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000", "num_hidden_layers is 1000000000"),
        ({"mlp_bias": True}, "it has no model.layers.0.mlp.gate_proj.bias", "lacks"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "'dynamic'", ""),
        ({"rope_parameters": 5}, "is not what the engine reads", ""),
        ({"final_logit_softcapping": 5.0}, r"says final_logit_softcapping = 5\.0, which the engine", ""),
        ({"hidden_activation": "relu"}, "says hidden_activation = 'relu', which the engine", ""),
        ({"layer_types": ["sliding_attention"] * 4, "sliding_window": 9}, "says layer_types = ", ""),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_configurations(folder: Path, change: Json, why: str, loads: str) -> None:
    edited(folder, lambda config: config.update(change))
    with pytest.raises(Unsupported, match=why):
        open_plain(folder, None, {})
    if loads:
        with pytest.raises(InputError, match=loads):
            Generator(str(folder))


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", {"sliding_window": None, "use_sliding_window": False, "final_logit_softcapping": None}),
        ("mistral", {"attention_bias": False, "mlp_bias": False}),
        ("qwen2", {"use_mrope": False}),
        ("smollm3", {"max_window_layers": 1}),
        ("gemma2", {"hidden_act": "silu"}),
        ("gemma3", {"hidden_act": "silu"}),
    ],
)
def test_fields_of_another_family_that_change_nothing(
    family: str, change: Json, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Checkpoints come with some of them."""
    folder = saved(tmp_path / "model", tokenizer, family)
    wanted = Engine(folder).logits(TOKENS)
    agree(edited(folder, lambda config: config.update(change)), tokenizer)
    assert np.array_equal(Engine(folder).logits(TOKENS), wanted)


def test_a_mistral_with_layers_of_two_kinds_is_another_model(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """To Transformers it is a Ministral."""
    folder = saved(tmp_path / "model", tokenizer, "mistral")
    kinds = ["full_attention", "sliding_attention"] * 2
    edited(folder, lambda config: config.update(layer_types=kinds))
    with pytest.raises(Unsupported, match="says layer_types = "):
        open_plain(folder, None, {})
    with pytest.raises(Unsupported, match="'ministral'"):
        Engine(folder)


def test_a_field_without_a_default(folder: Path) -> None:
    """Transformers has one."""
    refused(
        edited(folder, lambda config: config.pop("hidden_act")), "its config.json has no hidden_act", None
    )


def test_pickles(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused(folder, "only pickled weights", "only pickled weights")


def test_a_budget_is_for_artifacts(folder: Path) -> None:
    with pytest.raises(InputError, match="is no artifact of several widths"):
        Generator(str(folder), bits=4)


def test_a_file_is_no_folder(folder: Path) -> None:
    refused(folder / "model.safetensors", "it is a file", "name the directory that holds it")
